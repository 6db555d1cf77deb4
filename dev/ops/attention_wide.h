/* The backward pass of attention for heads of 72 to 128 channels, which on a Hopper GPU have a kernel of their own
 * (hopper_backward_wide.cuh). Elsewhere these cases repeat those of attention.h. */
#ifndef DEV_OPS_ATTENTION_WIDE_H
#define DEV_OPS_ATTENTION_WIDE_H

#include "attention.h"

static const AttentionSizes ATTENTION_WIDE_SIZES[] = {
    {{1}, 1, 1, 128, 0},
    {{128, 64}, 2, 2, 72, 0},   // one tile of keys: no sums in memory
    {{300, 65}, 2, 1, 128, 0},  // several tiles of keys, the last with few rows
    {{129, 1, 257}, 3, 2, 80, 0.1},
    {{385}, 1, 1, 96, 0.5},
    {{192, 127}, 2, 3, 112, 0},
    {{0, 130, 63}, 3, 3, 128, 0.1},
    {{200}, 1, 5, 104, 0},
    {{77, 64}, 2, 1, 64, 0.1},  // the kernels of other head sizes
    {{77, 64}, 2, 1, 136, 0},
#if defined(__CUDACC__) && !defined(DEV_EMULATOR_EMULATOR_H)  // tiles of many blocks, which wait for each other
    {{1100}, 1, 3, 128, 0},
    {{640, 900}, 2, 4, 128, 0},
    {{900, 640}, 2, 4, 112, 0.1},
#endif
};

#if defined(__CUDACC__) && !defined(DEV_EMULATOR_EMULATOR_H)

// Blocks that wait for each other do so in another order in every run; the bits stay.
static void test_attention_wide_repeated(Harness* h, Mask mask, double p) {
    enum { RUNS = 20 };
    static const int lengths[] = {2048, 1500};
    case_begin(h, "attention_wide/repeated %s p=%g", mask == CAUSAL ? "CAUSAL" : "FULL", p);
    AttentionCase a = attention_case(h, lengths, COUNT_OF(lengths), 8, 128, mask, p, 1.0);
    attention_run_forward(&a);
    attention_run_backward(&a);
    real* first = copy_of(h, a.dqkv);
    for (int run = 1; run < RUNS; run++) {
        array_restore(a.dqkv);
        attention_run_backward(&a);
        array_download(a.dqkv);
        expect_equal(h, "dqkv, run again", a.dqkv, first);
    }
    case_end(h);
}

#endif

static void test_attention_wide(Harness* h) {
    for (size_t i = 0; i < COUNT_OF(ATTENTION_WIDE_SIZES); i++)
        for (int mask = CAUSAL; mask <= FULL; mask++) {
            AttentionCase a = attention_case_of(h, "wide", ATTENTION_WIDE_SIZES[i], (Mask)mask);
            attention_check(h, &a, FLASH, 3e-6);
            case_end(h);
        }

    // Documents, whose dropout is numbered by their first row.
    static const int documents[] = {70, 130, 56, 1, 255};
    case_begin(h, "attention_wide/documents");
    AttentionCase packed = attention_case(h, documents, COUNT_OF(documents), 2, 128, CAUSAL, 0.1, 1.0);
    packed.s.is_numbered_by_row = 1;
    attention_check(h, &packed, FLASH, 3e-6);
    case_end(h);

    int length = 150;  // as in test_attention(): scores up to a hundred
    case_begin(h, "attention_wide/large scores");
    AttentionCase large = attention_case(h, &length, 1, 2, 128, CAUSAL, 0.1, 5.0);
    attention_check(h, &large, FLASH, 3e-4);
    case_end(h);

    test_attention_wide_scratch(h);
#ifdef ATTENTION_FLASH
    if (HOPPER_BUILD && h->ctx.capability == 90) {
        AttentionShape shape = {.NH = 1, .HS = 72, .mask = CAUSAL};
        int kernel = 1;
        case_begin(h, "attention_wide/head sizes of the kernel");
        for (; shape.HS <= 128; shape.HS += 8) kernel &= hopper_wide_supports(shape, &h->ctx);
        expect_true(h, "72 to 128", kernel && !hopper_wide_supports(shape, &h->ctx));
        case_end(h);
    }
#endif
#if defined(__CUDACC__) && !defined(DEV_EMULATOR_EMULATOR_H)
    test_attention_wide_repeated(h, CAUSAL, 0);
    test_attention_wide_repeated(h, FULL, 0);
    test_attention_wide_repeated(h, CAUSAL, 0.1);
#endif
    device_set_attention(&h->ctx, FLASH);
}

#endif
