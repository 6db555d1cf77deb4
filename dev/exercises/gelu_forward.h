/* Exercise 1, gelu_forward: the activation of a block's MLP.
 *
 *   kind GELU_TANH    y[i] = 0.5 x[i] (1 + tanh(sqrt(2 / pi) (x[i] + 0.044715 x[i]^3)))          GPT-2
 *   kind GELU_ERF     y[i] = 0.5 x[i] (1 + erf(x[i] / sqrt(2)))                                  BERT
 *
 * x and y have n elements; y may be x. tanhf() and erff() are C's. In this build floatX, the type of weights and
 * activations, and real, the type of sums, are both float. ctx is the device; the CPU does not need it. */
static void exercise_gelu_forward(floatX* y, const floatX* x, size_t n, Gelu kind, Context* ctx) {
    // your code
}
