/* Tests of the files of llmc/text: byte-level BPE, the texts of token ids, WordPiece. What is read of a good file, and
 * what is said of each bad one. dev/test/check_tokenizers.py compares the tokens of texts with the library, and runs
 * this program for them:
 *
 *     test_tokenizers words|text|token|wordpiece DIRECTORY FILE...
 *
 * writes for each file, as 32-bit integers, their number and: the lengths of its words in bytes, or its tokens with
 * special ones as text or as tokens, or those of WordPiece.
 *
 *     test_tokenizers [NAME]      the tests whose name contains NAME */
#include "apps/use/bpe.h"
#include "dev/test/tests.h"
#include "llmc/run/find_files.h"
#include "llmc/text/tokenizer.h"
#include "llmc/text/wordpiece.h"

static char* put_json(const Tests* t, const char* text) { return put_text_file(t, "tokenizer.json", text); }

// Open what lies in the folder of a file.
#define OPENER(name, Type, open, close)                                                                                \
    static void name(const char* path) {                                                                               \
        Type x;                                                                                                        \
        char* directory = directory_of(path);                                                                          \
        if (open != 0) die(LOST_PEER, "%s: no tokenizer", path);                                                       \
        close(&x);                                                                                                     \
        free(directory);                                                                                               \
    }
OPENER(open_bpe, Bpe, bpe_open(&x, directory), bpe_free)
OPENER(open_tokenizer, Tokenizer, tokenizer_open(&x, directory), tokenizer_free)
OPENER(open_wordpiece, WordPiece, wordpiece_open(&x, directory, UNCASED), wordpiece_free)

// ---------------------------------------------------------------------------------------------------------
// Byte-level BPE

#define KIND "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true}"

static void test_bpe(Tests* t) {
    static const char good[] =
        "{\"added_tokens\":[{\"id\":7,\"content\":\"q\",\"special\":true,\"lstrip\":false}],\"normalizer\":null," KIND
        ",\"model\":{\"type\":\"BPE\",\"dropout\":null,\"continuing_subword_prefix\":\"\","
        "\"end_of_word_suffix\":\"\",\"ignore_merges\":false,\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[\"a "
        "b\"]}}";
    static const TextChange changes[] = {
        {"\"pre_tokenizer\"", "\"x\"", "key \"pre_tokenizer\""},
        {"\"ByteLevel\"", "\"Sequence\"", "key \"pre_tokenizer\": \"Sequence\" differs"},
        {"\"use_regex\":true", "\"use_regex\":false", "key \"use_regex\""},
        {"\"add_prefix_space\":false", "\"add_prefix_space\":true", "key \"add_prefix_space\""},
        {"\"normalizer\":null", "\"normalizer\":{}", "key \"normalizer\""},
        {"\"BPE\"", "\"Unigram\"", "key \"type\""},
        {"\"dropout\":null", "\"dropout\":0.1", "key \"dropout\""},
        {"\"ignore_merges\":false", "\"ignore_merges\":true", "key \"ignore_merges\""},
        {"suffix\":\"\"", "suffix\":\"</w>\"", "key \"end_of_word_suffix\""},
        {"prefix\":\"\"", "prefix\":\"##\"", "key \"continuing_subword_prefix\""},
        {"\"vocab\"", "\"x\"", "no object of tokens"},
        {"\"a\":0", "\"a\":-1", "token \"a\": its id"},
        {"\"merges\"", "\"x\"", "no array of merges"},
        {"\"a b\"", "7", "merge 1 is not two symbols"},
        {"\"a b\"", "[\"a\",\"b\",\"c\"]", "merge 1 is not two symbols"},
        {"\"a b\"", "\"b a\"", "merge 1: \"ba\" is not in the vocabulary"},
        {"\"content\"", "\"x\"", "key \"content\": missing"},
        {"\"id\":7,", "", "token \"q\": its id"},
        {"\"special\":true", "\"special\":1", "key \"special\""},
        {"\"lstrip\":false", "\"lstrip\":true", "token \"q\": \"lstrip\" is not supported"},
    };
    expect_text_changes(t, "tokenizer.json", good, changes, COUNT_OF(changes), put_json, open_bpe);
    char *json = path_in(t, "tokenizer.json"), *lines = path_in(t, "merges.txt");
    unlink(json);
    expect_end(t, LOST_PEER, "no tokenizer", "no tokenizer", open_bpe, json);
    free(put_text_file(t, "vocab.json", "{\"a\":0,\"b\":1,\"ab\":2}"));
    free(put_text_file(t, "merges.txt", "#version: 0.2\na b\n\nab  c\n"));
    expect_end(t, USAGE, "merges.txt: two spaces", "merge 2 is not two symbols", open_bpe, lines);
    free(put_text_file(t, "merges.txt", "a b\na q"));
    expect_end(t, USAGE, "merges.txt: a symbol", "merge 2: \"q\" is not in the vocabulary in", open_bpe, lines);
    free(json), free(lines);
}

// ---------------------------------------------------------------------------------------------------------
// Texts of ids

// Characters of the byte alphabet and others, ids that are not in use, and a special token, whose text is as it is.
#define TOKENIZER                                                                                                      \
    "{\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"ByteLevel\"}]},"                                    \
    "\"added_tokens\":[{\"id\":9,\"content\":\"<|endoftext|>\"},{\"id\":11,\"content\":\"\\u0120 x\"}],"               \
    "\"model\":{\"vocab\":{\"a\":0,\"\\u0120the\":5,\"\\u010a\":2,\"\\u00e2\\u0136\\u00a2\":3,\"\\u0143\":6,"          \
    "\"\xe4\xb8\xad\":8}}}"

static void test_tokenizer(Tests* t) {
    // By id, from -1 on; NULL: no token.
    static const char* const tokens[] = {NULL,         "a",    NULL, "\n",           "\xe2\x94\xa2",  NULL,
                                         " the",       "\xad", NULL, "\xe4\xb8\xad", "<|endoftext|>", NULL,
                                         "\xc4\xa0 x", NULL};
    static const TextChange changes[] = {
        {"ByteLevel", "Strip", "not a byte-level tokenizer"},
        {"\"vocab\":", "\"vocab\":[],\"x\":", "no object of tokens"},
        {"\"content\":\"<", "\"x\":\"<", "no content"},
        {"\"id\":9,", "", "token \"<|endoftext|>\": its id"},
        {"\"a\":0", "\"a\":2", "its id 2 is also another token's"},
        {"\"a\":0", "\"a\":-1", "token \"a\": its id"},
        {"\"a\":0", "\"a\":999999999", "token \"a\": its id"},
    };
    Tokenizer k;
    size_t n;
    EXPECT(t, tokenizer_open(&k, t->directory) == -1);
    free(put_json(t, TOKENIZER));
    EXPECT(t, tokenizer_open(&k, t->directory) == 0 && k.size == 12 && tokenizer_end_of_text(&k) == 9);
    for (int id = -1; id < (int)COUNT_OF(tokens) - 1; id++) {
        const char *got = tokenizer_decode(&k, id, &n), *want = tokens[id + 1];
        if (got && want ? n != strlen(want) || memcmp(got, want, n) != 0 : got || want)
            fail(t, "token %d is '%.*s', not '%s'", id, got ? (int)n : 0, got ? got : "", want ? want : "");
    }
    tokenizer_free(&k);
    expect_text_changes(t, "tokenizer.json", TOKENIZER, changes, COUNT_OF(changes), put_json, open_tokenizer);
}

// ---------------------------------------------------------------------------------------------------------
// WordPiece

#define WORDPIECE                                                                                                      \
    "{\"added_tokens\": [{\"id\": 4, \"content\": \"[MASK]\", \"lstrip\": false}, {\"id\": 3, \"content\": "           \
    "\"[SEP]\"}, "                                                                                                     \
    "{\"id\": 2, \"content\": \"[CLS]\"}, {\"id\": 1, \"content\": \"[UNK]\"}, {\"id\": 0, \"content\": \"[PAD]\"}], " \
    "\"normalizer\": {\"type\": \"BertNormalizer\", \"lowercase\": true, \"strip_accents\": null, "                    \
    "\"clean_text\": true, \"handle_chinese_chars\": true}, \"pre_tokenizer\": {\"type\": \"BertPreTokenizer\"}, "     \
    "\"model\": {\"type\": \"WordPiece\", \"unk_token\": \"[UNK]\", \"continuing_subword_prefix\": \"##\", "           \
    "\"max_input_chars_per_word\": 100, \"vocab\": {\"##s\": 7, \"[PAD]\": 0, \"[UNK]\": 1, \"[CLS]\": 2, "            \
    "\"[SEP]\": 3, \"[MASK]\": 4, \"the\": 5, \"Caf\u00e9\": 6, \"cafe\": 8, \"!\": 9}}}"

static void test_wordpiece(Tests* t) {
    static const TextChange changes[] = {
        {"\"BertNormalizer\"", "\"Sequence\"", "normalizer's \"type\" is \"Sequence\"; only \"BertNormalizer\""},
        {"\"lowercase\"", "\"x\"", "key \"lowercase\": missing"},
        {"\"clean_text\": true", "\"clean_text\": false", "\"clean_text\""},
        {"BertPreTokenizer", "Whitespace", "pre_tokenizer's \"type\" is \"Whitespace\""},
        {"\"unk_token\": \"[UNK]\"", "\"unk_token\": \"<unk>\"", "\"unk_token\" is \"<unk>\""},
        {"prefix\": \"##\"", "prefix\": \"@\"", "prefix\" is \"@\""},
        {"per_word\": 100", "per_word\": 9", "\"max_input_chars_per_word\" is 9"},
        {"\"vocab\":", "\"vocab\": {}, \"x\":", "has no [PAD]"},
        {"\"the\": 5", "\"the\": 10", "token \"the\": its id 10 is not below"},
        {"\"the\": 5", "\"the\": 4", "token \"the\": its id 4 is also"},
        {"{\"id\": 4", "{\"id\": 9, \"content\": \"<x>\"}, {\"id\": 4",
         "added token <x> with the id 9 is not supported"},
        {"{\"id\": 4", "{\"id\": 3", "added token [MASK] with the id 3"},
        {"\"lstrip\": false", "\"lstrip\": true", "[MASK]'s \"lstrip\" is true"},
        {", {\"id\": 0, \"content\": \"[PAD]\"}", "", "has no added token for one of [PAD]"},
    };
    static const int ids[] = {5, 8, 7, 9, 4, 99, -1};
    WordPiece w;
    Text text = {NULL, 0, 0};
    free(put_json(t, WORDPIECE));
    EXPECT(t, wordpiece_open(&w, t->directory, CASE_OF_MODEL) == 0 && w.letter_case == UNCASED && !w.is_bytes);
    EXPECT(t, w.size == 10 && w.mask == 4 && wordpiece_id(&w, "##s", 3) == 7 && wordpiece_id(&w, "x", 1) == -1);
    wordpiece_decode(&text, &w, ids, COUNT_OF(ids));
    EXPECT_TEXT(t, text.text, "the cafes! [MASK]");
    wordpiece_free(&w);
    expect_text_changes(t, "WordPiece", WORDPIECE, changes, COUNT_OF(changes), put_json, open_wordpiece);
    char* path = put_text_file(t, "vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nx");  // which comes first
    EXPECT(t, wordpiece_open(&w, t->directory, CASE_OF_MODEL) == 0 && w.size == 6);
    wordpiece_free(&w);
    free(path), path = put_text_file(t, "vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n");
    expect_end(t, USAGE, "vocab.txt: no [MASK]", "has no [MASK]", open_wordpiece, path);
    free(text.text), free(path);
}

// ---------------------------------------------------------------------------------------------------------
// For dev/test/check_tokenizers.py

static int print_files(const char* form, const char* directory, char** files, int n) {
    Bpe b;
    WordPiece w;
    int is_wordpiece = strcmp(form, "wordpiece") == 0;
    if ((is_wordpiece ? wordpiece_open(&w, directory, CASE_OF_MODEL) : bpe_open(&b, directory)) != 0)
        die(USAGE, "%s: holds no tokenizer", directory);
    for (int i = 0; i < n; i++) {
        size_t length;
        TokenIds found = {NULL, 0, 0};
        char* text = read_file(files[i], TOKENIZER_MAX_FILE, &length, USAGE);
        if (is_wordpiece) {
            wordpiece_encode(&found, &w, text, length);
        } else if (strcmp(form, "words") == 0) {
            found.id = (int*)xmalloc(length * sizeof(int));
            for (size_t at = 0; at < length; at += (size_t)found.id[found.count++])
                found.id[found.count] = (int)bpe_word(text + at, length - at);
        } else {
            found.count = bpe_encode(&found.id, &b, text, length, strcmp(form, "token") == 0 ? AS_TOKEN : AS_TEXT);
        }
        int count = (int)found.count;
        fwrite(&count, sizeof count, 1, stdout);
        fwrite(found.id, sizeof(int), found.count, stdout);
        free(found.id), free(text);
    }
    if (is_wordpiece) wordpiece_free(&w);
    else bpe_free(&b);
    return DONE;
}

int main(int argc, char** argv) {
    if (argc >= 4) return print_files(argv[1], argv[2], argv + 3, argc - 3);
    static const TestCase cases[] = {{"bpe", test_bpe}, {"tokenizer", test_tokenizer}, {"wordpiece", test_wordpiece}};
    return tests_main(argc, argv, cases, COUNT_OF(cases));
}
