/* The part of both trainers that does not depend on the model: flags, what they refuse, the memory plan, the run.
 * Included by a trainer once its Trainer is defined. */
#ifndef DEV_RECSYS_RECOMMENDER_H
#define DEV_RECSYS_RECOMMENDER_H

#ifdef PRECISION_FP16
#error "the backward pass has no loss scale: build it in bf16 or fp32"
#endif

enum { RECOMMENDER_MOST_SAMPLES = 1 << 21 };  // of a batch

static volatile sig_atomic_t stop_signal;
static void on_signal(int number) { stop_signal = number; }

// Each trainer defines these.
static int settings_flags(Trainer* t, Flag* table);
static void open_data(Trainer* t);  // opens or generates t->data and sets t->samples, checked against the settings
static void close_data(Trainer* t);
static Config config_from_settings(const Trainer* t);                   // the model that -e describes
static void train_samples(Trainer* t, uint64_t epoch, uint64_t first);  // a step from number `first` of the epoch on
static void validate(Run* r);  // score the held-out data, and log the result; with --evaluate print it

// ---------------------------------------------------------------------------------------------------------
// Settings and startup

// Take the flags that neither recommender uses out of the table, and those of `others` [count]. Their settings keep the
// defaults. Returns the number of rows left.
static inline int recommender_rows(Flag* table, int rows, const char* const* others, size_t count) {
    // clang-format off
    static const char* const neither[] = {
        "--val-data", "--val-batches", "--zero", "--shuffle", "--seq-len", "--total-batch", "--recompute", "--master-weights",
        "--optimizer", "--weight-decay", "--cautious-decay", "--clip", "--adamw-lr", "--init",
        "--muon-warmup", "--loss-outlier", "--norm-outlier", "--loss-scale", "--mode", "--graph", "--fp8", "--fp8-steps", "--fp8-exclude-forward"};
    // clang-format on
    char error[FLAG_ERROR_SIZE];
    settings_default(table, rows, "--clip", "0");  // the norm covers the MLPs only
    for (size_t i = 0; i < COUNT_OF(neither) + count; i++) {
        Flag* row = settings_find(table, rows, i < COUNT_OF(neither) ? neither[i] : others[i - COUNT_OF(neither)]);
        CHECK(flags_assign(row, row->default_text, error) == 0);
        memmove(row, row + 1, (size_t)(table + --rows - row) * sizeof *row);
    }
    settings_help(table, rows, "--batch", "Samples per step.");
    settings_find(table, rows, "--batch")->max = RECOMMENDER_MOST_SAMPLES;
    return rows;
}

// Check and open everything that the run needs. Nothing is written until all checks have passed.
static void trainer_open(Trainer* t, int argc, char** argv, const char* type, const char* usage) {
    Run* r = &t->run;
    const Settings* s = &r->settings;
    Model* m = &t->model;
    run_parse(r, settings_flags(t, r->flags), argc, argv, usage);
    run_join(r, NULL);
    if (r->group.size > 1)
        group_die(&r->group, USAGE, "%d ranks: a recommender trains on one; start it without mpirun", r->group.size);
    if (s->evaluate && !r->checkpoint) die(USAGE, "--evaluate 1: needs a trained model; name its run with -y 1 -o DIR");
    open_data(t);
    t->epoch_steps = t->samples / (uint64_t)s->B;  // the last part of a batch is dropped
    if (!t->epoch_steps) die(USAGE, "-b %d: an epoch has %llu samples", s->B, (unsigned long long)t->samples);
    run_find_model(r, "", "");
    model_plan(m, config_from_settings(t), s->B);
    run_sequence_length(r, 1);
    // The run allocates gradients and moments of the tables too.
    size_t n = m->buffers.table.elements;
    MemoryPlan plan = {{{"parameters", n * sizeof(floatX)},
                        {"gradients", n * sizeof(real)},
                        {"optimizer", optimizer_bytes(n, WITH_MASTER)},
                        {"activations", m->buffers.acts_table.elements * sizeof(floatX) +
                                            m->buffers.stats_table.elements * sizeof(real)},
                        {"batch", batch_loader_bytes(&t->data, s->B)},
                        {"segments", model_segments_bytes(m)},
                        {"workspace", device_workspace_bytes()}},
                       device_memory_available() + device_workspace_bytes(),
                       0};
    r->plan = plan;
    if (s->steps == 0) memory_plan_show(r->flags, r->flag_count, &m->buffers.table, &plan, &r->group);
    double needed = (double)memory_plan_bytes(&plan) / 1048576, available = (double)plan.available / 1048576;
    if (needed > available)
        die(USAGE,
            "the run needs %.1f MiB, but %.1f MiB are available; choose a smaller -e or -b (-x 0 prints the plan)",
            needed, available);
    run_check_data(r, t->data.fingerprint, *s->train_data ? s->train_data : "the generated data");
    Text config = {NULL, 0, 0};  // config.json; the sizes of tables are in the weights
    text_printf(&config, "{\"model_type\": \"%s\"", type);
    json_put_string(&config, "sizes", s->model);
    text_append(&config, "}\n", 2);
    run_check_ranks(r, config, t->data.held_out != 0, t->data.fingerprint);  // samples, or an item of each user
    run_set_last(r, t->epoch_steps * (uint64_t)s->B);
    run_alloc(r, &m->buffers);
    model_alloc(m, &r->ctx);
    batch_loader_open(&t->loader, &t->data, s->B, &r->ctx);
    if (!r->start) {
        HostView view = host_view_open(m->buffers.params, m->buffers.table.elements, VIEW_FLOATX);
        memset(view.values, 0, view.n * sizeof *view.values);  // the padding between tensors too
        random_weights(m, view.values, (uint64_t)s->seed);
        model_buffers_write(&m->buffers, &r->optimizer, &view, &r->ctx);
    }
    run_share(r);
}

// ---------------------------------------------------------------------------------------------------------
// The run

// One optimizer step. The GPU runs it asynchronously. run_end_step() reads its results and logs them.
static void train_step(Trainer* t) {
    Run* r = &t->run;
    int B = t->model.B;
    StepWork work = {B, (double)B, (double)B, model_flops(&t->model), {t->model.a.loss}};  // a sample counts as a token
    uint64_t step = run_step_sequence(r) / (uint64_t)B;
    run_begin_step(r, work);
    train_samples(t, step / t->epoch_steps, step % t->epoch_steps * (uint64_t)B);
    run_read_results(r);
}

// Train or evaluate. `type`: the model's; `usage`: the first line of --help; `score`: the key of a validation in
// log.jsonl.
static int recommender_main(int argc, char** argv, const char* type, const char* usage, const char* score) {
    static Trainer trainer, *t = &trainer;
    Run* r = &t->run;
    process_begin(on_signal, argv);
    trainer_open(t, argc, argv, type, usage);
    if (r->settings.evaluate) {
        process_on_stop(SIG_DFL);  // a signal may end the process at once: no checkpoint is written
        validate(r);
    } else {
        const DueWork due[] = {{r->val_every, validate, score}, {r->settings.checkpoint_every, run_save}};
        run_begin(r, due, COUNT_OF(due), t->samples, "", r->settings.B);
        while (run_next_step(r, (int)stop_signal)) {
            train_step(t);
            run_end_step(r);
        }
        run_end(r, "a recommender's training");
    }
    device_synchronize(&r->ctx);
    batch_loader_close(&t->loader);
    model_free(&t->model);
    close_data(t);
    run_close(r);
    return DONE;
}

#endif
