/* y[n, o] (SET or ADD) = b[o] + sum over i of x[n, i] w[o, i], as it is written. The compiler may not change the
 * order of a float sum, so each addition waits for the one before: four or so cycles for a product and a sum, on a
 * processor that can begin 32 or more in that time. */
static void loops_matmul_forward(floatX* y, const floatX* x, Linear p, int N, int IC, int OC, Mode mode, Context* ctx) {
    (void)ctx;
    for (int n = 0; n < N; n++)
        for (int o = 0; o < OC; o++) {
            const real *row = x + (size_t)n * (size_t)IC, *w = p.w + (size_t)o * (size_t)IC;
            real sum = 0, *to = &y[(size_t)n * (size_t)OC + (size_t)o];
            for (int i = 0; i < IC; i++) sum += row[i] * w[i];
            sum += p.b ? p.b[o] : 0;
            *to = mode == ADD ? *to + sum : sum;
        }
}
