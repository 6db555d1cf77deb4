/* The readers of the GPT-2 trainer, for fuzz.c. */
#include "fuzz.h"

#include "llmc/run/peak.h"

// What the machine can do is measured in half a second, which is long here.
#define peak_matmul_flops(ctx) ((void)(ctx), 1e12)
#define main gpt2_main
#include "apps/use_gpt2.cu"
#undef main

static void fuzz_validate(Trainer* t) { validate(&t->run, &t->model, &t->data, NULL); }

static void fuzz_step(Trainer* t) { train_step(&t->run, &t->model, &t->data); }

#include "fuzz_trainer.h"

const FuzzTrainer FUZZ_GPT2 = FUZZ_TRAINER;
