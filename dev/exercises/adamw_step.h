/* Exercise 9, adamw_step: the numbers of an AdamW step that are the same for all parameters, Adam's bias
 * correction among them. The moments m and v begin at 0, so after t updates they are too small by 1 - beta1^t and
 * 1 - beta2^t.
 *
 *   step.gradient   = clip / scale        the factor on every gradient. clip is h.max_norm / norm where h.max_norm is
 *                                         above 0 and norm is above h.max_norm; else 1
 *   step.step_size  = h.lr / (1 - h.beta1^t)
 *   step.root_scale = 1 / sqrt(1 - h.beta2^t)
 *   step.is_taken   = 1, or 0 where norm is NaN or infinite
 *
 * adamw_update then does p -= step_size * m / (root_scale * sqrt(v) + h.eps). t is `update`, from 1 up to
 * billions: use pow(). Compute in double; the fields are real. */
static AdamWStep exercise_adamw_step(double norm, double scale, int64_t update, OptimizerSettings h) {
    AdamWStep step = {0};
    // your code
    return step;
}
