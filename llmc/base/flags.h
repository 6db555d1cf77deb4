/* Command line flags as rows of a table: the same rows parse, check, print --help and are saved with a run.
 *
 *     int batch;
 *     Flag rows[] = {
 *         {"-b", "--batch", FLAG_INT, &batch, "4", 1, 65536, NULL, "sequences in a micro-batch", 0},
 *     };
 *     flags_parse(rows, COUNT_OF(rows), argc, argv, "./train_gpt2 [flags]");
 *
 * `-b 4`, `--batch 4` and `--batch=4` are the same. A mistake ends the program with status 2 before anything is
 * done, in one line that names the flag, what was given and what is allowed. */
#ifndef LLMC_FLAGS_H
#define LLMC_FLAGS_H

#include <limits.h>

#include "json.h"

typedef enum { FLAG_INT, FLAG_SIZE, FLAG_REAL, FLAG_STRING, FLAG_CHOICE } FlagType;

typedef struct {
    const char* flag;       // "-b", or NULL
    const char* long_name;  // "--batch"
    FlagType type;
    void* value;               // int*, int64_t*, double*, const char**; int* for the index of a choice
    const char* default_text;  // parsed like what a user gives
    double min, max;           // of numbers, inclusive; -INFINITY and INFINITY for no bound
    const char* choices;       // "a|b|c", else NULL
    const char* help;
    int is_set;  // 0 in the table; see below
} Flag;

// Bits of is_set: the user gave it; its string is a copy that flags_free() frees.
enum { FLAG_IS_GIVEN = 1, FLAG_IS_COPY = 2, FLAG_TEXT_SIZE = 256, FLAG_ERROR_SIZE = 512 };

// ---------------------------------------------------------------------------------------------------------
// One row

// What may be given: "1..8", ">= 0", "cosine|linear".
static inline void flags_format_range(const Flag* row, char* out, size_t n) {
    if (row->type == FLAG_STRING || row->type == FLAG_CHOICE) {
        snprintf(out, n, "%s", row->type == FLAG_CHOICE ? row->choices : "text");
        return;
    }
    double limit = row->type == FLAG_INT ? (double)INT_MAX : row->type == FLAG_SIZE ? 9.2e18 : 1e300;
    int low = row->min > -limit, high = row->max < limit;
    char min[32] = "", max[32] = "";
    if (low) format_number(min, row->min);
    if (high) format_number(max, row->max);
    if (low && high) snprintf(out, n, "%s..%s", min, max);
    else if (low || high) snprintf(out, n, "%s %s", low ? ">=" : "<=", low ? min : max);
    else snprintf(out, n, "any number");
}

// The value as text that flags_set() reads back as the same value.
static inline void flags_format_value(const Flag* row, char* out, size_t n) {
    char digits[32];
    if (row->type == FLAG_INT) snprintf(out, n, "%d", *(const int*)row->value);
    if (row->type == FLAG_SIZE) snprintf(out, n, "%lld", (long long)*(const int64_t*)row->value);
    if (row->type == FLAG_STRING) snprintf(out, n, "%s", *(const char* const*)row->value);
    if (row->type == FLAG_REAL) {
        format_number(digits, *(const double*)row->value);
        snprintf(out, n, "%s", digits);
    }
    if (row->type == FLAG_CHOICE) {
        const char* name = row->choices;
        for (int skip = *(const int*)row->value; skip > 0 && name; skip--) {
            name = strchr(name, '|');
            if (name) name++;
        }
        CHECK(name);
        snprintf(out, n, "%.*s", (int)strcspn(name, "|"), name);
    }
}

static inline int flags_complain(const Flag* row, const char* text, const char* what, char error[FLAG_ERROR_SIZE]) {
    char range[FLAG_TEXT_SIZE];
    flags_format_range(row, range, sizeof(range));
    snprintf(error, FLAG_ERROR_SIZE, "%s%s%s: '%.80s' %s; allowed: %s", row->flag ? row->flag : "",
             row->flag ? " " : "", row->long_name, text, what, range);
    return -1;
}

// Parse `text` into the row's value; a string is kept by its pointer. Returns 0, or -1 with the value untouched.
static inline int flags_assign(Flag* row, const char* text, char error[FLAG_ERROR_SIZE]) {
    if (row->type == FLAG_STRING) {
        *(const char**)row->value = text;
    } else if (row->type == FLAG_CHOICE) {
        size_t length = strlen(text);
        int index = 0;
        for (const char* name = row->choices;; index++) {
            size_t this_length = strcspn(name, "|");
            if (length > 0 && length == this_length && memcmp(name, text, length) == 0) break;
            if (name[this_length] == '\0') return flags_complain(row, text, "is not one of the choices", error);
            name += this_length + 1;
        }
        *(int*)row->value = index;
    } else if (row->type == FLAG_REAL) {
        // The set of characters leaves out what strtod would also take: nan, inf, hexadecimal, white space.
        char* end = NULL;
        errno = 0;
        double x = strtod(text, &end);
        int is_beyond = errno == ERANGE;  // infinite, or so small that it would become 0
        if (*text == '\0' || *end != '\0' || text[strspn(text, "+-.eE0123456789")] != '\0')
            return flags_complain(row, text, "is not a number", error);
        if (is_beyond || !(x >= row->min && x <= row->max)) return flags_complain(row, text, "is out of range", error);
        *(double*)row->value = x;
    } else {
        const char* digits = text + (*text == '-');
        if (*digits == '\0' || digits[strspn(digits, "0123456789")] != '\0')
            return flags_complain(row, text, "is not a whole number", error);
        errno = 0;
        long long x = strtoll(text, NULL, 10);
        if (errno || !((double)x >= row->min && (double)x <= row->max) ||
            (row->type == FLAG_INT && (x < INT_MIN || x > INT_MAX)))
            return flags_complain(row, text, "is out of range", error);
        if (row->type == FLAG_INT) *(int*)row->value = (int)x;
        else *(int64_t*)row->value = (int64_t)x;
    }
    return 0;
}

// Give the row a value from elsewhere (a saved run), as text that is copied. Returns 0, or -1 with `error`.
static inline int flags_set(Flag* row, const char* text, char error[FLAG_ERROR_SIZE]) {
    if (row->type != FLAG_STRING) return flags_assign(row, text, error);
    char* copy = xprintf("%s", text);
    if (row->is_set & FLAG_IS_COPY) free(*(char**)row->value);
    row->is_set |= FLAG_IS_COPY;
    return flags_assign(row, copy, error);
}

// ---------------------------------------------------------------------------------------------------------
// The table

// The row with this short or long name (the first `n` bytes of `name`), or NULL.
static inline Flag* flags_find(Flag* rows, int count, const char* name, size_t n) {
    for (int i = 0; i < count; i++) {
        const char* names[2] = {rows[i].flag, rows[i].long_name};
        for (int k = 0; k < 2; k++)
            if (names[k] && strlen(names[k]) == n && memcmp(names[k], name, n) == 0) return &rows[i];
    }
    return NULL;
}

// Whether the command line has it.
static inline int flag_is_given(Flag* rows, int count, const char* name) {
    return (flags_find(rows, count, name, strlen(name))->is_set & FLAG_IS_GIVEN) != 0;
}

static inline void flags_free(Flag* rows, int count) {
    for (int i = 0; i < count; i++) {
        if (!(rows[i].is_set & FLAG_IS_COPY)) continue;
        free(*(char**)rows[i].value);
        *(const char**)rows[i].value = NULL;
        rows[i].is_set &= ~FLAG_IS_COPY;
    }
}

// {"batch": 4, "train-data": "data/train*.bin", ...}
static inline void flags_to_json(Text* t, const Flag* rows, int count) {
    text_append(t, "{", 1);
    for (int i = 0; i < count; i++) {
        const Flag* row = &rows[i];
        char value[FLAG_TEXT_SIZE];
        json_put_key(t, row->long_name + 2);
        if (row->type == FLAG_STRING) {
            const char* s = *(const char* const*)row->value;
            text_json_string(t, s, strlen(s));
        } else {
            flags_format_value(row, value, sizeof(value));
            if (row->type == FLAG_CHOICE) text_json_string(t, value, strlen(value));
            else text_append(t, value, strlen(value));
        }
    }
    text_append(t, "}", 1);
}

// "batch                4", a line a row.
static inline void flags_print_values(const Flag* rows, int count) {
    for (int i = 0; i < count; i++) {
        char value[FLAG_TEXT_SIZE];
        flags_format_value(&rows[i], value, sizeof(value));
        const char* text = rows[i].type == FLAG_STRING ? *(const char* const*)rows[i].value : value;
        printf("%-20s %s\n", rows[i].long_name + 2, text);
    }
}

// Print `help` from column `indent` on, broken between words before column 120.
static inline void flags_print_wrapped(const char* help, int indent) {
    int column = indent;
    while (*help) {
        int word = (int)strcspn(help, " ");
        if (column > indent && column + 1 + word > 120) {
            printf("\n%*s", indent, "");
            column = indent;
        } else if (column > indent) {
            putchar(' ');
            column++;
        }
        printf("%.*s", word, help);
        column += word;
        help += word;
        help += strspn(help, " ");
    }
    putchar('\n');
}

static inline void flags_print_help(const Flag* rows, int count, const char* usage_line) {
    // A column is as wide as its widest entry, within reason.
    static const char* const heads[] = {"flag", "long name", "default", "allowed"};
    static const int limits[] = {6, 24, 24, 34};
    char range[FLAG_TEXT_SIZE];
    int width[4];
    for (int c = 0; c < 4; c++) {
        width[c] = (int)strlen(heads[c]);
        for (int i = 0; i < count; i++) {
            flags_format_range(&rows[i], range, sizeof(range));
            const char* cells[4] = {rows[i].flag ? rows[i].flag : "", rows[i].long_name, rows[i].default_text, range};
            width[c] = max_int(width[c], min_int((int)strlen(cells[c]), limits[c]));
        }
    }
    int indent = 2 + width[0] + 2 + width[1] + 2 + width[2] + 2 + width[3] + 2;
    printf("usage: %s\n\n", usage_line);
    printf("  %-*s  %-*s  %-*s  %s\n", width[0], heads[0], width[1], heads[1], width[2], heads[2], heads[3]);
    for (int i = 0; i < count; i++) {
        flags_format_range(&rows[i], range, sizeof(range));
        int used = printf("  %-*s  %-*s  %-*s  %-*s  ", width[0], rows[i].flag ? rows[i].flag : "", width[1],
                          rows[i].long_name, width[2], rows[i].default_text, width[3], range);
        if (used > indent) printf("\n%*s", indent, "");
        flags_print_wrapped(rows[i].help, indent);
    }
    printf("  %-*s  %-*sprint this table and end\n", width[0], "", indent - width[0] - 4, "--help");
}

// Letters to insert, delete or replace to come from a[0..n) to b (at most 63 letters of each).
static inline int flags_distance(const char* a, size_t n, const char* b) {
    int row[64];
    size_t m = min_size(strlen(b), 63);
    n = min_size(n, 63);
    for (size_t j = 0; j <= m; j++) row[j] = (int)j;
    for (size_t i = 1; i <= n; i++) {
        int diagonal = row[0];
        row[0] = (int)i;
        for (size_t j = 1; j <= m; j++) {
            int replace = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = min_int(replace, min_int(row[j], row[j - 1]) + 1);
        }
    }
    return row[m];
}

// The long name that `name` was probably meant to be, or NULL.
static inline const char* flags_nearest(const Flag* rows, int count, const char* name, size_t n) {
    const char* best = NULL;
    int best_distance = n < 7 ? 2 : 3;
    if (name[0] != '-' || n < 4) return NULL;
    for (int i = 0; i < count; i++) {
        int starts_it = strncmp(rows[i].long_name, name, n) == 0;
        int distance = starts_it ? 0 : flags_distance(name, n, rows[i].long_name);
        if (distance < best_distance) best = rows[i].long_name, best_distance = distance;
    }
    return best;
}

// Every row gets its default and then what the user gave. Ends the program on --help and on any mistake.
static inline void flags_parse(Flag* rows, int count, int argc, char** argv, const char* usage_line) {
    char error[FLAG_ERROR_SIZE];
    for (int i = 0; i < count; i++) {
        const Flag* row = &rows[i];
        rows[i].is_set = 0;
        if (flags_assign(&rows[i], row->default_text, error) != 0)
            die(FAILED, "internal: the table's default for %s", error);
        if (flags_find(rows, count, row->long_name, strlen(row->long_name)) != row ||
            (row->flag && flags_find(rows, count, row->flag, strlen(row->flag)) != row))
            die(FAILED, "internal: two rows of the table are named %s", row->long_name);
    }
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") != 0) continue;
        flags_print_help(rows, count, usage_line);
        exit(DONE);
    }
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i], *text = NULL;
        size_t n = strcspn(name, "=");
        Flag* row = flags_find(rows, count, name, n);
        if (!row && name[0] != '-')
            die(USAGE, "'%.80s' is not a flag, and only flags are understood; all flags: --help", name);
        if (!row) {
            const char* nearest = flags_nearest(rows, count, name, n);
            if (nearest) die(USAGE, "unknown flag '%.80s'; did you mean %s? All flags: --help", name, nearest);
            die(USAGE, "unknown flag '%.80s'; all flags: --help", name);
        }
        if (row->is_set) die(USAGE, "%s is given twice ('%.80s' is the second); give it once", row->long_name, name);
        if (name[n] == '=') text = name + n + 1;
        else if (i + 1 < argc) text = argv[++i];
        // A flag where a value should be is a forgotten value, also for text, which could be anything.
        if (text && name[n] != '=' && flags_find(rows, count, text, strcspn(text, "="))) text = NULL;
        if (!text) {
            char range[FLAG_TEXT_SIZE];
            flags_format_range(row, range, sizeof(range));
            die(USAGE, "%s needs a value; allowed: %s", name, range);
        }
        if (flags_assign(row, text, error) != 0) die(USAGE, "%s", error);
        row->is_set = FLAG_IS_GIVEN;
    }
}

#endif
