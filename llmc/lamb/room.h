/* The optimizer LAMB, as the rest of a program sees it. With -DNO_LAMB nothing calls what stands here for the room:
 * flags_refuse_rooms() refuses --optimizer lamb. */
#ifndef LLMC_LAMB_ROOM_H
#define LLMC_LAMB_ROOM_H

#ifndef NO_LAMB
#include "llmc/lamb/lamb.h"
#else
#include "llmc/base/rooms.h"
#include "llmc/ops/common/adam.h"

typedef struct {
    const ParamSpan* spans;
    int count, blocks;
    size_t elements;
} LambSpans;

#define lamb_number_blocks(...) room_absent(0, __VA_ARGS__)
#define lamb_scratch_bytes(...) (size_t) room_absent(0, __VA_ARGS__)
#define lamb_update(...) room_absent(0, __VA_ARGS__)
#define lamb_moments(...) room_absent(0, __VA_ARGS__)
#define lamb_apply(...) room_absent(0, __VA_ARGS__)

#endif
#endif
