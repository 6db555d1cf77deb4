/* A loop for each line of the formula, as an optimizer written in tensor operations runs it: all of m, all of v,
 * then all parameters. The gradient is read from memory twice, and m and v are written by one loop and read by
 * another: 36 bytes an element, where the op needs 28. */
static inline void rung_adamw_update(AdamWState a, size_t elements, const ParamSpan* spans, int count,
                                     OptimizerSettings h, Context* ctx) {
    AdamWCoefficients c = adamw_coefficients(h);
    AdamWStep k = *a.step;
    (void)ctx, (void)elements;
    for (int pass = 0; pass < 3 && k.is_taken; pass++)
        for (int s = 0; s < count; s++) {
            real *p = a.params + spans[s].offset, *m = a.m + spans[s].offset, *v = a.v + spans[s].offset;
            const real* grads = a.grads + spans[s].offset;
            size_t n = spans[s].size;
            real rate = spans[s].rate, shrink = (real)(1 - h.lr * rate * h.weight_decay * spans[s].decay);
            if (pass == 0)
                for (size_t i = 0; i < n; i++) m[i] = c.beta1 * m[i] + c.beta1_rest * (k.gradient * grads[i]);
            if (pass == 1)
                for (size_t i = 0; i < n; i++) {
                    real g = k.gradient * grads[i];
                    v[i] = c.beta2 * v[i] + c.beta2_rest * (g * g);
                }
            if (pass == 2)
                for (size_t i = 0; i < n; i++) {
                    real decayed = p[i] * (c.cautious && m[i] * p[i] < 0 ? 1 : shrink);
                    p[i] = decayed - k.step_size * rate * m[i] / (k.root_scale * (real)sqrt((double)v[i]) + c.eps);
                }
        }
}
