/* Sockets for the ranks: send and receive whole messages, listen, connect. Also the address of rank 0. */
#ifndef LLMC_DIST_TCP_H
#define LLMC_DIST_TCP_H

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include "llmc/base/util.h"

enum { ENDPOINT_NAMES = 12, ENDPOINT_NAME_SIZE = 128 };

#define TCP_MAGIC "llmcrnk2"

// Where rank 0 listens: names or addresses to try in turn, each with `ports` ports from `port` on.
typedef struct {
    char magic[8];
    uint64_t key;      // of the run
    uint64_t machine;  // that rank 0 runs on; 0: unknown. Ranks on the same machine try the loopback first
    int port, ports, names, unused;
    char name[ENDPOINT_NAMES][ENDPOINT_NAME_SIZE];
} Endpoint;

// ---------------------------------------------------------------------------------------------------------
// Messages

// Send everything, blocking. Returns 0, or -1 with errno. `flags`: 0, or MSG_MORE if more follows at once.
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

// Receive exactly n bytes before the time `deadline` (as now_seconds(); INFINITY: no limit). Returns 0, or -1 with
// errno (0: the connection was closed).
static inline int tcp_receive(int fd, void* bytes, size_t n, double deadline) {
    char* p = (char*)bytes;
    while (n) {
        if (deadline < INFINITY) {
            struct pollfd waited = {.fd = fd, .events = POLLIN};
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

// Send small messages without delay.
static inline void tcp_no_delay(int fd) {
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

// ---------------------------------------------------------------------------------------------------------
// Addresses

// Append a name to try, unless it is already in the list.
static inline void endpoint_add_name(Endpoint* e, const char* name) {
    for (int i = 0; i < e->names; i++)
        if (strcmp(e->name[i], name) == 0) return;
    if (e->names == ENDPOINT_NAMES || strlen(name) >= ENDPOINT_NAME_SIZE) return;
    snprintf(e->name[e->names++], ENDPOINT_NAME_SIZE, "%s", name);
}

// Append this machine's host name, then the addresses of its interfaces. It cannot know which of them the others can
// reach; they try each.
static inline void endpoint_add_own_names(Endpoint* e) {
    char name[ENDPOINT_NAME_SIZE];
    struct ifaddrs *list = NULL, *i;
    if (gethostname(name, sizeof name) == 0) name[sizeof name - 1] = '\0', endpoint_add_name(e, name);
    if (getifaddrs(&list) != 0) return;
    for (i = list; i; i = i->ifa_next) {
        if (!i->ifa_addr || !(i->ifa_flags & IFF_UP) || (i->ifa_flags & IFF_LOOPBACK)) continue;
        int family = i->ifa_addr->sa_family;
        if (family != AF_INET && family != AF_INET6) continue;
        // Link-local addresses mean nothing elsewhere.
        if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&((struct sockaddr_in6*)(void*)i->ifa_addr)->sin6_addr))
            continue;
        socklen_t size = family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
        if (getnameinfo(i->ifa_addr, size, name, sizeof name, NULL, 0, NI_NUMERICHOST) == 0) endpoint_add_name(e, name);
    }
    freeifaddrs(list);
}

// Listen on the first free port of the endpoint (port 0: any), and store it there. If its only name is the loopback, no
// other machine can connect. Returns the socket, or -1 with errno.
static inline int tcp_listen(Endpoint* e) {
    const int is_ipv6_loopback = strcmp(e->name[0], "::1") == 0;
    const int only_here = e->names == 1 && (is_ipv6_loopback || strcmp(e->name[0], "localhost") == 0 ||
                                            strcmp(e->name[0], "127.0.0.1") == 0);
    int why = EAFNOSUPPORT;
    for (int port = e->port; port < e->port + e->ports; port++) {
        for (int version = 6; version >= 4; version -= 2) {
            // An IPv6 socket for all addresses accepts IPv4 too; only the IPv4 loopback needs a socket of its own.
            if (only_here && (version == 6) != is_ipv6_loopback) continue;
            struct sockaddr_in6 six;
            struct sockaddr_in four;
            memset(&six, 0, sizeof six), memset(&four, 0, sizeof four);
            six.sin6_family = AF_INET6, four.sin_family = AF_INET;
            six.sin6_port = four.sin_port = htons((uint16_t)port);
            six.sin6_addr = only_here ? in6addr_loopback : in6addr_any;
            four.sin_addr.s_addr = htonl(only_here ? INADDR_LOOPBACK : INADDR_ANY);
            const void* address = version == 6 ? (const void*)&six : (const void*)&four;
            socklen_t size = version == 6 ? sizeof six : sizeof four;
            int fd = socket(version == 6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1, off = 0;
            if (fd < 0) continue;
            setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
            if (version == 6) setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
            if (bind(fd, (const struct sockaddr*)address, size) == 0 && listen(fd, SOMAXCONN) == 0) {
                size = sizeof six;
                CHECK(getsockname(fd, (struct sockaddr*)(void*)&six, &size) == 0);
                e->port = ntohs(six.sin6_port), e->ports = 1;  // an IPv4 address has its port at the same place
                return fd;
            }
            why = errno;
            close(fd);
            if (why == EADDRINUSE) break;  // IPv6's port is taken: another program may own IPv4's too
        }
    }
    errno = why;
    return -1;
}

// Connect within `seconds`. Returns the socket, or -1 and the reason in `why`.
static inline int tcp_connect(const char* name, int port, double seconds, char why[ENDPOINT_NAME_SIZE]) {
    struct addrinfo hints, *found = NULL;
    char service[16];
    int fd = -1;
    memset(&hints, 0, sizeof hints);
    hints.ai_socktype = SOCK_STREAM;
    snprintf(service, sizeof service, "%d", port);
    int bad = getaddrinfo(name, service, &hints, &found);
    if (bad) {
        snprintf(why, ENDPOINT_NAME_SIZE, "%s", gai_strerror(bad));
        return -1;
    }
    for (const struct addrinfo* a = found; a && fd < 0; a = a->ai_next) {
        fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0) continue;
        int error = 0;
        socklen_t size = sizeof error;
        if (connect(fd, a->ai_addr, a->ai_addrlen) != 0) error = errno;
        if (error == EINPROGRESS) {
            struct pollfd waited = {.fd = fd, .events = POLLOUT};
            error = poll(&waited, 1, (int)(1e3 * seconds) + 1) == 1 ? 0 : ETIMEDOUT;
            if (!error) getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
        }
        if (error) {
            snprintf(why, ENDPOINT_NAME_SIZE, "%s", strerror(error));
            close(fd), fd = -1;
        }
    }
    freeaddrinfo(found);
    if (fd < 0) return -1;
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
    tcp_no_delay(fd);
    return fd;
}

#endif
