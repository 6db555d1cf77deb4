/* Tests of llmc/run: drawing tokens, configuration rows, showing a checkpoint where there are no hard links, the list of a
 * step's kernels, and what ranks read of a step's sequences.
 * Prints a line a case and `N passed, N failed`; exit status 1 if one failed. */
#include <sys/wait.h>

#include "llmc/run/checkpoint.h"
#include "llmc/run/config.h"
#include "llmc/run/mlm_data.h"
#include "llmc/run/profiler.h"
#include "llmc/run/sampler.h"
#include "llmc/run/settings.h"
#include "llmc/run/steps.h"

typedef struct {
    int passed, failed, skipped;
} Tests;

__attribute__((format(printf, 4, 5))) static void expect(Tests* t, int good, const char* name, const char* format,
                                                         ...) {
    printf("%s %s", good ? "ok  " : "FAIL", name);
    if (good) t->passed++;
    else t->failed++;
    if (!good) {
        va_list args;
        va_start(args, format);
        printf(": ");
        vprintf(format, args);
        va_end(args);
    }
    putchar('\n');
}

// ---------------------------------------------------------------------------------------------------------
// Sampler

enum { V = 7, DRAWS = 100000 };
static const real LOGITS[V] = {(real)0.5, (real)2, (real)-1, (real)1.5, (real)-30, (real)0, (real)1};

// How often each token comes out for uniforms spread evenly over (0, 1).
static void draw_many(double share[V], Sampler sampler) {
    for (int i = 0; i < V; i++) share[i] = 0;
    for (int k = 0; k < DRAWS; k++) {
        int token = sampler_draw(LOGITS, V, sampler, (k + 0.5) / DRAWS);
        CHECK(token >= 0 && token < V);
        share[token] += 1.0 / DRAWS;
    }
}

// The largest difference of the shares to softmax(LOGITS / temperature) over the `k` largest.
static double share_error(const double share[V], double temperature, int k) {
    double p[V], total = 0, worst = 0;
    for (int i = 0; i < V; i++) {
        int larger = 0;
        for (int j = 0; j < V; j++) larger += LOGITS[j] > LOGITS[i];
        p[i] = larger < k ? exp((double)LOGITS[i] / temperature) : 0;
        total += p[i];
    }
    for (int i = 0; i < V; i++) worst = fmax(worst, fabs(share[i] - p[i] / total));
    return worst;
}

static void test_sampler(Tests* t) {
    double share[V], before = 0;
    const double tolerance = 2.0 / DRAWS;  // evenly spread uniforms miss a share by one draw at each end
    for (int top_k = 0; top_k <= 3; top_k += 3) {
        Sampler greedy = {0, top_k};
        draw_many(share, greedy);
        expect(t, fabs(share[1] - 1) < 1e-9, top_k ? "sampler/temperature 0, top 3" : "sampler/temperature 0",
               "the most likely token has a share of %g", share[1]);
    }
    for (int top_k = 1; top_k <= V; top_k++) {
        Sampler sampler = {1, top_k};
        char* name = xprintf("sampler/top %d", top_k);
        int seen = 0;
        draw_many(share, sampler);
        for (int i = 0; i < V; i++) seen += share[i] > 0;
        // The least likely of the seven has e^-30: it is a candidate that is never drawn.
        double error = share_error(share, 1, top_k);
        expect(t, seen == min_int(top_k, V - 1) && error <= tolerance, name, "%d tokens were drawn, error %g", seen,
               error);
        free(name);
    }
    static const double temperatures[] = {100, 2, 1, 0.5, 0.1, 0.001};
    for (size_t k = 0; k < COUNT_OF(temperatures); k++) {
        Sampler sampler = {temperatures[k], 0}, beyond = {temperatures[k], V + 5};
        double same[V];
        char* name = xprintf("sampler/temperature %g", temperatures[k]);
        draw_many(share, sampler);
        draw_many(same, beyond);
        double error = share_error(share, temperatures[k], V);
        expect(t, error <= tolerance && share[1] > before - 1e-9 && memcmp(share, same, sizeof share) == 0, name,
               "error %g, share of the most likely %g after %g", error, share[1], before);
        before = share[1];  // it grows as the temperature falls
        free(name);
    }
    static const real equal[5] = {1, 2, 1, 1, 0};
    int seen[5] = {0, 0, 0, 0, 0};
    for (int k = 0; k < DRAWS; k++) {
        Sampler three = {1, 3};
        seen[sampler_draw(equal, 5, three, (k + 0.5) / DRAWS)]++;
    }
    expect(t, seen[0] && seen[1] && seen[2] && !seen[3] && !seen[4], "sampler/top 3 of equal ones", "%d %d %d %d %d",
           seen[0], seen[1], seen[2], seen[3], seen[4]);
    static const real one[1] = {3};
    Sampler plain = {1, 0};
    expect(t, sampler_draw(one, 1, plain, 0.999999) == 0, "sampler/one token", "not token 0");
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

static void refuse_descriptor(const char* text) {
    Sizes sizes = {1 << 25, 0};
    (void)text;
    config_rows_check(&sizes, ROWS, COUNT_OF(ROWS), "source");
}

// What `body` says in a process of its own, which must end with USAGE.
static void expect_refusal(Tests* t, const char* name, void (*body)(const char*), const char* text, const char* want) {
    int ends[2], status;
    char got[512];
    fflush(stdout);
    if (pipe(ends) != 0) die(FAILED, "pipe: %s", strerror(errno));
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 2);
        body(text);
        _exit(DONE);
    }
    close(ends[1]);
    size_t n = 0;
    for (ssize_t m; n < sizeof got - 1 && (m = read(ends[0], got + n, sizeof got - 1 - n)) > 0;) n += (size_t)m;
    got[n] = '\0';
    close(ends[0]);
    waitpid(child, &status, 0);
    expect(t, WIFEXITED(status) && WEXITSTATUS(status) == USAGE && strcmp(got, want) == 0, name, "got %s", got);
}

static void test_config(Tests* t) {
    expect_refusal(t, "config/whole numbers", refuse_file, "{\"layers\": 0, \"rate\": 0}",
                   "error: file: key \"layers\": 0 is out of range; allowed: 1..16777216\n");
    expect_refusal(t, "config/fractions", refuse_file, "{\"layers\": 16777216, \"rate\": 0.75}",
                   "error: file: key \"rate\": 0.75 is out of range; allowed: 0..0.5\n");
    expect_refusal(t, "config/a descriptor's numbers", refuse_descriptor, "",
                   "error: source: key \"layers\": 33554432 is out of range; allowed: 1..16777216\n");
}

// ---------------------------------------------------------------------------------------------------------
// Settings: strings that differ only behind what is printed of other values

static void restore(const char* saved_tail) {
    const char* value;
    Flag row = {"-o", "--out", FLAG_STRING, &value, "", 0, 0, NULL, "", 0};
    char long_text[401], program[] = "program", name[] = "-o", error[JSON_ERROR_SIZE];
    char* argv[] = {program, name, long_text};
    Json json;
    memset(long_text, 'x', 400);
    long_text[400] = '\0';
    char* saved = xprintf("{\"out\": \"%.399s%s\"}", long_text, saved_tail);
    flags_parse(&row, 1, 3, argv, "");
    if (json_parse(&json, saved, strlen(saved), error) != 0) die(FAILED, "%s", error);
    settings_restore(&row, 1, json.root, "", "", 0, "file");
    die(USAGE, "the same");
}

static void restore_and_count(const char* saved_tail) {
    int ends[2], status;
    char c;
    size_t n = 0;
    if (pipe(ends) != 0) die(FAILED, "pipe: %s", strerror(errno));
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 2);
        restore(saved_tail);
    }
    close(ends[1]);
    while (read(ends[0], &c, 1) == 1) n++;
    waitpid(child, &status, 0);
    die(USAGE, "%s", n > 800 ? "both are named in full" : "the same");
}

static void test_settings(Tests* t) {
    expect_refusal(t, "settings/equal long strings", restore_and_count, "x", "error: the same\n");
    expect_refusal(t, "settings/long strings that differ at their end", restore_and_count, "y",
                   "error: both are named in full\n");
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
        LossScaleRule rule = {cases[i].kind, 2000};
        char* name = xprintf("overflow/%s", cases[i].name);
        int got = steps_is_overflow(rule, cases[i].loss, cases[i].norm, cases[i].scale);
        expect(t, got == cases[i].want, name, "got %d", got);
        free(name);
    }
}

// ---------------------------------------------------------------------------------------------------------
// Master weights: a checkpoint that has them is of another run than one that has not

static char master_file[] = "/tmp/llmc_master_XXXXXX";

// Write or read an optimizer's file of one tensor, with master weights or without.
static void master_checkpoint(MasterWeights master, const char* write_to, const char* check) {
    static const TensorRow row[] = {{"w", 0, {0, 0}, OWN, 0, INIT_ZERO, 0, AS_IN_MEMORY}};
    const int dims[] = {5, 1};
    real values[3][TENSOR_ALIGNMENT] = {{0}};
    TensorTable table;
    Context ctx;
    Optimizer o;
    Checkpoints c;
    TensorPart parts[3];
    memset(&table, 0, sizeof table), memset(&o, 0, sizeof o), memset(&c, 0, sizeof c);
    context_init(&ctx);
    tensors_add(&table, row, 1, dims, -1);
    tensors_finish(&table);
    o.m = values[0], o.v = values[1], o.master = master == WITH_MASTER ? values[2] : NULL;
    c.table = &table, c.optimizer = &o, c.ctx = &ctx;
    if (write_to && tensors_write(write_to, &table, parts, checkpoint_optimizer_parts(&c, parts), &ctx) != 0)
        die(FAILED, "%s: %s", write_to, strerror(errno));
    if (check) checkpoint_check_master(&c, check);
    tensors_free(&table);
    context_free(&ctx);
}

// "has" or "wants" in one bit each: the file, the run.
static void refuse_master(const char* has_wants) {
    MasterWeights has = has_wants[0] == '1' ? WITH_MASTER : NO_MASTER;
    MasterWeights wants = has_wants[1] == '1' ? WITH_MASTER : NO_MASTER;
    master_checkpoint(has, master_file, NULL);
    master_checkpoint(wants, NULL, master_file);
    die(USAGE, "taken");
}

static void test_master(Tests* t) {
    int fd = mkstemp(master_file);
    if (fd < 0) die(FAILED, "%s: %s", master_file, strerror(errno));
    close(fd);
    char* has = xprintf("error: %s: holds master weights, which this run has not; go on with -w 1 and the same build\n",
                        master_file);
    char* wants = xprintf("error: %s: holds no master weights; go on with -w 0 and the same build\n", master_file);
    expect_refusal(t, "master weights/in both", refuse_master, "11", "error: taken\n");
    expect_refusal(t, "master weights/in neither", refuse_master, "00", "error: taken\n");
    expect_refusal(t, "master weights/in the checkpoint only", refuse_master, "10", has);
    expect_refusal(t, "master weights/in the run only", refuse_master, "01", wants);
    free(has), free(wants);
    unlink(master_file);
}

// ---------------------------------------------------------------------------------------------------------
// Showing a checkpoint

static void test_publish(Tests* t, const char* other) {
    char out[] = "/tmp/llmc_run_XXXXXX";
    struct stat here, there;
    if (!mkdtemp(out)) die(FAILED, "%s: %s", out, strerror(errno));
    char* dir = xprintf("%s/llmc_run_%d", other, (int)getpid());
    if (mkdir(dir, 0777) != 0 || stat(out, &here) != 0 || stat(dir, &there) != 0 || here.st_dev == there.st_dev) {
        printf("skip publish/another file system: %s is none that can be written\n", other);
        t->skipped++;
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
    checkpoint_remove(dir);
    checkpoint_remove(out);
    free(dir);
}

// ---------------------------------------------------------------------------------------------------------
// The list of kernels, from records as CUPTI gives them

static void test_kernel_names(Tests* t) {
    static const char* const names[][2] = {
        {"nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN", "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN"},
        {"sum_forward_kernel(float*, float const*, int, float, int)", "sum_forward_kernel"},
        {"void attention_forward_kernel<64, (Mask)0, false>(float*, Shape<3>)", "attention_forward_kernel"},
        {"void cublasLt::splitKreduce_kernel<32, 16, int, float, true>(float const*, int)",
         "cublasLt::splitKreduce_kernel"},
        {"void (anonymous namespace)::fill<Pair<int, float> >(int)", "fill"},
        {"std::enable_if<(4)==(4), void>::type pack<4>(int)", "pack"},
        {"void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_128x64_tn_align8>(Params)",
         "cutlass_80_tensorop_bf16_s16816gemm_128x64_tn_align8"},
        {"void cutlass::device_kernel<gemm::Universal<A<1>, B>, int>(Params)", "gemm::Universal"},
        {"", ""},
        {"<<", ""},
        {">>(", ""},
    };
    for (size_t i = 0; i < COUNT_OF(names); i++) {
        char *got = kernel_name_short(names[i][0]), *name = xprintf("kernels/name %s", names[i][1]);
        expect(t, strcmp(got, names[i][1]) == 0, name, "got %s", got);
        free(got), free(name);
    }
}

static void add_launch(KernelTrace* trace, const char* name, uint32_t correlation, uint64_t start, uint64_t end) {
    TracedLaunch row = {xprintf("%s", name), NO_SCOPE, correlation, start, end, {8, 2, 1}, {256, 1, 1}, 40, 1024};
    kernel_trace_add(trace, &row);
}

static void test_kernels(Tests* t) {
    const uint64_t now = (uint64_t)1700000000 * 1000000000;  // a double does not hold such nanoseconds
    ScopeRecord records[2] = {{"matmul_forward", FORWARD, 3, "N=64 IC=16", 0, 0, 0, 0},
                              {"readback", OPTIMIZER, -1, "", 0, 0, 0, 0}};
    KernelTrace trace;
    ScopeLog log = {records, 2, 2, &trace};
    memset(&trace, 0, sizeof trace);
    // Out of order; two kernels in one scope; one that overlaps its predecessor; one outside every scope.
    add_launch(&trace, "reduce", 12, now + 5000, now + 7000);
    add_launch(&trace, "copy_to_host_4B", 40, now + 10000, now + 10500);
    add_launch(&trace, "stray", 13, now + 6500, now + 9000);
    add_launch(&trace, "product", 11, now, now + 4000);
    kernel_trace_add_call(&trace, 40, 1);
    kernel_trace_add_call(&trace, 39, 1);
    kernel_trace_add_call(&trace, 11, 0);
    kernel_trace_add_call(&trace, 12, 0);
    scope_log_resolve(&log);
    expect(t,
           trace.rows[0].scope == 0 && trace.rows[1].scope == 0 && trace.rows[2].scope == NO_SCOPE &&
               trace.rows[3].scope == 1 && strcmp(trace.rows[2].name, "stray") == 0,
           "kernels/scopes and order", "the first is %s", trace.rows[0].name);
    expect(t, fabs(records[0].seconds - 7e-6) < 1e-12 && fabs(records[1].seconds - 5e-7) < 1e-12,
           "kernels/time of a scope", "%g and %g", records[0].seconds, records[1].seconds);
    KernelTotals totals = profiler_kernel_totals(&trace);
    expect(t, fabs(totals.busy - 9e-6) < 1e-12 && fabs(totals.gaps - 2e-6) < 1e-12 && totals.unscoped == 1,
           "kernels/totals", "busy %g, gaps %g, %zu", totals.busy, totals.gaps, totals.unscoped);

    Text list = {NULL, 0, 0}, summary = {NULL, 0, 0};
    char index[8], direction[16], layer[8], op[32], shapes[32], kernel[32], grid[32], block[32];
    int registers, shared, lines = 0;
    double start, microseconds;
    profiler_put_kernels(&list, &log, &trace);
    profiler_put_kernel_totals(&summary, &log, &trace);
    const char* line = strchr(list.text, '\n') + 1;
    int fields = sscanf(line, "%7s %15s %7s %31s %31s %31s %31s %31s %d %d %lf %lf", index, direction, layer, op,
                        shapes, kernel, grid, block, &registers, &shared, &start, &microseconds);
    char* read = xprintf("%d %s %s %s %s %s %s %s %s %d %d %.2f %.2f", fields, index, direction, layer, op, shapes,
                         kernel, grid, block, registers, shared, start, microseconds);
    expect(t, strcmp(read, "12 0 forward 3 matmul_forward N=64,IC=16 product 8x2x1 256x1x1 40 1024 0.00 4.00") == 0,
           "kernels/a row", "%s", read);
    for (const char* c = list.text; *c; c++) lines += *c == '\n';
    const char* total = "total: 4 launches, 0.009 ms in kernels, 0.002 ms in gaps between them, 1 without a scope\n";
    expect(t, lines == 6 && strcmp(list.text + list.length - strlen(total), total) == 0, "kernels/last line", "%d: %s",
           lines, list.text);
    expect(t, strstr(summary.text, "\nproduct ") && strstr(summary.text, "44.4%"), "kernels/by kernel", "%s",
           summary.text);
    free(list.text), free(summary.text), free(read);
    kernel_trace_free(&trace);
}

// ---------------------------------------------------------------------------------------------------------
// Sequences by rank: whichever number of ranks shares a step, its micro-batches one after the other are the same

enum { STEP_ROWS = 16, SPLIT_T = 48, SPLIT_MASKS = 8 };

// The tokens, masks and labels of two steps, as `ranks` ranks with micro-batches of `B` rows read them, end to end.
static Text split_stream(int ranks, int B, int pack) {
    Text all = {NULL, 0, 0};
    Context ctx;
    MlmSource data;
    MlmRecipe recipe = {SPLIT_MASKS, 0.15, 0, 1, 0, pack, 0.1};
    int micro_steps = STEP_ROWS / (ranks * B);
    context_init(&ctx);
    mlm_source_alloc(&data, recipe, B, SPLIT_T, micro_steps, &ctx);
    mlm_source_open(&data, "data/builtin/bert/train.bin", NULL, 261, 11);
    for (uint64_t step = 0; step < 2; step++)
        for (int part = 0; part < micro_steps * ranks; part++) {
            mlm_source_build(&data, step * STEP_ROWS, B, part % ranks, ranks);
            const MlmBatch* b = &data.batches[part / ranks];
            for (int s = 0; s < b->count; s++) {
                text_printf(&all, "%lld %d:", (long long)b->first + s, b->next_labels[s]);
                for (int i = b->cu_seqlens[s]; i < b->cu_seqlens[s + 1]; i++) text_printf(&all, " %d", b->tokens[i]);
                text_append(&all, "\n", 1);
            }
        }
    mlm_source_close(&data);
    context_free(&ctx);
    return all;
}

static void test_split(Tests* t) {
    static const int WAYS[][2] = {{1, 4}, {2, 8}, {2, 4}, {4, 4}, {4, 1}, {16, 1}};
    for (int pack = 0; pack < 4; pack += 3) {
        Text whole = split_stream(1, STEP_ROWS, pack);
        for (size_t i = 0; i < COUNT_OF(WAYS); i++) {
            Text parts = split_stream(WAYS[i][0], WAYS[i][1], pack);
            char* name = xprintf("%d ranks with micro-batches of %d rows read what one reads%s", WAYS[i][0], WAYS[i][1],
                                 pack ? ", packed" : "");
            expect(t, whole.length > 0 && strcmp(whole.text, parts.text) == 0, name, "the sequences differ");
            free(name), free(parts.text);
        }
        free(whole.text);
    }
}

int main(void) {
    Tests t = {0, 0, 0};
    test_split(&t);
    test_kernel_names(&t);
    test_kernels(&t);
    test_sampler(&t);
    test_config(&t);
    test_settings(&t);
    test_overflow(&t);
    test_master(&t);
    test_publish(&t, "/dev/shm");
    printf("%d passed, %d failed, %d skipped\n", t.passed, t.failed, t.skipped);
    return t.failed != 0;
}
