/* Flags that a program does not have, but an earlier version had, or another program has. The command line and recipes
 * refuse them by name; a checkpoint that holds one at a value that changed nothing resumes. */
#ifndef LLMC_BASE_FLAGS_RETIRED_H
#define LLMC_BASE_FLAGS_RETIRED_H

#include "llmc/base/util.h"

// A flag of earlier versions.
typedef struct {
    const char *flag, *long_name;  // -b, --batch
    const char* values;   // those that a checkpoint may hold, "a|b": with them it resumes as it began. NULL: any.
    const char* instead;  // what to use now, or the program that has it (./NAME), or NULL
} RetiredFlag;

// clang-format off
static const RetiredFlag FLAGS_RETIRED[] = {
    {NULL, "--async-checkpoint", "0|1", NULL},
    {NULL, "--attention", "flash|flash-wide", NULL},
    {NULL, "--batch-ramp", "0", NULL},
    {NULL, "--ceilings", NULL, NULL},
    {NULL, "--chat", NULL, "./use_gpt2"},
    {NULL, "--embed", NULL, "./use_bert"},
    {NULL, "--embedding-lr", "0", "--adamw-lr"},
    {NULL, "--evaluate", NULL, "./use_gpt2 and ./use_bert"},
    {NULL, "--explain", NULL, "./use_gpt2 and ./use_bert"},
    {NULL, "--explain-file", NULL, "--explain @FILE of ./use_gpt2 and ./use_bert (- for standard input)"},
    {NULL, "--explain-next", NULL, NULL},
    {NULL, "--explain-second", NULL, NULL},
    {NULL, "--explain-tensors", NULL, "./use_gpt2 and ./use_bert"},
    {NULL, "--fill", NULL, "./use_bert"},
    {NULL, "--fp8-fusion", "1|2|3", NULL},
    {"-ge", "--gelu-fusion", "1|2|3", NULL},
    {NULL, "--generate", NULL, "./use_gpt2"},
    {NULL, "--interaction", "all", NULL},
    {NULL, "--kv-cache", NULL, NULL},
    {NULL, "--labels", NULL, "./finetune_bert"},
    {NULL, "--loss-scale-growth", "2000", NULL},
    {NULL, "--loss-scale-start", NULL, "--loss-scale N"},
    {NULL, "--max-hours", NULL, "timeout -s TERM, which saves, and -y 1"},
    {NULL, "--max-predictions", "-1", "--mask-fraction"},
    {NULL, "--muon-coefficients", "newton_schulz", NULL},
    {NULL, "--muon-momentum", "0.95", NULL},
    {NULL, "--muon-scale", "match_rms", NULL},
    {NULL, "--normalize", NULL, NULL},
    {NULL, "--normuon-beta2", "0.95", NULL},
    {NULL, "--on-checkpoint-error", "continue", NULL},
    {NULL, "--patience", "0", "--keep-best 1, and SIGTERM to stop"},
    {NULL, "--pool", NULL, "./use_bert"},
    {NULL, "--predictions", NULL, "./finetune_bert"},
    {NULL, "--prompt", NULL, "./use_gpt2"},
    {NULL, "--prompt-file", "", "--prompt @FILE of ./use_gpt2 (- for standard input)"},
    {"-pr", "--rank", NULL, "mpirun, which numbers the ranks"},
    {"-pn", "--ranks", NULL, "mpirun -np N"},
    {"-pg", "--ranks-per-machine", NULL, "mpirun --npernode N"},
    {"-pi", "--ranks-start", NULL, "mpirun -np N, or srun --mpi=pmix -K -n N"},
    {NULL, "--reduce", "fp32", NULL},
    {"-pf", "--rendezvous", NULL, "mpirun -np N, which connects the ranks"},
    {NULL, "--samples", NULL, "./use_gpt2"},
    {NULL, "--seq-warmup", "0", NULL},
    {"-ps", "--server", NULL, "mpirun --host A,B, which connects the ranks"},
    {NULL, "--server-port", NULL, "mpirun -np N, which connects the ranks"},
    {NULL, "--static-masking", "0", NULL},
    {NULL, "--stride", NULL, "./finetune_bert"},
    {NULL, "--task", NULL, "./finetune_bert"},
    {NULL, "--temperature", NULL, "./use_gpt2"},
    {NULL, "--top-k", NULL, "./use_gpt2"},
    {NULL, "--top-p", NULL, "./use_gpt2"},
    {NULL, "--vector-lr", "0", "--adamw-lr"},
    {NULL, "--vectors", NULL, "./use_bert"},
    {NULL, "--wsd-decay", "0.2", NULL},
};
// clang-format on

// End with USAGE if `name` (of n bytes) is a retired flag. `where`: "FILE:LINE: " of a recipe, "" of the command line.
static inline void flags_refuse_retired(const char* name, size_t n, const char* where) {
    for (size_t i = 0; i < COUNT_OF(FLAGS_RETIRED); i++) {
        const RetiredFlag* r = &FLAGS_RETIRED[i];
        const char* names[2] = {r->flag, r->long_name};
        for (int k = 0; k < 2; k++)
            if (names[k] && strlen(names[k]) == n && memcmp(names[k], name, n) == 0)
                die(USAGE, "%sunknown flag '%s': %s%s; all flags: --help", where, names[k],
                    !r->instead          ? "it was removed"
                    : *r->instead == '.' ? "it is a flag of "
                                         : "it was removed; use ",
                    r->instead ? r->instead : "");
    }
}

#endif
