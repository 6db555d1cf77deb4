/* Tests of llmc/base: the JSON reader and writer, random numbers, schedules, the log and its picture, the share of
 * the CPUs.
 *
 *     ./test_base [NAME]      the cases whose name contains NAME */
#include <signal.h>
#include <sys/resource.h>

#include "dev/test/tests.h"
#include "llmc/base/json.h"
#include "llmc/base/log.h"
#include "llmc/base/process.h"
#include "llmc/base/rng.h"
#include "llmc/base/schedule.h"
#include "llmc/checkpoint/loss_svg.h"

// ---------------------------------------------------------------------------------------------------------
// JSON

// Write the tree in a canonical form, for comparison.
static void write_tree(Text* t, const JsonNode* node) {
    size_t count = 0;
    if (node->key) text_json_string(t, node->key, node->key_length), text_append(t, ":", 1);
    if (node->type == JSON_NULL) text_printf(t, "null");
    if (node->type == JSON_BOOL) text_printf(t, node->integer ? "true" : "false");
    if (node->type == JSON_STRING) text_json_string(t, node->string, node->length);
    if (node->type == JSON_NUMBER && node->is_integer) text_printf(t, "%lldi", (long long)node->integer);
    if (node->type == JSON_NUMBER && !node->is_integer) text_json_number(t, node->number);
    if (node->type != JSON_ARRAY && node->type != JSON_OBJECT) return;
    text_printf(t, node->type == JSON_ARRAY ? "[" : "{");
    for (const JsonNode* child = node->first; child; child = child->next) {
        if (count++) text_append(t, ",", 1);
        write_tree(t, child);
    }
    text_printf(t, node->type == JSON_ARRAY ? "]" : "}");
    CHECK(count == node->count);
}

// What is made of a text: its tree, or why there is none.
static void expect_json(Tests* t, const char* name, const char* text, size_t n, const char* want) {
    Json json;
    Text tree = {NULL, 0, 0};
    char error[JSON_ERROR_SIZE];
    char* copy = (char*)xmalloc(n);  // it ends where the text ends, so that a sanitizer sees a read beyond it
    memcpy(copy, text, n);
    int result = json_parse(&json, copy, n, error);
    if (result == 0) write_tree(&tree, json.root), json_free(&json);
    const char* got = result == 0 ? tree.text : error;
    expect(t, result == -(strncmp(want, "line ", 5) == 0) && strcmp(got, want) == 0, name, "it is '%s', not '%s'", got,
           want);
    free(tree.text), free(copy);
}

static void test_json(Tests* t) {
    static const struct {
        const char *text, *want;
    } cases[] = {
        {" \t\r\n [ 1 , {} , [], true,false,null, \"\" ] \n", "[1i,{},[],true,false,null,\"\"]"},
        {"[0,-0,-1,9223372036854775807,-9223372036854775808]",
         "[0i,0i,-1i,9223372036854775807i,-9223372036854775808i]"},
        {"[0.5,-1e-5,1E+2,2.50e1,1e-400,1.7976931348623157e308]", "[0.5,-1e-05,100,25,0,1.7976931348623157e+308]"},
        {"\"\\\"\\\\\\/\\b\\f\\n\\r\\t\\u0041\\u00e9\\u20AC\"",
         "\"\\\"\\\\/\\u0008\\u000c\\n\\u000d\\tA\xC3\xA9\xE2\x82\xAC\""},
        {"\"\\ud83d\\ude00\\uDBFF\\uDFFF\"", "\"\xF0\x9F\x98\x80\xF4\x8F\xBF\xBF\""},
        {"\"\x7F\xC2\x80\xDF\xBF\xE0\xA0\x80\xEF\xBF\xBF\xF0\x90\x80\x80\"",
         "\"\x7F\xC2\x80\xDF\xBF\xE0\xA0\x80\xEF\xBF\xBF\xF0\x90\x80\x80\""},
        {"{\"a\\u0000b\":\"\\u0000\",\"a\":1}", "{\"a\\u0000b\":\"\\u0000\",\"a\":1i}"},
        {" \n ", "line 2 column 2: expected a value, but the text ends"},
        {"[1,]", "line 1 column 4: a comma before ']'"},
        {"{a:1}", "line 1 column 2: expected a key in double quotes"},
        {"{\"a\":1,\n \"b\":2,\n \"a\":3}", "line 3 column 2: the key \"a\" occurs twice"},
        {"{\"\\u0061\":1,\"a\":2}", "line 1 column 13: the key \"a\" occurs twice"},
        {"-Infinity", "line 1 column 1: expected a value; a '-' must be followed by digits"},
        {"01", "line 1 column 1: a number must not begin with 0"},
        {"1e999", "line 1 column 1: a number beyond the range of a double"},
        {"\"a", "line 1 column 1: a string that begins here does not end"},
        {"\"\\x41\"", "line 1 column 2: unknown escape in a string"},
        {"\"\\ud800\\u0041\"", "line 1 column 2: half of a surrogate pair"},
        {"\"\\ud800\\ue000\"", "line 1 column 2: half of a surrogate pair"},
        {"\"a\x1f\"", "line 1 column 3: control character 0x1f in a string; it must be escaped"},
        {"\"\xC0\x80\"", "line 1 column 2: byte 0xc0 is not valid UTF-8"},
        {"\"\xED\xA0\x80\"", "line 1 column 2: byte 0xed is not valid UTF-8"},
        {"\"\xF4\x90\x80\x80\"", "line 1 column 2: byte 0xf4 is not valid UTF-8"},
        {"\xEF\xBB\xBF{}", "line 1 column 1: a byte order mark; save it without"},
    };
    char deep[2 * JSON_MAX_DEPTH + 1] = "";
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        expect_json(t, named("json/%zu: %s", i, cases[i].want), cases[i].text, strlen(cases[i].text), cases[i].want);
    memset(deep, '[', JSON_MAX_DEPTH), memset(deep + JSON_MAX_DEPTH, ']', JSON_MAX_DEPTH);
    expect_json(t, "json/64 levels", deep, 2 * JSON_MAX_DEPTH, deep);
    deep[JSON_MAX_DEPTH] = '[';
    expect_json(t, "json/65 levels", deep, 2 * JSON_MAX_DEPTH, "line 1 column 65: more than 64 levels deep");
    expect_json(t, "json/NUL after the value", "1\0", 2, "line 1 column 2: something follows the end of the value");
}

static void test_json_writer(Tests* t) {
    Text text = {NULL, 0, 0};
    char digits[32];
    text_append(&text, "{", 1);
    json_put_string(&text, "path", "a\"b\\c\n\x01/\xC3\xA9\xFF");
    json_put_integer(&text, "big", INT64_MIN);
    json_put_number(&text, "lr", 3e-4);
    json_put_number(&text, "nan", NAN);
    json_put_number(&text, "inf", -INFINITY);
    json_put_bool(&text, "tied", 1);
    EXPECT_TEXT(t, text.text,
                "{\"path\": \"a\\\"b\\\\c\\n\\u0001/\xC3\xA9\\ufffd\", \"big\": -9223372036854775808, \"lr\": 0.0003, "
                "\"nan\": null, \"inf\": null, \"tied\": true");
    static const double numbers[] = {0.1, 1.0 / 3, 5e-324, 1.7976931348623157e308, 1e22, 123456.789};
    for (size_t i = 0; i < COUNT_OF(numbers); i++) {  // they are read back as they were
        format_number(digits, numbers[i]);
        if (strtod(digits, NULL) != numbers[i]) fail(t, "%a is written as %s", numbers[i], digits);
    }
    free(text.text);
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
        {{~0u, ~0u, ~0u, ~0u}, ~(uint64_t)0, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         0x299f31d0a4093822,
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        const uint32_t* c = cases[i].counter;
        Philox got = philox(c[0], c[1], c[2], c[3], cases[i].key);
        for (int k = 0; k < 4; k++) EXPECT_EQ(t, got.v[k], cases[i].want[k]);
    }
    // Each seed, step, layer and site has its own stream; all their bits matter.
    const uint64_t high = (uint64_t)1 << 40, key = rng_stream(1, 2, 3, 4);
    const uint64_t others[] = {rng_stream(9, 2, 3, 4),        rng_stream(1 | high, 2, 3, 4), rng_stream(1, 9, 3, 4),
                               rng_stream(1, 2 | high, 3, 4), rng_stream(1, 2, 9, 4),        rng_stream(1, 2, 3, 9)};
    for (size_t i = 0; i < COUNT_OF(others); i++)
        if ((uint32_t)others[i] == (uint32_t)key || others[i] >> 32 == key >> 32) fail(t, "stream %zu is the first", i);
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
        {{SCHEDULE_COSINE, 1, 10, 110, 0.1, 0}, 35, 0.1 + 0.9 * 0.85355339059327376},
        {{SCHEDULE_LINEAR, 2, 5, 25, 0, 0}, 20, 0.5},
        {{SCHEDULE_CONSTANT, 3e-4, 4, 10, 0, 0}, 1, 1.5e-4},
        {{SCHEDULE_WSD, 1, 10, 100, 0.2, 0}, 85, 0.6},
        {{SCHEDULE_POLY, 6e-3, 2000, 7038, 0, 0.5}, 2000, 5.0763984e-3},  // "6e-3 -> 5.08e-3" in the BERT recipe
        {{SCHEDULE_COSINE, 1, 20, 10, 0.1, 0}, 15, 0.8},                  // a warm-up longer than the run
        {{SCHEDULE_LINEAR, 1, 0, 0, 0.1, 0}, 0, 0.1},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        double got = schedule_at(&cases[i].s, cases[i].step), want = cases[i].want;
        if (!(fabs(got - want) <= 2e-8 * want + 1e-15)) fail(t, "case %zu: %.10g, not %.10g", i, got, want);
    }
}

// ---------------------------------------------------------------------------------------------------------
// The log

static char* read_text(const char* directory, const char* file) {
    Path path = path_of("%s/%s", directory, file);
    return file_exists(path.text) ? read_file(path.text, SIZE_MAX, NULL, FAILED) : xprintf("(no such file)");
}

static void run_steps(Log* log, int from, int to) {
    for (int i = from; i <= to; i++) {
        LogStep s = {.step = i, .steps = 300, .loss = i == 2 ? NAN : 10.0 / i, .lr = 3e-4, .grad_norm = 1.25};
        s.seconds = 0.0821, s.tokens_per_second = 12345.6, s.mfu = 0.041;
        s.extra = i == 3 ? "\"nsp_loss\": 0.5" : NULL;
        log_step(log, &s);
        if (i % 2 == 0) log_validation(log, i, 300, 11.0 / i, NULL);
    }
}

// A run of six steps with a torn line, and one without its newline at the end; then one that was resumed from step 3.
static void log_and_resume(void* state) {
    static const char torn[] = "{\"step\": 2, \"lo\n{\"step\": 2, \"val_loss\": 1}";
    Text header = {NULL, 0, 0};
    Log log;
    log_open(&log, (const char*)state, -1);
    text_printf(&header, "{\"batch\": 4}");
    log_line(&log, &header);
    run_steps(&log, 1, 6);
    CHECK(write_all(log.fd, torn, sizeof(torn) - 1) == 0);
    log_close(&log);
    log_open(&log, (const char*)state, 3);
    CHECK(log.train.count == 2 && log.train.step[1] == 3 && log.validation.count == 1);
    run_steps(&log, 4, 4);
    CHECK(log.train.count == 3 && log.validation.count == 2);
    log_write_svg(&log, "a title");
    log_close(&log);
    free(header.text);
}

// Files may grow to 200 bytes: half of the second line is written, and must be removed again.
static void log_to_small_disk(void* state) {
    struct rlimit limit = {200, 200};
    Log log;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    log_open(&log, (const char*)state, -1);
    run_steps(&log, 1, 3);
    log_close(&log);
}

static void test_log(Tests* t) {
#define STEP(step, loss, more)                                                                                         \
    "{\"step\": " step ", \"loss\": " loss ", \"lr\": 0.0003, \"grad_norm\": 1.25, \"ms\": 82.1, \"tok_s\": 12345.6, " \
    "\"mfu\": 0.041" more "}\n"
    char *run = path_in(t, "a/b"), *small = path_in(t, "small");
    Text output = {NULL, 0, 0};
    EXPECT_EQ(t, run_in_child(&output, STDOUT_AND_STDERR, log_and_resume, run), DONE);
    char *text = read_text(run, "log.jsonl"), *svg = read_text(run, "loss.svg"),
         *left = read_text(run, "log.jsonl.tmp");
    EXPECT_TEXT(t, text,
                "{\"batch\": 4}\n" STEP("1", "10", "") STEP("2", "null", "") "{\"step\": 2, \"val_loss\": 5.5}\n" STEP(
                    "3", "3.33333333", ", \"nsp_loss\": 0.5")
                    STEP("4", "2.5", "") "{\"step\": 4, \"val_loss\": 2.75}\n");
    EXPECT_TEXT(t, left, "(no such file)");
    EXPECT(t, strncmp(svg, "<svg ", 5) == 0 && strstr(svg, ">a title<"));
    output.text[strcspn(output.text, "\n")] = '\0';
    EXPECT_TEXT(t, output.text,
                "step   1/300 | loss 10.0000 | lr 3.00e-04 | norm 1.25 | 82.1 ms | 12,345 tok/s | mfu 4.1%");
    free(text), free(svg), free(left);

    output.length = 0;
    EXPECT_EQ(t, run_in_child(&output, STDOUT_AND_STDERR, log_to_small_disk, small), DONE);
    const char* warning = strstr(output.text, "warning: ");
    EXPECT(t, warning && !strstr(warning + 1, "warning: ") && strstr(output.text, "step   3/300"));
    text = read_text(small, "log.jsonl");
    EXPECT_TEXT(t, text, STEP("1", "10", "") "{\"step\": 2, \"val_loss\": 5.5}\n");
    free(text), free(run), free(small), free(output.text);
}

// ---------------------------------------------------------------------------------------------------------
// Control groups in a folder, and the threads of 8 CPUs

static void test_cpu_share(Tests* t) {
    static const struct {
        const char* groups;    // /proc/self/cgroup
        const char* files[4];  // below /sys/fs/cgroup, each with its text
        int threads;
    } cases[] = {
        {"0::/a/b\n", {"a/b/cpu.max", "max 100000"}, 8},
        {"0::/a/b\n", {"a/b/cpu.max", "250000 100000"}, 2},
        {"0::/a/b\n", {"a/b/cpu.max", "50000 100000"}, 1},
        {"0::/a/b\n", {"a/b/cpu.max", "500000 100000", "a/cpu.max", "300000 100000"}, 3},
        {"5:memory:/m\n4:cpu,cpuacct:/a/b\n",
         {"cpu,cpuacct/a/b/cpu.cfs_quota_us", "20000", "cpu,cpuacct/a/b/cpu.cfs_period_us", "10000"},
         2},
        {"4:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us", "-1", "cpu/a/cpu.cfs_period_us", "100000"}, 8},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        Tests at = {.directory = xprintf("%s/%zu", t->directory, i)};
        CHECK(make_directories(at.directory) == 0);
        char* groups = put_text_file(&at, "groups", cases[i].groups);
        for (int k = 0; k < 4 && cases[i].files[k]; k += 2) {
            char* directory = xprintf("%s/%s", at.directory, cases[i].files[k]);
            *strrchr(directory, '/') = '\0';
            CHECK(make_directories(directory) == 0);
            free(put_text_file(&at, cases[i].files[k], cases[i].files[k + 1]));
            free(directory);
        }
        int threads = cpu_share_threads(cpu_share_quota(groups, at.directory), 8);
        if (threads != cases[i].threads) fail(t, "case %zu: %d threads, not %d", i, threads, cases[i].threads);
        free(at.directory), free(groups);
    }
}

int main(int argc, char** argv) {
    static const TestCase cases[] = {{"json", test_json},     {"json/writer", test_json_writer},
                                     {"philox", test_philox}, {"schedule", test_schedule},
                                     {"log", test_log},       {"cpu_share", test_cpu_share}};
    return tests_main(argc, argv, cases, COUNT_OF(cases));
}
