/* Consistency checks: ranks that train together must agree on flags, model, data and weights. If two ranks differ, each
 * function ends all ranks with USAGE and reports the two ranks and the difference. All ranks call them. With one rank
 * they do nothing. */
#ifndef LLMC_RUN_CONSISTENCY_H
#define LLMC_RUN_CONSISTENCY_H

#include "llmc/checkpoint/writer.h"
#include "llmc/dist/process_group.h"
#include "llmc/run/settings.h"

// Compare the current values of all flags except those of SCOPE_RANK, which may differ.
static inline void check_same_flags(const ProcessGroup* group, const Flag* rows, int count) {
    Text settings = {NULL, 0, 0};
    char value[FLAG_TEXT_SIZE];
    for (int i = 0; i < count; i++) {
        const Flag* row = &rows[i];
        if (row->scope == SCOPE_RANK) continue;
        flags_format_value(row, value, sizeof value);
        text_printf(&settings, "%s %s\n", row->long_name,
                    row->type == FLAG_STRING ? *(const char* const*)row->value : value);
    }
    group_check_same(group, "the settings", settings.text);
    free(settings.text);
}

// Compare the build's data type, config.json and the fingerprints of the data.
static inline void check_same_model(const ProcessGroup* group, const char* config_json, uint32_t data,
                                    uint32_t val_data) {
    char fingerprints[48];
    snprintf(fingerprints, sizeof fingerprints, "training %08x\nvalidation %08x", data, val_data);
    group_check_same(group, "the type of the build", FLOATX_NAME);
    group_check_same(group, "the model", config_json);
    group_check_same(group, "the data's fingerprint", fingerprints);
}

// Compare the initial weights. Files with the same name may differ between machines, and with ZeRO-1 each rank would
// broadcast a shard of its own file.
static inline void check_same_weights(const ProcessGroup* group, const TensorTable* table, floatX* params,
                                      Context* ctx) {
    const TensorPart weights = {.prefix = "", .device = params, .type = VIEW_FLOATX};
    char hash[16];
    if (group->size == 1) return;
    snprintf(hash, sizeof hash, "%08x", checkpoint_weights_hash(&weights, table->elements, ctx));
    group_check_same(group, "the initial weights (CRC-32)", hash);
}

#endif
