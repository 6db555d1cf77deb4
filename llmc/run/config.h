/* A model's config.json as rows: the same rows read it, check it and write it. */
#ifndef LLMC_CONFIG_H
#define LLMC_CONFIG_H

#include "../base/json.h"

typedef enum { CONFIG_INT, CONFIG_REAL, CONFIG_BOOL } ConfigType;

#define CONFIG_NEEDED NAN             // as a fallback: the key must be there
#define CONFIG_NO_FIELD ((size_t)-1)  // as a field: the value must be min = max, nothing else is supported

typedef struct {
    const char* key;
    ConfigType type;
    size_t field;     // offsetof an int (CONFIG_INT, CONFIG_BOOL) or a double (CONFIG_REAL)
    double fallback;  // of a key that is absent or null
    double min, max;  // inclusive
} ConfigRow;

static inline void config_refuse(const ConfigRow* row, double value, const char* source) {
    if (row->type == CONFIG_REAL)
        die(USAGE, "%s: key \"%s\": %g is out of range; allowed: %g..%g", source, row->key, value, row->min, row->max);
    die(USAGE, "%s: key \"%s\": %.0f is out of range; allowed: %.0f..%.0f", source, row->key, value, row->min,
        row->max);
}

// Hold the whole numbers of a `config` that came from elsewhere to the limits of the rows.
static inline void config_rows_check(const void* config, const ConfigRow* rows, size_t count, const char* source) {
    for (size_t i = 0; i < count; i++) {
        int value;
        if (rows[i].type != CONFIG_INT || rows[i].field == CONFIG_NO_FIELD) continue;
        memcpy(&value, (const char*)config + rows[i].field, sizeof value);
        if (value < rows[i].min || value > rows[i].max) config_refuse(&rows[i], value, source);
    }
}

// Fill the fields of `config`; ends with USAGE and the key's name where a value is missing, of a wrong type or refused.
static inline void config_rows_read(void* config, const ConfigRow* rows, size_t count, const JsonNode* json,
                                    const char* file) {
    for (size_t i = 0; i < count; i++) {
        const ConfigRow* row = &rows[i];
        double value = row->fallback;
        if (isnan(row->fallback) || json_has(json, row->key))
            value = row->type == CONFIG_INT    ? (double)json_get_int(json, row->key, file)
                    : row->type == CONFIG_BOOL ? (double)json_get_bool(json, row->key, file)
                                               : json_get_double(json, row->key, file);
        if (!(value >= row->min && value <= row->max)) {
            if (row->field == CONFIG_NO_FIELD)
                die(USAGE, "%s: key \"%s\": only %s is supported", file, row->key, row->min ? "true" : "false");
            config_refuse(row, value, file);
        }
        if (row->field == CONFIG_NO_FIELD) continue;
        char* field = (char*)config + row->field;
        int whole = (int)value;
        if (row->type == CONFIG_REAL) memcpy(field, &value, sizeof value);
        else memcpy(field, &whole, sizeof whole);
    }
}

// Append the rows that have a field as members of an object.
static inline void config_rows_write(Text* t, const void* config, const ConfigRow* rows, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (rows[i].field == CONFIG_NO_FIELD) continue;
        const char* field = (const char*)config + rows[i].field;
        double value;
        int whole;
        memcpy(&value, field, rows[i].type == CONFIG_REAL ? sizeof value : 0);
        memcpy(&whole, field, sizeof whole);
        if (rows[i].type == CONFIG_REAL) json_put_number(t, rows[i].key, value);
        else if (rows[i].type == CONFIG_INT) json_put_integer(t, rows[i].key, whole);
        else json_put_bool(t, rows[i].key, whole);
    }
}

// A size that a descriptor names.
typedef struct {
    const char* name;
    int* value;
} ConfigSize;

// "L=4,C=128,...": whole numbers from 0 to 2^24. Returns 0, or -1 where the text is anything else.
static inline int config_sizes_read(const ConfigSize* sizes, size_t count, const char* text) {
    for (const char* p = text; *p;) {
        size_t n = strcspn(p, "=,"), k = 0;
        while (k < count && (strlen(sizes[k].name) != n || strncmp(p, sizes[k].name, n) != 0)) k++;
        if (k == count || p[n] != '=') return -1;
        const char* digits = p + n + 1;
        size_t length = strspn(digits, "0123456789");
        if (length < 1 || length > 8 || (digits[length] != ',' && digits[length] != '\0')) return -1;
        long value = strtol(digits, NULL, 10);
        if (value > 1 << 24) return -1;
        *sizes[k].value = (int)value;
        p = digits + length + (digits[length] == ',');
    }
    return 0;
}

#endif
