/* Tests of the profiler without a GPU. Made-up CUPTI records of steps become a report, whose sums are those of
 * dev/test/profile_golden.txt; rows and files are checked by themselves. Run from the repository's root.
 * Prints one line per case and `N passed, N failed`; exit status 1 if one failed.
 *
 *     build/test_profile golden     writes that file, after an intended change: read the difference */
#include "dev/test/tests.h"
#include "llmc/profile/report.h"

#define GOLDEN "dev/test/profile_golden.txt"

// Names of kernels, and whether they use tensor cores.
static void test_names(Tests* t) {
    static const struct {
        const char *full, *name;
        int half, tensor_cores;
    } cases[] = {
        {"void (anonymous namespace)::fill<Pair<int, float> >(int)", "fill", 1, 0},
        {"void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_128x64_tn_align8>(Params)",
         "cutlass_80_tensorop_bf16_s16816gemm_128x64_tn_align8", 1, 1},
        {"void cutlass::device_kernel<gemm::Universal<A<1>, B>, int>(Params)", "gemm::Universal", 1, 1},
        {"cutlass_80_tensorop_s1688gemm_128x64", "cutlass_80_tensorop_s1688gemm_128x64", 0, 0},
        {"attention_forward_flash_kernel", "attention_forward_flash_kernel", 0, 1},
        {"attention_forward_softmax_kernel", "attention_forward_softmax_kernel", 1, 0},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        char *full = xprintf("%s", cases[i].full), *name = kernel_name_short(full);
        ProfileRow row = profile_row(NULL);
        row.kernel = name, row.full = full;
        int cores = profile_tensor_cores(&row, cases[i].half);
        expect(t, strcmp(name, cases[i].name) == 0 && cores == cases[i].tensor_cores, full, "'%s', %d", name, cores);
        free(full), free(name);
    }
}

// ---------------------------------------------------------------------------------------------------------
// A step as it was traced

// Too large for a double to hold the nanoseconds exactly.
#define NOW ((uint64_t)1700000000 * 1000000000)

enum { NO_OP = -1, UNKNOWN = 1 << 30, COMPUTE = 7, COPIES = 13, COLLECTIVES = 20 };

// A flop takes 1 ns, a byte 10 ns, a launch 1 ms.
static const MeasuredPeaks PEAKS = {1e9, 1e8, 1e-3};

static ScopeRecord OPS[] = {
    {{NULL, "batch_load", FORWARD, -1, "B=2 T=8", 0, 64}, 0, 0, 0},
    {{NULL, "matmul_forward", FORWARD, 0, "N=64 IC=16 OC=32", 4.9e6, 1e5}, 0, 0, 0},
    {{NULL, "layernorm_forward", FORWARD, 0, "N=64 C=16", 10, 3e5}, 0, 0, 0},
    {{NULL, "gelu_forward", FORWARD, 1, "n=10", 10, 10}, 0, 0, 0},
    {{NULL, "matmul_backward_weight", BACKWARD, 1, "N=64 IC=16 OC=32", 9e6, 1.2e6}, 0, 0, 0},
    {{NULL, "sum_gradients", COMMUNICATION, 1, "n=1000", 0, 1e6}, 0, 0, 0},
    {{NULL, "adamw_update", OPTIMIZER, -1, "n=1000", 10, 2.5e5}, 0, 0, 0},
    {{NULL, "readback", OPTIMIZER, -1, "n=3", 0, 12}, 0, 0, 0},
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
    {"copy_to_host_96B", NULL, NO_OP, COPIES, 25000, 25500, 19650},  // begins with the one that was called before it
    {"fill_4B", NULL, 1, COMPUTE, 3000, 3500, 1500},
    {"ncclDevKernel_AllReduce", NULL, 5, COLLECTIVES, 25000, 36800, 19800},
    {"nvjet_weight", NULL, 4, COMPUTE, 23000, 33000, 19700},
    {"copy_to_host_12B", NULL, 7, COPIES, 40000, 41500, 20000},
    {"layernorm_forward_kernel", NULL, 2, COMPUTE, 10000, 14000, 3000},
};

static uint64_t at(int microseconds) { return (uint64_t)((int64_t)NOW + 1000 * (int64_t)microseconds); }

// The step without the launch named `without`; the product ends `longer`, the last copy `later` microseconds later.
static void step_open(ProfileStep* step, const char* without, int longer, int later) {
    KernelTrace trace;
    ScopeLog log;
    memset(&trace, 0, sizeof trace);
    scope_log_open(&log, &trace);
    log.records = OPS, log.count = COUNT_OF(OPS);
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

// The energies of a step's calls, each op by itself at another power.
static void fill_energies(OpEnergies* e) {
    static const struct {
        Scope scope;
        RepeatedEnergy alone;
    } calls[] = {
        {{NULL, "matmul_forward", FORWARD, -1, "N=1", 0, 0}, {1e-3, 700, 1500}},
        {{NULL, "matmul_forward", FORWARD, -1, "N=2", 0, 0}, {4e-3, 600, 1500}},
        {{NULL, "matmul_forward", BACKWARD, -1, "N=1", 0, 0}, {2e-3, 650, 1500}},
    };
    for (size_t i = 0; i < COUNT_OF(calls); i++) {
        op_energies_count(e, &calls[i].scope);
        e->ops[i].alone = calls[i].alone;
    }
    op_energies_count(e, &calls[0].scope);
    e->whole.seconds = 9e-3, e->whole.watts = 570, e->whole.mhz = 1555;
}

static void set_cell(Table* t, size_t row, size_t column, const char* text) {
    char** cell = &t->cells[row * t->column_count + column];
    free(*cell);
    *cell = xprintf("%s", text);
}

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
    fill_energies(&p->ops);
    profiler_fill_report(&f->report, p, &f->run);
    // As if on another machine.
    set_cell(&f->report.tables[0], 0, 2, "./program -o 'a b</script><!--<script>' \"\xC3\xA9\"");
    set_cell(&f->report.tables[0], 1, 2, "one | <b>\n");
}

static void filled_close(Filled* f) {
    report_free(&f->report);
    free(f->profiler.ops.ops);
    for (int i = 0; i < 3; i++) profile_step_free(&f->steps[i]);
}

static void test_median(Tests* t) {
    static const double spans[] = {5, 8, 6}, ranks[] = {1, 2, 3, 2.5, 9, 1};
    double two[] = {4, 1};
    expect_that(t, median_of(two, 2) == 2.5, "median of two");
    expect_that(t, profiler_median_index(spans, 1, 3) == 2 && profiler_median_index(spans, 1, 2) == 0, "median");
    expect_that(t, profiler_median_index(ranks, 2, 3) == 2, "median of the slowest rank's times");
}

// ---------------------------------------------------------------------------------------------------------
// Files

// A file of the tests (caller frees).
static char* text_of(const Tests* t, const char* name) {
    char *path = path_in(t, name), *text = read_file(path, (size_t)1 << 24, NULL, FAILED);
    free(path);
    return text;
}

static const ProfileReport* written;  // by write_to()

static void write_to(const char* directory) { report_write(written, NULL, directory); }

// The files of a traced step, with the times of all three. page.py has the page.
static void test_files(Tests* t, int is_new) {
    Text said = {NULL, 0, 0};
    char* out = path_in(t, "out");
    report_write(written, NULL, out);
    char *summary = text_of(t, "out/summary.csv"), *csv = text_of(t, "out/kernels.csv"),
         *text = text_of(t, "out/profile.txt");
    char* rows = strstr(text, "\nRows in order of execution\n");
    CHECK(rows);
    *rows++ = '\0';
    if (is_new) CHECK(write_file(GOLDEN, text, strlen(text)) == 0);
    char* golden = read_file(GOLDEN, (size_t)1 << 24, NULL, FAILED);
    case_begin(t, "files");
    EXPECT_TEXT(t, text, golden);
    EXPECT(t, strstr(rows, "5000.00   5000.00    6000.00   6400.00  0.005  0.100    0.001   0.0  yes"));
    EXPECT(t, strstr(rows, "14000.00  6000.00  host             gelu_forward_kernel           4\n"));
    EXPECT(t, strstr(summary, "\nnumber,span_ms,41.6\r\n") && strstr(summary, "\nnumber,unattributed,2\r\n"));
    EXPECT(t, strstr(csv, ",\"void evil<a, \"\"b\"\">(</script>\r\n)\"\r\n"));
    // A full disk is a warning.
    CHECK(unlink(named("%s/profile.txt", out)) == 0 && symlink("/dev/full", named("%s/profile.txt", out)) == 0);
    EXPECT_EQ(t, exit_status_of(write_to, out, &said), DONE);
    EXPECT_TEXT(t, said.text, named("warning: %s/profile.txt: cannot be written: No space left on device\n", out));
    case_end(t);
    free(said.text), free(out), free(summary), free(csv), free(text), free(golden);
}

// What is left where two ranks profile after four. Other files stay, and the target of a link.
static void test_clear(Tests* t) {
    const char* making = named("mkdir '%s/profile' && cd '%s/profile' && mkdir rank_0 rank_1 rank_2 rank_3 && touch "
                               "profile.txt notes.txt rank_0/profile.txt rank_2/summary.csv rank_2/mine "
                               "rank_3/kernels.csv && ln -s rank_0 rank_4",
                               t->directory, t->directory);
    CHECK(system(making) == 0);
    report_clear(NULL, t->directory, 2);
    const char* left = "notes.txt rank_0 rank_0/profile.txt rank_1 rank_2 rank_2/mine rank_4";
    const char* looking =
        named("cd '%s/profile' && test \"$(echo $(find * | LC_ALL=C sort))\" = '%s'", t->directory, left);
    expect_that(t, system(looking) == 0, "two ranks after four");
}

int main(int argc, char** argv) {
    Tests t;
    Filled f;
    tests_open(&t);
    t.directory = make_scratch_directory("test_profile");
    test_names(&t);
    filled_open(&f);
    written = &f.report;
    test_files(&t, argc > 1 && strcmp(argv[1], "golden") == 0);
    test_clear(&t);
    test_median(&t);
    filled_close(&f);
    return tests_close(&t);
}
