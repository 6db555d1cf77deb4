/* quantize: nothing differentiates it. */
#ifndef DEV_OPS_QUANTIZE_H
#define DEV_OPS_QUANTIZE_H

#include "llmc/fp8/quantize.h"
#include "llmc/ops/classifier/classifier.h"
#include "op.h"

typedef struct {
    QuantizeOutput out, want;  // of the launcher in device memory, of the reference in the host's
    real *center, *centered;
} QuantizeOwn;

static inline const char* fp8_name(Fp8Format format) { return format == FP8_E4M3 ? "E4M3" : "E5M2"; }

// Equal; of an amax that is NaN the payload is not looked at.
static inline int same_stats(const void* one, const void* other) {
    Fp8Stats a, b;
    memcpy(&a, one, sizeof a), memcpy(&b, other, sizeof b);
    int same_amax = a.amax == b.amax || (a.amax > 0x7f800000u && b.amax > 0x7f800000u);
    return same_amax && a.clipped == b.clipped && a.flushed == b.flushed;
}

// The bytes of a tensor and of its transpose, and statistics, to which a launcher adds.
static inline void quantize_bytes(OpCase* k, int N, int C) {
    const Fp8Stats before = {7, 9, float_bits(0.25f)};
    k->bytes[0] = bytes_output(k->h, "y's bytes", (size_t)N * (size_t)C, NULL);
    k->bytes[1] = bytes_output(k->h, "yt's bytes", quantize_rows(N) * (size_t)C, NULL);
    k->bytes[2] = bytes_output(k->h, "amax and the counts", sizeof before, &before);
    k->bytes[2].same = same_stats;
    op_restore_bytes(k);
}

static inline void quantize_scale(OpCase* k, double scale) {
    QuantizeOwn* o = OP_OWN(QuantizeOwn);
    real* host = (real*)case_memory(k->h, sizeof *host);
    *host = (real)scale;
    o->out.scale = resident_real(k->h, *host), o->want.scale = host;
}

// M: the format. About one element in twenty is clipped, and some are flushed. Kind 0: all outputs are wanted; 1: not
// the transpose; 2: nothing else. What is not wanted must stay as it is.
OP_FN(quantize_prepare) {
    QuantizeOwn* o = (QuantizeOwn*)(k->own = case_memory(k->h, sizeof *o));
    size_t C = (size_t)k->C;
    quantize_bytes(k, k->N, k->C);
    quantize_scale(k, k->M == FP8_E4M3 ? 256 : 32768);
    o->out.format = o->want.format = (Fp8Format)k->M;
    for (int is_want = 0; is_want < 2; is_want++) {
        QuantizeOutput* out = is_want ? &o->want : &o->out;
        if (k->kind < 2) out->y = is_want ? k->bytes[0].want : k->bytes[0].device;
        if (k->kind != 1) out->yt = is_want ? k->bytes[1].want : k->bytes[1].device;
        if (k->kind < 2) out->stats = (Fp8Stats*)(void*)(is_want ? k->bytes[2].want : k->bytes[2].device);
    }
    o->center = (real*)pinned_memory(k->h, C * sizeof *o->center);
    o->centered = (real*)case_memory(k->h, k->x.n * sizeof *o->centered);
    for (size_t c = 0; c < C; c++) o->center[c] = (real)((double)c / (double)C - 0.3);
    for (size_t i = 0; i < k->x.n; i++) o->centered[i] = k->x.host[i] - o->center[i % C];
}

RUN_AND_WANT(quantize, plain, quantize(OP_OWN(QuantizeOwn)->out, quantize_plain(k->x.device), k->N, k->C, k->ctx),
             quantize_ref(OP_OWN(QuantizeOwn)->want, k->x.host, k->N, k->C));
static const Arg QUANTIZE_ARGS[] = ARGS(ARG(x, "N C", IN, 1));
static const int QUANTIZE_SIZES[][3] = {{0, 16, 0},   {1, 112, 1},   {15, 128, 0},  {16, 144, 1},  {17, 768, 0},
                                        {100, 16, 1}, {127, 144, 0}, {128, 128, 1}, {129, 768, 0}, {300, 112, 1}};
static const int QUANTIZE_GPU[][3] = {{65536, 768, 0}, {65536, 3072, 0}}, QUANTIZE_CPU[][3] = {{4096, 768, 0}};

static const Op QUANTIZE = {OP_OF("quantize", "N C M", QUANTIZE_ARGS, QUANTIZE_SIZES),
                            OP_BENCH(QUANTIZE_GPU, QUANTIZE_CPU), .passes = {{"plain", "", OP_PAIR(quantize, plain)}},
                            .prepare = quantize_prepare, .kinds = {"y yt", "y", "yt"}};

// In E4M3 alone: less a number for each column.
RUN_AND_WANT(quantize, centered,
             quantize(OP_OWN(QuantizeOwn)->out, quantize_centered(k->x.device, OP_OWN(QuantizeOwn)->center), k->N, k->C,
                      k->ctx),
             quantize_ref(OP_OWN(QuantizeOwn)->want, OP_OWN(QuantizeOwn)->centered, k->N, k->C));

// The bias of a matmul with the rounded tensor as its weight; with and without another bias.
static inline QuantizeOutput quantize_bias_output(const OpCase* k) {
    QuantizeOutput out = OP_OWN(QuantizeOwn)->out;
    out.bias = (QuantizeBias){k->y.device, k->kind ? NULL : k->b.device, k->means.device_real};
    return out;
}

OP_FN(quantize_run_bias) { quantize(quantize_bias_output(k), quantize_plain(k->x.device), k->N, k->C, k->ctx); }

OP_FN(quantize_want_bias) {
    QuantizeOutput want = OP_OWN(QuantizeOwn)->want;
    want.bias.means = k->means.host;
    quantize_want_plain(k);
    k->y.magnitude = (real*)case_memory(k->h, k->y.n * sizeof(real));
    for (size_t n = 0; n < (size_t)k->N; n++) {
        const real* x = k->x.host + n * (size_t)k->C;
        k->y.want[n] = (real)((k->kind ? 0 : (double)k->b.host[n]) + quantize_bias_ref(want, x, k->C));
        k->y.magnitude[n] = k->kind ? 0 : (real)fabs((double)k->b.host[n]);
        for (int c = 0; c < k->C; c++) k->y.magnitude[n] += (real)(2 * fabs((double)(x[c] * k->means.host[c])));
    }
}

static const Arg QUANTIZE_E4M3_ARGS[] =
    ARGS(ARG(x, "N C", IN, 1), ARG(means, "2 C", IN, 1), ARG(b, "N", IN, 1), ARG(y, "N", OUT, 0, 1e-5));
static const int QUANTIZE_E4M3_SIZES[][3] = {{1, 16, 0}, {33, 48, 0}, {128, 128, 0}, {130, 272, 0}, {300, 2064, 0}};

static const Op QUANTIZE_E4M3 = {
    OP_OF("quantize", "N C M", QUANTIZE_E4M3_ARGS, QUANTIZE_E4M3_SIZES),
    .passes = {{"bias", "y", OP_PAIR(quantize, bias)}, {"centered", "", OP_PAIR(quantize, centered)}},
    .prepare = quantize_prepare, .kinds = {"y yt, added", "y"}};

static inline OpCase* quantize_case(Harness* h, int N, int C, Fp8Format format) {
    const int row[] = {N, C, (int)format};
    return op_case(h, &QUANTIZE, QUANTIZE.passes, row, OP_PLAIN);
}

// Every number of a 16-bit floatX, NaN of both signs included; of a wider one, every number of bf16.
static inline void quantize_all_values(OpCase* k) {
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
            OpCase* k = quantize_case(h, 256, 256, (Fp8Format)format);
            case_begin(h, "quantize/every 16-bit number %s scale=%g", fp8_name((Fp8Format)format), SCALES[s]);
            quantize_scale(k, SCALES[s]);
            quantize_all_values(k);
            op_check(h, k, &QUANTIZE, QUANTIZE.passes);
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
                {449, 0x7e, 0x5f},  // more than the largest
                {INFINITY, 0x7e, 0x7b},
                {-INFINITY, 0xfe, 0xfb},
                {0.001953125, 0x01, 0x18},     // 2^-9, the smallest of E4M3
                {1.52587890625e-05, 0, 0x01},  // 2^-16, the smallest of E5M2
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

// The gradient of logits: x of a case are logits, whose losses come from classifier_forward(); `own` is this.
typedef struct {
    QuantizeOwn q;
    LogitsGradient d;
} QuantizeLogitsOwn;

// Every fourth target is ignored, and its row has infinity or NaN. Padding columns hold NaN.
static inline OpCase* quantize_logits_case(Harness* h, int N, int V, int Vp) {
    OpCase* k = quantize_case(h, N, Vp, FP8_E5M2);
    QuantizeLogitsOwn* c = (QuantizeLogitsOwn*)case_memory(h, sizeof *c);
    c->q = *OP_OWN(QuantizeOwn), k->own = c;
    int* targets = int_array(h, (size_t)N);
    real* loss_scale = (real*)pinned_memory(h, sizeof *loss_scale);
    Array each = output(h, (size_t)N, SET), sum = output(h, 1, SET);
    quantize_scale(k, 4096);
    for (size_t n = 0; n < (size_t)N; n++) {
        real* x = k->x.host + n * (size_t)Vp;
        targets[n] = n % 4 == 2 ? -1 : random_below(h, V);
        for (int v = 0; v < Vp; v++) x[v] = v < V ? 4 * x[v] : (real)NAN;
        if (targets[n] < 0) x[0] = n % 8 == 2 ? (real)INFINITY : (real)NAN;
    }
    *loss_scale = 8;
    array_upload(k->x);
    c->d = (LogitsGradient){
        .losses = {each.device_real, sum.device_real, 0.25, SET}, .targets = targets, .loss_scale = loss_scale, .V = V};
    classifier_forward(c->d.losses, k->x.device, targets, N, V, Vp, k->ctx);
    device_synchronize(k->ctx);
    return k;
}

OP_FN(quantize_run_logits) {
    const QuantizeLogitsOwn* c = OP_OWN(QuantizeLogitsOwn);
    quantize(c->q.out, quantize_classifier_backward(k->x.device, c->d), k->N, k->C, k->ctx);
}

// Bytes of dlogits by classifier_backward_ref(): where they are others, a change of 2e-5 in the number explains it.
static inline void test_quantize_logits(Harness* h) {
    static const int SIZES[][3] = {{1, 5, 16}, {4, 16, 16}, {33, 50, 64}, {128, 272, 272}, {131, 1000, 1008}};
    for (size_t i = 0; i < COUNT_OF(SIZES); i++) {
        int N = SIZES[i][0], V = SIZES[i][1], Vp = SIZES[i][2], wrong = 0, same = 0, turned = 0;
        OpCase* k = quantize_logits_case(h, N, V, Vp);
        const LogitsGradient d = OP_OWN(QuantizeLogitsOwn)->d;
        size_t n = (size_t)N * (size_t)Vp, Np = quantize_rows(N);
        real *want = copy_of(h, k->x), *each = (real*)case_memory(h, (size_t)N * sizeof *each), sum;
        classifier_backward_ref((Losses){each, &sum, d.losses.scale, SET}, want, d.targets, d.loss_scale, N, V, Vp);
        op_restore_bytes(k);
        quantize_run_logits(k);
        uint8_t *y = k->bytes[0].want, *yt = k->bytes[1].want;
        Fp8Stats stats, start;
        memcpy(&start, k->bytes[2].start, sizeof start);
        device_download(k->ctx, y, k->bytes[0].device, n);
        device_download(k->ctx, yt, k->bytes[1].device, Np * (size_t)Vp);
        device_download(k->ctx, &stats, k->bytes[2].device, sizeof stats);
        double amax = 0.25;
        for (size_t at = 0; at < n; at++) {
            double scaled = (double)want[at] * 4096;
            int is_near = 0, is_same = y[at] == fp8_from_float_ref((float)scaled, FP8_E5M2);
            for (int side = -1; side <= 1; side += 2)
                is_near |= y[at] == fp8_from_float_ref((float)(scaled * (1 + side * 2e-5)), FP8_E5M2);
            same += is_same, wrong += !is_same && !is_near;
            turned += yt[at % (size_t)Vp * Np + at / (size_t)Vp] != y[at];
            start.flushed += (y[at] & 0x7f) == 0;
            amax = fmax(amax, fabs((double)want[at]));
        }
        for (size_t v = 0; v < (size_t)Vp; v++)
            for (size_t row = (size_t)N; row < Np; row++) turned += yt[v * Np + row] != 0;
        float seen;
        memcpy(&seen, &stats.amax, sizeof seen);
        expect_true(h, "y is the rounded gradient", wrong == 0 && same > 0.999 * (double)n);
        expect_true(h, "yt is its transpose", turned == 0);
        expect_true(h, "amax", fabs((double)seen / amax - 1) < 2e-5 && stats.clipped == start.clipped);
        expect_true(h, "what is flushed is counted", stats.flushed == start.flushed);
        case_end(h);
    }
}

static inline void test_quantize(Harness* h) {
    test_fp8_numbers(h);
    test_quantize_values(h);
    test_quantize_logits(h);
}

// From logits to their losses and their gradient in fp8.
OP_FN(quantize_run_loss) {
    const LogitsGradient d = OP_OWN(QuantizeLogitsOwn)->d;
    classifier_forward(d.losses, k->x.device, d.targets, k->N, d.V, k->C, k->ctx);
    quantize_run_logits(k);
}

static inline void bench_quantize(Harness* h) {
    bench(h, " and quantize", quantize_run_loss,
          quantize_logits_case(h, HAS_DEVICE_MEMORY ? 16384 : 256, 50257, 50304));
    case_free(h);
}

#endif
