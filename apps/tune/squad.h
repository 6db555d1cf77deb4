/* Answers to the questions of a SQuAD file (squad_files.h), and their scores (squad_match.h).
 *
 * The answer is the part of the context with the largest sum of a start and an end logit, over all windows and all
 * parts of at most `most_answer` tokens. In v2.0 there is no answer if the smallest sum at [CLS] is larger.
 *
 * Rajpurkar et al., "SQuAD: 100,000+ questions for machine comprehension of text", 2016; Rajpurkar et al., "Know what
 * you don't know", 2018. */
#ifndef APPS_TUNE_SQUAD_H
#define APPS_TUNE_SQUAD_H

#include "apps/tune/squad_files.h"
#include "apps/tune/squad_match.h"

// ---------------------------------------------------------------------------------------------------------
// Answers

// The number of questions that the model has answered, including those answered with "no answer".
static inline int squad_answered(const Squad* s) {
    int count = 0;
    for (int i = 0; i < s->questions; i++) count += s->answer[i].example != 0;
    return count;
}

// Take the model's output for an example: logits[t * stride] for position t of its sequence being the start of the
// answer, logits[t * stride + 1] for the end. Of equal scores the first one counts, and NaN is never the best.
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

// Everything that squad_take() found, to be summed over ranks.
static inline double* squad_answers(Squad* s, size_t* count) {
    *count = (size_t)s->questions * sizeof(SquadAnswer) / sizeof(double);
    return (double*)s->answer;
}

// The answer to a question, not NUL-terminated; NULL if none of its windows was seen.
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

// Write {"id": "answer", ...} for all questions that were seen.
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

// In per cent of `questions`.
typedef struct {
    int questions;
    double exact, f1;
} SquadScore;

// Compare an answer with the gold answers: the best exact match and the best F1.
static inline SquadMatch squad_judge(const Squad* s, int question, const char* text, size_t n) {
    const SquadQuestion* q = &s->question[question];
    Text answer = {NULL, 0, 0}, gold = {NULL, 0, 0};
    SquadMatch best = {0, 0};
    int compared = 0;
    squad_normalize(&answer, text, n);
    // In v2.0 a gold answer that normalizes to nothing does not count, and a question without gold answers has the
    // empty one.
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

// Whether the file gives the answer, or states that there is none.
static inline int squad_is_known(const Squad* s, int question) {
    return s->question[question].gold_count > 0 || s->question[question].is_impossible;
}

// The score over the questions that were seen and whose answer the file has.
static inline SquadScore squad_score(const Squad* s) {
    SquadScore score = {0, 0, 0};
    for (int i = 0; i < s->questions; i++) {
        size_t n;
        const char* answer = squad_answer(s, i, &n);
        if (!answer || !squad_is_known(s, i)) continue;
        SquadMatch match = squad_judge(s, i, answer, n);
        score.questions++, score.exact += match.exact, score.f1 += match.f1;
    }
    if (score.questions == 0) return score;
    score.exact = 100.0 * score.exact / score.questions;
    score.f1 = 100.0 * score.f1 / score.questions;
    return score;
}

#endif
