/* What a process sets up first: its standard descriptors, and handlers for the signals that stop it. */
#ifndef LLMC_BASE_PROCESS_H
#define LLMC_BASE_PROCESS_H

#include <signal.h>

#include "llmc/base/cpu_share.h"
#include "llmc/base/util.h"

typedef void (*StopHandler)(int);

// Install `handler` for the signals that ask the process to stop. A SIGHUP that is ignored, as under nohup, stays
// ignored. Returns the previous handler.
static inline StopHandler process_on_stop(StopHandler handler) {
    struct sigaction now;
    StopHandler before = signal(SIGINT, handler);
    signal(SIGTERM, handler);
    if (sigaction(SIGHUP, NULL, &now) == 0 && now.sa_handler != SIG_IGN) signal(SIGHUP, handler);
    return before;
}

// exit() calls this: a program that would end with status 0 ends with 1 if its output could not be written, as on a full
// disk. A pipe's reader may leave early: that is no failure.
static inline void process_check_output(void) {
    struct stat out;
    int bad = fflush(stdout) != 0 || ferror(stdout);
    if (*exit_status() != DONE || !bad || fstat(STDOUT_FILENO, &out) != 0 || S_ISFIFO(out.st_mode) ||
        S_ISSOCK(out.st_mode))
        return;
    fprintf(stderr, "error: standard output could not be written completely; is its disk full?\n");
    _exit(FAILED);
}

// Call this first in main, with its arguments: the program may execute itself again (cpu_share.h). Opens closed
// standard descriptors on /dev/null. Otherwise the first files that the program opens would get their numbers, and
// output would go into these files.
static inline void process_begin(StopHandler on_stop, char** argv) {
    cpu_share_settle(argv);
    atexit(process_check_output);
    int fd = 0;
    while (fd >= 0 && fd <= STDERR_FILENO) fd = open("/dev/null", O_RDWR);
    if (fd >= 0) close(fd);
    process_on_stop(on_stop);
}

#endif
