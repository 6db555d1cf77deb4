/* gather: test, grad and bench. */
#ifndef DEV_OPS_GATHER_H
#define DEV_OPS_GATHER_H

#include "harness.h"
#include "llmc/ops/gather.h"

typedef struct {
    Array x, y, dy, dx;
    int* index;
    int M, N, C;
    Mode mode;
    Context* ctx;
} GatherCase;

static inline GatherCase* gather_case(Harness* h, int M, int N, int C, Mode mode) {
    GatherCase* k = (GatherCase*)case_memory(h, sizeof *k);
    k->M = M, k->N = N, k->C = C, k->mode = mode;
    k->x = input(h, (size_t)N * (size_t)C, 1.0);
    k->y = output(h, (size_t)M * (size_t)C, SET);
    k->dy = input(h, (size_t)M * (size_t)C, 1.0);
    k->dx = output(h, (size_t)N * (size_t)C, mode);
    k->index = int_array(h, (size_t)M);
    for (int m = 0; m < M; m++) k->index[m] = (int)rng_permute((uint64_t)m, (uint64_t)N, h->key);
    k->ctx = &h->ctx;
    return k;
}

static inline void gather_run_forward(void* state) {
    GatherCase* k = (GatherCase*)state;
    gather_forward(k->y.device, k->x.device, k->index, k->M, k->C, k->ctx);
}

static inline void gather_run_backward(void* state) {
    GatherCase* k = (GatherCase*)state;
    gather_backward(k->dx.device, k->dy.device, k->index, k->M, k->N, k->C, k->mode, k->ctx);
}

static inline void test_gather(Harness* h) {
    static const int SIZES[][3] = {{1, 1, 1},      {1, 77, 48},       {13, 77, 33},     {77, 77, 768},  {0, 5, 48},
                                   {17, 77, 1024}, {154, 1024, 1600}, {17, 1024, 1025}, {1, 1024, 1024}};
    for (size_t i = 0; i < COUNT_OF(SIZES); i++) {
        int M = SIZES[i][0], N = SIZES[i][1], C = SIZES[i][2];
        case_begin(h, "gather/forward M=%d N=%d C=%d", M, N, C);
        GatherCase* k = gather_case(h, M, N, C, SET);
        real* y = copy_of(h, k->y);
        gather_forward_ref(y, k->x.host, k->index, M, C);
        expect_same_for_any_threads(h, "forward", gather_run_forward, k, &k->y, 1);
        expect_equal(h, "y", k->y, y);
        case_end(h);
        for (int add = 0; add < 2; add++) {
            Mode mode = add ? ADD : SET;
            case_begin(h, "gather/backward M=%d N=%d C=%d %s", M, N, C, mode_name(mode));
            k = gather_case(h, M, N, C, mode);
            real* dx = copy_of(h, k->dx);
            gather_backward_ref(dx, k->dy.host, k->index, M, N, C, mode);
            expect_same_for_any_threads(h, "backward", gather_run_backward, k, &k->dx, 1);
            expect_equal(h, "dx", k->dx, dx);
            case_end(h);
        }
    }
}

// The masked rows of BERT-large.
static inline void bench_gather(Harness* h) {
    int N = HAS_DEVICE_MEMORY ? 32768 : 1024, M = 20 * N / 128, C = 1024;
    char shapes[64];
    snprintf(shapes, sizeof shapes, "M=%d N=%d C=%d", M, N, C);
    for (int add = 0; add < 2; add++) {
        Mode mode = add ? ADD : SET;
        case_begin(h, "gather bench");
        GatherCase* k = gather_case(h, M, N, C, mode);
        k->index = resident_ints(h, k->index, (size_t)M);
        if (!add)
            bench_report(h, "gather_forward", shapes, bench_seconds(h, gather_run_forward, k),
                         GATHER_FORWARD_FLOPS(M, C), GATHER_FORWARD_BYTES(M, C));
        bench_report(h, add ? "gather_backward ADD" : "gather_backward SET", shapes,
                     bench_seconds(h, gather_run_backward, k), GATHER_BACKWARD_FLOPS(M, C, mode),
                     GATHER_BACKWARD_BYTES(M, N, C, mode));
        case_free(h);
    }
}

static inline double gather_loss(void* state) {
    GatherCase* k = (GatherCase*)state;
    gather_forward_ref(k->y.host, k->x.host, k->index, k->M, k->C);
    double loss = 0;
    for (size_t i = 0; i < k->y.n; i++) loss += (double)k->y.host[i] * (double)k->dy.host[i];
    return loss;
}

static inline void grad_gather(Harness* h) {
    for (int launcher = 0; launcher < 2; launcher++) {
        case_begin(h, "gather/backward%s M=5 N=9 C=7", launcher ? "" : "_ref");
        GatherCase* k = gather_case(h, 5, 9, 7, SET);
        if (launcher) gather_run_backward(k);
        else gather_backward_ref(k->dx.host, k->dy.host, k->index, 5, 9, 7, SET);
        expect_gradient(h, "dx", gather_loss, k, k->x.host, k->x.n, k->dx.host, 1e-8);
        case_end(h);
    }
}

#endif
