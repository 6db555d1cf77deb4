/* Exercise 5, classifier_backward: the loss of a language model, and the gradient of its logits, in one op.
 *
 *   lse[n]        = log(sum over v < V of exp(logits[n, v]))
 *   losses.each[n] = lse[n] - logits[n, targets[n]]
 *   losses.sum[0]  = or += losses.scale * (sum of losses.each)            as losses.mode says, SET or ADD
 *   logits[n, v]   = factor * (exp(logits[n, v] - lse[n]) - (1 if v is targets[n], else 0))   in place
 *   factor         = losses.scale * loss_scale[0], or losses.scale where loss_scale is NULL
 *
 * logits [N, Vp]: element (n, v) is at n * Vp + v. The columns V to Vp - 1 are padding: they may hold NaN before,
 * are in no sum, and must be 0 after. A target below 0 is to be ignored: its loss and its row of gradients are 0.
 * Subtract the row's maximum before you take exponentials, or they overflow. Add up the exponentials and the
 * losses in double. */
static void exercise_classifier_backward(Losses losses, floatX* logits, const int* targets, const real* loss_scale,
                                         int N, int V, int Vp, Context* ctx) {
    // your code
}
