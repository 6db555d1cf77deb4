/* Files of SQuAD v1.1 and v2.0, read into examples: questions about texts whose answer is a part of the text.
 *
 *   {"data": [{"paragraphs": [{"context": "...", "qas": [{"id": "...", "question": "...", "is_impossible": false,
 *       "answers": [{"answer_start": 34, "text": "308"}, ...]}, ...]}, ...]}, ...]}
 *
 * An id may be an integer, which is the same as the string of its digits. answer_start counts characters (code points).
 * If any question has is_impossible, or "version" is "v2.0", the file is of v2.0: a question may have no answer. Other
 * members are ignored. Some answers of the published files are not at answer_start: such a question is evaluated, but not
 * trained on. A question with neither answers nor is_impossible is answered, but neither scored nor trained on.
 *
 * A question becomes windows, [CLS] question [SEP] part of the context [SEP], of at most T tokens, with the first
 * `most_question` tokens of the question. Neighbouring windows of a context share `stride` tokens, as Hugging Face's
 * `tokenizers` cuts them with truncation "only_second". (The --doc_stride of older scripts is the step from one window
 * to the next.) The label of a window is the first and the last token of the first answer. If the window does not
 * contain the whole answer, the label is [CLS], position 0, twice. */
#ifndef APPS_TUNE_SQUAD_FILES_H
#define APPS_TUNE_SQUAD_FILES_H

#include "apps/tune/squad_match.h"
#include "llmc/bert/examples.h"
#include "llmc/text/wordpiece.h"

#define SQUAD_MAX_FILE ((size_t)1 << 27)
#define SQUAD_MAX_TOKENS ((size_t)1 << 30)  // of all windows

typedef enum { SQUAD_EVALUATE, SQUAD_TRAIN } SquadUse;

typedef struct {
    int T;                           // tokens of a window at most
    int stride;                      // tokens of the context that a window shares with the next one
    int most_question, most_answer;  // tokens
    SquadUse use;                    // SQUAD_TRAIN skips questions whose first answer is not known
} SquadSettings;

// A part of Squad's `text`.
typedef struct {
    size_t begin, length;
} SquadText;

typedef struct {
    SquadText context;
    size_t first_token;  // in `tokens`
    int token_count;
} SquadParagraph;

typedef struct {
    SquadText id;
    int paragraph;
    int first_gold, gold_count;
    int is_impossible;
} SquadQuestion;

// A model's prediction for a question; all 0 if none of its windows has been seen. One rank must see all windows of a
// question, so that the sum over ranks is that rank's result. All members are doubles, so that they can be summed.
typedef struct {
    double score, null_score;  // of the best part of the context (-INFINITY: there is none), and of no answer
    double example;            // 1 + the window of that part
    double first, last;        // its tokens, counted from the first one of the context
} SquadAnswer;

typedef struct {
    char* file;
    SquadSettings settings;
    int is_v2;
    int paragraphs, questions, golds, windows;
    SquadParagraph* paragraph;  // [paragraphs]
    SquadQuestion* question;    // [questions]
    SquadText* gold;            // [golds] gold answers
    int* window;                // [windows] the token of the context where the second segment begins
    size_t paragraph_capacity, question_capacity, gold_capacity, window_capacity;
    Text text;            // contexts, ids, gold answers
    TokenIds tokens;      // of the contexts, with the bytes that they come from
    SquadAnswer* answer;  // [questions]
    int unanswered;       // questions for which the file does not say whether they have an answer
    int misplaced;        // questions whose first answer is not at answer_start
} Squad;

// ---------------------------------------------------------------------------------------------------------
// Windows

// Find the tokens first .. last, among tokens begin .. end - 1 of a context, that cover bytes from .. to - 1. Returns 0
// if they do not cover these bytes.
static inline int squad_find(const TextSpan* origin, int begin, int end, size_t from, size_t to, int* first,
                             int* last) {
    if (begin == end || origin[begin].begin > from || origin[end - 1].end < to) return 0;
    int a = begin, b = end - 1;
    while (a + 1 < end && origin[a + 1].begin <= from) a++;
    while (b > begin && origin[b - 1].end >= to) b--;
    // If several tokens come from one character, such as a Hangul syllable, a may be after b.
    *first = min_int(a, b), *last = max_int(a, b);
    return 1;
}

// Append the windows of a question with these tokens, whose answer is bytes from .. to - 1 of the context; to 0: no
// answer.
static inline void squad_add_windows(Squad* s, Examples* e, const WordPiece* words, const TokenIds* question,
                                     size_t from, size_t to) {
    const SquadParagraph* p = &s->paragraph[s->question[s->questions - 1].paragraph];
    const TextSpan* origin = s->tokens.origin + p->first_token;
    const int* ids = s->tokens.id + p->first_token;
    int n = min_int((int)min_size(question->count, INT32_MAX), s->settings.most_question), second = n + 2;
    int room = s->settings.T - n - 3;
    int* tokens = (int*)xmalloc((size_t)s->settings.T * sizeof(int));
    tokens[0] = words->cls;
    if (n) memcpy(tokens + 1, question->id, (size_t)n * sizeof(int));
    tokens[n + 1] = words->sep;
    for (int begin = 0, end = -1; end < p->token_count; begin += room - s->settings.stride) {
        int first = 0, last = 0;
        end = begin + min_int(room, p->token_count - begin);
        if (begin < end) memcpy(tokens + second, ids + begin, (size_t)(end - begin) * sizeof(int));
        tokens[second + end - begin] = words->sep;
        if (to && squad_find(origin, begin, end, from, to, &first, &last))
            first += second - begin, last += second - begin;
        if (e->count && e->begin[e->count] > SQUAD_MAX_TOKENS)
            die(USAGE, "%s: its windows have more than %zu tokens; use longer windows, or split the file", s->file,
                SQUAD_MAX_TOKENS);
        s->window = (int*)array_reserve(s->window, &s->window_capacity, (size_t)s->windows + 1, sizeof(int));
        s->window[s->windows++] = begin;
        examples_add(e, tokens, second + end - begin + 1, second, first, last, s->questions - 1);
    }
    free(tokens);
}

// ---------------------------------------------------------------------------------------------------------
// The file

static inline SquadText squad_keep(Squad* s, const JsonNode* string) {
    SquadText kept = {.begin = s->text.length, .length = string->length};
    text_append(&s->text, string->string, string->length);
    return kept;
}

// Append the beginning of a string, in quotes, for a one-line message.
static inline void squad_quote(Text* t, const char* string, size_t n) {
    size_t shown = min_size(n, 40);
    while (shown < n && shown > 0 && (string[shown] & 0xC0) == 0x80) shown--;
    text_json_string(t, string, shown);
    if (shown < n) text_append(t, "...", 3);
}

// The first byte of each character of a text, then the text's length (caller frees). *characters: how many there are.
static inline uint32_t* squad_characters(const char* text, size_t n, int64_t* characters) {
    uint32_t* byte = (uint32_t*)xmalloc((n + 1) * sizeof(uint32_t));
    size_t count = 0;
    for (size_t i = 0; i < n; i++)
        if ((text[i] & 0xC0) != 0x80) byte[count++] = (uint32_t)i;
    byte[count] = (uint32_t)n;
    *characters = (int64_t)count;
    return byte;
}

// Read a gold answer. Returns whether it is at answer_start, and sets *from to that byte.
static inline int squad_read_answer(Squad* s, const JsonNode* answer, const JsonNode* context, const uint32_t* byte,
                                    int64_t characters, size_t* from, const char* where) {
    const JsonNode* text = json_need(answer, "text", JSON_STRING, where);
    int64_t start = json_get_int(answer, "answer_start", where);
    if (text->length == 0) die(USAGE, "%s: key \"text\": an answer is empty", where);
    if (start < 0 || start >= characters)
        die(USAGE, "%s: key \"answer_start\": is %lld, but the context has %lld characters", where, (long long)start,
            (long long)characters);
    s->gold = (SquadText*)array_reserve(s->gold, &s->gold_capacity, (size_t)s->golds + 1, sizeof *s->gold);
    s->gold[s->golds++] = squad_keep(s, text);
    *from = byte[start];
    size_t left = context->length - *from;
    return text->length <= left && memcmp(context->string + *from, text->string, text->length) == 0;
}

static inline void squad_read_question(Squad* s, Examples* e, const WordPiece* words, const JsonNode* node,
                                       const JsonNode* context, const uint32_t* byte, int64_t characters,
                                       const char* place) {
    const JsonNode *id = json_get(node, "id"), *answers = NULL;
    if (!id || !id->is_integer) id = json_need(node, "id", JSON_STRING, place);
    Text where = {NULL, 0, 0};
    text_printf(&where, "%s: question ", s->file);
    squad_quote(&where, id->string, id->length);
    const JsonNode* question = json_need(node, "question", JSON_STRING, where.text);
    s->question = (SquadQuestion*)array_reserve(s->question, &s->question_capacity, (size_t)s->questions + 1,
                                                sizeof *s->question);
    SquadQuestion* q = &s->question[s->questions++];
    q->id = squad_keep(s, id);
    q->paragraph = s->paragraphs - 1;
    q->first_gold = s->golds;
    q->is_impossible = json_get_bool_or(node, "is_impossible", 0, where.text);
    int says = json_has(node, "is_impossible"), is_sound = 1;
    size_t from = 0, to = 0;
    s->is_v2 |= says;
    if (json_has(node, "answers")) answers = json_need(node, "answers", JSON_ARRAY, where.text);
    for (const JsonNode* a = answers ? answers->first : NULL; a; a = a->next) {
        size_t begin;
        int is_there = squad_read_answer(s, a, context, byte, characters, &begin, where.text);
        if (a == answers->first) is_sound = is_there, from = begin, to = begin + s->gold[s->golds - 1].length;
    }
    q->gold_count = s->golds - q->first_gold;
    if (says && q->is_impossible != (q->gold_count == 0))
        die(USAGE, "%s: is_impossible is %s, but %s", where.text, q->is_impossible ? "true" : "false",
            q->gold_count ? "there are answers" : "there is no answer");
    int is_unanswered = !says && q->gold_count == 0;
    s->unanswered += is_unanswered;
    s->misplaced += !is_sound;
    if (s->settings.use == SQUAD_EVALUATE || (is_sound && !is_unanswered)) {
        TokenIds tokens;
        memset(&tokens, 0, sizeof tokens);
        wordpiece_encode(&tokens, words, question->string, question->length);
        squad_add_windows(s, e, words, &tokens, from, is_sound ? to : 0);
        token_ids_free(&tokens);
    }
    free(where.text);
}

static inline void squad_read_paragraph(Squad* s, Examples* e, const WordPiece* words, const JsonNode* node,
                                        const char* where) {
    const JsonNode* context = json_need(node, "context", JSON_STRING, where);
    int64_t characters, number = 0;
    s->paragraph = (SquadParagraph*)array_reserve(s->paragraph, &s->paragraph_capacity, (size_t)s->paragraphs + 1,
                                                  sizeof *s->paragraph);
    SquadParagraph* p = &s->paragraph[s->paragraphs++];
    p->context = squad_keep(s, context);
    p->first_token = s->tokens.count;
    wordpiece_encode(&s->tokens, words, context->string, context->length);
    p->token_count = (int)(s->tokens.count - p->first_token);
    uint32_t* byte = squad_characters(context->string, context->length, &characters);
    for (const JsonNode* q = json_need(node, "qas", JSON_ARRAY, where)->first; q; q = q->next) {
        char* place = xprintf("%s.qas[%lld]", where, (long long)number++);
        squad_read_question(s, e, words, q, context, byte, characters, place);
        free(place);
    }
    free(byte);
}

// End with USAGE if two questions have the same id: answers are listed by id.
static inline void squad_check_ids(const Squad* s) {
    SquadWord* id = (SquadWord*)xmalloc((size_t)s->questions * sizeof *id);
    for (int i = 0; i < s->questions; i++)
        id[i].text = s->text.text + s->question[i].id.begin, id[i].length = s->question[i].id.length;
    qsort(id, (size_t)s->questions, sizeof *id, squad_compare_words);
    for (int i = 1; i < s->questions; i++) {
        if (squad_compare_words(&id[i - 1], &id[i]) != 0) continue;
        const SquadWord twice = id[i];
        Text t = {NULL, 0, 0};
        free(id);
        squad_quote(&t, twice.text, twice.length);
        die(USAGE, "%s: two questions have the id %s", s->file, t.text);
    }
    free(id);
}

// Clear all answers before an evaluation.
static inline void squad_begin(Squad* s) { memset(s->answer, 0, (size_t)s->questions * sizeof *s->answer); }

// Read a file, and make examples of its windows: window i is example i, and its group is the number of its question.
// Ends with USAGE if the file or the settings are invalid.
static inline void squad_open(Squad* s, Examples* e, const char* path, const WordPiece* words, SquadSettings settings) {
    Json json;
    int64_t article = 0;
    if (settings.stride < 0 || settings.most_question < 1 || settings.most_answer < 1)
        die(USAGE, "windows share %d tokens, questions have %d and answers %d; allowed: 0.., 1.. and 1..",
            settings.stride, settings.most_question, settings.most_answer);
    if (settings.T - 3 - settings.most_question <= settings.stride)
        die(USAGE,
            "sequences of %d tokens (-t) have no room for questions of %d, 3 special tokens and more than the %d that "
            "two windows share (--stride)",
            settings.T, settings.most_question, settings.stride);
    memset(s, 0, sizeof *s);
    s->file = xprintf("%s", path);
    s->settings = settings;
    s->tokens.has_origins = 1;
    examples_open(e, 2);
    json_load(&json, path, SQUAD_MAX_FILE);
    const JsonNode* version = json_get(json.root, "version");
    s->is_v2 = version && version->type == JSON_STRING && strcmp(version->string, "v2.0") == 0;
    for (const JsonNode* a = json_need(json.root, "data", JSON_ARRAY, path)->first; a; a = a->next, article++) {
        char* place = xprintf("%s: data[%lld]", path, (long long)article);
        int64_t number = 0;
        for (const JsonNode* p = json_need(a, "paragraphs", JSON_ARRAY, place)->first; p; p = p->next) {
            char* where = xprintf("%s.paragraphs[%lld]", place, (long long)number++);
            squad_read_paragraph(s, e, words, p, where);
            free(where);
        }
        free(place);
    }
    json_free(&json);
    if (s->questions == 0) die(USAGE, "%s: has no questions", path);
    if (s->windows == 0) die(USAGE, "%s: none of its %d questions has an answer at answer_start", path, s->questions);
    squad_check_ids(s);
    free(s->tokens.id);  // the examples have copies
    s->tokens.id = NULL;
    s->answer = (SquadAnswer*)xmalloc((size_t)s->questions * sizeof *s->answer);
    squad_begin(s);
}

static inline void squad_close(Squad* s) {
    free(s->file), free(s->paragraph), free(s->question), free(s->gold), free(s->window), free(s->text.text);
    free(s->answer);
    token_ids_free(&s->tokens);
    memset(s, 0, sizeof *s);
}

// Warn about oddities of the file. Call it on one rank.
static inline void squad_warn(const Squad* s) {
    int trains = s->settings.use == SQUAD_TRAIN;
    if (s->misplaced)
        warn("%s: of %d questions, %d have an answer that is not at answer_start%s", s->file, s->questions,
             s->misplaced, trains ? " and are skipped" : "");
    if (s->unanswered && s->unanswered < s->questions)
        warn("%s: of %d questions, %d have neither answers nor is_impossible and are %s", s->file, s->questions,
             s->unanswered, trains ? "skipped" : "not scored");
}

#endif
