/* --graph: launch a step as CUDA graphs, because the gaps between their kernels are shorter than on a stream.
 *
 * A graph holds the launches of one micro-batch after its inputs have been uploaded. The graph of the last micro-batch
 * also holds the all-reduce, the update and the copies of the step's results. Every step is captured anew. Then
 * cudaGraphExecUpdate() writes the new kernel arguments into an executable graph of an earlier step, which is launched.
 * So values that change from step to step (learning rate, random keys, numbers of rows) stay kernel arguments, and the
 * same kernels write the same bits. If no earlier graph fits, a new one is instantiated. A graph with other matmul
 * algorithms never fits: an update can put another kernel in a kernel's place, but leaves the old dimensions of thread
 * block clusters, and then the results are wrong.
 *
 * The first steps, which choose algorithms and allocate scratch, run without a graph, and so does everything outside of
 * steps: validation, checkpoints, samples. Steps whose launches have always the same arguments, as those of a program
 * that generates text, are captured once (step_graph_repeat). */
#ifndef LLMC_GRAPH_STEP_GRAPH_H
#define LLMC_GRAPH_STEP_GRAPH_H

#include "llmc/device/device.h"
#include "llmc/run/settings.h"

enum {
    STEP_GRAPH_WARMUP = 2,   // steps without a graph
    STEP_GRAPH_SHAPES = 16,  // sequences of launches for which graphs are kept
    STEP_GRAPH_TURNS = 2     // graphs of each, used in turn, as one still runs; an update changes later launches only
};

typedef struct {
    int is_on;
    int64_t steps;           // of this process
    int64_t launched, made;  // graphs
    size_t nodes;            // of the last one
    void* last;              // that one; NULL: none since the last restart
#ifdef __CUDACC__
    int part;  // of the step that is captured
    int next;  // the shape to replace by a new one
    struct {
        int part;
        uint64_t algorithms;
        size_t nodes;  // 0: unused
        unsigned uses;
        cudaGraphExec_t graphs[STEP_GRAPH_TURNS];
    } shapes[STEP_GRAPH_SHAPES];
#endif
} StepGraph;

static inline void step_graph_open(StepGraph* g, const Settings* s, int ranks) {
    const char* obstacle = !GPU_BUILD   ? "this is the CPU build"
                           : ranks > 1  ? "it is for one GPU: the sums over ranks run on a stream of their own"
                           : s->profile ? "--profile measures the launches one by one"
                                        : NULL;
    if (s->graph && obstacle) die(USAGE, "--graph 1: %s; leave it out", obstacle);
    memset(g, 0, sizeof *g);
    g->is_on = s->graph;
}

// The next steps launch other ops, which may allocate scratch: begin again with steps without a graph.
static inline void step_graph_restart(StepGraph* g) { g->steps = 0, g->last = NULL; }

#ifdef __CUDACC__

// Launch the last graph again. Returns 0 if there is none since step_graph_restart().
static inline int step_graph_repeat(StepGraph* g, Context* ctx) {
    if (!g->last) return 0;
    g->launched++;
    cudaCheck(cudaGraphLaunch((cudaGraphExec_t)g->last, ctx->stream));
    return 1;
}

// Capture launches until step_graph_end(). The first micro-batch of a step sets the gradients, others add to them, and
// the update follows the last one, so these need different graphs.
static inline void step_graph_begin(StepGraph* g, int is_first, int is_last, Context* ctx) {
    if (!g->is_on || g->steps < STEP_GRAPH_WARMUP) return;
    g->part = 2 * is_first + is_last;
    // Relaxed: scratch may grow, and the thread that writes a checkpoint may copy and wait.
    cudaCheck(cudaStreamBeginCapture(ctx->stream, cudaStreamCaptureModeRelaxed));
    ctx->is_captured = 1;
    ctx->captured_algorithms = FNV_START;
}

// A running graph is freed when it ends.
static inline void step_graph_free(cudaGraphExec_t* exec) {
    if (*exec) cudaCheck(cudaGraphExecDestroy(*exec));
    *exec = NULL;
}

// Where the next executable graph for this part of a step, g->nodes launches and these algorithms is kept. NULL there:
// none yet.
static inline cudaGraphExec_t* step_graph_place(StepGraph* g, uint64_t algorithms) {
    int i = 0;
    while (i < STEP_GRAPH_SHAPES &&
           (g->shapes[i].part != g->part || g->shapes[i].nodes != g->nodes || g->shapes[i].algorithms != algorithms))
        i++;
    if (i == STEP_GRAPH_SHAPES) {
        i = g->next;
        g->next = (g->next + 1) % STEP_GRAPH_SHAPES;
        for (int k = 0; k < STEP_GRAPH_TURNS; k++) step_graph_free(&g->shapes[i].graphs[k]);
        g->shapes[i].part = g->part, g->shapes[i].nodes = g->nodes, g->shapes[i].algorithms = algorithms;
    }
    return &g->shapes[i].graphs[g->shapes[i].uses++ % STEP_GRAPH_TURNS];
}

// Make *exec run the launches of `graph`. Returns 1 if it had to be instantiated.
static inline int step_graph_take(cudaGraphExec_t* exec, cudaGraph_t graph) {
    cudaGraphExecUpdateResultInfo info;
    if (*exec) {
        cudaError_t status = cudaGraphExecUpdate(*exec, graph, &info);
        if (status == cudaSuccess) return 0;
        if (status != cudaErrorGraphExecUpdateFailure) cudaCheck(status);
        cudaGetLastError();  // clear the error, so that no later call returns it
        step_graph_free(exec);
    }
    cudaCheck(cudaGraphInstantiate(exec, graph, 0));
    return 1;
}

// Free old scratch buffers, replaced during the capture, after the launches that use them have run.
static inline void step_graph_free_outgrown(Context* ctx) {
    if (!ctx->outgrown_count) return;
    device_synchronize(ctx);
    for (int i = 0; i < ctx->outgrown_count; i++) cudaCheck(cudaFree(ctx->outgrown[i]));
    free(ctx->outgrown);
    ctx->outgrown = NULL, ctx->outgrown_count = 0;
}

// Launch the graph of everything captured since step_graph_begin().
static inline void step_graph_end(StepGraph* g, Context* ctx) {
    cudaGraph_t graph;
    if (!ctx->is_captured) return;
    ctx->is_captured = 0;
    cudaCheck(cudaStreamEndCapture(ctx->stream, &graph));
    cudaCheck(cudaGraphGetNodes(graph, NULL, &g->nodes));
    cudaGraphExec_t* exec = step_graph_place(g, ctx->captured_algorithms);
    g->made += step_graph_take(exec, graph);
    g->launched++;
    cudaCheck(cudaGraphDestroy(graph));
    cudaCheck(cudaGraphLaunch(*exec, ctx->stream));
    g->last = *exec;
    step_graph_free_outgrown(ctx);
}

// At the end of a run: print the number of graphs.
static inline void step_graph_report(const StepGraph* g) {
    if (g->launched)
        printf("graphs: %lld launched, %lld of them instantiated; the last one has %zu launches\n",
               (long long)g->launched, (long long)g->made, g->nodes);
}

static inline void step_graph_close(StepGraph* g) {
    for (int i = 0; i < STEP_GRAPH_SHAPES; i++)
        for (int k = 0; k < STEP_GRAPH_TURNS; k++) step_graph_free(&g->shapes[i].graphs[k]);
}

#else

static inline int step_graph_repeat(StepGraph* g, Context* ctx) { return (void)g, (void)ctx, 0; }
static inline void step_graph_begin(StepGraph* g, int is_first, int is_last, Context* ctx) {
    (void)g, (void)is_first, (void)is_last, (void)ctx;
}
static inline void step_graph_end(StepGraph* g, Context* ctx) { (void)g, (void)ctx; }
static inline void step_graph_report(const StepGraph* g) { (void)g; }
static inline void step_graph_close(StepGraph* g) { (void)g; }

#endif

#endif
