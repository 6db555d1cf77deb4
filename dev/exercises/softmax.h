/* softmax_backward: the derivative of the softmax, which attention has inside. An op of its own for the exercises.
 *
 *   ds[n, k] = p[n, k] (dp[n, k] - sum over j of p[n, j] dp[n, j])            p, dp, ds [N, T]; ds may be dp */
#ifndef DEV_EXERCISES_SOFTMAX_H
#define DEV_EXERCISES_SOFTMAX_H

#include "llmc/device/device.h"

static inline void softmax_backward_ref(real* ds, const real* p, const real* dp, int N, int T) {
    for (size_t row = 0; row < (size_t)N * (size_t)T; row += (size_t)T) {
        double sum = 0;
        for (size_t k = row; k < row + (size_t)T; k++) sum += (double)p[k] * (double)dp[k];
        for (size_t k = row; k < row + (size_t)T; k++) ds[k] = (real)((double)p[k] * ((double)dp[k] - sum));
    }
}

// Partial sums that do not wait for one another.
static inline void softmax_backward(floatX* ds, const floatX* p, const floatX* dp, int N, int T, Context* ctx) {
    enum { LANES = 16 };
    (void)ctx;
#pragma omp parallel for schedule(static)
    for (int n = 0; n < N; n++) {
        size_t row = (size_t)n * (size_t)T;
        real lane[LANES] = {0}, sum = 0;
        int k = 0;
        for (; k + LANES <= T; k += LANES)
            for (int j = 0; j < LANES; j++) lane[j] += p[row + (size_t)(k + j)] * dp[row + (size_t)(k + j)];
        for (; k < T; k++) lane[0] += p[row + (size_t)k] * dp[row + (size_t)k];
        for (int j = 0; j < LANES; j++) sum += lane[j];
        for (k = 0; k < T; k++) ds[row + (size_t)k] = p[row + (size_t)k] * (dp[row + (size_t)k] - sum);
    }
}

#endif
