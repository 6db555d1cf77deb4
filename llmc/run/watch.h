/* The watch: how ranks notice that one of them died, fell silent or hangs.
 *
 * A thread in every rank keeps a connection to rank 0 and sends a heartbeat each way once a second: how many waits on
 * other ranks the main thread has begun, since when it has been in one, how long it has shown no sign, its step. Three
 * things end a run, each with a line on stderr that names the rank, the same in all ranks that still live, and with
 * exit status LOST_PEER:
 *
 *     gone      its connection broke, at once, or it announced that it ended with an error
 *     silent    nothing was heard of it for the timeout: stopped, or the network between is cut
 *     hanging   others have waited for the timeout, it does not wait and its main thread has shown no sign for as long
 *
 * Rank 0 decides and tells the others; each of them decides by itself only about rank 0. What a rank was told is read
 * before the end of the connection that follows it, so that nobody blames rank 0 for the rank that rank 0 ended for.
 * A rank that ends as it should says so and is no longer watched.
 *
 * The clock stands still while the watch itself does not get to run (a stopped process, a machine with too much to do):
 * others are not blamed for that time. */
#ifndef LLMC_WATCH_H
#define LLMC_WATCH_H

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include "../base/util.h"

enum { WATCH_HOST_SIZE = 64, WATCH_TEXT_SIZE = 344 };

// Who a rank is, for messages and for finding out which ranks share a machine.
typedef struct {
    char host[WATCH_HOST_SIZE];
    uint64_t machine;
    int pid, local_rank;  // -1: it was not told
} Identity;

// HEARTBEAT; ENDING (with an exit status); LEAVING, as a run should end; HEARD, the answer to these two; VERDICT (a
// text).
typedef enum { HEARTBEAT, ENDING, LEAVING, HEARD, VERDICT } WatchKind;

// Times are nanoseconds, because the clocks of two machines have nothing in common.
typedef struct {
    int kind, status;
    int64_t calls;   // waits begun so far
    int64_t waited;  // for how long in the present one, -1 outside
    int64_t quiet;   // for how long without a sign of the main thread
    int64_t step;    // -1: none yet
    char text[WATCH_TEXT_SIZE];
} WatchMessage;

// What is known of another rank. For ranks other than 0 that is rank 0 alone.
typedef struct {
    int fd;           // -1: not connected, or no more
    int left, heard;  // it left as a run should end; it has heard that this rank leaves or ends
    int stuck;        // a message could not be sent whole: nothing more can be
    int broken;       // errno, or -1 for an ordinary end; 0: not
    int ended;        // it announced that it ends with `status`
    int status;
    double ended_at, heard_at;
    WatchMessage last;   // its last heartbeat
    WatchMessage draft;  // the message that is coming in, of which `got` bytes are here
    size_t got;
} WatchPeer;

typedef enum { WATCHING, WATCH_LEAVE, WATCH_END } WatchOrder;

typedef struct {
    int rank, size;
    double timeout, beat;
    Identity* who;     // [size]
    WatchPeer* peers;  // [size]
    struct pollfd* polls;
    pthread_t thread;
    pid_t pid;                // a child that was forked must not speak for this process
    int wake;                 // an eventfd that interrupts the thread's waiting
    int wait_depth, stopped;  // of the main thread; watch_stop() was called
    // Shared between threads, through __atomic builtins.
    int64_t calls, waiting_since, sign_at, step, asleep;  // waiting_since: -1 outside; asleep: time that does not count
    int order, status;                                    // a WatchOrder; with which exit status
} Watch;

// ---------------------------------------------------------------------------------------------------------
// The main thread's side. All of it may be called with NULL, where there is no other rank.

static inline int64_t watch_load(const int64_t* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static inline void watch_store(int64_t* p, int64_t value) { __atomic_store_n(p, value, __ATOMIC_RELAXED); }

// Nanoseconds on the watch's clock.
static inline int64_t watch_now(const Watch* w) { return (int64_t)(1e9 * now_seconds()) - watch_load(&w->asleep); }

// Before and after whatever takes as long as other ranks take. Pairs may be nested; main thread only.
static inline void watch_wait_begin(Watch* w) {
    if (!w || w->wait_depth++ > 0) return;
    watch_store(&w->calls, w->calls + 1);
    watch_store(&w->waiting_since, watch_now(w));
}

static inline void watch_wait_end(Watch* w) {
    if (!w || --w->wait_depth > 0) return;
    CHECK(w->wait_depth == 0);
    watch_store(&w->sign_at, watch_now(w));
    watch_store(&w->waiting_since, -1);
}

// A sign that work goes on. Any thread.
static inline void watch_sign(Watch* w) {
    if (w) watch_store(&w->sign_at, watch_now(w));
}

// The same, at this step.
static inline void watch_progress(Watch* w, int64_t step) {
    if (!w) return;
    watch_store(&w->step, step);
    watch_sign(w);
}

// What this rank says of itself.
static inline WatchMessage watch_message(const Watch* w, WatchKind kind) {
    WatchMessage m;
    int64_t now = watch_now(w), since = watch_load(&w->waiting_since), sign = watch_load(&w->sign_at);
    memset(&m, 0, sizeof m);
    m.kind = (int)kind;
    m.calls = watch_load(&w->calls);
    m.waited = since < 0 ? -1 : now > since ? now - since : 0;
    m.quiet = now > sign ? now - sign : 0;
    m.step = watch_load(&w->step);
    return m;
}

// ---------------------------------------------------------------------------------------------------------
// The thread's side: messages

static inline void watch_send(WatchPeer* p, const WatchMessage* m) {
    if (p->fd < 0 || p->stuck) return;
    // Never wait: what cannot be sent will not be read either, and that shows as silence. Only reading tells of an end.
    ssize_t put = send(p->fd, m, sizeof *m, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (put >= 0 ? put < (ssize_t)sizeof *m : errno != EAGAIN && errno != EINTR) p->stuck = 1;
}

static inline void watch_send_all(Watch* w, const WatchMessage* m) {
    for (int r = 0; r < w->size; r++)
        if (!w->peers[r].left) watch_send(&w->peers[r], m);
}

// Print the line that names who was lost, see that the others have it, and end this process.
__attribute__((noreturn)) static inline void watch_end(Watch* w, const char* text) {
    enum { LINGER = 1 };  // seconds
    WatchMessage m = watch_message(w, VERDICT);
    snprintf(m.text, sizeof m.text, "%s", text);
    watch_send_all(w, &m);
    // The main thread may hold stderr's lock for ever, so not through it; whole lines do not mix. Nor may this wait
    // for ever for somebody who no longer reads what is printed; otherwise what the main thread has printed is not
    // lost either.
    struct pollfd error = {STDERR_FILENO, POLLOUT, 0}, out = {STDOUT_FILENO, POLLOUT, 0};
    char line[WATCH_TEXT_SIZE + 16];
    int length = snprintf(line, sizeof line, "error: %s\n", m.text);
    if (poll(&error, 1, 1000) == 1) write_all(STDERR_FILENO, line, (size_t)length);
    if (ftrylockfile(stdout) == 0) {
        if (poll(&out, 1, 0) == 1) fflush(stdout);
        funlockfile(stdout);
    }
    // A connection that is closed with unread bytes is reset, which could overtake the message: rank 0 reads until the
    // others, who do as it said, have closed theirs.
    double end = now_seconds() + LINGER;
    for (int r = 0; r < w->size && w->rank == 0; r++) {
        WatchPeer* p = &w->peers[r];
        struct pollfd in = {p->fd, POLLIN, 0};
        ssize_t got = p->fd >= 0 && !p->broken && shutdown(p->fd, SHUT_WR) == 0;
        while (got > 0 && now_seconds() < end)
            if (poll(&in, 1, 20) == 1) got = recv(in.fd, line, sizeof line, MSG_DONTWAIT);
    }
    _exit(LOST_PEER);
}

// "rank 2 of 4 (host, process 4711)"
static inline void watch_print_rank(const Watch* w, int rank, char* out, size_t n) {
    snprintf(out, n, "rank %d of %d (%s, process %d)", rank, w->size, w->who[rank].host, w->who[rank].pid);
}

static inline void watch_take(Watch* w, WatchPeer* p) {
    const WatchMessage* m = &p->draft;
    WatchMessage heard = watch_message(w, HEARD);
    if (m->kind == HEARTBEAT || m->kind == ENDING || m->kind == LEAVING) p->last = *m;
    if (m->kind == ENDING) p->ended = 1, p->status = m->status, p->ended_at = (double)watch_now(w);
    if (m->kind == LEAVING) p->left = 1;
    if (m->kind == ENDING || m->kind == LEAVING) watch_send(p, &heard);
    if (m->kind == HEARD) p->heard = 1;
    // A rank that is already ending, for a reason of its own, keeps to that.
    if (m->kind == VERDICT && __atomic_load_n(&w->order, __ATOMIC_ACQUIRE) != WATCH_END) {
        char text[WATCH_TEXT_SIZE];
        memcpy(text, m->text, sizeof text);
        text[sizeof text - 1] = '\0';
        watch_end(w, text);
    }
}

// Read all that has come from a rank.
static inline void watch_read(Watch* w, int rank) {
    WatchPeer* p = &w->peers[rank];
    while (p->fd >= 0 && !p->broken) {
        ssize_t got = recv(p->fd, (char*)&p->draft + p->got, sizeof p->draft - p->got, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && errno == EAGAIN) return;
        if (got <= 0) p->broken = got == 0 ? -1 : errno;
        if (got <= 0) return;
        p->heard_at = (double)watch_now(w);
        p->got += (size_t)got;
        if (p->got < sizeof p->draft) continue;
        p->got = 0;
        watch_take(w, p);
    }
}

// ---------------------------------------------------------------------------------------------------------
// The thread's side: judging

// End with the line "RANK WHAT; step N".
__attribute__((noreturn)) static inline void watch_accuse(Watch* w, int rank, const char* what) {
    char name[WATCH_HOST_SIZE + 64], text[WATCH_TEXT_SIZE];
    // Ranks go in step, and its last word may be a heartbeat old.
    int64_t own = watch_load(&w->step), step = w->peers[rank].last.step;
    if (own > step && !w->peers[rank].ended) step = own;
    watch_print_rank(w, rank, name, sizeof name);
    if (step >= 0) snprintf(text, sizeof text, "%s %s; step %lld", name, what, (long long)step);
    else snprintf(text, sizeof text, "%s %s", name, what);
    watch_end(w, text);
}

// Ranks whose connection broke, who announced an error, or who say nothing.
static inline void watch_judge_peers(Watch* w) {
    enum { MERCY = 200 };  // milliseconds after an announced error: others may be about to end for the same reason
    double now = (double)watch_now(w);
    for (int r = 0; r < w->size; r++) {
        WatchPeer* p = &w->peers[r];
        char what[128];
        if (p->fd < 0 || p->left || p->heard) continue;
        if (p->ended) {
            if (now < p->ended_at + 1e6 * MERCY) continue;
            snprintf(what, sizeof what, "ended %s (exit status %d)", p->status == DONE ? "too early" : "with an error",
                     p->status);
            watch_accuse(w, r, what);
        }
        if (p->broken) {
            int plain = p->broken < 0 || p->broken == ECONNRESET || p->broken == EPIPE;
            snprintf(what, sizeof what, "is gone: its connection broke%s%s%s", plain ? "" : " (",
                     plain ? "" : strerror(p->broken), plain ? "" : ")");
            watch_accuse(w, r, what);
        }
        if (now > p->heard_at + 1e9 * w->timeout) {
            snprintf(what, sizeof what, "has not answered for %g s", w->timeout);
            watch_accuse(w, r, what);
        }
    }
}

// Rank 0: a rank that the others wait for. While one of those that do not wait shows signs of work, all is well.
static inline void watch_judge_waits(Watch* w) {
    const int64_t limit = (int64_t)(1e9 * w->timeout);
    int64_t longest = -1, shortest = INT64_MAX, most = -1;
    int hanging = -1, behind = -1, working = 0, left = -1;
    w->peers[0].last = watch_message(w, HEARTBEAT);
    for (int r = 0; r < w->size; r++) {
        const WatchMessage* m = &w->peers[r].last;
        if (w->peers[r].left) {
            left = r;
        } else if (m->waited < 0) {
            if (m->quiet < limit) working = 1;
            else if (hanging < 0 || m->calls < w->peers[hanging].last.calls) hanging = r;
        } else {
            if (m->waited > longest) longest = m->waited;
            if (m->waited < shortest) shortest = m->waited;
            if (behind < 0 || m->calls < w->peers[behind].last.calls) behind = r;
            if (m->calls > most) most = m->calls;
        }
    }
    if (longest < limit || (hanging < 0 && (working || shortest < limit))) return;
    char name[WATCH_HOST_SIZE + 64], text[WATCH_TEXT_SIZE], at[48] = "";
    if (hanging < 0 && w->peers[behind].last.calls < most) hanging = behind;
    int about = hanging >= 0 ? hanging : left >= 0 ? left : 0;
    watch_print_rank(w, about, name, sizeof name);
    if (w->peers[about].last.step >= 0) snprintf(at, sizeof at, " at step %lld", (long long)w->peers[about].last.step);
    if (hanging < 0 && left < 0)
        snprintf(text, sizeof text, "no rank goes on%s: all %d have waited %g s for each other", at, w->size,
                 w->timeout);
    else
        snprintf(text, sizeof text, "%s %s%s: the others have waited %g s for it", name,
                 hanging >= 0 ? "hangs" : "has ended", at, w->timeout);
    watch_end(w, text);
}

// Follow an order to leave or to end. Returns 1 when this rank may go.
static inline int watch_obey(Watch* w, WatchOrder order, int* announced, double* since) {
    const double PATIENCE = 0.3;  // seconds that a rank with an error waits to be heard
    if (*announced != (int)order) {
        WatchMessage m = watch_message(w, order == WATCH_END ? ENDING : LEAVING);
        m.status = __atomic_load_n(&w->status, __ATOMIC_RELAXED);
        // Rank 0 leaves last: the others have nobody else to tell. Only an error makes it speak.
        if (order == WATCH_END || w->rank != 0) watch_send_all(w, &m);
        *announced = (int)order, *since = now_seconds();
    }
    int through = 1;
    for (int r = 0; r < w->size; r++) {
        const WatchPeer* p = &w->peers[r];
        if (p->fd >= 0 && !p->left && !p->heard && !(p->broken && order == WATCH_END)) through = 0;
    }
    return through || (order == WATCH_END && now_seconds() > *since + PATIENCE);
}

static inline void* watch_run(void* argument) {
    Watch* w = (Watch*)argument;
    double looked = now_seconds(), beat_at = 0, since = 0;
    int announced = WATCHING;
    for (;;) {
        WatchOrder order = (WatchOrder)__atomic_load_n(&w->order, __ATOMIC_ACQUIRE);
        if (order != WATCHING && watch_obey(w, order, &announced, &since)) break;
        // A rank that leaves says nothing after that: what is never read would reset the connection.
        if (order == WATCHING || w->rank == 0) {
            WatchMessage m = watch_message(w, HEARTBEAT);
            if (now_seconds() >= beat_at) watch_send_all(w, &m), beat_at = now_seconds() + w->beat;
        }
        for (int r = 0; r < w->size; r++) {
            w->polls[r].fd = w->peers[r].broken ? -1 : w->peers[r].fd;
            w->polls[r].events = POLLIN;
        }
        w->polls[w->size].fd = w->wake, w->polls[w->size].events = POLLIN;
        double pause = order == WATCHING ? fmax(0, beat_at - now_seconds()) : 0.05;
        for (int r = 0; r < w->size; r++)
            if (w->peers[r].ended) pause = fmin(pause, 0.05);
        poll(w->polls, (nfds_t)w->size + 1, (int)(1e3 * pause) + 1);

        // Time in which this thread did not run, although it would have, is nobody's fault.
        double now = now_seconds();
        if (now - looked > 2 * w->beat) watch_store(&w->asleep, w->asleep + (int64_t)(1e9 * (now - looked - w->beat)));
        looked = now;
        if (w->polls[w->size].revents) {
            uint64_t count;
            if (read(w->wake, &count, sizeof count) < 0 && errno != EAGAIN && errno != EINTR) break;
        }
        for (int r = 0; r < w->size; r++)
            if (w->polls[r].fd >= 0) watch_read(w, r);
        if (order == WATCH_END) continue;
        watch_judge_peers(w);
        if (w->rank == 0) watch_judge_waits(w);
    }
    return NULL;
}

// ---------------------------------------------------------------------------------------------------------
// Beginning and ending

// Give the thread an order and wait until it has followed it.
static inline void watch_order(Watch* w, WatchOrder order, int status) {
    uint64_t one = 1;
    __atomic_store_n(&w->status, status, __ATOMIC_RELAXED);
    __atomic_store_n(&w->order, (int)order, __ATOMIC_RELEASE);
    write_all(w->wake, &one, sizeof one);
    pthread_join(w->thread, NULL);
}

// What exit() calls: a rank that ends without watch_stop() lets the others know that it was an error.
static inline void watch_at_exit(int status, void* argument) {
    Watch* w = (Watch*)argument;
    if (w->pid == getpid() && !w->stopped) watch_order(w, WATCH_END, status);
}

// Begin to watch: `fds[r * stride]` is the connection to rank r, which the watch takes over: on rank 0 to all others,
// on them to rank 0. `who` [size] is copied, `timeout` in seconds. All ranks must begin at about the same time.
static inline Watch* watch_start(int rank, int size, const int* fds, int stride, const Identity* who, double timeout) {
    Watch* w = (Watch*)xcalloc(1, sizeof(Watch));
    w->rank = rank, w->size = size, w->timeout = timeout;
    w->beat = fmin(1, timeout / 5);
    w->who = (Identity*)xcalloc((size_t)size, sizeof(Identity));
    w->peers = (WatchPeer*)xcalloc((size_t)size, sizeof(WatchPeer));
    w->polls = (struct pollfd*)xcalloc((size_t)size + 1, sizeof(struct pollfd));
    memcpy(w->who, who, (size_t)size * sizeof *who);
    w->pid = getpid();
    w->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (w->wake < 0) die(FAILED, "no eventfd for the watch over the ranks: %s", strerror(errno));
    w->waiting_since = w->step = -1;
    w->sign_at = watch_now(w);
    for (int r = 0; r < size; r++) {
        w->peers[r].fd = r != rank && (rank == 0 || r == 0) ? fds[r * stride] : -1;
        w->peers[r].heard_at = (double)watch_now(w);
        w->peers[r].last = watch_message(w, HEARTBEAT);
    }
    // Signals are the main thread's business.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int bad = pthread_create(&w->thread, NULL, watch_run, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (bad) die(FAILED, "no thread for the watch over the ranks: %s", strerror(bad));
    on_exit(watch_at_exit, w);
    return w;
}

// End the watch as a run should end. Rank 0 waits until all others have, and watches them until then.
static inline void watch_stop(Watch* w) {
    watch_wait_begin(w);
    watch_order(w, WATCH_LEAVE, 0);
    w->stopped = 1;
    for (int r = 0; r < w->size; r++)
        if (w->peers[r].fd >= 0) close(w->peers[r].fd);
    close(w->wake);
    free(w->who), free(w->peers), free(w->polls);
}

#endif
