/* target_rounding: nothing differentiates it, and it is too short to time. */
#ifndef DEV_OPS_TARGET_ROUNDING_H
#define DEV_OPS_TARGET_ROUNDING_H

#include "llmc/fp8/target_rounding.h"
#include "op.h"
#include "quantize.h"

// Losses whose gradients, up to 1 / N, are multiplied by a power of two before they are rounded.
OP_FN(target_rounding_prepare) {
    RoundedLogits* o = (RoundedLogits*)(k->own = case_memory(k->h, sizeof *o));
    int N = k->N, Vp = k->Vp;
    size_t logits = (size_t)N * (size_t)Vp;
    double scale = exp2(13 + ceil(log2(N)));
    uint8_t* bytes = (uint8_t*)pinned_memory(k->h, logits);
    real* inverse = (real*)pinned_memory(k->h, sizeof *inverse);
    int* targets = int_array(k->h, (size_t)N);
    memset(bytes, BYTES_FILL, logits);
    for (int n = 0; n < N; n++) {
        k->each.host[n] = (real)fabs((double)k->each.host[n]);
        targets[n] = n % 5 == 3 ? -1 : random_below(k->h, Vp);
        if (targets[n] >= 0)
            bytes[(size_t)n * (size_t)Vp + (size_t)targets[n]] =
                fp8_from_float((float)(expm1(-(double)k->each.host[n]) / N * scale), FP8_E5M2);
    }
    array_upload_real(k->each);
    *inverse = (real)(1 / scale);
    o->of.losses.each = k->each.device_real, o->of.losses.scale = 1.0 / N, o->of.targets = targets;
    o->rounded = bytes, o->inverse = inverse, o->Vp = Vp;
}

RUN_AND_WANT(target, rounding, target_rounding(k->dx.device, *OP_OWN(RoundedLogits), k->w.device, k->N, k->C, k->ctx),
             target_rounding_ref(k->dx.want, k->each.host, *OP_OWN(RoundedLogits), k->w.host, k->N, k->C));

// What the products of the bytes and this op add up to at the target is exact.
OP_FN(target_rounding_after) {
    const RoundedLogits* o = OP_OWN(RoundedLogits);
    int is_whole = 1, others = 0;
    for (size_t n = 0, C = (size_t)k->C; n < (size_t)k->N; n++) {
        if (o->of.targets[n] < 0) continue;
        size_t target = (size_t)o->of.targets[n], at = n * (size_t)k->Vp + target;
        double number = (double)*o->inverse * (double)fp8_to_float(o->rounded[at], FP8_E5M2);
        double left = (double)k->dx.want[n * C] - (double)k->dx.initial[n * C], weight = (double)k->w.host[target * C];
        is_whole &= fabs(number * weight + left - expm1(-(double)k->each.host[n]) / k->N * weight) <= 1e-6;
        others += fabs(left) > 1e-6;
    }
    expect_true(k->h, "it is what rounding took", is_whole && (others > 0 || k->N < 7));
}

static const Arg TARGET_ROUNDING_ARGS[] =
    ARGS(ARG(dx, "N C", IN_OUT, 1, 1e-6), ARG(each, "N", IN, 3), ARG(w, "Vp C", IN, 1));
static const int TARGET_ROUNDING_ROWS[][3] = {{1, 16, 16}, {7, 48, 80}, {33, 33, 100}, {130, 768, 272}, {0, 16, 16}};

static const Op TARGET_ROUNDING = {
    OP_OF("target_rounding", "N C Vp", TARGET_ROUNDING_ARGS, TARGET_ROUNDING_ROWS),
    .passes = {{"backward", "dx", OP_PAIR(target, rounding), NULL, target_rounding_after}},
    .prepare = target_rounding_prepare};

#endif
