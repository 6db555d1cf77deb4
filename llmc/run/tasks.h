/* Fine-tuning: a task's settings, its examples, and what is told of them on held-out data.
 *
 *   classify   labelled text (data/labelled.h). accuracy; F1 of class 1 where there are two classes, else the mean of the F1 of
 *              all classes that are labels or predictions; loss: mean cross-entropy
 *   answer     questions about contexts (data/squad.h). exact match and F1 in per cent, over questions, as the official script
 *              has them; loss: mean cross-entropy of both ends, over windows
 *
 * Held-out data may lack classes or answers where only predictions are wanted; what has them is scored. */
#ifndef LLMC_TASKS_H
#define LLMC_TASKS_H

#include "../data/labelled.h"
#include "../data/squad.h"
#include "../device/host_view.h"
#include "config.h"
#include "session.h"
#include "task_head.h"

enum { TASK_MIN_LENGTH = 8, TASK_MOST_LABELS = 1 << 16, TASK_MOST_QUESTION = 64, TASK_MOST_ANSWER = 30 };

typedef struct {
    int task, labels, stride;
    const char* predictions;
} TaskSettings;

// None of them changes what is trained.
#define TASK_FREE_TO_CHANGE " --predictions"

// Append the rows of these settings. Returns the new count.
static inline int task_settings_rows(TaskSettings* s, Flag* table, int count) {
    // clang-format off
    const Flag rows[] = {
        {NULL,  "--task",               FLAG_CHOICE, &s->task,            "pretrain", 0, 0, "pretrain|classify|answer", "what is learnt: masked tokens; the class of each text in a file of tab-separated values; the span of a context that answers a question, in SQuAD's JSON", 0},
        {NULL,  "--labels",             FLAG_INT,    &s->labels,          "0",      0, TASK_MOST_LABELS, NULL, "classify: number of classes; 0: as many as the model has, else 2", 0},
        {NULL,  "--stride",             FLAG_INT,    &s->stride,          "128",    0, 1 << 20, NULL, "answer: tokens that neighbouring windows of a long context share", 0},
        {NULL,  "--predictions",        FLAG_STRING, &s->predictions,     "",       0, 0, NULL, "with --evaluate 1: the file that is to say what the model makes of each example of -j, which then needs no labels or answers", 0},
    };
    // clang-format on
    Flag* batches = flags_find(table, count, "--val-batches", strlen("--val-batches"));
    CHECK(batches);
    batches->help = "micro-batches of a validation at most; 0: all, which a task has where this is not given";
    return settings_add_rows(table, count, rows, COUNT_OF(rows));
}

// A task is validated on all examples, unless the user says otherwise. For the flags as they are given, before those of a
// run that is resumed.
static inline void task_default_batches(const TaskSettings* t, Settings* s, Flag* table, int count) {
    if (t->task && !flag_is_given(table, count, "--val-batches")) s->val_batches = 0;
}

// Refuse flags that cannot be meant together.
static inline void task_check_settings(const TaskSettings* t, const Settings* s, const MlmSettings* mlm) {
    if (t->task && (*mlm->fill || *mlm->phase2))
        die(USAGE, "%s: is for --task pretrain alone; leave --task out", *mlm->fill ? "--fill" : "--phase2");
    if (t->labels && t->task != TASK_CLASSIFY) die(USAGE, "--labels %d: is for --task classify alone", t->labels);
    if (t->labels == 1) die(USAGE, "--labels 1: there are at least two classes; a task with one has nothing to learn");
    if (*t->predictions && (t->task == TASK_PRETRAIN || !s->evaluate))
        die(USAGE, "--predictions %s: is for --evaluate 1 of --task classify or answer", t->predictions);
}

// Outputs of the head: those asked for, else as many as the model has classes, if it has any.
static inline int task_outputs(const TaskSettings* t, int classes) {
    if (t->task == TASK_PRETRAIN) return 0;
    if (t->task == TASK_ANSWER) return SPAN_ENDS;
    return t->labels ? t->labels : classes > 1 ? classes : 2;
}

// End with USAGE where the model's file has a classifier of another number of classes.
static inline void task_check_labels(const char* weights, int outputs) {
    SafeTensors file;
    if (tensors_are_llmc(weights)) return;  // which has none
    tensors_check_form(weights);
    safetensors_open(&file, weights);
    const SafeTensor* classifier = safetensors_find(&file, "classifier.weight");
    int classes = classifier && classifier->ndim == 2 ? (int)classifier->shape[0] : outputs;
    if (classes != outputs)
        die(USAGE,
            "%s: its classifier has %d classes, not the %d of --labels, or else of config.json; give --labels %d, or "
            "begin with a model that has no classifier yet",
            weights, classes, outputs, classes);
    safetensors_close(&file);
}

// A row of a batch is a sequence, with one target or two.
static inline MlmRecipe task_recipe(Task task) {
    MlmRecipe recipe = {task == TASK_ANSWER ? SPAN_ENDS : 1, 0, 0, 0, 0, 1, 0};
    return recipe;
}

// The files to train and to validate on (caller frees). For --evaluate 1 the second will do, and stands for both.
static inline void task_find_data(const Session* session, char** train, char** val) {
    const Settings* s = session->settings;
    if (!*s->train_data && !s->evaluate) die(USAGE, "--task: needs -i, the file of examples to train on");
    if (s->evaluate && !*s->train_data && !*s->val_data)
        die(USAGE, "--evaluate 1 needs validation data; name it with -j");
    if (*s->train_data) session_find_data(session, "", train, val);
    else *train = xprintf("%s", s->val_data), *val = xprintf("%s", s->val_data);
}

// ---------------------------------------------------------------------------------------------------------
// Names of classes, as a model's config.json has them: {"id2label": {"0": "no", ...}}

// From the file, into names that are empty. They stay so where it has none, where one is missing or there twice, and where
// they only number the classes: LABEL_0, LABEL_1, ... Returns how many classes it has, 0 where it does not say. A model
// whose classes are something else is refused where the task is to classify.
static inline int task_find_names(LabelNames* names, const char* path, Task task) {
    Json json;
    int are_numbers = 1;
    json_load(&json, path, CONFIG_MAX_FILE);
    if (task == TASK_CLASSIFY) config_expect(json.root, "problem_type", "single_label_classification", path);
    const JsonNode* all = json_has(json.root, "id2label") ? json_need(json.root, "id2label", JSON_OBJECT, path) : NULL;
    // There may be 65,536, mostly in order: each is looked for behind the one before, and only then among all.
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
    int classes = all ? (int)min_size(all->count, TASK_MOST_LABELS) : 0;
    json_free(&json);
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
    int classes;  // that the model has had, 0 if it has none
    Examples train, val;
    Squad train_questions, val_questions;
    LabelNames names;
    int has_train, has_val;
} TaskData;

static inline void task_data_read(TaskData* d, const TaskSettings* s, const char* path, int is_val,
                                  const WordPiece* words, int T, int says) {
    Examples* e = is_val ? &d->val : &d->train;
    if (d->task == TASK_CLASSIFY) {
        labelled_read(e, path, words, &d->names, d->labels, T, is_val && *s->predictions);
        return;
    }
    SquadSettings squad = {T, s->stride, TASK_MOST_QUESTION, TASK_MOST_ANSWER, is_val ? SQUAD_EVALUATE : SQUAD_TRAIN};
    Squad* questions = is_val ? &d->val_questions : &d->train_questions;
    squad_open(questions, e, path, words, squad);
    if (says) squad_warn(questions);
    if (e->count == 0) die(USAGE, "%s: holds no question that can be learnt from", path);
    if (is_val && questions->unanswered == questions->questions && !*s->predictions)
        die(USAGE, "%s: has no answers to compare with; --evaluate 1 --predictions FILE says those of the model", path);
}

// Read the files as sequences of at most T tokens; either path may be NULL. d->names may hold the model's names. What is odd
// about the files is said by one rank, whose `says` is 1.
static inline void task_data_open(TaskData* d, const TaskSettings* s, const char* train, const char* val,
                                  const WordPiece* words, int labels, int V, int T, int says) {
    d->task = (Task)s->task, d->labels = labels;
    if (*s->predictions && says) predictions_check(s->predictions);
    if (!words->size)
        die(USAGE, "--task: there is no vocab.txt or tokenizer.json to read texts with; put the model's into its "
                   "directory (-e)");
    if (words->size > V)
        die(USAGE, "--task: the vocabulary has %d tokens, but the model %d; put the model's own into its directory",
            words->size, V);
    if (T < TASK_MIN_LENGTH) die(USAGE, "-t %d: a task's sequences have %d tokens at least", T, (int)TASK_MIN_LENGTH);
    if (d->names.count != labels) label_names_free(&d->names);
    if (d->task == TASK_CLASSIFY && train && !d->names.count) labelled_find_names(&d->names, train, labels);
    d->has_train = train != NULL, d->has_val = val != NULL;
    if (train) task_data_read(d, s, train, 0, words, T, says);
    if (val) task_data_read(d, s, val, 1, words, T, says);
}

static inline void task_data_close(TaskData* d) {
    if (d->has_train) examples_close(&d->train);
    if (d->has_val) examples_close(&d->val);
    if (d->task == TASK_ANSWER && d->has_train) squad_close(&d->train_questions);
    if (d->task == TASK_ANSWER && d->has_val) squad_close(&d->val_questions);
    label_names_free(&d->names);
}

// ---------------------------------------------------------------------------------------------------------
// Evaluation

// accuracy and F1 in 0 .. 1; exact match and F1 in per cent.
typedef struct {
    double loss, first, f1, examples;  // examples or questions that were scored
    int said;                          // those that were predicted
    Task task;
} TaskScore;

// Of held-out examples, each of which one rank looks at.
typedef struct {
    TaskData* data;
    MlmBatch* batch;
    int count;          // the first examples of the data, which are evaluated
    int next, *number;  // of examples; [B] those of the batch
    int B, rank, ranks;
    double *said, *sure;   // [examples] the predicted class + 1, and its probability
    double loss, targets;  // the sum over examples whose class or answer the data has, and how many these are
} TaskEvaluation;

// `batches`: micro-batches of B, at most; 0: all. Questions are whole: what has no room is left out with all its windows.
static inline void task_evaluation_begin(TaskEvaluation* e, TaskData* data, MlmBatch* batch, int B, int batches,
                                         const Comm* comm) {
    size_t n = (size_t)data->val.count;
    memset(e, 0, sizeof *e);
    e->data = data, e->batch = batch, e->B = B, e->rank = comm->rank, e->ranks = comm->size;
    e->count = examples_first(&data->val, (uint64_t)batches * (uint64_t)B);
    e->number = (int*)xmalloc((size_t)B * sizeof(int));
    e->said = (double*)xcalloc(2 * n, sizeof(double));
    e->sure = e->said + n;
    if (data->task == TASK_ANSWER) squad_begin(&data->val_questions);
}

// Fill the batch with this rank's next examples. Returns 0 where there are none left.
static inline int task_evaluation_next(TaskEvaluation* e) {
    return examples_batch_next(e->batch, e->number, &e->data->val, &e->next, e->count, e->B, e->rank, e->ranks) > 0;
}

// Minus the logarithm of a target's probability among n logits that lie `step` apart; 0 where it is none of them.
static inline double task_cross_entropy(const real* x, int n, int step, int target) {
    double max = -INFINITY, sum = 0;
    if (target < 0 || target >= n) return 0;
    for (int i = 0; i < n; i++) max = fmax(max, (double)x[(size_t)i * (size_t)step]);
    for (int i = 0; i < n; i++) sum += exp((double)x[(size_t)i * (size_t)step] - max);
    return max + log(sum) - (double)x[(size_t)target * (size_t)step];
}

// Count the batch's examples, from the head's logits after task_forward().
static inline void task_evaluation_take(TaskEvaluation* e, const TaskHead* h, Context* ctx) {
    const MlmBatch* b = e->batch;
    const Examples* examples = &e->data->val;
    int is_answer = h->task == TASK_ANSWER, Kp = h->stored;
    size_t n = (size_t)(is_answer ? b->rows : b->count) * (size_t)Kp;
    HostView logits = host_view_open(h->buffers.logits, n, VIEW_FLOATX);
    host_view_read(ctx, &logits);
    for (int s = 0; s < b->count; s++) {
        int i = e->number[s], row = is_answer ? b->cu_seqlens[s] : s, length = examples_length(examples, i), best = 0;
        const real* x = logits.values + (size_t)row * (size_t)Kp;
        const int* label = examples->label + 2 * i;
        int is_known = is_answer ? squad_is_known(&e->data->val_questions, examples->group[i]) : label[0] >= 0;
        e->targets += is_known;
        if (is_answer) {
            squad_take(&e->data->val_questions, examples, i, x, Kp);
            for (int end = 0; end < SPAN_ENDS && is_known; end++)
                e->loss += task_cross_entropy(x + end, length, Kp, label[end]) / SPAN_ENDS;
            continue;
        }
        for (int k = 1; k < h->outputs; k++)
            if (x[k] > x[best]) best = k;
        e->said[i] = best + 1;
        e->sure[i] = exp(-task_cross_entropy(x, h->outputs, 1, best));
        e->loss += task_cross_entropy(x, h->outputs, 1, label[0]);
    }
    host_view_close(&logits);
}

// F1 of each class from how often it is right, said and true; 0 where it is never right.
static inline void task_score_classes(TaskScore* score, const TaskEvaluation* e) {
    int n = e->count, K = e->data->labels, classes = 0;
    double *right = (double*)xcalloc(3 * (size_t)K, sizeof(double)), *said = right + K, *is = said + K, all = 0, f1 = 0;
    for (int i = 0; i < n; i++) {
        int label = e->data->val.label[2 * i], prediction = (int)e->said[i] - 1;
        said[prediction]++, is[label]++;
        right[label] += label == prediction, all += label == prediction;
    }
    for (int k = 0; k < K; k++) {
        double of_class = right[k] > 0 ? 2 * right[k] / (said[k] + is[k]) : 0;
        if (K == 2 && k == 1) score->f1 = of_class;
        classes += said[k] + is[k] > 0, f1 += of_class;
    }
    if (K > 2) score->f1 = f1 / classes;
    score->first = all / n;
    free(right);
}

// A line for each example: the class, its name and its probability.
static inline void task_write_classes(const TaskEvaluation* e, const char* path) {
    Text t = {NULL, 0, 0};
    text_printf(&t, "prediction\tname\tprobability\n");
    for (int i = 0; i < e->count; i++) {
        int k = (int)e->said[i] - 1;
        if (e->data->names.count) text_printf(&t, "%d\t%s\t%.6f\n", k, e->data->names.name[k], e->sure[i]);
        else text_printf(&t, "%d\tLABEL_%d\t%.6f\n", k, k, e->sure[i]);
    }
    predictions_write(path, &t);
    free(t.text);
}

// From each rank's share; `predictions`: where to write them, empty for nowhere.
static inline TaskScore task_evaluation_end(TaskEvaluation* e, const char* predictions, const Comm* comm) {
    TaskData* d = e->data;
    double sums[2] = {e->loss, e->targets};
    comm_sum_counts(comm, sums, 2);
    TaskScore score = {sums[0] / sums[1], 0, 0, sums[1], e->count, d->task};
    if (d->task == TASK_ANSWER) {
        Squad* s = &d->val_questions;
        size_t count;
        double* answers = squad_answers(s, &count);
        comm_sum_counts(comm, answers, count);
        SquadShare all = squad_score(s).all;
        score.first = all.exact, score.f1 = all.f1, score.examples = all.questions;
        score.said = squad_answered(s);
        if (*predictions && comm->rank == 0) squad_write(s, predictions);
    } else {
        comm_sum_counts(comm, e->said, 2 * (size_t)d->val.count);
        if (score.examples > 0) task_score_classes(&score, e);
        if (*predictions && comm->rank == 0) task_write_classes(e, predictions);
    }
    free(e->number), free(e->said);
    return score;
}

static inline void task_score_log(Log* log, const Session* session, TaskScore s) {
    Text t = {NULL, 0, 0};
    log_put(&t, s.task == TASK_ANSWER ? "val_exact_match" : "val_accuracy", s.first, 6);
    log_put(&t, "val_f1", s.f1, 6);
    log_validation(log, session->step, session->last, s.loss, t.text);
    log_print_step(session->step, session->last);
    if (s.task == TASK_ANSWER) printf("exact match %.2f, F1 %.2f\n", s.first, s.f1);
    else printf("accuracy %.4f, F1 %.4f\n", s.first, s.f1);
    free(t.text);
}

static inline void task_score_print(TaskScore s) {
    if (s.examples == 0)
        printf("nothing to compare with: %s is predicted of %d %s\n",
               s.task == TASK_ANSWER ? "the answer" : "the class", s.said,
               s.task == TASK_ANSWER ? "questions" : "texts");
    else if (s.task == TASK_ANSWER)
        printf("val loss %.6f | exact match %.4f, F1 %.4f (%.0f questions)\n", s.loss, s.first, s.f1, s.examples);
    else printf("val loss %.6f | accuracy %.6f, F1 %.6f (%.0f examples)\n", s.loss, s.first, s.f1, s.examples);
}

#endif
