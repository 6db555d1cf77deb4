/* Cases of llmc/ops/accuracy.h. */
#ifndef DEV_OPS_ACCURACY_H
#define DEV_OPS_ACCURACY_H

#include "harness.h"
#include "llmc/ops/accuracy.h"

// Every third target is the largest of its row, every seventh is ignored.
static inline void test_accuracy_random(Harness* h) {
    static const int SIZES[][3] = {{1, 1, 1}, {5, 2, 8}, {77, 33, 40}, {130, 1000, 1024}, {17, 30522, 30592}};
    for (size_t i = 0; i < COUNT_OF(SIZES); i++) {
        int N = SIZES[i][0], V = SIZES[i][1], Vp = SIZES[i][2];
        case_begin(h, "accuracy/forward N=%d V=%d Vp=%d", N, V, Vp);
        Array logits = input(h, (size_t)N * (size_t)Vp, 1);
        int* targets = int_array(h, (size_t)N);
        for (int n = 0; n < N; n++) {
            const real* x = logits.host + (size_t)n * (size_t)Vp;
            for (int v = 1; v < V && n % 3 == 0; v++)
                if (x[v] > x[targets[n]]) targets[n] = v;
            if (n % 3) targets[n] = (int)(philox((uint32_t)n, 0, 0, 0, 7).v[0] % (uint32_t)V);
            if (n % 7 == 6) targets[n] = -1;
        }
        for (int add = 0; add < 2; add++) {
            Mode mode = add ? ADD : SET;
            Array right = output(h, 1, mode);
            real* want = copy_of(h, right);
            accuracy_forward_ref(want, logits.host, targets, N, V, Vp, mode);
            accuracy_forward(right.device_real, logits.device, targets, N, V, Vp, mode, &h->ctx);
            expect_equal(h, mode_name(mode), right, want);
        }
        case_end(h);
    }
}

// The reference against numbers that were written by hand: padding does not count, ties go to the first, NaN is not a
// hit.
static inline void test_accuracy(Harness* h) {
    enum { N = 7, V = 3, Vp = 4 };
    const real nan = (real)NAN;
    const real rows[N * Vp] = {1, 2, 0, 9, /**/ 2, 2, 0, 0, /**/ 2,   2, 0, 0, /**/ 0, 1, nan, 0, /**/
                               0, 1, 2, 0, /**/ 0, 1, 2, 0, /**/ nan, 1, 0, 0};
    const int classes[N] = {1, 0, 1, 1, 2, -1, 0};
    const real want[N] = {1, 1, 0, 0, 1, 0, 0}, all = 3, twice = 6;
    case_begin(h, "accuracy/forward by hand");
    Array logits = input(h, N * Vp, 1), right = output(h, 1, SET);
    int* targets = int_array(h, N);
    memcpy(targets, classes, sizeof classes);
    memcpy(logits.initial, rows, sizeof rows);
    array_restore(logits);
    for (int n = 0; n < N; n++) {  // row by row, then together
        real ref;
        accuracy_forward_ref(&ref, rows + n * Vp, classes + n, 1, V, Vp, SET);
        expect_true(h, "the reference", ref == want[n]);
        accuracy_forward(right.device_real, logits.device + n * Vp, targets + n, 1, V, Vp, SET, &h->ctx);
        expect_equal(h, "a row", right, &want[n]);
    }
    accuracy_forward(right.device_real, logits.device, targets, N, V, Vp, SET, &h->ctx);
    expect_equal(h, "all rows", right, &all);
    accuracy_forward(right.device_real, logits.device, targets, N, V, Vp, ADD, &h->ctx);
    expect_equal(h, "all rows twice", right, &twice);
    case_end(h);
    test_accuracy_random(h);
}

typedef struct {
    Array right, logits;
    int* targets;
    int N, V, Vp;
    Context* ctx;
} AccuracyBench;

static inline void accuracy_run_bench(void* state) {
    AccuracyBench* k = (AccuracyBench*)state;
    accuracy_forward(k->right.device_real, k->logits.device, k->targets, k->N, k->V, k->Vp, SET, k->ctx);
}

// BERT's masked positions, 20 of each of 256 sequences.
static inline void bench_accuracy(Harness* h) {
    AccuracyBench k;
    char shapes[64];
    k.N = HAS_DEVICE_MEMORY ? 5120 : 128, k.V = 30522, k.Vp = 30592, k.ctx = &h->ctx;
    case_begin(h, "accuracy bench");
    k.logits = input(h, (size_t)k.N * (size_t)k.Vp, 1), k.right = output(h, 1, SET);
    int* targets = int_array(h, (size_t)k.N);
    for (int n = 0; n < k.N; n++)  // the largest: a row is read to its end
        for (int v = 1; v < k.V; v++) {
            const real* row = k.logits.host + (size_t)n * (size_t)k.Vp;
            if (row[v] > row[targets[n]]) targets[n] = v;
        }
    k.targets = resident_ints(h, targets, (size_t)k.N);
    snprintf(shapes, sizeof shapes, "N=%d V=%d Vp=%d", k.N, k.V, k.Vp);
    bench_report(h, "accuracy_forward", shapes, bench_seconds(h, accuracy_run_bench, &k),
                 ACCURACY_FORWARD_FLOPS(k.N, k.V), ACCURACY_FORWARD_BYTES(k.N, k.V));
    case_free(h);
}

#endif
