/* Ranks that train together: how they start, exchange small messages in host memory, and end if one of them is lost.
 *
 *     mpirun -np 4 PROGRAM
 *     srun --mpi=pmix -K -n 4 PROGRAM
 *
 * MPI starts the ranks and carries the host's collectives. These are for small or rare messages: settings, counts,
 * NCCL's id, decisions. All ranks must call the same collectives in the same order, from the main thread. With one rank
 * everything returns at once and costs nothing.
 *
 * If a rank dies, the launcher ends the others. If a rank is stopped or cannot be reached, the others wait for it until
 * their watch ends them. The watch is a thread that counts seconds: of a step, from its launch to its end, and of the
 * work between steps. */
#ifndef LLMC_DIST_PROCESS_GROUP_H
#define LLMC_DIST_PROCESS_GROUP_H

#ifdef USE_MPI
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>
#endif

#include <limits.h>

#include "llmc/base/thread.h"
#include "llmc/device/device.h"

typedef struct {
    int rank, size;
    int64_t timeout;               // of a step, in seconds
    int64_t step;                  // the newest one that was launched; 0: none
    int64_t in_step, limit, left;  // whether it runs; seconds that it, or the other work, may take and has left
    pthread_t thread;
} Watch;

typedef struct {
    int rank, size;
    int local_rank, local_size;  // among the ranks on this machine
    Watch* watch;                // NULL if there is one rank
} ProcessGroup;

// ---------------------------------------------------------------------------------------------------------
// The watch

static inline void* watch_run(void* argument) {
    Watch* w = (Watch*)argument;
    do sleep(1);  // however long this process is suspended meanwhile
    while (__atomic_sub_fetch(&w->left, 1, __ATOMIC_ACQUIRE) > 0);
    char line[256];
    int n =
        snprintf(line, sizeof line, "error: rank %d of %d: %s step %lld for %lld s; another rank is %s\n", w->rank,
                 w->size, w->in_step ? "has waited in" : "has waited after", (long long)w->step, (long long)w->limit,
                 w->in_step ? "stopped or out of reach, or --timeout is too short" : "stopped or out of reach");
    write_all(STDERR_FILENO, line, (size_t)n);
    _exit(LOST_PEER);
}

static inline void watch_set(Watch* w, int in_step, int64_t limit) {
    w->in_step = in_step, w->limit = limit;
    __atomic_store_n(&w->left, limit + 1, __ATOMIC_RELEASE);  // the present second has begun
}

// This step begins: from now on its launch and its end have --timeout seconds.
static inline void group_begin_step(const ProcessGroup* group, int64_t step) {
    if (!group->watch) return;
    group->watch->step = step;
    watch_set(group->watch, 1, group->watch->timeout);
}

// Something else begins or makes progress: loading, evaluating, sampling, saving.
static inline void group_begin_work(const ProcessGroup* group) {
    enum { WORK_SECONDS = 1800 };
    if (group->watch) watch_set(group->watch, 0, WORK_SECONDS);
}

// NCCL reports that another rank is gone. End at once: functions that exit() calls could wait for the device.
__attribute__((noreturn)) static inline void group_lost(const ProcessGroup* group, const char* what) {
    fflush(stdout);
    fprintf(stderr, "error: rank %d of %d lost another rank in step %lld: %s\n", group->rank, group->size,
            (long long)group->watch->step, what);
    _exit(LOST_PEER);
}

// ---------------------------------------------------------------------------------------------------------
// Collectives in host memory

// Copy `bytes` from rank `root` to all.
static inline void group_broadcast_from(const ProcessGroup* group, void* data, size_t bytes, int root) {
#ifdef USE_MPI
    const size_t PIECE = 1 << 28;  // MPI counts in int
    for (size_t i = 0; i < bytes && group->size > 1; i += PIECE)
        MPI_Bcast((char*)data + i, (int)min_size(bytes - i, PIECE), MPI_BYTE, root, MPI_COMM_WORLD);
#else
    (void)group, (void)data, (void)bytes, (void)root;
#endif
}

// Copy rank 0's `bytes` to all.
static inline void group_broadcast(const ProcessGroup* group, void* data, size_t bytes) {
    group_broadcast_from(group, data, bytes, 0);
}

// Gather `bytes` of every rank on all ranks, in the order of ranks: all[size][bytes].
static inline void group_gather(const ProcessGroup* group, void* all, const void* mine, size_t bytes) {
    memcpy((char*)all + (size_t)group->rank * bytes, mine, bytes);
#ifdef USE_MPI
    CHECK(bytes <= INT_MAX);
    int n = (int)bytes;
    if (group->size > 1) MPI_Allgather(MPI_IN_PLACE, n, MPI_BYTE, all, n, MPI_BYTE, MPI_COMM_WORLD);
#endif
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

// The number of ranks that a launcher has started, and its name; 1: there is none. mpirun comes first: srun may have
// started it, once on each machine.
static inline int launcher_ranks(const char** launcher) {
    static const char* const variables[][2] = {{"mpirun", "OMPI_COMM_WORLD_SIZE"},
                                               {"mpirun", "PMI_SIZE"},
                                               {"srun", "SLURM_STEP_NUM_TASKS"},
                                               {"torchrun", "WORLD_SIZE"}};
    for (size_t i = 0; i < COUNT_OF(variables); i++) {
        const char* text = getenv(variables[i][1]);
        *launcher = variables[i][0];
        if (text && *text) return (int)strtol(text, NULL, 10);
    }
    return 1;
}

// Join the other ranks if a launcher has started several. `timeout`: seconds that a step may take.
static inline void group_init(ProcessGroup* group, double timeout) {
    const char* launcher;
    int ranks = launcher_ranks(&launcher);
    memset(group, 0, sizeof *group);
    group->size = group->local_size = 1;
    if (ranks <= 1) return;
#ifdef USE_MPI
    int provided = 0;
    MPI_Comm machine;
    if (!getenv("OMPI_COMM_WORLD_SIZE") && !getenv("PMI_SIZE") && !getenv("PMIX_RANK"))
        die(USAGE, "%s started %d ranks without MPI; start them with mpirun -np %d, or srun --mpi=pmix -K -n %d",
            launcher, ranks, ranks, ranks);
    MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &group->rank);
    MPI_Comm_size(MPI_COMM_WORLD, &group->size);
    if (provided < MPI_THREAD_FUNNELED) die(FAILED, "this MPI allows no threads");
    if (group->size != ranks)
        die(USAGE,
            "%s started %d ranks, but MPI sees %d: it is not the MPI that this program was built with; use its own "
            "mpirun, or srun --mpi=pmix",
            launcher, ranks, group->size);
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine);
    MPI_Comm_rank(machine, &group->local_rank);
    MPI_Comm_size(machine, &group->local_size);
    MPI_Comm_free(&machine);
    group->watch = (Watch*)xcalloc(1, sizeof *group->watch);
    group->watch->rank = group->rank, group->watch->size = group->size;
    group->watch->timeout = (int64_t)ceil(timeout);
    group_begin_work(group);
    int bad = thread_start(&group->watch->thread, watch_run, group->watch);
    if (bad) die(FAILED, "no thread for the watch: %s", strerror(bad));
#else
    (void)timeout;
    die(USAGE,
        "%s started %d ranks, but this program was built without MPI, for one process or GPU; build it where mpicc is "
        "found (make setup)",
        launcher, ranks);
#endif
}

// The normal end of a run, which waits for all ranks.
static inline void group_close(ProcessGroup* group) {
#ifdef USE_MPI
    if (group->size > 1) MPI_Finalize();
#endif
    if (group->watch) {
        pthread_cancel(group->watch->thread);
        pthread_join(group->watch->thread, NULL);
        free(group->watch);
    }
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

// The same; rank 0 prints the reason.
__attribute__((format(printf, 3, 4), noreturn)) static inline void group_die(const ProcessGroup* group, int status,
                                                                             const char* format, ...) {
    va_list args;
    char line[1024];
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    if (group->size == 1) die(status, "%s", line);
    if (group->rank == 0) fprintf(stderr, "error: %s\n", line);
    group_exit(group, status);
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
