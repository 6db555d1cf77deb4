/* Exercise 3, layernorm_forward: each row of x gets the mean 0 and the standard deviation 1, then a scale and an
 * offset.
 *
 *   mean[n] = average of x[n, c] over the C channels
 *   rstd[n] = 1 / sqrt(average of (x[n, c] - mean[n])^2 + eps)
 *   y[n, c] = (x[n, c] - mean[n]) rstd[n] w[c] + b[c]
 *
 * x, y [N, C] with N = size.N, C = size.C: element (n, c) is at n * C + c. mean is stats.mean, rstd is stats.rstd,
 * both [N]: the backward pass reads them. w is p.w_fp32, b is p.b, both [C]. One case has a mean of 2000: the
 * average of x^2 minus the squared mean would lose every digit. */
static void exercise_layernorm_forward(floatX* y, LayerNormStats stats, const floatX* x, LayerNorm p, Rows size,
                                       real eps, Context* ctx) {
    // your code
}
