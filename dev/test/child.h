/* What the tests of readers share: bad input ends the process, so it is read in a process of its own; and the files that
 * they leave are deleted. */
#ifndef TEST_CHILD_H
#define TEST_CHILD_H

#include <ftw.h>
#include <sys/wait.h>

#include "../../llmc/base/util.h"

typedef enum { SAID_ON_STDERR, SAID_ANYWHERE } ChildOutput;

// Run body(state) in a child. What it says is appended to `said`, which then holds a string. Returns its exit status, that of
// a signal plus 128.
static inline int in_child(Text* said, ChildOutput output, void (*body)(void* state), void* state) {
    int ends[2], result = 0;
    char piece[4096];
    fflush(stdout);
    if (pipe(ends) != 0) die(FAILED, "pipe: %s", strerror(errno));
    pid_t child = fork();
    if (child < 0) die(FAILED, "fork: %s", strerror(errno));
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        if (output == SAID_ANYWHERE) dup2(ends[1], STDOUT_FILENO);
        close(ends[0]), close(ends[1]);
        body(state);
        exit(DONE);
    }
    close(ends[1]);
    text_append(said, "", 0);
    for (ssize_t got; (got = read(ends[0], piece, sizeof piece)) > 0;) text_append(said, piece, (size_t)got);
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
static inline int end_of(void (*run)(const char*), const char* argument, Text* said) {
    ChildCall c = {run, argument};
    return in_child(said, SAID_ON_STDERR, child_call, &c);
}

static inline int is_one_line(const Text* said) {
    return said->length > 1 && strchr(said->text, '\n') == said->text + said->length - 1;
}

// Whether run(file) ends with `status` and says `message` (NULL: anything), with USAGE in one line that names the file;
// status -1 accepts 0 and USAGE. *why: how it ended (caller frees).
static inline int ends_with(int status, const char* message, void (*run)(const char*), const char* file, char** why) {
    Text said = {NULL, 0, 0};
    int code = end_of(run, file, &said);
    int good = status < 0 ? code == DONE || code == USAGE : code == status;
    if (code == USAGE) good = good && is_one_line(&said) && strstr(said.text, file);
    if (message) good = good && strstr(said.text, message);
    *why = xprintf("ended with %d: %s", code, said.text);
    free(said.text);
    return good;
}

static inline int remove_entry(const char* path, const struct stat* st, int type, struct FTW* where) {
    (void)st, (void)type, (void)where;
    return remove(path);
}

// With all that is in it.
static inline void remove_directory(const char* path) { nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS); }

#endif
