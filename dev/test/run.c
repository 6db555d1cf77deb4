/* Tests of llmc/run: drawing tokens, what reaches the optimizer, the energy meter; and checkpoints of one process:
 * written in the background, kept, cut off by a power cut, and in a directory that another run took. dev/test/equal.txt
 * has those of several ranks, refuse.txt the damaged ones.
 *
 *     ./test_run [NAME]      the cases whose name contains NAME */
#include <errno.h>
#include <ftw.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

// The code under test flushes and renames through these functions. They keep what a power cut would lose: names that
// were renamed before everything below them was flushed, and directories with such names that were not flushed since.
// Nothing is flushed.
enum { DISK_MOST = 1024 };
static struct stat disk_flushed[DISK_MOST];    // of files and directories when they were flushed
static ino_t disk_unflushed_names[DISK_MOST];  // of directories
static int disk_flushed_count, disk_names_count, disk_lost_count;
static void (*on_flush)(const char* path);

static int disk_check(const char* path, const struct stat* st, int kind, struct FTW* walk) {
    (void)path, (void)kind, (void)walk;
    for (int i = 0; i < disk_flushed_count; i++) {
        const struct stat* f = &disk_flushed[i];
        if (f->st_dev == st->st_dev && f->st_ino == st->st_ino &&
            memcmp(&f->st_mtim, &st->st_mtim, sizeof f->st_mtim) == 0)
            return 0;
    }
    disk_lost_count++;
    return 0;
}

static int test_fsync(int fd) {
    int names = 0;
    struct stat st;
    char link[64], path[4096];
    if (fstat(fd, &st) == 0 && disk_flushed_count < DISK_MOST) disk_flushed[disk_flushed_count++] = st;
    for (int i = 0; i < disk_names_count; i++)
        if (disk_unflushed_names[i] != st.st_ino) disk_unflushed_names[names++] = disk_unflushed_names[i];
    disk_names_count = names;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    path[n > 0 ? n : 0] = '\0';
    if (on_flush) on_flush(path);
    return 0;
}

static int test_rename(const char* from, const char* to) {
    char parent[4096];
    struct stat st;
    const char *end = strrchr(to, '.'), *slash = strrchr(to, '/');
    int is_away = end && (strcmp(end, ".tmp") == 0 || strcmp(end, ".damaged") == 0);  // renamed out of place
    if (slash && !is_away) {
        nftw(from, disk_check, 8, FTW_PHYS);
        snprintf(parent, sizeof parent, "%.*s", (int)(slash - to), to);
        if (stat(parent, &st) == 0 && disk_names_count < DISK_MOST)
            disk_unflushed_names[disk_names_count++] = st.st_ino;
    }
    return rename(from, to);
}

#define fsync test_fsync
#define rename test_rename

#include "apps/use/embed.h"
#include "apps/use/generate.h"
#include "dev/test/tests.h"
#include "llmc/bert/mlm_data.h"
#include "llmc/checkpoint/resume.h"
#include "llmc/model/config.h"
#include "llmc/profile/profiler.h"
#include "llmc/run/step.h"

// ---------------------------------------------------------------------------------------------------------
// Sampler

// The token that `uniform` selects of all logits sorted in descending order, of equal ones the first first.
static int draw_sorted(const real* logits, int n, Sampler sampler, double uniform) {
    double total = 0, mass = 0, sum = 0, *weight = (double*)xcalloc((size_t)n, sizeof(double));
    int *order = (int*)xmalloc((size_t)n * sizeof(int)), token = 0,
        most = sampler.top_k ? min_int(sampler.top_k, n) : n;
    for (int i = 0; i < n; i++) {
        int at = i;
        for (; at > 0 && logits[order[at - 1]] < logits[i]; at--) order[at] = order[at - 1];
        order[at] = i;
    }
#define WEIGHT(i) exp((double)(logits[i] - logits[order[0]]) / sampler.temperature)
    for (int i = 0; i < most; i++) total += WEIGHT(order[i]);
    for (int i = 0; i < most && (i == 0 || sampler.top_p == 0 || mass < sampler.top_p * total); i++)
        mass += weight[order[i]] = WEIGHT(order[i]);
#undef WEIGHT
    while (token < n && (sum += weight[token]) <= uniform * mass) token++;
    free(order), free(weight);
    return token;
}

// Every draw equals that of a sort: of logits that differ, that are rounded to many equal ones, one of which is far
// below the others, and of a few.
static void test_sampler(Tests* t) {
    enum { N = 2000 };
    static const Sampler samplers[] = {{1, 0, 0},     {1, 1, 0},   {0.7, 1500, 0}, {1, 0, 0.9}, {2, 300, 0.95},
                                       {0.2, 0, 0.3}, {100, 3, 0}, {0.01, 0, 0.5}, {1, N, 0.5}, {1, 1 << 30, 0}};
    static real logits[N];
    for (int i = 0; i <= 7000; i++) EXPECT_NEAR(t, sampler_exp(-0.1 * i) / exp(-0.1 * i), 1, 4e-16);
    for (int kind = 0; kind < 4; kind++) {
        int n = kind == 3 ? 7 : N;
        for (int i = 0; i < n; i++) logits[i] = (real)(4 * rng_normal(42, (uint64_t)i));
        for (int i = 0; i < n && kind == 1; i++) logits[i] = (real)(floor(8 * (double)logits[i]) / 8);
        if (kind == 2) logits[N / 2] = (real)-1e4;
        for (size_t k = 0; k < COUNT_OF(samplers) * 50; k++) {
            double uniform = ((double)(k % 50) + 0.5) / 50;
            EXPECT_EQ(t, sampler_draw(logits, n, samplers[k / 50], uniform),
                      draw_sorted(logits, n, samplers[k / 50], uniform));
        }
    }
}

// Which positions are computed for each token of a text: without the cache the whole window, with it the last alone,
// but after the window has moved; the windows are the same.
static void test_windows(Tests* t) {
    for (int T = 1; T <= 17; T += 4) {
        int tokens[100], calls = 0, moved = max_int(T / 4, 1);
        Generation with = {.tokens = tokens, .T = T, .count = 1}, without = with;
        with.can_cache = 1;
        for (; with.count < 100; with.count++, without.count++) {
            Window a = generation_window(&with), b = generation_window(&without);
            EXPECT(t, a.tokens == b.tokens && a.count == b.count && a.tokens + a.count == tokens + with.count);
            EXPECT(t, a.count <= T && a.count >= min_int(with.count, T - moved + 1));
            EXPECT(t, b.past_len == 0 && (a.past_len == 0 || a.past_len == a.count - 1));
            calls += a.past_len == 0;
        }
        EXPECT_EQ(t, calls, 1 + (99 - T + moved - 1) / moved);
    }
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

// Every tensor has its own stream for every seed; all 64 bits of the seed matter.
static void test_streams(Tests* t) {
    enum { N = 5, STREAMS = 4 };
    static const TensorRow rows[] = {{"a", 0, {0, 0}, OWN, 0, INIT_NORMAL}, {"b", 0, {0, 0}, OWN, 0, INIT_NORMAL}};
    const int dims[] = {N, 1};
    real values[STREAMS][N], params[2 * TENSOR_ALIGNMENT];
    TensorTable table;
    memset(&table, 0, sizeof table);
    tensors_add(&table, rows, 2, dims, -1);
    tensors_finish(&table);
    CHECK(table.elements <= COUNT_OF(params));
    for (int i = 0; i < STREAMS; i++) {
        tensors_init(&table, params, 1 | (uint64_t)(i / 2) << 40, 1, 1);
        memcpy(values[i], params + table.tensors[i % 2].offset, sizeof values[i]);
        for (int k = 0; k < i; k++) EXPECT(t, memcmp(values[i], values[k], sizeof values[i]) != 0);
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

// The state that it saved may change from writer_begin() on. Whether loading brings it back: all, and a shard of it.
static int tiny_loads(Tiny* t, const char* dir) {
    int same = 1;
    Tiny want = *t;
    size_t n = t->table.elements, begin = TENSOR_ALIGNMENT;
    FlatRange shard = {begin, n / TENSOR_ALIGNMENT / 2 * TENSOR_ALIGNMENT};
    for (int p = 0; p < TINY_PARTS; p++) want.values[p] = (real*)xcalloc(n, sizeof(real));
    tiny_fill(&want, 5);
    for (int is_whole = 0; is_whole < 2; is_whole++) {
        t->optimizer.shard = is_whole ? (FlatRange){0, n} : shard;
        for (int p = 0; p < TINY_PARTS; p++) memset(t->values[p], 0x7f, n * sizeof(real));
        checkpoint_load(&t->c, NULL, dir);
        same = same && memcmp(t->values[0], want.values[0], n * sizeof(real)) == 0;
        for (int p = 1; p < TINY_PARTS; p++)
            same = same && memcmp(t->values[p], want.values[p] + t->optimizer.shard.begin,
                                  t->optimizer.shard.size * sizeof(real)) == 0;
    }
    for (int p = 0; p < TINY_PARTS; p++) free(want.values[p]);
    return same;
}

static Tiny* loaded;  // by load_into()

// Whether the copies of the table's tensors are of these values.
static int copies_are(const Fp32Copies* e, const TensorTable* table, const real* values) {
    int same = 1;
    for (int i = 0; i < table->count; i++) {
        const Tensor* tensor = &table->tensors[i];
        if (!tensor->fp32_copy) continue;
        same =
            same && memcmp(e->copies + tensor->fp32_offset, values + tensor->offset, tensor->size * sizeof(real)) == 0;
    }
    return same;
}

// Where nothing is updated: the weights, and of the master weights those of the first two tensors, which have copies.
// Then the same from the model's file, whose values a forward pass must leave as they are.
static int tiny_loads_copies(Tiny* t, const char* dir) {
    CastSpan spans[2];
    Fp32Copies copies = {(real*)xcalloc(t->table.elements, sizeof(real)), spans, COUNT_OF(spans)};
    t->table.fixed = 1, t->optimizer.shard = tensors_updated(&t->table);
    for (size_t i = 0, at = 0; i < COUNT_OF(spans); i++) {
        Tensor* tensor = &t->table.tensors[i];
        tensor->fp32_copy = 1, tensor->fp32_offset = at;
        spans[i] = (CastSpan){tensor->offset, at, tensor->size};
        t->table.fp32_elements = at += round_up(tensor->size, TENSOR_ALIGNMENT);
    }
    checkpoint_load(&t->c, &copies, dir);
    int same = copies_are(&copies, &t->table, t->values[3]);
    fp32_copies_read_master(&copies, &t->table, &t->optimizer, named("%s/model.safetensors", dir), NULL, &t->ctx);
    fp32_copies_update(&copies, &t->table, t->c.params, t->optimizer.master, NULL, &t->ctx);
    same = same && copies_are(&copies, &t->table, t->values[0]);
    t->table.fixed = 0, t->optimizer.shard.size = t->table.elements;
    free(copies.copies);
    return same;
}

static void load_into(const char* dir) { checkpoint_load(&loaded->c, NULL, dir); }

// A checkpoint of one process, and the same whose optimizer's file is three shards, of which one is empty.
static void test_load(Tests* t) {
    Tiny tiny;
    FileDigest digest;
    tiny_open(&tiny, t);
    size_t third = tiny.table.elements / TENSOR_ALIGNMENT / 3 * TENSOR_ALIGNMENT;
    const FlatRange ranges[] = {{0, third}, {third, 0}, {third, tiny.table.elements - third}};
    char* dir = checkpoint_path(tiny_out, 1);
    EXPECT_EQ(t, tiny_begin(&tiny, 1, 0), 0);
    for (int is_sharded = 0; is_sharded < 2; is_sharded++) {
        for (int i = 0; i < 3 && is_sharded; i++) {
            const TensorPart parts[] = {{"m.", tiny.values[1] + ranges[i].begin, VIEW_REAL},
                                        {"v.", tiny.values[2] + ranges[i].begin, VIEW_REAL},
                                        {"master.", tiny.values[3] + ranges[i].begin, VIEW_REAL}};
            const char* path = named("%s/optimizer-%05d-of-00003.safetensors", dir, i);
            EXPECT_EQ(t, tensors_write_shard(path, &tiny.table, parts, 3, ranges[i], &digest, &tiny.ctx), 0);
        }
        CHECK(!is_sharded || unlink(named("%s/optimizer.safetensors", dir)) == 0);
        EXPECT(t, tiny_loads(&tiny, dir));
        EXPECT(t, tiny_loads_copies(&tiny, dir));
    }
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

// Everything that a run renames into place was flushed before, and its directory after.
static void test_power_cut(Tests* t) {
    static const char* const renamed[] = {"ckpt/00000002", "ema",      "model.safetensors",
                                          "predictions",   "loss.svg", "vectors"};
    static Run r;
    Tiny tiny;
    ModelBuffers b;
    Embedding e;
    Log log;
    Text line = {NULL, 0, 0};
    tiny_open(&tiny, t);
    tiny.c.keep = 1;
    disk_flushed_count = disk_names_count = disk_lost_count = 0;
    EXPECT(t, tiny_begin(&tiny, 1, 0) == 0 && tiny_begin(&tiny, 2, 0) == 0 && disk_names_count == 0);
    memset(&r, 0, sizeof r), memset(&b, 0, sizeof b), memset(&e, 0, sizeof e);
    r.out = tiny_out, r.ctx = tiny.ctx, r.buffers = &b, r.config.text = (char*)"{}";
    b.table = tiny.table, b.params = tiny.c.params;
    run_save_average(&r, "card");
    text_printf(&line, "{\"step\": 1}\n{\"step\": 2}\n");
    predictions_write(named("%s/predictions", tiny_out), &line);
    CHECK(write_file(named("%s/log.jsonl", tiny_out), line.text, line.length) == 0);
    log_open(&log, tiny_out, 1);  // cuts it back
    log_write_svg(&log, "loss");
    log_close(&log);
    e.path = xprintf("%s/vectors", tiny_out), e.temporary = xprintf("%s.tmp", e.path);
    e.file = fopen(e.temporary, "wb");
    embed_put(&e, "vector", 6);
    embed_close(&e);
    for (size_t i = 0; i < COUNT_OF(renamed); i++) EXPECT(t, access(named("%s/%s", tiny_out, renamed[i]), F_OK) == 0);
    EXPECT_EQ(t, disk_lost_count, 0);   // renamed before they were flushed
    EXPECT_EQ(t, disk_names_count, 0);  // directories that were not flushed
    tiny_close(&tiny);
    free(line.text);
}

static const char* const theirs[] = {".lock",       "model.safetensors",           "model.safetensors.tmp",
                                     "config.json", "ckpt/00000001/manifest.json", "ckpt/00000002.tmp/manifest.json"};

// Another run's directory is in the place of OUT once all files of the second checkpoint are written.
static void replace_out(const char* path) {
    if (!strstr(path, "/ckpt/00000002.tmp") || strstr(path, ".tmp/")) return;
    on_flush = NULL;
    CHECK(rename(tiny_out, named("%s.moved", tiny_out)) == 0);
    CHECK(make_directories(named("%s/ckpt/00000001", tiny_out)) == 0);
    CHECK(make_directories(named("%s/ckpt/00000002.tmp", tiny_out)) == 0);
    for (size_t i = 0; i < COUNT_OF(theirs); i++)
        CHECK(write_file(named("%s/%s", tiny_out, theirs[i]), "theirs", 6) == 0);
}

// Save two steps while OUT is replaced.
static void save_replaced(const char* tests) {
    Tiny tiny;
    RunLock lock = {NULL, 0, 0};
    tiny_open(&tiny, (const Tests*)(const void*)tests);
    run_lock_take(&lock, tiny_out, O_CREAT);
    tiny.c.lock = &lock;
    int first = tiny_begin(&tiny, 1, 0);
    on_flush = replace_out;
    die(USAGE, "saved %d %d", first, tiny_begin(&tiny, 2, 0));
}

static int replaced_entries;

static int count_entry(const char* path, const struct stat* st, int kind, struct FTW* walk) {
    (void)path, (void)st, (void)kind, (void)walk;
    replaced_entries++;
    return 0;
}

// The run ends instead of the commit, and writes nothing more.
static void test_replaced(Tests* t) {
    Text said = {NULL, 0, 0};
    size_t n;
    snprintf(tiny_out, sizeof tiny_out, "%s/out", t->directory);
    EXPECT_EQ(t, exit_status_of(save_replaced, (const char*)t, &said), FAILED);
    EXPECT(t, is_one_line(&said) && strstr(said.text, "nothing more is written"));
    for (size_t k = 0; k < COUNT_OF(theirs); k++) {
        char* text = read_file(named("%s/%s", tiny_out, theirs[k]), 1 << 20, &n, FAILED);
        EXPECT_TEXT(t, text, "theirs");
        free(text);
    }
    replaced_entries = 0;
    nftw(tiny_out, count_entry, 8, FTW_PHYS);
    EXPECT_EQ(t, replaced_entries, 10);
    free(said.text);
}

// ---------------------------------------------------------------------------------------------------------
// The energy of a GPU

// It has used `*device` joules. Counts how often it was asked.
static int energy_asked;
static int energy_made_up(void* device, unsigned long long* millijoules) {
    energy_asked++;
    *millijoules = (unsigned long long)(1000 * *(double*)device + 0.5);
    return 0;
}

// The means that the log shows of a GPU with `watts`, for steps of 0.3 s: a pause in between does not count.
static void test_energy(Tests* t) {
    const double watts = 500;
    double now = 7, used = watts * now, last = 0;
    int measured = 0;
    EnergyMeter m;
    EXPECT(t, energy_open(&m) == -1 && isnan(energy_total(&m)));
    m.device = &used, m.total = energy_made_up, energy_asked = 0;
    energy_begin(&m, now);
    for (int step = 1; step <= 9; step++) {
        if (step == 7) now += 100, used = watts * now, energy_begin(&m, now);
        now += 0.3, used = watts * now;
        double joules = energy_step(&m, now);
        if (!isnan(joules)) measured = 10 * measured + step, last = joules;
    }
    EXPECT_EQ(t, energy_asked, 3);  // once a second
    EXPECT_EQ(t, measured, 4);      // the only step that ends a second from the beginning or the pause on
    EXPECT_NEAR(t, last, 0.3 * watts, 1e-9);
}

// ---------------------------------------------------------------------------------------------------------
// The best validation, and what a checkpoint reads back; the average of the weights

static void test_state(Tests* t) {
    SavedState s, saved;
    Best* b = &s.best;
    Json json;
    Text text = {NULL, 0, 0};
    char error[JSON_ERROR_SIZE];
    memset(&s, 0, sizeof s), memset(&saved, 0, sizeof saved);
    best_judge(b, 0, 1);
    EXPECT(t, b->step == 0 && b->judged == 0);  // before the first step
    best_judge(b, 10, 5), best_judge(b, 20, 4), best_judge(b, 30, 4), best_judge(b, 40, NAN), best_judge(b, 40, 1);
    EXPECT(t, b->step == 20 && b->loss == 4 && b->judged == 40);  // not equal, not finite, not repeated ones
    s.step = saved.step = 40, s.samples = 320, s.data = UINT32_MAX, s.matmul_plans = (char*)"plans";
    s.has_outliers = 1, s.outliers.loss.value[0] = 1.5, s.outliers.loss.count = 1;
    s.scale.scale = (real)0.5, s.scale.updates = 40;
    text_append(&text, "{", 1);
    state_put(&text, &s);
    text_append(&text, "}", 1);
    CHECK(json_parse(&json, text.text, text.length, error) == 0);
    state_get(&saved, json.root, "file");
    EXPECT(t, memcmp(&saved.best, b, sizeof *b) == 0 && saved.samples == 320 && saved.data == UINT32_MAX && !saved.fp8);
    EXPECT(t, saved.scale.scale == (real)0.5 && saved.scale.updates == 40 && strcmp(saved.matmul_plans, "plans") == 0);
    EXPECT(t, saved.outliers.loss.count == 1 && saved.outliers.loss.value[0] == 1.5 && !saved.outliers.norm.count);
    json_free(&json), state_free(&saved);
    free(text.text);
}

static void test_average(Tests* t) {
    WeightAverage a = {.decay = 0.9, .start = 3};
    EXPECT(t, !weight_average_is_on(&a, 2) && weight_average_is_on(&a, 3));
    EXPECT_NEAR(t, weight_average_rate(&a, 3), 1, 1e-12);
    EXPECT_NEAR(t, weight_average_rate(&a, 6), 0.25, 1e-12);
    EXPECT_NEAR(t, weight_average_rate(&a, 99), 0.1, 1e-12);
}

int main(int argc, char** argv) {
    static const TestCase cases[] = {{"state", test_state},
                                     {"average", test_average},
                                     {"sampler", test_sampler},
                                     {"generation/windows", test_windows},
                                     {"settings/update", test_update_settings},
                                     {"init/streams", test_streams},
                                     {"energy/meter", test_energy},
                                     {"checkpoint/whole, and in shards", test_load},
                                     {"checkpoint/kept", test_retention},
                                     {"checkpoint/power cut", test_power_cut},
                                     {"checkpoint/another run's directory", test_replaced}};
    device_set_threads(1);  // a fork knows nothing of its parent's threads
    return tests_main(argc, argv, cases, COUNT_OF(cases));
}
