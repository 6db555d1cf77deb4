/* Tests of multiple-choice sets: reading, packing into micro-batches, and counting, compared with plain loops. The
 * model's outputs are made up; dev/test/choices.sh compares with a real model.
 *
 *     ./test_choices [NAME]      the cases whose name contains NAME */
#include "dev/test/tests.h"
#include "llmc/choices/multiple_choice.h"

// ---------------------------------------------------------------------------------------------------------
// Files

enum { V = 1000 };

static uint32_t draw(uint32_t a, uint32_t b, uint32_t c) { return philox(a, b, c, 0, 99).v[0]; }

static void put_word(Text* out, size_t word) {
    uint16_t w = (uint16_t)word;
    text_append(out, (const char*)&w, sizeof w);
}

// Token k of a text; text 0 is the context, text 1 the first ending.
static int token_of(int example, int text, int k) {
    return (int)(draw((uint32_t)example, (uint32_t)text, (uint32_t)k) % V);
}

static void put_header(Text* out, int32_t count, int32_t version) {
    int32_t header[256] = {20240522, version, count, 0};
    text_append(out, (const char*)header, sizeof header);
}

static int characters_of(int example, int ending) {
    return 1 + (int)(draw((uint32_t)example, 103, (uint32_t)ending) % 9);
}

static void put_example(Text* out, int example, int label, int endings, const int* lengths, int version) {
    size_t begin = out->length;
    const int head[] = {65535, 0, example, label, endings};
    for (size_t i = 0; i < COUNT_OF(head); i++) put_word(out, (size_t)head[i]);
    for (int text = 0; text <= endings; text++) {
        put_word(out, (size_t)lengths[text]);
        for (int k = 0; k < lengths[text]; k++) put_word(out, (size_t)token_of(example, text, k));
    }
    for (int k = 0; k < endings && version == 2; k++) put_word(out, (size_t)characters_of(example, k));
    uint16_t bytes = (uint16_t)(out->length - begin);
    memcpy(out->text + begin + 2, &bytes, 2);
}

enum { EXAMPLES = 500, MOST_ENDINGS = 9 };

// The properties of an example of the tests' set.
static int endings_of(int example, int cloze) { return cloze ? 1 : 1 + (int)(draw((uint32_t)example, 100, 0) % 6); }
static int label_of(int example, int cloze) {
    return (int)(draw((uint32_t)example, 101, 0) % (uint32_t)endings_of(example, cloze));
}
static int length_of(int example, int text) {
    return 1 + (int)(draw((uint32_t)example, 102, (uint32_t)text) % (text ? 7 : 20));
}

static char* put_set(Tests* t, const char* name, int cloze, int version) {
    Text out = {NULL, 0, 0};
    put_header(&out, EXAMPLES, version);
    for (int i = 0; i < EXAMPLES; i++) {
        int lengths[1 + MOST_ENDINGS];
        for (int text = 0; text <= endings_of(i, cloze); text++) lengths[text] = length_of(i, text);
        put_example(&out, i, label_of(i, cloze), endings_of(i, cloze), lengths, version);
    }
    char* path = put_file(t, name, out.text, out.length);
    free(out.text);
    return path;
}

static void open_set(const char* file) {
    MultipleChoice c;
    multiple_choice_open(&c, file, V);
    multiple_choice_close(&c);
}

// Two examples: one begins at word 512 with a context of 2 tokens and two endings of 1, one at word 524.
static void test_refused(Tests* t) {
    enum { FIRST = 1024, SECOND = FIRST + 2 * 12 };
    static const FileChange changes[] = {
        {"as it is", 0, 0, 0, 0, NULL},
        {"version 3", 4, 4, 3, 0, "version 3, but only versions 1 and 2"},
        {"version 2 without characters", 4, 4, 2, 0, "example 0: its header gives 24 bytes, but its texts take 28"},
        {"one example more than there is", 8, 4, 3, 0, "gives 3 examples, but 46 bytes"},
        {"one example less", 8, 4, 1, 0, "22 bytes follow its last example"},
        {"no begin of an example", SECOND, 2, 65534, 0,
         "example 1 begins with 65534 and has the number 1, not with 65535"},
        {"another number of bytes", FIRST + 2, 2, 22, 0, "example 0: its header gives 22 bytes, but its texts take 24"},
        {"a label that there is not", FIRST + 6, 2, 2, 0, "example 0: its label is 2, but it has 2 endings"},
        {"an empty ending", FIRST + 16, 2, 0, 0, "example 0: an ending has no tokens"},
        {"a text beyond the end", SECOND + 10, 2, 40, 0, "ends inside example 1 of 2"},
        {"a token outside the vocabulary", FIRST + 12, 2, 1000, 0,
         "example 0: token 1000 is outside the vocabulary of 1000"},
    };
    // With characters: the last words are those of the endings.
    static const FileChange characters[] = {
        {"as it is", 0, 0, 0, 0, NULL},
        {"none", FIRST + 24, 2, 0, 0, "example 0: an ending has no characters"},
        {"truncated", 0, 0, 0, -2, "ends inside example 0 of 1"},
    };
    int lengths[] = {2, 1, 1, 1};
    Text good = {NULL, 0, 0}, two = {NULL, 0, 0};
    put_header(&good, 2, 1), put_header(&two, 1, 2);
    put_example(&good, 0, 1, 2, lengths, 1), put_example(&two, 0, 1, 2, lengths, 2);
    lengths[0] = 1;
    put_example(&good, 1, 0, 2, lengths, 1);
    expect_changes(t, &good, "set.bin", changes, COUNT_OF(changes), open_set);
    expect_any_damage(t, &good, "damaged.bin", 16, open_set);
    expect_changes(t, &two, "characters.bin", characters, COUNT_OF(characters), open_set);
    free(good.text), free(two.text);
}

// ---------------------------------------------------------------------------------------------------------
// Packing and counting

// A made-up model: its loss on a target after the n tokens before it, an integer, so that ties happen, or NaN for one
// in 100; and whether the target is the token that it finds likeliest.
static real model(const int* tokens, int n, int target, int* is_right) {
    uint32_t u =
        (uint32_t)(fnv_update(FNV_START, (const char*)tokens, (size_t)n * sizeof(int)) >> 20) * 31 + (uint32_t)target;
    u = draw(u, (uint32_t)target, 0);
    *is_right = u / 100 % 4 != 0;
    return u % 100 == 0 ? (real)NAN : (real)(u % 5);
}

// The counts without micro-batches: contexts give way at their left where an example is longer than T.
static MultipleChoiceSums sums_by_loops(int cloze, int version, int T) {
    MultipleChoiceSums sums = {EXAMPLES, 0, 0, 0, 0};
    for (int i = 0; i < EXAMPLES; i++) {
        int n = endings_of(i, cloze), C = length_of(i, 0), best = 0, best_norm = 0, all_right = 1;
        double loss[MOST_ENDINGS], mean[MOST_ENDINGS];
        for (int ending = 0; ending < n; ending++) {
            int L = length_of(i, 1 + ending), from = max_int(0, C + L - 1 - T), tokens[64], is_right;
            for (int k = 0; k < C + L; k++) tokens[k] = k < C ? token_of(i, 0, k) : token_of(i, 1 + ending, k - C);
            loss[ending] = 0;
            for (int k = C; k < C + L; k++, all_right = all_right && is_right)
                loss[ending] += (double)model(tokens + from, k - from, tokens[k], &is_right);
            if (isnan(loss[ending])) loss[ending] = INFINITY, sums.not_finite++;
            mean[ending] = loss[ending] / (version == 2 ? characters_of(i, ending) : L);
        }
        for (int ending = n - 1; ending >= 0; ending--) {
            if (loss[ending] <= loss[best]) best = ending;
            if (mean[ending] <= mean[best_norm]) best_norm = ending;
        }
        sums.correct += n == 1 ? all_right : loss[best] < INFINITY && best == label_of(i, cloze);
        sums.correct_norm += mean[best_norm] < INFINITY && best_norm == label_of(i, cloze);
        if (n == 1) sums.cloze_loss += loss[0];
    }
    return sums;
}

// Micro-batches of a rank's share: their layout, and what they add to the sums.
static void evaluate_share(Tests* t, MultipleChoiceEvaluation* e) {
    for (int rows, before = -1; (rows = multiple_choice_pack(e)) > 0; before = rows) {
        const Documents* packed = &e->packed;
        int64_t squares = 0;
        int longest = 0, scored = 0;
        // No ending that would have fitted in the micro-batch before was moved to this one.
        EXPECT(t, rows <= e->N && e->count == packed->count && (before < 0 || before + packed->cu_seqlens[1] > e->N));
        for (int i = 0; i < e->count; i++) {
            const MultipleChoiceSequence* s = &e->sequences[i];
            int begin = packed->cu_seqlens[i], length = packed->cu_seqlens[i + 1] - begin;
            for (int k = begin; k < begin + length; k++)
                EXPECT(t, packed->document[k] == i && packed->position[k] == k - begin);
            squares += (int64_t)length * length, longest = max_int(longest, length), scored += s->count;
            e->correct[i] = 0;
            for (int k = s->first; k < s->first + s->count; k++) {
                int is_right;
                e->losses[k] = model(e->inputs + begin, e->rows[k] + 1 - begin, e->targets[k], &is_right);
                e->correct[i] += (real)is_right;
            }
        }
        EXPECT(t, squares == packed->sum_sq_len && longest == packed->longest && scored == e->scored);
        multiple_choice_score(e, e->losses, e->correct);
    }
}

// Micro-batches of all shapes, for one rank and several.
static void test_evaluation(Tests* t, int cloze, int version) {
    static const struct {
        int N, T, ranks;
    } shapes[] = {{28, 28, 1}, {64, 32, 1}, {64, 10, 1}, {9, 7, 2}, {1000, 40, 3}};
    MultipleChoice c;
    char* path = put_set(t, "set.bin", cloze, version);
    multiple_choice_open(&c, path, V);
    for (size_t i = 0; i < COUNT_OF(shapes); i++) {
        MultipleChoiceSums got = {0, 0, 0, 0, 0}, want = sums_by_loops(cloze, version, shapes[i].T);
        EXPECT(t, want.correct > 50 && want.correct < 450 && (cloze || want.correct != want.correct_norm));
        for (int rank = 0; rank < shapes[i].ranks; rank++) {
            MultipleChoiceEvaluation e;
            multiple_choice_begin(&e, &c, shapes[i].N, shapes[i].T, rank, shapes[i].ranks);
            evaluate_share(t, &e);
            got.examples += e.sums.examples, got.correct += e.sums.correct, got.correct_norm += e.sums.correct_norm;
            got.cloze_loss += e.sums.cloze_loss, got.not_finite += e.sums.not_finite;
            multiple_choice_end(&e);
        }
        EXPECT_EQ(t, got.examples, want.examples);
        EXPECT_EQ(t, got.correct, want.correct);
        EXPECT_EQ(t, got.correct_norm, want.correct_norm);
        EXPECT_EQ(t, got.not_finite, want.not_finite);
        EXPECT(t, got.cloze_loss == want.cloze_loss || !isfinite(want.cloze_loss));
    }
    multiple_choice_close(&c);
    free(path);
}
static void test_choices(Tests* t) { test_evaluation(t, 0, 1); }
static void test_clozes(Tests* t) { test_evaluation(t, 1, 1); }
static void test_by_characters(Tests* t) { test_evaluation(t, 0, 2); }

int main(int argc, char** argv) {
    static const TestCase cases[] = {{"choices/refused", test_refused},
                                     {"choices/evaluation", test_choices},
                                     {"choices/clozes", test_clozes},
                                     {"choices/by_characters", test_by_characters}};
    return tests_main(argc, argv, cases, COUNT_OF(cases));
}
