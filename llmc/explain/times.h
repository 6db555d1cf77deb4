/* The time of each op in a profile of the same model (OUT/profile/kernels.csv, which --profile writes). */
#ifndef LLMC_EXPLAIN_TIMES_H
#define LLMC_EXPLAIN_TIMES_H

#include "llmc/device/scope.h"

// The rows of one op: one layer, one direction, and shapes without the number of tokens, in which the profiled batch
// and the text differ.
typedef struct {
    char key[160];
    double ms;
} ExplainTime;

typedef struct {
    char* file;  // NULL: there is no profile
    ExplainTime* times;
    size_t count, capacity;
} ExplainTimes;

// "forward 3 matmul_forward IC=768 OC=2304".
static inline void explain_time_key(char key[160], const char* direction, const char* layer, const char* op,
                                    const char* shapes) {
    int n = snprintf(key, 160, "%.20s %.8s %.40s", direction, layer, op);
    for (const char* s = shapes; *s;) {
        size_t length = strcspn(s, " ");
        int is_weight = strncmp(s, "IC=", 3) == 0 || strncmp(s, "OC=", 3) == 0 || strncmp(s, "C=", 2) == 0;
        if (is_weight && length < 20) n += snprintf(key + n, (size_t)(160 - n), " %.*s", (int)length, s);
        s += length + (s[length] == ' ');
    }
}

// Cut the next field off a line of CSV, quotes removed. Returns NULL at the end of the line.
static inline char* explain_csv_field(char** line) {
    char *begin = *line, *to = begin, *from = begin;
    if (!begin) return NULL;
    int quoted = *from == '"';
    from += quoted;
    begin = to = from;
    while (*from && (quoted || *from != ',')) {
        if (quoted && *from == '"' && from[1] != '"') quoted = 0, from++;
        else from += quoted && *from == '"', *to++ = *from++;
    }
    *line = *from ? from + 1 : NULL;
    *to = '\0';
    return begin;
}

static inline void explain_times_add(ExplainTimes* t, const char* key, double ms) {
    size_t i = 0;
    while (i < t->count && strcmp(t->times[i].key, key) != 0) i++;
    if (i == t->count) {
        t->times = (ExplainTime*)array_reserve(t->times, &t->capacity, t->count + 1, sizeof *t->times);
        memset(&t->times[t->count++], 0, sizeof *t->times);
        snprintf(t->times[i].key, sizeof t->times[i].key, "%s", key);
    }
    t->times[i].ms += ms;
}

// Read the profile in `directory`, if there is one. Lines that are not rows of a profile are skipped.
static inline void explain_times_read(ExplainTimes* t, const char* directory) {
    enum { MOST_BYTES = 1 << 28, DIRECTION_AT = 1, LAYER_AT, OP_AT, SHAPES_AT, FIELDS = 24 };
    char* path = xprintf("%s/profile/kernels.csv", directory);
    size_t length, us = 0;
    if (!file_exists(path)) {
        free(path);
        return;
    }
    char *text = read_file(path, MOST_BYTES, &length, USAGE), *next = text;
    t->file = path;
    while (next && *next) {
        char *line = next, *end = strchr(line, '\n'), *field[FIELDS];
        size_t n = 0;
        if (end) *end = '\0';
        next = end ? end + 1 : NULL;
        while (n < FIELDS && (field[n] = explain_csv_field(&line))) n++;
        if (us && us < n) {
            char key[160];
            explain_time_key(key, field[DIRECTION_AT], field[LAYER_AT], field[OP_AT], field[SHAPES_AT]);
            explain_times_add(t, key, 1e-3 * strtod(field[us], NULL));
        }
        for (size_t i = 0; i < n && !us; i++) us = strcmp(field[i], "us") == 0 ? i : 0;  // the first line has the names
    }
    free(text);
}

static inline void explain_scope_key(char key[160], const ScopeRecord* r) {
    char layer[16] = "";
    if (r->layer >= 0) snprintf(layer, sizeof layer, "%d", r->layer);
    explain_time_key(key, direction_name(r->direction), layer, r->op, r->shapes);
}

// Milliseconds of record number i of the log in the profiled step. Ops of equal shapes in one layer share their time.
// NaN if the profile has no such op.
static inline double explain_time_of(const ExplainTimes* t, const ScopeLog* log, size_t i) {
    char key[160], other[160];
    int same = 0;
    explain_scope_key(key, &log->records[i]);
    for (size_t k = 0; k < log->count; k++) {
        explain_scope_key(other, &log->records[k]);
        same += strcmp(key, other) == 0;
    }
    for (size_t k = 0; k < t->count; k++)
        if (strcmp(t->times[k].key, key) == 0) return t->times[k].ms / same;
    return NAN;
}

static inline void explain_times_close(ExplainTimes* t) { free(t->file), free(t->times); }

#endif
