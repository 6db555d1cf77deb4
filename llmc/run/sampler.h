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

enum { SAMPLER_BINS = 1 << 10, SAMPLER_BLOCK = 64 };

// The logits by size, the largest in bin 0. Only the bin where the candidates end is sorted.
typedef struct {
    int count[SAMPLER_BINS];
    double weight[SAMPLER_BINS];  // sums of e^((logit - largest) / temperature)
    real largest;
    double temperature;
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

// Sort V logits into bins. bin[i] is that of logit i; the last one is NaN's, too.
static inline void sampler_fill(SamplerBins* b, int* bin, const real* logits, const double* weight, int V) {
    real least = b->largest;
#pragma omp simd reduction(min : least)
    for (int i = 0; i < V; i++) least = logits[i] < least ? logits[i] : least;
    double scale = least < b->largest ? SAMPLER_BINS / (double)(b->largest - least) : 0;
#pragma omp simd
    for (int i = 0; i < V; i++) {
        double at = (double)(b->largest - logits[i]) * scale;
        bin[i] = (int)(at < SAMPLER_BINS - 1 ? at : SAMPLER_BINS - 1);
    }
    for (int i = 0; i < V; i++) b->count[bin[i]]++, b->weight[bin[i]] += weight[i];
}

// Candidates are the first logits in descending order, at least one.
typedef struct {
    double mass;     // the sum of their weights
    real threshold;  // the last one
    int ties;        // those equal to it
} SamplerCandidates;

// Take candidates until there are `most` or their weights add up to `mass`.
static inline SamplerCandidates sampler_select(const SamplerBins* b, const int* bins, const real* logits, int V,
                                               int most, double mass) {
    SamplerCandidates c = {0, b->largest, 0};
    int n = 0, bin = 0, size = 0;
    for (; bin < SAMPLER_BINS - 1 && n + b->count[bin] < most && c.mass + b->weight[bin] < mass; bin++)
        n += b->count[bin], c.mass += b->weight[bin];
    real* sorted = (real*)xmalloc((size_t)(b->count[bin] + 1) * sizeof(real));
    for (int i = 0; i < V; i++)
        if (bins[i] == bin) sorted[size++] = logits[i];
    qsort(sorted, (size_t)size, sizeof(real), sampler_descending);
    for (int i = 0; i < size && (n == 0 || (n < most && c.mass < mass)); i++, n++) {
        c.ties = i > 0 && sorted[i] == c.threshold ? c.ties + 1 : 1;
        c.threshold = sorted[i];
        c.mass += sampler_exp(sampler_exponent(b, sorted[i]));
    }
    free(sorted);
    return c;
}

// The sums of blocks of SAMPLER_BLOCK weights. Returns the sum of all.
static inline double sampler_sums(double* sums, const double* weight, int V) {
    double total = 0;
    for (int begin = 0; begin < V; begin += SAMPLER_BLOCK) {
        double sum = 0;
        int end = min_int(begin + SAMPLER_BLOCK, V);
#pragma omp simd reduction(+ : sum)
        for (int i = begin; i < end; i++) sum += weight[i];
        total += sums[begin / SAMPLER_BLOCK] = sum;
    }
    return total;
}

// Set the weights of all but the candidates to 0.
static inline void sampler_keep(double* weight, SamplerBins* b, const real* logits, int V, Sampler sampler,
                                double total) {
    int *bin = (int*)xmalloc((size_t)V * sizeof(int)), most = sampler.top_k > 0 ? min_int(sampler.top_k, V) : V;
    sampler_fill(b, bin, logits, weight, V);
    SamplerCandidates c = {total, 0, 0};
    if (most < V) c = sampler_select(b, bin, logits, V, most, INFINITY);
    if (sampler.top_p > 0) c = sampler_select(b, bin, logits, V, most, sampler.top_p * c.mass);
    for (int i = 0, left = c.ties; i < V; i++)
        if (!(logits[i] > c.threshold || (logits[i] == c.threshold && left-- > 0))) weight[i] = 0;
    free(bin);
}

// Draw a token from softmax(logits / temperature) over the candidates among V logits; of equal logits the first.
// `uniform` in (0, 1) is the random number. The loops over V are simple enough to be vectorized.
static inline int sampler_draw(const real* logits, int V, Sampler sampler, double uniform) {
    int best = 0, token = 0;
    real largest = logits[0];
#pragma omp simd reduction(max : largest)
    for (int i = 0; i < V; i++) largest = logits[i] > largest ? logits[i] : largest;
    while (best + 1 < V && logits[best] != largest) best++;
    if (sampler.temperature <= 0 || sampler.top_k == 1) return best;
    SamplerBins* b = (SamplerBins*)xcalloc(1, sizeof *b);
    double *weight = (double*)xmalloc((size_t)V * sizeof(double)), sum = 0;
    double* sums = (double*)xmalloc((size_t)(V / SAMPLER_BLOCK + 1) * sizeof(double));
    b->largest = largest, b->temperature = sampler.temperature;
#pragma omp simd
    for (int i = 0; i < V; i++) weight[i] = sampler_exponent(b, logits[i]);
        // A loop of its own: with the choice in it, gcc would not vectorize it.
#pragma omp simd
    for (int i = 0; i < V; i++) weight[i] = sampler_exp(weight[i]);
    double total = sampler_sums(sums, weight, V);
    if ((sampler.top_k > 0 && sampler.top_k < V) || sampler.top_p > 0) {
        sampler_keep(weight, b, logits, V, sampler, total);
        total = sampler_sums(sums, weight, V);
    }
    // The token where the running sum exceeds `uniform` of the sum.
    for (; token + SAMPLER_BLOCK <= V && sum + sums[token / SAMPLER_BLOCK] <= uniform * total; token += SAMPLER_BLOCK)
        sum += sums[token / SAMPLER_BLOCK];
    while (token < V && (sum += weight[token]) <= uniform * total) token++;
    free(weight), free(sums), free(b);
    return token < V ? token : best;
}

#endif
