/* Energy and clock of this rank's GPU while it trains, from NVML's counters. A step at the power limit takes as long as
 * its energy takes to deliver, so joules show what a faster step must save.
 *
 * NVML is part of the driver and loaded at run time. Without it, or on a CPU, nothing is measured. Its counter moves in
 * jumps of up to a tenth of a second, so a value is the mean over at least a second of steps. */
#ifndef LLMC_PROFILE_ENERGY_METER_H
#define LLMC_PROFILE_ENERGY_METER_H

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
                   {"nvmlDeviceGetClockInfo", &m->clock}};
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
