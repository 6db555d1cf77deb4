/* layernorm_fp8: the kernel against layernorm and quantize(), bit for bit; bench: both in turn. */
#ifndef DEV_OPS_LAYERNORM_FP8_H
#define DEV_OPS_LAYERNORM_FP8_H

#include "layernorm.h"
#include "llmc/fp8/layernorm.h"
#include "quantize.h"

#ifdef __CUDACC__

typedef struct {
    LayernormCase* k;
    LayerNormBranch branch;
    LayerNormRows rows;
    QuantizeOutput out;
    Fp8Stats before;
} LayernormFp8Case;

// Some columns of y are zero or small, so that elements are flushed; the scale clips some of the others.
static LayernormFp8Case layernorm_fp8_case(Harness* h, Rows size, LayerNormBranch branch) {
    LayernormFp8Case f = {
        .k = layernorm_case(h, size.N, size.C, SET, SET, branch == LAYERNORM_RESIDUAL_DROPOUT ? 0.3 : 0),
        .branch = branch,
        .before = {7, 9, float_bits(0.25f)}};
    LayernormCase* k = f.k;
    for (int c = 0; c < size.C; c += 5) {
        k->w.host[c] = c % 2 ? (real)0 : (real)1e-6;
        k->b.host[c] = 0;
    }
    array_upload_real(k->w), array_upload(k->b);
    f.out.scale = resident_real(h, 128), f.out.format = FP8_E4M3;
    f.out.y = (uint8_t*)case_block(h, (size_t)size.N * (size_t)size.C, ON_DEVICE);
    f.out.yt = (uint8_t*)case_block(h, quantize_rows(size.N) * (size_t)size.C, ON_DEVICE);
    f.out.stats = (Fp8Stats*)case_block(h, sizeof *f.out.stats, ON_DEVICE);
    return f;
}

static void layernorm_fp8_run_apart(void* state) {
    LayernormFp8Case* f = (LayernormFp8Case*)state;
    if (f->branch == LAYERNORM_ALONE) layernorm_run_forward(f->k);
    else layernorm_run_residual(f->k);
    quantize(f->out, quantize_plain(f->k->y.device), f->k->size.N, f->k->size.C, f->k->ctx);
}

static void layernorm_fp8_run_fused(void* state) {
    LayernormFp8Case* f = (LayernormFp8Case*)state;
    LayernormCase* k = f->k;
    ResidualBranch branch = {.r = k->r.device, .dropout = k->dropout};
    LayerNorm p = layernorm_norm(k->w, k->b);
    LayerNormFp8 out = {.y = k->y.device,
                        .rows = f->rows,
                        .y8 = f->out.y,
                        .yt = f->out.yt,
                        .stats = f->out.stats,
                        .scale = f->out.scale};
    if (f->branch == LAYERNORM_ALONE)
        layernorm_forward_fp8(out, layernorm_stats(k), k->x.device, p, k->size, (real)LAYERNORM_EPS, k->ctx);
    else
        residual_layernorm_forward_fp8(out, branch, layernorm_stats(k), k->x.device, p, k->size, (real)LAYERNORM_EPS,
                                       k->ctx);
}

// What a run leaves on the device.
typedef struct {
    real *y, *r, *mean, *rstd;
    uint8_t *y8, *yt;
    Fp8Stats stats;
} LayernormFp8Result;

// Run with outputs as they were made.
static LayernormFp8Result layernorm_fp8_result(Harness* h, LayernormFp8Case* f, QuantizeOutput all,
                                               void (*run)(void* state)) {
    LayernormCase* k = f->k;
    LayernormFp8Result got;
    size_t n = (size_t)k->size.N * (size_t)k->size.C, transposed = quantize_rows(k->size.N) * (size_t)k->size.C;
    array_restore(k->y), array_restore(k->r), array_restore(k->mean), array_restore(k->rstd);
    cudaCheck(cudaMemsetAsync(all.y, QUANTIZE_FILL, n, k->ctx->stream));
    cudaCheck(cudaMemsetAsync(all.yt, QUANTIZE_FILL, transposed, k->ctx->stream));
    device_upload(k->ctx, all.stats, &f->before, sizeof f->before);
    device_synchronize(k->ctx);
    run(f);
    got.y = copy_of(h, k->y), got.r = copy_of(h, k->r), got.mean = copy_of(h, k->mean), got.rstd = copy_of(h, k->rstd);
    got.y8 = (uint8_t*)case_memory(h, n), got.yt = (uint8_t*)case_memory(h, transposed);
    device_download(k->ctx, got.y8, all.y, n);
    device_download(k->ctx, got.yt, all.yt, transposed);
    device_download(k->ctx, &got.stats, all.stats, sizeof got.stats);
    return got;
}

// `yt`, `stats`: what is wanted besides y8.
static void layernorm_fp8_compare(Harness* h, LayernormFp8Case* f, LayerNormRows rows, int yt, int stats) {
    LayernormCase* k = f->k;
    QuantizeOutput all = f->out;
    size_t C = (size_t)k->size.C, n = (size_t)k->size.N * C;
    f->rows = rows;
    if (!yt) f->out.yt = NULL;
    if (!stats) f->out.stats = NULL;
    LayernormFp8Result want = layernorm_fp8_result(h, f, all, layernorm_fp8_run_apart);
    LayernormFp8Result got = layernorm_fp8_result(h, f, all, layernorm_fp8_run_fused);
    f->out = all;
    for (int row = 0; row < k->size.N; row++)  // a row that nobody reads stays as it was
        if (rows == LAYERNORM_MEAN_ROWS && !mean_bias_reads(row, k->size.N))
            memcpy(want.y + (size_t)row * C, k->y.initial + (size_t)row * C, C * sizeof *want.y);
    expect_equal(h, "y", k->y, want.y);
    expect_equal(h, "r", k->r, want.r);
    expect_equal(h, "mean", k->mean, want.mean);
    expect_equal(h, "rstd", k->rstd, want.rstd);
    expect_true(h, "y8 has quantize's bytes", memcmp(got.y8, want.y8, n) == 0);
    expect_true(h, "yt has quantize's bytes", memcmp(got.yt, want.yt, quantize_rows(k->size.N) * C) == 0);
    expect_true(h, "amax and the counts are quantize's", same_stats(got.stats, want.stats));
    if (stats && n > 1000)
        expect_true(h, "some are clipped and some flushed",
                    got.stats.clipped > f->before.clipped && got.stats.flushed > f->before.flushed);
}

static const char* layernorm_fp8_name(LayerNormBranch branch) {
    static const char* const NAMES[] = {"alone", "residual", "residual, dropout"};
    return NAMES[branch];
}

// The rows that mean_bias reads, asked one by one.
static void test_layernorm_fp8_rows(Harness* h) {
    static const int ROWS[] = {1, 16, 511, 512, 513, 1000, 1024, 5001};
    case_begin(h, "layernorm_fp8/rows of the means");
    for (size_t i = 0; i < COUNT_OF(ROWS); i++) {
        int N = ROWS[i], same = 1;
        unsigned char* read = (unsigned char*)case_memory(h, (size_t)N);
        for (int k = 0; k < mean_bias_rows(N); k++) read[mean_bias_row(k, N)] = 1;
        for (int row = 0; row < N; row++) same &= mean_bias_reads(row, N) == read[row];
        expect_true(h, "mean_bias_reads() and mean_bias_row()", same);
    }
    expect_true(h, "what it takes", layernorm_fp8_takes(16, &h->ctx) && layernorm_fp8_takes(1600, &h->ctx));
    expect_true(h, "what it does not", !layernorm_fp8_takes(1808, &h->ctx) && !layernorm_fp8_takes(1608, &h->ctx));
    case_end(h);
}

// Infinity and NaN in the input make a row of NaN: bytes, and amax.
static void test_layernorm_fp8_nan(Harness* h) {
    case_begin(h, "layernorm_fp8/a row with NaN and one with infinity");
    LayernormFp8Case f = layernorm_fp8_case(h, (Rows){.N = 40, .C = 768}, LAYERNORM_ALONE);
    f.k->x.host[3 * 768 + 5] = (real)NAN, f.k->x.host[33 * 768 + 700] = (real)INFINITY;
    array_upload_real(f.k->x);
    layernorm_fp8_compare(h, &f, LAYERNORM_ALL_ROWS, 1, 1);
    case_end(h);
}

static void test_layernorm_fp8(Harness* h) {
    // Blocks with 1 to 32 rows, halves of a block without a row, every number of elements that a thread may hold, more
    // rows than the means are of.
    static const Rows SIZES[] = {{1, 16},    {15, 64},   {16, 768},  {17, 64},   {31, 784}, {48, 768},
                                 {33, 1024}, {50, 1040}, {70, 1600}, {64, 1792}, {600, 80}, {1027, 48}};
    if (!layernorm_fp8_takes(16, &h->ctx)) return;
    test_layernorm_fp8_rows(h);
    test_layernorm_fp8_nan(h);
    for (size_t i = 0; i < COUNT_OF(SIZES); i++)
        for (int branch = LAYERNORM_ALONE; branch <= LAYERNORM_RESIDUAL_DROPOUT; branch++) {
            int N = SIZES[i].N, C = SIZES[i].C;
            case_begin(h, "layernorm_fp8/N=%d C=%d %s", N, C, layernorm_fp8_name((LayerNormBranch)branch));
            LayernormFp8Case f = layernorm_fp8_case(h, SIZES[i], (LayerNormBranch)branch);
            layernorm_fp8_compare(h, &f, LAYERNORM_ALL_ROWS, 1, 1);
            layernorm_fp8_compare(h, &f, LAYERNORM_MEAN_ROWS, 1, 1);
            layernorm_fp8_compare(h, &f, LAYERNORM_ALL_ROWS, 0, 0);
            case_end(h);
        }
}

static void bench_layernorm_fp8(Harness* h) {
    static const Rows SIZES[] = {{65536, 768}, {16384, 1600}, {32768, 1024}};
    if (!layernorm_fp8_takes(16, &h->ctx)) return;
    for (size_t i = 0; i < COUNT_OF(SIZES); i++)
        for (int branch = LAYERNORM_RESIDUAL; branch <= LAYERNORM_RESIDUAL_DROPOUT; branch++) {
            Rows size = SIZES[i];
            LayernormFp8Case f = layernorm_fp8_case(h, size, (LayerNormBranch)branch);
            f.k->sequences = resident_sequences(h, f.k->sequences);
            char shapes[64];
            snprintf(shapes, sizeof shapes, "N=%d C=%d%s", size.N, size.C,
                     branch == LAYERNORM_RESIDUAL ? "" : " dropout");
            double flops = RESIDUAL_LAYERNORM_FORWARD_FLOPS(size.N, size.C);
            double apart = RESIDUAL_LAYERNORM_FORWARD_BYTES(size.N, size.C);
            for (int turn = 0; turn < 2; turn++) {
                bench_report(h, "layernorm, quantize", shapes, bench_seconds(h, layernorm_fp8_run_apart, &f), flops,
                             apart + QUANTIZE_BYTES(size.N, size.C, 1, 2));
                for (int rows = LAYERNORM_ALL_ROWS; rows <= LAYERNORM_MEAN_ROWS; rows++) {
                    f.rows = (LayerNormRows)rows;
                    LayerNormFp8 out = {.rows = f.rows, .yt = f.out.yt};
                    bench_report(h, rows == LAYERNORM_ALL_ROWS ? "fused, all of y" : "fused, rows of the means", shapes,
                                 bench_seconds(h, layernorm_fp8_run_fused, &f), flops,
                                 layernorm_fp8_bytes(out, apart, size));
                }
            }
            case_free(h);
        }
}

#endif
#endif
