/* The readers of examples to fine-tune on, as in fuzz_readers.h. */
#ifndef FUZZ_TASKS_H
#define FUZZ_TASKS_H

#include "apps/tune/labelled.h"
#include "apps/tune/squad.h"
#include "fuzz_tokenizers.h"

enum { TASK_T = 16, TASK_LABELS = 3 };

static void task_seed(CaseList* list, const char* name, const char* text) {
    Case* c = case_new(list);
    case_add(c, "vocab.txt", VOCAB_TXT, strlen(VOCAB_TXT));
    case_add(c, name, text, strlen(text));
}

static WordPiece task_words(void) {
    WordPiece w;
    if (wordpiece_open(&w, CASE_DIR, CASE_OF_MODEL) != 0) die(USAGE, "no vocab.txt");
    return w;
}

// Sequences of tokens, each with a class from `least` on or with two positions in it, also as a batch.
static void examples_check(const Examples* e, const WordPiece* w, int least) {
    MlmBatch b;
    for (int i = 0; i < e->count; i++) {
        const int *label = e->label + 2 * i, *tokens = e->tokens + e->begin[i];
        int n = examples_length(e, i), most = e->targets == 1 ? TASK_LABELS : n;
        if (n < 2 || n > TASK_T || e->second[i] < 1 || e->second[i] > n)
            fuzz_broken("example %d has %d tokens, the second part from %d on", i, n, e->second[i]);
        for (int k = 0; k < n; k++)
            if (tokens[k] < 0 || tokens[k] >= w->size) fuzz_broken("token %d of %d", tokens[k], w->size);
        for (int k = 0; k < e->targets; k++)
            if (label[k] < least || label[k] >= most || (k && label[k] < label[0]))
                fuzz_broken("example %d is labelled %d", i, label[k]);
    }
    mlm_batch_alloc(&b, 2, TASK_T, e->targets);
    examples_batch_read(&b, e, 1, 1, 0, 2, 0);
    mlm_batch_free(&b);
}

// ---------------------------------------------------------------------------------------------------------
// Labelled texts

static void labelled_seeds(CaseList* list) {
    task_seed(list, "texts.txt", "0\tThe aab\n2\ta b ing, \xe4\xb8\xad\r\n\n1\tthe the\n");
    task_seed(list, "texts.txt", "yes\tthe a\tb ab!\nno\tab 12 ab ab ab ab ab ab ab ab ab ab\tthe\nmaybe\t\t\n");
    task_seed(list, "texts.txt", "id\tsentence1\tgold_label\tsentence2\nx\tthe\tyes\ta\ny\tab\tno\tb\n");
}

static void labelled_read_case(void) {
    const char* path = CASE_DIR "/texts.txt";
    WordPiece w = task_words();
    Examples e;
    LabelNames names = {NULL, 0};
    labelled_find_names(&names, path, TASK_LABELS);
    labelled_read(&e, path, &w, &names, TASK_LABELS, TASK_T, 0);
    examples_check(&e, &w, 0);
    examples_close(&e), label_names_free(&names), wordpiece_free(&w);
}

// Texts that need no labels.
static void unlabelled_seeds(CaseList* list) {
    labelled_seeds(list);
    task_seed(list, "texts.txt", "The aab\n\nab 12 ab\r\nthe\n");
    task_seed(list, "texts.txt", "id\tsentence1\tsentence2\nx\tthe\ta\ny\tab\tb\n");
}

static void unlabelled_read_case(void) {
    WordPiece w = task_words();
    Examples e;
    LabelNames names = {NULL, 0};
    label_names_add(&names, "yes", 3);
    labelled_read(&e, CASE_DIR "/texts.txt", &w, &names, TASK_LABELS, TASK_T, 1);
    examples_check(&e, &w, -1);
    examples_close(&e), label_names_free(&names), wordpiece_free(&w);
}

// ---------------------------------------------------------------------------------------------------------
// Questions about texts: whatever a model says, its answers are JSON, and scores are shares

static void squad_seeds(CaseList* list) {
    task_seed(
        list, "questions.json",
        "{\"data\": [{\"title\": \"x\", \"paragraphs\": [{\"context\": \"The aab b\\u00e9bing, \\u4e2d ab 12 the a b a "
        "b "
        "ab\", \"qas\": [{\"id\": \"q0\", \"question\": \"the a b a?\", \"answers\": [{\"answer_start\": 4, \"text\": "
        "\"aab\"}, {\"answer_start\": 19, \"text\": \"ab\"}]}, {\"id\": \"q1\", \"question\": \"\", \"answers\": "
        "[{\"answer_start\": 16, \"text\": \"\\u4e2d\"}]}]}]}]}");
    task_seed(
        list, "questions.json",
        "{\"version\": \"v2.0\", \"data\": [{\"paragraphs\": [{\"context\": \"the ab\", \"qas\": [{\"id\": \"a\", "
        "\"question\": \"ab\", \"is_impossible\": true, \"answers\": []}, {\"id\": \"b\", \"question\": \"a\", "
        "\"is_impossible\": false, \"answers\": [{\"answer_start\": 0, \"text\": \"the\"}]}]}]}]}");
}

static void squad_check_answers(Squad* s, const Examples* e) {
    real logits[2 * TASK_T];
    Json answers;
    for (int k = 0; k < 2 * TASK_T; k++) logits[k] = (real)(k * 7 % 13);
    for (int i = 0; i < e->count; i++) squad_take(s, e, i, logits, 2);
    SquadShare all = squad_score(s).all;
    if (!(all.exact >= 0 && all.exact <= 100 && all.f1 >= 0 && all.f1 <= 100))
        fuzz_broken("scores %g and %g", all.exact, all.f1);
    squad_write(s, CASE_DIR "/answers.json");
    json_load(&answers, CASE_DIR "/answers.json", SIZE_MAX);
    json_free(&answers);
}

static void squad_read_case(void) {
    WordPiece w = task_words();
    for (int use = SQUAD_EVALUATE; use <= SQUAD_TRAIN; use++) {
        SquadSettings settings = {TASK_T, 3, 4, 5, (SquadUse)use};
        Squad s;
        Examples e;
        squad_open(&s, &e, CASE_DIR "/questions.json", &w, settings);
        squad_warn(&s);
        examples_check(&e, &w, 0);
        squad_check_answers(&s, &e);
        squad_close(&s), examples_close(&e);
    }
    wordpiece_free(&w);
}

#endif
