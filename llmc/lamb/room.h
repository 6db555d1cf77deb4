/* The optimizer LAMB, as the rest of a program sees it. With -DNO_LAMB nothing calls what stands here for the room:
 * flags_refuse_rooms() refuses --optimizer lamb. */
#ifndef LLMC_LAMB_ROOM_H
#define LLMC_LAMB_ROOM_H

#ifndef NO_LAMB
#include "llmc/lamb/lamb.h"
#else
#include "llmc/ops/common/adam.h"

typedef struct {
    const ParamSpan* spans;
    int count, blocks;
    size_t elements;
} LambSpans;

#define lamb_number_blocks(...) 0
#define lamb_scratch_bytes(...) 0
#define lamb_update(...) ((void)0)
#define lamb_moments(...) ((void)0)
#define lamb_apply(...) ((void)0)

#endif
#endif
