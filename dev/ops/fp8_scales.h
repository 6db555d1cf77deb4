/* fp8_scales: test (nothing differentiates it, and it is too short to time). */
#ifndef DEV_OPS_FP8_SCALES_H
#define DEV_OPS_FP8_SCALES_H

#include "harness.h"
#include "llmc/fp8/scales.h"

// `device`: where the launchers run. `host`: what the reference makes of the same statistics.
typedef struct {
    Fp8Scales device, host;
    Context* ctx;
} Fp8ScalesCase;

static inline Fp8Scales fp8_scales_arrays(Harness* h, int count, const Fp8Format* format, Place place) {
    size_t n = (size_t)count;
    Fp8Scales s;
    s.count = count;
    s.format = format;
    s.stats = (Fp8Stats*)case_block(h, n * sizeof *s.stats, place);
    s.recorded = (Fp8Recorded*)case_block(h, n * sizeof *s.recorded, place);
    s.history = (uint32_t*)case_block(h, FP8_HISTORY * n * sizeof *s.history, place);
    s.scale = (real*)case_block(h, n * sizeof *s.scale, place);
    s.inverse = (real*)case_block(h, FP8_INVERSE_APART * n * sizeof *s.inverse, place);
    return s;
}

static inline void fp8_scales_upload(const Fp8ScalesCase* k) {
    size_t n = (size_t)k->host.count;
    device_upload(k->ctx, k->device.stats, k->host.stats, n * sizeof *k->host.stats);
    device_upload(k->ctx, k->device.history, k->host.history, FP8_HISTORY * n * sizeof *k->host.history);
    device_upload(k->ctx, k->device.scale, k->host.scale, n * sizeof *k->host.scale);
    device_upload(k->ctx, k->device.inverse, k->host.inverse, FP8_INVERSE_APART * n * sizeof *k->host.inverse);
    device_synchronize(k->ctx);
}

// E4M3 and E5M2 in turn, scales of 1, no history.
static inline Fp8ScalesCase fp8_scales_case(Harness* h, int count) {
    Fp8ScalesCase k;
    Fp8Format* format = (Fp8Format*)pinned_memory(h, (size_t)count * sizeof *format);
    for (int t = 0; t < count; t++) format[t] = t % 2 ? FP8_E5M2 : FP8_E4M3;
    k.device = fp8_scales_arrays(h, count, format, ON_DEVICE);
    k.host = fp8_scales_arrays(h, count, format, ON_HOST);
    k.ctx = &h->ctx;
    for (int t = 0; t < count; t++) k.host.scale[t] = k.host.inverse[FP8_INVERSE_APART * t] = 1;
    fp8_scales_upload(&k);
    return k;
}

// One step on the device with the statistics of k->host; then the scales are those of the reference.
static inline void fp8_scales_step(Harness* h, Fp8ScalesCase* k, int64_t step) {
    size_t n = (size_t)k->host.count;
    char what[64];
    real* scale = (real*)case_memory(h, (1 + FP8_INVERSE_APART) * n * sizeof *scale);
    Fp8Stats* stats = (Fp8Stats*)case_memory(h, n * sizeof *stats);
    Fp8Recorded* recorded = (Fp8Recorded*)case_memory(h, n * sizeof *recorded);
    real* before = (real*)case_memory(h, n * sizeof *before);
    device_upload(k->ctx, k->device.stats, k->host.stats, n * sizeof *stats);
    device_download(k->ctx, before, k->device.scale, n * sizeof *before);
    fp8_scales_record(k->device, step, k->ctx);
    fp8_scales_update(k->device, k->ctx);
    device_download(k->ctx, scale, k->device.scale, n * sizeof *scale);
    device_download(k->ctx, scale + n, k->device.inverse, FP8_INVERSE_APART * n * sizeof *scale);
    device_download(k->ctx, stats, k->device.stats, n * sizeof *stats);
    device_download(k->ctx, recorded, k->device.recorded, n * sizeof *recorded);
    int cleared = 1, is_kept = 1;
    for (size_t t = 0; t < n; t++) {
        k->host.history[(size_t)(step % 16) * n + t] = k->host.stats[t].amax;
        const Fp8Stats *was = &k->host.stats[t], *kept = &recorded[t].stats;
        cleared &= stats[t].amax == 0 && stats[t].clipped == 0 && stats[t].flushed == 0;
        is_kept &= kept->amax == was->amax && kept->clipped == was->clipped && kept->flushed == was->flushed;
        is_kept &= recorded[t].scale == before[t];
    }
    fp8_scales_update_ref(k->host);
    snprintf(what, sizeof what, "scales and inverses after step %lld", (long long)step);
    expect_true(h, what,
                memcmp(scale, k->host.scale, n * sizeof *scale) == 0 &&
                    memcmp(scale + n, k->host.inverse, FP8_INVERSE_APART * n * sizeof *scale) == 0);
    expect_true(h, "the statistics are reset", cleared);
    expect_true(h, "those of the step are kept, with its scale", is_kept);
}

// An E4M3 tensor's amax step by step, and the scale after it, worked out by hand.
static inline void test_fp8_scales_by_hand(Harness* h) {
    static const struct {
        double amax, scale;
    } STEPS[] = {
        {0, 1},             // nothing is known yet
        {NAN, 1},           // and still not
        {224, 1},           // 448 / 448
        {INFINITY, 1},      // does not count either
        {225, 0.5},         // just more than half of the largest number
        {7, 0.5},           // the largest counts: of the last 16 steps
        {3.4e38, 0x1p-121}  // log2(448 / 6.8e38) = -120.2
    };
    case_begin(h, "fp8_scales/by hand");
    Fp8ScalesCase k = fp8_scales_case(h, 1);
    real scale;
    for (size_t i = 0; i < COUNT_OF(STEPS); i++) {
        char what[64];
        k.host.stats->amax = float_bits((float)STEPS[i].amax) & 0x7fffffffu;
        fp8_scales_step(h, &k, (int64_t)i);
        device_download(k.ctx, &scale, k.device.scale, sizeof scale);
        snprintf(what, sizeof what, "amax %g makes the scale %g", STEPS[i].amax, STEPS[i].scale);
        expect_true(h, what, scale == (real)STEPS[i].scale);
    }
    for (int64_t step = COUNT_OF(STEPS); step <= 24; step++) {
        k.host.stats->amax = float_bits(1);
        fp8_scales_step(h, &k, step);
        device_download(k.ctx, &scale, k.device.scale, sizeof scale);
        // 3.4e38 was step 6 and counts up to step 21.
        expect_true(h, "a step counts for 16", scale == (real)(step < 22 ? 0x1p-121 : 128));
        expect_true(h, "the scale leaves a factor of 2", step < 22 || (scale * 2 <= 448 && scale * 4 > 448));
    }
    k.host.stats->amax = 1;  // the smallest float
    for (int64_t step = 25; step < 41; step++) fp8_scales_step(h, &k, step);
    device_download(k.ctx, &scale, k.device.scale, sizeof scale);
    expect_true(h, "2^126 at most", scale == (real)0x1p126);
    case_end(h);
}

static inline void test_fp8_scales(Harness* h) {
    static const int COUNTS[] = {1, 7, 128, 300};
    test_fp8_scales_by_hand(h);
    for (size_t c = 0; c < COUNT_OF(COUNTS); c++) {
        int count = COUNTS[c];
        case_begin(h, "fp8_scales/n=%d", count);
        Fp8ScalesCase k = fp8_scales_case(h, count);
        for (int64_t step = 0; step < 40; step++) {
            for (int t = 0; t < count; t++) {
                // Of many sizes; near 1.75 times a power of two, where the scale changes; and what does not count.
                double size = t % 3 ? fabs(rng_normal(h->key, h->drawn++)) : 1.75 + ldexp(random_below(h, 5) - 2, -22);
                float amax = (float)ldexp(size, random_below(h, 250) - 125);
                k.host.stats[t].amax = random_below(h, 10) ? float_bits(amax) : random_below(h, 2) ? 0x7fc00000u : 0;
                k.host.stats[t].clipped = (uint64_t)t;
            }
            fp8_scales_step(h, &k, step);
        }
        case_end(h);
    }
}

#endif
