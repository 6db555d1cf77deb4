/* Drawing the next token from a row of logits. */
#ifndef LLMC_RUN_SAMPLER_H
#define LLMC_RUN_SAMPLER_H

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

enum { SAMPLER_BINS = 1 << 10 };

// The logits by size, the largest in bin 0. Only the bin where the candidates end is sorted.
typedef struct {
    int count[SAMPLER_BINS];
    double weight[SAMPLER_BINS];  // sums of e^((logit - largest) / temperature)
    real largest;
    double scale, temperature;
} SamplerBins;

// e^x for -700 <= x <= 0, within 4e-16 of itself. Compilers vectorize it, unlike the library's, which takes five times
// as long.
static inline double sampler_exp(double x) {
    // x = n ln(2) + r. Adding 1.5 * 2^52 rounds to an integer, which is then in the lowest bits.
    double shifted = x * 1.4426950408889634 + 6755399441055744.0, n = shifted - 6755399441055744.0;
    double r = x - n * 0.6931471803691238 - n * 1.9082149292705877e-10, power = 1 + r / 13;
    uint64_t exponent, bits;
    power = 1 + r * (1.0 / 10) * (1 + r * (1.0 / 11) * (1 + r * (1.0 / 12) * power));
    power = 1 + r * (1.0 / 7) * (1 + r * (1.0 / 8) * (1 + r * (1.0 / 9) * power));
    power = 1 + r * (1.0 / 4) * (1 + r * (1.0 / 5) * (1 + r * (1.0 / 6) * power));
    power = 1 + r * (1 + r * (1.0 / 2) * (1 + r * (1.0 / 3) * power));
    memcpy(&exponent, &shifted, sizeof exponent);
    memcpy(&bits, &power, sizeof bits);
    bits += exponent << 52;
    memcpy(&power, &bits, sizeof power);
    return power;
}

// The exponent of a logit's weight. No sum of weights notices e^-700.
static inline double sampler_exponent(const SamplerBins* b, real logit) {
    double x = (double)(logit - b->largest) / b->temperature;
    return x >= -700 ? x : -700;
}

static inline int sampler_bin(const SamplerBins* b, real logit) {
    double bin = (double)(b->largest - logit) * b->scale;
    return bin < SAMPLER_BINS - 1 ? (int)bin : SAMPLER_BINS - 1;  // NaN is in the last one
}

static inline void sampler_fill(SamplerBins* b, const real* logits, const double* weight, int V) {
    real least = b->largest;
    for (int i = 0; i < V; i++) least = logits[i] < least ? logits[i] : least;
    b->scale = least < b->largest ? SAMPLER_BINS / (double)(b->largest - least) : 0;
    for (int i = 0; i < V; i++) {
        int bin = sampler_bin(b, logits[i]);
        b->count[bin]++, b->weight[bin] += weight[i];
    }
}

// Candidates are the first logits in descending order, at least one.
typedef struct {
    double mass;     // the sum of their weights
    real threshold;  // the last one
    int ties;        // those equal to it
} SamplerCandidates;

// Take candidates until there are `most` or their weights add up to `mass`.
static inline SamplerCandidates sampler_select(const SamplerBins* b, const real* logits, int V, int most, double mass) {
    SamplerCandidates c = {0, b->largest, 0};
    int n = 0, bin = 0, size = 0;
    for (; bin < SAMPLER_BINS - 1 && n + b->count[bin] < most && c.mass + b->weight[bin] < mass; bin++)
        n += b->count[bin], c.mass += b->weight[bin];
    real* sorted = (real*)xmalloc((size_t)(b->count[bin] + 1) * sizeof(real));
    for (int i = 0; i < V; i++)
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

// Draw a token from softmax(logits / temperature) over the candidates among V logits; of equal logits the first.
// `uniform` in (0, 1) is the random number.
static inline int sampler_draw(const real* logits, int V, Sampler sampler, double uniform) {
    int best = 0, token = 0, most = sampler.top_k > 0 ? min_int(sampler.top_k, V) : V;
    real largest = logits[0];
    for (int i = 1; i < V; i++)
        if (logits[i] > largest) best = i, largest = logits[i];
    if (sampler.temperature <= 0 || sampler.top_k == 1) return best;
    SamplerBins* b = (SamplerBins*)xcalloc(1, sizeof *b);
    SamplerCandidates c = {0, (real)-INFINITY, V};
    double *weight = (double*)xmalloc((size_t)V * sizeof(double)), total = 0, sum = 0;
    b->largest = largest, b->temperature = sampler.temperature;
    for (int i = 0; i < V; i++) weight[i] = sampler_exponent(b, logits[i]);
        // A loop of its own: with the choice in it, gcc would not vectorize it.
#pragma omp simd
    for (int i = 0; i < V; i++) weight[i] = sampler_exp(weight[i]);
    if (most < V || sampler.top_p > 0) {
        sampler_fill(b, logits, weight, V);
        c = sampler_select(b, logits, V, most, INFINITY);
        if (sampler.top_p > 0) c = sampler_select(b, logits, V, most, sampler.top_p * c.mass);
    }
    for (int i = 0, left = c.ties; i < V; i++) {
        int is_candidate = logits[i] > c.threshold || (logits[i] == c.threshold && left-- > 0);
        if (!is_candidate) weight[i] = 0;
        total += weight[i];
    }
    // The token where the running sum exceeds `uniform` of the sum.
    while (token < V && (sum += weight[token]) <= uniform * total) token++;
    free(weight), free(b);
    return token < V ? token : best;
}

#endif
