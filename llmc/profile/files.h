/* The files of a profile's report, all in one directory:
 *
 *     profile.txt    everything, as aligned text            profile.html   the same as one page that needs no network
 *     kernels.csv    one line per row, with full names      summary.csv    the facts, and the step's times for scripts
 *
 * The page is llmc/profile/page.html, which the Makefile turns into the bytes that are included here. */
#ifndef LLMC_PROFILE_FILES_H
#define LLMC_PROFILE_FILES_H

#include <dirent.h>

#include "llmc/base/run_lock.h"
#include "llmc/profile/tables.h"

// The page's data replaces this.
#define PROFILE_PLACE "/*PROFILE*/null"

enum { PROFILE_FACTS = 18, PROFILE_TABLES = 10 };

typedef struct {
    char* title;  // owned, like the facts' texts
    struct {
        const char* name;
        char* text;
    } facts[PROFILE_FACTS];
    Table tables[PROFILE_TABLES];
    int fact_count, table_count;
    const ProfileStep* step;
    MeasuredPeaks peaks;
    Accounting accounting;
    ProfileTimes times;
} ProfileReport;

// Takes ownership of `text`.
static inline void report_fact(ProfileReport* r, const char* name, char* text) {
    CHECK(r->fact_count < PROFILE_FACTS);
    r->facts[r->fact_count].name = name;
    r->facts[r->fact_count++].text = text;
}

static inline Table* report_table(ProfileReport* r) {
    CHECK(r->table_count < PROFILE_TABLES);
    return &r->tables[r->table_count++];
}

static inline void report_free(ProfileReport* r) {
    for (int i = 0; i < r->fact_count; i++) free(r->facts[i].text);
    for (int i = 0; i < r->table_count; i++) table_free(&r->tables[i]);
    free(r->title);
    memset(r, 0, sizeof *r);
}

static inline const Table* report_find(const ProfileReport* r, const char* id) {
    for (int i = 0; i < r->table_count; i++)
        if (strcmp(r->tables[i].id, id) == 0) return &r->tables[i];
    return NULL;
}

// ---------------------------------------------------------------------------------------------------------
// Text

static inline void report_put_table(Text* out, const Table* t) {
    text_printf(out, "\n%s\n", t->title);
    if (t->note) text_printf(out, "%s\n", t->note);
    text_append(out, "\n", 1);
    table_put_text(out, t);
}

static inline void report_text(Text* out, const ProfileReport* r) {
    text_printf(out, "%s\n\n", r->title);
    for (int i = 0; i < r->fact_count; i++) text_printf(out, "%-12s %s\n", r->facts[i].name, r->facts[i].text);
    for (int i = 0; i < r->table_count; i++) report_put_table(out, &r->tables[i]);
}

// ---------------------------------------------------------------------------------------------------------
// The page

// The page's data. "<" is escaped, so that nothing in it ends the enclosing script or begins a comment.
static inline void report_page_data(Text* out, const ProfileReport* r) {
    Text plain = {NULL, 0, 0};
    const Accounting* a = &r->accounting;
    text_append(&plain, "{", 1);
    json_put_string(&plain, "title", r->title);
    text_printf(&plain, ",\n\"facts\": [");
    for (int i = 0; i < r->fact_count; i++) {
        text_printf(&plain, "%s[", i ? ", " : "");
        text_json_string(&plain, r->facts[i].name, strlen(r->facts[i].name));
        text_append(&plain, ", ", 2);
        text_json_string(&plain, r->facts[i].text, strlen(r->facts[i].text));
        text_append(&plain, "]", 1);
    }
    text_printf(&plain, "],\n\"ceilings\": {");
    json_put_number(&plain, "flops", r->peaks.flops);
    json_put_number(&plain, "bytes", r->peaks.bytes);
    text_printf(&plain, "},\n\"step\": {");
    json_put_number(&plain, "span_ms", 1e3 * a->span);
    json_put_number(&plain, "overlap_ms", 1e3 * a->overlap);
    json_put_number(&plain, "idle_ms", 1e3 * (a->gap[GAP_HOST] + a->gap[GAP_STREAM] + a->gap[GAP_SWITCH]));
    text_printf(&plain, "},\n\"tables\": [");
    for (int i = 0; i < r->table_count; i++) {
        if (i) text_append(&plain, ",\n", 2);
        table_put_json(&plain, &r->tables[i]);
    }
    text_printf(&plain, "]}");
    for (size_t i = 0; i < plain.length; i++) {
        if (plain.text[i] == '<') text_append(out, "\\u003c", 6);
        else text_append(out, &plain.text[i], 1);
    }
    free(plain.text);
}

static inline void report_page(Text* out, const ProfileReport* r) {
    static const unsigned char page[] = {
#include "profile_page.inc"
        0};
    const char* text = (const char*)page;
    const char* place = strstr(text, PROFILE_PLACE);
    CHECK(place);
    text_append(out, text, (size_t)(place - text));
    report_page_data(out, r);
    place += strlen(PROFILE_PLACE);
    text_append(out, place, strlen(place));
}

// ---------------------------------------------------------------------------------------------------------
// CSV

static inline void report_csv(Text* out, const ProfileReport* r) { table_put_csv(out, report_find(r, "kernels")); }

static inline void report_put_fact(Table* t, const char* kind, const char* name, const char* value) {
    table_text(t, "kind", kind);
    table_text(t, "name", name);
    table_text(t, "value", value);
}

static inline void report_summary(Text* out, const ProfileReport* r) {
    const Accounting* a = &r->accounting;
    Table t;
    size_t readbacks = 0;
    for (size_t i = 0; i < r->step->count; i++)
        readbacks += r->step->rows[i].kernel && text_begins(r->step->rows[i].kernel, "copy_to_host");
    const struct {
        const char* name;
        double value;
    } numbers[] = {{"span_ms", 1e3 * a->span},
                   {"kernels_ms", 1e3 * a->kernels},
                   {"overlap_ms", 1e3 * a->overlap},
                   {"gap_host_ms", 1e3 * a->gap[GAP_HOST]},
                   {"gap_stream_ms", 1e3 * a->gap[GAP_STREAM]},
                   {"gap_kernels_ms", 1e3 * a->gap[GAP_SWITCH]},
                   {"before_ms", 1e3 * r->step->before},
                   {"after_ms", 1e3 * r->step->after},
                   {"profiled_ms", 1e3 * r->times.profiled},
                   {"plain_ms", 1e3 * r->times.plain},
                   {"host_waits", (double)r->step->host_waits},
                   {"stream_waits", (double)r->step->stream_waits},
                   {"readbacks", (double)readbacks},
                   {"unattributed", (double)a->unscoped},
                   {"dropped", (double)r->step->dropped}};
    table_open(&t, "summary", "");
    report_put_fact(&t, "fact", "command", r->title);
    for (int i = 0; i < r->fact_count; i++) report_put_fact(&t, "fact", r->facts[i].name, r->facts[i].text);
    for (size_t i = 0; i < COUNT_OF(numbers); i++) {
        char number[32];
        format_number(number, numbers[i].value);
        report_put_fact(&t, "number", numbers[i].name, isnan(numbers[i].value) ? NULL : number);
    }
    table_put_csv(out, &t);
    table_free(&t);
}

// ---------------------------------------------------------------------------------------------------------
// Files

typedef struct {
    const char* name;
    void (*put)(Text*, const ProfileReport*);
} ReportFile;

static const ReportFile REPORT_FILES[] = {{"profile.txt", report_text},
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
    char* directory = report_directory(out, 0, 1);
    DIR* listing = opendir(directory);
    if (listing && ranks > 1) report_remove(lock, directory);
    for (struct dirent* entry; listing && (entry = readdir(listing));) {
        int rank = -1;
        if (sscanf(entry->d_name, "rank_%9d", &rank) != 1 || rank < 0 || (ranks > 1 && rank < ranks)) continue;
        char *name = xprintf("rank_%d", rank), *path = xprintf("%s/%s", directory, name);
        struct stat st;
        if (strcmp(entry->d_name, name) == 0 && lstat(path, &st) == 0 && S_ISDIR(st.st_mode)) {
            report_remove(lock, path);
            if (run_lock_check(lock) == 0) rmdir(path);  // fails if it holds other files
        }
        free(name), free(path);
    }
    if (listing) closedir(listing);
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

#endif
