/* The fuzzer's interface to a trainer. Include it after the trainer's source and two functions: fuzz_validate()
 * evaluates held-out data, fuzz_step() trains a step. */
#ifndef FUZZ_TRAINER_H
#define FUZZ_TRAINER_H

static void fuzz_descriptor(const char* text) {
    enum { DATA_V = 300 };
    Config c = config_from_descriptor(text, DATA_V);
    if (c.C % c.NH != 0 || c.L < 1 || c.V < 1 || c.T < 1 || c.F < 1) fuzz_broken("sizes %d %d %d", c.L, c.C, c.F);
}

static void fuzz_config(const char* path) {
    Config c = config_read(path);
    if (c.C < 1 || c.NH < 1 || c.C % c.NH != 0) fuzz_broken("%d channels, %d heads", c.C, c.NH);
}

// A table has as many elements as its shapes say in double, which does not overflow.
static void fuzz_check_plan(const Trainer* r) {
    const TensorTable* tables[] = {&r->model.buffers.table, &r->model.buffers.acts_table,
                                   &r->model.buffers.stats_table};
    for (size_t k = 0; k < COUNT_OF(tables); k++) {
        double elements = 0;
        for (int i = 0; i < tables[k]->count; i++) {
            const Tensor* t = &tables[k]->tensors[i];
            elements = fmax(elements, (double)t->offset + (double)t->stored_rows * t->shape[1]);
        }
        if ((double)tables[k]->elements < elements || elements > 4e18)
            fuzz_broken("a table of %g elements has %zu", elements, tables[k]->elements);
    }
}

// The settings, tensors and memory of the run that flags ask for: -x 0 ends it before it takes memory.
static void fuzz_command_line(int argc, char** argv) {
    Trainer* r = (Trainer*)xcalloc(1, sizeof *r);
    char **all = (char**)xmalloc(((size_t)argc + 3) * sizeof *all), x[] = "-x", zero[] = "0";
    memcpy(all, argv, (size_t)argc * sizeof *all);
    all[argc] = x, all[argc + 1] = zero, all[argc + 2] = NULL;
    trainer_open(r, argc + 2, all);
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

// Steps as main() does them, if they are small: two of a new run, with the checkpoints that the flags ask for, or one.
static void fuzz_train(int argc, char** argv) {
    enum { MOST_ROWS = 256 };
    Trainer* r = (Trainer*)xcalloc(1, sizeof *r);
    Run* run = &r->run;
    trainer_open(r, argc, argv);
    fuzz_check_plan(r);
    if ((int64_t)run->consumed < 0 || run->step < 0 || run->micro_steps < 1 || !(run->restored.scale.scale >= 0))
        fuzz_broken("step %lld, %lld samples", (long long)run->step, (long long)run->consumed);
    run_open_directory(run);
    run_begin_steps(run);
    int is_new = run->step == 0;
    int64_t last = run->last < run->step + 1 + is_new ? run->last : run->step + 1 + is_new;
    while (run->step < last && (int64_t)r->model.N * run->micro_steps <= MOST_ROWS) {
        fuzz_step(r);
        run_end_step(run);
        if (is_new && run->settings.checkpoint_every) run_save(run);
        if (run->save_failed) fuzz_broken("a checkpoint was not saved");
    }
    if (writer_finish(run->writer) != 0) fuzz_broken("a checkpoint was not saved");
    trainer_close(r);
    free(r);
}

#define FUZZ_TRAINER                                                                                                   \
    { fuzz_descriptor, fuzz_config, fuzz_command_line, fuzz_evaluate, fuzz_train }

#endif
