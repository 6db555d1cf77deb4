/* layernorm_fp8: residual_layernorm_forward() of an operand with an 8-bit copy, against the same without one and a pass
 * of quantize(), bit for bit; bench: both in turn. */
#ifndef DEV_OPS_LAYERNORM_FP8_H
#define DEV_OPS_LAYERNORM_FP8_H

#include "layernorm.h"
#include "llmc/fp8/layernorm.h"
#include "quantize.h"

// `own` of a case of RESIDUAL_LAYERNORM.
typedef struct {
    Fp8Shared shared;
    Fp8Linear layer;
    Fp8Copy copy;
    double elements;
} LayernormFp8;

// Some columns of y are zero or small, so that elements are flushed; the scale clips some of the others.
static inline OpCase* layernorm_fp8_case(Harness* h, int N, int C, double p, int is_bench) {
    const int row[] = {N, C};
    OpWay way = {SET, SET, 0, p, is_bench};
    OpCase* k = op_case(h, &RESIDUAL_LAYERNORM, RESIDUAL_LAYERNORM.passes, row, way);
    LayernormFp8* f = (LayernormFp8*)(k->own = case_memory(h, sizeof *f));
    for (int c = 0; c < C; c += 5) k->w.host[c] = c % 2 ? (real)0 : (real)1e-6, k->b.host[c] = 0;
    array_upload_real(k->w), array_upload(k->b);
    quantize_bytes(k, N, C);
    f->shared.elements = &f->elements, f->shared.scales.scale = resident_real(h, 128);
    f->shared.scales.stats = (Fp8Stats*)(void*)k->bytes[2].device;
    f->layer.shared = &f->shared, f->copy.layer = &f->layer, f->copy.operand = FP8_X;
    f->copy.y = k->bytes[0].device, f->copy.yt = k->bytes[1].device;
    return k;
}

OP_FN(layernorm_fp8_run_apart) {
    Operand y = {.v = k->y.device, .q = &OP_OWN(LayernormFp8)->copy};
    layernorm_run_residual(k);
    fp8_fill(y, k->N, k->C, k->ctx);
}

OP_FN(layernorm_fp8_run_fused) { layernorm_run_residual_of(k, &OP_OWN(LayernormFp8)->copy); }

static inline int layernorm_fp8_is_fused(int C, const Context* ctx) {
#ifdef __CUDACC__
    return layernorm_fp8_takes(C, ctx);
#else
    return (void)C, (void)ctx, 0;
#endif
}

// v_is_read: of y. records: as in a training step, which wants the transpose and the statistics too.
static inline void layernorm_fp8_compare(Harness* h, OpCase* k, int v_is_read, int records) {
    LayernormFp8* f = OP_OWN(LayernormFp8);
    const Array written[] = {k->y, k->r, k->mean, k->rstd};
    real* want[COUNT_OF(written)];
    size_t C = (size_t)k->C;
    f->copy.v_is_read = v_is_read, f->shared.records = records, f->elements = 0;
    op_restore_bytes(k);
    layernorm_fp8_run_apart(k);
    for (size_t i = 0; i < COUNT_OF(written); i++) want[i] = copy_of(h, written[i]), array_restore(written[i]);
    for (int i = 0; i < 3; i++) device_download(k->ctx, k->bytes[i].want, k->bytes[i].device, k->bytes[i].n);
    double elements = f->elements;
    f->elements = 0;
    op_restore_bytes(k);
    layernorm_fp8_run_fused(k);
    int is_sparse = !v_is_read && records && layernorm_fp8_is_fused(k->C, k->ctx);
    for (int row = 0; row < k->N; row++)  // a row that nobody reads stays as it was
        if (is_sparse && !mean_bias_reads(row, k->N))
            memcpy(want[0] + (size_t)row * C, k->y.initial + (size_t)row * C, C * sizeof(real));
    for (size_t i = 0; i < COUNT_OF(written); i++) {
        expect_equal(h, "what layernorm writes", written[i], want[i]);
        array_restore(written[i]);
    }
    op_expect_bytes(k);
    expect_true(h, "the number of elements", f->elements == elements && elements == (records ? k->N * k->C : 0));
    expect_true(h, "what the copy was computed from", f->copy.from.x == k->y.device);
    Fp8Stats stats, start;
    memcpy(&stats, k->bytes[2].want, sizeof stats), memcpy(&start, k->bytes[2].start, sizeof start);
    if (records && k->N * k->C > 1000)
        expect_true(h, "some are clipped and some flushed",
                    stats.clipped > start.clipped && stats.flushed > start.flushed);
}

static inline void test_layernorm_fp8(Harness* h) {
    // Blocks with 1 to 32 rows, halves of a block without a row, every number of elements that a thread may hold, more
    // rows than the means are of, rows that are too long for the kernel.
    static const Rows SIZES[] = {{1, 16},    {15, 64},   {16, 768},  {17, 64},  {31, 784},  {48, 768}, {33, 1024},
                                 {50, 1040}, {70, 1600}, {64, 1792}, {600, 80}, {1027, 48}, {16, 2064}};
    case_begin(h, "layernorm_fp8/widths that the kernel takes");
    expect_true(h, "taken", layernorm_fp8_is_fused(1600, &h->ctx) == layernorm_fp8_is_fused(16, &h->ctx));
    expect_true(h, "not", !layernorm_fp8_is_fused(1808, &h->ctx) && !layernorm_fp8_is_fused(1608, &h->ctx));
    case_end(h);
    for (size_t i = 0; i < 2 * COUNT_OF(SIZES); i++) {
        OpCase* k = layernorm_fp8_case(h, SIZES[i / 2].N, SIZES[i / 2].C, i % 2 ? 0.3 : 0, 0);
        layernorm_fp8_compare(h, k, 1, 1);
        layernorm_fp8_compare(h, k, 0, 1);
        layernorm_fp8_compare(h, k, 1, 0);
        case_end(h);
    }
    // Infinity and NaN in the input make a row of NaN: bytes, and amax.
    OpCase* k = layernorm_fp8_case(h, 40, 768, 0, 0);
    k->x.host[3 * 768 + 5] = (real)NAN, k->x.host[33 * 768 + 700] = (real)INFINITY;
    array_upload_real(k->x);
    layernorm_fp8_compare(h, k, 1, 1);
    case_end(h);
}

// Both ways, with and without dropout, and where only the rows of the means are read.
static inline void bench_layernorm_fp8(Harness* h) {
    static const Rows SIZES[] = {{65536, 768}, {16384, 1600}, {32768, 1024}};
    if (!layernorm_fp8_is_fused(16, &h->ctx)) return;
    for (size_t i = 0; i < 2 * COUNT_OF(SIZES); i++) {
        OpCase* k = layernorm_fp8_case(h, SIZES[i / 2].N, SIZES[i / 2].C, i % 2 ? 0.3 : 0, 1);
        LayernormFp8* f = OP_OWN(LayernormFp8);
        f->shared.records = f->copy.v_is_read = 1;
        bench(h, i % 2 ? ", quantize, dropout" : ", quantize", layernorm_fp8_run_apart, k);
        bench(h, i % 2 ? " dropout" : "", layernorm_fp8_run_fused, k);
        f->copy.v_is_read = 0;
        bench(h, i % 2 ? ", rows of the means, dropout" : ", rows of the means", layernorm_fp8_run_fused, k);
        case_free(h);
    }
}

#endif
