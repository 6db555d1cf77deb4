/* Tests of question answering: the windows made from a file, the choice of the answer, and its score.
 *
 *     ./test_squad [NAME]                                 on small files that are written here
 *     ./test_squad windows VOCABULARY FILE T STRIDE QUESTION train|evaluate
 *     ./test_squad answer VOCABULARY FILE T STRIDE PREDICTIONS.json
 *     ./test_squad score VOCABULARY FILE PREDICTIONS.json
 *     ./test_squad normalize TEXTS.json
 *
 * The others are for dev/test/check_squad.py: a line for each window; what made-up logits answer; a line for each
 * answer in a file of them; texts as they are compared. VOCABULARY is a directory with vocab.txt, QUESTION the most
 * tokens of a question.
 *
 * Prints a line per case and `N passed, N failed, 0 skipped`; exit status 1 if one failed. */

#include "apps/tune/squad.h"
#include <signal.h>
#include <sys/resource.h>

#include "dev/test/tests.h"
#include "llmc/base/rng.h"

static WordPiece words;  // the vocabulary of the tests

static SquadSettings settings_of(int T, int stride, SquadUse use) {
    SquadSettings settings = {T, stride, 4, 3, use};
    return settings;
}

// ---------------------------------------------------------------------------------------------------------
// A vocabulary

static const char VOCABULARY[] =
    "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\nc\nd\ne\nf\ng\nh\ni\nj\ncafe\n##s\n.\n?\n\xe4\xb8\xad\n"
    "\xe1\x84\x80\n##\xe1\x85\xa1\n##\xe1\x84\x82\n##\xe1\x85\xa1\xe1\x84\x82\n";
enum { CLS = 2, SEP = 3, A = 5, B, C, D, E, F, G, H, I, J, CAFE, S, STOP, WHAT };

// The tokens of a text with the bytes that they come from, as "token@begin-end" separated by spaces.
static void expect_origins(Tests* t, const WordPiece* words, const char* text, size_t n, const char* want) {
    TokenIds ids, plain;
    Text got = {NULL, 0, 0};
    memset(&ids, 0, sizeof ids);
    memset(&plain, 0, sizeof plain);
    ids.has_origins = 1;
    wordpiece_encode(&ids, words, text, n);
    wordpiece_encode(&plain, words, text, n);
    text_append(&got, "", 0);
    for (size_t i = 0; i < ids.count; i++) {
        size_t length;
        const char* token = wordpiece_token(words, ids.id[i], &length);
        text_printf(&got, "%s%.*s@%u-%u", i ? " " : "", (int)length, token, ids.origin[i].begin, ids.origin[i].end);
    }
    int same = ids.count == plain.count && !plain.origin && memcmp(ids.id, plain.id, ids.count * sizeof(int)) == 0;
    expect(t, same && strcmp(got.text, want) == 0, want, "they are '%s'", got.text);
    free(got.text);
    token_ids_free(&ids), token_ids_free(&plain);
}

// Tokens of a vocabulary of bytes. check_squad.py compares the origins of words.
static void test_origins(Tests* t) {
    expect_origins(t, &words, " a  cafe\xcc\x81s.", 13, "a@1-2 cafe@4-8 ##s@10-11 .@11-12");
    Text bytes = {NULL, 0, 0};
    int byte_of[BYTE_ALPHABET_END];
    byte_alphabet(byte_of);
    for (int byte = 0; byte < 256; byte++)
        for (int c = 0; c < BYTE_ALPHABET_END; c++)
            if (byte_of[c] == byte) wordpiece_put(&bytes, (uint32_t)c), text_append(&bytes, "\n", 1);
    text_printf(&bytes, "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n");
    char* folder = xprintf("%s/bytes", t->directory);
    WordPiece words;
    if (make_directories(folder) != 0) die(FAILED, "%s: %s", folder, strerror(errno));
    free(put_file(t, "bytes/vocab.txt", bytes.text, bytes.length));
    if (wordpiece_open(&words, folder, CASE_OF_MODEL) != 0 || !words.is_bytes) die(FAILED, "%s: no bytes", folder);
    expect_origins(t, &words, "A\xc3[MASK]b", 9, "A@0-1 \xc3\x83@1-2 [MASK]@2-8 b@8-9");
    wordpiece_free(&words);
    free(folder), free(bytes.text);
}

// ---------------------------------------------------------------------------------------------------------
// Files

// A file of one question about a context; `rest` are further members of the question.
static char* put_question(const Tests* t, const char* context, const char* question, const char* rest) {
    Text out = {NULL, 0, 0};
    text_printf(&out, "{\"version\": \"1.1\", \"data\": [{\"title\": \"\", \"paragraphs\": [{\"context\": \"%s\", ",
                context);
    text_printf(&out, "\"qas\": [{\"id\": \"q\", \"question\": \"%s\"%s}]}]}]}\n", question, rest);
    char* path = put_file(t, "questions.json", out.text, out.length);
    free(out.text);
    return path;
}

// The windows of a question about a context, as "tokens second first last", one after the other.
typedef struct {
    const char *name, *context, *question, *rest;
    int T, stride;
    SquadUse use;
    const char* want;
} SquadWindows;

static void expect_windows(Tests* t, const SquadWindows* c) {
    Squad s;
    Examples e;
    Text got = {NULL, 0, 0};
    char* path = put_question(t, c->context, c->question, c->rest);
    squad_open(&s, &e, path, &words, settings_of(c->T, c->stride, c->use));
    text_append(&got, "", 0);
    for (int i = 0; i < e.count; i++) {
        text_printf(&got, i ? ", " : "");
        for (size_t k = e.begin[i]; k < e.begin[i + 1]; k++) {
            size_t n;
            const char* token = wordpiece_token(&words, e.tokens[k], &n);
            text_printf(&got, "%.*s ", (int)n, token);
        }
        text_printf(&got, "%d %d %d", e.second[i], e.label[2 * i], e.label[2 * i + 1]);
    }
    expect(t, e.targets == 2 && s.windows == e.count && strcmp(got.text, c->want) == 0, c->name, "'%s', not '%s'",
           got.text, c->want);
    squad_close(&s), examples_close(&e);
    free(got.text), free(path);
}

#define GOLD(start, text) "{\"answer_start\": " start ", \"text\": \"" text "\"}"
#define ANSWER(start, text) ", \"answers\": [" GOLD(start, text) "]"

static void test_windows(Tests* t) {
    static const SquadWindows cases[] = {
        {"one window", "a b c", "d e?", ANSWER("2", "b c"), 11, 2, SQUAD_TRAIN, "[CLS] d e ? [SEP] a b c [SEP] 5 6 7"},
        {"windows share two tokens", "a b c d e f g", "h ?", ANSWER("4", "c d"), 10, 2, SQUAD_TRAIN,
         "[CLS] h ? [SEP] a b c d e [SEP] 4 6 7, [CLS] h ? [SEP] d e f g [SEP] 4 0 0"},
        {"an answer in two windows, in one as its last token", "a b c d e f g", "h ?", ANSWER("8", "e"), 10, 2,
         SQUAD_TRAIN, "[CLS] h ? [SEP] a b c d e [SEP] 4 8 8, [CLS] h ? [SEP] d e f g [SEP] 4 5 5"},
        {"a question that is too long", "a b", "c d e f g h", ANSWER("0", "a b"), 11, 2, SQUAD_TRAIN,
         "[CLS] c d e f [SEP] a b [SEP] 6 6 7"},
        {"a context without tokens", " \\u200b", "a", ANSWER("0", " "), 11, 2, SQUAD_TRAIN,
         "[CLS] a [SEP] [SEP] 3 0 0"},
        {"answer_start counts characters", "\\u4e2d\xe4\xb8\xad\\ud83d\\ude00 caf\xc3\xa9 a", "b",
         ANSWER("4", "caf\\u00e9"), 12, 1, SQUAD_TRAIN,
         "[CLS] b [SEP] \xe4\xb8\xad \xe4\xb8\xad [UNK] cafe a [SEP] 3 6 6"},
        {"an answer that is part of a word", "a cafes b", "c", ANSWER("3", "afe"), 11, 2, SQUAD_TRAIN,
         "[CLS] c [SEP] a cafe ##s b [SEP] 3 4 4"},
        {"tokens of one character", "a \\uac00 b", "c", ANSWER("2", "\\uac00"), 11, 2, SQUAD_TRAIN,
         "[CLS] c [SEP] a \xe1\x84\x80 ##\xe1\x85\xa1 b [SEP] 3 4 5"},
        {"the first of several answers", "a b c", "d", ", \"answers\": [" GOLD("4", "c") ", " GOLD("0", "a") "]", 11, 2,
         SQUAD_TRAIN, "[CLS] d [SEP] a b c [SEP] 3 5 5"},
        {"no answer", "a b c", "d", ", \"answers\": [], \"is_impossible\": true", 11, 2, SQUAD_TRAIN,
         "[CLS] d [SEP] a b c [SEP] 3 0 0"},
        {"evaluation of a question without labels", "a b c", "d", ", \"answers\": null", 11, 2, SQUAD_EVALUATE,
         "[CLS] d [SEP] a b c [SEP] 3 0 0"},
        {"evaluation with a misplaced answer", "a b c", "d", ANSWER("2", "c"), 11, 2, SQUAD_EVALUATE,
         "[CLS] d [SEP] a b c [SEP] 3 0 0"},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) expect_windows(t, &cases[i]);
}

// ---------------------------------------------------------------------------------------------------------
// What is refused

static void open_to(const char* path, SquadSettings settings) {
    Squad s;
    Examples e;
    squad_open(&s, &e, path, &words, settings);
    squad_warn(&s);
    squad_score(&s);
    squad_close(&s), examples_close(&e);
}

static void open_training(const char* path) { open_to(path, settings_of(11, 2, SQUAD_TRAIN)); }
static void open_evaluation(const char* path) { open_to(path, settings_of(11, 2, SQUAD_EVALUATE)); }
static void open_short(const char* path) { open_to(path, settings_of(9, 2, SQUAD_TRAIN)); }
static void open_negative(const char* path) { open_to(path, settings_of(11, -1, SQUAD_TRAIN)); }

// On a disk that is full; `path` is a good file, next to which they are written.
static void write_full(const char* path) {
    struct rlimit limit = {1, 1};
    Squad s;
    Examples e;
    squad_open(&s, &e, path, &words, settings_of(11, 2, SQUAD_EVALUATE));
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    squad_write(&s, xprintf("%s.predicted", path));
}

static char* put_questions(const Tests* t, const char* text) { return put_text_file(t, "questions.json", text); }

// Text before and after the members of a question with the id q.
#define BEFORE "{\"data\": [{\"paragraphs\": [{\"context\": \"a b c\", \"qas\": [{\"id\": \"q\", \"question\": \"d\""
#define AFTER "}]}]}]}"
#define NEXT(id) "}, {\"id\": \"" id "\", \"question\": \"e\""
#define POSSIBLE ", \"is_impossible\": false"
#define IMPOSSIBLE ", \"answers\": [], \"is_impossible\": true"

static void test_refused(Tests* t) {
    static const char good[] = BEFORE ANSWER("0", "a") POSSIBLE NEXT("r") ANSWER("2", "b") AFTER;
    static const TextChange changes[] = {
        {"{", "{", NULL},
        {"]}]}]}", "", "is not valid JSON"},
        {"\"data\"", "\"x\"", "key \"data\": missing; an array is needed"},
        {"\"data\": ", "\"data\": {}, \"x\": ", "key \"data\": is an object, but an array is needed"},
        {"\"data\": ", "\"data\": [], \"x\": ", "has no questions"},
        {"\"qas\": ", "\"qas\": [], \"x\": ", "has no questions"},
        {"[{\"paragraphs\"", "[\"a\", {\"paragraphs\"", "data[0]: key \"paragraphs\": missing"},
        {"[{\"context\"", "[null, {\"context\"", "data[0].paragraphs[0]: key \"context\": missing"},
        {"\"a b c\"", "1", "\"context\": is a number"},
        {"\"qas\"", "\"x\"", "paragraphs[0]: key \"qas\": missing"},
        {"\"id\"", "\"x\"", "qas[0]: key \"id\": missing"},
        {"\"q\"", "1.5", "key \"id\": is a number, but a string"},
        {"\"question\"", "\"x\"", "question \"q\": key \"question\": missing"},
        {"\"answers\": ", "\"answers\": {}, \"x\": ", "question \"q\": key \"answers\": is an object"},
        {"\"answers\": [", "\"answers\": [\"a\", ", "key \"text\": missing"},
        {"\"answer_start\"", "\"x\"", "key \"answer_start\": missing"},
        {"\"text\": \"a\"", "\"text\": \"\"", "an answer is empty"},
        {"\"text\": \"a\"", "\"text\": \"\xff\"", "byte 0xff is not valid UTF-8"},
        {"_start\": 0", "_start\": -1",
         "question \"q\": key \"answer_start\": is -1, but the context has 5 characters"},
        {"_start\": 0", "_start\": 5", "is 5, but the context has 5"},
        {"_start\": 0", "_start\": 99999999999999999999", "a whole number is needed"},
        {"_start\": 0", "_start\": 0.5", "a whole number is needed"},
        {"_start\": 0", "_start\": \"0\"", "\"answer_start\": is a string"},
        {"false", "\"no\"", "\"is_impossible\": is a string"},
        {"false", "true", "is_impossible is true, but there are answers"},
        {"\"answers\": [", "\"answers\": [], \"x\": [", "is_impossible is false, but there is no answer"},
        {"\"r\"", "\"q\"", "two questions have the id \"q\""},
        {"a b c", "d e f", "none of its 2 questions"},
    };
    static const struct {
        int status;
        const char *name, *message;
        void (*run)(const char*);
    } others[] = {
        {USAGE, "sequences that are too short", "sequences of 9 tokens (-t) have no room for", open_short},
        {USAGE, "less than nothing shared", "share -1 tokens", open_negative},
        {FAILED, "a full disk", ".predicted: cannot be written: File too large", write_full},
    };
    expect_text_changes(t, "questions", good, changes, COUNT_OF(changes), put_questions, open_training);
    char* path = put_questions(t, good);
    for (size_t i = 0; i < COUNT_OF(others); i++) {
        Text said = {NULL, 0, 0};
        int status = exit_status_of(others[i].run, path, &said);
        expect(t, status == others[i].status && is_one_line(&said) && strstr(said.text, others[i].message),
               others[i].name, "it ended with %d and '%s'; due is %d and '%s'", status, said.text, others[i].status,
               others[i].message);
        free(said.text);
    }
    char* left = xprintf("%s.predicted.tmp", path);
    expect_that(t, access(left, F_OK) != 0, "a full disk: no temporary file is left");
    unlink(path);
    expect_end(t, USAGE, "no file", "questions.json: cannot be read", open_training, path);
    free(left), free(path);
}

// Questions that cannot be trained on, or not be scored.
static void test_odd(Tests* t) {
    // clang-format off
    static const char odd[] =
        BEFORE ANSWER("0", "b") NEXT("r") ANSWER("2", "c") NEXT("s") NEXT("t") ANSWER("4", "c") AFTER;
    // clang-format on
    char* path = put_questions(t, odd);
    for (SquadUse use = SQUAD_EVALUATE; use <= SQUAD_TRAIN; use = (SquadUse)(use + 1)) {
        Squad s;
        Examples e;
        squad_open(&s, &e, path, &words, settings_of(11, 2, use));
        int wanted = use == SQUAD_TRAIN ? 1 : 4;
        expect(t, s.questions == 4 && s.misplaced == 2 && s.unanswered == 1 && e.count == wanted,
               use == SQUAD_TRAIN ? "what is left to train on" : "what is evaluated", "%d examples, not %d", e.count,
               wanted);
        expect(t,
               e.group[e.count - 1] == 3 && s.first_misplaced &&
                   strstr(s.first_misplaced, "question \"q\" has \"a\" there, not \"b\""),
               "the first misplaced answer", "%s", s.first_misplaced);
        squad_close(&s), examples_close(&e);
    }
    free(path);
    path = put_questions(t, BEFORE ANSWER("0", "b") AFTER);
    expect_end(t, DONE, "a warning for misplaced answers", "of 1 questions, 1 have an answer that is not at",
               open_evaluation, path);
    free(path);
    path = put_questions(t, BEFORE NEXT("r") ANSWER("0", "a") AFTER);
    expect_end(t, DONE, "a warning for questions without answers",
               "of 2 questions, 1 have neither answers nor is_impossible and are not scored", open_evaluation, path);
    free(path);
    Squad s;
    Examples e;
    const real logits[2 * 16] = {0};
    char* asked = xprintf("{\"version\": \"v2.0\", %s", BEFORE NEXT("r") AFTER + 1);
    path = put_questions(t, asked);
    squad_open(&s, &e, path, &words, settings_of(11, 2, SQUAD_EVALUATE));
    squad_take(&s, &e, 1, logits, 2);
    expect(t, s.is_v2 && s.unanswered == 2 && e.count == 2 && !squad_is_known(&s, 1) && squad_answered(&s) == 1,
           "v2.0 by its version, without answers", "%d of %d unanswered", s.unanswered, e.count);
    squad_close(&s), examples_close(&e), free(path), free(asked);
}

// ---------------------------------------------------------------------------------------------------------
// Answers

enum { ROOM = 16 };

// Set the start and end logits of a window's tokens, [ROOM, 3]; the third column must not be read.
static void set_logits(real* logits, const double* start, const double* end, int n) {
    for (int t = 0; t < ROOM; t++) {
        logits[3 * t] = t < n ? (real)start[t] : (real)1000;
        logits[3 * t + 1] = t < n ? (real)end[t] : (real)1000;
        logits[3 * t + 2] = (real)1000;
    }
}

static void expect_answer(Tests* t, const char* name, const Squad* s, const char* want) {
    size_t n;
    const char* answer = squad_answer(s, 0, &n);
    char* got = answer ? xprintf("\"%.*s\"", (int)n, answer) : xprintf("nothing");
    char* quoted = want ? xprintf("\"%s\"", want) : xprintf("nothing");
    expect(t, strcmp(got, quoted) == 0, name, got);
    free(got), free(quoted);
}

// The example has [CLS] d [SEP] a b, c d, e [SEP]: the context is at 3 .. 9.
#define CONTEXT "a b, c d, e"
enum { LENGTH = 11, CONTEXT_AT = 3 };

static void test_answer(Tests* t, int is_v2) {
    const double nan_value = (double)NAN;
    static const double flat[LENGTH] = {0};
    double start[LENGTH], end[LENGTH];
    real logits[3 * ROOM];
    Squad s;
    Examples e;
    char* path = put_question(t, CONTEXT, "d", is_v2 ? ", \"answers\": [], \"is_impossible\": true" : ANSWER("2", "b"));
    squad_open(&s, &e, path, &words, settings_of(ROOM, 2, SQUAD_EVALUATE));
    expect(t, e.count == 1 && examples_length(&e, 0) == LENGTH && s.is_v2 == is_v2, "one window", "it is another");
    expect_answer(t, "nothing seen", &s, NULL);
#define TAKE(name, want)                                                                                               \
    do {                                                                                                               \
        squad_begin(&s);                                                                                               \
        set_logits(logits, start, end, LENGTH);                                                                        \
        squad_take(&s, &e, 0, logits, 3);                                                                              \
        expect_answer(t, name, &s, want);                                                                              \
    } while (0)
#define RESET() (memcpy(start, flat, sizeof start), memcpy(end, flat, sizeof end))
    RESET();
    TAKE("equal scores: the first one", "a");
    RESET(), start[4] = 2, end[6] = 2;
    TAKE("three tokens", "b, c");
    RESET(), start[4] = 3, end[7] = 3, end[5] = 2;
    TAKE("not four", "b,");
    RESET(), start[6] = 6, end[4] = 5;
    TAKE("no end before the start", "c");
    RESET(), start[1] = 9, end[1] = 9, start[2] = end[2] = 9, start[10] = end[10] = 9, start[9] = 1;
    TAKE("nothing outside the context", "e");
    RESET(), start[9] = end[9] = 1;
    TAKE("the last token", "e");
    RESET(), start[3] = nan_value, start[5] = nan_value, end[6] = nan_value, start[7] = end[7] = 1;
    TAKE("NaN is not the best", "d");
    for (int i = 0; i < LENGTH; i++) start[i] = nan_value;
    TAKE("nothing but NaN", "");
    RESET(), start[0] = 2, end[0] = 2, start[6] = end[6] = 2;
    TAKE("as good as none", "c");
    start[0] = 2.5;
    TAKE(is_v2 ? "none is better" : "none is not an answer in v1.1", is_v2 ? "" : "c");
    size_t n;
    double* sums = squad_answers(&s, &n);
    expect(t, n == 5 && sums[0] == 4 && sums[1] == 4.5 && sums[2] == 1 && sums[3] == 3 && sums[4] == 3,
           "what ranks add up", "it is something else");
    squad_close(&s), examples_close(&e);
    free(path);
}

// A context of two windows: [CLS] h ? [SEP] a b c d e [SEP], [CLS] h ? [SEP] d e f g [SEP].
static void test_answer_windows(Tests* t) {
    real logits[2][3 * ROOM];
    double start[2][10] = {{0}}, end[2][10] = {{0}};
    Squad s;
    Examples e;
    char* path = put_question(t, "a b c d e f g", "h ?", ", \"answers\": [], \"is_impossible\": true");
    squad_open(&s, &e, path, &words, settings_of(10, 2, SQUAD_EVALUATE));
    start[0][5] = 1, end[0][5] = 1, start[1][6] = 1, end[1][7] = 2, start[0][0] = 9, start[1][0] = 1;
    set_logits(logits[0], start[0], end[0], 10), set_logits(logits[1], start[1], end[1], 9);
    for (int order = 0; order < 2; order++) {
        squad_begin(&s);
        squad_take(&s, &e, order, logits[order], 3);
        expect_answer(t, order ? "the second window" : "the first window", &s, order ? "f g" : "");
        squad_take(&s, &e, !order, logits[!order], 3);
        expect_answer(t, "both windows", &s, "f g");
        expect(t, s.answer[0].null_score == 1 && s.answer[0].score == 3 && s.answer[0].example == 2,
               "the least of none, the best of all", "another one");
    }
    squad_close(&s), examples_close(&e);
    free(path);
}

static void test_write(Tests* t) {
    static const char file[] =
        "{\"data\": [{\"paragraphs\": [{\"context\": \"a \\\"b\\\" caf\\u00e9\", \"qas\": [{\"id\": \"x\", "
        "\"question\": \"d\"}, {\"id\": -262, \"question\": \"d\"}, {\"id\": \"z\\n\", \"question\": \"d\"}]}]}]}";
    real logits[3 * ROOM] = {0};
    Squad s;
    Examples e;
    char *path = put_file(t, "three.json", file, sizeof file - 1), *out = xprintf("%s/predictions.json", t->directory);
    squad_open(&s, &e, path, &words, settings_of(ROOM, 2, SQUAD_EVALUATE));
    squad_write(&s, out);
    char* text = read_file(out, 1000, NULL, FAILED);
    expect(t, strcmp(text, "{}\n") == 0, "predictions of nothing", text);
    free(text);
    squad_take(&s, &e, 0, logits, 3);
    logits[3 * 4] = logits[3 * 6 + 1] = 1;
    squad_take(&s, &e, 1, logits, 3);
    squad_take(&s, &e, 2, logits, 3);
    squad_write(&s, out);
    text = read_file(out, 1000, NULL, FAILED);
    const char* want = "{\n\"x\": \"a\",\n\"-262\": \"\\\"b\\\"\",\n\"z\\n\": \"\\\"b\\\"\"\n}\n";
    expect(t, strcmp(text, want) == 0, "predictions, an integer as an id", text);
    char* temporary = xprintf("%s.tmp", out);
    expect(t, !file_exists(temporary), "nothing else is left", temporary);
    SquadScore score = squad_score(&s);
    expect(t, score.all.questions == 0 && score.all.f1 == 0, "nothing to score", "there is");
    free(text), free(temporary), free(path), free(out);
    squad_close(&s), examples_close(&e);
}

// ---------------------------------------------------------------------------------------------------------
// Scores

static void test_score(Tests* t) {
    // clang-format off
    static const char file[] =
        BEFORE POSSIBLE ", \"answers\": [" GOLD("2", "b") ", " GOLD("2", "b c") "]"
        NEXT("r") IMPOSSIBLE
        NEXT("s") POSSIBLE ANSWER("0", "a")
        NEXT("t") ANSWER("0", "a")
        NEXT("u") ", \"answers\": [" GOLD("0", "a") ", " GOLD("2", "b") "]" AFTER;
    // clang-format on
    // Exact match and F1 in per cent: of all, of those with an answer, of those without.
    static const struct {
        const char *name, *answer[3];
        double want[6];
    } cases[] = {
        {"the second gold answer is better", {"x b c", "", ""}, {200.0 / 3, 280.0 / 3, 50, 90, 100, 100}},
        {"an answer where there is none", {"b", "b", ""}, {200.0 / 3, 200.0 / 3, 100, 100, 0, 0}},
        {"articles are as good as none", {"b", "the", "the"}, {100, 100, 100, 100, 100, 100}},
    };
    Squad s;
    Examples e;
    char* path = put_file(t, "scores.json", file, sizeof file - 1);
    squad_open(&s, &e, path, &words, settings_of(ROOM, 2, SQUAD_EVALUATE));
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        SquadScore score;
        memset(&score, 0, sizeof score);
        for (int q = 0; q < 3; q++) squad_score_add(&score, &s, q, cases[i].answer[q], strlen(cases[i].answer[q]));
        squad_score_end(&score);
        const double got[6] = {score.all.exact,     score.all.f1,           score.answerable.exact,
                               score.answerable.f1, score.impossible.exact, score.impossible.f1};
        for (int k = 0; k < 6; k++) {
            char* name = xprintf("%s, %d", cases[i].name, k);
            expect(t, fabs(got[k] - cases[i].want[k]) < 1e-12, name, "%g, not %g", got[k], cases[i].want[k]);
            free(name);
        }
    }
    // A gold answer that normalizes to nothing does not count.
    SquadMatch none = squad_judge(&s, 3, "", 0), other = squad_judge(&s, 4, "", 0);
    expect(t, none.exact == 1 && none.f1 == 1 && other.exact == 0 && other.f1 == 0, "gold answers that are articles",
           "another score");
    // Only questions that were seen count.
    real logits[3 * ROOM] = {0};
    logits[3 * 4] = logits[3 * 4 + 1] = 1;
    squad_take(&s, &e, 0, logits, 3);
    SquadScore score = squad_score(&s);
    expect(t, score.all.questions == 1 && score.all.exact == 100 && score.impossible.questions == 0,
           "one question of five", "another score");
    squad_close(&s), examples_close(&e);
    free(path);
}

// ---------------------------------------------------------------------------------------------------------
// For check_squad.py

static int number_of(const char* text) {
    char* end;
    long value = strtol(text, &end, 10);
    if (*end || end == text || value < 0 || value > 1 << 20) die(USAGE, "%s: is not a number up to 2^20", text);
    return (int)value;
}

static void show_windows(const Squad* s, const Examples* e) {
    for (int i = 0; i < e->count; i++) {
        const SquadParagraph* p = &s->paragraph[s->question[e->group[i]].paragraph];
        const TextSpan* origin = s->tokens.origin + p->first_token + s->window[i];
        printf("%d %d %d %d\t", e->group[i], e->second[i], e->label[2 * i], e->label[2 * i + 1]);
        for (size_t k = e->begin[i]; k < e->begin[i + 1]; k++) printf("%d ", e->tokens[k]);
        printf("\t");
        for (int k = 0; k < examples_length(e, i) - 1 - e->second[i]; k++)
            printf("%u %u ", origin[k].begin, origin[k].end);
        printf("\n");
    }
}

// A pseudo-random number that check_squad.py computes too: 23 bits of a product.
static real made_up(int example, int position, int end) {
    uint32_t at = ((uint32_t)example * 512 + (uint32_t)position) * 2 + (uint32_t)end;
    uint32_t bits = at * 2654435761u;
    bits = (bits ^ bits >> 15) * 2246822519u;
    return (real)(bits >> 9) + (position == 0 ? (real)(1 << 22) : 0);
}

static void answer_all(Squad* s, const Examples* e, int T) {
    real* logits = (real*)xmalloc(2 * (size_t)T * sizeof(real));
    for (int i = 0; i < e->count; i++) {
        for (int t = 0; t < T; t++) logits[2 * t] = made_up(i, t, 0), logits[2 * t + 1] = made_up(i, t, 1);
        squad_take(s, e, i, logits, 2);
    }
    free(logits);
}

static void show_score(const SquadScore* score) {
    const SquadShare* share[] = {&score->all, &score->answerable, &score->impossible};
    for (size_t i = 0; i < COUNT_OF(share); i++)
        printf("%d %.17g %.17g\n", share[i]->questions, share[i]->exact, share[i]->f1);
}

static void score_file(const Squad* s, const char* path) {
    Json json;
    SquadScore score;
    memset(&score, 0, sizeof score);
    json_load(&json, path, SQUAD_MAX_FILE);
    for (int i = 0; i < s->questions; i++) {
        char* id = xprintf("%.*s", (int)s->question[i].id.length, s->text.text + s->question[i].id.begin);
        const JsonNode* answer = json_get(json.root, id);
        if (answer) {
            SquadMatch match = squad_judge(s, i, answer->string, answer->length);
            squad_score_add(&score, s, i, answer->string, answer->length);
            printf("%.17g %.17g\n", match.exact, match.f1);
        }
        free(id);
    }
    squad_score_end(&score);
    show_score(&score);
    json_free(&json);
}

static int normalize_all(const char* path) {
    Json json;
    Text out = {NULL, 0, 0}, line = {NULL, 0, 0};
    json_load(&json, path, SQUAD_MAX_FILE);
    for (const JsonNode* text = json.root->first; text; text = text->next) {
        squad_normalize(&out, text->string, text->length);
        line.length = 0;
        text_json_string(&line, out.text, out.length);
        puts(line.text);
    }
    free(out.text), free(line.text);
    json_free(&json);
    return 0;
}

static int check(int argc, char** argv) {
    int shows = argc == 8 && strcmp(argv[1], "windows") == 0, answers = argc == 7 && strcmp(argv[1], "answer") == 0;
    if (argc == 3 && strcmp(argv[1], "normalize") == 0) return normalize_all(argv[2]);
    if (!shows && !answers && (argc != 5 || strcmp(argv[1], "score") != 0))
        die(USAGE,
            "usage: test_squad [windows VOCABULARY FILE T STRIDE QUESTION train|evaluate | answer VOCABULARY FILE T "
            "STRIDE PREDICTIONS.json | score VOCABULARY FILE PREDICTIONS.json | normalize TEXTS.json]");
    SquadSettings settings = {384, 128, 64, 30, SQUAD_EVALUATE};
    if (shows || answers) settings.T = number_of(argv[4]), settings.stride = number_of(argv[5]);
    if (shows)
        settings.most_question = number_of(argv[6]),
        settings.use = strcmp(argv[7], "train") == 0 ? SQUAD_TRAIN : SQUAD_EVALUATE;
    WordPiece words;
    Squad s;
    Examples e;
    if (wordpiece_open(&words, argv[2], CASE_OF_MODEL) != 0) die(USAGE, "%s: holds no vocab.txt", argv[2]);
    double start = now_seconds();
    squad_open(&s, &e, argv[3], &words, settings);
    fprintf(stderr, "%d questions, %d windows, %zu tokens: %.2f s\n", s.questions, e.count, e.begin[e.count],
            now_seconds() - start);
    squad_warn(&s);
    if (shows) show_windows(&s, &e);
    else if (answers) {
        answer_all(&s, &e, settings.T);
        squad_write(&s, argv[6]);
        SquadScore score = squad_score(&s);
        show_score(&score);
    } else score_file(&s, argv[4]);
    squad_close(&s), examples_close(&e), wordpiece_free(&words);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------

int main(int argc, char** argv) {
    if (argc > 2) return check(argc, argv);
    Tests t;
    tests_choose(&t, argc, argv);
    t.directory = make_scratch_directory("test_squad");
    free(put_file(&t, "vocab.txt", VOCABULARY, sizeof VOCABULARY - 1));
    if (wordpiece_open(&words, t.directory, CASE_OF_MODEL) != 0) die(FAILED, "%s: no vocabulary", t.directory);
    test_origins(&t);
    test_windows(&t);
    test_refused(&t);
    test_odd(&t);
    test_answer(&t, 0);
    test_answer(&t, 1);
    test_answer_windows(&t);
    test_write(&t);
    test_score(&t);
    wordpiece_free(&words);
    return tests_close(&t);
}
