/* Tests of the examples of a task: reading, truncating and batching labelled text. tasks.py has their scores.
 *
 *     ./test_examples [NAME]      the cases whose name contains NAME
 *
 * Prints a line per case and `N passed, N failed`; exit status 1 if one failed. */
#include "apps/tune/labelled.h"
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

// A file, and its first example. Files of labelled texts are read for training too.
typedef struct {
    const char *name, *text, *tokens;
    int labels, label, second;
} LabelledFile;

// Labels 0 to 2, GLUE's own files (tasks.py has STS-B's), and classes that are called no and yes.
static const LabelledFile FILES[] = {
    {"a text that is cut to 16", "2\ta b c d e f g h i j k l m n o p\n\n", "abcdefghijklmn|", 3, 2, 16},
    {"SST-2", "sentence\tlabel\na b \t1\n", "ab|", 2, 1, 4},
    {"MRPC", "\xEF\xBB\xBFQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t2\t3\ta b\tc\r\n", "ab|c|", 2, 1, 4},
    {"MNLI: columns by their names", "sentence1_parse\tsentence2\tsentence1\tlabel1\tgold_label\nx\tc\ta b\t0\t1\n",
     "ab|c|", 2, 1, 4},
    {"a question comes before its sentence", "sentence\tquestion\tlabel\na\tb\tyes\t\n", "b|a|", 2, 1, 3},
    // Cut as `tokenizers` 0.23 does it: each text to 16 tokens first, then the longer one, and both to a half of 13
    // where the shorter one has more than that.
    {"a pair of 7 and 6 tokens", "0\ta a a a a a a\tb b b b b b\n", "aaaaaaa|bbbbbb|", 2, 0, 9},
    {"a pair of 5 and 10 tokens", "0\ta a a a a\tb b b b b b b b b b\n", "aaaaa|bbbbbbbb|", 2, 0, 7},
    {"a pair of 10 and 5 tokens", "0\ta a a a a a a a a a\tb b b b b\n", "aaaaaaaa|bbbbb|", 2, 0, 10},
    {"a pair of 7 and 7 tokens", "0\ta a a a a a a\tb b b b b b b\n", "aaaaaa|bbbbbbb|", 2, 0, 8},
    {"a pair of 9 and 8 tokens", "0\ta a a a a a a a a\tb b b b b b b b\n", "aaaaaaa|bbbbbb|", 2, 0, 9},
    {"a pair of 19 and 18 tokens", "0\ta a a a a a a a a a a a a a a a a a a\tb b b b b b b b b b b b b b b b b b\n",
     "aaaaaa|bbbbbbb|", 2, 0, 8},
    {"an empty line", "\na b\nno\n0\n", "|", 2, -1, 2},
    {"a header without labels, of a pair", "index\tsentence2\tsentence1\n0\tb\ta\n", "a|b|", 2, -1, 3},
};

static void test_files(Tests* t, const WordPiece* words) {
    LabelNames names = {NULL, 0};
    char* numbers = put_text_file(t, "numbers.tsv", "0\ta\n1\tb\n");
    char* named_file = put_text_file(t, "names.tsv", "yes\ta\nno\tb\n");
    case_begin(t, "numbers have no names; others stand in the order of their bytes");
    labelled_find_names(&names, numbers, 3);
    EXPECT_EQ(t, names.count, 0);
    labelled_find_names(&names, named_file, 2);
    EXPECT(t, names.count == 2 && strcmp(names.name[0], "no") == 0);
    case_end(t);
    for (size_t i = 0; i < COUNT_OF(FILES); i++) {
        const LabelledFile* f = &FILES[i];
        char* path = put_text_file(t, "file.tsv", f->text);
        case_begin(t, f->name);
        // Blank lines are skipped only where each line must have a label.
        int most = f->label < 0 || !strstr(f->text, "\n\n");
        for (int may_lack = f->label < 0; may_lack <= most; may_lack++) {
            Examples e;
            labelled_read(&e, path, words, &names, f->labels, 16, may_lack);
            EXPECT(t, e.targets == 1 && e.group[0] == 0 && is_example(&e, 0, f->tokens, f->second, f->label));
            examples_close(&e);
        }
        case_end(t);
        free(path);
    }
    label_names_free(&names);
    free(numbers), free(named_file);
}

// ---------------------------------------------------------------------------------------------------------
// Batches

enum { COUNT = 23, BATCH = 5, T = 8, TARGETS = 2 };

// Example i has i % 5 + 3 tokens, and belongs to group i / 3.
static void make_examples(Examples* e) {
    examples_open(e, TARGETS);
    for (int i = 0; i < COUNT; i++) {
        int tokens[T], n = i % 5 + 3;
        for (int k = 0; k < n; k++) tokens[k] = 100 * i + k;
        examples_add(e, tokens, n, n - i % 2, i, i + 1, i / 3);
    }
}

// Whether sequence s of the batch is example i.
static int batch_is(const MlmBatch* b, const Examples* e, int s, int i) {
    int begin = b->cu_seqlens[s], n = examples_length(e, i), same = b->cu_seqlens[s + 1] - begin == n;
    for (int k = 0; k < n && same; k++)
        same = b->tokens[begin + k] == 100 * i + k && b->types[begin + k] == (k >= e->second[i]) &&
               b->sequence[begin + k] == s && b->position[begin + k] == k;
    for (int k = 0; k < TARGETS && same; k++)
        same = b->targets[TARGETS * s + k] == i + k && b->masked_rows[TARGETS * s + k] == begin;
    return same;
}

static void test_batches(Tests* t) {
    static const int first[][2] = {{0, COUNT}, {1, 3}, {3, 3}, {5, 3}, {22, 21}, {23, 23}, {99, 23}};
    Examples e;
    MlmBatch b;
    int order[2 * COUNT], seen[2][COUNT] = {{0}}, differ = 0, rank_of[COUNT], evaluated = 0;
    make_examples(&e);
    mlm_batch_alloc(&b, BATCH, T, TARGETS);
    case_begin(t, "every epoch has all examples, in an order of its own; a batch may be over the end of the first");
    for (int i = 0; i < 2 * COUNT; i += b.count) {
        examples_batch_read(&b, &e, 42, 1, (uint64_t)i, min_int(BATCH, 2 * COUNT - i), 3);
        for (int s = 0; s < b.count; s++) {
            int which = order[i + s] = b.tokens[b.cu_seqlens[s]] / 100;
            seen[(i + s) / COUNT][which]++;
            EXPECT(t, batch_is(&b, &e, s, which));
        }
        EXPECT(t, b.first == 3 && b.masked == b.count * TARGETS && b.rows == b.cu_seqlens[b.count]);
    }
    for (int i = 0; i < COUNT; i++) {
        differ += order[i] != order[COUNT + i];
        EXPECT(t, seen[0][i] == 1 && seen[1][i] == 1);
    }
    EXPECT(t, differ > COUNT / 2);
    examples_batch_read(&b, &e, 42, 0, COUNT + 4, 2, 0);  // --shuffle 0: as in the file
    EXPECT(t, batch_is(&b, &e, 0, 4) && batch_is(&b, &e, 1, 5));
    case_end(t);

    case_begin(t, "three ranks evaluate every example once, groups together; the first ones are whole groups");
    for (int i = 0; i < COUNT; i++) rank_of[i] = -1;
    for (int rank = 0; rank < 3; rank++)
        for (int next = 0, number[BATCH]; examples_batch_next(&b, number, &e, &next, COUNT, BATCH, rank, 3) > 0;)
            for (int s = 0; s < b.count; s++) {
                evaluated++, rank_of[number[s]] = rank;
                EXPECT(t, batch_is(&b, &e, s, number[s]));
            }
    EXPECT_EQ(t, evaluated, COUNT);
    for (int i = 0; i < COUNT; i++) EXPECT(t, rank_of[i] >= 0 && (i % 3 == 0 || rank_of[i] == rank_of[i - 1]));
    for (size_t i = 0; i < COUNT_OF(first); i++) EXPECT_EQ(t, examples_first(&e, (uint64_t)first[i][0]), first[i][1]);
    case_end(t);
    mlm_batch_free(&b);
    examples_close(&e);
}

int main(int argc, char** argv) {
    Tests t;
    WordPiece words;
    tests_choose(&t, argc, argv);
    t.directory = make_scratch_directory("test_examples");
    open_words(&t, &words);
    test_files(&t, &words);
    test_batches(&t);
    wordpiece_free(&words);
    return tests_close(&t);
}
