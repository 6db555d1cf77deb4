/* What either trainer, a source of its own (fuzz_trainer.c), gives the fuzzer to read with: functions of a path, which
 * end the process where they refuse. */
#ifndef FUZZ_H
#define FUZZ_H

typedef enum {
    FUZZ_COMMAND_LINE,  // a file of flags, and the plan that they mean
    FUZZ_MODEL,         // a model's directory, on validation data
    FUZZ_RUN,           // the directory of a run, which is resumed or begun
    FUZZ_MAKE,          // the same, which is not there yet
    FUZZ_READERS
} FuzzReader;

typedef void (*const FuzzTrainer[FUZZ_READERS])(const char* path);
extern FuzzTrainer FUZZ_GPT2, FUZZ_BERT;

#endif
