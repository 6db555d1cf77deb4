/* trainer.json: all that a checkpoint keeps of a run besides weights and moments. Its values are rows, as flags are:
 * name, type, address. The settings are one more member, which settings_restore() restores. */
#ifndef LLMC_CHECKPOINT_STATE_H
#define LLMC_CHECKPOINT_STATE_H

#include <float.h>
#include <limits.h>

#include "llmc/base/json.h"
#include "llmc/run/state.h"

// ---------------------------------------------------------------------------------------------------------
// The settings of a resumed run. A checkpoint's settings take precedence over flags. A flag that contradicts them is an
// error, because it would silently turn the run into a different one.

// The text of a saved value. What is now --fp8 1 was 2; another 1, without GPT-2's output matrix, has fewer scales
// (fp8_state_set). --graph had a third choice; --loss-scale was a choice, and its number a flag of its own.
static inline const char* settings_saved_text(const Flag* row, const JsonNode* saved, const char* file) {
    if (!saved->string) die(USAGE, "%s: key \"%s\": is not a setting's value", file, row->long_name + 2);
    if (strcmp(row->long_name, "--fp8") == 0 && strcmp(saved->string, "2") == 0) return "1";
    if (strcmp(row->long_name, "--graph") == 0 && strcmp(saved->string, "auto") == 0) return "0";
    if (strcmp(row->long_name, "--loss-scale") != 0) return saved->string;
    if (strcmp(saved->string, "fixed") == 0)
        die(USAGE, "%s: the run has --loss-scale fixed, which was removed; -e starts a new run from its model", file);
    return strcmp(saved->string, "auto") == 0      ? "-1"
           : strcmp(saved->string, "off") == 0     ? "0"
           : strcmp(saved->string, "dynamic") == 0 ? "65536"
                                                   : saved->string;
}

// Check a flag of the command line against the saved value. Both are compared as the flag prints them, so 1e-3 equals
// 0.001.
static inline void settings_check_given(const Flag* row, const char* saved, int may_differ, const char* file) {
    char was[FLAG_TEXT_SIZE], is[FLAG_TEXT_SIZE], error[FLAG_ERROR_SIZE];
    Flag copy = *row;
    double number;
    int index;
    int64_t size;
    const char* string = NULL;
    copy.value = copy.type == FLAG_REAL     ? (void*)&number
                 : copy.type == FLAG_STRING ? (void*)&string
                 : copy.type == FLAG_SIZE   ? (void*)&size
                                            : (void*)&index;
    if (flags_assign(&copy, saved, error) != 0) die(USAGE, "%s: %s", file, error);
    flags_format_value(&copy, was, sizeof was);
    flags_format_value(row, is, sizeof is);
    const char* was_text = copy.type == FLAG_STRING ? string : was;
    const char* is_text = copy.type == FLAG_STRING ? *(const char* const*)row->value : is;
    if (strcmp(was_text, is_text) != 0 && !may_differ)
        die(USAGE, "%s %s contradicts the run that is resumed (%s has %s); leave it out, or add --override 1",
            row->long_name, is_text, file, was_text);
}

// Refuse saved settings with a retired flag that had an effect.
static inline void settings_refuse_retired(Flag* rows, int count, const JsonNode* settings, const char* file) {
    for (size_t i = 0; i < COUNT_OF(FLAGS_RETIRED); i++) {
        const RetiredFlag* r = &FLAGS_RETIRED[i];
        const JsonNode* saved = json_get(settings, r->long_name + 2);
        if (!saved || !r->values || flags_find(rows, count, r->long_name, strlen(r->long_name))) continue;
        int index;
        char error[FLAG_ERROR_SIZE];
        Flag row = {.long_name = r->long_name, .type = FLAG_CHOICE, .value = &index, .choices = r->values};
        const char* text = settings_saved_text(&row, saved, file);
        if (strcmp(text, r->values) != 0 && flags_assign(&row, text, error) != 0)
            die(USAGE,
                "%s: the run has %s '%.80s'; that flag was removed, and only '%s' can go on; -e starts a new run from "
                "its weights",
                file, r->long_name, text, r->values);
    }
}

// Restore the rows from saved `settings`, an object that flags_to_json() wrote. Flags of SCOPE_PROCESS and SCOPE_RANK
// keep their values; others take the saved value. If such a flag is on the command line, it wins if it is SCOPE_FREE or
// `override` is set; otherwise it must equal the saved value.
static inline void settings_restore(Flag* rows, int count, const JsonNode* settings, int override, const char* file) {
    char error[FLAG_ERROR_SIZE];
    settings_refuse_retired(rows, count, settings, file);
    for (int i = 0; i < count; i++) {
        Flag* row = &rows[i];
        const JsonNode* saved = json_get(settings, row->long_name + 2);
        if (!saved || row->scope == SCOPE_PROCESS || row->scope == SCOPE_RANK) continue;
        const char* text = settings_saved_text(row, saved, file);
        if (row->is_set & FLAG_IS_GIVEN) settings_check_given(row, text, override || row->scope == SCOPE_FREE, file);
        else if (flags_set(row, text, error) != 0) die(USAGE, "%s: %s", file, error);
    }
}

typedef enum { STATE_COUNT, STATE_REAL, STATE_DOUBLE, STATE_TEXT, STATE_WINDOW } StateType;

// A value of trainer.json. The name "best.loss" is the key "loss" in the object "best".
typedef struct {
    const char* name;
    StateType type;  // of *value: int64_t from 0 to `most`, real from 0 to FLT_MAX, double, char*, OutlierWindow
    void* value;
    int64_t most;
    int is_saved;   // 0: left out
    int is_needed;  // 1: every checkpoint has it. Without another value, *value stays as it is
} StateRow;

enum { STATE_ROWS = 16 };

// The rows of `s`, after the step is known.
static inline void state_rows(SavedState* s, StateRow rows[STATE_ROWS]) {
    const StateRow all[STATE_ROWS] = {
        {"step", STATE_COUNT, &s->step, INT64_MAX, 1, 1},
        {"samples", STATE_COUNT, &s->samples, INT64_MAX, 1, 1},
        {"train_data_fingerprint", STATE_COUNT, &s->data, UINT32_MAX, 1, 1},
        {"step_sequences", STATE_COUNT, &s->step_sequences, INT_MAX, 1, 0},
        {"ranks", STATE_COUNT, &s->ranks, INT_MAX, 1, 0},
        {"shards", STATE_COUNT, &s->shards, INT_MAX, 1, 0},
        {"updates", STATE_COUNT, &s->scale.updates, s->step, 1, 1},
        {"loss_scale", STATE_REAL, &s->scale.scale, 0, s->scale.scale > 0, 0},
        {"loss_scale_good_steps", STATE_COUNT, &s->scale.good, s->step, s->scale.scale > 0, 0},
        {"outliers.loss", STATE_WINDOW, &s->outliers.loss, 0, s->has_outliers, 0},
        {"outliers.norm", STATE_WINDOW, &s->outliers.norm, 0, s->has_outliers, 0},
        {"best.judged", STATE_COUNT, &s->best.judged, INT64_MAX, s->best.judged > 0, 0},
        {"best.step", STATE_COUNT, &s->best.step, INT64_MAX, s->best.judged > 0, 0},
        {"best.loss", STATE_DOUBLE, &s->best.loss, 0, s->best.judged > 0, 0},
        {"fp8", STATE_TEXT, &s->fp8, 0, s->fp8 != NULL, 0},
        {"matmul_plans", STATE_TEXT, &s->matmul_plans, 0, 1, 0},
    };
    memcpy(rows, all, sizeof all);
}

// Length of the name of the row's object; 0: none.
static inline size_t state_row_object(const StateRow* row) {
    const char* dot = strchr(row->name, '.');
    return dot ? (size_t)(dot - row->name) : 0;
}

static inline void state_row_put(Text* t, const StateRow* row, const char* key) {
    if (row->type == STATE_COUNT) json_put_integer(t, key, *(const int64_t*)row->value);
    if (row->type == STATE_REAL) json_put_number(t, key, (double)*(const real*)row->value);
    if (row->type == STATE_DOUBLE) json_put_number(t, key, *(const double*)row->value);
    if (row->type == STATE_TEXT) json_put_string(t, key, *(char* const*)row->value);
    if (row->type == STATE_WINDOW) outlier_window_put(t, key, (const OutlierWindow*)row->value);
}

// Append the members of the state's object.
static inline void state_put(Text* t, SavedState* s) {
    StateRow rows[STATE_ROWS];
    size_t open = 0;  // length of the open object's name
    state_rows(s, rows);
    for (int i = 0; i < STATE_ROWS; i++) {
        const StateRow* row = &rows[i];
        size_t n = state_row_object(row);
        int is_in = open && n == open && strncmp(row->name, rows[i - 1].name, n) == 0;
        if (open && !is_in) text_append(t, "}", 1), open = 0;
        if (!row->is_saved) continue;
        if (n && !is_in) {
            char object[16];
            snprintf(object, sizeof object, "%.*s", (int)n, row->name);
            json_put_key(t, object);
            text_append(t, "{", 1);
            open = n;
        }
        state_row_put(t, row, row->name + (n ? n + 1 : 0));
    }
}

// Read a value that the checkpoint has.
static inline void state_row_get(const StateRow* row, const JsonNode* object, const char* key, const char* file) {
    if (row->type == STATE_COUNT) {
        int64_t n = json_get_int(object, key, file);
        if (n < 0 || n > row->most)
            die(USAGE, "%s: key \"%s\": is %lld; allowed: 0..%lld", file, row->name, (long long)n,
                (long long)row->most);
        *(int64_t*)row->value = n;
    } else if (row->type == STATE_REAL) {
        // At most FLT_MAX, because the largest --loss-scale, 3e38, is 3.00000006e38 as a float.
        double x = json_get_double(object, key, file);
        if (!(x >= 0 && x <= FLT_MAX))
            die(USAGE, "%s: key \"%s\": is %g; allowed: 0..%g", file, row->name, x, (double)FLT_MAX);
        *(real*)row->value = (real)x;
    } else if (row->type == STATE_DOUBLE) {
        *(double*)row->value = json_get_double(object, key, file);
    } else if (row->type == STATE_TEXT) {
        *(char**)row->value = xprintf("%s", json_get_string(object, key, file));
    } else {
        outlier_window_get((OutlierWindow*)row->value, object, key, file);
    }
}

// Read what state_put() wrote into the object `root`. s->step is set.
static inline void state_get(SavedState* s, const JsonNode* root, const char* file) {
    StateRow rows[STATE_ROWS];
    state_rows(s, rows);
    for (int i = 0; i < STATE_ROWS; i++) {
        const StateRow* row = &rows[i];
        char name[16];
        size_t n = state_row_object(row);
        snprintf(name, sizeof name, "%.*s", (int)n, row->name);
        const JsonNode* object = n ? json_get(root, name) : root;
        const char* key = row->name + (n ? n + 1 : 0);
        // An object has all of its values.
        if (row->is_needed || (n && object) || (object && json_has(object, key))) state_row_get(row, object, key, file);
    }
    Best b = s->best;
    if (b.step > b.judged || (b.step > 0 && !isfinite(b.loss)))
        die(USAGE, "%s: key \"best\": is not the state of a run's validations", file);
}

#endif
