/* quantize: a tensor in fp8 and its transpose, in one pass, with the statistics for delayed scaling and reports. The
 * pass can first compute the tensor from stored ones.
 *
 *   v  [N, C]        = x                  quantize_plain()
 *                    = gelu(x)            quantize_gelu()
 *                    = x gelu'(pre)       quantize_gelu_backward()
 *                    = x - center         quantize_centered(): center [C] real on the device, for E4M3
 *                    = dlogits            quantize_classifier_backward(): as classifier_backward() of the logits x,
 *                                         with the losses of classifier_forward(); for E5M2
 *   y  [N, C]  (SET) = fp8(scale v)       row-major bytes of FP8_E4M3 or FP8_E5M2 (fp8/format.h)
 *   yt [C, Np] (SET) = the transpose of y; Np is N rounded up to 16, and columns N to Np - 1 are zero
 *   sums.b [C] (SET or ADD) = the column sums of v before it is rounded: the gradient of a bias
 *   bias.y [N] (SET) = bias.b + v mean - (fp8(scale v) / scale) mean8: the bias of a matmul whose weight is v, with
 *                      bias.means = mean, mean8 [2, C] real (mean_bias.h); bias.b [N] or NULL
 *   stats (ADD): amax = max(amax, |v|), clipped += elements stored as the format's largest number,
 *                flushed += elements stored as 0
 *
 *   x, pre [N, C] floatX; scale [1] real, a power of two, read on the device; stats on the device
 *
 * fp8 matmuls need both operands with the summed index contiguous and a multiple of 16: y serves one, yt the other. y,
 * yt, sums.b, bias.y and, in evaluation, stats may be NULL. bias.y needs quantize_plain(), E4M3 and y.
 * shapes     C is a multiple of 16; x, y and yt are aligned to 16 bytes. N may be 0: nothing is written.
 * numerics   v and scale v are in fp32; scaling by a power of two is exact. Rounding is to nearest even, saturating.
 *            NaN becomes 0x7f, counts neither as clipped nor as flushed, and makes amax NaN; infinity makes amax
 *            infinite. dlogits take lse = each + x[target], so a target's logit of -inf makes the row NaN.
 * stats      integers. amax holds the bits of a non-negative float; these are ordered like the floats. So the order of
 *            elements does not matter, and the same x gives the same bits.
 * sums       on the GPU in fp32, over the rows of a tile, then over the tiles in order (bias: over the columns); on the
 *            CPU in double
 * bytes      N C (sizeof(floatX) for each input + 1 for each output)
 * source     delayed scaling: Micikevicius et al., "FP8 formats for deep learning", arXiv 2209.05433
 *
 * Files: quantize.cuh for the GPU. */
#ifndef LLMC_FP8_QUANTIZE_H
#define LLMC_FP8_QUANTIZE_H

#include "llmc/device/scope.h"
#include "llmc/fp8/format.h"
#include "llmc/ops/common/activation.h"
#include "llmc/ops/common/losses.h"

// The bias that is computed with the rounding errors of a weight.
typedef struct {
    floatX* y;  // NULL: not wanted
    const floatX* b;
    const real* means;
} QuantizeBias;

// Where an fp8 tensor is written and how.
typedef struct {
    uint8_t *y, *yt;  // NULL: not wanted
    Fp8Stats* stats;  // NULL: not wanted
    const real* scale;
    Fp8Format format;
    BiasGrad sums;  // sums.b NULL: not wanted
    QuantizeBias bias;
} QuantizeOutput;

// What the gradient of the losses with respect to the logits is computed from, besides the logits (classifier.h).
typedef struct {
    Losses losses;           // `each` as classifier_forward() wrote it, and `scale`
    const int* targets;      // [N]; below 0: the row is ignored
    const real* loss_scale;  // [1] on the device; NULL: 1
    int V;                   // columns; the others are padding
} LogitsGradient;

HOST_DEVICE static inline real logits_gradient_factor(LogitsGradient d) {
    return (real)d.losses.scale * (d.loss_scale ? *d.loss_scale : 1);
}

// What is quantized.
typedef enum {
    QUANTIZE_PLAIN,
    QUANTIZE_GELU,
    QUANTIZE_GELU_BACKWARD,
    QUANTIZE_CENTERED,
    QUANTIZE_CLASSIFIER_BACKWARD
} QuantizeSource;
typedef struct {
    QuantizeSource source;
    Gelu gelu;
    const floatX *x, *pre;
    const real* center;
    LogitsGradient logits;
} QuantizeInput;

static inline QuantizeInput quantize_plain(const floatX* x) {
    return (QuantizeInput){.source = QUANTIZE_PLAIN, .x = x};
}
static inline QuantizeInput quantize_gelu(const floatX* x, Gelu gelu) {
    return (QuantizeInput){.source = QUANTIZE_GELU, .gelu = gelu, .x = x};
}
static inline QuantizeInput quantize_gelu_backward(const floatX* x, const floatX* pre, Gelu gelu) {
    return (QuantizeInput){.source = QUANTIZE_GELU_BACKWARD, .gelu = gelu, .x = x, .pre = pre};
}
static inline QuantizeInput quantize_centered(const floatX* x, const real* center) {
    return (QuantizeInput){.source = QUANTIZE_CENTERED, .x = x, .center = center};
}
static inline QuantizeInput quantize_classifier_backward(const floatX* x, LogitsGradient logits) {
    return (QuantizeInput){.source = QUANTIZE_CLASSIFIER_BACKWARD, .x = x, .logits = logits};
}

#define QUANTIZE_FLOPS(N, C) (1.0 * (N) * (C))
#define QUANTIZE_BYTES(N, C, inputs, outputs) (1.0 * (N) * (C) * ((double)sizeof(floatX) * (inputs) + (outputs)))

// ---------------------------------------------------------------------------------------------------------
// Reference

static inline void quantize_ref(QuantizeOutput out, const real* x, int N, int C) {
    size_t Np = quantize_rows(N);
    for (size_t c = 0; c < (size_t)C && out.sums.b; c++) {
        double sum = out.sums.mode == ADD ? out.sums.b[c] : 0;
        for (size_t n = 0; n < (size_t)N; n++) sum += (double)x[n * (size_t)C + c];
        out.sums.b[c] = (real)sum;
    }
    for (size_t n = 0; n < Np; n++)
        for (size_t c = 0; c < (size_t)C; c++) {
            float v = n < (size_t)N ? (float)x[n * (size_t)C + c] : 0, scaled = v * (float)*out.scale;
            uint8_t byte = fp8_from_float_ref(scaled, out.format);
            if (out.y && n < (size_t)N) out.y[n * (size_t)C + c] = byte;
            if (out.yt) out.yt[c * Np + n] = byte;
            if (!out.stats) continue;
            uint32_t size = float_bits(v) & 0x7fffffffu;
            if (size > out.stats->amax) out.stats->amax = size;
            if (n >= (size_t)N) continue;
            out.stats->clipped += (byte & 0x7f) == fp8_top(out.format);
            out.stats->flushed += (byte & 0x7f) == 0;
        }
}

// out.bias.y[n] - out.bias.b[n]. x: row n of the tensor.
static inline double quantize_bias_ref(QuantizeOutput out, const real* x, int C) {
    double sum = 0;
    for (int c = 0; c < C; c++) {
        float rounded = fp8_to_float(fp8_from_float_ref((float)x[c] * (float)*out.scale, out.format), out.format);
        sum += (double)x[c] * (double)out.bias.means[c];
        sum -= (double)rounded / (double)*out.scale * (double)out.bias.means[C + c];
    }
    return sum;
}

// Check a launcher's arguments and open its scope.
static inline Scope quantize_open(QuantizeOutput out, QuantizeInput in, int N, int C, Context* ctx) {
    static const char* const NAMES[] = {"quantize", "quantize_gelu", "quantize_gelu_backward", "quantize_centered",
                                        "quantize_classifier_backward"};
    int outputs = (out.y != NULL) + (out.yt != NULL), inputs = in.source == QUANTIZE_GELU_BACKWARD ? 2 : 1;
    CHECK(outputs > 0 && N >= 0 && C > 0 && C % QUANTIZE_ALIGNMENT == 0);
    CHECK(in.source != QUANTIZE_CLASSIFIER_BACKWARD || (out.format == FP8_E5M2 && in.logits.V <= C));
    CHECK(!out.bias.y || (out.y && in.source == QUANTIZE_PLAIN && out.format == FP8_E4M3));
    CHECK(((uintptr_t)in.x | (uintptr_t)in.pre | (uintptr_t)out.y | (uintptr_t)out.yt) % 16 == 0);
    return scope_open(ctx, NAMES[in.source], QUANTIZE_FLOPS(N, C) * (out.bias.y ? 5 : 1),
                      QUANTIZE_BYTES(N, C, inputs, outputs), "N=%d C=%d%s", N, C, out.bias.y ? " bias" : "");
}

#ifdef __CUDACC__
#include "llmc/fp8/quantize.cuh"
#else
// ---------------------------------------------------------------------------------------------------------
// CPU: strips of 16 rows, which are 16 adjacent bytes in every row of the transpose

enum { QUANTIZE_COLUMNS = 256 };  // of a tile

// Quantize `count` elements of a row to y; adds to stats.
static inline void quantize_row(uint8_t* y, const floatX* x, size_t count, float scale, Fp8Format format,
                                Fp8Stats* stats) {
    uint8_t top = fp8_top(format);
    uint32_t amax = stats->amax, clipped = 0, flushed = 0;
#pragma omp simd reduction(max : amax) reduction(+ : clipped, flushed)
    for (size_t c = 0; c < count; c++) {
        float v = (float)x[c];
        uint32_t bits = float_bits(v) & 0x7fffffffu;
        amax = bits > amax ? bits : amax;
        y[c] = fp8_from_float(v * scale, format);
        clipped += (y[c] & 0x7f) == top;
        flushed += (y[c] & 0x7f) == 0;
    }
    stats->amax = amax;
    stats->clipped += clipped;
    stats->flushed += flushed;
}

// Elements of dlogits: `count` of row n, from column c on. x: their logits.
static inline void quantize_dlogits(floatX* v, const floatX* x, QuantizeInput in, size_t n, size_t c, size_t count,
                                    size_t C) {
    LogitsGradient d = in.logits;
    int target = d.targets[n];
    size_t used = target < 0 || (size_t)d.V <= c ? 0 : min_size((size_t)d.V - c, count);
    real factor = logits_gradient_factor(d), lse = used ? d.losses.each[n] + in.x[n * C + (size_t)target] : 0;
    for (size_t i = 0; i < used; i++) v[i] = factor * real_exp(x[i] - lse);
    for (size_t i = used; i < count; i++) v[i] = 0;
    if ((size_t)target - c < used) v[(size_t)target - c] -= factor;
}

// Compute `count` elements of row n of the tensor to quantize [., C], from column c on.
static inline void quantize_source(floatX* v, QuantizeInput in, size_t n, size_t c, size_t count, size_t C) {
    size_t at = n * C + c;
    const floatX* x = in.x + at;
    if (in.source == QUANTIZE_PLAIN) memcpy(v, x, count * sizeof *v);
    else if (in.source == QUANTIZE_GELU)
        for (size_t i = 0; i < count; i++) v[i] = gelu_value(x[i], in.gelu);
    else if (in.source == QUANTIZE_CENTERED)
        for (size_t i = 0; i < count; i++) v[i] = x[i] - in.center[c + i];
    else if (in.source == QUANTIZE_CLASSIFIER_BACKWARD) quantize_dlogits(v, x, in, n, c, count, C);
    else
        for (size_t i = 0; i < count; i++) v[i] = x[i] * gelu_derivative(in.pre[at + i], in.gelu);
}

// Column sums of the tensor.
static inline void quantize_sums(BiasGrad sums, QuantizeInput in, int N, int C) {
#pragma omp parallel for schedule(static)
    for (int c = 0; c < C; c += QUANTIZE_ALIGNMENT) {
        double sum[QUANTIZE_ALIGNMENT] = {0};
        for (int n = 0; n < N; n++) {
            floatX v[QUANTIZE_ALIGNMENT];
            quantize_source(v, in, (size_t)n, (size_t)c, QUANTIZE_ALIGNMENT, (size_t)C);
            for (int j = 0; j < QUANTIZE_ALIGNMENT; j++) sum[j] += (double)v[j];
        }
        for (int j = 0; j < QUANTIZE_ALIGNMENT; j++)
            sums.b[c + j] = (real)(sums.mode == ADD ? sums.b[c + j] + sum[j] : sum[j]);
    }
}

// bias.y from v [N, C] and its bytes.
static inline void quantize_bias(QuantizeBias bias, const floatX* v, const uint8_t* bytes, double inverse, int N,
                                 int C) {
    size_t width = (size_t)C;
    float number[256];
    fp8_numbers(number, FP8_E4M3);
#pragma omp parallel for schedule(static)
    for (size_t n = 0; n < (size_t)N; n++) {
        double sum = bias.b ? (double)bias.b[n] : 0;
        for (size_t c = 0; c < width; c++)
            sum += (double)v[n * width + c] * (double)bias.means[c] -
                   inverse * (double)number[bytes[n * width + c]] * (double)bias.means[width + c];
        bias.y[n] = (floatX)sum;
    }
}

static inline void quantize(QuantizeOutput out, QuantizeInput in, int N, int C, Context* ctx) {
    if (!N) return;
    Scope scope = quantize_open(out, in, N, C, ctx);
    if (out.sums.b) quantize_sums(out.sums, in, N, C);
    size_t rows = (size_t)N, columns = (size_t)C, Np = quantize_rows(N);
    float scale = (float)*out.scale;
    uint64_t clipped = 0, flushed = 0;
    uint32_t amax = 0;
#pragma omp parallel for schedule(static) reduction(max : amax) reduction(+ : clipped, flushed)
    for (size_t n = 0; n < rows; n += QUANTIZE_ALIGNMENT) {
        uint8_t tile[QUANTIZE_ALIGNMENT][QUANTIZE_COLUMNS] = {{0}};
        Fp8Stats stats = {0, 0, 0};
        size_t height = min_size(rows - n, QUANTIZE_ALIGNMENT);
        for (size_t c = 0; c < columns; c += QUANTIZE_COLUMNS) {
            size_t width = min_size(columns - c, QUANTIZE_COLUMNS);
            for (size_t i = 0; i < height; i++) {
                size_t at = (n + i) * columns + c;
                floatX v[QUANTIZE_COLUMNS];
                quantize_source(v, in, n + i, c, width, columns);
                if (out.format == FP8_E4M3) quantize_row(tile[i], v, width, scale, FP8_E4M3, &stats);
                else quantize_row(tile[i], v, width, scale, FP8_E5M2, &stats);
                if (out.y) memcpy(out.y + at, tile[i], width);
            }
            for (size_t j = 0; j < width && out.yt; j++)
                for (size_t i = 0; i < QUANTIZE_ALIGNMENT; i++) out.yt[(c + j) * Np + n + i] = tile[i][j];
        }
        amax = stats.amax > amax ? stats.amax : amax;
        clipped += stats.clipped;
        flushed += stats.flushed;
    }
    if (out.stats) {
        if (amax > out.stats->amax) out.stats->amax = amax;
        out.stats->clipped += clipped;
        out.stats->flushed += flushed;
    }
    if (out.bias.y) quantize_bias(out.bias, in.x, out.y, 1 / (double)scale, N, C);
    scope_close(&scope);
}
#endif

#endif
