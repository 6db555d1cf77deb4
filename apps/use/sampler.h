/* Drawing the next token from a row of logits. */
#ifndef APPS_USE_SAMPLER_H
#define APPS_USE_SAMPLER_H

#include "llmc/base/util.h"

typedef struct {
    double temperature;  // 0: always the most likely token
    int top_k;           // 0: all tokens are candidates
    double top_p;        // nucleus: of these, the smallest set whose probabilities add up to it; 0: all
} Sampler;

static inline int sampler_descending(const void* a, const void* b) {
    real x = *(const real*)a, y = *(const real*)b;
    return (x < y) - (x > y);
}

enum { SAMPLER_BINS = 1 << 10, SAMPLER_BLOCK = 64, SAMPLER_LANES = 8 };

// The logits by size, the largest in bin 0. Only the bin where the candidates end is sorted.
typedef struct {
    int count[SAMPLER_BINS];
    double weight[SAMPLER_BINS];         // sums of e^((logit - largest) / temperature)
    real largest, maxima[SAMPLER_BINS];  // of all logits, and of those in each column when SAMPLER_BINS are in a row
    double temperature, per_unit;        // bins a unit of the logits
} SamplerBins;

// e^x for -700 <= x <= 0, within 4e-16 of itself. Compilers vectorize it where it is inlined, unlike the library's, which
// takes ten times as long.
__attribute__((always_inline)) static inline double sampler_exp(double x) {
    // x = n ln(2) + r. Adding 1.5 * 2^52 rounds to an integer, which is then in the lowest bits.
    double shifted = x * 1.4426950408889634 + 6755399441055744.0, n = shifted - 6755399441055744.0;
    double r = fma(n, -1.9082149292705877e-10, fma(n, -0.6931471803691238, x)), power = 1.0 / 6227020800;
    uint64_t exponent, bits;
    power = fma(r, fma(r, fma(r, power, 1.0 / 479001600), 1.0 / 39916800), 1.0 / 3628800);
    power = fma(r, fma(r, fma(r, power, 1.0 / 362880), 1.0 / 40320), 1.0 / 5040);
    power = fma(r, fma(r, fma(r, power, 1.0 / 720), 1.0 / 120), 1.0 / 24);
    power = fma(r, fma(r, fma(r, fma(r, power, 1.0 / 6), 1.0 / 2), 1), 1);
    memcpy(&exponent, &shifted, sizeof exponent);
    memcpy(&bits, &power, sizeof bits);
    bits += exponent << 52;
    memcpy(&power, &bits, sizeof power);
    return power;
}

// The exponent of a logit's weight. No sum of weights notices e^-700.
static inline double sampler_exponent(const SamplerBins* b, real logit) {
    double x = (double)(logit - b->largest) / b->temperature;
    return x > -700 ? x : -700;
}

// The weights of n <= SAMPLER_BLOCK logits. Returns their sum, the same with vectors of any width.
static inline double sampler_weigh(double* weight, const SamplerBins* b, const real* logits, int n) {
    double lane[SAMPLER_LANES] = {0}, sum = 0;
#pragma omp simd
    for (int i = 0; i < n; i++) weight[i] = sampler_exponent(b, logits[i]);
        // A loop of its own: with the choice in it, gcc would not vectorize it.
#pragma omp simd
    for (int i = 0; i < n; i++) weight[i] = sampler_exp(weight[i]);
    for (int i = n; i < SAMPLER_BLOCK; i++) weight[i] = 0;
    for (int i = 0; i < SAMPLER_BLOCK; i += SAMPLER_LANES)
#pragma omp simd
        for (int l = 0; l < SAMPLER_LANES; l++) lane[l] += weight[i + l];
    for (int l = 0; l < SAMPLER_LANES; l++) sum += lane[l];
    return sum;
}

// The sums of each SAMPLER_BLOCK of n weights. Returns the sum of all.
static inline double sampler_sums(double* sums, const SamplerBins* b, const real* logits, int n) {
    double weight[SAMPLER_BLOCK], total = 0;
    for (int begin = 0; begin < n; begin += SAMPLER_BLOCK)
        total += sums[begin / SAMPLER_BLOCK] =
            sampler_weigh(weight, b, logits + begin, min_int(SAMPLER_BLOCK, n - begin));
    return total;
}

// The last bin is NaN's, too.
static inline int sampler_bin(const SamplerBins* b, real logit) {
    double at = (double)(b->largest - logit) * b->per_unit;
    return (int)(at < SAMPLER_BINS - 1 ? at : SAMPLER_BINS - 1);
}

// Sort n logits into bins.
static inline void sampler_fill(SamplerBins* b, const real* logits, int n) {
    double weight[SAMPLER_BLOCK];
    real least = b->largest;
#pragma omp simd reduction(min : least)
    for (int i = 0; i < n; i++) least = logits[i] < least ? logits[i] : least;
    b->per_unit = least < b->largest ? SAMPLER_BINS / (double)(b->largest - least) : 0;
    memset(b->count, 0, sizeof b->count), memset(b->weight, 0, sizeof b->weight);
    for (int i = 0; i < n; i++) {
        if (i % SAMPLER_BLOCK == 0) sampler_weigh(weight, b, logits + i, min_int(SAMPLER_BLOCK, n - i));
        int bin = sampler_bin(b, logits[i]);
        b->count[bin]++, b->weight[bin] += weight[i % SAMPLER_BLOCK];
    }
}

// Candidates are the first logits in descending order, at least one.
typedef struct {
    double mass;     // the sum of their weights
    real threshold;  // the last one
    int ties;        // those equal to it
} SamplerCandidates;

// Take candidates until there are `most` or their weights add up to `mass`.
static inline SamplerCandidates sampler_select(const SamplerBins* b, const real* logits, int count, int most,
                                               double mass) {
    SamplerCandidates c = {0, b->largest, 0};
    int n = 0, bin = 0, size = 0;
    for (; bin < SAMPLER_BINS - 1 && n + b->count[bin] < most && c.mass + b->weight[bin] < mass; bin++)
        n += b->count[bin], c.mass += b->weight[bin];
    real* sorted = (real*)xmalloc((size_t)(b->count[bin] + 1) * sizeof(real));
    for (int i = 0; i < count; i++)
        if (sampler_bin(b, logits[i]) == bin) sorted[size++] = logits[i];
    qsort(sorted, (size_t)size, sizeof(real), sampler_descending);
    for (int i = 0; i < size && (n == 0 || (n < most && c.mass < mass)); i++, n++) {
        c.ties = i > 0 && sorted[i] == c.threshold ? c.ties + 1 : 1;
        c.threshold = sorted[i];
        c.mass += sampler_exp(sampler_exponent(b, sorted[i]));
    }
    free(sorted);
    return c;
}

// Copy the candidates among V logits to `kept` and their tokens to `token`, in the vocabulary's order. Returns how many
// they are. `total` is the sum of all weights, needed if most == V.
static inline int sampler_keep(real* kept, int* token, SamplerBins* b, const real* logits, int V, int most,
                               double top_p, double total) {
    int n = 0, size = 0, columns = min_int(SAMPLER_BINS, V);
    double mass = most < V ? INFINITY : top_p * total;
    // A bound below which no candidate lies: the last of `most` columns' maxima, or of those that have the mass. Where
    // all of them have less: V logits below the bound have less than 1 - top_p of the total. 1.01 is for roundings.
    sampler_fill(b, b->maxima, columns);
    SamplerCandidates c = sampler_select(b, b->maxima, columns, most, mass);
    if (most < V && most > columns) c.threshold = -INFINITY;
    if (most == V && c.mass < mass)
        c.threshold = (real)(b->largest + b->temperature * log((1 - top_p) * total / (1.01 * V)));
    for (int i = 0; i < V; i++) token[size] = i, size += logits[i] >= c.threshold;
    for (int i = 0; i < size; i++) kept[i] = logits[token[i]];
    sampler_fill(b, kept, size);
    if (most < V) c = sampler_select(b, kept, size, most, mass), total = c.mass;
    if (top_p > 0) c = sampler_select(b, kept, size, most, top_p * total);
    for (int i = 0; i < size; i++)
        if (kept[i] > c.threshold || (kept[i] == c.threshold && c.ties-- > 0)) kept[n] = kept[i], token[n++] = token[i];
    return n;
}

// Draw a token from softmax(logits / temperature) over the candidates among V logits; of equal logits the first.
// `uniform` in (0, 1) is the random number. The loops over V are simple enough to be vectorized.
static inline int sampler_draw(const real* logits, int V, Sampler sampler, double uniform) {
    SamplerBins b = {.largest = -INFINITY, .temperature = sampler.temperature};
    int best = 0, n = V, at = 0, most = sampler.top_k > 0 ? min_int(sampler.top_k, V) : V;
    int columns = min_int(SAMPLER_BINS, V);
    double sum = 0, total = 0;
    for (int c = 0; c < columns; c++) b.maxima[c] = -INFINITY;
    for (int i = 0; i < V; i += columns)
#pragma omp simd
        for (int c = 0; c < min_int(columns, V - i); c++)
            b.maxima[c] = logits[i + c] > b.maxima[c] ? logits[i + c] : b.maxima[c];
    for (int c = 0; c < columns; c++) b.largest = b.maxima[c] > b.largest ? b.maxima[c] : b.largest;
    while (best + 1 < V && logits[best] != b.largest) best++;
    if (sampler.temperature <= 0 || sampler.top_k == 1) return best;
    double* sums = (double*)xmalloc((size_t)(V / SAMPLER_BLOCK + 1) * sizeof(double));
    real* kept = (real*)xmalloc(((size_t)V + 1) * sizeof(real));
    int* token = (int*)xmalloc(((size_t)V + 1) * sizeof(int));
    if (most == V) total = sampler_sums(sums, &b, logits, V);
    if (most < V || sampler.top_p > 0) {
        n = sampler_keep(kept, token, &b, logits, V, most, sampler.top_p, total);
        total = sampler_sums(sums, &b, kept, n);
        logits = kept;
    }
    // The token where the running sum exceeds `uniform` of the sum.
    for (; at + SAMPLER_BLOCK <= n && sum + sums[at / SAMPLER_BLOCK] <= uniform * total; at += SAMPLER_BLOCK)
        sum += sums[at / SAMPLER_BLOCK];
    while (at < n && (sum += sampler_exp(sampler_exponent(&b, logits[at]))) <= uniform * total) at++;
    if (at < n) best = logits == kept ? token[at] : at;
    free(sums), free(kept), free(token);
    return best;
}

#endif
