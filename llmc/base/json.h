/* JSON: a strict reader (RFC 8259) that builds a tree, and look-ups in it. json_write.h writes JSON.
 *
 * Strict means: one value and nothing after it, no trailing commas, no NaN or Infinity, no number beyond the range of a
 * double, valid UTF-8, no lone surrogates, no duplicate keys, at most 64 levels deep. The files read here
 * (configurations, vocabularies, safetensors headers) decide what a run does, so a file that two readers could
 * understand in two ways is refused, with line and column.
 *
 * The tree lives in memory owned by Json: nodes point at one another and at strings, and json_free() frees them all. A
 * file of n bytes takes up to n bytes for strings and about 50 n for nodes: callers limit n. */
#ifndef LLMC_BASE_JSON_H
#define LLMC_BASE_JSON_H

#include "llmc/base/json_write.h"
#include "llmc/base/utf8.h"
#include "llmc/base/util.h"

enum { JSON_MAX_DEPTH = 64, JSON_ERROR_SIZE = 160 };

typedef enum { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } JsonType;

typedef struct JsonNode {
    JsonType type;
    int is_integer;   // a number without fraction or exponent that fits `integer`
    const char* key;  // of a member of an object, else NULL; NUL-terminated, but may contain NULs
    size_t key_length;
    const char* string;  // the bytes of a string (UTF-8, NUL-terminated), or a number as written; else NULL
    size_t length;
    double number;
    int64_t integer;         // value of an integer; 0 or 1 for a bool
    size_t count;            // children of an array or object
    size_t offset;           // in the text: of the value, or of the key for a member
    struct JsonNode* first;  // child: for (node = array->first; node; node = node->next)
    struct JsonNode* next;   // in the parent
} JsonNode;

typedef struct JsonBlock {
    struct JsonBlock* next;
    size_t used, capacity;  // in nodes; they follow this header
} JsonBlock;

typedef struct {
    JsonNode* root;
    char* strings;
    JsonBlock* blocks;
} Json;

static inline void json_free(Json* json) {
    while (json->blocks) {
        JsonBlock* next = json->blocks->next;
        free(json->blocks);
        json->blocks = next;
    }
    free(json->strings);
    json->strings = NULL;
    json->root = NULL;
}

// ---------------------------------------------------------------------------------------------------------
// Reading

typedef struct {
    const char* text;
    size_t n, at;
    char* string_end;  // where the next string goes; a string is shorter here than in the text
    Json* json;
    char* error;
} JsonParser;

// Store what is wrong at byte `at`. Always returns -1, so that callers can return it.
__attribute__((format(printf, 3, 4))) static inline int json_fail(JsonParser* p, size_t at, const char* format, ...) {
    size_t line = 1, column = 1;
    for (size_t i = 0; i < at; i++) {
        if (p->text[i] == '\n') line++, column = 1;
        else if (((unsigned char)p->text[i] & 0xC0) != 0x80) column++;
    }
    int n = snprintf(p->error, JSON_ERROR_SIZE, "line %zu column %zu: ", line, column);
    va_list args;
    va_start(args, format);
    vsnprintf(p->error + n, (size_t)(JSON_ERROR_SIZE - n), format, args);
    va_end(args);
    return -1;
}

static inline JsonNode* json_new_node(Json* json) {
    JsonBlock* b = json->blocks;
    if (!b || b->used == b->capacity) {
        size_t capacity = b ? min_size(2 * b->capacity, 4096) : 16;
        b = (JsonBlock*)xmalloc(sizeof(JsonBlock) + capacity * sizeof(JsonNode));
        b->next = json->blocks, b->used = 0, b->capacity = capacity;
        json->blocks = b;
    }
    JsonNode* node = (JsonNode*)(b + 1) + b->used++;
    memset(node, 0, sizeof(*node));
    return node;
}

// The next byte that is not white space, without consuming it; -1 at the end.
static inline int json_peek(JsonParser* p) {
    while (p->at < p->n) {
        char c = p->text[p->at];
        if (c != ' ' && c != '\n' && c != '\r' && c != '\t') return (unsigned char)c;
        p->at++;
    }
    return -1;
}

// The value of the four hexadecimal digits of a \u escape at `at`; -1 if they are not there.
static inline int json_hex4(const JsonParser* p, size_t at) {
    if (at + 4 > p->n) return -1;
    int code = 0;
    for (size_t i = at; i < at + 4; i++) {
        char c = p->text[i], letter = (char)(c | 0x20);
        if (c >= '0' && c <= '9') code = 16 * code + (c - '0');
        else if (letter >= 'a' && letter <= 'f') code = 16 * code + (letter - 'a' + 10);
        else return -1;
    }
    return code;
}

// Decode the escape whose backslash is at p->at to *out.
static inline int json_escape(JsonParser* p, char** out) {
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    size_t start = p->at;
    char c = p->at + 1 < p->n ? p->text[p->at + 1] : '\0';
    const char* simple = c ? strchr(names, c) : NULL;
    if (simple) {
        *(*out)++ = values[simple - names];
        p->at += 2;
        return 0;
    }
    if (c != 'u') return json_fail(p, start, "unknown escape in a string");
    int code = json_hex4(p, p->at + 2);
    if (code < 0) return json_fail(p, start, "\\u needs four hexadecimal digits");
    p->at += 6;
    if (code >= 0xD800 && code <= 0xDFFF) {
        int paired = code <= 0xDBFF && p->at + 1 < p->n && p->text[p->at] == '\\' && p->text[p->at + 1] == 'u';
        int low = paired ? json_hex4(p, p->at + 2) : -1;
        if (low < 0xDC00 || low > 0xDFFF) return json_fail(p, start, "half of a surrogate pair");
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
        p->at += 6;
    }
    *out += utf8_encode(*out, (uint32_t)code);
    return 0;
}

// Read the string whose opening quote is at p->at.
static inline int json_string(JsonParser* p, const char** string, size_t* length) {
    size_t start = p->at++;
    char* out = p->string_end;
    *string = out;
    for (;;) {
        if (p->at >= p->n) return json_fail(p, start, "a string that begins here does not end");
        unsigned char c = (unsigned char)p->text[p->at];
        if (c == '"') break;
        if (c == '\\') {
            if (json_escape(p, &out) != 0) return -1;
            continue;
        }
        if (c < 0x20) return json_fail(p, p->at, "control character 0x%02x in a string; it must be escaped", c);
        size_t bytes = utf8_length(p->text + p->at, p->n - p->at);
        if (bytes == 0) return json_fail(p, p->at, "byte 0x%02x is not valid UTF-8", c);
        for (size_t i = 0; i < bytes; i++) *out++ = p->text[p->at++];
    }
    p->at++;
    *length = (size_t)(out - *string);
    *out++ = '\0';
    p->string_end = out;
    return 0;
}

static inline size_t json_digits(JsonParser* p) {
    size_t start = p->at;
    while (p->at < p->n && p->text[p->at] >= '0' && p->text[p->at] <= '9') p->at++;
    return p->at - start;
}

// Skip the next byte if it is `a` or `b`. Returns whether it was.
static inline int json_skip(JsonParser* p, char a, char b) {
    int is = p->at < p->n && (p->text[p->at] == a || p->text[p->at] == b);
    p->at += (size_t)is;
    return is;
}

static inline int json_number(JsonParser* p, JsonNode* node) {
    size_t start = p->at, first = start + (size_t)json_skip(p, '-', '-'), whole = json_digits(p);
    if (whole == 0) return json_fail(p, start, "expected a value; a '-' must be followed by digits");
    if (whole > 1 && p->text[first] == '0') return json_fail(p, start, "a number must not begin with 0");
    int has_fraction = json_skip(p, '.', '.');
    if (has_fraction && json_digits(p) == 0) return json_fail(p, start, "a decimal point must be followed by digits");
    int has_exponent = json_skip(p, 'e', 'E');
    if (has_exponent) json_skip(p, '+', '-');
    if (has_exponent && json_digits(p) == 0) return json_fail(p, start, "an exponent must have digits");
    node->type = JSON_NUMBER;
    node->length = p->at - start;
    node->string = p->string_end;
    memcpy(p->string_end, p->text + start, node->length);
    p->string_end += node->length;
    *p->string_end++ = '\0';
    if (!has_fraction && !has_exponent) {
        errno = 0;
        node->integer = (int64_t)strtoll(node->string, NULL, 10);
        node->is_integer = errno == 0;
        if (!node->is_integer) node->integer = 0;
    }
    node->number = node->integer ? (double)node->integer : strtod(node->string, NULL);
    if (!isfinite(node->number)) return json_fail(p, start, "a number beyond the range of a double");
    return 0;
}

static inline int json_compare_keys(const void* left, const void* right) {
    const JsonNode *a = *(const JsonNode*const*)left, *b = *(const JsonNode*const*)right;
    if (a->key_length != b->key_length) return a->key_length < b->key_length ? -1 : 1;
    int order = memcmp(a->key, b->key, a->key_length);
    return order ? order : a->offset < b->offset ? -1 : 1;
}

// A member with the key of an earlier one, or NULL. The keys are sorted: a vocabulary of 50,257 takes 20 ms.
static inline const JsonNode* json_duplicate(const JsonNode* object) {
    const JsonNode *found = NULL, **keys = (const JsonNode**)xmalloc(object->count * sizeof *keys);
    size_t n = 0;
    for (const JsonNode* m = object->first; m; m = m->next) keys[n++] = m;
    qsort(keys, n, sizeof *keys, json_compare_keys);
    for (size_t i = 1; i < n && !found; i++)
        if (keys[i - 1]->key_length == keys[i]->key_length &&
            memcmp(keys[i - 1]->key, keys[i]->key, keys[i]->key_length) == 0)
            found = keys[i];
    free(keys);
    return found;
}

static inline int json_value(JsonParser* p, JsonNode* node, int depth);

// Read the array or object whose opening bracket is at p->at.
static inline int json_children(JsonParser* p, JsonNode* node, int depth) {
    size_t start = p->at;
    int is_object = p->text[p->at++] == '{', close = is_object ? '}' : ']';
    node->type = is_object ? JSON_OBJECT : JSON_ARRAY;
    if (depth >= JSON_MAX_DEPTH) return json_fail(p, start, "more than %d levels deep", JSON_MAX_DEPTH);
    JsonNode** link = &node->first;
    for (int c = json_peek(p); c != close || node->count;) {
        JsonNode* child = json_new_node(p->json);
        if (node->count && c == close) return json_fail(p, p->at, "a comma before '%c'", close);
        child->offset = p->at;
        if (is_object) {
            if (c != '"')
                return json_fail(p, p->at, "expected a key in double quotes%s", c < 0 ? ", but the text ends" : "");
            if (json_string(p, &child->key, &child->key_length) != 0) return -1;
            if (json_peek(p) != ':') return json_fail(p, p->at, "expected ':' after a key");
            p->at++;
        }
        if (json_value(p, child, depth + 1) != 0) return -1;
        *link = child;
        link = &child->next;
        node->count++;
        c = json_peek(p);
        if (c == close) break;
        if (c != ',') return json_fail(p, p->at, "expected ',' or '%c'%s", close, c < 0 ? ", but the text ends" : "");
        p->at++;
        c = json_peek(p);
    }
    p->at++;
    const JsonNode* twice = is_object ? json_duplicate(node) : NULL;
    if (twice) {
        Text key = {NULL, 0, 0};
        text_json_string(&key, twice->key, twice->key_length);
        json_fail(p, twice->offset, "the key %.80s occurs twice", key.text);
        free(key.text);
        return -1;
    }
    return 0;
}

static inline int json_value(JsonParser* p, JsonNode* node, int depth) {
    int c = json_peek(p);
    if (!node->key) node->offset = p->at;
    if (c < 0) return json_fail(p, p->at, "expected a value, but the text ends");
    if (c == '{' || c == '[') return json_children(p, node, depth);
    if (c == '-' || (c >= '0' && c <= '9')) return json_number(p, node);
    if (c == '"') {
        node->type = JSON_STRING;
        return json_string(p, &node->string, &node->length);
    }
    static const char* const words[] = {"null", "false", "true"};
    for (int w = 0; w < 3; w++) {
        size_t n = strlen(words[w]);
        if (p->n - p->at < n || memcmp(p->text + p->at, words[w], n) != 0) continue;
        node->type = w == 0 ? JSON_NULL : JSON_BOOL;
        node->integer = w == 2;
        p->at += n;
        return 0;
    }
    return json_fail(p, p->at, "expected a value");
}

// Read `n` bytes of text, which need no NUL at the end and may be freed afterwards. Returns 0, or -1 with "line L
// column C: what" in `error` and nothing to free.
static inline int json_parse(Json* out, const char* text, size_t n, char error[JSON_ERROR_SIZE]) {
    memset(out, 0, sizeof(*out));
    error[0] = '\0';
    out->strings = (char*)xmalloc(n + 1);
    JsonParser p;
    p.text = text, p.n = n, p.at = 0, p.string_end = out->strings, p.json = out, p.error = error;
    out->root = json_new_node(out);
    int bad =
        utf8_mark(text, n) ? json_fail(&p, 0, "a byte order mark; save it without") : json_value(&p, out->root, 0);
    if (!bad && json_peek(&p) >= 0) bad = json_fail(&p, p.at, "something follows the end of the value");
    if (bad) json_free(out);
    return bad;
}

// Read a file of at most `limit` bytes; dies if it cannot be read or is not JSON.
static inline void json_load(Json* out, const char* path, size_t limit) {
    size_t n;
    char error[JSON_ERROR_SIZE];
    char* text = read_file(path, limit, &n, USAGE);
    if (json_parse(out, text, n, error) != 0) die(USAGE, "%s: is not valid JSON: %s", path, error);
    free(text);
}

// ---------------------------------------------------------------------------------------------------------
// Look-ups

static inline const char* json_type_name(JsonType type) {
    static const char* const names[] = {"null", "true or false", "a number", "a string", "an array", "an object"};
    return names[type];
}

// The member `key`, NULL if there is none or `object` is not an object. Walks the list: for objects with few keys.
static inline const JsonNode* json_get(const JsonNode* object, const char* key) {
    size_t n = strlen(key);
    if (!object || object->type != JSON_OBJECT) return NULL;
    for (const JsonNode* m = object->first; m; m = m->next)
        if (m->key_length == n && memcmp(m->key, key, n) == 0) return m;
    return NULL;
}

// The member `key`, which must exist and have this type; else dies naming the file and the key.
static inline const JsonNode* json_need(const JsonNode* object, const char* key, JsonType type, const char* file) {
    const JsonNode* m = json_get(object, key);
    if (!m) die(USAGE, "%s: key \"%s\": missing; %s is needed", file, key, json_type_name(type));
    if (m->type != type)
        die(USAGE, "%s: key \"%s\": is %s, but %s is needed", file, key, json_type_name(m->type), json_type_name(type));
    return m;
}

// Whether `key` exists and is not null. Files write optional settings both ways.
static inline int json_has(const JsonNode* object, const char* key) {
    const JsonNode* m = json_get(object, key);
    return m && m->type != JSON_NULL;
}

static inline const char* json_get_string(const JsonNode* object, const char* key, const char* file) {
    const JsonNode* m = json_need(object, key, JSON_STRING, file);
    if (strlen(m->string) != m->length) die(USAGE, "%s: key \"%s\": the string contains \\u0000", file, key);
    return m->string;
}

static inline int64_t json_get_int(const JsonNode* object, const char* key, const char* file) {
    const JsonNode* m = json_need(object, key, JSON_NUMBER, file);
    if (!m->is_integer) die(USAGE, "%s: key \"%s\": is %.40s, but a whole number is needed", file, key, m->string);
    return m->integer;
}

static inline double json_get_double(const JsonNode* object, const char* key, const char* file) {
    return json_need(object, key, JSON_NUMBER, file)->number;
}

static inline int json_get_bool(const JsonNode* object, const char* key, const char* file) {
    return (int)json_need(object, key, JSON_BOOL, file)->integer;
}

// The same for optional keys: `fallback` if absent or null; another type dies as above.
static inline const char* json_get_string_or(const JsonNode* object, const char* key, const char* fallback,
                                             const char* file) {
    return json_has(object, key) ? json_get_string(object, key, file) : fallback;
}

static inline int64_t json_get_int_or(const JsonNode* object, const char* key, int64_t fallback, const char* file) {
    return json_has(object, key) ? json_get_int(object, key, file) : fallback;
}

static inline double json_get_double_or(const JsonNode* object, const char* key, double fallback, const char* file) {
    return json_has(object, key) ? json_get_double(object, key, file) : fallback;
}

static inline int json_get_bool_or(const JsonNode* object, const char* key, int fallback, const char* file) {
    return json_has(object, key) ? json_get_bool(object, key, file) : fallback;
}

#endif
