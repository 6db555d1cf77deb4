/* Drawing the next token from a row of logits. */
#ifndef APPS_USE_SAMPLER_H
#define APPS_USE_SAMPLER_H

#include "llmc/base/util.h"

typedef struct {
    double temperature;  // 0: always the most likely token
    int top_k;           // 0: all tokens are candidates
    double top_p;        // nucleus: of these, the smallest set whose probabilities add up to it; 0: all
} Sampler;

enum { SAMPLER_LANES = 8 };

// e^x for -700 <= x <= 0, within 4e-16 of itself. Compilers vectorize it where it is inlined, unlike the library's, which
// takes ten times as long.
HOST_DEVICE __attribute__((always_inline)) static inline double sampler_exp(double x) {
    // x = n ln(2) + r. Adding 1.5 * 2^52 rounds to an integer, which is then in the lowest bits.
    double shifted = x * 1.4426950408889634 + 6755399441055744.0, n = shifted - 6755399441055744.0;
    double r = fma(n, -1.9082149292705877e-10, fma(n, -0.6931471803691238, x)), power = 1.0 / 6227020800;
    uint64_t exponent, bits;
    power = fma(r, fma(r, fma(r, power, 1.0 / 479001600), 1.0 / 39916800), 1.0 / 3628800);
    power = fma(r, fma(r, fma(r, power, 1.0 / 362880), 1.0 / 40320), 1.0 / 5040);
    power = fma(r, fma(r, fma(r, power, 1.0 / 720), 1.0 / 120), 1.0 / 24);
    power = fma(r, fma(r, fma(r, fma(r, power, 1.0 / 6), 1.0 / 2), 1.0), 1.0);
    memcpy(&exponent, &shifted, sizeof exponent);
    memcpy(&bits, &power, sizeof bits);
    bits += exponent << 52;
    memcpy(&power, &bits, sizeof power);
    return power;
}

// The weights e^((logit - largest) / temperature) of V logits. No sum of weights notices e^-700. Returns their sum, the
// same with vectors of any width.
static inline double sampler_weigh(double* weight, const real* logits, int V, real largest, double temperature) {
    double lane[SAMPLER_LANES] = {0}, sum = 0;
#pragma omp simd
    for (int i = 0; i < V; i++) {
        double x = (double)(logits[i] - largest) / temperature;
        weight[i] = x > -700 ? x : -700;
    }
    // A loop of its own: with the choice in it, gcc would not vectorize it.
#pragma omp simd
    for (int i = 0; i < V; i++) weight[i] = sampler_exp(weight[i]);
    for (int i = 0; i + SAMPLER_LANES <= V; i += SAMPLER_LANES)
#pragma omp simd
        for (int l = 0; l < SAMPLER_LANES; l++) lane[l] += weight[i + l];
    for (int i = V / SAMPLER_LANES * SAMPLER_LANES; i < V; i++) sum += weight[i];
    for (int l = 0; l < SAMPLER_LANES; l++) sum += lane[l];
    return sum;
}

// Keep the tokens of the largest logits, none below `low`, until they are `most` or their weights add up to `mass`; of
// equal logits the first. Set the weights of all others to 0. Returns the sum of the weights that are kept.
static inline double sampler_keep(double* weight, const real* logits, int V, int most, double mass, real low) {
    int *token = (int*)xmalloc((size_t)V * sizeof(int)), n = 0, count = 0;
    real high = low, middle;
    double sum = 0;
    for (int i = 0; i < V; i++) {
        token[n] = i, n += logits[i] >= low && weight[i] > 0;
        high = logits[i] > high ? logits[i] : high;
    }
    high = (real)nextafterf((float)high, INFINITY);
    // Tokens from `high` on are kept, those below `low` are not, and token [n] are between.
    while (middle = low + (high - low) / 2, middle > low && middle < high) {
        int above = 0, left = 0;
        double more = 0;
        for (int i = 0; i < n; i++) {
            int is_above = logits[token[i]] >= middle;
            above += is_above, more += is_above * weight[token[i]];
        }
        int is_enough = count + above >= most || sum + more >= mass;
        for (int i = 0; i < n; i++) token[left] = token[i], left += (logits[token[i]] >= middle) == is_enough;
        n = left;
        if (is_enough) low = middle;
        else high = middle, count += above, sum += more;
    }
    for (int i = 0; i < V; i++)
        if (logits[i] < low) weight[i] = 0;
    for (int i = 0; i < n; i++)
        if (count < most && sum < mass) count++, sum += weight[token[i]];
        else weight[token[i]] = 0;
    free(token);
    return sum;
}

// Draw a token from softmax(logits / temperature) over the candidates among V logits; of equal logits the first.
// `uniform` in (0, 1) is the random number.
static inline int sampler_draw(const real* logits, int V, Sampler sampler, double uniform) {
    int best = 0, at = 0;
    real largest = -INFINITY, least = INFINITY;
    double sum = 0;
#pragma omp simd reduction(max : largest) reduction(min : least)
    for (int i = 0; i < V; i++) {
        largest = logits[i] > largest ? logits[i] : largest;
        least = logits[i] < least ? logits[i] : least;
    }
    while (best + 1 < V && logits[best] != largest) best++;
    if (sampler.temperature <= 0 || sampler.top_k == 1) return best;
    double *weight = (double*)xmalloc((size_t)V * sizeof(double)),
           total = sampler_weigh(weight, logits, V, largest, sampler.temperature);
    if (sampler.top_k > 0 && sampler.top_k < V) total = sampler_keep(weight, logits, V, sampler.top_k, INFINITY, least);
    // V logits below this bound have less than 1 - top_p of the total. 1.01 is for roundings.
    else if (sampler.top_p > 0 && sampler.top_p < 1)
        least = (real)fmax((double)least,
                           (double)largest + sampler.temperature * log((1 - sampler.top_p) * total / (1.01 * V)));
    if (sampler.top_p > 0 && sampler.top_p < 1)
        total = sampler_keep(weight, logits, V, V, sampler.top_p * total, least);
    // The token where the running sum exceeds `uniform` of the sum.
    while (at < V && (sum += weight[at]) <= uniform * total) at++;
    free(weight);
    return at < V ? at : best;
}

#endif
