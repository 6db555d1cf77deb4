/* Steps of Muon on one matrix, for check_muon.py. From stdin: five int32 (rows, cols, steps, NorMuon, cautious),
 * three doubles (lr, weight decay, momentum), then float32: the matrix and the gradient of each step. To stdout: the
 * matrix after each step. */
#include <stdio.h>

#include "llmc/ops/muon/muon.h"

static void read_all(void* to, size_t size, size_t n) {
    if (fread(to, size, n, stdin) != n) die(FAILED, "muon_steps: stdin ends early");
}

int main(void) {
    int32_t n[5];
    double rates[3];
    Context ctx;
    context_init(&ctx);
    read_all(n, sizeof *n, 5);
    read_all(rates, sizeof *rates, 3);
    const MuonGroup group = {.rows = n[0], .cols = n[1], .count = 1, .model_count = 1};
    const MuonMatrix matrix = {.offset = 0, .decay = 1};
    const AdamWStep step = {.gradient = 1, .is_taken = 1};
    size_t size = muon_elements(group);
    MuonMatrices matrices = {.matrices = &matrix, .groups = &group, .group_count = 1};
    OptimizerSettings h = {.lr = rates[0], .weight_decay = rates[1], .cautious = n[4]};
    h.muon.is_normuon = n[3], h.muon.momentum = rates[2];
    muon_space_bind(&matrices.space, xmalloc(muon_space_bind(NULL, NULL, &group, 1)), &group, 1);
    real *w = (real*)xmalloc(size * sizeof *w), *g = (real*)xmalloc(size * sizeof *g);
    real *m = (real*)xcalloc(size, sizeof *m), *v = (real*)xcalloc(size, sizeof *v);
    read_all(w, sizeof *w, size);
    for (int i = 0; i < n[2]; i++) {
        AdamWState a = {.params = w, .m = m, .v = v, .grads = g, .step = &step};
        read_all(g, sizeof *g, size);
        muon_update(a, &matrices, h, &ctx);
        fwrite(w, sizeof *w, size, stdout);
    }
    return fflush(stdout) == 0 ? DONE : FAILED;
}
