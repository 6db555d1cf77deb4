/* The stream, events and CUDA graphs on the CPU. During a capture, launches are stored with their arguments at that
 * time, instead of run. As on a GPU, it is an error during a capture to wait for the stream, or for an event that was
 * recorded in a capture. So is what a GPU would do at once, before the captured launches: a copy or fill without a
 * stream, and freeing memory. There is one stream, so a graph is a list.
 *
 * With LLMC_TEST_LATE=1 the stream is as late as possible: its work is done when the host waits for it, or frees device
 * memory. Then host memory that is changed or read before its copy is made gives other results. */
#ifndef DEV_EMULATOR_GRAPH_H
#define DEV_EMULATOR_GRAPH_H

#include <deque>
#include <functional>
#include <mutex>
#include <stdlib.h>
#include <time.h>
#include <vector>

// A kernel of a cooperative launch is a kind of its own: a graph's node keeps what it is.
typedef enum {
    EMULATED_KERNEL,
    EMULATED_COOPERATIVE,
    EMULATED_PRODUCT,
    EMULATED_COPY,
    EMULATED_FILL,
    EMULATED_RECORD
} EmulatedKind;

struct EmulatedNode {
    EmulatedKind kind;
    int clusters;  // of a product's algorithm; a graph's node keeps them too, without an error
    std::function<void()> work;
};
typedef std::vector<EmulatedNode> EmulatedGraph;

static EmulatedGraph* emulated_capture;                    // NULL: launches go to the stream
static std::deque<std::function<void()>> emulated_stream;  // what is not done yet; empty unless it is late
static std::recursive_mutex emulated_lock;                 // of the stream: a checkpoint's thread waits for an event
static cudaError_t emulated_error;                         // of the last call that failed, until cudaGetLastError()
static const char* const emulated_late_value = getenv("LLMC_TEST_LATE");
static const int emulated_is_late = emulated_late_value && *emulated_late_value == '1';

static inline cudaError_t emulated_status(cudaError_t status) {
    if (status != cudaSuccess) emulated_error = status;
    return status;
}

// An event is the time of its record.
typedef struct {
    struct timespec time;
    int pending;      // records that the stream has not come to
    int is_captured;  // it was recorded in a capture
} EmulatedEvent;

// `work` must hold copies of all that it needs from the host.
static inline void emulated_run(const std::function<void()>& work) {
    std::lock_guard<std::recursive_mutex> lock(emulated_lock);
    if (emulated_is_late) emulated_stream.push_back(work);
    else work();
}

template <typename Work> static inline void emulated_do(EmulatedKind kind, const Work& work, int clusters = 0) {
    if (emulated_capture) emulated_capture->push_back({kind, clusters, work});
    else emulated_run(work);
}

// Do what the stream has to do: up to an event, or all.
static inline void emulated_catch_up(const EmulatedEvent* event) {
    std::lock_guard<std::recursive_mutex> lock(emulated_lock);
    while (!emulated_stream.empty() && (!event || event->pending)) {
        std::function<void()> work = std::move(emulated_stream.front());
        emulated_stream.pop_front();
        work();
    }
}

// For calls that wait for the stream, or do at once what belongs into it.
static inline cudaError_t emulated_wait(void) {
    if (emulated_capture) return emulated_status(cudaErrorStreamCaptureUnsupported);
    emulated_catch_up(NULL);
    return cudaSuccess;
}

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
    if (emulated_capture) return emulated_status(cudaErrorIllegalState);
    emulated_capture = new EmulatedGraph;
    return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
    if (!emulated_capture) return emulated_status(cudaErrorIllegalState);
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
// Launches of the same kinds in the same order. A GPU may refuse more (another size of a fill, other attributes of a
// kernel): a late stream refuses each 16th update. It does not refuse a product with other clusters, whose results are
// then wrong: here it writes none.
cudaError_t cudaGraphExecUpdate(cudaGraphExec_t exec, cudaGraph_t graph, cudaGraphExecUpdateResultInfo*) {
    static unsigned updates;
    EmulatedGraph &to = *(EmulatedGraph*)exec, &from = *(EmulatedGraph*)graph;
    int is_same = to.size() == from.size() && !(emulated_is_late && ++updates % 16 == 0);
    for (size_t i = 0; is_same && i < to.size(); i++) is_same = to[i].kind == from[i].kind;
    if (!is_same) return emulated_status(cudaErrorGraphExecUpdateFailure);
    for (size_t i = 0; i < to.size(); i++) {
        int clusters = to[i].clusters;
        to[i] = from[i];
        if (to[i].clusters != clusters) to[i].clusters = clusters, to[i].work = [] {};
    }
    return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t) {
    if (emulated_capture) return emulated_status(cudaErrorNotSupported);
    for (const EmulatedNode& node : *(EmulatedGraph*)exec) emulated_run(node.work);
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) { return delete (EmulatedGraph*)exec, cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
    *e = (cudaEvent_t)calloc(1, sizeof(EmulatedEvent));
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t e) {
    emulated_catch_up((EmulatedEvent*)e);
    return free(e), cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
    EmulatedEvent* e = (EmulatedEvent*)event;
    std::lock_guard<std::recursive_mutex> lock(emulated_lock);
    e->is_captured = emulated_capture != NULL;
    if (e->is_captured) return emulated_do(EMULATED_RECORD, [] {}), cudaSuccess;
    e->pending++;
    emulated_run([=] {
        clock_gettime(CLOCK_MONOTONIC, &e->time);
        e->pending--;
    });
    return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    EmulatedEvent* e = (EmulatedEvent*)event;
    if (e->is_captured) return emulated_status(cudaErrorCapturedEvent);
    emulated_catch_up(e);
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t e) { return cudaEventSynchronize(e); }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
    const EmulatedEvent *first = (EmulatedEvent*)from, *last = (EmulatedEvent*)to;
    const struct timespec *a = &first->time, *b = &last->time;
    if (first->pending || last->pending) return emulated_status(cudaErrorNotReady);
    *ms = (float)(1e3 * (double)(b->tv_sec - a->tv_sec) + 1e-6 * (double)(b->tv_nsec - a->tv_nsec));
    return cudaSuccess;
}

}  // extern "C"

#endif
