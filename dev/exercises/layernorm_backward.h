/* Exercise 4, layernorm_backward: gradients of a layernorm's input and parameters.
 *
 *   with u[n, c] = (x[n, c] - mean[n]) rstd[n]  and  e[n, c] = dy[n, c] w[c]
 *   dx[n, c] = rstd[n] (e[n, c] - average of the row's e - u[n, c] * average of the row's e u)
 *   dw[c]    = sum over n of dy[n, c] u[n, c]          db[c] = sum over n of dy[n, c]
 *
 * Inputs: in.x, in.dy [N, C]; in.stats.mean, in.stats.rstd [N], which the forward pass left; in.w [C]; N =
 * in.size.N, C = in.size.C. Outputs: dx [N, C], set or added to as dx_mode says; d.w, d.b [C], as d_mode says:
 * with SET they hold anything before, NaN too. Averages are over the C channels of a row. Up to 7,000 rows add up
 * in dw and db: sum them in double. With SET, dx may be in.dy. docs/tour.md derives the formulas. */
static void exercise_layernorm_backward(floatX* dx, LayerNormGrads d, LayerNormInputs in, Mode dx_mode, Mode d_mode,
                                        Context* ctx) {
    // your code
}
