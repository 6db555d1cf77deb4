/* Tests of byte-level BPE encoding (llmc/text/bpe.h): the forms of a vocabulary's files, special tokens, long words,
 * and refused files. Expected tokens are those of `tokenizers` 0.23. dev/test/check_bpe.py compares megabytes, with
 * bytes that are no UTF-8 among them, and runs this program for them:
 *
 *     test_bpe words|text|token DIRECTORY FILE...
 *
 * writes for each file, as 32-bit integers, their number and: the lengths of its words in bytes, or its tokens with
 * special ones as text or as tokens.
 *
 *     test_bpe [NAME]
 *
 * prints a line per case (whose name contains NAME) and `N passed, N failed`; exit status 1 if one failed. */

#include "llmc/text/bpe.h"
#include "dev/data/corpus_files.h"
#include "dev/test/tests.h"
#include "llmc/run/find_files.h"

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

// A million equal characters as one word: takes a second, but would take an hour if the time grew with the square of the
// word's length. And no byte is read behind a text that ends inside a character: a sanitizer would report it.
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

static char* put_json(const Tests* t, const char* text) { return put_text_file(t, "tokenizer.json", text); }

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

// The output for dev/test/check_bpe.py.
static int print_files(const char* form, const char* directory, char** files, int n) {
    Bpe b;
    if (bpe_open(&b, directory) != 0) die(USAGE, "%s: holds no tokenizer", directory);
    for (int i = 0; i < n; i++) {
        size_t length, found = 0;
        char* text = read_file(files[i], TOKENIZER_MAX_FILE, &length, USAGE);
        int* numbers = NULL;
        if (strcmp(form, "words") == 0) {
            numbers = (int*)xmalloc(length * sizeof(int));
            for (size_t at = 0; at < length; at += (size_t)numbers[found++])
                numbers[found] = (int)bpe_word(text + at, length - at);
        } else found = bpe_encode(&numbers, &b, text, length, strcmp(form, "token") == 0 ? AS_TOKEN : AS_TEXT);
        int count = (int)found;
        fwrite(&count, sizeof count, 1, stdout);
        fwrite(numbers, sizeof(int), found, stdout);
        free(numbers), free(text);
    }
    bpe_free(&b);
    return DONE;
}

int main(int argc, char** argv) {
    if (argc >= 4) return print_files(argv[1], argv[2], argv + 3, argc - 3);
    Tests t;
    tests_choose(&t, argc, argv);
    t.directory = make_scratch_directory("test_bpe");
    test_forms(&t);
    test_long_words(&t);
    test_refused(&t);
    return tests_close(&t);
}
