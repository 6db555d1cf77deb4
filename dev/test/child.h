/* For tests of readers: bad input ends the process, so it is read in a child process. And deleting of a directory. */
#ifndef TEST_CHILD_H
#define TEST_CHILD_H

#include <ftw.h>
#include <sys/wait.h>

#include "llmc/base/util.h"

// What is captured of a child's output.
typedef enum { STDERR_ONLY, STDOUT_AND_STDERR } ChildOutput;

// Run body(state) in a child process and append its output to `output`. Returns the exit status; 128 + the number of
// the signal if one ended it.
static inline int run_in_child(Text* output, ChildOutput captured, void (*body)(void* state), void* state) {
    int ends[2], result = 0;
    char piece[4096];
    fflush(stdout);
    if (pipe(ends) != 0) die(FAILED, "pipe: %s", strerror(errno));
    pid_t child = fork();
    if (child < 0) die(FAILED, "fork: %s", strerror(errno));
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        if (captured == STDOUT_AND_STDERR) dup2(ends[1], STDOUT_FILENO);
        close(ends[0]), close(ends[1]);
        body(state);
        exit(DONE);
    }
    close(ends[1]);
    text_append(output, "", 0);
    for (ssize_t got; (got = read(ends[0], piece, sizeof piece)) > 0;) text_append(output, piece, (size_t)got);
    close(ends[0]);
    waitpid(child, &result, 0);
    return WIFEXITED(result) ? WEXITSTATUS(result) : 128 + WTERMSIG(result);
}

typedef struct {
    void (*run)(const char*);
    const char* argument;
} ChildCall;

static inline void child_call(void* state) {
    ChildCall* c = (ChildCall*)state;
    c->run(c->argument);
}

// The same for run(argument) and stderr.
static inline int exit_status_of(void (*run)(const char*), const char* argument, Text* output) {
    ChildCall c = {run, argument};
    return run_in_child(output, STDERR_ONLY, child_call, &c);
}

static inline int is_one_line(const Text* output) {
    return output->length > 1 && strchr(output->text, '\n') == output->text + output->length - 1;
}

// Whether run(file) ends with `status` and prints `message` (NULL: anything); with USAGE, in one line that names the
// file. Status -1 accepts 0 and USAGE. *why: how it ended (caller frees).
static inline int ends_with(int status, const char* message, void (*run)(const char*), const char* file, char** why) {
    Text output = {NULL, 0, 0};
    int code = exit_status_of(run, file, &output);
    int good = status < 0 ? code == DONE || code == USAGE : code == status;
    if (code == USAGE) good = good && is_one_line(&output) && strstr(output.text, file);
    if (message) good = good && strstr(output.text, message);
    *why = xprintf("it ended with %d and '%.*s'; due is %d and '%s'", code, (int)strcspn(output.text, "\n"),
                   output.text, status, message ? message : "");
    free(output.text);
    return good;
}

static inline int remove_entry(const char* path, const struct stat* st, int type, struct FTW* where) {
    (void)st, (void)type, (void)where;
    return remove(path);
}

// Delete a directory and everything in it.
static inline void remove_directory(const char* path) { nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS); }

#endif
