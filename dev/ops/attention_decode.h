/* attention_decode: test and benchmark. Its result is also a row of attention_forward(). */
#ifndef DEV_OPS_ATTENTION_DECODE_H
#define DEV_OPS_ATTENTION_DECODE_H

#include "apps/use/decode.h"
#include "op.h"

RUN_AND_WANT(decode, row, attention_decode(k->out.device, k->qkv.device, k->N - 1, k->NH, k->HS, k->ctx),
             attention_decode_ref(k->out.want, k->qkv.host, k->N - 1, k->NH, k->HS));

// kind 1: scores up to some hundreds, a softmax that is nearly one-hot: a score of 300 is right to 3e-5.
OP_FN(decode_prepare) {
    for (size_t i = 0; i < k->qkv.n && k->kind; i++) k->qkv.host[i] *= 8;
    array_upload(k->qkv);
    k->out.slack = k->kind ? tolerance(3e-4) : 0;
}

// Compares with the last row of attention over all rows. If floatX is a 16-bit type, attention_forward() rounds P and
// its result, and the row from attention_decode() is rounded too.
OP_FN(decode_after) {
    Harness* h = k->h;
    int length = k->N;
    Sequences s = sequences_of(h, &length, 1, 0);
    Array all = output(h, (size_t)length * k->out.n, SET), lse = output(h, (size_t)length * (size_t)k->NH, SET);
    attention_forward(all.device, lse.device_real, k->qkv.device, &s,
                      (AttentionShape){k->NH, k->HS, CAUSAL, dropout_none(NULL)}, k->ctx);
    array_download(all);
    const real* row = all.host + (size_t)(length - 1) * k->out.n;
    double tol = tolerance(k->kind ? 3e-4 : 3e-6) + (k->kind ? 40 : 5) * array_rounding(all);
    expect_close(h, "out against attention_forward", k->out, row, tol);
}

static const Arg DECODE_ARGS[] = ARGS(ARG(qkv, "N 3 NH HS", IN, 1), ARG(out, "NH HS", OUT, 0, 3e-6));
// Lengths on both sides of the blocks that rows are taken in; the head sizes on both sides of each choice of the GPU's,
// and that of GPT-2. The last one is too large for the GPU.
static const int DECODE_ROWS[][3] = {{71, 2, 16},    {1, 1, 1},    {2, 3, 7},    {7, 2, 8},    {16, 2, 33},
                                     {17, 12, 64},   {32, 1, 72},  {33, 2, 80},  {100, 3, 96}, {257, 2, 128},
                                     {1024, 1, 136}, {64, 2, 255}, {65, 2, 256}, {600, 2, 64}, {1024, 2, 64},
                                     {3, 2, 16},     {9, 2, 16},   {15, 2, 16},  {31, 2, 16},  {21, 1, 300}};
// A layer of the 124M and of the 1558M model, in the middle and at the end of their text.
static const int DECODE_BENCH[][3] = {{128, 12, 64}, {1024, 12, 64}, {1024, 25, 64}, {4096, 16, 128}};

static inline int decode_takes(const Harness* h, int* row) { return (void)h, attention_decode_takes(row[2]); }

static const Op DECODE = {OP_OF("attention_decode", "N NH HS", DECODE_ARGS, DECODE_ROWS),
                          OP_BENCH(DECODE_BENCH, DECODE_BENCH),
                          .passes = {{"row", "out", OP_PAIR(decode, row), NULL, decode_after}},
                          .prepare = decode_prepare,
                          .kinds = {"scale 1", "scale 8"},
                          .takes = decode_takes};

// NaN in a value or a key, the first or the last one, must show in its head and in no other.
static inline void decode_check_nan(Harness* h, int row, int part) {
    enum { NH = 2, HS = 16, C = NH * HS };
    OpCase* k = op_case(h, &DECODE, DECODE.passes, DECODE_ROWS[0], OP_PLAIN);
    int shown = 0, spread = 0;
    k->qkv.host[row * 3 * C + part * C + 3] = (real)NAN;
    array_upload(k->qkv);
    decode_run_row(k);
    array_download(k->out);
    for (int i = 0; i < C; i++) *(i < HS ? &shown : &spread) += isnan(k->out.host[i]) != 0;
    expect_true(h, "NaN shows", part == 2 ? shown == 1 : shown == HS);
    expect_true(h, "the other head stays", spread == 0);
    case_end(h);
}

static inline void test_attention_decode(Harness* h) {
    for (int part = 1; part <= 2; part++) decode_check_nan(h, 0, part), decode_check_nan(h, 70, part);
    case_begin(h, "attention_decode/head sizes");
    expect_true(h, "256 channels are taken", attention_decode_takes(256));
    expect_true(h, "more are refused on the GPU alone", attention_decode_takes(257) == !HAS_DEVICE_MEMORY);
    case_end(h);
}

#endif
