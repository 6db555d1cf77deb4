/* A run: the parts of a trainer that do not depend on its model and data. A trainer calls the functions in this order:
 *
 *   run_parse         parse the flags
 *   run_join          join the other ranks, open the device, find the checkpoint to resume and the data
 *   run_find_model    find the model's directory and weights
 *   run_search_batch  plan the memory. If it does not fit, report the largest micro-batch that does, and exit
 *   run_check_ranks   check that all ranks train the same model on the same data
 *   run_init_model    allocate the model's buffers and the optimizer, and set the weights
 *   run_begin         open the log. From here on the run writes files
 *   run_next_step     whether another step follows. The trainer launches it (step.h):
 *     run_begin_step, for each micro-batch run_begin_micro_batch and run_end_micro_batch, then run_all_reduce,
 *     run_update, run_read_results
 *   run_end_step      read and log results. Then do what is due by the trainer's table, such as validation (evaluate.h)
 *   run_end           the last results, the last checkpoint, the plot
 *   run_close */
#ifndef LLMC_RUN_RUN_H
#define LLMC_RUN_RUN_H

#include "llmc/base/process.h"
#include "llmc/base/rooms.h"
#include "llmc/run/find_files.h"
#include "llmc/run/recipe.h"
#include "llmc/run/step.h"

// ---------------------------------------------------------------------------------------------------------
// Start. Nothing is written until run_begin()

// Refuse settings that contradict --keep-best or --ema. The settings of a checkpoint must be known by now.
static inline void run_check_kept(Run* r, int has_val) {
    const Settings* s = &r->settings;
    if (s->evaluate) return;
    if (s->keep_best && (s->val_every == 0 || !has_val))
        die(USAGE, "--keep-best 1 goes by the validation loss; give -v and validation data (-j)");
    if (s->keep_best && !*s->out) die(USAGE, "--keep-best 1 and -o '': there is nowhere to keep a checkpoint");
    if (s->ema > 0 && s->fp8) die(USAGE, "--ema does not combine with --fp8, whose scales follow the last weights");
    if (s->ema == 0 && s->ema_start > 1 && flag_is_given(r->flags, r->flag_count, "--ema-start"))
        die(USAGE, "--ema-start: needs --ema");
}

// Parse the command line into the rows of r->flags, and then the recipe that it names, unless -y 1 takes the flags from
// a checkpoint. `usage`: the first line of --help.
static inline void run_parse(Run* r, int flag_count, int argc, char** argv, const char* usage) {
    r->flag_count = flag_count;
    flags_parse(r->flags, flag_count, argc, argv, usage);
    if (!*r->settings.recipe) return;
    r->skips_recipe = r->settings.resume && run_count_checkpoints(r->settings.out) > 0;
    if (!r->skips_recipe) recipe_apply(r->flags, flag_count, r->settings.recipe);
}

// Compare the current values of all flags among the ranks, except those of SCOPE_RANK, which may differ. If two ranks
// differ, all end with USAGE, and the message has the two ranks and the difference.
static inline void run_check_same_flags(const Run* r) {
    Text settings = {NULL, 0, 0};
    char value[FLAG_TEXT_SIZE];
    for (int i = 0; i < r->flag_count; i++) {
        const Flag* row = &r->flags[i];
        if (row->scope == SCOPE_RANK) continue;
        flags_format_value(row, value, sizeof value);
        text_printf(&settings, "%s %s\n", row->long_name,
                    row->type == FLAG_STRING ? *(const char* const*)row->value : value);
    }
    group_check_same(&r->group, "the settings", settings.text);
    free(settings.text);
}

// Join the other ranks, open the device, and find the checkpoint to resume, the data and its directory. `builtin`: the
// data that an empty -i selects; NULL: none, because the run needs no data.
static inline void run_join(Run* r, const char* builtin) {
    const Settings* s = &r->settings;
    Context* ctx = &r->ctx;
    int trains = !s->evaluate && s->steps != 0;
    group_init(&r->group, s->timeout);
    flags_refuse_rooms(r->flags, r->flag_count);
    settings_check(s);
    r->out = r->group.rank == 0 ? s->out : "";
    // An evaluation ends when its output is closed (SIGPIPE); training continues.
    if (trains) signal(SIGPIPE, SIG_IGN);
    // Rank 0 prints for all. Each rank reports its own errors.
    if (r->group.rank > 0 && !freopen("/dev/null", "w", stdout)) die(FAILED, "/dev/null: %s", strerror(errno));
    run_check_same_flags(r);  // first, because the flags determine what the ranks do together
    device_choose(r->group.local_rank);
    context_init(ctx);
    device_set_threads(s->threads);
    if (trains) run_lock(r, 0);
    if (s->resume || (trains && !s->overwrite)) run_find_checkpoint(r);
    // No checkpoint is usable: a new run needs the recipe. OUT is open and stays.
    if (r->skips_recipe && !r->checkpoint) {
        settings_find(r->flags, r->flag_count, "--output")->is_set |= FLAG_IS_GIVEN;
        recipe_apply(r->flags, r->flag_count, s->recipe);
        settings_check(s);
    }
    device_set_matmul(ctx, s->autotune, s->tf32);
    if (r->restored.matmul_plans) matmul_plans_load(ctx, r->restored.matmul_plans);
    if (builtin) find_data(s, builtin, &r->train_pattern, &r->val_pattern);
    const char* data = *s->train_data ? s->train_data : r->train_pattern;
    r->data_directory = data ? directory_of(data) : NULL;
}

// Find the model to start from: the checkpoint to resume, else the newest checkpoint of the run in the directory
// `other` ("": none), which the flag `flag` names, else -e.
static inline void run_find_model(Run* r, const char* flag, const char* other) {
    run_find_start(r, flag, other);
    r->hub = r->start ? NULL : hub_find(r->settings.model);
    r->source = r->start ? r->start : r->hub ? r->hub : r->settings.model;
    find_model(r->source, &r->directory, &r->weights);
}

// The sequence length: -t, or by default the model's number of positions. Sets r->micro_steps, the micro-batches per
// step on each rank. A step has --total-batch tokens. Without that flag, a resumed run keeps its number of sequences,
// and a new run has one micro-batch per rank. An evaluation has one.
static inline int run_sequence_length(Run* r, int positions) {
    const int B = r->settings.B, T = r->settings.T ? r->settings.T : positions;
    int64_t total_batch = r->settings.total_batch, ranks = r->group.size, micro_tokens = (int64_t)B * T * ranks;
    if (T > positions) die(USAGE, "-t %d: the model knows %d positions; choose at most that", T, positions);
    if (r->settings.evaluate) total_batch = r->step_sequences = 0;
    if ((int64_t)B * T > 1 << 30)
        die(USAGE, "-b %d: a micro-batch of -t %d has more than 2^30 tokens; use -d for large steps", B, T);
    if (total_batch % micro_tokens != 0)
        die(USAGE, "-d %lld: is not a multiple of the %lld tokens of a micro-batch over all ranks (-b x -t x ranks)",
            (long long)total_batch, (long long)micro_tokens);
    if (total_batch / T > INT_MAX || B * ranks > INT_MAX)
        die(USAGE, "-d %lld: %lld sequences of -t %d in a step exceed the maximum of %d", (long long)total_batch,
            (long long)(total_batch ? total_batch / T : B * ranks), T, INT_MAX);
    int64_t sequences = total_batch ? total_batch / T : r->step_sequences ? r->step_sequences : B * ranks;
    if (sequences % (B * ranks) != 0)
        die(USAGE,
            "%s: its run has %lld sequences in a step, which %lld ranks of -b %d cannot share; change the number of "
            "ranks, or give -b or -d with --override 1",
            r->checkpoint, (long long)sequences, (long long)ranks, B);
    r->step_sequences = sequences;
    r->micro_steps = (int)(sequences / (B * ranks));
    return T;
}

// The run ends after --steps, or after --epochs passes over the data's `sequences`. Sets the schedule, too.
static inline void run_set_last(Run* r, uint64_t sequences) {
    const Settings* s = &r->settings;
    int64_t all = (int64_t)(s->epochs * (double)sequences / (double)r->step_sequences);
    r->last = s->steps > 0 ? s->steps : all > 0 ? all : 1;
    r->end = s->stop_after > 0 && s->stop_after < r->last ? s->stop_after : r->last;
    settings_check_average(s, r->last);
    settings_check_profile(s, r->end - r->step);
    Schedule schedule = {.kind = (ScheduleKind)s->schedule, .peak = s->lr, .warmup = s->warmup, .total = r->last};
    schedule.final_fraction = s->final_fraction, schedule.power = s->poly_power;
    r->schedule = schedule;
}

// The optimizer's settings: update rule, master weights, sharding. All ranks call it.
static inline UpdateSettings run_update_settings(const Run* r) {
    const Settings* s = &r->settings;
    int is_muon = optimizer_is_muon(s->optimizer);
    GradSyncSettings sums = {
        .zero = s->zero, .bucket_mib = s->bucket, .has_p2p = has_p2p(&r->group), .whole_matrices = is_muon};
    UpdateSettings update;
    memset(&update, 0, sizeof update);
    update.kind = (OptimizerKind)s->optimizer;
    update.master = s->master_weights ? WITH_MASTER : NO_MASTER;
    update.rank = r->group.rank, update.ranks = r->group.size;
    update.sums = sums;
    update.keeps_average = s->ema > 0;
    update.adamw_rate = s->adamw_lr / s->lr;
    return update;
}

// A binary search for the largest micro-batch that fits into memory.
typedef struct {
    int low, high;  // the largest size that fits is one of these
    int B;          // the size to plan next
    UpdateSettings update;
} BatchSearch;

// The caller plans the tables for each size that run_next_batch() asks for: first the size of -b, and if it does not
// fit, others.
static inline BatchSearch run_search_batch(const Run* r) {
    BatchSearch search;
    memset(&search, 0, sizeof search);
    search.high = r->settings.B;
    search.update = run_update_settings(r);
    return search;
}

// Returns 1 if the caller must plan `b` for micro-batches of search->B sequences, 0 if the plan for -b fits. If -b does
// not fit, reports the largest size that does, and exits. With --steps 0, prints settings, tensors and plan, and exits.
static inline int run_next_batch(Run* r, BatchSearch* search, ModelBuffers* b) {
    if (!search->B) {
        search->B = search->high;
        return 1;
    }
    b->fp8.is_wanted = r->settings.fp8, b->fp8.keeps_x = !b->table.fixed && r->settings.recompute == RECOMPUTE_NOTHING;
    b->fp8.exact_forward = r->settings.fp8_exclude_forward;
    b->fp8.steps = r->settings.fp8_steps;
    fp8_state_plan(&b->fp8, &b->table, b->step.N);
    MemoryPlan plan = model_buffers_memory(b, search->update, &r->ctx);
    int fits = memory_plan_fits(plan);
    if (search->B == r->settings.B) {
        r->plan = plan;
        if (r->settings.steps == 0) memory_plan_show(r->flags, r->flag_count, &b->table, &plan, &r->group);
        if (fits) return 0;
    }
    if (fits) search->low = search->B;
    else search->high = search->B - 1;
    if (search->low == search->high) memory_plan_refuse(&r->plan, search->low);
    model_buffers_free_tables(b);
    search->B = (search->low + search->high + 1) / 2;
    return 1;
}

// Check that all ranks train the same model on the same data with the same settings, which may by now be a
// checkpoint's. `config`: the text of config.json; the run takes ownership. `val`: fingerprint of the validation data;
// 0: none.
static inline void run_check_ranks(Run* r, Text config, int has_val, uint32_t val) {
    char fingerprints[48];
    r->config = config, r->has_val = has_val;
    flags_refuse_rooms(r->flags, r->flag_count);
    r->val_every = has_val ? r->settings.val_every : 0;
    run_check_kept(r, has_val);
    run_check_same_flags(r);
    snprintf(fingerprints, sizeof fingerprints, "training %08x\nvalidation %08x", r->data, val);
    group_check_same(&r->group, "the type of the build", FLOATX_NAME);
    group_check_same(&r->group, "the model", config.text);
    group_check_same(&r->group, "the data's fingerprint", fingerprints);
}

// Set the optimizer's loss scale and outlier limits from the settings, and their state from the checkpoint.
static inline void run_set_loss_scale(Run* r) {
    const double automatic = strcmp(FLOATX_NAME, "F16") == 0 ? 65536 : 0;
    double start = r->settings.loss_scale < 0 ? automatic : r->settings.loss_scale;
    LossScaleRule rule = {.kind = start > 0 ? LOSS_SCALE_DYNAMIC : LOSS_SCALE_FIXED,
                          .growth_interval = LOSS_SCALE_GROWTH};
    LossScale state = r->restored.scale;
    if (start == 0 || state.scale == 0) state.scale = start > 0 ? (real)start : 1, state.good = 0;
    OutlierLimits limits = {.loss = r->settings.loss_outlier, .norm = r->settings.norm_outlier};
    optimizer_set_loss_scale(&r->optimizer, state, rule, &r->ctx);
    optimizer_set_outliers(&r->optimizer, &r->restored.outliers, limits, &r->ctx);
}

// Allocate the model's buffers and the optimizer, and connect them. If the run starts from a checkpoint, load its
// weights and moments; otherwise the caller sets the weights.
static inline void run_alloc(Run* r, ModelBuffers* b) {
    r->buffers = b;
    model_buffers_alloc(b, &r->ctx);
    optimizer_join(&r->optimizer, &r->grad_sync, &b->table, run_update_settings(r), &r->group, &r->ctx);
    run_set_loss_scale(r);
    b->grad_sync = r->group.size > 1 ? &r->grad_sync : NULL;
    b->loss_scale = &r->optimizer.loss_scale->scale;
    b->master = r->optimizer.master;
    run_open_steps(r);
    r->average.decay = r->settings.ema, r->average.start = r->settings.ema_start;
    fp8_state_set(&b->fp8, r->restored.fp8, r->checkpoint, &r->ctx);
    fp8_state_switch(&b->fp8, r->step);
    if (r->start) run_load_start(r);
}

// After setting the weights: check that they are equal on all ranks, and share the fp32 copies. Files with the same
// name may differ between machines, and with ZeRO-1 each rank would broadcast a shard of its own file.
static inline void run_share(Run* r) {
    const ModelBuffers* b = r->buffers;
    const TensorPart weights = {.prefix = "", .device = b->params, .type = VIEW_FLOATX};
    char hash[16];
    if (r->group.size > 1) {
        snprintf(hash, sizeof hash, "%08x", tensor_part_hash(&weights, b->table.elements, &r->ctx));
        group_check_same(&r->group, "the initial weights (CRC-32)", hash);
    }
    model_buffers_share(b, &r->ctx);
}

// Allocate as run_alloc() does, and set the weights: from the checkpoint, else from the model's file, else random.
// Tensors that the file may lack keep their random values.
static inline void run_init_model(Run* r, ModelBuffers* b, WeightRules rules) {
    int is_zero_out = r->settings.init == INIT_ZERO_OUT;
    if (is_zero_out && !r->start && r->weights && !r->settings.evaluate)
        die(USAGE, "--init zero-out is for a new model, but %s has weights; leave one out", r->weights);
    if (is_zero_out) rules.file.init.residual_std = 0;
    rules.file.init.seed = (uint64_t)r->settings.seed;
    run_alloc(r, b);
    if (!r->start && !r->weights) model_buffers_init(b, &r->optimizer, &rules, rules.file.init.seed, &r->ctx);
    if (!r->start && r->weights) model_buffers_read(b, &r->optimizer, r->weights, &rules.file, &r->ctx);
    run_share(r);
}

// ---------------------------------------------------------------------------------------------------------
// Begin, save, end

// Print the first lines of a run. `step_tokens`: in a step over all ranks. `about`: "" if exact, else "about " or
// "at most ".
static inline void run_print_start(const Run* r, uint64_t tokens, const char* about, double step_tokens) {
    int64_t step = r->step, last = r->last;
    Schedule schedule = r->schedule;
    schedule.peak = 1;  // so its rates are parts of -l
    printf("%zu parameters, %s | %llu training tokens, %s%.0f a step | ", r->buffers->table.parameters,
           r->start ? r->start : r->settings.model, (unsigned long long)tokens, about, step_tokens);
    if (step < last) printf("steps %lld to %lld | ", (long long)step + 1, (long long)last);
    else printf("no steps left: step %lld is done, the last one is %lld | ", (long long)step, (long long)last);
    printf("%d CPU threads | ", device_threads());
    if (r->group.size > 1 && r->settings.passes != PASSES_FORWARD)
        printf("%d ranks, gradients summed %s | ", r->group.size,
               r->grad_sync.at_once ? "at once" : "bucket by bucket");
    printf("100 %% mfu is %.4g TFLOP/s%s, %s\n", 1e-12 * r->peak_flops / r->group.size,
           r->group.size > 1 ? " a rank" : "",
           r->peak_is_measured ? "measured on a large matmul" : "the data sheet's peak");
    if (schedule.warmup > last && step < last)
        printf("the warm-up (-u %lld) is longer than the run: the learning rate ends at %.3g of -l\n",
               (long long)schedule.warmup, schedule_at(&schedule, last - 1));
    memory_plan_print(stdout, &r->plan);
}

// Lock OUT, open the log with the settings as its first line, and delete what an earlier run has left.
static inline void run_open_directory(Run* r) {
    Text settings = {NULL, 0, 0};
    int64_t resumed = r->checkpoint ? r->step : -1;
    run_check_lock(r);
    if (*r->out) run_refuse_foreign(r);
    if (*r->out) run_directory_prepare(r->out);
    int was_open = *r->out && !r->lock.path && !r->settings.overwrite;  // other runs could lock it until now
    run_lock(r, O_CREAT);
    if (was_open && run_count_checkpoints(r->out) != r->earlier)
        die(USAGE, "%s: another run has saved there since this one started; choose another -o", r->out);
    group_barrier(&r->group);  // the lock exists now
    log_open(&r->log, r->out, resumed);
    // A run that was killed may have logged a validation of its step after the checkpoint.
    for (size_t i = 0; i < r->log.result_count && r->settings.keep_best; i++)
        if (strcmp(r->log.results[i].key, "val_loss") == 0 && r->log.results[i].step == r->step)
            best_judge(&r->best, r->step, r->log.results[i].value);
    if (r->settings.keep_best) group_broadcast(&r->group, &r->best, sizeof r->best);
    if (*r->out) run_delete_earlier(r);
    if (*r->out) checkpoint_clean(r->out, r->checkpoint, resumed);
    flags_to_json(&settings, r->flags, r->flag_count);
    log_line(&r->log, &settings);
    free(settings.text);
    r->writer = (CheckpointWriter*)xcalloc(1, sizeof *r->writer);
    writer_open(r->writer, &r->group, &r->log, resumed);
}

// From here on the run writes files. Prints the first line, with the number of training tokens (`tokens`) and of tokens
// in a step over all ranks (`step_tokens`), which `about` qualifies. `due`: what is due every N steps, until the end.
static inline void run_begin(Run* r, const DueWork* due, size_t count, uint64_t tokens, const char* about,
                             double step_tokens) {
    run_open_directory(r);
    run_begin_steps(r);
    run_print_start(r, tokens, about, step_tokens);
    r->due = due, r->due_count = (int)count;
    r->average.saved = -1;  // a run that was killed may lack the average of the last checkpoint, which follows it
    run_catch_up(r);
}

// Report how the run ended, after the last save. Ends with FAILED if the save failed. All ranks call it.
static inline void run_report_end(Run* r, int failed) {
    const Settings* s = &r->settings;
    run_check_lock(r);
    if (r->best.step > 0 && s->keep_best)
        printf("lowest validation loss: %.4f after step %lld\n", r->best.loss, (long long)r->best.step);
    if (r->average.decay > 0 && !s->evaluate && !weight_average_is_on(&r->average, r->step))
        printf("no average of the weights: --ema-start %lld is not reached\n", (long long)s->ema_start);
    if (r->stop)
        printf("stopped by signal %d after step %lld%s\n", r->stop, (long long)r->step,
               failed || r->writer->saved != r->step ? "" : ", saved");
    if (failed)
        die(FAILED, "%s: the state after step %lld could not be saved; make room there, then resume with -y 1", s->out,
            (long long)r->step);
}

// After the last step: read and log the remaining results, save, draw the plot, and report a profile with the energy of
// ops, or an incomplete profile, and how the run ended.
static inline void run_end(Run* r, const char* title) {
    Profiler* profiler = &r->profiler;
    run_finish_steps(r, 0);
    group_begin_work(&r->group);
    run_save(r);
    int failed = writer_finish(r->writer) != 0 || r->save_failed;
    log_write_svg(&r->log, title);
    int is_measured = profiler_measure_ops(profiler, &r->group, &r->ctx);
    ProfiledRun run = run_profiled(r);
    if (is_measured) profiler_report(stdout, profiler, &run);
    else if (r->stop) profiler_stop(stdout, profiler, &run);
    step_graph_report(&r->graph);
    run_report_end(r, failed);
}

// Free the model's buffers and everything else of the run.
static inline void run_close(Run* r) {
    model_buffers_free(r->buffers);
    run_close_steps(r);
    optimizer_free(&r->optimizer);
    log_close(&r->log);
    if (r->writer) writer_close(r->writer);
    free(r->writer);
    run_lock_close(&r->lock);
    tokenizer_free(&r->tokenizer);
    tokenizer_files_free(&r->tokenizer_files);
    matmul_plans_free(&r->ctx);
    grad_sync_close(&r->grad_sync);
    context_free(&r->ctx);
    group_close(&r->group);
    state_free(&r->restored);
    flags_free(r->flags, r->flag_count);
    free(r->train_pattern), free(r->val_pattern), free(r->data_directory), free(r->checkpoint);
    free(r->start), free(r->hub), free(r->directory), free(r->weights), free(r->config.text);
}

#endif
