/* What ranks must have in common before they train together. Each function ends all ranks with USAGE where two of them
 * differ, and names these and what they differ in; where there is one rank it does nothing. All ranks call them. */
#ifndef LLMC_AGREEMENT_H
#define LLMC_AGREEMENT_H

#include "comm.h"
#include "saving.h"
#include "settings.h"

// Flags in which ranks may differ: where each of them runs, and how patient it is.
#define SETTINGS_OF_RANK                                                                                               \
    "--threads --ceilings --ranks-start --ranks --rank --ranks-per-machine --server --server-port --rendezvous "       \
    "--timeout --max-hours"

// As they stand now.
static inline void agree_on_flags(const Comm* comm, const Flag* rows, int count) {
    Text settings = {NULL, 0, 0};
    char value[FLAG_TEXT_SIZE];
    for (int i = 0; i < count; i++) {
        const Flag* row = &rows[i];
        if (settings_listed(SETTINGS_OF_RANK, row->long_name)) continue;
        flags_format_value(row, value, sizeof value);
        text_printf(&settings, "%s %s\n", row->long_name,
                    row->type == FLAG_STRING ? *(const char* const*)row->value : value);
    }
    comm_check_same(comm, "the settings", settings.text);
    free(settings.text);
}

// The build, the model (as config.json has it) and the fingerprints of the data.
static inline void agree_on_model(const Comm* comm, const char* config_json, uint32_t data, uint32_t val_data) {
    char fingerprints[48];
    snprintf(fingerprints, sizeof fingerprints, "training %08x\nvalidation %08x", data, val_data);
    comm_check_same(comm, "the type of the build", FLOATX_NAME);
    comm_check_same(comm, "the model", config_json);
    comm_check_same(comm, "the data's fingerprint", fingerprints);
}

// The weights that training begins with: files of one name may differ between machines, and with ZeRO-1 each rank then
// hands its part of them to all others.
static inline void agree_on_weights(const Comm* comm, const TensorTable* table, floatX* params, Context* ctx) {
    const TensorPart weights = {"", params, VIEW_FLOATX, NULL};
    char hash[16];
    if (comm->size == 1) return;
    snprintf(hash, sizeof hash, "%08x", checkpoint_weights_hash(&weights, table->elements, ctx));
    comm_check_same(comm, "the weights to begin with (CRC-32)", hash);
}

#endif
