/* Exercise 10, adamw_update: the update of every parameter.
 *
 *   g = step.gradient * grads[i]
 *   m[i] = beta1 m[i] + (1 - beta1) g
 *   v[i] = beta2 v[i] + (1 - beta2) g^2
 *   params[i] = params[i] (1 - lr * weight_decay * decay) - step.step_size * m[i] / root
 *   root = step.root_scale * sqrt(v[i]) + eps
 *
 * a.params, a.m, a.v, a.grads: flat buffers of `elements` numbers. a.step[0] is what exercise 9 computes; where
 * its is_taken is 0, nothing changes. The buffers hold `count` spans: number s is elements spans[s].offset to
 * spans[s].offset + spans[s].size - 1, with decay = spans[s].decay, 1 or 0. What lies between spans must not
 * change. lr, weight_decay, beta1, beta2 and eps are fields of h. a.master is NULL in this build. */
static void exercise_adamw_update(AdamWState a, size_t elements, const ParamSpan* spans, int count, OptimizerSettings h,
                                  Context* ctx) {
    // your code
}
