/* Exercise 2, gelu_backward: the gradient of the loss in x, from that in y = GELU(x).
 *
 *   mode SET    dx[i] = dy[i] GELU'(x[i])          mode ADD    dx[i] += dy[i] GELU'(x[i])
 *
 *   kind GELU_TANH    GELU'(x) = 0.5 (1 + t) + 0.5 x (1 - t^2) k (1 + 3 * 0.044715 x^2)
 *                     with k = sqrt(2 / pi), t = tanh(k (x + 0.044715 x^3)): docs/tour.md derives it
 *   kind GELU_ERF     GELU'(x) = 0.5 (1 + erf(x / sqrt(2))) + x exp(-x^2 / 2) / sqrt(2 pi)
 *
 * Every op that writes gradients says how: SET overwrites what is there, which may be NaN; ADD adds to it. dx may
 * be dy. */
static void exercise_gelu_backward(floatX* dx, const floatX* dy, const floatX* x, size_t n, Gelu kind, Mode mode,
                                   Context* ctx) {
    // your code
}
