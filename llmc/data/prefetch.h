/* A thread that prepares the trainer's next batches while the trainer is busy.
 *
 * Jobs are numbered from 0 and done in order. The trainer asks for a job, and waits for it before it uses the result.
 * The job's parameters and result are in memory that both share: it belongs to the thread from prefetch_ask() until
 * prefetch_wait() returns, and otherwise to the trainer. The trainer reports errors in the data (ReadError) and handles
 * signals.
 *
 *     trainer                                       thread
 *     prefetch_open(&p, work, data);                while (prefetch_take(&p, &job)) {
 *     uint64_t job = prefetch_ask(&p);                  make job number `job`
 *     prefetch_wait(&p, job);                           prefetch_done(&p);
 *     prefetch_close(&p);                           } */
#ifndef LLMC_DATA_PREFETCH_H
#define LLMC_DATA_PREFETCH_H

#include "llmc/base/thread.h"
#include "llmc/base/util.h"

typedef struct {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t asked, done;  // jobs
    int stops;
} Prefetch;

// Start a thread that runs work(data), with all signals masked.
static inline void prefetch_open(Prefetch* p, void* (*work)(void*), void* data) {
    memset(p, 0, sizeof *p);
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->changed, NULL);
    int bad = thread_start(&p->thread, work, data);
    if (bad) die(FAILED, "cannot start the thread that reads ahead: %s", strerror(bad));
}

// Wait for the running job and drop the others.
static inline void prefetch_close(Prefetch* p) {
    pthread_mutex_lock(&p->lock);
    p->stops = 1;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
    pthread_join(p->thread, NULL);
    pthread_cond_destroy(&p->changed);
    pthread_mutex_destroy(&p->lock);
}

// Ask for the next job. Returns its number.
static inline uint64_t prefetch_ask(Prefetch* p) {
    pthread_mutex_lock(&p->lock);
    uint64_t job = p->asked++;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
    return job;
}

// Wait until this job is done.
static inline void prefetch_wait(Prefetch* p, uint64_t job) {
    pthread_mutex_lock(&p->lock);
    CHECK(job < p->asked);
    while (p->done <= job) pthread_cond_wait(&p->changed, &p->lock);
    pthread_mutex_unlock(&p->lock);
}

// For the thread: wait for the next job. Returns 0 if the thread must end.
static inline int prefetch_take(Prefetch* p, uint64_t* job) {
    pthread_mutex_lock(&p->lock);
    while (!p->stops && p->done == p->asked) pthread_cond_wait(&p->changed, &p->lock);
    *job = p->done;
    int has_job = !p->stops;
    pthread_mutex_unlock(&p->lock);
    return has_job;
}

// For the thread: its current job is done.
static inline void prefetch_done(Prefetch* p) {
    pthread_mutex_lock(&p->lock);
    p->done++;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

#endif
