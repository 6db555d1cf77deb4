/* A model's config.json as a table: the same rows read, check and write it. */
#ifndef LLMC_MODEL_CONFIG_H
#define LLMC_MODEL_CONFIG_H

#include "llmc/base/json.h"
#include "llmc/data/safetensors.h"
#include "llmc/device/device.h"

// CONFIG_TOKEN is a token ID. A null in the file is read as -1. CONFIG_GELU is the name of an activation.
typedef enum { CONFIG_INT, CONFIG_REAL, CONFIG_BOOL, CONFIG_TOKEN, CONFIG_GELU } ConfigType;

#define CONFIG_NEEDED NAN                  // as a fallback: the key is required
#define CONFIG_MAX_FILE ((size_t)1 << 26)  // bytes; there may be many class names
#define CONFIG_NO_FIELD ((size_t)-1)       // as a field: the value must be min = max, the only one supported

typedef struct {
    const char* key;
    ConfigType type;
    size_t field;      // offsetof a double (CONFIG_REAL) or an int (all others)
    double fallback;   // if the key is absent, or null (except for CONFIG_TOKEN)
    double min, max;   // inclusive
    const char* size;  // its name in a descriptor, such as L; NULL: none
} ConfigRow;

static inline void config_refuse(const ConfigRow* row, double value, const char* source) {
    if (row->type == CONFIG_REAL)
        die(USAGE, "%s: key \"%s\": %g is out of range; allowed: %g..%g", source, row->key, value, row->min, row->max);
    die(USAGE, "%s: key \"%s\": %.0f is out of range; allowed: %.0f..%.0f", source, row->key, value, row->min,
        row->max);
}

// The field with this name in a descriptor, such as C; NULL: no row has it.
static inline int* config_size(void* config, const ConfigRow* rows, size_t count, const char* size) {
    for (size_t i = 0; i < count; i++)
        if (rows[i].size && strcmp(rows[i].size, size) == 0) return (int*)((char*)config + rows[i].field);
    return NULL;
}

// Check a `config` from any source: integers against the limits of the rows, tokens against V, and that the heads
// divide C. An F of 0 becomes 4 C.
static inline void config_rows_check(void* config, const ConfigRow* rows, size_t count, const char* source) {
    const int *C = config_size(config, rows, count, "C"), *NH = config_size(config, rows, count, "NH"),
              *V = config_size(config, rows, count, "V");
    int* F = config_size(config, rows, count, "F");
    if (C && F && *F == 0) *F = 4 * *C;
    for (size_t i = 0; i < count; i++) {
        int value;
        if (rows[i].field == CONFIG_NO_FIELD || rows[i].type == CONFIG_REAL) continue;
        memcpy(&value, (const char*)config + rows[i].field, sizeof value);
        if (rows[i].type == CONFIG_INT && (value < rows[i].min || value > rows[i].max))
            config_refuse(&rows[i], value, source);
        if (rows[i].type == CONFIG_TOKEN && V && value >= *V)
            die(USAGE, "%s: key \"%s\": %d is not below vocab_size, %d", source, rows[i].key, value, *V);
    }
    if (C && NH && *C % *NH != 0) die(USAGE, "%s: %d channels cannot be cut into %d heads", source, *C, *NH);
}

// The activation named by `key`, or `fallback` if the key is absent.
static inline Gelu config_gelu(const JsonNode* json, const char* key, Gelu fallback, const char* file) {
    const char* name = json_get_string_or(json, key, fallback == GELU_ERF ? "gelu" : "gelu_new", file);
    if (strcmp(name, "gelu") == 0) return GELU_ERF;
    if (strcmp(name, "gelu_new") != 0 && strcmp(name, "gelu_pytorch_tanh") != 0)
        die(USAGE, "%s: key \"%s\": \"%s\" is not supported; gelu_new, gelu_pytorch_tanh and gelu are", file, key,
            name);
    return GELU_TANH;
}

static inline double config_row_value(const ConfigRow* row, const JsonNode* json, const char* file) {
    if (row->type == CONFIG_GELU) return config_gelu(json, row->key, (Gelu)row->fallback, file);
    const JsonNode* node = json_get(json, row->key);
    if (row->type == CONFIG_TOKEN && node && node->type == JSON_NULL) return -1;
    if (!isnan(row->fallback) && !json_has(json, row->key)) return row->fallback;
    if (row->type == CONFIG_REAL) return json_get_double(json, row->key, file);
    return row->type == CONFIG_BOOL ? (double)json_get_bool(json, row->key, file)
                                    : (double)json_get_int(json, row->key, file);
}

// Fill the fields of `config`, and check it. If a value is missing, has a wrong type or is out of range, report its key
// and exit with USAGE.
static inline void config_rows_read(void* config, const ConfigRow* rows, size_t count, const JsonNode* json,
                                    const char* file) {
    for (size_t i = 0; i < count; i++) {
        const ConfigRow* row = &rows[i];
        double value = config_row_value(row, json, file);
        if (row->type == CONFIG_TOKEN && value == -1 && json_has(json, row->key)) config_refuse(row, value, file);
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
    config_rows_check(config, rows, count, file);
}

// Append the rows that have a field as members of a JSON object.
static inline void config_rows_write(Text* t, const void* config, const ConfigRow* rows, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (rows[i].field == CONFIG_NO_FIELD) continue;
        const char* field = (const char*)config + rows[i].field;
        double value;
        int whole;
        memcpy(&value, field, rows[i].type == CONFIG_REAL ? sizeof value : 0);
        memcpy(&whole, field, sizeof whole);
        if (rows[i].type == CONFIG_REAL) json_put_number(t, rows[i].key, value);
        else if (rows[i].type == CONFIG_GELU) json_put_string(t, rows[i].key, whole == GELU_TANH ? "gelu_new" : "gelu");
        else if (rows[i].type == CONFIG_TOKEN && whole < 0) json_put_number(t, rows[i].key, NAN);  // null
        else if (rows[i].type != CONFIG_BOOL) json_put_integer(t, rows[i].key, whole);
        else json_put_bool(t, rows[i].key, whole);
    }
}

// The text of a config.json with these rows. `keys`: other members; freed. Its text may be NULL: none.
static inline Text config_text(const char* architecture, const char* model_type, Text keys, const void* config,
                               const ConfigRow* rows, size_t count) {
    Text t = {NULL, 0, 0};
    text_printf(&t, "{\"architectures\": [\"%s\"], \"model_type\": \"%s\"", architecture, model_type);
    if (keys.text) text_printf(&t, ", %s", keys.text);
    config_rows_write(&t, config, rows, count);
    json_put_string(&t, "dtype", safetensors_dtype_name(FLOATX_NAME));
    text_printf(&t, "}\n");
    free(keys.text);
    return t;
}

// Check that `key` has `value`, the only one supported, which is also the default of an absent key.
static inline void config_expect(const JsonNode* json, const char* key, const char* value, const char* file) {
    const char* text = json_get_string_or(json, key, value, file);
    if (strcmp(text, value) != 0)
        die(USAGE, "%s: key \"%s\": is \"%s\", but this trainer reads \"%s\"", file, key, text, value);
}

// A published model: its name, and its sizes as a descriptor.
typedef struct {
    const char *name, *sizes;
} ConfigPublished;

// Set the fields that a descriptor "L=4,C=128,..." names to its integers, from 0 to 2^24, and flags to 0 or 1. Returns
// 0, or -1 if the text is anything else.
static inline int config_sizes_read(void* config, const ConfigRow* rows, size_t count, const char* text) {
    for (const char* p = text; *p;) {
        size_t n = strcspn(p, "=,"), k = 0;
        while (k < count && (!rows[k].size || strlen(rows[k].size) != n || strncmp(p, rows[k].size, n) != 0)) k++;
        if (k == count || p[n] != '=') return -1;
        const char* digits = p + n + 1;
        size_t length = strspn(digits, "0123456789");
        if (length < 1 || length > 8 || (digits[length] != ',' && digits[length] != '\0')) return -1;
        long value = strtol(digits, NULL, 10);
        if (value > (rows[k].type == CONFIG_BOOL ? 1 : 1 << 24)) return -1;
        int whole = (int)value;
        memcpy((char*)config + rows[k].field, &whole, sizeof whole);
        p = digits + length + (digits[length] == ',');
    }
    return 0;
}

// Set the sizes that -e gives, as a published model's name or a descriptor, in `config`, which has the defaults, and
// check it. Exits with USAGE if the text is neither. `allowed` completes the message.
static inline void config_sizes_find(void* config, const ConfigRow* rows, size_t count,
                                     const ConfigPublished* published, size_t published_count, const char* text,
                                     const char* allowed) {
    const char* expanded = text;
    for (size_t i = 0; i < published_count; i++)
        if (strcmp(text, published[i].name) == 0) expanded = published[i].sizes;
    if (config_sizes_read(config, rows, count, expanded) == 0) {
        char* source = xprintf("-e %s", text);
        config_rows_check(config, rows, count, source);
        free(source);
        return;
    }
    if (strchr(text, '/') && !file_exists(text))
        die(USAGE, "-e %s: no such file or directory; a model on the Hub is hub:ORGANIZATION/MODEL", text);
    die(USAGE,
        "-e %s: is neither a model directory, a .safetensors file, hub:NAME of a model on the Hub, %s (V, F and "
        "tied=0|1 may follow)",
        text, allowed);
}

#endif
