/* fp8_scales: test (nothing differentiates it, and it is too short to time). */
#ifndef DEV_OPS_FP8_SCALES_H
#define DEV_OPS_FP8_SCALES_H

#include "harness.h"
#include "llmc/fp8/scales.h"

// Each is one block: what the launchers change, and what the reference makes of the same statistics.
typedef struct {
    Fp8Scales device, host, got;  // got: a copy of the device's
    size_t bytes;
    Context* ctx;
} Fp8ScalesCase;

static inline size_t fp8_scales_bind(Fp8Scales* s, void* block, int count, const Fp8Format* format) {
    size_t n = (size_t)count;
    s->count = count, s->format = format;
    s->stats = (Fp8Stats*)block;
    s->recorded = (Fp8Recorded*)(s->stats + n);
    s->scale = (real*)(s->recorded + n);
    s->inverse = s->scale + n;
    s->history = (uint32_t*)(s->inverse + FP8_INVERSE_APART * n);
    return n * (sizeof *s->stats + sizeof *s->recorded + (1 + FP8_INVERSE_APART) * sizeof(real) +
                FP8_HISTORY * sizeof *s->history);
}

// E4M3 and E5M2 in turn, scales of 1, no history.
static inline Fp8ScalesCase fp8_scales_case(Harness* h, int count) {
    Fp8ScalesCase k;
    Fp8Format* format = (Fp8Format*)pinned_memory(h, (size_t)count * sizeof *format);
    for (int t = 0; t < count; t++) format[t] = t % 2 ? FP8_E5M2 : FP8_E4M3;
    k.bytes = fp8_scales_bind(&k.device, NULL, count, format), k.ctx = &h->ctx;
    fp8_scales_bind(&k.device, case_block(h, k.bytes, ON_DEVICE), count, format);
    fp8_scales_bind(&k.host, case_memory(h, k.bytes), count, format);
    fp8_scales_bind(&k.got, case_memory(h, k.bytes), count, format);
    for (int t = 0; t < count; t++) k.host.scale[t] = k.host.inverse[FP8_INVERSE_APART * t] = 1;
    return k;
}

static inline int fp8_same_stats(Fp8Stats a, Fp8Stats b) {
    return a.amax == b.amax && a.clipped == b.clipped && a.flushed == b.flushed;
}

// One step with the statistics of k->host: what is left is as the reference has it.
static inline void fp8_scales_step(Harness* h, Fp8ScalesCase* k, int64_t step) {
    const Fp8Stats none = {0, 0, 0};
    Fp8Scales host = k->host, got = k->got;
    int is_reset = 1, is_kept = 1;
    device_upload(k->ctx, k->device.stats, host.stats, k->bytes);
    fp8_scales_record(k->device, step, k->ctx);
    fp8_scales_update(k->device, k->ctx);
    device_download(k->ctx, got.stats, k->device.stats, k->bytes);
    for (int t = 0; t < host.count; t++) {
        host.history[(step % FP8_HISTORY) * host.count + t] = host.stats[t].amax;
        is_kept &= fp8_same_stats(got.recorded[t].stats, host.stats[t]) && got.recorded[t].scale == host.scale[t];
        is_reset &= fp8_same_stats(got.stats[t], none);
        host.stats[t] = none;
    }
    fp8_scales_update_ref(host);
    size_t rest = k->bytes - (size_t)((char*)host.scale - (char*)host.stats);
    expect_true(h, "scales, inverses and history", memcmp(got.scale, host.scale, rest) == 0);
    expect_true(h, "the statistics are reset", is_reset);
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
        {3.4e38, 0x1p-121}  // log2(448 / 6.8e38) = -120.2; 2^126 is the most
    };
    case_begin(h, "fp8_scales/by hand");
    Fp8ScalesCase k = fp8_scales_case(h, 1);
    for (int64_t step = 0; step < 41; step++) {
        // 3.4e38 is step 6 and counts up to step 21; from step 25 on the smallest float.
        int is_given = step < (int)COUNT_OF(STEPS);
        double want = is_given ? STEPS[step].scale : step < 22 ? 0x1p-121 : step < 40 ? 128 : 0x1p126;
        k.host.stats->amax = step >= 25 ? 1 : float_bits(is_given ? (float)STEPS[step].amax : 1) & 0x7fffffffu;
        fp8_scales_step(h, &k, step);
        char what[64];
        snprintf(what, sizeof what, "a scale of %g after step %d", want, (int)step);
        expect_true(h, what, *k.got.scale == (real)want);
    }
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
