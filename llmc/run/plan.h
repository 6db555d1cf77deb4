/* The memory that a run needs where the ops run, by what needs it. The plan is made from tables and shapes alone, before
 * anything of size is allocated. */
#ifndef LLMC_PLAN_H
#define LLMC_PLAN_H

#include "../ops/attention.h"
#include "../ops/embedding.h"
#include "../ops/layernorm.h"
#include "../ops/matmul.h"
#include "exact.h"
#include "optimizer.h"
#include "settings.h"

// The parts are called what device_alloc() is told; scratch grows with the first launches instead. The context has taken
// the workspace before the plan is made.
enum { PLAN_PARTS = 7 };
typedef struct {
    struct {
        const char* name;
        size_t bytes;
    } part[PLAN_PARTS];
    size_t available;   // bytes, when the plan was made
    int forward_alone;  // no backward pass follows
} MemoryPlan;

// What a training step is at most; fewer rows, and shorter sequences, never need more.
typedef struct {
    AttentionShape attention;
    EmbeddingSizes embedding;
    int N, sequences, T;   // rows of a micro-batch, in so many sequences of T rows at most
    int parts;             // of sequences, as many as there are or more, that attention keeps apart
    int head_rows, F;      // rows that get logits; channels inside the MLP
    size_t other_scratch;  // bytes that ops need which are not in every model
} StepSizes;

// The largest request of any op, in bytes. `spans` and `blocks` are the optimizer's.
static inline size_t plan_scratch(const StepSizes* z, size_t elements, const ParamSpan* spans, int count, int blocks,
                                  const Context* ctx) {
    int N = z->N, C = z->embedding.C;
    size_t adamw_blocks = 0, norm_blocks = (elements + GLOBAL_NORM_BLOCK - 1) / GLOBAL_NORM_BLOCK;
    for (int s = 0; s < count; s++) adamw_blocks += (spans[s].size + ADAMW_BLOCK - 1) / ADAMW_BLOCK;
    const size_t requests[] = {
        attention_scratch_bytes(N, z->parts, z->T, z->attention, ctx),
        embedding_scratch_bytes(N, z->sequences, z->T, z->embedding),
        layernorm_scratch_bytes(N, C, ctx),
        matmul_scratch_bytes(N, C, 3 * C),
        matmul_scratch_bytes(N, C, z->F),
        matmul_scratch_bytes(N, z->F, C),
        matmul_scratch_bytes(z->head_rows, C, z->embedding.V),
        norm_blocks * sizeof(double),
        adamw_blocks * sizeof(ParamSpan),  // of both optimizers the needier way to run it, which is the CPU's
        (size_t)blocks * sizeof(LambBlock) + (size_t)count * sizeof(real),
        z->other_scratch,
    };
    size_t most = 0;
    for (size_t i = 0; i < COUNT_OF(requests); i++) most = max_size(most, requests[i]);
    return most;
}

// From the tables of the parameters, the activations and the statistics that stay in full precision; `batch`: the bytes of
// the micro-batch itself.
static inline MemoryPlan plan_make(const TensorTable* table, const TensorTable* acts, const TensorTable* stats,
                                   UpdateSettings u, size_t batch, const StepSizes* step, const Context* ctx) {
    ParamSpan* spans = (ParamSpan*)xcalloc((size_t)table->count, sizeof *spans);
    int count = optimizer_spans(spans, table, u.kind), blocks = lamb_number_blocks(spans, count);
    size_t exact = 0, scratch = plan_scratch(step, table->elements, spans, count, blocks, ctx);
    for (int i = 0; i < table->count; i++) exact += table->tensors[i].exact != 0;
    exact = exact_bytes(table) ? exact_bytes(table) + exact * sizeof(WidenSpan) : 0;
    size_t held = update_shard(table, u).size, optimizer = optimizer_bytes(held, u.master);
    optimizer += (size_t)count * (sizeof *spans + (held < table->elements ? 2 * sizeof(double) : 0));
    Reduction sums;
    memset(&sums, 0, sizeof sums);
    if (u.ranks > 1 && u.sums.narrow && !table->fixed) reduction_cut(&sums, table, u.sums);
    MemoryPlan plan = {{{"parameters", table->elements * sizeof(floatX) + exact},
                        {"gradients", tensors_updated(table).size * sizeof(real) + reduction_narrow_bytes(&sums)},
                        {"optimizer", optimizer + sizeof(LossScale) + sizeof(AdamWStep) + sizeof(Outliers)},
                        {"activations", acts->elements * sizeof(floatX) + stats->elements * sizeof(real)},
                        {"batch", batch},
                        {"scratch", device_scratch_size(scratch)},
                        {"workspace", device_workspace_bytes() + (u.ranks > 1 ? COLLECTIVE_BYTES : 0)}},
                       device_memory_available() + device_workspace_bytes(),
                       table->fixed};
    free(spans), free(sums.buckets);
    return plan;
}

static inline size_t plan_bytes(const MemoryPlan* plan) {
    size_t bytes = 0;
    for (int i = 0; i < PLAN_PARTS; i++) bytes += plan->part[i].bytes;
    return bytes;
}

static inline int plan_fits(MemoryPlan plan) { return plan_bytes(&plan) <= plan.available; }

static inline void plan_print(FILE* out, const MemoryPlan* plan) {
    const double MiB = 1048576;
    fprintf(out, "memory plan%s: ", plan->forward_alone ? " of forward passes alone" : "");
    for (int i = 0; i < PLAN_PARTS; i++)
        if (plan->part[i].bytes) fprintf(out, "%s %.1f MiB, ", plan->part[i].name, (double)plan->part[i].bytes / MiB);
    fprintf(out, "together %.1f MiB; %.1f MiB are available\n", (double)plan_bytes(plan) / MiB,
            (double)plan->available / MiB);
}

// Print what a run would be and end.
__attribute__((noreturn)) static inline void plan_show(const Flag* flags, int flag_count, const TensorTable* table,
                                                       const MemoryPlan* plan, Comm* comm) {
    flags_print_values(flags, flag_count);
    tensors_print(stdout, table);
    plan_print(stdout, plan);
    comm_exit(comm, DONE);
}

// End with USAGE: the plan does not fit. `fits`: the largest micro-batch that does, 0 if none.
__attribute__((noreturn)) static inline void plan_refuse(const MemoryPlan* plan, int fits) {
    char* advice = fits ? xprintf("the largest micro-batch that fits is -b %d", fits)
                        : xprintf("not even -b 1 fits: choose a smaller model or a shorter -t");
    die(USAGE, "the run needs %.1f MiB, but %.1f MiB are available; %s (%s-x 0 prints the plan)",
        (double)plan_bytes(plan) / 1048576, (double)plan->available / 1048576, advice,
        plan->forward_alone ? "" : "-r 2 saves memory too, ");
}

#endif
