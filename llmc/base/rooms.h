/* What a program does without a room: -DNO_MUON leaves out llmc/muon/, and so on. What others see of a room, with it or
 * without, is in its room.h; of fp8, in model/fp8.h. A flag that needs a room which is left out is refused. */
#ifndef LLMC_BASE_ROOMS_H
#define LLMC_BASE_ROOMS_H

#include "llmc/base/flags.h"

// In the place of a room's functions that do nothing, or return `value`.
static inline int room_absent(int value, ...) { return value; }

typedef struct {
    const char *flag, *value;  // value NULL: any but the default
    const char* room;
} RoomFlag;

static const RoomFlag ROOMS_LEFT_OUT[] = {
#ifdef NO_MUON
    {"--optimizer", "muon", "muon"},
    {"--optimizer", "normuon", "muon"},
#endif
#ifdef NO_LAMB
    {"--optimizer", "lamb", "lamb"},
#endif
#ifdef NO_CHECKPOINT
    {"--resume", NULL, "checkpoint"},
    {"--overwrite", NULL, "checkpoint"},
    {"--keep-best", NULL, "checkpoint"},
#endif
#ifdef NO_PROFILE
    {"--profile", NULL, "profile"},
    {"--profile-energy", NULL, "profile"},
#endif
#ifdef NO_AVERAGE
    {"--ema", NULL, "average"},
#endif
#ifdef NO_GRAPH
    {"--graph", "1", "graph"},
#endif
#ifdef NO_CHOICES
    {"--hellaswag", NULL, "choices"},
    {"--choices", NULL, "choices"},
#endif
    {NULL, NULL, NULL},
};

// End with USAGE if a flag's value needs a room that was left out.
static inline void flags_refuse_rooms(Flag* rows, int count) {
    for (const RoomFlag* r = ROOMS_LEFT_OUT; r->flag; r++) {
        char is[FLAG_TEXT_SIZE];
        const Flag* row = flags_find(rows, count, r->flag, strlen(r->flag));
        if (!row) continue;
        flags_format_value(row, is, sizeof is);
        if (r->value ? strcmp(is, r->value) == 0 : strcmp(is, row->default_text) != 0)
            die(USAGE, "%s %s: built without %s", r->flag, is, r->room);
    }
}

#endif
