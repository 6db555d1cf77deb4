/* Exercise 11, lamb_update: AdamW's direction, scaled for each tensor by how long the tensor is. For very large
 * batches.
 *
 *   g = step.gradient * grads[i];  m[i], v[i] as in AdamW (exercise 10)
 *   u[i]  = step.step_size * m[i] / (step.root_scale * sqrt(v[i]) + eps) + weight_decay * decay * params[i]
 *   ratio = |params| / |u|, the square roots of the sums of squares over a tensor, of params before the update;
 *           1 where one of the sums is 0, and where the span's `trust` is 0
 *   params[i] = params[i] - lr * ratio * u[i]
 *
 * step is a.step[0]; its step_size is without lr here. Where its is_taken is 0, nothing changes. A tensor is one
 * of the in.count spans in.spans[s], with offset, size, decay and trust; what lies between spans must not change.
 * The ratio needs all u of a tensor: compute u twice, or keep it in memory from malloc(). Sums are of up to
 * millions of squares: use double. lr, weight_decay, beta1, beta2 and eps are fields of h. */
static void exercise_lamb_update(AdamWState a, LambSpans in, OptimizerSettings h, Context* ctx) {
    // your code
}
