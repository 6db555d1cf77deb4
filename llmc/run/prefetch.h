/* A thread that works ahead: it makes what the trainer will ask for next while the trainer is busy with something else.
 *
 * Jobs are numbered from 0 and done one after the other. The trainer asks for them and waits for each before it uses
 * what the job has made; the thread takes them, does them, and says so. What job number n is about, and where its
 * result goes, lies in memory that both know: it belongs to the thread from prefetch_ask() until prefetch_wait() has
 * returned, else to the trainer. What is wrong with the data is the trainer's to report (ReadError), and signals are
 * its own.
 *
 *     trainer                                       thread
 *     prefetch_open(&p, work, data);                while (prefetch_take(&p, &job)) {
 *     uint64_t job = prefetch_ask(&p);                  make job number `job`
 *     prefetch_wait(&p, job);                           prefetch_done(&p);
 *     prefetch_close(&p);                           } */
#ifndef LLMC_PREFETCH_H
#define LLMC_PREFETCH_H

#include <pthread.h>
#include <signal.h>

#include "../base/util.h"

typedef struct {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t asked, done;  // jobs
    int stops;
} Prefetch;

// Start a thread that runs work(data). Signals are left to the threads that there are.
static inline void prefetch_open(Prefetch* p, void* (*work)(void*), void* data) {
    sigset_t all, before;
    memset(p, 0, sizeof *p);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->changed, NULL);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int bad = pthread_create(&p->thread, NULL, work, data);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (bad) die(FAILED, "a thread that reads ahead cannot be started: %s", strerror(bad));
}

// Let the running job come to its end and leave the others undone.
static inline void prefetch_close(Prefetch* p) {
    pthread_mutex_lock(&p->lock);
    p->stops = 1;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
    pthread_join(p->thread, NULL);
    pthread_cond_destroy(&p->changed);
    pthread_mutex_destroy(&p->lock);
}

// Returns the number of the job.
static inline uint64_t prefetch_ask(Prefetch* p) {
    pthread_mutex_lock(&p->lock);
    uint64_t job = p->asked++;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
    return job;
}

// Wait until this job, which was asked for, is done.
static inline void prefetch_wait(Prefetch* p, uint64_t job) {
    pthread_mutex_lock(&p->lock);
    CHECK(job < p->asked);
    while (p->done <= job) pthread_cond_wait(&p->changed, &p->lock);
    pthread_mutex_unlock(&p->lock);
}

// For the thread: wait for its next job. Returns 0 when it is to end.
static inline int prefetch_take(Prefetch* p, uint64_t* job) {
    pthread_mutex_lock(&p->lock);
    while (!p->stops && p->done == p->asked) pthread_cond_wait(&p->changed, &p->lock);
    *job = p->done;
    int goes_on = !p->stops;
    pthread_mutex_unlock(&p->lock);
    return goes_on;
}

// For the thread: the job it has taken is done.
static inline void prefetch_done(Prefetch* p) {
    pthread_mutex_lock(&p->lock);
    p->done++;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

#endif
