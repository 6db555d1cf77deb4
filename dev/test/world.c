/* Tests of the stories that builtin_corpus writes, whose bytes dev/test/text.sh holds: the entropy of a smaller world
 * is the analytic one; a reader that knows English but not the generator finds the answers; any tokenizer encodes a
 * word as its token; no question of the exam is answered in the training set; a trainer reads the generator's losses.
 *
 *     ./test_world [NAME]      the tests whose name contains NAME */
#define main builtin_corpus_main
#include "../data/builtin_corpus.c"
#undef main
#include "dev/test/tests.h"
#include "llmc/data/val_entropy.h"
#include "llmc/text/bpe.h"
#include "llmc/text/wordpiece.h"

// ---------------------------------------------------------------------------------------------------------
// Entropy of a world small enough to list all its blocks

static const WorldSize SMALL_WORLD = {50, 2, 1, 2, 1};

typedef struct {
    double probability, entropy;  // sums over all blocks: p, and -p log p
    size_t blocks;
} Listing;

static void list_blocks(Listing* l, World w, double p) {
    Sentence list[MOST_SENTENCES];
    Choices c = world_choices(&w, &SMALL_WORLD);
    if (c.sum == 0) l->probability += p, l->entropy -= p * log(p), l->blocks++;
    for (int kind = 0; kind < KINDS && c.sum; kind++) {
        int n = c.weights[kind] ? world_sentences(&w, &SMALL_WORLD, (Kind)kind, list) : 0;
        for (int i = 0; i < n; i++) {
            World next = w;
            world_apply(&next, list[i]);
            list_blocks(l, next, p * c.weights[kind] / c.sum / n);
        }
    }
}

static void test_entropy(Tests* t) {
    enum { TOKENS = 10000000 };
    const WorldSize* size = &SMALL_WORLD;
    Listing l = {0, 0, 0};
    double nats = 0, entropy = 0;
    Block b;
    list_blocks(&l, world_begin(size), 1);
    EXPECT(t, fabs(l.probability - 1) < 1e-9 && l.blocks > 1000);
    block_alloc(&b, size);
    const int blocks = TOKENS / size->T;
    for (int n = 0; n < blocks; n++) {
        block_make(&b, size, 3, (uint64_t)n);
        nats += b.nats, entropy += b.entropy;
    }
    nats /= blocks, entropy /= blocks;
    EXPECT_NEAR(t, nats / l.entropy, 1, 1e-3);
    EXPECT_NEAR(t, entropy / l.entropy, 1, 1e-3);
    block_free(&b);
}

// ---------------------------------------------------------------------------------------------------------
// Answers, by a reader that takes the text word by word

static int is_word(int word, const char* text) { return word != END_OF_STORY && strcmp(WORD[word], text) == 0; }

// The answer to the question that ends with words [count - 1], from the story before it; -1: nothing says.
static int read_answer(const int* words, int count) {
    int place[MOST_PEOPLE], eggs[MOST_PEOPLE], holder[MOST_THINGS], first = 0;
    for (int i = 0; i < MOST_PEOPLE; i++) place[i] = -1, eggs[i] = -1;
    for (int i = 0; i < MOST_THINGS; i++) holder[i] = -1;
    for (int i = 0; i < count - 1; i++) {
        const int* s = words + first;
        if (!is_word(words[i], ".") && !is_word(words[i], "?")) continue;
        first = i + 1;
        if (is_word(s[1], "goes")) place[s[0]] = s[4];
        if (is_word(s[1], "takes") || is_word(s[1], "gets")) holder[s[3] - THINGS] = s[0];
        if (is_word(s[1], "finds")) eggs[s[0]] = DIGITS - 1 + (s[2] - DIGITS + 1) + (s[5] - DIGITS + 1);
    }
    int asked = words[count - 2];
    if (is_word(words[first], "Who")) return holder[asked - THINGS];
    if (is_word(words[first], "How")) return eggs[asked];
    if (asked >= THINGS) asked = holder[asked - THINGS];
    return asked < 0 ? -1 : place[asked];
}

// The number of words of [0, count) up to the last question mark.
static int question_end(const int* words, int count) {
    while (!is_word(words[count - 1], "?")) count--;
    return count;
}

static void test_answers(Tests* t) {
    const WorldSize* size = &FULL_WORLD;
    int questions = 0;
    Block b;
    block_alloc(&b, size);
    for (uint64_t n = 0; n < 5000; n++) {
        block_make(&b, size, 11, n);
        for (int at = 1; at < size->T; at++) {
            if (!b.is_answer[at]) continue;
            int start = story_start(b.words, at);
            if (read_answer(b.words + start, question_end(b.words + start, at - start)) != b.words[at])
                fail(t, "block %d: the answer at %d is wrong", (int)n, at);
            questions++;
        }
    }
    EXPECT(t, questions > 15000);
    block_free(&b);
}

// ---------------------------------------------------------------------------------------------------------
// Files

static void expect_same(Tests* t, const int* tokens, size_t count, const int* expected, size_t n) {
    EXPECT(t, count == n && memcmp(tokens, expected, n * sizeof(int)) == 0);
}

// The text of a block's words, as BERT's users would write it, or with end-of-text tokens.
static void append_text(Text* t, const int* words, int count) {
    for (int i = 0; i < count; i++) {
        int begins = i == 0 || words[i - 1] == END_OF_STORY;
        if (words[i] == END_OF_STORY) text_printf(t, "<|endoftext|>");
        else text_printf(t, "%s%s", begins || strchr(".?", WORD[words[i]][0]) ? "" : " ", WORD[words[i]]);
    }
}

static void test_tokenizers(Tests* t) {
    static Corpus c;
    const WorldSize* size = &FULL_WORLD;
    WordPiece words;
    Block b;
    Bpe bpe;
    corpus_make(&c, size, 5, 1);
    for (int i = VOCAB; i <= BERT_CONFIG; i++) {
        const char* slash = strrchr(OUTPUT[i], '/');
        if (c.text[i].text) free(put_file(t, slash ? slash + 1 : OUTPUT[i], c.text[i].text, c.text[i].length));
    }
    block_alloc(&b, size);
    for (int form = 0; form < 2; form++) {  // tokenizer.json, then vocab.json with merges.txt
        CHECK(bpe_open(&bpe, t->directory) == 0);
        for (uint64_t n = 0; n < 300; n++) {
            Text text = {NULL, 0, 0};
            int expected[64], *ids;
            block_make(&b, size, 5, n);
            vocabulary_encode(&c.vocabulary, expected, b.words, size->T, 0);
            append_text(&text, b.words, size->T);
            size_t count = bpe_encode(&ids, &bpe, text.text, text.length, AS_TOKEN);
            expect_same(t, ids, count, expected, (size_t)size->T);
            free(ids), free(text.text);
        }
        bpe_free(&bpe);
        unlink(named("%s/tokenizer.json", t->directory));
    }
    CHECK(wordpiece_open(&words, t->directory, CASE_OF_MODEL) == 0);
    EXPECT(t, words.size == c.pieces && words.mask == MASK && words.sep == SEP);
    for (int i = 0; i < WORDS; i++) {
        TokenIds ids = {NULL, 0, 0, 0, NULL};
        int expected = PIECES + i;
        wordpiece_encode(&ids, &words, WORD[i], strlen(WORD[i]));
        expect_same(t, ids.id, ids.count, &expected, 1);
        free(ids.id);
    }
    wordpiece_free(&words);
    block_free(&b);
    corpus_free(&c);
}

// The questions' words of a set, whose tokens are one a word.
static int is_in_training(const Corpus* c, const uint16_t* story, int length) {
    for (size_t at = 0; at + (size_t)length <= c->train.tokens.count; at++) {
        int same = 0;
        while (same < length && c->train.tokens.id[at + (size_t)same] == story[same]) same++;
        if (same == length) return 1;
    }
    return 0;
}

static void test_exam(Tests* t) {
    static Corpus c;
    const WorldSize* size = &FULL_WORLD;
    int far = 0;
    corpus_make(&c, size, 6, 3000);
    for (int which = 0; which < 4; which++) {
        const Exam* exam = which < 2 ? &c.exam : &c.not_last;
        MultipleChoice set;
        char* path = path_in(t, "exam.bin");
        CHECK(write_questions(path, which % 2 ? &exam->mlm : &exam->lm) == 0);
        multiple_choice_open(&set, path, which % 2 ? c.pieces : c.vocabulary.end_of_text + 1);
        EXPECT(t, set.is_cloze && set.count >= 1000 && set.longest <= size->T + 1);
        EXPECT(t, set.chance > 1.0 / 7 && set.chance < 0.2);
        for (int i = 0; i < set.count && which % 2; i++) {  // WordPiece's numbers give the words
            MultipleChoiceText context = multiple_choice_example(&set, i).context,
                               ending = multiple_choice_next(context);
            int words[64], n = context.length, last = -1;
            for (int k = 0; k < n; k++) words[k] = context.tokens[k] - PIECES;
            int answer = ending.tokens[0] - PIECES;
            EXPECT(t, ending.length >= 2 && read_answer(words, question_end(words, n)) == answer);
            for (int k = 0; k < n; k++)
                if (words[k] < DIGITS && word_class(words[k]) == word_class(answer)) last = words[k];
            if (which == 3) EXPECT(t, answer < DIGITS && last != answer);
            else far += answer < DIGITS && last != answer;
        }
        multiple_choice_close(&set);
        free(path);
    }
    EXPECT(t, far > 200 && far < EXAM_QUESTIONS);
    // The stories of the questions, searched for in the training set itself.
    const uint16_t* word = (const uint16_t*)c.exam.lm.words.text;
    for (int i = 0; i < EXAM_QUESTIONS; i++, word += word[1] / 2) {
        int end = 6 + word[5], start = end;
        while (word[start - 1] != c.vocabulary.end_of_text) start--;
        uint16_t story[64];
        memcpy(story, word + start, (size_t)(end - start) * sizeof *word);
        memcpy(story + end - start, word + end + 1, word[end] * sizeof *word);
        EXPECT(t, !is_in_training(&c, story, end + word[end] - start));
    }
    corpus_free(&c);
}

// The file next to the validation shard, as a trainer reads it.
static void test_val_entropy(Tests* t) {
    static Corpus c;
    const WorldSize* size = &FULL_WORLD;
    double nats = 0;
    ValEntropy e;
    Shards s;
    Block b;
    corpus_make(&c, size, 9, 2000);
    char *shard = path_in(t, "val.bin"), *other = path_in(t, "other.bin");
    free(put_file(t, "val_entropy.txt", c.text[ENTROPY].text, c.text[ENTROPY].length));
    CHECK(write_output(&c, shard, VAL) == 0 && write_output(&c, other, VAL) == 0);
    block_alloc(&b, size);
    for (int n = 0; n < VAL_BLOCKS; n++) block_make(&b, size, 9, VAL_BEGINS + (uint64_t)n), nats += b.nats;
    shards_open(&s, shard);
    val_entropy_open(&e, &s, size->T);
    EXPECT(t, e.blocks == VAL_BLOCKS && s.tokens == (uint64_t)VAL_BLOCKS * 64 + 1);
    for (int n = 0; n < VAL_BLOCKS && !t->is_bad; n++) nats -= e.nats[n];
    EXPECT(t, fabs(nats) < 1e-5 && e.bound > 0.26 && e.bound < 0.28);
    val_entropy_close(&e);
    // None for windows of two blocks, with a block missing, and next to a shard without a file.
    for (int i = 0; i < 3; i++) {
        if (i == 1) free(put_file(t, "val_entropy.txt", c.text[ENTROPY].text, c.text[ENTROPY].length - 20));
        if (i == 2) shards_close(&s), shards_open(&s, other);
        val_entropy_open(&e, &s, i == 0 ? 2 * size->T : size->T);
        EXPECT_EQ(t, e.blocks, 0);
        val_entropy_close(&e);
    }
    shards_close(&s);
    free(shard), free(other);
    block_free(&b), corpus_free(&c);
}

int main(int argc, char** argv) {
    static const TestCase cases[] = {{"world/entropy", test_entropy},
                                     {"world/answers", test_answers},
                                     {"world/tokenizers", test_tokenizers},
                                     {"world/exam", test_exam},
                                     {"world/val_entropy", test_val_entropy}};
    return tests_main(argc, argv, cases, COUNT_OF(cases));
}
