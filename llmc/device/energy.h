/* Energy and clock of this rank's GPU while it trains, from NVML's counters. A step at the power limit takes as long as
 * its energy takes to deliver, so joules show what a faster step must save.
 *
 * NVML is part of the driver and loaded at run time. Without it, or on a CPU, nothing is measured. Its counter moves in
 * jumps of up to a tenth of a second, so a value is the mean over at least a second of steps. */
#ifndef LLMC_DEVICE_ENERGY_H
#define LLMC_DEVICE_ENERGY_H

#include "llmc/base/util.h"

#ifdef __CUDACC__
#include <dlfcn.h>

#include "llmc/device/cuda_utils.cuh"
#endif

#define ENERGY_SECONDS 1.0  // minimum duration of a measurement

typedef struct {
    void* device;                                     // nvmlDevice_t; NULL: nothing is measured
    int (*total)(void* device, unsigned long long*);  // millijoules since the driver was loaded
    int (*clock)(void* device, int kind, unsigned*);  // MHz
    int (*limit)(void* device, unsigned*);            // milliwatts
    int steps;                                        // of this measurement
    double began, joules;                             // its start, and the counter at that time
} EnergyMeter;

// Joules that the GPU has used since some time in the past; NaN if unknown.
static inline double energy_total(const EnergyMeter* m) {
    unsigned long long millijoules = 0;
    return m->device && m->total(m->device, &millijoules) == 0 ? 1e-3 * (double)millijoules : (double)NAN;
}

// Clock of the multiprocessors now, in MHz; NaN if unknown.
static inline double energy_mhz(const EnergyMeter* m) {
    enum { CLOCK_SM = 1 };
    unsigned mhz = 0;
    return m->device && m->clock(m->device, CLOCK_SM, &mhz) == 0 ? (double)mhz : (double)NAN;
}

// The power limit that the driver enforces, in watts; NaN if unknown.
static inline double energy_limit(const EnergyMeter* m) {
    unsigned milliwatts = 0;
    return m->device && m->limit(m->device, &milliwatts) == 0 ? 1e-3 * (double)milliwatts : (double)NAN;
}

// Find the GPU that CUDA uses. Returns 0, or -1 without NVML or without an energy counter.
static inline int energy_open(EnergyMeter* m) {
    memset(m, 0, sizeof *m);
#ifdef __CUDACC__
    int (*init)(void) = NULL, (*find)(const char*, void**) = NULL;
    const struct {
        const char* name;
        void* slot;
    } symbols[] = {{"nvmlInit_v2", &init},
                   {"nvmlDeviceGetHandleByPciBusId_v2", &find},
                   {"nvmlDeviceGetTotalEnergyConsumption", &m->total},
                   {"nvmlDeviceGetClockInfo", &m->clock},
                   {"nvmlDeviceGetEnforcedPowerLimit", &m->limit}};
    char bus[32];
    int index = 0;
    void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW);  // stays loaded
    for (size_t i = 0; i < COUNT_OF(symbols); i++) {
        void* symbol = library ? dlsym(library, symbols[i].name) : NULL;
        if (!symbol) return -1;
        memcpy(symbols[i].slot, &symbol, sizeof symbol);
    }
    cudaCheck(cudaGetDevice(&index));
    cudaCheck(cudaDeviceGetPCIBusId(bus, sizeof bus, index));
    if (init() != 0 || find(bus, &m->device) != 0) m->device = NULL;
    if (isnan(energy_total(m))) m->device = NULL;
#endif
    return m->device ? 0 : -1;
}

// Begin a measurement at time `now`.
static inline void energy_begin(EnergyMeter* m, double now) {
    m->steps = 0, m->began = now, m->joules = energy_total(m);
}

// A step has ended at time `now`. Returns the joules per step, the mean since the measurement began, and begins the
// next one; or NaN, if the measurement is still too short. The counter is not read at each step: that may take longer
// than a step of a small model.
static inline double energy_step(EnergyMeter* m, double now) {
    m->steps++;
    if (!m->device || now - m->began < ENERGY_SECONDS) return (double)NAN;
    int steps = m->steps;
    double before = m->joules;
    energy_begin(m, now);
    return (m->joules - before) / steps;
}

// ---------------------------------------------------------------------------------------------------------
// The last steps before a moment that is not known in advance, enough of them to last ENERGY_SECONDS

// The end of step number `step`, from 1.
typedef struct {
    double time, joules;
    int64_t step;  // 0: none
} EnergyMark;

// The means over consecutive steps.
typedef struct {
    double seconds;  // of all of them
    double joules;   // of a step; NaN: unknown
    double watts, mhz;
} StepEnergy;

// Whether energy_mark() would keep a start at time `now`.
static inline int energy_mark_is_due(const EnergyMark marks[2], double now) {
    return !marks[1].step || now - marks[1].time >= ENERGY_SECONDS;
}

// A step has ended, and a measurement may begin here. Keeps two such starts at least ENERGY_SECONDS apart: marks[1] is
// the newest, marks[0] the one before it.
static inline void energy_mark(EnergyMark marks[2], EnergyMark now) {
    if (!energy_mark_is_due(marks, now.time)) return;
    if (!marks[1].step) marks[1] = now;
    marks[0] = marks[1], marks[1] = now;
}

// Measure from the newest kept start that is at least ENERGY_SECONDS ago, or else from the oldest, to `now`.
static inline StepEnergy energy_since(const EnergyMark marks[2], EnergyMark now) {
    const EnergyMark* from = &marks[now.time - marks[1].time >= ENERGY_SECONDS];
    StepEnergy e = {.seconds = now.time - from->time, .joules = (double)NAN};
    if (!from->step || now.step <= from->step) return e;
    e.joules = (now.joules - from->joules) / (double)(now.step - from->step);
    e.watts = (now.joules - from->joules) / e.seconds;
    return e;
}

// ---------------------------------------------------------------------------------------------------------
// Mean power while only one kind of work runs, from many readings of the counter

// The interval between two observed jumps of the counter.
typedef struct {
    double joules;  // the newest reading
    double first_time, first_joules, last_time;
    int readings, jumps;
} EnergyJumps;

static inline void energy_jumps_read(EnergyJumps* e, double now, double joules) {
    if (e->readings++ && joules != e->joules) {
        if (!e->jumps++) e->first_time = now, e->first_joules = joules;
        e->last_time = now;
    }
    e->joules = joules;
}

static inline double energy_jumps_seconds(const EnergyJumps* e) { return e->last_time - e->first_time; }

// NaN if the jumps that were seen lie less than ENERGY_SECONDS apart.
static inline double energy_jumps_watts(const EnergyJumps* e) {
    return energy_jumps_seconds(e) >= ENERGY_SECONDS ? (e->joules - e->first_joules) / energy_jumps_seconds(e)
                                                     : (double)NAN;
}

#endif
