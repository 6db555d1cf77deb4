/* CUDA graphs on the CPU: between the begin and the end of a capture launches are kept instead of run, with their
 * arguments as they were then. What a GPU refuses in a capture is refused here: to wait for the stream, or for an event
 * that was recorded in a capture. There is one stream, so a graph is a list. */
#ifndef DEV_EMULATOR_GRAPH_H
#define DEV_EMULATOR_GRAPH_H

#include <functional>
#include <time.h>
#include <vector>

typedef enum { EMULATED_KERNEL, EMULATED_PRODUCT, EMULATED_COPY, EMULATED_FILL } EmulatedKind;

struct EmulatedNode {
    EmulatedKind kind;
    std::function<void()> work;
};
typedef std::vector<EmulatedNode> EmulatedGraph;

static EmulatedGraph* emulated_capture;  // NULL: launches run at once

// An event is the time of its record.
typedef struct {
    struct timespec time;
    int is_captured;  // it was recorded in a capture
} EmulatedEvent;

// `work` must hold copies of all that it needs from the host.
template <typename Work> static inline void emulated_do(EmulatedKind kind, const Work& work) {
    if (emulated_capture) emulated_capture->push_back({kind, work});
    else work();
}

static inline cudaError_t emulated_wait(void) {
    return emulated_capture ? cudaErrorStreamCaptureUnsupported : cudaSuccess;
}

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
    if (emulated_capture) return cudaErrorIllegalState;
    emulated_capture = new EmulatedGraph;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
    if (!emulated_capture) return cudaErrorIllegalState;
    *graph = (cudaGraph_t)emulated_capture;
    emulated_capture = NULL;
    return cudaSuccess;
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
    return *count = ((EmulatedGraph*)graph)->size(), cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return delete (EmulatedGraph*)graph, cudaSuccess; }
cudaError_t cudaGraphCreate(cudaGraph_t*, unsigned) { return cudaErrorNotSupported; }
cudaError_t cudaGraphAddChildGraphNode(cudaGraphNode_t*, cudaGraph_t, const cudaGraphNode_t*, size_t, cudaGraph_t) {
    return cudaErrorNotSupported;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
    *exec = (cudaGraphExec_t) new EmulatedGraph(*(EmulatedGraph*)graph);
    return cudaSuccess;
}
// Launches of the same kinds in the same order.
cudaError_t cudaGraphExecUpdate(cudaGraphExec_t exec, cudaGraph_t graph, cudaGraphExecUpdateResultInfo*) {
    EmulatedGraph &to = *(EmulatedGraph*)exec, &from = *(EmulatedGraph*)graph;
    int is_same = to.size() == from.size();
    for (size_t i = 0; is_same && i < to.size(); i++) is_same = to[i].kind == from[i].kind;
    if (!is_same) return cudaErrorGraphExecUpdateFailure;
    to = from;
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t) {
    if (emulated_capture) return cudaErrorNotSupported;
    for (const EmulatedNode& node : *(EmulatedGraph*)exec) node.work();
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return delete (EmulatedGraph*)exec, cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
    *e = (cudaEvent_t)calloc(1, sizeof(EmulatedEvent));
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) { return free(e), cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
    EmulatedEvent* e = (EmulatedEvent*)event;
    clock_gettime(CLOCK_MONOTONIC, &e->time);
    e->is_captured = emulated_capture != NULL;
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    return ((EmulatedEvent*)e)->is_captured ? cudaErrorCapturedEvent : cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t e) { return cudaEventSynchronize(e); }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
    const struct timespec *a = &((EmulatedEvent*)from)->time, *b = &((EmulatedEvent*)to)->time;
    *ms = (float)(1e3 * (double)(b->tv_sec - a->tv_sec) + 1e-6 * (double)(b->tv_nsec - a->tv_nsec));
    return cudaSuccess;
}

}  // extern "C"

#endif
