/* What a step spends its time on. A profiled run takes so many steps of warm-up, then as many plain steps as profiled ones,
 * which say what profiling costs, then the profiled ones; the report is of the one in the middle of these by its time, with
 * several ranks by the slowest one's, so that all report the same; with the extremes of all.
 *
 * In a run the host is ahead of the GPU. Profiled steps are apart from each other, so each begins with a kernel that does
 * nothing, behind which the host gets ahead; the step is what comes after it, up to the end of all that it launched.
 *
 * Rows are kernels where CUPTI traces them, else ops: on the GPU between two events, on the CPU by the host's clock.
 *
 * steps.h puts profiler_prepare_step(), profiler_begin_step() and profiler_end_step() around steps and tells the times of
 * plain ones. */
#ifndef LLMC_PROFILER_H
#define LLMC_PROFILER_H

#include <sys/resource.h>

#include "../base/rng.h"
#include "../device/host_view.h"
#include "../ops/matmul.h"
#include "comm.h"
#include "plan.h"
#include "profile_files.h"

#ifdef __CUDACC__
#define GPU_BUILD 1
// Whether products run in 16 bits or may be rounded to TF32.
#define PROFILER_HALF(ctx) (sizeof(floatX) == 2 || (ctx)->tf32)
// Dense peak FLOP/s of the matrix units in the type that is built, by the vendor's data sheets; 0 for a GPU that is not
// in the table.
static inline double profiler_known_peak(void) {
    static const struct {
        const char* name;
        double half, tf32;
    } known[] = {{"H100 PCIe", 756e12, 378e12},
                 {"H100", 989.4e12, 494.7e12},
                 {"H200", 989.4e12, 494.7e12},
                 {"A100", 312e12, 156e12}};
    struct cudaDeviceProp properties;
    cudaCheck(cudaGetDeviceProperties(&properties, 0));
    for (size_t i = 0; i < COUNT_OF(known); i++)
        if (strstr(properties.name, known[i].name)) return sizeof(floatX) == 2 ? known[i].half : known[i].tf32;
    return 0;
}
enum { PEAK_SIZE = 8192, PEAK_REPEATS = 60 };
#define COPY_BYTES ((size_t)1 << 30)
#else
#define GPU_BUILD 0
#define PROFILER_HALF(ctx) 0
static inline double profiler_known_peak(void) { return 0; }
enum { PEAK_SIZE = 768, PEAK_REPEATS = 6 };
#define COPY_BYTES ((size_t)1 << 27)
#endif

// FLOP/s of a square matmul, the best of a few, by the library's own choice: to time others would heat the GPU.
static inline double profiler_matmul_flops(Context* ctx) {
    const double limit = 0.1;  // seconds: enough, also where a build is slow
    size_t n = (size_t)PEAK_SIZE * PEAK_SIZE;
    int autotune = device_set_autotune(ctx, 0);
    double best = INFINITY, began = 0;
    floatX* a = (floatX*)device_alloc(ctx, 3 * n * sizeof(floatX), "measurement");
    HostView view = host_view_open(a, 2 * n, VIEW_FLOATX);
    Affine w = {a + n, NULL};
    for (size_t i = 0; i < 2 * n; i++) view.values[i] = (real)(rng_uniform((uint32_t)i * 2654435761u) - 0.5);
    host_view_write(ctx, &view);
    host_view_close(&view);
    for (int i = -1; i < PEAK_REPEATS && (i <= 0 || now_seconds() - began < limit); i++) {
        device_synchronize(ctx);
        double start = now_seconds();
        matmul_forward(a + 2 * n, a, w, PEAK_SIZE, PEAK_SIZE, PEAK_SIZE, SET, ctx);
        device_synchronize(ctx);
        if (i < 0) began = now_seconds();  // the first one loads its kernel
        else best = fmin(best, now_seconds() - start);
    }
    device_set_autotune(ctx, autotune);
    device_free(a, 3 * n * sizeof(floatX));
    return MATMUL_FLOPS(PEAK_SIZE, PEAK_SIZE, PEAK_SIZE) / best;
}

// The FLOP/s that a step's mfu is of: the hardware's peak where it is known.
static inline double profiler_peak_flops(Context* ctx) {
    return profiler_known_peak() > 0 ? profiler_known_peak() : profiler_matmul_flops(ctx);
}

// ---------------------------------------------------------------------------------------------------------
// Ceilings

// Copy `bytes`, where the ops run, with all that it has.
static inline void profiler_copy(char* to, const char* from, size_t bytes, Context* ctx) {
#ifdef __CUDACC__
    cudaCheck(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, ctx->stream));
#else
    const size_t piece = 1 << 20;
    (void)ctx;
#pragma omp parallel for schedule(static)
    for (size_t at = 0; at < bytes; at += piece) memcpy(to + at, from + at, min_size(piece, bytes - at));
#endif
}

// Bytes a second that a large copy reads and writes, the best of a few.
static inline double profiler_copy_bytes(Context* ctx) {
    size_t bytes = min_size(COPY_BYTES, device_memory_available() / 8);
    double best = INFINITY;
    char* a = (char*)device_alloc(ctx, 2 * bytes, "measurement");
    for (int i = 0; i < 5; i++) {
        device_synchronize(ctx);
        double start = now_seconds();
        profiler_copy(a + bytes, a, bytes, ctx);
        device_synchronize(ctx);
        if (i > 0) best = fmin(best, now_seconds() - start);  // the first one meets fresh pages
    }
    device_free(a, 2 * bytes);
    return 2 * (double)bytes / best;
}

// Seconds that a launch takes at least, work or none: one of many small fills on the GPU, a parallel region on the CPU.
static inline double profiler_launch_seconds(Context* ctx) {
    enum { LAUNCHES = 500 };
    double best = INFINITY;
    for (int i = 0; i < 5; i++) {
        device_synchronize(ctx);
        double start = now_seconds();
        for (int k = 0; k < LAUNCHES; k++) {
#ifdef __CUDACC__
            cudaCheck(cudaMemsetAsync(ctx->cublaslt_workspace, 0, 256, ctx->stream));
#else
            int threads = 0;
#pragma omp parallel reduction(+ : threads)
            threads += 1;
            CHECK(threads > 0);
#endif
        }
        device_synchronize(ctx);
        best = fmin(best, (now_seconds() - start) / LAUNCHES);
    }
    return best;
}

static inline Ceilings profiler_measure_ceilings(Context* ctx) {
    Ceilings c = {profiler_matmul_flops(ctx), profiler_copy_bytes(ctx), profiler_launch_seconds(ctx)};
    return c;
}

// From a file that a profile has written: {"flops": FLOP/s, "bytes": byte/s, "launch_us": microseconds}, also inside of
// "ceilings".
static inline Ceilings profiler_read_ceilings(const char* path) {
    Json json;
    json_load(&json, path, (size_t)16 << 20);
    const JsonNode* node = json_get(json.root, "ceilings");
    if (!node) node = json.root;
    Ceilings c = {json_get_double(node, "flops", path), json_get_double(node, "bytes", path),
                  1e-6 * json_get_double(node, "launch_us", path)};
    if (!(c.flops > 0 && c.bytes > 0 && c.launch > 0))
        die(USAGE, "%s: flops, bytes and launch_us must all be above 0", path);
    json_free(&json);
    return c;
}

// ---------------------------------------------------------------------------------------------------------
// Steps

#define PROFILER_LEAD 5e-3  // seconds in which the host gets ahead of a GPU before a profiled step

typedef struct {
    int warmup, count;  // steps before, and of each kind; count 0: nothing is profiled
    int64_t first;      // the run's first step, from 0
    Ceilings ceilings;
    const char* ceilings_from;
    ScopeLog log;
    KernelTrace trace;
    int is_tracing, taken, plain_count;
    ProfileStep* steps;  // [count], of which `taken` are there
    double* plain;       // [count] seconds, of which `plain_count`
    double began;        // the newest step, by the host's clock
} Profiler;

typedef enum { STAGE_NONE, STAGE_PLAIN, STAGE_PROFILED } ProfilerStage;

// Before the first step, number `first`. `ceilings`: "measure", or a file.
static inline void profiler_open(Profiler* p, int warmup, int count, const char* ceilings, int64_t first,
                                 Context* ctx) {
    memset(p, 0, sizeof *p);
    p->warmup = warmup, p->count = count, p->first = first;
    if (!count) return;
    p->ceilings_from = ceilings;
    p->ceilings = strcmp(ceilings, "measure") == 0 ? profiler_measure_ceilings(ctx) : profiler_read_ceilings(ceilings);
    p->steps = (ProfileStep*)xcalloc((size_t)count, sizeof *p->steps);
    p->plain = (double*)xcalloc((size_t)count, sizeof *p->plain);
}

static inline ProfilerStage profiler_stage(const Profiler* p, int64_t step) {
    int64_t i = step - p->first - p->warmup;
    if (i < 0 || i >= 2 * (int64_t)p->count) return STAGE_NONE;
    return i < p->count ? STAGE_PLAIN : STAGE_PROFILED;
}

// Whether this step's results have to be read before the next is launched: no step is in flight when a profiled one begins,
// and the plain ones are all finished when the report is made.
static inline int profiler_reads_at_once(const Profiler* p, int64_t step) {
    return profiler_stage(p, step) == STAGE_PROFILED || profiler_stage(p, step + 1) == STAGE_PROFILED;
}

// Step number `step`, from 0, took so long.
static inline void profiler_step_took(Profiler* p, int64_t step, double seconds) {
    if (profiler_stage(p, step) == STAGE_PLAIN && p->plain_count < p->count) p->plain[p->plain_count++] = seconds;
}

// Wait for everything that was launched, on the collectives' stream too.
static inline void profiler_wait(Context* ctx) {
#ifdef __CUDACC__
    (void)ctx;
    cudaCheck(cudaDeviceSynchronize());
#else
    device_synchronize(ctx);
#endif
}

// Returns 1 where this step is to be profiled, for which all is ready then, and the idle kernel is launched.
static inline int profiler_prepare_step(Profiler* p, int64_t step, Context* ctx) {
    if (profiler_stage(p, step) != STAGE_PROFILED) return 0;
    profiler_wait(ctx);
    if (p->taken == 0) p->is_tracing = kernel_trace_start(&p->trace, ctx) == 0;
    scope_log_open(&p->log, p->is_tracing ? &p->trace : NULL);
    if (p->is_tracing) {
        kernel_trace_collect(&p->trace);  // what ran between the steps, which is of no interest
        kernel_trace_clear(&p->trace);
        kernel_trace_lead((uint64_t)(1e9 * PROFILER_LEAD), ctx);
    }
    return 1;
}

// Before the first launch of a step that is prepared.
static inline void profiler_begin_step(Profiler* p, Context* ctx) {
    ctx->scope_log = &p->log;
    p->began = now_seconds();
}

// Returns 1 after the last one.
static inline int profiler_end_step(Profiler* p, int64_t step, Context* ctx) {
    if (profiler_stage(p, step) != STAGE_PROFILED) return 0;
    profiler_wait(ctx);
    double seconds = now_seconds() - p->began;
    uint64_t ended = p->is_tracing ? kernel_trace_now(&p->trace) : 0;
    ProfileStep* s = &p->steps[p->taken];
    ctx->scope_log = NULL;
    scope_log_resolve(&p->log);
    uint64_t began = p->is_tracing ? kernel_trace_take_lead(&p->trace) : 0;
    if (p->is_tracing && p->trace.count && began) {
        uint64_t first = p->trace.rows[0].start;
        profile_take(s, &p->log, PROFILER_HALF(ctx));
        s->before = 1e-9 * (double)((int64_t)first - (int64_t)began);
        s->after = 1e-9 * (double)((int64_t)ended - (int64_t)first) - profile_span(s);
        seconds = 1e-9 * (double)(ended - began);
    } else {
        if (p->log.count) p->began = p->log.records[0].start - p->began;
        profile_take(s, &p->log, PROFILER_HALF(ctx));
#ifndef __CUDACC__
        s->before = p->began;
        s->after = seconds - s->before - profile_span(s);
#endif
    }
    s->seconds = seconds;
    profile_set_roofs(s, &p->ceilings);
    scope_log_close(&p->log);
    if (++p->taken < p->count) return 0;
    if (p->is_tracing) {
        kernel_trace_stop(&p->trace);
        kernel_trace_free(&p->trace);
    }
    return 1;
}

static inline void profiler_close(Profiler* p) {
    for (int i = 0; i < p->taken; i++) profile_step_free(&p->steps[i]);
    free(p->steps), free(p->plain);
    memset(p, 0, sizeof *p);
}

// ---------------------------------------------------------------------------------------------------------
// The report

// What the report says of the run.
typedef struct {
    const char* out;  // the run's directory; "": no files
    const char* mode;
    const MemoryPlan* plan;
    double flops;  // of the model in a step
    Comm* comm;
    int shares_ahead;  // parameters go to the other ranks while the next step's forward pass runs
} ProfiledRun;

// The step in the middle by the slowest rank's span, of spans [ranks][count]: of an even number the earlier one.
static inline size_t profiler_middle(const double* spans, int ranks, size_t count) {
    double* slowest = (double*)xcalloc(count + 1, sizeof *slowest);
    size_t middle = 0;
    for (size_t i = 0; i < count * (size_t)ranks; i++) slowest[i % count] = fmax(slowest[i % count], spans[i]);
    for (size_t i = 0; i < count; i++) {
        size_t shorter = 0;
        for (size_t k = 0; k < count; k++) shorter += slowest[k] < slowest[i] || (slowest[k] == slowest[i] && k < i);
        if (shorter == (count - 1) / 2) middle = i;
    }
    free(slowest);
    return middle;
}

// The step that all ranks report. A collective call.
static inline size_t profiler_middle_step(const Profiler* p, const Comm* comm) {
    size_t count = (size_t)p->taken;
    double* mine = (double*)xcalloc(count + 1, sizeof *mine);
    double* all = (double*)xmalloc((size_t)comm->size * count * sizeof *all);
    for (size_t i = 0; i < count; i++) mine[i] = profile_span(&p->steps[i]);
    comm_gather(comm, all, mine, count * sizeof *mine);
    size_t middle = profiler_middle(all, comm->size, count);
    free(mine), free(all);
    return middle;
}

// A rank's step in a few numbers, in seconds. `communication` is without `shared`, which a run hides beside its next step.
typedef struct {
    double span, own, communication, hidden, shared, host;
} RankStep;

static inline RankStep profiler_rank_step(const ProfileStep* step, const Accounting* a, const ProfiledRun* run) {
    RankStep r = {a->span,         a->kernels - a->communication + a->gap[GAP_HOST], a->communication, a->hidden, 0,
                  a->gap[GAP_HOST]};
    for (size_t i = 0; run->shares_ahead && i < step->count; i++) {
        const ProfileRow* row = &step->rows[i];
        if (row->direction != COMMUNICATION || strcmp(row->op, "share_parameters") != 0) continue;
        r.shared += row->seconds;
        r.communication -= row->seconds, r.hidden -= profile_hidden(step, i);
    }
    return r;
}

// How this program was started, as one would type it (caller frees).
static inline char* profiler_command(void) {
    Text t = {NULL, 0, 0};
    FILE* f = fopen("/proc/self/cmdline", "r");
    char bytes[4096];
    size_t n = f ? fread(bytes, 1, sizeof bytes - 1, f) : 0;
    bytes[n] = '\0';
    for (const char* word = bytes; word < bytes + n; word += strlen(word) + 1) {
        int plain =
            *word && !word[strspn(word, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./=,:@%+-")];
        text_printf(&t, plain ? "%s%s" : "%s'%s'", word == bytes ? "" : " ", word);
    }
    if (f) fclose(f);
    return t.text ? t.text : xprintf("unknown");
}

// Name of the GPU, or of the processor and the threads used (caller frees).
static inline char* profiler_machine(void) {
#ifdef __CUDACC__
    struct cudaDeviceProp properties;
    int device;
    cudaCheck(cudaGetDevice(&device));
    cudaCheck(cudaGetDeviceProperties(&properties, device));
    return xprintf("%s", properties.name);
#else
    char line[256] = "";
    const char* name = "unknown processor";
    FILE* f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof line, f))
        if (text_begins(line, "model name") && strchr(line, ':')) {
            line[strcspn(line, "\n")] = '\0';
            name = strchr(line, ':') + 2;
            break;
        }
    if (f) fclose(f);
    return xprintf("%s, %d threads", name, device_threads());
#endif
}

// What profiling costs, and why where that is less than nothing (caller frees). `waits`: plain steps wait for the host.
static inline char* profiler_cost(double profiled, double plain, int is_gpu, int waits) {
    double cost = profiled / plain - 1;
    return xprintf("%.3f ms profiled, %.3f ms plain: %+.1f %%%s", 1e3 * profiled, 1e3 * plain, 100 * cost,
                   is_gpu && !waits && cost < -0.02 ? "; steps one after another keep the GPU at its power limit, and "
                                                      "profiled ones pause"
                                                    : "");
}

static inline void profiler_facts(ProfileReport* r, const Profiler* p, const ProfiledRun* run, size_t middle,
                                  const RankStep* mine) {
    double plain = r->times.plain, profiled = r->times.profiled;
    int waits = p->is_tracing && plain > 1.1 * profiled && mine->host > 0.01 * mine->span;
    int64_t first = p->first + p->warmup + p->count + 1;
    int is_gpu = GPU_BUILD;
    report_fact(r, is_gpu ? "GPU" : "CPU", profiler_machine());
    report_fact(r, "precision", xprintf("%s", FLOATX_NAME));
    report_fact(r, "mode", xprintf("%s", run->mode));
    report_fact(r, "rank", xprintf("%d of %d", run->comm->rank, run->comm->size));
    report_fact(r, "times",
                xprintf("%s", p->is_tracing ? "of kernels, from CUPTI's activity records"
                              : is_gpu      ? "of ops, between CUDA events (no kernels: CUPTI does not trace)"
                                            : "of ops, by the host's clock"));
    report_fact(r, "step",
                xprintf("%lld, the one in the middle of %lld to %lld by %stime; %d of warm-up and %d plain before",
                        (long long)(first + (int64_t)middle), (long long)first, (long long)(first + p->count - 1),
                        run->comm->size > 1 ? "the slowest rank's " : "", p->warmup, p->count));
    report_fact(r, "ceilings",
                xprintf("%.4g TFLOP/s (matmul of %d), %.4g GB/s (copy), %.3g us a launch, %s%s",
                        1e-12 * p->ceilings.flops, PEAK_SIZE, 1e-9 * p->ceilings.bytes, 1e6 * p->ceilings.launch,
                        strcmp(p->ceilings_from, "measure") ? "from " : "",
                        strcmp(p->ceilings_from, "measure") ? p->ceilings_from : "measured at the start"));
    if (waits)
        report_fact(r, "host",
                    xprintf("plain steps take %.3f ms longer than this one, before which the host got ahead: they wait "
                            "for it",
                            1e3 * (plain - profiled)));
    if (!isnan(plain)) report_fact(r, "cost", profiler_cost(profiled, plain, is_gpu, waits));
    report_fact(r, "work",
                xprintf("%.4g TFLOP by the model's formula over all ranks, %.4g TFLOP/s in %s step", 1e-12 * run->flops,
                        1e-12 * run->flops / (isnan(plain) ? profiled : plain), isnan(plain) ? "this" : "a plain"));
    if (mine->communication > 0)
        report_fact(r, "overlap",
                    xprintf("%.1f %% of %.3f ms of communication run beside other work",
                            100 * mine->hidden / mine->communication, 1e3 * mine->communication));
    if (mine->shared > 0)
        report_fact(r, "sharing",
                    xprintf("%.3f ms of share_parameters, which a run has beside the next step's forward pass and a "
                            "profiled step at its end: not in the overlap",
                            1e3 * mine->shared));
}

// What was planned, what was allocated, what is used.
static inline void profiler_table_memory(Table* t, const MemoryPlan* plan, const Context* ctx) {
    static const TableColumn columns[] = {
        {"category", TABLE_TEXT, 0, 0}, {"planned_mib", TABLE_NUMBER, 1, 0}, {"allocated_mib", TABLE_NUMBER, 1, 0}};
    const double MiB = 1048576;
    double together = 0, peak;
    table_open(t, "memory", "Memory", columns, COUNT_OF(columns));
    for (int i = 0; i < PLAN_PARTS; i++) {
        size_t held = strcmp(plan->part[i].name, "scratch") == 0 ? ctx->scratch_bytes : 0;
        for (int k = 0; k < MEMORY_CATEGORIES && ctx->memory[k].name; k++)
            if (strcmp(ctx->memory[k].name, plan->part[i].name) == 0) held = ctx->memory[k].bytes;
        table_text(t, plan->part[i].name);
        table_number(t, (double)plan->part[i].bytes / MiB);
        table_number(t, held ? (double)held / MiB : (double)NAN);
        together += (double)held;
    }
    table_text(t, "together");
    table_number(t, (double)plan_bytes(plan) / MiB);
    table_number(t, together / MiB);
#ifdef __CUDACC__
    size_t available, all;
    cudaCheck(cudaMemGetInfo(&available, &all));
    peak = (double)(all - available);
    table_text(t, "used on the device");
#else
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    peak = 1024 * (double)usage.ru_maxrss;
    table_text(t, "peak of the process");
#endif
    table_number(t, (double)NAN);
    table_number(t, peak / MiB);
    t->note = xprintf(
        "Everything is allocated before the first step ends; the last line counts what the driver, libraries and "
        "this report take too.");
}

// The ranks side by side, and which of them the others wait for.
static inline void profiler_table_ranks(ProfileReport* r, const RankStep* all, int size) {
    static const TableColumn columns[] = {
        {"rank", TABLE_NUMBER, 0, 0},           {"span_ms", TABLE_NUMBER, 3, 0},
        {"own_ms", TABLE_NUMBER, 3, 0},         {"communication_ms", TABLE_NUMBER, 3, 0},
        {"hidden_percent", TABLE_NUMBER, 1, 0}, {"late_host_ms", TABLE_NUMBER, 3, 0}};
    Table* t = report_table(r);
    int slowest = 0, fastest = 0;
    table_open(t, "ranks", "The ranks", columns, COUNT_OF(columns));
    for (int i = 0; i < size; i++) {
        table_number(t, i);
        table_number(t, 1e3 * all[i].span);
        table_number(t, 1e3 * all[i].own);
        table_number(t, 1e3 * all[i].communication);
        table_number(t, all[i].communication > 0 ? 100 * all[i].hidden / all[i].communication : (double)NAN);
        table_number(t, 1e3 * all[i].host);
        if (all[i].own > all[slowest].own) slowest = i;
        if (all[i].own < all[fastest].own) fastest = i;
    }
    t->note = xprintf(
        "The same step of all. own_ms: a rank's rows but communication, and the gaps in which its host is late: "
        "what the others wait for. %sThe slowest is rank %d, %.1f %% slower than rank %d.",
        all[0].shared > 0 ? "communication_ms is without share_parameters. " : "", slowest,
        100 * (all[slowest].own / all[fastest].own - 1), fastest);
    report_fact(r, "slowest",
                xprintf("rank %d, whose own work takes %.3f ms; the fastest, rank %d, takes %.3f ms", slowest,
                        1e3 * all[slowest].own, fastest, 1e3 * all[fastest].own));
}

// Collective calls, as all ranks report the same step.
static inline void profiler_fill_report(ProfileReport* r, Profiler* p, const ProfiledRun* run, const Context* ctx) {
    size_t middle = profiler_middle_step(p, run->comm);
    ProfileStep* step = &p->steps[middle];
    memset(r, 0, sizeof *r);
    profile_compare_steps(step, p->steps, (size_t)p->taken);
    r->title = profiler_command();
    r->step = step, r->ceilings = p->ceilings, r->flops = run->flops, r->rank = run->comm->rank;
    r->accounting = profile_account(step);
    r->times.plain = median_of(p->plain, (size_t)p->plain_count), r->times.profiled = step->seconds;
    RankStep mine = profiler_rank_step(step, &r->accounting, run);
    profiler_facts(r, p, run, middle, &mine);
    r->losses = profile_losses(step, &p->ceilings, 5, &r->loss_count);
    double span = r->accounting.span;
    profile_table_accounting(report_table(r), step, &r->accounting, r->times);
    profile_table_directions(report_table(r), step, span);
    profile_table_kinds(report_table(r), step, span);
    profile_table_layers(report_table(r), step, span);
    profile_table_ops(report_table(r), step, span);
    profile_table_kernel_names(report_table(r), step, span);
    profile_table_kernels(report_table(r), step);
    profile_table_gaps(report_table(r), step);
    profile_table_steps(report_table(r), p->steps, (size_t)p->taken, p->first + p->warmup + p->count + 1);
    profiler_table_memory(report_table(r), run->plan, ctx);
    RankStep* all = (RankStep*)xmalloc((size_t)run->comm->size * sizeof *all);
    comm_gather(run->comm, all, &mine, sizeof mine);
    if (run->comm->size > 1) profiler_table_ranks(r, all, run->comm->size);
    free(all);
}

// Print what the profiled steps spent their time on, and write all of it to OUT/profile, or to a directory a rank in it. All
// ranks call it together, after the last profiled step.
static inline void profiler_report(FILE* out, Profiler* p, const ProfiledRun* run, const Context* ctx) {
    static const char* const shown[] = {"accounting", "kinds", "ops"};
    ProfileReport r;
    Text t = {NULL, 0, 0};
    profiler_fill_report(&r, p, run, ctx);
    for (int i = 0; i < r.fact_count; i++) text_printf(&t, "%-12s %s\n", r.facts[i].name, r.facts[i].text);
    for (size_t i = 0; i < COUNT_OF(shown); i++) report_put_table(&t, report_find(&r, shown[i]));
    text_printf(&t, "\nThe largest losses\n\n");
    report_put_losses(&t, &r);
    if (*run->out) {
        char* directory = run->comm->size == 1 ? xprintf("%s/profile", run->out)
                                               : xprintf("%s/profile/rank_%d", run->out, run->comm->rank);
        report_write(&r, directory);
        text_printf(&t, "\nthe whole profile: %s/profile.txt, and profile.html for a browser\n", directory);
        free(directory);
    }
    if (run->comm->rank == 0) fputs(t.text, out);
    free(t.text);
    report_free(&r);
    profiler_close(p);
    comm_barrier(run->comm);  // else the next step would wait for a rank that still writes
}

#endif
