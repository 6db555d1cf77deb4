/* span: targets that are ignored, padding columns that hold NaN, sequences of one row. */
#ifndef DEV_OPS_SPAN_H
#define DEV_OPS_SPAN_H

#include "apps/tune/span.h"
#include "losses.h"

// S sequences, of which every third has one row. Every fifth target is not a position of its sequence, by one or by
// being negative.
OP_FN(span_prepare) {
    Harness* h = k->h;
    int S = k->S, *lengths = int_array(h, (size_t)S), rest = k->N;
    for (int s = 0; s < S; s++) rest -= lengths[s] = s == S - 1 ? rest : s % 3 == 1 ? 1 : k->N / S;
    k->sequences = sequences_of(h, lengths, S, 0);
    k->targets = int_array(h, (size_t)(SPAN_ENDS * S));
    for (int i = 0; i < SPAN_ENDS * S; i++) {
        int length = lengths[i / SPAN_ENDS];
        k->targets[i] = i % 5 == 3 ? (i % 2 ? -1 : length) : random_below(h, length);
    }
    loss_case_start(k, SPAN_ENDS, S == 4 ? 1 : 64);
    if (!k->is_bench) return;
    k->sequences = resident_sequences(h, k->sequences);
    k->targets = resident_ints(h, k->targets, (size_t)(SPAN_ENDS * S));
}

RUN_AND_WANT(span, forward, span_forward(loss_device(k), k->logits.device, k->targets, &k->sequences, k->Vp, k->ctx),
             span_forward_ref(loss_want(k), k->logits.host, k->targets, k->sequences.host_cu_seqlens, k->S, k->Vp));
RUN_AND_WANT(span, backward,
             span_backward(loss_device(k), k->logits.device, k->targets, k->loss_scale.device_real, &k->sequences,
                           k->Vp, k->ctx),
             span_backward_ref(loss_want(k), k->logits.want, k->targets, k->loss_scale.host,
                               k->sequences.host_cu_seqlens, k->S, k->Vp));

static const Arg SPAN_ARGS[] = ARGS(LOSS_LOGITS(2, 2e-5), LOSS_EACH("2 S"), LOSS_SUM, LOSS_SCALE);
static const int SPAN_ROWS[][3] = {{1, 1, 2}, {39, 3, 8}, {1276, 6, 3}}, SPAN_GRAD[] = {15, 4, 2};
static const int SPAN_BENCH[][3] = {{32 * 384, 32, 8}};  // windows of SQuAD

static const Op SPAN = {OP_OF("span", "N S Vp", SPAN_ARGS, SPAN_ROWS),
                        OP_BENCH(SPAN_BENCH, SPAN_BENCH),
                        .passes = {{"forward", "losses sum dlogits", OP_PAIR(span, forward)},
                                   {"backward", "losses sum dlogits", OP_PAIR(span, backward)}},
                        .prepare = span_prepare,
                        .grad = SPAN_GRAD,
                        .loss = "sum"};

#endif
