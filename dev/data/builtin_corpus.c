/* The corpus that comes with the project: stories about a small world (dev/data/world.h), whose entropy is known, and
 * an exam about them. The same bytes on every machine. No network, no Python.
 *
 *   builtin_corpus OUT_DIR [SEED [BLOCKS]]          default: seed 1, 100,000 blocks for training
 *
 * OUT_DIR gets
 *   train.bin, val.bin    token shards: whole blocks of 64 tokens, then one more end-of-text
 *   val_entropy.txt       the generator's own losses on val.bin. First line: tokens of a block, and the mean loss
 *                         that no model can beat, in nats a token. Then -log p of each block in nats, one a line
 *   exam.bin              questions as clozes (llmc/choices/choice_files.h). No story of the training set begins
 *                         with the text from the start of the question's story to the answer
 *   notlast.bin           such questions whose answer is a person or place, but not the last one named before it
 *   vocab.json, merges.txt, tokenizer.json, tokenizer_config.json   byte-level BPE, in which a word is a token
 *   bert/train.bin, bert/val.bin   the stories of both as sentences; a story is a document
 *   bert/exam.bin, bert/notlast.bin   the same questions; an ending is the answer and the rest of its sentence
 *   bert/vocab.txt, bert/tokenizer_config.json      WordPiece, in which a word is a token
 *   bert/val_unigram.txt  the mean loss on bert/val.bin, in nats a token, of a model that knows only how frequent each
 *                         token of bert/train.bin is */
#include <ctype.h>

#include "dev/data/corpus_files.h"
#include "dev/data/world.h"
#include "llmc/choices/choice_files.h"

enum { TRAIN_BLOCKS = 100000, MOST_BLOCKS = 50000000, VAL_BLOCKS = 2000, EXAM_QUESTIONS = 2000 };
// Blocks are numbered through; each set has its own part of the numbers.
static const uint64_t VAL_BEGINS = (uint64_t)1 << 40, EXAM_BEGINS = (uint64_t)1 << 41;

// ---------------------------------------------------------------------------------------------------------
// Tokens of words

enum { MOST_MERGES = 256, MOST_LETTERS = 16, PAD = 0, UNK, CLS, SEP, MASK, PIECES };

typedef struct {
    Merge merge[MOST_MERGES];
    Merges merges;
    int bare[WORDS], spaced[WORDS];  // without and with a space before; spaced of a punctuation mark is bare
    int end_of_text;
} Vocabulary;

static int merged(Vocabulary* v, int left, int right) {
    int i = 0;
    while (i < v->merges.count && (v->merge[i].left != left || v->merge[i].right != right)) i++;
    CHECK(i < MOST_MERGES);
    if (i == v->merges.count) v->merge[v->merges.count++] = (Merge){left, right};
    return 256 + i;
}

// Letters are joined from the left, then the space is. Long words come first, so that in "finds" the merge of "fi"
// comes before that of "in". The test encodes every word.
static void vocabulary_make(Vocabulary* v) {
    memset(v, 0, sizeof *v);
    v->merges.merge = v->merge;
    for (size_t length = MOST_LETTERS; length > 0; length--)
        for (int i = 0; i < WORDS; i++) {
            if (strlen(WORD[i]) != length) continue;
            v->bare[i] = (unsigned char)WORD[i][0];
            for (const char* p = WORD[i] + 1; *p; p++) v->bare[i] = merged(v, v->bare[i], (unsigned char)*p);
            v->spaced[i] = strchr(".?", WORD[i][0]) ? v->bare[i] : merged(v, ' ', v->bare[i]);
        }
    v->end_of_text = 256 + v->merges.count;
}

// The tokens of words, the first of which may begin a story.
static void vocabulary_encode(const Vocabulary* v, int* tokens, const int* words, int count, int begins) {
    for (int i = 0; i < count; i++) {
        if (words[i] == END_OF_STORY) tokens[i] = v->end_of_text;
        else tokens[i] = (i ? words[i - 1] == END_OF_STORY : begins) ? v->bare[words[i]] : v->spaced[words[i]];
    }
}

// BERT's vocabulary: the special tokens, the words, then the other printable characters, alone and inside words.
static Text vocabulary_lines(int* count, uint32_t* continues) {
    Text t = {NULL, 0, 0};
    text_printf(&t, "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n");
    for (int i = 0; i < WORDS; i++) text_printf(&t, "%s\n", WORD[i]);
    *count = PIECES + WORDS;
    for (int inside = 0; inside < 2; inside++)
        for (char c = '!'; c <= '~'; c++) {
            int is_word = 0;
            for (int i = 0; i < WORDS; i++) is_word |= WORD[i][0] == c && !WORD[i][1];
            if (inside ? !isalnum((unsigned char)c) : is_word) continue;
            text_printf(&t, inside ? "##%c\n" : "%c\n", c);
            if (inside) continues[*count / 32] |= 1u << (*count % 32);
            ++*count;
        }
    return t;
}

// ---------------------------------------------------------------------------------------------------------
// Exam

// Hashes of the beginnings of all stories of the training set that end with an answer.
typedef struct {
    uint64_t* hash;
    size_t count, capacity;
} Beginnings;

static uint64_t hash_words(const int* words, int count) {
    uint64_t hash = FNV_START;
    for (int i = 0; i < count; i++) hash = (hash ^ (uint64_t)words[i]) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 32;
}

static int story_start(const int* words, int at) {
    while (words[at - 1] != END_OF_STORY) at--;
    return at;
}

static void beginnings_add(Beginnings* b, const Block* block, int T) {
    for (int i = 1; i < T; i++) {
        if (!block->is_answer[i]) continue;
        b->hash = (uint64_t*)array_reserve(b->hash, &b->capacity, b->count + 1, sizeof *b->hash);
        int start = story_start(block->words, i);
        b->hash[b->count++] = hash_words(block->words + start, i + 1 - start);
    }
}

static int compare_hashes(const void* a, const void* b) {
    uint64_t x = *(const uint64_t*)a, y = *(const uint64_t*)b;
    return (x > y) - (x < y);
}

// Questions, as the words of a multiple-choice set.
typedef struct {
    Text words;
    int count;
    double chance;  // sum over the questions of 1 / possible answers
} Questions;

static void questions_add(Questions* q, const int* context, int context_length, const int* ending, int ending_length,
                          double chance) {
    int bytes = 2 * (7 + context_length + ending_length);
    const int head[] = {MULTIPLE_CHOICE_BEGIN, bytes, q->count & 65535, 0, 1, context_length};
    Tokens all = {NULL, 0, 0};
    tokens_add(&all, head, COUNT_OF(head));
    tokens_add(&all, context, (size_t)context_length);
    tokens_add(&all, &ending_length, 1);
    tokens_add(&all, ending, (size_t)ending_length);
    for (size_t i = 0; i < all.count; i++) {
        uint16_t word = (uint16_t)all.id[i];
        text_append(&q->words, (const char*)&word, sizeof word);
    }
    free(all.id);
    q->count++;
    q->chance += chance;
}

static int word_class(int word) {
    return word < THINGS ? PEOPLE : word < PLACES ? THINGS : word < DIGITS ? PLACES : DIGITS;
}

// Whether the answer at `at` is a person or place, but not the last one named before it.
static int answer_is_not_last(const int* words, int at) {
    int kind = word_class(words[at]), last = at - 1;
    if (kind != PEOPLE && kind != PLACES) return 0;
    while (words[last] != END_OF_STORY && (words[last] >= DIGITS || word_class(words[last]) != kind)) last--;
    return words[last] != words[at];
}

typedef struct {
    Questions lm, mlm;
} Exam;

static void exam_add(Exam* e, const Vocabulary* v, const Block* block, int T, int at) {
    int tokens[256], pieces[256], start = story_start(block->words, at), kind = word_class(block->words[at]);
    double chance = 1.0 / (kind == PEOPLE ? MOST_PEOPLE : kind == PLACES ? MOST_PLACES : 2 * MOST_EGGS - 1);
    int asked = at;  // where the answer begins
    CHECK(T <= 256);
    while (strcmp(WORD[block->words[asked - 1]], "?") != 0) asked--;
    vocabulary_encode(v, tokens, block->words, at + 1, 0);
    questions_add(&e->lm, tokens, asked, tokens + asked, at + 1 - asked, chance);
    int end = at + 1;  // of the sentence
    while (strcmp(WORD[block->words[end - 1]], ".") != 0) end++;
    for (int i = start; i < end; i++) pieces[i - start] = PIECES + block->words[i];
    questions_add(&e->mlm, pieces, at - start, pieces + at - start, end - at, chance);
}

static void exams_make(Exam* all, Exam* not_last, const Beginnings* b, const Vocabulary* v, Block* block,
                       const WorldSize* size, uint64_t seed) {
    for (uint64_t n = EXAM_BEGINS; all->lm.count < EXAM_QUESTIONS || not_last->lm.count < EXAM_QUESTIONS / 2; n++) {
        block_make(block, size, seed, n);
        for (int at = 1; at < size->T; at++) {
            if (!block->is_answer[at]) continue;
            int start = story_start(block->words, at);
            uint64_t hash = hash_words(block->words + start, at + 1 - start);
            if (bsearch(&hash, b->hash, b->count, sizeof hash, compare_hashes)) continue;
            if (all->lm.count < EXAM_QUESTIONS) exam_add(all, v, block, size->T, at);
            if (not_last->lm.count < EXAM_QUESTIONS / 2 && answer_is_not_last(block->words, at))
                exam_add(not_last, v, block, size->T, at);
        }
    }
}

static int write_questions(const char* path, const Questions* q) {
    int32_t header[SHARD_HEADER_INTS] = {SHARD_MAGIC_EVALUATION, MULTIPLE_CHOICE_VERSION, q->count};
    Text t = {NULL, 0, 0};
    for (const char* p = q->words.text; p < q->words.text + q->words.length;) {
        uint16_t bytes;
        memcpy(&bytes, p + sizeof bytes, sizeof bytes);
        header[3] = max_int(header[3], bytes);
        p += bytes;
    }
    header[MULTIPLE_CHOICE_CHANCE] = (int32_t)(1e6 * q->chance / q->count + 0.5);
    text_append(&t, (const char*)header, sizeof header);
    text_append(&t, q->words.text, q->words.length);
    int bad = write_file(path, t.text, t.length);
    free(t.text);
    return bad;
}

// ---------------------------------------------------------------------------------------------------------
// Training and validation

typedef struct {
    Tokens tokens;                      // of the blocks
    Tokens pieces, sentences, stories;  // BERT's: tokens, where sentences begin, the first sentence of each story
    double entropy;                     // of all blocks, in nats
} Set;

static void set_add(Set* s, const Vocabulary* v, const Block* block, int T) {
    int* tokens = (int*)xmalloc((size_t)T * sizeof(int));
    vocabulary_encode(v, tokens, block->words, T, 0);
    tokens_add(&s->tokens, tokens, (size_t)T);
    free(tokens);
    s->entropy += block->entropy;
    for (int i = 1; i < T; i++) {
        int word = block->words[i], before = block->words[i - 1], piece = PIECES + word;
        int sentence = (int)s->sentences.count, at = (int)s->pieces.count;
        if (word == END_OF_STORY) continue;
        if (before == END_OF_STORY) tokens_add(&s->stories, &sentence, 1);
        if (before == END_OF_STORY || strchr(".?", WORD[before][0])) tokens_add(&s->sentences, &at, 1);
        tokens_add(&s->pieces, &piece, 1);
    }
}

// The mean loss on `val` of the frequencies of tokens in `train`, one added to each.
static double unigram_loss(const Set* train, const Set* val, int V) {
    size_t* counts = (size_t*)xcalloc((size_t)V, sizeof *counts);
    double nats = 0;
    for (size_t i = 0; i < train->pieces.count; i++) counts[train->pieces.id[i]]++;
    for (size_t i = 0; i < val->pieces.count; i++)
        nats += log(((double)train->pieces.count + V) / (double)(counts[val->pieces.id[i]] + 1));
    free(counts);
    return nats / (double)val->pieces.count;
}

static int write_sentences(const char* path, Set* s, int V, const uint32_t* continues) {
    int pieces = (int)s->pieces.count, sentences = (int)s->sentences.count, stories = (int)s->stories.count;
    SentencesHeader h = {(uint32_t)pieces, (uint32_t)sentences, (uint32_t)stories, V, PAD, UNK, CLS, SEP, MASK, 0};
    tokens_add(&s->sentences, &pieces, 1);
    tokens_add(&s->stories, &sentences, 1);
    return sentences_write(path, h, s->pieces.id, (const uint32_t*)s->sentences.id, (const uint32_t*)s->stories.id,
                           continues);
}

static void set_free(Set* s) { free(s->tokens.id), free(s->pieces.id), free(s->sentences.id), free(s->stories.id); }

// ---------------------------------------------------------------------------------------------------------

enum {
    TRAIN,
    VAL,
    ENTROPY,
    EXAM,
    NOT_LAST,
    VOCAB,
    MERGES,
    TOKENIZER,
    TOKENIZER_CONFIG,
    BERT_TRAIN,
    BERT_VAL,
    BERT_EXAM,
    BERT_NOT_LAST,
    BERT_VOCAB,
    BERT_CONFIG,
    BERT_UNIGRAM,
    OUTPUTS
};
static const char* const OUTPUT[OUTPUTS] = {"train.bin",
                                            "val.bin",
                                            "val_entropy.txt",
                                            "exam.bin",
                                            "notlast.bin",
                                            "vocab.json",
                                            "merges.txt",
                                            "tokenizer.json",
                                            "tokenizer_config.json",
                                            "bert/train.bin",
                                            "bert/val.bin",
                                            "bert/exam.bin",
                                            "bert/notlast.bin",
                                            "bert/vocab.txt",
                                            "bert/tokenizer_config.json",
                                            "bert/val_unigram.txt"};

typedef struct {
    Vocabulary vocabulary;
    Set train, val;
    Exam exam, not_last;
    Text text[OUTPUTS];
    uint32_t continues[16];
    int pieces;  // size of BERT's vocabulary
} Corpus;

static int write_output(Corpus* c, const char* path, int output) {
    switch (output) {
    case TRAIN:
        return shard_write(path, c->train.tokens.id, c->train.tokens.count, 2);
    case VAL:
        return shard_write(path, c->val.tokens.id, c->val.tokens.count, 2);
    case EXAM:
        return write_questions(path, &c->exam.lm);
    case NOT_LAST:
        return write_questions(path, &c->not_last.lm);
    case BERT_TRAIN:
        return write_sentences(path, &c->train, c->pieces, c->continues);
    case BERT_VAL:
        return write_sentences(path, &c->val, c->pieces, c->continues);
    case BERT_EXAM:
        return write_questions(path, &c->exam.mlm);
    case BERT_NOT_LAST:
        return write_questions(path, &c->not_last.mlm);
    default:
        return write_file(path, c->text[output].text, c->text[output].length);
    }
}

// All that follows from the seed.
static void corpus_make(Corpus* c, const WorldSize* size, uint64_t seed, uint64_t blocks) {
    Beginnings beginnings = {NULL, 0, 0};
    Text per_block = {NULL, 0, 0};
    Block block;
    memset(c, 0, sizeof *c);
    block_alloc(&block, size);
    vocabulary_make(&c->vocabulary);
    const Vocabulary* v = &c->vocabulary;
    for (uint64_t n = 0; n < blocks; n++) {
        block_make(&block, size, seed, n);
        set_add(&c->train, v, &block, size->T);
        beginnings_add(&beginnings, &block, size->T);
    }
    for (uint64_t n = 0; n < VAL_BLOCKS; n++) {
        block_make(&block, size, seed, VAL_BEGINS + n);
        set_add(&c->val, v, &block, size->T);
        text_printf(&per_block, "%.9f\n", block.nats);
    }
    tokens_add(&c->train.tokens, &v->end_of_text, 1);
    tokens_add(&c->val.tokens, &v->end_of_text, 1);
    text_printf(&c->text[ENTROPY], "%d %.6f\n", size->T,
                (c->train.entropy + c->val.entropy) / (double)(blocks + VAL_BLOCKS) / size->T);
    text_append(&c->text[ENTROPY], per_block.text, per_block.length);
    qsort(beginnings.hash, beginnings.count, sizeof *beginnings.hash, compare_hashes);
    exams_make(&c->exam, &c->not_last, &beginnings, v, &block, size, seed);
    c->text[VOCAB] = vocab_json(v->merges);
    c->text[MERGES] = merges_txt(v->merges);
    c->text[TOKENIZER] = tokenizer_json(v->merges);
    c->text[TOKENIZER_CONFIG] = tokenizer_config_json();
    c->text[BERT_VOCAB] = vocabulary_lines(&c->pieces, c->continues);
    text_printf(&c->text[BERT_CONFIG], "{\n  \"do_lower_case\": false\n}\n");
    text_printf(&c->text[BERT_UNIGRAM], "%.4f\n", unigram_loss(&c->train, &c->val, c->pieces));
    free(per_block.text), free(beginnings.hash);
    block_free(&block);
}

static void corpus_free(Corpus* c) {
    Questions* questions[] = {&c->exam.lm, &c->exam.mlm, &c->not_last.lm, &c->not_last.mlm};
    for (size_t i = 0; i < COUNT_OF(questions); i++) free(questions[i]->words.text);
    for (int i = 0; i < OUTPUTS; i++) free(c->text[i].text);
    set_free(&c->train), set_free(&c->val);
}

static uint64_t number_argument(const char* text, uint64_t most) {
    char* end;
    errno = 0;
    unsigned long long n = strtoull(text, &end, 10);
    if (*text < '0' || *text > '9' || *end || errno || n > most)
        die(USAGE, "%s: is not a number from 0 to %llu", text, (unsigned long long)most);
    return n;
}

int main(int argc, char** argv) {
    static Corpus c;
    if (argc < 2 || argc > 4) die(USAGE, "usage: builtin_corpus OUT_DIR [SEED [BLOCKS]]");
    uint64_t seed = argc > 2 ? number_argument(argv[2], UINT64_MAX) : 1;
    uint64_t blocks = argc > 3 ? number_argument(argv[3], MOST_BLOCKS) : TRAIN_BLOCKS;
    const char* out = argv[1];
    if (blocks == 0) die(USAGE, "0 blocks: the training set needs one at least");
    corpus_make(&c, &FULL_WORLD, seed, blocks);
    output_directories(out);
    for (int i = 0; i < OUTPUTS; i++) {
        char* temporary = output_temporary(out, OUTPUT[i]);
        if (write_output(&c, temporary, i) != 0) output_failed(out, OUTPUT, OUTPUTS, OUTPUT[i]);
        free(temporary);
    }
    output_rename(out, OUTPUT, OUTPUTS);
    printf("%s: %zu tokens of stories for training, %zu for validation, vocabulary of %d; an exam of %d questions\n",
           out, c.train.tokens.count, c.val.tokens.count, c.vocabulary.end_of_text + 1, c.exam.lm.count);
    corpus_free(&c);
    return DONE;
}
