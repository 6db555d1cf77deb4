/* Faster than loops: the sum is cut into 4 * LANES sums that do not wait for one another. LANES of them lie in one
 * vector, which one instruction multiplies and adds (vector_fma, product.h). What limits it now are loads: two
 * vectors for each product of vectors, and all of w comes from the outer caches again for each row of x. */

// Their sum.
static inline real lanes_sum(Vector v) {
    real sum = 0;
    for (int j = 0; j < LANES; j++) sum += v[j];
    return sum;
}

static inline real lanes_dot(const real* a, const real* b, int n) {
    Vector sum[4] = {{0}, {0}, {0}, {0}};
    int i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int j = 0; j < 4; j++)
            sum[j] = vector_fma(*(const Vector*)(a + i + j * LANES), *(const Vector*)(b + i + j * LANES), sum[j]);
    real total = lanes_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
    for (; i < n; i++) total += a[i] * b[i];
    return total;
}

static inline void lanes_matmul_forward(floatX* y, const floatX* x, Linear p, int N, int IC, int OC, Mode mode,
                                        Context* ctx) {
    (void)ctx;
    for (int n = 0; n < N; n++)
        for (int o = 0; o < OC; o++) {
            real sum = lanes_dot(x + (size_t)n * (size_t)IC, p.w + (size_t)o * (size_t)IC, IC) + (p.b ? p.b[o] : 0);
            real* to = &y[(size_t)n * (size_t)OC + (size_t)o];
            *to = mode == ADD ? *to + sum : sum;
        }
}
