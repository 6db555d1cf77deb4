/* What is put on a trained encoder for a task, from the rows x [N, C] that it ends with.
 *
 *   classify   logits [S, K] = output(dropout(tanh(pooler(first row of each sequence))))    K classes
 *   answer     logits [N, 2] = output(x): two softmaxes over a sequence's rows, where the answer begins and where it ends
 *
 * The loss is the mean over all targets of their cross-entropies: one of each sequence, or two. K is stored as a multiple
 * of 8, so that rows of logits begin on 16 bytes.
 *
 * Source: Devlin et al., "BERT", 2018, section 4; dropout as in Hugging Face's BertForSequenceClassification. */
#ifndef LLMC_TASK_HEAD_H
#define LLMC_TASK_HEAD_H

#include "../ops/classifier.h"
#include "../ops/classifier_span.h"
#include "../ops/dropout.h"
#include "../ops/gather.h"
#include "../ops/matmul.h"
#include "../ops/tanh.h"
#include "mlm_data.h"

// In the order of the flag's choices.
typedef enum { TASK_PRETRAIN, TASK_CLASSIFY, TASK_ANSWER } Task;

// Layers and their gradients. The pooler is there only where texts are classified.
typedef struct {
    Affine pooler, output;
    AffineGradient dpooler, doutput;
} TaskLayers;

// Where the model keeps what the head needs. first, pooled and work: [S, C], used only where texts are classified.
typedef struct {
    floatX *first, *pooled, *work, *logits;
    real *losses, *loss;  // of each target; [1] the sum
} TaskBuffers;

typedef struct {
    Task task;
    int outputs, stored;  // K, and the columns of its logits
    int C, S;             // channels; sequences of a micro-batch, at most
    TaskLayers layers;
    TaskBuffers buffers;
    int* ints;             // where the ops run
    Sequences first_rows;  // of a micro-batch, each a sequence of its own, for the masks of dropout
} TaskHead;

static inline int task_stored_outputs(int outputs) { return (int)round_up((size_t)outputs, 8); }

// What a head keeps where the ops run, in ints.
static inline size_t task_head_ints(Task task, int S) { return task == TASK_CLASSIFY ? 3 * (size_t)S + 1 : 0; }

static inline void task_head_open(TaskHead* h, Task task, int outputs, int C, int S, TaskLayers layers,
                                  TaskBuffers buffers, Context* ctx) {
    size_t n = task_head_ints(task, S);
    memset(h, 0, sizeof *h);
    h->task = task, h->outputs = outputs, h->stored = task_stored_outputs(outputs), h->C = C, h->S = S;
    h->layers = layers, h->buffers = buffers;
    if (!n) return;
    int* host = (int*)xmalloc(n * sizeof(int));
    h->ints = (int*)device_alloc(ctx, n * sizeof(int), "batch");
    sequences_uniform(host, host + S + 1, host + 2 * S + 1, S, 1);
    device_upload(ctx, h->ints, host, n * sizeof(int));
    device_synchronize(ctx);
    free(host);
}

static inline void task_head_close(TaskHead* h) {
    if (h->ints) device_free(h->ints, task_head_ints(h->task, h->S) * sizeof(int));
}

// The first rows of a micro-batch.
static inline const Sequences* task_first_rows(TaskHead* h, const MlmInput* in) {
    Sequences s = {in->sequences.count, in->sequences.count, 1, in->sequences.count, in->sequences.first};
    s.cu_seqlens = h->ints, s.sequence = h->ints + h->S + 1, s.position = h->ints + 2 * h->S + 1;
    h->first_rows = s;
    return &h->first_rows;
}

// Logits from x. `dropout` is that of task_first_rows().
static inline void task_forward(const TaskHead* h, const floatX* x, const MlmInput* in, Dropout dropout, Context* ctx) {
    TaskBuffers a = h->buffers;
    int S = in->sequences.count, C = h->C;
    scope_at(ctx, FORWARD, -1);
    if (h->task == TASK_ANSWER) {
        matmul_forward(a.logits, x, h->layers.output, in->sequences.rows, C, h->stored, SET, ctx);
        return;
    }
    gather_forward(a.first, x, in->sequences.cu_seqlens, S, C, ctx);
    matmul_forward(a.pooled, a.first, h->layers.pooler, S, C, C, SET, ctx);
    tanh_forward(a.pooled, a.pooled, (size_t)S * (size_t)C, ctx);
    dropout_forward(a.work, a.pooled, S, C, dropout, ctx);
    matmul_forward(a.logits, a.work, h->layers.output, S, C, h->stored, SET, ctx);
}

// The sum of the losses times `scale`, put into or added to buffers.loss. Going BACKWARD the logits become their gradient,
// *loss_scale (NULL: 1) times too large.
static inline void task_loss(const TaskHead* h, const MlmInput* in, double scale, const real* loss_scale,
                             Direction direction, Mode mode, Context* ctx) {
    floatX* logits = h->buffers.logits;
    ClassifierLosses losses = {h->buffers.losses, h->buffers.loss, scale, mode};
    const Sequences* s = &in->sequences;
    const int *targets = in->masked_targets, S = s->count, K = h->outputs, Kp = h->stored,
              forward = direction == FORWARD;
    scope_at(ctx, direction, -1);
    if (h->task == TASK_ANSWER && forward) span_forward(losses, logits, targets, s, Kp, ctx);
    else if (h->task == TASK_ANSWER) span_backward(losses, logits, targets, loss_scale, s, Kp, ctx);
    else if (forward) classifier_forward(losses, logits, targets, S, K, Kp, ctx);
    else classifier_backward(losses, logits, targets, loss_scale, S, K, Kp, ctx);
}

// From the gradient of the logits to dx, after task_forward() from the same x, which has left in `work` what the output
// layer read. Gradients of the layers are written by `mode`.
static inline void task_backward(const TaskHead* h, floatX* dx, const floatX* x, const MlmInput* in, Dropout dropout,
                                 Mode mode, Context* ctx) {
    TaskBuffers a = h->buffers;
    const TaskLayers* p = &h->layers;
    int S = in->sequences.count, N = in->sequences.rows, C = h->C;
    if (h->task == TASK_ANSWER) {
        matmul_backward_weight(p->doutput, a.logits, x, N, C, h->stored, mode, ctx);
        matmul_backward_input(dx, a.logits, p->output.w, N, C, h->stored, SET, ctx);
        return;
    }
    matmul_backward_weight(p->doutput, a.logits, a.work, S, C, h->stored, mode, ctx);
    matmul_backward_input(a.work, a.logits, p->output.w, S, C, h->stored, SET, ctx);
    dropout_backward(a.work, a.work, S, C, dropout, SET, ctx);
    tanh_backward(a.work, a.work, a.pooled, (size_t)S * (size_t)C, ctx);
    matmul_backward_weight(p->dpooler, a.work, a.first, S, C, C, mode, ctx);
    matmul_backward_input(a.pooled, a.work, p->pooler.w, S, C, C, SET, ctx);
    gather_backward(dx, a.pooled, in->sequences.cu_seqlens, S, N, C, SET, ctx);
}

#endif
