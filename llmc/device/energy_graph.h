/* The power and time of work that repeats: a CUDA graph, launched back to back for at least a second.
 *
 * Graphs are captured on the context's stream and chained as child graphs, which cudaGraphAddChildGraphNode() copies.
 * They hold addresses and sizes: buffers must stay where they are. */
#ifndef LLMC_DEVICE_ENERGY_GRAPH_H
#define LLMC_DEVICE_ENERGY_GRAPH_H

#include "llmc/device/device.h"
#include "llmc/device/energy.h"

// The cost of repeated work.
typedef struct {
    double seconds;     // of one repetition
    double watts, mhz;  // means; NaN: unknown
} RepeatedEnergy;

#ifdef __CUDACC__

#define ENERGY_WARMUP 0.5  // seconds for the power controller to settle
#define ENERGY_MOST 5.0    // seconds after which we stop waiting for the counter to move
#define ENERGY_POLL 1e-3   // seconds between readings

// Capture launches on the context's stream, instead of running them, until energy_capture_end(). No launch may allocate
// or wait for the device.
static inline void energy_capture_begin(Context* ctx) {
    cudaCheck(cudaStreamBeginCapture(ctx->stream, cudaStreamCaptureModeRelaxed));
}

// Returns the captured launches; NULL if there were none. The caller destroys the graph.
static inline cudaGraph_t energy_capture_end(Context* ctx) {
    cudaGraph_t graph;
    size_t nodes = 0;
    cudaCheck(cudaStreamEndCapture(ctx->stream, &graph));
    cudaCheck(cudaGraphGetNodes(graph, NULL, &nodes));
    if (nodes) return graph;
    cudaCheck(cudaGraphDestroy(graph));
    return NULL;
}

// A graph that runs the parts in order, `rounds` times. The caller destroys it.
static inline cudaGraph_t energy_chain(const cudaGraph_t* parts, size_t count, size_t rounds) {
    cudaGraph_t chain;
    cudaGraphNode_t last = NULL;
    cudaCheck(cudaGraphCreate(&chain, 0));
    for (size_t i = 0; i < count * rounds; i++) {
        cudaGraphNode_t node;
        cudaCheck(cudaGraphAddChildGraphNode(&node, chain, last ? &last : NULL, last ? 1 : 0, parts[i % count]));
        last = node;
    }
    return chain;
}

// Run a graph once and wait for it. Returns its seconds on the device.
static inline double energy_run(cudaGraph_t graph, Context* ctx) {
    cudaGraphExec_t exec;
    cudaEvent_t began, ended;
    float ms;
    cudaCheck(cudaGraphInstantiate(&exec, graph, 0));
    cudaCheck(cudaEventCreate(&began));
    cudaCheck(cudaEventCreate(&ended));
    cudaCheck(cudaEventRecord(began, ctx->stream));
    cudaCheck(cudaGraphLaunch(exec, ctx->stream));
    cudaCheck(cudaEventRecord(ended, ctx->stream));
    cudaCheck(cudaEventSynchronize(ended));
    cudaCheck(cudaEventElapsedTime(&ms, began, ended));
    cudaCheck(cudaEventDestroy(began));
    cudaCheck(cudaEventDestroy(ended));
    cudaCheck(cudaGraphExecDestroy(exec));
    return 1e-3 * (double)ms;
}

static inline int energy_event_passed(cudaEvent_t event) {
    cudaError_t state = cudaEventQuery(event);
    if (state == cudaErrorNotReady) cudaGetLastError();  // clear it, so that no later call returns it
    else cudaCheck(state);
    return state == cudaSuccess;
}

// Repeat a graph of at least some milliseconds. A few launches are queued at any time, so the device never idles.
static inline RepeatedEnergy energy_repeat(const EnergyMeter* m, cudaGraph_t graph, Context* ctx) {
    enum { QUEUED = 4 };
    const struct timespec moment = {.tv_sec = 0, .tv_nsec = (long)(1e9 * ENERGY_POLL)};
    EnergyJumps jumps;
    RepeatedEnergy e = {.seconds = 0, .watts = (double)NAN};
    cudaGraphExec_t exec;
    cudaEvent_t queued[QUEUED], began, ended;
    float ms;
    size_t launches = 0, first = 0, readings = 0;
    memset(&jumps, 0, sizeof jumps);
    cudaCheck(cudaGraphInstantiate(&exec, graph, 0));
    for (int i = 0; i < QUEUED; i++) cudaCheck(cudaEventCreate(&queued[i]));
    cudaCheck(cudaEventCreate(&began));
    cudaCheck(cudaEventCreate(&ended));
    double start = now_seconds(), now = start, warm = 0;
    while (!first || (now - warm < ENERGY_MOST && energy_jumps_seconds(&jumps) < ENERGY_SECONDS)) {
        if (launches < QUEUED || energy_event_passed(queued[launches % QUEUED])) {
            if (!first && launches && now - start >= ENERGY_WARMUP) {
                cudaCheck(cudaEventRecord(began, ctx->stream));
                first = launches, warm = now;
            }
            cudaCheck(cudaGraphLaunch(exec, ctx->stream));
            cudaCheck(cudaEventRecord(queued[launches++ % QUEUED], ctx->stream));
        } else {
            if (first) {
                energy_jumps_read(&jumps, now, energy_total(m));
                e.mhz += (energy_mhz(m) - e.mhz) / (double)++readings;
            }
            nanosleep(&moment, NULL);
        }
        now = now_seconds();
    }
    cudaCheck(cudaEventRecord(ended, ctx->stream));
    cudaCheck(cudaEventSynchronize(ended));
    cudaCheck(cudaEventElapsedTime(&ms, began, ended));
    e.seconds = 1e-3 * (double)ms / (double)(launches - first);
    e.watts = energy_jumps_watts(&jumps);
    for (int i = 0; i < QUEUED; i++) cudaCheck(cudaEventDestroy(queued[i]));
    cudaCheck(cudaEventDestroy(began));
    cudaCheck(cudaEventDestroy(ended));
    cudaCheck(cudaGraphExecDestroy(exec));
    return e;
}

#endif
#endif
