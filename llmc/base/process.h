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

// Call this first in main, with its arguments: the program may execute itself again (cpu_share.h). Opens closed
// standard descriptors on /dev/null. Otherwise the first files that the program opens would get their numbers, and
// output would go into these files.
static inline void process_begin(StopHandler on_stop, char** argv) {
    cpu_share_settle(argv);
    int fd = 0;
    while (fd >= 0 && fd <= STDERR_FILENO) fd = open("/dev/null", O_RDWR);
    if (fd >= 0) close(fd);
    process_on_stop(on_stop);
}

#endif
