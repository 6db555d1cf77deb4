/* The backward pass of attention with --attention flash-wide: heads of 72 to 128 channels on a Hopper GPU have a kernel
 * of their own (hopper_backward_wide.cuh). Elsewhere these cases repeat those of attention.h. */
#ifndef DEV_OPS_ATTENTION_WIDE_H
#define DEV_OPS_ATTENTION_WIDE_H

#include "attention.h"

static const AttentionSizes ATTENTION_WIDE_SIZES[] = {
    {{1}, 1, 1, 128, 0},
    {{128, 64}, 2, 2, 72, 0},
    {{300, 65}, 2, 1, 128, 0},  // several tiles of keys, the last with few rows
    {{129, 1, 257}, 3, 2, 80, 0.1},
    {{385}, 1, 1, 96, 0.5},
    {{0, 130, 63}, 3, 3, 128, 0.1},
#if defined(__CUDACC__) && !defined(DEV_EMULATOR_EMULATOR_H)  // tiles of many blocks, which wait for each other
    {{1500}, 1, 3, 128, 0},
    {{640, 900}, 2, 12, 128, 0},
    {{900, 640}, 2, 8, 112, 0.1},
#endif
};

static void test_attention_wide(Harness* h) {
    for (size_t i = 0; i < COUNT_OF(ATTENTION_WIDE_SIZES); i++)
        for (int mask = CAUSAL; mask <= FULL; mask++) {
            AttentionCase a = attention_case_of(h, "wide", ATTENTION_WIDE_SIZES[i], (Mask)mask);
            AttentionTruth want = {copy_of(h, a.out), copy_of(h, a.lse), copy_of(h, a.dqkv)};
            attention_forward_ref(want.out, want.lse, a.qkv.host, &a.s, a.shape);
            attention_backward_ref(want.dqkv, a.dout.host, a.qkv.host, &a.s, a.shape);
            attention_check_path(h, &a, &want, FLASH_WIDE, 3e-6);
            attention_check_packing(h, &a);
            case_end(h);
        }
    device_set_attention(&h->ctx, FLASH);
}

// One shape by both kernels, on the same inputs.
static void bench_attention_wide_case(Harness* h, int B, int T, int NH, int HS, Mask mask, double p) {
    int lengths[64];
    CHECK(B <= (int)COUNT_OF(lengths));
    for (int i = 0; i < B; i++) lengths[i] = T;
    case_begin(h, "attention_wide bench");
    AttentionCase a = attention_case(h, lengths, B, NH, HS, mask, p, 1.0);
    double pairs = attention_pairs(&a.s, mask);
    a.s = resident_sequences(h, a.s);
    attention_run_forward(&a);
    for (int wide = 0; wide < 2; wide++) {
        char shapes[80];
        snprintf(shapes, sizeof shapes, "B=%d T=%d NH=%d HS=%d %s p=%g%s", B, T, NH, HS,
                 mask == CAUSAL ? "CAUSAL" : "FULL", p, wide ? " flash-wide" : "");
        device_set_attention(a.ctx, wide ? FLASH_WIDE : FLASH);
        double seconds = bench_seconds(h, attention_run_backward, &a);
        bench_report(h, "attention_backward", shapes, seconds, ATTENTION_BACKWARD_FLOPS(pairs, NH, HS),
                     ATTENTION_BACKWARD_BYTES(a.s.rows, NH, HS));
    }
    device_set_attention(a.ctx, FLASH);
    case_free(h);
}

static void bench_attention_wide(Harness* h) {
    if (!HAS_DEVICE_MEMORY) return;
    bench_attention_wide_case(h, 8, 4096, 16, 128, CAUSAL, 0);
    bench_attention_wide_case(h, 2, 4096, 16, 128, FULL, 0);
    bench_attention_wide_case(h, 8, 1024, 16, 128, CAUSAL, 0);
    bench_attention_wide_case(h, 8, 1024, 16, 128, CAUSAL, 0.1);
}

#endif
