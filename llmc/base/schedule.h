/* Learning rate as a function of the step.
 *
 * Step s counts from 0, S = `total` steps, W = `warmup` of them, p = `peak`, f = final_fraction * p.
 *
 *   warm-up   s < W:  p * (s + 1) / W                          step 0 is above 0, step W - 1 has the peak
 *   then, with r = (s - W) / (S - W):
 *   cosine    f + (p - f) * (1 + cos(pi r)) / 2                Loshchilov and Hutter, "SGDR", 2016
 *   linear    f + (p - f) * (1 - r)
 *   constant  p
 *   wsd       p, and over the last part of length D = 0.2 * S, as in llm.c
 *             f + (p - f) * (1 - sqrt(r')),  r' = (s - (S - D)) / D
 *                                                              warm-up, stable, decay: Hu et al., "MiniCPM", 2024;
 *                                                              this decay: Haegele et al., "Scaling laws and compute-
 *                                                              optimal training beyond fixed training durations", 2024
 *   poly      f + (p - f) * (1 - s / S)^power                  s / S counts the warm-up, so that the rate drops at
 *                                                              its end: NVIDIA's BERT recipe, power 0.5, f = 0
 *
 * All but constant are f from s = S on; the last step of a run, S - 1, is one step before that, as in llm.c and
 * nanoGPT. */
#ifndef LLMC_BASE_SCHEDULE_H
#define LLMC_BASE_SCHEDULE_H

#include "llmc/base/util.h"

typedef enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD, SCHEDULE_POLY } ScheduleKind;

// The names in that order, for a flag of type FLAG_CHOICE.
#define SCHEDULE_CHOICES "cosine|linear|constant|wsd|poly"
#define SCHEDULE_WSD_DECAY 0.2

typedef struct {
    ScheduleKind kind;
    double peak;
    int64_t warmup, total;
    double final_fraction;
    double power;  // poly
} Schedule;

static inline double schedule_at(const Schedule* s, int64_t step) {
    double final_rate = s->final_fraction * s->peak, drop = s->peak - final_rate;
    if (step < s->warmup) return s->peak * (double)(step + 1) / (double)s->warmup;
    if (s->kind == SCHEDULE_CONSTANT) return s->peak;
    if (step >= s->total) return final_rate;
    double r = (double)(step - s->warmup) / (double)(s->total - s->warmup);
    if (s->kind == SCHEDULE_COSINE) return final_rate + drop * 0.5 * (1 + cos(3.14159265358979323846 * r));
    if (s->kind == SCHEDULE_LINEAR) return final_rate + drop * (1 - r);
    if (s->kind == SCHEDULE_POLY) return final_rate + drop * pow(1 - (double)step / (double)s->total, s->power);
    CHECK(s->kind == SCHEDULE_WSD);
    double decay = SCHEDULE_WSD_DECAY * (double)s->total, into = (double)step - ((double)s->total - decay);
    return into <= 0 ? s->peak : final_rate + drop * (1 - sqrt(into / decay));
}

#endif
