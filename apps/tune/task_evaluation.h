/* Metrics of fine-tuned models on held-out examples: accuracy, F1, correlations, exact match. tasks.h defines them. */
#ifndef APPS_TUNE_TASK_EVALUATION_H
#define APPS_TUNE_TASK_EVALUATION_H

#include "apps/tune/squared_error.h"
#include "apps/tune/tasks.h"
#include "llmc/device/copies.h"
#include "llmc/run/run.h"

// How a task's two metrics are reported, in the log and on the terminal.
typedef struct {
    const char *keys[2], *names[2], *predicted, *unit, *input;
    int digits;  // printed on the terminal during a run
} TaskFigures;

static inline const TaskFigures* task_figures(Task task, int labels) {
    static const TaskFigures figures[] = {
        {{"val_accuracy", "val_f1"}, {"accuracy", "F1"}, "class", "examples", "texts", 4},
        {{"val_pearson", "val_spearman"}, {"Pearson", "Spearman"}, "number", "examples", "texts", 4},
        {{"val_exact_match", "val_f1"}, {"exact match", "F1"}, "answer", "questions", "questions", 2}};  // in percent
    return &figures[task == TASK_ANSWER ? 2 : labels == 1];
}

typedef struct {
    double loss, values[2], examples;  // examples or questions that were scored
    int predicted, all;                // number predicted; number in the data
    const TaskFigures* figures;
} TaskScore;

// The evaluation of held-out examples. Each example is evaluated by one rank.
typedef struct {
    TaskData* data;
    MlmBatch* batch;
    int count;          // evaluate only this many examples, the first of the data
    int next, *number;  // index of the next example; [B] indices of the batch's examples
    int B, rank, ranks;
    double *predicted, *prob;  // [examples] predicted class + 1 or predicted number; probability of the predicted class
    double loss, targets;      // summed loss of the examples with a known class or answer; their number
    double not_finite;         // number of non-finite logits, over all examples
    int is_stopped;            // a signal to any rank ended the evaluation early, so it has no result
} TaskEvaluation;

// `batches`: maximum number of micro-batches of B; 0: all. A question is evaluated with all its windows or skipped.
static inline void task_evaluation_begin(TaskEvaluation* e, TaskData* data, MlmBatch* batch, int B, int batches,
                                         const ProcessGroup* group) {
    size_t n = (size_t)data->val.count;
    memset(e, 0, sizeof *e);
    e->data = data, e->batch = batch, e->B = B, e->rank = group->rank, e->ranks = group->size;
    e->count = examples_first(&data->val, (uint64_t)batches * (uint64_t)B);
    e->number = (int*)xmalloc((size_t)B * sizeof(int));
    e->predicted = (double*)xcalloc(2 * n, sizeof(double));
    e->prob = e->predicted + n;
    if (data->task == TASK_ANSWER) squad_begin(&data->val_questions);
}

// Fill the batch with this rank's next examples. Returns 0 if none are left, or early because of a `signal` (0: none).
// All ranks call it.
static inline int task_evaluation_next(TaskEvaluation* e, Run* r, int signal) {
    group_begin_work(&r->group);
    if (!signal &&
        examples_batch_next(e->batch, e->number, &e->data->val, &e->next, e->count, e->B, e->rank, e->ranks) > 0)
        return 1;
    e->is_stopped = group_any(&r->group, signal != 0);
    return 0;
}

// The cross-entropy of `target` over n logits with stride `step`; 0 if the target is out of range.
static inline double task_cross_entropy(const real* x, int n, int step, int target) {
    double max = -INFINITY, sum = 0;
    if (target < 0 || target >= n) return 0;
    for (int i = 0; i < n; i++) max = fmax(max, (double)x[(size_t)i * (size_t)step]);
    for (int i = 0; i < n; i++) sum += exp((double)x[(size_t)i * (size_t)step] - max);
    return max + log(sum) - (double)x[(size_t)target * (size_t)step];
}

// The head's outputs for a batch: logits [rows, Kp] on the device, of which the first K columns are used.
typedef struct {
    Task task;
    int K, Kp;
    floatX* logits;
} TaskOutputs;

// Accumulate the batch's predictions and losses from the head's logits.
static inline void task_evaluation_take(TaskEvaluation* e, TaskOutputs h, Context* ctx) {
    const MlmBatch* b = e->batch;
    const Examples* examples = &e->data->val;
    int is_answer = h.task == TASK_ANSWER, Kp = h.Kp;
    size_t n = (size_t)(is_answer ? b->rows : b->count) * (size_t)Kp;
    HostView logits = host_view_open(h.logits, n, VIEW_FLOATX);
    host_view_read(ctx, &logits);
    for (int s = 0; s < b->count; s++) {
        int i = e->number[s], row = is_answer ? b->cu_seqlens[s] : s, length = examples_length(examples, i), best = 0;
        const real* x = logits.values + (size_t)row * (size_t)Kp;
        const int* label = examples->label + 2 * i;
        double target = squared_error_target(label[0]);  // for regression
        int is_known = is_answer  ? squad_is_known(&e->data->val_questions, examples->group[i])
                       : h.K == 1 ? !isnan(target)
                                  : label[0] >= 0;
        e->targets += is_known;
        for (int k = 0; k < (is_answer ? length : 1) * Kp; k++)
            e->not_finite += k % Kp < h.K && !isfinite((double)x[k]);
        if (is_answer) {
            squad_take(&e->data->val_questions, examples, i, x, Kp);
            for (int end = 0; end < SPAN_ENDS && is_known; end++)
                e->loss += task_cross_entropy(x + end, length, Kp, label[end]) / SPAN_ENDS;
            continue;
        }
        if (h.K == 1) {
            e->predicted[i] = (double)*x;
            if (is_known) e->loss += ((double)*x - target) * ((double)*x - target);
            continue;
        }
        for (int k = 1; k < h.K; k++)
            if (x[k] > x[best]) best = k;
        e->predicted[i] = best + 1;
        e->prob[i] = exp(-task_cross_entropy(x, h.K, 1, best));
        e->loss += task_cross_entropy(x, h.K, 1, label[0]);
    }
    host_view_close(&logits);
}

// Accuracy and F1. A class's F1 follows from its numbers of correct predictions (`correct`), predictions
// (`predicted`) and labels (`actual`). It is 0 if no prediction is correct.
static inline void task_score_classes(TaskScore* score, const TaskEvaluation* e) {
    int n = e->count, K = e->data->labels, classes = 0;
    double *correct = (double*)xcalloc(3 * (size_t)K, sizeof(double)), *predicted = correct + K,
           *actual = predicted + K;
    double all_correct = 0, f1 = 0;
    for (int i = 0; i < n; i++) {
        int label = e->data->val.label[2 * i], prediction = (int)e->predicted[i] - 1;
        predicted[prediction]++, actual[label]++;
        correct[label] += label == prediction, all_correct += label == prediction;
    }
    for (int k = 0; k < K; k++) {
        double of_class = correct[k] > 0 ? 2 * correct[k] / (predicted[k] + actual[k]) : 0;
        if (K == 2 && k == 1) score->values[1] = of_class;
        classes += predicted[k] + actual[k] > 0, f1 += of_class;
    }
    if (K > 2) score->values[1] = f1 / classes;
    score->values[0] = all_correct / n;
    free(correct);
}

// The Pearson correlation of x and y [n]; NaN if either is constant.
static inline double task_correlation(const double* x, const double* y, int n) {
    double mx = 0, my = 0, xx = 0, yy = 0, xy = 0;
    for (int i = 0; i < n; i++) mx += x[i] / n, my += y[i] / n;
    for (int i = 0; i < n; i++) {
        double dx = x[i] - mx, dy = y[i] - my;
        xx += dx * dx, yy += dy * dy, xy += dx * dy;
    }
    return xy / sqrt(xx * yy);
}

typedef struct {
    double value;
    int index;
} TaskRanked;

static inline int task_compare_ranked(const void* a, const void* b) {
    double x = ((const TaskRanked*)a)->value, y = ((const TaskRanked*)b)->value;
    return (x > y) - (x < y);
}

// rank [n]: the rank of each x [n] in ascending order. Equal values get the mean of their ranks.
static inline void task_rank(double* rank, const double* x, int n) {
    TaskRanked* sorted = (TaskRanked*)xmalloc((size_t)n * sizeof *sorted);
    for (int i = 0; i < n; i++) sorted[i].value = x[i], sorted[i].index = i;
    qsort(sorted, (size_t)n, sizeof *sorted, task_compare_ranked);
    for (int i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && sorted[end].value == sorted[i].value;) end++;
        for (int k = i; k < end; k++) rank[sorted[k].index] = 0.5 * (i + end - 1);
    }
    free(sorted);
}

// Pearson correlation of predicted and actual numbers, and Spearman correlation, which is Pearson's of their ranks.
static inline void task_score_numbers(TaskScore* score, const TaskEvaluation* e) {
    int n = e->count;
    double *actual = (double*)xmalloc(3 * (size_t)n * sizeof(double)), *ranks = actual + n, *actual_ranks = ranks + n;
    for (int i = 0; i < n; i++) actual[i] = squared_error_target(e->data->val.label[2 * i]);
    task_rank(ranks, e->predicted, n), task_rank(actual_ranks, actual, n);
    score->values[0] = task_correlation(e->predicted, actual, n);
    score->values[1] = task_correlation(ranks, actual_ranks, n);
    free(actual);
}

// Write one line per example: the class, its name and its probability, or for regression the number.
static inline void task_write_classes(const TaskEvaluation* e, const char* path) {
    Text t = {NULL, 0, 0};
    int are_numbers = e->data->labels == 1;
    text_printf(&t, are_numbers ? "prediction\n" : "prediction\tname\tprobability\n");
    for (int i = 0; i < e->count; i++) {
        int k = (int)e->predicted[i] - 1;
        if (are_numbers) text_printf(&t, "%.6f\n", e->predicted[i]);
        else if (e->data->names.count) text_printf(&t, "%d\t%s\t%.6f\n", k, e->data->names.name[k], e->prob[i]);
        else text_printf(&t, "%d\tLABEL_%d\t%.6f\n", k, k, e->prob[i]);
    }
    predictions_write(path, &t);
    free(t.text);
}

// "accuracy 0.9, F1 0.8"
static inline void task_score_put(TaskScore s, int digits) {
    for (int i = 0; i < 2; i++) printf("%s%s %.*f", i ? ", " : "", s.figures->names[i], digits, plain_nan(s.values[i]));
}

static inline void task_score_print(TaskScore s) {
    const TaskFigures* f = s.figures;
    if (s.examples == 0) {
        printf("nothing to compare with: the %s is predicted of %d %s\n", f->predicted, s.predicted, f->input);
        return;
    }
    printf("val loss %.6f | ", s.loss);
    task_score_put(s, f->digits + 2);
    if (s.predicted == s.all) printf(" (%.0f %s)\n", s.examples, f->unit);
    else printf(" (%.0f of %d %s; -m 0 takes all)\n", s.examples, s.all, f->unit);
}

// Write a line to the log, or print the scores if `log` is NULL.
static inline void task_score_show(Log* log, const Run* r, TaskScore s) {
    Text t = {NULL, 0, 0};
    if (!log) {
        task_score_print(s);
        return;
    }
    for (int i = 0; i < 2; i++) log_put(&t, s.figures->keys[i], s.values[i], 6);
    log_validation(log, r->step, r->last, s.loss, t.text);
    log_print_step(r->step, r->last);
    task_score_put(s, s.figures->digits);
    printf("\n");
    free(t.text);
}

// Combine the results of all ranks, and log or print them. `predictions`: the file to write predictions to; empty:
// none.
static inline void task_evaluation_end(TaskEvaluation* e, const char* predictions, Run* r) {
    TaskData* data = e->data;
    const ProcessGroup* group = &r->group;
    double sums[3] = {e->loss, e->targets, e->not_finite};
    group_sum_counts(group, sums, 3);
    if (sums[2] > 0) run_check_finite(r, "a prediction", NAN);
    TaskScore score = {.loss = sums[0] / sums[1],
                       .examples = sums[1],
                       .predicted = e->count,
                       .all = data->val.count,
                       .figures = task_figures(data->task, data->labels)};
    if (data->task == TASK_ANSWER) {
        Squad* s = &data->val_questions;
        size_t count;
        double* answers = squad_answers(s, &count);
        group_sum_counts(group, answers, count);
        SquadScore all = squad_score(s);
        score.values[0] = all.exact, score.values[1] = all.f1, score.examples = all.questions;
        score.predicted = squad_answered(s), score.all = s->questions;
        if (*predictions && group->rank == 0) squad_write(s, predictions);
    } else {
        group_sum_counts(group, e->predicted, 2 * (size_t)data->val.count);
        if (score.examples > 0 && data->labels == 1) task_score_numbers(&score, e);
        else if (score.examples > 0) task_score_classes(&score, e);
        if (*predictions && group->rank == 0) task_write_classes(e, predictions);
    }
    free(e->number), free(e->predicted);
    if (!e->is_stopped) task_score_show(r->settings.evaluate ? NULL : &r->log, r, score);
}

#endif
