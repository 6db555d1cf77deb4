/* The average of the weights (--ema), as the rest of a program sees it. With -DNO_AVERAGE there is none. */
#ifndef LLMC_AVERAGE_ROOM_H
#define LLMC_AVERAGE_ROOM_H

#ifndef NO_AVERAGE
#include "llmc/average/weight_average.h"
#else
#include "llmc/base/rooms.h"

typedef struct {
    double decay;
    int64_t start, saved;
    int is_in;
} WeightAverage;

#define weight_average_is_on(...) room_absent(0, __VA_ARGS__)
#define weight_average_step(...) room_absent(0, __VA_ARGS__)
#define weight_average_exchange(...) room_absent(0, __VA_ARGS__)

#endif
#endif
