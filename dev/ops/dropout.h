/* dropout: values, and statistics of the masks. */
#ifndef DEV_OPS_DROPOUT_H
#define DEV_OPS_DROPOUT_H

#include "llmc/ops/dropout.h"
#include "op.h"

OP_FN(dropout_prepare) {
    k->sequences = sequences_split(k->h, k->N, 4, 2);
    k->dropout = dropout_make(k->p, 1337, 10, 3, SITE_DROPOUT_MLP_OUT, &k->sequences);
    if (k->is_bench) k->sequences = resident_sequences(k->h, k->sequences);
}

RUN_AND_WANT(dropout, forward, dropout_forward(k->y.device, k->x.device, k->N, k->C, k->dropout, k->ctx),
             dropout_ref(k->y.want, k->x.host, k->N, k->C, k->dropout));
RUN_AND_WANT(dropout, backward, dropout_backward(k->dx.device, k->dy.device, k->N, k->C, k->dropout, k->ctx),
             dropout_ref(k->dx.want, k->dy.host, k->N, k->C, k->dropout));

static const Arg DROPOUT_ARGS[] = ARGS(ARG(x, "N C", IN, 1), ARG(y, "N C", OUT, 0, 2e-7),  // one rounding
                                       ARG(dy, "N C", IN, 1, 0, "y"), ARG(dx, "N C", OUT, 0, 2e-7, "x"));
static const int DROPOUT_ROWS[][2] = {{32, 1},    {32, 33},   {32, 48}, {32, 64},   {32, 768},
                                      {95, 1024}, {18, 1600}, {1, 768}, {1024, 48}, {1104, 1025}};
static const int DROPOUT_GRAD[] = {8, 7};
static const int DROPOUT_GPU[][2] = {{65536, 768}}, DROPOUT_CPU[][2] = {{2048, 768}};

static const Op DROPOUT = {
    OP_OF("dropout", "N C", DROPOUT_ARGS, DROPOUT_ROWS),
    OP_BENCH(DROPOUT_GPU, DROPOUT_CPU),
    .passes = {{"forward", "y", OP_PAIR(dropout, forward)}, {"backward", "dx", OP_PAIR(dropout, backward)}},
    .prepare = dropout_prepare,
    .rates = {0, 0.3},
    .grad = DROPOUT_GRAD};

// The mask itself: dropout of ones.
static inline Array dropout_mask(Harness* h, const Sequences* s, int C, Dropout dropout) {
    Array ones = input(h, (size_t)s->rows * (size_t)C, 1), y = output(h, ones.n, SET);
    for (size_t i = 0; i < ones.n; i++) ones.host[i] = 1;
    array_upload(ones);
    dropout_forward(y.device, ones.device, s->rows, C, dropout, &h->ctx);
    array_download(y);
    return y;
}

static inline void test_dropout_rate(Harness* h, double p) {
    enum { C = 768 };
    static const int LENGTHS[] = {64, 17, 96};
    case_begin(h, "dropout/keep rate p=%g", p);
    Sequences s = sequences_of(h, LENGTHS, 3, 2);
    Array y = dropout_mask(h, &s, C, dropout_make(p, 1337, 10, 3, SITE_DROPOUT_MLP_OUT, &s));
    size_t N = (size_t)s.rows, bad = 0, worst = 0, kept = 0;
    real scale = array_stored(y, (real)(float)(1 / (1 - p)));
    double *rows = (double*)case_memory(h, N * sizeof *rows), *columns = (double*)case_memory(h, C * sizeof *columns);
    for (size_t e = 0; e < y.n; e++) {
        int is_kept = y.host[e] != 0;
        bad += is_kept && y.host[e] != scale;
        kept += (size_t)is_kept, rows[e / C] += is_kept, columns[e % C] += is_kept;
    }
    // Every channel and every row on its own: no pattern along either.
    for (size_t i = 0; i < N; i++) worst += fabs(rows[i] / C - (1 - p)) > 5 * sqrt(p * (1 - p) / C);
    for (size_t i = 0; i < C; i++) worst += fabs(columns[i] / (double)N - (1 - p)) > 5 * sqrt(p * (1 - p) / (double)N);
    expect_true(h, "every element is 0 or 1 / (1 - p)", bad == 0);
    expect_within(h, "keep rate", (double)kept / (double)y.n, 1 - p, 4 * sqrt(p * (1 - p) / (double)y.n));
    expect_true(h, "keep rate of every row and channel within 5 deviations", worst == 0);
    case_end(h);
}

static inline void test_dropout_masks(Harness* h) {
    static const int LENGTHS[] = {64, 17, 96}, MOVED[] = {17, 3};
    for (int i = 1; i <= 9; i += 4) test_dropout_rate(h, 0.1 * i);
    // Sequence 3 of the step lies at row 64 of one batch and at row 0 of another.
    case_begin(h, "dropout/mask does not depend on packing");
    Sequences s = sequences_of(h, LENGTHS, 3, 2);
    Sequences moved = sequences_of(h, MOVED, 2, 3);
    Array y = dropout_mask(h, &s, 50, dropout_make(0.3, 1337, 10, 3, SITE_DROPOUT_MLP_OUT, &s));
    Array part = dropout_mask(h, &moved, 50, dropout_make(0.3, 1337, 10, 3, SITE_DROPOUT_MLP_OUT, &moved));
    part.n = 17 * 50;
    expect_equal(h, "y", part, y.host + 64 * 50);
    case_end(h);

    // Two masks that have nothing to do with each other agree in p^2 + (1 - p)^2 of the elements.
    static const char* const OTHERS[] = {"seed", "step", "layer", "site", "sequence"};
    for (size_t i = 0; i < COUNT_OF(OTHERS); i++) {
        case_begin(h, "dropout/another %s gives another mask", OTHERS[i]);
        s = sequences_of(h, LENGTHS, 3, 2);
        Sequences later = s;
        later.first += i == 4 ? 3 : 0;
        y = dropout_mask(h, &s, 96, dropout_make(0.5, 1337, 10, 3, SITE_DROPOUT_MLP_OUT, &s));
        Dropout d = dropout_make(0.5, i == 0 ? 1338 : 1337, i == 1 ? 11 : 10, i == 2 ? 4 : 3,
                                 i == 3 ? SITE_DROPOUT_ATTENTION_OUT : SITE_DROPOUT_MLP_OUT, &later);
        Array other = dropout_mask(h, &s, 96, d);
        size_t same = 0;
        for (size_t e = 0; e < y.n; e++) same += y.host[e] == other.host[e];
        expect_within(h, "agreement", (double)same / (double)y.n, 0.5, 4 * 0.5 / sqrt((double)y.n));
        case_end(h);
    }
}

#endif
