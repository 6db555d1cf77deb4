/* A mutation fuzzer over the readers of files that users bring.
 *
 *     build/san/test_fuzz 100000 240          as `make san` runs it: inputs of all readers, and seconds for them
 *     build/san/test_fuzz 100000 240 bpe 7    one reader, other draws
 *
 * An input is a case of READERS with one to eight changes; first each is read as it is. Every draw comes from one
 * stream, so that an input is a function of (seed, reader, number).
 *
 * A reader must take an input, and what it makes of it must be sound, or refuse it: with status 2, after lines that
 * begin with "warning: " and one that begins with "error: ". All else is a failure: a signal, a sanitizer's report, an
 * internal check, more memory than such a file can need, or five seconds. A child process reads each input.
 *
 * Binary files of one header have every byte of it changed in their own tests, by expect_any_damage(); refuse.txt has
 * damaged models and checkpoints, base.c a damaged log. */
#include "apps/tune/labelled.h"
#include "apps/tune/squad.h"
#include "apps/use/bpe.h"
#include "dev/test/child.h"
#include "llmc/data/safetensors.h"

const char* __asan_default_options(void);
const char* __asan_default_options(void) {
    return "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=1024";
}

enum { HANG_SECONDS = 5, CASE_FILES = 3, CASES = 4, TASK_T = 16, TASK_LABELS = 3 };

// ---------------------------------------------------------------------------------------------------------
// Readers of what lies in case/, which check what they were given

// A text that ends where the file ends, without a NUL, so that a sanitizer sees what is read behind it.
static char* read_exactly(const char* path, size_t* n) {
    char *text = read_file(path, SIZE_MAX, n, USAGE), *exact = (char*)xmalloc(*n);
    memcpy(exact, text, *n);
    free(text);
    return exact;
}

static void read_safetensors(void) {
    SafeTensors file;
    struct stat info;
    safetensors_open(&file, "case/input.safetensors");
    CHECK(stat("case/input.safetensors", &info) == 0);
    for (int i = 0; i < file.count; i++) {
        const SafeTensor* t = &file.tensors[i];
        CHECK(t->begin <= t->end && t->end <= (uint64_t)info.st_size);
        CHECK(t->end - t->begin == t->elements * (uint64_t)t->element_size && safetensors_find(&file, t->name));
        if ((t->dtype[0] != 'F' && strcmp(t->dtype, "BF16") != 0) || t->element_size == 1) continue;
        real* values = (real*)xmalloc((size_t)t->elements * sizeof(real));
        safetensors_read_real(t, 0, (size_t)t->elements, values);
        free(values);
    }
    safetensors_close(&file);
}

static void read_bpe(void) {
    Bpe b;
    Tokenizer t;
    size_t n, length;
    int* ids;
    if (tokenizer_open(&t, "case") != 0 || bpe_open(&b, "case") != 0) die(USAGE, "no tokenizer");
    for (int id = -1; id <= min_int(t.size, 4096); id++) {
        const char* bytes = tokenizer_decode(&t, id, &n);
        CHECK(!bytes || (bytes >= t.bytes.text && bytes + n <= t.bytes.text + t.bytes.length));
    }
    char* text = read_exactly("case/text.txt", &n);
    for (size_t i = bpe_encode(&ids, &b, text, n, AS_TOKEN); i-- > 0;) CHECK(tokenizer_decode(&t, ids[i], &length));
    free(text), free(ids);
    bpe_free(&b), tokenizer_free(&t);
}

static WordPiece read_words(void) {
    WordPiece w;
    if (wordpiece_open(&w, "case", CASE_OF_MODEL) != 0) die(USAGE, "no vocabulary");
    return w;
}

// Examples of tasks: sequences of tokens, each with a class from `least` on or with two positions in it.
static void check_examples(const Examples* e, const WordPiece* w, int least) {
    for (int i = 0; i < e->count; i++) {
        const int *label = e->label + 2 * i, *tokens = e->tokens + e->begin[i];
        int n = examples_length(e, i), most = e->targets == 1 ? TASK_LABELS : n;
        CHECK(n >= 2 && n <= TASK_T && e->second[i] >= 1 && e->second[i] <= n);
        for (int k = 0; k < n; k++) CHECK(tokens[k] >= 0 && tokens[k] < w->size);
        for (int k = 0; k < e->targets; k++) CHECK(label[k] >= least && label[k] < most);
    }
}

// Texts that need labels, or need none: by the file's size.
static void read_labelled(void) {
    const char* path = "case/texts.txt";
    WordPiece w = read_words();
    Examples e;
    LabelNames names = {NULL, 0};
    size_t size;
    free(read_file(path, SIZE_MAX, &size, USAGE));
    int may_lack = size % 2;
    if (may_lack) label_names_add(&names, "yes", 3);
    else labelled_find_names(&names, path, TASK_LABELS);
    labelled_read(&e, path, &w, &names, TASK_LABELS, TASK_T, may_lack);
    check_examples(&e, &w, -may_lack);
    examples_close(&e), label_names_free(&names), wordpiece_free(&w);
}

// Whatever a model says, its answers are JSON.
static void read_squad(void) {
    WordPiece w = read_words();
    SquadSettings settings = {TASK_T, 3, 4, 5, SQUAD_EVALUATE};
    Squad s;
    Examples e;
    Json answers;
    real logits[2 * TASK_T];
    squad_open(&s, &e, "case/questions.json", &w, settings);
    check_examples(&e, &w, 0);
    for (int k = 0; k < 2 * TASK_T; k++) logits[k] = (real)(k * 7 % 13);
    for (int i = 0; i < e.count; i++) squad_take(&s, &e, i, logits, 2);
    squad_write(&s, "answers.json");
    json_load(&answers, "answers.json", SIZE_MAX);
    json_free(&answers), squad_close(&s), examples_close(&e), wordpiece_free(&w);
}

typedef struct {
    const char *name, *text;  // each ' of the text is written as "; of a .safetensors file only the header is here
} CaseFile;

typedef struct {
    const char* name;
    void (*read)(void);
    CaseFile cases[CASES][CASE_FILES];
} Reader;

// clang-format off
#define WORDS {"vocab.txt", "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n##b\n##ing\nthe\n,\n\u00e9\n\u4e2d\nab\n!\n"}
#define VOCAB "{'a': 0, 'b': 1, '\u0120': 2, '\u0120ab': 3, '?': 4, '\u20ac': 5, 'ab': 6, '\u0143': 7, '!': 8}"

static const Reader READERS[] = {
    {"safetensors", read_safetensors, {
        {{"input.safetensors", "{'__metadata__':{'format':'pt'},'a':{'dtype':'BF16','shape':[2,3],"
                               "'data_offsets':[0,12]},'b':{'dtype':'F32','shape':[1],'data_offsets':[12,16]},"
                               "'c':{'dtype':'F64','shape':[],'data_offsets':[16,24]}}"}},
        {{"input.safetensors", "{'a':{'dtype':'F16','shape':[3,4],'data_offsets':[0,24]}}"}},
        {{"input.safetensors", "{'a':{'dtype':'F3\\n2','shape':[6],'data_offsets':[0,24]}}"}}}},
    {"bpe", read_bpe, {
        {{"tokenizer.json", "{'added_tokens': [{'id': 9, 'content': '<|endoftext|>'}], 'pre_tokenizer': {'type': "
                            "'ByteLevel', 'add_prefix_space': false}, 'decoder': {'type': 'ByteLevel'}, "
                            "'model': {'type': 'BPE', 'unk_token': '?', 'vocab': " VOCAB ", "
                            "'merges': ['a b', ['\u0120', 'ab']]}}"}, {"text.txt", "ab abb!"}},
        {{"vocab.json", VOCAB}, {"merges.txt", "#version: 0.2\na b\n\u0120 ab\n"}, {"text.txt", "ab abb!"}}}},
    {"labelled", read_labelled, {
        {{"texts.txt", "yes\tthe a\tb ab!!\nno\tab 12 ab ab ab ab ab ab ab ab ab ab\tthe\nmaybe\t\t\n"}, WORDS},
        {{"texts.txt", "id\tsentence1\tgold_label\tsentence2\nx\tthe\tyes\ta\ny\tab\tno\tb\nz\tab\tso\tb\n"}, WORDS},
        {{"texts.txt", "0\tThe aab [MASK]\n2\ta b\u00e9bing, \u4e2d \uac00 12\u0301 \xff\U0001f600\n\n1\tthe [\n"},
         WORDS, {"tokenizer_config.json", "{'do_lower_case': false}"}},
        {{"texts.txt", "a the aab\nab 12 ab\nthe\n"}, WORDS}}},
    {"squad", read_squad, {
        {{"questions.json", "{'data': [{'paragraphs': [{'context': 'The aab b\u00e9bing, \u4e2d ab 12 the a b', 'qas': "
                            "[{'id': 'q0', 'question': 'the a?', 'answers': [{'answer_start': 0, 'text': 'The'}]}, "
                            "{'id': 'q1', 'question': 'ab', 'is_impossible': true, 'answers': []}]}]}]}"}, WORDS}}},
};
// clang-format on

// ---------------------------------------------------------------------------------------------------------
// Changes

static struct {
    const Reader* reader;
    uint64_t seed, key;  // key: of the input's draws
    uint32_t draws;
} fuzz = {.seed = 1};

// 0 .. n - 1; 0 for n = 0.
static size_t draw(size_t n) { return n ? philox(fuzz.draws++, 0, 0, 0, fuzz.key).v[0] % n : 0; }

// Bytes [at, at + gone) give way to `n` others, which may be part of the same text.
static void text_splice(Text* t, size_t at, size_t gone, const void* bytes, size_t n) {
    Text result = {NULL, 0, 0};
    text_append(&result, t->text, at);
    text_append(&result, (const char*)bytes, n);
    text_append(&result, t->text + at + gone, t->length - at - gone);
    free(t->text);
    *t = result;
}

// A token: [begin, returned).
static size_t draw_token(const Text* t, size_t* begin) {
    const char* delimiters = " \n\r\t,:{}[]=";
    size_t at = draw(t->length), end = at;
    while (at > 0 && !strchr(delimiters, t->text[at - 1])) at--;
    while (end < t->length && !strchr(delimiters, t->text[end])) end++;
    *begin = at;
    return end;
}

#define DIGITS "0123456789"

// A byte or a piece, half of the time where headers are; or a token.
static void change(Text* t) {
    // clang-format off
    static const char* const odd[] = {
        "0", "-0", "-1", "2", "1e308", "1e400", "1e-400", "9223372036854775807", "9223372036854775808", "2147483648",
        "-9223372036854775808", "18446744073709551616", "4294967296", "65536", "0.5", "1E+2", "00", "1.", "-", "--",
        "0x10", "nan", "-Infinity", "null", "true", "\"\"", "[]", "{}", "\"\\u0000\"", "\"a\\u0000b\"", "\"\\ud800\"",
        "\"\\ud83d\\u0041\"", "\"\\n\\u001b[31m\"", "\"\xff\"", "\xe2\x82", "\xc4\xa0", "[0, 0]", "%s%n", "##", "=",
        "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[",
    };
    // clang-format on
    size_t at = draw(draw(2) ? t->length : min_size(t->length, 64)), some = draw(min_size(t->length - at, 40));
    size_t begin, from, end = draw_token(t, &begin), to = draw_token(t, &from), kind = draw(9);
    const char* word = odd[draw(COUNT_OF(odd))];
    char number[32];  // near the next in the text
    if (t->length == 0) return;
    size_t digit = begin + strcspn(t->text + begin, DIGITS), digits = strspn(t->text + digit, DIGITS);
    snprintf(number, sizeof number, "%lld", (long long)((uint64_t)strtoll(t->text + digit, NULL, 10) + draw(9) - 4));
    if (kind == 0) t->text[at] = (char)(t->text[at] ^ 1 << draw(8));
    else if (kind == 1) text_splice(t, at, t->length - at, "", 0);
    else if (kind == 2)
        for (size_t more = (size_t)1 << draw(8); more; more--) text_splice(t, at, 0, t->text + at, some);
    else if (kind == 3) text_splice(t, at, some, "", 0);
    else if (kind == 4) text_splice(t, begin, end - begin, t->text + from, to - from);
    else if (kind == 5) text_splice(t, digit, digits, number, strlen(number));
    else text_splice(t, begin, end - begin, word, strlen(word));
}

// Write a file of a case with `changes`.
static void write_changed(const CaseFile* file, int changes) {
    Text t = {NULL, 0, 0};
    char* path = xprintf("case/%s", file->name);
    text_append(&t, file->text, strlen(file->text));
    for (size_t i = 0; i < t.length; i++) t.text[i] = (char)(t.text[i] == '\'' ? '"' : t.text[i]);
    int is_binary = strstr(path, ".safetensors") != NULL, of_file = is_binary && changes && draw(3) == 0;
    for (int i = of_file; i < changes; i++) change(&t);
    uint64_t length = t.length;
    if (is_binary) text_splice(&t, 0, 0, &length, sizeof length), text_append(&t, "abcdefghijklmnopqrstuvwx", 24);
    if (of_file) change(&t);
    if (write_file(path, t.text, t.length) != 0) die(FAILED, "%s: %s", path, strerror(errno));
    free(path), free(t.text);
}

// ---------------------------------------------------------------------------------------------------------
// Attempts

// Fill case/ with input n, mostly with changes in the first file; below 0 with a case as it is.
static void write_case(int64_t n, int cases) {
    fuzz.key = rng_stream(fuzz.seed, (uint64_t)n, (uint32_t)(fuzz.reader - READERS), 0), fuzz.draws = 0;
    const CaseFile* files = fuzz.reader->cases[n < 0 ? (size_t)-n - 1 : draw((size_t)cases)];
    size_t count = 0, changed = 0;
    int changes = n >= 0;
    while (count < CASE_FILES && files[count].name) count++;
    if (draw(4) == 0) changed = draw(count);
    while (changes && changes < 8 && draw(3) == 0) changes++;
    remove_directory("case");
    make_directories("case");
    for (size_t i = 0; i < count; i++) write_changed(&files[i], i == changed ? changes : 0);
}

// In a child.
static void read_case(void* none) {
    (void)none;
    if (!freopen("/dev/null", "w", stdout)) die(FAILED, "/dev/null: %s", strerror(errno));
    alarm(HANG_SECONDS);
    fuzz.reader->read();
}

// Whether a reader that refuses says lines of warnings, then one error.
static int is_refusal(const Text* said) {
    const char* line = said->text;
    while (strncmp(line, "warning: ", 9) == 0 && strchr(line, '\n')) line = strchr(line, '\n') + 1;
    return strncmp(line, "error: ", 7) == 0 && strchr(line, '\n') == said->text + said->length - 1;
}

// All inputs of a reader, up to the first failure, whose files are kept.
static int try_reader(double inputs, double end) {
    int accepted = 0, refused = 0, failed = 0, cases = 0;
    while (cases < CASES && fuzz.reader->cases[cases][0].name) cases++;
    for (int64_t i = -cases; (double)i < inputs && !failed && (i < 0 || now_seconds() < end); i++) {
        Text said = {NULL, 0, 0};
        write_case(i, cases);
        int status = run_in_child(&said, STDERR_ONLY, read_case, NULL);
        accepted += status == DONE, refused += status == USAGE;
        failed = status != DONE && !(status == USAGE && is_refusal(&said));
        if (failed) printf("FAIL %s: status %d, stderr: %.3000s\n", fuzz.reader->name, status, said.text);
        CHECK(!failed || rename("case", fuzz.reader->name) == 0);
        free(said.text);
    }
    // A fuzzer whose inputs all end at the first byte tries nothing.
    int good = !failed && accepted >= (accepted + refused) / 100;
    printf("%s %-12s %6d accepted, %6d refused\n", good ? "ok  " : "FAIL", fuzz.reader->name, accepted, refused);
    return good;
}

int main(int argc, char** argv) {
    int good = 0, tried = 0, readers = argc > 3 ? 1 : (int)COUNT_OF(READERS);
    if (argc < 3 || argc > 5) die(USAGE, "usage: test_fuzz INPUTS SECONDS [READER [SEED]]");
    double inputs = strtod(argv[1], NULL) / readers, seconds = strtod(argv[2], NULL) / readers;
    if (argc == 5) fuzz.seed = strtoull(argv[4], NULL, 10);
    // In memory, if that is a directory: a run reads and writes about a million files.
    char* work = xprintf("%s/fuzz-XXXXXX", access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
    if (!mkdtemp(work) || chdir(work) != 0) die(FAILED, "%s: %s", work, strerror(errno));
    for (fuzz.reader = READERS; fuzz.reader < READERS + COUNT_OF(READERS); fuzz.reader++) {
        if (argc > 3 && strcmp(fuzz.reader->name, argv[3]) != 0) continue;
        good += try_reader(inputs, now_seconds() + seconds), tried++;
    }
    if (tried == 0) die(USAGE, "%s: there is no such reader", argv[3]);
    if (good == tried) remove_directory(work);
    else printf("the inputs that failed are in %s\n", work);
    printf("%d passed, %d failed\n", good, tried - good);
    return good != tried;
}
