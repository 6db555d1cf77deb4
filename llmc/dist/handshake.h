/* How ranks connect: a star of TCP connections around rank 0, made in rounds.
 *
 * In a round every other rank connects to rank 0 and sends a Hello that identifies it. When all have connected, rank 0
 * sends each of them the list of ranks. The first round makes the connections of the heartbeat, which then watches the
 * second round, the connections of the collectives.
 *
 * Rank 0 closes a connection that does not send the run's key, without an answer. So port scanners, processes of other
 * runs and addresses of other machines do no harm: ranks try again until the timeout. A rank that does not fit (another
 * number of ranks, or a duplicate rank) is refused, and all ranks end with the reason. All machines must have the same
 * byte order. */
#ifndef LLMC_DIST_HANDSHAKE_H
#define LLMC_DIST_HANDSHAKE_H

#include <sys/random.h>
#include <sys/resource.h>

#include "llmc/dist/tcp.h"

enum { HOST_NAME_SIZE = 64, REPLY_TEXT_SIZE = 448 };

// Who a rank is, for messages and to find the ranks that share a machine.
typedef struct {
    char host[HOST_NAME_SIZE];
    uint64_t machine;
    int rank, pid, local_rank, unused;  // local_rank: -1: not given
} Identity;

typedef enum { ROUND_HEARTBEAT, ROUND_COLLECTIVES } Round;

// What a rank sends when it has connected.
typedef struct {
    char magic[8];
    uint64_t key, process;  // of the run; a random number that tells two processes apart
    int round, size;
    Identity who;
} Hello;

// Rank 0's answer: first HELLO_RECEIVED, later DONE (all ranks have connected; the list of ranks follows), or the exit
// status to end with and the reason.
enum { HELLO_RECEIVED = -1 };
typedef struct {
    char magic[8];
    int status, unused;
    char text[REPLY_TEXT_SIZE];
} Reply;

static inline uint64_t random_key(void) {
    uint64_t key = 0;
    while (key == 0)
        if (getrandom(&key, sizeof key, 0) != (ssize_t)sizeof key && errno != EINTR)
            die(FAILED, "the system gives no random numbers: %s", strerror(errno));
    return key;
}

// ---------------------------------------------------------------------------------------------------------
// Rank 0's endpoint in a shared directory

// Replace `file` by this endpoint; its inode goes to *inode. Only the user can read it, because the key is in it.
static inline void endpoint_write(const Endpoint* e, const char* file, ino_t* inode) {
    char* draft = xprintf("%s.%016llx.tmp", file, (unsigned long long)e->key);
    int fd = open(draft, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    struct stat st;
    if (fd < 0 || write_all(fd, e, sizeof *e) != 0 || fsync(fd) != 0 || fstat(fd, &st) != 0 || close(fd) != 0 ||
        rename_into_place(draft, file) != 0)
        die(FAILED, "%s: cannot be written: %s", draft, strerror(errno));
    *inode = st.st_ino;
    free(draft);
}

// Returns whether `file` holds an endpoint. It may be left from an earlier run that no longer listens.
static inline int endpoint_read(Endpoint* e, const char* file) {
    int fd = open(file, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    int good = fd >= 0 && pread_all(fd, e, sizeof *e, 0) == 0 && memcmp(e->magic, TCP_MAGIC, 8) == 0 && e->names >= 0 &&
               e->names <= ENDPOINT_NAMES && e->port >= 1 && e->ports >= 1 && e->ports <= 65536 &&
               e->port <= 65536 - e->ports;
    if (fd >= 0) close(fd);
    for (int i = 0; good && i < ENDPOINT_NAMES; i++) e->name[i][ENDPOINT_NAME_SIZE - 1] = '\0';
    return good;
}

// ---------------------------------------------------------------------------------------------------------
// The other ranks

// Try every address of the endpoint once. Returns a connection on which rank 0 of this run has answered, or -1 with the
// last failure in `why`. If rank 0 refuses this rank, the program ends with rank 0's reason.
static inline int handshake_try(const Endpoint* e, const Hello* hello, char why[ENDPOINT_NAME_SIZE]) {
    const int same_machine = e->machine != 0 && e->machine == hello->who.machine;
    for (int i = same_machine ? -1 : 0; i < e->names; i++)
        for (int port = e->port; port < e->port + e->ports; port++) {
            int fd = tcp_connect(i < 0 ? "127.0.0.1" : e->name[i], port, 2, why);
            Reply reply;
            if (fd < 0) continue;
            if (tcp_send(fd, hello, sizeof *hello, 0) == 0 &&
                tcp_receive(fd, &reply, sizeof reply, now_seconds() + 5) == 0 &&
                memcmp(reply.magic, TCP_MAGIC, 8) == 0) {
                reply.text[REPLY_TEXT_SIZE - 1] = '\0';
                if (reply.status != HELLO_RECEIVED) die(reply.status, "%s", reply.text);
                return fd;
            }
            close(fd);
            snprintf(why, ENDPOINT_NAME_SIZE, "the program that answers there is not rank 0 of this run");
        }
    return -1;
}

// One round: connect to rank 0 and wait, at most `timeout` seconds, until all ranks have connected. If `file` is not
// NULL, the endpoint is read from it before each attempt. Returns the connection; the list of ranks goes to
// ranks[size].
static inline int handshake_join(Endpoint* e, const char* file, Hello* hello, double timeout, Identity* ranks) {
    const double deadline = now_seconds() + timeout;
    const int rank = hello->who.rank, size = hello->size;
    char why[ENDPOINT_NAME_SIZE] = "nothing was tried";
    for (int fd = -1;;) {
        int known = !file || endpoint_read(e, file);
        hello->key = e->key;
        if (known) fd = handshake_try(e, hello, why);
        if (fd >= 0) {
            Reply reply;
            // Rank 0 reports the missing ranks after its own timeout, which may have started a little later.
            double end = now_seconds() + timeout + 10;
            int lost = tcp_receive(fd, &reply, sizeof reply, end) != 0;
            reply.text[REPLY_TEXT_SIZE - 1] = '\0';
            if (!lost && reply.status != DONE) die(reply.status, "%s", reply.text);
            if (lost || tcp_receive(fd, ranks, (size_t)size * sizeof *ranks, end) != 0)
                die(FAILED, "rank %d of %d: rank 0 (%s port %d) ended before all ranks had connected", rank, size,
                    e->names ? e->name[0] : "127.0.0.1", e->port);
            return fd;
        }
        if (now_seconds() > deadline && !known)
            die(FAILED, "rank %d of %d: rank 0 has not written %s within %g s; is it running, with the same -pf?", rank,
                size, file, timeout);
        if (now_seconds() > deadline)
            die(FAILED, "rank %d of %d: rank 0 is missing: %s port %d could not be reached within %g s: %s", rank, size,
                e->names ? e->name[0] : "127.0.0.1", e->port, timeout, why);
        usleep(50000);
    }
}

// ---------------------------------------------------------------------------------------------------------
// Rank 0

// A round on rank 0.
typedef struct {
    int* fds;       // [size] connections; -1: not connected, and rank 0 itself
    Hello* hellos;  // [size] of rank 0 and the connected ranks; `process` is 0 for the others
    Reply reply;    // DONE, or why the ranks do not fit together
} Lobby;

static inline void handshake_reply(int fd, const Reply* reply, int status) {
    Reply copy = *reply;
    copy.status = status;
    if (fd >= 0) send(fd, &copy, sizeof copy, MSG_NOSIGNAL | MSG_DONTWAIT);  // the heartbeat reports a lost rank
}

// Accept a connection. If its hello does not fit, the reply becomes a refusal.
static inline void lobby_accept(Lobby* l, int listener) {
    enum { HELLO_MS = 500 };  // a rank says hello at once
    const Hello* own = &l->hellos[0];
    Hello hello;
    Identity* who = &hello.who;
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0) return;
    tcp_no_delay(fd);
    if (tcp_receive(fd, &hello, sizeof hello, now_seconds() + 1e-3 * HELLO_MS) != 0 ||
        memcmp(hello.magic, TCP_MAGIC, 8) != 0 || hello.key != own->key || hello.round != own->round || who->rank < 0 ||
        (hello.size == own->size && who->rank >= own->size)) {
        close(fd);
        return;
    }
    who->host[HOST_NAME_SIZE - 1] = '\0';
    for (char* p = who->host; *p; p++)
        if (*p < ' ' || *p > '~') *p = '?';
    const Hello* other = who->rank < own->size ? &l->hellos[who->rank] : own;
    if (l->reply.status == DONE && hello.size != own->size) {
        l->reply.status = USAGE;
        snprintf(l->reply.text, REPLY_TEXT_SIZE,
                 "the ranks disagree about their number: rank 0 (%s, process %d) expects %d, rank %d (%s, process %d) "
                 "%d; give all of them the same (-pn, WORLD_SIZE)",
                 own->who.host, own->who.pid, own->size, who->rank, who->host, who->pid, hello.size);
    } else if (l->reply.status == DONE && other->process != 0 && other->process != hello.process) {
        l->reply.status = USAGE;
        snprintf(l->reply.text, REPLY_TEXT_SIZE,
                 "two processes are rank %d of %d: %s, process %d, and %s, process %d; give each its own rank (-pr, "
                 "RANK)",
                 who->rank, own->size, other->who.host, other->who.pid, who->host, who->pid);
    }
    handshake_reply(fd, &l->reply, l->reply.status == DONE ? HELLO_RECEIVED : l->reply.status);
    if (l->reply.status == DONE) {
        // A rank that gave up waiting for an answer tries again.
        if (l->fds[who->rank] >= 0) close(l->fds[who->rank]);
        l->fds[who->rank] = fd, l->hellos[who->rank] = hello;
    } else {
        close(fd);
    }
}

// Wait for connections until the time `until`. Ranks send nothing until all have connected, so a connection that
// becomes readable was closed.
static inline void lobby_wait(Lobby* l, int listener, struct pollfd* polls, double until) {
    const int size = l->hellos[0].size;
    double left = until - now_seconds();
    for (int r = 0; r < size; r++) polls[r].fd = r ? l->fds[r] : listener, polls[r].events = POLLIN;
    if (poll(polls, (nfds_t)size, left > 0 ? (int)(1e3 * left) + 1 : 0) < 0) return;
    for (int r = 1; r < size; r++) {
        if (l->fds[r] < 0 || !polls[r].revents) continue;
        close(l->fds[r]);
        l->fds[r] = -1, l->hellos[r].process = 0;
    }
    if (polls[0].revents) lobby_accept(l, listener);
}

// List the ranks that have not connected, at most eight: "ranks 2, 3 and 5", or "rank 2". Returns their number.
static inline int lobby_missing(const Lobby* l, char* out, size_t n) {
    const int size = l->hellos[0].size;
    int missing = 0, named = 0;
    for (int r = 1; r < size; r++) missing += l->fds[r] < 0;
    int length = snprintf(out, n, missing == 1 ? "rank" : "ranks");
    for (int r = 1; r < size && named < 8; r++) {
        if (l->fds[r] >= 0) continue;
        const char* before = named == 0 ? " " : named + 1 == missing ? " and " : ", ";
        length += snprintf(out + length, n - (size_t)length, "%s%d", before, r);
        named++;
    }
    if (named < missing) snprintf(out + length, n - (size_t)length, " and %d more", missing - named);
    return missing;
}

// Allow enough open files for the ranks' connections.
static inline void raise_open_files(int size) {
    struct rlimit files;
    rlim_t needed = 2 * (rlim_t)size + 128;
    if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur >= needed || files.rlim_max <= files.rlim_cur) return;
    files.rlim_cur = files.rlim_max < needed ? files.rlim_max : needed;
    setrlimit(RLIMIT_NOFILE, &files);
}

// One round: wait on `listener` until every other rank has connected. Fills fds[size] and ranks[size]. Ends this and
// all connected ranks if the ranks do not fit together or some are missing after the timeout. If the inode of `file`
// (may be NULL) is no longer `inode`, another rank 0 has replaced it.
static inline void handshake_host(int listener, const Hello* own, double timeout, const Endpoint* e, const char* file,
                                  ino_t inode, int* fds, Identity* ranks) {
    enum { LINGER = 1 };  // seconds for which ranks that connect after a refusal are refused too
    const int size = own->size;
    const double deadline = now_seconds() + timeout;
    struct stat st;
    struct pollfd* polls = (struct pollfd*)xcalloc((size_t)size, sizeof(struct pollfd));
    char missing[128];
    Lobby l;
    memset(&l, 0, sizeof l);
    memcpy(l.reply.magic, TCP_MAGIC, 8);
    l.fds = fds, l.hellos = (Hello*)xcalloc((size_t)size, sizeof(Hello));
    l.hellos[0] = *own;
    for (int r = 0; r < size; r++) fds[r] = -1;
    raise_open_files(size);
    while (l.reply.status == DONE && lobby_missing(&l, missing, sizeof missing)) {
        lobby_wait(&l, listener, polls, fmin(deadline, now_seconds() + 1));
        if (l.reply.status != DONE) break;
        if (file && (stat(file, &st) != 0 || st.st_ino != inode)) {
            l.reply.status = USAGE;
            snprintf(l.reply.text, REPLY_TEXT_SIZE,
                     "%s was replaced: two processes are rank 0, or two runs share a directory; give each its own "
                     "(-pr, -pf)",
                     file);
        } else if (lobby_missing(&l, missing, sizeof missing) && now_seconds() > deadline) {
            l.reply.status = FAILED;
            snprintf(l.reply.text, REPLY_TEXT_SIZE, "%s of %d did not connect to rank 0 (%s port %d) within %g s",
                     missing, size, e->names ? e->name[0] : own->who.host, e->port, timeout);
        }
    }
    for (int r = 0; r < size; r++) {
        ranks[r] = l.hellos[r].who;
        handshake_reply(fds[r], &l.reply, l.reply.status);
    }
    for (int r = 1; r < size && l.reply.status == DONE; r++) tcp_send(fds[r], ranks, (size_t)size * sizeof *ranks, 0);
    for (double end = now_seconds() + LINGER; l.reply.status != DONE && now_seconds() < end;)
        lobby_wait(&l, listener, polls, end);
    free(l.hellos), free(polls);
    if (file && stat(file, &st) == 0 && st.st_ino == inode) unlink(file);
    if (l.reply.status != DONE) die(l.reply.status, "%s", l.reply.text);
}

#endif
