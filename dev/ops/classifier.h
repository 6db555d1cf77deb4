/* Cases of classifier: padding columns that hold NaN, ignored targets, extreme logits, a loss scale on the device. */
#ifndef DEV_OPS_CLASSIFIER_H
#define DEV_OPS_CLASSIFIER_H

#include "harness.h"
#include "llmc/ops/classifier/classifier.h"

typedef struct {
    Array losses, sum, logits;
    int* targets;
    Array loss_scale;  // [1], or none
    int N, V, Vp;
    double scale;
    Mode mode;
    Context* ctx;
} ClassifierCase;

static Losses classifier_losses(const ClassifierCase* c, real* each, real* sum) {
    Losses losses = {each, sum, c->scale, c->mode};
    return losses;
}

static void classifier_run_forward(void* state) {
    ClassifierCase* c = (ClassifierCase*)state;
    classifier_forward(classifier_losses(c, c->losses.device_real, c->sum.device_real), c->logits.device, c->targets,
                       c->N, c->V, c->Vp, c->ctx);
}

static void classifier_run_backward(void* state) {
    ClassifierCase* c = (ClassifierCase*)state;
    classifier_backward(classifier_losses(c, c->losses.device_real, c->sum.device_real), c->logits.device, c->targets,
                        c->loss_scale.device_real, c->N, c->V, c->Vp, c->ctx);
}

// The numbers in `initial`, rounded to floatX, are the input of launchers and references.
static void classifier_start(Array a) {
    array_restore(a);
    array_upload(a);
    memcpy(a.initial, a.host, a.n * sizeof(real));
}

// Call after case_begin(). Every third target is ignored, if there are three; padding columns hold NaN.
static ClassifierCase classifier_case(Harness* h, int N, int V, int Vp, double size, Mode mode) {
    ClassifierCase c;
    memset(&c, 0, sizeof c);
    c.N = N;
    c.V = V;
    c.Vp = Vp;
    c.scale = 0.25;
    c.mode = mode;
    c.ctx = &h->ctx;
    c.targets = int_array(h, (size_t)N);
    c.logits = input(h, (size_t)N * (size_t)Vp, size);
    c.losses = output(h, (size_t)N, SET);
    c.sum = output(h, 1, mode);
    for (int n = 0; n < N; n++) {
        c.targets[n] = n % 3 == 2 ? -1 : random_below(h, V);
        for (int v = V; v < Vp; v++) c.logits.initial[(size_t)n * (size_t)Vp + (size_t)v] = (real)NAN;
    }
    c.targets[N - 1] = N > 1 ? V - 1 : c.targets[N - 1];
    classifier_start(c.logits);
    return c;
}

// The sum is that of the losses that the launcher wrote: all that is left is the rounding of the result, and of what it
// is added to.
static void classifier_check_sum(Harness* h, ClassifierCase* c, const char* what) {
    array_download(c->losses), array_download(c->sum);
    double before = c->mode == ADD ? (double)c->sum.initial[0] : 0, total = 0, magnitude = fabs(before);
    for (int n = 0; n < c->N; n++) {
        total += c->scale * (double)c->losses.host[n];
        magnitude += c->scale * fabs((double)c->losses.host[n]);
    }
    expect_within(h, what, ((double)c->sum.host[0] - before - total) / fmax(magnitude, 1e-30), 0,
                  sizeof(real) == sizeof(double) ? 1e-13 : tolerance(6e-8));
}

// A loss is right to the rounding of the largest logit. A probability is right relative to itself: the exponential
// to 3e-7, its argument to half a rounding of |logit - maximum|. The target's gradient is a difference of numbers
// up to `scale`. In fp16, what lies below the smallest normal number is right to the spacing of those that follow it.
static void classifier_check(Harness* h, ClassifierCase* c, double tol) {
    real *each = copy_of(h, c->losses), *sum = copy_of(h, c->sum), before = *sum;
    Losses losses = classifier_losses(c, each, sum);
    real* dlogits = copy_of(h, c->logits);
    real* magnitude = copy_of(h, c->logits);
    const real factor = (real)c->scale * (c->loss_scale.n ? c->loss_scale.host[0] : 1);
#ifdef PRECISION_FP16
    const double smallest = 6.2e-5;
#else
    const double smallest = 1e-30;
#endif
    classifier_forward_ref(losses, c->logits.host, c->targets, c->N, c->V, c->Vp);
    Array all[3] = {c->losses, c->sum, c->logits};
    expect_same_for_any_threads(h, "forward", classifier_run_forward, c, all, 3);
    expect_close(h, "losses of forward", c->losses, each, tolerance(1e-6));
    classifier_check_sum(h, c, "sum of forward");
    *sum = before;
    classifier_backward_ref(losses, dlogits, c->targets, c->loss_scale.host, c->N, c->V, c->Vp);
    for (size_t i = 0; i < c->logits.n; i++) {
        int n = (int)(i / (size_t)c->Vp), v = (int)(i % (size_t)c->Vp);
        magnitude[i] = v == c->targets[n] ? factor : (real)fmax(fabs((double)dlogits[i]), smallest);
    }
    expect_same_for_any_threads(h, "backward", classifier_run_backward, c, all, 3);
    expect_close(h, "losses", c->losses, each, tolerance(1e-6));
    expect_close(h, "sum against the reference", c->sum, sum, tolerance(1e-6));
    classifier_check_sum(h, c, "sum");
    expect_close_to_sum(h, "dlogits", c->logits, dlogits, magnitude, tolerance(tol));
}

static void test_classifier(Harness* h) {
    static const int shapes[][3] = {{1, 1, 1},          {77, 48, 48},      {4, 33, 64},     {5, 768, 896},
                                    {9, 1537, 1600},    {3, 50257, 50304}, {20011, 40, 48}, {32, 2, 8},
                                    {17, 30522, 30592}, {1024, 257, 384}};
    for (size_t i = 0; i < 2 * COUNT_OF(shapes); i++) {
        int N = shapes[i / 2][0], V = shapes[i / 2][1], Vp = shapes[i / 2][2];
        Mode mode = i % 2 ? ADD : SET;
        case_begin(h, "classifier/both N=%d V=%d Vp=%d %s", N, V, Vp, mode_name(mode));
        ClassifierCase c = classifier_case(h, N, V, Vp, 2.0, mode);
        classifier_check(h, &c, 3e-6);
        case_end(h);
    }

    case_begin(h, "classifier/both loss scale 1024");
    ClassifierCase scaled = classifier_case(h, 5, 768, 896, 2.0, ADD);
    scaled.loss_scale = input(h, 1, 1.0);
    scaled.loss_scale.initial[0] = 1024;
    array_restore(scaled.loss_scale);
    classifier_check(h, &scaled, 3e-6);
    case_end(h);

    // Probabilities down to exp(-87), the smallest that a float holds in full; the argument's rounding is 4e-6.
    case_begin(h, "classifier/both far logits");
    ClassifierCase far_case = classifier_case(h, 4, 70, 80, 0, SET);
    for (int n = 0; n < 4; n++)
        for (int v = 0; v < 70; v++)
            far_case.logits.initial[n * 80 + v] = (real)(n % 2 ? 1e4 - v : 30 - 1.2 * ((v * 37) % 70));
    classifier_start(far_case.logits);
    classifier_check(h, &far_case, 1e-5);
    case_end(h);

    // A question, whose tokens are ignored, and its answer.
    case_begin(h, "classifier/both answers alone");
    ClassifierCase chat = classifier_case(h, 40, 50261, 50304, 2.0, ADD);
    for (int n = 0; n < 40; n++) chat.targets[n] = n % 20 < 13 ? -1 : 50261 - 1 - n;
    classifier_check(h, &chat, 3e-6);
    case_end(h);

    case_begin(h, "classifier/both all ignored");
    ClassifierCase ignored = classifier_case(h, 3, 40, 48, 1.0, SET);
    for (int n = 0; n < 3; n++) ignored.targets[n] = -100;
    real* zeros = (real*)case_memory(h, ignored.logits.n * sizeof(real));
    classifier_run_backward(&ignored);
    expect_equal(h, "losses", ignored.losses, zeros);
    expect_equal(h, "sum", ignored.sum, zeros);
    expect_equal(h, "dlogits", ignored.logits, zeros);
    case_end(h);

    case_begin(h, "classifier/both a NaN or an infinity is not hidden");
    ClassifierCase bad = classifier_case(h, 2, 40, 48, 1.0, SET);
    bad.logits.host[3] = (real)NAN;
    bad.logits.host[48 + 39] = (real)INFINITY;
    array_upload(bad.logits);
    bad.targets[1] = 0;
    classifier_run_forward(&bad);
    array_download(bad.losses), array_download(bad.sum);
    expect_true(h, "losses of forward are NaN", isnan(bad.losses.host[0]) && isnan(bad.losses.host[1]));
    expect_true(h, "their sum too", isnan(bad.sum.host[0]));
    array_restore(bad.losses), array_restore(bad.sum);
    classifier_run_backward(&bad);
    array_download(bad.losses), array_download(bad.sum);
    expect_true(h, "losses are NaN", isnan(bad.losses.host[0]) && isnan(bad.losses.host[1]));
    expect_true(h, "their sum is too", isnan(bad.sum.host[0]));
    case_end(h);
}

static double classifier_loss(void* state) {
    ClassifierCase* c = (ClassifierCase*)state;
    classifier_run_forward(c);
    return (double)c->sum.host[0];
}

static double classifier_loss_ref(void* state) {
    ClassifierCase* c = (ClassifierCase*)state;
    classifier_forward_ref(classifier_losses(c, c->losses.host, c->sum.host), c->logits.host, c->targets, c->N, c->V,
                           c->Vp);
    return (double)c->sum.host[0];
}

static void grad_classifier(Harness* h) {
    case_begin(h, "classifier/grad N=4 V=13 Vp=16");
    ClassifierCase c = classifier_case(h, 4, 13, 16, 1.0, SET);
    for (size_t i = 0; i < c.logits.n; i++)
        if (isnan(c.logits.initial[i])) c.logits.initial[i] = 0;
    array_restore(c.logits);
    real* want = copy_of(h, c.logits);
    classifier_backward_ref(classifier_losses(&c, c.losses.host, c.sum.host), want, c.targets, NULL, c.N, c.V, c.Vp);
    classifier_run_backward(&c);
    real* got = copy_of(h, c.logits);
    array_restore(c.logits);
    expect_gradient(h, "dlogits of the reference", classifier_loss_ref, &c, c.logits.host, c.logits.n, want, 1e-8);
    expect_gradient(h, "dlogits", classifier_loss, &c, c.logits.host, c.logits.n, got, 1e-8);
    case_end(h);
}

static void bench_classifier_case(Harness* h, int rows, int V, int Vp) {
    case_begin(h, "classifier bench");
    ClassifierCase c = classifier_case(h, rows, V, Vp, 1.0, SET);
    double N = c.N;
    char shapes[64];
    snprintf(shapes, sizeof shapes, "N=%d V=%d Vp=%d", c.N, c.V, c.Vp);
    for (int n = 0; n < c.N; n++) c.targets[n] = n % c.V;
    c.targets = resident_ints(h, c.targets, (size_t)c.N);
    double seconds = bench_seconds(h, classifier_run_forward, &c);
    bench_report(h, "classifier_forward", shapes, seconds, CLASSIFIER_FORWARD_FLOPS(N, V),
                 CLASSIFIER_FORWARD_BYTES(N, V));
    seconds = bench_seconds(h, classifier_run_backward, &c);
    bench_report(h, "classifier_backward", shapes, seconds, CLASSIFIER_BACKWARD_FLOPS(N, V),
                 CLASSIFIER_BACKWARD_BYTES(N, V, Vp));
    case_free(h);
}

// GPT-2's, of four sequences; BERT's masked positions, 20 of each of 256 sequences.
static void bench_classifier(Harness* h) {
    bench_classifier_case(h, HAS_DEVICE_MEMORY ? 4096 : 256, 50257, 50304);
    bench_classifier_case(h, HAS_DEVICE_MEMORY ? 5120 : 128, 30522, 30592);
}

#endif
