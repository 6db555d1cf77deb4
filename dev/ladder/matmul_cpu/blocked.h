/* Faster than lanes: a loaded vector is used several times. Three rows of x times four rows of w are twelve sums,
 * which stay in registers: seven loads for twelve products of vectors, where the rung before needs twenty-four. And
 * the rows of w are taken in blocks that stay in the L2 cache while all rows of x pass by, so w comes from further
 * away once. */
enum { BLOCK_X = 3, BLOCK_W = 4, BLOCK_ROWS = 64 };

// sum[r][c] = row r of x . row c of w. Rows that do not exist are given as the last one.
static inline void blocked_tile(real sum[BLOCK_X][BLOCK_W], const real* const* x, const real* const* w, int IC) {
    Vector v[BLOCK_X][BLOCK_W] = {{{0}}};
    int i = 0;
    for (; i + LANES <= IC; i += LANES)
        for (int c = 0; c < BLOCK_W; c++) {
            Vector column = *(const Vector*)(w[c] + i);
            for (int r = 0; r < BLOCK_X; r++) v[r][c] = vector_fma(*(const Vector*)(x[r] + i), column, v[r][c]);
        }
    for (int r = 0; r < BLOCK_X; r++)
        for (int c = 0; c < BLOCK_W; c++) {
            sum[r][c] = 0;
            for (int j = 0; j < LANES; j++) sum[r][c] += v[r][c][j];
            for (int j = i; j < IC; j++) sum[r][c] += x[r][j] * w[c][j];
        }
}

static void blocked_matmul_forward(floatX* y, const floatX* x, Linear p, int N, int IC, int OC, Mode mode,
                                   Context* ctx) {
    (void)ctx;
    for (int begin = 0; begin < OC; begin += BLOCK_ROWS)
        for (int n = 0; n < N; n += BLOCK_X)
            for (int o = begin; o < min_int(OC, begin + BLOCK_ROWS); o += BLOCK_W) {
                const real *rows[BLOCK_X], *columns[BLOCK_W];
                real sum[BLOCK_X][BLOCK_W];
                for (int r = 0; r < BLOCK_X; r++) rows[r] = x + (size_t)min_int(n + r, N - 1) * (size_t)IC;
                for (int c = 0; c < BLOCK_W; c++) columns[c] = p.w + (size_t)min_int(o + c, OC - 1) * (size_t)IC;
                blocked_tile(sum, rows, columns, IC);
                for (int r = 0; r < min_int(BLOCK_X, N - n); r++)
                    for (int c = 0; c < min_int(BLOCK_W, OC - o); c++) {
                        real* to = &y[(size_t)(n + r) * (size_t)OC + (size_t)(o + c)];
                        real value = sum[r][c] + (p.b ? p.b[o + c] : 0);
                        *to = mode == ADD ? *to + value : value;
                    }
            }
}
