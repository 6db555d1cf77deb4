/* quantize: test and bench (nothing differentiates it). */
#ifndef DEV_OPS_QUANTIZE_H
#define DEV_OPS_QUANTIZE_H

#include "harness.h"
#include "llmc/fp8/quantize.h"
#include "llmc/ops/classifier/classifier.h"

enum { QUANTIZE_FILL = 0xa5 };  // what outputs hold before

typedef struct {
    Array x;
    real *center, *centered;  // NULL: x is quantized
    int N, C;
    QuantizeOutput out;   // in device memory
    QuantizeOutput want;  // of the reference, in the host's memory
    Fp8Stats before;
    Context* ctx;
} QuantizeCase;

static inline const char* fp8_name(Fp8Format format) { return format == FP8_E4M3 ? "E4M3" : "E5M2"; }

// Both outputs and the statistics, wanted or not, so that what must not be written is seen too.
static inline QuantizeCase* quantize_case(Harness* h, int N, int C, double size, real scale, Fp8Format format) {
    QuantizeCase* k = (QuantizeCase*)case_memory(h, sizeof *k);
    size_t n = (size_t)N * (size_t)C, transposed = quantize_rows(N) * (size_t)C;
    real* host_scale = (real*)case_memory(h, sizeof *host_scale);
    Fp8Stats before = {7, 9, float_bits(0.25f * (float)size)};  // ADD: they grow
    *host_scale = scale;
    k->N = N, k->C = C, k->ctx = &h->ctx, k->before = before;
    k->x = input(h, n, size);
    k->center = k->centered = NULL;
    k->out.scale = resident_real(h, scale), k->want.scale = host_scale;
    k->out.format = k->want.format = format;
    k->out.y = (uint8_t*)case_block(h, n, ON_DEVICE);
    k->out.yt = (uint8_t*)case_block(h, transposed, ON_DEVICE);
    k->out.stats = (Fp8Stats*)case_block(h, sizeof before, ON_DEVICE);
    k->want.y = (uint8_t*)case_memory(h, n);
    k->want.yt = (uint8_t*)case_memory(h, transposed);
    k->want.stats = (Fp8Stats*)case_memory(h, sizeof before);
    return k;
}

static inline void quantize_run_case(void* state) {
    QuantizeCase* k = (QuantizeCase*)state;
    QuantizeInput in = k->center ? quantize_centered(k->x.device, k->center) : quantize_plain(k->x.device);
    quantize(k->out, in, k->N, k->C, k->ctx);
}

static inline int same_bytes(Harness* h, const uint8_t* device, const uint8_t* want, size_t n) {
    uint8_t* got = (uint8_t*)case_memory(h, n);
    device_download(&h->ctx, got, device, n);
    return memcmp(got, want, n) == 0;
}

// Equal; of an amax that is NaN the payload is not looked at.
static inline int same_stats(Fp8Stats a, Fp8Stats b) {
    int same_amax = a.amax == b.amax || (a.amax > 0x7f800000u && b.amax > 0x7f800000u);
    return same_amax && a.clipped == b.clipped && a.flushed == b.flushed;
}

// The launcher against the reference, for any number of threads. `y`, `yt`, `stats`: what is wanted of it.
static inline void quantize_compare(Harness* h, QuantizeCase* k, int y, int yt, int stats) {
    size_t n = (size_t)k->N * (size_t)k->C, transposed = quantize_rows(k->N) * (size_t)k->C;
    QuantizeOutput all = k->out, want = k->want;
    uint8_t* fill = (uint8_t*)case_memory(h, transposed);
    memset(fill, QUANTIZE_FILL, transposed);
    memset(k->want.y, QUANTIZE_FILL, n);
    memset(k->want.yt, QUANTIZE_FILL, transposed);
    *k->want.stats = k->before;
    if (!y) k->out.y = want.y = NULL;
    if (!yt) k->out.yt = want.yt = NULL;
    if (!stats) k->out.stats = want.stats = NULL;
    quantize_ref(want, k->center ? k->centered : k->x.host, k->N, k->C);
    for (int threads = 1; threads <= 4; threads++) {
        device_upload(&h->ctx, all.y, fill, n);
        device_upload(&h->ctx, all.yt, fill, transposed);
        device_upload(&h->ctx, all.stats, &k->before, sizeof k->before);
        device_synchronize(&h->ctx);
        int usual = device_threads();
        device_set_threads(threads);
        quantize_run_case(k);
        device_set_threads(usual);
        Fp8Stats got;
        device_download(&h->ctx, &got, all.stats, sizeof got);
        expect_true(h, "y has the reference's bytes", same_bytes(h, all.y, k->want.y, n));
        expect_true(h, "yt has the reference's bytes", same_bytes(h, all.yt, k->want.yt, transposed));
        expect_true(h, "amax and the counts are the reference's", same_stats(got, *k->want.stats));
    }
    k->out = all;
}

// Every number of a 16-bit floatX, NaN of both signs included; of a wider one, every number of bf16.
static inline void quantize_all_values(QuantizeCase* k) {
    uint16_t* bits = (uint16_t*)xmalloc(65536 * sizeof *bits);
    for (uint32_t i = 0; i < 65536; i++) {
        uint32_t wide = i << 16;
        float value;
        bits[i] = (uint16_t)i;
        memcpy(&value, &wide, sizeof value);
#if defined(__CUDACC__) && defined(PRECISION_FP16)
        __half half;
        memcpy((void*)&half, &bits[i], sizeof half);
        value = __half2float(half);
#endif
        k->x.host[i] = (real)value;
    }
    array_upload_real(k->x);
    // A NaN keeps its sign only as bits.
    if (sizeof(floatX) == sizeof *bits) device_upload(k->ctx, k->x.device, bits, 65536 * sizeof *bits);
    else if (HAS_DEVICE_MEMORY) device_upload(k->ctx, k->x.device, k->x.host, 65536 * sizeof(floatX));
    device_synchronize(k->ctx);
    free(bits);
}

static inline void test_quantize_values(Harness* h) {
    static const double SCALES[] = {1.0 / 1048576, 1.0 / 64, 1, 32, 16384, 1.329227995784916e36};  // the last: 2^120
    for (int format = FP8_E4M3; format <= FP8_E5M2; format++)
        for (size_t s = 0; s < COUNT_OF(SCALES); s++) {
            case_begin(h, "quantize/every 16-bit number %s scale=%g", fp8_name((Fp8Format)format), SCALES[s]);
            QuantizeCase* k = quantize_case(h, 256, 256, 1, (real)SCALES[s], (Fp8Format)format);
            quantize_all_values(k);
            quantize_compare(h, k, 1, 1, 1);
            case_end(h);
        }
}

// Both conversions: byte by byte there and back, no neighbour nearer, and bytes worked out by hand.
static inline void test_fp8_numbers(Harness* h) {
    static const struct {
        double x;
        uint8_t e4m3, e5m2;
    } HAND[] = {{0.0, 0, 0},
                {-0.0, 0x80, 0x80},
                {1, 0x38, 0x3c},
                {-1.5, 0xbc, 0xbe},
                {1.0625, 0x38, 0x3c},  // in E4M3 a tie, down to the even one
                {1.1875, 0x3a, 0x3d},  // in E4M3 a tie, up
                {1.125, 0x39, 0x3c},   // in E5M2 a tie, down
                {448, 0x7e, 0x5f},     // the largest of E4M3
                {449, 0x7e, 0x5f},     // more than the largest
                {57344, 0x7e, 0x7b},   // the largest of E5M2
                {-1e30, 0xfe, 0xfb},   // far more
                {INFINITY, 0x7e, 0x7b},
                {-INFINITY, 0xfe, 0xfb},
                {0.015625, 0x08, 0x24},        // 2^-6, the smallest normal number of E4M3
                {0.001953125, 0x01, 0x18},     // 2^-9, the smallest of E4M3
                {0.0009765625, 0, 0x14},       // 2^-10, a tie
                {0.0029296875, 0x02, 0x1a},    // 1.5 times 2^-9, a tie
                {6.103515625e-05, 0, 0x04},    // 2^-14, the smallest normal number of E5M2
                {1.52587890625e-05, 0, 0x01},  // 2^-16, the smallest of E5M2
                {7.62939453125e-06, 0, 0},     // 2^-17, a tie
                {-7.6293954e-06, 0x80, 0x81},  // a little more
                {NAN, 0x7f, 0x7f},
                {-NAN, 0x7f, 0x7f}};
    for (int f = FP8_E4M3; f <= FP8_E5M2; f++) {
        Fp8Format format = (Fp8Format)f;
        int back = 0, farther = 0, top = format == FP8_E4M3 ? 0x7e : 0x7b;
        case_begin(h, "quantize/numbers of %s", fp8_name(format));
        for (int byte = 0; byte < 256; byte++) {
            float x = fp8_to_float((uint8_t)byte, format);
            int finite = (byte & 0x7f) <= top;
            back += finite ? fp8_from_float_ref(x, format) != byte || fp8_from_float(x, format) != byte : !(x - x != 0);
        }
        for (int i = 0; i < 100000; i++) {
            float x = (float)ldexp(rng_normal(h->key, (uint64_t)i), i % 40 - 24);
            int byte = fp8_from_float_ref(x, format), size = byte & 0x7f;
            double error = fabs((double)fp8_to_float((uint8_t)byte, format) - (double)x);
            back += fp8_from_float(x, format) != byte;
            for (int side = -1; side <= 1; side += 2) {
                if (size + side < 0 || size + side > top) continue;
                double other = fabs((double)fp8_to_float((uint8_t)(byte + side), format) - (double)x);
                farther += !(error < other || (error == other && byte % 2 == 0));
            }
        }
        expect_true(h, "every byte comes back, and both conversions agree", back == 0);
        expect_true(h, "no neighbour is nearer, and of two the even one is taken", farther == 0);
        for (size_t i = 0; i < COUNT_OF(HAND); i++) {
            char what[64];
            uint8_t want = format == FP8_E4M3 ? HAND[i].e4m3 : HAND[i].e5m2;
            snprintf(what, sizeof what, "%.9g is %#04x", HAND[i].x, want);
            expect_true(h, what, fp8_from_float_ref((float)HAND[i].x, format) == want);
            expect_true(h, what, fp8_from_float((float)HAND[i].x, format) == want);
        }
        case_end(h);
    }
}

// From now on the case quantizes x less a number for each column.
static inline void quantize_center(Harness* h, QuantizeCase* k) {
    size_t n = (size_t)k->N * (size_t)k->C, C = (size_t)k->C;
    k->center = (real*)pinned_memory(h, C * sizeof *k->center);
    k->centered = (real*)case_memory(h, n * sizeof *k->centered);
    for (size_t c = 0; c < C; c++) k->center[c] = (real)((double)c / (double)C - 0.3);
    for (size_t i = 0; i < n; i++) k->centered[i] = k->x.host[i] - k->center[i % C];
}

// The bias of a matmul with the rounded tensor as its weight; without and with another bias, twice the same bits.
static inline void test_quantize_bias(Harness* h) {
    static const int SIZES[][2] = {{1, 16}, {33, 48}, {128, 128}, {130, 272}, {300, 2064}};
    for (size_t i = 0; i < COUNT_OF(SIZES); i++)
        for (int has_b = 0; has_b < 2; has_b++) {
            int N = SIZES[i][0], C = SIZES[i][1];
            case_begin(h, "quantize/bias N=%d C=%d%s", N, C, has_b ? " added" : "");
            QuantizeCase* k = quantize_case(h, N, C, 1, 256, FP8_E4M3);
            Array means = input(h, 2 * (size_t)C, 1), b = input(h, (size_t)N, 1), y = output(h, (size_t)N, SET);
            real *want = copy_of(h, y), *size = (real*)case_memory(h, (size_t)N * sizeof *size);
            QuantizeBias bias = {.y = y.device, .b = has_b ? b.device : NULL, .means = means.device_real};
            array_upload_real(means);
            k->out.bias = bias;
            k->want.bias = bias, k->want.bias.means = means.host;
            for (size_t n = 0; n < (size_t)N; n++) {
                const real* x = k->x.host + n * (size_t)C;
                want[n] = (real)((has_b ? (double)b.host[n] : 0) + quantize_bias_ref(k->want, x, C));
                size[n] = has_b ? (real)fabs((double)b.host[n]) : 0;
                for (int c = 0; c < C; c++) size[n] += (real)(2 * fabs((double)(x[c] * means.host[c])));
            }
            expect_same_for_any_threads(h, "bias", quantize_run_case, k, &y, 1);
            expect_close_to_sum(h, "bias", y, want, size, tolerance(1e-5));
            quantize_compare(h, k, 1, 1, 1);
            case_end(h);
        }
}

// The gradient of logits: x of a case are logits, whose losses come from classifier_forward().
typedef struct {
    QuantizeCase* k;
    LogitsGradient d;
} QuantizeLogitsCase;

// Every fourth target is ignored, and its row has infinity or NaN. Padding columns hold NaN.
static inline QuantizeLogitsCase* quantize_logits_case(Harness* h, int N, int V, int Vp) {
    QuantizeLogitsCase* c = (QuantizeLogitsCase*)case_memory(h, sizeof *c);
    c->k = quantize_case(h, N, Vp, 4, 4096, FP8_E5M2);
    int* targets = int_array(h, (size_t)N);
    real* loss_scale = (real*)pinned_memory(h, sizeof *loss_scale);
    Array each = output(h, (size_t)N, SET), sum = output(h, 1, SET);
    for (int n = 0; n < N; n++) {
        targets[n] = n % 4 == 2 ? -1 : random_below(h, V);
        if (targets[n] < 0) c->k->x.host[(size_t)n * (size_t)Vp] = n % 8 == 2 ? (real)INFINITY : (real)NAN;
        for (int v = V; v < Vp; v++) c->k->x.host[(size_t)n * (size_t)Vp + (size_t)v] = (real)NAN;
    }
    *loss_scale = 8;
    array_upload(c->k->x);
    c->d.losses.each = each.device_real, c->d.losses.sum = sum.device_real;
    c->d.losses.scale = 0.25, c->d.losses.mode = SET;
    c->d.targets = targets, c->d.loss_scale = loss_scale, c->d.V = V;
    classifier_forward(c->d.losses, c->k->x.device, targets, N, V, Vp, c->k->ctx);
    device_synchronize(c->k->ctx);
    return c;
}

static inline void quantize_run_logits(void* state) {
    QuantizeLogitsCase* c = (QuantizeLogitsCase*)state;
    quantize(c->k->out, quantize_classifier_backward(c->k->x.device, c->d), c->k->N, c->k->C, c->k->ctx);
}

// Bytes of dlogits by classifier_backward_ref(): where they are others, a change of 2e-5 in the number explains it.
static inline void test_quantize_logits(Harness* h) {
    static const int SIZES[][3] = {{1, 5, 16}, {4, 16, 16}, {33, 50, 64}, {128, 272, 272}, {131, 1000, 1008}};
    for (size_t i = 0; i < COUNT_OF(SIZES); i++) {
        int N = SIZES[i][0], V = SIZES[i][1], Vp = SIZES[i][2], wrong = 0, same = 0, turned = 0;
        case_begin(h, "quantize/logits N=%d V=%d Vp=%d", N, V, Vp);
        QuantizeLogitsCase* c = quantize_logits_case(h, N, V, Vp);
        QuantizeCase* k = c->k;
        size_t n = (size_t)N * (size_t)Vp, Np = quantize_rows(N);
        real* want = copy_of(h, k->x);
        Losses losses = c->d.losses;
        losses.each = (real*)case_memory(h, (size_t)N * sizeof(real)), losses.sum = (real*)case_memory(h, sizeof(real));
        classifier_backward_ref(losses, want, c->d.targets, c->d.loss_scale, N, V, Vp);
        device_upload(k->ctx, k->out.stats, &k->before, sizeof k->before);
        quantize_run_logits(c);
        uint8_t *y = (uint8_t*)case_memory(h, n), *yt = (uint8_t*)case_memory(h, Np * (size_t)Vp);
        Fp8Stats stats, none = k->before;
        device_download(k->ctx, y, k->out.y, n);
        device_download(k->ctx, yt, k->out.yt, Np * (size_t)Vp);
        device_download(k->ctx, &stats, k->out.stats, sizeof stats);
        double amax = 0, seen;
        for (size_t at = 0; at < n; at++) {
            double scaled = (double)want[at] * 4096, low = scaled * (1 - 2e-5), high = scaled * (1 + 2e-5);
            same += y[at] == fp8_from_float_ref((float)scaled, FP8_E5M2);
            wrong += y[at] != fp8_from_float_ref((float)scaled, FP8_E5M2) &&
                     y[at] != fp8_from_float_ref((float)low, FP8_E5M2) &&
                     y[at] != fp8_from_float_ref((float)high, FP8_E5M2);
            turned += yt[at % (size_t)Vp * Np + at / (size_t)Vp] != y[at];
            none.flushed += (y[at] & 0x7f) == 0;
            amax = fmax(amax, fabs((double)want[at]));
        }
        for (size_t v = 0; v < (size_t)Vp; v++)
            for (size_t row = (size_t)N; row < Np; row++) turned += yt[v * Np + row] != 0;
        float bits;
        memcpy(&bits, &stats.amax, sizeof bits);
        seen = (double)bits;
        expect_true(h, "y is the rounded gradient", wrong == 0 && same > 0.999 * (double)n);
        expect_true(h, "yt is its transpose", turned == 0);
        expect_true(h, "amax", fabs(seen / amax - 1) < 2e-5 && stats.clipped == none.clipped);
        expect_true(h, "what is flushed is counted", stats.flushed == none.flushed);
        expect_bytes(h, "quantize_classifier_backward", quantize_run_logits, c,
                     (double)n * ((double)sizeof(floatX) + 2));
        case_end(h);
    }
}

static inline void test_quantize(Harness* h) {
    static const int ROWS[] = {0, 1, 15, 16, 17, 100, 127, 128, 129, 300}, COLUMNS[] = {16, 112, 128, 144, 768};
    test_fp8_numbers(h);
    test_quantize_values(h);
    test_quantize_bias(h);
    test_quantize_logits(h);
    for (size_t i = 0; i < COUNT_OF(ROWS); i++)
        for (size_t j = 0; j < COUNT_OF(COLUMNS); j++) {
            Fp8Format format = (i + j) % 2 ? FP8_E5M2 : FP8_E4M3;
            case_begin(h, "quantize/N=%d C=%d %s", ROWS[i], COLUMNS[j], fp8_name(format));
            // About one element in twenty is clipped, and some are flushed.
            QuantizeCase* k =
                quantize_case(h, ROWS[i], COLUMNS[j], 1, (real)(format == FP8_E4M3 ? 256 : 32768), format);
            quantize_compare(h, k, 1, 1, 1);
            quantize_compare(h, k, 1, 0, 1);
            quantize_compare(h, k, 0, 1, 0);
            if (ROWS[i])
                expect_bytes(h, "quantize", quantize_run_case, k,
                             (double)ROWS[i] * COLUMNS[j] * ((double)sizeof(floatX) + 2));
            if (format == FP8_E4M3) {
                quantize_center(h, k);
                quantize_compare(h, k, 1, 1, 1);
                quantize_compare(h, k, 1, 0, 0);
            }
            case_end(h);
        }
}

// From logits to their losses and their gradient in fp8.
static inline void quantize_run_loss(void* state) {
    QuantizeLogitsCase* c = (QuantizeLogitsCase*)state;
    LogitsGradient d = c->d;
    classifier_forward(d.losses, c->k->x.device, d.targets, c->k->N, d.V, c->k->C, c->k->ctx);
    quantize_run_logits(c);
}

static inline void bench_quantize_logits(Harness* h) {
    int N = HAS_DEVICE_MEMORY ? 16384 : 256, V = 50257, Vp = 50304;
    bench(h, " and quantize", quantize_run_loss, quantize_logits_case(h, N, V, Vp));
    case_free(h);
}

static inline void bench_quantize(Harness* h) {
    bench_quantize_logits(h);
    int N = HAS_DEVICE_MEMORY ? 65536 : 4096;
    static const int COLUMNS[] = {768, 3072};
    for (size_t j = 0; j < COUNT_OF(COLUMNS); j++) {
        QuantizeCase* k = quantize_case(h, N, COLUMNS[j], 1, 32, FP8_E4M3);
        uint8_t* yt = k->out.yt;
        bench(h, " y yt", quantize_run_case, k);
        k->out.yt = NULL;
        bench(h, " y", quantize_run_case, k);
        k->out.yt = yt, k->out.y = NULL;
        bench(h, " yt", quantize_run_case, k);
        case_free(h);
    }
}

#endif
