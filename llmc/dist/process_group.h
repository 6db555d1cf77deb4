/* Ranks that train together: how they start, exchange small messages in host memory, and notice that one is lost.
 *
 *     mpirun -np 4 PROGRAM                       MPI (in builds with USE_MPI)
 *     torchrun --nproc-per-node 4 PROGRAM        RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT
 *     srun -n 4 PROGRAM                          MPI where Slurm offers PMIx, else SLURM_PROCID, _NTASKS and _LOCALID
 *     PROGRAM -pi tcp -ps HOST -pr 2 -pn 4       by hand: the address of rank 0
 *     PROGRAM -pi fs -pf DIR -pr 2 -pn 4         by hand: a directory that all ranks see
 *
 * However they start, ranks connect to rank 0 over TCP (handshake.h): one connection for the heartbeat, one for the
 * host's collectives. These are for small or rare messages: settings, counts, addresses, decisions.
 *
 * All ranks must call the same collectives in the same order, from the main thread. A collective in which another rank
 * is lost does not return. With one rank everything returns at once and costs nothing. */
#ifndef LLMC_DIST_PROCESS_GROUP_H
#define LLMC_DIST_PROCESS_GROUP_H

#ifdef USE_MPI
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#endif

#include "llmc/device/device.h"
#include "llmc/dist/heartbeat.h"
#include "llmc/dist/rendezvous.h"

typedef struct ProcessGroup {
    int rank, size;
    int local_rank,
        local_size;        // among the ranks on this machine, in the order of ranks unless the launcher gives them
    double timeout;        // seconds
    int is_mpi;            // MPI was initialised
    int* links;            // [size] connections for collectives; NULL if there is one rank
    Heartbeat* heartbeat;  // NULL if there is one rank
} ProcessGroup;

// ---------------------------------------------------------------------------------------------------------
// Waiting for other ranks

static inline void group_wait_begin(const ProcessGroup* group) { heartbeat_wait_begin(group->heartbeat); }
static inline void group_wait_end(const ProcessGroup* group) { heartbeat_wait_end(group->heartbeat); }

// Report that this rank is working on this step. A rank that keeps others waiting for longer than the timeout counts as
// hanging, unless it calls this, waits itself, or reads or writes files. Any thread.
static inline void group_progress(const ProcessGroup* group, int64_t step) {
    heartbeat_progress(group->heartbeat, step);
}

// A connection or MPI reports that another rank is gone. The heartbeat finds out which one, and ends this process. If
// it finds none, this function ends the process.
__attribute__((noreturn)) static inline void group_lost(const ProcessGroup* group, const char* what) {
    double end = now_seconds() + (group->heartbeat ? group->timeout + 5 : 0);
    while (now_seconds() < end) usleep(10000);
    die(LOST_PEER, "rank %d of %d lost another rank: %s", group->rank, group->size, what);
}

#ifdef USE_MPI
// Check what an MPI call returned.
static inline void group_mpi_check(const ProcessGroup* group, int result, const char* call) {
    char reason[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    if (result == MPI_SUCCESS) return;
    MPI_Error_string(result, reason, &length);
    group_lost(group, xprintf("%s: %s", call, reason));
}
#endif

// ---------------------------------------------------------------------------------------------------------
// Collectives in host memory

// Each message begins with its length, so that ranks that are at different collectives do not mistake one for another.
static inline void group_send(const ProcessGroup* group, int to, const void* bytes, size_t n) {
    uint64_t header = n;
    if (tcp_send(group->links[to], &header, sizeof header, n ? MSG_MORE : 0) != 0 ||
        tcp_send(group->links[to], bytes, n, 0) != 0)
        group_lost(group, strerror(errno));
}

static inline void group_receive(const ProcessGroup* group, int from, void* bytes, size_t n) {
    uint64_t header = n;
    int lost = tcp_receive(group->links[from], &header, sizeof header, INFINITY) != 0;
    if (!lost && header != n)
        die(FAILED, "internal: rank %d sends %llu bytes where rank %d expects %zu", from, (unsigned long long)header,
            group->rank, n);
    if (lost || tcp_receive(group->links[from], bytes, n, INFINITY) != 0)
        group_lost(group, errno ? strerror(errno) : "it closed");
}

// Copy rank 0's `bytes` to all.
static inline void group_broadcast(const ProcessGroup* group, void* data, size_t bytes) {
    if (group->size == 1) return;
    group_wait_begin(group);
    if (group->rank != 0) group_receive(group, 0, data, bytes);
    for (int r = 1; r < group->size && group->rank == 0; r++) group_send(group, r, data, bytes);
    group_wait_end(group);
}

// Gather `bytes` of every rank on all ranks, in the order of ranks: all[size][bytes].
static inline void group_gather(const ProcessGroup* group, void* all, const void* mine, size_t bytes) {
    memcpy((char*)all + (size_t)group->rank * bytes, mine, bytes);
    if (group->size == 1) return;
    group_wait_begin(group);
    if (group->rank != 0) group_send(group, 0, mine, bytes);
    for (int r = 1; r < group->size && group->rank == 0; r++)
        group_receive(group, r, (char*)all + (size_t)r * bytes, bytes);
    group_broadcast(group, all, (size_t)group->size * bytes);
    group_wait_end(group);
}

// Sum n numbers over all ranks, in place, on every rank. All add in the order of ranks and get the same bits.
static inline void group_sum_counts(const ProcessGroup* group, double* values, size_t n) {
    if (group->size == 1) return;
    double* all = (double*)xmalloc((size_t)group->size * n * sizeof *all);
    group_gather(group, all, values, n * sizeof *all);
    for (size_t i = 0; i < n; i++) {
        values[i] = 0;
        for (int r = 0; r < group->size; r++) values[i] += all[(size_t)r * n + i];
    }
    free(all);
}

// 1 on all ranks if `flag` is not 0 on one of them.
static inline int group_any(const ProcessGroup* group, int flag) {
    double count = flag != 0;
    group_sum_counts(group, &count, 1);
    return count > 0;
}

// Returns when all ranks have called it.
static inline void group_barrier(const ProcessGroup* group) { group_any(group, 0); }

// ---------------------------------------------------------------------------------------------------------
// Beginning and ending

// Start MPI, which gives rank and size, and take rank 0's endpoint from it.
static inline void group_start_mpi(ProcessGroup* group, Rendezvous* plan, const RendezvousSettings* s) {
#ifdef USE_MPI
    int provided = 0, expected = plan->size;
    MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided);
    group->is_mpi = 1;
    MPI_Comm_rank(MPI_COMM_WORLD, &group->rank);
    MPI_Comm_size(MPI_COMM_WORLD, &group->size);
    if (provided < MPI_THREAD_FUNNELED) die(FAILED, "this MPI allows no threads");
    if (expected > 1 && group->size != expected)
        die(USAGE,
            "%d ranks were started, but MPI sees %d: it is not the MPI that this program was built with; use its own "
            "mpirun, srun --mpi=pmix, or -pi env",
            expected, group->size);
    if (group->size == 1) return;
    // Errors return, so that the heartbeat can name the lost rank.
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    if (s->local_size > 0) plan->local_rank = group->rank % s->local_size;
    // Rank 0 calls this too, once it listens.
    if (group->rank != 0)
        group_mpi_check(group, MPI_Bcast(&plan->endpoint, sizeof plan->endpoint, MPI_BYTE, 0, MPI_COMM_WORLD),
                        "MPI_Bcast");
#else
    (void)group, (void)plan, (void)s;
#endif
}

// Rank 0: listen, and publish the endpoint. Returns the socket; the inode of a published file goes to *inode.
static inline int group_listen(const ProcessGroup* group, Rendezvous* plan, const Hello* hello, ino_t* inode) {
    Endpoint* e = &plan->endpoint;
    int listener = tcp_listen(e);
    if (listener < 0 && errno == EADDRINUSE) {
        char why[ENDPOINT_NAME_SIZE];
        handshake_try(e, hello, why);  // if rank 0 of this run listens there, its refusal says more
        die(USAGE,
            "port %d of this machine, where rank 0 should listen, is taken by another program; choose another one",
            e->port);
    }
    if (listener < 0) die(FAILED, "rank 0 cannot listen on port %d: %s", e->port, strerror(errno));
    e->machine = hello->who.machine;
    if (plan->file) endpoint_write(e, plan->file, inode);
#ifdef USE_MPI
    if (group->is_mpi) group_mpi_check(group, MPI_Bcast(e, sizeof *e, MPI_BYTE, 0, MPI_COMM_WORLD), "MPI_Bcast");
#endif
    (void)group;
    return listener;
}

// Connect with the other ranks: first the heartbeat, which then watches the second round.
static inline void group_connect(ProcessGroup* group, Rendezvous* plan) {
    const size_t size = (size_t)group->size;
    int *fds = (int*)xcalloc(size, sizeof *fds), listener = -1;
    plan->ranks = (Identity*)xcalloc(size, sizeof *plan->ranks);
    ino_t inode = 0;
    Hello hello;
    memset(&hello, 0, sizeof hello);
    memcpy(hello.magic, TCP_MAGIC, 8);
    hello.key = plan->endpoint.key, hello.process = random_key(), hello.size = group->size;
    hello.who.machine = rendezvous_machine_id();
    hello.who.rank = group->rank, hello.who.local_rank = plan->local_rank, hello.who.pid = (int)getpid();
    if (gethostname(hello.who.host, HOST_NAME_SIZE - 1) != 0) snprintf(hello.who.host, HOST_NAME_SIZE, "unknown");
    if (group->rank == 0) listener = group_listen(group, plan, &hello, &inode);
    group->links = (int*)xcalloc(size, sizeof *group->links);
    for (int round = ROUND_HEARTBEAT; round <= ROUND_COLLECTIVES; round++) {
        const char* file = round == ROUND_HEARTBEAT ? plan->file : NULL;  // read once, and deleted after that
        int* links = round == ROUND_HEARTBEAT ? fds : group->links;
        hello.round = round;
        group_wait_begin(group);
        if (group->rank == 0)
            handshake_host(listener, &hello, group->timeout, &plan->endpoint, file, inode, links, plan->ranks);
        else links[0] = handshake_join(&plan->endpoint, file, &hello, group->timeout, plan->ranks);
        group_wait_end(group);
        if (round == ROUND_HEARTBEAT)
            group->heartbeat = heartbeat_start(group->rank, group->size, fds, plan->ranks, group->timeout);
    }
    if (listener >= 0) close(listener);
    group->local_size = 0;
    for (int r = 0; r < group->size; r++) {
        if (plan->ranks[r].machine != hello.who.machine) continue;
        if (r == group->rank) group->local_rank = group->local_size;
        group->local_size++;
    }
    if (plan->local_rank >= 0) group->local_rank = plan->local_rank;
    free(fds), free(plan->ranks);
}

// Find the other ranks and connect to them; a single rank unless flags or environment specify more. Ends the program
// with a line that names the error or the missing ranks.
static inline void group_init(ProcessGroup* group, const RendezvousSettings* settings) {
    Rendezvous plan;
    memset(group, 0, sizeof *group);
    group->timeout = settings->timeout > 0 ? settings->timeout : 60;
    group->local_size = 1;
    rendezvous_plan(&plan, settings);
    group->rank = plan.rank, group->size = plan.size;
    if (plan.start == START_AUTO) return;
    if (plan.start == START_MPI) group_start_mpi(group, &plan, settings);
    if (group->size > 1) group_connect(group, &plan);
    free((char*)plan.file);
}

// The normal end of a run. Rank 0 waits until the others have left.
static inline void group_close(ProcessGroup* group) {
#ifdef USE_MPI
    // MPI waits here for all ranks, while the heartbeat watches them.
    if (group->is_mpi) {
        group_wait_begin(group);
        MPI_Finalize();
        group_wait_end(group);
    }
#endif
    if (group->heartbeat) heartbeat_stop(group->heartbeat);
    for (int r = 0; group->links && r < group->size; r++)
        if (r != group->rank && (r == 0 || group->rank == 0)) close(group->links[r]);
    free(group->links);
    memset(group, 0, sizeof *group);
    group->size = 1;
}

// End all ranks with this status, which they have agreed on: no rank counts as lost.
__attribute__((noreturn)) static inline void group_exit(const ProcessGroup* group, int status) {
    ProcessGroup copy = *group;
    fflush(stdout);
    group_close(&copy);
    exit(*exit_status() = status);
}

// ---------------------------------------------------------------------------------------------------------
// Consistency

// Copy the line of `text` around position `at`; of a long line only the words from there.
static inline void group_excerpt(const char* text, size_t at, char out[96]) {
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
static inline void group_check_same(const ProcessGroup* group, const char* what, const char* mine) {
    if (group->size == 1) return;
    size_t length = strlen(mine), longest = 0;
    size_t* lengths = (size_t*)xmalloc((size_t)group->size * sizeof *lengths);
    group_gather(group, lengths, &length, sizeof length);
    for (int r = 0; r < group->size; r++) longest = longest > lengths[r] ? longest : lengths[r];
    char* padded = (char*)xcalloc(longest + 1, 1);
    char* all = (char*)xmalloc((size_t)group->size * (longest + 1));
    memcpy(padded, mine, length);
    group_gather(group, all, padded, longest + 1);
    int other = 1;
    while (other < group->size && memcmp(all, all + (size_t)other * (longest + 1), longest + 1) == 0) other++;
    if (other < group->size) {
        char first[96], second[96];
        const char* theirs = all + (size_t)other * (longest + 1);
        size_t at = 0;
        while (all[at] == theirs[at]) at++;
        group_excerpt(all, at, first), group_excerpt(theirs, at, second);
        fflush(stdout);
        fprintf(stderr, "error: ranks 0 and %d disagree about %s: %s / %s\n", other, what, first, second);
    }
    free(lengths), free(padded), free(all);
    if (other == group->size) return;
    group_exit(group, USAGE);
}

#endif
