/* span: targets that are ignored, padding columns that hold NaN, sequences of one row. */
#ifndef DEV_OPS_SPAN_H
#define DEV_OPS_SPAN_H

#include "apps/tune/span.h"
#include "losses.h"

// S sequences, of which every third has one row. Every fifth target is not a position of its sequence, by one or by
// being negative.
static inline void span_prepare(void* state) {
    LossCase* k = (LossCase*)state;
    Harness* h = k->z.h;
    int S = k->z.S, *lengths = int_array(h, (size_t)S), rest = k->z.N;
    for (int s = 0; s < S; s++) rest -= lengths[s] = s == S - 1 ? rest : s % 3 == 1 ? 1 : k->z.N / S;
    k->sequences = sequences_of(h, lengths, S, 0);
    k->targets = int_array(h, (size_t)(SPAN_ENDS * S));
    for (int i = 0; i < SPAN_ENDS * S; i++) {
        int length = lengths[i / SPAN_ENDS];
        k->targets[i] = i % 5 == 3 ? (i % 2 ? -1 : length) : random_below(h, length);
    }
    loss_case_start(k, SPAN_ENDS, S == 4 ? 1 : 64);
    if (!k->z.is_bench) return;
    k->sequences = resident_sequences(h, k->sequences);
    k->targets = resident_ints(h, k->targets, (size_t)(SPAN_ENDS * S));
}

static inline void span_run_forward(void* state) {
    LossCase* k = (LossCase*)state;
    span_forward(loss_device(k), k->logits.device, k->targets, &k->sequences, k->z.Vp, k->z.ctx);
}

static inline void span_want_forward(void* state) {
    LossCase* k = (LossCase*)state;
    span_forward_ref(loss_want(k), k->logits.host, k->targets, k->sequences.host_cu_seqlens, k->z.S, k->z.Vp);
}

static inline void span_run_backward(void* state) {
    LossCase* k = (LossCase*)state;
    span_backward(loss_device(k), k->logits.device, k->targets, k->loss_scale.device_real, &k->sequences, k->z.Vp,
                  k->z.ctx);
}

static inline void span_want_backward(void* state) {
    LossCase* k = (LossCase*)state;
    span_backward_ref(loss_want(k), k->logits.want, k->targets, k->loss_scale.host, k->sequences.host_cu_seqlens,
                      k->z.S, k->z.Vp);
}

static const Arg SPAN_ARGS[] = {LOSS_LOGITS(2, 2e-5), LOSS_EACH("2 S"), LOSS_SUM, LOSS_SCALE, {NULL}};
static const int SPAN_ROWS[][3] = {{1, 1, 2}, {39, 3, 8}, {1276, 6, 3}}, SPAN_GRAD[] = {15, 4, 2};
static const int SPAN_BENCH[][3] = {{32 * 384, 32, 8}};  // windows of SQuAD

static const Op SPAN = {.name = "span",
                        .bytes = sizeof(LossCase),
                        .sizes = "N S Vp",
                        .args = SPAN_ARGS,
                        .passes = {{"forward", "losses sum dlogits", span_run_forward, span_want_forward},
                                   {"backward", "losses sum dlogits", span_run_backward, span_want_backward}},
                        .prepare = span_prepare,
                        .rows = SIZE_ROWS(SPAN_ROWS),
                        .gpu_bench = SIZE_ROWS(SPAN_BENCH),
                        .cpu_bench = SIZE_ROWS(SPAN_BENCH),
                        .grad = SPAN_GRAD,
                        .loss = "sum"};

// One sequence, by hand: equal logits, so log 2 and log 2; the last position is not a target.
static inline void test_span_by_hand(Harness* h) {
    static const int ROW[] = {2, 1, 2};
    LossCase* k = (LossCase*)op_case(h, &SPAN, &SPAN.passes[1], ROW, OP_PLAIN);
    k->targets[0] = 1, k->targets[1] = 2;
    memset(k->logits.host, 0, 4 * sizeof(real));
    array_begin(k->logits);
    const real want[] = {(real)log(2.0), 0}, gradient[] = {8, 0, -8, 0};
    span_run_backward(k);
    expect_close(h, "losses", k->each, want, tolerance(1e-6));
    expect_close(h, "dlogits", k->logits, gradient, tolerance(1e-6));
    case_end(h);
}

#endif
