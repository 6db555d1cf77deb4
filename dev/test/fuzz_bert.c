/* The readers of the BERT trainer, for fuzz.c. */
#include "fuzz.h"

#include "llmc/run/profiler.h"

// What the machine can do is measured in half a second, which is long here.
#define profiler_peak_flops(ctx) ((void)(ctx), 1e12)
#define main bert_main
#include "train_bert.cu"
#undef main

static int fuzz_flags(Run* r) { return settings_flags(&r->settings, &r->mlm, r->flags); }

#include "fuzz_trainer.h"

const FuzzTrainer FUZZ_BERT = FUZZ_TRAINER;
