/* attention_decode: test and benchmark. Its result is also a row of attention_forward(), on the CPU with the same
 * bits. */
#ifndef DEV_OPS_ATTENTION_DECODE_H
#define DEV_OPS_ATTENTION_DECODE_H

#include "apps/use/decode.h"
#include "harness.h"

typedef struct {
    Array qkv, out;
    int position, NH, HS;
    Context* ctx;
} DecodeCase;

static inline DecodeCase decode_case(Harness* h, int position, int NH, int HS, double scale) {
    DecodeCase d;
    size_t C = (size_t)NH * (size_t)HS;
    d.qkv = input(h, (size_t)(position + 1) * 3 * C, scale);
    d.out = output(h, C, SET);
    d.position = position, d.NH = NH, d.HS = HS, d.ctx = &h->ctx;
    return d;
}

static inline void decode_run(void* state) {
    DecodeCase* d = (DecodeCase*)state;
    attention_decode(d->out.device, d->qkv.device, d->position, d->NH, d->HS, d->ctx);
}

// Compares with the last row of attention over all rows. If floatX is a 16-bit type, attention_forward() rounds P and
// its result, and the row from attention_decode() is rounded too.
static inline void decode_check_forward(Harness* h, DecodeCase* d, double scale, double tol) {
    int length = d->position + 1;
    size_t C = (size_t)d->NH * (size_t)d->HS;
    AttentionShape shape = {d->NH, d->HS, CAUSAL, dropout_none(NULL)};
    Sequences s = sequences_of(h, &length, 1, 0);
    Array all = output(h, (size_t)length * C, SET), lse = output(h, (size_t)length * (size_t)d->NH, SET);
    attention_forward(all.device, lse.device_real, d->qkv.device, &s, shape, d->ctx);
    array_download(all);
    const real* row = all.host + (size_t)d->position * C;
    if (HAS_DEVICE_MEMORY)
        expect_close(h, "out against attention_forward", d->out, row, tolerance(tol) + 5 * scale * array_rounding(all));
    else expect_equal(h, "out against attention_forward", d->out, row);
}

static inline void decode_check(Harness* h, int position, int NH, int HS, double scale, double tol) {
    case_begin(h, "attention_decode/position=%d NH=%d HS=%d scale=%g", position, NH, HS, scale);
    DecodeCase d = decode_case(h, position, NH, HS, scale);
    real* want = copy_of(h, d.out);
    attention_decode_ref(want, d.qkv.host, position, NH, HS);
    expect_same_for_any_threads(h, "attention_decode", decode_run, &d, &d.out, 1);
    expect_close(h, "out", d.out, want, tolerance(tol));
    decode_check_forward(h, &d, scale, tol);
    case_end(h);
}

// NaN in a value or a key, the first or the last one, must show in its head and in no other.
static inline void decode_check_nan(Harness* h, int row, int part) {
    enum { POSITION = 40, NH = 2, HS = 16, C = NH * HS };
    case_begin(h, "attention_decode/NaN in row %d of part %d", row, part);
    DecodeCase d = decode_case(h, POSITION, NH, HS, 1.0);
    int shown = 0, spread = 0;
    d.qkv.host[row * 3 * C + part * C + 3] = (real)NAN;
    array_upload(d.qkv);
    decode_run(&d);
    array_download(d.out);
    for (int i = 0; i < C; i++) *(i < HS ? &shown : &spread) += isnan(d.out.host[i]) != 0;
    expect_true(h, "NaN shows", part == 2 ? shown == 1 : shown == HS);
    expect_true(h, "the other head stays", spread == 0);
    case_end(h);
}

static inline void test_attention_decode(Harness* h) {
    // The head sizes on both sides of each choice of the GPU's, and that of GPT-2.
    static const int HEADS[][2] = {{1, 1},  {3, 7},  {2, 8},   {2, 33},  {12, 64}, {1, 72},
                                   {2, 80}, {3, 96}, {2, 128}, {1, 136}, {2, 255}, {2, 256}};
    static const int POSITIONS[] = {0, 1, 6, 15, 16, 31, 32, 99, 256, 1023};
    for (size_t i = 0; i < COUNT_OF(HEADS); i++)
        for (size_t k = 0; k < COUNT_OF(POSITIONS); k++)
            decode_check(h, POSITIONS[k], HEADS[i][0], HEADS[i][1], 1.0, 3e-6);
    for (int position = 0; position < 70; position++) decode_check(h, position, 2, 16, 1.0, 3e-6);
    // A softmax that is nearly one-hot: a score of 300 is right to 3e-5.
    decode_check(h, 50, 2, 16, 8.0, 3e-4);
    decode_check(h, 600, 2, 64, 8.0, 3e-4);
    for (int part = 1; part <= 2; part++) decode_check_nan(h, 0, part), decode_check_nan(h, 40, part);
    if (!HAS_DEVICE_MEMORY) decode_check(h, 20, 1, 300, 1.0, 3e-6);  // the GPU does not take such a head
    case_begin(h, "attention_decode/head sizes");
    expect_true(h, "256 channels are taken", attention_decode_takes(256));
    expect_true(h, "more are refused on the GPU alone", attention_decode_takes(257) == !HAS_DEVICE_MEMORY);
    case_end(h);
}

// A layer of the 124M and of the 1558M model, in the middle and at the end of their text.
static inline void bench_attention_decode(Harness* h) {
    static const int SHAPES[][3] = {{127, 12, 64}, {1023, 12, 64}, {1023, 25, 64}, {4095, 16, 128}};
    for (size_t i = 0; i < COUNT_OF(SHAPES); i++) {
        int position = SHAPES[i][0], NH = SHAPES[i][1], HS = SHAPES[i][2];
        char shapes[64];
        snprintf(shapes, sizeof shapes, "position=%d NH=%d HS=%d", position, NH, HS);
        case_begin(h, "attention_decode bench");
        DecodeCase d = decode_case(h, position, NH, HS, 1.0);
        bench_report(h, "attention_decode", shapes, bench_seconds(h, decode_run, &d),
                     ATTENTION_DECODE_FLOPS(position, NH, HS), ATTENTION_DECODE_BYTES(position, NH, HS));
        case_free(h);
    }
}

#endif
