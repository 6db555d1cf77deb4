/* span: test, grad and bench: targets that are ignored, padding columns that hold NaN, sequences of one row. */
#ifndef DEV_OPS_SPAN_H
#define DEV_OPS_SPAN_H

#include "apps/tune/span.h"
#include "harness.h"

typedef struct {
    Array each, sum, logits, loss_scale;
    int* targets;
    Sequences sequences;
    int Kp;
    Mode mode;
    Context* ctx;
} SpanCase;

static inline Losses span_losses(const SpanCase* k, real* each, real* sum) {
    Losses losses = {each, sum, 0.25, k->mode};
    return losses;
}

static inline void span_run_forward(void* state) {
    SpanCase* k = (SpanCase*)state;
    span_forward(span_losses(k, k->each.device_real, k->sum.device_real), k->logits.device, k->targets, &k->sequences,
                 k->Kp, k->ctx);
}

static inline void span_run_backward(void* state) {
    SpanCase* k = (SpanCase*)state;
    span_backward(span_losses(k, k->each.device_real, k->sum.device_real), k->logits.device, k->targets,
                  k->loss_scale.device_real, &k->sequences, k->Kp, k->ctx);
}

// Every fifth target is not a position of its sequence, by one or by being negative.
static inline SpanCase* span_case(Harness* h, const int* lengths, int count, int Kp, double size, Mode mode) {
    SpanCase* k = (SpanCase*)case_memory(h, sizeof *k);
    k->sequences = sequences_of(h, lengths, count, 0);
    k->Kp = Kp, k->mode = mode, k->ctx = &h->ctx;
    k->logits = input(h, (size_t)k->sequences.rows * (size_t)Kp, size);
    k->each = output(h, (size_t)(SPAN_ENDS * count), SET);
    k->sum = output(h, 1, mode);
    k->loss_scale = input(h, 1, 1.0);
    k->loss_scale.initial[0] = 64;
    array_restore(k->loss_scale), array_upload_real(k->loss_scale);
    k->targets = int_array(h, (size_t)(SPAN_ENDS * count));
    for (int i = 0; i < SPAN_ENDS * count; i++) {
        int length = lengths[i / SPAN_ENDS];
        k->targets[i] = i % 5 == 3 ? (i % 2 ? -1 : length) : random_below(h, length);
    }
    for (size_t i = 0; i < k->logits.n; i++)
        if ((int)(i % (size_t)Kp) >= SPAN_ENDS) k->logits.initial[i] = (real)NAN;
    array_restore(k->logits), array_upload(k->logits);
    memcpy(k->logits.initial, k->logits.host, k->logits.n * sizeof(real));
    return k;
}

static inline void test_span(Harness* h) {
    static const int LENGTHS[][6] = {{1, 0, 0, 0, 0, 0}, {5, 1, 33, 0, 0, 0}, {384, 77, 512, 1, 2, 300}};
    static const int WIDTHS[] = {2, 8, 3};
    for (size_t i = 0; i < 2 * COUNT_OF(LENGTHS); i++) {
        const int *lengths = LENGTHS[i / 2], Kp = WIDTHS[i / 2];
        Mode mode = i % 2 ? ADD : SET;
        int count = 0;
        while (count < 6 && lengths[count] > 0) count++;
        case_begin(h, "span/both S=%d Kp=%d %s", count, Kp, mode_name(mode));
        SpanCase* k = span_case(h, lengths, count, Kp, 2.0, mode);
        const int* cu_seqlens = k->sequences.host_cu_seqlens;
        real *each = copy_of(h, k->each), *sum = copy_of(h, k->sum), before = *sum, *dlogits = copy_of(h, k->logits);
        Array all[3] = {k->each, k->sum, k->logits};
        span_forward_ref(span_losses(k, each, sum), k->logits.host, k->targets, cu_seqlens, count, Kp);
        expect_same_for_any_threads(h, "forward", span_run_forward, k, all, 3);
        expect_close(h, "losses of forward", k->each, each, tolerance(1e-6));
        expect_close(h, "sum of forward", k->sum, sum, tolerance(1e-6));
        *sum = before;
        span_backward_ref(span_losses(k, each, sum), dlogits, k->targets, k->loss_scale.host, cu_seqlens, count, Kp);
        expect_same_for_any_threads(h, "backward", span_run_backward, k, all, 3);
        expect_close(h, "losses", k->each, each, tolerance(1e-6));
        expect_close(h, "sum", k->sum, sum, tolerance(1e-6));
        expect_close(h, "dlogits", k->logits, dlogits, tolerance(2e-5));
        case_end(h);
    }
    // One sequence, by hand: equal logits, so log 2 and log 2; the last position is not a target.
    case_begin(h, "span/both by hand");
    static const int two[] = {2};
    SpanCase* k = span_case(h, two, 1, 2, 0, SET);
    k->targets[0] = 1, k->targets[1] = 2;
    for (int i = 0; i < 4; i++) k->logits.initial[i] = 0;
    array_restore(k->logits), array_upload(k->logits);
    const real want[] = {(real)log(2.0), 0}, gradient[] = {8, 0, -8, 0};
    span_run_backward(k);
    expect_close(h, "losses", k->each, want, tolerance(1e-6));
    expect_close(h, "dlogits", k->logits, gradient, tolerance(1e-6));
    case_end(h);
}

static inline double span_loss(void* state) {
    SpanCase* k = (SpanCase*)state;
    span_forward_ref(span_losses(k, k->each.host, k->sum.host), k->logits.host, k->targets,
                     k->sequences.host_cu_seqlens, k->sequences.count, k->Kp);
    return (double)*k->sum.host;
}

static inline void grad_span(Harness* h) {
    static const int lengths[] = {5, 9, 1};
    for (int launcher = 0; launcher < 2; launcher++) {
        case_begin(h, "span/backward%s", launcher ? "" : "_ref");
        SpanCase* k = span_case(h, lengths, 3, 2, 2.0, SET);
        real* d = copy_of(h, k->logits);
        k->loss_scale.host[0] = 1;
        if (launcher)
            span_backward(span_losses(k, k->each.host, k->sum.host), (floatX*)d, k->targets, NULL, &k->sequences, 2,
                          k->ctx);
        else
            span_backward_ref(span_losses(k, k->each.host, k->sum.host), d, k->targets, NULL,
                              k->sequences.host_cu_seqlens, 3, 2);
        expect_gradient(h, "dlogits", span_loss, k, k->logits.host, k->logits.n, d, 1e-8);
        case_end(h);
    }
}

// 32 windows of SQuAD.
static inline void bench_span(Harness* h) {
    enum { S = 32, T = 384, KP = 8 };
    int lengths[S];
    for (int i = 0; i < S; i++) lengths[i] = T;
    case_begin(h, "span bench");
    SpanCase* k = span_case(h, lengths, S, KP, 1.0, SET);
    k->sequences = resident_sequences(h, k->sequences);
    k->targets = resident_ints(h, k->targets, SPAN_ENDS * S);
    bench_report(h, "span_backward", "S=32 T=384", bench_seconds(h, span_run_backward, k), SPAN_BACKWARD_FLOPS(S * T),
                 SPAN_BACKWARD_BYTES(S * T, S, KP));
    case_free(h);
}

#endif
