/* The bench of Muon on the sizes of published models. */
#ifndef DEV_OPS_MUON_BENCH_H
#define DEV_OPS_MUON_BENCH_H

#include "adamw.h"
#include "llmc/device/copies.h"
#include "llmc/muon/muon.h"

typedef struct {
    AdamWState a;
    MuonMatrices m;
    OptimizerSettings h;
    Context* ctx;
} MuonBench;

static inline void muon_bench_run(void* state) {
    MuonBench* b = (MuonBench*)state;
    muon_update(b->a, &b->m, b->h, b->ctx);
}

// Normal numbers on the device alone: a model of 1.5 B parameters has no room for an Array's copies.
static inline real* muon_bench_numbers(Harness* h, size_t n) {
    enum { PIECE = 1 << 20 };
    real *to = (real*)case_block(h, n * sizeof(real), ON_DEVICE), *from = (real*)case_memory(h, PIECE * sizeof(real));
    for (size_t i = 0; i < PIECE; i++) from[i] = (real)rng_normal(h->key, h->drawn++);
    for (size_t i = 0; i < n; i += PIECE) device_upload(&h->ctx, to + i, from, min_size(PIECE, n - i) * sizeof(real));
    device_synchronize(&h->ctx);
    return to;
}

// `layers` layers of C channels: Q, K, V, the projection of attention, and the two matrices of the MLP.
static inline void bench_muon_model(Harness* h, const char* name, int layers, int C) {
    const MuonGroup groups[] = {{C, C, 0, 4 * layers, 4 * layers},
                                {4 * C, C, 4 * layers, layers, layers},
                                {C, 4 * C, 5 * layers, layers, layers}};
    int count = 6 * layers, has_master = sizeof(floatX) < sizeof(real);
    size_t square = (size_t)C * (size_t)C, n = 12 * (size_t)layers * square;
    MuonMatrix* host = (MuonMatrix*)case_memory(h, (size_t)count * sizeof *host);
    for (int i = 0; i < count; i++) {
        int layer = i < 4 * layers ? i / 4 : (i - 4 * layers) % layers;
        int part = i < 4 * layers ? i % 4 : i < 5 * layers ? 4 : 8;
        host[i].offset = ((size_t)layer * 12 + (size_t)part) * square, host[i].decay = 1;
    }
    MuonBench b;
    memset(&b, 0, sizeof b);
    b.m.matrices = (MuonMatrix*)resident(h, host, (size_t)count * sizeof *host), b.m.groups = groups,
    b.m.group_count = (int)COUNT_OF(groups);
    size_t space = muon_space_bind(NULL, NULL, groups, b.m.group_count);
    muon_space_bind(&b.m.space, case_block(h, space, ON_DEVICE), groups, b.m.group_count);
    const AdamWStep taken = {1, 1, 1, 1};
    b.a.grads = muon_bench_numbers(h, n), b.a.m = muon_bench_numbers(h, n),
    b.a.step = (AdamWStep*)resident(h, &taken, sizeof taken);
    b.a.v = (real*)case_block(h, n * sizeof(real), ON_DEVICE);
    b.a.master = has_master ? (real*)case_block(h, n * sizeof(real), ON_DEVICE) : NULL;
    b.a.params = (floatX*)case_block(h, n * sizeof(floatX), ON_DEVICE);
    b.h.lr = 0.01, b.h.muon.momentum = 0.95;
    b.ctx = &h->ctx;
    printf("%s\n", name);
    for (int is_normuon = 0; is_normuon < 2; is_normuon++) {
        b.h.muon.is_normuon = is_normuon;
        bench(h, is_normuon ? ", NorMuon's update" : ", Muon's update", muon_bench_run, &b);
    }
    case_free(h);
}

static inline void bench_muon(Harness* h) {
    if (!HAS_DEVICE_MEMORY) {
        bench_muon_model(h, "L=1 C=256", 1, 256);
        return;
    }
    bench_muon_model(h, "d12", 12, 768);
    bench_muon_model(h, "BERT-large", 24, 1024);
    bench_muon_model(h, "d48", 48, 1600);
}

#endif
