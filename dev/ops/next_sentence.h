/* next_sentence: one block and many, ignored labels, ties, sure predictions, a loss scale on the device. */
#ifndef DEV_OPS_NEXT_SENTENCE_H
#define DEV_OPS_NEXT_SENTENCE_H

#include "llmc/bert/next_sentence.h"
#include "op.h"

// Every fourth label is ignored, but for the first. Gradients of 8 and of 21 sequences carry a loss scale.
OP_FN(next_sentence_prepare) {
    k->targets = int_array(k->h, (size_t)k->S);
    for (int s = 0; s < k->S; s++) k->targets[s] = s % 4 == 3 ? -1 : random_below(k->h, 2);
    k->targets = op_ints(k, k->targets, k->S);
    for (size_t i = 0; i < k->w.n; i++) k->w.host[i] *= (real)(3 / sqrt(k->C));
    for (size_t i = 0; i < k->pre.n; i++) k->pre.host[i] = k->x.host[i] + k->bias.host[i % (size_t)k->C];
    *k->loss_scale.host = k->S == 21 ? 1024 : 2;
    array_upload(k->w), array_begin(k->pre), array_upload_real(k->loss_scale);
    if (k->S != 21 && k->S != 8) k->loss_scale.host = k->loss_scale.device_real = NULL, k->loss_scale.n = 0;
}

// Of the launcher, or of the reference.
static inline NextSentenceLoss next_sentence_loss(const OpCase* k, int of_launcher) {
    NextSentenceLoss out = {.labels = k->targets, .scale = 0.25};
    out.logits = of_launcher ? k->logits.device_real : k->logits.want;
    out.loss = of_launcher ? k->loss.device_real : k->loss.want;
    out.correct = of_launcher ? k->correct.device_real : k->correct.want;
    out.loss_scale = of_launcher ? k->loss_scale.device_real : k->loss_scale.host;
    return out;
}

OP_FN(next_sentence_run_forward) {
    next_sentence_forward(next_sentence_loss(k, 1), k->pre.device, (Linear){k->w.device, k->b.device}, k->S, k->C,
                          k->mode, k->ctx);
}

OP_FN(next_sentence_run_backward) {
    next_sentence_backward(
        k->pre.device, (NextSentenceGrads){.d = {k->dw.device_real, k->db.device_real}, .dbias = k->dbias.device_real},
        next_sentence_loss(k, 1), (Linear){k->w.device, k->b.device}, k->S, k->C, k->mode, k->ctx);
}

// The sum of absolute values behind each result. An error of the logits reaches a gradient a quarter as large at most.
// What fp16 stores below its smallest normal number is correct to the spacing of the numbers that follow it.
static inline void next_sentence_magnitudes(OpCase* k) {
    size_t C = (size_t)k->C;
#ifdef PRECISION_FP16
    const double smallest = 6.2e-5;
#else
    const double smallest = 0;
#endif
    double factor = 0.25 * (k->loss_scale.n ? (double)k->loss_scale.host[0] : 1);
    Array* all[] = {&k->logits, &k->pre, &k->loss, &k->dw, &k->db, &k->dbias};
    for (size_t i = 0; i < COUNT_OF(all); i++) {
        all[i]->magnitude = array_absolute(k->h, *all[i]);
        if (k->mode == SET) memset(all[i]->magnitude, 0, all[i]->n * sizeof(real));
    }
    for (size_t s = 0; s < (size_t)k->S; s++) {
        double row[2] = {fabs((double)k->b.host[0]), fabs((double)k->b.host[1])};
        for (size_t c = 0; c < C; c++) {
            double t = fabs(tanh((double)k->pre.host[s * C + c]));
            double dpre = factor * (fabs((double)k->w.host[c]) + fabs((double)k->w.host[C + c]));
            for (size_t j = 0; j < 2; j++) {
                row[j] += t * fabs((double)k->w.host[j * C + c]);
                k->dw.magnitude[j * C + c] += (real)(factor * t);
            }
            k->pre.magnitude[s * C + c] = (real)fmax(dpre, smallest);
            k->dbias.magnitude[c] += (real)dpre;
        }
        k->logits.magnitude[2 * s] = (real)row[0], k->logits.magnitude[2 * s + 1] = (real)row[1];
        *k->loss.magnitude += (real)(0.25 * (1 + row[0] + row[1]));
        k->db.magnitude[0] += (real)factor, k->db.magnitude[1] += (real)factor;
    }
}

OP_FN(next_sentence_want_forward) {
    for (size_t i = 0; i < k->pre.n && k->is_grad; i++) k->pre.host[i] = k->x.host[i] + k->bias.host[i % (size_t)k->C];
    next_sentence_forward_ref(next_sentence_loss(k, 0), NULL, k->pre.host, k->w.host, k->b.host, k->S, k->C, k->mode);
    next_sentence_magnitudes(k);
}

OP_FN(next_sentence_want_backward) {
    next_sentence_backward_ref(k->pre.want, (NextSentenceGrads){.d = {k->dw.want, k->db.want}, .dbias = k->dbias.want},
                               next_sentence_loss(k, 0), k->w.host, k->b.host, k->S, k->C, k->mode);
    next_sentence_magnitudes(k);
}

static const Arg NEXT_SENTENCE_ARGS[] =
    ARGS(ARG(x, "S C", IN, 1), ARG(bias, "C", IN, 1), ARG_AS("dpre", pre, "S C", IN_OUT, 1, 2e-6, "x"),
         ARG(w, "2 C", IN, 1), ARG(b, "2", IN, 1), ARG(logits, "2 S", OUT, 0, 1e-6), ARG(loss, "", BY_MODE, 0, 1e-6),
         ARG(correct, "", BY_MODE, 0, 1e-6), ARG(dw, "2 C", BY_MODE, 0, 2e-6, "w"), ARG(db, "2", BY_MODE, 0, 2e-6, "b"),
         ARG(dbias, "C", BY_MODE, 0, 2e-6, "bias"), ARG(loss_scale, "", IN, 1));
static const int NEXT_SENTENCE_ROWS[][2] = {{1, 1},     {1, 33},   {3, 48},     {4, 1024}, {16, 512},
                                            {17, 513},  {33, 768}, {70, 1030},  {128, 65}, {129, 77},
                                            {300, 130}, {5, 1600}, {256, 1024}, {21, 100}};
static const int NEXT_SENTENCE_GRAD[] = {7, 9};
static const int NEXT_SENTENCE_GPU[][2] = {{256, 1024}}, NEXT_SENTENCE_CPU[][2] = {{64, 1024}};  // BERT-large

static const Op NEXT_SENTENCE = {
    OP_OF("next_sentence", "S C", NEXT_SENTENCE_ARGS, NEXT_SENTENCE_ROWS),
    OP_BENCH(NEXT_SENTENCE_GPU, NEXT_SENTENCE_CPU),
    .passes = {{"forward", "logits loss correct", OP_PAIR(next_sentence, forward)},
               {"backward", "logits loss correct dpre dw db dbias", OP_PAIR(next_sentence, backward)}},
    .prepare = next_sentence_prepare,
    .grad = NEXT_SENTENCE_GRAD,
    .loss = "loss"};

// w picks one column for each class, so a logit is a tanh. Equal logits are the first class, labels of other negative
// numbers are ignored too.
static inline void test_next_sentence_ties(Harness* h) {
    enum { S = 6 };
    static const int ROW[] = {S, 2};
    const real pre[2 * S] = {0, 0, /**/ 0, 0, /**/ 1, 0, /**/ 0, 1, /**/ 2, 1, /**/ 2, 1};
    const int labels[S] = {0, 0, 0, 1, -7, -1};
    OpCase* k = op_case(h, &NEXT_SENTENCE, &NEXT_SENTENCE.passes[1], ROW, OP_PLAIN);
    memcpy(k->pre.host, pre, sizeof pre), memcpy(k->targets, labels, sizeof labels);
    k->w.host[0] = k->w.host[3] = 1, k->w.host[1] = k->w.host[2] = k->b.host[0] = k->b.host[1] = 0;
    array_begin(k->pre), array_upload(k->w), array_upload(k->b);
    op_check(h, k, &NEXT_SENTENCE, &NEXT_SENTENCE.passes[1]);
    expect_within(h, "correct", (double)*k->correct.host, 4, 0);
    case_end(h);
}

static inline void test_next_sentence(Harness* h) {
    // Logits of 150 apart: the losses are as large, the gradients those of a step function.
    static const int SURE[] = {40, 96};
    for (int pass = 0; pass < 2; pass++) {
        OpCase* k = op_case(h, &NEXT_SENTENCE, &NEXT_SENTENCE.passes[pass], SURE, OP_PLAIN);
        for (size_t c = 0; c < k->w.n; c++) k->w.host[c] *= 21;
        array_upload(k->w);
        op_check(h, k, &NEXT_SENTENCE, &NEXT_SENTENCE.passes[pass]);
        case_end(h);
    }
    test_next_sentence_ties(h);
}

#endif
