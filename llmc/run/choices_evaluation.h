/* What a language model makes of a multiple-choice set: which ending does it take for the most likely one?
 *
 *   loss       of an ending: minus the logarithm of its probability after the context, the sum over its tokens
 *   acc        the share of examples whose right ending has the smallest loss, the first of equal ones
 *   acc_norm   the same of the loss over the number of the ending's tokens. It is what llm.c's evaluation prints;
 *              lm-evaluation-harness divides by the ending's characters and calls that acc_norm
 *   an example with one ending (a cloze) counts in acc where each token of the ending is the model's most likely one, the
 *   first of equal ones; perplexity is exp(the mean loss of the endings), as in lm-evaluation-harness
 *
 * Context and ending, without its last token, are a sequence. A micro-batch is filled with as many as its rows hold; only
 * the rows that say something of an ending go on to the head. Where a sequence would be longer than those of the run, its
 * context is cut at the beginning. The examples go round the ranks; what is added up over them are whole numbers, and
 * losses of clozes. */
#ifndef LLMC_CHOICES_EVALUATION_H
#define LLMC_CHOICES_EVALUATION_H

#include "../base/log.h"
#include "../base/sequences.h"
#include "../data/batch_lm.h"
#include "../data/choices.h"
#include "../ops/accuracy.h"
#include "comm.h"
#include "settings.h"

// A sequence of a micro-batch: one ending of an example.
typedef struct {
    int label, ending, endings;
    int first, count;  // of the rows that are scored, those of this ending
} ChoicesSequence;

// Nothing but double.
typedef struct {
    double examples, right, right_norm, cloze_loss;
} ChoicesSums;

typedef struct {
    const Choices* set;
    int N, T;           // rows that a micro-batch may have, tokens that a sequence may
    int example, step;  // the example that is packed next; from one of this rank's to its next
    int ending;         // its ending that is packed next
    ChoicesText text;   // the ending before it
    // The micro-batch, on the host.
    int count, scored;             // sequences; rows that are scored
    int *inputs, *rows, *targets;  // [N] tokens; [scored] rows that are scored, and the tokens that should follow them
    Documents packed;              // where the sequences are
    ChoicesSequence* sequences;    // [count]
    real *losses, *right;          // [scored], [count]
    // The example that is scored: its best ending so far, by loss and by mean loss; -1: none has a loss that is a number.
    int best, best_norm;
    double best_loss, best_mean;
    ChoicesSums sums;
    // Where the ops run.
    int* device_rows;    // [scored], and from N on the arrays of `packed`
    real* device_right;  // [count] for each sequence of a cloze, how many of its scored tokens are the most likely ones
} ChoicesEvaluation;

typedef struct {
    double examples, acc;
    int is_cloze;
    double acc_norm, perplexity;  // the one where it is not a cloze, the other where it is
} ChoicesResult;

// ---------------------------------------------------------------------------------------------------------
// On the host

static inline size_t choices_device_ints(int N) { return (size_t)N + documents_ints(N); }

// What an evaluation in micro-batches of N rows takes where the ops run.
static inline size_t choices_device_bytes(int N) {
    return choices_device_ints(N) * sizeof(int) + (size_t)N * sizeof(real);
}

// End with USAGE where an ending does not fit sequences of T tokens; where a context does not, only `says` so.
static inline void choices_fit(const Choices* set, int T, int says) {
    if (set->longest_ending > T)
        die(USAGE, "%s: one of its endings has %d tokens, but sequences have %d at most (-t)", set->file,
            set->longest_ending, T);
    if (set->longest - 1 > T && says)
        warn("%s: its longest example has %d tokens; contexts are cut to sequences of %d", set->file, set->longest, T);
}

// Begin with the examples of one rank of `ranks`. Micro-batches have N rows at most, of sequences of up to T tokens, T <= N,
// which endings fit.
static inline void choices_begin(ChoicesEvaluation* e, const Choices* set, int N, int T, int rank, int ranks) {
    CHECK(set->longest_ending <= T && T <= N);
    memset(e, 0, sizeof *e);
    e->set = set;
    e->N = N, e->T = T;
    e->example = rank, e->step = ranks;
    e->inputs = (int*)xcalloc(3 * (size_t)N + documents_ints(N), sizeof(int));
    e->rows = e->inputs + N;
    e->targets = e->rows + N;
    documents_place(&e->packed, e->targets + N, N);
    e->sequences = (ChoicesSequence*)xmalloc((size_t)N * sizeof *e->sequences);  // each has a row at least
    e->losses = (real*)xmalloc((size_t)N * sizeof(real));
    e->right = (real*)xcalloc((size_t)N, sizeof(real));
}

static inline void choices_end(ChoicesEvaluation* e) {
    free(e->inputs), free(e->sequences), free(e->losses), free(e->right);
    memset(e, 0, sizeof *e);
}

// Put context and ending behind the rows that are taken.
static inline void choices_put(ChoicesEvaluation* e, ChoicesExample example, ChoicesText ending, int length) {
    Documents* d = &e->packed;
    ChoicesText context = example.context;
    ChoicesSequence s = {example.label, e->ending, example.endings, e->scored, ending.length};
    int begin = d->cu_seqlens[e->count], cut = context.length + ending.length - 1 - length;
    for (int t = 0; t < length; t++) {
        int at = cut + t, of_ending = at - context.length;
        e->inputs[begin + t] = of_ending < 0 ? context.tokens[at] : ending.tokens[of_ending];
        d->document[begin + t] = e->count;
        d->position[begin + t] = t;
    }
    for (int t = 0; t < ending.length; t++) {
        e->rows[e->scored] = begin + length - ending.length + t;
        e->targets[e->scored++] = ending.tokens[t];
    }
    d->squares += (int64_t)length * length;
    d->longest = max_int(d->longest, length);
    d->cu_seqlens[e->count + 1] = begin + length;
    e->sequences[e->count++] = s;
    d->count = e->count;
}

// Fill the next micro-batch. Returns its rows, 0 where all examples are done.
static inline int choices_pack(ChoicesEvaluation* e) {
    e->count = e->scored = e->packed.count = e->packed.longest = e->packed.cu_seqlens[0] = 0;
    e->packed.squares = 0;
    while (e->example < e->set->count) {
        ChoicesExample example = choices_example(e->set, e->example);
        ChoicesText ending = choices_next(e->ending ? e->text : example.context);
        int length = min_int(example.context.length + ending.length - 1, e->T);
        if (e->packed.cu_seqlens[e->count] + length > e->N) break;
        choices_put(e, example, ending, length);
        e->text = ending;
        if (++e->ending == example.endings) e->ending = 0, e->example += e->step;
    }
    return e->packed.cu_seqlens[e->count];
}

// Count the micro-batch, whose scored rows have these losses, and whose sequences so many tokens right, which is looked at
// for clozes alone.
static inline void choices_score(ChoicesEvaluation* e, const real* losses, const real* right) {
    for (int i = 0; i < e->count; i++) {
        const ChoicesSequence* s = &e->sequences[i];
        double loss = 0, mean;
        for (int k = 0; k < s->count; k++) loss += (double)losses[s->first + k];
        mean = loss / s->count;
        if (s->ending == 0) e->best = e->best_norm = -1, e->best_loss = e->best_mean = INFINITY;
        if (loss < e->best_loss) e->best = s->ending, e->best_loss = loss;
        if (mean < e->best_mean) e->best_norm = s->ending, e->best_mean = mean;
        if (s->ending + 1 < s->endings) continue;
        int is_cloze = s->endings == 1;
        e->sums.examples++;
        e->sums.right += is_cloze ? (double)right[i] == s->count : e->best == s->label;
        e->sums.right_norm += e->best_norm == s->label;
        if (is_cloze) e->sums.cloze_loss += loss;
    }
}

// From each rank's sums.
static inline ChoicesResult choices_result(const ChoicesEvaluation* e, const Comm* comm) {
    ChoicesSums sums = e->sums;
    comm_sum_counts(comm, (double*)&sums, sizeof sums / sizeof(double));
    ChoicesResult r = {sums.examples, sums.right / sums.examples, e->set->is_cloze, sums.right_norm / sums.examples,
                       exp(sums.cloze_loss / sums.examples)};
    return r;
}

// ---------------------------------------------------------------------------------------------------------
// With the model, which runs between choices_load() and choices_take()

static inline void choices_alloc(ChoicesEvaluation* e, Context* ctx) {
    e->device_rows = (int*)device_alloc(ctx, choices_device_ints(e->N) * sizeof(int), "batch");
    e->device_right = (real*)device_alloc(ctx, (size_t)e->N * sizeof(real), "batch");
}

static inline void choices_free(ChoicesEvaluation* e) {
    device_free(e->device_rows, choices_device_ints(e->N) * sizeof(int));
    device_free(e->device_right, (size_t)e->N * sizeof(real));
}

// Bring the next micro-batch to the device: inputs [N], targets [e->scored] of the rows e->device_rows, and the sequences.
// Returns 0 where all examples are done.
static inline int choices_load(ChoicesEvaluation* e, int* inputs, int* targets, Sequences* sequences, Context* ctx) {
    int rows = choices_pack(e);
    if (rows == 0) return 0;
    Documents on_device;
    Sequences s = {rows, e->count, e->packed.longest, e->packed.squares};
    documents_place(&on_device, e->device_rows + e->N, e->N);
    s.cu_seqlens = on_device.cu_seqlens, s.sequence = on_device.document, s.position = on_device.position;
    s.host_cu_seqlens = e->packed.cu_seqlens;
    scope_at(ctx, FORWARD, -1);
    device_upload(ctx, inputs, e->inputs, (size_t)rows * sizeof(int));
    device_upload(ctx, targets, e->targets, (size_t)e->scored * sizeof(int));
    device_upload(ctx, e->device_rows, e->rows, (size_t)e->scored * sizeof(int));
    device_upload(ctx, e->device_rows + e->N, e->packed.document, documents_ints(e->N) * sizeof(int));
    *sequences = s;
    return 1;
}

// Count the micro-batch: losses [e->scored] and logits [e->scored, Vp] of its scored rows.
static inline void choices_take(ChoicesEvaluation* e, const real* losses, const floatX* logits, const int* targets,
                                int V, int Vp, Context* ctx) {
    int clozes = 0;
    for (int i = 0; i < e->count; i++) {
        const ChoicesSequence* s = &e->sequences[i];
        if (s->endings > 1) continue;
        clozes++;
        accuracy_forward(e->device_right + i, logits + (size_t)s->first * (size_t)Vp, targets + s->first, s->count, V,
                         Vp, SET, ctx);
    }
    device_download(ctx, e->losses, losses, (size_t)e->scored * sizeof(real));
    if (clozes) device_download(ctx, e->right, e->device_right, (size_t)e->count * sizeof(real));
    choices_score(e, e->losses, e->right);
}

// ---------------------------------------------------------------------------------------------------------
// Telling

static inline void choices_print(const Choices* set, ChoicesResult r) {
    char name[32];
    choices_name(set, name);
    printf("%s acc %.6f, ", name, r.acc);
    if (r.is_cloze) printf("perplexity %.3f", plain_nan(r.perplexity));
    else printf("acc_norm %.6f", r.acc_norm);
    printf(" (%.0f examples)\n", r.examples);
}

// A line of the log and of the terminal.
static inline void choices_log(Log* log, int64_t step, int64_t steps, const Choices* set, ChoicesResult r) {
    char name[32], key[48];
    choices_name(set, name);
    log_print_step(step, steps);
    choices_print(set, r);
    fflush(stdout);
    Text t = {NULL, 0, 0};
    text_append(&t, "{", 1);
    json_put_integer(&t, "step", step);
    snprintf(key, sizeof key, "%s_acc", name);
    log_put(&t, key, r.acc, 6);
    snprintf(key, sizeof key, r.is_cloze ? "%s_perplexity" : "%s_acc_norm", name);
    log_put(&t, key, r.is_cloze ? r.perplexity : r.acc_norm, 6);
    text_append(&t, "}", 1);
    log_line(log, &t);
    free(t.text);
}

// ---------------------------------------------------------------------------------------------------------
// The sets of a run

typedef struct {
    const char* files;  // --choices: with commas between them
    int every;          // -h: steps between evaluations; 0: none but at --evaluate 1
    int count;
    Choices* set;  // [count]
} ChoicesSets;

#define CHOICES_FREE_TO_CHANGE " --hellaswag --choices"

// Append the rows of the settings. Returns the new count.
static inline int choices_rows(ChoicesSets* s, Flag* table, int count) {
    // clang-format off
    const Flag rows[] = {
        {"-h",  "--hellaswag",      FLAG_INT,    &s->every,            "0",      0, 1e9, NULL, "steps between evaluations on --choices, and one at the end; 0: never", 0},
        {NULL,  "--choices",        FLAG_STRING, &s->files,            "",       0, 0, NULL, "multiple-choice sets for -h and --evaluate 1, with commas between them (dev/data/hellaswag.py, lambada.py)", 0},
    };
    // clang-format on
    return settings_add_rows(table, count, rows, COUNT_OF(rows));
}

// Open the files. Their tokens are to be below V, their endings to fit sequences of T, and all ranks to have the same.
static inline void choices_sets_open(ChoicesSets* s, int V, int T, const Comm* comm) {
    char name[32], other[32];
    Text all = {NULL, 0, 0};
    if (s->every > 0 && !*s->files) die(USAGE, "-h %d: needs --choices, the sets to evaluate on", s->every);
    s->count = 0, s->set = NULL;
    for (const char* p = s->files; *p;) {
        size_t n = strcspn(p, ",");
        char* path = xprintf("%.*s", (int)n, p);
        s->set = (Choices*)xrealloc(s->set, ((size_t)s->count + 1) * sizeof(Choices));
        Choices* set = &s->set[s->count];
        choices_open(set, path, V);
        choices_fit(set, T, comm->rank == 0);
        choices_name(set, name);
        for (int i = 0; i < s->count; i++) {
            choices_name(&s->set[i], other);
            if (strcmp(name, other) == 0)
                die(USAGE, "%s: in logs it would be \"%s\", as %s; give one of them another name", path, name,
                    s->set[i].file);
        }
        text_printf(&all, "%s of %d examples, %08x\n", name, set->count, set->crc);
        s->count++;
        free(path);
        p += n + (p[n] == ',');
    }
    if (s->count) comm_check_same(comm, "the multiple-choice sets", all.text);
    free(all.text);
}

static inline void choices_sets_close(ChoicesSets* s) {
    for (int i = 0; i < s->count; i++) choices_close(&s->set[i]);
    free(s->set);
    s->set = NULL, s->count = 0;
}

#endif
