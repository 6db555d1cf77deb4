/* Evaluate a language model on a multiple-choice set: which ending does it consider most likely?
 *
 *   loss       of an ending: the negative log-likelihood of its tokens after the context, summed
 *   acc        the share of examples whose correct ending has the smallest loss; of equal ones the first
 *   acc_norm   the same, with the loss divided by the ending's tokens, as in llm.c's evaluation; or by its characters,
 *              as in lm-evaluation-harness, if the set has their number
 *   cloze      an example with one ending. It counts in acc if each token of the ending is the model's most likely one
 *              (of equal ones the first). perplexity is exp(mean loss of the endings), as in lm-evaluation-harness
 *
 * Context and ending, without the last token, form a sequence. A micro-batch is packed with as many sequences as fit
 * its rows. The head reads only rows that predict a token of an ending. If a sequence is too long, its context is
 * truncated on the left. Examples are distributed round-robin over the ranks. Sums over ranks are of integers, and of
 * the losses of clozes. */
#ifndef LLMC_CHOICES_MULTIPLE_CHOICE_H
#define LLMC_CHOICES_MULTIPLE_CHOICE_H

#include "llmc/base/log.h"
#include "llmc/base/sequences.h"
#include "llmc/choices/choice_files.h"
#include "llmc/data/batch_lm.h"
#include "llmc/ops/accuracy.h"
#include "llmc/ops/gather.h"
#include "llmc/run/step.h"

// A sequence of a micro-batch: one ending of an example.
typedef struct {
    int label, ending, endings;
    int first, count;  // its rows among the scored ones
    int norm;          // divisor of its loss for acc_norm
} MultipleChoiceSequence;

// All double, for group_sum_counts().
typedef struct {
    double examples, correct, correct_norm, cloze_loss;
    double not_finite;  // endings whose loss is not finite
} MultipleChoiceSums;

// The sets of a run.
typedef struct {
    const char* files;  // --choices: separated by commas
    int every;          // -h: steps between evaluations; 0: none while training
    int count;
    MultipleChoice* set;  // [count]
} MultipleChoiceSets;

typedef struct {
    const MultipleChoice* set;
    int N, T;                 // maximum rows of a micro-batch, maximum tokens of a sequence
    int example, step;        // the next example to pack; the distance between this rank's examples
    int ending;               // its next ending to pack
    MultipleChoiceText text;  // the previous ending
    // The micro-batch, on the host.
    int count, scored;                  // sequences; scored rows
    int *inputs, *rows, *targets;       // [N] tokens; [scored] the scored rows, and their target tokens
    Documents packed;                   // layout of the sequences
    MultipleChoiceSequence* sequences;  // [count]
    real *losses, *correct;             // [scored], [count]
    // The current example: its best ending so far, by loss and by mean loss; -1: no finite loss yet.
    int best, best_norm;
    double best_loss, best_mean;
    MultipleChoiceSums sums;
    // On the device.
    int* device_rows;                // [scored], and from N on the arrays of `packed`
    real* device_correct;            // [count] scored tokens of each cloze that are the model's most likely ones
    const MultipleChoiceSets* sets;  // `set` is number `index` of these
    int index;
} MultipleChoiceEvaluation;

typedef struct {
    double examples, acc;
    int is_cloze;
    double acc_norm, perplexity;  // acc_norm without clozes, perplexity of clozes
    double not_finite;            // endings whose loss is not finite
} MultipleChoiceResult;

// ---------------------------------------------------------------------------------------------------------
// On the host

static inline size_t multiple_choice_device_ints(int N) { return (size_t)N + documents_ints(N); }

// Device memory of an evaluation in micro-batches of N rows.
static inline size_t multiple_choice_device_bytes(int N) {
    return multiple_choice_device_ints(N) * sizeof(int) + (size_t)N * sizeof(real);
}

// End with USAGE if an ending does not fit into T tokens. If only a context does not, warn (with `says`).
static inline void multiple_choice_fit(const MultipleChoice* set, int T, int says) {
    if (set->longest_ending > T)
        die(USAGE, "%s: one of its endings has %d tokens, but sequences have %d at most (-t)", set->file,
            set->longest_ending, T);
    if (set->longest - 1 > T && says)
        warn("%s: its longest example has %d tokens; contexts are cut to sequences of %d", set->file, set->longest, T);
}

// Begin with the examples of rank `rank` of `ranks`. Micro-batches have at most N rows, in sequences of at most T <= N
// tokens, which all endings fit.
static inline void multiple_choice_begin(MultipleChoiceEvaluation* e, const MultipleChoice* set, int N, int T, int rank,
                                         int ranks) {
    CHECK(set->longest_ending <= T && T <= N);
    memset(e, 0, sizeof *e);
    e->set = set;
    e->N = N, e->T = T;
    e->example = rank, e->step = ranks;
    e->inputs = (int*)xcalloc(3 * (size_t)N + documents_ints(N), sizeof(int));
    e->rows = e->inputs + N;
    e->targets = e->rows + N;
    documents_place(&e->packed, e->targets + N, N);
    e->sequences = (MultipleChoiceSequence*)xmalloc((size_t)N * sizeof *e->sequences);  // each has at least one row
    e->losses = (real*)xmalloc((size_t)N * sizeof(real));
    e->correct = (real*)xcalloc((size_t)N, sizeof(real));
}

static inline void multiple_choice_end(MultipleChoiceEvaluation* e) {
    free(e->inputs), free(e->sequences), free(e->losses), free(e->correct);
    memset(e, 0, sizeof *e);
}

// Append context and ending to the micro-batch.
static inline void multiple_choice_put(MultipleChoiceEvaluation* e, MultipleChoiceExample example,
                                       MultipleChoiceText ending, int length) {
    Documents* documents = &e->packed;
    MultipleChoiceText context = example.context;
    MultipleChoiceSequence s;
    s.label = example.label;
    s.ending = e->ending, s.endings = example.endings;
    s.first = e->scored, s.count = ending.length;
    s.norm = example.characters ? example.characters[e->ending] : ending.length;
    int begin = documents->cu_seqlens[e->count], cut = context.length + ending.length - 1 - length;
    for (int t = 0; t < length; t++) {
        int at = cut + t, of_ending = at - context.length;
        e->inputs[begin + t] = of_ending < 0 ? context.tokens[at] : ending.tokens[of_ending];
        documents->document[begin + t] = e->count;
        documents->position[begin + t] = t;
    }
    for (int t = 0; t < ending.length; t++) {
        e->rows[e->scored] = begin + length - ending.length + t;
        e->targets[e->scored++] = ending.tokens[t];
    }
    documents->sum_sq_len += (int64_t)length * length;
    documents->longest = max_int(documents->longest, length);
    documents->cu_seqlens[e->count + 1] = begin + length;
    e->sequences[e->count++] = s;
    documents->count = e->count;
}

// Pack the next micro-batch. Returns its rows, 0 if all examples are done.
static inline int multiple_choice_pack(MultipleChoiceEvaluation* e) {
    e->count = e->scored = e->packed.count = e->packed.longest = e->packed.cu_seqlens[0] = 0;
    e->packed.sum_sq_len = 0;
    while (e->example < e->set->count) {
        MultipleChoiceExample example = multiple_choice_example(e->set, e->example);
        MultipleChoiceText ending = multiple_choice_next(e->ending ? e->text : example.context);
        int length = min_int(example.context.length + ending.length - 1, e->T);
        if (e->packed.cu_seqlens[e->count] + length > e->N) break;
        multiple_choice_put(e, example, ending, length);
        e->text = ending;
        if (++e->ending == example.endings) e->ending = 0, e->example += e->step;
    }
    return e->packed.cu_seqlens[e->count];
}

// Add the micro-batch to the sums, from the losses of its scored rows and, for clozes only, the number of correct
// tokens of each sequence.
static inline void multiple_choice_score(MultipleChoiceEvaluation* e, const real* losses, const real* correct) {
    for (int i = 0; i < e->count; i++) {
        const MultipleChoiceSequence* s = &e->sequences[i];
        double loss = 0, mean;
        for (int k = 0; k < s->count; k++) loss += (double)losses[s->first + k];
        mean = loss / s->norm;
        e->sums.not_finite += !isfinite(loss);
        if (s->ending == 0) e->best = e->best_norm = -1, e->best_loss = e->best_mean = INFINITY;
        if (loss < e->best_loss) e->best = s->ending, e->best_loss = loss;
        if (mean < e->best_mean) e->best_norm = s->ending, e->best_mean = mean;
        if (s->ending + 1 < s->endings) continue;
        int is_cloze = s->endings == 1;
        e->sums.examples++;
        e->sums.correct += is_cloze ? (double)correct[i] == s->count : e->best == s->label;
        e->sums.correct_norm += e->best_norm == s->label;
        if (is_cloze) e->sums.cloze_loss += loss;
    }
}

// Compute the result over all ranks from this rank's sums.
static inline MultipleChoiceResult multiple_choice_result(const MultipleChoiceEvaluation* e,
                                                          const ProcessGroup* group) {
    MultipleChoiceSums sums = e->sums;
    group_sum_counts(group, (double*)&sums, sizeof sums / sizeof(double));
    MultipleChoiceResult r;
    r.examples = sums.examples;
    r.acc = sums.correct / sums.examples;
    r.is_cloze = e->set->is_cloze;
    r.acc_norm = sums.correct_norm / sums.examples;
    r.perplexity = exp(sums.cloze_loss / sums.examples);
    r.not_finite = sums.not_finite;
    return r;
}

// ---------------------------------------------------------------------------------------------------------
// Results

static inline void multiple_choice_print(const MultipleChoice* set, MultipleChoiceResult r) {
    char name[32];
    multiple_choice_name(set, name);
    printf("%s acc %.6f, ", name, r.acc);
    if (set->chance > 0) printf("chance %.6f, ", set->chance);
    if (r.is_cloze) printf("perplexity %.3f", plain_nan(r.perplexity));
    else printf("acc_norm %.6f", r.acc_norm);
    printf(" (%.0f examples)\n", r.examples);
}

// Write a line to the log and the terminal; with --evaluate only to the terminal.
static inline void multiple_choice_show(Run* r, const MultipleChoice* set, MultipleChoiceResult result) {
    char name[32], key[48];
    multiple_choice_name(set, name);
    snprintf(key, sizeof key, "a loss on %s", name);
    if (result.not_finite > 0) run_check_finite(r, key, NAN);
    if (!r->settings.evaluate) log_print_step(r->step, r->last);
    multiple_choice_print(set, result);
    fflush(stdout);
    if (r->settings.evaluate) return;
    Text t = {NULL, 0, 0};
    text_append(&t, "{", 1);
    json_put_integer(&t, "step", r->step);
    log_put(&t, set->key, result.acc, 6);
    snprintf(key, sizeof key, result.is_cloze ? "%s_perplexity" : "%s_acc_norm", name);
    log_put(&t, key, result.is_cloze ? result.perplexity : result.acc_norm, 6);
    text_append(&t, "}", 1);
    log_line(&r->log, &t);
    free(t.text);
}

// ---------------------------------------------------------------------------------------------------------
// With the model, which runs between multiple_choice_load() and multiple_choice_take()

// The set after set i whose score the log lacks; s->count: none. A new model scores none, --evaluate all.
static inline int multiple_choice_next_set(const MultipleChoiceSets* s, int i, const Run* r) {
    do i++;
    while (i < s->count && !r->settings.evaluate && (r->step == 0 || run_has_result(r, s->set[i].key)));
    return i;
}

// Begin the evaluation of this rank's share of the set after set i, and allocate device memory. e->set NULL: no more.
static inline void multiple_choice_evaluation_next(MultipleChoiceEvaluation* e, const MultipleChoiceSets* sets, int i,
                                                   int N, int T, Run* r) {
    i = multiple_choice_next_set(sets, i, r);
    e->set = NULL;
    if (i == sets->count) return;
    multiple_choice_begin(e, &sets->set[i], N, T, r->group.rank, r->group.size);
    e->sets = sets, e->index = i;
    e->device_rows = (int*)device_alloc(&r->ctx, multiple_choice_device_ints(N) * sizeof(int), "batch");
    e->device_correct = (real*)device_alloc(&r->ctx, (size_t)N * sizeof(real), "batch");
}

// End the evaluation of a set and begin that of the next. Show the result, unless a `signal` to any rank has ended it.
static inline void multiple_choice_evaluation_end(MultipleChoiceEvaluation* e, Run* r, int signal) {
    const MultipleChoiceSets* sets = e->sets;
    MultipleChoiceResult result = multiple_choice_result(e, &r->group);
    int i = e->index, N = e->N, T = e->T;
    if (!group_any(&r->group, signal != 0)) multiple_choice_show(r, e->set, result);
    device_free(e->device_rows, multiple_choice_device_ints(N) * sizeof(int));
    device_free(e->device_correct, (size_t)N * sizeof(real));
    multiple_choice_end(e);
    multiple_choice_evaluation_next(e, sets, i, N, T, r);
}

// Upload the next micro-batch: inputs [N], targets [e->scored] of the rows e->device_rows, and the sequences. Returns 0
// if all sets are done, or after a `signal` (0: none).
static inline int multiple_choice_load(MultipleChoiceEvaluation* e, int* inputs, int* targets, Sequences* sequences,
                                       Run* r, int signal) {
    Context* ctx = &r->ctx;
    int rows = 0;
    while (e->set && !rows) {
        group_begin_work(&r->group);
        rows = signal ? 0 : multiple_choice_pack(e);
        if (!rows) multiple_choice_evaluation_end(e, r, signal);
    }
    if (!rows) return 0;
    Documents on_device;
    Sequences s;
    memset(&s, 0, sizeof s);
    s.rows = rows, s.count = e->count;
    s.max_length = e->packed.longest, s.sum_sq_len = e->packed.sum_sq_len;
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

// Gather the scored rows of x [N, C] into y.
static inline void multiple_choice_gather(floatX* y, const floatX* x, const MultipleChoiceEvaluation* e, int C,
                                          Context* ctx) {
    gather_forward(y, x, e->device_rows, e->scored, C, ctx);
}

// Add the micro-batch to the sums, from losses [e->scored] and logits [e->scored, Vp] of its scored rows.
static inline void multiple_choice_take(MultipleChoiceEvaluation* e, const real* losses, const floatX* logits,
                                        const int* targets, int V, int Vp, Context* ctx) {
    int clozes = 0;
    for (int i = 0; i < e->count; i++) {
        const MultipleChoiceSequence* s = &e->sequences[i];
        if (s->endings > 1) continue;
        clozes++;
        accuracy_forward(e->device_correct + i, logits + (size_t)s->first * (size_t)Vp, targets + s->first, s->count, V,
                         Vp, SET, ctx);
    }
    device_download(ctx, e->losses, losses, (size_t)e->scored * sizeof(real));
    if (clozes) device_download(ctx, e->correct, e->device_correct, (size_t)e->count * sizeof(real));
    multiple_choice_score(e, e->losses, e->correct);
}

// ---------------------------------------------------------------------------------------------------------
// The sets of a run

// The key of the last set's score in log.jsonl; NULL without sets.
static inline const char* multiple_choice_last_key(const MultipleChoiceSets* s) {
    return s->count ? s->set[s->count - 1].key : NULL;
}

// Append the rows of the settings. Returns the new count.
static inline int multiple_choice_rows(MultipleChoiceSets* s, Flag* table, int count) {
    // clang-format off
    const Flag rows[] = {
        {"-h", "--hellaswag", FLAG_INT,    &s->every, "0", 0, 1e9, NULL, SCOPE_FREE, TOPIC_VALIDATION,
         "Steps between evaluations on --choices, and one at the end. 0: never."},
        {NULL, "--choices",   FLAG_STRING, &s->files, "",  0, 0,   NULL, SCOPE_FREE, TOPIC_VALIDATION,
         "Multiple-choice sets to evaluate on, separated by commas (dev/data/hellaswag.py, lambada.py)."},
    };
    // clang-format on
    return settings_add_rows(table, count, rows, COUNT_OF(rows));
}

// Open the files. Their tokens must be below V, their endings fit sequences of T, and all ranks have the same files.
static inline void multiple_choice_sets_open(MultipleChoiceSets* s, int V, int T, const ProcessGroup* group) {
    char name[32], other[32];
    Text all = {NULL, 0, 0};
    if (s->every > 0 && !*s->files) die(USAGE, "-h %d: needs --choices, the sets to evaluate on", s->every);
    s->count = 0, s->set = NULL;
    for (const char* p = s->files; *p;) {
        size_t n = strcspn(p, ",");
        char* path = xprintf("%.*s", (int)n, p);
        s->set = (MultipleChoice*)xrealloc(s->set, ((size_t)s->count + 1) * sizeof(MultipleChoice));
        MultipleChoice* set = &s->set[s->count];
        multiple_choice_open(set, path, V);
        multiple_choice_fit(set, T, group->rank == 0);
        multiple_choice_name(set, name);
        snprintf(set->key, sizeof set->key, "%s_acc", name);
        for (int i = 0; i < s->count; i++) {
            multiple_choice_name(&s->set[i], other);
            if (strcmp(name, other) == 0)
                die(USAGE, "%s: in logs it would be \"%s\", as %s; give one of them another name", path, name,
                    s->set[i].file);
        }
        text_printf(&all, "%s of %d examples, %08x\n", name, set->count, set->crc);
        s->count++;
        free(path);
        p += n + (p[n] == ',');
    }
    if (s->count) group_check_same(group, "the multiple-choice sets", all.text);
    free(all.text);
}

static inline void multiple_choice_sets_close(MultipleChoiceSets* s) {
    for (int i = 0; i < s->count; i++) multiple_choice_close(&s->set[i]);
    free(s->set);
    s->set = NULL, s->count = 0;
}

#endif
