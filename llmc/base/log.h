/* What a run reports: one line per step on the terminal, OUT/log.jsonl for programs, OUT/loss.svg for people.
 *
 * log.jsonl holds one JSON object per line. A line without "step" describes the run (its settings). The others are:
 *
 *   {"step", "loss", "lr", "grad_norm", "ms", "tok_s", "mfu"}   and "loss_scale" if the loss is scaled
 *       about once a second also "joules" of a step, the mean since the previous line that has it, and "mhz", the
 *       clock now, both of rank 0's GPU
 *   {"step", "val_loss"}
 *   {"step", "fp8": [{"tensor", "operand", "format", "amax", "scale", "clipped", "flushed"}, ...]}
 *       with --fp8, before each validation: of the last step, if it was in fp8 (fp8/report.h)
 *   {"step", "checkpoint_ms", "checkpoint_write_s", "checkpoint_gb_s", "checkpoint_wait_ms"}
 *       once the checkpoint of that step is on disk: the time that training lost, the duration and the speed of the
 *       write, and how much of the lost time was spent waiting for the end of the write; and "weights_hash" if several
 *       ranks were found to hold the same weights
 *
 * A line is one write(), so a killed run leaves whole lines. Numbers that are not finite become null. A resumed run
 * cuts the file back to the step of its checkpoint and appends to it. A full disk costs log lines and one warning, not
 * the run. With several ranks, only one opens a log. */
#ifndef LLMC_BASE_LOG_H
#define LLMC_BASE_LOG_H

#include "llmc/base/json.h"

typedef struct {
    int64_t* step;
    float* value;
    size_t count, capacity;
} LossCurve;

// Skips values that are not finite, and steps that no run reaches (from a damaged log), because the axes are doubles.
static inline void loss_curve_add(LossCurve* c, int64_t step, double value) {
    if (!isfinite((float)value) || step < 0 || step > (int64_t)1 << 53) return;
    size_t capacity = c->capacity;
    c->step = (int64_t*)array_reserve(c->step, &capacity, c->count + 1, sizeof(int64_t));
    c->value = (float*)array_reserve(c->value, &c->capacity, c->count + 1, sizeof(float));
    c->step[c->count] = step;
    c->value[c->count++] = (float)value;
}

static inline void loss_curve_free(LossCurve* c) {
    free(c->step);
    free(c->value);
    memset(c, 0, sizeof(*c));
}

// The newest value of an evaluation, by its key in log.jsonl: "val_loss", "exam_acc", ...
enum { LOG_KEY = 48 };

typedef struct {
    char key[LOG_KEY];
    int64_t step;
    double value;
} LogResult;

typedef struct {
    char* directory;  // NULL: terminal only
    int fd;           // of log.jsonl, or -1
    int has_warned;   // about a failed write
    int is_terminal;  // stdout is a terminal: show the time left
    double started;   // when the first step of this process ended: it includes autotuning
    int64_t first;    // number of that step, 0 before it
    LossCurve train, validation;
    LogResult* results;
    size_t result_count, result_capacity;
} Log;

// One optimizer step of `steps`, counted from 1. mfu is a fraction; NaN or 0 if unknown.
typedef struct {
    int64_t step, steps;
    double loss, lr, grad_norm, seconds, tokens_per_second, mfu;
    double loss_scale;  // of the step's gradients; 0 if the loss is not scaled
    const char* note;   // text at the end of the terminal line, or NULL
    const char* extra;  // more members for log.jsonl, as in "\"mlm_loss\": 7.1, \"nsp_loss\": 0.6", or NULL
} LogStep;

// ---------------------------------------------------------------------------------------------------------
// The file

static inline void log_warn_once(Log* log, const char* file) {
    if (log->has_warned) return;
    warn("%s/%s: %s; the run continues, but its log may have gaps", log->directory, file, strerror(errno));
    log->has_warned = 1;
}

// Whether this key of a line is an evaluation result.
static inline int log_is_result(const char* key) {
    static const char* const ends[] = {"_acc", "_acc_norm", "_perplexity"};
    size_t n = strlen(key);
    int is = strncmp(key, "val_", 4) == 0 || strncmp(key, "ema_val_", 8) == 0 || strstr(key, "_at_");
    for (size_t i = 0; i < COUNT_OF(ends); i++)
        is = is || (n > strlen(ends[i]) && strcmp(key + n - strlen(ends[i]), ends[i]) == 0);
    return is && n < LOG_KEY;
}

// Keep the evaluation results of a line of log.jsonl.
static inline void log_keep_results(Log* log, const JsonNode* line) {
    const JsonNode* step = json_get(line, "step");
    for (const JsonNode* m = step && step->is_integer ? line->first : NULL; m; m = m->next) {
        size_t i = 0;
        if ((m->type != JSON_NUMBER && m->type != JSON_NULL) || !log_is_result(m->key)) continue;
        while (i < log->result_count && strcmp(log->results[i].key, m->key) != 0) i++;
        if (i == log->result_count) {
            log->results = (LogResult*)array_reserve(log->results, &log->result_capacity, i + 1, sizeof(LogResult));
            snprintf(log->results[i].key, LOG_KEY, "%s", m->key);
            log->result_count++;
        }
        log->results[i].step = step->integer;
        log->results[i].value = m->type == JSON_NULL ? NAN : m->number;  // null: it was not finite
    }
}

static inline void log_keep_line(Log* log, const Text* json) {
    Json parsed;
    char error[JSON_ERROR_SIZE];
    if (json_parse(&parsed, json->text, json->length, error) != 0) return;
    log_keep_results(log, parsed.root);
    json_free(&parsed);
}

// Keep the lines up to `last_step`, as if the run had stopped there, and read their losses.
static inline void log_cut_back(Log* log, const char* path, int64_t last_step) {
    size_t n;
    char error[JSON_ERROR_SIZE];
    char* text = read_file(path, SIZE_MAX, &n, FAILED);
    Text kept = {NULL, 0, 0};
    for (size_t start = 0, end; start < n; start = end) {
        const char* newline = (const char*)memchr(text + start, '\n', n - start);
        Json line;
        end = newline ? (size_t)(newline - text) + 1 : n;
        if (json_parse(&line, text + start, end - start, error) != 0) continue;  // torn by a kill or a full disk
        const JsonNode* step = json_get(line.root, "step");
        const JsonNode *loss = json_get(line.root, "loss"), *val_loss = json_get(line.root, "val_loss");
        if (newline && (!step || (step->is_integer && step->integer <= last_step))) {
            text_append(&kept, text + start, end - start);
            if (step && loss && loss->type == JSON_NUMBER) loss_curve_add(&log->train, step->integer, loss->number);
            if (step && val_loss && val_loss->type == JSON_NUMBER)
                loss_curve_add(&log->validation, step->integer, val_loss->number);
            log_keep_results(log, line.root);
        }
        json_free(&line);
    }
    Path temporary = path_of("%s.tmp", path);
    if (kept.length != n &&
        (write_file(temporary.text, kept.text, kept.length) != 0 || rename_into_place(temporary.text, path) != 0))
        die(FAILED, "%s: cannot be cut back to step %lld: %s", path, (long long)last_step, strerror(errno));
    free(kept.text);
    free(text);
}

// Whether the log has the result `key` of an evaluation after `step` steps.
static inline int log_has_result(const Log* log, const char* key, int64_t step) {
    for (size_t i = 0; i < log->result_count; i++)
        if (log->results[i].step == step && strcmp(log->results[i].key, key) == 0) return 1;
    return 0;
}

// Open OUT/log.jsonl: a new file if `resume_step` is -1, else the present one, cut back to that step. An `out_dir` of
// NULL or "" means no files.
static inline void log_open(Log* log, const char* out_dir, int64_t resume_step) {
    memset(log, 0, sizeof(*log));
    log->fd = -1;
    log->is_terminal = isatty(STDOUT_FILENO);
    if (!out_dir || !*out_dir) return;
    log->directory = xprintf("%s", out_dir);
    Path path = path_of("%s/log.jsonl", out_dir);
    if (make_directories(out_dir) == 0) {
        if (resume_step >= 0 && file_exists(path.text)) log_cut_back(log, path.text, resume_step);
        int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK | (resume_step < 0 ? O_TRUNC : 0);
        log->fd = open(path.text, flags, 0666);
    }
    int status = errno == ENOSPC || errno == EIO ? FAILED : USAGE;
    if (log->fd < 0)
        die(status, "%s: cannot be written: %s; give another directory with -o", path.text, strerror(errno));
}

// Also works for a zero-initialised Log that was never opened.
static inline void log_close(Log* log) {
    if (log->directory && log->fd >= 0) close(log->fd);
    free(log->directory);
    free(log->results);
    loss_curve_free(&log->train);
    loss_curve_free(&log->validation);
    memset(log, 0, sizeof(*log));
    log->fd = -1;
}

// Append one JSON object, given without a newline.
static inline void log_line(Log* log, const Text* json) {
    if (!strstr(json->text, "\"lr\":")) log_keep_line(log, json);  // a step's line has no results
    if (log->fd < 0) return;
    Text line = {NULL, 0, 0};
    text_append(&line, json->text, json->length);
    text_append(&line, "\n", 1);
    ssize_t put;
    do put = write(log->fd, line.text, line.length);
    while (put < 0 && errno == EINTR);
    if (put < 0 || (size_t)put < line.length) {
        // A full file system may accept part of a line. Remove that part, so that the next line does not continue it.
        struct stat st;
        if (put >= 0) errno = ENOSPC;
        log_warn_once(log, "log.jsonl");
        if (put > 0 && (fstat(log->fd, &st) != 0 || ftruncate(log->fd, st.st_size - (off_t)put) != 0)) {
            close(log->fd);
            log->fd = -1;
        }
    }
    free(line.text);
}

// A measured number with the given number of significant digits; null if it is not finite.
static inline void log_put(Text* t, const char* key, double x, int digits) {
    json_put_key(t, key);
    if (isfinite(x)) text_printf(t, "%.*g", digits, x);
    else text_append(t, "null", 4);
}

// ---------------------------------------------------------------------------------------------------------
// The terminal

static inline void format_duration(char out[32], double seconds) {
    long long s = seconds > 0 && seconds < 1e15 ? (long long)(seconds + 0.5) : 0;
    if (s >= 86400) snprintf(out, 32, "%lldd %02lld:%02lld h", s / 86400, s / 3600 % 24, s / 60 % 60);
    else if (s >= 3600) snprintf(out, 32, "%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
    else snprintf(out, 32, "%02lld:%02lld", s / 60, s % 60);
}

// "step   12/300", with the same width for every step.
static inline void log_print_step(int64_t step, int64_t steps) {
    int width = snprintf(NULL, 0, "%lld", (long long)steps);
    printf("step %*lld/%lld | ", width, (long long)step, (long long)steps);
}

static inline void log_step(Log* log, const LogStep* s) {
    loss_curve_add(&log->train, s->step, s->loss);
    if (log->first == 0) log->first = s->step, log->started = now_seconds();

    char speed[32], left[32];
    int is_sane = s->tokens_per_second > 0 && s->tokens_per_second < 1e15;
    format_count(speed, is_sane ? (int64_t)s->tokens_per_second : 0);
    log_print_step(s->step, s->steps);
    printf("loss %.*f | lr %.2e | norm %.*g | %.1f ms | %s tok/s", fabs(s->loss) < 1000 ? 4 : 0, plain_nan(s->loss),
           s->lr, fabs(s->grad_norm) < 1 ? 3 : 4, plain_nan(s->grad_norm), 1e3 * s->seconds, speed);
    if (s->mfu > 0) printf(" | mfu %.1f%%", 100 * s->mfu);
    if (log->is_terminal && s->step > log->first && s->step < s->steps) {
        double done = (double)(s->step - log->first);
        format_duration(left, (now_seconds() - log->started) / done * (double)(s->steps - s->step));
        printf(" | %s left", left);
    }
    printf("%s%s\n", s->note ? " | " : "", s->note ? s->note : "");
    fflush(stdout);

    Text t = {NULL, 0, 0};
    text_append(&t, "{", 1);
    json_put_integer(&t, "step", s->step);
    log_put(&t, "loss", s->loss, 9);
    log_put(&t, "lr", s->lr, 9);
    log_put(&t, "grad_norm", s->grad_norm, 9);
    log_put(&t, "ms", 1e3 * s->seconds, 6);
    log_put(&t, "tok_s", s->tokens_per_second, 6);
    log_put(&t, "mfu", s->mfu, 4);
    if (s->loss_scale > 0) log_put(&t, "loss_scale", s->loss_scale, 9);
    text_printf(&t, "%s%s}", s->extra ? ", " : "", s->extra ? s->extra : "");
    log_line(log, &t);
    free(t.text);
}

// A validation after `step` steps; 0: before the first one. `extra` is as in LogStep.
static inline void log_validation(Log* log, int64_t step, int64_t steps, double val_loss, const char* extra) {
    loss_curve_add(&log->validation, step, val_loss);
    log_print_step(step, steps);
    printf("val loss %.*f\n", fabs(val_loss) < 1000 ? 4 : 0, plain_nan(val_loss));
    fflush(stdout);
    Text t = {NULL, 0, 0};
    text_append(&t, "{", 1);
    json_put_integer(&t, "step", step);
    log_put(&t, "val_loss", val_loss, 9);
    text_printf(&t, "%s%s}", extra ? ", " : "", extra ? extra : "");
    log_line(log, &t);
    free(t.text);
}

#endif
