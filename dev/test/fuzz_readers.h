/* The readers that the fuzzer tries: for each a few valid inputs to begin with, a function that reads what lies in the
 * directory case/ and checks what it was given, and, where an input holds its own checksums or counts, one that
 * corrects them, so that mutations get past them. */
#ifndef FUZZ_READERS_H
#define FUZZ_READERS_H

#include <dirent.h>

#include "fuzz_mutate.h"
#include "llmc/base/flags.h"
#include "llmc/base/log.h"
#include "llmc/checkpoint/loss_svg.h"
#include "llmc/data/safetensors.h"

typedef struct {
    const char* name;
    int share;    // of all inputs, in thousandths
    int batch;    // inputs of a process
    int answers;  // exit statuses, bit by bit, besides DONE and USAGE
    int files;    // 1: a run, which keeps its lock to its end; when it is refused its directory must stay as it is
    size_t most;  // bytes that may be asked for at once; 0: any number
    void (*seeds)(CaseList* list);
    void (*read)(void);
    void (*settle)(Case* c,
                   int outermost);  // 1: only the checksum over the others; NULL: there is nothing to make right
} Reader;

#define CASE_DIR "case"
enum { FUZZ_V = 40, FUZZ_T = 8, ANSWER_NAN = 1 << STOPPED_BY_NAN };

// ---------------------------------------------------------------------------------------------------------
// Inputs on the disk

static void case_write(const Case* c, const char* directory) {
    for (int i = 0; i < c->count; i++) {
        char* path = xprintf("%s/%s", directory, c->file[i].name);
        char* slash = strrchr(path, '/');
        *slash = '\0';
        make_directories(path);
        *slash = '/';
        int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
        if (fd < 0 || write_all(fd, c->file[i].bytes.text, c->file[i].bytes.length) != 0)
            fuzz_broken("%s: %s", path, strerror(errno));
        close(fd);
        free(path);
    }
}

// Add what `directory` holds, and its directories hold, in the order of names; names begin after `prefix` bytes.
static void case_read(Case* c, const char* directory, size_t prefix) {
    struct dirent** entries = NULL;
    int n = scandir(directory, &entries, NULL, alphasort);
    for (int i = 0; i < n; i++) {
        char* path = xprintf("%s/%s", directory, entries[i]->d_name);
        size_t length;
        if (is_directory(path)) {
            if (entries[i]->d_name[0] != '.') case_read(c, path, prefix);
        } else {
            char* bytes = read_file(path, SIZE_MAX, &length, FAILED);
            case_add(c, path + prefix, bytes, length);
            free(bytes);
        }
        free(path), free(entries[i]);
    }
    free(entries);
}

// Remove a directory with all that is in it.
static void remove_tree(const char* directory) {
    DIR* dir = opendir(directory);
    for (struct dirent* e = dir ? readdir(dir) : NULL; e; e = readdir(dir)) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0) continue;
        if (e->d_type != DT_DIR && unlinkat(dirfd(dir), e->d_name, 0) == 0) continue;
        char* path = xprintf("%s/%s", directory, e->d_name);
        if (is_directory(path)) remove_tree(path);
        free(path);
    }
    if (dir) closedir(dir);
    rmdir(directory);
}

// A text that ends where the file ends, without a NUL, so that a sanitizer sees what is read behind it.
static char* read_exactly(const char* path, size_t* n) {
    char *text = read_file(path, SIZE_MAX, n, USAGE), *exact = (char*)xmalloc(*n);
    memcpy(exact, text, *n);
    free(text);
    return exact;
}

static void seed_text(CaseList* list, const char* name, const char* text) {
    case_add(case_new(list), name, text, strlen(text));
}

// What a writer of the project has written to `path` becomes an input's file.
static void seed_add_file(Case* c, const char* name, const char* path) {
    size_t n;
    char* bytes = read_file(path, SIZE_MAX, &n, FAILED);
    case_add(c, name, bytes, n);
    free(bytes);
    unlink(path);
}

// The words of a text, one a line, as argv; the caller frees lines and words.
typedef struct {
    int count;
    char *text, **word;
} Lines;

static Lines lines_read(const char* path) {
    Lines l = {0, read_file(path, SIZE_MAX, NULL, USAGE), NULL};
    size_t n = strlen(l.text), capacity = 2;
    for (size_t i = 0; i < n; i++) capacity += l.text[i] == '\n';
    l.word = (char**)xcalloc(capacity, sizeof *l.word);
    for (char *at = l.text, *end; at < l.text + n; at = end + 1) {
        end = at + strcspn(at, "\n");
        l.word[l.count++] = at;
        if (*end == '\0') break;
        *end = '\0';
    }
    return l;
}

static void lines_free(Lines* l) { free(l->text), free(l->word); }

// ---------------------------------------------------------------------------------------------------------
// JSON: what was read and is written again reads as the same

static void json_seeds(CaseList* list) {
    static const char* const texts[] = {
        "{\"a\": 1, \"b\": [true, false, null], \"c\": {\"d\": \"\\u00e9\\ud83d\\ude00\\n\", \"\": -0.5e-3}}",
        "[0, -1, 1.5, 1e10, 9223372036854775807, \"x\", [], {}, [[[]]]]",
        "{\"k0\":0,\"k1\":1,\"k2\":2,\"k3\":3,\"k4\":4,\"k5\":5,\"k6\":6,\"k7\":7,\"k8\":8,\"k9\":9,\"k10\":10,"
        "\"k11\":11,\"k12\":12,\"k13\":13,\"k14\":14,\"k15\":15,\"k16\":16,\"k17\":17}",
        " \"text with \\\"quotes\\\" and \xe2\x82\xac\" ",
        "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]",
        "-12.25"};
    for (size_t i = 0; i < COUNT_OF(texts); i++) seed_text(list, "input.json", texts[i]);
}

static void json_write(Text* t, const JsonNode* node, int depth) {
    if (node->key) {
        text_json_string(t, node->key, node->key_length);
        text_append(t, ":", 1);
    }
    if (node->type == JSON_NULL) text_append(t, "null", 4);
    if (node->type == JSON_BOOL) text_printf(t, "%s", node->integer ? "true" : "false");
    if (node->type == JSON_NUMBER && node->is_integer) text_printf(t, "%lld", (long long)node->integer);
    if (node->type == JSON_NUMBER && !node->is_integer) text_printf(t, "%.17e", node->number);  // -0 stays no integer
    if (node->type == JSON_STRING) text_json_string(t, node->string, node->length);
    if (node->type != JSON_ARRAY && node->type != JSON_OBJECT) return;
    size_t count = 0;
    if (depth >= JSON_MAX_DEPTH) fuzz_broken("%d levels deep", depth);
    text_append(t, node->type == JSON_ARRAY ? "[" : "{", 1);
    for (const JsonNode* m = node->first; m; m = m->next) {
        if (count++) text_append(t, ",", 1);
        json_write(t, m, depth + 1);
        for (const JsonNode* other = m->key ? m->next : NULL; other; other = other->next)
            if (other->key_length == m->key_length && memcmp(other->key, m->key, m->key_length) == 0)
                fuzz_broken("the key %s occurs twice", m->key);
    }
    text_append(t, node->type == JSON_ARRAY ? "]" : "}", 1);
    if (count != node->count) fuzz_broken("%zu children of %zu", count, node->count);
}

static void json_read(void) {
    Json json, again;
    char error[JSON_ERROR_SIZE];
    Text first = {NULL, 0, 0}, second = {NULL, 0, 0};
    size_t n;
    char* text = read_exactly(CASE_DIR "/input.json", &n);
    if (json_parse(&json, text, n, error) != 0) die(USAGE, "%s", error);
    free(text);
    json_write(&first, json.root, 0);
    if (json_parse(&again, first.text, first.length, error) != 0)
        fuzz_broken("written again, it is refused: %s", error);
    json_write(&second, again.root, 0);
    if (first.length != second.length || memcmp(first.text, second.text, first.length) != 0)
        fuzz_broken("written again, it is another");
    json_free(&json), json_free(&again);
    free(first.text), free(second.text);
}

// ---------------------------------------------------------------------------------------------------------
// log.jsonl, cut back to a step

// Steps first .. first + count - 1, cut back to the one in the middle.
static void log_seed(CaseList* list, int64_t first, int count) {
    Log log;
    Case* c = case_new(list);
    Text settings = {NULL, 0, 0};
    char text[32];
    log_open(&log, "made", -1);
    text_printf(&settings, "{\"batch\": 4, \"output\": \"out\"}");
    log_line(&log, &settings);
    for (int i = 0; i < count; i++) {
        int64_t step = first + i, steps = first + count;
        LogStep s = {step, steps, 5.0 - i, 1e-3, i == 3 ? NAN : 1.0, 0.01, 1000, 0, (double)(i % 2), NULL, NULL};
        log_step(&log, &s);
        if (i % 2 == 0) log_validation(&log, step, steps, 4.0 - i, "\"accuracy\": 0.25");
    }
    log_close(&log);
    seed_add_file(c, "log.jsonl", "made/log.jsonl");
    snprintf(text, sizeof text, "%lld\n", (long long)(first + count / 2));
    case_add(c, "step.txt", text, strlen(text));
    free(settings.text);
}

static void log_seeds(CaseList* list) {
    log_seed(list, 1, 0);
    log_seed(list, 1, 5);
    log_seed(list, 1, 10);
    log_seed(list, INT64_MAX - 4, 3);
    log_seed(list, ((int64_t)1 << 53) - 60, 120);  // with a mean, and steps that are too large for a plot
}

static void log_read(void) {
    Log log;
    Text none = {NULL, 0, 0};
    Json line;
    char error[JSON_ERROR_SIZE];
    Lines step = lines_read(CASE_DIR "/step.txt");
    int64_t last = step.count ? strtoll(step.word[0], NULL, 10) : 0;
    lines_free(&step);
    if (last < 0) die(USAGE, "no step");
    log_open(&log, CASE_DIR, last);
    text_append(&none, "{}", 2);
    log_line(&log, &none);
    log_write_svg(&log, "<fuzz> & \xff");
    if (log.train.count > 1 && log.train.step[log.train.count - 1] > last) fuzz_broken("a loss behind the last step");
    log_close(&log);
    free(none.text);
    Lines kept = lines_read(CASE_DIR "/log.jsonl");
    for (int i = 0; i < kept.count; i++) {
        if (json_parse(&line, kept.word[i], strlen(kept.word[i]), error) != 0) fuzz_broken("line %d: %s", i + 1, error);
        const JsonNode* number = json_get(line.root, "step");
        if (number && !(number->is_integer && number->integer <= last))
            fuzz_broken("line %d is of another step", i + 1);
        json_free(&line);
    }
    if (kept.count == 0) fuzz_broken("the new line is not there");
    lines_free(&kept);
}

// ---------------------------------------------------------------------------------------------------------
// safetensors

static void safetensors_seed(CaseList* list, int metadata, const char* const* dtypes, int count) {
    SafeTensorsWriter w;
    const uint64_t shapes[] = {(uint64_t)(metadata ? 2 : 0), 3, 1, 4};  // also tensors of no elements
    char bytes[2 * 3 * 4 * 8];
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (char)(7 * i);
    safetensors_writer_create(&w, "made/x");
    if (metadata) safetensors_writer_metadata(&w, "format", "pt");
    for (int i = 0; i < count; i++) {
        char name[32];
        snprintf(name, sizeof name, "block.%d.weight", i);
        safetensors_writer_add(&w, name, dtypes[i], i % 5, shapes);
    }
    safetensors_writer_begin(&w);
    for (int i = 0; i < count; i++) {
        uint64_t n = (uint64_t)safetensors_element_size(dtypes[i]);
        for (int k = 0; k < i % 5; k++) n *= shapes[k];
        safetensors_writer_append(&w, bytes, (size_t)n);
    }
    if (safetensors_writer_finish(&w) != 0) fuzz_broken("made/x: %s", strerror(errno));
    seed_add_file(case_new(list), "input.safetensors", "made/x");
}

static void safetensors_seeds(CaseList* list) {
    static const char* const dtypes[] = {"BF16", "F32", "F16", "F64", "I64", "U8", "F32", "BOOL"};
    safetensors_seed(list, 1, dtypes, COUNT_OF(dtypes));
    safetensors_seed(list, 0, dtypes, 3);
    safetensors_seed(list, 1, dtypes, 0);
}

// The data is as long as the header says.
static void safetensors_settle(Case* c, int outermost) {
    (void)outermost;
    Text* t = &c->file[0].bytes;
    Json json;
    char error[JSON_ERROR_SIZE];
    uint64_t n = 0, end = 0;
    memcpy(&n, t->text, t->length < sizeof n ? 0 : sizeof n);
    if (t->length < sizeof n || n > t->length - sizeof n ||
        json_parse(&json, t->text + sizeof n, (size_t)n, error) != 0)
        return;
    for (const JsonNode* m = json.root->first; m; m = m->next) {
        const JsonNode* offsets = json_get(m, "data_offsets");
        const JsonNode* last = offsets && offsets->first ? offsets->first->next : NULL;
        if (last && last->integer > 0 && (uint64_t)last->integer > end) end = (uint64_t)last->integer;
    }
    size_t data = sizeof n + (size_t)n, has = t->length - data;
    char* zeros = (char*)xcalloc(CASE_LARGEST, 1);
    if (end <= CASE_LARGEST && end < has) text_splice(t, data + (size_t)end, has - (size_t)end, NULL, 0);
    if (end <= CASE_LARGEST && end > has) text_splice(t, t->length, 0, zeros, (size_t)end - has);
    free(zeros);
    json_free(&json);
}

static void safetensors_read(void) {
    SafeTensors file;
    struct stat info;
    safetensors_open(&file, CASE_DIR "/input.safetensors");
    if (stat(CASE_DIR "/input.safetensors", &info) != 0) fuzz_broken("the file is gone");
    uint64_t total = 0, size = (uint64_t)info.st_size, first = size;
    for (int i = 0; i < file.count; i++) {
        const SafeTensor* t = &file.tensors[i];
        if (t->end > size || t->begin > t->end || t->elements > size ||
            t->end - t->begin != t->elements * (uint64_t)t->element_size)
            fuzz_broken("%s is at %llu", t->name, (unsigned long long)t->begin);
        const SafeTensor* found = safetensors_find(&file, t->name);
        if (!found || strcmp(found->name, t->name) != 0) fuzz_broken("%s is not found", t->name);
        total += t->end - t->begin;
        if (t->begin < first) first = t->begin;
        if (t->dtype[0] != 'F' && t->dtype[0] != 'B') continue;
        if (strcmp(t->dtype, "BOOL") == 0 || t->element_size == 1) continue;
        real* values = (real*)xmalloc((size_t)t->elements * sizeof(real));
        safetensors_read_real(t, 0, (size_t)t->elements, values);
        free(values);
    }
    if (total != size - first)
        fuzz_broken("%llu bytes of tensors in %llu", (unsigned long long)total, (unsigned long long)(size - first));
    if (safetensors_find(&file, "no such tensor")) fuzz_broken("a tensor that there is not");
    safetensors_close(&file);
}

#endif
