/* The readers of the BERT trainer, for fuzz.c. */
#include "fuzz.h"

#include "llmc/run/peak.h"

// What the machine can do is measured in half a second, which is long here.
#define peak_matmul_flops(ctx) ((void)(ctx), 1e12)
#include "llmc/bert/mlm_data.h"
// Each micro-batch of a step takes memory of its own: for millions of them that takes seconds.
#define mlm_source_alloc(d, recipe, B, T, micro_steps, ctx)                                                            \
    do {                                                                                                               \
        if ((micro_steps) > 1 << 14) die(USAGE, "-d: %d micro-batches are more than are tried here", micro_steps);     \
        (mlm_source_alloc)(d, recipe, B, T, micro_steps, ctx);                                                         \
    } while (0)
#define main bert_main
#include "apps/use_bert.cu"
#undef main

static int fuzz_flags(Trainer* t) { return settings_flags(t); }

static void fuzz_validate(Trainer* t) { validate(&t->run); }

static void fuzz_step(Trainer* t) { train_step(&t->run, &t->model, &t->data, t->mlm.loss_mean); }

#include "fuzz_trainer.h"

const FuzzTrainer FUZZ_BERT = FUZZ_TRAINER;
