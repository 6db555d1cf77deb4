/* attention_decode: test and benchmark. Its result is also a row of attention_forward(). */
#ifndef DEV_OPS_ATTENTION_DECODE_H
#define DEV_OPS_ATTENTION_DECODE_H

#include "apps/use/decode.h"
#include "op.h"

static inline DecodeShape decode_shape(const OpCase* k) { return (DecodeShape){k->B, k->N, k->NH, k->HS}; }

RUN_AND_WANT(decode, row,
             attention_decode(k->out.device, k->qkv.device, k->x.device, k->index, decode_shape(k), k->ctx),
             attention_decode_ref(k->out.want, k->qkv.want, k->x.host, k->index, decode_shape(k)));

// kind 1: scores up to some hundreds, a softmax that is nearly one-hot: a score of 300 is right to 3e-5.
OP_FN(decode_prepare) {
    for (size_t i = 0; i < k->qkv.n && k->kind; i++) k->qkv.host[i] *= 8;
    array_begin(k->qkv);
    k->out.slack = k->kind ? tolerance(3e-4) : 0;
    k->index = int_array(k->h, (size_t)k->B);  // the newest token of each text: the first text's is the last of N
    for (int b = 0; b < k->B; b++) k->index[b] = b == 1 ? 0 : max_int(k->N - 1 - 7 * b, 0);
    k->index = op_ints(k, k->index, k->B);
}

// Compares the first text with the last row of attention over all rows. If floatX is a 16-bit type, attention_forward()
// rounds P and its result, and the row from attention_decode() is rounded too.
OP_FN(decode_after) {
    Harness* h = k->h;
    int length = k->N;
    Sequences s = sequences_of(h, &length, 1, 0);
    Array first = k->out, lse = output(h, (size_t)length * (size_t)k->NH, SET);
    first.n = (size_t)(k->NH * k->HS);
    Array all = output(h, (size_t)length * first.n, SET);
    attention_forward(all.device, lse.device_real, k->qkv.device, &s,
                      (AttentionShape){k->NH, k->HS, CAUSAL, dropout_none(NULL)}, k->ctx);
    array_download(all);
    const real* row = all.host + (size_t)(length - 1) * first.n;
    double tol = tolerance(k->kind ? 3e-4 : 3e-6) + (k->kind ? 40 : 5) * array_rounding(all);
    expect_close(h, "out against attention_forward", first, row, tol);
}

static const Arg DECODE_ARGS[] =
    ARGS(ARG(qkv, "B N 3 NH HS", IN_OUT, 1), ARG(x, "B 3 NH HS", IN, 1), ARG(out, "B NH HS", OUT, 0, 3e-6));
// Lengths on both sides of the parts that rows are taken in; the head sizes on both sides of each choice of the GPU's,
// and that of GPT-2. The last one is too large for the GPU.
static const int DECODE_ROWS[][4] = {
    {1, 71, 2, 16},   {1, 1, 1, 1},    {1, 2, 3, 7},    {3, 7, 2, 8},     {1, 16, 2, 33},    {4, 17, 12, 64},
    {1, 32, 1, 72},   {1, 33, 2, 80},  {1, 100, 3, 96}, {2, 257, 2, 128}, {1, 1024, 1, 136}, {1, 64, 2, 255},
    {1, 128, 2, 256}, {1, 129, 2, 64}, {5, 600, 2, 64}, {1, 1024, 2, 64}, {1, 3, 2, 16},     {20, 9, 3, 16},
    {1, 15, 2, 16},   {1, 31, 2, 16},  {1, 21, 1, 300}};
// A layer of the 124M and of the 1558M model, in the middle and at the end of their text, and of 64 texts.
static const int DECODE_BENCH[][4] = {{1, 128, 12, 64}, {1, 1024, 12, 64}, {1, 1024, 25, 64}, {64, 512, 12, 64}};

static inline int decode_takes(const Harness* h, int* row) { return (void)h, attention_decode_takes(row[3]); }

static const Op DECODE = {OP_OF("attention_decode", "B N NH HS", DECODE_ARGS, DECODE_ROWS),
                          OP_BENCH(DECODE_BENCH, DECODE_BENCH),
                          .passes = {{"row", "qkv out", OP_PAIR(decode, row), NULL, decode_after}},
                          .prepare = decode_prepare,
                          .kinds = {"scale 1", "scale 8"},
                          .takes = decode_takes};

// NaN in a value or a key, the first or the newest one, must show in its head and in no other.
static inline void decode_check_nan(Harness* h, int is_newest, int part) {
    enum { NH = 2, HS = 16, C = NH * HS };
    OpCase* k = op_case(h, &DECODE, DECODE.passes, DECODE_ROWS[0], OP_PLAIN);
    Array changed = is_newest ? k->x : k->qkv;
    int shown = 0, spread = 0;
    changed.host[part * C + 3] = (real)NAN;
    array_upload(changed);
    decode_run_row(k);
    array_download(k->out);
    for (int i = 0; i < C; i++) *(i < HS ? &shown : &spread) += isnan(k->out.host[i]) != 0;
    expect_true(h, "NaN shows", part == 2 ? shown == 1 : shown == HS);
    expect_true(h, "the other head stays", spread == 0);
    case_end(h);
}

static inline void test_attention_decode(Harness* h) {
    for (int part = 1; part <= 2; part++) decode_check_nan(h, 0, part), decode_check_nan(h, 1, part);
    case_begin(h, "attention_decode/head sizes");
    expect_true(h, "256 channels are taken", attention_decode_takes(256));
    expect_true(h, "more are refused on the GPU alone", attention_decode_takes(257) == !HAS_DEVICE_MEMORY);
    case_end(h);
}

#endif
