/* What layernorm.h sees of fp8: room.h without the rest, which builds on layernorm's neighbours. */
#include "llmc/ops/layernorm/layernorm.h"  // before the guard: it includes this file

#ifndef LLMC_FP8_ROOM_LAYERNORM_H
#define LLMC_FP8_ROOM_LAYERNORM_H

#ifndef NO_FP8
#include "llmc/fp8/layernorm.h"
#else
#include "llmc/model/fp8.h"
#endif

#endif
