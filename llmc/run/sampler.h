/* Drawing the next token from a row of logits. */
#ifndef LLMC_SAMPLER_H
#define LLMC_SAMPLER_H

#include "../base/util.h"

typedef struct {
    double temperature;  // 0: always the most likely token
    int top_k;           // 0: all tokens are candidates
} Sampler;

static inline int sampler_descending(const void* a, const void* b) {
    real x = *(const real*)a, y = *(const real*)b;
    return (x < y) - (x > y);
}

// A token from softmax(logits / temperature) over the top_k largest of V logits (of equal ones, the first); `uniform` in
// (0, 1) decides.
static inline int sampler_draw(const real* logits, int V, Sampler sampler, double uniform) {
    int best = 0;
    for (int i = 1; i < V; i++)
        if (logits[i] > logits[best]) best = i;
    if (sampler.temperature <= 0 || sampler.top_k == 1) return best;
    real threshold = -INFINITY;
    int ties = V;  // candidates that are as likely as the last of them
    if (sampler.top_k > 0 && sampler.top_k < V) {
        real* sorted = (real*)xmalloc((size_t)V * sizeof(real));
        memcpy(sorted, logits, (size_t)V * sizeof(real));
        qsort(sorted, (size_t)V, sizeof(real), sampler_descending);
        threshold = sorted[sampler.top_k - 1];
        for (ties = 1; ties < sampler.top_k && sorted[sampler.top_k - 1 - ties] == threshold;) ties++;
        free(sorted);
    }
    double total = 0;
    for (int drawing = 0; drawing < 2; drawing++) {  // first their sum, then the one where `uniform` of it is reached
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
