/* interaction: test, grad and bench. */
#ifndef DEV_OPS_INTERACTION_H
#define DEV_OPS_INTERACTION_H

#include "dev/recsys/ops/interaction.h"
#include "harness.h"

typedef struct {
    InteractionShape s;
    int table_rows, *rows;
    Array z, bottom, table, dz, dbottom, dvectors;
    Context* ctx;
} InteractionCase;

static inline InteractionCase* interaction_case(Harness* h, int B, int tables, int E, int table_rows) {
    InteractionCase* k = (InteractionCase*)case_memory(h, sizeof *k);
    InteractionShape s = {B, tables, E, interaction_width(tables, E)};
    size_t n = (size_t)B * (size_t)tables;
    k->s = s, k->table_rows = table_rows, k->ctx = &h->ctx;
    k->bottom = input(h, (size_t)B * (size_t)E, 1.0);  // half of it is not positive
    k->table = input(h, (size_t)table_rows * (size_t)E, 0.5);
    k->z = output(h, (size_t)B * (size_t)s.width, SET);
    k->dz = input(h, (size_t)B * (size_t)s.width, 1.0);
    k->dbottom = output(h, (size_t)B * (size_t)E, SET);
    k->dvectors = output(h, n * (size_t)E, SET);
    k->rows = int_array(h, n);
    for (size_t i = 0; i < n; i++) k->rows[i] = random_below(h, table_rows);
    return k;
}

static inline void interaction_run_forward(void* state) {
    InteractionCase* k = (InteractionCase*)state;
    interaction_forward(k->z.device, k->bottom.device, k->table.device, k->rows, k->s, k->ctx);
}

static inline void interaction_run_backward(void* state) {
    InteractionCase* k = (InteractionCase*)state;
    InteractionBackward g = {k->dbottom.device, k->dvectors.device, k->dz.device,
                             k->bottom.device,  k->table.device,    k->rows};
    interaction_backward(g, k->s, k->ctx);
}

static inline void test_interaction(Harness* h) {
    // {B, tables, E}: the published shape, the most tables that a warp takes, more, and other widths.
    static const int SHAPES[][3] = {{5, 26, 128}, {9, 31, 128}, {4, 32, 128}, {6, 4, 8}, {3, 1, 128}, {7, 5, 24}};
    for (size_t i = 0; i < COUNT_OF(SHAPES); i++) {
        int B = SHAPES[i][0], tables = SHAPES[i][1], E = SHAPES[i][2];
        case_begin(h, "interaction/forward B=%d tables=%d E=%d", B, tables, E);
        InteractionCase* k = interaction_case(h, B, tables, E, 50);
        real* want = copy_of(h, k->z);
        interaction_forward_ref(want, k->bottom.host, k->table.host, k->rows, k->s);
        expect_same_for_any_threads(h, "forward", interaction_run_forward, k, &k->z, 1);
        expect_close(h, "z", k->z, want, tolerance(1e-5));
        case_end(h);
        case_begin(h, "interaction/backward B=%d tables=%d E=%d", B, tables, E);
        k = interaction_case(h, B, tables, E, 50);
        Array both[2] = {k->dbottom, k->dvectors};
        InteractionBackwardRef g = {copy_of(h, k->dbottom), copy_of(h, k->dvectors), k->dz.host,
                                    k->bottom.host,         k->table.host,           k->rows};
        interaction_backward_ref(g, k->s);
        expect_same_for_any_threads(h, "backward", interaction_run_backward, k, both, 2);
        expect_close(h, "dbottom", k->dbottom, g.dbottom, tolerance(1e-5));
        expect_close(h, "dvectors", k->dvectors, g.dvectors, tolerance(1e-5));
        case_end(h);
    }
}

// The sum of dz times z, of a bottom vector that has gone through ReLU.
static inline double interaction_loss(void* state) {
    InteractionCase* k = (InteractionCase*)state;
    double loss = 0;
    real* z = k->z.host;
    interaction_forward_ref(z, k->bottom.host, k->table.host, k->rows, k->s);
    for (size_t i = 0; i < k->z.n; i++) loss += (double)k->dz.host[i] * (double)z[i];
    return loss;
}

static inline void grad_interaction(Harness* h) {
    for (int launcher = 0; launcher < 2; launcher++) {
        case_begin(h, "interaction/backward%s", launcher ? "" : "_ref");
        InteractionCase* k = interaction_case(h, 2, 3, 8, 6);
        for (size_t i = 0; i < k->bottom.n; i++) k->bottom.host[i] = (real)(0.1 + fabs((double)k->bottom.host[i]));
        for (int i = 0; i < 6; i++) k->rows[i] = (i * 5 + 1) % 6;  // each row once: its gradient is that of one lookup
        InteractionBackwardRef g = {k->dbottom.host, k->dvectors.host, k->dz.host,
                                    k->bottom.host,  k->table.host,    k->rows};
        if (launcher) interaction_run_backward(k);
        else interaction_backward_ref(g, k->s);
        real* dtable = (real*)case_memory(h, k->table.n * sizeof(real));
        for (size_t i = 0; i < 6; i++) memcpy(dtable + 8 * k->rows[i], k->dvectors.host + 8 * i, 8 * sizeof(real));
        expect_gradient(h, "dbottom", interaction_loss, k, k->bottom.host, k->bottom.n, k->dbottom.host, 1e-8);
        expect_gradient(h, "dtable", interaction_loss, k, k->table.host, k->table.n, dtable, 1e-8);
        case_end(h);
    }
}

static inline void bench_interaction(Harness* h) {
    int B = HAS_DEVICE_MEMORY ? 32768 : 1024, rows = HAS_DEVICE_MEMORY ? 1000000 : 26000;
    case_begin(h, "interaction bench");
    InteractionCase* k = interaction_case(h, B, 26, 128, rows);
    k->rows = resident_ints(h, k->rows, (size_t)B * 26);
    char shape[64];
    snprintf(shape, sizeof shape, "B=%d tables=26 E=128", B);
    bench_report(h, "interaction_forward", shape, bench_seconds(h, interaction_run_forward, k),
                 INTERACTION_FORWARD_FLOPS(k->s), INTERACTION_FORWARD_BYTES(k->s));
    bench_report(h, "interaction_backward", shape, bench_seconds(h, interaction_run_backward, k),
                 INTERACTION_BACKWARD_FLOPS(k->s), INTERACTION_BACKWARD_BYTES(k->s));
    case_free(h);
}

#endif
