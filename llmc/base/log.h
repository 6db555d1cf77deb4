/* What a run tells: a line a step on the terminal, OUT/log.jsonl for programs, OUT/loss.svg for eyes.
 *
 * log.jsonl holds one JSON object a line. Lines without "step" describe the run (its settings); the others are
 * {"step", "loss", "lr", "grad_norm", "ms", "tok_s", "mfu"}, with "loss_scale" where the loss is scaled, and
 * {"step", "val_loss"}, and {"step", "checkpoint_ms", "checkpoint_write_s", "checkpoint_gb_s", "checkpoint_wait_ms"} when a
 * checkpoint of that step is on the disk: what the run lost by it, how long it was written and how fast, and what of the
 * loss was waiting for the end of the writing, with "weights_hash" where several ranks were found to hold the same weights. A line is one write(), so that a killed run leaves whole lines; what is not
 * finite is null. A resumed run cuts the file back to the step of its checkpoint and goes on behind it. A disk that is full
 * costs log lines and one warning, not the run.
 *
 * With several ranks only one opens a log. */
#ifndef LLMC_LOG_H
#define LLMC_LOG_H

#include "json.h"

typedef struct {
    int64_t* step;
    float* value;
    size_t count, capacity;
} LogSeries;

// How far a stage is, on a terminal's line that is written over.
typedef struct {
    int is_on;            // a stage has begun
    int is_shown;         // the line is there
    double first, begun;  // what was done when the stage was first seen, and when that was
    double last, at;      // what was done when it was last seen, and when the line was last written
} LogProgress;

typedef struct {
    char* directory;  // NULL: terminal only
    int fd;           // of log.jsonl, or -1
    int has_warned;   // about a write that failed
    int is_terminal;  // stdout is one: show the time left
    double started;   // when the first step of this process began
    int64_t first;    // that step, 0 before it
    LogSeries train, validation;
    LogProgress progress;
} Log;

// One optimizer step, counted from 1, of `steps`. mfu is a fraction; NaN or 0 where it is not known.
typedef struct {
    int64_t step, steps;
    double loss, lr, grad_norm, seconds, tokens_per_second, mfu;
    double loss_scale;  // that the step's gradients carried; 0 where the loss is not scaled
    const char* note;   // the end of the terminal's line, or NULL
    const char* extra;  // more members for log.jsonl, as in "\"mlm_loss\": 7.1, \"nsp_loss\": 0.6", or NULL
} LogStep;

// ---------------------------------------------------------------------------------------------------------
// Losses in memory

// What is not finite is left out of the plot, and steps of a damaged log that no run makes: the axes are of doubles.
static inline void log_series_add(LogSeries* s, int64_t step, double value) {
    if (!isfinite((float)value) || step < 0 || step > (int64_t)1 << 53) return;
    if (s->count == s->capacity) {
        s->capacity = s->capacity ? 2 * s->capacity : 256;
        s->step = (int64_t*)xrealloc(s->step, s->capacity * sizeof(int64_t));
        s->value = (float*)xrealloc(s->value, s->capacity * sizeof(float));
    }
    s->step[s->count] = step;
    s->value[s->count++] = (float)value;
}

// ---------------------------------------------------------------------------------------------------------
// The file

static inline void log_warn_once(Log* log, const char* file) {
    if (log->has_warned) return;
    warn("%s/%s: %s; the run goes on, its log may have gaps", log->directory, file, strerror(errno));
    log->has_warned = 1;
}

// Keep what a run that stopped after `last_step` would have written; take its losses into memory.
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
            if (step && loss && loss->type == JSON_NUMBER) log_series_add(&log->train, step->integer, loss->number);
            if (step && val_loss && val_loss->type == JSON_NUMBER)
                log_series_add(&log->validation, step->integer, val_loss->number);
        }
        json_free(&line);
    }
    char* temporary = xprintf("%s.tmp", path);
    if (kept.length != n && (write_file(temporary, kept.text, kept.length) != 0 || rename(temporary, path) != 0))
        die(FAILED, "%s: cannot be cut back to step %lld: %s", path, (long long)last_step, strerror(errno));
    free(temporary);
    free(kept.text);
    free(text);
}

// Open OUT/log.jsonl: a fresh one where `resume_step` is -1, else cut back to it. An `out_dir` of NULL or "" means
// no files.
static inline void log_open(Log* log, const char* out_dir, int64_t resume_step) {
    memset(log, 0, sizeof(*log));
    log->fd = -1;
    log->is_terminal = isatty(STDOUT_FILENO);
    if (!out_dir || !*out_dir) return;
    log->directory = xprintf("%s", out_dir);
    char* path = xprintf("%s/log.jsonl", out_dir);
    if (make_directories(out_dir) == 0) {
        if (resume_step >= 0 && file_exists(path)) log_cut_back(log, path, resume_step);
        log->fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | (resume_step < 0 ? O_TRUNC : 0), 0666);
    }
    int status = errno == ENOSPC || errno == EIO ? FAILED : USAGE;
    if (log->fd < 0) die(status, "%s: cannot be written: %s; give another directory with -o", path, strerror(errno));
    free(path);
}

// Also of a log that is zero: it was never opened.
static inline void log_close(Log* log) {
    if (log->directory && log->fd >= 0) close(log->fd);
    free(log->directory);
    free(log->train.step);
    free(log->train.value);
    free(log->validation.step);
    free(log->validation.value);
    memset(log, 0, sizeof(*log));
    log->fd = -1;
}

// Append one JSON object, given without newline.
static inline void log_line(Log* log, const Text* json) {
    if (log->fd < 0) return;
    Text line = {NULL, 0, 0};
    text_append(&line, json->text, json->length);
    text_append(&line, "\n", 1);
    ssize_t put;
    do put = write(log->fd, line.text, line.length);
    while (put < 0 && errno == EINTR);
    if (put < 0 || (size_t)put < line.length) {
        // A file system that is full may take the first part of a line: the next line must not grow on it.
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

// A measured number: as many digits as it is worth, null where it is not finite.
static inline void log_put(Text* t, const char* key, double x, int digits) {
    json_put_key(t, key);
    if (isfinite(x)) text_printf(t, "%.*g", digits, x);
    else text_append(t, "null", 4);
}

// ---------------------------------------------------------------------------------------------------------
// The terminal

// 1234567 -> 1,234,567
static inline void log_format_count(char out[32], int64_t n) {
    char digits[24];
    int length = snprintf(digits, sizeof(digits), "%lld", (long long)n), at = 0;
    for (int i = 0; i < length; i++) {
        out[at++] = digits[i];
        if (digits[i] != '-' && i + 1 < length && (length - 1 - i) % 3 == 0) out[at++] = ',';
    }
    out[at] = '\0';
}

static inline void log_format_duration(char out[32], double seconds) {
    long long s = seconds > 0 && seconds < 1e15 ? (long long)(seconds + 0.5) : 0;
    if (s >= 86400) snprintf(out, 32, "%lldd %02lld:%02lld h", s / 86400, s / 3600 % 24, s / 60 % 60);
    else if (s >= 3600) snprintf(out, 32, "%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
    else snprintf(out, 32, "%02lld:%02lld", s / 60, s % 60);
}

// At `now` so much of `all` is done; less than before is a stage that begins, all is its end. Says nothing of what is over
// in half a second, and then twice a second.
static inline void log_progress(LogProgress* p, FILE* out, const char* what, double done, double all, double now) {
    char left[32];
    if (!p->is_on || done < p->last) {
        LogProgress begins = {1, p->is_shown, done, now, done, now};
        *p = begins;
    }
    p->last = done;
    if (done >= all) {
        if (p->is_shown) fprintf(out, "\r\033[K"), fflush(out);
        p->is_on = p->is_shown = 0;
        return;
    }
    if (now - p->at < 0.5 || done <= p->first) return;
    log_format_duration(left, (now - p->begun) * (all - done) / (done - p->first));
    fprintf(out, "\r%s: %.1f %%, %s left\033[K", what, 100 * done / all, left);
    fflush(out);
    p->at = now, p->is_shown = 1;
}

// "step   12/300", as wide for every step.
static inline void log_print_step(int64_t step, int64_t steps) {
    int width = snprintf(NULL, 0, "%lld", (long long)steps);
    printf("step %*lld/%lld | ", width, (long long)step, (long long)steps);
}

static inline void log_step(Log* log, const LogStep* s) {
    log_series_add(&log->train, s->step, s->loss);
    if (log->first == 0) log->first = s->step, log->started = now_seconds() - s->seconds;

    char speed[32], left[32];
    int is_sane = s->tokens_per_second > 0 && s->tokens_per_second < 1e15;
    log_format_count(speed, is_sane ? (int64_t)s->tokens_per_second : 0);
    log_print_step(s->step, s->steps);
    printf("loss %.*f | lr %.2e | norm %.*g | %.1f ms | %s tok/s", fabs(s->loss) < 1000 ? 4 : 0, plain_nan(s->loss),
           s->lr, fabs(s->grad_norm) < 1 ? 3 : 4, plain_nan(s->grad_norm), 1e3 * s->seconds, speed);
    if (s->mfu > 0) printf(" | mfu %.1f%%", 100 * s->mfu);
    if (log->is_terminal && s->step < s->steps) {
        double done = (double)(s->step - log->first + 1);
        log_format_duration(left, (now_seconds() - log->started) / done * (double)(s->steps - s->step));
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

// Validation after `step` steps; 0 is before the first. `extra` as in LogStep.
static inline void log_validation(Log* log, int64_t step, int64_t steps, double val_loss, const char* extra) {
    log_series_add(&log->validation, step, val_loss);
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

// ---------------------------------------------------------------------------------------------------------
// The plot

// From data to pixels: the plot area and the ranges that it shows.
typedef struct {
    double left, right, top, bottom;
    double x_min, x_max, y_min, y_max;
} LogAxes;

static inline double log_x(const LogAxes* a, double step) {
    return a->left + (a->right - a->left) * (step - a->x_min) / (a->x_max - a->x_min);
}

static inline double log_y(const LogAxes* a, double value) {
    return a->bottom - (a->bottom - a->top) * (value - a->y_min) / (a->y_max - a->y_min);
}

// 1, 2 or 5 times a power of ten, so that about `parts` of it make up `range`.
static inline double log_nice_step(double range, int parts) {
    double rough = range / parts, power = pow(10, floor(log10(rough))), ratio = rough / power;
    return power * (ratio < 1.5 ? 1 : ratio < 3.5 ? 2 : ratio < 7.5 ? 5 : 10);
}

// The ranges that hold both series: from the first step to the last, losses from tick to tick. Returns their step.
static inline double log_fit_axes(LogAxes* a, const LogSeries* train, const LogSeries* validation) {
    double x0 = INFINITY, x1 = -INFINITY, y0 = INFINITY, y1 = -INFINITY;
    const LogSeries* both[2] = {train, validation};
    for (int k = 0; k < 2; k++) {
        for (size_t i = 0; i < both[k]->count; i++) {
            x0 = fmin(x0, (double)both[k]->step[i]), x1 = fmax(x1, (double)both[k]->step[i]);
            y0 = fmin(y0, (double)both[k]->value[i]), y1 = fmax(y1, (double)both[k]->value[i]);
        }
    }
    if (x0 > x1) x0 = 0, x1 = 1, y0 = 0, y1 = 1;
    if (x0 > 0 && x0 < 0.05 * x1) x0 = 0;
    if (x0 == x1) x0 = fmax(0, x0 - 1), x1 += 1;
    double least = fmax(1e-6, 1e-2 * fmax(fabs(y0), fabs(y1)));  // a flat line is no reason to magnify rounding
    if (y1 - y0 < least) y0 -= least / 2, y1 += least / 2;
    double step = log_nice_step(y1 - y0, 6);
    a->x_min = x0, a->x_max = x1;
    a->y_min = step * floor(y0 / step), a->y_max = step * ceil(y1 / step);
    return step;
}

// A line through the points; of a series too long for the screen, the lowest and the highest of each slice.
static inline void log_svg_line(Text* t, const LogAxes* a, const LogSeries* s, const char* style) {
    size_t slice = s->count <= 1500 ? 1 : (s->count + 699) / 700;
    text_printf(t, "<polyline fill=\"none\" stroke-linejoin=\"round\" stroke-linecap=\"round\" %s points=\"", style);
    for (size_t start = 0; start < s->count; start += slice) {
        size_t low = start, high = start, end = min_size(start + slice, s->count);
        for (size_t i = start; i < end; i++) {
            if (s->value[i] < s->value[low]) low = i;
            if (s->value[i] > s->value[high]) high = i;
        }
        size_t pair[2] = {min_size(low, high), low + high - min_size(low, high)};
        for (int k = 0; k < (low == high ? 1 : 2); k++)
            text_printf(t, "%.1f,%.1f ", log_x(a, (double)s->step[pair[k]]), log_y(a, (double)s->value[pair[k]]));
    }
    text_printf(t, "\"/>\n");
}

// A mean over a twenty-fifth of the run, narrower at its steep beginning: what the eye looks for in a noisy line.
static inline void log_svg_mean(Text* t, const LogAxes* a, const LogSeries* s, const char* style) {
    double* sum = (double*)xmalloc((s->count + 1) * sizeof(double));
    LogSeries mean;
    memset(&mean, 0, sizeof(mean));
    sum[0] = 0;
    for (size_t i = 0; i < s->count; i++) sum[i + 1] = sum[i] + (double)s->value[i];
    for (size_t i = 0; i < s->count; i++) {
        size_t reach = min_size(s->count / 50, i), end = min_size(i + reach + 1, s->count);
        log_series_add(&mean, s->step[i], (sum[end] - sum[i - reach]) / (double)(end - i + reach));
    }
    log_svg_line(t, a, &mean, style);
    free(mean.step);
    free(mean.value);
    free(sum);
}

static inline void log_svg_text(Text* t, double x, double y, const char* style, const char* text) {
    text_printf(t, "<text x=\"%.1f\" y=\"%.1f\" %s>", x, y, style);
    for (size_t i = 0, n = strlen(text), bytes; i < n; i += bytes ? bytes : 1) {
        unsigned char c = (unsigned char)text[i];
        bytes = utf8_sequence(text + i, n - i);
        if (bytes == 0 || c < 0x20) text_append(t, "?", 1);
        else if (c == '<' || c == '&') text_printf(t, "&#%d;", c);
        else text_append(t, text + i, bytes);
    }
    text_printf(t, "</text>\n");
}

// The legend names what is there and its last value. Returns where it ends.
static inline double log_svg_legend(Text* t, double x, const char* name, const char* color, double dot,
                                    const LogSeries* s) {
    char label[64];
    int n = snprintf(label, sizeof(label), "%s %.4g", name, (double)s->value[s->count - 1]);
    text_printf(t, "<path d=\"M%.0f 52h20\" stroke=\"%s\" stroke-width=\"2\"/>\n", x, color);
    text_printf(t, "<circle cx=\"%.0f\" cy=\"52\" r=\"%g\" fill=\"%s\"/>\n", x + 10, dot, color);
    log_svg_text(t, x + 27, 56, "font-size=\"13\" fill=\"#444\"", label);
    return x + 27 + 7.2 * n + 20;
}

// The whole picture, 800 x 480, as text.
static inline void log_svg(Text* t, const LogSeries* train, const LogSeries* validation, const char* title) {
    static const char blue[] = "#2f6fb5", orange[] = "#e2711d";
    LogAxes a = {80, 760, 76, 424, 0, 1, 0, 1};
    double y_step = log_fit_axes(&a, train, validation);
    double x_step = fmax(1, log_nice_step(a.x_max - a.x_min, a.x_max < 1e5 ? 8 : 5));
    char label[64], style[128];

    text_printf(t, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"800\" height=\"480\" viewBox=\"0 0 800 480\" "
                   "font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\">\n"
                   "<rect width=\"800\" height=\"480\" fill=\"#fff\"/>\n");
    log_svg_text(t, a.left, 32, "font-size=\"17\" font-weight=\"600\" fill=\"#222\"", title);

    int decimals = max_int(0, (int)-floor(log10(y_step) + 1e-9)), is_plain = a.y_max < 1e6 && decimals <= 6;
    for (int k = 0; a.y_min + k * y_step < a.y_max + 0.5 * y_step; k++) {
        double value = a.y_min + k * y_step, y = log_y(&a, value);
        text_printf(t, "<path d=\"M%.0f %.1fH%.0f\" stroke=\"%s\"/>\n", a.left, y, a.right, k ? "#e9e9e9" : "#999");
        snprintf(label, sizeof(label), is_plain ? "%.*f" : "%.*g", is_plain ? decimals : 3, value);
        log_svg_text(t, a.left - 10, y + 4.5, "font-size=\"13\" fill=\"#666\" text-anchor=\"end\"", label);
    }
    for (int64_t k = (int64_t)ceil(a.x_min / x_step); (double)k * x_step <= a.x_max; k++) {
        double x = log_x(&a, (double)k * x_step);
        text_printf(t, "<path d=\"M%.1f %.0fv5\" stroke=\"#999\"/>\n", x, a.bottom);
        log_format_count(label, (int64_t)llround((double)k * x_step));
        log_svg_text(t, x, a.bottom + 21, "font-size=\"13\" fill=\"#666\" text-anchor=\"middle\"", label);
    }
    log_svg_text(t, (a.left + a.right) / 2, 468, "font-size=\"13\" fill=\"#444\" text-anchor=\"middle\"", "step");
    const char* upright = "font-size=\"13\" fill=\"#444\" text-anchor=\"middle\" transform=\"rotate(-90 16 250)\"";
    log_svg_text(t, 16, 250, upright, "loss");

    double legend = a.left;
    if (train->count) {
        int is_noisy = train->count >= 100;  // enough points for a mean to say more than they do
        snprintf(style, sizeof(style), "stroke=\"%s\" stroke-width=\"%s\" stroke-opacity=\"%s\"", blue,
                 is_noisy ? "1" : "1.5", is_noisy ? "0.35" : "1");
        log_svg_line(t, &a, train, style);
        snprintf(style, sizeof(style), "stroke=\"%s\" stroke-width=\"1.8\"", blue);
        if (is_noisy) log_svg_mean(t, &a, train, style);
        if (train->count == 1)
            text_printf(t, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>\n", log_x(&a, (double)train->step[0]),
                        log_y(&a, (double)train->value[0]), blue);
        legend = log_svg_legend(t, legend, "training", blue, 1, train);
    }
    if (validation->count) {
        snprintf(style, sizeof(style), "stroke=\"%s\" stroke-width=\"1.8\"", orange);
        log_svg_line(t, &a, validation, style);
        for (size_t i = 0; i < validation->count && validation->count <= 200; i++)
            text_printf(t, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"%s\" fill=\"%s\" stroke=\"#fff\"/>\n",
                        log_x(&a, (double)validation->step[i]), log_y(&a, (double)validation->value[i]),
                        validation->count <= 60 ? "4" : "2.5", orange);
        legend = log_svg_legend(t, legend, "validation", orange, 4, validation);
    }
    if (legend == a.left) log_svg_text(t, legend, 56, "font-size=\"13\" fill=\"#444\"", "no loss has been logged");
    text_printf(t, "</svg>\n");
}

// Write OUT/loss.svg, replacing the one before.
static inline void log_write_svg(Log* log, const char* title) {
    if (!log->directory) return;
    Text t = {NULL, 0, 0};
    log_svg(&t, &log->train, &log->validation, title);
    char* path = xprintf("%s/loss.svg", log->directory);
    char* temporary = xprintf("%s.tmp", path);
    if (write_file(temporary, t.text, t.length) != 0 || rename(temporary, path) != 0) {
        log_warn_once(log, "loss.svg");
        unlink(temporary);
    }
    free(temporary);
    free(path);
    free(t.text);
}

#endif
