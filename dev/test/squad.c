/* Tests of question answering: the windows made from a file, the choice of the answer, its score, and what is refused.
 *
 *     ./test_squad [NAME]                                 on small files that are written here
 *     ./test_squad windows VOCABULARY FILE T STRIDE       a line for each window
 *     ./test_squad normalize TEXTS.json                   texts as they are compared, a line each
 *
 * dev/test/check_squad.py compares the last two with other programs. VOCABULARY is a directory with vocab.txt. */

#include "apps/tune/squad.h"
#include "dev/test/tests.h"

static WordPiece words;  // the vocabulary of the tests

static SquadSettings settings_of(int T, int stride, SquadUse use) {
    SquadSettings settings = {T, stride, 4, 3, use};
    return settings;
}

static const char VOCABULARY[] = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\nc\nd\ne\nf\ng\nh\ni\nj\ncafe\n?\n";

// A token's text after `got`.
static void put_token(Text* got, const WordPiece* vocabulary, int id) {
    size_t n;
    const char* token = wordpiece_token(vocabulary, id, &n);
    text_append(got, token, n);
}

// A vocabulary of bytes: the tokens with the bytes that they come from. check_squad.py compares those of words.
static void test_origins(Tests* t) {
    static const char text[] = "A\xc3[MASK]b";
    Text bytes = {NULL, 0, 0}, got = {NULL, 0, 0};
    TokenIds ids = {.has_origins = 1};
    WordPiece of_bytes;
    int byte_of[BYTE_ALPHABET_END];
    byte_alphabet(byte_of);
    for (int byte = 0; byte < 256; byte++)
        for (int c = 0; c < BYTE_ALPHABET_END; c++)
            if (byte_of[c] == byte) wordpiece_put(&bytes, (uint32_t)c), text_append(&bytes, "\n", 1);
    text_printf(&bytes, "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n");
    free(put_file(t, "vocab.txt", bytes.text, bytes.length));
    CHECK(wordpiece_open(&of_bytes, t->directory, CASE_OF_MODEL) == 0 && of_bytes.is_bytes);
    wordpiece_encode(&ids, &of_bytes, text, sizeof text - 1);
    for (size_t i = 0; i < ids.count; i++) {
        put_token(&got, &of_bytes, ids.id[i]);
        text_printf(&got, "@%u-%u ", ids.origin[i].begin, ids.origin[i].end);
    }
    expect(t, strcmp(got.text, "A@0-1 \xc3\x83@1-2 [MASK]@2-8 b@8-9 ") == 0, "origins of bytes", "'%s'", got.text);
    wordpiece_free(&of_bytes), token_ids_free(&ids);
    free(bytes.text), free(got.text);
}

// ---------------------------------------------------------------------------------------------------------
// Files

// Text before and after the members of a question with the id q about CONTEXT.
#define ABOUT(context)                                                                                                 \
    "{\"data\": [{\"paragraphs\": [{\"context\": \"" context "\", \"qas\": [{\"id\": \"q\", \"question\": "
#define BEFORE ABOUT("a b c") "\"d\""
#define AFTER "}]}]}]}"
#define NEXT(id) "}, {\"id\": \"" id "\", \"question\": \"e\""
#define GOLD(start, text) "{\"answer_start\": " start ", \"text\": \"" text "\"}"
#define ANSWER(start, text) ", \"answers\": [" GOLD(start, text) "]"
#define POSSIBLE ", \"is_impossible\": false"

static char* put_questions(const Tests* t, const char* text) { return put_text_file(t, "questions.json", text); }

// The windows of a file, as "tokens second first last", one after the other: which answer counts. check_squad.py
// compares windows of every shape, and answers anywhere.
static void test_windows(Tests* t) {
    static const struct {
        const char *name, *file;
        SquadUse use;
        const char* want;
    } cases[] = {
        {"the first of several answers; none; evaluation of one without labels, of a misplaced one",
         BEFORE ", \"answers\": [" GOLD("4", "c") ", " GOLD("0", "a") "]" NEXT("r") ", \"answers\": null" NEXT("s")
             ANSWER("2", "c") AFTER,
         SQUAD_EVALUATE,
         "[CLS] d [SEP] a b c [SEP] 3 5 5, [CLS] e [SEP] a b c [SEP] 3 0 0, [CLS] e [SEP] a b c [SEP] 3 0 0"},
        {"training without answers that are misplaced or not known",
         BEFORE ANSWER("0", "b") NEXT("r") NEXT("s") ANSWER("4", "c") AFTER, SQUAD_TRAIN,
         "[CLS] e [SEP] a b c [SEP] 3 5 5"},
    };
    for (size_t k = 0; k < COUNT_OF(cases); k++) {
        Squad s;
        Examples e;
        Text got = {NULL, 0, 0};
        char* path = put_questions(t, cases[k].file);
        squad_open(&s, &e, path, &words, settings_of(11, 2, cases[k].use));
        for (int i = 0; i < e.count; i++) {
            text_printf(&got, i ? ", " : "");
            for (size_t j = e.begin[i]; j < e.begin[i + 1]; j++)
                put_token(&got, &words, e.tokens[j]), text_append(&got, " ", 1);
            text_printf(&got, "%d %d %d", e.second[i], e.label[2 * i], e.label[2 * i + 1]);
        }
        expect(t, e.targets == 2 && s.windows == e.count && strcmp(got.text, cases[k].want) == 0, cases[k].name,
               "'%s', not '%s'", got.text, cases[k].want);
        squad_close(&s), examples_close(&e);
        free(got.text), free(path);
    }
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

static void test_refused(Tests* t) {
    static const char good[] = BEFORE ANSWER("0", "a") POSSIBLE NEXT("r") ANSWER("2", "b") AFTER;
    static const TextChange changes[] = {
        {"\"data\"", "\"x\"", "key \"data\": missing; an array is needed"},
        {"\"data\": ", "\"data\": [], \"x\": ", "has no questions"},
        {"[{\"context\"", "[null, {\"context\"", "data[0].paragraphs[0]: key \"context\": missing"},
        {"\"qas\"", "\"x\"", "paragraphs[0]: key \"qas\": missing"},
        {"\"q\"", "1.5", "key \"id\": is a number, but a string"},
        {"\"question\"", "\"x\"", "question \"q\": key \"question\": missing"},
        {"\"answers\": [", "\"answers\": [\"a\", ", "key \"text\": missing"},
        {"\"answer_start\"", "\"x\"", "key \"answer_start\": missing"},
        {"\"text\": \"a\"", "\"text\": \"\"", "an answer is empty"},
        {"_start\": 0", "_start\": -1",
         "question \"q\": key \"answer_start\": is -1, but the context has 5 characters"},
        {"_start\": 0", "_start\": 5", "is 5, but the context has 5"},
        {"_start\": 0", "_start\": 99999999999999999999", "a whole number is needed"},
        {"false", "true", "is_impossible is true, but there are answers"},
        {"\"answers\": [", "\"answers\": [], \"x\": [", "is_impossible is false, but there is no answer"},
        {"\"r\"", "\"q\"", "two questions have the id \"q\""},
        {"a b c", "d e f", "none of its 2 questions"},
    };
    expect_text_changes(t, "questions", good, changes, COUNT_OF(changes), put_questions, open_training);
    char* path = put_questions(t, BEFORE ANSWER("0", "b") AFTER);
    expect_end(t, DONE, "a warning for misplaced answers",
               "of 1 questions, 1 have an answer that is not at answer_start", open_evaluation, path);
    free(path), path = put_questions(t, BEFORE NEXT("r") ANSWER("0", "a") AFTER);
    expect_end(t, DONE, "a warning for questions without answers",
               "of 2 questions, 1 have neither answers nor is_impossible and are not scored", open_evaluation, path);
    free(path);
}

// ---------------------------------------------------------------------------------------------------------
// Answers

enum { ROOM = 10, WINDOWS = 2 };

// In two windows: [CLS] h ? [SEP] a b c d e [SEP], [CLS] h ? [SEP] d e f g [SEP].
static void test_answers(Tests* t) {
    static const char file[] = ABOUT("a b c d e f g") "\"h ?\"" AFTER;
    static const struct {
        const char* name;
        struct {
            int at;  // the second window begins at ROOM
            double start, end;
        } logits[4];  // all others are 0
        const char *v1, *v2;
    } cases[] = {
        {"three tokens", {{5, 2, 0}, {7, 0, 2}}, "b c d", "b c d"},
        {"not four", {{5, 3, 0}, {8, 0, 3}, {6, 0, 2}}, "b c", "b c"},
        {"no end before the start", {{7, 6, 0}, {5, 0, 5}}, "d", "d"},
        {"nothing outside the context", {{1, 9, 9}, {3, 9, 9}, {9, 9, 9}, {8, 1, 0}}, "e", "e"},
        {"NaN is not the best", {{4, NAN, 0}, {6, 0, NAN}, {15, 1, 1}}, "e", "e"},
        {"the best of all windows", {{5, 1, 1}, {16, 1, 0}, {17, 0, 2}}, "f g", "f g"},
        {"as good as none, by the window where that is the least", {{0, 9, 0}, {10, 1, 0}, {5, 0, 1}}, "a b", "a b"},
        {"none is better, except in v1.1", {{0, 9, 0}, {10, 1, 1}, {5, 0, 1}}, "a b", ""},
    };
    Squad s;
    Examples e;
    size_t n;
    char* path = put_questions(t, file);
    squad_open(&s, &e, path, &words, settings_of(ROOM, 2, SQUAD_EVALUATE));
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        case_begin(t, cases[i].name);
        for (int way = 0; way < 4; way++) {   // the windows in both orders, v1.1 and v2.0
            real logits[3 * WINDOWS * ROOM];  // the third column must not be read
            for (int k = 0; k < WINDOWS * ROOM; k++) logits[3 * k] = logits[3 * k + 1] = 0, logits[3 * k + 2] = 1000;
            for (int k = 0; k < 4; k++) {
                real* at = &logits[3 * cases[i].logits[k].at];
                if (cases[i].logits[k].start != 0) at[0] = (real)cases[i].logits[k].start;
                if (cases[i].logits[k].end != 0) at[1] = (real)cases[i].logits[k].end;
            }
            squad_begin(&s);
            EXPECT(t, !squad_answer(&s, 0, &n));
            s.is_v2 = way / 2;
            for (int k = 0; k < WINDOWS; k++) squad_take(&s, &e, (k + way) % 2, logits + (k + way) % 2 * 3 * ROOM, 3);
            const char *want = s.is_v2 ? cases[i].v2 : cases[i].v1, *got = squad_answer(&s, 0, &n);
            if (strlen(want) != n || memcmp(want, got, n) != 0) fail(t, "'%.*s', not '%s'", (int)n, got, want);
        }
        case_end(t);
    }
    double* sums = squad_answers(&s, &n);
    expect_that(t, n == 5 && sums[0] == 1 && sums[1] == 2 && sums[2] == 1 && sums[3] == 0 && sums[4] == 1,
                "what ranks add up");
    real nothing[3 * ROOM];
    for (int k = 0; k < 3 * ROOM; k++) nothing[k] = NAN;
    squad_begin(&s);
    squad_take(&s, &e, 0, nothing, 3);
    expect_that(t, squad_answer(&s, 0, &n) && n == 0, "nothing but NaN is no answer");
    squad_close(&s), examples_close(&e);
    free(path);
}

// Answers as they are written, with an integer as an id, and their score; the last question has no known answer.
static void test_write(Tests* t) {
    // In v2.0 a gold answer that is an article does not count. Of several the one that fits best does.
    static const char file[] =
        "{\"version\": \"v2.0\", \"data\": [{\"paragraphs\": [{\"context\": \"a \\\"b\\\" caf\\u00e9\", "
        "\"qas\": [{\"id\": \"x\\n\", \"question\": \"d\", \"answers\": [" GOLD("0", "a") ", " GOLD(
            "3", "b") "]}, {\"id\": -262, \"question\": \"d\"" ANSWER("3", "b\\\" caf\\u00e9")
            NEXT("z") ", \"answers\": [" GOLD("3", "b") ", " GOLD("0", "a \\\"b\\\" c") "]" NEXT("u") AFTER;
    static const char want[] =
        "{\n\"x\\n\": \"a\",\n\"-262\": \"\\\"b\\\"\",\n\"z\": \"\\\"b\\\"\",\n\"u\": \"\\\"b\\\"\"\n}\n";
    real logits[3 * 16] = {0};
    Squad s;
    Examples e;
    char *path = put_questions(t, file), *out = path_in(t, "predictions.json");
    squad_open(&s, &e, path, &words, settings_of(16, 2, SQUAD_EVALUATE));
    for (int i = 0; i < 4; i++) {
        squad_take(&s, &e, i, logits, 3);
        logits[3 * 4] = logits[3 * 6 + 1] = 1;
    }
    squad_write(&s, out);
    char* text = read_file(out, 1000, NULL, FAILED);
    SquadScore score = squad_score(&s);
    case_begin(t, "predictions and the score of known answers");
    EXPECT_TEXT(t, text, want);
    EXPECT_EQ(t, score.questions, 3);
    EXPECT_NEAR(t, score.exact, 100.0 / 3, 1e-12);
    EXPECT_NEAR(t, score.f1, (0 + 200.0 / 3 + 100) / 3, 1e-12);
    case_end(t);
    free(text), free(path), free(out);
    squad_close(&s), examples_close(&e);
}

// Words in common count as often as both texts have them; of no words at all v1.1 and v2.0 think differently.
static void test_matches(Tests* t) {
    static const struct {
        const char *answer, *gold;
        double exact, f1[2];  // in v1.1 and in v2.0
    } cases[] = {
        {"The B, an a c!", "b c", 1, {1, 1}},
        {"c b", "b c", 0, {1, 1}},
        {"b b c", "b c c d", 0, {4.0 / 7, 4.0 / 7}},
        {"b", "bc", 0, {0, 0}},
        {"", "b", 0, {0, 0}},
        {"the", "a", 1, {0, 1}},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        Text answer = {NULL, 0, 0}, gold = {NULL, 0, 0};
        squad_normalize(&answer, cases[i].answer, strlen(cases[i].answer));
        squad_normalize(&gold, cases[i].gold, strlen(cases[i].gold));
        case_begin(t, named("'%s' for '%s'", cases[i].answer, cases[i].gold));
        for (int is_v2 = 0; is_v2 < 2; is_v2++) {
            SquadMatch match = squad_match(&answer, &gold, is_v2);
            EXPECT_NEAR(t, match.exact, cases[i].exact, 0);
            EXPECT_NEAR(t, match.f1, cases[i].f1[is_v2], 1e-12);
        }
        case_end(t);
        free(answer.text), free(gold.text);
    }
}

// ---------------------------------------------------------------------------------------------------------
// For check_squad.py

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

static int number_of(const char* text) {
    char* end;
    long value = strtol(text, &end, 10);
    if (*end || end == text || value < 0 || value > 1 << 20) die(USAGE, "%s: is not a number up to 2^20", text);
    return (int)value;
}

static int check(int argc, char** argv) {
    if (argc == 3 && strcmp(argv[1], "normalize") == 0) return normalize_all(argv[2]);
    if (argc != 6 || strcmp(argv[1], "windows") != 0) die(USAGE, "usage: the first lines of dev/test/squad.c show it");
    Squad s;
    Examples e;
    if (wordpiece_open(&words, argv[2], CASE_OF_MODEL) != 0) die(USAGE, "%s: holds no vocab.txt", argv[2]);
    squad_open(&s, &e, argv[3], &words,
               (SquadSettings){number_of(argv[4]), number_of(argv[5]), 16, 30, SQUAD_EVALUATE});
    show_windows(&s, &e);
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
    test_matches(&t);
    test_answers(&t);
    test_write(&t);
    wordpiece_free(&words);
    return tests_close(&t);
}
