/* The definition: the row's maximum, the sum of the exponentials, then the gradients, which take the exponentials
 * again. The library's exp is a call for each element, in double. */
static inline void loops_classifier_backward(Losses losses, floatX* logits, const int* targets, const real* loss_scale,
                                             int N, int V, int Vp, Context* ctx) {
    double factor = losses.scale * (loss_scale ? (double)*loss_scale : 1);
    (void)ctx;
    for (int n = 0; n < N; n++) {
        floatX* x = logits + (size_t)n * (size_t)Vp;
        int target = targets[n], used = target < 0 ? 0 : V;
        double max = -INFINITY, sum = 0;
        for (int v = 0; v < used; v++) max = fmax(max, (double)x[v]);
        for (int v = 0; v < used; v++) sum += exp((double)x[v] - max);
        losses.each[n] = used ? (real)(max + log(sum) - (double)x[target]) : 0;
        for (int v = 0; v < used; v++) x[v] = (real)(factor * (exp((double)x[v] - max) / sum - (v == target)));
        for (int v = used; v < Vp; v++) x[v] = 0;
    }
    losses_add_ref(losses, N);
}
