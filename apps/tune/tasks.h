/* Fine-tuning: a task's settings, its examples, and its metrics on held-out data.
 *
 *   classify   labelled text (tune/labelled.h). Metrics: accuracy, and F1 of class 1 if there are two classes,
 *              else the mean F1 of all classes that occur as labels or predictions. Loss: mean cross-entropy.
 *              --labels 1 is regression. Metrics: Pearson and Spearman correlation. Loss: mean squared error.
 *   answer     questions about contexts (tune/squad.h). Metrics: exact match and F1 in percent, over questions,
 *              as in the official script. Loss: mean cross-entropy of the answer's start and end, over windows.
 *
 * Held-out data may lack classes or answers if only predictions are wanted. Examples that have them are scored. */
#ifndef APPS_TUNE_TASKS_H
#define APPS_TUNE_TASKS_H

#include "apps/tune/labelled.h"
#include "apps/tune/span.h"
#include "apps/tune/squad.h"
#include "llmc/bert/mlm_data.h"
#include "llmc/bert/mlm_settings.h"
#include "llmc/device/copies.h"
#include "llmc/model/config.h"
#include "llmc/run/evaluate.h"

// In the order of the choices of --task.
typedef enum { TASK_CLASSIFY, TASK_ANSWER } Task;

enum {
    TASK_MIN_LENGTH = 8,
    TASK_MOST_LABELS = 1 << 16,
    TASK_MOST_QUESTION = 64,
    TASK_MOST_ANSWER = 30,
    TASK_STRIDE = 128
};

typedef struct {
    int task, labels, stride, new_head;
    const char* predictions;
} TaskSettings;

// Append the rows of these settings. Returns the new count.
static inline int task_settings_rows(TaskSettings* s, Flag* table, int count) {
    // clang-format off
    const Flag rows[] = {
        {NULL, "--task",        FLAG_CHOICE, &s->task,        "classify", 0, 0,        "classify|answer", SCOPE_RUN, TOPIC_TASK,
         "What to learn. classify: the class of each text in a tab-separated file; answer: "
         "the span of a context that answers a question, in SQuAD's JSON."},
        {NULL, "--labels",      FLAG_INT,    &s->labels,      "0",       0,  TASK_MOST_LABELS, NULL, SCOPE_RUN, TOPIC_TASK,
         "classify: number of classes. 1: a number to predict (regression); 0: as many as the model has, else 2."},
        {NULL, "--new-head",    FLAG_INT,    &s->new_head,    "0",       0,  1,        NULL,   SCOPE_RUN,  TOPIC_TASK,
         "1: start a new head on the encoder of a model that has one, for example for other labels."},
        {NULL, "--stride",      FLAG_INT,    &s->stride,      "-1",      -1, 1 << 20,  NULL,   SCOPE_RUN,  TOPIC_TASK,
         "answer: tokens shared by neighbouring windows of a long context. -1: 128, or fewer if -t is small."},
        {NULL, "--predictions", FLAG_STRING, &s->predictions, "",        0,  0,        NULL,   SCOPE_FREE, TOPIC_TASK,
         "With --evaluate 1: file for the predictions of -j, which then needs no labels or answers."},
    };
    // clang-format on
    settings_help(table, count, "--train-data",
                  "File of examples to train on: tab-separated text for classify, SQuAD's JSON for answer.");
    settings_help(table, count, "--seed", "Seed of the initial weights, the order of the examples and dropout.");
    settings_default(table, count, "--val-batches", "0");
    return settings_add_rows(table, count, rows, COUNT_OF(rows));
}

// Refuse flags that contradict each other.
static inline void task_check_settings(const TaskSettings* t, const Settings* s) {
    if (t->labels && t->task != TASK_CLASSIFY) die(USAGE, "--labels %d: is for --task classify alone", t->labels);
    if (t->new_head && s->evaluate)
        die(USAGE, "--new-head 1: is for training; --evaluate 1 takes the head of the model");
    if (*t->predictions && !s->evaluate) die(USAGE, "--predictions %s: is for --evaluate 1", t->predictions);
    if (!*s->train_data && !s->evaluate) die(USAGE, "--task: needs -i, the file of examples to train on");
    if (!*s->train_data && !*s->val_data) die(USAGE, "--evaluate 1 needs validation data; name it with -j");
}

// Whether the head starts from random weights whatever the model has: not if a checkpoint of this run is resumed.
static inline int task_starts_head(const TaskSettings* t, const Run* r) { return t->new_head && !r->start; }

// Outputs of the head: start and end for answer. For classify: --labels, else the model's number of classes, else 2.
static inline int task_outputs(const TaskSettings* t, int classes) {
    if (t->task == TASK_ANSWER) return SPAN_ENDS;
    return t->labels ? t->labels : classes > 0 ? classes : 2;
}

// Exit with USAGE if the head in the model's file (NULL: none) has another number of outputs, or if --evaluate needs a
// head and there is none.
static inline void task_check_head(const TaskSettings* t, const Settings* s, const char* weights, int outputs) {
    const char* name = t->task == TASK_ANSWER ? "qa_outputs.weight" : "classifier.weight";
    int is_there = 0, classes = outputs;
    if (weights && !tensors_are_llmc(weights)) {  // llm.c's files have no head
        SafeTensors file;
        weights_open(&file, weights);
        const SafeTensor* head = safetensors_find(&file, name);
        is_there = head != NULL;
        if (head && head->ndim == 2) classes = (int)head->shape[0];
        safetensors_close(&file);
    }
    if (s->evaluate && !is_there)
        die(USAGE, "%s%s: has no %s, so it would be evaluated with random weights; fine-tune it first, with -i",
            weights ? "" : "-e ", weights ? weights : s->model, name);
    if (classes != outputs && t->task == TASK_CLASSIFY)
        die(USAGE,
            "%s: its classifier has %d classes, not the %d of --labels, or else of config.json; give --labels %d, or "
            "--new-head 1 to start another classifier on this encoder",
            weights, classes, outputs, classes);
}

// A row of a batch is one sequence, with one target (classify) or two (answer).
static inline MlmRecipe task_recipe(Task task) {
    MlmRecipe recipe = {.max_predictions = task == TASK_ANSWER ? SPAN_ENDS : 1, .pack = 1};
    return recipe;
}

// ---------------------------------------------------------------------------------------------------------
// Class names, as in a model's config.json: {"id2label": {"0": "no", ...}}

// Read the class names in a directory's config.json into `names`, which must be empty. It stays empty if there are no
// names, if one is missing or occurs twice, or if they are only LABEL_0, LABEL_1, ... Returns the number of classes, or
// 0 if the file does not have it. For --task classify, exits with USAGE if the model's problem_type is not the task's:
// classification or regression.
static inline int task_find_names(LabelNames* names, const char* directory, const TaskSettings* t) {
    Json json;
    char* path = xprintf("%s/config.json", directory);
    int are_numbers = 1;
    json_load(&json, path, CONFIG_MAX_FILE);
    const JsonNode* all = json_has(json.root, "id2label") ? json_need(json.root, "id2label", JSON_OBJECT, path) : NULL;
    // There may be 65,536 names, mostly in order. Try the entry after the previous one first, then search all.
    const JsonNode* next = all ? all->first : NULL;
    for (size_t i = 0; all && i < all->count; i++, next = next ? next->next : NULL) {
        char key[32];
        snprintf(key, sizeof key, "%zu", i);
        int is_next = next && next->type == JSON_STRING && strcmp(next->key, key) == 0;
        const char* name = is_next ? next->string : json_get_string_or(all, key, "", path);
        char plain[32];
        snprintf(plain, sizeof plain, "LABEL_%zu", i);
        are_numbers &= strcmp(name, plain) == 0;
        if (!*name || i >= TASK_MOST_LABELS) break;
        label_names_add(names, name, strlen(name));
    }
    if (all && ((size_t)names->count < all->count || are_numbers || !label_names_differ(names)))
        label_names_free(names);
    // transformers writes id2label instead of num_labels, but a handwritten file may have num_labels.
    int64_t number = all ? (int64_t)all->count : json_get_int_or(json.root, "num_labels", 0, path);
    int classes = number < 0 ? 0 : (int)min_size((size_t)number, TASK_MOST_LABELS);
    const char* type = task_outputs(t, classes) == 1 ? "regression" : "single_label_classification";
    const char* found = json_get_string_or(json.root, "problem_type", type, path);
    if (t->task == TASK_CLASSIFY && strcmp(found, type) != 0)
        die(USAGE,
            "%s: key \"problem_type\": is \"%s\", not the \"%s\" of --labels %d; --new-head 1 starts another head",
            path, found, type, task_outputs(t, classes));
    json_free(&json);
    free(path);
    return classes;
}

static inline void task_write_names(Text* t, const LabelNames* names, int labels) {
    for (int reverse = 0; reverse < 2; reverse++) {
        Text map = {NULL, 0, 0};
        text_printf(&map, "{");
        for (int i = 0; i < labels; i++) {
            char *key = xprintf("%d", i), *name = names->count ? xprintf("%s", names->name[i]) : xprintf("LABEL_%d", i);
            if (reverse) json_put_integer(&map, name, i);
            else json_put_string(&map, key, name);
            free(key), free(name);
        }
        json_put_key(t, reverse ? "label2id" : "id2label");
        text_printf(t, "%s}", map.text);
        free(map.text);
    }
}

// ---------------------------------------------------------------------------------------------------------
// Data

typedef struct {
    Task task;
    int labels;
    int classes;  // that the loaded model has, 0 if none
    Examples train, val;
    Squad train_questions, val_questions;
    LabelNames names;
    int has_train, has_val;
} TaskData;

static inline void task_data_read(TaskData* data, const TaskSettings* s, const char* path, int is_val, int stride,
                                  const WordPiece* words, int T, int says) {
    Examples* e = is_val ? &data->val : &data->train;
    if (data->task == TASK_CLASSIFY) {
        labelled_read(e, path, words, &data->names, data->labels, T, is_val && *s->predictions);
        return;
    }
    SquadSettings squad = {.T = T,
                           .stride = stride,
                           .most_question = TASK_MOST_QUESTION,
                           .most_answer = TASK_MOST_ANSWER,
                           .use = is_val ? SQUAD_EVALUATE : SQUAD_TRAIN};
    Squad* questions = is_val ? &data->val_questions : &data->train_questions;
    squad_open(questions, e, path, words, squad);
    if (says) squad_warn(questions);
    if (e->count == 0) die(USAGE, "%s: has no question to learn from", path);
    if (is_val && questions->unanswered == questions->questions && !*s->predictions)
        die(USAGE, "%s: has no answers to compare with; --evaluate 1 --predictions FILE writes those of the model",
            path);
}

// The number of tokens that neighbouring windows of T tokens share: --stride, or by default 128. If 128 would leave no
// new tokens in a window with the longest question, half of the window's room for context.
static inline int task_stride(const TaskSettings* s, int T, int says) {
    int room = T - 3 - TASK_MOST_QUESTION;
    if (s->stride >= 0) return s->stride;
    if (room > TASK_STRIDE) return TASK_STRIDE;
    if (says && room > 0) printf("--stride %d instead of %d, which does not fit -t %d\n", room / 2, TASK_STRIDE, T);
    return max_int(room / 2, 0);
}

// Read the files as sequences of at most T tokens. Either path may be NULL. data->names may hold the model's class
// names. Only the rank with `says` = 1 prints warnings about the files.
static inline void task_data_open(TaskData* data, const TaskSettings* s, const char* train, const char* val,
                                  const WordPiece* words, int labels, int V, int T, int says) {
    data->task = (Task)s->task, data->labels = labels;
    if (*s->predictions && says) {  // as squad_write() and task_write_classes() begin
        const char* start = labels == 1 ? "prediction\n" : "prediction\tname\t";
        predictions_refuse_input("--predictions", s->predictions, train);
        predictions_refuse_input("--predictions", s->predictions, val);
        predictions_check("--predictions", s->predictions, data->task == TASK_ANSWER ? "{\n\"" : start);
    }
    examples_check_texts(words, V, "--task");
    if (T < TASK_MIN_LENGTH) die(USAGE, "-t %d: a task needs sequences of at least %d tokens", T, (int)TASK_MIN_LENGTH);
    if (data->names.count != labels) label_names_free(&data->names);
    if (data->task == TASK_CLASSIFY && train && !data->names.count) labelled_find_names(&data->names, train, labels);
    data->has_train = train != NULL, data->has_val = val != NULL;
    int stride = data->task == TASK_ANSWER ? task_stride(s, T, says) : 0;
    if (train) task_data_read(data, s, train, 0, stride, words, T, says);
    if (val) task_data_read(data, s, val, 1, stride, words, T, says);
}

static inline void task_data_close(TaskData* data) {
    if (data->has_train) examples_close(&data->train);
    if (data->has_val) examples_close(&data->val);
    if (data->task == TASK_ANSWER && data->has_train) squad_close(&data->train_questions);
    if (data->task == TASK_ANSWER && data->has_val) squad_close(&data->val_questions);
    label_names_free(&data->names);
}

#endif
