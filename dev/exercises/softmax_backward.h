/* Exercise 3, softmax_backward: p = softmax(s), row by row; from the gradient dp of p to the gradient ds of s.
 *
 *   ds[n, k] = p[n, k] (dp[n, k] - sum over j of p[n, j] dp[n, j])
 *
 * p, dp, ds [N, T]: element (n, k) is at n * T + k. Probabilities of a row add up to 1, so the sum is the mean of
 * dp: a score that gains takes from the others. ds may be dp: take the sum before you write. */
static void exercise_softmax_backward(floatX* ds, const floatX* p, const floatX* dp, int N, int T, Context* ctx) {
    // your code
}
