/* How the processes of a run find each other: TCP connections that form a star around rank 0.
 *
 * Rank 0 listens, all others connect and say who they are; when all have come, rank 0 tells them so. Whoever does not
 * know the run's key is turned away without an answer, so a port scanner, a process of another run or an address that
 * belongs to somebody else does no harm: the ranks go on trying until the timeout. All machines have one byte order. */
#ifndef LLMC_TCP_H
#define LLMC_TCP_H

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include "../base/util.h"

// The connections of a rank to rank 0: one for collectives, one for the watch.
enum { TCP_DATA, TCP_WATCH, TCP_LINKS };
enum { TCP_NAMES = 12, TCP_NAME_SIZE = 128, TCP_HOST_SIZE = 64, TCP_TEXT_SIZE = 448 };

#define TCP_MAGIC "llmcrnk1"

// Where rank 0 can be reached: names or addresses to try in turn, each with `ports` ports.
typedef struct {
    char magic[8];
    uint64_t key;      // of the run
    uint64_t machine;  // that rank 0 runs on, 0: unknown; ranks of the same one try the loopback first
    int port, ports, names, unused;
    char name[TCP_NAMES][TCP_NAME_SIZE];
} TcpPlace;

// What a process says when it connects.
typedef struct {
    char magic[8];
    uint64_t key, process;  // of the run; a random number, the same on all connections of a process
    int link, rank, size, pid;
    char host[TCP_HOST_SIZE];
} TcpHello;

// What rank 0 answers: TCP_SEEN at once, later DONE (0: all are here) or the exit status to end with and why.
enum { TCP_SEEN = -1 };
typedef struct {
    char magic[8];
    int status, unused;
    char text[TCP_TEXT_SIZE];
} TcpAnswer;

// ---------------------------------------------------------------------------------------------------------
// Bytes

// Send all, blocking. Returns 0, or -1 with errno. `flags`: 0, or MSG_MORE where more follows at once.
static inline int tcp_send(int fd, const void* bytes, size_t n, int flags) {
    const char* p = (const char*)bytes;
    while (n) {
        ssize_t put = send(fd, p, n, MSG_NOSIGNAL | flags);
        if (put < 0 && errno == EINTR) continue;
        if (put < 0) return -1;
        p += put, n -= (size_t)put;
    }
    return 0;
}

// Receive exactly n bytes until the time `deadline` (now_seconds(); INFINITY: whenever they come). Returns 0, or -1
// with errno (0: the connection was closed).
static inline int tcp_receive(int fd, void* bytes, size_t n, double deadline) {
    char* p = (char*)bytes;
    while (n) {
        if (deadline < INFINITY) {
            struct pollfd waited = {fd, POLLIN, 0};
            double left = deadline - now_seconds();
            int ready = left > 0 ? poll(&waited, 1, (int)(1e3 * left) + 1) : 0;
            if (ready < 0 && errno == EINTR) continue;
            if (ready == 0) errno = ETIMEDOUT;
            if (ready <= 0) return -1;
        }
        ssize_t got = recv(fd, p, n, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got == 0) errno = 0;
        if (got <= 0) return -1;
        p += got, n -= (size_t)got;
    }
    return 0;
}

// Small messages must leave at once.
static inline void tcp_no_delay(int fd) {
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

static inline uint64_t tcp_random(void) {
    uint64_t key = 0;
    while (key == 0)
        if (getrandom(&key, sizeof key, 0) != (ssize_t)sizeof key && errno != EINTR)
            die(FAILED, "the system gives no random numbers: %s", strerror(errno));
    return key;
}

// ---------------------------------------------------------------------------------------------------------
// Addresses

// Append a name to try, unless it is there already.
static inline void tcp_add_name(TcpPlace* place, const char* name) {
    for (int i = 0; i < place->names; i++)
        if (strcmp(place->name[i], name) == 0) return;
    if (place->names == TCP_NAMES || strlen(name) >= TCP_NAME_SIZE) return;
    snprintf(place->name[place->names++], TCP_NAME_SIZE, "%s", name);
}

// All that this machine may be called by others: its host name, then the addresses of its interfaces. A machine with
// many interfaces does not know which of them the others can reach; they try.
static inline void tcp_add_own_names(TcpPlace* place) {
    char name[TCP_NAME_SIZE];
    struct ifaddrs *list = NULL, *i;
    if (gethostname(name, sizeof name) == 0) name[sizeof name - 1] = '\0', tcp_add_name(place, name);
    if (getifaddrs(&list) != 0) return;
    for (i = list; i; i = i->ifa_next) {
        if (!i->ifa_addr || !(i->ifa_flags & IFF_UP) || (i->ifa_flags & IFF_LOOPBACK)) continue;
        int family = i->ifa_addr->sa_family;
        if (family != AF_INET && family != AF_INET6) continue;
        // Link-local addresses mean nothing elsewhere.
        if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&((struct sockaddr_in6*)(void*)i->ifa_addr)->sin6_addr))
            continue;
        socklen_t size = family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
        if (getnameinfo(i->ifa_addr, size, name, sizeof name, NULL, 0, NI_NUMERICHOST) == 0) tcp_add_name(place, name);
    }
    freeifaddrs(list);
}

// Listen on the first of the place's ports that is free (0: any), and note it there. With a place whose only name is
// the loopback nobody else can connect. Returns the socket, or -1 with errno.
static inline int tcp_listen(TcpPlace* place) {
    int only_here =
        place->names == 1 && (strcmp(place->name[0], "localhost") == 0 || strcmp(place->name[0], "127.0.0.1") == 0 ||
                              strcmp(place->name[0], "::1") == 0);
    int saved = EAFNOSUPPORT;
    for (int port = place->port; port < place->port + place->ports; port++) {
        for (int version = 6; version >= 4; version -= 2) {
            // An IPv6 socket for all addresses takes IPv4 too; only the IPv4 loopback needs one of its own.
            if (only_here && (version == 6) != (strcmp(place->name[0], "::1") == 0)) continue;
            struct sockaddr_in6 six;
            struct sockaddr_in four;
            memset(&six, 0, sizeof six), memset(&four, 0, sizeof four);
            six.sin6_family = AF_INET6, four.sin_family = AF_INET;
            six.sin6_port = four.sin_port = htons((uint16_t)port);
            six.sin6_addr = only_here ? in6addr_loopback : in6addr_any;
            four.sin_addr.s_addr = htonl(only_here ? INADDR_LOOPBACK : INADDR_ANY);
            int fd = socket(version == 6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1, off = 0;
            if (fd < 0) continue;
            setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
            if (version == 6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
            const struct sockaddr* address =
                version == 6 ? (const struct sockaddr*)(const void*)&six : (const struct sockaddr*)(const void*)&four;
            socklen_t size = version == 6 ? sizeof six : sizeof four;
            if (bind(fd, address, size) == 0 && listen(fd, SOMAXCONN) == 0) {
                struct sockaddr_storage bound;
                socklen_t bound_size = sizeof bound;
                CHECK(getsockname(fd, (struct sockaddr*)(void*)&bound, &bound_size) == 0);
                place->port = ntohs(version == 6 ? ((struct sockaddr_in6*)(void*)&bound)->sin6_port
                                                 : ((struct sockaddr_in*)(void*)&bound)->sin_port);
                place->ports = 1;
                return fd;
            }
            saved = errno;
            close(fd);
            if (saved == EADDRINUSE) break;  // the same port of IPv4 alone would be another program's neighbour
        }
    }
    errno = saved;
    return -1;
}

// Connect within `seconds`. Returns the socket, or -1 and the reason in `why`.
static inline int tcp_connect(const char* name, int port, double seconds, char why[TCP_NAME_SIZE]) {
    struct addrinfo hints, *found = NULL;
    char service[16];
    int fd = -1;
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    snprintf(service, sizeof service, "%d", port);
    int bad = getaddrinfo(name, service, &hints, &found);
    if (bad) {
        snprintf(why, TCP_NAME_SIZE, "%s", gai_strerror(bad));
        return -1;
    }
    for (const struct addrinfo* a = found; a && fd < 0; a = a->ai_next) {
        fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0) continue;
        int error = 0;
        socklen_t size = sizeof error;
        if (connect(fd, a->ai_addr, a->ai_addrlen) != 0) error = errno;
        if (error == EINPROGRESS) {
            struct pollfd waited = {fd, POLLOUT, 0};
            error = poll(&waited, 1, (int)(1e3 * seconds) + 1) == 1 ? 0 : ETIMEDOUT;
            if (!error) getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
        }
        if (error) {
            snprintf(why, TCP_NAME_SIZE, "%s", strerror(error));
            close(fd), fd = -1;
        }
    }
    freeaddrinfo(found);
    if (fd < 0) return -1;
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
    tcp_no_delay(fd);
    return fd;
}

// ---------------------------------------------------------------------------------------------------------
// A place in a shared directory

// Replace `file` by this place; its inode goes to *inode. Only the user can read it, because the key is in it.
static inline void tcp_place_write(const TcpPlace* place, const char* file, ino_t* inode) {
    char* draft = xprintf("%s.%016llx.tmp", file, (unsigned long long)place->key);
    int fd = open(draft, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    struct stat st;
    if (fd < 0 || write_all(fd, place, sizeof *place) != 0 || fsync(fd) != 0 || fstat(fd, &st) != 0 || close(fd) != 0 ||
        rename(draft, file) != 0)
        die(FAILED, "%s: cannot be written: %s", draft, strerror(errno));
    *inode = st.st_ino;
    free(draft);
}

// Returns whether there is a place in `file`. It may be that of an earlier run, where nobody answers.
static inline int tcp_place_read(TcpPlace* place, const char* file) {
    int fd = open(file, O_RDONLY | O_CLOEXEC);
    int good = fd >= 0 && pread_all(fd, place, sizeof *place, 0) == 0 && memcmp(place->magic, TCP_MAGIC, 8) == 0 &&
               place->names >= 0 && place->names <= TCP_NAMES && place->port >= 1 && place->ports >= 1 &&
               place->ports <= 65536 && place->port <= 65536 - place->ports;
    if (fd >= 0) close(fd);
    for (int i = 0; good && i < TCP_NAMES; i++) place->name[i][TCP_NAME_SIZE - 1] = '\0';
    return good;
}

// ---------------------------------------------------------------------------------------------------------
// Coming together: the others

// Go once through all that the place names. Returns a connection that rank 0 of this run has answered on, or -1 and in
// `why` what the last attempt met. Ends the program as rank 0 says if it refuses this rank.
static inline int tcp_try(const TcpPlace* place, const TcpHello* hello, uint64_t machine, char why[TCP_NAME_SIZE]) {
    int here = place->machine != 0 && place->machine == machine;
    for (int i = here ? -1 : 0; i < place->names; i++)
        for (int port = place->port; port < place->port + place->ports; port++) {
            int fd = tcp_connect(i < 0 ? "127.0.0.1" : place->name[i], port, 2, why);
            TcpAnswer answer;
            if (fd < 0) continue;
            if (tcp_send(fd, hello, sizeof *hello, 0) == 0 &&
                tcp_receive(fd, &answer, sizeof answer, now_seconds() + 5) == 0 &&
                memcmp(answer.magic, TCP_MAGIC, 8) == 0) {
                answer.text[TCP_TEXT_SIZE - 1] = '\0';
                if (answer.status != TCP_SEEN) die(answer.status, "%s", answer.text);
                return fd;
            }
            close(fd);
            snprintf(why, TCP_NAME_SIZE, "who answers there is not rank 0 of this run");
        }
    return -1;
}

// Connect this rank to rank 0: link after link, `links` being a set of bits. With a `file` the place is read from there
// each time. Fills fds[TCP_LINKS], -1 for links that were not asked for. Returns when all ranks are there.
static inline void tcp_join(TcpPlace* place, const char* file, TcpHello* hello, uint64_t machine, unsigned links,
                            double timeout, int* fds) {
    double deadline = now_seconds() + timeout;
    char why[TCP_NAME_SIZE] = "nothing was tried";
    for (int link = 0; link < TCP_LINKS; link++) {
        fds[link] = -1;
        hello->link = link;
        while ((links >> link & 1) && fds[link] < 0) {
            int known = !file || tcp_place_read(place, file);
            if (file) hello->key = known ? place->key : 0;
            if (known) fds[link] = tcp_try(place, hello, machine, why);
            if (fds[link] >= 0) break;
            if (now_seconds() > deadline && !known)
                die(FAILED, "rank %d of %d: rank 0 has not written %s within %g s; is it running, with the same -pf?",
                    hello->rank, hello->size, file, timeout);
            if (now_seconds() > deadline)
                die(FAILED, "rank %d of %d: rank 0 is missing: %s port %d could not be reached within %g s: %s",
                    hello->rank, hello->size, place->names ? place->name[0] : "127.0.0.1", place->port, timeout, why);
            usleep(50000);
        }
    }
    for (int link = 0; link < TCP_LINKS; link++) {
        TcpAnswer answer;
        if (fds[link] < 0) continue;
        // Rank 0 itself gives up after its timeout and says who is missing; it may have begun a little later.
        if (tcp_receive(fds[link], &answer, sizeof answer, now_seconds() + timeout + 10) != 0)
            die(FAILED, "rank %d of %d: rank 0 (%s port %d) ended before all ranks had come", hello->rank, hello->size,
                place->names ? place->name[0] : "127.0.0.1", place->port);
        answer.text[TCP_TEXT_SIZE - 1] = '\0';
        if (answer.status != DONE) die(answer.status, "%s", answer.text);
    }
}

// ---------------------------------------------------------------------------------------------------------
// Coming together: rank 0

// Connections that have not said yet who they are.
enum { TCP_GUESTS = 64 };
typedef struct {
    int fd;
    size_t got;
    TcpHello hello;
} TcpGuest;

// A rank that has come, with its connections (-1: not this one yet).
typedef struct {
    int fd[TCP_LINKS], pid;
    uint64_t process;
    char host[TCP_HOST_SIZE];
} TcpRank;

static inline int tcp_rank_is_here(const TcpRank* r, unsigned links) {
    for (int link = 0; link < TCP_LINKS; link++)
        if ((links >> link & 1) && r->fd[link] < 0) return 0;
    return 1;
}

static inline void tcp_answer(int fd, const TcpAnswer* answer) {
    if (fd >= 0) send(fd, answer, sizeof *answer, MSG_NOSIGNAL | MSG_DONTWAIT);  // who is gone is noticed elsewhere
}

// "ranks 2, 3 and 5", or "rank 2", of those that have not come; at most eight are named.
static inline void tcp_print_missing(const TcpRank* ranks, int size, unsigned links, char* out, size_t n) {
    int missing = 0, named = 0;
    for (int r = 1; r < size; r++) missing += !tcp_rank_is_here(&ranks[r], links);
    int length = snprintf(out, n, missing == 1 ? "rank" : "ranks");
    for (int r = 1; r < size && named < 8; r++) {
        if (tcp_rank_is_here(&ranks[r], links)) continue;
        const char* before = named == 0 ? " " : named + 1 == missing ? " and " : ", ";
        length += snprintf(out + length, n - (size_t)length, "%s%d", before, r);
        named++;
    }
    if (named < missing) snprintf(out + length, n - (size_t)length, " and %d more", missing - named);
}

// Take a process that has said hello. Returns 0, or an exit status for all with the reason in `text`.
static inline int tcp_admit(TcpRank* ranks, const TcpHello* own, TcpGuest* guest, char text[TCP_TEXT_SIZE]) {
    TcpHello* h = &guest->hello;
    h->host[TCP_HOST_SIZE - 1] = '\0';
    for (char* p = h->host; *p; p++)
        if (*p < ' ' || *p > '~') *p = '?';
    if (h->size != own->size) {
        snprintf(text, TCP_TEXT_SIZE,
                 "the ranks disagree about their number: rank 0 (%s, process %d) was told %d, rank %d (%s, process %d) "
                 "%d; give all the same (-pn, WORLD_SIZE)",
                 own->host, own->pid, own->size, h->rank, h->host, h->pid, h->size);
        return USAGE;
    }
    if (h->rank < 0 || h->rank >= own->size || h->link < 0 || h->link >= TCP_LINKS) {
        close(guest->fd);
        return 0;
    }
    TcpRank* r = &ranks[h->rank];
    if (r->process != 0 && r->process != h->process) {
        snprintf(text, TCP_TEXT_SIZE,
                 "two processes are rank %d of %d: %s, process %d, and %s, process %d; give each a number of its own "
                 "(-pr, RANK)",
                 h->rank, own->size, r->host, r->pid, h->host, h->pid);
        return USAGE;
    }
    if (r->fd[h->link] >= 0) close(r->fd[h->link]);  // it had lost patience and tries again
    r->fd[h->link] = guest->fd;
    r->process = h->process, r->pid = h->pid;
    memcpy(r->host, h->host, sizeof r->host);
    TcpAnswer seen;
    memset(&seen, 0, sizeof seen);
    memcpy(seen.magic, TCP_MAGIC, 8);
    seen.status = TCP_SEEN;
    tcp_answer(guest->fd, &seen);
    return 0;
}

// Read what a guest has to say. Returns 1 when it is a whole hello of this run, 0 for not yet, -1 for a stranger.
static inline int tcp_guest_read(TcpGuest* g, uint64_t key) {
    ssize_t got = recv(g->fd, (char*)&g->hello + g->got, sizeof g->hello - g->got, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (got <= 0) return -1;
    g->got += (size_t)got;
    if (memcmp(g->hello.magic, TCP_MAGIC, min_size(g->got, 8)) != 0) return -1;
    if (g->got < sizeof g->hello) return 0;
    return g->hello.key == key ? 1 : -1;
}

// Wait on `listener` until every other rank has come with all of `links`, and fill fds[size][TCP_LINKS]. Ends the
// program, here and in all ranks that have come, when they do not fit together or some are missing after the timeout.
// A `file` (may be NULL) whose inode is no longer `inode` was written by another rank 0.
static inline void tcp_host(int listener, const TcpHello* own, unsigned links, double timeout, const TcpPlace* place,
                            const char* file, ino_t inode, int* fds) {
    enum { LINGER = 1 };  // seconds for which those that come after a refusal are told of it
    const int size = own->size, most = 1 + TCP_GUESTS + TCP_LINKS * size;
    TcpRank* ranks = (TcpRank*)xcalloc((size_t)size, sizeof(TcpRank));
    TcpGuest* guests = (TcpGuest*)xcalloc(TCP_GUESTS, sizeof(TcpGuest));
    struct pollfd* polls = (struct pollfd*)xcalloc((size_t)most, sizeof(struct pollfd));
    int guest_count = 0, here = 0;
    double deadline = now_seconds() + timeout, end = INFINITY;
    TcpAnswer answer;
    memset(&answer, 0, sizeof answer);
    memcpy(answer.magic, TCP_MAGIC, 8);
    for (int r = 0; r < size; r++)
        for (int link = 0; link < TCP_LINKS; link++) ranks[r].fd[link] = -1;
    ranks[0].process = own->process, ranks[0].pid = own->pid;
    memcpy(ranks[0].host, own->host, sizeof own->host);

    struct rlimit files;
    rlim_t needed = (rlim_t)most + 128;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < needed && files.rlim_max > files.rlim_cur) {
        files.rlim_cur = files.rlim_max < needed ? files.rlim_max : needed;
        setrlimit(RLIMIT_NOFILE, &files);
    }

    while (answer.status != DONE || here < size - 1) {
        struct stat st;
        int count = 0;
        double now = now_seconds();
        if (now > end) break;
        polls[count].fd = listener, polls[count++].events = POLLIN;
        for (int g = 0; g < guest_count; g++) polls[count].fd = guests[g].fd, polls[count++].events = POLLIN;
        for (int r = 1; r < size; r++)
            for (int link = 0; link < TCP_LINKS; link++)
                polls[count].fd = ranks[r].fd[link], polls[count++].events = POLLIN;
        double until = fmin(end, fmin(deadline, now + 1)) - now;
        int ready = poll(polls, (nfds_t)count, until > 0 ? (int)(1e3 * until) + 1 : 0), refused = 0;
        if (ready < 0) continue;

        // Ranks say nothing more before they are answered: what can be read is the end of their connection.
        for (int r = 1; r < size; r++)
            for (int link = 0; link < TCP_LINKS; link++) {
                int at = 1 + guest_count + (r - 1) * TCP_LINKS + link;
                if (polls[at].fd < 0 || !polls[at].revents) continue;
                close(ranks[r].fd[link]);
                ranks[r].fd[link] = -1;
                if (ranks[r].fd[TCP_DATA] < 0 && ranks[r].fd[TCP_WATCH] < 0) ranks[r].process = 0;
            }
        int kept = 0;
        for (int g = 0, before = guest_count; g < before; g++) {
            TcpGuest guest = guests[g];
            int what = polls[1 + g].revents ? tcp_guest_read(&guest, own->key) : 0;
            if (what < 0) close(guest.fd);
            else if (what == 0) guests[kept++] = guest;
            else if (answer.status != DONE) tcp_answer(guest.fd, &answer);
            else if ((refused = tcp_admit(ranks, own, &guest, answer.text)) != 0) {
                answer.status = refused;
                tcp_answer(guest.fd, &answer);
            }
        }
        guest_count = kept;
        if (polls[0].revents) {
            int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
            if (fd >= 0 && guest_count == TCP_GUESTS) {
                close(guests[0].fd);
                memmove(guests, guests + 1, --guest_count * sizeof *guests);
            }
            if (fd >= 0) {
                tcp_no_delay(fd);
                memset(&guests[guest_count], 0, sizeof *guests);
                guests[guest_count++].fd = fd;
            }
        }
        here = 0;
        for (int r = 1; r < size; r++) here += tcp_rank_is_here(&ranks[r], links);
        if (answer.status == DONE && file && (stat(file, &st) != 0 || st.st_ino != inode)) {
            answer.status = USAGE, refused = 1;
            snprintf(answer.text, sizeof answer.text,
                     "%s was replaced: two processes are rank 0, or two runs share a directory; give each its own "
                     "(-pr, -pf)",
                     file);
        } else if (answer.status == DONE && here < size - 1 && now_seconds() > deadline) {
            char missing[128];
            tcp_print_missing(ranks, size, links, missing, sizeof missing);
            answer.status = FAILED, refused = 1;
            snprintf(answer.text, sizeof answer.text, "%s of %d did not come to rank 0 (%s port %d) within %g s",
                     missing, size, place->names ? place->name[0] : own->host, place->port, timeout);
        }
        if (refused) {
            end = now_seconds() + LINGER;
            for (int r = 1; r < size; r++)
                for (int link = 0; link < TCP_LINKS; link++) tcp_answer(ranks[r].fd[link], &answer);
        }
    }
    for (int g = 0; g < guest_count; g++) close(guests[g].fd);
    for (int r = 0; r < size; r++)
        for (int link = 0; link < TCP_LINKS; link++) {
            fds[r * TCP_LINKS + link] = ranks[r].fd[link];
            if (answer.status == DONE) tcp_answer(ranks[r].fd[link], &answer);
        }
    free(ranks), free(guests), free(polls);
    struct stat st;
    if (file && stat(file, &st) == 0 && st.st_ino == inode) unlink(file);
    if (answer.status != DONE) die(answer.status, "%s", answer.text);
}

#endif
