/* Training in fp8 (--fp8), as llmc/model/fp8.h includes it. */
#ifndef LLMC_FP8_ROOM_H
#define LLMC_FP8_ROOM_H

#include "llmc/fp8/linear.h"
#include "llmc/fp8/peak.h"
#include "llmc/fp8/report.h"
#include "llmc/fp8/state.h"

#endif
