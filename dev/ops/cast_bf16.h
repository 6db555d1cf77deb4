/* cast_bf16: test and bench (nothing differentiates it). */
#ifndef DEV_OPS_CAST_BF16_H
#define DEV_OPS_CAST_BF16_H

#include "harness.h"
#include "llmc/ops/cast_bf16.h"

typedef struct {
    Array x;
    Bf16* y;  // in device memory
    Mode mode;
    Context* ctx;
} CastBf16Case;

static inline CastBf16Case* cast_bf16_case(Harness* h, Array x, Mode mode) {
    CastBf16Case* k = (CastBf16Case*)case_memory(h, sizeof *k);
    k->x = x, k->mode = mode, k->ctx = &h->ctx;
    k->y = (Bf16*)case_block(h, x.n * sizeof *k->y, ON_DEVICE);
    return k;
}

static inline void cast_bf16_run_forward(void* state) {
    CastBf16Case* k = (CastBf16Case*)state;
    cast_to_bf16(k->y, k->x.device_real, k->x.n, k->ctx);
}

static inline void cast_bf16_run_back(void* state) {
    CastBf16Case* k = (CastBf16Case*)state;
    cast_from_bf16(k->x.device_real, k->y, k->x.n, k->mode, k->ctx);
}

// What the forward pass makes of x.
static inline uint16_t* cast_bf16_result(Harness* h, CastBf16Case* k) {
    size_t bytes = k->x.n * sizeof(uint16_t);
    uint16_t* y = (uint16_t*)case_memory(h, bytes);
    memset(y, 0xa5, bytes);
    device_upload(k->ctx, k->y, y, bytes);
    device_synchronize(k->ctx);
    cast_bf16_run_forward(k);
    device_download(k->ctx, y, k->y, bytes);
    return y;
}

static inline void test_cast_bf16(Harness* h) {
    static const size_t SIZES[] = {0, 4, 128, 1020, 1024, 1028, 100004};
    for (size_t s = 0; s < COUNT_OF(SIZES); s++) {
        size_t n = SIZES[s], wrong = 0, farther = 0;
        case_begin(h, "cast_bf16/forward n=%zu", n);
        Array x = input(h, n, 1);
        for (size_t i = 0; i < n; i++) {
            x.host[i] *= (real)ldexp(1 + 1e-3 * (double)(i % 7), (int)(i % 61) - 30);  // of many sizes, no bf16
            if (i % 5 == 0) x.host[i] = (real)ldexp(256 + (double)(i % 256), -8) + (real)ldexp(1, -8);  // some are ties
        }
        array_upload_real(x);
        CastBf16Case* k = cast_bf16_case(h, x, SET);
        uint16_t *y = cast_bf16_result(h, k), *want = (uint16_t*)case_memory(h, n * sizeof *want);
        cast_to_bf16_ref(want, x.host, n);
        for (size_t i = 0; i < n; i++) {
            double error = fabs((double)bf16_value(y[i]) - (double)(float)x.host[i]);
            wrong += y[i] != want[i];
            for (int side = -1; side <= 1; side += 2) {
                double other = fabs((double)bf16_value((uint16_t)(y[i] + side)) - (double)(float)x.host[i]);
                farther += !(error < other || (error == other && y[i] % 2 == 0));
            }
        }
        expect_true(h, "the reference's bits", wrong == 0);
        expect_true(h, "no neighbour is nearer, and of two the even one is taken", farther == 0);
        case_end(h);

        for (int mode = SET; mode <= ADD; mode++) {
            case_begin(h, "cast_bf16/back n=%zu %s", n, mode_name((Mode)mode));
            k = cast_bf16_case(h, output(h, n, (Mode)mode), (Mode)mode);
            y = (uint16_t*)case_memory(h, n * sizeof *y);
            for (size_t i = 0; i < n; i++) y[i] = bf16_bits((real)rng_normal(h->key, h->drawn++));
            device_upload(k->ctx, k->y, y, n * sizeof *y);
            device_synchronize(k->ctx);
            real* back = copy_of(h, k->x);
            cast_from_bf16_ref(back, y, n, (Mode)mode);
            expect_same_for_any_threads(h, "back", cast_bf16_run_back, k, &k->x, 1);
            expect_equal(h, "x", k->x, back);
            case_end(h);
        }
    }

    case_begin(h, "cast_bf16/forward and back, worked out by hand");
    static const struct {
        double x;
        uint16_t y;
    } HAND[] = {{0.0, 0},
                {-0.0, 0x8000},
                {1, 0x3f80},
                {-2.5, 0xc020},
                {1 + 1.0 / 256, 0x3f80},                  // a tie, down to the even one
                {1 + 3.0 / 256, 0x3f82},                  // a tie, up
                {1 + 1.0 / 256 + 1.0 / 1048576, 0x3f81},  // a little more than a tie
                {FLT_MAX, 0x7f80},                        // beyond the largest
                {3.3895313892515355e38, 0x7f7f},          // the largest
                {INFINITY, 0x7f80},
                {-INFINITY, 0xff80},
                {1.1754943508222875e-38, 0x0080},  // the smallest normal number
                {9.183549615799121e-41, 0x0001},   // 2^-133, the smallest of all
                {4.591774807899561e-41, 0},        // 2^-134, a tie
                {NAN, 0},
                {NAN, 0}};
    CastBf16Case* k = cast_bf16_case(h, input(h, COUNT_OF(HAND), 1), SET);
    for (size_t i = 0; i < COUNT_OF(HAND); i++) k->x.host[i] = (real)HAND[i].x;
    uint32_t ones = 0x7fffffffu;  // a NaN that an addition carries over would make -0
    float nan_of_ones;
    memcpy(&nan_of_ones, &ones, sizeof ones);
    k->x.host[COUNT_OF(HAND) - 1] = (real)nan_of_ones;
    array_upload_real(k->x);
    uint16_t* y = cast_bf16_result(h, k);
    cast_bf16_run_back(k);
    array_download(k->x);
    for (size_t i = 0; i < COUNT_OF(HAND); i++) {
        char what[64];
        snprintf(what, sizeof what, "%.9g is %#06x and comes back", HAND[i].x, HAND[i].y);
        int nan = HAND[i].x != HAND[i].x;
        real back = bf16_value(HAND[i].y);
        if (nan) expect_true(h, "NaN stays NaN", (y[i] & 0x7fff) > 0x7f80 && k->x.host[i] != k->x.host[i]);
        else expect_true(h, what, y[i] == HAND[i].y && memcmp(&k->x.host[i], &back, sizeof back) == 0);
    }
    case_end(h);
}

static inline void bench_cast_bf16(Harness* h) {
    size_t n = (size_t)(HAS_DEVICE_MEMORY ? 128 : 16) << 20;
    char shapes[64];
    snprintf(shapes, sizeof shapes, "n=%zu", n);
    CastBf16Case* k = cast_bf16_case(h, input(h, n, 1), SET);
    bench_report(h, "cast_to_bf16", shapes, bench_seconds(h, cast_bf16_run_forward, k), 0, CAST_BF16_FORWARD_BYTES(n));
    bench_report(h, "cast_from_bf16 SET", shapes, bench_seconds(h, cast_bf16_run_back, k), CAST_BF16_BACK_FLOPS(n, SET),
                 CAST_BF16_BACK_BYTES(n, SET));
    k->mode = ADD;
    bench_report(h, "cast_from_bf16 ADD", shapes, bench_seconds(h, cast_bf16_run_back, k), CAST_BF16_BACK_FLOPS(n, ADD),
                 CAST_BF16_BACK_BYTES(n, ADD));
}

#endif
