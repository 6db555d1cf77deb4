/* The readers of binary files of tokens and weights, as in fuzz_readers.h. */
#ifndef FUZZ_BINARY_H
#define FUZZ_BINARY_H

#include "dev/data/corpus_files.h"
#include "fuzz_readers.h"
#include "llmc/bert/batch_mlm.h"
#include "llmc/choices/choice_files.h"
#include "llmc/data/batch_lm.h"
#include "llmc/import/llmc_files.h"

// ---------------------------------------------------------------------------------------------------------
// Token shards: whatever is read without an error is a token

static void shards_seeds(CaseList* list) {
    int tokens[100];
    for (int i = 0; i < 100; i++) tokens[i] = i * 7 % FUZZ_V;
    for (int width = 2; width <= 4; width += 2) {
        shard_write("made/x", tokens, 100, width);
        seed_add_file(case_new(list), "input.bin", "made/x");
    }
    shard_write("made/x", tokens, 9, 2);
    seed_add_file(case_new(list), "input.bin", "made/x");
}

// The count is that of the file again.
static void shards_settle(Case* c, int outermost) {
    (void)outermost;
    Text* t = &c->file[0].bytes;
    if (t->length < SHARD_HEADER_BYTES) return;
    int32_t magic;
    memcpy(&magic, t->text, sizeof magic);
    uint64_t count = (t->length - SHARD_HEADER_BYTES) / (magic == SHARD_MAGIC_UINT32 ? 4 : 2);
    memcpy(t->text + 8, &count, sizeof count);
}

static void shards_read_case(void) {
    enum { B = 3 };
    Shards s;
    BatchLm b;
    ReadError error = {0, NULL};
    int inputs[B * FUZZ_T], targets[B * FUZZ_T], arrays[3 * B * FUZZ_T + 1];
    Documents documents;
    shards_open(&s, CASE_DIR "/input.bin");
    batch_lm_init(&b, &s, B, FUZZ_T, FUZZ_V, 1, SHUFFLED);
    documents_place(&documents, arrays, B * FUZZ_T);
    uint64_t windows = batch_lm_windows(&b);
    for (uint64_t i = 0; i < windows + 2 && i < 64 && !error.message; i += B) {
        batch_lm_read(&b, i, inputs, targets, &error);
        for (int k = 0; k < B * FUZZ_T && !error.message; k++)
            if (inputs[k] < 0 || inputs[k] >= FUZZ_V || targets[k] < 0 || targets[k] >= FUZZ_V)
                fuzz_broken("tokens %d and %d of %d", inputs[k], targets[k], FUZZ_V);
        documents_find(&documents, inputs, B, FUZZ_T, FUZZ_V - 1);
        if (documents.count < B || documents.count > B * FUZZ_T || documents.longest > FUZZ_T)
            fuzz_broken("%d documents", documents.count);
    }
    shards_fingerprint(&s);
    batch_lm_free(&b);
    shards_close(&s);
    read_error_end(&error);
}

// ---------------------------------------------------------------------------------------------------------
// Files of sentences: every batch is made of real tokens

static void sentences_seed(CaseList* list, int V, const char* name, Case* into) {
    enum { TOKENS = 120, SENTENCES = 24, DOCUMENTS = 4 };
    int tokens[TOKENS];
    uint32_t begin[SENTENCES + 1], first[DOCUMENTS + 1], *continues;
    SentencesHeader h = {TOKENS, SENTENCES, DOCUMENTS, V, 0, 1, 2, 3, 4};
    continues = (uint32_t*)xcalloc((size_t)sentences_words(V), sizeof *continues);
    continues[0] = 0xF000;
    for (int i = 0; i < TOKENS; i++) tokens[i] = 5 + i * 11 % (FUZZ_V - 5);
    for (uint32_t i = 0; i <= SENTENCES; i++) begin[i] = i * (TOKENS / SENTENCES);
    for (uint32_t i = 0; i <= DOCUMENTS; i++) first[i] = i * i * SENTENCES / (DOCUMENTS * DOCUMENTS);
    if (sentences_write("made/x", h, tokens, begin, first, continues) != 0) fuzz_broken("made/x: %s", strerror(errno));
    seed_add_file(into ? into : case_new(list), name, "made/x");
    free(continues);
}

static void sentences_seeds(CaseList* list) {
    sentences_seed(list, FUZZ_V, "input.bin", NULL);
    sentences_seed(list, 70000, "input.bin", NULL);
}

// The number of tokens is what the file's size leaves for them.
static void sentences_settle(Case* c, int outermost) {
    (void)outermost;
    Text* t = &c->file[0].bytes;
    if (t->length < SHARD_HEADER_BYTES) return;
    int32_t header[11];
    memcpy(header, t->text, sizeof header);
    if (header[5] < 1 || header[5] > SENTENCES_MAX_VOCABULARY) return;
    uint64_t rest = 4 * ((uint64_t)(uint32_t)header[3] + (uint32_t)header[4] + 2 + sentences_words(header[5]));
    if (rest > t->length - SHARD_HEADER_BYTES) return;
    header[2] = (int32_t)((t->length - SHARD_HEADER_BYTES - rest) / (header[1] == SENTENCES_VERSION_UINT32 ? 4 : 2));
    memcpy(t->text, header, sizeof header);
}

static void sentences_check(const MlmBatch* b, const MlmData* data) {
    int V = data->text.vocabulary.V;
    for (int i = 0; i < b->rows; i++)
        if (b->tokens[i] < 0 || b->tokens[i] >= V || b->types[i] < 0 || b->types[i] > 1 || b->sequence[i] >= b->count ||
            b->position[i] < 0 || b->position[i] >= data->T)
            fuzz_broken("row %d: token %d of %d", i, b->tokens[i], V);
    for (int i = 0; i < b->masked; i++)
        if (b->masked_rows[i] <= (i ? b->masked_rows[i - 1] : -1) || b->masked_rows[i] >= b->rows ||
            b->targets[i] < 0 || b->targets[i] >= V)
            fuzz_broken("mask %d is in row %d of %d", i, b->masked_rows[i], b->rows);
    if (b->cu_seqlens[b->count] != b->rows || b->max_length > data->T) fuzz_broken("%d rows", b->rows);
}

static void sentences_read_case(void) {
    enum { B = 2, T = 24 };
    static const MlmRecipe recipes[] = {{4, 0.15, 0, 1, 0, 0.1}, {6, 0.3, 1, 0, 3, 0.5}};
    for (size_t k = 0; k < COUNT_OF(recipes); k++) {
        MlmData data;
        MlmBatch b;
        ReadError error = {0, NULL};
        mlm_open(&data, CASE_DIR "/input.bin", T, recipes[k], 1);
        for (uint64_t i = 0; i < data.text.documents; i++)
            for (uint32_t n = data.text.document[i].sentences, first = 0; first < n || n == 0; first++)
                if (n == 0 || sentences_length(&data.text, i, first, first + 1) == 0)
                    fuzz_broken("document %d", (int)i);
        mlm_batch_alloc(&b, B, T, recipes[k].max_predictions);
        for (uint64_t i = 0; i < 2 * mlm_sequences(&data) && i < 32 && !error.message; i += B) {
            mlm_batch_read(&b, &data, i, B, &error);
            if (!error.message) sentences_check(&b, &data);
        }
        mlm_fingerprint(&data);
        mlm_batch_free(&b);
        mlm_close(&data);
        read_error_end(&error);
    }
}

// ---------------------------------------------------------------------------------------------------------
// Multiple-choice sets: every example is inside the file, and of tokens

static void multiple_choice_seeds(CaseList* list) {
    for (int endings = 1; endings <= 4; endings += 3) {
        int32_t header[SHARD_HEADER_INTS] = {SHARD_MAGIC_EVALUATION, MULTIPLE_CHOICE_VERSION, 5};
        Text t = {NULL, 0, 0};
        text_append(&t, (const char*)header, sizeof header);
        for (uint16_t i = 0; i < 5; i++) {
            uint16_t words[128] = {MULTIPLE_CHOICE_BEGIN, 0, i, (uint16_t)(i % endings), (uint16_t)endings};
            size_t n = 5;
            for (uint16_t text = 0; text <= endings; text++) {
                words[n++] = (uint16_t)(1 + (i + text) % 5);
                for (uint16_t k = words[n - 1]; k > 0; k--) words[n++] = (uint16_t)(i * k + text);
            }
            words[1] = (uint16_t)(2 * n);
            text_append(&t, (const char*)words, 2 * n);
        }
        case_add(case_new(list), "input.bin", t.text, t.length);
        free(t.text);
    }
}

// The number and the bytes of each example are right, as far as lengths lead from one to the next.
static void multiple_choice_settle(Case* c, int outermost) {
    Text* t = &c->file[0].bytes;
    (void)outermost;
    if (t->length < SHARD_HEADER_BYTES) return;
    size_t n = (t->length - SHARD_HEADER_BYTES) / 2, at = 0;
    uint16_t* w = (uint16_t*)xmalloc(2 * n);
    memcpy(w, t->text + SHARD_HEADER_BYTES, 2 * n);
    for (uint16_t i = 0; at + 5 < n; i++) {
        size_t end = at + 5;
        for (int text = 0; text <= w[at + 4] && end < n; text++) end += 1 + (size_t)w[end];
        if (end > n) break;
        w[at] = MULTIPLE_CHOICE_BEGIN, w[at + 1] = (uint16_t)(2 * (end - at)), w[at + 2] = i;
        at = end;
    }
    memcpy(t->text + SHARD_HEADER_BYTES, w, 2 * n);
    free(w);
}

static void multiple_choice_read_case(void) {
    MultipleChoice c;
    multiple_choice_open(&c, CASE_DIR "/input.bin", FUZZ_V);
    for (int i = 0; i < c.count; i++) {
        MultipleChoiceExample e = multiple_choice_example(&c, i);
        MultipleChoiceText text = e.context;
        if (e.label >= e.endings) fuzz_broken("example %d: ending %d of %d", i, e.label, e.endings);
        for (int ending = 0;; ending++, text = multiple_choice_next(text)) {
            int length = e.context.length + (ending ? text.length : 0);
            if (text.length < 1 || (ending && (length > c.longest || text.length > c.longest_ending)))
                fuzz_broken("example %d has %d tokens, the longest %d", i, length, c.longest);
            for (int k = 0; k < text.length; k++)
                if (text.tokens[k] >= FUZZ_V) fuzz_broken("token %d of %d", text.tokens[k], FUZZ_V);
            if (ending == e.endings) break;
        }
    }
    multiple_choice_close(&c);
}

// ---------------------------------------------------------------------------------------------------------
// Checkpoints of llm.c

// A model of one layer, 4 channels, 40 tokens and 8 positions.
static void llmc_seed(CaseList* list, const char* name, int version) {
    int32_t header[LLMC_HEADER_INTS] = {LLMC_MAGIC_WEIGHTS, version, 8, FUZZ_V, 1, 2, 4, 48};
    LlmcWeights w;
    Text t = {NULL, 0, 0};
    memset(&w, 0, sizeof w);
    w.T = 8, w.V = FUZZ_V, w.L = 1, w.NH = 2, w.C = 4, w.Vp = 48, w.is_bfloat16 = version == LLMC_VERSION_BFLOAT16;
    text_append(&t, (const char*)header, sizeof header);
    for (uint64_t n = llmc_weights_place(&w), i = t.length; i < n; i += 2) {
        const uint16_t small = (uint16_t)(0x3c00 + i % 200);  // of either type
        text_append(&t, (const char*)&small, 2);
    }
    case_add(case_new(list), name, t.text, t.length);
    free(t.text);
}

static void llmc_seeds(CaseList* list) {
    llmc_seed(list, "input.bin", LLMC_VERSION_FLOAT32);
    llmc_seed(list, "input.bin", LLMC_VERSION_BFLOAT16);
}

static void llmc_read(void) {
    LlmcWeights w;
    struct stat info;
    llmc_weights_open(&w, CASE_DIR "/input.bin");
    if (stat(CASE_DIR "/input.bin", &info) != 0) fuzz_broken("the file is gone");
    for (int k = 0; k < LLMC_KINDS; k++) {
        const LlmcKind* kind = &w.kind[k];
        uint64_t end = kind->begin + kind->bytes * (uint64_t)(kind->in_layers ? w.L : 1);
        if (end > (uint64_t)info.st_size || kind->shape[0] * kind->shape[1] * (w.is_bfloat16 ? 2 : 4) > kind->bytes)
            fuzz_broken("kind %d ends at %llu", k, (unsigned long long)end);
    }
    llmc_weights_close(&w);
}

#endif
