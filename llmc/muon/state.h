/* The state of Muon and NorMuon for a shard of a table's tensors: the list of the matrices that the table marks
 * (TensorRow.matrices), by shape, and the buffers of their updates. The moments are the optimizer's. */
#ifndef LLMC_MUON_STATE_H
#define LLMC_MUON_STATE_H

#include "llmc/model/tensors.h"
#include "llmc/muon/muon.h"

enum { MUON_GROUPS = 8 };  // different shapes

typedef struct {
    MuonGroup groups[MUON_GROUPS];
    MuonMatrices matrices;
    void* memory;  // [bytes] the list of the matrices, then the buffers
    size_t bytes;
} MuonState;

// Find the matrices in a shard, and list them by shape. Returns their number. `matrices`: room for them, or NULL.
static inline int muon_state_matrices(MuonGroup groups[MUON_GROUPS], int* group_count, MuonMatrix* matrices,
                                      const TensorTable* table, FlatRange shard) {
    int found = 0;
    *group_count = 0;
    for (int i = 0; i < table->count && !table->fixed; i++) {
        const Tensor* t = &table->tensors[i];
        if (!t->matrices) continue;
        MuonGroup group = {.rows = t->shape[0] / t->matrices, .cols = t->shape[1]};
        int g = 0;
        while (g < *group_count && (groups[g].rows != group.rows || groups[g].cols != group.cols)) g++;
        CHECK(g < MUON_GROUPS && t->shape[0] % t->matrices == 0 && t->stored_rows == t->shape[0]);
        if (g == *group_count) groups[(*group_count)++] = group;
        groups[g].model_count += t->matrices;
    }
    for (int g = 0; g < *group_count; g++) {
        size_t n = muon_elements(groups[g]);
        groups[g].first = found;
        for (int i = 0; i < table->count; i++) {
            const Tensor* t = &table->tensors[i];
            int is_of_group =
                t->matrices && t->shape[0] / t->matrices == groups[g].rows && t->shape[1] == groups[g].cols;
            for (int k = 0; is_of_group && k < t->matrices; k++) {
                size_t at = t->offset + (size_t)k * n;
                if (at < shard.begin || at + n > shard.begin + shard.size) continue;
                MuonMatrix matrix = {.offset = at - shard.begin, .decay = (float)t->decay};
                if (matrices) matrices[found] = matrix;
                found++;
            }
        }
        groups[g].count = found - groups[g].first;
    }
    return found;
}

// Bytes that a shard needs in addition to the moments.
static inline size_t muon_state_bytes(const TensorTable* table, FlatRange shard) {
    MuonGroup groups[MUON_GROUPS];
    int group_count, count = muon_state_matrices(groups, &group_count, NULL, table, shard);
    return count ? round_up((size_t)count * sizeof(MuonMatrix), 256) + muon_space_bind(NULL, NULL, groups, group_count)
                 : 0;
}

// Scratch for the matmuls.
static inline size_t muon_state_scratch(const TensorTable* table) {
    MuonGroup groups[MUON_GROUPS];
    int count;
    size_t most = 0;
    muon_state_matrices(groups, &count, NULL, table, tensors_updated(table));
    for (int i = 0; i < count; i++) most = max_size(most, muon_scratch_bytes(groups[i].rows, groups[i].cols));
    return most;
}

static inline void muon_state_open(MuonState* s, const TensorTable* table, FlatRange shard, Context* ctx) {
    int most = 0;
    for (int i = 0; i < table->count; i++) most += table->tensors[i].matrices;
    MuonMatrix* matrices = (MuonMatrix*)xcalloc((size_t)most, sizeof *matrices);
    int count = muon_state_matrices(s->groups, &s->matrices.group_count, matrices, table, shard);
    size_t list = round_up((size_t)count * sizeof *matrices, 256);
    s->bytes = muon_state_bytes(table, shard);
    s->memory = s->bytes ? device_alloc(ctx, s->bytes, "optimizer") : NULL;
    if (s->memory) {
        device_upload(ctx, s->memory, matrices, (size_t)count * sizeof *matrices);
        device_synchronize(ctx);
        muon_space_bind(&s->matrices.space, (char*)s->memory + list, s->groups, s->matrices.group_count);
    }
    s->matrices.matrices = (const MuonMatrix*)s->memory;
    free(matrices);
}

static inline void muon_state_close(MuonState* s) {
    if (s->memory) device_free(s->memory, s->bytes);
}

// Update the matrices; AdamW updates the rest.
static inline void muon_state_update(const MuonState* s, AdamWState a, OptimizerSettings h, Context* ctx) {
    MuonMatrices matrices = s->matrices;
    matrices.groups = s->groups;  // the optimizer may have been moved
    muon_update(a, &matrices, h, ctx);
}

#endif
