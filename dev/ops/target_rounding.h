/* target_rounding: nothing differentiates it, and it is too short to time. */
#ifndef DEV_OPS_TARGET_ROUNDING_H
#define DEV_OPS_TARGET_ROUNDING_H

#include "llmc/fp8/target_rounding.h"
#include "op.h"
#include "quantize.h"

typedef struct {
    OpCase z;
    Array dx, each, w;
    RoundedLogits rounded;
} TargetRoundingCase;

// Losses whose gradients, up to 1 / N, are multiplied by a power of two before they are rounded.
static inline void target_rounding_prepare(void* state) {
    TargetRoundingCase* k = (TargetRoundingCase*)state;
    int N = k->z.N, Vp = k->z.Vp;
    size_t logits = (size_t)N * (size_t)Vp;
    double scale = exp2(13 + ceil(log2(N)));
    uint8_t* bytes = (uint8_t*)pinned_memory(k->z.h, logits);
    real* inverse = (real*)pinned_memory(k->z.h, sizeof *inverse);
    int* targets = int_array(k->z.h, (size_t)N);
    memset(bytes, QUANTIZE_FILL, logits);
    for (int n = 0; n < N; n++) {
        k->each.host[n] = (real)fabs((double)k->each.host[n]);
        targets[n] = n % 5 == 3 ? -1 : random_below(k->z.h, Vp);
        if (targets[n] >= 0)
            bytes[(size_t)n * (size_t)Vp + (size_t)targets[n]] =
                fp8_from_float((float)(expm1(-(double)k->each.host[n]) / N * scale), FP8_E5M2);
    }
    array_upload_real(k->each);
    *inverse = (real)(1 / scale);
    k->rounded.of.losses.each = k->each.device_real, k->rounded.of.losses.scale = 1.0 / N;
    k->rounded.of.targets = targets, k->rounded.of.loss_scale = NULL;
    k->rounded.rounded = bytes, k->rounded.inverse = inverse, k->rounded.Vp = Vp;
}

static inline void target_rounding_launch(void* state) {
    TargetRoundingCase* k = (TargetRoundingCase*)state;
    target_rounding(k->dx.device, k->rounded, k->w.device, k->z.N, k->z.C, k->z.ctx);
}

static inline void target_rounding_want(void* state) {
    TargetRoundingCase* k = (TargetRoundingCase*)state;
    target_rounding_ref(k->dx.want, k->each.host, k->rounded, k->w.host, k->z.N, k->z.C);
}

// What the products of the bytes and this op add up to at the target is exact.
static inline void target_rounding_after(void* state) {
    TargetRoundingCase* k = (TargetRoundingCase*)state;
    int is_whole = 1, others = 0;
    for (size_t n = 0, C = (size_t)k->z.C; n < (size_t)k->z.N; n++) {
        if (k->rounded.of.targets[n] < 0) continue;
        size_t target = (size_t)k->rounded.of.targets[n], at = n * (size_t)k->z.Vp + target;
        double number = (double)*k->rounded.inverse * (double)fp8_to_float(k->rounded.rounded[at], FP8_E5M2);
        double left = (double)k->dx.want[n * C] - (double)k->dx.initial[n * C], weight = (double)k->w.host[target * C];
        is_whole &= fabs(number * weight + left - expm1(-(double)k->each.host[n]) / k->z.N * weight) <= 1e-6;
        others += fabs(left) > 1e-6;
    }
    expect_true(k->z.h, "it is what rounding took", is_whole && (others > 0 || k->z.N < 7));
}

static const Arg TARGET_ROUNDING_ARGS[] = {{"dx", offsetof(TargetRoundingCase, dx), "N C", IN_OUT, 1, 1e-6},
                                           {"each", offsetof(TargetRoundingCase, each), "N", IN, 3, 0},
                                           {"w", offsetof(TargetRoundingCase, w), "Vp C", IN, 1, 0},
                                           {NULL}};
static const int TARGET_ROUNDING_ROWS[][3] = {{1, 16, 16}, {7, 48, 80}, {33, 33, 100}, {130, 768, 272}, {0, 16, 16}};

static const Op TARGET_ROUNDING = {
    .name = "target_rounding",
    .bytes = sizeof(TargetRoundingCase),
    .sizes = "N C Vp",
    .args = TARGET_ROUNDING_ARGS,
    .passes = {{"backward", "dx", target_rounding_launch, target_rounding_want, NULL, target_rounding_after}},
    .prepare = target_rounding_prepare,
    .rows = SIZE_ROWS(TARGET_ROUNDING_ROWS),
};

#endif
