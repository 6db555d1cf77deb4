/* What the parts of the fuzzer share: what a reader under test calls instead of ending the process or taking memory,
 * and what the two trainers, each a source of its own, give it to read with. Include it before everything else. */
#ifndef FUZZ_H
#define FUZZ_H

#include <stdint.h>
#include <stdlib.h>

// A reader refuses its input by ending the program. Here that ends the attempt: fuzz.c continues with the next input.
__attribute__((noreturn)) void fuzz_exit(int status);
// Memory as usual, but a request that is out of all proportion to a file of some KiB is a failure.
void* fuzz_malloc(size_t n);
void* fuzz_calloc(size_t count, size_t size);
void* fuzz_realloc(void* old, size_t n);
// What a reader has made of its input cannot be: a failure.
__attribute__((format(printf, 1, 2), noreturn)) void fuzz_broken(const char* format, ...);

#define exit(status) fuzz_exit(status)
#define malloc(n) fuzz_malloc(n)
#define calloc(count, size) fuzz_calloc(count, size)
#define realloc(old, n) fuzz_realloc(old, n)

// One trainer's readers. All end by fuzz_exit() where they refuse.
typedef struct {
    void (*descriptor)(const char* text);         // -e L=4,C=128,...
    void (*config)(const char* path);             // config.json
    void (*command_line)(int argc, char** argv);  // flags, and the plan that they mean
    void (*evaluate)(int argc, char** argv);      // a model's directory, on validation data
    void (*train)(int argc, char** argv);         // two steps, from flags or a checkpoint
} FuzzTrainer;

extern const FuzzTrainer FUZZ_GPT2, FUZZ_BERT;

#endif
