/* Models from elsewhere, as the rest of a program sees them: llm.c's .bin files, the cache of the Hugging Face Hub (-e
 * hub:NAME), and files that must be converted first. With -DNO_IMPORT the first two are refused. */
#ifndef LLMC_IMPORT_ROOM_H
#define LLMC_IMPORT_ROOM_H

#ifndef NO_IMPORT
#include "llmc/import/foreign.h"
#include "llmc/import/hub.h"
#include "llmc/import/llmc_model.h"
#else
#include "llmc/base/rooms.h"

#define foreign_refuse(source) room_absent(0, source)
#define hub_is_name(...) room_absent(0, __VA_ARGS__)
#define tensors_open_llmc(file, path, table) (room_absent(0, table), die(USAGE, "%s: built without import", path))
#define llmc_model_sizes(path) (die(USAGE, "%s: built without import", path), (char*)NULL)

static inline char* hub_find(const char* source) {
    if (strncmp(source, "hub:", 4) == 0) die(USAGE, "-e %s: built without import", source);
    return NULL;
}

#endif
#endif
