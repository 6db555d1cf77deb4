/* Exercise 7, matmul_forward: the linear layer, where nearly all time of a training step goes.
 *
 *   y[n, o] = or += b[o] + sum over i of x[n, i] w[o, i]            as mode says, SET or ADD
 *
 * x [N, IC], w [OC, IC], y [N, OC]: rows one after the other. w is p.w; b is p.b [OC], or NULL: then there is
 * none. Rows of x and of w are contiguous, so the innermost loop reads both in order. Three loops pass. Then look
 * at the speed: dev/ladder/matmul_cpu has the steps from there to the shipped one. */
static void exercise_matmul_forward(floatX* y, const floatX* x, Linear p, int N, int IC, int OC, Mode mode,
                                    Context* ctx) {
    // your code
}
