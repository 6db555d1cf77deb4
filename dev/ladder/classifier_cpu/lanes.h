/* Faster than loops: an exponential without branches and calls, so that the compiler computes eight at a time
 * (llmc/ops/common/vector_math.h), and sums in lanes. Each exponential is computed once: it takes the logit's place,
 * and becomes the gradient by one multiplication. classifier_maximum() and classifier_sum() are the shipped op's;
 * what the op adds are threads. */
static inline void lanes_classifier_backward(Losses losses, floatX* logits, const int* targets, const real* loss_scale,
                                             int N, int V, int Vp, Context* ctx) {
    double scaled = losses.scale * (loss_scale ? (double)*loss_scale : 1);
    (void)ctx;
    for (int n = 0; n < N; n++) {
        floatX* x = logits + (size_t)n * (size_t)Vp;
        int target = targets[n], used = target < 0 ? 0 : V;
        losses.each[n] = 0;
        if (used) {
            real max = classifier_maximum(x, V), at_target = x[target];
            double sum = classifier_sum(x, x, V, max), p = (double)x[target] / sum;
            real factor = (real)(scaled / sum);
            losses.each[n] = (real)((double)max + log(sum) - (double)at_target);
            for (int v = 0; v < V; v++) x[v] *= factor;
            x[target] = (real)(scaled * (p - 1));
        }
        for (int v = used; v < Vp; v++) x[v] = 0;
    }
    losses_add_ref(losses, N);
}
