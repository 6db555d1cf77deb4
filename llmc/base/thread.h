/* Start a thread that handles no signals: the threads that exist already handle them. */
#ifndef LLMC_BASE_THREAD_H
#define LLMC_BASE_THREAD_H

#include <pthread.h>
#include <signal.h>

// Start a thread that runs body(argument) with all signals blocked. Returns 0, or the error of pthread_create().
static inline int thread_start(pthread_t* thread, void* (*body)(void*), void* argument) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(thread, NULL, body, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

#endif
