/* Faster than blocked: the lanes of a vector are outputs, not parts of one sum. A panel is TILE_COLS rows of w,
 * copied so that the TILE_COLS numbers of one i are adjacent. A tile of TILE_ROWS rows of x then needs two loads and
 * TILE_ROWS broadcasts for 2 * TILE_ROWS products of vectors, all in one stream, and nothing is left to add up
 * across lanes in the end. The copy is made once and used by all rows of x. */

// panel[i, c] = w[o + c, i]; 0 for rows of w that do not exist.
static inline void packed_panel(real* panel, const real* w, int IC, int columns) {
    if (columns < TILE_COLS) memset(panel, 0, (size_t)IC * (size_t)TILE_COLS * sizeof *panel);
    for (int c = 0; c < columns; c++)
        for (int i = 0; i < IC; i++) panel[i * TILE_COLS + c] = w[(size_t)c * (size_t)IC + (size_t)i];
}

// The product, and the panel that a call computes: the TILE_COLS outputs from o on.
typedef struct {
    floatX* y;
    const floatX* x;
    Linear p;
    int N, IC, OC;
    Mode mode;
} PackedProduct;

static inline void packed_columns(const PackedProduct* m, const real* panel, int o) {
    const Vector zero = {0};
    int N = m->N, IC = m->IC, columns = min_int(TILE_COLS, m->OC - o);
    for (int n = 0; n < N; n += TILE_ROWS) {
        const real* row[TILE_ROWS];
        Vector sum[TILE_ROWS][2];
        for (int r = 0; r < TILE_ROWS; r++) {
            row[r] = m->x + (size_t)min_int(n + r, N - 1) * (size_t)IC;
            sum[r][0] = sum[r][1] = zero;
        }
        for (int i = 0; i < IC; i++) {
            Vector left = *(const Vector*)(panel + i * TILE_COLS),
                   right = *(const Vector*)(panel + i * TILE_COLS + LANES);
            for (int r = 0; r < TILE_ROWS; r++) {
                Vector xi = row[r][i] - zero;  // in every lane
                sum[r][0] = vector_fma(xi, left, sum[r][0]);
                sum[r][1] = vector_fma(xi, right, sum[r][1]);
            }
        }
        for (int r = 0; r < min_int(TILE_ROWS, N - n); r++)
            for (int c = 0; c < columns; c++) {
                real *to = &m->y[(size_t)(n + r) * (size_t)m->OC + (size_t)(o + c)],
                     value = sum[r][c / LANES][c % LANES];
                if (m->p.b) value += m->p.b[o + c];
                *to = m->mode == ADD ? *to + value : value;
            }
    }
}

static void packed_matmul_forward(floatX* y, const floatX* x, Linear p, int N, int IC, int OC, Mode mode,
                                  Context* ctx) {
    PackedProduct m = {y, x, p, N, IC, OC, mode};
    real* panel = (real*)device_scratch(ctx, (size_t)IC * (size_t)TILE_COLS * sizeof *panel);
    for (int o = 0; o < OC; o += TILE_COLS) {
        packed_panel(panel, p.w + (size_t)o * (size_t)IC, IC, min_int(TILE_COLS, OC - o));
        packed_columns(&m, panel, o);
    }
}
