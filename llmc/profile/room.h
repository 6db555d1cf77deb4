/* --profile, and what a GPU's energy counter and NVTX add to every run, as the rest of a program sees them. With
 * -DNO_PROFILE nothing is measured. */
#ifndef LLMC_PROFILE_ROOM_H
#define LLMC_PROFILE_ROOM_H

#ifndef NO_PROFILE
#include "llmc/profile/report.h"
#else
#include "llmc/base/rooms.h"
#include "llmc/base/run_lock.h"
#include "llmc/dist/process_group.h"

typedef struct {
    void* device;
} EnergyMeter;

typedef struct {
    int unused;
} NvtxRanges;

typedef struct {
    int count, measures_ops;
    EnergyMeter* meter;
} Profiler;

typedef struct {
    const char *out, *passes;
    const RunLock* lock;
    double flops;
    ProcessGroup* group;
    int broadcast_overlaps;
} ProfiledRun;

#define nvtx_open(...) room_absent(0, __VA_ARGS__)
#define nvtx_close(...) room_absent(0, __VA_ARGS__)
#define energy_open(...) room_absent(0, __VA_ARGS__)
#define energy_begin(...) room_absent(0, __VA_ARGS__)
#define energy_step(...) NAN
#define energy_mhz(...) room_absent(0, __VA_ARGS__)
#define profiler_open(...) room_absent(0, __VA_ARGS__)
#define profiler_close(...) room_absent(0, __VA_ARGS__)
#define profiler_prepare_step(...) room_absent(0, __VA_ARGS__)
#define profiler_begin_step(...) room_absent(0, __VA_ARGS__)
#define profiler_end_step(...) room_absent(0, __VA_ARGS__)
#define profiler_step_took(...) room_absent(0, __VA_ARGS__)
#define profiler_reads_at_once(...) room_absent(0, __VA_ARGS__)
#define profiler_measure_ops(...) room_absent(0, __VA_ARGS__)
#define profiler_report(...) room_absent(0, __VA_ARGS__)
#define profiler_stop(...) room_absent(0, __VA_ARGS__)

#endif
#endif
