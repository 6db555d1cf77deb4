/* Tests of the examples of a task: reading, truncating and batching labelled text, compared with plain loops; and the
 * scores of classes, compared with counts by hand.
 *
 *     ./test_examples [NAME]      the cases whose name contains NAME
 *
 * Prints a line per case and `N passed, N failed`; exit status 1 if one failed. */
#include "apps/tune/task_evaluation.h"
#include "dev/test/tests.h"

enum { UNK = 1, CLS = 2, SEP = 3, FIRST_LETTER = 5 };

// Words of one letter, a .. z, after the special tokens.
static void open_words(Tests* t, WordPiece* words) {
    Text vocab = {NULL, 0, 0};
    text_printf(&vocab, "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n");
    for (char c = 'a'; c <= 'z'; c++) text_printf(&vocab, "%c\n", c);
    free(put_text_file(t, "vocab.txt", vocab.text));
    free(vocab.text);
    if (wordpiece_open(words, t->directory, UNCASED) != 0) die(FAILED, "%s: no vocabulary", t->directory);
}

// Whether example i is these words, "|" standing for [SEP] and "?" for [UNK], with this second segment and label.
static int is_example(const Examples* e, int i, const char* want, int second, int label) {
    const int* tokens = e->tokens + e->begin[i];
    int n = examples_length(e, i), length = (int)strlen(want), same = n == length + 1 && tokens[0] == CLS;
    for (int k = 0; k < length && same; k++)
        same = tokens[k + 1] == (want[k] == '|' ? SEP : want[k] == '?' ? UNK : FIRST_LETTER + want[k] - 'a');
    return same && e->second[i] == second && e->label[2 * i] == label;
}

// ---------------------------------------------------------------------------------------------------------
// Files

// A file, and one of its examples.
typedef struct {
    const char *name, *text, *tokens;
    int T, example, labels, label, second;
    double number;  // of a regression
} LabelledFile;

// Of texts with labels 0 to 2, and of GLUE's own files. Files with a label column are read for training too.
static const LabelledFile NUMBERED[] = {
    {"a text", "1\ta b c\n\n0\td\n", "abc|", 8, 0, 3, 1, 5, 0},
    {"a text that is cut", "2\ta b c d e f g h i\n", "abcdef|", 8, 0, 3, 2, 8, 0},
    {"CoLA, test", "index\tsentence\n0\ta b\n", "ab|", 16, 0, 2, -1, 4, 0},
    {"SST-2", "sentence\tlabel\na b \t1\n", "ab|", 16, 0, 2, 1, 4, 0},
    {"MRPC", "\xEF\xBB\xBFQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t702\t703\ta b\tc\r\n", "ab|c|", 16, 0, 2, 1,
     4, 0},
    {"STS-B",
     "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
     "0\tmain\tMSRvid\t2012\t1\tnone\tnone\ta b\tc\t4.75\n",
     "ab|c|", 16, 0, 1, 0, 4, 4.75},
    {"STS-B, below 0", "score\tsentence1\tsentence2\n-1.5e0\ta b\tc\n", "ab|c|", 16, 0, 1, 0, 4, -1.5},
    {"QQP, test", "id\tquestion1\tquestion2\n0\ta b\tc\n", "ab|c|", 16, 0, 2, -1, 4, 0},
    {"MNLI",
     "index\tpromptID\tsentence1_binary_parse\tsentence1_parse\tsentence1\tsentence2\tlabel1\tgold_label\n"
     "0\t1\tx\tx\ta b\tc\t0\t1\n",
     "ab|c|", 16, 0, 2, 1, 4, 0},
    {"a CR in a line is kept", "1\ta\rb\r\n", "ab|", 16, 0, 2, 1, 4, 0},
};

// Of texts with the labels no and yes.
static const LabelledFile NAMED[] = {
    {"columns by their names", "id\thypothesis\tgold_label\tpremise\n7\tb c\tyes\ta\n", "a|bc|", 16, 0, 2, 1, 3, 0},
    {"a question comes before its sentence", "sentence\tquestion\tlabel\na\tb\tyes\n", "b|a|", 16, 0, 2, 1, 3, 0},
    {"tabs at the end of a line", "sentence\tlabel\na\tno\t\nb\tyes\t\t\n", "b|", 16, 1, 2, 1, 3, 0},
    {"an empty line", "a b\n\nno\n0\n", "|", 16, 1, 2, -1, 2, 0},
    {"a header without labels, of a pair", "index\tsentence2\tsentence1\n0\tb\ta\n", "a|b|", 16, 0, 2, -1, 3, 0},
    {"a column's name after a label", "no\ttext\nyes\tsentence\n", "?|", 16, 1, 2, 1, 3, 0},
};

static void test_files(Tests* t, const WordPiece* words, const LabelledFile* files, size_t count,
                       const LabelNames* names) {
    for (size_t i = 0; i < count; i++) {
        const LabelledFile* f = &files[i];
        char *path = put_text_file(t, "file.tsv", f->text), *name = xprintf("file: %s", f->name);
        case_begin(t, name);
        // Blank lines are skipped only where each line must have a label.
        int most = f->label < 0 || !strstr(f->text, "\n\n");
        for (int may_lack = f->label < 0; may_lack <= most; may_lack++) {
            Examples e;
            labelled_read(&e, path, words, names, f->labels, f->T, may_lack);
            int label = f->labels == 1 && f->label >= 0 ? squared_error_bits(f->number) : f->label, k = f->example;
            EXPECT(t, k < e.count && e.targets == 1 && e.group[k] == k);
            if (!t->is_bad && !is_example(&e, k, f->tokens, f->second, label))
                fail(t, "example %d has %d tokens, the second part from %d on, the label %d; not '%s', %d, %d", k,
                     examples_length(&e, k), e.second[k], e.label[2 * k], f->tokens, f->second, label);
            examples_close(&e);
        }
        case_end(t);
        free(path), free(name);
    }
}

static void test_names(Tests* t, const WordPiece* words) {
    LabelNames names = {NULL, 0};
    test_files(t, words, NUMBERED, COUNT_OF(NUMBERED), &names);
    char* path = put_text_file(t, "numbers.tsv", "0\ta\n1\tb\n");
    labelled_find_names(&names, path, 3);
    expect(t, names.count == 0, "numbers have no names", "there are %d", names.count);
    free(path);
    path = put_text_file(t, "names.tsv", "yes\ta\nno\tb\n");
    labelled_find_names(&names, path, 2);
    expect(t, names.count == 2 && strcmp(names.name[0], "no") == 0, "names in the order of their bytes", "%d, first %s",
           names.count, names.count ? names.name[0] : "");
    test_files(t, words, NAMED, COUNT_OF(NAMED), &names);
    label_names_free(&names);
    free(path);
}

// What each text of a pair keeps of 3 + 7 tokens, as `tokenizers` 0.23 truncates: it cuts each text to 10 tokens first,
// then the longer one, and both to a half where the shorter one has more than that.
static void test_truncation(Tests* t, const WordPiece* words) {
    static const struct {
        int n[2], kept[2];
    } cases[] = {{{3, 4}, {3, 4}},   {{0, 9}, {0, 7}},  {{9, 0}, {7, 0}},  {{5, 6}, {3, 4}}, {{6, 5}, {4, 3}},
                 {{6, 6}, {3, 4}},   {{2, 6}, {2, 5}},  {{6, 2}, {5, 2}},  {{3, 8}, {3, 4}}, {{12, 11}, {3, 4}},
                 {{11, 12}, {3, 4}}, {{40, 3}, {4, 3}}, {{4, 40}, {3, 4}}, {{40, 4}, {4, 3}}};
    char text[81];
    for (int i = 0; i < 80; i++) text[i] = i % 2 ? ' ' : 'a';
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        Examples e;
        const int *n = cases[i].n, *kept = cases[i].kept;
        Field first = {text, 2 * (size_t)n[0]}, second = {text, 2 * (size_t)n[1]};
        examples_open(&e, 1);
        labelled_add(&e, words, first, second, 10, 0);
        int got[2] = {e.second[0] - 2, examples_length(&e, 0) - e.second[0] - 1};
        expect(t, got[0] == kept[0] && got[1] == kept[1], named("a pair of %d and %d tokens is cut", n[0], n[1]),
               "to %d and %d, not %d and %d", got[0], got[1], kept[0], kept[1]);
        examples_close(&e);
    }
}

// ---------------------------------------------------------------------------------------------------------
// Batches

enum { COUNT = 23, BATCH = 5, T = 8 };

// Example i has i % 5 + 3 tokens, and belongs to group i / 2.
static void make_examples(Examples* e, int targets) {
    examples_open(e, targets);
    for (int i = 0; i < COUNT; i++) {
        int tokens[T], n = i % 5 + 3;
        for (int k = 0; k < n; k++) tokens[k] = 100 * i + k;
        examples_add(e, tokens, n, n - i % 2, i, i + 1, i / 2);
    }
}

static int batch_is(const MlmBatch* b, const Examples* e, int s, int i) {
    int begin = b->cu_seqlens[s], n = examples_length(e, i), same = b->cu_seqlens[s + 1] - begin == n;
    for (int k = 0; k < n && same; k++)
        same = b->tokens[begin + k] == 100 * i + k && b->types[begin + k] == (k >= e->second[i]) &&
               b->sequence[begin + k] == s && b->position[begin + k] == k;
    for (int k = 0; k < e->targets && same; k++)
        same = b->targets[e->targets * s + k] == i + k && b->masked_rows[e->targets * s + k] == begin;
    return same;
}

static void test_batches(Tests* t, int targets) {
    static const int first[][2] = {{0, COUNT}, {1, 2}, {2, 2}, {3, 2}, {4, 4}, {22, 22}, {23, 23}, {99, 23}};
    Examples e;
    MlmBatch b;
    int order[2][COUNT], seen[2][COUNT] = {{0}}, differ = 0, whole = 1, same = 1;
    make_examples(&e, targets);
    mlm_batch_alloc(&b, BATCH, T, targets);
    for (int i = 0; i < 2 * COUNT; i += b.count) {
        int64_t squares = 0;
        examples_batch_read(&b, &e, 42, 1, (uint64_t)i, min_int(BATCH, 2 * COUNT - i), 3);
        for (int s = 0; s < b.count; s++) {
            int which = b.tokens[b.cu_seqlens[s]] / 100, n = examples_length(&e, which);
            order[(i + s) / COUNT][(i + s) % COUNT] = which;
            seen[(i + s) / COUNT][which]++;
            same &= batch_is(&b, &e, s, which);
            squares += n * n;
        }
        same &= b.first == 3 && b.masked == b.count * targets && b.sum_sq_len == squares;
        same &= b.rows == b.cu_seqlens[b.count];
    }
    for (int i = 0; i < COUNT; i++) differ += order[0][i] != order[1][i], whole &= seen[0][i] == 1 && seen[1][i] == 1;
    expect_that(t, same, "batches, of which one is over the end of an epoch");
    expect_that(t, whole && differ > COUNT / 2, "every epoch has all examples, in an order of its own");
    examples_batch_read(&b, &e, 42, 0, COUNT + 4, 2, 0);
    expect_that(t, batch_is(&b, &e, 0, 4) && batch_is(&b, &e, 1, 5), "--shuffle 0: as in the file");

    int times[COUNT] = {0}, rank_of[COUNT], together = 1;
    for (int rank = 0; rank < 3; rank++)
        for (int next = 0, number[BATCH]; examples_batch_next(&b, number, &e, &next, COUNT, BATCH, rank, 3) > 0;)
            for (int s = 0; s < b.count; s++) {
                times[number[s]]++, rank_of[number[s]] = rank;
                together &= batch_is(&b, &e, s, number[s]);
            }
    for (int i = 0; i < COUNT; i++)
        together &= times[i] == 1 && (i == 0 || e.group[i] != e.group[i - 1] || rank_of[i] == rank_of[i - 1]);
    for (size_t i = 0; i < COUNT_OF(first); i++) together &= examples_first(&e, (uint64_t)first[i][0]) == first[i][1];
    expect_that(t, together,
                "three ranks evaluate every example once, groups together; the first ones are whole groups");
    uint32_t before = examples_fingerprint(&e);
    e.label[2 * COUNT - 2]++;
    expect_that(t, examples_fingerprint(&e) != before, "the fingerprint has the labels");
    mlm_batch_free(&b);
    examples_close(&e);
}

// ---------------------------------------------------------------------------------------------------------
// Scores

// The scores of predictions. Classes are predicted as their number + 1; K 1: numbers.
static TaskScore score_of(const double* actual, const double* predicted, int n, int K) {
    TaskData data;
    TaskEvaluation e;
    TaskScore score = {0};
    double prediction[16];
    const int token = CLS;
    memset(&data, 0, sizeof data), memset(&e, 0, sizeof e);
    examples_open(&data.val, 1);
    for (int i = 0; i < n; i++) {
        examples_add(&data.val, &token, 1, 1, K == 1 ? squared_error_bits(actual[i]) : (int)actual[i], 0, i);
        prediction[i] = predicted[i] + (K > 1);
    }
    data.labels = K, e.data = &data, e.predicted = prediction, e.count = n;
    if (K == 1) task_score_numbers(&score, &e);
    else task_score_classes(&score, &e);
    examples_close(&data.val);
    return score;
}

static void test_scores(Tests* t) {
    static const struct {
        const char* name;
        int labels, n;
        double actual[6], predicted[6], want[2];
    } cases[] = {
        // 3 of 4 and 4 are right in class 1
        {"two classes", 2, 6, {0, 1, 1, 1, 0, 1}, {0, 1, 0, 1, 1, 1}, {4.0 / 6, 6.0 / 8}},
        // Class 1 is predicted, but never correctly; classes from 3 on do not occur.
        {"nine classes", 9, 5, {0, 0, 2, 2, 2}, {0, 2, 2, 2, 1}, {3.0 / 5, (2.0 / 3 + 0 + 4.0 / 6) / 3}},
        // numpy.corrcoef of the numbers, and of their ranks
        {"numbers", 1, 5, {0.5, 3, 1, 1, 8}, {1, 2, 2, 4, 5}, {0.7181077176566726, 0.7631578947368421}},
        {"a constant", 1, 5, {3, 3, 3, 3, 3}, {1, 2, 2, 4, 5}, {NAN, NAN}},
    };
    static const real x[6] = {1, 9, 2, 9, 0, 9};  // logits that lie apart
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        TaskScore score = score_of(cases[i].actual, cases[i].predicted, cases[i].n, cases[i].labels);
        for (int k = 0; k < 2; k++) {
            double got = score.values[k], want = cases[i].want[k];
            expect(t, fabs(got - want) < 1e-6 || (isnan(got) && isnan(want)),
                   named("%s of %s", k ? "F1 or Spearman's correlation" : "accuracy or Pearson's", cases[i].name),
                   "%.9g, not %.9g", got, want);
        }
    }
    case_begin(t, "cross-entropy, also of a target that is none");
    EXPECT_NEAR(t, task_cross_entropy(x, 3, 2, 1), log(exp(1.0) + exp(2.0) + 1) - 2, 1e-6);
    EXPECT_NEAR(t, task_cross_entropy(x, 3, 2, 3), 0, 0);
    case_end(t);
}

int main(int argc, char** argv) {
    Tests t;
    WordPiece words;
    tests_choose(&t, argc, argv);
    t.directory = make_scratch_directory("test_examples");
    open_words(&t, &words);
    test_names(&t, &words);
    test_truncation(&t, &words);
    test_batches(&t, 1);
    test_batches(&t, 2);
    test_scores(&t);
    wordpiece_free(&words);
    return tests_close(&t);
}
