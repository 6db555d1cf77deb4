/* classifier: padding columns that hold NaN, ignored targets, extreme logits, a loss scale on the device. */
#ifndef DEV_OPS_CLASSIFIER_H
#define DEV_OPS_CLASSIFIER_H

#include "llmc/ops/classifier/classifier.h"
#include "losses.h"

// Every third target is ignored, if there are three. Of 5 rows the gradients carry a loss scale.
OP_FN(classifier_prepare) {
    int N = k->N, V = k->V;
    k->targets = int_array(k->h, (size_t)N);
    for (int n = 0; n < N; n++) k->targets[n] = n % 3 == 2 && !k->is_bench ? -1 : random_below(k->h, V);
    k->targets[N - 1] = N > 1 ? V - 1 : k->targets[N - 1];
    k->targets = op_ints(k, k->targets, N);
    loss_case_start(k, V, N == 5 ? 1024 : 1);
}

RUN_AND_WANT(classifier, forward,
             classifier_forward(loss_device(k), k->logits.device, k->targets, k->N, k->V, k->Vp, k->ctx),
             classifier_forward_ref(loss_want(k), k->logits.host, k->targets, k->N, k->V, k->Vp));

OP_FN(classifier_run_backward) {
    classifier_backward(loss_device(k), k->logits.device, k->targets, k->loss_scale.device_real, k->N, k->V, k->Vp,
                        k->ctx);
}

// A probability is right relative to itself: the exponential to 3e-7, its argument to half a rounding of |logit -
// maximum|. The target's gradient is a difference of numbers up to the scale. In fp16, what lies below the smallest
// normal number is right to the spacing of those that follow it.
OP_FN(classifier_want_backward) {
    const double factor = 0.25 * (k->loss_scale.n ? (double)*k->loss_scale.host : 1);
#ifdef PRECISION_FP16
    const double smallest = 6.2e-5;
#else
    const double smallest = 1e-30;
#endif
    classifier_backward_ref(loss_want(k), k->logits.want, k->targets, k->loss_scale.host, k->N, k->V, k->Vp);
    k->logits.magnitude = (real*)case_memory(k->h, k->logits.n * sizeof(real));
    for (size_t i = 0; i < k->logits.n; i++) {
        int is_target = (int)(i % (size_t)k->Vp) == k->targets[i / (size_t)k->Vp];
        k->logits.magnitude[i] = (real)(is_target ? factor : fmax(fabs((double)k->logits.want[i]), smallest));
    }
}

// The sum is that of the losses that the launcher wrote: all that is left is the rounding of the result, and of what it
// is added to.
OP_FN(classifier_after) {
    double before = k->mode == ADD ? (double)*k->sum.initial : 0, total = 0, magnitude = fabs(before);
    for (int n = 0; n < k->N; n++) {
        total += 0.25 * (double)k->each.host[n];
        magnitude += 0.25 * fabs((double)k->each.host[n]);
    }
    expect_within(k->h, "sum of its losses", ((double)*k->sum.host - before - total) / fmax(magnitude, 1e-30), 0,
                  sizeof(real) == sizeof(double) ? 1e-13 : tolerance(6e-8));
}

// A loss is right to the rounding of the largest logit.
static const Arg CLASSIFIER_ARGS[] = ARGS(LOSS_LOGITS(2, 3e-6), LOSS_EACH("N"), LOSS_SUM, LOSS_SCALE);
static const int CLASSIFIER_ROWS[][3] = {{1, 1, 1},          {77, 48, 48},      {4, 33, 64},     {5, 768, 896},
                                         {9, 1537, 1600},    {3, 50257, 50304}, {20011, 40, 48}, {32, 2, 8},
                                         {17, 30522, 30592}, {1024, 257, 384}};
static const int CLASSIFIER_GRAD[] = {4, 13, 16};
// GPT-2's, of four sequences; BERT's masked positions, 20 of each of 256 sequences.
static const int CLASSIFIER_GPU[][3] = {{4096, 50257, 50304}, {5120, 30522, 30592}};
static const int CLASSIFIER_CPU[][3] = {{256, 50257, 50304}, {128, 30522, 30592}};

static const Op CLASSIFIER = {
    OP_OF("classifier", "N V Vp", CLASSIFIER_ARGS, CLASSIFIER_ROWS),
    OP_BENCH(CLASSIFIER_GPU, CLASSIFIER_CPU),
    .passes = {{"forward", "losses sum dlogits", OP_PAIR(classifier, forward), NULL, classifier_after},
               {"backward", "losses sum dlogits", OP_PAIR(classifier, backward), NULL, classifier_after}},
    .prepare = classifier_prepare,
    .grad = CLASSIFIER_GRAD,
    .loss = "sum"};

static inline OpCase* classifier_case(Harness* h, int pass, int N, int V, int Vp) {
    const int row[] = {N, V, Vp};
    return op_case(h, &CLASSIFIER, &CLASSIFIER.passes[pass], row, OP_PLAIN);
}

static inline void test_classifier_of(Harness* h, int pass) {
    void (*const run)(void* k) = CLASSIFIER.passes[pass].run;
    // Probabilities down to exp(-87), the smallest that a float holds in full; the argument's rounding is 4e-6.
    OpCase* k = classifier_case(h, pass, 4, 70, 80);
    for (int i = 0; i < 4 * 70; i++) {
        int n = i / 70, v = i % 70;
        k->logits.host[n * 80 + v] = (real)(n % 2 ? 1e4 - v : 30 - 1.2 * ((v * 37) % 70));
    }
    array_begin(k->logits);
    k->logits.slack = tolerance(7e-6);
    op_check(h, k, &CLASSIFIER, &CLASSIFIER.passes[pass]);
    case_end(h);

    k = classifier_case(h, pass, 3, 40, 48);
    for (int n = 0; n < 3; n++) k->targets[n] = -100;
    real* zeros = (real*)case_memory(h, k->logits.n * sizeof(real));
    run(k);
    expect_equal(h, "losses, all ignored", k->each, zeros);
    expect_equal(h, "sum, all ignored", k->sum, zeros);
    if (pass == 1) expect_equal(h, "dlogits, all ignored", k->logits, zeros);
    case_end(h);

    k = classifier_case(h, pass, 2, 40, 48);
    k->logits.host[3] = (real)NAN, k->logits.host[48 + 39] = (real)INFINITY;
    array_upload(k->logits);
    k->targets[1] = 0;
    run(k);
    array_download(k->each), array_download(k->sum);
    expect_true(h, "a NaN or an infinity makes its loss NaN", isnan(k->each.host[0]) && isnan(k->each.host[1]));
    expect_true(h, "and the sum", isnan(k->sum.host[0]));
    case_end(h);
}

static inline void test_classifier(Harness* h) {
    for (int pass = 0; pass < 2; pass++) test_classifier_of(h, pass);
}

#endif
