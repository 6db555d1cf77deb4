/* Tests of the profiler without a GPU. Made-up CUPTI records of a step become rows, roofline times, gaps and sums;
 * made-up steps become a report's facts; tables are read back from every format; all files of a report are written and
 * read. Run from the repository's root. Prints one line per case and `N passed, N failed`; exit status 1 if one
 * failed. */
#include "dev/test/tests.h"
#include "llmc/base/json.h"
#include "llmc/profile/report.h"

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
        char *got = kernel_name_short(names[i][0]), *name = xprintf("names/%s", names[i][1]);
        expect(t, strcmp(got, names[i][1]) == 0, name, "got %s", got);
        free(got), free(name);
    }
}

static void test_tensor_cores(Tests* t) {
    static const struct {
        const char* kernel;
        int half, want;
    } cases[] = {
        {"nvjet_sm90_tst_128x128_64x6_2x1_v_bz_TNT", 1, 1},
        {"nvjet_sm90_tss_192x192_64x3_1x2_h_bz_coopB_splitK_NTN", 1, 1},
        {"cublasLt::splitKreduce_kernel", 1, 0},
        {"cutlass_80_simt_sgemm_128x64_tn_align1", 1, 0},
        {"cutlass_80_tensorop_s1688gemm_128x64", 0, 0},
        {"attention_forward_flash_kernel", 0, 1},
        {"attention_forward_softmax_kernel", 1, 0},
        {"layernorm_forward_kernel", 1, 0},
        {NULL, 1, -1},
    };
    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        ProfileRow row = profile_row(NULL);
        char kernel[64], *name = xprintf("tensor cores/%s", cases[i].kernel ? cases[i].kernel : "an op");
        snprintf(kernel, sizeof kernel, "%s", cases[i].kernel ? cases[i].kernel : "");
        row.kernel = row.full = cases[i].kernel ? kernel : NULL;
        int got = profile_tensor_cores(&row, cases[i].half);
        expect(t, got == cases[i].want, name, "%d", got);
        free(name);
    }
}

// ---------------------------------------------------------------------------------------------------------
// A step as it was traced

// Too large for a double to hold the nanoseconds exactly.
#define NOW ((uint64_t)1700000000 * 1000000000)

enum { NO_OP = -1, UNKNOWN = 1 << 30, COMPUTE = 7, COPIES = 13, COLLECTIVES = 20 };

// A flop takes 1 ps, a byte 10 ps, a launch 1 us.
static const MeasuredPeaks PEAKS = {1e12, 1e11, 1e-6};

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

// A name that every output format escapes in its own way.
#define EVIL "evil</script><!--|*\\"
#define EVIL_FULL "void evil<a, \"b\">(</script>\r\n)"

// Nanoseconds from NOW; `issued`: when its launch returned. Not in the order of execution.
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

typedef struct {
    ScopeRecord records[COUNT_OF(OPS)];
    KernelTrace trace;
    ScopeLog log;
} Traced;

// Without the launch named `without`; the product ends `longer`, the last copy `later` nanoseconds later.
static void traced_open(Traced* d, const char* without, int longer, int later) {
    memset(d, 0, sizeof *d);
    d->log.records = d->records, d->log.count = COUNT_OF(OPS), d->log.trace = &d->trace;
    d->trace.lost = 3;
    for (size_t i = 0; i < COUNT_OF(OPS); i++) {
        Scope* r = &d->records[i].scope;
        r->op = OPS[i].op, r->direction = OPS[i].direction, r->layer = OPS[i].layer;
        r->flops = OPS[i].flops, r->bytes = OPS[i].bytes;
        snprintf(r->shapes, sizeof r->shapes, "%s", OPS[i].shapes);
    }
    for (size_t i = 0; i < COUNT_OF(LAUNCHES); i++) {
        TracedLaunch row;
        int is_kernel = strncmp(LAUNCHES[i].name, "copy", 4) != 0 && strncmp(LAUNCHES[i].name, "fill", 4) != 0;
        int more = strcmp(LAUNCHES[i].name, "nvjet_product") == 0      ? longer
                   : strcmp(LAUNCHES[i].name, "copy_to_host_12B") == 0 ? later
                                                                       : 0;
        if (without && strcmp(LAUNCHES[i].name, without) == 0) continue;
        memset(&row, 0, sizeof row);
        row.name = xprintf("%s", LAUNCHES[i].name);
        row.full = LAUNCHES[i].full ? xprintf("%s", LAUNCHES[i].full) : NULL;
        row.correlation = (uint32_t)(40 - 3 * i), row.stream = LAUNCHES[i].stream;
        row.start = NOW + (uint64_t)LAUNCHES[i].start, row.end = NOW + (uint64_t)(LAUNCHES[i].end + more);
        if (is_kernel) row.grid[0] = 8, row.grid[1] = 2, row.grid[2] = 1, row.block[0] = 256, row.registers = 40;
        kernel_trace_add(&d->trace, &row);
        if (LAUNCHES[i].op != NO_OP) traced_calls_add(&d->trace.scopes, row.correlation, (uint64_t)LAUNCHES[i].op);
        if (LAUNCHES[i].issued != UNKNOWN)
            traced_calls_add(&d->trace.returns, row.correlation, NOW + (uint64_t)LAUNCHES[i].issued);
    }
    traced_calls_add(&d->trace.scopes, 4000, 2);  // calls that launched nothing
    traced_calls_add(&d->trace.returns, 1, NOW);
}

static void step_open(ProfileStep* step, const char* without, int longer, int later) {
    Traced d;
    traced_open(&d, without, longer, later);
    kernel_trace_collect(&d.trace);
    profile_from_log(step, &d.log, 1);
    kernel_trace_free(&d.trace);
    profile_set_rooflines(step, &PEAKS);
}

static void test_join(Tests* t) {
    Traced d;
    traced_open(&d, NULL, 0, 0);
    for (int again = 0; again < 2; again++) {  // joining twice changes nothing
        Text order = {NULL, 0, 0};
        kernel_trace_collect(&d.trace);
        for (size_t i = 0; i < d.trace.count; i++) {
            const TracedLaunch* row = &d.trace.rows[i];
            text_printf(&order, "%s %s %lld\n", row->name,
                        row->scope == NO_SCOPE       ? "-"
                        : row->scope < COUNT_OF(OPS) ? OPS[row->scope].op
                                                     : "wrong",
                        row->issued ? (long long)(row->issued - NOW) : -1);
        }
        expect_text(t, again ? "join/again" : "join/order, scopes and launches", order.text,
                    "copy_to_device_64B batch_load -500\n"
                    "fill_4B matmul_forward 1500\n"
                    "nvjet_product matmul_forward 2500\n"
                    "layernorm_forward_kernel layernorm_forward 3000\n"
                    "gelu_forward_kernel gelu_forward 19500\n" EVIL " - 19600\n"
                    "nvjet_weight matmul_backward_weight 19700\n"
                    "ncclDevKernel_AllReduce sum_gradients 19800\n"
                    "copy_to_host_96B - 19650\n"
                    "cublasLt::splitKreduce_kernel matmul_backward_weight 19900\n"
                    "adamw_update_kernel adamw_update -1\n"
                    "copy_to_host_12B readback 20000\n");
    }
    kernel_trace_clear(&d.trace);
    expect(t, d.trace.count == 0 && d.trace.lost == 0 && d.trace.scopes.count == 0 && d.trace.returns.count == 0,
           "join/cleared", "%zu rows are left", d.trace.count);
    for (int i = 0; i < 3; i++) {  // three that begin at the same time
        TracedLaunch row;
        memset(&row, 0, sizeof row);
        row.name = xprintf("%d", i), row.correlation = (uint32_t)((i + 1) % 3), row.start = row.end = NOW;
        kernel_trace_add(&d.trace, &row);
    }
    kernel_trace_collect(&d.trace);
    expect(t, d.trace.rows[0].name[0] == '2' && d.trace.rows[1].name[0] == '0' && d.trace.rows[2].name[0] == '1',
           "join/launches that begin at once are in the order of the calls", "%s first", d.trace.rows[0].name);
    kernel_trace_free(&d.trace);
}

static void test_rows(Tests* t) {
    ProfileStep step;
    Text rows = {NULL, 0, 0};
    step_open(&step, NULL, 0, 0);
    for (size_t i = 0; i < step.count; i++) {
        const ProfileRow* r = &step.rows[i];
        const char* bound = profile_bound_name(r->bound);
        text_printf(&rows, "%-8.8s %s %d, %s %2d from %.0f, %.0f, %.0f: %s, bound %s %.0f, lost %.0f%s\n", r->kernel,
                    direction_name(r->direction), r->layer, *r->op ? r->op : "-", r->stream, 1e9 * r->start,
                    1e9 * r->seconds, plain_nan(1e9 * r->issued), profile_kind_name(profile_kind(r)),
                    bound ? bound : "-", plain_nan(1e9 * r->roofline), plain_nan(1e9 * profile_lost(r)),
                    r->is_helper ? ", helper" : "");
    }
    expect_text(
        t, "rows/ops, times, roofline times, helpers", rows.text,
        "copy_to_ forward -1, batch_load 13 from 0, 1000, -500: host copy, bound - nan, lost nan\n"
        "fill_4B  forward 0, matmul_forward  7 from 3000, 500, 1500: matmul, bound - 0, lost 500, helper\n"
        "nvjet_pr forward 0, matmul_forward  7 from 3500, 6000, 2500: matmul, bound compute 4900, lost 1100\n"
        "layernor forward 0, layernorm_forward  7 from 10000, 4000, 3000: memory-bound, bound memory 3000, lost "
        "1000\n"
        "gelu_for forward 1, gelu_forward  7 from 20000, 2000, 19500: launch-bound, bound launch 1000, lost 1000\n"
        "evil</sc forward -1, -  7 from 22000, 1000, 19600: memory-bound, bound - 0, lost 1000\n"
        "nvjet_we backward 1, matmul_backward_weight  7 from 23000, 10000, 19700: matmul, bound memory 10000, lost 0\n"
        "ncclDevK communication 1, sum_gradients 20 from 25000, 11800, 19800: communication, bound - nan, lost nan\n"
        "copy_to_ forward -1, - 13 from 26000, 500, 19650: memory-bound, bound - 0, lost 500\n"
        "cublasLt backward 1, matmul_backward_weight  7 from 33000, 2000, 19900: matmul, bound - 2000, lost 0, helper\n"
        "adamw_up optimizer -1, adamw_update  7 from 37500, 3000, nan: memory-bound, bound memory 2500, lost 500\n"
        "copy_to_ optimizer -1, readback 13 from 40000, 1500, 20000: host copy, bound - nan, lost "
        "nan\n");
    const ProfileRow *product = &step.rows[2], *fill = &step.rows[1], *evil = &step.rows[5];
    expect(t, product->flops == 4.9e6 && product->bytes == 1e5 && isnan(fill->flops) && isnan(fill->bytes),
           "rows/the longest carries the op's work", "flops %g and %g", product->flops, fill->flops);
    expect(t, strcmp(evil->full, EVIL_FULL) == 0 && strcmp(fill->full, "fill_4B") == 0, "rows/full names", "%s",
           evil->full);
    expect(t, product->tensor_cores == 1 && step.rows[9].tensor_cores == 0 && step.dropped == 3 && isnan(step.before),
           "rows/tensor cores, lost launches", "%d %d %zu", product->tensor_cores, step.rows[9].tensor_cores,
           step.dropped);
    profile_step_free(&step);
}

// kernels - overlap + gaps = span for every step.
static void expect_identity(Tests* t, const char* name, const Accounting* a) {
    double sum = a->kernels - a->overlap + a->gap[GAP_HOST] + a->gap[GAP_STREAM] + a->gap[GAP_SWITCH];
    expect(t, near_to(sum, a->span), name, "%.15g against %.15g", sum, a->span);
}

static void test_accounting(Tests* t) {
    ProfileStep step;
    Text causes = {NULL, 0, 0};
    size_t count;
    step_open(&step, NULL, 0, 0);
    Accounting a = profile_account(&step);
    expect(t, near_to(a.kernels, 43300e-9) && near_to(a.span, 41500e-9) && near_to(a.overlap, 11000e-9),
           "accounting/kernels, span, overlap", "%g %g %g", a.kernels, a.span, a.overlap);
    expect_identity(t, "accounting/the sum is the span", &a);
    expect(t,
           near_to(a.gap[GAP_HOST], 6000e-9) && near_to(a.gap[GAP_STREAM], 2200e-9) &&
               near_to(a.gap[GAP_SWITCH], 1000e-9),
           "accounting/gaps by cause", "%g %g %g", a.gap[GAP_HOST], a.gap[GAP_STREAM], a.gap[GAP_SWITCH]);
    expect(t, a.unscoped == 2, "accounting/rows without an op", "%zu", a.unscoped);
    expect(t, near_to(a.communication, 11800e-9) && near_to(a.overlapped, 10000e-9),
           "accounting/overlapped communication", "%g of %g", a.overlapped, a.communication);
    ProfileGap* gaps = profile_gaps(&step, &count);
    for (size_t i = 0; i < count; i++)
        text_printf(&causes, "%.0f: %.0f, host %.0f, %s, before %s\n", 1e9 * gaps[i].start, 1e9 * gaps[i].seconds,
                    1e9 * gaps[i].host, profile_gap_name(gaps[i].rest), step.rows[gaps[i].before].kernel);
    expect_text(t, "accounting/every gap", causes.text,
                "1000: 2000, host 500, another stream, before fill_4B\n"
                "9500: 500, host 0, between kernels, before layernorm_forward_kernel\n"
                "14000: 6000, host 5500, between kernels, before gelu_forward_kernel\n"
                "36800: 700, host 0, another stream, before adamw_update_kernel\n");
    free(gaps);
    profile_step_free(&step);
}

// Steps of random rows on several streams, dense and sparse.
static void test_random_accounting(Tests* t) {
    enum { ROWS = 60 };
    uint64_t state = 1;
    for (int round = 0; round < 20; round++) {
        Traced d;
        ProfileStep step;
        memset(&d, 0, sizeof d);
        d.log.trace = &d.trace;
        for (uint32_t i = 0; i < ROWS; i++) {
            TracedLaunch row;
            memset(&row, 0, sizeof row);
            uint64_t r[4];
            for (int k = 0; k < 4; k++) r[k] = (state = state * 6364136223846793005u + 1442695040888963407u) >> 33;
            row.name = xprintf("kernel"), row.correlation = i, row.stream = (int)(r[0] % 3);
            row.start = NOW + r[1] % (round % 2 ? 1000000 : 20000), row.end = row.start + r[2] % 10000;
            kernel_trace_add(&d.trace, &row);
            if (r[3] % 4) traced_calls_add(&d.trace.returns, i, row.start - r[3] % 20000);
        }
        kernel_trace_collect(&d.trace);
        profile_from_log(&step, &d.log, 0);
        kernel_trace_free(&d.trace);
        Accounting a = profile_account(&step);
        char* name = xprintf("accounting/random step %d", round);
        expect_identity(t, name, &a);
        free(name);
        profile_step_free(&step);
    }
    ProfileStep empty;
    memset(&empty, 0, sizeof empty);
    Accounting a = profile_account(&empty);
    expect(t, a.kernels == 0 && a.span == 0 && a.overlap == 0, "accounting/a step without rows", "%g", a.span);
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
    expect(t, step.count == 3 && log.open == NO_SCOPE && other.count == 3, "ops/one per scope", "%zu", step.count);
    const ProfileRow* r = step.rows;
    expect(t,
           strcmp(r[0].op, "outer") == 0 && strcmp(r[0].shapes, "n=4") == 0 && r[0].direction == BACKWARD &&
               r[0].layer == 3 && r[0].flops == 1 && r[0].bytes == 2 && !r[0].kernel && r[0].stream == -1 &&
               r[0].tensor_cores == -1 && r[2].direction == OPTIMIZER && r[2].layer == -1,
           "ops/fields", "%s %s", r[0].op, r[0].shapes);
    expect(t,
           r[1].seconds >= 0.02 && r[0].seconds >= 0 && r[0].start == 0 &&
               r[0].seconds + r[1].seconds <= r[2].start + 1e-9,
           "ops/time of an inner scope", "%g %g", r[0].seconds, r[1].seconds);
    profile_step_free(&step);
    scope_log_close(&log), scope_log_close(&other);
}

// ---------------------------------------------------------------------------------------------------------
// Over steps

static void test_steps(Tests* t) {
    ProfileStep steps[3];
    step_open(&steps[0], "gelu_forward_kernel", 0, 0);
    step_open(&steps[1], NULL, 400, 300);
    step_open(&steps[2], NULL, -1000, 100);
    expect(t, near_to(profile_span(&steps[1]), 41800e-9), "steps/span", "%g", profile_span(&steps[1]));
    const double spans[] = {5, 8, 6}, same[] = {7, 7, 7}, ranks[] = {1, 2, 3, 2.5, 9, 1};
    expect(t,
           profiler_median_index(spans, 1, 3) == 2 && profiler_median_index(spans, 1, 2) == 0 &&
               profiler_median_index(spans + 1, 1, 2) == 1 && profiler_median_index(spans, 1, 1) == 0,
           "steps/the median one", "%zu", profiler_median_index(spans, 1, 3));
    expect(t, profiler_median_index(same, 1, 3) == 1, "steps/the median of equal ones", "%zu",
           profiler_median_index(same, 1, 3));
    expect(t, profiler_median_index(ranks, 2, 3) == 2, "steps/the median by the slowest rank's time", "%zu",
           profiler_median_index(ranks, 2, 3));
    profile_compare_steps(&steps[2], steps, 3);
    const ProfileRow *product = &steps[2].rows[2], *fill = &steps[2].rows[1], *gelu = &steps[2].rows[4],
                     *reduce = &steps[2].rows[9];
    expect(t,
           near_to(product->min, 5000e-9) && near_to(product->median, 6000e-9) && near_to(product->max, 6400e-9) &&
               near_to(fill->max, 500e-9) && near_to(reduce->min, 2000e-9),
           "steps/min, median, max", "%g %g %g", product->min, product->median, product->max);
    expect(t, isnan(gelu->min) && isnan(gelu->median) && isnan(gelu->max), "steps/a row that a step lacks", "%g",
           gelu->median);
    double four[] = {4, 1, 3, 2}, one[] = {7};
    expect(t, median_of(four, 4) == 2.5 && median_of(one, 1) == 7 && isnan(median_of(one, 0)), "steps/median", "%g",
           four[1]);
    for (int i = 0; i < 3; i++) profile_step_free(&steps[i]);
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
            int k = s && i % 2          ? i - 1
                    : s && i + 1 < ROWS ? i + 1
                                        : i;  // swap neighbours, which are of different places
            ProfileRow* row = &steps[s].rows[i];
            *row = profile_row(NULL);
            row->op = ops[k % 3], row->layer = k % 7, row->start = i, row->seconds = k + s;
        }
    }
    profile_compare_steps(&steps[0], steps, 2);
    for (int i = 0; i < ROWS; i++)
        wrong += steps[0].rows[i].min != i || steps[0].rows[i].median != i + 0.5 || steps[0].rows[i].max != i + 1;
    expect(t, wrong == 0, "steps/many rows", "%zu have a wrong match", wrong);
    wrong = 0;
    for (size_t i = 0; i < ROWS;
         i++) {  // pairs with a roofline time of 9: 5 to the longer row, 3 to its helper, 1 left
        ProfileRow* row = &steps[0].rows[i];
        row->scope = (i / 2 + 17) % (ROWS / 2), row->is_helper = i % 2 == 0;
        row->seconds = row->is_helper ? 3 : 5;
        row->flops = 9e12, row->bytes = 0;
    }
    profile_set_rooflines(&steps[0], &PEAKS);
    for (size_t i = 0; i < ROWS; i++) wrong += !near_to(steps[0].rows[i].roofline, i % 2 ? 6 : 3);
    expect(t, wrong == 0, "steps/roofline times of many rows", "%zu are wrong", wrong);
    expect(t, now_seconds() - began < 10, "steps/many rows, in seconds", "%g s", now_seconds() - began);
    for (int s = 0; s < 2; s++) profile_step_free(&steps[s]);
}

// ---------------------------------------------------------------------------------------------------------
// Tables

// The fields of a CSV text (RFC 4180), each followed by a byte 1, each record by a byte 2 (caller frees); NULL if it is
// malformed.
static char* csv_read(const char* c) {
    Text out = {NULL, 0, 0};
    int good = 1;
    while (good && *c) {
        if (*c == '"') {
            for (c++; *c && (*c != '"' || c[1] == '"'); c++) {
                if (*c == '"') c++;
                text_append(&out, c, 1);
            }
            good = *c == '"';
            c += good;
        } else {
            size_t n = strcspn(c, ",\"\r\n");
            text_append(&out, c, n);
            c += n;
        }
        text_append(&out, "\1", 1);
        if (*c == ',') c++;
        else if (c[0] == '\r' && c[1] == '\n') c += 2, text_append(&out, "\2", 1);
        else good = 0;
    }
    if (!good) free(out.text);
    return good ? out.text : NULL;
}

// The expected result of csv_read().
static char* csv_of(const Table* t) {
    Text out = {NULL, 0, 0};
    char number[48];
    for (size_t c = 0; c < t->column_count; c++) text_printf(&out, "%s\1", t->columns[c].name);
    for (size_t r = 0; r < table_rows(t); r++) {
        text_append(&out, "\2", 1);
        for (size_t c = 0; c < t->column_count; c++) text_printf(&out, "%s\1", table_cell(t, r, c, number));
    }
    text_append(&out, "\2", 1);
    return out.text;
}

static void expect_csv(Tests* t, const char* name, const char* csv, const Table* table) {
    char *got = csv_read(csv), *want = csv_of(table);
    expect(t, got && strcmp(got, want) == 0, name, "%s", csv);
    free(got), free(want);
}

// Whether the node holds this table: its strings and all its cells.
static int json_is_table(const JsonNode* node, const Table* t) {
    char number[48];
    if (!node || strcmp(json_get_string(node, "id", "table"), t->id) != 0 ||
        strcmp(json_get_string(node, "title", "table"), t->title) != 0 ||
        strcmp(json_get_string(node, "note", "table"), t->note ? t->note : "") != 0)
        return 0;
    const JsonNode* columns = json_need(node, "columns", JSON_ARRAY, "table");
    const JsonNode* rows = json_need(node, "rows", JSON_ARRAY, "table");
    const JsonNode* column = columns->first;
    if (columns->count != t->column_count || rows->count != table_rows(t)) return 0;
    for (size_t c = 0; c < t->column_count; c++, column = column->next) {
        int is_number = !table_is_text(t, c);
        if (column->count != 2 || strcmp(column->first->string, t->columns[c].name) != 0 ||
            strcmp(column->first->next->string, is_number ? "number" : "text") != 0)
            return 0;
    }
    size_t r = 0;
    for (const JsonNode* row = rows->first; row; row = row->next, r++) {
        const JsonNode* cell = row->first;
        if (row->count != t->column_count) return 0;
        for (size_t c = 0; c < t->column_count; c++, cell = cell->next) {
            const char* want = table_cell(t, r, c, number);
            JsonType type = !*want ? JSON_NULL : !table_is_text(t, c) ? JSON_NUMBER : JSON_STRING;
            if (cell->type != type || (type != JSON_NULL && strcmp(cell->string, want) != 0)) return 0;
        }
    }
    return 1;
}

static void expect_json_table(Tests* t, const char* name, const Table* table) {
    Text text = {NULL, 0, 0};
    Json json;
    char error[JSON_ERROR_SIZE];
    table_put_json(&text, table);
    int parsed = json_parse(&json, text.text, text.length, error) == 0;
    expect(t, parsed && json_is_table(json.root, table), name, "%s: %s", error, text.text);
    if (parsed) json_free(&json);
    free(text.text);
}

static void test_table(Tests* t) {
    static const struct {
        const char *op, *name, *shapes;
        double ms, n;
    } rows[] = {{"matmul", "f<a, b>(\"c\")", "N=1 C=2", 1234.56, -7},
                {NULL, "line\r\nbreak", "", NAN, INFINITY},
                {"a_b|c", NULL, "`x` \\ *<y>", 0, 123456}};
    Table table;
    Text text = {NULL, 0, 0}, csv = {NULL, 0, 0};
    table_open(&table, "id", "A \"title\"");
    table.note = xprintf("A note\nof two lines.");
    expect_json_table(t, "table/JSON of no rows", &table);
    expect(t, table_rows(&table) == 0, "table/no rows", "%zu", table_rows(&table));
    for (size_t i = 0; i < COUNT_OF(rows); i++) {
        table_text(&table, "op", rows[i].op);
        table_number(&table, "milliseconds", 1, rows[i].ms);
        table_long_text(&table, "name", rows[i].name);
        table_number(&table, "n", 0, rows[i].n);
        table_text(&table, "shapes", rows[i].shapes);
    }
    expect(t, table_rows(&table) == 3, "table/rows", "%zu", table_rows(&table));
    table_put_text(&text, &table);
    expect_text(t, "table/text", text.text,
                "op      milliseconds       n  shapes\n"
                "matmul        1234.6      -7  N=1 C=2\n"
                "-                  -       -  -\n"
                "a_b|c            0.0  123456  `x` \\ *<y>\n");
    table_put_csv(&csv, &table);
    expect_csv(t, "table/CSV read back", csv.text, &table);
    expect(t, strstr(csv.text, "n,shapes\r\nmatmul,1234.6,\"f<a, b>(\"\"c\"\")\",-7,N=1 C=2\r\n,,") != NULL,
           "table/CSV as written", "%s", csv.text);
    expect_json_table(t, "table/JSON read back", &table);
    free(csv.text);
    table_free(&table);
}

static const TableCell* table_at(const Table* t, size_t row, const char* column) {
    if (row >= table_rows(t)) die(FAILED, "table %s has only %zu rows", t->id, table_rows(t));
    for (size_t c = 0; c < t->column_count; c++)
        if (strcmp(t->columns[c].name, column) == 0) return &t->cells[row * t->column_count + c];
    die(FAILED, "table %s has no column %s", t->id, column);
}

// The first row whose cell in `column` is this text; -1: none.
static int table_find(const Table* t, const char* column, const char* text) {
    for (size_t r = 0; r < table_rows(t); r++) {
        const char* cell = table_at(t, r, column)->text;
        if (cell && strcmp(cell, text) == 0) return (int)r;
    }
    return -1;
}

static double table_sum(const Table* t, const char* column) {
    double sum = 0;
    for (size_t r = 0; r < table_rows(t); r++)
        if (!isnan(table_at(t, r, column)->number)) sum += table_at(t, r, column)->number;
    return sum;
}

// ---------------------------------------------------------------------------------------------------------
// A report

#define TITLE "./program -o 'a b</script><!--<script>' \"\xC3\xA9\""

static void report_open(ProfileReport* r, ProfileStep steps[2]) {
    memset(r, 0, sizeof *r);
    for (int i = 0; i < 2; i++) step_open(&steps[i], NULL, 0, 100 * i);
    steps[0].seconds = 42e-6, steps[0].before = 0.2e-6, steps[0].after = 0.3e-6;
    profile_compare_steps(&steps[0], steps, 2);
    r->title = xprintf("%s", TITLE);
    r->step = &steps[0], r->peaks = PEAKS;
    r->accounting = profile_account(r->step);
    r->times.plain = (double)NAN, r->times.profiled = steps[0].seconds;
    report_fact(r, "GPU", xprintf("one | <b>\n"));
    report_fact(r, "step", xprintf("1 of 2"));
    double span = r->accounting.span;
    profile_table_accounting(report_table(r), r->step, &r->accounting, r->times);
    profile_table_kinds(report_table(r), r->step, span);
    profile_table_layers(report_table(r), r->step, span);
    profile_table_ops(report_table(r), r->step, span);
    profile_table_kernels(report_table(r), r->step);
    profile_table_gaps(report_table(r), r->step);
}

static void report_end(ProfileReport* r, ProfileStep steps[2]) {
    report_free(r);
    for (int i = 0; i < 2; i++) profile_step_free(&steps[i]);
}

// Every grouping counts each row once.
static void test_sums(Tests* t, const ProfileReport* r) {
    static const char* const ids[] = {"kinds", "layers", "ops"};
    for (size_t i = 0; i < COUNT_OF(ids); i++) {
        const Table* table = report_find(r, ids[i]);
        char* name = xprintf("sums/%s", ids[i]);
        double ms = table_sum(table, "ms"), lost = table_sum(table, "lost_ms");
        double rows = table_sum(table, strcmp(ids[i], "ops") ? "rows" : "kernels");
        expect(t, fabs(ms - 43.3e-3) < 1e-9 && fabs(lost - 5.6e-3) < 1e-9 && rows == 12, name, "%g, lost %g, %g", ms,
               lost, rows);
        free(name);
    }
    const Table* layers = report_find(r, "layers");
    double by_direction = table_sum(layers, "forward_ms") + table_sum(layers, "backward_ms") +
                          table_sum(layers, "optimizer_ms") + table_sum(layers, "communication_ms");
    expect(t,
           fabs(by_direction - 43.3e-3) < 1e-9 && isnan(table_at(layers, 0, "layer")->number) &&
               table_at(layers, 1, "layer")->number == 0 && table_at(layers, 2, "layer")->number == 1,
           "sums/layers in order, by direction", "%g", by_direction);
    const Table* gaps = report_find(r, "gaps");
    expect(t, fabs(table_sum(gaps, "us") - 9.2) < 1e-9, "sums/gaps", "%g", table_sum(gaps, "us"));
}

static void test_groups(Tests* t, const ProfileReport* r) {
    static const struct {
        const char* kind;
        double rows, ns, lost;
    } kinds[] = {{"matmul", 4, 18500, 1600},
                 {"communication", 1, 11800, NAN},
                 {"memory-bound", 4, 8500, 3000},
                 {"host copy", 2, 2500, NAN},
                 {"launch-bound", 1, 2000, 1000}};
    static const char* const causes[] = {"another stream", "between kernels", "host", "another stream"};
    const Table *table = report_find(r, "kinds"), *ops = report_find(r, "ops"), *gaps = report_find(r, "gaps");
    for (size_t i = 0; i < COUNT_OF(kinds); i++) {
        double lost = table_at(table, i, "lost_ms")->number, rows = table_at(table, i, "rows")->number;
        const char* kind = table_at(table, i, "kind")->text;
        char* name = xprintf("groups/%s", kinds[i].kind);
        expect(t,
               strcmp(kind, kinds[i].kind) == 0 && rows == kinds[i].rows &&
                   fabs(1e6 * table_at(table, i, "ms")->number - kinds[i].ns) < 1e-6 &&
                   (isnan(lost) ? isnan(kinds[i].lost) : fabs(1e6 * lost - kinds[i].lost) < 1e-6),
               name, "%s: %g rows", kind, rows);
        free(name);
    }
    int weight = table_find(ops, "op", "matmul_backward_weight"), none = -1;
    for (size_t i = 0; i < table_rows(ops); i++)
        if (!table_at(ops, i, "op")->text) none = (int)i;
    CHECK(weight >= 0 && none >= 0);
    expect(t,
           table_at(ops, (size_t)weight, "calls")->number == 1 &&
               table_at(ops, (size_t)weight, "kernels")->number == 2 &&
               fabs(table_at(ops, (size_t)weight, "gflop")->number - 0.009) < 1e-9 &&
               fabs(table_at(ops, (size_t)weight, "roofline_percent")->number - 100) < 1e-9 &&
               fabs(table_at(ops, (size_t)weight, "tflop_s")->number - 0.75) < 1e-9,
           "groups/an op with a helper", "%g %% of the roofline",
           table_at(ops, (size_t)weight, "roofline_percent")->number);
    expect(t, table_at(ops, (size_t)none, "kernels")->number == 2 && !table_at(ops, (size_t)none, "bound")->text,
           "groups/rows without a scope", "%g", table_at(ops, (size_t)none, "kernels")->number);
    for (size_t i = 0; i < COUNT_OF(causes); i++) {
        const char* cause = table_at(gaps, i, "cause")->text;
        char* name = xprintf("groups/gap %zu: %s", i, causes[i]);
        expect(t, strcmp(cause, causes[i]) == 0, name, "%s", cause);
        free(name);
    }
    const char* above = "Above 100 %: operands were still in a cache";
    expect(t, strstr(ops->note, above) && strstr(report_find(r, "kernels")->note, above), "groups/above the roofline",
           "%s", ops->note);
    const Table* accounting = report_find(r, "accounting");
    expect(t,
           table_rows(accounting) == 9 && strstr(accounting->note, "2 rows have no scope; 3 launches") &&
               table_find(accounting, "what", "step without profiling (median)") < 0,
           "groups/accounting", "%zu lines; %s", table_rows(accounting), accounting->note);
}

static void test_same(Tests* t) {
    ProfileRow a = profile_row(NULL), b = a;
    a.op = b.op = "op", a.layer = 1, b.layer = 2;
    snprintf(a.shapes, sizeof a.shapes, "N=1"), snprintf(b.shapes, sizeof b.shapes, "N=1");
    int same = profile_is_same(&a, &b, BY_OP) && !profile_is_same(&a, &b, BY_LAYER);
    snprintf(b.shapes, sizeof b.shapes, "N=2");
    same &= !profile_is_same(&a, &b, BY_OP);
    snprintf(b.shapes, sizeof b.shapes, "N=1");
    b.direction = BACKWARD;
    same &= !profile_is_same(&a, &b, BY_OP);
    expect(t, same, "groups/ops are equal by direction, name and shapes", "not so");
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

// What the report says under this name; "" where it says nothing.
static const char* fact_of(const ProfileReport* r, const char* name) {
    for (int i = 0; i < r->fact_count; i++)
        if (strcmp(r->facts[i].name, name) == 0) return r->facts[i].text;
    return "";
}

// Three steps of 42 us each, of which the last is in the middle, after plain ones of 44 us. It ends with 1.6 us in
// which parameters are shared, 1.1 of them alone.
static void filled_open(Filled* f) {
    memset(f, 0, sizeof *f);
    step_open(&f->steps[0], "gelu_forward_kernel", 0, 0);
    step_open(&f->steps[1], NULL, 400, 300);
    step_open(&f->steps[2], NULL, -1000, 100);
    for (int i = 0; i < 3; i++) f->steps[i].seconds = 42e-6;
    ProfileRow* last = &f->steps[2].rows[f->steps[2].count - 1];
    last->direction = COMMUNICATION, last->op = "share_parameters";
    f->plain[0] = 44e-6, f->plain[1] = 60e-6, f->plain[2] = 43e-6;
    Profiler* p = &f->profiler;
    p->warmup = 5, p->count = p->taken = p->plain_count = 3, p->first = 100, p->is_tracing = 1;
    p->steps = f->steps, p->plain = f->plain, p->peaks = PEAKS;
    f->group.size = 1;
    ProfiledRun run = {"", "train", 2.1e6, &f->group, 1};
    f->run = run;
}

static const char* filled_fact(Filled* f, const char* name) {
    report_free(&f->report);
    profiler_fill_report(&f->report, &f->profiler, &f->run);
    return fact_of(&f->report, name);
}

static void filled_close(Filled* f) {
    report_free(&f->report);
    for (int i = 0; i < 3; i++) profile_step_free(&f->steps[i]);
}

static void expect_fact(Tests* t, const char* title, Filled* f, const char* name, const char* want) {
    const char* got = filled_fact(f, name);
    expect(t, strcmp(got, want) == 0, title, "%s '%s', not '%s'", name, got, want);
}

static void test_words(Tests* t) {
    static const char* const words[][2] = {{"-o", "-o"},           {"", "''"},
                                           {"a b\\c", "'a b\\c'"}, {"it's", "'it'\\''s'"},
                                           {"a\\b\n", "'a\\b?'"},  {"\xC3\xA9", "'\xC3\xA9'"}};
    for (size_t i = 0; i < COUNT_OF(words); i++) {
        Text text = {NULL, 0, 0};
        char* name = xprintf("words/as one types %s", words[i][1]);
        profiler_put_word(&text, words[i][0]);
        expect_text(t, name, text.text, words[i][1]);
        free(name);
    }
}

static void test_facts(Tests* t) {
    Filled f;
    filled_open(&f);
    expect_fact(t, "facts/the step, from 1", &f, "step",
                "111, the median of 109 to 111 by time, after 5 warm-up and 3 plain steps");
    expect_fact(t, "facts/what profiling costs, against the median", &f, "cost",
                "0.042 ms profiled, 0.044 ms plain: -4.5 %");
    expect_fact(t, "facts/work", &f, "work",
                "2.1e-06 TFLOP over all ranks by the model's formula, 0.04773 TFLOP/s in a plain step");
    expect_fact(t, "facts/an overlapped broadcast is not in the overlap", &f, "overlap",
                "84.7 % of 0.012 ms of communication overlap with other work");
    expect_fact(
        t, "facts/broadcast", &f, "broadcast",
        "0.002 ms of share_parameters, not in the overlap: a run overlaps it with the next step's forward pass, "
        "a profiled step has it at its end");
    f.profiler.count = 7;
    expect_fact(t, "facts/the step of a run that was stopped", &f, "step",
                "115, the median of 113 to 115 by time, after 5 warm-up and 7 plain steps; the run was stopped before "
                "the rest");
    f.profiler.count = 3;
    f.run.broadcast_overlaps = 0;
    expect_fact(t, "facts/an exposed broadcast is in the overlap", &f, "overlap",
                "78.4 % of 0.013 ms of communication overlap with other work");
    expect_fact(t, "facts/no overlapped broadcast", &f, "broadcast", "");

    expect_fact(t, "facts/plain steps that are hardly longer", &f, "host", "");
    f.plain[0] = f.plain[1] = f.plain[2] = 50e-6;
    expect_fact(
        t, "facts/plain steps that wait for the host", &f, "host",
        "plain steps take 0.008 ms longer than this one, for which the host queued work ahead: they wait for the host");
    for (size_t i = 0; i < f.steps[2].count; i++) f.steps[2].rows[i].issued = (double)NAN;
    expect_fact(t, "facts/no gap waits for the host", &f, "host", "");

    f.profiler.plain_count = 0;
    expect_fact(t, "facts/no plain step, no cost", &f, "cost", "");
    expect_fact(t, "facts/no plain step, none mentioned", &f, "work",
                "2.1e-06 TFLOP over all ranks by the model's formula, 0.05 TFLOP/s in this step");
    filled_close(&f);

    char* costs[] = {profiler_cost(0.96, 1, 1, 0), profiler_cost(0.99, 1, 1, 0), profiler_cost(0.96, 1, 0, 0),
                     profiler_cost(0.8, 1, 1, 1)};
    const char* power = strstr(costs[0], "-4.0 %; plain steps run at the GPU's power limit");
    expect(t, power && !strchr(costs[1], ';') && !strchr(costs[2], ';') && !strchr(costs[3], ';'),
           "facts/why it costs less than nothing", "%s", costs[0]);
    for (size_t i = 0; i < COUNT_OF(costs); i++) free(costs[i]);
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
    expect_text(t, "stages/read at once: from the last plain step on", stages.text, "0 0 1 1! 2! 2! 0 0 ");
    expect(t, p.plain_count == 2 && p.plain[0] == 11 && p.plain[1] == 12, "stages/times of plain steps", "%d",
           p.plain_count);
    p.measures_ops = 1;
    expect_that(t,
                profiler_stage(&p, 15) == STAGE_CAPTURED && profiler_stage(&p, 16) == STAGE_NONE &&
                    profiler_reads_at_once(&p, 15) && !profiler_reads_at_once(&p, 16),
                "stages/one more step is captured");
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
    expect(t, e.count == 5 && e.ops[0].calls == 2, "energies/calls of an op", "%zu ops", e.count);
    expect_text(t, "energies/the sum", op_energies_sum(&e),
                "7.64 J, each op by itself; 7.8 J in 15.000 ms at 520 W and 1555 MHz, all of them in order: -2.1 %");
    profile_table_energy(&table, &e);
    Text text = {NULL, 0, 0};
    for (size_t row = 0; row < table_rows(&table); row++)
        text_printf(&text, "%s %g J %.1f %% %g ms; ", table_at(&table, row, "op")->text,
                    table_at(&table, row, "joules")->number, table_at(&table, row, "percent")->number,
                    table_at(&table, row, "ms")->number);
    expect_text(t, "energies/table, most joules first", text.text,
                "adamw_update 2.5 J 32.7 % 5 ms; matmul_forward 2.4 J 31.4 % 4 ms; matmul_forward 1.4 J 18.3 % 2 ms; "
                "matmul_forward 1.3 J 17.0 % 2 ms; gelu 0.04 J 0.5 % 0.1 ms; ");
    table_free(&table);
    free(e.ops);
}

static void test_ranks(Tests* t) {
    Filled f;
    filled_open(&f);
    filled_fact(&f, "step");
    RankStep all[3];
    all[0] = all[1] = all[2] = profiler_rank_step(&f.steps[2], &f.report.accounting, &f.run);
    expect(t,
           near_to(all[0].own, 38700e-9) && near_to(all[0].span, 41600e-9) && near_to(all[0].host, 6000e-9) &&
               near_to(all[0].communication, 11800e-9) && near_to(all[0].overlapped, 10000e-9) &&
               near_to(all[0].broadcast, 1600e-9),
           "ranks/a rank in numbers", "own %g, %g of %g overlapped, broadcast %g", all[0].own, all[0].overlapped,
           all[0].communication, all[0].broadcast);
    f.steps[2].before = 500e-9;
    all[0] = profiler_rank_step(&f.steps[2], &f.report.accounting, &f.run);
    expect(t, near_to(all[0].own, 39200e-9), "ranks/the time before the first row counts as its own", "%g", all[0].own);
    all[0].own = 35e-6, all[1].own = 42e-6, all[2].own = 30e-6;
    profiler_table_ranks(&f.report, all, 3);
    const Table* ranks = report_find(&f.report, "ranks");
    expect(t,
           table_rows(ranks) == 3 && fabs(table_at(ranks, 1, "own_ms")->number - 0.042) < 1e-9 &&
               fabs(table_at(ranks, 0, "host_wait_ms")->number - 0.006) < 1e-9 &&
               fabs(table_at(ranks, 0, "overlapped_percent")->number - 100 * 10 / 11.8) < 1e-9,
           "ranks/side by side", "%g", table_at(ranks, 1, "own_ms")->number);
    expect(t,
           strstr(ranks->note, "The slowest is rank 1, 40.0 % slower than rank 2.") &&
               strstr(ranks->note, "communication_ms does not include share_parameters. "),
           "ranks/the note", "%s", ranks->note);
    const char* slowest = fact_of(&f.report, "slowest");
    expect(t, strcmp(slowest, "rank 1 with 0.042 ms of its own work; the fastest is rank 2 with 0.030 ms") == 0,
           "ranks/the slowest", "%s", slowest);
    filled_close(&f);
}

// Ops on the CPU: communication that ends together, before which one rank has shorter ops and longer gaps.
static void test_rank_of_ops(Tests* t) {
    ProcessGroup group;
    memset(&group, 0, sizeof group);
    ProfiledRun run = {"", "train", 0, &group, 0};
    RankStep rank[2];
    for (int i = 0; i < 2; i++) {
        ProfileStep step;
        memset(&step, 0, sizeof step);
        step.rows = (ProfileRow*)xcalloc(3, sizeof *step.rows), step.count = 3, step.before = 1e-6;
        for (int k = 0; k < 3; k++) step.rows[k] = profile_row(NULL);
        step.rows[0].seconds = i ? 2e-6 : 4e-6;
        step.rows[1].start = i ? 6e-6 : 4e-6, step.rows[1].seconds = 1e-6;
        step.rows[2].start = i ? 7e-6 : 5e-6, step.rows[2].seconds = i ? 1e-6 : 3e-6;
        step.rows[2].direction = COMMUNICATION;
        Accounting a = profile_account(&step);
        rank[i] = profiler_rank_step(&step, &a, &run);
        profile_step_free(&step);
    }
    expect(t, near_to(rank[0].own, 6e-6) && near_to(rank[1].own, 8e-6), "ranks/gaps between ops are a rank's own",
           "%g and %g", rank[0].own, rank[1].own);
}

// ---------------------------------------------------------------------------------------------------------
// Files

static char scratch[] = "/tmp/llmc_profile_XXXXXX";

// A file of the report (caller frees).
static char* file_of(const char* directory, const char* name) {
    char* path = xprintf("%s/%s", directory, name);
    char* text = read_file(path, (size_t)1 << 24, NULL, FAILED);
    free(path);
    return text;
}

static Json json_of(Tests* t, const char* name, const char* text) {
    Json json;
    char error[JSON_ERROR_SIZE];
    int bad = json_parse(&json, text, strlen(text), error);
    expect(t, !bad, name, "%s", error);
    if (bad) die(FAILED, "%s: %s", name, error);
    return json;
}

static void test_summary(Tests* t, const char* text) {
    static const char* const lines[] = {"kind,name,value",
                                        "fact,GPU,\"one | <b>\n\"",
                                        "number,span_ms,0.0415",
                                        "number,kernels_ms,0.0433",
                                        "number,overlap_ms,0.011",
                                        "number,gap_host_ms,0.006",
                                        "number,gap_stream_ms,0.0022",
                                        "number,gap_kernels_ms,0.001",
                                        "number,before_ms,0.0002",
                                        "number,after_ms,0.0003",
                                        "number,profiled_ms,0.042",
                                        "number,plain_ms,",
                                        "number,readbacks,2",
                                        "number,unattributed,2",
                                        "number,dropped,3"};
    char* read = csv_read(text);
    expect(t, read && strstr(read, "fact\1command\1" TITLE "\1"), "summary/the command", "%s", text);
    for (size_t i = 0; i < COUNT_OF(lines); i++) {
        const char* number = strrchr(lines[i], ',') + 1;
        int length = (int)(number - lines[i]);
        char *name = xprintf("summary/%.*s", length - 1, lines[i]), *begin = xprintf("%.*s", length, lines[i]);
        const char* at = strstr(text, begin);
        double value = at ? strtod(at + length, NULL) : 0;
        int is_number = *number >= '0' && *number <= '9';
        expect(t, at && (is_number ? near_to(value, strtod(number, NULL)) : text_begins(at, lines[i])), name, "%s",
               text);
        free(name), free(begin);
    }
    free(read);
}

static void test_page(Tests* t, const char* page, const ProfileReport* r) {
    char* empty = read_file("llmc/profile/page.html", (size_t)1 << 24, NULL, FAILED);
    const char* place = strstr(empty, PROFILE_PLACE);
    expect(t, place && !strstr(place + 1, PROFILE_PLACE), "page/one place for the data", "%s",
           place ? "several" : "none");
    CHECK(place);
    size_t before = (size_t)(place - empty), after = strlen(place + strlen(PROFILE_PLACE)), n = strlen(page);
    CHECK(n > before + after);
    expect(t, memcmp(page, empty, before) == 0 && strcmp(page + n - after, place + strlen(PROFILE_PLACE)) == 0,
           "page/the rest is the page without data", "%zu bytes", n);
    char* data = xprintf("%.*s", (int)(n - before - after), page + before);
    expect(t, !strstr(data, "</") && !strstr(data, "<!--"), "page/nothing ends the script", "%s",
           strstr(data, "</") ? strstr(data, "</") : strstr(data, "<!--"));
    Json json = json_of(t, "page/the data is JSON", data);
    const JsonNode *tables = json_need(json.root, "tables", JSON_ARRAY, "page"),
                   *facts = json_need(json.root, "facts", JSON_ARRAY, "page");
    expect(t,
           strcmp(json_get_string(json.root, "title", "page"), TITLE) == 0 && facts->count == 2 &&
               strcmp(facts->first->first->next->string, "one | <b>\n") == 0,
           "page/title and facts", "%zu facts", facts->count);
    int same = tables->count == (size_t)r->table_count, i = 0;
    for (const JsonNode* table = tables->first; same && table; table = table->next)
        same = json_is_table(table, &r->tables[i++]);
    expect(t, same, "page/every table, cell by cell", "table %d", i);
    json_free(&json);
    free(empty), free(data);
}

static void test_texts(Tests* t, const char* text, const ProfileReport* r) {
    size_t missing = 0;
    for (int i = 0; i < r->table_count; i++) missing += !strstr(text, r->tables[i].title);
    expect(t, missing == 0 && strncmp(text, TITLE "\n", strlen(TITLE) + 1) == 0, "texts/complete",
           "%zu parts are missing", missing);
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

static void test_refused_files(Tests* t, const ProfileReport* r) {
    char *blocker = xprintf("%s/said", scratch), *below = xprintf("%s/said/profile", scratch);
    char *full = xprintf("%s/full", scratch), *link = xprintf("%s/full/profile.html", scratch);
    char *taken = xprintf("%s/full/profile.txt", scratch), *csv = xprintf("%s/full/kernels.csv", scratch);
    CHECK(write_file(blocker, "", 0) == 0 && make_directories(taken) == 0 && symlink("/dev/full", link) == 0);
    char *want = xprintf("warning: %s: cannot be created: Not a directory; the profile is not written\n", below),
         *got = said_by_write(r, below);
    expect_text(t, "files/a directory that cannot be created", got, want);
    free(want);
    want = xprintf("warning: %s: cannot be written: Is a directory\n"
                   "warning: %s: cannot be written: No space left on device\n",
                   taken, link);
    got = said_by_write(r, full);
    expect_text(t, "files/two that cannot be written", got, want);
    expect(t, file_exists(csv), "files/the others are there", "%s is not", csv);
    free(want), free(blocker), free(below), free(full), free(link), free(taken), free(csv);
}

static void test_files(Tests* t, const ProfileReport* r) {
    static const char* const names[] = {"profile.txt", "profile.html", "kernels.csv", "summary.csv"};
    char *directory = xprintf("%s/out/profile", scratch), *files[COUNT_OF(names)];
    for (int again = 0; again < 2; again++) {
        char* said = said_by_write(r, directory);
        expect_text(t, again ? "files/written again" : "files/written", said, "");
    }
    for (size_t i = 0; i < COUNT_OF(names); i++) files[i] = file_of(directory, names[i]);
    test_texts(t, files[0], r);
    test_page(t, files[1], r);
    expect_csv(t, "files/kernels.csv read back", files[2], report_find(r, "kernels"));
    test_summary(t, files[3]);
    expect(t, strstr(files[2], ",\"void evil<a, \"\"b\"\">(</script>\r\n)\"\r\n") != NULL,
           "files/full names in the CSV", "%s", files[2]);
    for (size_t i = 0; i < COUNT_OF(names); i++) free(files[i]);
    free(directory);
    test_refused_files(t, r);
}

// Create these files below `out`, clear it for a run of `ranks`, and list what is left; "!": the directory is gone too
// (caller frees).
static char* left_in(const char* out, const char* const* names, size_t count, int ranks) {
    Text left = {NULL, 0, 0};
    for (size_t i = 0; i < count; i++) {
        char *path = xprintf("%s/profile/%s", out, names[i]), *slash = strrchr(path, '/');
        *slash = '\0';
        CHECK(make_directories(path) == 0);
        *slash = '/';
        CHECK(file_exists(path) || write_file(path, "x", 1) == 0);
        free(path);
    }
    for (int again = 0; again < 2; again++) report_clear(NULL, out, ranks);
    for (size_t i = 0; i < count; i++) {
        char *path = xprintf("%s/profile/%s", out, names[i]), *slash = strrchr(path, '/');
        if (file_exists(path)) text_printf(&left, "%s ", names[i]);
        *slash = '\0';
        if (!file_exists(path)) text_printf(&left, "!%s ", names[i]);
        free(path);
    }
    text_append(&left, "", 0);
    return left.text;
}

static void test_clear(Tests* t) {
    static const char* const names[] = {
        "profile.txt",        "kernels.csv",        "notes.txt",   "rank_0/profile.txt",  "rank_1/profile.html",
        "rank_2/kernels.csv", "rank_3/summary.csv", "rank_3/mine", "rank_04/profile.txt", "rank_x/profile.txt"};
    char *out = xprintf("%s/cleared", scratch), *link = xprintf("%s/profile/rank_7", out);
    char* elsewhere = xprintf("%s/profile/rank_x", out);
    expect_text(t, "clear/one rank after four", left_in(out, names, COUNT_OF(names), 1),
                "profile.txt kernels.csv notes.txt !rank_0/profile.txt !rank_1/profile.html !rank_2/kernels.csv "
                "rank_3/mine rank_04/profile.txt rank_x/profile.txt ");
    CHECK(symlink(elsewhere, link) == 0);
    expect_text(t, "clear/two ranks after one and four; the target of a link stays",
                left_in(out, names, COUNT_OF(names), 2),
                "notes.txt rank_0/profile.txt rank_1/profile.html !rank_2/kernels.csv rank_3/mine rank_04/profile.txt "
                "rank_x/profile.txt ");
    report_clear(NULL, link, 1);  // no such directory
    free(out), free(link), free(elsewhere);
}

// If the run has lost the lock of its directory, nothing is written there and nothing removed.
static void test_lost(Tests* t, const ProfileReport* r) {
    char *out = xprintf("%s/lost", scratch), *lock_file = xprintf("%s/.lock", out);
    char *directory = report_directory(out, 0, 1), *file = xprintf("%s/rank_3/profile.txt", directory);
    RunLock lock = {NULL, 0, 0};
    CHECK(make_directories(out) == 0);
    run_lock_take(&lock, out, O_CREAT);
    CHECK(unlink(lock_file) == 0);
    report_write(r, &lock, directory);
    expect(t, !file_exists(directory), "lost/nothing is written", "%s is there", directory);
    char* slash = strrchr(file, '/');
    *slash = '\0';
    CHECK(make_directories(file) == 0);
    *slash = '/';
    CHECK(write_file(file, "x", 1) == 0);
    report_clear(&lock, out, 1);
    expect(t, file_exists(file), "lost/nothing is removed", "%s was", file);
    run_lock_close(&lock);
    free(out), free(lock_file), free(directory), free(file);
}

// The files of a step whose rows are ops, as on the CPU.
static void test_files_of_ops(Tests* t) {
    ScopeRecord records[2];
    ScopeLog log;
    ProfileStep step;
    ProfileReport r;
    memset(records, 0, sizeof records), memset(&r, 0, sizeof r);
    records[0].scope.op = "matmul_forward", records[1].scope.op = "adamw\"update";
    records[0].start = 5, records[0].seconds = 2e-6, records[1].start = 5 + 3e-6, records[1].seconds = 1e-6;
    records[1].scope.direction = OPTIMIZER, records[0].scope.layer = records[1].scope.layer = -1;
    scope_log_open(&log, NULL);
    log.records = records, log.count = 2;
    profile_from_log(&step, &log, 0);
    profile_set_rooflines(&step, &PEAKS);
    r.title = xprintf("ops"), r.step = &step, r.accounting = profile_account(&step);
    profile_table_kernels(report_table(&r), &step);
    char *directory = xprintf("%s/ops", scratch), *said = said_by_write(&r, directory);
    expect_text(t, "files/of ops", said, "");
    char* csv = file_of(directory, "kernels.csv");
    expect(t, near_to(r.accounting.gap[GAP_SWITCH], 1e-6) && near_to(r.accounting.kernels, 3e-6),
           "files/gaps between ops do not wait for the host", "%g", r.accounting.gap[GAP_SWITCH]);
    ProfileTimes times = {NAN, NAN};
    Table accounting, gaps;
    profile_table_accounting(&accounting, &step, &r.accounting, times), profile_table_gaps(&gaps, &step);
    expect(t,
           table_find(&accounting, "what", "+ gaps: between ops") == 2 && table_rows(&accounting) == 4 &&
               table_find(&gaps, "cause", "between ops") == 0,
           "files/gaps between ops", "%zu lines", table_rows(&accounting));
    table_free(&accounting), table_free(&gaps);
    expect_csv(t, "files/CSV of ops", csv, &r.tables[0]);
    free(directory), free(csv);
    report_free(&r);
    profile_step_free(&step);
}

static void remove_scratch(void) {
    char* command = xprintf("rm -rf '%s'", scratch);
    if (system(command) != 0) warn("%s: cannot be removed", scratch);
    free(command);
}

int main(void) {
    Tests t;
    tests_open(&t);
    ProfileReport r;
    ProfileStep steps[2];
    CHECK(mkdtemp(scratch));
    test_names(&t);
    test_tensor_cores(&t);
    test_join(&t);
    test_rows(&t);
    test_accounting(&t);
    test_random_accounting(&t);
    test_ops(&t);
    test_steps(&t);
    test_long_steps(&t);
    test_table(&t);
    report_open(&r, steps);
    test_sums(&t, &r);
    test_groups(&t, &r);
    test_same(&t);
    test_stages(&t);
    test_words(&t);
    test_facts(&t);
    test_op_energies(&t);
    test_ranks(&t);
    test_rank_of_ops(&t);
    test_files(&t, &r);
    test_clear(&t);
    test_lost(&t, &r);
    test_files_of_ops(&t);
    report_end(&r, steps);
    remove_scratch();
    return tests_close(&t);
}
