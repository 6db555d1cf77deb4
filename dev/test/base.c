/* Tests of llmc/base: the JSON reader and writer, flags, random numbers, schedules, the log.
 * Prints a line per case and `N passed, N failed`; exit status 1 if one failed. With an argument, only cases whose name
 * contains it. */
#include <ctype.h>
#include <signal.h>
#include <sys/resource.h>

#include "dev/test/tests.h"
#include "llmc/base/flags.h"
#include "llmc/base/json.h"
#include "llmc/base/log.h"
#include "llmc/base/process.h"
#include "llmc/base/rng.h"
#include "llmc/base/schedule.h"
#include "llmc/checkpoint/loss_svg.h"

static void expect_text(Tests* t, const char* name, const char* got, const char* want) {
    expect(t, strcmp(got, want) == 0, name, "got\n%s\nwanted\n%s", got, want);
}

// ---------------------------------------------------------------------------------------------------------
// JSON

// Parse a copy that ends where the text ends, so that a sanitizer sees a read beyond it.
static int parse(Json* json, const char* text, size_t n, char* error) {
    char* copy = (char*)xmalloc(n);
    if (n) memcpy(copy, text, n);
    int result = json_parse(json, copy, n, error);
    free(copy);
    return result;
}

// Write the tree in a canonical form, for comparison.
static void write_tree(Text* t, const JsonNode* node) {
    if (node->key) {
        text_json_string(t, node->key, node->key_length);
        text_append(t, ":", 1);
    }
    if (node->type == JSON_NULL) text_printf(t, "null");
    if (node->type == JSON_BOOL) text_printf(t, node->integer ? "true" : "false");
    if (node->type == JSON_STRING) text_json_string(t, node->string, node->length);
    if (node->type == JSON_NUMBER && node->is_integer) text_printf(t, "%lldi", (long long)node->integer);
    if (node->type == JSON_NUMBER && !node->is_integer) text_json_number(t, node->number);
    if (node->type != JSON_ARRAY && node->type != JSON_OBJECT) return;
    size_t count = 0;
    text_printf(t, node->type == JSON_ARRAY ? "[" : "{");
    for (const JsonNode* child = node->first; child; child = child->next) {
        if (count++) text_append(t, ",", 1);
        write_tree(t, child);
    }
    text_printf(t, node->type == JSON_ARRAY ? "]" : "}");
    CHECK(count == node->count);
}

static void test_json_good(Tests* t) {
    static const struct {
        const char *name, *text, *tree;
    } cases[] = {
        {"null", "null", "null"},
        {"white space", " \t\r\n [ 1 , 2 ] \n", "[1i,2i]"},
        {"empty", "[{},[],\"\"]", "[{},[],\"\"]"},
        {"words", "[true,false,null]", "[true,false,null]"},
        {"integers", "[0,-0,-1,9223372036854775807,-9223372036854775808]",
         "[0i,0i,-1i,9223372036854775807i,-9223372036854775808i]"},
        {"larger than int64", "9223372036854775808", "9.223372036854776e+18"},
        {"reals", "[0.5,-1e-5,1E+2,2.50e1,1e-400,1.7976931348623157e308]",
         "[0.5,-1e-05,100,25,0,1.7976931348623157e+308]"},
        {"escapes", "\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0041\\u00e9\\u20AC\"",
         "\"\\\"\\\\/\\u0008\\u000c\\n\\u000d\\tA\xC3\xA9\xE2\x82\xAC\""},
        {"surrogate pair", "\"\\ud83d\\ude00\\uDBFF\\uDFFF\"", "\"\xF0\x9F\x98\x80\xF4\x8F\xBF\xBF\""},
        {"utf-8", "\"\x7F\xC2\x80\xDF\xBF\xE0\xA0\x80\xEF\xBF\xBF\xF0\x90\x80\x80\"",
         "\"\x7F\xC2\x80\xDF\xBF\xE0\xA0\x80\xEF\xBF\xBF\xF0\x90\x80\x80\""},
        {"escaped NUL", "{\"a\\u0000b\":\"\\u0000\",\"a\":1}", "{\"a\\u0000b\":\"\\u0000\",\"a\":1i}"},
        {"same key elsewhere", "{\"a\":{\"a\":1},\"b\":{\"a\":2}}", "{\"a\":{\"a\":1i},\"b\":{\"a\":2i}}"},
        {"order kept", "{\"z\":1,\"a\":2,\"\":3}", "{\"z\":1i,\"a\":2i,\"\":3i}"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        Json json;
        Text tree = {NULL, 0, 0};
        char error[JSON_ERROR_SIZE];
        char* name = xprintf("json/good: %s", cases[i].name);
        if (parse(&json, cases[i].text, strlen(cases[i].text), error) != 0) {
            expect(t, 0, name, "%s", error);
        } else {
            write_tree(&tree, json.root);
            expect_text(t, name, tree.text, cases[i].tree);
            json_free(&json);
        }
        free(tree.text);
        free(name);
    }
}

static void test_json_bad(Tests* t) {
    static const struct {
        const char *text, *error;
    } cases[] = {
        {"", "line 1 column 1: expected a value, but the text ends"},
        {" \n ", "line 2 column 2: expected a value, but the text ends"},
        {"[1,]", "line 1 column 4: a comma before ']'"},
        {"{\"a\":1,}", "line 1 column 8: a comma before '}'"},
        {"[1 2]", "line 1 column 4: expected ',' or ']'"},
        {"[1", "line 1 column 3: expected ',' or ']', but the text ends"},
        {"{\"a\" 1}", "line 1 column 6: expected ':' after a key"},
        {"{\"a\":}", "line 1 column 6: expected a value"},
        {"{a:1}", "line 1 column 2: expected a key in double quotes"},
        {"{\"a\":1,\n \"b\":2,\n \"a\":3}", "line 3 column 2: the key \"a\" occurs twice"},
        {"{\"\\u0061\":1,\"a\":2}", "line 1 column 13: the key \"a\" occurs twice"},
        {"[] []", "line 1 column 4: something follows the end of the value"},
        {"1 // one", "line 1 column 3: something follows the end of the value"},
        {"NaN", "line 1 column 1: expected a value"},
        {"-Infinity", "line 1 column 1: expected a value; a '-' must be followed by digits"},
        {"01", "line 1 column 1: a number must not begin with 0"},
        {"+1", "line 1 column 1: expected a value"},
        {".5", "line 1 column 1: expected a value"},
        {"[5.]", "line 1 column 2: a decimal point must be followed by digits"},
        {"1e", "line 1 column 1: an exponent must have digits"},
        {"-", "line 1 column 1: expected a value; a '-' must be followed by digits"},
        {"0x10", "line 1 column 2: something follows the end of the value"},
        {"1e999", "line 1 column 1: a number beyond the range of a double"},
        {"\"a", "line 1 column 1: a string that begins here does not end"},
        {"[\"a\\", "line 1 column 4: unknown escape in a string"},
        {"\"\\x41\"", "line 1 column 2: unknown escape in a string"},
        {"\"\\u12G4\"", "line 1 column 2: \\u needs four hexadecimal digits"},
        {"\"\\u", "line 1 column 2: \\u needs four hexadecimal digits"},
        {"\"\\ud800\"", "line 1 column 2: half of a surrogate pair"},
        {"\"\\ud800\\u0041\"", "line 1 column 2: half of a surrogate pair"},
        {"\"\\ud800\\udbff\"", "line 1 column 2: half of a surrogate pair"},
        {"\"\\ud800\\ue000\"", "line 1 column 2: half of a surrogate pair"},
        {"\"\\udc00\\ud800\"", "line 1 column 2: half of a surrogate pair"},
        {"\"a\nb\"", "line 1 column 3: control character 0x0a in a string; it must be escaped"},
        {"\"\xC3\xA9\xFF\"", "line 1 column 3: byte 0xff is not valid UTF-8"},
        {"\"\xC0\x80\"", "line 1 column 2: byte 0xc0 is not valid UTF-8"},
        {"\"\xE0\x9F\xBF\"", "line 1 column 2: byte 0xe0 is not valid UTF-8"},
        {"\"\xED\xA0\x80\"", "line 1 column 2: byte 0xed is not valid UTF-8"},
        {"\"\xF0\x8F\xBF\xBF\"", "line 1 column 2: byte 0xf0 is not valid UTF-8"},
        {"\"\xF4\x90\x80\x80\"", "line 1 column 2: byte 0xf4 is not valid UTF-8"},
        {"\"\xE2\x82", "line 1 column 2: byte 0xe2 is not valid UTF-8"},
        {"\xEF\xBB\xBF{}", "line 1 column 1: a byte order mark; save it without"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        Json json;
        char error[JSON_ERROR_SIZE];
        char* name = xprintf("json/bad %zu: %s", i, cases[i].error);
        int result = parse(&json, cases[i].text, strlen(cases[i].text), error);
        expect(t, result == -1 && strcmp(error, cases[i].error) == 0, name, "result %d, error '%s'", result, error);
        if (result == 0) json_free(&json);
        free(name);
    }
    Json json;
    char error[JSON_ERROR_SIZE];
    expect(t, parse(&json, "1\0", 2, error) != 0, "json/bad: a NUL after the value", "accepted");
    expect(t, parse(&json, "\"\0\"", 3, error) != 0, "json/bad: a NUL in a string", "accepted");
}

static void test_json_depth(Tests* t) {
    static const int depths[] = {JSON_MAX_DEPTH, JSON_MAX_DEPTH + 1, 100000};
    for (size_t k = 0; k < COUNT_OF(depths); k++) {
        Text text = {NULL, 0, 0};
        Json json;
        char error[JSON_ERROR_SIZE], *name = xprintf("json/depth %d", depths[k]);
        const char* want = k ? "line 1 column 65: more than 64 levels deep" : "";
        for (int i = 0; i < depths[k]; i++) text_append(&text, "[", 1);
        for (int i = 0; i < depths[k]; i++) text_append(&text, "]", 1);
        int result = parse(&json, text.text, text.length, error);
        expect(t, result == -(k > 0) && strcmp(error, want) == 0, name, "result %d, '%s'", result, error);
        if (result == 0) json_free(&json);
        free(name), free(text.text);
    }
}

static void test_json_vocabulary(Tests* t) {
    Text text = {NULL, 0, 0};
    Json json;
    char error[JSON_ERROR_SIZE];
    text_append(&text, "{", 1);
    for (int i = 0; i < 50257; i++) text_printf(&text, "%s\"\\u0120token%x\": %d", i ? ", " : "", i * 2654435761u, i);
    text_printf(&text, ",\n\"\\u0120token0\": 1}");
    clock_t start = clock();
    int result = json_parse(&json, text.text, text.length, error);
    double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
    expect(t, result != 0 && strcmp(error, "line 2 column 1: the key \"\xC4\xA0token0\" occurs twice") == 0,
           "json/key twice among 50,257", "result %d, '%s'", result, error);
    expect(t, seconds < 1, "json/50,257 keys in a second", "%.2f s", seconds);
    free(text.text);
}

static void test_json_writer(Tests* t) {
    Text text = {NULL, 0, 0};
    text_append(&text, "{", 1);
    json_put_string(&text, "path", "a\"b\\c\n\x01/\xC3\xA9\xFF");
    json_put_integer(&text, "big", INT64_MIN);
    json_put_number(&text, "lr", 3e-4);
    json_put_number(&text, "count", 124439808);
    json_put_number(&text, "nan", NAN);
    json_put_number(&text, "inf", -INFINITY);
    json_put_bool(&text, "tied", 1);
    text_append(&text, "}", 1);
    expect_text(t, "json/writer", text.text,
                "{\"path\": \"a\\\"b\\\\c\\n\\u0001/\xC3\xA9\\ufffd\", \"big\": -9223372036854775808, \"lr\": 0.0003, "
                "\"count\": 124439808, \"nan\": null, \"inf\": null, \"tied\": true}");
    int wrong = 0;
    for (uint32_t i = 0; i < 100000; i++) {
        Philox bits = philox(i, 0, 0, 0, 7);
        double x, back;
        memcpy(&x, bits.v, sizeof(x));
        if (!isfinite(x)) continue;
        char digits[32];
        format_number(digits, x);
        back = strtod(digits, NULL);
        wrong += memcmp(&x, &back, sizeof(x)) != 0;
    }
    expect(t, wrong == 0, "json/numbers read back as they were", "%d of 100,000 do not", wrong);

    Json json;
    char all[512], error[JSON_ERROR_SIZE];
    for (int i = 0; i < 128; i++) all[i] = (char)i;
    text.length = 0;
    text_json_string(&text, all, 128);
    int result = parse(&json, text.text, text.length, error);
    expect(t, result == 0 && json.root->length == 128 && memcmp(json.root->string, all, 128) == 0,
           "json/strings read back as they were", "%s", error);
    if (result == 0) json_free(&json);
    free(text.text);
}

// ---------------------------------------------------------------------------------------------------------
// Flags

typedef struct {
    int batch, schedule;
    int64_t seed;
    double lr, dropout;
    const char *data, *out;
} Settings;

enum { FLAG_ROWS = 7 };

static void make_rows(Flag* rows, Settings* s) {
    const Flag table[FLAG_ROWS] = {
        {"-b", "--batch", FLAG_INT, &s->batch, "4", 1, 4096, NULL, SCOPE_RUN, TOPIC_NONE, "sequences in a micro-batch"},
        {"-i", "--train-data", FLAG_STRING, &s->data, "", 0, 0, NULL, SCOPE_RUN, TOPIC_NONE,
         "training tokens: a file or a glob of shards"},
        {"-o", "--out", FLAG_STRING, &s->out, "out", 0, 0, NULL, SCOPE_RUN, TOPIC_NONE, "directory to write to"},
        {"-l", "--learning-rate", FLAG_REAL, &s->lr, "3e-4", 0, INFINITY, NULL, SCOPE_RUN, TOPIC_NONE,
         "peak learning rate"},
        {NULL, "--dropout", FLAG_REAL, &s->dropout, "0", 0, 0.99, NULL, SCOPE_RUN, TOPIC_NONE,
         "probability of dropping an element of the embeddings, the attention and the residual branches; 0 switches "
         "dropout off, also where the model's configuration asks for it"},
        {NULL, "--seed", FLAG_SIZE, &s->seed, "1337", -INFINITY, INFINITY, NULL, SCOPE_RUN, TOPIC_NONE,
         "of everything random"},
        {"-k", "--schedule", FLAG_CHOICE, &s->schedule, "cosine", 0, 0, SCHEDULE_CHOICES, SCOPE_RUN, TOPIC_NONE,
         "of the learning rate"},
    };
    memcpy(rows, table, sizeof(table));
}

// Parse a command line given in one string and print the result.
static void parse_flags(void* state) {
    char* line = xprintf("program %s", (const char*)state);
    char* argv[16];
    int argc = 0;
    for (char* word = strtok(line, " "); word; word = strtok(NULL, " "))
        argv[argc++] = strcmp(word, "''") ? word : word + 2;
    Settings s;
    Flag rows[FLAG_ROWS];
    Text t = {NULL, 0, 0};
    make_rows(rows, &s);
    flags_parse(rows, FLAG_ROWS, argc, argv, "./program [flags]");
    flags_to_json(&t, rows, FLAG_ROWS);
    printf("%s%s", t.text, rows[0].is_set ? " given" : "");
    free(t.text);
    free(line);
}

static void test_flags(Tests* t) {
    static const struct {
        const char* line;
        int status;
        const char* output;
    } cases[] = {
        {"", 0,
         "{\"batch\": 4, \"train-data\": \"\", \"out\": \"out\", \"learning-rate\": 0.0003, \"dropout\": 0, "
         "\"seed\": 1337, \"schedule\": \"cosine\"}"},
        {"-b 8 --learning-rate=1e-3 --seed -9223372036854775808 -k wsd -i a*.bin --out=x=y --dropout .5", 0,
         "{\"batch\": 8, \"train-data\": \"a*.bin\", \"out\": \"x=y\", \"learning-rate\": 0.001, \"dropout\": 0.5, "
         "\"seed\": -9223372036854775808, \"schedule\": \"wsd\"} given"},
        {"--batch=4096 -o -odd", 0,
         "{\"batch\": 4096, \"train-data\": \"\", \"out\": \"-odd\", \"learning-rate\": 0.0003, \"dropout\": 0, "
         "\"seed\": 1337, \"schedule\": \"cosine\"} given"},
        {"-b x", 2, "error: -b --batch: 'x' is not a whole number; allowed: 1..4096\n"},
        {"-b 4.0", 2, "error: -b --batch: '4.0' is not a whole number; allowed: 1..4096\n"},
        {"-b 0", 2, "error: -b --batch: '0' is out of range; allowed: 1..4096\n"},
        {"-b 4097", 2, "error: -b --batch: '4097' is out of range; allowed: 1..4096\n"},
        {"--seed 9223372036854775808", 2,
         "error: --seed: '9223372036854775808' is out of range; allowed: any number\n"},
        {"-l nan", 2, "error: -l --learning-rate: 'nan' is not a number; allowed: >= 0\n"},
        {"-l 1e999", 2, "error: -l --learning-rate: '1e999' is out of range; allowed: >= 0\n"},
        {"-l -1", 2, "error: -l --learning-rate: '-1' is out of range; allowed: >= 0\n"},
        {"--dropout 1", 2, "error: --dropout: '1' is out of range; allowed: 0..0.99\n"},
        {"-k cos", 2, "error: -k --schedule: 'cos' is not one of the choices; allowed: " SCHEDULE_CHOICES "\n"},
        {"-b 4 --batch=5", 2, "error: --batch is given twice ('--batch=5' is the second); give it once\n"},
        {"-b", 2, "error: -b needs a value; allowed: 1..4096; all flags: --help\n"},
        {"-o --batch 4", 2, "error: -o needs a value; allowed: text; all flags: --help\n"},
        {"--bacth 4", 2, "error: unknown flag '--bacth'; did you mean --batch? All flags: --help\n"},
        {"-batch=3", 2, "error: unknown flag '-batch=3'; did you mean --batch? All flags: --help\n"},
        {"--colour red", 2, "error: unknown flag '--colour'; all flags: --help\n"},
        {"--larning-rate 1", 2,
         "error: unknown flag '--larning-rate'; did you mean --learning-rate? All flags: --help\n"},
        {"-", 2, "error: unknown flag '-'; all flags: --help\n"},
        {"data.bin", 2, "error: 'data.bin' is not a flag, and only flags are understood; all flags: --help\n"},
        {"-b 5 --help --nonsense", 0, NULL},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        Text output = {NULL, 0, 0};
        char* name = xprintf("flags/'%s'", cases[i].line);
        int status = run_in_child(&output, STDOUT_AND_STDERR, parse_flags, (void*)cases[i].line);
        int same = !cases[i].output || strcmp(output.text, cases[i].output) == 0;
        expect(t, status == cases[i].status && same, name, "status %d, output\n%s", status, output.text);
        free(name);
        free(output.text);
    }
    Text output = {NULL, 0, 0};
    int status = run_in_child(&output, STDOUT_AND_STDERR, parse_flags, (void*)"--help");
    size_t longest = 0, rows = 0;
    for (const char* line = output.text; *line; line += strcspn(line, "\n") + 1) {
        longest = longest < strcspn(line, "\n") ? strcspn(line, "\n") : longest;
        rows += line[0] == ' ' && line[8] == '-';
    }
    expect(t, status == 0 && longest <= 100 && rows == FLAG_ROWS + 1 && strstr(output.text, ">= 0"), "flags/--help",
           "status %d, %zu columns, %zu rows:\n%s", status, longest, rows, output.text);
    free(output.text);
}

static void test_flags_saved(Tests* t) {
    Settings s;
    Flag rows[FLAG_ROWS];
    char* argv[] = {(char*)"program", (char*)"-b", (char*)"7", (char*)"-l", (char*)"0.1"};
    char error[FLAG_ERROR_SIZE], value[FLAG_TEXT_SIZE];
    make_rows(rows, &s);
    flags_parse(rows, FLAG_ROWS, 5, argv, "");
    Flag* lr = flags_find(rows, FLAG_ROWS, "--learning-rate", 15);
    flags_format_value(lr, value, sizeof(value));
    expect_text(t, "flags/format a real", value, "0.1");
    expect(t, flags_set(&rows[0], "0", error) == -1 && s.batch == 7, "flags/set out of range", "%d", s.batch);
    expect_text(t, "flags/set says why", error, "-b --batch: '0' is out of range; allowed: 1..4096");

    // Saved settings of every type are restored unchanged.
    static const char saved[] = "{\"batch\": 64, \"train-data\": \"a b\", \"out\": \"o\", \"learning-rate\": 0.00012, "
                                "\"dropout\": 0, \"seed\": -5, \"schedule\": \"poly\"}";
    for (int again = 0; again < 2; again++) {
        Json json;
        Text text = {NULL, 0, 0};
        if (json_parse(&json, saved, strlen(saved), error) != 0) die(FAILED, "%s", error);
        for (int i = 0; i < FLAG_ROWS; i++) {
            const JsonNode* node = json_get(json.root, rows[i].long_name + 2);
            if (flags_set(&rows[i], node->string, error) != 0) die(FAILED, "%s", error);
        }
        json_free(&json);
        flags_to_json(&text, rows, FLAG_ROWS);
        expect_text(t, again ? "flags/saved and set again" : "flags/saved and set", text.text, saved);
        free(text.text);
    }
    expect(t, (rows[0].is_set & FLAG_IS_GIVEN) && !(rows[2].is_set & FLAG_IS_GIVEN), "flags/given stays", "%d %d",
           rows[0].is_set, rows[2].is_set);
    expect(t, s.schedule == SCHEDULE_POLY, "flags/choice is an index", "%d", s.schedule);
    flags_free(rows, FLAG_ROWS);
    expect(t, s.data == NULL, "flags/free", "not freed");
}

// ---------------------------------------------------------------------------------------------------------
// Random numbers: every run's weights, order of data and masks follow from them, so they must never change

static void test_philox(Tests* t) {
    // Counters, key, result: the known answers published with Random123, the library of Philox's authors.
    static const struct {
        uint32_t counter[4];
        uint64_t key;
        uint32_t want[4];
    } cases[] = {
        {{0, 0, 0, 0}, 0, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         0xffffffffffffffff,
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         0x299f31d0a4093822,
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const uint32_t* c = cases[i].counter;
        Philox got = philox(c[0], c[1], c[2], c[3], cases[i].key);
        char* name = xprintf("philox/known answer %zu", i);
        expect(t, memcmp(got.v, cases[i].want, sizeof got.v) == 0, name, "%08x %08x %08x %08x", got.v[0], got.v[1],
               got.v[2], got.v[3]);
        free(name);
    }
    // Each seed, step, layer and site has its own stream; all their bits matter.
    const uint64_t high = (uint64_t)1 << 40, key = rng_stream(1, 2, 3, 4);
    const uint64_t others[] = {rng_stream(9, 2, 3, 4),        rng_stream(1 | high, 2, 3, 4), rng_stream(1, 9, 3, 4),
                               rng_stream(1, 2 | high, 3, 4), rng_stream(1, 2, 9, 4),        rng_stream(1, 2, 3, 9)};
    for (size_t i = 0; i < COUNT_OF(others); i++) {
        char* name = xprintf("streams/what names them, %zu", i);
        expect(t, (uint32_t)others[i] != (uint32_t)key && others[i] >> 32 != key >> 32, name, "the same key");
        free(name);
    }
}

// ---------------------------------------------------------------------------------------------------------
// Schedules

static void test_schedule(Tests* t) {
    // kind, peak, warmup, total, final fraction, power; step; the value by hand
    static const struct {
        Schedule s;
        int64_t step;
        double want;
    } cases[] = {
        {{SCHEDULE_COSINE, 1, 10, 110, 0.1, 0}, 0, 0.1},
        {{SCHEDULE_COSINE, 1, 10, 110, 0.1, 0}, 9, 1},
        {{SCHEDULE_COSINE, 1, 10, 110, 0.1, 0}, 10, 1},
        {{SCHEDULE_COSINE, 1, 10, 110, 0.1, 0}, 35, 0.1 + 0.9 * 0.85355339059327376},
        {{SCHEDULE_COSINE, 1, 10, 110, 0.1, 0}, 110, 0.1},
        {{SCHEDULE_COSINE, 1, 10, 110, 0.1, 0}, 1000, 0.1},
        {{SCHEDULE_COSINE, 3e-4, 0, 300, 0, 0}, 0, 3e-4},
        {{SCHEDULE_LINEAR, 2, 5, 25, 0, 0}, 20, 0.5},
        {{SCHEDULE_LINEAR, 2, 5, 25, 0.5, 0}, 25, 1},
        {{SCHEDULE_CONSTANT, 3e-4, 4, 10, 0, 0}, 1, 1.5e-4},
        {{SCHEDULE_CONSTANT, 3e-4, 4, 10, 0, 0}, 99, 3e-4},
        {{SCHEDULE_WSD, 1, 10, 100, 0, 0}, 80, 1},
        {{SCHEDULE_WSD, 1, 10, 100, 0, 0}, 85, 0.5},
        {{SCHEDULE_WSD, 1, 10, 100, 0.2, 0}, 85, 0.6},
        {{SCHEDULE_WSD, 1, 10, 100, 0.2, 0}, 100, 0.2},
        {{SCHEDULE_POLY, 6e-3, 2000, 7038, 0, 0.5}, 2000, 5.0763984e-3},  // "6e-3 -> 5.08e-3" in the BERT recipe
        {{SCHEDULE_POLY, 1, 0, 100, 0, 1}, 25, 0.75},
        {{SCHEDULE_POLY, 1, 0, 100, 0, 0.5}, 100, 0},
        {{SCHEDULE_COSINE, 1, 20, 10, 0.1, 0}, 15, 0.8},  // a warm-up longer than the run
        {{SCHEDULE_LINEAR, 1, 0, 0, 0.1, 0}, 0, 0.1},
    };
    static const char* const kinds[] = {"cosine", "linear", "constant", "wsd", "poly"};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        double got = schedule_at(&cases[i].s, cases[i].step), want = cases[i].want;
        char* name = xprintf("schedule/%s case %zu step %lld", kinds[cases[i].s.kind], i, (long long)cases[i].step);
        expect(t, fabs(got - want) <= 2e-8 * want + 1e-15, name, "%.10g, wanted %.10g", got, want);
        free(name);
    }
}

// ---------------------------------------------------------------------------------------------------------
// The log

static char* read_text(const char* directory, const char* file) {
    char* path = xprintf("%s/%s", directory, file);
    char* text = file_exists(path) ? read_file(path, SIZE_MAX, NULL, FAILED) : xprintf("(no such file)");
    free(path);
    return text;
}

static void run_steps(Log* log, int from, int to) {
    for (int i = from; i <= to; i++) {
        LogStep s = {i,
                     300,
                     i == 2 ? NAN : 10.0 / i,
                     3e-4,
                     1.25,
                     0.0821,
                     12345.6,
                     0.041,
                     0,
                     NULL,
                     i == 3 ? "\"nsp_loss\": 0.5" : NULL};
        log_step(log, &s);
        if (i % 2 == 0) log_validation(log, i, 300, 11.0 / i, NULL);
    }
}

// A run of six steps with a torn line, and one without its newline at the end; then one that was resumed from step 3.
static void log_and_resume(void* state) {
    const char* directory = (const char*)state;
    Log log;
    Text header = {NULL, 0, 0};
    log_open(&log, directory, -1);
    text_printf(&header, "{\"batch\": 4}");
    log_line(&log, &header);
    run_steps(&log, 1, 6);
    static const char torn[] = "{\"step\": 2, \"lo\n{\"step\": 2, \"val_loss\": 1}";
    if (write_all(log.fd, torn, sizeof(torn) - 1) != 0) die(FAILED, "write: %s", strerror(errno));
    log_close(&log);
    free(header.text);

    log_open(&log, directory, 3);
    CHECK(log.train.count == 2 && log.train.step[1] == 3 && log.validation.count == 1);
    run_steps(&log, 4, 4);
    CHECK(log.train.count == 3 && log.validation.count == 2);
    log_write_svg(&log, "a title");
    log_close(&log);
}

static void log_to_full_disk(void* state) {
    Log log;
    log_open(&log, (const char*)state, -1);
    run_steps(&log, 1, 3);
    log_close(&log);
}

// Files may grow to 200 bytes: half of the second line is written, and must be removed again.
static void log_to_small_disk(void* state) {
    struct rlimit limit = {200, 200};
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    log_to_full_disk(state);
}

static void test_log(Tests* t) {
#define STEP(step, loss, more)                                                                                         \
    "{\"step\": " step ", \"loss\": " loss ", \"lr\": 0.0003, \"grad_norm\": 1.25, \"ms\": 82.1, \"tok_s\": 12345.6, " \
    "\"mfu\": 0.041" more "}\n"
    char *root = make_scratch_directory("test_base"), *run = xprintf("%s/a/b", root), *full = xprintf("%s/full", root);
    char* small = xprintf("%s/small", root);
    char* link_path = xprintf("%s/log.jsonl", full);
    Text output = {NULL, 0, 0};
    int status = run_in_child(&output, STDOUT_AND_STDERR, log_and_resume, run);
    char* text = read_text(run, "log.jsonl");
    expect(t, status == 0, "log/a run and its resumption", "status %d: %s", status, output.text);
    expect_text(t, "log/cut back", text,
                "{\"batch\": 4}\n" STEP("1", "10", "") STEP("2", "null", "") "{\"step\": 2, \"val_loss\": 5.5}\n" STEP(
                    "3", "3.33333333", ", \"nsp_loss\": 0.5")
                    STEP("4", "2.5", "") "{\"step\": 4, \"val_loss\": 2.75}\n");
    free(text);
    output.text[strcspn(output.text, "\n")] = '\0';
    expect_text(t, "log/terminal line", output.text,
                "step   1/300 | loss 10.0000 | lr 3.00e-04 | norm 1.25 | 82.1 ms | 12,345 tok/s | mfu 4.1%");
    text = read_text(run, "loss.svg");
    expect(t, strncmp(text, "<svg ", 5) == 0 && strstr(text, ">a title<"), "log/loss.svg", "%.200s", text);
    free(text);
    text = read_text(run, "log.jsonl.tmp");
    expect_text(t, "log/no file left over", text, "(no such file)");
    free(text);

    if (mkdir(full, 0777) != 0 || symlink("/dev/full", link_path) != 0) die(FAILED, "%s: %s", full, strerror(errno));
    output.length = 0;
    status = run_in_child(&output, STDOUT_AND_STDERR, log_to_full_disk, full);
    const char* warning = strstr(output.text, "warning: ");
    expect(t, status == 0 && warning && !strstr(warning + 1, "warning: ") && strstr(output.text, "step   3/300"),
           "log/full disk warns once", "status %d:\n%s", status, output.text);
    output.length = 0;
    status = run_in_child(&output, STDOUT_AND_STDERR, log_to_small_disk, small);
    text = read_text(small, "log.jsonl");
    expect(t,
           status == 0 && strlen(text) > 0 && text[strlen(text) - 1] == '\n' &&
               strstr(text, "{\"step\": 2, \"val_loss\": 5.5}\n"),
           "log/full disk leaves whole lines", "status %d:\n%s\n%s", status, text, output.text);
    free(text);

    remove_directory(root);
    free(root), free(run), free(full), free(small), free(link_path), free(output.text);
}

static void test_log_formats(Tests* t) {
    char out[32];
    static const struct {
        int64_t n;
        const char* text;
    } counts[] = {
        {0, "0"}, {999, "999"}, {1000, "1,000"}, {-1234567, "-1,234,567"}, {INT64_MAX, "9,223,372,036,854,775,807"}};
    for (size_t i = 0; i < COUNT_OF(counts); i++) {
        format_count(out, counts[i].n);
        expect_text(t, "log/count", out, counts[i].text);
    }
    static const struct {
        double seconds;
        const char* text;
    } times[] = {{0, "00:00"},      {24.4, "00:24"},        {3599.6, "1:00:00"},
                 {3723, "1:02:03"}, {183840, "2d 03:04 h"}, {NAN, "00:00"}};
    for (size_t i = 0; i < COUNT_OF(times); i++) {
        format_duration(out, times[i].seconds);
        expect_text(t, "log/duration", out, times[i].text);
    }
}

// Whether a picture has numbers that are none, stray ampersands, or another count of opened than of closed tags.
static const char* svg_fault(const char* text) {
    int open = 0;
    if (strstr(text, "nan") || strstr(text, "inf,") || strstr(text, ",inf") || strstr(text, "\"inf"))
        return "a number that is none";
    for (const char* p = text; *p; p++) {
        if (*p == '&' && strncmp(p, "&#", 2) != 0) return "a stray ampersand";
        open += (*p == '<' ? p[1] == '/' ? -1 : 1 : 0) - (p[0] == '/' && p[1] == '>');
    }
    return open == 0 ? NULL : "an open tag";
}

// A colour of the picture, `fill="#...` or `stroke="#...`, that has no replacement in a dark scheme; NULL: all have
// one.
static const char* svg_only_light(const char* text, char found[32]) {
    const char* picture = strstr(text, "</style>");
    if (!picture) return "no style";
    for (const char* p = picture; (p = strstr(p, "=\"#")) != NULL; p += 3) {
        const char* name = p;
        while (isalpha((unsigned char)name[-1])) name--;
        snprintf(found, 32, "[%.*s='%.*s']", (int)(p - name), name, (int)strcspn(p + 2, "\""), p + 2);
        const char* rule = strstr(text, found);
        if (!rule || rule > picture) return found;
    }
    return NULL;
}

static void test_svg(Tests* t) {
    static const char* const names[] = {
        "no point",        "one point",   "one validation point", "NaN only",    "flat",      "300 steps",
        "a million steps", "huge losses", "tiny losses",          "validations", "late start"};
    static const int64_t lengths[] = {0, 1, 0, 0, 300, 300, 1000000, 50, 1, 300, 300};
    for (int k = 0; k < (int)COUNT_OF(names); k++) {
        LossCurve train, validation;
        Text text = {NULL, 0, 0};
        memset(&train, 0, sizeof(train));
        memset(&validation, 0, sizeof(validation));
        int64_t n = lengths[k];
        for (int64_t i = 1; i <= n; i++) {
            double noise = 0.1 * rng_normal(3, (uint64_t)i),
                   loss = k == 4 ? 3.25 : 3 + 8 * exp(-5.0 * (double)i / (double)n) + noise;
            if (k == 7) loss = i % 7 == 0 ? 1e300 : i % 5 == 0 ? 3e38 : i % 3 == 0 ? -INFINITY : loss;
            if (k == 8) loss = 1e-30;
            loss_curve_add(&train, i + (k == 10 ? 100000 : 0), loss);
            if (k != 8 && i % (k == 9 ? 1 : 20) == 0)
                loss_curve_add(&validation, i + (k == 10 ? 100000 : 0), loss + 0.2);
        }
        if (k == 2) loss_curve_add(&validation, 0, 10.8);
        if (k == 3) loss_curve_add(&train, 1, NAN);
        loss_svg(&text, &train, &validation, "a < b & \"c\" > \xC3\xA9 \xFF \x01");
        char color[32];
        const char* fault = svg_fault(text.text);
        if (!fault) fault = svg_only_light(text.text, color);
        char* name = xprintf("svg/%s", names[k]);
        expect(t, !fault && text.length < 120000, name, "%s, %zu bytes", fault ? fault : "too large", text.length);
        free(name), free(text.text), free(train.step), free(train.value), free(validation.step), free(validation.value);
    }
}

// The first step of a process, which autotunes, does not count for the time left.
static void test_log_time_left(Tests* t) {
    char *directory = make_scratch_directory("test_base"), *path = xprintf("%s/shown", directory);
    Log log = {.fd = -1, .is_terminal = 1};
    fflush(stdout);
    int terminal = dup(STDOUT_FILENO), file = open(path, O_CREAT | O_RDWR, 0600);
    dup2(file, STDOUT_FILENO);
    for (int step = 8; step <= 10; step++) {
        LogStep s = {.step = step, .steps = 10, .loss = 1, .seconds = step == 8 ? 385 : 1e-3};
        log_step(&log, &s);
    }
    dup2(terminal, STDOUT_FILENO), close(terminal), close(file);
    char* text = read_text(directory, "shown");
    const char *second = strstr(text, "\nstep  9/10"), *left = strstr(text, " left");
    expect(t, second && left > second && strncmp(left - 8, " | 00:", 6) == 0 && !strstr(left + 1, " left"),
           "log/time left, without the first step", "%s", text);
    log_close(&log);
    remove_directory(directory);
    free(text), free(path), free(directory);
}

// Control groups in a folder, and the threads of 8 CPUs.
static void test_cpu_share(Tests* t) {
    static const struct {
        const char *name, *groups, *files;  // /proc/self/cgroup; files below /sys/fs/cgroup as NAME=TEXT;
        int threads;
    } cases[] = {
        {"none", "0::/a/b\n", "", 8},
        {"no quota", "0::/a/b\n", "a/b/cpu.max=max 100000;", 8},
        {"two and a half", "0::/a/b\n", "a/b/cpu.max=250000 100000;", 2},
        {"a half", "0::/a/b\n", "a/b/cpu.max=50000 100000;", 1},
        {"the parent's is smaller", "0::/a/b\n", "a/b/cpu.max=500000 100000;a/cpu.max=300000 100000;", 3},
        {"a path that is not there", "0::/x/y\n", "cpu.max=400000 100000;", 4},
        {"not the process's", "0::/a\n", "b/cpu.max=100000 100000;", 8},
        {"version 1", "5:memory:/m\n4:cpu,cpuacct:/a/b\n",
         "cpu,cpuacct/a/b/cpu.cfs_quota_us=20000;cpu,cpuacct/a/b/cpu.cfs_period_us=10000;", 2},
        {"version 1, no quota", "4:cpu:/a\n", "cpu/a/cpu.cfs_quota_us=-1;cpu/a/cpu.cfs_period_us=100000;", 8},
        {"version 1, another controller", "4:cpuset:/a\n",
         "cpuset/a/cpu.cfs_quota_us=100000;cpuset/a/cpu.cfs_period_us=100000;", 8},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        Tests at = {.directory = make_scratch_directory("test_base")};
        char *groups = put_text_file(&at, "groups", cases[i].groups), *name = xprintf("cpu_share/%s", cases[i].name);
        for (const char* file = cases[i].files; *file; file = strchr(file, ';') + 1) {
            const char *text = strchr(file, '=') + 1, *slash = text;
            while (slash > file && *slash != '/') slash--;
            char* directory = xprintf("%s/%.*s", at.directory, (int)(slash - file), file);
            char *path = xprintf("%.*s", (int)(text - 1 - file), file),
                 *line = xprintf("%.*s\n", (int)strcspn(text, ";"), text);
            CHECK(make_directories(directory) == 0);
            free(put_text_file(&at, path, line));
            free(directory), free(path), free(line);
        }
        int threads = cpu_share_threads(cpu_share_quota(groups, at.directory), 8);
        expect(t, threads == cases[i].threads, name, "%d threads, not %d", threads, cases[i].threads);
        remove_directory(at.directory);
        free(at.directory), free(groups), free(name);
    }
}

int main(int argc, char** argv) {
    Tests t;
    tests_choose(&t, argc, argv);
    test_cpu_share(&t);
    test_json_good(&t);
    test_json_bad(&t);
    test_json_depth(&t);
    test_json_vocabulary(&t);
    test_json_writer(&t);
    test_flags(&t);
    test_flags_saved(&t);
    test_philox(&t);
    test_schedule(&t);
    test_log(&t);
    test_log_formats(&t);
    test_log_time_left(&t);
    test_svg(&t);
    return tests_close(&t);
}
