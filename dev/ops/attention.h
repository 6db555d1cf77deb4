/* Cases of attention: unequal lengths, odd head sizes, both masks, dropout, large scores, packed against alone. */
#ifndef DEV_OPS_ATTENTION_H
#define DEV_OPS_ATTENTION_H

#include "../../llmc/ops/attention.h"
#include "harness.h"

typedef struct {
    Array out, lse, qkv, dqkv, dout;
    Sequences s;
    AttentionShape shape;
    double scale;  // of qkv
    Context* ctx;
} AttentionCase;

static void attention_run_forward(void* state) {
    AttentionCase* a = (AttentionCase*)state;
    attention_forward(a->out.device, a->lse.device_real, a->qkv.device, &a->s, a->shape, a->ctx);
}

static void attention_run_backward(void* state) {
    AttentionCase* a = (AttentionCase*)state;
    attention_backward(a->dqkv.device, a->dout.device, a->qkv.device, a->out.device, a->lse.device_real, &a->s,
                       a->shape, a->ctx);
}

// Call after case_begin().
static AttentionCase attention_case(Harness* h, const int* lengths, int count, int NH, int HS, Mask mask, double p,
                                    double scale) {
    AttentionCase a;
    a.s = sequences_of(h, lengths, count, 5);
    a.shape.NH = NH;
    a.shape.HS = HS;
    a.shape.mask = mask;
    a.shape.dropout = dropout_make(p, 42, 7, 3, SITE_DROPOUT_ATTENTION, NULL);
    a.scale = scale;
    a.ctx = &h->ctx;
    size_t N = (size_t)a.s.rows, C = (size_t)(NH * HS);
    a.qkv = input(h, N * 3 * C, scale);
    a.dout = input(h, N * C, 1.0);
    a.out = output(h, N * C, SET);
    a.lse = output(h, N * (size_t)NH, SET);
    a.dqkv = output(h, N * 3 * C, SET);
    return a;
}

// What rounding inside the op may add where floatX is short: P and ds are rounded before the products they enter, and
// delta is made from a rounded out. An output is a sum of P[k] V[k], where the P sum to 1 (dropout: to its scale) and
// an element of V is within 4 of its standard deviations. 0 where nothing is rounded inside.
static double attention_rounding(const AttentionCase* a) {
    double unit = sizeof(floatX) == sizeof(real) ? 0 : array_rounding(a->out);
    return 4 * unit * a->scale * (double)a->shape.dropout.scale;
}

// Launchers against references. With inputs of size 1 a score is right to a few 1e-7, and what is made from it
// is an average of numbers near 1; a gradient adds about as many of them as there are queries, and is a product of
// two operands of the inputs' scale. Tensor cores cut off what falls below the largest term's last bit instead of
// rounding it, which lse shows.
static void attention_check(Harness* h, AttentionCase* a, double tol) {
    real* out = copy_of(h, a->out);
    real* lse = copy_of(h, a->lse);
    real* dqkv = copy_of(h, a->dqkv);
    attention_forward_ref(out, lse, a->qkv.host, &a->s, a->shape);
    attention_backward_ref(dqkv, a->dout.host, a->qkv.host, &a->s, a->shape);
    Array forward[2] = {a->out, a->lse};
    expect_same_for_any_threads(h, "forward", attention_run_forward, a, forward, 2);
    double rounding = attention_rounding(a), cut = rounding > 0 ? 3 : 1;
    expect_close(h, "out", a->out, out, tolerance(tol) + rounding);
    expect_close(h, "lse", a->lse, lse, tolerance(cut * tol));
    expect_same_for_any_threads(h, "backward", attention_run_backward, a, &a->dqkv, 1);
    expect_close(h, "dqkv", a->dqkv, dqkv, tolerance(3 * tol) + 3 * rounding * a->scale);
}

// A sequence among others gives the same bits as the same sequence alone.
static void attention_check_packing(Harness* h, const AttentionCase* packed) {
    size_t C = (size_t)(packed->shape.NH * packed->shape.HS);
    for (int b = 0; b < packed->s.count; b++) {
        int first = packed->s.cu_seqlens[b], length = packed->s.cu_seqlens[b + 1] - first;
        AttentionCase alone =
            attention_case(h, &length, 1, packed->shape.NH, packed->shape.HS, packed->shape.mask, 0, 1.0);
        alone.s.first = packed->s.first + b;
        alone.shape.dropout = packed->shape.dropout;
        memcpy(alone.qkv.host, packed->qkv.host + (size_t)first * 3 * C, alone.qkv.n * sizeof(real));
        memcpy(alone.dout.host, packed->dout.host + (size_t)first * C, alone.dout.n * sizeof(real));
        array_upload(alone.qkv);
        array_upload(alone.dout);
        attention_run_forward(&alone);
        attention_run_backward(&alone);
        expect_equal(h, "out of a sequence alone", alone.out, packed->out.host + (size_t)first * C);
        expect_equal(h, "dqkv of a sequence alone", alone.dqkv, packed->dqkv.host + (size_t)first * 3 * C);
    }
}

static void test_attention(Harness* h) {
    static const struct {
        int lengths[4], count, NH, HS;
        double p;
    } cases[] = {
        {{1}, 1, 1, 1, 0},           {{1, 1}, 2, 3, 16, 0.5},
        {{17, 1, 77}, 3, 3, 16, 0},  {{17, 1, 77}, 3, 2, 33, 0.3},
        {{64, 64}, 2, 2, 64, 0},     {{6, 23, 24, 25}, 4, 2, 5, 0.1},
        {{130, 47}, 2, 1, 32, 0.2},  {{16, 0, 8}, 3, 2, 8, 0.1},
        {{1, 17, 77}, 3, 2, 64, 0},  {{77, 300, 1}, 3, 2, 64, 0.1},
        {{1, 77, 17}, 3, 2, 128, 0}, {{300, 65}, 2, 1, 128, 0.1},
        {{77, 33}, 2, 3, 48, 0.1},   {{129, 64, 63}, 3, 1, 80, 0},
        {{1024}, 1, 1, 64, 0.1},     {{40, 33}, 2, 1, 200, 0.1},
    };
    static const char* const masks[] = {"CAUSAL", "FULL"};
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        for (int mask = CAUSAL; mask <= FULL; mask++) {
            case_begin(h, "attention/both %s T=%d,.. of %d NH=%d HS=%d p=%g", masks[mask], cases[i].lengths[0],
                       cases[i].count, cases[i].NH, cases[i].HS, cases[i].p);
            AttentionCase a = attention_case(h, cases[i].lengths, cases[i].count, cases[i].NH, cases[i].HS, (Mask)mask,
                                             cases[i].p, 1.0);
            attention_check(h, &a, 3e-6);
            attention_check_packing(h, &a);
            case_end(h);
        }

    // Scores up to some hundreds: the softmax is nearly one-hot, masked scores would overflow, and a score of 300
    // is right to 3e-5.
    int length = 50;
    case_begin(h, "attention/both large scores");
    AttentionCase large = attention_case(h, &length, 1, 2, 16, CAUSAL, 0.1, 8.0);
    attention_check(h, &large, 3e-4);
    case_end(h);

    case_begin(h, "attention/forward a NaN is not hidden");
    AttentionCase nan_case = attention_case(h, &length, 1, 2, 16, CAUSAL, 0, 1.0);
    nan_case.qkv.host[20 * 3 * 32] = (real)NAN;  // head 0 of query 20
    array_upload(nan_case.qkv);
    attention_run_forward(&nan_case);
    array_download(nan_case.out);
    array_download(nan_case.lse);
    int shown = isnan(nan_case.lse.host[20]);
    for (size_t c = 0; c < 16; c++) shown &= isnan(nan_case.out.host[20 * 32 + c]);
    expect_true(h, "NaN in q gives NaN in lse and out", shown);
    expect_true(h, "the other head stays", !isnan(nan_case.lse.host[70]) && !isnan(nan_case.out.host[20 * 32 + 16]));
    case_end(h);
}

static double attention_loss_of(const AttentionCase* a) {
    double loss = 0;
    for (size_t i = 0; i < a->out.n; i++) loss += (double)a->dout.host[i] * (double)a->out.host[i];
    return loss;
}

static double attention_loss(void* state) {
    attention_run_forward(state);
    return attention_loss_of((AttentionCase*)state);
}

static double attention_loss_ref(void* state) {
    AttentionCase* a = (AttentionCase*)state;
    attention_forward_ref(a->out.host, a->lse.host, a->qkv.host, &a->s, a->shape);
    return attention_loss_of(a);
}

static void grad_attention(Harness* h) {
    static const int lengths[] = {7, 1, 26};
    for (int mask = CAUSAL; mask <= FULL; mask++)
        for (int dropped = 0; dropped < 2; dropped++) {
            double p = dropped ? 0.25 : 0;
            case_begin(h, "attention/grad %s p=%g", mask == CAUSAL ? "CAUSAL" : "FULL", p);
            AttentionCase a = attention_case(h, lengths, 3, 2, 3, (Mask)mask, p, 1.0);
            real* want = copy_of(h, a.dqkv);
            attention_backward_ref(want, a.dout.host, a.qkv.host, &a.s, a.shape);
            expect_gradient(h, "dqkv of the reference", attention_loss_ref, &a, a.qkv.host, a.qkv.n, want, 1e-8);
            attention_run_forward(&a);
            attention_run_backward(&a);
            expect_gradient(h, "dqkv", attention_loss, &a, a.qkv.host, a.qkv.n, a.dqkv.host, 1e-8);
            case_end(h);
        }
}

// What a CPU does in seconds, or the shapes at which other libraries were measured on an H200.
typedef struct {
    int B, T, NH, HS;
    Mask mask;
    double p;
} AttentionBench;

static void bench_attention_case(Harness* h, AttentionBench b) {
    int lengths[256];
    char shapes[64];
    CHECK(b.B <= (int)COUNT_OF(lengths));
    for (int i = 0; i < b.B; i++) lengths[i] = b.T;
    case_begin(h, "attention bench");
    AttentionCase a = attention_case(h, lengths, b.B, b.NH, b.HS, b.mask, b.p, 1.0);
    double pairs = attention_pairs(&a.s, a.shape.mask);
    a.s = resident_sequences(h, a.s);
    snprintf(shapes, sizeof shapes, "B=%d T=%d NH=%d HS=%d %s p=%g", b.B, b.T, b.NH, b.HS,
             b.mask == CAUSAL ? "CAUSAL" : "FULL", b.p);
    double seconds = bench_seconds(h, attention_run_forward, &a);
    bench_report(h, "attention_forward", shapes, seconds, ATTENTION_FORWARD_FLOPS(pairs, b.NH, b.HS),
                 ATTENTION_FORWARD_BYTES(a.s.rows, b.NH, b.HS));
    seconds = bench_seconds(h, attention_run_backward, &a);
    bench_report(h, "attention_backward", shapes, seconds, ATTENTION_BACKWARD_FLOPS(pairs, b.NH, b.HS),
                 ATTENTION_BACKWARD_BYTES(a.s.rows, b.NH, b.HS));
    case_free(h);
}

static void bench_attention(Harness* h) {
    static const AttentionBench host[] = {{4, 256, 4, 32, CAUSAL, 0},
                                          {4, 64, 12, 64, CAUSAL, 0},
                                          {4, 1024, 12, 64, CAUSAL, 0},
                                          {4, 1024, 12, 64, FULL, 0},
                                          {4, 1024, 12, 64, CAUSAL, 0.1}};
    static const AttentionBench device[] = {
        {32, 1024, 12, 64, CAUSAL, 0},   {64, 1024, 12, 64, CAUSAL, 0}, {16, 1024, 25, 64, CAUSAL, 0},
        {32, 1024, 12, 64, CAUSAL, 0.1}, {256, 128, 16, 64, FULL, 0},   {256, 128, 16, 64, FULL, 0.1},
        {64, 512, 16, 64, FULL, 0},      {64, 512, 16, 64, FULL, 0.1},  {8, 4096, 16, 128, CAUSAL, 0},
    };
    if (HAS_DEVICE_MEMORY)
        for (size_t i = 0; i < COUNT_OF(device); i++) bench_attention_case(h, device[i]);
    else
        for (size_t i = 0; i < COUNT_OF(host); i++) bench_attention_case(h, host[i]);
}

#endif
