/* How much memory the host can still allocate. */
#ifndef LLMC_BASE_HOST_MEMORY_H
#define LLMC_BASE_HOST_MEMORY_H

#include <sys/resource.h>

#include "llmc/base/util.h"

// The number n in a file's line "key n", or in a file that holds a single number (`key` NULL); 0 if there is none.
static inline size_t memory_figure(const char* path, const char* key) {
    FILE* f = fopen(path, "r");
    char line[256];
    unsigned long long n = 0;
    size_t found = 0;
    while (f && !found && fgets(line, sizeof line, f)) {
        if (key && strncmp(line, key, strlen(key)) != 0) continue;
        if (sscanf(line + (key ? strlen(key) : 0), "%llu", &n) == 1) found = (size_t)n;
        if (!key) break;
    }
    if (f) fclose(f);
    return found;
}

// Bytes that a container may still allocate, from its control group's files; SIZE_MAX if it has no limit. The group
// counts the page cache as used, but the kernel evicts it when memory is needed. The keys in `stat` give its size.
static inline size_t memory_of_group(const char* limit_file, const char* used_file, const char* stat,
                                     const char* inactive, const char* active) {
    size_t limit = memory_figure(limit_file, NULL), used = memory_figure(used_file, NULL);
    size_t cached = memory_figure(stat, inactive) + memory_figure(stat, active);
    used -= min_size(used, cached);
    return limit == 0 ? SIZE_MAX : limit - min_size(limit, used);
}

// Bytes that the host can still allocate: the kernel's MemAvailable, or less if the container (cgroup v2 or v1) or a
// ulimit sets a lower limit.
static inline size_t host_memory_available(void) {
    size_t available = 1024 * memory_figure("/proc/meminfo", "MemAvailable:");
    if (!available) available = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    size_t group2 = memory_of_group("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current",
                                    "/sys/fs/cgroup/memory.stat", "inactive_file ", "active_file ");
    size_t group1 =
        memory_of_group("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes",
                        "/sys/fs/cgroup/memory/memory.stat", "total_inactive_file ", "total_active_file ");
    available = min_size(available, min_size(group1, group2));
    struct rlimit address_space;
    if (getrlimit(RLIMIT_AS, &address_space) == 0 && address_space.rlim_cur != RLIM_INFINITY)
        available = min_size(available, (size_t)address_space.rlim_cur);
    return available;
}

#endif
