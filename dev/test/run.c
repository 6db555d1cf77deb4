/* Tests of llmc/run: drawing tokens, a model's configuration, what reaches the optimizer, the energy meter; and
 * checkpoints: of any number of ranks, written in the background, kept, damaged, cut off by a power cut, and in a
 * directory that another run has taken.
 *
 *     ./test_run [NAME]      the cases whose name contains NAME
 *
 * Prints a line per case and `N passed, N failed`; exit status 1 if one failed. */
#include <errno.h>
#include <ftw.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

// The code under test calls the disk through these functions, which record the call and may act in between. A path is
// recorded from "/ckpt" on, or from its last slash.
static char disk_events[1 << 14];
static void (*on_disk_event)(const char* event);

static void disk_event(const char* what, const char* path) {
    const char *ckpt = strstr(path, "/ckpt"), *slash = strrchr(path, '/');
    size_t n = strlen(disk_events);
    snprintf(disk_events + n, sizeof disk_events - n, "%s %s\n", what, ckpt ? ckpt : slash ? slash + 1 : path);
    if (on_disk_event) on_disk_event(disk_events + n);
}

static void disk_event_of(const char* what, int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    path[n > 0 ? n : 0] = '\0';
    disk_event(what, path);
}

// What a power cut would lose: names that were renamed before everything below them was flushed, and directories with
// such names that were not flushed since.
enum { DISK_MOST = 1024 };
static struct stat disk_flushed[DISK_MOST];    // of files and directories when they were flushed
static ino_t disk_unflushed_names[DISK_MOST];  // of directories
static int disk_flushed_count, disk_names_count, disk_lost_count;

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

static void disk_renames(const char* from, const char* to) {
    char parent[4096];
    struct stat st;
    const char *end = strrchr(to, '.'), *slash = strrchr(to, '/');
    disk_event("before", from);
    if (!slash || (end && (strcmp(end, ".tmp") == 0 || strcmp(end, ".damaged") == 0))) return;  // renamed out of place
    nftw(from, disk_check, 8, FTW_PHYS);
    snprintf(parent, sizeof parent, "%.*s", (int)(slash - to), to);
    if (stat(parent, &st) == 0 && disk_names_count < DISK_MOST) disk_unflushed_names[disk_names_count++] = st.st_ino;
}

// Nothing is flushed: what is recorded decides.
static int test_fsync(int fd) {
    int names = 0;
    struct stat st;
    if (fstat(fd, &st) == 0 && disk_flushed_count < DISK_MOST) disk_flushed[disk_flushed_count++] = st;
    for (int i = 0; i < disk_names_count; i++)
        if (disk_unflushed_names[i] != st.st_ino) disk_unflushed_names[names++] = disk_unflushed_names[i];
    disk_names_count = names;
    disk_event_of("fsync", fd);
    return 0;
}

static int test_rename(const char* from, const char* to) {
    disk_renames(from, to);
    int result = rename(from, to), why = errno;
    disk_event("rename", from);
    errno = why;
    return result;
}

#define fsync test_fsync
#define rename test_rename

// Ranks of these tests are processes with shared memory.
#include "llmc/dist/process_group.h"
#define group_gather test_gather
#define group_broadcast test_broadcast
#define group_barrier test_barrier
#define group_any test_any
#define group_exit test_exit
#define group_die test_die

enum { TEST_RANKS = 4, TEST_BYTES = 1 << 16 };

typedef struct {
    pthread_barrier_t barrier;
    char bytes[TEST_RANKS][TEST_BYTES];
} TestRanks;

static TestRanks* test_ranks;

static inline void test_barrier(const ProcessGroup* group) {
    if (group->size > 1) pthread_barrier_wait(&test_ranks->barrier);
}

static inline void test_gather(const ProcessGroup* group, void* all, const void* mine, size_t bytes) {
    CHECK(bytes <= TEST_BYTES && group->size <= TEST_RANKS);
    if (group->size == 1) {
        memcpy(all, mine, bytes);
        return;
    }
    memcpy(test_ranks->bytes[group->rank], mine, bytes);
    test_barrier(group);
    for (int r = 0; r < group->size; r++) memcpy((char*)all + (size_t)r * bytes, test_ranks->bytes[r], bytes);
    test_barrier(group);
}

static inline void test_broadcast(const ProcessGroup* group, void* data, size_t bytes) {
    char* all = (char*)xmalloc((size_t)group->size * bytes);
    test_gather(group, all, data, bytes);
    memcpy(data, all, bytes);
    free(all);
}

static inline int test_any(const ProcessGroup* group, int flag) {
    int all[TEST_RANKS], any = 0;
    test_gather(group, all, &flag, sizeof flag);
    for (int r = 0; r < group->size; r++) any = any || all[r];
    return any;
}

__attribute__((noreturn)) static inline void test_exit(const ProcessGroup* group, int status) {
    fflush(stdout);
    test_barrier(group);
    exit(status);
}

__attribute__((format(printf, 3, 4), noreturn)) static inline void test_die(const ProcessGroup* group, int status,
                                                                            const char* format, ...) {
    va_list args;
    va_start(args, format);
    if (group->rank == 0) fputs("error: ", stderr), vfprintf(stderr, format, args), fputs("\n", stderr);
    va_end(args);
    test_exit(group, status);
}

#include "apps/use/embed.h"
#include "apps/use/generate.h"
#include "dev/test/tests.h"
#include "llmc/bert/mlm_data.h"
#include "llmc/checkpoint/resume.h"
#include "llmc/model/config.h"
#include "llmc/profile/profiler.h"
#include "llmc/run/step.h"

// ---------------------------------------------------------------------------------------------------------
// Settings that earlier versions saved

// A value of --loss-scale that earlier versions saved.
static void test_old_value(Tests* t, const char* value, double want) {
    char* saved = xprintf("{\"loss-scale\": \"%s\"}", value);
    double scale = 0;
    Flag row = {NULL, "--loss-scale", FLAG_REAL, &scale, "-1", -1, 3e38, NULL, SCOPE_RUN, TOPIC_NONE, ""};
    char *argv[] = {(char*)"program"}, error[JSON_ERROR_SIZE];
    Json json;
    flags_parse(&row, 1, 1, argv, "");
    if (json_parse(&json, saved, strlen(saved), error) != 0) die(FAILED, "%s", error);
    settings_restore(&row, 1, json.root, 0, "file");
    json_free(&json);
    free(saved);
    expect(t, scale == want, "settings/--loss-scale of an earlier version", "%s: %g", value, scale);
}

// ---------------------------------------------------------------------------------------------------------
// Sampler

// The token that `uniform` selects of all logits sorted in descending order, of equal ones the first first.
static int draw_sorted(const real* logits, int n, Sampler sampler, double uniform) {
    double total = 0, mass = 0, sum = 0;
    int *order = (int*)xmalloc((size_t)n * sizeof(int)), *is_candidate = (int*)xcalloc((size_t)n, sizeof(int)),
        token = 0;
    for (int i = 0; i < n; i++) {
        int at = i;
        for (; at > 0 && logits[order[at - 1]] < logits[i]; at--) order[at] = order[at - 1];
        order[at] = i;
    }
    int most = sampler.top_k ? min_int(sampler.top_k, n) : n;
#define WEIGHT(i) exp((double)(logits[i] - logits[order[0]]) / sampler.temperature)
    for (int i = 0; i < most; i++) total += WEIGHT(order[i]);
    for (int i = 0; i < most && (i == 0 || sampler.top_p == 0 || mass < sampler.top_p * total); i++)
        mass += WEIGHT(order[i]), is_candidate[order[i]] = 1;
    while (token < n && (sum += is_candidate[token] ? WEIGHT(token) : 0) <= uniform * mass) token++;
#undef WEIGHT
    free(order), free(is_candidate);
    return token;
}

// Every draw equals that of a sort: of logits that differ, that are rounded to many equal ones, one of which is far
// below the others, and of a few.
static void test_sampler(Tests* t) {
    enum { N = 2000 };
    static const Sampler samplers[] = {{1, 0, 0},      {1, 1, 0},       {1, 40, 0},     {0.7, 1500, 0}, {1, 0, 0.9},
                                       {2, 300, 0.95}, {0.2, 0, 0.3},   {3, 0, 0.95},   {100, 3, 0},    {0.01, 0, 0.5},
                                       {1, N, 0.5},    {1, N + 1, 0.5}, {1, 1 << 30, 0}};
    static real logits[N];
    double worst = 0;
    for (int i = 0; i <= 7000; i++) worst = fmax(worst, fabs(sampler_exp(-0.1 * i) / exp(-0.1 * i) - 1));
    expect(t, worst < 4e-16 && sampler_exp(0) == 1, "sampler/exp", "error %g", worst);
    for (int kind = 0; kind < 4; kind++) {
        int n = kind == 3 ? 7 : N, differ = 0;
        for (int i = 0; i < n; i++) logits[i] = (real)(4 * rng_normal(42, (uint64_t)i));
        for (int i = 0; i < n && kind == 1; i++) logits[i] = (real)(floor(8 * (double)logits[i]) / 8);
        if (kind == 2) logits[N / 2] = (real)-1e4;
        for (size_t k = 0; k < COUNT_OF(samplers); k++)
            for (int d = 0; d < 50; d++)
                differ += sampler_draw(logits, n, samplers[k], (d + 0.5) / 50) !=
                          draw_sorted(logits, n, samplers[k], (d + 0.5) / 50);
        char* name = xprintf("sampler/as by sorting, %d", kind);
        expect(t, differ == 0, name, "%d tokens differ", differ);
        free(name);
    }
    // Four equal logits, of which each has exactly a quarter.
    static const real equal[4] = {2, 2, 2, 2};
    static const struct {
        Sampler sampler;
        double uniform;
        int token;
    } cases[] = {
        {{1, 0, 0.25}, 0.999, 0}, {{1, 0, 0.5}, 0.999, 1},  {{1, 0, 0.75}, 0.999, 2}, {{1, 0, 1}, 0.999, 3},
        {{1, 3, 1}, 0.999, 2},    {{0, 0, 0.25}, 0.999, 0}, {{0, 3, 0}, 0.5, 0},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        int got = sampler_draw(equal, 4, cases[i].sampler, cases[i].uniform);
        char* name = xprintf("sampler/four equal ones, %zu", i);
        expect(t, got == cases[i].token, name, "token %d, not %d", got, cases[i].token);
        free(name);
    }
    // Four rows of columns, each row a little below the one before: most candidates are no column's maximum.
    static real rows[4 * SAMPLER_BINS];
    for (int i = 0; i < 4 * SAMPLER_BINS; i++) rows[i] = (real)(-0.01 * (i / SAMPLER_BINS));
    Sampler many = {1, 3 * SAMPLER_BINS + 2, 0}, nucleus = {1, 0, 0.9};  // 0.9 of the four ends at 608 of the last
    int last = sampler_draw(rows, 4 * SAMPLER_BINS, many, 1 - 1e-9);
    expect(t, last == 3 * SAMPLER_BINS + 1, "sampler/more than columns", "token %d, not %d", last,
           3 * SAMPLER_BINS + 1);
    last = sampler_draw(rows, 4 * SAMPLER_BINS, nucleus, 1 - 1e-9) - 3 * SAMPLER_BINS;
    expect(t, last > 600 && last < 616, "sampler/top p beyond the columns' maxima", "token %d of the last row", last);
    static const real nan_logits[3] = {(real)NAN, 1, (real)NAN};
    last = sampler_draw(nan_logits, 3, nucleus, 0.5);
    expect(t, last >= 0 && last < 3, "sampler/NaN", "token %d", last);
}

// Which positions are computed for each token of a text: without the cache the whole window, with it the last alone,
// but after the window has moved; the windows are the same.
static void test_windows(Tests* t) {
    for (int T = 1; T <= 17; T += 4) {
        int tokens[100], calls = 0, good = 1;
        Generation with, without;
        memset(&with, 0, sizeof with);
        with.tokens = tokens, with.T = T, with.count = 1;
        without = with;
        with.can_cache = 1;
        for (; with.count < 100; with.count++, without.count++) {
            Window a = generation_window(&with), b = generation_window(&without);
            int least = with.count <= T ? with.count : T - max_int(T / 4, 1) + 1;
            good &= a.tokens == b.tokens && a.count == b.count && a.tokens + a.count == tokens + with.count;
            good &=
                a.count <= T && a.count >= least && b.past_len == 0 && (a.past_len == 0 || a.past_len == a.count - 1);
            calls += a.past_len == 0;
        }
        char* name = xprintf("generation/windows, T %d", T);
        int moves = (99 - T + max_int(T / 4, 1) - 1) / max_int(T / 4, 1);
        expect(t, good && calls == 1 + moves, name, "%d whole windows where %d are due, %s", calls, 1 + moves,
               good ? "well" : "a wrong window");
        free(name);
    }
}

// ---------------------------------------------------------------------------------------------------------
// Configuration rows

typedef struct {
    int layers;
    double rate;
} Sizes;

static const ConfigRow ROWS[] = {{"layers", CONFIG_INT, offsetof(Sizes, layers), 1, 1, 1 << 24},
                                 {"rate", CONFIG_REAL, offsetof(Sizes, rate), 0, 0, 0.5}};

static void refuse_file(const char* text) {
    Sizes sizes;
    Json json;
    char error[JSON_ERROR_SIZE];
    if (json_parse(&json, text, strlen(text), error) != 0) die(FAILED, "%s", error);
    config_rows_read(&sizes, ROWS, COUNT_OF(ROWS), json.root, "file");
}

// The output of `body` on stderr in a child process, which must end with USAGE (caller frees); NULL if it does not.
static char* refusal(void (*body)(const char*), const char* text) {
    Text got = {NULL, 0, 0};
    if (exit_status_of(body, text, &got) == USAGE) return got.text;
    free(got.text);
    return NULL;
}

static void expect_refusal(Tests* t, const char* name, void (*body)(const char*), const char* text, const char* want) {
    char* got = refusal(body, text);
    expect(t, got && strcmp(got, want) == 0, name, "got %s, not %s", got ? got : "another exit status", want);
    free(got);
}

static void test_config(Tests* t) {
    expect_refusal(t, "config/whole numbers", refuse_file, "{\"layers\": 0, \"rate\": 0}",
                   "error: file: key \"layers\": 0 is out of range; allowed: 1..16777216\n");
    expect_refusal(t, "config/fractions", refuse_file, "{\"layers\": 16777216, \"rate\": 0.75}",
                   "error: file: key \"rate\": 0.75 is out of range; allowed: 0..0.5\n");
}

// ---------------------------------------------------------------------------------------------------------
// Settings on their way to the optimizer

static void test_update_settings(Tests* t) {
    static Run r;
    Settings* s = &r.settings;
    memset(&r, 0, sizeof r);
    s->beta1 = 0.1, s->beta2 = 0.2, s->eps = 0.3, s->weight_decay = 0.4, s->clip = 0.5, s->lr = 0.6;
    r.lr = 0.7;  // the schedule's rate, not the peak
    OptimizerSettings o = run_optimizer_settings(&r);
    int same = o.lr == 0.7 && o.beta1 == 0.1 && o.beta2 == 0.2 && o.eps == 0.3 && o.weight_decay == 0.4;
    expect(t, same && o.max_norm == 0.5, "update/settings", "lr %g, betas %g %g, eps %g, decay %g, clip %g", o.lr,
           o.beta1, o.beta2, o.eps, o.weight_decay, o.max_norm);
    uint64_t rounding = o.rounding;
    r.step = 1;
    expect(t, run_optimizer_settings(&r).rounding != rounding, "update/rounding draws new bits in every step",
           "it does not");
    r.group.size = 1, r.step = 5;
    s->optimizer = MUON, s->muon_warmup = 10, s->adamw_lr = 1.2;
    double momentum = run_optimizer_settings(&r).muon.momentum;  // half of the way from 0.85
    UpdateSettings u = run_update_settings(&r);
    expect(t, fabs(momentum - 0.9) < 1e-12, "update/--muon-warmup", "momentum %g", momentum);
    expect(t, fabs(u.adamw_rate - 2) < 1e-12, "update/--adamw-lr", "rate %g", u.adamw_rate);
}

// ---------------------------------------------------------------------------------------------------------
// Initial values

// Every tensor has its own stream for every seed; all 64 bits of the seed matter.
static void test_streams(Tests* t) {
    static const TensorRow rows[] = {{"a", 0, {0, 0}, OWN, 0, INIT_NORMAL},
                                     {"b", 0, {0, 0}, OWN, 0, INIT_NORMAL},
                                     {"c", 0, {0, 0}, OWN, 0, INIT_NORMAL_RESIDUAL}};
    const uint64_t seeds[] = {1, 2, 1 | (uint64_t)1 << 40};
    enum { N = 5, TENSORS = COUNT_OF(rows), STREAMS = COUNT_OF(seeds) * TENSORS };
    const int dims[] = {N, 1};
    real values[STREAMS][N];
    TensorTable table;
    memset(&table, 0, sizeof table);
    tensors_add(&table, rows, TENSORS, dims, -1);
    tensors_finish(&table);
    real* params = (real*)xmalloc(table.elements * sizeof(real));
    for (int i = 0; i < STREAMS; i++) {
        tensors_init(&table, params, seeds[i / TENSORS], 1, 1);
        memcpy(values[i], params + table.tensors[i % TENSORS].offset, sizeof values[i]);
    }
    int same = 0;
    for (int i = 0; i < STREAMS; i++)
        for (int k = 0; k < i; k++) same += memcmp(values[i], values[k], sizeof values[i]) == 0;
    expect(t, same == 0, "init/tensors and seeds differ", "%d pairs of streams are the same", same);
    free(params);
    tensors_free(&table);
}

// ---------------------------------------------------------------------------------------------------------
// Which steps the loss scale explains

static void test_overflow(Tests* t) {
    static const struct {
        const char* name;
        LossScaleKind kind;
        double loss, norm, scale;
        int want;
    } cases[] = {{"all is well", LOSS_SCALE_DYNAMIC, 3, 1, 1024, 0},
                 {"infinite gradients", LOSS_SCALE_DYNAMIC, 3, INFINITY, 1024, 1},
                 {"gradients that are NaN", LOSS_SCALE_DYNAMIC, 3, NAN, 2, 1},
                 {"the lowest scale", LOSS_SCALE_DYNAMIC, 3, INFINITY, 1, 0},
                 {"a fixed scale", LOSS_SCALE_FIXED, 3, INFINITY, 1024, 0},
                 {"a loss that is NaN", LOSS_SCALE_DYNAMIC, NAN, NAN, 1024, 0}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char* name = xprintf("overflow/%s", cases[i].name);
        int is_scaled = cases[i].kind == LOSS_SCALE_DYNAMIC;
        int got = run_has_overflowed(is_scaled, cases[i].loss, cases[i].norm, cases[i].scale);
        expect(t, got == cases[i].want, name, "got %d", got);
        free(name);
    }
}

// ---------------------------------------------------------------------------------------------------------
// Showing a checkpoint

static void test_publish(Tests* t, const char* other) {
    char out[] = "/tmp/llmc_run_XXXXXX";
    struct stat here, there;
    if (!mkdtemp(out)) die(FAILED, "%s: %s", out, strerror(errno));
    char* dir = xprintf("%s/llmc_run_%d", other, (int)getpid());
    if (mkdir(dir, 0777) != 0 || stat(out, &here) != 0 || stat(dir, &there) != 0 || here.st_dev == there.st_dev) {
        skip_case(t, "publish/another file system", "%s cannot be written", other);
    } else {
        enum { BYTES = (1 << 20) + 12345 };  // more than one piece
        char *from = xprintf("%s/model.safetensors", dir), *to = xprintf("%s/model.safetensors", out);
        char *tmp = xprintf("%s.tmp", to), *bytes = (char*)xmalloc(BYTES);
        size_t n = 0;
        for (int i = 0; i < BYTES; i++) bytes[i] = (char)(i * 31 >> 3);
        if (write_file(from, bytes, BYTES) != 0) die(FAILED, "%s: %s", from, strerror(errno));
        int result = checkpoint_publish(out, dir);
        char* got = file_exists(to) ? read_file(to, BYTES, &n, FAILED) : NULL;
        expect(t, result == 0 && n == BYTES && memcmp(got, bytes, BYTES) == 0 && !file_exists(tmp),
               "publish/another file system", "result %d, %zu bytes", result, n);
        free(got), free(from), free(to), free(tmp), free(bytes);
    }
    remove_directory(dir), remove_directory(out);
    free(dir);
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
    real* values[TINY_PARTS];  // [elements], whole
    real* mine[TINY_PARTS];    // the weights whole, else the shard
    Optimizer optimizer;
    Context ctx;
    Checkpoints c;
    ProcessGroup group;
    CheckpointWriter writer;
} Tiny;

// Where the shard of rank `rank` of `ranks` begins: shards are uneven, and the third of 4 is empty.
static size_t tiny_cut(const TensorTable* table, int rank, int ranks) {
    size_t groups = table->elements / TENSOR_ALIGNMENT;
    if (rank == ranks) return table->elements;
    if (ranks == 4 && rank == 3) rank = 2;
    return groups * (size_t)(rank * rank) / (size_t)(ranks * ranks) * TENSOR_ALIGNMENT;
}

// Another `seed`, another state. A rank has its shard where `sharded`.
static void tiny_open(Tiny* t, const char* out, int seed, int sharded, int rank, int ranks) {
    memset(t, 0, sizeof *t);
    context_init(&t->ctx);
    tensors_add(&t->table, TINY_ROWS, COUNT_OF(TINY_ROWS), TINY_DIMS, -1);
    tensors_finish(&t->table);
    size_t begin = sharded ? tiny_cut(&t->table, rank, ranks) : 0;
    size_t end = sharded ? tiny_cut(&t->table, rank + 1, ranks) : t->table.elements;
    FlatRange shard = {begin, end - begin};
    for (int p = 0; p < TINY_PARTS; p++) {
        t->values[p] = (real*)xcalloc(t->table.elements, sizeof(real));
        for (int i = 0; i < t->table.count; i++)
            for (size_t k = 0; k < tensor_elements(&t->table.tensors[i]); k++)
                t->values[p][t->table.tensors[i].offset + k] =
                    (real)rng_normal(rng_stream((uint64_t)seed, (uint64_t)p, 0, SITE_INIT), (uint64_t)(i * 10000) + k);
        size_t n = p == 0 ? t->table.elements : shard.size;
        t->mine[p] = (real*)xmalloc((n + 1) * sizeof(real));
        memcpy(t->mine[p], t->values[p] + (p == 0 ? 0 : begin), n * sizeof(real));
    }
    t->optimizer.m = t->mine[1], t->optimizer.v = t->mine[2], t->optimizer.master = t->mine[3];
    t->optimizer.shard = shard;
    Checkpoints c = {out, &t->table, (floatX*)t->mine[0], &t->optimizer, NULL, 0, 0, &t->ctx};
    t->c = c;
    t->group.rank = rank, t->group.size = ranks;
    writer_open(&t->writer, &t->group, NULL, -1);
}

static void tiny_close(Tiny* t) {
    writer_close(&t->writer);
    for (int p = 0; p < TINY_PARTS; p++) free(t->values[p]), free(t->mine[p]);
    tensors_free(&t->table);
    context_free(&t->ctx);
}

// Whether this rank has its part of `seed`'s state.
static int tiny_is(const Tiny* t, int seed) {
    Tiny want;
    tiny_open(&want, "", seed, 0, 0, 1);
    int same = memcmp(t->mine[0], want.values[0], t->table.elements * sizeof(real)) == 0;
    for (int p = 1; p < TINY_PARTS; p++)
        same = same && memcmp(t->mine[p], want.values[p] + t->optimizer.shard.begin,
                              t->optimizer.shard.size * sizeof(real)) == 0;
    tiny_close(&want);
    return same;
}

static int tiny_save(Tiny* t, int64_t step, int background) {
    int result = writer_begin(&t->writer, &t->c, step, "{\"config\": 1}\n", "{\"step\": 1}\n", NULL, background);
    // From here on the state may change.
    for (int p = 0; p < TINY_PARTS; p++)
        memset(t->mine[p], 0x7f, (p == 0 ? t->table.elements : t->optimizer.shard.size) * sizeof(real));
    while (result == 0 && t->writer.phase != WRITER_IDLE) result = writer_poll(&t->writer);
    return result;
}

static char tiny_out[64];

static void tiny_begin(void) {
    disk_events[0] = '\0';
    snprintf(tiny_out, sizeof tiny_out, "/tmp/llmc_checkpoint_XXXXXX");
    if (!mkdtemp(tiny_out)) die(FAILED, "%s: %s", tiny_out, strerror(errno));
}

static void tiny_end(void) { remove_directory(tiny_out); }

// Run `body` in `ranks` processes, whose exit statuses must be `want`. Returns their output on stderr (caller frees).
static char* in_ranks(int ranks, void (*body)(ProcessGroup, int), int argument, int want, int* good) {
    int ends[2], status;
    pid_t children[TEST_RANKS];
    pthread_barrierattr_t shared;
    Text said = {NULL, 0, 0};
    char piece[4096];
    fflush(stdout);
    test_ranks = (TestRanks*)mmap(NULL, sizeof *test_ranks, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (test_ranks == MAP_FAILED || pipe(ends) != 0) die(FAILED, "no memory for ranks: %s", strerror(errno));
    pthread_barrierattr_init(&shared);
    pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&test_ranks->barrier, &shared, (unsigned)ranks);
    for (int r = 0; r < ranks; r++) {
        if ((children[r] = fork()) != 0) continue;
        ProcessGroup group;
        memset(&group, 0, sizeof group);
        group.rank = r, group.size = ranks;
        alarm(60);
        dup2(ends[1], 2);
        body(group, argument);
        _exit(DONE);
    }
    close(ends[1]);
    for (ssize_t n; (n = read(ends[0], piece, sizeof piece)) > 0;) text_append(&said, piece, (size_t)n);
    close(ends[0]);
    *good = 1;
    for (int r = 0; r < ranks; r++)
        *good = waitpid(children[r], &status, 0) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == want && *good;
    munmap(test_ranks, sizeof *test_ranks);
    return said.text ? said.text : xprintf("%s", "");
}

enum {
    WHOLE = 1 << 8,
    BACKGROUND = 1 << 9,
    OTHER_WEIGHTS = 1 << 10,
    NO_SHARED_DISK = 1 << 11,
    NO_MEMORY = 1 << 12,
    LACKS_MASTER = 1 << 13
};

// Save seed 5's state as step `how` & 255.
static void save_rank(ProcessGroup group, int how) {
    Tiny t;
    int away = how & NO_SHARED_DISK && group.rank == group.size - 1;
    char* elsewhere = xprintf("%s/elsewhere", tiny_out);
    tiny_open(&t, away ? elsewhere : tiny_out, 5, !(how & WHOLE), group.rank, group.size);
    if (how & OTHER_WEIGHTS && group.rank == 1) t.mine[0][3] += 1;
    if (how & LACKS_MASTER) t.optimizer.master = NULL;
    t.writer.has_warned = how & NO_MEMORY && group.rank == 1;  // as it is after the warning that there is none
    int result = tiny_save(&t, how & 255, how & BACKGROUND);
    if (t.writer.saved != (result == 0 ? how & 255 : -1)) _exit(99);
    tiny_close(&t);
    free(elsewhere);
    if (result != 0) _exit(77);
}

// Find and load it, every rank its shard.
static void load_rank(ProcessGroup group, int how) {
    Tiny t;
    int64_t step = -1;
    tiny_open(&t, tiny_out, 6, !(how & WHOLE), group.rank, group.size);
    char* dir = checkpoint_find(tiny_out, &step, &group);
    if (!dir || step != (how & 255)) _exit(77);
    checkpoint_load(&t.c, NULL, dir);
    if (!tiny_is(&t, 5)) _exit(78);
    free(dir);
    tiny_close(&t);
}

// Whether the copies of the table's tensors are of these values.
static int copies_are(const Fp32Copies* e, const TensorTable* table, const real* values) {
    int same = 1;
    for (int i = 0; i < table->count; i++) {
        const Tensor* tensor = &table->tensors[i];
        if (!tensor->fp32_copy) continue;
        same &= memcmp(e->copies + tensor->fp32_offset, values + tensor->offset, tensor->size * sizeof(real)) == 0;
    }
    return same;
}

// Load it where nothing is updated: the weights, and of the master weights those of two tensors that have copies. Then
// the same from its model's file, whose values a forward pass must leave as they are.
static void load_copies(ProcessGroup group, int how) {
    Tiny t, want;
    int64_t step;
    CastSpan spans[2];
    Fp32Copies copies = {NULL, spans, COUNT_OF(spans)};
    const int copied[] = {0, 1};
    size_t at = 0;
    tiny_open(&t, tiny_out, 6, 0, group.rank, group.size);
    tiny_open(&want, "", 5, 0, 0, 1);
    t.table.fixed = 1, t.optimizer.shard = tensors_updated(&t.table);
    copies.copies = (real*)xcalloc(t.table.elements, sizeof(real));
    for (size_t i = 0; i < COUNT_OF(copied); i++) {
        Tensor* tensor = &t.table.tensors[copied[i]];
        tensor->fp32_copy = 1, tensor->fp32_offset = at;
        CastSpan span = {tensor->offset, at, tensor->size};
        spans[i] = span;
        at += round_up(tensor->size, TENSOR_ALIGNMENT);
    }
    char* dir = checkpoint_find(tiny_out, &step, &group);
    if (!dir) _exit(how);
    checkpoint_load(&t.c, &copies, dir);
    if (!tiny_is(&t, 5)) _exit(78);  // no moments are here to be compared
    if (!copies_are(&copies, &t.table, want.values[3])) _exit(79);
    char* model = xprintf("%s/model.safetensors", dir);
    fp32_copies_read_master(&copies, &t.table, &t.optimizer, model, NULL, &t.ctx);
    t.table.fp32_elements = at;
    fp32_copies_update(&copies, &t.table, t.c.params, t.optimizer.master, NULL, &t.ctx);
    if (!copies_are(&copies, &t.table, want.values[0])) _exit(80);
    tiny_close(&t), tiny_close(&want);
    free(dir), free(model), free(copies.copies);
}

static void test_copies(Tests* t) {
    for (int sharded = 0; sharded <= 1; sharded++) {
        int wrote, read;
        char* name = xprintf("checkpoint/%s, read where nothing is updated", sharded ? "shards" : "whole");
        tiny_begin();
        free(in_ranks(3, save_rank, 7 | (sharded ? 0 : WHOLE), DONE, &wrote));
        char* said = in_ranks(1, load_copies, 77, DONE, &read);
        expect(t, wrote && read, name, "wrote %d, read %d, %s", wrote, read, said);
        tiny_end();
        free(name), free(said);
    }
}

static void test_elastic(Tests* t) {
    static const int WAYS[] = {1 | WHOLE, 2 | WHOLE | BACKGROUND, 2, 3 | BACKGROUND, 3 | BACKGROUND | NO_MEMORY, 4};
    for (size_t i = 0; i < COUNT_OF(WAYS); i++) {
        int wrote, read = 1, kind = WAYS[i] & ~255, ranks = WAYS[i] & 255;
        char* name = xprintf("checkpoint/%d ranks%s%s%s, read by 1, 2, 3, 4", ranks, kind & WHOLE ? "" : " with shards",
                             kind & BACKGROUND ? ", in the background" : "",
                             kind & NO_MEMORY ? ", where one rank has no memory for a snapshot" : "");
        tiny_begin();
        char* said = in_ranks(ranks, save_rank, 7 | kind, DONE, &wrote);
        for (size_t k = 0; k < COUNT_OF(WAYS) && read; k++)
            free(in_ranks(WAYS[k] & 255, load_rank, 7 | (WAYS[k] & WHOLE), DONE, &read));
        expect(t, wrote && read && !*said, name, "wrote %d, read %d, %s", wrote, read, said);
        tiny_end();
        free(name), free(said);
    }
}

// A checkpoint written by three sharded ranks and damaged according to `how` must be refused.
static void refuse_shards(const char* how) {
    char *dir = checkpoint_path(tiny_out, 7), *second = xprintf("%s/optimizer-00001-of-00003.safetensors", dir);
    char* first = xprintf("%s/optimizer-00000-of-00003.safetensors", dir);
    char* whole = xprintf("%s/optimizer.safetensors", dir);
    Tiny t;
    tiny_open(&t, tiny_out, 6, 0, 0, 1);
    if (strcmp(how, "missing") == 0) unlink(second);
    if (strcmp(how, "doubled") == 0) copy_file(first, second);
    if (strcmp(how, "two kinds") == 0) copy_file(first, whole);
    if (strcmp(how, "master") == 0) t.optimizer.master = NULL;
    if (strcmp(how, "another table") == 0) t.table.tensors[1].name[0] = 'V';
    if (strcmp(how, "all gone") == 0) {
        char* third = xprintf("%s/optimizer-00002-of-00003.safetensors", dir);
        unlink(first), unlink(second), unlink(third);
    }
    // The weights have the names of another table too, and come first.
    const TensorPart part = {"m.", t.optimizer.m, VIEW_REAL, NULL};
    if (strcmp(how, "another table") == 0) checkpoint_read_shards(&t.c, dir, 3, &part, t.optimizer.shard);
    checkpoint_load(&t.c, NULL, dir);
}

static void test_shards(Tests* t) {
    static const struct {
        const char *how, *message;
        int saved;
    } cases[] = {{"missing", "optimizer-00001-of-00003.safetensors: is missing; all 3 shards are needed\n"},
                 {"doubled",
                  "optimizer-00001-of-00003.safetensors: begins at element 0, but 896 comes next; it is not rank 1's "
                  "shard\n"},
                 {"two kinds", "next to another optimizer's files; remove one of them\n"},
                 {"master",
                  "optimizer-00000-of-00003.safetensors: holds master weights, but this run has none; resume with -w 1 "
                  "and the same build\n"},
                 {"another table", "optimizer-00000-of-00003.safetensors: is a shard of another model's optimizer\n"},
                 {"all gone", "00000007: optimizer.safetensors is missing\n"},
                 {"no master", "holds no master weights; resume with -w 0 and the same build\n", LACKS_MASTER}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        int wrote;
        char* name = xprintf("checkpoint/shards: %s", cases[i].how);
        tiny_begin();
        free(in_ranks(3, save_rank, 7 | cases[i].saved, DONE, &wrote));
        char* said = refusal(refuse_shards, cases[i].how);
        expect(t, wrote && said && strstr(said, cases[i].message) && strncmp(said, "error: ", 7) == 0, name,
               "got %s, not %s", said ? said : "another exit status", cases[i].message);
        tiny_end();
        free(name), free(said);
    }
}

// A checkpoint makes the next one wait.
static void test_waiting(Tests* t) {
    Tiny tiny;
    int64_t* steps;
    tiny_begin();
    tiny_open(&tiny, tiny_out, 5, 0, 0, 1);
    int first = writer_begin(&tiny.writer, &tiny.c, 1, "", "", NULL, 1), busy = tiny.writer.phase == WRITER_FILES;
    int second = writer_begin(&tiny.writer, &tiny.c, 2, "", "", NULL, 1), one = checkpoint_list(tiny_out, "", &steps);
    int saved = (int)tiny.writer.saved;
    free(steps);
    int last = writer_finish(&tiny.writer), both = checkpoint_list(tiny_out, "", &steps);
    free(steps);
    expect(t, !first && !second && !last && busy && saved == 1 && one >= 1 && both == 2 && tiny.writer.saved == 2,
           "checkpoint/one waits for the one before", "%d %d %d, busy %d, %d then %d", first, second, last, busy, one,
           both);
    tiny_close(&tiny);
    tiny_end();
}

// Errors on several ranks end all of them in the same way, with one line.
static void test_ranks_fail(Tests* t) {
    int good, fine, loads;
    tiny_begin();
    char *old = checkpoint_path(tiny_out, 1), *new_one = checkpoint_path(tiny_out, 2),
         *tmp = xprintf("%s.tmp", new_one);
    free(in_ranks(3, save_rank, 1, DONE, &fine));
    char* said = in_ranks(3, save_rank, 2 | BACKGROUND | NO_SHARED_DISK, 77, &good);
    char* want =
        xprintf("warning: %s: the checkpoint could not be saved (rank 2: find rank 0's directory: -o must be on "
                "a shared file system: No such file or directory); earlier checkpoints are untouched\n",
                new_one);
    expect(t, fine && good && strcmp(said, want) == 0 && !file_exists(tmp) && !file_exists(new_one),
           "checkpoint/a rank cannot write", "%d %d %s", fine, good, said);
    free(said), free(want);
    said = in_ranks(3, save_rank, 2 | OTHER_WEIGHTS, FAILED, &good);
    expect(t,
           good && strncmp(said, "error: step 2: rank 1 holds other weights than rank 0", 53) == 0 &&
               strchr(said, '\n') == said + strlen(said) - 1 && !file_exists(tmp) && !file_exists(new_one),
           "checkpoint/ranks with other weights", "%d %s", good, said);
    free(said);
    // A byte of one shard of the newer of two.
    free(in_ranks(3, save_rank, 2, DONE, &fine));
    char* shard = xprintf("%s/optimizer-00001-of-00003.safetensors", new_one);
    int fd = open(shard, O_RDWR);
    char byte = 0;
    fine = fine && pread(fd, &byte, 1, 4000) == 1;
    byte ^= 1;
    fine = fine && pwrite(fd, &byte, 1, 4000) == 1;
    close(fd);
    said = in_ranks(4, load_rank, 1, DONE, &loads);
    want =
        xprintf("warning: %s: damaged (its size or checksum is not that of %s/manifest.json); this checkpoint is not "
                "used\n",
                shard, new_one);
    expect(t, fine && loads && strcmp(said, want) == 0, "checkpoint/a damaged shard", "%d %d %s", fine, loads, said);
    tiny_end();
    free(said), free(want), free(shard), free(old), free(new_one), free(tmp);
}

// Save seed 5's state as these steps with -nk `keep` and, if `spoil` is a step, cut its model short before the last; if
// it is a negative step, make its model too large.
// Returns the steps that are left as text (caller frees).
static char* kept_steps(int keep, int every, int count, int spoil) {
    Text left = {NULL, 0, 0};
    int64_t* steps;
    tiny_begin();
    for (int step = 1; step <= count; step++) {
        Tiny tiny;
        tiny_open(&tiny, tiny_out, 5, 0, 0, 1);
        tiny.c.keep = keep, tiny.c.keep_every = every;
        if (step == count && spoil) {
            char *dir = checkpoint_path(tiny_out, abs(spoil)), *model = xprintf("%s/model.safetensors", dir);
            if (truncate(model, spoil > 0 ? 100 : 1 << 20) != 0) die(FAILED, "%s: %s", model, strerror(errno));
            free(dir), free(model);
        }
        if (tiny_save(&tiny, step, step % 2) != 0) text_printf(&left, "failed ");
        tiny_close(&tiny);
    }
    int n = checkpoint_list(tiny_out, "", &steps);
    for (int i = 0; i < n; i++) text_printf(&left, "%d ", (int)steps[i]);
    free(steps);
    tiny_end();
    return left.text;
}

static void test_retention(Tests* t) {
    static const struct {
        const char *name, *left;
        int keep, every, count, spoil;
    } cases[] = {{"-nk 1", "4 ", 1, 0, 4, 0},
                 {"-nk 2 -nm 2", "2 4 5 ", 2, 2, 5, 0},
                 {"-nk 0", "1 2 3 4 ", 0, 0, 4, 0},
                 {"-nk 1, the one before damaged", "3 ", 1, 0, 3, 2},
                 {"-nk 2, the one before damaged", "2 3 4 ", 2, 0, 4, 3},
                 {"-nk 2, the one before too large", "2 3 4 ", 2, 0, 4, -3}};
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char* name = xprintf("checkpoint/kept with %s", cases[i].name);
        char* left = kept_steps(cases[i].keep, cases[i].every, cases[i].count, cases[i].spoil);
        // Incomplete checkpoints do not count: in the last case step 2 is the second complete one.
        expect(t, strcmp(left, cases[i].left) == 0, name, "steps %sare left, not %s", left, cases[i].left);
        free(name), free(left);
    }
}

// ---------------------------------------------------------------------------------------------------------
// The disk operations of a checkpoint, also when another run takes the directory

// Everything that a run renames into place was flushed before, and its directory after.
static void test_power_cut(Tests* t) {
    static Run r;
    Tiny tiny;
    ModelBuffers b;
    Embedding e;
    Log log;
    Text line = {NULL, 0, 0};
    tiny_begin();
    tiny_open(&tiny, tiny_out, 5, 0, 0, 1);
    tiny.c.keep = 1;
    disk_flushed_count = disk_names_count = disk_lost_count = 0;
    int saved = tiny_save(&tiny, 1, 0) + tiny_save(&tiny, 2, 0) + disk_names_count;
    memset(&r, 0, sizeof r), memset(&b, 0, sizeof b), memset(&e, 0, sizeof e);
    r.out = tiny_out, r.ctx = tiny.ctx, r.buffers = &b, r.config.text = (char*)"{}";
    b.table = tiny.table, b.params = tiny.c.params;
    run_save_average(&r, "card");
    char *path = xprintf("%s/log.jsonl", tiny_out), *predictions = xprintf("%s/predictions", tiny_out);
    text_printf(&line, "{\"step\": 1}\n{\"step\": 2}\n");
    predictions_write(predictions, &line);
    saved += write_file(path, line.text, line.length);
    log_open(&log, tiny_out, 1);  // cuts it back
    log_write_svg(&log, "loss");
    log_close(&log);
    e.path = xprintf("%s/vectors", tiny_out), e.temporary = xprintf("%s.tmp", e.path);
    e.file = fopen(e.temporary, "wb");
    embed_put(&e, "vector", 6);
    embed_close(&e);
    const char* renamed[] = {"ckpt/00000002", "ema", "model.safetensors", "predictions", "loss.svg", "vectors"};
    for (size_t i = 0; i < COUNT_OF(renamed); i++) {
        char* name = xprintf("%s/%s", tiny_out, renamed[i]);
        saved += access(name, F_OK);
        free(name);
    }
    expect(t, saved == 0 && disk_lost_count == 0 && disk_names_count == 0, "disk/renamed files after a power cut",
           "saved %d, %d renamed before they were flushed, %d names not flushed", saved, disk_lost_count,
           disk_names_count);
    tiny_close(&tiny);
    tiny_end();
    free(path), free(predictions), free(line.text);
}

static void put(const char* path, const char* text) {
    char *file = xprintf("%s/%s", tiny_out, path), *slash = strrchr(file, '/');
    *slash = '\0';
    if (make_directories(file) != 0) die(USAGE, "%s: %s", file, strerror(errno));
    *slash = '/';
    if (write_file(file, text, strlen(text)) != 0) die(USAGE, "%s: %s", file, strerror(errno));
    free(file);
}

static const char* const theirs[] = {".lock",       "model.safetensors",           "model.safetensors.tmp",
                                     "config.json", "ckpt/00000001/manifest.json", "ckpt/00000002.tmp/manifest.json"};

// Another run's directory is in the place of OUT once all files of the second checkpoint are written.
static void replace_out(const char* event) {
    if (strcmp(event, "fsync /ckpt/00000002.tmp\n") != 0) return;
    char* moved = xprintf("%s.moved", tiny_out);
    on_disk_event = NULL;
    if (rename(tiny_out, moved) != 0) die(USAGE, "%s: %s", moved, strerror(errno));
    for (size_t i = 0; i < COUNT_OF(theirs); i++) put(theirs[i], "theirs");
    free(moved);
}

// Save two steps while OUT is replaced.
static void save_replaced(const char* unused) {
    Tiny tiny;
    RunLock lock = {NULL, 0, 0};
    (void)unused;
    tiny_open(&tiny, tiny_out, 5, 0, 0, 1);
    run_lock_take(&lock, tiny_out, O_CREAT);
    tiny.c.lock = &lock;
    int first = tiny_save(&tiny, 1, 0);
    on_disk_event = replace_out;
    die(USAGE, "saved %d %d", first, tiny_save(&tiny, 2, 0));
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
    tiny_begin();
    char* moved = xprintf("%s.moved", tiny_out);
    int status = exit_status_of(save_replaced, "", &said), intact = 1;
    for (size_t k = 0; k < COUNT_OF(theirs) && intact; k++) {
        char* path = xprintf("%s/%s", tiny_out, theirs[k]);
        char* text = file_exists(path) ? read_file(path, 100, &n, FAILED) : xprintf("%s", "");
        intact = strcmp(text, "theirs") == 0;
        free(path), free(text);
    }
    replaced_entries = 0;
    nftw(tiny_out, count_entry, 8, FTW_PHYS);
    expect(t,
           status == FAILED && intact && replaced_entries == 10 && is_one_line(&said) &&
               strstr(said.text, "nothing more is written"),
           "checkpoint/another run's directory before the commit", "status %d, intact %d, %d entries, %s", status,
           intact, replaced_entries, said.text);
    remove_directory(tiny_out), remove_directory(moved);
    free(said.text), free(moved);
}

// A GPU that has used `*device` joules, and how often it was asked.
static int energy_asked;
static int energy_made_up(void* device, unsigned long long* millijoules) {
    energy_asked++;
    *millijoules = (unsigned long long)(1000 * *(double*)device + 0.5);
    return 0;
}

// The means that the log shows of a GPU with `watts`, for steps of 0.3 s: a pause in between does not count.
static void test_energy(Tests* t) {
    const double watts = 500;
    double now = 7, last = 0;
    int measured = 0;
    EnergyMeter m;
    expect(t, energy_open(&m) == -1 && isnan(energy_total(&m)), "energy/no GPU", "NVML is used");
    double used = watts * now;
    m.device = &used, m.total = energy_made_up, energy_asked = 0;
    energy_begin(&m, now);
    for (int step = 1; step <= 9; step++) {
        if (step == 7) {
            now += 100, used = watts * now;
            energy_begin(&m, now);
        }
        now += 0.3, used = watts * now;
        double joules = energy_step(&m, now);
        if (!isnan(joules)) measured = 10 * measured + step, last = joules;
    }
    expect(t, energy_asked == 3, "energy/the counter is read once a second", "%d times", energy_asked);
    expect(t, measured == 4, "energy/once a second, from its beginning or a pause on", "at steps %d", measured);
    expect(t, fabs(last - 0.3 * watts) <= 1e-9, "energy/mean of a step", "%.9g J", last);
}

// A counter read every 7 ms that moves every 0.1 s, at first at another power: what lies before the first jump and
// after the last does not count.
static void test_energy_jumps(Tests* t) {
    EnergyJumps jumps;
    int before = 0;
    memset(&jumps, 0, sizeof jumps);
    for (int i = 0; energy_jumps_seconds(&jumps) < ENERGY_SECONDS && i < 1000; i++) {
        double now = 50.03 + 0.007 * i, tick = floor(10 * now) / 10;
        energy_jumps_read(&jumps, now, tick < 50.1 ? 1000 : 9000 + 600 * (tick - 50.1));
        before += isnan(energy_jumps_watts(&jumps));
    }
    expect(t, before > 140 && energy_jumps_seconds(&jumps) >= ENERGY_SECONDS, "energy/a second of jumps is needed",
           "%d readings without", before);
    expect(t, fabs(energy_jumps_watts(&jumps) - 600) < 5 && energy_jumps_seconds(&jumps) < 1.02,
           "energy/mean power between jumps", "%g W in %g s", energy_jumps_watts(&jumps), energy_jumps_seconds(&jumps));
}

// ---------------------------------------------------------------------------------------------------------
// The best validation; ramps

static void test_state(Tests* t) {
    SavedState s, saved;
    Best* b = &s.best;
    Json json;
    Text text = {NULL, 0, 0};
    char error[JSON_ERROR_SIZE];
    case_begin(t, "state/the best validation, and what a checkpoint reads back");
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
    if (json_parse(&json, text.text, text.length, error) != 0) die(FAILED, "%s", error);
    state_get(&saved, json.root, "file");
    EXPECT(t, memcmp(&saved.best, b, sizeof *b) == 0);
    EXPECT(t, saved.samples == 320 && saved.data == UINT32_MAX && !saved.fp8);
    EXPECT(t, saved.scale.scale == (real)0.5 && saved.scale.updates == 40);
    EXPECT(t, saved.outliers.loss.count == 1 && saved.outliers.loss.value[0] == 1.5 && !saved.outliers.norm.count);
    EXPECT(t, strcmp(saved.matmul_plans, "plans") == 0);
    case_end(t);
    json_free(&json), state_free(&saved);
    free(text.text);
}

static void test_average(Tests* t) {
    static const struct {
        int step;
        double rate;
    } cases[] = {{3, 1}, {6, 0.25}, {99, 0.1}};
    WeightAverage a = {.decay = 0.9, .start = 3};
    expect_that(t, !weight_average_is_on(&a, 2) && weight_average_is_on(&a, 3), "average/begins at its start");
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        double got = weight_average_rate(&a, cases[i].step);
        expect(t, fabs(got - cases[i].rate) < 1e-12, "average/rates", "step %d: %g, not %g", cases[i].step, got,
               cases[i].rate);
    }
}

int main(int argc, char** argv) {
    Tests t;
    tests_choose(&t, argc, argv);
    device_set_threads(1);  // a fork knows nothing of its parent's threads
    test_state(&t);
    test_average(&t);
    test_sampler(&t);
    test_windows(&t);
    test_config(&t);
    test_update_settings(&t);
    test_streams(&t);
    test_old_value(&t, "auto", -1);
    test_old_value(&t, "off", 0);
    test_old_value(&t, "dynamic", 65536);
    test_old_value(&t, "1024", 1024);
    test_overflow(&t);
    test_energy(&t);
    test_energy_jumps(&t);
    test_publish(&t, "/dev/shm");
    test_elastic(&t);
    test_copies(&t);
    test_shards(&t);
    test_waiting(&t);
    test_ranks_fail(&t);
    test_retention(&t);
    test_power_cut(&t);
    test_replaced(&t);
    return tests_close(&t);
}
