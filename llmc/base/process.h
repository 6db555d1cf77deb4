/* What a process sets up first: its standard descriptors, and handlers for the signals that stop it. */
#ifndef LLMC_BASE_PROCESS_H
#define LLMC_BASE_PROCESS_H

#include <signal.h>

#include "llmc/base/cpu_share.h"
#include "llmc/base/util.h"

typedef void (*StopHandler)(int);

// Have `handler` take the signals that ask for an end. A SIGHUP that is ignored, as nohup has it, stays ignored.
// Returns the handler before it.
static inline StopHandler process_on_stop(StopHandler handler) {
    struct sigaction now;
    StopHandler before = signal(SIGINT, handler);
    signal(SIGTERM, handler);
    if (sigaction(SIGHUP, NULL, &now) == 0 && now.sa_handler != SIG_IGN) signal(SIGHUP, handler);
    return before;
}

// To be called first in main, with its arguments: the program may start itself again (cpu_share.h). Standard
// descriptors that are closed are opened on /dev/null: else the first files that the program opens would take their
// numbers, and its output would go into them.
static inline void process_begin(StopHandler on_stop, char** argv) {
    cpu_share_settle(argv);
    int fd = 0;
    while (fd >= 0 && fd <= STDERR_FILENO) fd = open("/dev/null", O_RDWR);
    if (fd >= 0) close(fd);
    process_on_stop(on_stop);
}

#endif
