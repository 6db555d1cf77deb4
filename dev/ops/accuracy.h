/* accuracy: counts, so everything is exact. */
#ifndef DEV_OPS_ACCURACY_H
#define DEV_OPS_ACCURACY_H

#include "llmc/ops/accuracy.h"
#include "op.h"

// Every third target is the largest of its row, every seventh is ignored. In a bench all are the largest: a row is read
// to its end.
OP_FN(accuracy_prepare) {
    k->targets = int_array(k->h, (size_t)k->N);
    for (int n = 0; n < k->N; n++) {
        const real* x = k->logits.host + (size_t)n * (size_t)k->Vp;
        int is_largest = n % 3 == 0 || k->is_bench;
        for (int v = 1; v < k->V && is_largest; v++)
            if (x[v] > x[k->targets[n]]) k->targets[n] = v;
        if (!is_largest) k->targets[n] = n % 7 == 6 ? -1 : random_below(k->h, k->V);
    }
    k->targets = op_ints(k, k->targets, k->N);
}

OP_FN(accuracy_run) {
    accuracy_forward(k->correct.device_real, k->logits.device, k->targets, k->N, k->V, k->Vp, k->mode, k->ctx);
}

OP_FN(accuracy_want) { accuracy_forward_ref(k->correct.want, k->logits.host, k->targets, k->N, k->V, k->Vp, k->mode); }

static const Arg ACCURACY_ARGS[] = ARGS(ARG(logits, "N Vp", IN, 1), ARG(correct, "", BY_MODE));
static const int ACCURACY_ROWS[][3] = {{1, 1, 1}, {5, 2, 8}, {77, 33, 40}, {130, 1000, 1024}, {17, 30522, 30592}};
// BERT's masked positions, 20 of each of 256 sequences.
static const int ACCURACY_GPU[][3] = {{5120, 30522, 30592}}, ACCURACY_CPU[][3] = {{128, 30522, 30592}};

static const Op ACCURACY = {
    OP_OF("accuracy", "N V Vp", ACCURACY_ARGS, ACCURACY_ROWS), OP_BENCH(ACCURACY_GPU, ACCURACY_CPU),
    .passes = {{"forward", "correct", accuracy_run, accuracy_want}}, .prepare = accuracy_prepare};

// Both against numbers that were written by hand: padding does not count, ties go to the first, NaN is not a hit.
static inline void test_accuracy(Harness* h) {
    enum { N = 7, V = 3, Vp = 4 };
    const real nan = (real)NAN;
    const real rows[N * Vp] = {1, 2, 0, 9, /**/ 2, 2, 0, 0, /**/ 2,   2, 0, 0, /**/ 0, 1, nan, 0, /**/
                               0, 1, 2, 0, /**/ 0, 1, 2, 0, /**/ nan, 1, 0, 0};
    const int targets[N] = {1, 0, 1, 1, 2, -1, 0}, row[] = {1, V, Vp};
    const real want[N] = {1, 1, 0, 0, 1, 0, 0};
    for (int n = 0; n < N; n++) {
        OpCase* k = op_case(h, &ACCURACY, ACCURACY.passes, row, OP_PLAIN);
        memcpy(k->logits.host, rows + n * Vp, Vp * sizeof(real));
        array_begin(k->logits);
        *k->targets = targets[n];
        op_check(h, k, &ACCURACY, ACCURACY.passes);
        expect_true(h, "the reference, by hand", *k->correct.want == want[n]);
        case_end(h);
    }
}

#endif
