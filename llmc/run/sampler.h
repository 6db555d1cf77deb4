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

// How many of the first `count` logits, sorted in descending order, have probabilities that add up to top_p of the sum;
// at least one.
static inline int sampler_nucleus(const real* sorted, int count, Sampler sampler) {
    double total = 0, sum = 0;
    int n = 0;
    for (int i = 0; i < count; i++) total += exp((double)(sorted[i] - sorted[0]) / sampler.temperature);
    while (n < count && sum < sampler.top_p * total)
        sum += exp((double)(sorted[n++] - sorted[0]) / sampler.temperature);
    return max_int(n, 1);  // a NaN among the logits makes the sum NaN
}

// Draw a token from softmax(logits / temperature) over the candidates among V logits; of equal logits the first.
// `uniform` in (0, 1) is the random number.
static inline int sampler_draw(const real* logits, int V, Sampler sampler, double uniform) {
    int best = 0;
    for (int i = 1; i < V; i++)
        if (logits[i] > logits[best]) best = i;
    if (sampler.temperature <= 0 || sampler.top_k == 1) return best;
    real threshold = -INFINITY;
    int candidates = sampler.top_k > 0 ? min_int(sampler.top_k, V) : V, has_nucleus = sampler.top_p > 0;
    int ties = V;  // candidates with the logit of the last one
    if (candidates < V || has_nucleus) {
        real* sorted = (real*)xmalloc((size_t)V * sizeof(real));
        memcpy(sorted, logits, (size_t)V * sizeof(real));
        qsort(sorted, (size_t)V, sizeof(real), sampler_descending);
        if (has_nucleus) candidates = sampler_nucleus(sorted, candidates, sampler);
        threshold = sorted[candidates - 1];
        for (ties = 1; ties < candidates && sorted[candidates - 1 - ties] == threshold;) ties++;
        free(sorted);
    }
    double total = 0;
    for (int drawing = 0; drawing < 2;
         drawing++) {  // first the sum, then the token where the running sum reaches `uniform` of it
        double sum = 0;
        for (int i = 0, left = ties; i < V; i++) {
            if (!(logits[i] > threshold || (logits[i] == threshold && left-- > 0))) continue;
            sum += exp((double)(logits[i] - logits[best]) / sampler.temperature);
            if (drawing && sum > uniform * total) return i;
        }
        total = sum;
    }
    return best;
}

#endif
