/* How many CPUs this process may use: those of its affinity mask, or fewer if its control group or a parent of it has a
 * quota (cpu.max of version 2, cpu.cfs_quota_us of version 1). OpenMP knows the mask only.
 *
 * Threads that wait for others spin, by libgomp's default for milliseconds. On a busy machine they then spin in the time
 * that the awaited thread needs. Both are settings of the environment that libgomp reads when it is loaded, so the
 * program sets them and starts itself again. What the user has set stays. */
#ifndef LLMC_BASE_CPU_SHARE_H
#define LLMC_BASE_CPU_SHARE_H

#include <sched.h>

#include "llmc/base/util.h"

// Enough for the gaps between parallel loops: some 10 microseconds.
#define SPINS_WHILE_WAITING "1000"

// The first line of a short file into `line`. Returns 0 if there is none.
static inline int cpu_share_read(const char* directory, const char* name, char* line, int size) {
    char* path = xprintf("%s/%s", directory, name);
    FILE* f = fopen(path, "r");
    int found = f && fgets(line, size, f);
    if (f) fclose(f);
    free(path);
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
    char* directory = xprintf("%s%s", mount, path);
    double share = cpu_share_of_group(directory);
    for (size_t n = strlen(directory); n > strlen(mount); n--) {
        if (directory[n - 1] != '/') continue;
        directory[n - 1] = '\0';
        share = fmin(share, cpu_share_of_group(directory));
    }
    free(directory);
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
        char* mount = xprintf("%s%s%s", root, *controllers ? "/" : "", controllers);
        share = fmin(share, cpu_share_of_path(mount, path));
        free(mount);
    }
    if (f) fclose(f);
    return share;
}

// The number of threads that a quota allows out of `cpus`: at least 1.
static inline int cpu_share_threads(double quota, int cpus) {
    return quota >= cpus ? cpus : quota < 1 ? 1 : (int)quota;
}

// To be called before any output and any thread. Returns if nothing is to be set.
static inline void cpu_share_settle(char** argv) {
    cpu_set_t mask;
    int cpus = sched_getaffinity(0, sizeof mask, &mask) == 0 ? CPU_COUNT(&mask) : 1, changed = 0;
    int threads = cpu_share_threads(cpu_share_quota("/proc/self/cgroup", "/sys/fs/cgroup"), cpus);
    if (!getenv("OMP_WAIT_POLICY") && !getenv("GOMP_SPINCOUNT"))
        changed |= setenv("GOMP_SPINCOUNT", SPINS_WHILE_WAITING, 0) == 0;
    if (threads < cpus && !getenv("OMP_NUM_THREADS") && !getenv("OMP_THREAD_LIMIT")) {
        char text[16];
        snprintf(text, sizeof text, "%d", threads);
        changed |= setenv("OMP_NUM_THREADS", text, 0) == 0;
    }
    if (changed) execv("/proc/self/exe", argv);  // if that fails, the run is only slower
}

#endif
