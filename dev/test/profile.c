/* Tests of the profiler without a GPU. Made-up CUPTI records of steps, and scopes as on the CPU, become a report whose
 * files dev/test/profile_golden.txt holds; sums, matches and refusals are checked by themselves. Run from the repository's
 * root. Prints one line per case and `N passed, N failed`; exit status 1 if one failed.
 *
 *     build/test_profile golden     writes that file, after an intended change: read the difference */
#include "dev/test/tests.h"
#include "llmc/base/json.h"
#include "llmc/profile/report.h"

static char scratch[] = "/tmp/llmc_profile_XXXXXX";
#define GOLDEN "dev/test/profile_golden.txt"
static char* golden;      // the expected texts
static FILE* new_golden;  // where to write them; NULL: compare

// Whether `text` is what the golden file has under this name. Carriage returns are written as "\r". Frees `text`.
static void expect_golden(Tests* t, const char* name, char* text) {
    Text want = {NULL, 0, 0};
    text_printf(&want, "== %s ==\n", name);
    for (const char* c = text; *c; c++) text_append(&want, *c == '\r' ? "\\r" : c, *c == '\r' ? 2 : 1);
    text_append(&want, "\n", 1);
    if (new_golden) fputs(want.text, new_golden);
    else expect(t, strstr(golden, want.text) != NULL, name, GOLDEN " has no such text:\n%s", text);
    free(want.text), free(text);
}

// Frees `got`.
static void expect_text(Tests* t, const char* name, char* got, const char* want) {
    expect(t, strcmp(got, want) == 0, name, "got\n%s\nbut want\n%s", got, want);
    free(got);
}

static int near_to(double a, double b) { return fabs(a - b) <= 1e-12; }

// ---------------------------------------------------------------------------------------------------------
// Names of kernels

static void test_names(Tests* t) {
    static const char* const names[][2] = {
        {"nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN", "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN"},
        {"void cublasLt::splitKreduce_kernel<32, 16, int, float, true>(float const*, int)",
         "cublasLt::splitKreduce_kernel"},
        {"void (anonymous namespace)::fill<Pair<int, float> >(int)", "fill"},
        {"std::enable_if<(4)==(4), void>::type pack<4>(int)", "pack"},
        {"void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_128x64_tn_align8>(Params)",
         "cutlass_80_tensorop_bf16_s16816gemm_128x64_tn_align8"},
        {"void cutlass::device_kernel<gemm::Universal<A<1>, B>, int>(Params)", "gemm::Universal"},
        {">>(", ""},
    };
    for (size_t i = 0; i < COUNT_OF(names); i++)
        expect_text(t, names[i][0], kernel_name_short(names[i][0]), names[i][1]);
}

static void test_tensor_cores(Tests* t) {
    static const struct {
        char* kernel;
        int half, want;
    } cases[] = {
        {"nvjet_sm90_tst_128x128_64x6_2x1_v_bz_TNT", 1, 1},
        {"cublasLt::splitKreduce_kernel", 1, 0},
        {"cutlass_80_simt_sgemm_128x64_tn_align1", 1, 0},
        {"cutlass_80_tensorop_s1688gemm_128x64", 0, 0},
        {"attention_forward_flash_kernel", 0, 1},
        {"attention_forward_softmax_kernel", 1, 0},
        {NULL, 1, -1},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        ProfileRow row = profile_row(NULL);
        row.kernel = row.full = cases[i].kernel;
        int got = profile_tensor_cores(&row, cases[i].half);
        expect(t, got == cases[i].want, cases[i].kernel ? cases[i].kernel : "an op", "%d", got);
    }
}

// ---------------------------------------------------------------------------------------------------------
// A step as it was traced

// Too large for a double to hold the nanoseconds exactly.
#define NOW ((uint64_t)1700000000 * 1000000000)

enum { NO_OP = -1, UNKNOWN = 1 << 30, COMPUTE = 7, COPIES = 13, COLLECTIVES = 20 };

// A flop takes 1 ns, a byte 10 ns, a launch 1 ms.
static const MeasuredPeaks PEAKS = {1e9, 1e8, 1e-3};

static const struct {
    const char* op;
    Direction direction;
    int layer;
    const char* shapes;
    double flops, bytes;
} OPS[] = {
    {"batch_load", FORWARD, -1, "B=2 T=8", 0, 64},
    {"matmul_forward", FORWARD, 0, "N=64 IC=16 OC=32", 4.9e6, 1e5},
    {"layernorm_forward", FORWARD, 0, "N=64 C=16", 10, 3e5},
    {"gelu_forward", FORWARD, 1, "n=10", 10, 10},
    {"matmul_backward_weight", BACKWARD, 1, "N=64 IC=16 OC=32", 9e6, 1.2e6},
    {"sum_gradients", COMMUNICATION, 1, "n=1000", 0, 1e6},
    {"adamw_update", OPTIMIZER, -1, "n=1000", 10, 2.5e5},
    {"readback", OPTIMIZER, -1, "n=3", 0, 12},
};

// Names that every output format escapes in its own way.
#define EVIL "evil</script><!--|*\\"
#define EVIL_FULL "void evil<a, \"b\">(</script>\r\n)"

// Microseconds from NOW; `issued`: when its launch returned. Not in the order of execution.
static const struct {
    const char *name, *full;
    int op, stream, start, end, issued;
} LAUNCHES[] = {
    {"adamw_update_kernel", NULL, 6, COMPUTE, 37500, 40500, UNKNOWN},
    {"nvjet_product", "nvjet_product", 1, COMPUTE, 3500, 9500, 2500},
    {"gelu_forward_kernel", "void gelu_forward_kernel<(Gelu)1>(int)", 3, COMPUTE, 20000, 22000, 19500},  // host late
    {"copy_to_device_64B", NULL, 0, COPIES, 0, 1000, -500},
    {"cublasLt::splitKreduce_kernel", NULL, 4, COMPUTE, 33000, 35000, 19900},
    {EVIL, EVIL_FULL, NO_OP, COMPUTE, 22000, 23000, 19600},
    {"copy_to_host_96B", NULL, NO_OP, COPIES, 26000, 26500, 19650},  // overlaps with two others
    {"fill_4B", NULL, 1, COMPUTE, 3000, 3500, 1500},
    {"ncclDevKernel_AllReduce", NULL, 5, COLLECTIVES, 25000, 36800, 19800},
    {"nvjet_weight", NULL, 4, COMPUTE, 23000, 33000, 19700},
    {"copy_to_host_12B", NULL, 7, COPIES, 40000, 41500, 20000},
    {"layernorm_forward_kernel", NULL, 2, COMPUTE, 10000, 14000, 3000},
};

static uint64_t at(int microseconds) { return (uint64_t)((int64_t)NOW + 1000 * (int64_t)microseconds); }

// The step without the launch named `without`; the product ends `longer`, the last copy `later` microseconds later.
static void step_open(ProfileStep* step, const char* without, int longer, int later) {
    ScopeRecord records[COUNT_OF(OPS)];
    KernelTrace trace;
    ScopeLog log;
    memset(records, 0, sizeof records), memset(&trace, 0, sizeof trace);
    scope_log_open(&log, &trace);
    log.records = records, log.count = COUNT_OF(OPS);
    for (size_t i = 0; i < COUNT_OF(OPS); i++) {
        Scope* r = &records[i].scope;
        r->op = OPS[i].op, r->direction = OPS[i].direction, r->layer = OPS[i].layer;
        r->flops = OPS[i].flops, r->bytes = OPS[i].bytes;
        snprintf(r->shapes, sizeof r->shapes, "%s", OPS[i].shapes);
    }
    for (size_t i = 0; i < COUNT_OF(LAUNCHES); i++) {
        const char* name = LAUNCHES[i].name;
        TracedLaunch row;
        int is_kernel = !text_begins(name, "copy") && !text_begins(name, "fill");
        int more = strcmp(name, "nvjet_product") == 0 ? longer : strcmp(name, "copy_to_host_12B") == 0 ? later : 0;
        if (without && strcmp(name, without) == 0) continue;
        memset(&row, 0, sizeof row);
        row.name = xprintf("%s", name);
        row.full = LAUNCHES[i].full ? xprintf("%s", LAUNCHES[i].full) : NULL;
        row.correlation = (uint32_t)(40 - 3 * i), row.stream = LAUNCHES[i].stream;
        row.start = at(LAUNCHES[i].start), row.end = at(LAUNCHES[i].end + more);
        if (is_kernel) row.grid[0] = 8, row.grid[1] = 2, row.grid[2] = 1, row.block[0] = 256, row.registers = 40;
        kernel_trace_add(&trace, &row);
        if (LAUNCHES[i].op != NO_OP) traced_calls_add(&trace.scopes, row.correlation, (uint64_t)LAUNCHES[i].op);
        if (LAUNCHES[i].issued != UNKNOWN) traced_calls_add(&trace.returns, row.correlation, at(LAUNCHES[i].issued));
    }
    traced_calls_add(&trace.scopes, 4000, 2);  // calls that launched nothing
    traced_calls_add(&trace.returns, 1, NOW);
    trace.lost = 3;
    for (int again = 0; again < 2; again++) kernel_trace_collect(&trace);  // joining twice changes nothing
    profile_from_log(step, &log, 1);
    kernel_trace_free(&trace);
    profile_set_rooflines(step, &PEAKS);
}

// Launches that begin at the same time are in the order of the calls.
static void test_order(Tests* t) {
    KernelTrace trace;
    memset(&trace, 0, sizeof trace);
    for (int i = 0; i < 3; i++) {
        TracedLaunch row;
        memset(&row, 0, sizeof row);
        row.name = xprintf("%d", i), row.correlation = (uint32_t)((i + 1) % 3), row.start = row.end = NOW;
        kernel_trace_add(&trace, &row);
    }
    kernel_trace_collect(&trace);
    const TracedLaunch* rows = trace.rows;
    expect(t, rows[0].name[0] == '2' && rows[1].name[0] == '0' && rows[2].name[0] == '1', "launches that begin at once",
           "%s first", rows[0].name);
    kernel_trace_free(&trace);
}

// kernels - overlap + gaps = span for every step: here of random rows on several streams, dense and sparse.
static void test_random_accounting(Tests* t) {
    enum { ROWS = 60 };
    uint64_t state = 1;
    int wrong = 0;
    for (int round = 0; round < 20; round++) {
        ProfileStep step;
        KernelTrace trace;
        ScopeLog log;
        memset(&trace, 0, sizeof trace);
        scope_log_open(&log, &trace);
        for (uint32_t i = 0; i < ROWS; i++) {
            TracedLaunch row;
            memset(&row, 0, sizeof row);
            uint64_t r[4];
            for (int k = 0; k < 4; k++) r[k] = (state = state * 6364136223846793005u + 1442695040888963407u) >> 33;
            row.name = xprintf("kernel"), row.correlation = i, row.stream = (int)(r[0] % 3);
            row.start = NOW + r[1] % (round % 2 ? 1000000 : 20000), row.end = row.start + r[2] % 10000;
            kernel_trace_add(&trace, &row);
            if (r[3] % 4) traced_calls_add(&trace.returns, i, row.start - r[3] % 20000);
        }
        kernel_trace_collect(&trace);
        profile_from_log(&step, &log, 0);
        kernel_trace_free(&trace);
        Accounting a = profile_account(&step);
        double sum = a.kernels - a.overlap + a.gap[GAP_HOST] + a.gap[GAP_STREAM] + a.gap[GAP_SWITCH];
        wrong += !near_to(sum, a.span);
        profile_step_free(&step);
    }
    expect(t, wrong == 0, "the sums of random steps", "%d are wrong", wrong);
}

// Without a trace rows are ops, timed by the host's clock. An inner scope's time does not count in the outer one.
static void test_ops(Tests* t) {
    Context ctx;
    ScopeLog log, other;
    ProfileStep step;
    memset(&ctx, 0, sizeof ctx);
    scope_log_open(&log, NULL), scope_log_open(&other, NULL);
    Scope unheard = scope_open(&ctx, "unheard", 0, 0, "n=%d", 1);
    scope_close(&unheard);
    scope_attach(&ctx, &log.observer), scope_attach(&ctx, &other.observer);
    scope_at(&ctx, BACKWARD, 3);
    Scope outer = scope_open(&ctx, "outer", 1, 2, "n=%d", 4), inner = scope_open(&ctx, "inner", 0, 0, "m=%d", 5);
    usleep(20000);
    scope_close(&inner), scope_close(&outer);
    scope_at(&ctx, OPTIMIZER, -1);
    Scope after = scope_open(&ctx, "after", 0, 0, "%s", "");
    scope_close(&after);
    profile_from_log(&step, &log, 1);
    const ProfileRow* r = step.rows;
    expect(t, step.count == 3 && log.open == NO_SCOPE && other.count == 3, "ops: one row per scope", "%zu", step.count);
    expect(t,
           strcmp(r[0].op, "outer") == 0 && strcmp(r[0].shapes, "n=4") == 0 && r[0].direction == BACKWARD &&
               r[0].layer == 3 && r[0].flops == 1 && r[0].bytes == 2 && !r[0].kernel && r[0].stream == -1 &&
               r[0].tensor_cores == -1 && r[2].direction == OPTIMIZER && r[2].layer == -1,
           "ops: fields", "%s %s", r[0].op, r[0].shapes);
    expect(t,
           r[1].seconds >= 0.02 && r[0].seconds >= 0 && r[0].start == 0 &&
               r[0].seconds + r[1].seconds <= r[2].start + 1e-9,
           "ops: the time of an inner scope", "%g %g", r[0].seconds, r[1].seconds);
    profile_step_free(&step);
    scope_log_close(&log), scope_log_close(&other);
}

// ---------------------------------------------------------------------------------------------------------
// Over steps

static void test_medians(Tests* t) {
    const double spans[] = {5, 8, 6}, same[] = {7, 7, 7}, ranks[] = {1, 2, 3, 2.5, 9, 1};
    double four[] = {4, 1, 3, 2}, one[] = {7};
    expect_that(t,
                profiler_median_index(spans, 1, 3) == 2 && profiler_median_index(spans, 1, 2) == 0 &&
                    profiler_median_index(spans + 1, 1, 2) == 1 && profiler_median_index(spans, 1, 1) == 0 &&
                    profiler_median_index(same, 1, 3) == 1,
                "the median step");
    expect_that(t, profiler_median_index(ranks, 2, 3) == 2, "the median step by the slowest rank's time");
    expect_that(t, median_of(four, 4) == 2.5 && median_of(one, 1) == 7 && isnan(median_of(one, 0)), "medians");
}

// Rows are matched in steps so long that a linear search for each would take minutes.
static void test_long_steps(Tests* t) {
    enum { ROWS = 100000 };
    static char* const ops[] = {"forward", "backward", "update"};
    ProfileStep steps[2];
    size_t wrong = 0;
    double began = now_seconds();
    for (int s = 0; s < 2; s++) {
        memset(&steps[s], 0, sizeof steps[s]);
        steps[s].count = ROWS;
        steps[s].rows = (ProfileRow*)xcalloc(ROWS, sizeof *steps[s].rows);
        for (int i = 0; i < ROWS; i++) {
            int k = s ? i ^ 1 : i;  // neighbours, which are of different places, are swapped in the second step
            ProfileRow* row = &steps[s].rows[i];
            *row = profile_row(NULL);
            row->op = ops[k % 3], row->layer = k % 7, row->start = i, row->seconds = k + s;
        }
    }
    profile_compare_steps(&steps[0], steps, 2);
    for (int i = 0; i < ROWS; i++)
        wrong += steps[0].rows[i].min != i || steps[0].rows[i].median != i + 0.5 || steps[0].rows[i].max != i + 1;
    expect(t, wrong == 0 && now_seconds() - began < 10, "matches of many rows", "%zu are wrong; %g s", wrong,
           now_seconds() - began);
    for (int s = 0; s < 2; s++) profile_step_free(&steps[s]);
}

// ---------------------------------------------------------------------------------------------------------
// A profiler after its last step

typedef struct {
    Profiler profiler;
    ProfileStep steps[3];
    double plain[3];
    ProcessGroup group;
    ProfiledRun run;
    ProfileReport report;
} Filled;

// Three steps of 42 ms each, of which the last is in the middle, after plain ones of 44 ms.
static void filled_open(Filled* f) {
    memset(f, 0, sizeof *f);
    step_open(&f->steps[0], "gelu_forward_kernel", 0, 0);
    step_open(&f->steps[1], NULL, 400, 300);
    step_open(&f->steps[2], NULL, -1000, 100);
    for (int i = 0; i < 3; i++) f->steps[i].seconds = 42e-3, f->steps[i].before = 2e-4, f->steps[i].after = 3e-4;
    f->plain[0] = 44e-3, f->plain[1] = 60e-3, f->plain[2] = 43e-3;
    Profiler* p = &f->profiler;
    p->warmup = 5, p->count = p->taken = p->plain_count = 3, p->first = 100, p->is_tracing = 1;
    p->steps = f->steps, p->plain = f->plain, p->peaks = PEAKS;
    f->group.size = 1;
    f->run.out = "", f->run.passes = "train", f->run.flops = 2.1e6, f->run.group = &f->group;
    f->run.broadcast_overlaps = 1;
}

static void set_cell(Table* t, size_t row, size_t column, const char* text) {
    char** cell = &t->cells[row * t->column_count + column];
    free(*cell);
    *cell = xprintf("%s", text);
}

// Make the report again, as if on another machine.
static void filled_report(Filled* f) {
    report_free(&f->report);
    profiler_fill_report(&f->report, &f->profiler, &f->run);
    set_cell(&f->report.tables[0], 0, 2, "./program -o 'a b</script><!--<script>' \"\xC3\xA9\"");
    set_cell(&f->report.tables[0], 1, 2, "one | <b>\n");
}

static void filled_close(Filled* f) {
    report_free(&f->report);
    for (int i = 0; i < 3; i++) profile_step_free(&f->steps[i]);
}

// The facts with these names (caller frees).
static char* facts_of(Filled* f, const char* names) {
    Text text = {NULL, 0, 0};
    filled_report(f);
    const Table* t = &f->report.tables[0];
    for (size_t i = 1; i < table_rows(t); i++)
        if (strstr(names, table_cell(t, i, 1)))
            text_printf(&text, "%s: %s\n", table_cell(t, i, 1), table_cell(t, i, 2));
    text_append(&text, "", 0);
    return text.text;
}

static void test_facts(Tests* t) {
    Filled f;
    filled_open(&f);
    ProfileRow* last = &f.steps[2].rows[f.steps[2].count - 1];  // 1.6 ms, of which 1.1 alone
    last->direction = COMMUNICATION, last->op = "share_parameters";
    expect_golden(t, "facts of an overlapped broadcast", facts_of(&f, "step cost work overlap broadcast host"));
    f.profiler.count = 7, f.run.broadcast_overlaps = 0;
    expect_golden(t, "facts of an exposed broadcast; of a run that was stopped",
                  facts_of(&f, "step overlap broadcast"));
    f.profiler.count = 3;
    f.plain[0] = f.plain[1] = f.plain[2] = 50e-3;
    expect_golden(t, "facts of plain steps that wait for the host", facts_of(&f, "cost host"));
    for (size_t i = 0; i < f.steps[2].count; i++) f.steps[2].rows[i].issued = (double)NAN;
    expect_text(t, "no gap waits for the host", facts_of(&f, "host"), "");
    f.profiler.plain_count = 0;
    expect_golden(t, "facts without plain steps", facts_of(&f, "cost work"));
    filled_close(&f);

    char* costs[] = {profiler_cost(0.96, 1, 1, 0), profiler_cost(0.99, 1, 1, 0), profiler_cost(0.96, 1, 0, 0),
                     profiler_cost(0.8, 1, 1, 1)};
    const char* power = strstr(costs[0], "-4.0 %; plain steps run at the GPU's power limit");
    expect(t, power && !strchr(costs[1], ';') && !strchr(costs[2], ';') && !strchr(costs[3], ';'),
           "why profiling costs less than nothing", "%s", costs[0]);
    for (size_t i = 0; i < COUNT_OF(costs); i++) free(costs[i]);
}

static void test_words(Tests* t) {
    static const char* const words[][2] = {
        {"-o", "-o"}, {"", "''"}, {"a b\\c", "'a b\\c'"}, {"it's", "'it'\\''s'"}, {"a\\b\n", "'a\\b?'"}};
    for (size_t i = 0; i < COUNT_OF(words); i++) {
        Text text = {NULL, 0, 0};
        profiler_put_word(&text, words[i][0]);
        expect_text(t, "a word as one types it", text.text, words[i][1]);
    }
}

static void test_stages(Tests* t) {
    Profiler p;
    Text stages = {NULL, 0, 0};
    memset(&p, 0, sizeof p);
    p.warmup = 1, p.count = 2, p.first = 10, p.plain = (double*)xcalloc(2, sizeof *p.plain);
    for (int64_t step = 9; step < 17; step++) {
        profiler_step_took(&p, step, (double)step);
        text_printf(&stages, "%d%s ", profiler_stage(&p, step), profiler_reads_at_once(&p, step) ? "!" : "");
    }
    expect_text(t, "stages, read at once from the last plain step on", stages.text, "0 0 1 1! 2! 2! 0 0 ");
    expect(t, p.plain_count == 2 && p.plain[0] == 11 && p.plain[1] == 12, "times of plain steps", "%d", p.plain_count);
    p.measures_ops = 1;
    expect_that(t,
                profiler_stage(&p, 15) == STAGE_CAPTURED && profiler_stage(&p, 16) == STAGE_NONE &&
                    profiler_reads_at_once(&p, 15) && !profiler_reads_at_once(&p, 16),
                "one more step is captured");
    profiler_close(&p);
}

// The calls of a made-up step, each op by itself at another power.
static void test_op_energies(Tests* t) {
    static const struct {
        Direction direction;
        const char *op, *shapes;
        double seconds, watts;
    } calls[] = {{FORWARD, "matmul_forward", "N=1", 1e-3, 700},  {FORWARD, "matmul_forward", "N=2", 4e-3, 600},
                 {BACKWARD, "matmul_forward", "N=1", 2e-3, 650}, {FORWARD, "matmul_forward", "N=1", 1e-3, 700},
                 {OPTIMIZER, "adamw_update", "", 5e-3, 500},     {FORWARD, "gelu", "N=1", 1e-4, 400}};
    OpEnergies e;
    Table table;
    Text text = {NULL, 0, 0};
    memset(&e, 0, sizeof e);
    for (size_t i = 0; i < COUNT_OF(calls); i++) {
        Scope r;
        memset(&r, 0, sizeof r);
        r.direction = calls[i].direction, r.op = calls[i].op;
        snprintf(r.shapes, sizeof r.shapes, "%s", calls[i].shapes);
        op_energies_count(&e, &r);
        OpEnergy* op = &e.ops[i < 3 ? i : i == 3 ? 0 : i - 1];
        op->alone.seconds = calls[i].seconds, op->alone.watts = calls[i].watts, op->alone.mhz = 1500;
    }
    e.whole.seconds = 15e-3, e.whole.watts = 520, e.whole.mhz = 1555;
    char* sum = op_energies_sum(&e);
    text_printf(&text, "%s\n", sum);
    profile_table_energy(&table, &e);
    table_put_text(&text, &table);
    expect_golden(t, "energies of ops", text.text);
    table_free(&table);
    free(sum), free(e.ops);
}

static void test_ranks(Tests* t) {
    Filled f;
    Text text = {NULL, 0, 0};
    filled_open(&f);
    ProfileRow* last = &f.steps[2].rows[f.steps[2].count - 1];
    last->direction = COMMUNICATION, last->op = "share_parameters";
    filled_report(&f);
    Accounting a = profile_account(&f.steps[2]);
    RankStep all[3];
    for (int i = 0; i < 3; i++) {  // the time before the first row counts as a rank's own
        f.steps[2].before = i == 1 ? 16.4e-3 : i == 2 ? NAN : 500e-6;
        all[i] = profiler_rank_step(&f.steps[2], &a, &f.run);
    }
    profiler_table_ranks(&f.report, all, 3);
    report_put_table(&text, report_find(&f.report, "ranks"));
    text_printf(&text, "%s\n", table_cell(&f.report.tables[0], table_rows(&f.report.tables[0]) - 1, 2));
    expect_golden(t, "ranks", text.text);
    filled_close(&f);
}

// ---------------------------------------------------------------------------------------------------------
// Files

// A file of a report (caller frees).
static char* file_of(const char* directory, const char* name) {
    char* path = xprintf("%s/%s", directory, name);
    char* text = read_file(path, (size_t)1 << 24, NULL, FAILED);
    free(path);
    return text;
}

// Whether the page's data are the report's tables, cell by cell.
static int page_has_tables(const JsonNode* root, const ProfileReport* r) {
    const JsonNode* table = root->first;
    if (root->count != (size_t)r->count) return 0;
    for (int i = 0; i < r->count; i++, table = table->next) {
        const Table* t = &r->tables[i];
        const JsonNode* row = json_need(table, "rows", JSON_ARRAY, "page")->first;
        if (strcmp(json_get_string(table, "note", "page"), t->note ? t->note : "") != 0) return 0;
        for (size_t k = 0; k < table_rows(t); k++, row = row->next) {
            const JsonNode* cell = row->first;
            for (size_t c = 0; c < t->column_count; c++, cell = cell->next) {
                const char* want = table_cell(t, k, c);
                JsonType type = !*want ? JSON_NULL : table_is_text(t, c) ? JSON_STRING : JSON_NUMBER;
                if (cell->type != type || (*want && strcmp(cell->string, want) != 0)) return 0;
            }
        }
    }
    return 1;
}

static void test_page(Tests* t, const char* page, const ProfileReport* r) {
    char *shared = read_file("llmc/profile/head.html", (size_t)1 << 24, NULL, FAILED),
         *own = read_file("llmc/profile/page.html", (size_t)1 << 24, NULL, FAILED), *place = strstr(shared, PAGE_PLACE);
    CHECK(place && !strstr(place + 1, PAGE_PLACE) && !strstr(own, PAGE_PLACE));
    char* rest = xprintf("%s%s", place + strlen(PAGE_PLACE), own);
    size_t before = (size_t)(place - shared), after = strlen(rest), n = strlen(page);
    CHECK(n > before + after);
    expect_that(t, memcmp(page, shared, before) == 0 && strcmp(page + n - after, rest) == 0,
                "all but the data is the page without data");
    char* data = xprintf("%.*s", (int)(n - before - after), page + before);
    expect_that(t, !strchr(data, '<'), "nothing in the data ends the script");
    Json json;
    char error[JSON_ERROR_SIZE];
    if (json_parse(&json, data, strlen(data), error) != 0) die(FAILED, "the page's data: %s", error);
    expect_that(t, page_has_tables(json.root, r), "the page has every table, cell by cell");
    json_free(&json);
    free(shared), free(own), free(rest), free(data);
}

// What report_write() prints on stderr (caller frees).
static char* said_by_write(const ProfileReport* r, const char* directory) {
    char* path = xprintf("%s/said", scratch);
    int kept = dup(2), file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    CHECK(kept >= 0 && file >= 0);
    fflush(stderr);
    dup2(file, 2);
    report_write(r, NULL, directory);
    fflush(stderr);
    dup2(kept, 2);
    close(kept), close(file);
    free(path);
    return file_of(scratch, "said");
}

// The files of a traced step, with the times of all three.
static void test_files(Tests* t, const ProfileReport* r) {
    static const char* const names[] = {"profile.txt", "summary.csv"};
    char* directory = xprintf("%s/out/profile", scratch);
    for (int again = 0; again < 2; again++) expect_text(t, "files are written", said_by_write(r, directory), "");
    for (size_t i = 0; i < COUNT_OF(names); i++) expect_golden(t, names[i], file_of(directory, names[i]));
    char *page = file_of(directory, "profile.html"), *csv = file_of(directory, "kernels.csv");
    test_page(t, page, r);
    expect(t, strstr(csv, ",\"void evil<a, \"\"b\"\">(</script>\r\n)\"\r\n") != NULL, "full names in kernels.csv", "%s",
           csv);
    free(page), free(csv), free(directory);
}

// The report of a step whose rows are ops, as on the CPU: a gap between ops does not wait for the host.
static void test_report_of_ops(Tests* t) {
    ScopeRecord records[2];
    ScopeLog log;
    ProfileStep step;
    ProfileReport r;
    OpEnergies none = {NULL, 0, {0, 0, 0}};
    static const char* const ids[] = {"accounting", "ops", "gaps"};
    Text text = {NULL, 0, 0};
    memset(records, 0, sizeof records);
    records[0].scope.op = "matmul_forward", records[1].scope.op = "adamw\"update";
    records[0].start = 5, records[0].seconds = 2e-3, records[1].start = 5 + 3e-3, records[1].seconds = 1e-3;
    records[1].scope.direction = OPTIMIZER, records[0].scope.layer = records[1].scope.layer = -1;
    scope_log_open(&log, NULL);
    log.records = records, log.count = 2;
    profile_from_log(&step, &log, 0);
    profile_set_rooflines(&step, &PEAKS);
    Accounting a = profile_account(&step);
    ProfileTimes times = {NAN, NAN};
    report_open(&r, xprintf("ops"));
    report_step(&r, &step, &a, times, &none);
    for (size_t i = 0; i < COUNT_OF(ids); i++) report_put_table(&text, report_find(&r, ids[i]));
    expect_golden(t, "a report of ops", text.text);
    report_free(&r);
    profile_step_free(&step);
}

static void test_refused_files(Tests* t, const ProfileReport* r) {
    char *blocker = xprintf("%s/said", scratch), *below = xprintf("%s/said/profile", scratch);
    char *full = xprintf("%s/full", scratch), *link = xprintf("%s/full/profile.html", scratch);
    char *taken = xprintf("%s/full/profile.txt", scratch), *csv = xprintf("%s/full/kernels.csv", scratch);
    CHECK(write_file(blocker, "", 0) == 0 && make_directories(taken) == 0 && symlink("/dev/full", link) == 0);
    char* want = xprintf("warning: %s: cannot be created: Not a directory; the profile is not written\n", below);
    expect_text(t, "a directory that cannot be created", said_by_write(r, below), want);
    free(want);
    want = xprintf("warning: %s: cannot be written: Is a directory\n"
                   "warning: %s: cannot be written: No space left on device\n",
                   taken, link);
    expect_text(t, "two files that cannot be written", said_by_write(r, full), want);
    expect(t, file_exists(csv), "the others are written", "%s is not", csv);
    free(want), free(blocker), free(below), free(full), free(link), free(taken), free(csv);
}

// What a shell command prints in the scratch folder (caller frees).
static char* shell(const char* command) {
    Text out = {NULL, 0, 0};
    char line[256], *whole = xprintf("cd %s && %s", scratch, command);
    FILE* f = popen(whole, "r");
    while (f && fgets(line, sizeof line, f)) text_append(&out, line, strlen(line));
    CHECK(f && pclose(f) == 0);
    text_append(&out, "", 0);
    free(whole);
    return out.text;
}

// What is left where one rank, or two, profile after one and four have. Other files stay, and the target of a link.
static void test_clear(Tests* t) {
    static const char make[] =
        "mkdir -p cleared/profile && cd cleared/profile && mkdir -p rank_0 rank_1 rank_2 rank_3 && "
        "touch profile.txt notes.txt rank_0/profile.txt rank_1/profile.html rank_2/summary.csv "
        "rank_2/mine rank_3/kernels.csv && ln -sfn rank_0 rank_4";
    static const char list[] = "cd cleared/profile && echo $(find * | sort)";
    char* out = xprintf("%s/cleared", scratch);
    static const char* const left[] = {"notes.txt profile.txt rank_2 rank_2/mine rank_4\n",
                                       "notes.txt rank_0 rank_0/profile.txt rank_1 rank_1/profile.html rank_2 "
                                       "rank_2/mine rank_4\n"};
    for (int ranks = 1; ranks <= 2; ranks++) {
        free(shell(make));
        report_clear(NULL, out, ranks);
        expect_text(t, ranks == 1 ? "one rank after four" : "two ranks after four", shell(list), left[ranks - 1]);
    }
    free(out);
}

// If the run has lost the lock of its directory, nothing is written there and nothing removed.
static void test_lost(Tests* t, const ProfileReport* r) {
    char *out = xprintf("%s/lost", scratch), *lock_file = xprintf("%s/.lock", out);
    char *directory = report_directory(out, 0, 1), *rank = xprintf("%s/rank_0", directory),
         *file = xprintf("%s/profile.txt", rank);
    RunLock lock = {NULL, 0, 0};
    CHECK(make_directories(out) == 0);
    run_lock_take(&lock, out, O_CREAT);
    CHECK(unlink(lock_file) == 0);
    report_write(r, &lock, directory);
    expect(t, !file_exists(directory), "without the lock nothing is written", "%s is there", directory);
    CHECK(make_directories(rank) == 0 && write_file(file, "x", 1) == 0);
    report_clear(&lock, out, 1);
    expect(t, file_exists(file), "without the lock nothing is removed", "%s was", file);
    run_lock_close(&lock);
    free(out), free(lock_file), free(directory), free(rank), free(file);
}

int main(int argc, char** argv) {
    Tests t;
    Filled f;
    tests_open(&t);
    if (argc > 1 && strcmp(argv[1], "golden") == 0) CHECK((new_golden = fopen(GOLDEN, "w")) != NULL);
    else golden = read_file(GOLDEN, (size_t)1 << 24, NULL, FAILED);
    CHECK(mkdtemp(scratch));
    test_names(&t);
    test_tensor_cores(&t);
    test_order(&t);
    test_random_accounting(&t);
    test_ops(&t);
    test_medians(&t);
    test_long_steps(&t);
    test_facts(&t);
    test_words(&t);
    test_stages(&t);
    test_op_energies(&t);
    test_ranks(&t);
    filled_open(&f);
    filled_report(&f);
    test_files(&t, &f.report);
    test_refused_files(&t, &f.report);
    test_clear(&t);
    test_lost(&t, &f.report);
    test_report_of_ops(&t);
    filled_close(&f);
    char* command = xprintf("rm -rf '%s'", scratch);
    if (system(command) != 0) warn("%s: cannot be removed", scratch);
    free(command), free(golden);
    if (new_golden) fclose(new_golden);
    return tests_close(&t);
}
