/* draw: the tokens that the host draws from the same logits. */
#ifndef DEV_OPS_DRAW_H
#define DEV_OPS_DRAW_H

#include "apps/use/draw.h"
#include "op.h"

// kind 0: logits of a model; 1: whole numbers, of which many are equal; 2: all are equal. One row is not finite.
static inline void draw_check(Harness* h, int V, int kind, Sampler s) {
    enum { N = 2, BAD = 1 };
    case_begin(h, "draw V=%d kind=%d temperature=%g top_k=%d top_p=%g", V, kind, s.temperature, s.top_k, s.top_p);
    int Vp = (int)round_up((size_t)V, 8), *ints = int_array(h, 5 * N), not_equal = 0, not_stepped = 0;
    Array logits = input(h, (size_t)(N * Vp), 2);
    Newest t = {ints, ints + N, ints + 2 * N, (uint64_t*)pinned_memory(h, N * sizeof(uint64_t)), {ints + 3 * N}};
    t.drawn[1] = ints + 4 * N;
    for (size_t i = 0; i < logits.n; i++)
        if (kind) logits.host[i] = kind == 1 ? (real)round((double)logits.host[i]) : (real)0.5;
    logits.host[BAD * Vp + V / 2] = (real)(kind ? NAN : INFINITY);
    array_upload(logits);
    for (int n = 0; n < N; n++) t.position[n] = t.count[n] = 10 * n, t.key[n] = (uint64_t)(n * V + kind);
    for (int step = 0; step < (h->is_quick ? 2 : 8); step++) {
        int want[N];
        for (int n = 0; n < N; n++)
            want[n] = n == BAD ? DRAW_NOT_FINITE : sampler_draw(logits.host + n * Vp, V, s, draw_uniform(t, n));
        draw(t, logits.device, N, V, Vp, s, &h->ctx);
        device_synchronize(&h->ctx);
        for (int n = 0; n < N; n++) {
            not_equal += t.token[n] != max_int(want[n], 0) || t.drawn[step % 2][n] != want[n];
            not_stepped += t.count[n] != 10 * n + step + 1 || t.position[n] != t.count[n];
        }
    }
    expect_true(h, "the tokens are those of the host", not_equal == 0);
    expect_true(h, "positions and counts grow by one", not_stepped == 0);
    case_end(h);
}

static inline void test_draw(Harness* h) {
    static const Sampler SAMPLERS[] = {{0, 0, 0},   {1, 0, 0},     {0.7, 1, 0.9}, {0.8, 40, 0},
                                       {1, 0, 0.5}, {1.3, 7, 0.6}, {1, 0, 1e-9},  {0.9, 300, 0.99}};
    static const int SIZES[] = {1, 257, 1500, 5000};
    for (size_t i = 0; i < COUNT_OF(SIZES); i++)
        for (size_t s = 0; s < COUNT_OF(SAMPLERS); s++)
            for (int kind = 0; kind < 3; kind++) draw_check(h, SIZES[i], kind, SAMPLERS[s]);
}

#endif
