/* embedding_rows: test and bench. Sums and updates have references; there is nothing to differentiate. */
#ifndef DEV_OPS_EMBEDDING_ROWS_H
#define DEV_OPS_EMBEDDING_ROWS_H

#include "dev/recsys/ops/embedding_rows.h"
#include "harness.h"

typedef enum { ROWS_SGD, ROWS_ADAM } RowsKind;

typedef struct {
    RowSegments segments, want;
    int *index, E;
    size_t stride;
    Array w, copy, m, v, dx;
    RowsKind kind;
    OptimizerSettings settings;
    AdamWStep* step;
    Context* ctx;
} RowsCase;

static inline RowsCase* rows_case(Harness* h, int N, int rows, int E, RowsKind kind) {
    RowsCase* k = (RowsCase*)case_memory(h, sizeof *k);
    OptimizerSettings settings = {.lr = 0.01, .beta1 = 0.25, .beta2 = 0.5, .eps = 1e-8};
    size_t n = (size_t)rows * (size_t)E;
    k->settings = settings, k->kind = kind, k->E = E, k->ctx = &h->ctx;
    k->stride = (size_t)E + 8;
    k->w = input(h, n, 1.0), k->m = input(h, n, 0.1), k->v = input(h, n, 0.1);
    for (size_t i = 0; i < n; i++) k->v.initial[i] = (real)fabs((double)k->v.initial[i]);
    array_restore(k->v);
    k->copy = input(h, HAS_DEVICE_MEMORY ? n : 0, 1.0);
    k->dx = input(h, (size_t)N * k->stride, 1 / sqrt(N));
    k->index = int_array(h, (size_t)N);
    // Most rows are rare, some have many lookups, and some have none.
    for (int i = 0; i < N; i++)
        k->index[i] = random_below(h, 3) ? random_below(h, rows) / 2 * 2 : random_below(h, 3) * rows / 3;
    k->segments = row_segments_alloc(N, rows, k->ctx);
    k->want.N = N, k->want.rows = rows;
    k->want.source = (int*)case_memory(h, (size_t)N * sizeof(int));
    k->want.begin = (int*)case_memory(h, ((size_t)rows + 1) * sizeof(int));
    row_segments_ref(k->want, k->index);
    k->step = (AdamWStep*)pinned_memory(h, sizeof *k->step);
    *k->step = adamw_step(1, 1, 3, settings);
    return k;
}

static inline void rows_run(void* state) {
    RowsCase* k = (RowsCase*)state;
    EmbeddingTable t = {k->w.device_real, HAS_DEVICE_MEMORY ? k->copy.device : k->w.device, k->m.device_real,
                        k->v.device_real, k->E};
    RowGradients dx = {k->dx.device, k->stride};
    row_segments_begin(&k->segments, k->index, k->segments.capacity, k->kind == ROWS_SGD ? NO_STARTS : WITH_STARTS,
                       k->ctx);
    row_segments_wait(&k->segments, k->ctx);
    if (k->kind == ROWS_SGD) embedding_sgd(t, dx, k->segments, k->settings.lr, k->step, k->ctx);
    else embedding_adam(t, dx, k->segments, k->settings, k->step, k->ctx);
}

static inline void test_embedding_rows(Harness* h) {
    // {N, rows, E}: sorts of one launch and of several, by one digit up to three; and by CUB.
    static const int SHAPES[][3] = {{1, 1, 8},        {700, 90, 128},   {5000, 300, 64},
                                    {6000, 70000, 8}, {9000, 200, 132}, {270000, 70000, 8}};
    static const char* const names[] = {"sgd", "adam"};
    for (size_t i = 0; i < 2 * COUNT_OF(SHAPES); i++) {
        int N = SHAPES[i / 2][0], rows = SHAPES[i / 2][1], E = SHAPES[i / 2][2];
        RowsKind kind = (RowsKind)(i % 2);
        if (case_is_left_out(h, N)) continue;
        case_begin(h, "embedding_rows/%s N=%d rows=%d E=%d", names[kind], N, rows, E);
        RowsCase* k = rows_case(h, N, rows, E, kind);
        real* const state[3] = {copy_of(h, k->w), copy_of(h, k->m), copy_of(h, k->v)};
        Array all[4] = {k->w, k->m, k->v, k->copy};
        if (kind == ROWS_SGD) embedding_sgd_ref(state[0], k->dx.host, k->stride, k->want, E, k->settings.lr);
        else embedding_adam_ref(state, k->dx.host, k->stride, k->want, E, k->settings, 3);
        expect_same_for_any_threads(h, names[kind], rows_run, k, all, HAS_DEVICE_MEMORY ? 4 : 3);
        double limit = tolerance(1e-5);
        expect_close(h, "w", k->w, state[0], limit);
        expect_close(h, "m", k->m, state[1], limit);
        expect_close(h, "v", k->v, state[2], limit);
        if (sizeof(floatX) < sizeof(real) && kind == ROWS_ADAM) expect_close(h, "copy", k->copy, state[0], limit);
        k->step->is_taken = 0;
        expect_same_for_any_threads(h, "skipped", rows_run, k, all, 3);
        memcpy(state[0], k->w.initial, k->w.n * sizeof(real));
        expect_equal(h, "w of a skipped step", k->w, state[0]);
        device_synchronize(k->ctx);
        row_segments_free(&k->segments);
        case_end(h);
    }
}

static inline void bench_embedding_rows(Harness* h) {
    int N = HAS_DEVICE_MEMORY ? 851968 : 53248, rows = HAS_DEVICE_MEMORY ? 2632500 : 164000;
    case_begin(h, "embedding_rows bench");
    RowsCase* k = rows_case(h, N, rows, 128, ROWS_SGD);
    for (int i = 0; i < N; i++) k->index[i] = random_below(h, rows);
    k->index = resident_ints(h, k->index, (size_t)N);
    bench(h, " and embedding_sgd", rows_run, k);
    row_segments_free(&k->segments);
    case_free(h);
}

#endif
