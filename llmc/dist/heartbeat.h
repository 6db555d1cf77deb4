/* The heartbeat: how ranks notice that one of them died, fell silent or hangs.
 *
 * A thread in every rank keeps a connection to rank 0 and exchanges heartbeats with it once a second. A heartbeat holds
 * the number of waits for other ranks that the main thread has begun, the duration of the present wait, the time since
 * its last progress, and its step. Three things end a run, each with one line on stderr that names the rank, the same
 * on all surviving ranks, and with exit status LOST_PEER:
 *
 *     gone      its connection broke, or it announced that it ends with an error
 *     silent    it sent nothing for the timeout: it is stopped, or the network is cut
 *     hanging   others have waited for the timeout; it does not wait, and its main thread made no progress meanwhile
 *
 * Progress is a new step (heartbeat_progress), the end of a wait, or file I/O of the main thread, which the heartbeat
 * thread reads from /proc. So code that reads long files need not know about ranks.
 *
 * Rank 0 decides and sends its verdict to the others; each of them decides by itself only about rank 0. The verdict
 * arrives before rank 0 closes the connection, so the others report the lost rank and not rank 0. A rank that leaves at
 * the end of a run announces that and is no longer watched.
 *
 * The clock pauses while the heartbeat thread itself does not run (a stopped process, an overloaded machine). Other
 * ranks are not blamed for that time. */
#ifndef LLMC_DIST_HEARTBEAT_H
#define LLMC_DIST_HEARTBEAT_H

#include <sys/eventfd.h>

#include "llmc/base/thread.h"
#include "llmc/dist/handshake.h"

enum { HEARTBEAT_TEXT_SIZE = 344 };

// HEARD answers a heartbeat that announces an end. VERDICT holds the line with which all ranks end.
typedef enum { HEARTBEAT, HEARD, VERDICT } HeartbeatKind;

// Whether and how a rank ends: an exit status, or one of these.
enum { RUNNING = -2, LEAVING = -1 };  // LEAVING: the normal end of a run

// Times are nanoseconds, because the clocks of two machines have nothing in common.
typedef struct {
    int kind, ending;
    int64_t waits;   // begun so far
    int64_t waited;  // duration of the present wait, -1 outside of one
    int64_t quiet;   // how long ago the main thread last showed progress
    int64_t step;    // -1: none yet
    char text[HEARTBEAT_TEXT_SIZE];
} HeartbeatMessage;

// The state of another rank. Ranks other than 0 only have rank 0's.
typedef struct {
    int fd;      // -1: not connected
    int heard;   // it has confirmed that this rank ends
    int stuck;   // a message was sent in part, so no other can follow
    int broken;  // 0: not broken; else errno, or -1 for a normal close
    double ended_at, heard_at;
    HeartbeatMessage last;   // its last heartbeat
    HeartbeatMessage draft;  // the incoming message, of which `got` bytes have arrived
    size_t got;
} HeartbeatPeer;

typedef struct {
    int rank, size;
    double timeout, beat;
    double looked_at;      // when the thread last looked for messages
    Identity* ranks;       // [size]
    HeartbeatPeer* peers;  // [size]
    struct pollfd* polls;
    pthread_t thread;
    pid_t pid;                // a forked child must not announce an end for this process
    int wake;                 // an eventfd that wakes the thread
    int wait_depth, stopped;  // of the main thread; heartbeat_stop() was called
    long long io_bytes;       // that the main thread has read and written
    // Shared between threads, through __atomic builtins.
    int64_t waits, waiting_since, progress_at, step, asleep;  // waiting_since: -1 outside; asleep: time not counted
    int ending;                                               // RUNNING, LEAVING or an exit status
} Heartbeat;

// ---------------------------------------------------------------------------------------------------------
// The main thread's side. All of it may be called with NULL, if there is no other rank.

static inline int64_t heartbeat_load(const int64_t* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
static inline void heartbeat_store(int64_t* p, int64_t value) { __atomic_store_n(p, value, __ATOMIC_RELAXED); }

// Nanoseconds on the heartbeat's clock.
static inline int64_t heartbeat_now(const Heartbeat* h) {
    return (int64_t)(1e9 * now_seconds()) - heartbeat_load(&h->asleep);
}

// Call these before and after everything that waits for other ranks. Pairs may be nested; main thread only.
static inline void heartbeat_wait_begin(Heartbeat* h) {
    if (!h || h->wait_depth++ > 0) return;
    heartbeat_store(&h->waits, h->waits + 1);
    heartbeat_store(&h->waiting_since, heartbeat_now(h));
}

static inline void heartbeat_wait_end(Heartbeat* h) {
    if (!h || --h->wait_depth > 0) return;
    CHECK(h->wait_depth == 0);
    heartbeat_store(&h->progress_at, heartbeat_now(h));
    heartbeat_store(&h->waiting_since, -1);
}

// The run has reached this step, or is still working on it. Any thread may call this.
static inline void heartbeat_progress(Heartbeat* h, int64_t step) {
    if (!h) return;
    heartbeat_store(&h->step, step);
    heartbeat_store(&h->progress_at, heartbeat_now(h));
}

// ---------------------------------------------------------------------------------------------------------
// The thread's side: messages

// Bytes that the main thread has read and written so far, page cache included; 0 if the kernel does not count them
// (CONFIG_TASK_IO_ACCOUNTING). A kernel without it needs a --timeout above the time of the longest read.
static inline long long heartbeat_io_bytes(const Heartbeat* h) {
    char text[256] = "", *path = xprintf("/proc/self/task/%d/io", (int)h->pid);
    long long bytes_read = 0, written = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && read(fd, text, sizeof text - 1) > 0)
        if (sscanf(text, "rchar: %lld wchar: %lld", &bytes_read, &written) != 2) bytes_read = written = 0;
    if (fd >= 0) close(fd);
    free(path);
    return bytes_read + written;
}

// This rank's state.
static inline HeartbeatMessage heartbeat_message(const Heartbeat* h, HeartbeatKind kind) {
    HeartbeatMessage m;
    int64_t now = heartbeat_now(h), since = heartbeat_load(&h->waiting_since), shown = heartbeat_load(&h->progress_at);
    memset(&m, 0, sizeof m);
    m.kind = (int)kind, m.ending = RUNNING;
    m.waits = heartbeat_load(&h->waits);
    m.waited = since < 0 ? -1 : now > since ? now - since : 0;
    m.quiet = now > shown ? now - shown : 0;
    m.step = heartbeat_load(&h->step);
    return m;
}

static inline void heartbeat_send(HeartbeatPeer* p, const HeartbeatMessage* m) {
    if (p->fd < 0 || p->stuck) return;
    // Never wait: a peer that accepts no more data does not read either, and will be reported as silent. Only reading
    // detects a closed connection.
    ssize_t put = send(p->fd, m, sizeof *m, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (put >= 0 ? put < (ssize_t)sizeof *m : errno != EAGAIN && errno != EINTR) p->stuck = 1;
}

static inline void heartbeat_send_all(Heartbeat* h, const HeartbeatMessage* m) {
    for (int r = 0; r < h->size; r++)
        if (h->peers[r].last.ending != LEAVING) heartbeat_send(&h->peers[r], m);
}

// Print the line that names the lost rank, send it to the others, and end this process.
__attribute__((noreturn)) static inline void heartbeat_end(Heartbeat* h, const char* text) {
    enum { LINGER = 1 };  // seconds
    HeartbeatMessage m = heartbeat_message(h, VERDICT);
    snprintf(m.text, sizeof m.text, "%s", text);
    heartbeat_send_all(h, &m);
    // The main thread may never release stderr's lock, so write to the descriptor; lines stay whole. The reader of
    // stderr may have stopped, so do not wait long. Flush what the main thread has printed, if possible.
    struct pollfd error = {.fd = STDERR_FILENO, .events = POLLOUT}, out = {.fd = STDOUT_FILENO, .events = POLLOUT};
    char line[HEARTBEAT_TEXT_SIZE + 16];
    int length = snprintf(line, sizeof line, "error: %s\n", m.text);
    if (poll(&error, 1, 1000) == 1) write_all(STDERR_FILENO, line, (size_t)length);
    if (ftrylockfile(stdout) == 0) {
        if (poll(&out, 1, 0) == 1) fflush(stdout);
        funlockfile(stdout);
    }
    // Closing a connection with unread bytes resets it, and the reset could arrive before the verdict. So rank 0 reads
    // until the others have received the verdict and closed their ends.
    double end = now_seconds() + LINGER;
    for (int r = 0; r < h->size && h->rank == 0; r++) {
        HeartbeatPeer* p = &h->peers[r];
        struct pollfd in = {.fd = p->fd, .events = POLLIN};
        ssize_t got = p->fd >= 0 && !p->broken && shutdown(p->fd, SHUT_WR) == 0;
        while (got > 0 && now_seconds() < end)
            if (poll(&in, 1, 20) == 1) got = recv(in.fd, line, sizeof line, MSG_DONTWAIT);
    }
    _exit(LOST_PEER);
}

static inline void heartbeat_take(Heartbeat* h, HeartbeatPeer* p) {
    HeartbeatMessage* m = &p->draft;
    if (m->kind == HEARD) p->heard = 1;
    if (m->kind == HEARTBEAT) p->last = *m;
    if (m->kind == HEARTBEAT && m->ending != RUNNING) {
        HeartbeatMessage heard = heartbeat_message(h, HEARD);
        p->ended_at = (double)heartbeat_now(h);
        heartbeat_send(p, &heard);
    }
    // A rank that is already ending with an error keeps its own exit status.
    if (m->kind != VERDICT || __atomic_load_n(&h->ending, __ATOMIC_ACQUIRE) >= 0) return;
    m->text[HEARTBEAT_TEXT_SIZE - 1] = '\0';
    heartbeat_end(h, m->text);
}

// Read all that has come from a rank.
static inline void heartbeat_read(Heartbeat* h, HeartbeatPeer* p) {
    while (p->fd >= 0 && !p->broken) {
        ssize_t got = recv(p->fd, (char*)&p->draft + p->got, sizeof p->draft - p->got, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && errno == EAGAIN) return;
        if (got <= 0) p->broken = got == 0 ? -1 : errno;
        if (got <= 0) return;
        p->heard_at = (double)heartbeat_now(h);
        p->got += (size_t)got;
        if (p->got < sizeof p->draft) continue;
        p->got = 0;
        heartbeat_take(h, p);
    }
}

// ---------------------------------------------------------------------------------------------------------
// The thread's side: verdicts

// "rank 2 of 4 (host, process 4711)"
static inline void heartbeat_print_rank(const Heartbeat* h, int rank, char* out, size_t n) {
    snprintf(out, n, "rank %d of %d (%s, process %d)", rank, h->size, h->ranks[rank].host, h->ranks[rank].pid);
}

// End with the line "RANK WHAT; step N".
__attribute__((noreturn)) static inline void heartbeat_accuse(Heartbeat* h, int rank, const char* what) {
    const HeartbeatMessage* last = &h->peers[rank].last;
    char name[HOST_NAME_SIZE + 64], at[32] = "", text[HEARTBEAT_TEXT_SIZE];
    // Ranks are at the same step, and the last heartbeat may be a beat old.
    int64_t own = heartbeat_load(&h->step), step = own > last->step && last->ending == RUNNING ? own : last->step;
    heartbeat_print_rank(h, rank, name, sizeof name);
    if (step >= 0) snprintf(at, sizeof at, "; step %lld", (long long)step);
    snprintf(text, sizeof text, "%s %s%s", name, what, at);
    heartbeat_end(h, text);
}

// Is a rank's connection broken, has it announced an error, or is it silent?
static inline void heartbeat_check_peers(Heartbeat* h) {
    enum { GRACE = 200 };  // milliseconds after an announced error: others may be about to end for the same reason
    double now = (double)heartbeat_now(h);
    for (int r = 0; r < h->size; r++) {
        const HeartbeatPeer* p = &h->peers[r];
        const int ending = p->last.ending;
        char what[128] = "";
        if (p->fd < 0 || ending == LEAVING || p->heard) continue;
        if (ending != RUNNING) {
            if (now < p->ended_at + 1e6 * GRACE) continue;
            snprintf(what, sizeof what, "ended %s (exit status %d)", ending == DONE ? "too early" : "with an error",
                     ending);
        } else if (p->broken) {
            int plain = p->broken < 0 || p->broken == ECONNRESET || p->broken == EPIPE;
            snprintf(what, sizeof what, "is gone: its connection broke%s%s%s", plain ? "" : " (",
                     plain ? "" : strerror(p->broken), plain ? "" : ")");
        } else if (now > p->heard_at + 1e9 * h->timeout) {
            snprintf(what, sizeof what, "has not answered for %g s", h->timeout);
        }
        if (*what) heartbeat_accuse(h, r, what);
    }
}

// Rank 0: find a rank that keeps the others waiting. While any rank outside of a wait makes progress, none counts as
// hanging.
static inline void heartbeat_check_waits(Heartbeat* h) {
    const int64_t limit = (int64_t)(1e9 * h->timeout);
    int64_t longest = -1, shortest = INT64_MAX, most = -1;
    int hanging = -1, behind = -1, working = 0, left = -1;
    h->peers[0].last = heartbeat_message(h, HEARTBEAT);
    for (int r = 0; r < h->size; r++) {
        const HeartbeatMessage* m = &h->peers[r].last;
        if (m->ending == LEAVING) {
            left = r;
        } else if (m->waited < 0) {
            if (m->quiet < limit) working = 1;
            else if (hanging < 0 || m->waits < h->peers[hanging].last.waits) hanging = r;
        } else {
            if (m->waited > longest) longest = m->waited;
            if (m->waited < shortest) shortest = m->waited;
            if (behind < 0 || m->waits < h->peers[behind].last.waits) behind = r;
            if (m->waits > most) most = m->waits;
        }
    }
    if (longest < limit || (hanging < 0 && (working || shortest < limit))) return;
    char name[HOST_NAME_SIZE + 64], text[HEARTBEAT_TEXT_SIZE], at[48] = "";
    if (hanging < 0 && h->peers[behind].last.waits < most) hanging = behind;
    int about = hanging >= 0 ? hanging : left >= 0 ? left : 0;
    heartbeat_print_rank(h, about, name, sizeof name);
    if (h->peers[about].last.step >= 0) snprintf(at, sizeof at, " at step %lld", (long long)h->peers[about].last.step);
    if (hanging < 0 && left < 0)
        snprintf(text, sizeof text, "no rank makes progress%s: all %d have waited %g s for each other", at, h->size,
                 h->timeout);
    else
        snprintf(text, sizeof text, "%s %s%s: the others have waited %g s for it", name,
                 hanging >= 0 ? "hangs" : "has ended", at, h->timeout);
    heartbeat_end(h, text);
}

// ---------------------------------------------------------------------------------------------------------
// The thread

// This rank ends: announce it once, and wait until the others know. Returns 1 when it may exit.
static inline int heartbeat_may_end(Heartbeat* h, int ending, int* announced, double* since) {
    const double PATIENCE = 0.3;  // seconds that a rank with an error waits for confirmation
    if (*announced != ending) {
        HeartbeatMessage m = heartbeat_message(h, HEARTBEAT);
        m.ending = ending;
        // Rank 0 leaves last, because the others are connected to it alone. It announces only an error.
        if (ending >= 0 || h->rank != 0) heartbeat_send_all(h, &m);
        *announced = ending, *since = now_seconds();
    }
    if (ending >= 0 && now_seconds() > *since + PATIENCE) return 1;
    for (int r = 0; r < h->size; r++) {
        const HeartbeatPeer* p = &h->peers[r];
        if (p->fd >= 0 && p->last.ending != LEAVING && !p->heard && !(p->broken && ending >= 0)) return 0;
    }
    return 1;
}

// Receive and process messages until `seconds` have passed or the main thread ends.
static inline void heartbeat_receive(Heartbeat* h, double seconds) {
    uint64_t count;
    for (int r = 0; r < h->size; r++) {
        h->polls[r].fd = h->peers[r].broken ? -1 : h->peers[r].fd;
        h->polls[r].events = POLLIN;
    }
    h->polls[h->size].fd = h->wake, h->polls[h->size].events = POLLIN;
    poll(h->polls, (nfds_t)h->size + 1, (int)(1e3 * seconds) + 1);
    // Do not count the time for which this thread should have run but was not scheduled.
    double now = now_seconds(), passed = now - h->looked_at;
    if (passed > 2 * h->beat) heartbeat_store(&h->asleep, h->asleep + (int64_t)(1e9 * (passed - h->beat)));
    h->looked_at = now;
    while (h->polls[h->size].revents && read(h->wake, &count, sizeof count) > 0) continue;
    for (int r = 0; r < h->size; r++)
        if (h->polls[r].fd >= 0) heartbeat_read(h, &h->peers[r]);
}

static inline void* heartbeat_run(void* argument) {
    Heartbeat* h = (Heartbeat*)argument;
    double next = 0, since = 0;
    for (int announced = RUNNING;;) {
        int ending = __atomic_load_n(&h->ending, __ATOMIC_ACQUIRE);
        if (ending != RUNNING && heartbeat_may_end(h, ending, &announced, &since)) break;
        // A rank that leaves sends nothing more: bytes that are never read would reset the connection.
        if ((ending == RUNNING || h->rank == 0) && now_seconds() >= next) {
            long long bytes = heartbeat_io_bytes(h);
            if (bytes != h->io_bytes) heartbeat_store(&h->progress_at, heartbeat_now(h));
            h->io_bytes = bytes;
            HeartbeatMessage m = heartbeat_message(h, HEARTBEAT);
            heartbeat_send_all(h, &m), next = now_seconds() + h->beat;
        }
        double pause = ending == RUNNING ? fmax(0, next - now_seconds()) : 0.05;
        for (int r = 0; r < h->size; r++)
            if (h->peers[r].last.ending >= 0) pause = fmin(pause, 0.05);
        heartbeat_receive(h, pause);
        if (ending >= 0) continue;
        heartbeat_check_peers(h);
        if (h->rank == 0) heartbeat_check_waits(h);
    }
    return NULL;
}

// ---------------------------------------------------------------------------------------------------------
// Beginning and ending

// End the thread, and wait until the other ranks know how this one ends.
static inline void heartbeat_finish(Heartbeat* h, int ending) {
    uint64_t one = 1;
    __atomic_store_n(&h->ending, ending, __ATOMIC_RELEASE);
    write_all(h->wake, &one, sizeof one);
    pthread_join(h->thread, NULL);
}

// This process's heartbeat, for exit(), which passes nothing to its functions. on_exit() would, but musl has none.
static inline Heartbeat** heartbeat_of_process(void) {
    static Heartbeat* h;
    return &h;
}

// exit() calls this: a rank that ends without heartbeat_stop() announces an error.
static inline void heartbeat_at_exit(void) {
    Heartbeat* h = *heartbeat_of_process();
    if (h->pid == getpid() && !h->stopped) heartbeat_finish(h, *exit_status() == DONE ? FAILED : *exit_status());
}

// Start the heartbeat of `rank`. It takes over the connections fds[size]: on rank 0 to all others, elsewhere to rank 0.
// `ranks` [size] is copied, `timeout` is in seconds. All ranks must start it at about the same time.
static inline Heartbeat* heartbeat_start(int rank, int size, const int* fds, const Identity* ranks, double timeout) {
    Heartbeat* h = (Heartbeat*)xcalloc(1, sizeof(Heartbeat));
    h->rank = rank, h->size = size, h->timeout = timeout;
    h->beat = fmin(1, timeout / 5);
    h->ranks = (Identity*)xcalloc((size_t)size, sizeof(Identity));
    h->peers = (HeartbeatPeer*)xcalloc((size_t)size, sizeof(HeartbeatPeer));
    h->polls = (struct pollfd*)xcalloc((size_t)size + 1, sizeof(struct pollfd));
    memcpy(h->ranks, ranks, (size_t)size * sizeof *ranks);
    h->pid = getpid();
    h->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (h->wake < 0) die(FAILED, "no eventfd for the heartbeat: %s", strerror(errno));
    h->waiting_since = h->step = -1, h->ending = RUNNING;
    h->progress_at = heartbeat_now(h);
    h->looked_at = now_seconds();
    for (int r = 0; r < size; r++) {
        h->peers[r].fd = r != rank && (rank == 0 || r == 0) ? fds[r] : -1;
        h->peers[r].heard_at = (double)heartbeat_now(h);
        h->peers[r].last = heartbeat_message(h, HEARTBEAT);
    }
    int bad = thread_start(&h->thread, heartbeat_run, h);
    if (bad) die(FAILED, "no thread for the heartbeat: %s", strerror(bad));
    if (!*heartbeat_of_process()) atexit(heartbeat_at_exit);
    *heartbeat_of_process() = h;
    return h;
}

// End the heartbeat at the normal end of a run. Rank 0 keeps watching the others until all have ended theirs.
static inline void heartbeat_stop(Heartbeat* h) {
    heartbeat_wait_begin(h);
    heartbeat_finish(h, LEAVING);
    h->stopped = 1;
    for (int r = 0; r < h->size; r++)
        if (h->peers[r].fd >= 0) close(h->peers[r].fd);
    close(h->wake);
    free(h->ranks), free(h->peers), free(h->polls);
}

#endif
