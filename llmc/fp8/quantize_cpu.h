/* quantize on the CPU: strips of 16 rows, which are 16 adjacent bytes in every row of the transpose. */
#ifndef LLMC_FP8_QUANTIZE_CPU_H
#define LLMC_FP8_QUANTIZE_CPU_H

#include "llmc/fp8/quantize.h"

#ifndef __CUDACC__

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
