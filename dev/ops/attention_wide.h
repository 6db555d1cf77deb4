/* The backward pass of attention with --attention flash-wide: heads of 72 to 128 channels on a Hopper GPU have a kernel
 * of their own (hopper_backward_wide.cuh). Elsewhere these cases repeat those of attention.h. */
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
            attention_check(h, &a, FLASH_WIDE, 3e-6);
            case_end(h);
        }

    // Documents, whose dropout is numbered by their first row.
    static const int documents[] = {70, 130, 56, 1, 255};
    case_begin(h, "attention_wide/documents");
    AttentionCase packed = attention_case(h, documents, COUNT_OF(documents), 2, 128, CAUSAL, 0.1, 1.0);
    packed.s.is_numbered_by_row = 1;
    attention_check(h, &packed, FLASH_WIDE, 3e-6);
    case_end(h);

    int length = 150;  // as in test_attention(): scores up to a hundred
    case_begin(h, "attention_wide/large scores");
    AttentionCase large = attention_case(h, &length, 1, 2, 128, CAUSAL, 0.1, 5.0);
    attention_check(h, &large, FLASH_WIDE, 3e-4);
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

// ---------------------------------------------------------------------------------------------------------
// The backward pass by flash and flash-wide, in turn and on the same inputs

#ifdef __CUDACC__

typedef struct {
    int B, T, NH, HS;
    Mask mask;
    double p;
} AttentionWideBench;

static void bench_attention_wide_case(Harness* h, AttentionWideBench b) {
    enum { ROUNDS = 3 };
    int lengths[64];
    CHECK(b.B <= (int)COUNT_OF(lengths));
    for (int i = 0; i < b.B; i++) lengths[i] = b.T;
    case_begin(h, "attention_wide bench");
    AttentionCase a = {.shape = {.NH = b.NH,
                                 .HS = b.HS,
                                 .mask = b.mask,
                                 .dropout = dropout_make(b.p, 42, 7, 3, SITE_DROPOUT_ATTENTION, NULL)},
                       .ctx = &h->ctx};
    Sequences s = sequences_of(h, lengths, b.B, 0);
    double pairs = attention_pairs(&s, b.mask), seconds[2][ROUNDS];
    a.s = resident_sequences(h, s);
    size_t N = (size_t)s.rows, C = (size_t)(b.NH * b.HS);
    Array noise = input(h, (size_t)1 << 20, 1.0);
    a.qkv.device = (floatX*)bench_memory(h, N * 3 * C, sizeof(floatX), noise);
    a.dout.device = (floatX*)bench_memory(h, N * C, sizeof(floatX), noise);
    a.out.device = (floatX*)case_block(h, N * C * sizeof(floatX), ON_DEVICE);
    a.dqkv.device = (floatX*)case_block(h, N * 3 * C * sizeof(floatX), ON_DEVICE);
    a.lse.device_real = (real*)case_block(h, N * (size_t)b.NH * sizeof(real), ON_DEVICE);
    attention_run_forward(&a);
    for (int i = 0; i < 2 * ROUNDS; i++) {
        device_set_attention(a.ctx, i % 2 ? FLASH_WIDE : FLASH);
        seconds[i % 2][i / 2] = bench_seconds(h, attention_run_backward, &a);
    }
    device_set_attention(a.ctx, FLASH);
    double flops = ATTENTION_BACKWARD_FLOPS(pairs, b.NH, b.HS);
    printf("B=%d T=%d NH=%d HS=%d %s p=%-4g", b.B, b.T, b.NH, b.HS, b.mask == CAUSAL ? "CAUSAL" : "FULL  ", b.p);
    for (int wide = 0; wide < 2; wide++) {
        double median = bench_median(h, seconds[wide], ROUNDS);
        printf("  %s %9.1f us %6.1f TFLOP/s", wide ? "flash-wide" : "flash", 1e6 * median, 1e-12 * flops / median);
    }
    printf("  %.2f times\n", seconds[0][ROUNDS / 2] / seconds[1][ROUNDS / 2]);
    fflush(stdout);
    case_free(h);
}

static void bench_attention_wide(Harness* h) {
    static const AttentionWideBench benches[] = {
        {8, 4096, 16, 128, CAUSAL, 0}, {8, 1024, 16, 128, CAUSAL, 0},   {8, 2048, 16, 96, CAUSAL, 0},
        {2, 4096, 16, 128, FULL, 0},   {8, 1024, 16, 128, CAUSAL, 0.1},
    };
    for (size_t i = 0; i < COUNT_OF(benches); i++) bench_attention_wide_case(h, benches[i]);
}

#else

static void bench_attention_wide(Harness* h) { (void)h; }

#endif

#endif
