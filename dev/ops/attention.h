/* attention: unequal lengths, odd head sizes, both masks, dropout, large scores, packed against alone. On the GPU every
 * case runs as materialized and as flash attention (which falls back to materialized). */
#ifndef DEV_OPS_ATTENTION_H
#define DEV_OPS_ATTENTION_H

#include "attention_scratch.h"
#include "llmc/ops/attention/attention.h"
#include "op.h"

// S sequences of N rows in all: among others one row alone, and none. A row of a bench has equal ones.
static inline Sequences attention_sequences(const OpCase* k) {
    int *lengths = int_array(k->h, (size_t)k->S), rest = k->N;
    for (int s = 0; s < k->S; s++) {
        lengths[s] = s % 4 == 1 ? 1 : s % 4 == 3 ? 0 : (rest + 2) / 3;
        if (k->is_bench) lengths[s] = k->N / k->S;
        if (s == k->S - 1) lengths[s] = rest;
        rest -= lengths[s];
    }
    return sequences_of(k->h, lengths, k->S, 5);
}

// E: the scale of qkv. Of five sequences each has the number of its first row.
static inline void attention_prepare_path(OpCase* k, AttentionPath path) {
    k->sequences = attention_sequences(k);
    k->sequences.is_numbered_by_row = k->S == 5;
    k->dropout = dropout_make(k->p, 42, 7, 3, SITE_DROPOUT_ATTENTION, NULL);
    for (size_t i = 0; i < k->qkv.n && k->E > 1; i++) k->qkv.host[i] *= (real)k->E;
    array_upload(k->qkv);
    if (k->is_bench) k->sequences = resident_sequences(k->h, k->sequences);
    device_set_attention(k->ctx, path);
}

OP_FN(attention_prepare) { attention_prepare_path(k, FLASH); }
OP_FN(attention_prepare_materialized) { attention_prepare_path(k, MATERIALIZED); }

static inline AttentionShape attention_shape(const OpCase* k) {
    return (AttentionShape){k->NH, k->HS, (Mask)k->kind, k->dropout};
}

RUN_AND_WANT(attention, forward,
             attention_forward(k->out.device, k->lse.device_real, k->qkv.device, &k->sequences, attention_shape(k),
                               k->ctx),
             attention_forward_ref(k->out.want, k->lse.want, k->qkv.host, &k->sequences, attention_shape(k)));
RUN_AND_WANT(attention, backward,
             attention_backward(k->dqkv.device, k->dout.device, k->qkv.device, k->out.device, k->lse.device_real,
                                &k->sequences, attention_shape(k), k->ctx),
             attention_backward_ref(k->dqkv.want, k->dout.host, k->qkv.host, &k->sequences, attention_shape(k)));

OP_FN(attention_before_backward) {
    attention_run_forward(k);
    array_download(k->out), array_download(k->lse);
}

// Sequence b of the case alone, after a pass.
static inline OpCase attention_alone(const OpCase* k, int b) {
    Harness* h = k->h;
    OpCase alone = *k;
    int begin = k->sequences.cu_seqlens[b], length = k->sequences.cu_seqlens[b + 1] - begin;
    size_t n = (size_t)length, first = (size_t)begin, C = (size_t)(k->NH * k->HS), NH = (size_t)k->NH;
    alone.sequences = sequences_of(h, &length, 1, k->sequences.first + (k->sequences.is_numbered_by_row ? begin : b));
    alone.qkv = input(h, n * 3 * C, 1), alone.dout = input(h, n * C, 1);
    alone.out = output(h, n * C, SET), alone.lse = output(h, n * NH, SET), alone.dqkv = output(h, n * 3 * C, SET);
    memcpy(alone.qkv.host, k->qkv.host + first * 3 * C, alone.qkv.n * sizeof(real));
    memcpy(alone.dout.host, k->dout.host + first * C, alone.dout.n * sizeof(real));
    array_upload(alone.qkv), array_upload(alone.dout);
    if (k->pass->before) k->pass->before(&alone);
    k->pass->run(&alone);
    return alone;
}

// What rounding inside the op may add where floatX is short: P and ds are rounded before the products they enter, and
// delta is made from a rounded out. An output is a sum of P[k] V[k], where the P sum to 1 (dropout: to its scale) and
// an element of V is within 4 of its standard deviations. Tensor cores truncate what falls below the largest term's
// last bit instead of rounding it, which shows in lse. With inputs of size 1 a score is correct to a few 1e-7; one of
// 300, where the softmax is nearly one-hot, to 3e-5. A gradient adds about as many numbers near 1 as there are queries,
// and is a product of two operands of the inputs' scale.
static inline void attention_slack(OpCase* k) {
    double rounding = sizeof(floatX) == sizeof(real) ? 0 : 4 * array_rounding(k->out) * k->E * (double)k->dropout.scale;
    double tol = tolerance(k->E > 1 ? 3e-4 : 3e-6);
    k->out.slack = tol + rounding;
    k->lse.slack = rounding > 0 ? 3 * tol : tol;
    k->dqkv.slack = 3 * tol + 3 * rounding * k->E;
}

// A sequence among others gives the same bits as the same sequence alone.
OP_FN(attention_after) {
    size_t C = (size_t)(k->NH * k->HS);
    int is_forward = k->pass == k->op->passes;
    attention_slack(k);
    for (int b = 0; b < k->S; b++) {
        const OpCase alone = attention_alone(k, b);
        size_t first = (size_t)k->sequences.cu_seqlens[b];
        if (is_forward) expect_equal(k->h, "out alone", alone.out, k->out.host + first * C);
        else expect_equal(k->h, "dqkv alone", alone.dqkv, k->dqkv.host + first * 3 * C);
    }
}

static const Arg ATTENTION_ARGS[] =
    ARGS(ARG(qkv, "N 3 NH HS", IN, 1), ARG(out, "N NH HS", OUT), ARG(lse, "N NH", OUT),
         ARG(dout, "N NH HS", IN, 1, 0, "out"), ARG(dqkv, "N 3 NH HS", OUT, 0, 0, "qkv"));
// Lengths below, at and above tiles of 16, 64 and 128; head sizes that flash attention takes and others. The last four
// have the channels of models that are trained: 768, 1024, 1600.
static const int ATTENTION_SIZES[][5] = {
    {1, 1, 1, 1, 1},     {2, 2, 3, 16, 1},   {95, 3, 3, 16, 1},  {95, 3, 2, 33, 1},   {128, 2, 2, 64, 1},
    {78, 5, 2, 5, 1},    {16, 1, 2, 8, 1},   {377, 3, 1, 64, 1}, {95, 5, 2, 128, 1},  {110, 2, 3, 48, 1},
    {256, 4, 1, 80, 1},  {73, 2, 1, 200, 1}, {95, 3, 2, 96, 1},  {94, 2, 2, 160, 1},  {111, 3, 1, 256, 1},
    {1024, 1, 1, 64, 1}, {729, 5, 2, 64, 1}, {386, 2, 2, 40, 1}, {331, 4, 1, 128, 1}, {50, 1, 2, 16, 8},
    {40, 3, 12, 64, 1},  {30, 2, 16, 64, 1}, {18, 2, 25, 64, 1}, {17, 1, 20, 80, 1}};
static const int ATTENTION_GRAD[] = {34, 3, 2, 3, 1};
// GPT-2 124M, 1558M, BERT-large in both phases, and long sequences.
static const int ATTENTION_GPU[][5] = {{32 * 1024, 32, 12, 64, 1},
                                       {16 * 1024, 16, 25, 64, 1},
                                       {256 * 128, 256, 16, 64, 1},
                                       {64 * 512, 64, 16, 64, 1},
                                       {8 * 4096, 8, 16, 128, 1}};
static const int ATTENTION_CPU[][5] = {{4 * 256, 4, 4, 32, 1}, {4 * 64, 4, 12, 64, 1}, {4 * 1024, 4, 12, 64, 1}};
static const int ATTENTION_MATERIALIZED_GPU[][5] = {{8 * 1024, 8, 12, 64, 1}};

// clang-format off
#define ATTENTION_PASSES(path) \
    .passes = {{path "forward", "out lse", OP_PAIR(attention, forward), NULL, attention_after}, \
               {path "backward", "dqkv", OP_PAIR(attention, backward), attention_before_backward, \
                attention_after}}
// clang-format on

static const Op ATTENTION = {OP_OF("attention", "N S NH HS E", ATTENTION_ARGS, ATTENTION_SIZES),
                             OP_BENCH(ATTENTION_GPU, ATTENTION_CPU),
                             ATTENTION_PASSES(""),
                             .prepare = attention_prepare,
                             .kinds = {"CAUSAL", "FULL"},
                             .rates = {0, 0.1},
                             .grad = ATTENTION_GRAD};

static inline int attention_has_paths(const Harness* h, int* row) { return (void)h, (void)row, HAS_DEVICE_MEMORY; }

static const Op ATTENTION_MATERIALIZED = {OP_OF("attention", "N S NH HS E", ATTENTION_ARGS, ATTENTION_SIZES),
                                          .gpu_bench = SIZE_ROWS(ATTENTION_MATERIALIZED_GPU),
                                          ATTENTION_PASSES("materialized_"),
                                          .prepare = attention_prepare_materialized,
                                          .kinds = {"CAUSAL", "FULL"},
                                          .rates = {0, 0.1},
                                          .takes = attention_has_paths};

static inline void test_attention_nan(Harness* h, const Op* op) {
    static const int ROW[] = {50, 1, 2, 16, 1};
    OpCase* k = op_case(h, op, op->passes, ROW, OP_PLAIN);
    k->qkv.host[20 * 3 * 32] = (real)NAN;  // head 0 of query 20
    array_upload(k->qkv);
    attention_run_forward(k);
    array_download(k->out), array_download(k->lse);
    int shown = isnan(k->lse.host[20]);
    for (size_t c = 0; c < 16; c++) shown &= isnan(k->out.host[20 * 32 + c]);
    expect_true(h, "NaN in q gives NaN in lse and out", shown);
    expect_true(h, "the other head stays", !isnan(k->lse.host[70]) && !isnan(k->out.host[20 * 32 + 16]));
    case_end(h);
}

static inline void test_attention(Harness* h) {
    if (HAS_DEVICE_MEMORY) test_attention_nan(h, &ATTENTION_MATERIALIZED);
    test_attention_nan(h, &ATTENTION);  // the usual path is set again
    test_attention_keep(h, 0.1);
    test_attention_keep(h, 0.5);
    static const int MIXED[] = {130, 1, 300, 17, 128, 0, 8, 33, 0}, EQUAL[] = {257, 257, 257};
    int lengths[300];
    for (int i = 0; i < (int)COUNT_OF(lengths); i++) lengths[i] = i;
    for (int way = 0; way < 4; way++) {
        const DrawForm form = (DrawForm)(way % 2);
        const Mask mask = way / 2 ? FULL : CAUSAL;
        test_attention_draws(h, "mixed", MIXED, COUNT_OF(MIXED), form, mask);
        test_attention_draws(h, "equal", EQUAL, COUNT_OF(EQUAL), form, mask);
        test_attention_draws(h, "all lengths", lengths, COUNT_OF(lengths), form, mask);
    }
    test_attention_scratch(h);
}

#endif
