/* Tests of llmc/text: byte-level BPE (the forms of a vocabulary's files, special tokens, long words), the texts of
 * token ids, WordPiece, and refused files. Expected tokens are those of `tokenizers` 0.23. dev/test/check_tokenizers.py
 * compares megabytes, with bytes that are no UTF-8 among them, and runs this program for them:
 *
 *     test_tokenizers words|text|token|wordpiece DIRECTORY FILE...
 *
 * writes for each file, as 32-bit integers, their number and: the lengths of its words in bytes, or its tokens with
 * special ones as text or as tokens, or those of WordPiece.
 *
 *     test_tokenizers [NAME]      the tests whose name contains NAME */

#include "apps/use/bpe.h"
#include "dev/data/corpus_files.h"
#include "dev/test/tests.h"
#include "llmc/run/find_files.h"
#include "llmc/text/tokenizer.h"
#include "llmc/text/wordpiece.h"

static char* put_json(const Tests* t, const char* text) { return put_text_file(t, "tokenizer.json", text); }

// ---------------------------------------------------------------------------------------------------------
// A small vocabulary: id = byte, then what the merges make in the order of their ids, then added tokens

// Among p, q, r and z, a merge forms a pair of a lower rank; "aa" is merged after it is part of another merge.
static const Merge merge[] = {{' ', 't'}, {'h', 'e'}, {256, 257}, {'b', 'c'}, {'a', 'b'}, {'a', 259},
                              {260, 260}, {264, 264}, {'a', 'a'}, {195, 169}, {' ', ' '}, {266, 266},
                              {'q', 'r'}, {'p', 'q'}, {'z', 'p'}, {'p', 268}};
static const Merges merges = {merge, COUNT_OF(merge)};
static const char* const added[] = {"xyz", "yz!", "xyzx", "<|end", "   ", "<|endz"};  // ids 273 ...

// Its files: tokenizer.json with merges as strings or as pairs, GPT-2's files by either name.
typedef enum { STRINGS, PAIRS, VOCAB_JSON, ENCODER_JSON, FORMS } Form;

#define KIND "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true}"

static void drop(const Tests* t, const char* name) {
    char* path = path_in(t, name);
    unlink(path);
    free(path);
}

static void open_bpe(Bpe* b, const Tests* t) {
    if (bpe_open(b, t->directory) != 0) die(FAILED, "%s: no tokenizer", t->directory);
}

// With added tokens, and merges as strings or as pairs of strings.
static Text whole_json(Form form) {
    static const char first[] = "\"added_tokens\":[", last[] = "\"merges\":[";
    Text made = tokenizer_json(merges), t = {NULL, 0, 0};
    char *tokens = strstr(made.text, first) + strlen(first), *list = strstr(made.text, last) + strlen(last);
    text_append(&t, made.text, (size_t)(tokens - made.text));
    for (size_t i = 0; i < COUNT_OF(added); i++)
        text_printf(&t, "{\"id\":%zu,\"content\":\"%s\",\"special\":false},", 273 + i, added[i]);
    text_append(&t, tokens, (size_t)(list - tokens));
    for (int is_open = 0; *list; list++) {
        if (form == STRINGS || (*list != '"' && *list != ' ')) text_append(&t, list, 1);
        else if (*list == ' ') text_printf(&t, "\",\"");
        else text_printf(&t, (is_open = !is_open) ? "[\"" : "\"]");
    }
    free(made.text);
    return t;
}

static void open_form(Bpe* b, const Tests* t, Form form) {
    static const char* const names[][2] = {
        {"tokenizer.json", ""}, {"tokenizer.json", ""}, {"vocab.json", "merges.txt"}, {"encoder.json", "vocab.bpe"}};
    int is_whole = form <= PAIRS;
    Text file = is_whole ? whole_json(form) : vocab_json(merges), made = merges_txt(merges), lines = {NULL, 0, 0};
    for (const char* c = made.text; *c; c++)
        text_printf(&lines, form == ENCODER_JSON && *c == '\n' ? "\r%c" : "%c", *c);
    free(put_file(t, names[form][0], file.text, file.length));
    if (!is_whole) free(put_file(t, names[form][1], lines.text, lines.length));
    open_bpe(b, t);
    for (int i = 0; i <= !is_whole; i++) drop(t, names[form][i]);
    free(file.text), free(made.text), free(lines.text);
}

// One case: the tokens of a text are these numbers, with a space after each.
static void expect_tokens(Tests* t, Bpe* b, const char* name, const char* text, SpecialTokens special,
                          const char* want) {
    Text got = {NULL, 0, 0};
    int* ids;
    size_t count = bpe_encode(&ids, b, text, strlen(text), special);
    text_append(&got, "", 0);
    for (size_t i = 0; i < count; i++) text_printf(&got, "%d ", ids[i]);
    expect(t, strcmp(got.text, want) == 0, name, "tokens '%s', not '%s'", got.text, want);
    free(got.text), free(ids);
}

// ---------------------------------------------------------------------------------------------------------
// Cases

#define END_TEXT "60 124 101 110 100 111 102 116 101 120 116 124 62 "

// Words, merges and the end of text are the same in each form; tokenizer.json has added tokens too.
static void test_forms(Tests* t) {
    static const char words[] = "aab ababab aaaaa the then \u00e9 zpqr aabc abcabc I've it'sn",
                      tokens[] = "97 260 32 262 260 32 263 97 258 258 110 32 265 32 270 268 32 97 261 32 261 261 32 "
                                 "73 39 118 101 32 105 116 39 115 110 ";
    static const struct {
        const char *text, *as_token, *as_text;
    } specials[] = {
        {"a<|endoftext|>b", "97 272 98 ", "97 " END_TEXT "98 "},
        {"<|end <|endoftext|><|endoftext|>", "276 32 272 272 ", "276 32 " END_TEXT END_TEXT},
        {"xyzx xyz! wxyz", "275 32 273 33 32 119 273 ", "275 32 273 33 32 119 273 "},
        {"xyzxyzx  <|endoftext|>", "275 121 122 120 266 272 ", "275 121 122 120 32 32 " END_TEXT},
        {" a    b", "32 97 277 32 98 ", "32 97 277 32 98 "},
    };
    Bpe b;
    expect_that(t, bpe_open(&b, t->directory) == -1, "no tokenizer");
    for (Form form = STRINGS; form < FORMS; form = (Form)(form + 1)) {
        open_form(&b, t, form);
        expect_tokens(t, &b, "words", words, AS_TOKEN, tokens);
        expect_tokens(t, &b, "the end of a text", "\n \n<|endoftext|> the", AS_TOKEN, "10 32 10 272 258 ");
        expect_tokens(t, &b, "the end of a text as text", "\n \n<|endoftext|> the", AS_TEXT,
                      "10 32 10 " END_TEXT "258 ");
        if (form >= VOCAB_JSON) expect_tokens(t, &b, "white space", "         x", AS_TOKEN, "267 267 32 120 ");
        for (size_t i = 0; i < COUNT_OF(specials) && form == STRINGS; i++) {
            expect_tokens(t, &b, specials[i].text, specials[i].text, AS_TOKEN, specials[i].as_token);
            expect_tokens(t, &b, specials[i].text, specials[i].text, AS_TEXT, specials[i].as_text);
        }
        bpe_free(&b);
    }
}

// A million equal characters as one word: takes a second, but would take an hour if the time grew with the square of
// the word's length. And no byte is read behind a text that ends inside a character: a sanitizer would report it.
static void test_long_words(Tests* t) {
    enum { LONG = 1000000 };
    char *text = (char*)xmalloc(LONG), *end = (char*)xmalloc(2);
    int* ids;
    Bpe b;
    open_form(&b, t, VOCAB_JSON);
    for (int i = 0; i < 2; i++) {
        clock_t start = clock();
        memset(text, "a "[i], LONG);
        size_t count = bpe_encode(&ids, &b, text, LONG, AS_TEXT), bad = 0;
        for (size_t k = 0; k < count; k++) bad += ids[k] != (i ? 267 : 263);
        double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
        expect(t, count == LONG / 4 && !bad && seconds < 60, i ? "a million spaces" : "a million letters",
               "%zu tokens, %zu wrong, in %.2f s", count, bad, seconds);
        free(ids);
    }
    memcpy(end, "\xF0\x9F", 2);
    size_t count = bpe_encode(&ids, &b, end, 2, AS_TEXT);
    expect_that(t, count == 3 && ids[0] == 239 && ids[1] == 191 && ids[2] == 189,
                "a text that ends inside a character");
    free(text), free(end), free(ids);
    bpe_free(&b);
}

// ---------------------------------------------------------------------------------------------------------
// Refused files

static void open_alone(const char* path) {
    Bpe b;
    char* directory = directory_of(path);
    if (bpe_open(&b, directory) == 0) bpe_free(&b);
    free(directory);
}

#define PART(regex) "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":" regex "}"
#define WITH_PARTS(parts) "\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[" parts "]}"

static void test_refused(Tests* t) {
    static const char good[] =
        "{\"added_tokens\":[{\"id\":7,\"content\":\"q\",\"special\":true,\"lstrip\":false}],\"normalizer\":null," KIND
        ",\"model\":{\"type\":\"BPE\",\"dropout\":null,\"continuing_subword_prefix\":\"\","
        "\"end_of_word_suffix\":\"\",\"ignore_merges\":false,\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[\"a "
        "b\"]}}";
    static const TextChange changes[] = {
        {"\"pre_tokenizer\"", "\"x\"", "key \"pre_tokenizer\""},
        {KIND, WITH_PARTS("{\"type\":\"Split\",\"pattern\":{\"Regex\":\"x\"}}"), "\"Split\", or its pattern, differs"},
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
        {"\"a b\"", "\"a b c\"", "merge 1 is not two symbols"},
        {"\"a b\"", "[\"a\",\"b\",\"c\"]", "merge 1 is not two symbols"},
        {"\"a b\"", "\"b a\"", "merge 1: \"ba\" is not in the vocabulary"},
        {"\"content\"", "\"x\"", "key \"content\": missing"},
        {"\"id\":7,", "", "token \"q\": its id"},
        {"\"special\":true", "\"special\":1", "key \"special\""},
        {"\"lstrip\":false", "\"lstrip\":true", "token \"q\": \"lstrip\" is not supported"},
    };
    expect_text_changes(t, "tokenizer.json", good, changes, COUNT_OF(changes), put_json, open_alone);
    drop(t, "tokenizer.json");
    free(put_text_file(t, "vocab.json", "{\"a\":0,\"b\":1,\"ab\":2}"));
    char* lines = path_in(t, "merges.txt");
    free(put_text_file(t, "merges.txt", "#version: 0.2\na b\n\nab  c\n"));
    expect_end(t, USAGE, "merges.txt: two spaces", "merge 2 is not two symbols", open_alone, lines);
    free(put_text_file(t, "merges.txt", "a b\na q"));
    expect_end(t, USAGE, "merges.txt: a symbol", "merge 2: \"q\" is not in the vocabulary in", open_alone, lines);
    drop(t, "vocab.json"), drop(t, "merges.txt");
    free(lines);
}

// ---------------------------------------------------------------------------------------------------------
// Tokenizer

static void open_tokenizer(const char* path) {
    Tokenizer k;
    char* directory = directory_of(path);
    if (tokenizer_open(&k, directory) != 0) die(LOST_PEER, "%s: no tokenizer", path);
    tokenizer_free(&k);
    free(directory);
}

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

static void open_wordpiece(const char* path) {
    WordPiece w;
    char* directory = directory_of(path);
    if (wordpiece_open(&w, directory, UNCASED) != 0) die(LOST_PEER, "%s: no vocabulary", path);
    wordpiece_free(&w);
    free(directory);
}

// The tokens of a text, spelled, separated by spaces.
static void expect_words(Tests* t, const WordPiece* w, const char* text, const char* want) {
    TokenIds ids = {NULL, 0, 0};
    Text got = {NULL, 0, 0};
    wordpiece_encode(&ids, w, text, strlen(text));
    text_append(&got, "", 0);
    for (size_t i = 0; i < ids.count; i++) {
        size_t n;
        const char* token = wordpiece_token(w, ids.id[i], &n);
        if (i) text_append(&got, " ", 1);
        text_append(&got, token, n);
    }
    if (strcmp(got.text, want) != 0) fail(t, "\"%s\" is \"%s\", not \"%s\"", text, got.text, want);
    token_ids_free(&ids);
    free(got.text);
}

// Words and their tokens, as `tokenizers` 0.23 has them. dev/test/check_tokenizers.py compares every character, and all
// that tokenizer_config.json may say of case, accents and ideographs.
static void test_wordpiece(Tests* t) {
    static const char vocabulary[] = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\nun\n##aff\n##able\ncafe\n!\n,\n[\n]\n"
                                     "mask\na\n##a\n\xe4\xb8\xad\n##\xe4\xb8\xad\n\xc3\x89\nE\n##\xcc\x81\ne\n##e\n";
    static const char* const cases[][2] = {
        {"The UNAFFABLE  caf\xc3\xa9!", "the un ##aff ##able cafe !"},
        {"unaff,unx the", "un ##aff , [UNK] the"},
        {"the[MASK]the [mask] [MASK][SEP]", "the [MASK] the [ mask ] [MASK] [SEP]"},
        {"the\xc2\xad\xe2\x80\x8b\x01 the\xc2\xa0the\xff\xe3\x80", "the the the"},
    };
    static const char rules_text[] = "\xc3\x89 E\xcc\x81 a\xe4\xb8\xad"
                                     "e [MASK]\xc3\x89";
    static const char* const rules[][2] = {
        {"{\"do_lower_case\": true, \"strip_accents\": false}", "[UNK] e ##\xcc\x81 a \xe4\xb8\xad e [MASK] [UNK]"},
        {"{\"do_lower_case\": false, \"tokenize_chinese_chars\": false}",
         "\xc3\x89 E ##\xcc\x81 a ##\xe4\xb8\xad ##e [MASK] \xc3\x89"},
    };
    static const int ids[] = {5, 6, 7, 8, 11, 9, 10, 4, 99, -1};
    WordPiece w;
    Text text = {NULL, 0, 0};
    char longest[102] = "", *path = put_text_file(t, "vocab.txt", vocabulary);
    EXPECT(t, wordpiece_open(&w, t->directory, CASE_OF_MODEL) == 0 && w.letter_case == UNCASED && !w.is_bytes);
    EXPECT(t, w.mask == 4 && wordpiece_id(&w, "##able", 6) == 8 && wordpiece_id(&w, "x", 1) == -1);
    for (size_t i = 0; i < COUNT_OF(cases); i++) expect_words(t, &w, cases[i][0], cases[i][1]);
    memset(longest, 'a', 101);
    expect_words(t, &w, longest, "[UNK]");  // longer than any word
    wordpiece_decode(&text, &w, ids, COUNT_OF(ids));
    EXPECT_TEXT(t, text.text, "the unaffable, cafe! [MASK]");
    wordpiece_free(&w);
    for (size_t i = 0; i < COUNT_OF(rules); i++) {
        free(put_text_file(t, "tokenizer_config.json", rules[i][0]));
        EXPECT(t, wordpiece_open(&w, t->directory, CASE_OF_MODEL) == 0);
        expect_words(t, &w, rules_text, rules[i][1]);
        wordpiece_free(&w);
    }
    free(text.text), free(path);
    path = put_text_file(t, "vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n");
    expect_end(t, USAGE, "vocab.txt: no [MASK]", "has no [MASK]", open_wordpiece, path);
    free(path);
}

#define WORDPIECE                                                                                                      \
    "{\"added_tokens\": [{\"id\": 4, \"content\": \"[MASK]\", \"lstrip\": false}, {\"id\": 3, \"content\": "           \
    "\"[SEP]\"}, "                                                                                                     \
    "{\"id\": 2, \"content\": \"[CLS]\"}, {\"id\": 1, \"content\": \"[UNK]\"}, {\"id\": 0, \"content\": \"[PAD]\"}], " \
    "\"normalizer\": {\"type\": \"BertNormalizer\", \"lowercase\": true, \"strip_accents\": null, "                    \
    "\"clean_text\": true, \"handle_chinese_chars\": true}, \"pre_tokenizer\": {\"type\": \"BertPreTokenizer\"}, "     \
    "\"model\": {\"type\": \"WordPiece\", \"unk_token\": \"[UNK]\", \"continuing_subword_prefix\": \"##\", "           \
    "\"max_input_chars_per_word\": 100, \"vocab\": {\"##s\": 7, \"[PAD]\": 0, \"[UNK]\": 1, \"[CLS]\": 2, "            \
    "\"[SEP]\": 3, \"[MASK]\": 4, \"the\": 5, \"Caf\u00e9\": 6, \"cafe\": 8}}}"

static void test_wordpiece_json(Tests* t) {
    static const TextChange changes[] = {
        {"\"BertNormalizer\"", "\"Sequence\"", "normalizer's \"type\" is \"Sequence\"; only \"BertNormalizer\""},
        {"\"lowercase\"", "\"x\"", "key \"lowercase\": missing"},
        {"\"clean_text\": true", "\"clean_text\": false", "\"clean_text\""},
        {"BertPreTokenizer", "Whitespace", "pre_tokenizer's \"type\" is \"Whitespace\""},
        {"\"unk_token\": \"[UNK]\"", "\"unk_token\": \"<unk>\"", "\"unk_token\" is \"<unk>\""},
        {"prefix\": \"##\"", "prefix\": \"@\"", "prefix\" is \"@\""},
        {"per_word\": 100", "per_word\": 9", "\"max_input_chars_per_word\" is 9"},
        {"\"vocab\":", "\"vocab\": {}, \"x\":", "has no [PAD]"},
        {"\"the\": 5", "\"the\": 9", "token \"the\": its id 9 is not below"},
        {"\"the\": 5", "\"the\": 4", "token \"the\": its id 4 is also"},
        {"{\"id\": 4", "{\"id\": 9, \"content\": \"<x>\"}, {\"id\": 4",
         "added token <x> with the id 9 is not supported"},
        {"{\"id\": 4", "{\"id\": 3", "added token [MASK] with the id 3"},
        {"\"lstrip\": false", "\"lstrip\": true", "[MASK]'s \"lstrip\" is true"},
        {", {\"id\": 0, \"content\": \"[PAD]\"}", "", "has no added token for one of [PAD]"},
    };
    WordPiece w;
    free(put_json(t, WORDPIECE));
    EXPECT(t, wordpiece_open(&w, t->directory, CASE_OF_MODEL) == 0 && w.letter_case == UNCASED && !w.is_bytes);
    EXPECT(t, w.size == 9 && w.mask == 4 && wordpiece_id(&w, "##s", 3) == 7 && w.longest == 6);
    expect_words(t, &w, "The Caf\xc3\xa9s[MASK]x", "the cafe ##s [MASK] [UNK]");
    wordpiece_free(&w);
    expect_text_changes(t, "WordPiece", WORDPIECE, changes, COUNT_OF(changes), put_json, open_wordpiece);
    free(put_text_file(t, "vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nx"));  // which comes first
    EXPECT(t, wordpiece_open(&w, t->directory, CASE_OF_MODEL) == 0 && w.size == 6);
    wordpiece_free(&w);
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
    static const TestCase cases[] = {{"bpe/forms", test_forms},     {"bpe/long_words", test_long_words},
                                     {"bpe/refused", test_refused}, {"tokenizer", test_tokenizer},
                                     {"wordpiece", test_wordpiece}, {"wordpiece/json", test_wordpiece_json}};
    return tests_main(argc, argv, cases, COUNT_OF(cases));
}
