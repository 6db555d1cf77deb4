/* quantize on the CPU: strips of 16 rows, which are 16 adjacent bytes of every row of the transpose. */
#ifndef LLMC_OPS_QUANTIZE_CPU_H
#define LLMC_OPS_QUANTIZE_CPU_H

#include "llmc/ops/quantize/quantize.h"

#ifndef __CUDACC__

enum { QUANTIZE_COLUMNS = 256 };  // of a tile

// A row's `count` elements into y; adds to stats.
static inline void quantize_row(uint8_t* y, const floatX* x, size_t count, float scale, Fp8Format format,
                                Fp8Stats* stats) {
    float largest = fp8_largest(format), half_smallest = fp8_half_smallest(format);
    uint32_t amax = stats->amax, clipped = 0, flushed = 0;
#pragma omp simd reduction(max : amax) reduction(+ : clipped, flushed)
    for (size_t c = 0; c < count; c++) {
        float v = (float)x[c], scaled = v * scale, size = fabsf(scaled);
        uint32_t bits = float_bits(v) & 0x7fffffffu;
        amax = bits > amax ? bits : amax;
        clipped += size > largest;
        flushed += (bits != 0) & (size <= half_smallest);
        y[c] = fp8_from_float(scaled, format);
    }
    stats->amax = amax;
    stats->clipped += clipped;
    stats->flushed += flushed;
}

static inline void quantize(QuantizeOutput out, const floatX* x, int N, int C, Context* ctx) {
    if (!N) return;
    Scope scope = quantize_open(out, x, N, C, ctx);
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
                if (out.format == FP8_E4M3) quantize_row(tile[i], x + at, width, scale, FP8_E4M3, &stats);
                else quantize_row(tile[i], x + at, width, scale, FP8_E5M2, &stats);
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
    scope_close(&scope);
}

#endif
#endif
