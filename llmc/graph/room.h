/* Steps as CUDA graphs (--graph), as the rest of a program sees them. With -DNO_GRAPH steps are launched op by op. */
#ifndef LLMC_GRAPH_ROOM_H
#define LLMC_GRAPH_ROOM_H

#ifndef NO_GRAPH
#include "llmc/graph/step_graph.h"
#else
#include "llmc/base/rooms.h"

typedef struct {
    int is_on;
    int64_t steps;
} StepGraph;

#define step_graph_open(...) room_absent(0, __VA_ARGS__)
#define step_graph_begin(...) room_absent(0, __VA_ARGS__)
#define step_graph_end(...) room_absent(0, __VA_ARGS__)
#define step_graph_restart(...) room_absent(0, __VA_ARGS__)
#define step_graph_repeat(...) room_absent(0, __VA_ARGS__)
#define step_graph_report(...) room_absent(0, __VA_ARGS__)
#define step_graph_close(...) room_absent(0, __VA_ARGS__)

#endif
#endif
