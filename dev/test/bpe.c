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
#include "dev/test/tests.h"
#include "llmc/run/find_files.h"

// ---------------------------------------------------------------------------------------------------------
// A small vocabulary: id = byte, then what the merges make in the order of their ids, then added tokens

// A merge listed twice has its last rank. Among p, q, r and z, a merge forms a pair of a lower rank.
static const char* const merges[] = {"\u0120 t", "h e",           "\u0120t he",    "b c",
                                     "a b",      "a bc",          "ab ab",         "aa aa",
                                     "a a",      "\u00c3 \u00a9", "\u0120 \u0120", "\u0120\u0120 \u0120\u0120",
                                     "q r",      "p q",           "z p",           "p qr",
                                     "a b"};
static const char* const added[] = {"<|endoftext|>", "xyz", "yz!", "xyzx", "<|end", "   ", "<|endz", ""};
enum { BYTES = 256, FIRST_ADDED = BYTES + COUNT_OF(merges) - 1 };

// Its files: tokenizer.json with merges as strings or as pairs, GPT-2's files by either name.
typedef enum { STRINGS, PAIRS, VOCAB_JSON, ENCODER_JSON, FORMS } Form;

#define KIND "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true}"

// {"token": id, ...}
static Text vocabulary_json(const char* more) {
    Text t = {NULL, 0, 0};
    int id = BYTES, byte_of[BYTE_ALPHABET_END];
    byte_alphabet(byte_of);
    text_printf(&t, "{");
    for (uint32_t c = 0; c < BYTE_ALPHABET_END; c++) {
        char name[4];
        if (byte_of[c] < 0) continue;
        name[utf8_encode(name, c)] = '\0';
        json_put_integer(&t, name, byte_of[c]);
    }
    for (size_t i = 0; i + 1 < COUNT_OF(merges); i++) {
        char name[16];
        size_t left = strcspn(merges[i], " ");
        snprintf(name, sizeof name, "%.*s%s", (int)left, merges[i], merges[i] + left + 1);
        json_put_integer(&t, name, id++);
    }
    text_printf(&t, "%s}", more);
    return t;
}

static void drop(const Tests* t, const char* name) {
    char* path = path_in(t, name);
    unlink(path);
    free(path);
}

static void open_bpe(Bpe* b, const Tests* t) {
    if (bpe_open(b, t->directory) != 0) die(FAILED, "%s: no tokenizer", t->directory);
}

static void open_form(Bpe* b, const Tests* t, Form form) {
    static const char* const names[][2] = {
        {"tokenizer.json", ""}, {"tokenizer.json", ""}, {"vocab.json", "merges.txt"}, {"encoder.json", "vocab.bpe"}};
    int is_whole = form <= PAIRS;
    const char* end = form == ENCODER_JSON ? "\r\n" : "\n";
    Text vocabulary = vocabulary_json(is_whole ? "" : ", \"<|endoftext|>\": 272"), file = {NULL, 0, 0};
    if (is_whole) text_printf(&file, "{\"added_tokens\":[");
    else text_printf(&file, "#version: 0.2%s", end);
    for (size_t i = 0; i < COUNT_OF(added) && is_whole; i++)
        text_printf(&file, "%s{\"id\":%zu,\"content\":\"%s\",\"special\":%s,\"lstrip\":false}", i ? "," : "",
                    FIRST_ADDED + i, added[i], i ? "false" : "true");
    if (is_whole)
        text_printf(&file, "],\"normalizer\":null," KIND ",\"model\":{\"type\":\"BPE\",\"vocab\":%s,\"merges\":[",
                    vocabulary.text);
    for (size_t i = 0; i < COUNT_OF(merges); i++) {
        int left = (int)strcspn(merges[i], " ");
        if (!is_whole) text_printf(&file, "%s%s", merges[i], end);
        else if (form == STRINGS) text_printf(&file, "%s\"%s\"", i ? ", " : "", merges[i]);
        else text_printf(&file, "%s[\"%.*s\", \"%s\"]", i ? ", " : "", left, merges[i], merges[i] + left + 1);
    }
    if (is_whole) text_printf(&file, "]}}");
    free(put_file(t, names[form][is_whole ? 0 : 1], file.text, file.length));
    if (!is_whole) free(put_file(t, names[form][0], vocabulary.text, vocabulary.length));
    open_bpe(b, t);
    for (int i = 0; i <= !is_whole; i++) drop(t, names[form][i]);
    free(file.text), free(vocabulary.text);
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
                      tokens[] =
                          "264 98 32 262 260 32 263 97 258 258 110 32 265 32 270 268 32 97 261 32 261 261 32 73 39 "
                          "118 101 32 105 116 39 115 110 ";
    static const struct {
        const char *text, *as_token, *as_text;
    } specials[] = {
        {"a<|endoftext|>b", "97 272 98 ", "97 " END_TEXT "98 "},
        {"<|endoftext|", "276 111 102 116 101 120 116 124 ", "276 111 102 116 101 120 116 124 "},
        {"<|end <|endoftext|><|endoftext|>", "276 32 272 272 ", "276 32 " END_TEXT END_TEXT},
        {"<|endz", "278 ", "278 "},
        {"xyzx xyz! wxyz", "275 32 273 33 32 119 273 ", "275 32 273 33 32 119 273 "},
        {"xyzxyzx  <|endoftext|>", "275 121 122 120 266 272 ", "275 121 122 120 32 32 " END_TEXT},
        {" a    b", "32 97 277 32 98 ", "32 97 277 32 98 "},
    };
    Bpe b;
    expect_that(t, bpe_open(&b, t->directory) == -1, "no tokenizer");
    for (Form form = STRINGS; form < FORMS; form = (Form)(form + 1)) {
        open_form(&b, t, form);
        expect_tokens(t, &b, "no text", "", AS_TOKEN, "");
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

// A million equal characters as one word of letters, of white space, of numbers, of others: takes a second, but would
// take an hour if the time grew with the square of the word's length. And no byte is read behind a text that ends
// inside a character: a sanitizer would report it.
static void test_long_words(Tests* t) {
    enum { LONG = 1000000 };
    static const struct {
        char fill;
        int every, token;  // of how many characters one token
    } cases[] = {{'a', 4, 263}, {' ', 4, 267}, {'!', 1, '!'}, {'1', 1, '1'}};
    char* text = (char*)xmalloc(LONG);
    int* ids;
    Bpe b;
    open_form(&b, t, VOCAB_JSON);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        clock_t start = clock();
        memset(text, cases[i].fill, LONG);
        size_t count = bpe_encode(&ids, &b, text, LONG, AS_TEXT), bad = 0;
        double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
        for (size_t k = 0; k < count; k++) bad += ids[k] != cases[i].token;
        char* name = xprintf("%d times '%c': %zu tokens in %.2f s", LONG, cases[i].fill, count, seconds);
        expect_that(t, count == (size_t)(LONG / cases[i].every) && bad == 0 && seconds < 60, name);
        free(name), free(ids);
    }
    text = (char*)xrealloc(text, 2);
    memcpy(text, "\xF0\x9F", 2);
    size_t count = bpe_encode(&ids, &b, text, 2, AS_TEXT);
    expect_that(t, count == 3 && ids[0] == 239 && ids[1] == 191 && ids[2] == 189,
                "a text that ends inside a character");
    free(text), free(ids);
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
#define SPLIT                                                                                                          \
    "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"'s|'t|'re|'ve|'m|'ll|'d| ?\\\\p{L}+| ?\\\\p{N}+| "                   \
    "?[^\\\\s\\\\p{L}\\\\p{N}]+|\\\\s+(?!\\\\S)|\\\\s+\"},\"behavior\":\"Isolated\",\"invert\":false}"
#define WITH_PARTS(parts) "\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[" parts "]}"

static void test_refused(Tests* t) {
    static const char good[] =
        "{\"added_tokens\":[{\"id\":7,\"content\":\"q\",\"special\":true,\"lstrip\":false}],\"normalizer\":null," KIND
        ",\"model\":{\"type\":\"BPE\",\"dropout\":null,\"continuing_subword_prefix\":\"\","
        "\"end_of_word_suffix\":\"\",\"ignore_merges\":false,\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[\"a "
        "b\"]}}";
    static const TextChange changes[] = {
        {"{", "{", NULL},
        {"}}", "}", "not valid JSON"},
        {"\"pre_tokenizer\"", "\"x\"", "key \"pre_tokenizer\""},
        {"\"pre_tokenizer\":{", "\"pre_tokenizer\":null,\"x\":{", "key \"pre_tokenizer\": is null"},
        {KIND, WITH_PARTS(SPLIT "," PART("false")), NULL},
        {KIND, WITH_PARTS(""), "key \"pre_tokenizer\": differs"},
        {KIND, WITH_PARTS("{\"type\":\"Digits\",\"individual_digits\":true}," PART("false")),
         "\"pre_tokenizer\": \"Digits\" differs"},
        {KIND, WITH_PARTS(PART("false") "," PART("false")), "\"pre_tokenizer\": \"ByteLevel\" differs"},
        {KIND, WITH_PARTS(PART("false") "," SPLIT), "\"pre_tokenizer\": \"Split\", or"},
        {KIND, WITH_PARTS("{\"type\":\"Split\",\"pattern\":{\"Regex\":\"x\"}}"), "\"Split\", or its pattern, differs"},
        {KIND, WITH_PARTS(PART("false")), "key \"use_regex\""},
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
        {"\"a b\"", "\"a b\",\"ab\"", "merge 2 is not two symbols"},
        {"\"a b\"", "\" b\"", "merge 1 is not two symbols"},
        {"\"a b\"", "\"a \"", "merge 1 is not two symbols"},
        {"\"a b\"", "\"a b c\"", "merge 1 is not two symbols"},
        {"\"a b\"", "[\"a\"]", "merge 1 is not two symbols"},
        {"\"a b\"", "[\"a\",\"b\",\"c\"]", "merge 1 is not two symbols"},
        {"\"a b\"", "\"a q\\n\"", "merge 1: \"q\\n\" is not in the vocabulary"},
        {"\"a b\"", "\"b a\"", "merge 1: \"ba\" is not in the vocabulary"},
        {"\"content\"", "\"x\"", "key \"content\": missing"},
        {"\"id\":7,", "", "token \"q\": its id"},
        {"\"special\":true", "\"special\":1", "key \"special\""},
        {"\"lstrip\":false", "\"lstrip\":true", "token \"q\": \"lstrip\" is not supported"},
    };
    expect_text_changes(t, "tokenizer.json", good, changes, COUNT_OF(changes), put_json, open_alone);
    drop(t, "tokenizer.json");
    free(put_text_file(t, "vocab.json", "{\"a\":0,\"b\":1,\"ab\":2}"));
    char *vocabulary = path_in(t, "vocab.json"), *lines = path_in(t, "merges.txt");
    expect_end(t, USAGE, "vocab.json: alone", "neither merges.txt nor vocab.bpe", open_alone, vocabulary);
    free(put_text_file(t, "merges.txt", "#version: 0.2\na b\n\nab  c\n"));
    expect_end(t, USAGE, "merges.txt: two spaces", "merge 2 is not two symbols", open_alone, lines);
    free(put_text_file(t, "merges.txt", "a b\na q"));
    expect_end(t, USAGE, "merges.txt: a symbol", "merge 2: \"q\" is not in the vocabulary in", open_alone, lines);
    drop(t, "vocab.json"), drop(t, "merges.txt");
    free(vocabulary), free(lines);
}

// A vocabulary of four symbols: texts with other bytes are refused.
static void encode_lacking(const char* path) {
    Bpe b;
    int* ids;
    char* directory = directory_of(path);
    if (bpe_open(&b, directory) != 0) die(FAILED, "%s: no tokenizer", directory);
    bpe_encode(&ids, &b, "abxyab", 6, AS_TOKEN);
}

static void test_missing_bytes(Tests* t) {
    char* path =
        put_json(t, "{" KIND ",\"model\":{\"vocab\":{\"a\":0,\"b\":1,\"ab\":2,\"\u0120\":3},\"merges\":[\"a b\"]}}");
    Bpe b;
    open_bpe(&b, t);
    expect_tokens(t, &b, "a vocabulary without most bytes", "ab ab", AS_TOKEN, "2 3 2 ");
    expect_end(t, USAGE, "a missing byte", "has no token for the byte 0x78, which the text contains", encode_lacking,
               path);
    bpe_free(&b);
    free(path);
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
    test_missing_bytes(&t);
    return tests_close(&t);
}
