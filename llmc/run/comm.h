/* Ranks that train together: how they start, agree on small things in host memory, and notice that one is lost.
 *
 *     mpirun -np 4 PROGRAM                       MPI (in builds with USE_MPI)
 *     torchrun --nproc-per-node 4 PROGRAM        RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT
 *     srun -n 4 PROGRAM                          MPI where Slurm offers PMIx, else SLURM_PROCID, _NTASKS and _LOCALID
 *     PROGRAM -pi tcp -ps HOST -pr 2 -pn 4       by hand: the address of rank 0
 *     PROGRAM -pi fs -pf DIR -pr 2 -pn 4         by hand: a directory that all ranks see
 *
 * With anything but MPI the host's collectives run over TCP, rank 0 in the middle. They are for what is small or rare:
 * settings, counts, addresses, decisions. Whichever way, the ranks' watch (watch.h) has connections of its own.
 *
 * All ranks must call the same collectives in the same order, from the main thread. A collective in which another rank
 * is lost does not return. Alone (one rank) everything returns at once and costs nothing. */
#ifndef LLMC_COMM_H
#define LLMC_COMM_H

#ifdef USE_MPI
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#endif

#include "../device/device.h"
#include "launch.h"
#include "tcp.h"
#include "watch.h"

typedef struct Comm {
    int rank, size;
    int local_rank, local_size;  // among the ranks on this machine, in the order of ranks unless it was told
    char host[WATCH_HOST_SIZE];
    double timeout;  // seconds
    int is_mpi;      // MPI was initialised, and carries the collectives
    int* links;      // [size][TCP_LINKS] connections; NULL where there is one rank
    Identity* who;   // [size]
    Watch* watch;
} Comm;

// ---------------------------------------------------------------------------------------------------------
// Waiting on others

static inline void comm_wait_begin(const Comm* comm) { watch_wait_begin(comm->watch); }
static inline void comm_wait_end(const Comm* comm) { watch_wait_end(comm->watch); }

// A sign that this rank is at work, at this step. A rank that keeps others waiting for longer than the timeout without
// giving one (or waiting itself) is taken for hanging. Any thread.
static inline void comm_progress(const Comm* comm, int64_t step) { watch_progress(comm->watch, step); }

static Watch* comm_watch;  // of this process; NULL: it is alone

// What reads a long file knows no ranks: its on_progress.
static inline void comm_show_progress(void) { watch_sign(comm_watch); }

// A connection or MPI reports that another rank is no longer there. The watch knows which, and ends this process; only
// if it finds nobody to name does this.
__attribute__((noreturn)) static inline void comm_lost(const Comm* comm, const char* what) {
    double end = now_seconds() + (comm->watch ? comm->timeout + 5 : 0);
    while (now_seconds() < end) usleep(10000);
    die(LOST_PEER, "rank %d of %d lost another rank: %s", comm->rank, comm->size, what);
}

#ifdef USE_MPI
// Check what an MPI call returned.
static inline void comm_mpi_check(const Comm* comm, int result, const char* call) {
    char reason[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    if (result == MPI_SUCCESS) return;
    MPI_Error_string(result, reason, &length);
    comm_lost(comm, xprintf("%s: %s", call, reason));
}
#endif

// ---------------------------------------------------------------------------------------------------------
// Collectives in host memory

// Over TCP each message says how long it should be: ranks that have come apart are not to take one for another.
static inline void comm_put(const Comm* comm, int to, const void* bytes, size_t n) {
    uint64_t header = n;
    int fd = comm->links[to * TCP_LINKS + TCP_DATA];
    if (tcp_send(fd, &header, sizeof header, n ? MSG_MORE : 0) != 0 || tcp_send(fd, bytes, n, 0) != 0)
        comm_lost(comm, strerror(errno));
}

static inline void comm_take(const Comm* comm, int from, void* bytes, size_t n) {
    uint64_t header = 0;
    int fd = comm->links[from * TCP_LINKS + TCP_DATA];
    if (tcp_receive(fd, &header, sizeof header, INFINITY) != 0) comm_lost(comm, errno ? strerror(errno) : "it closed");
    if (header != n)
        die(FAILED, "internal: rank %d sends %llu bytes where rank %d expects %zu", from, (unsigned long long)header,
            comm->rank, n);
    if (tcp_receive(fd, bytes, n, INFINITY) != 0) comm_lost(comm, errno ? strerror(errno) : "it closed");
}

// `bytes` of every rank, in the order of ranks, to all: all[size][bytes].
static inline void comm_gather(const Comm* comm, void* all, const void* mine, size_t bytes) {
    memcpy((char*)all + (size_t)comm->rank * bytes, mine, bytes);
    if (comm->size == 1) return;
    comm_wait_begin(comm);
    if (comm->is_mpi) {
#ifdef USE_MPI
        CHECK(bytes <= INT32_MAX);
        comm_mpi_check(comm, MPI_Allgather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, MPI_COMM_WORLD),
                       "MPI_Allgather");
#endif
    } else if (comm->rank == 0) {
        for (int r = 1; r < comm->size; r++) comm_take(comm, r, (char*)all + (size_t)r * bytes, bytes);
        for (int r = 1; r < comm->size; r++) comm_put(comm, r, all, (size_t)comm->size * bytes);
    } else {
        comm_put(comm, 0, mine, bytes);
        comm_take(comm, 0, all, (size_t)comm->size * bytes);
    }
    comm_wait_end(comm);
}

// Rank 0's `bytes`, to all.
static inline void comm_broadcast(const Comm* comm, void* data, size_t bytes) {
    if (comm->size == 1) return;
    comm_wait_begin(comm);
    if (comm->is_mpi) {
#ifdef USE_MPI
        const size_t most = 1 << 30;  // what MPI counts in an int
        for (size_t at = 0; at < bytes; at += most)
            comm_mpi_check(comm,
                           MPI_Bcast((char*)data + at, (int)min_size(most, bytes - at), MPI_BYTE, 0, MPI_COMM_WORLD),
                           "MPI_Bcast");
#endif
    } else if (comm->rank == 0) {
        for (int r = 1; r < comm->size; r++) comm_put(comm, r, data, bytes);
    } else {
        comm_take(comm, 0, data, bytes);
    }
    comm_wait_end(comm);
}

// Sum n numbers over all ranks, in place, on every rank. All add in the order of ranks and get the same bits.
static inline void comm_sum_counts(const Comm* comm, double* values, size_t n) {
    if (comm->size == 1) return;
    double* all = (double*)xmalloc((size_t)comm->size * n * sizeof *all);
    comm_gather(comm, all, values, n * sizeof *all);
    for (size_t i = 0; i < n; i++) {
        values[i] = 0;
        for (int r = 0; r < comm->size; r++) values[i] += all[(size_t)r * n + i];
    }
    free(all);
}

// 1 on all ranks where `flag` is not 0 on one.
static inline int comm_any(const Comm* comm, int flag) {
    double count = flag != 0;
    comm_sum_counts(comm, &count, 1);
    return count > 0;
}

// Returns when all ranks have come here.
static inline void comm_barrier(const Comm* comm) { comm_any(comm, 0); }

// ---------------------------------------------------------------------------------------------------------
// Beginning

// Turn this rank's place into connections with all others, fds[size][TCP_LINKS] (rank 0) or [TCP_LINKS] (the others).
static inline void comm_connect(Comm* comm, const CommPlan* plan, TcpPlace* place, unsigned links) {
    TcpHello hello;
    uint64_t machine = comm_machine();
    memset(&hello, 0, sizeof hello);
    memcpy(hello.magic, TCP_MAGIC, 8);
    hello.key = place->key, hello.process = tcp_random();
    hello.rank = comm->rank, hello.size = comm->size, hello.pid = (int)getpid();
    memcpy(hello.host, comm->host, sizeof hello.host);
    comm->links = (int*)xmalloc((size_t)comm->size * TCP_LINKS * sizeof(int));
    for (int i = 0; i < comm->size * TCP_LINKS; i++) comm->links[i] = -1;
    if (comm->rank != 0) {
        tcp_join(place, plan->file, &hello, machine, links, comm->timeout, comm->links);
        return;
    }
    ino_t inode = 0;
    int listener = tcp_listen(place);
    if (listener < 0 && errno == EADDRINUSE) {
        // If it is this very run that listens there, it knows best what to say.
        char why[TCP_NAME_SIZE];
        tcp_try(place, &hello, 0, why);
        die(USAGE,
            "port %d of this machine, where rank 0 should listen, is taken by another program; choose another one",
            place->port);
    }
    if (listener < 0) die(FAILED, "rank 0 cannot listen on port %d: %s", place->port, strerror(errno));
    place->machine = machine;
    if (plan->file) tcp_place_write(place, plan->file, &inode);
#ifdef USE_MPI
    if (comm->is_mpi) comm_mpi_check(comm, MPI_Bcast(place, sizeof *place, MPI_BYTE, 0, MPI_COMM_WORLD), "MPI_Bcast");
#endif
    tcp_host(listener, &hello, links, comm->timeout, place, plan->file, inode, comm->links);
    close(listener);
}

// Start MPI, which knows rank and size best, and learn from it where rank 0 listens.
static inline void comm_start_mpi(Comm* comm, CommPlan* plan, const CommSettings* s) {
#ifdef USE_MPI
    int provided = 0, expected = plan->size;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided);
    comm->is_mpi = 1;
    MPI_Comm_rank(MPI_COMM_WORLD, &comm->rank);
    MPI_Comm_size(MPI_COMM_WORLD, &comm->size);
    if (provided < MPI_THREAD_FUNNELED) die(FAILED, "this MPI allows no threads");
    if (expected > 1 && comm->size != expected)
        die(USAGE,
            "%d ranks were started, but MPI sees %d: it is not the MPI that this program was built with; use its own "
            "mpirun, srun --mpi=pmix, or -pi env",
            expected, comm->size);
    if (comm->size == 1) return;
    // A lost rank is reported by name, by the watch.
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    if (s->local_size > 0) plan->local_rank = comm->rank % s->local_size;
    // Rank 0's part of this follows when it listens.
    if (comm->rank != 0)
        comm_mpi_check(comm, MPI_Bcast(&plan->place, sizeof plan->place, MPI_BYTE, 0, MPI_COMM_WORLD), "MPI_Bcast");
#else
    (void)comm, (void)plan, (void)s;
#endif
}

// Learn who the others are, and which of them share this machine.
static inline void comm_introduce(Comm* comm, int local_rank) {
    Identity self;
    memset(&self, 0, sizeof self);
    memcpy(self.host, comm->host, sizeof self.host);
    self.machine = comm_machine(), self.pid = (int)getpid(), self.local_rank = local_rank;
    comm->who = (Identity*)xcalloc((size_t)comm->size, sizeof(Identity));
    comm_gather(comm, comm->who, &self, sizeof self);
    comm->local_size = 0;
    for (int r = 0; r < comm->size; r++) {
        if (comm->who[r].machine != self.machine) continue;
        if (r == comm->rank) comm->local_rank = comm->local_size;
        comm->local_size++;
    }
    if (local_rank >= 0) comm->local_rank = local_rank;
}

// Find the other ranks and connect with them; alone where nothing says that there are any. Ends the program with a line
// that names what is wrong or who is missing.
static inline void comm_init(Comm* comm, const CommSettings* settings) {
    CommPlan plan;
    memset(comm, 0, sizeof *comm);
    comm->timeout = settings->timeout > 0 ? settings->timeout : 60;
    comm->local_size = 1;
    if (gethostname(comm->host, sizeof comm->host) != 0) snprintf(comm->host, sizeof comm->host, "unknown");
    comm->host[sizeof comm->host - 1] = '\0';
    comm_plan(&plan, settings);
    comm->rank = plan.rank, comm->size = plan.size;
    if (plan.start == START_AUTO) return;
    if (plan.start == START_MPI) comm_start_mpi(comm, &plan, settings);
    if (comm->size > 1) {
        comm_connect(comm, &plan, &plan.place, 1u << TCP_WATCH | (comm->is_mpi ? 0 : 1u << TCP_DATA));
        comm_introduce(comm, plan.local_rank);
        comm->watch = watch_start(comm->rank, comm->size, comm->links + TCP_WATCH, TCP_LINKS, comm->who, comm->timeout);
        comm_watch = comm->watch, on_progress = comm_show_progress;
    }
    free((char*)plan.file);
}

// End as all ranks should. Rank 0 stays until the others are through.
static inline void comm_close(Comm* comm) {
#ifdef USE_MPI
    // MPI waits here for all ranks, so the watch goes on until it is through.
    if (comm->is_mpi) {
        comm_wait_begin(comm);
        MPI_Finalize();
        comm_wait_end(comm);
    }
#endif
    on_progress = NULL;
    if (comm->watch) watch_stop(comm->watch);
    for (int i = 0; comm->links && i < comm->size * TCP_LINKS; i++)
        if (i % TCP_LINKS == TCP_DATA && comm->links[i] >= 0) close(comm->links[i]);
    free(comm->links), free(comm->who);
    memset(comm, 0, sizeof *comm);
    comm->size = 1;
}

// All ranks end here with this status, having agreed on it: nobody is lost.
__attribute__((noreturn)) static inline void comm_exit(const Comm* comm, int status) {
    Comm copy = *comm;
    fflush(stdout);
    comm_close(&copy);
    exit(status);
}

// ---------------------------------------------------------------------------------------------------------
// Agreeing

// The line of `text` around position `at`, or only the words from there where the line is long.
static inline void comm_excerpt(const char* text, size_t at, char out[96]) {
    enum { MOST = 72 };
    size_t length = strlen(text), begin = at < length ? at : length;
    while (begin > 0 && text[begin - 1] != '\n') begin--;
    if (at - begin > MOST / 2) {
        begin = at < length ? at : length;
        while (begin > 0 && at - begin < MOST / 2 && text[begin - 1] != ' ' && text[begin - 1] != '\n') begin--;
    }
    int n = (int)min_size(strcspn(text + begin, "\n"), MOST);
    if (n > 0) snprintf(out, 96, "'%.*s'%s", n, text + begin, n == MOST ? "..." : "");
    else snprintf(out, 96, "nothing");
}

// End all ranks with USAGE unless their texts are the same: "ranks 0 and 3 disagree about WHAT: ... / ...", with the
// first line that differs. Texts may be of any length.
static inline void comm_check_same(const Comm* comm, const char* what, const char* mine) {
    if (comm->size == 1) return;
    size_t length = strlen(mine), longest = 0;
    size_t* lengths = (size_t*)xmalloc((size_t)comm->size * sizeof *lengths);
    comm_gather(comm, lengths, &length, sizeof length);
    for (int r = 0; r < comm->size; r++) longest = longest > lengths[r] ? longest : lengths[r];
    char* padded = (char*)xcalloc(longest + 1, 1);
    char* all = (char*)xmalloc((size_t)comm->size * (longest + 1));
    memcpy(padded, mine, length);
    comm_gather(comm, all, padded, longest + 1);
    int other = 1;
    while (other < comm->size && memcmp(all, all + (size_t)other * (longest + 1), longest + 1) == 0) other++;
    if (other < comm->size) {
        char first[96], second[96];
        const char* theirs = all + (size_t)other * (longest + 1);
        size_t at = 0;
        while (all[at] == theirs[at]) at++;
        comm_excerpt(all, at, first), comm_excerpt(theirs, at, second);
        fflush(stdout);
        fprintf(stderr, "error: ranks 0 and %d disagree about %s: %s / %s\n", other, what, first, second);
    }
    free(lengths), free(padded), free(all);
    if (other == comm->size) return;
    comm_exit(comm, USAGE);
}

#endif
