/* target_rounding: test (nothing differentiates it, and it is too short to time). */
#ifndef DEV_OPS_TARGET_ROUNDING_H
#define DEV_OPS_TARGET_ROUNDING_H

#include "harness.h"
#include "llmc/fp8/target_rounding.h"
#include "quantize.h"

typedef struct {
    Array dx, each, w;
    RoundedLogits rounded;
    int N, C;
    Context* ctx;
} TargetRoundingCase;

// Losses whose gradients, up to 1 / N, are multiplied by a power of two before they are rounded.
static inline TargetRoundingCase* target_rounding_case(Harness* h, int N, int C, int Vp) {
    TargetRoundingCase* k = (TargetRoundingCase*)case_memory(h, sizeof *k);
    size_t logits = (size_t)N * (size_t)Vp;
    double scale = exp2(13 + ceil(log2(N)));
    uint8_t* bytes = (uint8_t*)pinned_memory(h, logits);
    real* inverse = (real*)pinned_memory(h, sizeof *inverse);
    int* targets = int_array(h, (size_t)N);
    k->N = N, k->C = C, k->ctx = &h->ctx;
    k->dx = output(h, (size_t)N * (size_t)C, ADD);
    k->each = input(h, (size_t)N, 3), k->w = input(h, (size_t)Vp * (size_t)C, 1.0);
    memset(bytes, QUANTIZE_FILL, logits);
    for (int n = 0; n < N; n++) {
        k->each.host[n] = (real)fabs((double)k->each.host[n]);
        targets[n] = n % 5 == 3 ? -1 : random_below(h, Vp);
        if (targets[n] >= 0)
            bytes[(size_t)n * (size_t)Vp + (size_t)targets[n]] =
                fp8_from_float((float)(expm1(-(double)k->each.host[n]) / N * scale), FP8_E5M2);
    }
    array_upload_real(k->each);
    *inverse = (real)(1 / scale);
    k->rounded.of.losses.each = k->each.device_real, k->rounded.of.losses.scale = 1.0 / N;
    k->rounded.of.targets = targets, k->rounded.of.loss_scale = NULL;
    k->rounded.rounded = bytes, k->rounded.inverse = inverse, k->rounded.Vp = Vp;
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
        target_rounding_ref(dx, k->each.host, k->rounded, k->w.host, N, C);
        expect_same_for_any_threads(h, "backward", target_rounding_launch, k, &k->dx, 1);
        expect_close(h, "dx", k->dx, dx, tolerance(1e-6));
        // What the products of the bytes and this op add up to at the target is exact.
        int is_whole = 1, others = 0;
        for (size_t n = 0; n < (size_t)N; n++) {
            if (k->rounded.of.targets[n] < 0) continue;
            size_t target = (size_t)k->rounded.of.targets[n], at = n * (size_t)Vp + target;
            double number = (double)*k->rounded.inverse * (double)fp8_to_float(k->rounded.rounded[at], FP8_E5M2);
            double left = (double)dx[n * (size_t)C] - (double)k->dx.initial[n * (size_t)C];
            double weight = (double)k->w.host[target * (size_t)C], want = expm1(-(double)k->each.host[n]) / N * weight;
            is_whole &= fabs(number * weight + left - want) <= 1e-6;
            others += fabs(left) > 1e-6;
        }
        expect_true(h, "it is what rounding took", is_whole && (others > 0 || N < 7));
        case_end(h);
    }
}

#endif
