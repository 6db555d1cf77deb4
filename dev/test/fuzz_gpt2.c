/* The readers of the GPT-2 trainer, for fuzz.c. */
#include "fuzz.h"

#include "llmc/run/profiler.h"

// What the machine can do is measured in half a second, which is long here.
#define profiler_peak_flops(ctx) ((void)(ctx), 1e12)
#define main gpt2_main
#include "train_gpt2.cu"
#undef main

static int fuzz_flags(Run* r) {
    return settings_flags(&r->settings, &r->generate, &r->choices, &r->doc_mask, r->flags);
}

static void fuzz_validate(Run* r) { validate(r, NULL); }

#include "fuzz_trainer.h"

const FuzzTrainer FUZZ_GPT2 = FUZZ_TRAINER;
