/* The fuzzer's interface to a trainer. Include it after the trainer's source and three functions: fuzz_flags() appends
 * the trainer's flags to r->run.flags and returns their number, fuzz_validate() evaluates held-out data, fuzz_step()
 * trains a step. */
#ifndef FUZZ_TRAINER_H
#define FUZZ_TRAINER_H

static void fuzz_descriptor(const char* text) {
    enum { DATA_V = 300 };
    Config c = config_from_descriptor(text, DATA_V);
    if (c.C % c.NH != 0 || c.L < 1 || c.V < 1 || c.T < 1 || c.F < 1) fuzz_broken("sizes %d %d %d", c.L, c.C, c.F);
}

static void fuzz_config(const char* path) {
    Config c = config_read(path);
    for (size_t i = 0; i < COUNT_OF(CONFIG_ROWS); i++) {
        const ConfigRow* row = &CONFIG_ROWS[i];
        double value;
        int whole;
        if (row->field == CONFIG_NO_FIELD) continue;
        memcpy(&whole, (const char*)&c + row->field, sizeof whole);
        if (row->type == CONFIG_REAL) memcpy(&value, (const char*)&c + row->field, sizeof value);
        else value = whole;
        if (!(value >= row->min && value <= row->max)) fuzz_broken("%s is %g", row->key, value);
    }
    if (c.C % c.NH != 0) fuzz_broken("%d channels, %d heads", c.C, c.NH);
}

// Every value is in its row's range, and the values that a run saves are read back unchanged.
static void fuzz_check_flags(const Trainer* r, int count) {
    Trainer* again = (Trainer*)xcalloc(1, sizeof *again);
    Text first = {NULL, 0, 0}, second = {NULL, 0, 0};
    Json json;
    char error[JSON_ERROR_SIZE];
    for (int i = 0; i < count; i++) {
        const Flag* row = &r->run.flags[i];
        double x = row->type == FLAG_INT    ? (double)*(const int*)row->value
                   : row->type == FLAG_SIZE ? (double)*(const int64_t*)row->value
                   : row->type == FLAG_REAL ? *(const double*)row->value
                                            : row->min;
        if (!(x >= row->min && x <= row->max)) fuzz_broken("%s is %g", row->long_name, x);
    }
    flags_to_json(&first, r->run.flags, count);
    if (json_parse(&json, first.text, first.length, error) != 0) fuzz_broken("the settings are no JSON: %s", error);
    int again_count = fuzz_flags(again);
    char* no_argv[] = {NULL, NULL};
    flags_parse(again->run.flags, again_count, 1, no_argv, "");
    for (int i = 0; i < again_count; i++) again->run.flags[i].scope = SCOPE_RUN;  // so that all are read back
    settings_restore(again->run.flags, again_count, json.root, 0, "settings");
    flags_to_json(&second, again->run.flags, again_count);
    // JSON changes a string that is not valid UTF-8.
    if (!strstr(first.text, "\\ufffd") && strcmp(first.text, second.text) != 0)
        fuzz_broken("saved as %s, read as %s", first.text, second.text);
    json_free(&json);
    flags_free(again->run.flags, again_count);
    free(first.text), free(second.text), free(again);
}

// The number of elements of a model equals that computed from its shapes in double, which does not overflow.
static void fuzz_check_plan(const Trainer* r) {
    const TensorTable* tables[] = {&r->model.buffers.table, &r->model.buffers.acts_table,
                                   &r->model.buffers.stats_table};
    for (size_t k = 0; k < COUNT_OF(tables); k++) {
        double elements = 0;
        for (int i = 0; i < tables[k]->count; i++) {
            const Tensor* t = &tables[k]->tensors[i];
            double end = (double)t->offset + (double)t->stored_rows * t->shape[1];
            if (end > elements) elements = end;
        }
        if ((double)tables[k]->elements < elements || elements > 4e18)
            fuzz_broken("a table of %g elements has %zu", elements, tables[k]->elements);
    }
}

static const Trainer* fuzz_planned;
static void fuzz_check_planned(void) { fuzz_check_plan(fuzz_planned); }

// The flags, then the settings, tensors and memory of the run that they ask for.
static void fuzz_command_line(int argc, char** argv) {
    Trainer *parsed = (Trainer*)xcalloc(1, sizeof *parsed), *run = (Trainer*)xcalloc(1, sizeof *run);
    char **again = (char**)xmalloc(((size_t)argc + 3) * sizeof *again), x[] = "-x", zero[] = "0";
    int count = fuzz_flags(parsed), n = 0;
    flags_parse(parsed->run.flags, count, argc, argv, "fuzz");
    fuzz_check_flags(parsed, count);
    for (int i = 0; i < argc; i++) {
        size_t length = strcspn(argv[i], "=");
        Flag* row = i > 0 ? flags_find(parsed->run.flags, count, argv[i], length) : NULL;
        if (row && strcmp(row->long_name, "--steps") == 0) {
            if (argv[i][length] != '=') i++;
            continue;
        }
        again[n++] = argv[i];
        if (row && argv[i][length] != '=') again[n++] = argv[++i];  // a value may look like a flag
    }
    again[n++] = x, again[n++] = zero, again[n] = NULL;
    fuzz_planned = run;
    fuzz_when_done = fuzz_check_planned;
    trainer_open(run, n, again);
    fuzz_broken("-x 0 did not end");
}

// Weights, tokenizer and configuration of a model, on the data of one validation.
static void fuzz_evaluate(int argc, char** argv) {
    Program* p = (Program*)xcalloc(1, sizeof *p);
    program_open(p, argc, argv);
    fuzz_check_plan(&p->trainer);
    fuzz_validate(&p->trainer);
    trainer_close(&p->trainer);
    free(p);
}

static void fuzz_check_run(const Trainer* r) {
    const Run* s = &r->run;
    const LossScale* scale = &s->restored.scale;
    int64_t rows = (int64_t)r->model.B * r->run.micro_steps;
    if ((int64_t)s->consumed < 0 || s->step < 0) fuzz_broken("%lld samples", (long long)s->consumed);
    if (r->run.micro_steps < 1 || rows != s->step_sequences)
        fuzz_broken("%d micro-batches of %d make %lld sequences", r->run.micro_steps, r->model.B,
                    (long long)s->step_sequences);
    if (!(scale->scale >= 0) || !isfinite((double)scale->scale) || scale->good < 0 || scale->updates < 0)
        fuzz_broken("loss scale %g, %lld updates", (double)scale->scale, (long long)scale->updates);
}

// Train `steps` steps as main() does, without the matmul that measures peak flops. Save a checkpoint after each step if
// the flags ask for it.
static Trainer* fuzz_steps(int argc, char** argv, int64_t steps, int limit) {
    Trainer* r = (Trainer*)xcalloc(1, sizeof *r);
    Run* run = &r->run;
    trainer_open(r, argc, argv);
    fuzz_check_plan(r);
    fuzz_check_run(r);
    run_open_directory(run);
    run_begin_steps(run);
    int64_t last = run->last < run->step + steps ? run->last : run->step + steps;
    if ((int64_t)r->model.N * run->micro_steps > limit) last = run->step;
    while (run->step < last) {
        fuzz_step(r);
        run_end_step(run);
        if (steps > 1 && run->settings.checkpoint_every) run_save(run);
        if (run->save_failed) fuzz_broken("a checkpoint was not saved");
    }
    return r;
}

static void fuzz_train(int argc, char** argv, int64_t steps, int limit) {
    Trainer* r = fuzz_steps(argc, argv, steps, limit);
    if (steps > 1 && writer_finish(r->run.writer) != 0) fuzz_broken("a checkpoint was not saved");
    trainer_close(r);
    free(r);
}

// The optimizer state that two ranks with -z 1 would save in this run.
static void fuzz_write_shards(int argc, char** argv, const char* directory) {
    Trainer* r = fuzz_steps(argc, argv, 0, 0);
    Checkpoints c = run_checkpoints(&r->run);
    size_t half = round_up(r->model.buffers.table.elements / 2, TENSOR_ALIGNMENT);
    FileDigest digest;
    for (int rank = 0; rank < 2; rank++) {
        FlatRange range = {rank ? half : 0, rank ? r->model.buffers.table.elements - half : half};
        char name[CHECKPOINT_NAME], *path;
        TensorPart parts[CHECKPOINT_PARTS];
        int count = checkpoint_optimizer_parts(&c, parts);
        for (int p = 0; p < count; p++) parts[p].device = (real*)parts[p].device + range.begin;
        checkpoint_optimizer_name(name, 1, rank, 2);
        path = xprintf("%s/%s", directory, name);
        if (tensors_write_shard(path, &r->model.buffers.table, parts, count, range, &digest, &r->run.ctx) != 0)
            fuzz_broken("%s: %s", path, strerror(errno));
        free(path);
    }
    trainer_close(r);
    free(r);
}

#define FUZZ_TRAINER                                                                                                   \
    { fuzz_descriptor, fuzz_config, fuzz_command_line, fuzz_evaluate, fuzz_train, fuzz_write_shards }

#endif
