/* The device memory of a run, by category. The plan is computed from tables and shapes alone, before any large
 * allocation. */
#ifndef LLMC_OPTIM_MEMORY_PLAN_H
#define LLMC_OPTIM_MEMORY_PLAN_H

#include "llmc/base/flags.h"
#include "llmc/ops/attention/attention.h"
#include "llmc/ops/embedding/embedding.h"
#include "llmc/ops/layernorm/layernorm.h"
#include "llmc/ops/matmul/matmul.h"
#include "llmc/optim/fp32_copies.h"
#include "llmc/optim/optimizer.h"

// The parts have the names that are passed to device_alloc(). Scratch is the exception: it grows during the first
// launches. The context has already allocated the workspace when the plan is made.
enum { MEMORY_PLAN_PARTS = 7 };
typedef struct {
    struct {
        const char* name;
        size_t bytes;
    } part[MEMORY_PLAN_PARTS];
    size_t available;  // bytes, when the plan was made
    int forward_only;  // 1: there is no backward pass
} MemoryPlan;

// Maximum sizes of a training step. Fewer rows or shorter sequences never need more memory.
typedef struct {
    AttentionShape attention;
    EmbeddingSizes embedding;
    int N, sequences, T;   // rows of a micro-batch; its sequences, of at most T rows each
    int fewest;            // minimum number of sequences in a micro-batch
    int parts;             // segments that attention keeps separate, such as documents; at least `sequences`
    int head_rows, F;      // rows that get logits; channels inside the MLP
    size_t other_scratch;  // bytes for ops that only some models have
} StepSizes;

// The largest scratch size that any op requests, in bytes. `spans` are the optimizer's.
static inline size_t memory_plan_scratch(const StepSizes* z, size_t elements, const ParamSpan* spans, int count,
                                         const Context* ctx) {
    int N = z->N, C = z->embedding.C;
    size_t adamw_blocks = 0, norm_blocks = (elements + GLOBAL_NORM_BLOCK - 1) / GLOBAL_NORM_BLOCK;
    for (int s = 0; s < count; s++) adamw_blocks += (spans[s].size + ADAMW_BLOCK - 1) / ADAMW_BLOCK;
    const size_t requests[] = {
        attention_scratch_bytes(N, z->fewest, z->parts, z->T, z->attention, ctx),
        embedding_scratch_bytes(N, z->sequences, z->T, z->embedding),
        layernorm_scratch_bytes(N, C, ctx),
        matmul_scratch_bytes(N, C, 3 * C),
        matmul_scratch_bytes(N, C, z->F),
        matmul_scratch_bytes(N, z->F, C),
        matmul_scratch_bytes(z->head_rows, C, z->embedding.V),
        norm_blocks * sizeof(double),
        adamw_blocks * sizeof(ParamSpan),  // for AdamW and LAMB; the CPU version, which needs more
        lamb_scratch_bytes(spans, count),
        z->other_scratch,
    };
    size_t most = 0;
    for (size_t i = 0; i < COUNT_OF(requests); i++) most = max_size(most, requests[i]);
    return most;
}

// Make the plan from the tables of the parameters, the activations, and the statistics that stay in full precision.
// `batch`: bytes of the micro-batch's inputs.
static inline MemoryPlan memory_plan_make(const TensorTable* table, const TensorTable* acts, const TensorTable* stats,
                                          UpdateSettings u, size_t batch, const StepSizes* step, const Context* ctx) {
    ParamSpan* spans = (ParamSpan*)xcalloc((size_t)table->count, sizeof *spans);
    int count = optimizer_spans(spans, table, u), is_muon = optimizer_is_muon(u.kind);
    size_t copies = 0, scratch = memory_plan_scratch(step, table->elements, spans, count, ctx);
    if (is_muon) scratch = max_size(scratch, muon_state_scratch(table));
    for (int i = 0; i < table->count; i++) copies += table->tensors[i].fp32_copy != 0;
    copies = fp32_copies_bytes(table) ? fp32_copies_bytes(table) + copies * sizeof(CastSpan) : 0;
    size_t held = update_shard(table, u).size, optimizer = optimizer_bytes(held, u.master);
    optimizer += optimizer_average_bytes(held, u);
    if (is_muon) optimizer += muon_state_bytes(table, update_shard(table, u));
    optimizer += (size_t)count * (sizeof *spans + (held < table->elements ? 2 * sizeof(double) : 0));
    MemoryPlan plan = {
        .part = {{"parameters", table->elements * sizeof(floatX) + copies},
                 {"gradients", tensors_updated(table).size * sizeof(real)},
                 {"optimizer", optimizer + sizeof(LossScale) + sizeof(AdamWStep) + sizeof(Outliers)},
                 {"activations", acts->elements * sizeof(floatX) + stats->elements * sizeof(real)},
                 {"batch", batch},
                 {"scratch", device_scratch_size(scratch)},
                 {"workspace", device_workspace_bytes() + (u.ranks > 1 ? COLLECTIVES_BYTES : 0)}},
        .available = device_memory_available() + device_workspace_bytes(),
        .forward_only = table->fixed,
    };
    free(spans);
    return plan;
}

static inline void memory_plan_add(MemoryPlan* plan, const char* name, size_t bytes) {
    for (int i = 0; i < MEMORY_PLAN_PARTS; i++)
        if (strcmp(plan->part[i].name, name) == 0) plan->part[i].bytes += bytes;
}

static inline size_t memory_plan_bytes(const MemoryPlan* plan) {
    size_t bytes = 0;
    for (int i = 0; i < MEMORY_PLAN_PARTS; i++) bytes += plan->part[i].bytes;
    return bytes;
}

static inline int memory_plan_fits(MemoryPlan plan) { return memory_plan_bytes(&plan) <= plan.available; }

static inline void memory_plan_print(FILE* out, const MemoryPlan* plan) {
    const double MiB = 1048576;
    fprintf(out, "memory plan%s: ", plan->forward_only ? " of forward passes only" : "");
    for (int i = 0; i < MEMORY_PLAN_PARTS; i++)
        if (plan->part[i].bytes) fprintf(out, "%s %.1f MiB, ", plan->part[i].name, (double)plan->part[i].bytes / MiB);
    fprintf(out, "together %.1f MiB; %.1f MiB are available\n", (double)memory_plan_bytes(plan) / MiB,
            (double)plan->available / MiB);
}

// Print the settings, the tensors and the memory plan, and exit.
__attribute__((noreturn)) static inline void memory_plan_show(const Flag* flags, int flag_count,
                                                              const TensorTable* table, const MemoryPlan* plan,
                                                              ProcessGroup* group) {
    flags_print_values(flags, flag_count);
    tensors_print(stdout, table);
    memory_plan_print(stdout, plan);
    group_exit(group, DONE);
}

// Exit with USAGE, because the plan does not fit. `fits`: the largest micro-batch that does, 0 if none.
__attribute__((noreturn)) static inline void memory_plan_refuse(const MemoryPlan* plan, int fits) {
    char* advice = fits ? xprintf("the largest micro-batch that fits is -b %d", fits)
                        : xprintf("not even -b 1 fits: choose a smaller model or a shorter -t");
    die(USAGE, "the run needs %.1f MiB, but %.1f MiB are available; %s (%s-x 0 prints the plan)",
        (double)memory_plan_bytes(plan) / 1048576, (double)plan->available / 1048576, advice,
        plan->forward_only ? "" : "-r 2 saves memory too, ");
}

#endif
