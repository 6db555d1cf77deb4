/* The k most likely tokens of a row of logits, or one that is drawn. */
#ifndef LLMC_BASE_TOP_K_H
#define LLMC_BASE_TOP_K_H

#include "llmc/base/util.h"

// best [k]: the indices of the k largest of V logits, in descending order; of equal logits the lower index first.
// probability [k]: their softmax probabilities, NaN if a logit is not finite. Returns min(k, V), the number of entries.
static inline int top_k(int* best, double* probability, const real* logits, int V, int k) {
    double total = 0;
    int found = 0;
    for (int v = 0; v < V; v++) {
        int i = found < k ? found++ : k;
        for (; i > 0 && logits[v] > logits[best[i - 1]]; i--)
            if (i < k) best[i] = best[i - 1];
        if (i < k) best[i] = v;
    }
    for (int v = 0; v < V; v++) total += exp((double)(logits[v] - logits[best[0]]));
    for (int i = 0; i < found; i++) probability[i] = exp((double)(logits[best[i]] - logits[best[0]])) / total;
    return found;
}

// Draw a token from softmax(logits [V]): the first at which the running sum of probabilities exceeds `uniform`, a
// random number in (0, 1).
static inline int softmax_draw(const real* logits, int V, double uniform) {
    double sum = 0, total = 0;
    real largest = -INFINITY;
    int token = 0;
    for (int v = 0; v < V; v++) largest = logits[v] > largest ? logits[v] : largest;
    for (int v = 0; v < V; v++) total += exp((double)(logits[v] - largest));
    while (token + 1 < V && (sum += exp((double)(logits[token] - largest))) <= uniform * total) token++;
    return token;
}

#endif
