/* What a process sets up first: its standard descriptors, handlers for the signals that stop it, its share of the CPUs.
 *
 * That is the CPUs of its affinity mask, or fewer if its control group or a parent of it has a quota (cpu.max of
 * version 2, cpu.cfs_quota_us of version 1). OpenMP only knows the mask.
 *
 * Waiting threads spin, by libgomp's default for milliseconds. On a busy machine they take CPU time from the thread
 * that they wait for. libgomp reads the number of threads and the length of the spinning from environment variables
 * when it is loaded, so the program sets these and executes itself again. Variables that the user has set are not
 * changed. The same way, a rank that Open MPI has bound to one core gets its share of the machine's CPUs. */
#ifndef LLMC_BASE_PROCESS_H
#define LLMC_BASE_PROCESS_H

#include <limits.h>
#include <sched.h>
#include <signal.h>

#include "llmc/base/util.h"

// Enough for the gaps between parallel loops: some 10 microseconds.
#define SPINS_WHILE_WAITING "1000"

// Read the first line of a short file into `line`. Returns 0 if there is none.
static inline int cpu_share_read(const char* directory, const char* name, char* line, int size) {
    Path path = path_of("%s/%s", directory, name);
    FILE* f = fopen(path.text, "r");
    int found = f && fgets(line, size, f);
    if (f) fclose(f);
    return found;
}

// The CPUs that the quota of one control group allows, INFINITY without one.
static inline double cpu_share_of_group(const char* directory) {
    char line[128];
    double quota = -1, period = 0;
    if (cpu_share_read(directory, "cpu.max", line, sizeof line)) {
        if (sscanf(line, "%lf %lf", &quota, &period) < 2) quota = -1;  // "max 100000"
    } else if (cpu_share_read(directory, "cpu.cfs_quota_us", line, sizeof line)) {
        quota = strtod(line, NULL);
        if (cpu_share_read(directory, "cpu.cfs_period_us", line, sizeof line)) period = strtod(line, NULL);
    }
    return quota > 0 && period > 0 ? quota / period : INFINITY;
}

// The smallest quota of a group and its parents. `mount` is where the root of the groups is, `path` begins with "/".
static inline double cpu_share_of_path(const char* mount, const char* path) {
    Path directory = path_of("%s%s", mount, path);
    double share = cpu_share_of_group(directory.text);
    for (size_t n = strlen(directory.text); n > strlen(mount); n--) {
        if (directory.text[n - 1] != '/') continue;
        directory.text[n - 1] = '\0';
        share = fmin(share, cpu_share_of_group(directory.text));
    }
    return share;
}

// The smallest quota of all groups that `file` (/proc/self/cgroup) lists, which are mounted below `root`
// (/sys/fs/cgroup): lines "0::/path" of version 2, "4:cpu,cpuacct:/path" of version 1.
static inline double cpu_share_quota(const char* file, const char* root) {
    char line[4096];
    double share = INFINITY;
    FILE* f = fopen(file, "r");
    while (f && fgets(line, sizeof line, f)) {
        char *controllers = strchr(line, ':'), *path = controllers ? strchr(controllers + 1, ':') : NULL;
        if (!path) continue;
        *path++ = '\0', controllers++;
        path[strcspn(path, "\n")] = '\0';
        if (*controllers && strncmp(controllers, "cpu,", 4) != 0 && strcmp(controllers, "cpu") != 0 &&
            strcmp(controllers, "cpuacct,cpu") != 0)
            continue;
        Path mount = path_of("%s%s%s", root, *controllers ? "/" : "", controllers);
        share = fmin(share, cpu_share_of_path(mount.text, path));
    }
    if (f) fclose(f);
    return share;
}

// The number of threads that a quota allows out of `cpus`: at least 1.
static inline int cpu_share_threads(double quota, int cpus) {
    return quota >= cpus ? cpus : quota < 1 ? 1 : (int)quota;
}

// Open MPI binds a rank to one core unless the user chooses a binding. All host work, such as drawing the first
// weights, would then have one thread. Give this rank an equal share of the CPUs of its launcher, this process's
// parent, if that is more. Returns whether the mask has changed.
static inline int cpu_share_unbind(void) {
    static const char* const choices[] = {"OMPI_MCA_hwloc_base_binding_policy", "OMPI_MCA_hwloc_base_cpu_set",
                                          "OMPI_MCA_hwloc_base_cpu_list", "OMPI_MCA_rmaps_base_mapping_policy"};
    const char *ranks = getenv("OMPI_COMM_WORLD_LOCAL_SIZE"), *rank = getenv("OMPI_COMM_WORLD_LOCAL_RANK");
    cpu_set_t bound, allowed, share;
    for (size_t i = 0; i < COUNT_OF(choices); i++)
        if (getenv(choices[i])) return 0;
    if (!ranks || !rank || sched_getaffinity(0, sizeof bound, &bound) != 0) return 0;
    if (sched_getaffinity(getppid(), sizeof allowed, &allowed) != 0) return 0;
    long n = CPU_COUNT(&allowed), size = strtol(ranks, NULL, 10), place = strtol(rank, NULL, 10);
    long first = size > 0 ? n * place / size : 0, end = size > 0 ? n * (place + 1) / size : 0, i = 0;
    CPU_ZERO(&share);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &allowed)) continue;
        if (i >= first && i < end) CPU_SET(cpu, &share);
        i++;
    }
    return CPU_COUNT(&share) > CPU_COUNT(&bound) && sched_setaffinity(0, sizeof share, &share) == 0;
}

// Call this before any output and before any thread starts. Returns if nothing needs to be set.
static inline void cpu_share_settle(char** argv) {
    int changed = cpu_share_unbind();
    cpu_set_t mask;
    int cpus = sched_getaffinity(0, sizeof mask, &mask) == 0 ? CPU_COUNT(&mask) : 1;
    int threads = cpu_share_threads(cpu_share_quota("/proc/self/cgroup", "/sys/fs/cgroup"), cpus);
    if (!getenv("OMP_WAIT_POLICY") && !getenv("GOMP_SPINCOUNT"))
        changed |= setenv("GOMP_SPINCOUNT", SPINS_WHILE_WAITING, 0) == 0;
    if (threads < cpus && !getenv("OMP_NUM_THREADS") && !getenv("OMP_THREAD_LIMIT")) {
        char text[16];
        snprintf(text, sizeof text, "%d", threads);
        changed |= setenv("OMP_NUM_THREADS", text, 0) == 0;
    }
    char path[PATH_MAX];  // not /proc/self/exe itself: ps and pkill would call the process "exe"
    ssize_t n = changed ? readlink("/proc/self/exe", path, sizeof path - 1) : -1;
    if (n < 0) return;
    path[n] = '\0';
    execv(path, argv);  // if that fails, the run is only slower
}

// ---------------------------------------------------------------------------------------------------------
// Descriptors and signals

typedef void (*StopHandler)(int);

// Install `handler` for the signals that ask the process to stop. A SIGHUP that is ignored, as under nohup, stays
// ignored. Returns the previous handler.
static inline StopHandler process_on_stop(StopHandler handler) {
    struct sigaction now;
    StopHandler before = signal(SIGINT, handler);
    signal(SIGTERM, handler);
    if (sigaction(SIGHUP, NULL, &now) == 0 && now.sa_handler != SIG_IGN) signal(SIGHUP, handler);
    return before;
}

// exit() calls this: a program that would end with status 0 ends with 1 if its output could not be written, as on a full
// disk. A pipe's reader may leave early: that is no failure.
static inline void process_check_output(void) {
    struct stat out;
    int bad = fflush(stdout) != 0 || ferror(stdout);
    if (*exit_status() != DONE || !bad || fstat(STDOUT_FILENO, &out) != 0 || S_ISFIFO(out.st_mode) ||
        S_ISSOCK(out.st_mode))
        return;
    fprintf(stderr, "error: standard output could not be written completely; is its disk full?\n");
    _exit(FAILED);
}

// Call this first in main, with its arguments: the program may execute itself again. Opens closed
// standard descriptors on /dev/null. Otherwise the first files that the program opens would get their numbers, and
// output would go into these files.
static inline void process_begin(StopHandler on_stop, char** argv) {
    cpu_share_settle(argv);
    atexit(process_check_output);
    int fd = 0;
    while (fd >= 0 && fd <= STDERR_FILENO) fd = open("/dev/null", O_RDWR);
    if (fd >= 0) close(fd);
    process_on_stop(on_stop);
}

#endif
