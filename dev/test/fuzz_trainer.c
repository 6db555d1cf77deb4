/* One trainer as the fuzzer reads with it: GPT-2's, or with -DBUILD_fuzz_of_bert BERT's. */
#include "fuzz.h"

#include "llmc/run/peak.h"

// What the machine can do is measured in half a second, which is long here.
#define peak_matmul_flops(ctx) ((void)(ctx), 1e12)
#ifdef BUILD_fuzz_of_bert
#include "llmc/bert/mlm_data.h"
// Each micro-batch of a step takes memory of its own: for millions of them that takes seconds.
#define mlm_source_alloc(d, recipe, B, T, micro_steps, ctx)                                                            \
    do {                                                                                                               \
        if ((micro_steps) > 1 << 14) die(USAGE, "-d: %d micro-batches are more than are tried here", micro_steps);     \
        (mlm_source_alloc)(d, recipe, B, T, micro_steps, ctx);                                                         \
    } while (0)
#define main bert_main
#include "apps/use_bert.cu"
#define STEP(t) train_step(&(t)->run, &(t)->model, &(t)->data, (t)->mlm.loss_mean)
#define FUZZ_THIS FUZZ_BERT
#define CORPUS "corpus/sentences/uint16/input.bin"
#else
#define main gpt2_main
#include "apps/use_gpt2.cu"
#define STEP(t) train_step(&(t)->run, &(t)->model, &(t)->data)
#define FUZZ_THIS FUZZ_GPT2
#define CORPUS "corpus/shards/uint16/input.bin"
#endif
#undef main

// A table has as many elements as its shapes say in double, which does not overflow.
static void check_plan(const Trainer* r) {
    const TensorTable* tables[] = {&r->model.buffers.table, &r->model.buffers.acts_table,
                                   &r->model.buffers.stats_table};
    for (size_t k = 0; k < COUNT_OF(tables); k++) {
        double elements = 0;
        for (int i = 0; i < tables[k]->count; i++) {
            const Tensor* t = &tables[k]->tensors[i];
            elements = fmax(elements, (double)t->offset + (double)t->stored_rows * t->shape[1]);
        }
        CHECK((double)tables[k]->elements >= elements && elements <= 4e18);
    }
}

// Words with spaces between them as argv, behind the program's name.
static char** words_of(char* text, int* argc) {
    enum { MOST = 1 << 17 };
    char** argv = (char**)xcalloc(MOST, sizeof *argv);
    argv[0] = xprintf("fuzz");
    for (*argc = 1; text && *argc < MOST - 1;) argv[(*argc)++] = strsep(&text, " \n");
    if (*argv[*argc - 1] == '\0') argv[--*argc] = NULL;  // behind the last line break
    return argv;
}

// The settings, tensors and memory of a run: -x 0 ends it before it takes memory.
static void read_command_line(const char* path) {
    int argc;
    Trainer* r = (Trainer*)xcalloc(1, sizeof *r);
    char** argv = words_of(xprintf("-x 0 %s", read_file(path, SIZE_MAX, NULL, USAGE)), &argc);
    trainer_open(r, argc, argv);
    die(FAILED, "-x 0 did not end");
}

#define FLAGS "-i " CORPUS " -j " CORPUS " -t 8 -b 1 --threads 1 -m 1 "

// Weights, tokenizer and configuration of a model, on the data of one validation.
static void read_model(const char* path) {
    int argc;
    Program* p = (Program*)xcalloc(1, sizeof *p);
    char *of_llmc = xprintf("%s/model.bin", path), *model = xprintf("%s", file_exists(of_llmc) ? of_llmc : path);
    char** argv = words_of(xprintf(FLAGS "-o out --evaluate 1 -e %s", model), &argc);
    program_open(p, argc, argv);
    check_plan(&p->trainer);
    validate(&p->trainer.run);
    trainer_close(&p->trainer);
    free(p), free(of_llmc), free(model);
}

// Steps as main() does them, if they are small: two of a new run, with the checkpoints that the flags ask for, or one.
static void train(const char* path, const char* flags) {
    enum { MOST_ROWS = 256 };
    int argc;
    Trainer* r = (Trainer*)xcalloc(1, sizeof *r);
    Run* run = &r->run;
    char** argv = words_of(xprintf(FLAGS "-e L=1,C=4,NH=2,T=8,V=40 -o %s %s", path, flags), &argc);
    trainer_open(r, argc, argv);
    check_plan(r);
    CHECK((int64_t)run->consumed >= 0 && run->step >= 0 && run->micro_steps > 0 && run->restored.scale.scale >= 0);
    run_open_directory(run);
    run_begin_steps(run);
    int is_new = run->step == 0;
    int64_t last = run->last < run->step + 1 + is_new ? run->last : run->step + 1 + is_new;
    while (run->step < last && (int64_t)r->model.N * run->micro_steps <= MOST_ROWS) {
        STEP(r);
        run_end_step(run);
        if (is_new && run->settings.checkpoint_every) run_save(run);
        CHECK(!run->save_failed);
    }
    CHECK(writer_finish(run->writer) == 0);
    trainer_close(r);
    free(r);
}

// Where no checkpoint is complete, it starts a new run.
static void read_run(const char* path) { train(path, "-y 1"); }
static void make_run(const char* path) { train(path, "-x 4 -n 1 -nk 0"); }

FuzzTrainer FUZZ_THIS = {read_command_line, read_model, read_run, make_run};
