/* target_rounding: test (nothing differentiates it, and it is too short to time). */
#ifndef DEV_OPS_TARGET_ROUNDING_H
#define DEV_OPS_TARGET_ROUNDING_H

#include "harness.h"
#include "llmc/ops/classifier/target_rounding.h"

typedef struct {
    Array dx, dlogits, w;
    RoundedLogits rounded;
    int N, C;
    Context* ctx;
} TargetRoundingCase;

// Gradients up to 1 / N, which are multiplied by a power of two before they are rounded.
static inline TargetRoundingCase* target_rounding_case(Harness* h, int N, int C, int Vp) {
    TargetRoundingCase* k = (TargetRoundingCase*)case_memory(h, sizeof *k);
    size_t logits = (size_t)N * (size_t)Vp;
    double scale = exp2(13 + ceil(log2(N)));
    uint8_t* bytes = (uint8_t*)pinned_memory(h, logits);
    real* inverse = (real*)pinned_memory(h, sizeof *inverse);
    int* targets = int_array(h, (size_t)N);
    k->N = N, k->C = C, k->ctx = &h->ctx;
    k->dx = output(h, (size_t)N * (size_t)C, ADD);
    k->dlogits = input(h, logits, 1.0 / N), k->w = input(h, (size_t)Vp * (size_t)C, 1.0);
    for (size_t i = 0; i < logits; i++) bytes[i] = fp8_from_float((float)(k->dlogits.host[i] * scale), FP8_E5M2);
    for (int n = 0; n < N; n++) targets[n] = n % 5 == 3 ? -1 : random_below(h, Vp);
    *inverse = (real)(1 / scale);
    k->rounded.dlogits = k->dlogits.device, k->rounded.rounded = bytes;
    k->rounded.inverse = inverse, k->rounded.targets = targets, k->rounded.Vp = Vp;
    return k;
}

static inline void target_rounding_launch(void* state) {
    TargetRoundingCase* k = (TargetRoundingCase*)state;
    target_rounding(k->dx.device, k->rounded, k->w.device, k->N, k->C, k->ctx);
}

static inline void test_target_rounding(Harness* h) {
    static const int SIZES[][3] = {{1, 16, 16}, {7, 48, 80}, {33, 33, 100}, {130, 768, 272}, {0, 16, 16}};
    for (size_t i = 0; i < COUNT_OF(SIZES); i++) {
        int N = SIZES[i][0], C = SIZES[i][1], Vp = SIZES[i][2];
        case_begin(h, "target_rounding N=%d C=%d Vp=%d", N, C, Vp);
        TargetRoundingCase* k = target_rounding_case(h, N, C, Vp);
        real* dx = copy_of(h, k->dx);
        target_rounding_ref(dx, k->dlogits.host, k->rounded, k->w.host, N, C);
        expect_same_for_any_threads(h, "backward", target_rounding_launch, k, &k->dx, 1);
        expect_close(h, "dx", k->dx, dx, tolerance(1e-6));
        // What the products of the bytes and this op add up to at the target is exact.
        int is_whole = 1, others = 0;
        for (size_t n = 0; n < (size_t)N; n++) {
            if (k->rounded.targets[n] < 0) continue;
            size_t target = (size_t)k->rounded.targets[n], at = n * (size_t)Vp + target;
            double number = (double)*k->rounded.inverse * (double)fp8_to_float(k->rounded.rounded[at], FP8_E5M2);
            double left = (double)dx[n * (size_t)C] - (double)k->dx.initial[n * (size_t)C];
            double weight = (double)k->w.host[target * (size_t)C], want = (double)k->dlogits.host[at] * weight;
            is_whole &= fabs(number * weight + left - want) <= 1e-6;
            others += fabs(left) > 1e-6;
        }
        expect_true(h, "it is what rounding took", is_whole && (others > 0 || N < 7));
        case_end(h);
    }
}

#endif
