/* Tests of llmc/run: drawing tokens, what reaches the optimizer, the energy meter; and checkpoints of one process: what
 * they load, which are kept, and what a power cut takes. dev/test/equal.txt has runs that go on from them, refuse.txt
 * the damaged ones, resume.sh directories that another run took.
 *
 *     ./test_run [NAME]      the cases whose name contains NAME */
#include <ftw.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

// The code under test flushes and renames through these functions. Nothing is flushed; they keep what a power cut would
// take: what was not flushed before its name was given to it, and directories with such names, until they are flushed.
enum { DISK_MOST = 1024 };
static struct stat disk_flushed[DISK_MOST];    // of files and directories when they were flushed
static ino_t disk_unflushed_names[DISK_MOST];  // of directories
static int disk_flushed_count, disk_names_count, disk_lost;
static void (*disk_renamed)(void);  // called after the next rename; NULL: nothing is

static int disk_check(const char* path, const struct stat* st, int kind, struct FTW* walk) {
    (void)path, (void)kind, (void)walk;
    for (int i = 0; i < disk_flushed_count; i++) {
        const struct stat* f = &disk_flushed[i];
        if (f->st_ino == st->st_ino && memcmp(&f->st_mtim, &st->st_mtim, sizeof f->st_mtim) == 0) return 0;
    }
    disk_lost++;
    return 0;
}

static int test_fsync(int fd) {
    int names = 0;
    struct stat st;
    if (fstat(fd, &st) != 0 || disk_flushed_count == DISK_MOST) return -1;
    disk_flushed[disk_flushed_count++] = st;
    for (int i = 0; i < disk_names_count; i++)
        if (disk_unflushed_names[i] != st.st_ino) disk_unflushed_names[names++] = disk_unflushed_names[i];
    disk_names_count = names;
    return 0;
}

static int test_rename(const char* from, const char* to) {
    char parent[4096];
    struct stat st;
    nftw(from, disk_check, 8, FTW_PHYS);
    snprintf(parent, sizeof parent, "%.*s", (int)(strrchr(to, '/') - to), to);
    if (stat(parent, &st) == 0 && disk_names_count < DISK_MOST) disk_unflushed_names[disk_names_count++] = st.st_ino;
    int status = rename(from, to);
    void (*then)(void) = disk_renamed;
    disk_renamed = NULL;
    if (then) then();
    return status;
}

#define fsync test_fsync
#define rename test_rename

#include "apps/use/sampler.h"
#include "dev/test/tests.h"
#include "llmc/checkpoint/resume.h"
#include "llmc/run/run.h"

// ---------------------------------------------------------------------------------------------------------
// Sampler

// Which token a number selects. Of five tokens the weights are 2, 4, 1, 4, 1, which add up in this order; of equal
// ones the first are candidates.
static void test_sampler(Tests* t) {
    enum { N = 2000 };
    static const struct {
        Sampler sampler;
        double uniform;
        int token;
    } cases[] = {
        // temperature, top_k, top_p
        {{0, 0, 0}, 0.9, 1},   {{1, 0, 0}, 2.5 / 12, 1},    {{1, 0, 0}, 11.5 / 12, 4}, {{1, 1, 0}, 0.9, 1},
        {{1, 2, 0}, 0.6, 3},   {{1, 4, 0}, 10.5 / 11, 3},   {{1, 0, 0.3}, 0.9, 1},     {{1, 0, 0.5}, 0.9, 3},
        {{1, 3, 0.7}, 0.1, 1}, {{0.5, 0, 0}, 37.5 / 38, 4}, {{4, 0, 0.7}, 0.6, 2},
    };
    const double weights[] = {2, 4, 1, 4, 1};
    real logits[COUNT_OF(weights)];
    static real equal[N];  // as many as take another path than a few
    for (size_t i = 0; i < COUNT_OF(weights); i++) logits[i] = (real)log(weights[i]);
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        int token = sampler_draw(logits, COUNT_OF(weights), cases[i].sampler, cases[i].uniform);
        if (token != cases[i].token) fail(t, "case %zu draws token %d, not %d", i, token, cases[i].token);
    }
    for (int i = 0; i < N; i++) {
        EXPECT_EQ(t, sampler_draw(equal, N, (Sampler){1, 0, 0}, (i + 0.5) / N), i);
        EXPECT_EQ(t, sampler_draw(equal, N, (Sampler){1, 1500, 0.5}, (i + 0.5) / N), (6 * i + 3) / 16);
    }
    for (int i = 0; i <= 7000; i++) EXPECT_NEAR(t, sampler_exp(-0.1 * i) / exp(-0.1 * i), 1, 4e-16);
}

// ---------------------------------------------------------------------------------------------------------
// From the settings to the optimizer and the weights

static void test_update_settings(Tests* t) {
    static Run r;
    Settings* s = &r.settings;
    memset(&r, 0, sizeof r);
    s->beta1 = 0.1, s->beta2 = 0.2, s->eps = 0.3, s->weight_decay = 0.4, s->clip = 0.5, s->lr = 0.6;
    r.lr = 0.7;  // the schedule's rate, not the peak
    OptimizerSettings o = run_optimizer_settings(&r);
    EXPECT(t, o.lr == 0.7 && o.beta1 == 0.1 && o.beta2 == 0.2 && o.eps == 0.3);
    EXPECT(t, o.weight_decay == 0.4 && o.max_norm == 0.5);
    r.step = 1;  // new bits for stochastic rounding in every step
    EXPECT(t, run_optimizer_settings(&r).rounding != o.rounding);
    r.group.size = 1, r.step = 5;
    s->optimizer = MUON, s->muon_warmup = 10, s->adamw_lr = 1.2;
    EXPECT_NEAR(t, run_optimizer_settings(&r).muon.momentum, 0.9, 1e-12);  // half of the way from 0.85
    EXPECT_NEAR(t, run_update_settings(&r).adamw_rate, 2, 1e-12);
}

// Every tensor has its own stream for every seed.
static void test_streams(Tests* t) {
    enum { N = 5, STREAMS = 4 };
    static const TensorRow rows[] = {{"a", 0, {0, 0}, OWN, 0, INIT_NORMAL}, {"b", 0, {0, 0}, OWN, 0, INIT_NORMAL}};
    const int dims[] = {N, 1};
    real params[STREAMS / 2][2 * TENSOR_ALIGNMENT], *values[STREAMS];
    TensorTable table;
    memset(&table, 0, sizeof table);
    tensors_add(&table, rows, 2, dims, -1);
    tensors_finish(&table);
    for (int i = 0; i < STREAMS; i++) {
        tensors_init(&table, params[i / 2], (TensorInit){1, 1, 1 | (uint64_t)(i / 2) << 40});
        values[i] = params[i / 2] + table.tensors[i % 2].offset;
        for (int k = 0; k < i; k++) EXPECT(t, memcmp(values[i], values[k], N * sizeof(real)) != 0);
    }
    tensors_free(&table);
}

// ---------------------------------------------------------------------------------------------------------
// Checkpoints of a small model: a matrix as it is, turned ones, a vector, rows of padding, a group, gaps between
// tensors

static const TensorRow TINY_ROWS[] = {{"plain", 0, {1, 2}, OWN, 3, INIT_ZERO, 1, AS_IN_MEMORY},
                                      {"vector", 0, {1, 0}, OWN, 0, INIT_ZERO, 0, AS_IN_MEMORY},
                                      {"turned", 0, {2, 1}, OWN, 0, INIT_ZERO, 1, TRANSPOSED},
                                      {"first", 0, {4, 1}, OWN, 0, INIT_ZERO, 1, TRANSPOSED},
                                      {"second", 0, {4, 1}, GROUPED, 0, INIT_ZERO, 1, AS_IN_MEMORY}};
static const int TINY_DIMS[] = {1, 37, 45, 40, 64};
enum { TINY_PARTS = 4 };  // weights, m, v, master

typedef struct {
    TensorTable table;
    real* values[TINY_PARTS];  // [elements]
    Optimizer optimizer;
    Context ctx;
    Checkpoints c;
    ProcessGroup group;
    CheckpointWriter writer;
} Tiny;

static char tiny_out[4096];

// Another `seed`, another state.
static void tiny_fill(Tiny* t, int seed) {
    for (int p = 0; p < TINY_PARTS; p++)
        for (int i = 0; i < t->table.count; i++)
            for (size_t k = 0; k < tensor_elements(&t->table.tensors[i]); k++)
                t->values[p][t->table.tensors[i].offset + k] =
                    (real)rng_normal(rng_stream((uint64_t)seed, (uint64_t)p, 0, SITE_INIT), (uint64_t)(i * 10000) + k);
}

// With an empty OUT.
static void tiny_open(Tiny* t, const Tests* tests) {
    snprintf(tiny_out, sizeof tiny_out, "%s/out", tests->directory);
    remove_directory(tiny_out);
    CHECK(mkdir(tiny_out, 0777) == 0);
    memset(t, 0, sizeof *t);
    context_init(&t->ctx);
    tensors_add(&t->table, TINY_ROWS, COUNT_OF(TINY_ROWS), TINY_DIMS, -1);
    tensors_finish(&t->table);
    for (int p = 0; p < TINY_PARTS; p++) t->values[p] = (real*)xcalloc(t->table.elements, sizeof(real));
    tiny_fill(t, 5);
    t->optimizer.m = t->values[1], t->optimizer.v = t->values[2], t->optimizer.master = t->values[3];
    t->optimizer.shard = (FlatRange){0, t->table.elements};
    t->c = (Checkpoints){tiny_out, &t->table, (floatX*)t->values[0], &t->optimizer, NULL, 0, 0, &t->ctx};
    t->group.size = 1;
    writer_open(&t->writer, &t->group, NULL, -1);
}

static void tiny_close(Tiny* t) {
    writer_close(&t->writer);
    for (int p = 0; p < TINY_PARTS; p++) free(t->values[p]);
    tensors_free(&t->table);
    context_free(&t->ctx);
}

static int tiny_begin(Tiny* t, int64_t step, int background) {
    return writer_begin(&t->writer, &t->c, step, "{\"config\": 1}\n", "{\"step\": 1}\n", NULL, background);
}

// The state that it saved may change from writer_begin() on. Whether loading brings it back.
static int tiny_loads(Tiny* t, const char* dir) {
    int same = 1;
    size_t bytes = t->table.elements * sizeof(real);
    Tiny want = *t;
    for (int p = 0; p < TINY_PARTS; p++) want.values[p] = (real*)xcalloc(1, bytes), memset(t->values[p], 0x7f, bytes);
    tiny_fill(&want, 5);
    checkpoint_load(&t->c, NULL, dir);
    for (int p = 0; p < TINY_PARTS; p++) {
        same = same && memcmp(t->values[p], want.values[p], bytes) == 0;
        free(want.values[p]);
    }
    return same;
}

static Tiny* loaded;  // by load_into()

// Where nothing is updated, the second tensor has a copy in fp32: of the master weights, and of the weights that the
// model's file has, whose values a forward pass must leave as they are.
static int tiny_loads_copies(Tiny* t, const char* dir) {
    Tensor* tensor = &t->table.tensors[1];
    size_t bytes = tensor->size * sizeof(real);
    CastSpan span = {tensor->offset, TENSOR_ALIGNMENT, tensor->size};
    Fp32Copies copies = {(real*)xcalloc(t->table.elements, sizeof(real)), &span, 1};
    t->table.fixed = 1, t->optimizer.shard = tensors_updated(&t->table);
    tensor->fp32_copy = 1, tensor->fp32_offset = span.to, t->table.fp32_elements = span.to + tensor->size;
    checkpoint_load(&t->c, &copies, dir);
    int same = memcmp(copies.copies + span.to, t->values[3] + tensor->offset, bytes) == 0;
    fp32_copies_read_master(&copies, &t->table, &t->optimizer, named("%s/model.safetensors", dir), NULL, &t->ctx);
    fp32_copies_update(&copies, &t->table, t->c.params, t->optimizer.master, NULL, &t->ctx);
    same = same && memcmp(copies.copies + span.to, t->values[0] + tensor->offset, bytes) == 0;
    t->table.fixed = 0, t->optimizer.shard.size = t->table.elements;
    free(copies.copies);
    return same;
}

static void load_into(const char* dir) { checkpoint_load(&loaded->c, NULL, dir); }

static void test_load(Tests* t) {
    Tiny tiny;
    tiny_open(&tiny, t);
    char* dir = checkpoint_path(tiny_out, 1);
    EXPECT_EQ(t, tiny_begin(&tiny, 1, 0), 0);
    EXPECT(t, tiny_loads(&tiny, dir) && tiny_loads_copies(&tiny, dir));
    loaded = &tiny, tiny.optimizer.master = NULL;
    expect_end(t, USAGE, "checkpoint/master weights that nobody wants", "but this run has none; resume with -w 1",
               load_into, dir);
    EXPECT_EQ(t, tiny_begin(&tiny, 2, 0), 0);
    tiny.optimizer.master = tiny.values[3], dir[strlen(dir) - 1] = '2';
    expect_end(t, USAGE, "checkpoint/no master weights", "holds no master weights; resume with -w 0", load_into, dir);
    tiny_close(&tiny);
    free(dir);
}

// Steps 1 to `count` are saved with -nk `keep`, each while the one before may still be written. Before the last, the
// model of the step `spoil` is cut short, or made too large where `spoil` is negative: incomplete checkpoints do not
// count.
static void test_retention(Tests* t) {
    static const struct {
        const char* left;
        int keep, every, count, spoil;
    } cases[] = {{"4 ", 1, 0, 4, 0}, {"2 4 5 ", 2, 2, 5, 0}, {"1 2 3 4 ", 0, 0, 4, 0},
                 {"3 ", 1, 0, 3, 2}, {"2 3 4 ", 2, 0, 4, 3}, {"2 3 4 ", 2, 0, 4, -3}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        int count = cases[i].count, spoil = cases[i].spoil;
        Tiny tiny;
        Text left = {NULL, 0, 0};
        int64_t* steps;
        tiny_open(&tiny, t);
        Path model = path_of("%s/ckpt/%08d/model.safetensors", tiny_out, abs(spoil));
        tiny.c.keep = cases[i].keep, tiny.c.keep_every = cases[i].every;
        for (int step = 1; step <= count; step++) {
            if (step == count && spoil) {
                EXPECT_EQ(t, writer_finish(&tiny.writer), 0);
                CHECK(truncate(model.text, spoil > 0 ? 100 : 1 << 20) == 0);
            }
            EXPECT_EQ(t, tiny_begin(&tiny, step, step % 3 > 0), 0);
        }
        EXPECT(t, writer_finish(&tiny.writer) == 0 && tiny.writer.saved == count);
        int n = checkpoint_list(tiny_out, "", &steps);
        for (int k = 0; k < n; k++) text_printf(&left, "%d ", (int)steps[k]);
        EXPECT_TEXT(t, left.text, cases[i].left);
        tiny_close(&tiny);
        free(left.text), free(steps);
    }
}

// What trainer.json holds of a run's state comes back.
static void test_state(Tests* t) {
    SavedState s, back;
    Text text = {NULL, 0, 0};
    Json json;
    char error[JSON_ERROR_SIZE];
    memset(&s, 0, sizeof s), memset(&back, 0, sizeof back);
    s.step = back.step = 9, s.samples = 70, s.data = 1234, s.step_sequences = 8, s.ranks = 2, s.shards = 3;
    s.scale.scale = 1024, s.scale.good = 5, s.scale.updates = 7;
    s.best = (Best){.loss = 2.5, .step = 4, .judged = 8};
    text_append(&text, "{", 1);
    s.fp8 = xprintf("ab"), s.matmul_plans = xprintf("plan");
    state_put(&text, &s);
    text_append(&text, "}", 1);
    CHECK(json_parse(&json, text.text, text.length, error) == 0);
    state_get(&back, json.root, "trainer.json");
    EXPECT(t, back.samples == 70 && back.data == 1234 && back.step_sequences == 8 && back.ranks == 2);
    EXPECT(t, back.shards == 3 && back.scale.scale == 1024 && back.scale.good == 5 && back.scale.updates == 7);
    EXPECT(t, back.best.loss == 2.5 && back.best.step == 4 && back.best.judged == 8);
    EXPECT(t, strcmp(back.fp8, "ab") == 0 && strcmp(back.matmul_plans, "plan") == 0);
    state_free(&s), state_free(&back), json_free(&json), free(text.text);
}

// Everything that a run renames into place was flushed before, and its directory after.
static void test_power_cut(Tests* t) {
    Tiny tiny;
    Log log;
    tiny_open(&tiny, t);
    disk_flushed_count = disk_names_count = disk_lost = 0;
    EXPECT(t, tiny_begin(&tiny, 1, 0) == 0 && tiny_begin(&tiny, 2, 0) == 0 && disk_names_count == 0);
    free(put_text_file(t, "out/log.jsonl", "{\"step\": 1}\n{\"step\": 2}\n"));
    log_open(&log, tiny_out, 1);  // cuts it back
    log_close(&log);
    EXPECT_EQ(t, disk_lost, 0);         // renamed before they were flushed
    EXPECT_EQ(t, disk_names_count, 0);  // directories that were not flushed
    tiny_close(&tiny);
}

static void replace_out(void) {
    Path moved = path_of("%s.moved", tiny_out), theirs = path_of("%s.theirs", tiny_out);
    CHECK(rename(tiny_out, moved.text) == 0 && rename(theirs.text, tiny_out) == 0);
}

// OUT becomes another run's once a checkpoint has its name: their model is not replaced.
static void test_replaced(Tests* t) {
    Tiny tiny;
    RunLock lock = {NULL, 0, 0};
    tiny_open(&tiny, t);
    CHECK(make_directories(named("%s.theirs/ckpt/00000001", tiny_out)) == 0);
    free(put_text_file(t, "out.theirs/ckpt/00000001/model.safetensors", "theirs"));
    run_lock_take(&lock, tiny_out, O_CREAT);
    tiny.c.lock = &lock, disk_renamed = replace_out;
    tiny_begin(&tiny, 1, 0);
    EXPECT(t, !disk_renamed && !file_exists(named("%s/model.safetensors", tiny_out)));
    tiny_close(&tiny);
    run_lock_close(&lock);
}

// ---------------------------------------------------------------------------------------------------------
// The energy of a GPU

// A made-up one has used 500 W for `*now` seconds.
static int energy_made_up(void* now, unsigned long long* millijoules) {
    *millijoules = (unsigned long long)(500e3 * *(double*)now + 0.5);
    return 0;
}

// The mean that the log shows of steps of 0.3 s: once a second.
static void test_energy(Tests* t) {
    double now = 7, joules = NAN;
    EnergyMeter m = {.device = &now, .total = energy_made_up};
    energy_begin(&m, now);
    for (int step = 1; step <= 4; step++) {
        EXPECT(t, isnan(joules));
        now += 0.3, joules = energy_step(&m, now);
    }
    EXPECT_NEAR(t, joules, 150, 1e-9);
}

// ---------------------------------------------------------------------------------------------------------
// The best validation, and the average of the weights

static void test_best(Tests* t) {
    Best b = {0};
    best_judge(&b, 0, 1);
    EXPECT(t, b.step == 0 && b.judged == 0);  // before the first step
    best_judge(&b, 10, 5), best_judge(&b, 20, 4), best_judge(&b, 30, 4), best_judge(&b, 40, NAN), best_judge(&b, 40, 1);
    EXPECT(t, b.step == 20 && b.loss == 4 && b.judged == 40);  // not equal, not finite, not repeated ones
}

static void test_average(Tests* t) {
    WeightAverage a = {.decay = 0.9, .start = 3};
    EXPECT(t, !weight_average_is_on(&a, 2) && weight_average_is_on(&a, 3));
    EXPECT_NEAR(t, weight_average_rate(&a, 3), 1, 1e-12);
    EXPECT_NEAR(t, weight_average_rate(&a, 6), 0.25, 1e-12);
    EXPECT_NEAR(t, weight_average_rate(&a, 99), 0.1, 1e-12);
}

int main(int argc, char** argv) {
    static const TestCase cases[] = {{"best", test_best},
                                     {"average", test_average},
                                     {"sampler", test_sampler},
                                     {"settings/update", test_update_settings},
                                     {"init/streams", test_streams},
                                     {"energy/meter", test_energy},
                                     {"checkpoint/load", test_load},
                                     {"checkpoint/kept", test_retention},
                                     {"checkpoint/state", test_state},
                                     {"checkpoint/power cut", test_power_cut},
                                     {"checkpoint/replaced", test_replaced}};
    device_set_threads(1);  // a fork knows nothing of its parent's threads
    return tests_main(argc, argv, cases, COUNT_OF(cases));
}
