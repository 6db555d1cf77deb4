/* The plot of a run's losses as an SVG picture: training and validation against the step. */
#ifndef LLMC_CHECKPOINT_LOSS_SVG_H
#define LLMC_CHECKPOINT_LOSS_SVG_H

#include "llmc/base/log.h"
#include "llmc/base/utf8.h"

// From data to pixels: the plot area and the ranges of its axes.
typedef struct {
    double left, right, top, bottom;
    double x_min, x_max, y_min, y_max;
} LossAxes;

static inline double loss_svg_x(const LossAxes* a, double step) {
    return a->left + (a->right - a->left) * (step - a->x_min) / (a->x_max - a->x_min);
}

static inline double loss_svg_y(const LossAxes* a, double value) {
    return a->bottom - (a->bottom - a->top) * (value - a->y_min) / (a->y_max - a->y_min);
}

// The distance between ticks: 1, 2 or 5 times a power of ten, with about `parts` ticks in `range`.
static inline double loss_svg_tick(double range, int parts) {
    double rough = range / parts, power = pow(10, floor(log10(rough))), ratio = rough / power;
    return power * (ratio < 1.5 ? 1 : ratio < 3.5 ? 2 : ratio < 7.5 ? 5 : 10);
}

// Set ranges that hold both curves: x from the first step to the last, y from tick to tick. Returns the distance of the
// y ticks.
static inline double loss_svg_fit_axes(LossAxes* a, const LossCurve* train, const LossCurve* validation) {
    double x0 = INFINITY, x1 = -INFINITY, y0 = INFINITY, y1 = -INFINITY;
    const LossCurve* both[2] = {train, validation};
    for (int k = 0; k < 2; k++) {
        for (size_t i = 0; i < both[k]->count; i++) {
            x0 = fmin(x0, (double)both[k]->step[i]), x1 = fmax(x1, (double)both[k]->step[i]);
            y0 = fmin(y0, (double)both[k]->value[i]), y1 = fmax(y1, (double)both[k]->value[i]);
        }
    }
    if (x0 > x1) x0 = 0, x1 = 1, y0 = 0, y1 = 1;
    if (x0 > 0 && x0 < 0.05 * x1) x0 = 0;
    if (x0 == x1) x0 = fmax(0, x0 - 1), x1 += 1;
    double least = fmax(1e-6, 1e-2 * fmax(fabs(y0), fabs(y1)));  // do not magnify the rounding of a flat line
    if (y1 - y0 < least) y0 -= least / 2, y1 += least / 2;
    double step = loss_svg_tick(y1 - y0, 6);
    a->x_min = x0, a->x_max = x1;
    a->y_min = step * floor(y0 / step), a->y_max = step * ceil(y1 / step);
    return step;
}

// A line through the points. A curve with more points than pixels shows the lowest and the highest of each slice.
static inline void loss_svg_line(Text* t, const LossAxes* a, const LossCurve* s, const char* style) {
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
            text_printf(t, "%.1f,%.1f ", loss_svg_x(a, (double)s->step[pair[k]]),
                        loss_svg_y(a, (double)s->value[pair[k]]));
    }
    text_printf(t, "\"/>\n");
}

// A moving average over 1/25 of the run, narrower at its steep beginning.
static inline void loss_svg_mean(Text* t, const LossAxes* a, const LossCurve* s, const char* style) {
    double* sum = (double*)xmalloc((s->count + 1) * sizeof(double));
    LossCurve mean;
    memset(&mean, 0, sizeof(mean));
    sum[0] = 0;
    for (size_t i = 0; i < s->count; i++) sum[i + 1] = sum[i] + (double)s->value[i];
    for (size_t i = 0; i < s->count; i++) {
        size_t reach = min_size(s->count / 50, i), end = min_size(i + reach + 1, s->count);
        loss_curve_add(&mean, s->step[i], (sum[end] - sum[i - reach]) / (double)(end - i + reach));
    }
    loss_svg_line(t, a, &mean, style);
    free(mean.step);
    free(mean.value);
    free(sum);
}

static inline void loss_svg_text(Text* t, double x, double y, const char* style, const char* text) {
    text_printf(t, "<text x=\"%.1f\" y=\"%.1f\" %s>", x, y, style);
    for (size_t i = 0, n = strlen(text), bytes; i < n; i += bytes ? bytes : 1) {
        unsigned char c = (unsigned char)text[i];
        bytes = utf8_length(text + i, n - i);
        if (bytes == 0 || c < 0x20) text_append(t, "?", 1);
        else if (c == '<' || c == '&') text_printf(t, "&#%d;", c);
        else text_append(t, text + i, bytes);
    }
    text_printf(t, "</text>\n");
}

// A legend entry: the curve's name and its last value. Returns the x where it ends.
static inline double loss_svg_legend(Text* t, double x, const char* name, const char* color, double dot,
                                     const LossCurve* s) {
    char label[64];
    int n = snprintf(label, sizeof(label), "%s %.4g", name, (double)s->value[s->count - 1]);
    text_printf(t, "<path d=\"M%.0f 52h20\" stroke=\"%s\" stroke-width=\"2\"/>\n", x, color);
    text_printf(t, "<circle cx=\"%.0f\" cy=\"52\" r=\"%g\" fill=\"%s\"/>\n", x + 10, dot, color);
    loss_svg_text(t, x + 27, 56, "font-size=\"13\" fill=\"#444\"", label);
    return x + 27 + 7.2 * n + 20;
}

// The whole picture, 800 x 480 pixels, as SVG text.
static inline void loss_svg(Text* t, const LossCurve* train, const LossCurve* validation, const char* title) {
    static const char blue[] = "#2f6fb5", orange[] = "#e2711d";
    // For readers whose colour scheme is dark, each colour has a replacement.
    static const char dark[] =
        "<style>@media (prefers-color-scheme: dark) {\n"
        "[fill='#fff'] { fill: #0d1117 } [stroke='#fff'] { stroke: #0d1117 } [fill='#222'] { fill: #e6edf3 }\n"
        "[fill='#444'] { fill: #e6edf3 } [fill='#666'] { fill: #9198a1 } [stroke='#999'] { stroke: #6e7681 }\n"
        "[stroke='#e9e9e9'] { stroke: #262c36 } [stroke='#2f6fb5'] { stroke: #5ea9f5 }\n"
        "[fill='#2f6fb5'] { fill: #5ea9f5 } [stroke='#e2711d'] { stroke: #f0883e }\n"
        "[fill='#e2711d'] { fill: #f0883e } }</style>\n";
    LossAxes a = {.left = 80, .right = 760, .top = 76, .bottom = 424, .x_min = 0, .x_max = 1, .y_min = 0, .y_max = 1};
    double y_step = loss_svg_fit_axes(&a, train, validation);
    double x_step = fmax(1, loss_svg_tick(a.x_max - a.x_min, a.x_max < 1e5 ? 8 : 5));
    char label[64], style[128];

    text_printf(t,
                "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"800\" height=\"480\" viewBox=\"0 0 800 480\" "
                "font-family=\"system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\">\n"
                "%s<rect width=\"800\" height=\"480\" fill=\"#fff\"/>\n",
                dark);
    loss_svg_text(t, a.left, 32, "font-size=\"17\" font-weight=\"600\" fill=\"#222\"", title);

    int decimals = max_int(0, (int)-floor(log10(y_step) + 1e-9)), is_plain = a.y_max < 1e6 && decimals <= 6;
    for (int k = 0; a.y_min + k * y_step < a.y_max + 0.5 * y_step; k++) {
        double value = a.y_min + k * y_step, y = loss_svg_y(&a, value);
        text_printf(t, "<path d=\"M%.0f %.1fH%.0f\" stroke=\"%s\"/>\n", a.left, y, a.right, k ? "#e9e9e9" : "#999");
        snprintf(label, sizeof(label), is_plain ? "%.*f" : "%.*g", is_plain ? decimals : 3, value);
        loss_svg_text(t, a.left - 10, y + 4.5, "font-size=\"13\" fill=\"#666\" text-anchor=\"end\"", label);
    }
    for (int64_t k = (int64_t)ceil(a.x_min / x_step); (double)k * x_step <= a.x_max; k++) {
        double x = loss_svg_x(&a, (double)k * x_step);
        text_printf(t, "<path d=\"M%.1f %.0fv5\" stroke=\"#999\"/>\n", x, a.bottom);
        format_count(label, (int64_t)llround((double)k * x_step));
        loss_svg_text(t, x, a.bottom + 21, "font-size=\"13\" fill=\"#666\" text-anchor=\"middle\"", label);
    }
    loss_svg_text(t, (a.left + a.right) / 2, 468, "font-size=\"13\" fill=\"#444\" text-anchor=\"middle\"", "step");
    const char* upright = "font-size=\"13\" fill=\"#444\" text-anchor=\"middle\" transform=\"rotate(-90 16 250)\"";
    loss_svg_text(t, 16, 250, upright, "loss");

    double legend = a.left;
    if (train->count) {
        int is_noisy = train->count >= 100;  // enough points for an average to be clearer than the points
        snprintf(style, sizeof(style), "stroke=\"%s\" stroke-width=\"%s\" stroke-opacity=\"%s\"", blue,
                 is_noisy ? "1" : "1.5", is_noisy ? "0.35" : "1");
        loss_svg_line(t, &a, train, style);
        snprintf(style, sizeof(style), "stroke=\"%s\" stroke-width=\"1.8\"", blue);
        if (is_noisy) loss_svg_mean(t, &a, train, style);
        if (train->count == 1)
            text_printf(t, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>\n",
                        loss_svg_x(&a, (double)train->step[0]), loss_svg_y(&a, (double)train->value[0]), blue);
        legend = loss_svg_legend(t, legend, "training", blue, 1, train);
    }
    if (validation->count) {
        snprintf(style, sizeof(style), "stroke=\"%s\" stroke-width=\"1.8\"", orange);
        loss_svg_line(t, &a, validation, style);
        for (size_t i = 0; i < validation->count && validation->count <= 200; i++)
            text_printf(t, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"%s\" fill=\"%s\" stroke=\"#fff\"/>\n",
                        loss_svg_x(&a, (double)validation->step[i]), loss_svg_y(&a, (double)validation->value[i]),
                        validation->count <= 60 ? "4" : "2.5", orange);
        legend = loss_svg_legend(t, legend, "validation", orange, 4, validation);
    }
    if (legend == a.left) loss_svg_text(t, legend, 56, "font-size=\"13\" fill=\"#444\"", "no loss has been logged");
    text_printf(t, "</svg>\n");
}

// Write OUT/loss.svg, or replace it.
static inline void log_write_svg(Log* log, const char* title) {
    if (!log->directory) return;
    Text t = {NULL, 0, 0};
    loss_svg(&t, &log->train, &log->validation, title);
    Path path = path_of("%s/loss.svg", log->directory);
    Path temporary = path_of("%s.tmp", path.text);
    if (write_file(temporary.text, t.text, t.length) != 0 || rename_into_place(temporary.text, path.text) != 0) {
        log_warn_once(log, "loss.svg");
        unlink(temporary.text);
    }
    free(t.text);
}

#endif
