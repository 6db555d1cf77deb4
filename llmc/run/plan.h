/* The memory that a run needs, by what needs it. */
#ifndef LLMC_PLAN_H
#define LLMC_PLAN_H

#include "exact.h"
#include "optimizer.h"
#include "settings.h"

typedef struct {
    size_t parameters, gradients, optimizer, activations, scratch;  // bytes
} MemoryPlan;

// From the tables of the parameters, the activations and the statistics that stay in full precision. `scratch` is
// attention's, whose need may grow with the square of the length.
static inline MemoryPlan plan_make(const TensorTable* table, const TensorTable* acts, const TensorTable* stats,
                                   MasterWeights master, size_t scratch) {
    MemoryPlan plan = {table->elements * sizeof(floatX) + exact_bytes(table), table->elements * sizeof(real),
                       optimizer_bytes(table, master), acts->elements * sizeof(floatX) + stats->elements * sizeof(real),
                       scratch};
    return plan;
}

static inline size_t plan_bytes(MemoryPlan plan) {
    return plan.parameters + plan.gradients + plan.optimizer + plan.activations + plan.scratch;
}

static inline void plan_print(FILE* out, MemoryPlan plan) {
    const double MiB = 1048576;
    fprintf(out, "memory plan: parameters %.1f MiB, gradients %.1f MiB, optimizer %.1f MiB, activations %.1f MiB, ",
            (double)plan.parameters / MiB, (double)plan.gradients / MiB, (double)plan.optimizer / MiB,
            (double)plan.activations / MiB);
    fprintf(out, "attention's scratch %.1f MiB, together %.1f MiB; %.1f MiB are available\n",
            (double)plan.scratch / MiB, (double)plan_bytes(plan) / MiB, (double)device_memory_available() / MiB);
}

// Print what a run would be and end.
__attribute__((noreturn)) static inline void plan_show(const Flag* flags, int flag_count, const TensorTable* table,
                                                       MemoryPlan plan) {
    flags_print_values(flags, flag_count);
    tensors_print(stdout, table);
    plan_print(stdout, plan);
    exit(DONE);
}

// End with USAGE: the plan needs more than is `available`. `fits`: the largest micro-batch that does not, 0 if none.
__attribute__((noreturn)) static inline void plan_refuse(MemoryPlan plan, size_t available, int fits) {
    char* advice = fits ? xprintf("the largest micro-batch that fits is -b %d", fits)
                        : xprintf("not even -b 1 fits: choose a smaller model or a shorter -t");
    die(USAGE, "the run needs %.1f MiB, but %.1f MiB are available; %s (-r 2 saves memory too, -x 0 prints the plan)",
        (double)plan_bytes(plan) / 1048576, (double)available / 1048576, advice);
}

#endif
