/* linear_bce: test, grad and bench. */
#ifndef DEV_OPS_LINEAR_BCE_H
#define DEV_OPS_LINEAR_BCE_H

#include "dev/recsys/ops/linear_bce.h"
#include "harness.h"

typedef struct {
    LinearBceShape s;
    Array x, w, b, labels, logits, each, sum, dx, dw, db, dbias;
    Mode mode;
    Direction direction;
    Context* ctx;
} LinearBceCase;

static inline LinearBceCase* linear_bce_case(Harness* h, int N, int C, int relu_begin, Mode mode) {
    LinearBceCase* k = (LinearBceCase*)case_memory(h, sizeof *k);
    LinearBceShape s = {N, C, relu_begin, 2};
    k->s = s, k->mode = mode, k->direction = BACKWARD, k->ctx = &h->ctx;
    k->x = input(h, (size_t)N * (size_t)C, 1.0);
    k->w = input(h, (size_t)C, 1.0 / sqrt(C));
    k->b = input(h, 1, 1.0);
    k->labels = input(h, (size_t)N, 1.0);
    for (int n = 0; n < N; n++) k->labels.initial[n] = random_below(h, 3) == 0;
    array_restore(k->labels);
    k->logits = output(h, (size_t)N, SET), k->each = output(h, (size_t)N, SET);
    k->sum = output(h, 1, mode);
    k->dx = output(h, (size_t)N * (size_t)C, SET);
    k->dw = output(h, (size_t)C, SET), k->db = output(h, 1, SET);
    k->dbias = output(h, (size_t)(C - relu_begin), SET);
    return k;
}

static inline void linear_bce_run(void* state) {
    LinearBceCase* k = (LinearBceCase*)state;
    Losses losses = {k->each.device_real, k->sum.device_real, 1.0 / k->s.N, k->mode};
    LinearBceInput in = {k->x.device, {k->w.device, k->b.device}, k->labels.device_real};
    LinearBceOutput out = {k->logits.device_real,
                           k->dx.device,
                           {k->dw.device_real, k->db.device_real},
                           k->dbias.n ? k->dbias.device_real : NULL};
    linear_bce(losses, out, in, k->s, k->direction, k->ctx);
}

static inline void test_linear_bce(Harness* h) {
    static const int SHAPES[][3] = {{70, 256, 0},  {1000, 128, 64}, {1, 16, 0},
                                    {33, 300, 10}, {5000, 8, 4},    {40, 512, 512}};
    for (size_t i = 0; i < 2 * COUNT_OF(SHAPES); i++) {
        int N = SHAPES[i / 2][0], C = SHAPES[i / 2][1];
        Mode mode = i % 2 ? ADD : SET;
        case_begin(h, "linear_bce/both N=%d C=%d %s", N, C, mode_name(mode));
        LinearBceCase* k = linear_bce_case(h, N, C, SHAPES[i / 2][2], mode);
        Array all[] = {k->logits, k->each, k->sum, k->dx, k->dw, k->db, k->dbias};
        LinearBceRef r = {copy_of(h, k->logits), copy_of(h, k->dx), copy_of(h, k->dw), copy_of(h, k->db),
                          copy_of(h, k->dbias),  k->x.host,         k->w.host,         k->b.host,
                          k->labels.host};
        Losses losses = {copy_of(h, k->each), copy_of(h, k->sum), 1.0 / N, mode};
        linear_bce_ref(losses, r, k->s, BACKWARD);
        k->direction = FORWARD;
        expect_same_for_any_threads(h, "forward", linear_bce_run, k, all, 3);
        expect_close(h, "logits of forward", k->logits, r.logits, tolerance(1e-5));
        expect_close(h, "sum of forward", k->sum, losses.sum, tolerance(1e-5));
        k->direction = BACKWARD;
        expect_same_for_any_threads(h, "backward", linear_bce_run, k, all, k->dbias.n ? 7 : 6);
        expect_close(h, "logits", k->logits, r.logits, tolerance(1e-5));
        expect_close(h, "losses", k->each, losses.each, tolerance(1e-5));
        expect_close(h, "sum", k->sum, losses.sum, tolerance(1e-5));
        expect_close(h, "dx", k->dx, r.dx, tolerance(1e-6));
        expect_close(h, "dw", k->dw, r.dw, tolerance(1e-5));
        expect_close(h, "db", k->db, r.db, tolerance(1e-5));
        // On the GPU the sum is of dx as it is stored: each of at most 1 / N has half a unit of floatX.
        if (k->dbias.n) expect_close(h, "dbias", k->dbias, r.dbias, tolerance(1e-5) + array_rounding(k->dx));
        case_end(h);
    }
}

static inline double linear_bce_loss(void* state) {
    LinearBceCase* k = (LinearBceCase*)state;
    Losses losses = {k->each.host, k->sum.host, 1.0 / k->s.N, SET};
    LinearBceRef r = {k->logits.host, NULL, NULL, NULL, NULL, k->x.host, k->w.host, k->b.host, k->labels.host};
    linear_bce_ref(losses, r, k->s, FORWARD);
    return (double)*k->sum.host;
}

// All columns before relu_begin, so dx is the gradient of x itself.
static inline void grad_linear_bce(Harness* h) {
    for (int launcher = 0; launcher < 2; launcher++) {
        case_begin(h, "linear_bce/backward%s", launcher ? "" : "_ref");
        LinearBceCase* k = linear_bce_case(h, 6, 8, 8, SET);
        Losses losses = {k->each.host, k->sum.host, 1.0 / 6, SET};
        LinearBceRef r = {k->logits.host, k->dx.host, k->dw.host, k->db.host,    NULL,
                          k->x.host,      k->w.host,  k->b.host,  k->labels.host};
        if (launcher) linear_bce_run(k);
        else linear_bce_ref(losses, r, k->s, BACKWARD);
        expect_gradient(h, "dx", linear_bce_loss, k, k->x.host, k->x.n, k->dx.host, 1e-8);
        expect_gradient(h, "dw", linear_bce_loss, k, k->w.host, k->w.n, k->dw.host, 1e-8);
        expect_gradient(h, "db", linear_bce_loss, k, k->b.host, 1, k->db.host, 1e-8);
        case_end(h);
    }
}

static inline void bench_linear_bce(Harness* h) {
    case_begin(h, "linear_bce bench");
    LinearBceCase* k = linear_bce_case(h, 32768, 256, 0, SET);
    bench_report(h, "linear_bce_backward", "N=32768 C=256", bench_seconds(h, linear_bce_run, k),
                 LINEAR_BCE_FLOPS(k->s, BACKWARD), LINEAR_BCE_BYTES(k->s, BACKWARD));
    case_free(h);
}

#endif
