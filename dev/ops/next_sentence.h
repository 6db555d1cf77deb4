/* Cases of next_sentence: one block and many, ignored labels, ties, sure predictions, a loss scale on the device. */
#ifndef DEV_OPS_NEXT_SENTENCE_H
#define DEV_OPS_NEXT_SENTENCE_H

#include "harness.h"
#include "llmc/bert/next_sentence.h"

typedef struct {
    Array pre, w, b, logits, loss, correct, dw, db, dbias;
    Array loss_scale;  // [1], or none
    int* labels;
    int S, C;
    double scale;
    Mode mode;
    Context* ctx;
} NextSentenceCase;

// Call after case_begin(). Every fourth label is ignored, but for the first.
static inline NextSentenceCase* next_sentence_case(Harness* h, int S, int C, Mode mode) {
    NextSentenceCase* k = (NextSentenceCase*)case_memory(h, sizeof *k);
    k->pre = input(h, (size_t)S * (size_t)C, 1);
    k->w = input(h, 2 * (size_t)C, 1 / sqrt(C));
    k->b = input(h, 2, 1);
    k->labels = int_array(h, (size_t)S);
    k->logits = output(h, 2 * (size_t)S, SET);
    k->loss = output(h, 1, mode), k->correct = output(h, 1, mode);
    k->dw = output(h, 2 * (size_t)C, mode), k->db = output(h, 2, mode), k->dbias = output(h, (size_t)C, mode);
    k->S = S, k->C = C, k->scale = 0.25, k->mode = mode, k->ctx = &h->ctx;
    for (int s = 0; s < S; s++) k->labels[s] = s % 4 == 3 ? -1 : random_below(h, 2);
    return k;
}

static inline NextSentenceLoss next_sentence_device(const NextSentenceCase* k) {
    NextSentenceLoss out = {.logits = k->logits.device_real,
                            .loss = k->loss.device_real,
                            .correct = k->correct.device_real,
                            .labels = k->labels,
                            .scale = k->scale,
                            .loss_scale = k->loss_scale.device_real};
    return out;
}

static inline NextSentenceLoss next_sentence_host(const NextSentenceCase* k, real* logits, real* loss, real* correct) {
    NextSentenceLoss out = {.logits = logits,
                            .loss = loss,
                            .correct = correct,
                            .labels = k->labels,
                            .scale = k->scale,
                            .loss_scale = k->loss_scale.host};
    return out;
}

static inline NextSentenceGrads next_sentence_grads(real* dw, real* db, real* dbias) {
    NextSentenceGrads g = {.d = {.w = dw, .b = db}, .dbias = dbias};
    return g;
}

static inline void next_sentence_run_forward(void* state) {
    NextSentenceCase* k = (NextSentenceCase*)state;
    Linear p = {k->w.device, k->b.device};
    next_sentence_forward(next_sentence_device(k), k->pre.device, p, k->S, k->C, k->mode, k->ctx);
}

static inline void next_sentence_run_backward(void* state) {
    NextSentenceCase* k = (NextSentenceCase*)state;
    Linear p = {k->w.device, k->b.device};
    NextSentenceGrads g = next_sentence_grads(k->dw.device_real, k->db.device_real, k->dbias.device_real);
    next_sentence_backward(k->pre.device, g, next_sentence_device(k), p, k->S, k->C, k->mode, k->ctx);
}

// The sum of absolute values behind each result. An error of the logits reaches a gradient a quarter as large at most.
// What fp16 stores below its smallest normal number is correct to the spacing of the numbers that follow it.
typedef struct {
    real *logits, *loss, *dpre, *dw, *db, *dbias;
} NextSentenceMagnitudes;

static inline NextSentenceMagnitudes next_sentence_magnitudes(Harness* h, const NextSentenceCase* k) {
    size_t C = (size_t)k->C;
#ifdef PRECISION_FP16
    const double smallest = 6.2e-5;
#else
    const double smallest = 0;
#endif
    double factor = k->scale * (k->loss_scale.n ? (double)k->loss_scale.host[0] : 1);
    NextSentenceMagnitudes m = {copy_of(h, k->logits), copy_of(h, k->loss), copy_of(h, k->pre),
                                copy_of(h, k->dw),     copy_of(h, k->db),   copy_of(h, k->dbias)};
    real* sums[] = {m.loss, m.dw, m.db, m.dbias};
    const size_t sizes[] = {1, 2 * C, 2, C};
    for (size_t i = 0; i < COUNT_OF(sums); i++)
        for (size_t j = 0; j < sizes[i]; j++) sums[i][j] = k->mode == ADD ? (real)fabs((double)sums[i][j]) : 0;
    for (size_t s = 0; s < (size_t)k->S; s++) {
        double row[2] = {fabs((double)k->b.host[0]), fabs((double)k->b.host[1])};
        for (size_t c = 0; c < C; c++) {
            double t = fabs(tanh((double)k->pre.host[s * C + c]));
            double dpre = factor * (fabs((double)k->w.host[c]) + fabs((double)k->w.host[C + c]));
            for (size_t j = 0; j < 2; j++) {
                row[j] += t * fabs((double)k->w.host[j * C + c]);
                m.dw[j * C + c] += (real)(factor * t);
            }
            m.dpre[s * C + c] = (real)fmax(dpre, smallest);
            m.dbias[c] += (real)dpre;
        }
        m.logits[2 * s] = (real)row[0], m.logits[2 * s + 1] = (real)row[1];
        *m.loss += (real)(k->scale * (1 + row[0] + row[1]));
        m.db[0] += (real)factor, m.db[1] += (real)factor;
    }
    return m;
}

static inline void next_sentence_check(Harness* h, NextSentenceCase* k) {
    NextSentenceMagnitudes size = next_sentence_magnitudes(h, k);
    real *logits = copy_of(h, k->logits), *loss = copy_of(h, k->loss), *correct = copy_of(h, k->correct);
    real *dpre = copy_of(h, k->pre), *dw = copy_of(h, k->dw), *db = copy_of(h, k->db), *dbias = copy_of(h, k->dbias);
    next_sentence_forward_ref(next_sentence_host(k, logits, loss, correct), NULL, k->pre.host, k->w.host, k->b.host,
                              k->S, k->C, k->mode);
    const Array outputs[] = {k->logits, k->loss, k->correct, k->pre, k->dw, k->db, k->dbias};
    expect_same_for_any_threads(h, "forward", next_sentence_run_forward, k, outputs, 3);
    expect_close_to_sum(h, "logits of forward", k->logits, logits, size.logits, tolerance(1e-6));
    expect_close_to_sum(h, "loss of forward", k->loss, loss, size.loss, tolerance(1e-6));
    expect_close(h, "correct of forward", k->correct, correct, tolerance(1e-6));

    memcpy(loss, k->loss.initial, sizeof *loss), memcpy(correct, k->correct.initial, sizeof *correct);
    next_sentence_backward_ref(dpre, next_sentence_grads(dw, db, dbias), next_sentence_host(k, logits, loss, correct),
                               k->w.host, k->b.host, k->S, k->C, k->mode);
    expect_same_for_any_threads(h, "backward", next_sentence_run_backward, k, outputs, COUNT_OF(outputs));
    expect_close_to_sum(h, "logits", k->logits, logits, size.logits, tolerance(1e-6));
    expect_close_to_sum(h, "loss", k->loss, loss, size.loss, tolerance(1e-6));
    expect_close(h, "correct", k->correct, correct, tolerance(1e-6));
    expect_close_to_sum(h, "dpre", k->pre, dpre, size.dpre, tolerance(2e-6));
    expect_close_to_sum(h, "dw", k->dw, dw, size.dw, tolerance(2e-6));
    expect_close_to_sum(h, "db", k->db, db, size.db, tolerance(2e-6));
    expect_close_to_sum(h, "dbias", k->dbias, dbias, size.dbias, tolerance(2e-6));
}

// The references' numbers are written by hand: w picks one column for each class, so a logit is a tanh and a bias.
static inline void test_next_sentence_by_hand(Harness* h) {
    enum { S = 8 };
    const real nan = (real)NAN;
    const real pre[2 * S] = {0, 0, /**/ 0, 0, /**/ 1, 0, /**/ 50, -50, /**/ 50, -50, /**/ 3, nan, /**/ 2, 1, /**/ 0, 0};
    const int labels[S] = {0, 1, 1, 0, 1, -1, -7, 0};
    const double t = tanh(1.0), p = 1 / (1 + exp(-t)), sure = 1 / (1 + exp(2.0));
    const double losses = 3 * log(2) + t + log1p(exp(-t)) + log1p(exp(-2.0)) + 2 + log1p(exp(-2.0));
    const real dpre[2 * S] = {
        (real)-.25, (real).25, (real).25,  (real)-.25, (real)(.5 * p * (1 - t * t)), (real)(-.5 * p), 0, 0, 0, 0, 0, 0,
        0,          0,         (real)-.25, (real).25};
    const real dw[4] = {(real)(.5 * (p * t - sure + 1 - sure)), (real)(.5 * (sure - 1 + sure)),
                        (real)(-.5 * (p * t - sure + 1 - sure)), (real)(-.5 * (sure - 1 + sure))};
    const real db[2] = {(real)(.5 * (p + .5 - 2 * sure)), (real)(-.5 * (p + .5 - 2 * sure))};
    const real dbias[2] = {dpre[4] + dpre[14], dpre[5] + dpre[15]}, loss = (real)(.25 * losses), three = 3;
    for (int is_launcher = 0; is_launcher < 2; is_launcher++)
        for (int has_nan = 0; has_nan < 2; has_nan++) {
            case_begin(h, "next_sentence/both by hand%s%s", is_launcher ? "" : ", references", has_nan ? ", NaN" : "");
            NextSentenceCase* k = next_sentence_case(h, S, 2, SET);
            memcpy(k->pre.initial, pre, sizeof pre), memcpy(k->labels, labels, sizeof labels);
            if (!has_nan) k->pre.initial[11] = 0;
            if (has_nan) k->labels[5] = 0;
            k->w.initial[0] = k->w.initial[3] = 1, k->w.initial[1] = k->w.initial[2] = 0;
            k->b.initial[0] = k->b.initial[1] = 0;
            k->loss_scale = input(h, 1, 1);
            k->loss_scale.initial[0] = 2;
            array_restore(k->pre), array_restore(k->w), array_restore(k->b), array_restore(k->loss_scale);
            if (is_launcher) next_sentence_run_backward(k);
            else
                next_sentence_backward_ref(k->pre.host, next_sentence_grads(k->dw.host, k->db.host, k->dbias.host),
                                           next_sentence_host(k, k->logits.host, k->loss.host, k->correct.host),
                                           k->w.host, k->b.host, S, 2, SET);
            array_download(k->loss), array_download(k->logits);
            expect_close(h, "correct", k->correct, &three, tolerance(1e-6));
            if (has_nan) {
                expect_true(h, "loss is NaN", isnan(k->loss.host[0]));
                expect_true(h, "its logit is NaN", isnan(k->logits.host[11]) && !isnan(k->logits.host[9]));
            } else {
                expect_close(h, "loss", k->loss, &loss, tolerance(1e-6));
                expect_close(h, "dpre", k->pre, dpre, tolerance(1e-6));
                expect_close(h, "dw", k->dw, dw, tolerance(1e-6));
                expect_close(h, "db", k->db, db, tolerance(1e-6));
                expect_close(h, "dbias", k->dbias, dbias, tolerance(1e-6));
            }
            case_end(h);
        }
}

static inline void test_next_sentence(Harness* h) {
    static const int SIZES[][2] = {{1, 1},     {1, 33},   {3, 48},   {4, 1024},  {16, 512}, {17, 513},  {33, 768},
                                   {70, 1030}, {128, 65}, {129, 77}, {300, 130}, {5, 1600}, {256, 1024}};
    for (size_t i = 0; i < COUNT_OF(SIZES); i++)
        for (int add = 0; add < 2; add++) {
            Mode mode = add ? ADD : SET;
            case_begin(h, "next_sentence/both S=%d C=%d %s", SIZES[i][0], SIZES[i][1], mode_name(mode));
            NextSentenceCase* k = next_sentence_case(h, SIZES[i][0], SIZES[i][1], mode);
            next_sentence_check(h, k);
            case_end(h);
        }

    case_begin(h, "next_sentence/both loss scale 1024");
    NextSentenceCase* scaled = next_sentence_case(h, 21, 100, SET);
    scaled->loss_scale = input(h, 1, 1);
    scaled->loss_scale.initial[0] = 1024;
    array_restore(scaled->loss_scale);
    next_sentence_check(h, scaled);
    case_end(h);

    // Logits of 150 apart: the losses are as large, the gradients those of a step function.
    case_begin(h, "next_sentence/both sure and wrong");
    NextSentenceCase* sure = next_sentence_case(h, 40, 96, ADD);
    for (size_t c = 0; c < sure->w.n; c++) sure->w.initial[c] *= 64;
    array_restore(sure->w);
    next_sentence_check(h, sure);
    case_end(h);
    test_next_sentence_by_hand(h);
}

typedef struct {
    NextSentenceCase* k;
    real *base, *bias;  // pre = base + bias
    int is_launcher;
} NextSentenceGrad;

static inline double next_sentence_loss(void* state) {
    NextSentenceGrad* g = (NextSentenceGrad*)state;
    NextSentenceCase* k = g->k;
    for (size_t i = 0; i < k->pre.n; i++) k->pre.host[i] = g->base[i] + g->bias[i % (size_t)k->C];
    if (g->is_launcher) next_sentence_run_forward(k);
    else
        next_sentence_forward_ref(next_sentence_host(k, k->logits.host, k->loss.host, k->correct.host), NULL,
                                  k->pre.host, k->w.host, k->b.host, k->S, k->C, SET);
    return (double)k->loss.host[0];
}

static inline void grad_next_sentence(Harness* h) {
    for (int is_launcher = 0; is_launcher < 2; is_launcher++) {
        case_begin(h, "next_sentence/backward%s S=7 C=9", is_launcher ? "" : "_ref");
        NextSentenceCase* k = next_sentence_case(h, 7, 9, SET);
        Array bias = input(h, 9, 1);
        NextSentenceGrad g = {k, copy_of(h, k->pre), bias.host, is_launcher};
        for (size_t i = 0; i < k->w.n; i++) k->w.host[i] *= 3;
        next_sentence_loss(&g);
        if (is_launcher) next_sentence_run_backward(k);
        else
            next_sentence_backward_ref(k->pre.host, next_sentence_grads(k->dw.host, k->db.host, k->dbias.host),
                                       next_sentence_host(k, k->logits.host, k->loss.host, k->correct.host), k->w.host,
                                       k->b.host, k->S, k->C, SET);
        real* dpre = copy_of(h, k->pre);
        expect_gradient(h, "dpre", next_sentence_loss, &g, g.base, k->pre.n, dpre, 1e-8);
        expect_gradient(h, "dw", next_sentence_loss, &g, k->w.host, k->w.n, k->dw.host, 1e-8);
        expect_gradient(h, "db", next_sentence_loss, &g, k->b.host, k->b.n, k->db.host, 1e-8);
        expect_gradient(h, "dbias", next_sentence_loss, &g, g.bias, bias.n, k->dbias.host, 1e-8);
        case_end(h);
    }
}

// The sequences of BERT-large.
static inline void bench_next_sentence(Harness* h) {
    int S = HAS_DEVICE_MEMORY ? 256 : 64, C = 1024;
    char shapes[64];
    case_begin(h, "next_sentence bench");
    NextSentenceCase* k = next_sentence_case(h, S, C, ADD);
    k->labels = resident_ints(h, k->labels, (size_t)S);
    snprintf(shapes, sizeof shapes, "S=%d C=%d", S, C);
    bench_report(h, "next_sentence_forward", shapes, bench_seconds(h, next_sentence_run_forward, k),
                 NEXT_SENTENCE_FORWARD_FLOPS(S, C), NEXT_SENTENCE_FORWARD_BYTES(S, C));
    bench_report(h, "next_sentence_backward", shapes, bench_seconds(h, next_sentence_run_backward, k),
                 NEXT_SENTENCE_BACKWARD_FLOPS(S, C), NEXT_SENTENCE_BACKWARD_BYTES(S, C, ADD));
    case_free(h);
}

#endif
