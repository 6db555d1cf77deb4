/* dropout: test (values and statistics of the masks), grad and bench. */
#ifndef DEV_OPS_DROPOUT_H
#define DEV_OPS_DROPOUT_H

#include "harness.h"
#include "llmc/ops/dropout.h"

typedef struct {
    Array x, y, dy, dx;
    int N, C;
    Sequences sequences;
    Dropout dropout;
    Context* ctx;
} DropoutCase;

static inline DropoutCase* dropout_case(Harness* h, const int* lengths, int count, int C, double p) {
    DropoutCase* k = (DropoutCase*)case_memory(h, sizeof *k);
    k->sequences = sequences_of(h, lengths, count, 2);
    k->dropout = dropout_make(p, 1337, 10, 3, SITE_DROPOUT_MLP_OUT, &k->sequences);
    k->N = k->sequences.rows;
    k->C = C;
    size_t n = (size_t)k->N * (size_t)C;
    k->x = input(h, n, 1.0);
    k->y = output(h, n, SET);
    k->dy = input(h, n, 1.0);
    k->dx = output(h, n, SET);
    k->ctx = &h->ctx;
    return k;
}

static inline void dropout_run_forward(void* state) {
    DropoutCase* k = (DropoutCase*)state;
    dropout_forward(k->y.device, k->x.device, k->N, k->C, k->dropout, k->ctx);
}

static inline void dropout_run_backward(void* state) {
    DropoutCase* k = (DropoutCase*)state;
    dropout_backward(k->dx.device, k->dy.device, k->N, k->C, k->dropout, k->ctx);
}

// Make y the mask itself: dropout of ones.
static inline void dropout_mask(DropoutCase* k, Dropout dropout) {
    for (size_t i = 0; i < k->x.n; i++) k->x.host[i] = 1;
    array_upload(k->x);
    dropout_forward(k->y.device, k->x.device, k->N, k->C, dropout, k->ctx);
    array_download(k->y);
}

static inline void test_dropout_masks(Harness* h) {
    int lengths[] = {64, 17, 96}, moved[] = {17, 3};
    double rates[] = {0.1, 0.5, 0.9};
    for (size_t i = 0; i < COUNT_OF(rates); i++) {
        case_begin(h, "dropout/keep rate p=%g", rates[i]);
        DropoutCase* k = dropout_case(h, lengths, 3, 768, rates[i]);
        dropout_mask(k, k->dropout);
        size_t kept = 0, bad = 0;
        real scale = array_stored(k->y, (real)(float)(1 / (1 - rates[i])));
        for (size_t e = 0; e < k->y.n; e++) {
            kept += k->y.host[e] != 0;
            bad += k->y.host[e] != 0 && k->y.host[e] != scale;
        }
        double n = (double)k->y.n, deviation = sqrt(rates[i] * (1 - rates[i]) / n);
        expect_true(h, "every element is 0 or 1 / (1 - p)", bad == 0);
        expect_within(h, "keep rate", (double)kept / n, 1 - rates[i], 4 * deviation);
        size_t worst = 0;  // every channel and every row on its own: no pattern along either
        for (int c = 0; c < k->C; c++) {
            size_t count = 0;
            for (int row = 0; row < k->N; row++) count += k->y.host[(size_t)row * (size_t)k->C + (size_t)c] != 0;
            double off = fabs((double)count / k->N - (1 - rates[i])) / sqrt(rates[i] * (1 - rates[i]) / k->N);
            worst += off > 5;
        }
        for (int row = 0; row < k->N; row++) {
            size_t count = 0;
            for (int c = 0; c < k->C; c++) count += k->y.host[(size_t)row * (size_t)k->C + (size_t)c] != 0;
            double off = fabs((double)count / k->C - (1 - rates[i])) / sqrt(rates[i] * (1 - rates[i]) / k->C);
            worst += off > 5;
        }
        expect_true(h, "keep rate of every row and channel within 5 deviations", worst == 0);
        case_end(h);
    }

    case_begin(h, "dropout/backward has the mask of forward");
    DropoutCase* k = dropout_case(h, lengths, 3, 50, 0.3);
    dropout_mask(k, k->dropout);
    for (size_t e = 0; e < k->dy.n; e++) k->dy.host[e] = 1;
    array_upload(k->dy);
    dropout_run_backward(k);
    expect_equal(h, "dx", k->dx, copy_of(h, k->y));
    case_end(h);

    // Sequence 3 of the step lies at row 64 of one batch and at row 0 of another.
    case_begin(h, "dropout/mask does not depend on packing");
    k = dropout_case(h, lengths, 3, 50, 0.3);
    DropoutCase* other = dropout_case(h, moved, 2, 50, 0.3);
    other->sequences.first = k->sequences.first + 1;
    dropout_mask(k, k->dropout);
    dropout_mask(other, other->dropout);
    Array part = other->y;
    part.n = 17 * 50;
    expect_equal(h, "y", part, k->y.host + 64 * 50);
    case_end(h);

    // Two masks that have nothing to do with each other agree in p^2 + (1 - p)^2 of the elements.
    static const char* const OTHERS[] = {"seed", "step", "layer", "site", "sequence"};
    for (size_t i = 0; i < COUNT_OF(OTHERS); i++) {
        case_begin(h, "dropout/another %s gives another mask", OTHERS[i]);
        k = dropout_case(h, lengths, 3, 96, 0.5);
        dropout_mask(k, k->dropout);
        real* first = copy_of(h, k->y);
        Sequences later = k->sequences;
        later.first += i == 4 ? 3 : 0;
        dropout_mask(k, dropout_make(0.5, i == 0 ? 1338 : 1337, i == 1 ? 11 : 10, i == 2 ? 4 : 3,
                                     i == 3 ? SITE_DROPOUT_ATTENTION_OUT : SITE_DROPOUT_MLP_OUT, &later));
        size_t same = 0;
        for (size_t e = 0; e < k->y.n; e++) same += k->y.host[e] == first[e];
        expect_within(h, "agreement", (double)same / (double)k->y.n, 0.5, 4 * 0.5 / sqrt((double)k->y.n));
        case_end(h);
    }
}

static inline void test_dropout(Harness* h) {
    static const struct {
        int lengths[4], count, C;
    } SIZES[] = {{{5, 17, 1, 9}, 4, 1},   {{5, 17, 1, 9}, 4, 33},  {{5, 17, 1, 9}, 4, 48}, {{5, 17, 1, 9}, 4, 64},
                 {{5, 17, 1, 9}, 4, 768}, {{77, 1, 17}, 3, 1024},  {{17, 1}, 2, 1600},     {{1}, 1, 768},
                 {{1024}, 1, 48},         {{1024, 77, 3}, 3, 1025}};
    static const double RATES[] = {0, 0.3};
    for (size_t i = 0; i < COUNT_OF(SIZES); i++)
        for (size_t r = 0; r < COUNT_OF(RATES); r++) {
            const int *lengths = SIZES[i].lengths, count = SIZES[i].count, C = SIZES[i].C;
            case_begin(h, "dropout/forward T=%d,.. of %d C=%d p=%g", lengths[0], count, C, RATES[r]);
            DropoutCase* k = dropout_case(h, lengths, count, C, RATES[r]);
            real* y = copy_of(h, k->y);
            dropout_ref(y, k->x.host, k->N, C, k->dropout);
            expect_same_for_any_threads(h, "forward", dropout_run_forward, k, &k->y, 1);
            expect_close(h, "y", k->y, y, tolerance(2e-7));  // one rounding
            case_end(h);
            case_begin(h, "dropout/backward T=%d,.. of %d C=%d p=%g", lengths[0], count, C, RATES[r]);
            k = dropout_case(h, lengths, count, C, RATES[r]);
            real* dx = copy_of(h, k->dx);
            dropout_ref(dx, k->dy.host, k->N, C, k->dropout);
            expect_same_for_any_threads(h, "backward", dropout_run_backward, k, &k->dx, 1);
            expect_close(h, "dx", k->dx, dx, tolerance(2e-7));
            case_end(h);
        }
    test_dropout_masks(h);
}

static inline double dropout_loss(void* state) {
    DropoutCase* k = (DropoutCase*)state;
    dropout_ref(k->y.host, k->x.host, k->N, k->C, k->dropout);
    double loss = 0;
    for (size_t i = 0; i < k->y.n; i++) loss += (double)k->y.host[i] * (double)k->dy.host[i];
    return loss;
}

static inline void grad_dropout(Harness* h) {
    static const int LENGTHS[] = {3, 1, 4};
    for (int launcher = 0; launcher < 2; launcher++) {
        case_begin(h, "dropout/backward%s N=8 C=7", launcher ? "" : "_ref");
        DropoutCase* k = dropout_case(h, LENGTHS, 3, 7, 0.4);
        if (launcher) dropout_run_backward(k);
        else dropout_ref(k->dx.host, k->dy.host, k->N, k->C, k->dropout);
        expect_gradient(h, "dx", dropout_loss, k, k->x.host, k->x.n, k->dx.host, 1e-8);
        case_end(h);
    }
}

static inline void bench_dropout(Harness* h) {
#ifdef __CUDACC__
    enum { COUNT = 64 };
#else
    enum { COUNT = 2 };
#endif
    int lengths[COUNT];
    for (int i = 0; i < COUNT; i++) lengths[i] = 1024;
    for (int on = 0; on < 2; on++) {
        char shapes[64];
        DropoutCase* k = dropout_case(h, lengths, COUNT, 768, on ? 0.1 : 0);
        k->sequences = resident_sequences(h, k->sequences);
        snprintf(shapes, sizeof shapes, "N=%d C=768 p=%g", k->N, on ? 0.1 : 0);
        bench_report(h, "dropout_forward", shapes, bench_seconds(h, dropout_run_forward, k), DROPOUT_FLOPS(k->N, k->C),
                     DROPOUT_BYTES(k->N, k->C));
        bench_report(h, "dropout_backward", shapes, bench_seconds(h, dropout_run_backward, k),
                     DROPOUT_FLOPS(k->N, k->C), DROPOUT_BYTES(k->N, k->C));
        case_free(h);
    }
}

#endif
