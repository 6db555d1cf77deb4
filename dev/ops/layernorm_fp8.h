/* layernorm_fp8: residual_layernorm_forward() of an operand with an 8-bit copy, against the same without one and a pass
 * of quantize(), bit for bit; bench: both in turn. */
#ifndef DEV_OPS_LAYERNORM_FP8_H
#define DEV_OPS_LAYERNORM_FP8_H

#include "layernorm.h"
#include "llmc/fp8/layernorm.h"
#include "quantize.h"

typedef struct {
    OpCase* k;
    Fp8Shared shared;
    Fp8Linear layer;
    Fp8Copy copy;
    double elements;
    Fp8Stats before;
} LayernormFp8Case;

// Some columns of y are zero or small, so that elements are flushed; the scale clips some of the others.
static inline LayernormFp8Case* layernorm_fp8_case(Harness* h, Rows size, OpWay way) {
    static const Fp8Stats before = {7, 9, 0x3e800000u};  // amax 0.25
    const int row[] = {size.N, size.C};
    OpCase* k = op_case(h, &RESIDUAL_LAYERNORM, RESIDUAL_LAYERNORM.passes, row, way);
    LayernormFp8Case* f = (LayernormFp8Case*)case_memory(h, sizeof *f);
    for (int c = 0; c < size.C; c += 5) {
        k->w.host[c] = c % 2 ? (real)0 : (real)1e-6;
        k->b.host[c] = 0;
    }
    array_upload_real(k->w), array_upload(k->b);
    f->k = k, f->before = before;
    f->shared.elements = &f->elements, f->shared.scales.scale = resident_real(h, 128);
    f->shared.scales.stats = (Fp8Stats*)case_block(h, sizeof(Fp8Stats), ON_DEVICE);
    f->layer.shared = &f->shared, f->copy.layer = &f->layer, f->copy.operand = FP8_X;
    f->copy.y = (uint8_t*)case_block(h, (size_t)size.N * (size_t)size.C, ON_DEVICE);
    f->copy.yt = (uint8_t*)case_block(h, quantize_rows(size.N) * (size_t)size.C, ON_DEVICE);
    return f;
}

static inline void layernorm_fp8_run_apart(void* state) {
    LayernormFp8Case* f = (LayernormFp8Case*)state;
    Operand y = {.v = f->k->y.device, .q = &f->copy};
    layernorm_run_residual(f->k);
    fp8_fill(y, f->k->N, f->k->C, f->k->ctx);
}

static inline void layernorm_fp8_run_fused(void* state) {
    LayernormFp8Case* f = (LayernormFp8Case*)state;
    layernorm_run_residual_of(f->k, &f->copy);
}

// What a run leaves on the device besides arrays.
typedef struct {
    uint8_t *y8, *yt;
    Fp8Stats stats;
    double elements;
} LayernormFp8Result;

// Run with outputs as they were made.
static inline LayernormFp8Result layernorm_fp8_result(Harness* h, LayernormFp8Case* f, void (*run)(void* state)) {
    OpCase* k = f->k;
    LayernormFp8Result got;
    size_t n = (size_t)k->N * (size_t)k->C, transposed = quantize_rows(k->N) * (size_t)k->C;
    got.y8 = (uint8_t*)case_memory(h, n), got.yt = (uint8_t*)case_memory(h, transposed);
    array_restore(k->y), array_restore(k->r), array_restore(k->mean), array_restore(k->rstd);
    memset(got.yt, QUANTIZE_FILL, transposed);
    device_upload(k->ctx, f->copy.y, got.yt, n);
    device_upload(k->ctx, f->copy.yt, got.yt, transposed);
    device_upload(k->ctx, f->shared.scales.stats, &f->before, sizeof f->before);
    device_synchronize(k->ctx);
    f->elements = 0;
    run(f);
    device_download(k->ctx, got.y8, f->copy.y, n);
    device_download(k->ctx, got.yt, f->copy.yt, transposed);
    device_download(k->ctx, &got.stats, f->shared.scales.stats, sizeof got.stats);
    got.elements = f->elements;
    return got;
}

static inline int layernorm_fp8_is_fused(int C, const Context* ctx) {
#ifdef __CUDACC__
    return layernorm_fp8_takes(C, ctx);
#else
    return (void)C, (void)ctx, 0;
#endif
}

// v_is_read: of y. records: as in a training step, which wants the transpose and the statistics too.
static inline void layernorm_fp8_compare(Harness* h, LayernormFp8Case* f, int v_is_read, int records) {
    OpCase* k = f->k;
    size_t C = (size_t)k->C, n = (size_t)k->N * C;
    f->copy.v_is_read = v_is_read, f->shared.records = records;
    LayernormFp8Result want = layernorm_fp8_result(h, f, layernorm_fp8_run_apart);
    real *y = copy_of(h, k->y), *r = copy_of(h, k->r), *mean = copy_of(h, k->mean), *rstd = copy_of(h, k->rstd);
    LayernormFp8Result got = layernorm_fp8_result(h, f, layernorm_fp8_run_fused);
    int is_sparse = !v_is_read && records && layernorm_fp8_is_fused(k->C, k->ctx);
    for (int row = 0; row < k->N; row++)  // a row that nobody reads stays as it was
        if (is_sparse && !mean_bias_reads(row, k->N))
            memcpy(y + (size_t)row * C, k->y.initial + (size_t)row * C, C * sizeof *y);
    expect_equal(h, "y", k->y, y);
    expect_equal(h, "r", k->r, r);
    expect_equal(h, "mean", k->mean, mean);
    expect_equal(h, "rstd", k->rstd, rstd);
    expect_true(h, "y8 has quantize's bytes", memcmp(got.y8, want.y8, n) == 0);
    expect_true(h, "yt has quantize's bytes", memcmp(got.yt, want.yt, quantize_rows(k->N) * C) == 0);
    expect_true(h, "amax and the counts are quantize's", same_stats(got.stats, want.stats));
    expect_true(h, "the number of elements", got.elements == want.elements && got.elements == (records ? n : 0.0));
    expect_true(h, "what the copy was computed from", f->copy.from.x == k->y.device);
    if (records && n > 1000)
        expect_true(h, "some are clipped and some flushed",
                    got.stats.clipped > f->before.clipped && got.stats.flushed > f->before.flushed);
}

// The rows that mean_bias reads, asked one by one.
static inline void test_layernorm_fp8_rows(Harness* h) {
    static const int ROWS[] = {1, 16, 511, 512, 513, 1000, 1024, 5001};
    case_begin(h, "layernorm_fp8/rows of the means");
    for (size_t i = 0; i < COUNT_OF(ROWS); i++) {
        int N = ROWS[i], same = 1;
        unsigned char* read = (unsigned char*)case_memory(h, (size_t)N);
        for (int k = 0; k < mean_bias_rows(N); k++) read[mean_bias_row(k, N)] = 1;
        for (int row = 0; row < N; row++) same &= mean_bias_reads(row, N) == read[row];
        expect_true(h, "mean_bias_reads() and mean_bias_row()", same);
    }
    int is_gpu = layernorm_fp8_is_fused(16, &h->ctx);
    expect_true(h, "what the kernel takes", layernorm_fp8_is_fused(1600, &h->ctx) == is_gpu);
    expect_true(h, "what it does not",
                !layernorm_fp8_is_fused(1808, &h->ctx) && !layernorm_fp8_is_fused(1608, &h->ctx));
    case_end(h);
}

static inline void test_layernorm_fp8(Harness* h) {
    // Blocks with 1 to 32 rows, halves of a block without a row, every number of elements that a thread may hold, more
    // rows than the means are of, rows that are too long for the kernel.
    static const Rows SIZES[] = {{1, 16},    {15, 64},   {16, 768},  {17, 64},  {31, 784},  {48, 768}, {33, 1024},
                                 {50, 1040}, {70, 1600}, {64, 1792}, {600, 80}, {1027, 48}, {16, 2064}};
    test_layernorm_fp8_rows(h);
    for (size_t i = 0; i < COUNT_OF(SIZES); i++)
        for (int dropped = 0; dropped < 2; dropped++) {
            OpWay way = {SET, SET, 0, dropped ? 0.3 : 0, 0};
            LayernormFp8Case* f = layernorm_fp8_case(h, SIZES[i], way);
            layernorm_fp8_compare(h, f, 1, 1);
            layernorm_fp8_compare(h, f, 0, 1);
            layernorm_fp8_compare(h, f, 1, 0);
            case_end(h);
        }
    // Infinity and NaN in the input make a row of NaN: bytes, and amax.
    Rows size = {.N = 40, .C = 768};
    LayernormFp8Case* f = layernorm_fp8_case(h, size, OP_PLAIN);
    f->k->x.host[3 * 768 + 5] = (real)NAN, f->k->x.host[33 * 768 + 700] = (real)INFINITY;
    array_upload_real(f->k->x);
    layernorm_fp8_compare(h, f, 1, 1);
    case_end(h);
}

// Both ways, with and without dropout, and where only the rows of the means are read.
static inline void bench_layernorm_fp8(Harness* h) {
    static const Rows SIZES[] = {{65536, 768}, {16384, 1600}, {32768, 1024}};
    if (!layernorm_fp8_is_fused(16, &h->ctx)) return;
    for (size_t i = 0; i < 2 * COUNT_OF(SIZES); i++) {
        OpWay way = {SET, SET, 0, i % 2 ? 0.3 : 0, 1};
        LayernormFp8Case* f = layernorm_fp8_case(h, SIZES[i / 2], way);
        f->shared.records = f->copy.v_is_read = 1;
        bench(h, i % 2 ? ", quantize, dropout" : ", quantize", layernorm_fp8_run_apart, f);
        bench(h, i % 2 ? " dropout" : "", layernorm_fp8_run_fused, f);
        f->copy.v_is_read = 0;
        bench(h, i % 2 ? ", rows of the means, dropout" : ", rows of the means", layernorm_fp8_run_fused, f);
        case_free(h);
    }
}

#endif
