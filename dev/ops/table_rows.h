/* table_rows: test. Copies of rows and of ids are exact; there is nothing to differentiate. */
#ifndef DEV_OPS_TABLE_ROWS_H
#define DEV_OPS_TABLE_ROWS_H

#include "dev/recsys/ops/table_rows.h"
#include "harness.h"

typedef struct {
    TableRows out, in;
    int *index, N;
    Context* ctx;
} TableRowsCase;

static inline void table_rows_run(void* state) {
    TableRowsCase* k = (TableRowsCase*)state;
    table_rows_copy(&k->out, &k->in, k->index, k->N, k->ctx);
}

// Columns of a matrix become rows of another.
static inline void test_table_ids(Harness* h, int N, int tables) {
    TableIds out = {0}, in = {0};
    case_begin(h, "table_rows/ids N=%d tables=%d", N, tables);
    int *ids = int_array(h, (size_t)(N * tables)), *turned = int_array(h, (size_t)(N * tables));
    for (int i = 0; i < N * tables; i++) ids[i] = random_below(h, 1000), turned[i] = -1;
    for (int t = 0; t < tables; t++) {
        table_ids_add(&in, ids + t, (size_t)tables);
        table_ids_add(&out, turned + t * N, 1);
    }
    table_ids_copy(&out, &in, N, &h->ctx);
    device_synchronize(&h->ctx);
    for (int i = 0; i < N * tables; i++)
        if (turned[i % tables * N + i / tables] != ids[i]) case_fail(h, "id %d is not where it belongs", i);
    h->comparisons++;
    case_end(h);
}

// Rows of tables with 40 rows each are joined side by side, by an index or one after the other.
static inline void test_table_rows(Harness* h) {
    // {N, tables, width of the first table, by how much each next table is wider}
    static const int SHAPES[][4] = {{1, 1, 4, 0}, {37, 26, 128, 0}, {40, 4, 64, 32}, {33, 32, 4, 4}, {0, 3, 8, 0}};
    enum { ROWS = 40 };
    for (size_t i = 0; i < 2 * COUNT_OF(SHAPES); i++) {
        const int *shape = SHAPES[i / 2], N = shape[0], tables = shape[1], by_index = i % 2 == 1;
        case_begin(h, "table_rows/%s N=%d tables=%d E=%d", by_index ? "gather" : "copy", N, tables, shape[2]);
        TableRowsCase* k = (TableRowsCase*)case_memory(h, sizeof *k);
        size_t width = 0, at = 0;
        k->N = N, k->ctx = &h->ctx;
        for (int t = 0; t < tables; t++) width += (size_t)(shape[2] + t * shape[3]);
        Array in = input(h, ROWS * width, 1.0), out = output(h, (size_t)N * width, SET);
        real* joined = copy_of(h, out);
        for (int t = 0; t < tables; t++) {
            int E = shape[2] + t * shape[3];
            table_rows_add(&k->in, in.device + ROWS * at, (size_t)E, E);
            table_rows_add(&k->out, out.device + at, width, E);
            at += (size_t)E;
        }
        k->index = by_index ? int_array(h, (size_t)N * (size_t)tables) : NULL;
        for (int n = 0; n < N * tables && by_index; n++) k->index[n] = random_below(h, ROWS);
        at = 0;
        for (int t = 0; t < tables; t++) {
            size_t E = (size_t)(shape[2] + t * shape[3]);
            for (size_t n = 0; n < (size_t)N; n++) {
                size_t row = by_index ? (size_t)k->index[n * (size_t)tables + (size_t)t] : n;
                memcpy(joined + n * width + at, in.host + ROWS * at + row * E, E * sizeof(real));
            }
            at += E;
        }
        expect_same_for_any_threads(h, "rows", table_rows_run, k, &out, 1);
        expect_equal(h, "rows", out, joined);
        case_end(h);
    }
    test_table_ids(h, 300, 26);
    test_table_ids(h, 7, 1);
}

#endif
