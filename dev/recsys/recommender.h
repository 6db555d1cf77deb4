/* What main() of both recommenders needs besides the run layer: their flags, what they refuse, and their memory plan. */
#ifndef DEV_RECSYS_RECOMMENDER_H
#define DEV_RECSYS_RECOMMENDER_H

#include "llmc/run/run.h"

enum { RECOMMENDER_MOST_SAMPLES = 1 << 21 };  // of a batch

// Take the flags that neither recommender uses out of the table, and those of `others` [count]. Their settings keep the
// defaults. Returns the number of rows left.
static inline int recommender_rows(Flag* table, int rows, const char* const* others, size_t count) {
    // clang-format off
    static const char* const neither[] = {
        "--val-data", "--val-batches", "--zero", "--shuffle", "--seq-len", "--total-batch", "--recompute", "--master-weights",
        "--optimizer", "--weight-decay", "--cautious-decay", "--clip", "--embedding-lr", "--vector-lr", "--init",
        "--muon-warmup", "--loss-outlier", "--norm-outlier", "--loss-scale", "--loss-scale-start", "--mode",
        "--attention", "--gelu-fusion", "--graph", "--fp8", "--fp8-steps", "--fp8-exclude-forward"};
    // clang-format on
    char error[FLAG_ERROR_SIZE];
    settings_default(table, rows, "--clip", "0");  // the norm covers the MLPs only
    for (size_t i = 0; i < COUNT_OF(neither) + count; i++) {
        Flag* row = settings_find(table, rows, i < COUNT_OF(neither) ? neither[i] : others[i - COUNT_OF(neither)]);
        CHECK(flags_assign(row, row->default_text, error) == 0);
        memmove(row, row + 1, (size_t)(table + --rows - row) * sizeof *row);
    }
    settings_help(table, rows, "--batch", "Samples per step.");
    settings_find(table, rows, "--batch")->max = RECOMMENDER_MOST_SAMPLES;
    return rows;
}

// The data's name for messages.
static inline const char* recommender_data(const Settings* s) {
    return *s->train_data ? s->train_data : "the generated data";
}

// Refuse several ranks, and an evaluation of random weights.
static inline void recommender_check(const Run* r) {
    if (r->group.size > 1)
        checkpoint_die(&r->group, USAGE, "%d ranks: a recommender trains on one; start it without mpirun",
                       r->group.size);
    if (r->settings.evaluate && !r->session.checkpoint)
        die(USAGE, "--evaluate 1: needs a trained model; name its run with -y 1 -o DIR");
}

// Plan the memory before anything is allocated. The run allocates gradients and moments of the tables too.
static inline void recommender_check_memory(Run* r, const ModelBuffers* b, size_t batch, size_t segments) {
    size_t n = b->table.elements;
    MemoryPlan plan = {
        {{"parameters", n * sizeof(floatX)},
         {"gradients", n * sizeof(real)},
         {"optimizer", optimizer_bytes(n, WITH_MASTER)},
         {"activations", b->acts_table.elements * sizeof(floatX) + b->stats_table.elements * sizeof(real)},
         {"batch", batch},
         {"segments", segments},
         {"workspace", device_workspace_bytes()}},
        device_memory_available() + device_workspace_bytes(),
        0};
    r->plan = plan;
    if (r->settings.steps == 0) memory_plan_show(r->flags, r->flag_count, &b->table, &plan, &r->group);
    double needed = (double)memory_plan_bytes(&plan) / 1048576, available = (double)plan.available / 1048576;
    if (needed > available)
        die(USAGE,
            "the run needs %.1f MiB, but %.1f MiB are available; choose a smaller -e or -b (-x 0 prints the plan)",
            needed, available);
}

#endif
