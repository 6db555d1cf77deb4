/* Tests of the examples of a task: reading, truncating and batching labelled text, compared with plain loops; and the
 * scores of classes, compared with counts by hand.
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

// Files without labels, for a model whose classes have these names.
static void test_unlabelled(Tests* t, const WordPiece* words, const LabelNames* names) {
    Examples e;
    char* path = put_text_file(t, "texts.tsv", "a b\n\nno\n0\n");
    labelled_read(&e, path, words, names, 2, 16, 1);
    expect_that(t, e.count == 4 && is_example(&e, 0, "ab|", 4, -1) && is_example(&e, 1, "|", 2, -1) && e.label[4] == -1,
                "lines of a text, one of them empty");
    examples_close(&e), free(path);
    path = put_text_file(t, "header-alone.tsv", "sentence\na b\n");
    labelled_read(&e, path, words, names, 2, 16, 1);
    expect_that(t, e.count == 1 && is_example(&e, 0, "ab|", 4, -1), "a header of one column");
    examples_close(&e), free(path);
    path = put_text_file(t, "header-pairs.tsv", "index\tsentence2\tsentence1\n0\tb\ta\n");
    labelled_read(&e, path, words, names, 2, 16, 1);
    expect_that(t, e.count == 1 && is_example(&e, 0, "a|b|", 3, -1), "a header without labels, of a pair");
    examples_close(&e), free(path);
    path = put_text_file(t, "odd.tsv", "no\ttext\n1\tsentence\n");
    labelled_read(&e, path, words, names, 2, 16, 1);
    expect_that(t, e.count == 2 && e.label[0] == 0 && e.label[2] == 1, "a text that is a column's name, after a label");
    examples_close(&e), free(path);
    path = put_text_file(t, "both.tsv", "label\ttext\nyes\ta\n");
    labelled_read(&e, path, words, names, 2, 16, 1);
    expect_that(t, e.count == 1 && is_example(&e, 0, "a|", 3, 1), "labels that need not be there");
    examples_close(&e), free(path);
}

static void test_files(Tests* t, const WordPiece* words) {
    LabelNames names = {NULL, 0};
    Examples e;
    char* path = put_text_file(t, "single.tsv", "1\ta b c\n\n0\tx\"y\r\n2\ta b c d e f g h i j k l\n");
    labelled_read(&e, path, words, &names, 3, 8, 0);
    expect_that(t, e.count == 3 && is_example(&e, 0, "abc|", 5, 1), "a text");
    expect_that(t, examples_length(&e, 1) == 5 && e.tokens[e.begin[1] + 2] == 1, "a quotation mark is a character");
    expect_that(t, is_example(&e, 2, "abcdef|", 8, 2), "a text that is cut");
    expect_that(t, e.group[0] == 0 && e.group[2] == 2 && e.targets == 1, "each is a group of its own");
    examples_close(&e), free(path);

    // 7 tokens for both texts: 3 and 4 if both are longer than half, whichever is longer.
    path = put_text_file(t, "pairs.tsv",
                         "0\ta b\tc d\n0\ta b c d e f\tx y\n0\ta b\tu v w x y z\n0\ta b c d e f\tu v w x y\n"
                         "0\ta b c d e\tu v w x y z\n0\ta b c d e\tv w x y z\n");
    labelled_read(&e, path, words, &names, 2, 10, 0);
    expect_that(t, is_example(&e, 0, "ab|cd|", 4, 0), "a pair");
    expect_that(t, is_example(&e, 1, "abcde|xy|", 7, 0), "a pair whose first text is cut");
    expect_that(t, is_example(&e, 2, "ab|uvwxy|", 4, 0), "a pair whose second text is cut");
    expect_that(t, is_example(&e, 3, "abcd|uvw|", 6, 0), "both are cut, the first is longer");
    expect_that(t, is_example(&e, 4, "abc|uvwx|", 5, 0), "both are cut, the second is longer");
    expect_that(t, is_example(&e, 5, "abc|vwxy|", 5, 0), "both are cut, equally long");
    examples_close(&e), free(path);

    path = put_text_file(t, "header.tsv", "id\thypothesis\tgold_label\tpremise\n7\tb c\tno\ta\n8\te\tyes\td\n");
    labelled_find_names(&names, path, 2);
    labelled_read(&e, path, words, &names, 2, 16, 0);
    expect_that(t, names.count == 2 && strcmp(names.name[0], "no") == 0, "names in the order of their bytes");
    expect_that(t, is_example(&e, 0, "a|bc|", 3, 0) && is_example(&e, 1, "d|e|", 3, 1), "columns by their names");
    examples_close(&e), free(path);
    path = put_text_file(t, "mark.tsv", "\xEF\xBB\xBFno\ta\nyes\tb\n");
    labelled_read(&e, path, words, &names, 2, 16, 0);
    expect_that(t, e.count == 2 && is_example(&e, 0, "a|", 3, 0), "a byte order mark");
    examples_close(&e), free(path);
    path = put_text_file(t, "question.tsv", "sentence\tquestion\tlabel\na\tb\tyes\n");
    labelled_read(&e, path, words, &names, 2, 16, 0);
    expect_that(t, is_example(&e, 0, "b|a|", 3, 1), "a question comes before its sentence");
    examples_close(&e), free(path);
    test_unlabelled(t, words, &names);
    path = put_text_file(t, "votes.tsv", "sentence1\tlabel1\tgold_label\na\tno\tyes\nb\tno\tno\tno\tyes\tyes\tyes\n");
    labelled_read(&e, path, words, &names, 2, 16, 0);
    expect_that(t, e.count == 2 && e.label[0] == 1 && is_example(&e, 1, "b|", 3, 1), "SNLI: label2 to label5");
    examples_close(&e), free(path);
    path = put_text_file(t, "tabs.tsv", "sentence\tlabel\na\tno\t\nb\tyes\t\t\n");
    labelled_read(&e, path, words, &names, 2, 16, 0);
    expect_that(t, e.count == 2 && is_example(&e, 1, "b|", 3, 1), "tabs at the end of a line");
    examples_close(&e), free(path);
    label_names_free(&names);
    path = put_text_file(t, "breaks.tsv",
                         "id\tquestion1\tquestion2\tis_duplicate\n"
                         "1\t\"a\n\nb\n\"\t\"c \"\"d\"\"\r\n\"\t1\n2\t\"\ta\t0\n");
    labelled_read(&e, path, words, &names, 2, 16, 0);
    expect_that(t, e.count == 2 && is_example(&e, 0, "?ab?|?c??d???|", 6, 1) && is_example(&e, 1, "?|a|", 3, 0),
                "QQP: line breaks in questions in quotation marks");
    examples_close(&e), free(path);
    path = put_text_file(t, "numbers.tsv", "0\ta\n1\tb\n");
    labelled_find_names(&names, path, 3);
    expect_that(t, names.count == 0, "numbers have no names");
    free(path);
}

// The header and a line of GLUE's own files, and the expected example. Files with a label column are read for training
// too.
static void test_glue(Tests* t, const WordPiece* words) {
    static const struct {
        const char *name, *text, *tokens;
        int labels, label, second;
        double number;  // of a regression
    } files[] = {
        {"CoLA", "gj04\t1\t\ta b\nr-67\t0\t?*\tc\n", "ab|", 2, 1, 4, 0},
        {"CoLA, test", "index\tsentence\n0\ta b\n", "ab|", 2, -1, 4, 0},
        {"SST-2", "sentence\tlabel\na b \t1\n", "ab|", 2, 1, 4, 0},
        {"SST-2, test", "index\tsentence\n0\ta b\n", "ab|", 2, -1, 4, 0},
        {"MRPC", "\xEF\xBB\xBFQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t702\t703\ta b\tc\r\n", "ab|c|", 2, 1, 4,
         0},
        {"MRPC, test", "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t7\t8\ta b\tc\n", "ab|c|", 2, -1, 4, 0},
        {"STS-B",
         "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore\n"
         "0\tmain\tMSRvid\t2012\t1\tnone\tnone\ta b\tc\t4.75\n",
         "ab|c|", 1, 0, 4, 4.75},
        {"STS-B, below 0", "score\tsentence1\tsentence2\n-1.5e0\ta b\tc\n", "ab|c|", 1, 0, 4, -1.5},
        {"STS-B, test",
         "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\n"
         "0\tmain\tMSRvid\t2012\t1\tnone\tnone\ta b\tc\n",
         "ab|c|", 1, -1, 4, NAN},
        {"a number and a text", "2.5\ta b\n", "ab|", 1, 0, 4, 2.5},
        {"QQP", "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\ta b\tc\t1\n", "ab|c|", 2, 1, 4, 0},
        {"QQP, test", "id\tquestion1\tquestion2\n0\ta b\tc\n", "ab|c|", 2, -1, 4, 0},
        {"MNLI",
         "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\t"
         "sentence2_parse\tsentence1\tsentence2\tlabel1\tlabel2\tgold_label\n"
         "0\t1\t2\tg\tx\tx\tx\tx\ta b\tc\t0\t0\t1\n",
         "ab|c|", 2, 1, 4, 0},
        {"QNLI", "index\tquestion\tsentence\tlabel\n0\ta b\tc\t1\n", "ab|c|", 2, 1, 4, 0},
        {"QNLI, test", "index\tquestion\tsentence\n0\ta b\tc\n", "ab|c|", 2, -1, 4, 0},
        {"RTE and WNLI", "index\tsentence1\tsentence2\tlabel\n0\ta b\tc\t1\n", "ab|c|", 2, 1, 4, 0},
        {"a text that is a column's name", "0\tscore\n1\ta b\n", "?|", 2, 0, 3, 0},
        {"a CR in a line is kept", "1\ta\rb\r\n", "ab|", 2, 1, 4, 0},
    };
    for (size_t i = 0; i < COUNT_OF(files); i++) {
        LabelNames names = {NULL, 0};
        char *path = put_text_file(t, "glue.tsv", files[i].text), *name = xprintf("GLUE: %s", files[i].name);
        int is_there = 1;
        for (int may_lack = files[i].label < 0; may_lack < 2; may_lack++) {
            Examples e;
            labelled_read(&e, path, words, &names, files[i].labels, 16, may_lack);
            int label =
                files[i].labels == 1 && files[i].label >= 0 ? squared_error_bits(files[i].number) : files[i].label;
            is_there &= e.count > 0 && is_example(&e, 0, files[i].tokens, files[i].second, label);
            examples_close(&e);
        }
        expect_that(t, is_there, name);
        free(path), free(name);
    }
}

// The tokens that each text of a pair keeps, for all lengths around the limits, as `tokenizers` 0.23 truncates: it cuts
// each text to T tokens first.
static void test_truncation(Tests* t, const WordPiece* words) {
    int same = 1, count = 0;
    for (int T = 8; T < 20; T++)
        for (int n1 = 0; n1 < T + 8; n1++)
            for (int n2 = 0; n2 < T + 8; n2++) {
                char a[64], b[64];
                Examples e;
                for (int i = 0; i < n1; i++) a[2 * i] = 'a', a[2 * i + 1] = ' ';
                for (int i = 0; i < n2; i++) b[2 * i] = 'b', b[2 * i + 1] = ' ';
                Field first = {a, 2 * (size_t)n1}, second = {b, 2 * (size_t)n2};
                examples_open(&e, 1);
                labelled_add(&e, words, first, second, T, 0);
                int room = T - 3, is_swapped = min_int(n1, T) > min_int(n2, T);
                int small = is_swapped ? min_int(n2, T) : min_int(n1, T), large = small;
                if (small <= room) large = max_int(small, room - small);
                large = min_int(large, is_swapped ? n1 : n2);
                if (small + large > room) small = room / 2, large = small + room % 2;
                int want1 = n1 + n2 <= room ? n1 : is_swapped ? large : small;
                int want2 = n1 + n2 <= room ? n2 : is_swapped ? small : large;
                same &= e.second[0] == want1 + 2 && examples_length(&e, 0) == want1 + want2 + 3;
                examples_close(&e);
                count++;
            }
    expect_that(t, same && count > 5000, "pairs of all lengths are cut as `tokenizers` cuts them");
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

// The first whole groups of two.
static void test_first(Tests* t) {
    static const int want[][2] = {{0, COUNT}, {1, 2}, {2, 2}, {3, 2}, {4, 4}, {22, 22}, {23, 23}, {99, 23}};
    Examples e;
    int good = 1;
    make_examples(&e, 1);
    for (size_t i = 0; i < COUNT_OF(want); i++) good &= examples_first(&e, (uint64_t)want[i][0]) == want[i][1];
    expect_that(t, good, "the first examples are whole groups");
    examples_close(&e);
}

static void test_batches(Tests* t, int targets) {
    Examples e;
    MlmBatch b;
    int order[2][COUNT], seen[2][COUNT] = {{0}}, differ = 0, whole = 1, same = 1;
    make_examples(&e, targets);
    mlm_batch_alloc(&b, BATCH, T, targets);
    for (int i = 0; i < 2 * COUNT; i++) {
        examples_batch_read(&b, &e, 42, 1, (uint64_t)i, 1, 3);
        int which = b.tokens[0] / 100;
        order[i / COUNT][i % COUNT] = which;
        seen[i / COUNT][which]++;
        same &= b.count == 1 && b.first == 3 && b.masked == targets && batch_is(&b, &e, 0, which);
    }
    for (int i = 0; i < COUNT; i++) differ += order[0][i] != order[1][i], whole &= seen[0][i] == 1 && seen[1][i] == 1;
    expect_that(t, same, "a batch of one");
    expect_that(t, whole && differ > COUNT / 2, "every epoch has all examples, in an order of its own");
    examples_batch_read(&b, &e, 42, 1, COUNT - 2, BATCH, 0);
    same = b.count == BATCH && b.masked == BATCH * targets;
    int64_t squares = 0;
    for (int s = 0; s < BATCH; s++) {
        int i = s < 2 ? order[0][COUNT - 2 + s] : order[1][s - 2], n = examples_length(&e, i);
        same &= batch_is(&b, &e, s, i);
        squares += n * n;
    }
    expect_that(t, same && b.sum_sq_len == squares && b.rows == b.cu_seqlens[BATCH],
                "a batch over the end of an epoch");
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
    expect_that(t, together, "three ranks evaluate every example once, groups together");
    uint32_t before = examples_fingerprint(&e);
    e.label[2 * COUNT - 2]++;
    expect_that(t, examples_fingerprint(&e) != before, "the fingerprint has the labels");
    mlm_batch_free(&b);
    examples_close(&e);
}

// ---------------------------------------------------------------------------------------------------------
// Scores

static TaskScore score_of(const int* labels, const int* said, int n, int K) {
    TaskData data;
    TaskEvaluation e;
    TaskScore score = {0};
    double prediction[16];
    const int token = CLS;
    memset(&data, 0, sizeof data), memset(&e, 0, sizeof e);
    examples_open(&data.val, 1);
    for (int i = 0; i < n; i++) examples_add(&data.val, &token, 1, 1, labels[i], 0, i), prediction[i] = said[i] + 1;
    data.labels = K, e.data = &data, e.predicted = prediction, e.count = n;
    task_score_classes(&score, &e);
    examples_close(&data.val);
    return score;
}

static TaskScore score_of_numbers(const double* said, const double* actual, int n) {
    TaskData data;
    TaskEvaluation e;
    TaskScore score = {0};
    double prediction[16];
    const int token = CLS;
    memset(&data, 0, sizeof data), memset(&e, 0, sizeof e);
    examples_open(&data.val, 1);
    for (int i = 0; i < n; i++)
        examples_add(&data.val, &token, 1, 1, squared_error_bits(actual[i]), 0, i), prediction[i] = said[i];
    data.labels = 1, e.data = &data, e.predicted = prediction, e.count = n;
    task_score_numbers(&score, &e);
    examples_close(&data.val);
    return score;
}

static void test_scores(Tests* t) {
    const int labels[6] = {0, 1, 1, 1, 0, 1}, said[6] = {0, 1, 0, 1, 1, 1};
    TaskScore two = score_of(labels, said, 6, 2);
    expect_that(t, fabs(two.values[0] - 4.0 / 6) < 1e-12 && fabs(two.values[1] - 6.0 / 8) < 1e-12,
                "F1 of class 1: 3 of 4 and 4");
    const int many[5] = {0, 0, 2, 2, 2}, answers[5] = {0, 2, 2, 2, 1};
    TaskScore three = score_of(many, answers, 5, 9);
    double f1 =
        (2.0 / 3 + 0 + 4.0 / 6) / 3;  // class 1 is predicted, but never correctly; classes from 3 on do not occur
    expect_that(t, fabs(three.values[0] - 3.0 / 5) < 1e-12 && fabs(three.values[1] - f1) < 1e-12,
                "mean F1 of the classes that occur");
    const real x[6] = {1, 9, 2, 9, 0, 9};
    const double x1[5] = {1, 2, 2, 4, 5}, y1[5] = {0.5, 3, 1, 1, 8};
    double ranks[5];
    task_rank(ranks, x1, 5);
    expect_that(t, ranks[0] == 0 && ranks[1] == 1.5 && ranks[2] == 1.5 && ranks[3] == 3 && ranks[4] == 4,
                "ranks of equals");
    // numpy.corrcoef of the numbers, and of their ranks
    TaskScore numbers = score_of_numbers(x1, y1, 5);
    expect_that(t, fabs(numbers.values[0] - 0.7181077176566726) < 1e-12, "Pearson's correlation");
    expect_that(t, fabs(numbers.values[1] - 0.7631578947368421) < 1e-12, "Spearman's correlation");
    expect_that(t, isnan(task_correlation(ranks, (const double[5]){0}, 5)), "no correlation with a constant");
    double sum = exp(1.0) + exp(2.0) + 1;
    expect_that(t, fabs(task_cross_entropy(x, 3, 2, 1) - (log(sum) - 2)) < 1e-6,
                "cross-entropy, logits that lie apart");
    expect_that(t, task_cross_entropy(x, 3, 2, 3) == 0, "a target that is none");
}

int main(void) {
    Tests t;
    WordPiece words;
    tests_open(&t);
    t.directory = make_scratch_directory("test_examples");
    open_words(&t, &words);
    test_files(&t, &words);
    test_glue(&t, &words);
    test_truncation(&t, &words);
    test_first(&t);
    test_batches(&t, 1);
    test_batches(&t, 2);
    test_scores(&t);
    wordpiece_free(&words);
    return tests_close(&t);
}
