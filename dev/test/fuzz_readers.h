/* The readers that the fuzzer tries: for each a function that reads what lies in the directory case/ and checks what it
 * was given. Valid inputs to begin with are in dev/test/corpus/READER, which is corpus/ here. Binary files of one
 * header (shards, sentences, choices) have every byte of it changed in their own tests, by expect_any_damage(). */
#ifndef FUZZ_READERS_H
#define FUZZ_READERS_H

#include <dirent.h>

#include "apps/tune/labelled.h"
#include "apps/tune/squad.h"
#include "apps/use/bpe.h"
#include "dev/test/child.h"
#include "fuzz.h"
#include "fuzz_mutate.h"
#include "llmc/base/flags.h"
#include "llmc/base/log.h"
#include "llmc/checkpoint/loss_svg.h"
#include "llmc/checkpoint/resume.h"
#include "llmc/data/safetensors.h"
#include "llmc/text/tokenizer.h"
#include "llmc/text/wordpiece.h"

#define CASE_DIR "case"
enum { TASK_T = 16, TASK_LABELS = 3 };

// A text that ends where the file ends, without a NUL, so that a sanitizer sees what is read behind it.
static char* read_exactly(const char* path, size_t* n) {
    char *text = read_file(path, SIZE_MAX, n, USAGE), *exact = (char*)xmalloc(*n);
    memcpy(exact, text, *n);
    free(text);
    return exact;
}

// ---------------------------------------------------------------------------------------------------------
// JSON, the log, weights

static void json_walk(const JsonNode* node, int depth) {
    CHECK(depth <= JSON_MAX_DEPTH);
    for (const JsonNode* m = node->first; m; m = m->next) {
        CHECK(!m->key || strlen(m->key) != m->key_length || json_get(node, m->key) == m);
        json_walk(m, depth + 1);
    }
}

static void json_read(void) {
    Json json;
    char error[JSON_ERROR_SIZE];
    size_t n;
    char* text = read_exactly(CASE_DIR "/input.json", &n);
    if (json_parse(&json, text, n, error) != 0) die(USAGE, "%s", error);
    free(text);
    json_walk(json.root, 0);
    json_free(&json);
}

static void log_read(void) {
    Log log;
    char* step = read_file(CASE_DIR "/step.txt", SIZE_MAX, NULL, USAGE);
    int64_t last = strtoll(step, NULL, 10);
    free(step);
    if (last < 0) die(USAGE, "no step");
    log_open(&log, CASE_DIR, last);
    log_write_svg(&log, "<fuzz> & \xff");
    CHECK(log.train.count < 2 || log.train.step[log.train.count - 1] <= last);
    log_close(&log);
}

static void safetensors_read(void) {
    SafeTensors file;
    struct stat info;
    safetensors_open(&file, CASE_DIR "/input.safetensors");
    CHECK(stat(CASE_DIR "/input.safetensors", &info) == 0);
    for (int i = 0; i < file.count; i++) {
        const SafeTensor* t = &file.tensors[i];
        CHECK(t->begin <= t->end && t->end <= (uint64_t)info.st_size);
        CHECK(t->end - t->begin == t->elements * (uint64_t)t->element_size && safetensors_find(&file, t->name));
        if ((t->dtype[0] != 'F' && strcmp(t->dtype, "BF16") != 0) || t->element_size == 1) continue;
        real* values = (real*)xmalloc((size_t)t->elements * sizeof(real));
        safetensors_read_real(t, 0, (size_t)t->elements, values);
        free(values);
    }
    safetensors_close(&file);
}

// ---------------------------------------------------------------------------------------------------------
// Tokenizers: the tokens of a text are the text

static void bpe_read(void) {
    Bpe b;
    Tokenizer t;
    size_t n, length;
    int* ids;
    if (tokenizer_open(&t, CASE_DIR) != 0) die(USAGE, "no tokenizer");
    for (int id = -1; id <= min_int(t.size, 4096); id++) {
        const char* bytes = tokenizer_decode(&t, id, &n);
        CHECK(!bytes || (bytes >= t.bytes.text && bytes + n <= t.bytes.text + t.bytes.length));
    }
    if (!file_exists(CASE_DIR "/gpt2_tokenizer.bin") && bpe_open(&b, CASE_DIR) == 0) {
        char* text = read_exactly(CASE_DIR "/text.txt", &n);
        size_t count = bpe_encode(&ids, &b, text, n, AS_TOKEN);
        for (size_t i = 0; i < count; i++) CHECK(tokenizer_decode(&t, ids[i], &length));
        free(text), free(ids);
        bpe_free(&b);
    }
    tokenizer_free(&t);
}

static WordPiece words_of(const char* directory) {
    WordPiece w;
    if (wordpiece_open(&w, directory, CASE_OF_MODEL) != 0) die(USAGE, "no vocabulary");
    return w;
}

static void wordpiece_read(void) {
    WordPiece w = words_of(CASE_DIR);
    size_t n;
    TokenIds ids = {NULL, 0, 0};
    Text decoded = {NULL, 0, 0};
    char* text = read_exactly(CASE_DIR "/text.txt", &n);
    wordpiece_encode(&ids, &w, text, n);
    for (size_t i = 0; i < ids.count; i++) CHECK(ids.id[i] >= 0 && ids.id[i] < w.size);
    wordpiece_decode(&decoded, &w, ids.id, ids.count);
    free(text), free(ids.id), free(decoded.text);
    wordpiece_free(&w);
}

// ---------------------------------------------------------------------------------------------------------
// Examples of tasks

// Sequences of tokens, each with a class from `least` on or with two positions in it.
static void examples_check(const Examples* e, const WordPiece* w, int least) {
    for (int i = 0; i < e->count; i++) {
        const int *label = e->label + 2 * i, *tokens = e->tokens + e->begin[i];
        int n = examples_length(e, i), most = e->targets == 1 ? TASK_LABELS : n;
        CHECK(n >= 2 && n <= TASK_T && e->second[i] >= 1 && e->second[i] <= n);
        for (int k = 0; k < n; k++) CHECK(tokens[k] >= 0 && tokens[k] < w->size);
        for (int k = 0; k < e->targets; k++) CHECK(label[k] >= least && label[k] < most);
    }
}

// Texts that need labels, or need none: by the file's size.
static void labelled_read_case(void) {
    const char* path = CASE_DIR "/texts.txt";
    WordPiece w = words_of("corpus/wordpiece/uncased");
    Examples e;
    LabelNames names = {NULL, 0};
    size_t size;
    free(read_file(path, SIZE_MAX, &size, USAGE));
    int may_lack = size % 2;
    if (may_lack) label_names_add(&names, "yes", 3);
    else labelled_find_names(&names, path, TASK_LABELS);
    labelled_read(&e, path, &w, &names, TASK_LABELS, TASK_T, may_lack);
    examples_check(&e, &w, -may_lack);
    examples_close(&e), label_names_free(&names), wordpiece_free(&w);
}

// Whatever a model says, its answers are JSON, and scores are shares.
static void squad_read_case(void) {
    WordPiece w = words_of("corpus/wordpiece/uncased");
    for (int use = SQUAD_EVALUATE; use <= SQUAD_TRAIN; use++) {
        SquadSettings settings = {TASK_T, 3, 4, 5, (SquadUse)use};
        Squad s;
        Examples e;
        Json answers;
        real logits[2 * TASK_T];
        squad_open(&s, &e, CASE_DIR "/questions.json", &w, settings);
        examples_check(&e, &w, 0);
        for (int k = 0; k < 2 * TASK_T; k++) logits[k] = (real)(k * 7 % 13);
        for (int i = 0; i < e.count; i++) squad_take(&s, &e, i, logits, 2);
        SquadScore all = squad_score(&s);
        CHECK(all.exact >= 0 && all.exact <= 100 && all.f1 >= 0 && all.f1 <= 100);
        squad_write(&s, "answers.json");
        json_load(&answers, "answers.json", SIZE_MAX);
        json_free(&answers);
        squad_close(&s), examples_close(&e);
    }
    wordpiece_free(&w);
}

// ---------------------------------------------------------------------------------------------------------
// Flags, models and runs, as the trainers read them

// Either trainer's file, "gpt2..." or "bert...", whichever the input has.
static void trainer_read(FuzzReader reader, const char* suffix) {
    for (int is_bert = 0; is_bert < 2; is_bert++) {
        char* path = xprintf(CASE_DIR "/%s%s", is_bert ? "bert" : "gpt2", suffix);
        if (file_exists(path)) {
            (is_bert ? FUZZ_BERT : FUZZ_GPT2)[reader](path);
            return;
        }
        free(path);
    }
    die(USAGE, "no file");
}

static void command_line_read(void) { trainer_read(FUZZ_COMMAND_LINE, ".txt"); }
static void model_read(void) { trainer_read(FUZZ_MODEL, ""); }
static void checkpoint_read(void) { trainer_read(FUZZ_RUN, ""); }

// What a run of two steps leaves in case/gpt2 or case/bert.
static void checkpoint_make(void* is_bert) {
    (*(int*)is_bert ? FUZZ_BERT : FUZZ_GPT2)[FUZZ_MAKE](*(int*)is_bert ? CASE_DIR "/bert" : CASE_DIR "/gpt2");
}

// Manifests vouch for what the mutations left.
static void checkpoint_seal(void) {
    static const char* const directories[] = {"gpt2/ckpt/00000001", "gpt2/ckpt/00000002", "bert/ckpt/00000002"};
    for (size_t i = 0; i < COUNT_OF(directories); i++) {
        char *directory = xprintf(CASE_DIR "/%s", directories[i]), *manifest = xprintf("%s/manifest.json", directory);
        if (file_exists(manifest)) unlink(manifest), checkpoint_write_manifest(directory, NULL, 0);
        free(directory), free(manifest);
    }
}

// ---------------------------------------------------------------------------------------------------------

typedef struct {
    const char* name;
    int share;    // of all inputs, in thousandths
    int is_run;   // it may find NaN, and keeps its lock to its end; when it is refused its directory stays as it is
    size_t most;  // bytes that may be asked for at once; 0: any number
    void (*read)(void);
    void (*make)(void* which);  // makes valid input 0 or 1 in case/; NULL: they are those of the corpus
    void (*seal)(void);         // corrects checksums in case/; NULL: there are none
} Reader;

// clang-format off
static const Reader READERS[] = {
    {"json",         160, 0, (size_t)16 << 20,  json_read, NULL, NULL},
    {"log",           80, 0, (size_t)64 << 20,  log_read, NULL, NULL},
    {"command_line", 140, 0, 0,                 command_line_read, NULL, NULL},
    {"safetensors",  140, 0, (size_t)16 << 20,  safetensors_read, NULL, NULL},
    {"bpe",          140, 0, (size_t)1 << 30,   bpe_read, NULL, NULL},
    {"wordpiece",     60, 0, (size_t)64 << 20,  wordpiece_read, NULL, NULL},
    {"labelled",      80, 0, (size_t)64 << 20,  labelled_read_case, NULL, NULL},
    {"squad",         60, 0, (size_t)64 << 20,  squad_read_case, NULL, NULL},
    {"model",        100, 1, 0,                 model_read, NULL, NULL},
    {"checkpoint",    40, 1, 0,                 checkpoint_read, checkpoint_make, checkpoint_seal},
};
// clang-format on

#endif
