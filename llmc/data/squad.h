/* Questions about texts whose answer is a stretch of the text: files of SQuAD v1.1 and v2.0, what a model answers, and
 * how well.
 *
 *   {"data": [{"paragraphs": [{"context": "...", "qas": [{"id": "...", "question": "...", "is_impossible": false,
 *       "answers": [{"answer_start": 34, "text": "308"}, ...]}, ...]}, ...]}, ...]}
 *
 * answer_start counts characters (code points). Where any question has is_impossible, or "version" is "v2.0", the file is
 * of v2.0: a model may say that a question has no answer, and scores are those of that version. Other members are
 * passed over. A few answers of the published files are not where answer_start says: such a question is evaluated, but
 * not trained on. One with neither answers nor is_impossible is answered, but neither scored nor trained on.
 *
 * A question becomes windows, [CLS] question [SEP] part of the context [SEP], of at most T tokens, with the first
 * `most_question` tokens of the question. Windows of a context share `stride` tokens, as Hugging Face's `tokenizers`
 * cuts them with truncation "only_second". (The --doc_stride of older scripts is the step from a window to the next.)
 * A window's label is the first and the last token of the first answer; where the window does not hold all of that, it
 * is [CLS], position 0, twice.
 *
 * The answer is the part of the context with the largest sum of a start and an end logit, over all windows and all
 * parts of at most `most_answer` tokens. In v2.0 there is none if the smallest sum at [CLS] is larger.
 *
 * Rajpurkar et al., "SQuAD: 100,000+ questions for machine comprehension of text", 2016; Rajpurkar et al., "Know what
 * you don't know", 2018. */
#ifndef LLMC_SQUAD_H
#define LLMC_SQUAD_H

#include "examples.h"
#include "squad_match.h"
#include "wordpiece.h"

#define SQUAD_MAX_FILE ((size_t)1 << 27)
#define SQUAD_MAX_TOKENS ((size_t)1 << 30)  // of all windows

typedef enum { SQUAD_EVALUATE, SQUAD_TRAIN } SquadUse;

typedef struct {
    int T;                           // tokens of a window at most
    int stride;                      // those of a context that a window shares with the next one
    int most_question, most_answer;  // tokens
    SquadUse use;                    // SQUAD_TRAIN leaves questions out whose first answer is not known
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

// What a model says of a question; all 0 where none of its windows was seen. One rank must see all windows of a
// question, so that sums over ranks are what that one found. Nothing but double.
typedef struct {
    double score, null_score;  // of the best part of the context (-INFINITY: there is none), and of none
    double example;            // 1 + the window of that part
    double first, last;        // its tokens, counted from the context's first one
} SquadAnswer;

typedef struct {
    char* file;
    SquadSettings settings;
    int is_v2;
    int paragraphs, questions, golds, windows;
    SquadParagraph* paragraph;
    SquadQuestion* question;
    SquadText* gold;
    int* window;          // [windows] the context's token at the position where the second segment begins
    Text text;            // contexts, ids, gold answers
    TokenIds tokens;      // of the contexts, with the bytes they come from
    SquadAnswer* answer;  // [questions]
    int unanswered;       // questions of which the file does not say whether they have an answer
    int misplaced;        // questions whose first answer is not where answer_start says
    char* first_misplaced;
} Squad;

// Per cent, of `questions`.
typedef struct {
    int questions;
    double exact, f1;
} SquadShare;

typedef struct {
    SquadShare all, answerable, impossible;
} SquadScore;

// ---------------------------------------------------------------------------------------------------------
// Windows

// Room for element `count` of an array that grows by one at a time.
static inline void* squad_room(void* array, int count, size_t size) {
    CHECK(count < INT32_MAX / 2);
    return (count & (count - 1)) == 0 ? xrealloc(array, 2 * (size_t)max_int(count, 1) * size) : array;
}

// The tokens first .. last among begin .. end - 1 of a context that hold its bytes from .. to - 1. 0 if these do not.
static inline int squad_find(const TextSpan* origin, int begin, int end, size_t from, size_t to, int* first,
                             int* last) {
    if (begin == end || origin[begin].begin > from || origin[end - 1].end < to) return 0;
    int a = begin, b = end - 1;
    while (a + 1 < end && origin[a + 1].begin <= from) a++;
    while (b > begin && origin[b - 1].end >= to) b--;
    // Tokens that come from one character, as those of a Hangul syllable may, pass each other.
    *first = min_int(a, b), *last = max_int(a, b);
    return 1;
}

// Append the windows of a question with these tokens, whose answer is bytes from .. to - 1 of the context; to 0: none.
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
            die(USAGE, "%s: its windows have more than %zu tokens; make the windows longer, or cut the file", s->file,
                SQUAD_MAX_TOKENS);
        s->window = (int*)squad_room(s->window, s->windows, sizeof(int));
        s->window[s->windows++] = begin;
        examples_add(e, tokens, second + end - begin + 1, second, first, last, s->questions - 1);
    }
    free(tokens);
}

// ---------------------------------------------------------------------------------------------------------
// The file

static inline SquadText squad_keep(Squad* s, const JsonNode* string) {
    SquadText kept = {s->text.length, string->length};
    text_append(&s->text, string->string, string->length);
    return kept;
}

// Start of a string, in quotes, for one line of a message.
static inline void squad_quote(Text* t, const char* string, size_t n) {
    size_t shown = min_size(n, 40);
    while (shown < n && shown > 0 && (string[shown] & 0xC0) == 0x80) shown--;
    text_json_string(t, string, shown);
    if (shown < n) text_append(t, "...", 3);
}

// The first byte of each character of a text, and its length: characters + 1 numbers. Their number in *characters.
static inline uint32_t* squad_characters(const char* text, size_t n, int64_t* characters) {
    uint32_t* byte = (uint32_t*)xmalloc((n + 1) * sizeof(uint32_t));
    size_t count = 0;
    for (size_t i = 0; i < n; i++)
        if ((text[i] & 0xC0) != 0x80) byte[count++] = (uint32_t)i;
    byte[count] = (uint32_t)n;
    *characters = (int64_t)count;
    return byte;
}

// A gold answer. Returns whether it stands where answer_start says, and sets *from to that byte.
static inline int squad_read_answer(Squad* s, const JsonNode* answer, const JsonNode* context, const uint32_t* byte,
                                    int64_t characters, size_t* from, const char* where) {
    const JsonNode* text = json_need(answer, "text", JSON_STRING, where);
    int64_t start = json_get_int(answer, "answer_start", where);
    if (text->length == 0) die(USAGE, "%s: key \"text\": an answer is empty", where);
    if (start < 0 || start >= characters)
        die(USAGE, "%s: key \"answer_start\": is %lld, but the context has %lld characters", where, (long long)start,
            (long long)characters);
    s->gold = (SquadText*)squad_room(s->gold, s->golds, sizeof *s->gold);
    s->gold[s->golds++] = squad_keep(s, text);
    *from = byte[start];
    size_t left = context->length - *from;
    if (text->length <= left && memcmp(context->string + *from, text->string, text->length) == 0) return 1;
    if (!s->first_misplaced) {
        Text t = {NULL, 0, 0};
        text_printf(&t, "%s has ", where);
        squad_quote(&t, context->string + *from, min_size(left, text->length));
        text_printf(&t, " there, not ");
        squad_quote(&t, text->string, text->length);
        s->first_misplaced = t.text;
    }
    return 0;
}

static inline void squad_read_question(Squad* s, Examples* e, const WordPiece* words, const JsonNode* node,
                                       const JsonNode* context, const uint32_t* byte, int64_t characters,
                                       const char* place) {
    const JsonNode *id = json_need(node, "id", JSON_STRING, place), *answers = NULL;
    Text where = {NULL, 0, 0};
    text_printf(&where, "%s: question ", s->file);
    squad_quote(&where, id->string, id->length);
    const JsonNode* question = json_need(node, "question", JSON_STRING, where.text);
    s->question = (SquadQuestion*)squad_room(s->question, s->questions, sizeof *s->question);
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
    s->paragraph = (SquadParagraph*)squad_room(s->paragraph, s->paragraphs, sizeof *s->paragraph);
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

// Answers are listed by the ids of their questions.
static inline void squad_check_ids(const Squad* s) {
    SquadWord* id = (SquadWord*)xmalloc((size_t)s->questions * sizeof *id);
    for (int i = 0; i < s->questions; i++)
        id[i].text = s->text.text + s->question[i].id.begin, id[i].length = s->question[i].id.length;
    qsort(id, (size_t)s->questions, sizeof *id, squad_compare_words);
    for (int i = 1; i < s->questions; i++) {
        if (squad_compare_words(&id[i - 1], &id[i]) != 0) continue;
        Text t = {NULL, 0, 0};
        squad_quote(&t, id[i].text, id[i].length);
        die(USAGE, "%s: two questions have the id %s", s->file, t.text);
    }
    free(id);
}

// Before the first answer, and before the next evaluation.
static inline void squad_begin(Squad* s) { memset(s->answer, 0, (size_t)s->questions * sizeof *s->answer); }

// Read a file, and make examples of its windows: window i is example i, and its group the number of its question. Ends
// with USAGE where the file or the settings are not sound.
static inline void squad_open(Squad* s, Examples* e, const char* path, const WordPiece* words, SquadSettings settings) {
    Json json;
    int64_t article = 0;
    if (settings.stride < 0 || settings.most_question < 1 || settings.most_answer < 1)
        die(USAGE, "windows that share %d tokens, questions of %d and answers of %d; allowed: 0.., 1.. and 1..",
            settings.stride, settings.most_question, settings.most_answer);
    if (settings.T - 3 - settings.most_question <= settings.stride)
        die(USAGE,
            "sequences of %d tokens (-t) do not hold questions of %d, 3 special tokens and more than the %d that two "
            "windows share (--stride)",
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
    if (s->windows == 0)
        die(USAGE, "%s: none of its %d questions has an answer that is where answer_start says", path, s->questions);
    squad_check_ids(s);
    free(s->tokens.id);  // the examples have them
    s->tokens.id = NULL;
    s->answer = (SquadAnswer*)xmalloc((size_t)s->questions * sizeof *s->answer);
    squad_begin(s);
}

static inline void squad_close(Squad* s) {
    free(s->file), free(s->paragraph), free(s->question), free(s->gold), free(s->window), free(s->text.text);
    free(s->answer), free(s->first_misplaced);
    token_ids_free(&s->tokens);
    memset(s, 0, sizeof *s);
}

// Say what is odd about the file. For one rank.
static inline void squad_warn(const Squad* s) {
    int trains = s->settings.use == SQUAD_TRAIN;
    if (s->misplaced)
        warn("%s: of %d questions %d have an answer that is not where answer_start says%s; the first: %s", s->file,
             s->questions, s->misplaced, trains ? ", and are left out" : "", s->first_misplaced);
    if (s->unanswered && s->unanswered < s->questions)
        warn("%s: of %d questions %d have neither answers nor is_impossible, and are %s", s->file, s->questions,
             s->unanswered, trains ? "left out" : "not scored");
}

// ---------------------------------------------------------------------------------------------------------
// Answers

// How many questions have an answer, which may be none.
static inline int squad_answered(const Squad* s) {
    int count = 0;
    for (int i = 0; i < s->questions; i++) count += s->answer[i].example != 0;
    return count;
}

// What the model says of an example: position t of its sequence starts the answer with logit logits[t * stride] and
// ends it with logits[t * stride + 1]. Of equal scores the first one counts, and NaN is never the best.
static inline void squad_take(Squad* s, const Examples* e, int example, const real* logits, int stride) {
    SquadAnswer* a = &s->answer[e->group[example]];
    int begin = e->second[example], end = examples_length(e, example) - 1;  // positions of the context
    double null_score = (double)logits[0] + (double)logits[1];
    if (a->example == 0) {
        a->example = example + 1;
        a->score = -INFINITY;
        a->null_score = null_score;
    }
    if (null_score < a->null_score) a->null_score = null_score;
    for (int first = begin; first < end; first++) {
        for (int last = first; last < end && last - first < s->settings.most_answer; last++) {
            double score =
                (double)logits[(size_t)first * (size_t)stride] + (double)logits[(size_t)last * (size_t)stride + 1];
            if (!(score > a->score)) continue;
            a->score = score;
            a->example = example + 1;
            a->first = s->window[example] + first - begin;
            a->last = s->window[example] + last - begin;
        }
    }
}

// All that squad_take() found, to be added up over ranks.
static inline double* squad_answers(Squad* s, size_t* count) {
    *count = (size_t)s->questions * sizeof(SquadAnswer) / sizeof(double);
    return (double*)s->answer;
}

// The answer to a question, not NUL-terminated; NULL where none of its windows was seen.
static inline const char* squad_answer(const Squad* s, int question, size_t* length) {
    const SquadAnswer* a = &s->answer[question];
    const SquadParagraph* p = &s->paragraph[s->question[question].paragraph];
    *length = 0;
    if (a->example == 0) return NULL;
    if (a->score == -INFINITY || (s->is_v2 && a->null_score > a->score)) return "";
    CHECK(a->first >= 0 && a->first <= a->last && a->last < p->token_count);
    const TextSpan* origin = s->tokens.origin + p->first_token;
    uint32_t begin = origin[(int)a->first].begin, end = origin[(int)a->last].end;
    *length = end - begin;
    return s->text.text + p->context.begin + begin;
}

// Write {"id": "answer", ...} of all questions that were seen.
static inline void squad_write(const Squad* s, const char* path) {
    Text t = {NULL, 0, 0};
    for (int i = 0; i < s->questions; i++) {
        size_t n;
        const char* answer = squad_answer(s, i, &n);
        if (!answer) continue;
        text_printf(&t, t.length ? ",\n" : "{\n");
        text_json_string(&t, s->text.text + s->question[i].id.begin, s->question[i].id.length);
        text_printf(&t, ": ");
        text_json_string(&t, answer, n);
    }
    text_printf(&t, t.length ? "\n}\n" : "{}\n");
    predictions_write(path, &t);
    free(t.text);
}

// ---------------------------------------------------------------------------------------------------------
// Scores

// An answer to a question against its gold answers: the best of each.
static inline SquadMatch squad_judge(const Squad* s, int question, const char* text, size_t n) {
    const SquadQuestion* q = &s->question[question];
    Text answer = {NULL, 0, 0}, gold = {NULL, 0, 0};
    SquadMatch best = {0, 0};
    int compared = 0;
    squad_normalize(&answer, text, n);
    // In v2.0 a gold answer of which nothing is left is none, and a question without gold answers has the empty one.
    for (int i = 0; i <= q->gold_count; i++) {
        SquadText t = {0, 0};
        if (i < q->gold_count) t = s->gold[q->first_gold + i];
        else if (compared) break;
        squad_normalize(&gold, s->text.text + t.begin, t.length);
        if (s->is_v2 && gold.length == 0 && i < q->gold_count) continue;
        SquadMatch match = squad_match(&answer, &gold, s->is_v2);
        best.exact = match.exact > best.exact ? match.exact : best.exact;
        best.f1 = match.f1 > best.f1 ? match.f1 : best.f1;
        compared++;
    }
    free(answer.text), free(gold.text);
    return best;
}

static inline void squad_share_add(SquadShare* share, SquadMatch match) {
    share->questions++;
    share->exact += match.exact;
    share->f1 += match.f1;
}

static inline void squad_share_end(SquadShare* share) {
    if (share->questions == 0) return;
    share->exact = 100.0 * share->exact / share->questions;
    share->f1 = 100.0 * share->f1 / share->questions;
}

// Does the file say what the answer is, or that there is none?
static inline int squad_is_known(const Squad* s, int question) {
    return s->question[question].gold_count > 0 || s->question[question].is_impossible;
}

// Add what a text is worth as the answer to a question, if the file knows the answer.
static inline void squad_score_add(SquadScore* score, const Squad* s, int question, const char* text, size_t n) {
    if (!squad_is_known(s, question)) return;
    SquadMatch match = squad_judge(s, question, text, n);
    squad_share_add(&score->all, match);
    squad_share_add(s->question[question].is_impossible ? &score->impossible : &score->answerable, match);
}

static inline void squad_score_end(SquadScore* score) {
    squad_share_end(&score->all), squad_share_end(&score->answerable), squad_share_end(&score->impossible);
}

// Of the questions that were seen.
static inline SquadScore squad_score(const Squad* s) {
    SquadScore score;
    memset(&score, 0, sizeof score);
    for (int i = 0; i < s->questions; i++) {
        size_t n;
        const char* answer = squad_answer(s, i, &n);
        if (answer) squad_score_add(&score, s, i, answer, n);
    }
    squad_score_end(&score);
    return score;
}

#endif
