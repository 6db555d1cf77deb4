/* attention_fused: the kernels against attention_backward() and quantize(), bit for bit but for sums, and the trainers'
 * choice between them; bench: together and apart in turn. */
#ifndef DEV_OPS_ATTENTION_FUSED_H
#define DEV_OPS_ATTENTION_FUSED_H

#include "attention.h"
#include "llmc/model/linear_output.h"
#include "matmul.h"
#include "quantize.h"

#ifdef ATTENTION_FLASH

typedef struct {
    AttentionCase a;
    QuantizeOutput out;
    Array sums;  // [3C]
    float* partial;
    Fp8Stats before;
} AttentionFp8Case;

static AttentionFp8Case attention_fp8_case(Harness* h, int B, int T, int NH, Mask mask, double p, Mode mode) {
    int* lengths = (int*)case_memory(h, (size_t)B * sizeof *lengths);
    for (int b = 0; b < B; b++) lengths[b] = T;
    AttentionFp8Case f = {.a = attention_case(h, lengths, B, NH, 64, mask, p, 1.0),
                          .before = {7, 9, float_bits(0.25f)}};
    size_t C = (size_t)NH * 64, n = 3 * C * (size_t)f.a.s.rows;
    real* scale = (real*)pinned_memory(h, sizeof *scale);
    *scale = 1 << 19;  // clips elements above 0.11
    for (size_t i = 0; i < f.a.dout.n; i += C)
        f.a.dout.host[i] = 0;  // so a channel of dV is 0, which counts as flushed
    array_upload(f.a.dout);
    f.sums = output(h, 3 * C, mode);
    f.partial = (float*)case_block(h, ATTENTION_FP8_BYTES(f.a.s.rows, C), ON_DEVICE);
    f.out.scale = scale, f.out.format = FP8_E5M2;
    f.out.y = (uint8_t*)case_block(h, n, ON_DEVICE);
    f.out.yt = (uint8_t*)case_block(h, n, ON_DEVICE);
    f.out.stats = (Fp8Stats*)case_block(h, sizeof *f.out.stats, ON_DEVICE);
    f.out.sums.b = f.sums.device_real, f.out.sums.mode = mode;
    return f;
}

static void attention_fp8_run_apart(void* state) {
    AttentionFp8Case* f = (AttentionFp8Case*)state;
    attention_run_backward(&f->a);
    quantize(f->out, quantize_plain(f->a.dqkv.device), f->a.s.rows, 3 * f->a.shape.NH * 64, f->a.ctx);
}

static void attention_fp8_run_fused(void* state) {
    AttentionFp8Case* f = (AttentionFp8Case*)state;
    AttentionInputs in = {f->a.dout.device, f->a.qkv.device, f->a.out.device, f->a.lse.device_real};
    AttentionFp8 out = {f->out.y, f->out.yt, f->out.stats, f->out.scale, f->out.sums};
    attention_backward_fp8(out, f->partial, in, &f->a.s, f->a.shape, f->a.ctx);
}

// What a run leaves on the device.
typedef struct {
    uint8_t *y, *yt;
    real* sums;
    Fp8Stats stats;
} AttentionFp8Result;

static AttentionFp8Result attention_fp8_result(Harness* h, AttentionFp8Case* f, QuantizeOutput all,
                                               void (*run)(void* state)) {
    AttentionFp8Result got;
    size_t n = f->a.dqkv.n;
    array_restore(f->sums);
    cudaCheck(cudaMemset(all.y, QUANTIZE_FILL, n));
    cudaCheck(cudaMemset(all.yt, QUANTIZE_FILL, n));
    device_upload(f->a.ctx, all.stats, &f->before, sizeof f->before);
    device_synchronize(f->a.ctx);
    run(f);
    got.y = (uint8_t*)case_memory(h, n), got.yt = (uint8_t*)case_memory(h, n), got.sums = copy_of(h, f->sums);
    device_download(f->a.ctx, got.y, all.y, n);
    device_download(f->a.ctx, got.yt, all.yt, n);
    device_download(f->a.ctx, &got.stats, all.stats, sizeof got.stats);
    return got;
}

// `sums`, `stats`: whether they are wanted.
static void attention_fp8_compare(Harness* h, AttentionFp8Case* f, int sums, int stats) {
    QuantizeOutput all = f->out;
    size_t n = f->a.dqkv.n;
    if (!sums) f->out.sums.b = NULL;
    if (!stats) f->out.stats = NULL;
    AttentionFp8Result want = attention_fp8_result(h, f, all, attention_fp8_run_apart);
    real* dqkv = copy_of(h, f->a.dqkv);
    AttentionFp8Result got = attention_fp8_result(h, f, all, attention_fp8_run_fused);
    f->out = all;
    expect_true(h, "y has quantize's bytes", memcmp(got.y, want.y, n) == 0);
    expect_true(h, "yt has quantize's bytes", memcmp(got.yt, want.yt, n) == 0);
    expect_true(h, "amax and the counts are quantize's", same_stats(got.stats, want.stats));
    expect_equal(h, "dqkv is not written", f->a.dqkv, dqkv);
    if (sums) expect_close(h, "column sums", f->sums, want.sums, tolerance(3e-6));
    if (stats)
        expect_true(h, "some are clipped and some flushed",
                    got.stats.clipped > f->before.clipped && got.stats.flushed > f->before.flushed);
}

// The bias gradient of [N, 3C] dqkv, for any lengths: dqkv keeps its bits.
static void test_attention_bias(Harness* h, AttentionSizes sizes, Mask mask, Mode mode) {
    AttentionCase a = attention_case_of(h, "bias", sizes, mask);
    size_t width = 3 * (size_t)a.shape.NH * (size_t)a.shape.HS;
    AttentionInputs in = {a.dout.device, a.qkv.device, a.out.device, a.lse.device_real};
    Array bias = output(h, width, mode);
    real* want = (real*)case_memory(h, width * sizeof *want);
    attention_run_forward(&a);
    attention_run_backward(&a);
    real* dqkv = copy_of(h, a.dqkv);
    for (size_t c = 0; c < width; c++) {
        double sum = mode == ADD ? (double)bias.initial[c] : 0;
        for (size_t n = 0; n < (size_t)a.s.rows; n++) sum += (double)dqkv[n * width + c];
        want[c] = (real)sum;
    }
    static const AttentionPath PATHS[] = {FLASH, FLASH_BIAS};
    for (size_t i = 0; i < COUNT_OF(PATHS); i++) {
        LinearGrads d = {.w = NULL, .b = bias.device_real, .fp8 = NULL};
        array_restore(a.dqkv);
        device_set_attention(a.ctx, PATHS[i]);
        d = attention_backward_for_linear(a.dqkv.device, in, &a.s, a.shape, d, mode, a.ctx);
        array_download(a.dqkv);
        expect_equal(h, "dqkv", a.dqkv, dqkv);
        expect_true(h, "the bias gradient is left to the next op",
                    d.b == (PATHS[i] == FLASH ? bias.device_real : NULL));
    }
    device_set_attention(a.ctx, FLASH);
    expect_close(h, "bias", bias, want, tolerance(3e-6));
    case_end(h);
}

static void test_attention_fused(Harness* h) {
    static const struct {
        int B, T, NH;
        double p;
    } SIZES[] = {{1, 64, 1, 0}, {2, 128, 2, 0}, {3, 192, 1, 0.1}, {1, 320, 3, 0}, {2, 256, 2, 0.3}};
    static const int uneven[] = {64, 128}, odd[] = {72, 72}, even[] = {128, 128};
    Sequences unequal = sequences_of(h, uneven, 2, 5), narrow = sequences_of(h, odd, 2, 5),
              two = sequences_of(h, even, 2, 5);
    static const AttentionSizes BIAS[] = {{{1}, 1, 1, 64, 0},           {{128, 64}, 2, 2, 64, 0},
                                          {{300, 65}, 2, 1, 64, 0.1},   {{129, 1, 257}, 3, 2, 40, 0},
                                          {{0, 130, 63}, 3, 3, 8, 0.1}, {{200}, 1, 2, 32, 0}};
    AttentionShape shape = {.NH = 2, .HS = 64, .mask = CAUSAL}, wide = {.NH = 2, .HS = 56, .mask = CAUSAL};
    if (!attention_bias_takes(shape, &h->ctx)) return;
    for (size_t i = 0; i < COUNT_OF(BIAS); i++)
        for (int mask = CAUSAL; mask <= FULL; mask++) test_attention_bias(h, BIAS[i], (Mask)mask, i % 2 ? ADD : SET);
    if (!attention_fp8_takes(&two, shape, &h->ctx)) return;
    case_begin(h, "attention_fused/what it does not take");
    expect_true(h, "sequences of several lengths", !attention_fp8_takes(&unequal, shape, &h->ctx));
    expect_true(h, "of a length that is no multiple of 64", !attention_fp8_takes(&narrow, shape, &h->ctx));
    expect_true(h, "heads of 56", !attention_fp8_takes(&two, wide, &h->ctx));
    case_end(h);
    for (size_t i = 0; i < COUNT_OF(SIZES); i++)
        for (int mask = CAUSAL; mask <= FULL; mask++) {
            case_begin(h, "attention_fused/fp8 B=%d T=%d NH=%d %s p=%g", SIZES[i].B, SIZES[i].T, SIZES[i].NH,
                       mask == CAUSAL ? "CAUSAL" : "FULL", SIZES[i].p);
            AttentionFp8Case f =
                attention_fp8_case(h, SIZES[i].B, SIZES[i].T, SIZES[i].NH, (Mask)mask, SIZES[i].p, i % 2 ? ADD : SET);
            attention_run_forward(&f.a);
            attention_fp8_compare(h, &f, 1, 1);
            attention_fp8_compare(h, &f, 0, 0);
            case_end(h);
        }
}

static void attention_bias_run_apart(void* state) {
    AttentionFp8Case* f = (AttentionFp8Case*)state;
    attention_run_backward(&f->a);
    matmul_backward_bias((BiasGrad){f->sums.device_real, SET}, f->a.dqkv.device, f->a.s.rows, 3 * f->a.shape.NH * 64,
                         f->a.ctx);
}

static void attention_bias_run_fused(void* state) {
    AttentionFp8Case* f = (AttentionFp8Case*)state;
    AttentionInputs in = {f->a.dout.device, f->a.qkv.device, f->a.out.device, f->a.lse.device_real};
    attention_backward_bias(f->a.dqkv.device, (BiasGrad){f->sums.device_real, SET}, in, &f->a.s, f->a.shape, f->a.ctx);
}

static void bench_attention_fused(Harness* h) {
    static const AttentionBench SIZES[] = {{64, 1024, 12, 64, CAUSAL, 0, FLASH},
                                           {16, 1024, 25, 64, CAUSAL, 0, FLASH},
                                           {256, 128, 16, 64, FULL, 0.1, FLASH},
                                           {64, 512, 16, 64, FULL, 0.1, FLASH}};
    static const struct {
        const char* name;
        void (*run)(void* state);
    } RUNS[] = {{"attention_backward, bias", attention_bias_run_apart},
                {"attention_backward_bias", attention_bias_run_fused},
                {"attention_backward, quantize", attention_fp8_run_apart},
                {"attention_backward_fp8", attention_fp8_run_fused}};
    for (size_t i = 0; i < COUNT_OF(SIZES); i++) {
        AttentionBench b = SIZES[i];
        case_begin(h, "attention_fused/bench");
        AttentionFp8Case f = attention_fp8_case(h, b.B, b.T, b.NH, b.mask, b.p, SET);
        char shapes[64];
        double pairs = attention_pairs(&f.a.s, b.mask);
        f.a.s = resident_sequences(h, f.a.s);
        snprintf(shapes, sizeof shapes, "B=%d T=%d NH=%d p=%g", b.B, b.T, b.NH, b.p);
        attention_run_forward(&f.a);
        size_t takes = attention_fp8_takes(&f.a.s, f.a.shape, &h->ctx) ? 4
                       : attention_bias_takes(f.a.shape, &h->ctx)      ? 2
                                                                       : 0;
        for (size_t run = 0; run < 2 * takes; run++)
            bench_report(h, RUNS[run % takes].name, shapes, bench_seconds(h, RUNS[run % takes].run, &f),
                         ATTENTION_BACKWARD_FLOPS(pairs, b.NH, 64), ATTENTION_BACKWARD_BYTES(f.a.s.rows, b.NH, 64));
        case_free(h);
    }
}

#endif
#endif
