/* The report of a profiler (profiler.h): facts about the run, and tables. What is printed, and the files, all in one
 * directory:
 *
 *     profile.txt    everything, as aligned text            profile.html   the same as one page that needs no network
 *     kernels.csv    one line per row, with full names      summary.csv    the facts, and the step's times for scripts */
#ifndef LLMC_PROFILE_REPORT_H
#define LLMC_PROFILE_REPORT_H

#include "llmc/base/run_lock.h"
#include "llmc/profile/page.h"
#include "llmc/profile/profiler.h"

// The run that is reported.
typedef struct {
    const char* out;  // the run's directory; "": write no files
    const char* passes;
    double flops;  // of the model in a step
    ProcessGroup* group;
    int broadcast_overlaps;  // updated parameters are broadcast during the next step's forward pass
    RunLock* lock;           // of `out`
} ProfiledRun;

// The first table is the summary: kind, name and value of the facts, of which the first is the command, then of numbers.
typedef struct {
    Table tables[10];
    int count;
} ProfileReport;

static inline Table* report_table(ProfileReport* r) {
    CHECK(r->count < (int)COUNT_OF(r->tables));
    return &r->tables[r->count++];
}

// Takes ownership of `value`.
static inline void report_add(ProfileReport* r, const char* kind, const char* name, char* value) {
    table_text(&r->tables[0], "kind", kind);
    table_text(&r->tables[0], "name", name);
    table_add(&r->tables[0], "value", TABLE_TEXT, value);
}

// Add a fact; its text is a format with arguments.
#define REPORT_FACT(report, name, ...) report_add(report, "fact", name, xprintf(__VA_ARGS__))

// Takes ownership of `command`.
static inline void report_open(ProfileReport* r, char* command) {
    memset(r, 0, sizeof *r);
    table_open(report_table(r), "summary", "");
    report_add(r, "fact", "command", command);
}

static inline void report_free(ProfileReport* r) {
    for (int i = 0; i < r->count; i++) table_free(&r->tables[i]);
    memset(r, 0, sizeof *r);
}

static inline const Table* report_find(const ProfileReport* r, const char* id) {
    for (int i = 0; i < r->count; i++)
        if (strcmp(r->tables[i].id, id) == 0) return &r->tables[i];
    return NULL;
}

// The tables of a step. `energies`: of its ops, if they were measured.
static inline void report_step(ProfileReport* r, const ProfileStep* step, const Accounting* a, ProfileTimes times,
                               OpEnergies* energies) {
    profile_table_accounting(report_table(r), step, a, times);
    profile_table_groups(report_table(r), step, a->span, BY_KIND);
    profile_table_groups(report_table(r), step, a->span, BY_LAYER);
    profile_table_groups(report_table(r), step, a->span, BY_OP);
    if (energies->count) profile_table_energy(report_table(r), energies);
    profile_table_kernels(report_table(r), step);
    profile_table_gaps(report_table(r), step);
}

// Append the numbers to the summary, after all facts.
static inline void report_numbers(ProfileReport* r, const ProfileStep* step, const Accounting* a, ProfileTimes times,
                                  const MeasuredPeaks* peaks) {
    size_t readbacks = 0;
    for (size_t i = 0; i < step->count; i++)
        readbacks += step->rows[i].kernel && text_begins(step->rows[i].kernel, "copy_to_host");
    const struct {
        const char* name;
        double value;
    } numbers[] = {{"span_ms", 1e3 * a->span},
                   {"kernels_ms", 1e3 * a->kernels},
                   {"overlap_ms", 1e3 * a->overlap},
                   {"gap_host_ms", 1e3 * a->gap[GAP_HOST]},
                   {"gap_stream_ms", 1e3 * a->gap[GAP_STREAM]},
                   {"gap_kernels_ms", 1e3 * a->gap[GAP_SWITCH]},
                   {"before_ms", 1e3 * step->before},
                   {"after_ms", 1e3 * step->after},
                   {"profiled_ms", 1e3 * times.profiled},
                   {"plain_ms", 1e3 * times.plain},
                   {"host_waits", (double)step->host_waits},
                   {"stream_waits", (double)step->stream_waits},
                   {"readbacks", (double)readbacks},
                   {"unattributed", (double)a->unscoped},
                   {"dropped", (double)step->dropped},
                   {"peak_flops", peaks->flops},
                   {"peak_bytes", peaks->bytes}};
    for (size_t i = 0; i < COUNT_OF(numbers); i++) {
        char number[32] = "";
        if (!isnan(numbers[i].value)) format_number(number, numbers[i].value);
        report_add(r, "number", numbers[i].name, xprintf("%s", number));
    }
}

// ---------------------------------------------------------------------------------------------------------
// Steps

// Index of the step whose slowest rank has the median span, of spans [ranks][count]; of an even number, the lower
// median.
static inline size_t profiler_median_index(const double* spans, int ranks, size_t count) {
    double* slowest = (double*)xcalloc(count + 1, sizeof *slowest);
    size_t median = 0;
    for (size_t i = 0; i < count * (size_t)ranks; i++) slowest[i % count] = fmax(slowest[i % count], spans[i]);
    for (size_t i = 0; i < count; i++) {
        size_t shorter = 0;
        for (size_t k = 0; k < count; k++) shorter += slowest[k] < slowest[i] || (slowest[k] == slowest[i] && k < i);
        if (shorter == (count - 1) / 2) median = i;
    }
    free(slowest);
    return median;
}

// Index of the step that all ranks report. A collective call.
static inline size_t profiler_median_step(const Profiler* p, const ProcessGroup* group) {
    size_t count = (size_t)p->taken;
    double* mine = (double*)xcalloc(count + 1, sizeof *mine);
    double* all = (double*)xmalloc((size_t)group->size * count * sizeof *all);
    for (size_t i = 0; i < count; i++) mine[i] = profile_span(&p->steps[i]);
    group_gather(group, all, mine, count * sizeof *mine);
    size_t median = profiler_median_index(all, group->size, count);
    free(mine), free(all);
    return median;
}

// A rank's step in seconds. `own`: from the start to the end of its last row, less communication that overlaps with
// nothing. Other ranks may wait for all of `own`, including the time before the first row and gaps. `communication`
// excludes `broadcast`, which a run overlaps with its next step. `host`: gaps in which the GPU waits for the host.
typedef struct {
    double span, own, communication, overlapped, broadcast, host;
} RankStep;

static inline RankStep profiler_rank_step(const ProfileStep* step, const Accounting* a, const ProfiledRun* run) {
    double before = step->before > 0 ? step->before : 0;  // NaN too
    double broadcast = run->broadcast_overlaps ? a->broadcast : 0;
    RankStep r = {.span = a->span,
                  .own = before + a->span - (a->communication - a->overlapped),
                  .communication = a->communication - broadcast,
                  .overlapped = a->overlapped - (run->broadcast_overlaps ? a->broadcast_overlapped : 0),
                  .broadcast = broadcast,
                  .host = a->gap[GAP_HOST]};
    return r;
}

// ---------------------------------------------------------------------------------------------------------
// Facts

// Append a word of a command as one would type it, in quotes if the shell needs them. A control character becomes "?".
static inline void profiler_put_word(Text* t, const char* word) {
    static const char plain[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./=,:@%+-";
    const char* quote = *word && !word[strspn(word, plain)] ? "" : "'";
    text_printf(t, "%s", quote);
    for (; *word; word++) {
        if (*word == '\'') text_append(t, "'\\''", 4);
        else text_append(t, (unsigned char)*word < ' ' || *word == 127 ? "?" : word, 1);
    }
    text_printf(t, "%s", quote);
}

// The command line that started this program (caller frees).
static inline char* profiler_command(void) {
    Text t = {NULL, 0, 0}, words = {NULL, 0, 0};
    FILE* f = fopen("/proc/self/cmdline", "r");
    char bytes[4096];
    for (size_t n; f && (n = fread(bytes, 1, sizeof bytes, f)) > 0;) text_append(&words, bytes, n);
    for (size_t at = 0; at < words.length; at += strlen(words.text + at) + 1) {
        if (at) text_append(&t, " ", 1);
        profiler_put_word(&t, words.text + at);
    }
    if (f) fclose(f);
    free(words.text);
    return t.text ? t.text : xprintf("unknown");
}

// Name of the GPU, or of the CPU with the number of threads (caller frees).
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

// The cost of profiling; if it is negative, also why (caller frees). `waits`: plain steps wait for the host.
static inline char* profiler_cost(double profiled, double plain, int is_gpu, int waits) {
    double cost = profiled / plain - 1;
    return xprintf("%.3f ms profiled, %.3f ms plain: %+.1f %%%s", 1e3 * profiled, 1e3 * plain, 100 * cost,
                   is_gpu && !waits && cost < -0.02 ? "; plain steps run at the GPU's power limit, profiled ones "
                                                      "pause in between"
                                                    : "");
}

static inline void profiler_facts(ProfileReport* r, const Profiler* p, const ProfiledRun* run, ProfileTimes times,
                                  size_t median, const RankStep* mine) {
    double plain = times.plain, profiled = times.profiled;
    int waits = p->is_tracing && plain > 1.1 * profiled && mine->host > 0.01 * mine->span;
    int64_t first = p->first + p->warmup + p->count + 1;
    int is_gpu = GPU_BUILD;
    char in_fp8[48] = "";
    if (p->peaks.fp8_flops > 0) snprintf(in_fp8, sizeof in_fp8, ", %.4g in fp8", 1e-12 * p->peaks.fp8_flops);
    report_add(r, "fact", is_gpu ? "GPU" : "CPU", profiler_machine());
    REPORT_FACT(r, "precision", "%s", FLOATX_NAME);
    REPORT_FACT(r, "mode", "%s", run->passes);
    REPORT_FACT(r, "rank", "%d of %d", run->group->rank, run->group->size);
    REPORT_FACT(r, "times", "%s",
                p->is_tracing ? "of kernels, from CUPTI's activity records" : "of ops, by the host's clock");
    REPORT_FACT(r, "step", "%lld, the median of %lld to %lld by %stime, after %d warm-up and %d plain steps%s",
                (long long)(first + (int64_t)median), (long long)first, (long long)(first + p->taken - 1),
                run->group->size > 1 ? "the slowest rank's " : "", p->warmup, p->count,
                p->taken < p->count ? "; the run was stopped before the rest" : "");
    REPORT_FACT(r, "ceilings",
                "%.4g TFLOP/s (matmul of %s%d)%s, %.4g GB/s (copy), %.3g us a launch, measured at the start",
                1e-12 * p->peaks.flops, is_gpu ? "" : "up to ", PEAK_SIZE, in_fp8, 1e-9 * p->peaks.bytes,
                1e6 * p->peaks.launch);
    if (waits)
        REPORT_FACT(r, "host",
                    "plain steps take %.3f ms longer than this one, for which the host queued work ahead: they "
                    "wait for the host",
                    1e3 * (plain - profiled));
    if (!isnan(plain)) report_add(r, "fact", "cost", profiler_cost(profiled, plain, is_gpu, waits));
    REPORT_FACT(r, "work", "%.4g TFLOP over all ranks by the model's formula, %.4g TFLOP/s in %s step",
                1e-12 * run->flops, 1e-12 * run->flops / (isnan(plain) ? profiled : plain),
                isnan(plain) ? "this" : "a plain");
    if (p->ops.count) report_add(r, "fact", "ops", op_energies_sum(&p->ops));
    if (mine->communication > 0)
        REPORT_FACT(r, "overlap", "%.1f %% of %.3f ms of communication overlap with other work",
                    100 * mine->overlapped / mine->communication, 1e3 * mine->communication);
    if (mine->broadcast > 0)
        REPORT_FACT(r, "broadcast",
                    "%.3f ms of share_parameters, not in the overlap: a run overlaps it with the next step's "
                    "forward pass, a profiled step has it at its end",
                    1e3 * mine->broadcast);
}

// All ranks, and which one the others wait for.
static inline void profiler_table_ranks(ProfileReport* r, const RankStep* all, int size) {
    Table* t = report_table(r);
    int slowest = 0, fastest = 0;
    table_open(t, "ranks", "The ranks");
    for (int i = 0; i < size; i++) {
        table_number(t, "rank", 0, i);
        table_number(t, "span_ms", 3, 1e3 * all[i].span);
        table_number(t, "own_ms", 3, 1e3 * all[i].own);
        table_number(t, "communication_ms", 3, 1e3 * all[i].communication);
        table_number(t, "overlapped_percent", 1,
                     all[i].communication > 0 ? 100 * all[i].overlapped / all[i].communication : (double)NAN);
        table_number(t, "host_wait_ms", 3, 1e3 * all[i].host);
        if (all[i].own > all[slowest].own) slowest = i;
        if (all[i].own < all[fastest].own) fastest = i;
    }
    t->note = xprintf("The same step on all ranks. own_ms: the time that the others may wait for, from the start of "
                      "the step to the end "
                      "of its last row, without communication that overlaps with nothing. %sThe slowest is rank %d, "
                      "%.1f %% slower than "
                      "rank %d.",
                      all[0].broadcast > 0 ? "communication_ms does not include share_parameters. " : "", slowest,
                      100 * (all[slowest].own / all[fastest].own - 1), fastest);
    REPORT_FACT(r, "slowest", "rank %d with %.3f ms of its own work; the fastest is rank %d with %.3f ms", slowest,
                1e3 * all[slowest].own, fastest, 1e3 * all[fastest].own);
}

// Makes collective calls: all ranks report the same step.
static inline void profiler_fill_report(ProfileReport* r, Profiler* p, const ProfiledRun* run) {
    size_t median = profiler_median_step(p, run->group);
    ProfileStep* step = &p->steps[median];
    profile_compare_steps(step, p->steps, (size_t)p->taken);
    Accounting a = profile_account(step);
    ProfileTimes times = {median_of(p->plain, (size_t)p->plain_count), step->seconds};
    RankStep mine = profiler_rank_step(step, &a, run);
    report_open(r, profiler_command());
    profiler_facts(r, p, run, times, median, &mine);
    report_step(r, step, &a, times, &p->ops);
    RankStep* all = (RankStep*)xmalloc((size_t)run->group->size * sizeof *all);
    group_gather(run->group, all, &mine, sizeof mine);
    if (run->group->size > 1) profiler_table_ranks(r, all, run->group->size);
    free(all);
    report_numbers(r, step, &a, times, &p->peaks);
}

// ---------------------------------------------------------------------------------------------------------
// Files

// The facts below the command.
static inline void report_put_facts(Text* out, const ProfileReport* r) {
    const Table* t = &r->tables[0];
    for (size_t i = 1; i < table_rows(t) && strcmp(table_cell(t, i, 0), "fact") == 0; i++)
        text_printf(out, "%-12s %s\n", table_cell(t, i, 1), table_cell(t, i, 2));
}

static inline void report_put_table(Text* out, const Table* t) {
    text_printf(out, "\n%s\n", t->title);
    if (t->note) text_printf(out, "%s\n", t->note);
    text_append(out, "\n", 1);
    table_put_text(out, t);
}

static inline void report_text(Text* out, const ProfileReport* r) {
    text_printf(out, "%s\n\n", table_cell(&r->tables[0], 0, 2));
    report_put_facts(out, r);
    for (int i = 1; i < r->count; i++) report_put_table(out, &r->tables[i]);
}

// The Makefile turns llmc/profile/page.html into the bytes that are included here.
static inline void report_page(Text* out, const ProfileReport* r) {
    static const unsigned char page[] = {
#include "profile_page.inc"
        0};
    Text data = {NULL, 0, 0};
    for (int i = 0; i < r->count; i++) {
        text_printf(&data, i ? ",\n" : "[");
        table_put_json(&data, &r->tables[i]);
    }
    text_printf(&data, "]");
    page_put(out, page, &data);
    free(data.text);
}

static inline void report_csv(Text* out, const ProfileReport* r) { table_put_csv(out, report_find(r, "kernels")); }

static inline void report_summary(Text* out, const ProfileReport* r) { table_put_csv(out, &r->tables[0]); }

static const struct {
    const char* name;
    void (*put)(Text*, const ProfileReport*);
} REPORT_FILES[] = {{"profile.txt", report_text},
                    {"profile.html", report_page},
                    {"kernels.csv", report_csv},
                    {"summary.csv", report_summary}};

// Remove a report's files, and only those, from `directory`. `lock`, here and below: the lock of the run's directory.
static inline void report_remove(RunLock* lock, const char* directory) {
    for (size_t i = 0; i < COUNT_OF(REPORT_FILES); i++) {
        char* path = xprintf("%s/%s", directory, REPORT_FILES[i].name);
        struct stat st;
        int is_there = run_lock_check(lock) == 0 && lstat(path, &st) == 0 && S_ISREG(st.st_mode);
        if (is_there && unlink(path) != 0 && errno != ENOENT)
            warn("%s: belongs to an earlier profile and cannot be removed: %s", path, strerror(errno));
        free(path);
    }
}

// A rank's report directory in the run's directory (caller frees).
static inline char* report_directory(const char* out, int rank, int ranks) {
    return ranks == 1 ? xprintf("%s/profile", out) : xprintf("%s/profile/rank_%d", out, rank);
}

// Remove the reports of an earlier profile with another number of ranks. Any rank may call this, because no rank of
// this run writes to those directories.
static inline void report_clear(RunLock* lock, const char* out, int ranks) {
    char* directory = xprintf("%s/profile", out);
    if (ranks > 1) report_remove(lock, directory);
    for (int rank = ranks > 1 ? ranks : 0, is_there = 1; is_there; rank++) {
        char* path = xprintf("%s/rank_%d", directory, rank);
        struct stat st;
        is_there = lstat(path, &st) == 0 && S_ISDIR(st.st_mode);
        if (is_there) report_remove(lock, path);
        if (is_there && run_lock_check(lock) == 0) rmdir(path);  // fails if it holds other files
        free(path);
    }
    free(directory);
}

// Create `directory` and write all files to it. Prints a warning for each file that cannot be written.
static inline void report_write(const ProfileReport* r, RunLock* lock, const char* directory) {
    if (run_lock_check(lock) != 0) return;
    if (make_directories(directory) != 0) {
        warn("%s: cannot be created: %s; the profile is not written", directory, strerror(errno));
        return;
    }
    for (size_t i = 0; i < COUNT_OF(REPORT_FILES) && run_lock_check(lock) == 0; i++) {
        Text text = {NULL, 0, 0};
        char* path = xprintf("%s/%s", directory, REPORT_FILES[i].name);
        REPORT_FILES[i].put(&text, r);
        if (write_file(path, text.text, text.length) != 0) warn("%s: cannot be written: %s", path, strerror(errno));
        free(text.text), free(path);
    }
}

// Print the main tables and write the whole report to OUT/profile, or with several ranks to a directory per rank in it.
// A collective call, after the last profiled step.
static inline void profiler_report(FILE* out, Profiler* p, const ProfiledRun* run) {
    static const char* const shown[] = {"accounting", "kinds", "ops", "energy"};
    ProfileReport r;
    Text t = {NULL, 0, 0};
    profiler_fill_report(&r, p, run);
    report_put_facts(&t, &r);
    for (size_t i = 0; i < COUNT_OF(shown); i++)
        if (report_find(&r, shown[i])) report_put_table(&t, report_find(&r, shown[i]));
    if (*run->out) {
        char* directory = report_directory(run->out, run->group->rank, run->group->size);
        report_clear(run->lock, run->out, run->group->size);
        report_write(&r, run->lock, directory);
        text_printf(&t, "\nwhole profile: %s/profile.txt; for a browser: profile.html\n", directory);
        free(directory);
    }
    if (run->group->rank == 0) fputs(t.text, out);
    free(t.text);
    report_free(&r);
    profiler_close(p);
    group_barrier(run->group);  // so that no rank is still writing when the next step begins
}

// Call at the end of the run. If the run ends before the profile is complete, print a line that says so and report the
// steps profiled so far. A collective call.
static inline void profiler_stop(FILE* out, Profiler* p, const ProfiledRun* run) {
    if (p->count == 0) return;
    if (run->group->rank == 0)
        fprintf(out, "the run was stopped after %d of %d profiled steps: %s\n", p->taken, p->count,
                p->taken ? "the profile is of these" : "no profile was written");
    if (p->taken == 0) {
        profiler_close(p);
        return;
    }
    profiler_end_trace(p);
    profiler_report(out, p, run);
}

#endif
