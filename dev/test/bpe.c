/* Tests of byte-level BPE encoding (llmc/text/bpe.h): merges, special tokens, long words, the files of a vocabulary,
 * and refused files. Expected tokens are those of `tokenizers` 0.23. dev/test/check_bpe.py compares megabytes, with
 * bytes that are no UTF-8 among them, and runs this program for them:
 *
 *     test_bpe words|text|token DIRECTORY FILE...
 *
 * writes for each file, as 32-bit integers, their number and: the lengths of its words in bytes, or its tokens with
 * special ones as text or as tokens. The speed goes to stderr.
 *
 *     test_bpe [NAME]
 *
 * prints a line per case (whose name contains NAME) and `N passed, N failed`; exit status 1 if one failed. */

#include "llmc/text/bpe.h"
#include "dev/test/tests.h"
#include "llmc/run/find_files.h"

static void drop(const Tests* t, const char* name) {
    char* path = xprintf("%s/%s", t->directory, name);
    unlink(path);
    free(path);
}

// ---------------------------------------------------------------------------------------------------------
// A small vocabulary: id = byte, then what the merges make in the order of their ids, then added tokens

// A merge listed twice has its last rank. Among p, q, r and z, a merge forms a pair of a lower rank.
static const char* const merges[] = {"\u0120 t", "h e",           "\u0120t he",    "b c",
                                     "a b",      "a bc",          "ab ab",         "aa aa",
                                     "a a",      "\u00c3 \u00a9", "\u0120 \u0120", "\u0120\u0120 \u0120\u0120",
                                     "q r",      "p q",           "z p",           "p qr",
                                     "a b"};
static const struct {
    const char* content;
    int is_special;
} added[] = {
    {"<|endoftext|>", 1}, {"xyz", 0}, {"yz!", 0}, {"xyzx", 0}, {"<|end", 0}, {"   ", 0}, {"<|endz", 0}, {"", 0},
};
enum { BYTES = 256, FIRST_ADDED = BYTES + COUNT_OF(merges) - 1 };

#define KIND "\"pre_tokenizer\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true}"

static void append_byte(Text* out, int byte) {
    int byte_of[BYTE_ALPHABET_END], c = 0;
    byte_alphabet(byte_of);
    while (byte_of[c] != byte) c++;
    char spelling[2] = {(char)(c < 0x80 ? c : 0xC0 | c >> 6), (char)(0x80 | (c & 63))};
    text_append(out, spelling, c < 0x80 ? 1 : 2);
}

// {"token": id, ...}
static Text vocabulary_json(const char* more) {
    Text t = {NULL, 0, 0};
    int id = BYTES;
    text_printf(&t, "{");
    for (int byte = 0; byte < BYTES; byte++) {
        Text name = {NULL, 0, 0};
        append_byte(&name, byte);
        json_put_integer(&t, name.text, byte);
        free(name.text);
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

static void put_vocabulary(const Tests* t, const char* name, const char* more) {
    Text text = vocabulary_json(more);
    free(put_file(t, name, text.text, text.length));
    free(text.text);
}

static void put_merges(const Tests* t, const char* name, const char* line_end) {
    Text text = {NULL, 0, 0};
    text_printf(&text, "#version: 0.2%s", line_end);
    for (size_t i = 0; i < COUNT_OF(merges); i++) text_printf(&text, "%s%s", merges[i], line_end);
    free(put_file(t, name, text.text, text.length));
    free(text.text);
}

static Text added_json(void) {
    static const char* const truth[] = {"false", "true"};
    Text t = {NULL, 0, 0};
    for (size_t i = 0; i < COUNT_OF(added); i++)
        text_printf(&t,
                    "%s{\"id\":%zu,\"content\":\"%s\",\"special\":%s,\"single_word\":false,"
                    "\"lstrip\":false,\"rstrip\":false}",
                    i ? "," : "", FIRST_ADDED + i, added[i].content, truth[added[i].is_special]);
    return t;
}

typedef enum { STRINGS, PAIRS } MergeForm;

static void put_tokenizer(const Tests* t, MergeForm form, const char* added_tokens) {
    Text text = {NULL, 0, 0}, vocabulary = vocabulary_json("");
    text_printf(&text, "{\"added_tokens\":[%s],\"normalizer\":null," KIND ",\"model\":{\"type\":\"BPE\",\"vocab\":%s,",
                added_tokens, vocabulary.text);
    text_printf(&text, "\"merges\":[");
    for (size_t i = 0; i < COUNT_OF(merges); i++) {
        int left = (int)strcspn(merges[i], " ");
        text_printf(&text, i ? ", " : "");
        if (form == STRINGS) text_printf(&text, "\"%s\"", merges[i]);
        else text_printf(&text, "[\"%.*s\", \"%s\"]", left, merges[i], merges[i] + left + 1);
    }
    text_printf(&text, "]}}");
    free(put_file(t, "tokenizer.json", text.text, text.length));
    free(text.text);
    free(vocabulary.text);
}

static void open_bpe(Bpe* b, const Tests* t) {
    if (bpe_open(b, t->directory) != 0) die(FAILED, "%s: no tokenizer", t->directory);
}

// The tokens of a text as numbers with a space after each.
static Text numbers(Bpe* b, const char* text, size_t n, SpecialTokens special) {
    Text got = {NULL, 0, 0};
    int* ids;
    size_t count = bpe_encode(&ids, b, text, n, special);
    text_append(&got, "", 0);
    for (size_t i = 0; i < count; i++) text_printf(&got, "%d ", ids[i]);
    free(ids);
    return got;
}

static void expect_tokens(Tests* t, Bpe* b, const char* text, SpecialTokens special, const char* want) {
    Text got = numbers(b, text, strlen(text), special), name = {NULL, 0, 0};
    text_json_string(&name, text, strlen(text));
    text_printf(&name, special == AS_TEXT ? ", special tokens as text" : "");
    expect(t, strcmp(got.text, want) == 0, name.text, "tokens '%s', not '%s'", got.text, want);
    free(got.text);
    free(name.text);
}

// ---------------------------------------------------------------------------------------------------------
// Cases

static void test_merges(Tests* t) {
    static const struct {
        const char *text, *want;
    } cases[] = {
        {"", ""},
        {"aab", "264 98 "},
        {"ababab", "262 260 "},
        {"aaaaa", "263 97 "},
        {" the then", "258 258 110 "},
        {"\u00e9", "265 "},
        {"zpqr", "270 268 "},
        {"aabc abcabc", "97 261 32 261 261 "},
        {"         x", "267 267 32 120 "},
        {"I've it'sn", "73 39 118 101 32 105 116 39 115 110 "},
    };
    Bpe b;
    for (int form = STRINGS; form <= PAIRS; form++) {
        put_tokenizer(t, (MergeForm)form, "");
        open_bpe(&b, t);
        for (size_t i = 0; i < COUNT_OF(cases); i++) expect_tokens(t, &b, cases[i].text, AS_TOKEN, cases[i].want);
        bpe_free(&b);
    }
}

#define END_TEXT "60 124 101 110 100 111 102 116 101 120 116 124 62 "

static void test_added(Tests* t) {
    static const struct {
        const char *text, *as_token, *as_text;
    } cases[] = {
        {"<|endoftext|>", "272 ", END_TEXT},
        {"a<|endoftext|>b", "97 272 98 ", "97 " END_TEXT "98 "},
        {"<|endoftext|", "276 111 102 116 101 120 116 124 ", NULL},
        {"<|end <|endoftext|><|endoftext|>", "276 32 272 272 ", "276 32 " END_TEXT END_TEXT},
        {"<|endz", "278 ", NULL},
        {"xyzx xyz! wxyz", "275 32 273 33 32 119 273 ", NULL},
        {"xyzxyzx  <|endoftext|>", "275 121 122 120 266 272 ", "275 121 122 120 32 32 " END_TEXT},
        {" a    b", "32 97 277 32 98 ", NULL},
        {"\n \n<|endoftext|> the", "10 32 10 272 258 ", "10 32 10 " END_TEXT "258 "},
    };
    Bpe b;
    Text tokens = added_json();
    put_tokenizer(t, STRINGS, tokens.text);
    free(tokens.text);
    open_bpe(&b, t);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        expect_tokens(t, &b, cases[i].text, AS_TOKEN, cases[i].as_token);
        expect_tokens(t, &b, cases[i].text, AS_TEXT, cases[i].as_text ? cases[i].as_text : cases[i].as_token);
    }
    bpe_free(&b);
}

// Each form of the files has the same tokens.
static void test_files(Tests* t) {
    static const char* const names[][3] = {{"vocab.json", "merges.txt", "\n"}, {"encoder.json", "vocab.bpe", "\r\n"}};
    static const char text[] = " the abcab<|endoftext|>";
    Bpe b;
    drop(t, "tokenizer.json");
    expect_that(t, bpe_open(&b, t->directory) == -1, "no tokenizer");
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        put_vocabulary(t, names[i][0], ", \"<|endoftext|>\": 272");
        put_merges(t, names[i][1], names[i][2]);
        open_bpe(&b, t);
        expect_tokens(t, &b, text, AS_TOKEN, "258 32 261 260 272 ");
        expect_tokens(t, &b, text, AS_TEXT, "258 32 261 260 " END_TEXT);
        bpe_free(&b);
        drop(t, names[i][0]);
        drop(t, names[i][1]);
    }
}

// Of a character that the text's end cuts no byte behind the end is read: a sanitizer would report it.
static void test_cut(Tests* t) {
    Bpe b;
    char* alone = (char*)xmalloc(2);
    put_tokenizer(t, STRINGS, "");
    open_bpe(&b, t);
    memcpy(alone, "\xF0\x9F", 2);
    Text got = numbers(&b, alone, 2, AS_TEXT);
    expect(t, strcmp(got.text, "239 191 189 ") == 0, "the text ends inside a character", "tokens '%s'", got.text);
    free(got.text), free(alone);
    bpe_free(&b);
}

// A million equal characters as one word of letters, of white space, of numbers, of others: takes a second, but would
// take an hour if the time grew with the square of the word's length.
static void test_long_words(Tests* t) {
    enum { LONG = 1000000 };
    static const struct {
        char fill;
        int every, token;  // of how many characters one token
    } cases[] = {{'a', 4, 263}, {' ', 4, 267}, {'!', 1, '!'}, {'1', 1, '1'}};
    char* text = (char*)xmalloc(LONG);
    Bpe b;
    put_tokenizer(t, STRINGS, "");
    open_bpe(&b, t);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        int* ids;
        clock_t start = clock();
        memset(text, cases[i].fill, LONG);
        size_t count = bpe_encode(&ids, &b, text, LONG, AS_TEXT), bad = 0;
        double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
        for (size_t k = 0; k < count; k++) bad += ids[k] != cases[i].token;
        char* name = xprintf("%d times '%c': %zu tokens in %.2f s", LONG, cases[i].fill, count, seconds);
        expect_that(t, count == (size_t)(LONG / cases[i].every) && bad == 0 && seconds < 60, name);
        free(name);
        free(ids);
    }
    free(text);
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
    put_vocabulary(t, "vocab.json", "");
    char *vocabulary = path_in(t, "vocab.json"), *lines = path_in(t, "merges.txt");
    expect_end(t, USAGE, "vocab.json: alone", "neither merges.txt nor vocab.bpe", open_alone, vocabulary);
    free(put_text_file(t, "merges.txt", "#version: 0.2\na b\n\nab  c\n"));
    expect_end(t, USAGE, "merges.txt: two spaces", "merge 2 is not two symbols", open_alone, lines);
    free(put_text_file(t, "merges.txt", "a b\na q"));
    expect_end(t, USAGE, "merges.txt: a symbol", "merge 2: \"aq\" is not in the vocabulary in", open_alone, lines);
    drop(t, "vocab.json"), drop(t, "merges.txt");
    free(vocabulary), free(lines);
}

// A vocabulary of four symbols: texts with other bytes are refused.
static void encode_lacking(const char* directory) {
    Bpe b;
    int* ids;
    if (bpe_open(&b, directory) != 0) die(FAILED, "%s: no tokenizer", directory);
    bpe_encode(&ids, &b, "abxyab", 6, AS_TOKEN);
    free(ids);
    bpe_free(&b);
}

static void test_missing_bytes(Tests* t) {
    const char* const files[] = {"tokenizer.json", "vocab.json"};
    for (size_t i = 0; i < COUNT_OF(files); i++) {
        const char* vocabulary = "{\"a\":0,\"b\":1,\"ab\":2,\"\u0120\":3}";
        char* text = i ? xprintf("%s", vocabulary)
                       : xprintf("{" KIND ",\"model\":{\"vocab\":%s,\"merges\":[\"a b\"]}}", vocabulary);
        Bpe b;
        Text said = {NULL, 0, 0};
        free(put_file(t, files[i], text, strlen(text)));
        if (i) free(put_file(t, "merges.txt", "a b\n", 4));
        open_bpe(&b, t);
        expect_tokens(t, &b, "ab ab", AS_TOKEN, "2 3 2 ");
        int code = exit_status_of(encode_lacking, t->directory, &said);
        char* want = xprintf("/%s: has no token for the byte 0x78, which the text contains", files[i]);
        expect_that(t, code == USAGE && is_one_line(&said) && strstr(said.text, want), want);
        free(want), free(said.text);
        bpe_free(&b);
        drop(t, files[i]);
        free(text);
    }
    drop(t, "merges.txt");
}

// ---------------------------------------------------------------------------------------------------------

// The output for dev/test/check_bpe.py.
static int print_files(const char* form, const char* directory, char** files, int n) {
    int is_words = strcmp(form, "words") == 0;
    double seconds = 0, bytes = 0;
    Bpe b;
    if (bpe_open(&b, directory) != 0) die(USAGE, "%s: holds no tokenizer", directory);
    for (int i = 0; i < n; i++) {
        size_t length, found = 0;
        char* text = read_file(files[i], TOKENIZER_MAX_FILE, &length, USAGE);
        int* numbers = NULL;
        double start = now_seconds();
        if (is_words) {
            numbers = (int*)xmalloc(length * sizeof(int));
            for (size_t at = 0; at < length; at += (size_t)numbers[found++])
                numbers[found] = (int)bpe_word(text + at, length - at);
        } else {
            found = bpe_encode(&numbers, &b, text, length, strcmp(form, "token") == 0 ? AS_TOKEN : AS_TEXT);
        }
        seconds += now_seconds() - start, bytes += (double)length;
        int count = (int)found;
        fwrite(&count, sizeof count, 1, stdout);
        fwrite(numbers, sizeof(int), found, stdout);
        free(numbers);
        free(text);
    }
    fprintf(stderr, "%.1f MB/s\n", bytes / seconds / 1e6);
    bpe_free(&b);
    return DONE;
}

int main(int argc, char** argv) {
    if (argc >= 4) return print_files(argv[1], argv[2], argv + 3, argc - 3);
    Tests t;
    tests_choose(&t, argc, argv);
    t.directory = make_scratch_directory("test_bpe");
    test_merges(&t);
    test_added(&t);
    test_files(&t);
    test_cut(&t);
    test_long_words(&t);
    test_refused(&t);
    test_missing_bytes(&t);
    return tests_close(&t);
}
