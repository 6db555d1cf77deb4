/* Command line flags as rows of a table. The same rows parse the command line, check it, print --help by topic, and are
 * saved with a run.
 *
 *     int batch;
 *     Flag rows[] = {
 *         {"-b", "--batch", FLAG_INT, &batch, "4", 1, 65536, NULL, SCOPE_RUN, TOPIC_BATCH, "Sequences."},
 *     };
 *     flags_parse(rows, COUNT_OF(rows), argc, argv, "./train_gpt2 [flags]");
 *
 * `-b 4`, `--batch 4` and `--batch=4` are the same. A mistake ends the program with status 2 before it does anything,
 * in one line with the flag, the value given and the values allowed. */
#ifndef LLMC_BASE_FLAGS_H
#define LLMC_BASE_FLAGS_H

#include <limits.h>

#include "llmc/base/flags_retired.h"
#include "llmc/base/json.h"

typedef enum { FLAG_INT, FLAG_SIZE, FLAG_REAL, FLAG_STRING, FLAG_CHOICE } FlagType;

// How far a flag's value must agree: with the checkpoint when a run is resumed, and between the ranks of a run.
typedef enum {
    SCOPE_RUN,      // part of the run: restored from the checkpoint, and a contradicting flag is refused
    SCOPE_FREE,     // restored from the checkpoint, but a flag may change it
    SCOPE_PROCESS,  // of this process, not of the run that it continues: never restored
    SCOPE_RANK,     // the same, and ranks may differ in it
} FlagScope;

// Headings of --help, in their order.
typedef enum {
    TOPIC_NONE,
    TOPIC_MODEL,
    TOPIC_DATA,
    TOPIC_RUN,
    TOPIC_BATCH,
    TOPIC_OPTIMIZATION,
    TOPIC_MASKING,
    TOPIC_TASK,
    TOPIC_VALIDATION,
    TOPIC_SAMPLES,
    TOPIC_CHECKPOINTS,
    TOPIC_RANKS,
    TOPIC_PROFILE,
    TOPIC_DEVICE,
    TOPICS
} FlagTopic;

static const char* const FLAG_TOPICS[TOPICS] = {
    NULL,           "Model",         "Data",        "Run and output", "Batch and memory",
    "Optimization", "Masked tokens", "Fine-tuning", "Validation",     "Samples and generated text",
    "Checkpoints",  "Ranks",         "Profile",     "GPU and CPU"};

typedef struct {
    const char* flag;       // "-b", or NULL
    const char* long_name;  // "--batch"
    FlagType type;
    void* value;               // int*, int64_t*, double*, const char**; int* for the index of a choice
    const char* default_text;  // parsed like a user's value
    double min, max;           // of numbers, inclusive; -INFINITY and INFINITY for no bound
    const char* choices;       // "a|b|c", else NULL
    FlagScope scope;
    FlagTopic topic;
    const char* help;
    int is_set;  // omitted in the table, so 0; see below
} Flag;

// Bits of is_set: FLAG_IS_GIVEN: on the command line. FLAG_IS_COPY: its string is a copy that flags_free() frees.
enum { FLAG_IS_GIVEN = 1, FLAG_IS_COPY = 2, FLAG_TEXT_SIZE = 256, FLAG_ERROR_SIZE = 512 };

// ---------------------------------------------------------------------------------------------------------
// One row

// The allowed values: "1..8", ">= 0", "cosine|linear".
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

// The value as text, from which flags_set() reads the same value.
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

// Parse `text` into the row's value; a string is not copied. Returns 0, or -1 with the value unchanged.
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
        // The set of characters excludes what strtod also accepts: nan, inf, hexadecimal, white space.
        char* end = NULL;
        errno = 0;
        double x = strtod(text, &end);
        int is_beyond = errno == ERANGE;  // overflow, or an underflow to 0
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

// Set the row's value from the text of a saved run, which is copied. Returns 0, or -1 with `error`.
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

// Whether the command line has this flag. A program without the flag never has it.
static inline int flag_is_given(Flag* rows, int count, const char* name) {
    const Flag* row = flags_find(rows, count, name, strlen(name));
    return row && (row->is_set & FLAG_IS_GIVEN) != 0;
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

// "batch                4", one line per row.
static inline void flags_print_values(const Flag* rows, int count) {
    for (int i = 0; i < count; i++) {
        char value[FLAG_TEXT_SIZE];
        flags_format_value(&rows[i], value, sizeof(value));
        const char* text = rows[i].type == FLAG_STRING ? *(const char* const*)rows[i].value : value;
        printf("%-20s %s\n", rows[i].long_name + 2, text);
    }
}

// Print a word after text that ends before `column`. If it would cross column 100, print it on a new line, indented to
// column `indent`. Returns the new column.
static inline int flags_print_word(const char* word, int length, int column, int indent) {
    int breaks = column > indent && column + 1 + length > 100;
    if (breaks) printf("\n%*s", indent, "");
    else if (column > indent) putchar(' ');
    printf("%.*s", length, word);
    return (breaks ? indent : column + (column > indent)) + length;
}

// The table by topic: flag, long name, default, and the help text followed by the allowed range in brackets.
static inline void flags_print_help(const Flag* rows, int count, const char* usage_line) {
    // After an entry that is wider than its column the help text starts on a new line.
    static const char* const heads[] = {"flag", "long name", "default"};
    static const int width[] = {4, 22, 9};
    char range[FLAG_TEXT_SIZE];
    int indent = 2 + width[0] + 2 + width[1] + 2 + width[2] + 2;
    printf("usage: %s\n\n", usage_line);
    printf("  %-*s  %-*s  %-*s  effect [allowed values]\n", width[0], heads[0], width[1], heads[1], width[2], heads[2]);
    printf("  %-*s  %-*sPrint this table and exit.\n", width[0], "", indent - width[0] - 4, "--help");
    for (int topic = TOPIC_NONE; topic < TOPICS; topic++) {
        int shown = 0;
        for (int i = 0; i < count; i++) {
            const Flag* row = &rows[i];
            if ((int)row->topic != topic) continue;
            if (!shown++ && FLAG_TOPICS[topic]) printf("\n%s\n", FLAG_TOPICS[topic]);
            int column = printf("  %-*s  %-*s  %-*s", width[0], row->flag ? row->flag : "", width[1], row->long_name,
                                width[2], row->default_text);
            if (column + 2 > indent) printf("\n%*s", indent, "");
            else printf("  ");
            column = indent;
            for (const char* word = row->help; *word; word += strspn(word, " ")) {
                int length = (int)strcspn(word, " ");
                column = flags_print_word(word, length, column, indent);
                word += length;
            }
            range[0] = '[';
            flags_format_range(row, range + 1, sizeof range - 2);
            strcat(range, "]");
            if (row->type != FLAG_STRING) flags_print_word(range, (int)strlen(range), column, indent);
            putchar('\n');
        }
    }
}

// Edit distance of a[0..n) and b: letters to insert, delete or replace (of at most 63 letters each).
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

// Names of the flags in other trainers.
// clang-format off
static const char* const FLAGS_ELSEWHERE[][2] = {
    {"batch-size", "--batch"}, {"micro-batch-size", "--batch"}, {"per-device-train-batch-size", "--batch"},
    {"train-batch-size", "--batch"}, {"global-batch-size", "--total-batch"}, {"learning-rate", "--lr"},
    {"num-train-epochs", "--epochs"}, {"max-steps", "--steps"}, {"max-iters", "--steps"}, {"train-iters", "--steps"},
    {"warmup-steps", "--warmup"}, {"warmup-iters", "--warmup"}, {"lr-scheduler-type", "--schedule"},
    {"adam-beta1", "--beta1"}, {"adam-beta2", "--beta2"}, {"adam-epsilon", "--eps"}, {"epsilon", "--eps"},
    {"max-grad-norm", "--clip"}, {"grad-clip", "--clip"}, {"seq-length", "--seq-len"}, {"sequence-length", "--seq-len"},
    {"max-seq-length", "--seq-len"}, {"max-length", "--seq-len"}, {"block-size", "--seq-len"},
    {"model-name-or-path", "--model"}, {"output-dir", "--output"}, {"out-dir", "--output"},
    {"train-file", "--train-data"}, {"validation-file", "--val-data"}, {"eval-steps", "--val-every"},
    {"eval-interval", "--val-every"}, {"eval-iters", "--val-batches"}, {"save-steps", "--checkpoint-every"},
    {"save-total-limit", "--keep"}, {"resume-from-checkpoint", "--resume"}};
// clang-format on

// Whether the user's `name` is closer than *distance to the name `candidate`. Leading dashes do not count; - and _ are
// the same.
static inline int flags_is_nearer(const char* name, size_t n, const char* candidate, int* distance) {
    char plain[64];
    size_t length = 0;
    while (n > 0 && *name == '-') name++, n--;
    for (size_t i = 0; i < n && length < sizeof plain; i++) plain[length++] = name[i] == '_' ? '-' : name[i];
    int is_start = length > 1 && strncmp(candidate, plain, length) == 0;
    int is = is_start ? candidate[length] != '\0' : flags_distance(plain, length, candidate);
    if (is >= *distance) return 0;
    *distance = is;
    return 1;
}

// The long name that the user probably meant by `name`, or NULL.
static inline const char* flags_nearest(Flag* rows, int count, const char* name, size_t n) {
    const char* best = NULL;
    int best_distance = n < 4 ? 1 : n < 7 ? 2 : 3;
    if (name[0] != '-' || n < 3) return NULL;
    for (int i = 0; i < count; i++)
        if (flags_is_nearer(name, n, rows[i].long_name + 2, &best_distance)) best = rows[i].long_name;
    for (size_t i = 0; i < COUNT_OF(FLAGS_ELSEWHERE); i++) {
        const char* ours = FLAGS_ELSEWHERE[i][1];
        if (flags_find(rows, count, ours, strlen(ours)) &&
            flags_is_nearer(name, n, FLAGS_ELSEWHERE[i][0], &best_distance))
            best = ours;
    }
    return best;
}

// The file that the value of a flag for a text names: FILE of "@FILE", standard input of "-" and "@-". NULL: the value is
// the text.
static inline const char* flags_text_file(const char* value) {
    if (strcmp(value, "-") == 0 || strcmp(value, "@-") == 0) return "/dev/stdin";
    return *value == '@' ? value + 1 : NULL;
}

// Set every row to its default, then to the user's value. Ends the program on --help and on any mistake.
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
        if (!row && name[0] != '-' && file_exists(name))
            die(USAGE, "'%.80s' is a file, not a flag; quote a pattern, or the shell expands it: 'data/*.bin'", name);
        if (!row && name[0] != '-')
            die(USAGE, "'%.80s' is not a flag, and only flags are understood; all flags: --help", name);
        if (!row) {
            flags_refuse_retired(name, n, "");
            const char* nearest = flags_nearest(rows, count, name, n);
            if (nearest) die(USAGE, "unknown flag '%.80s'; did you mean %s? All flags: --help", name, nearest);
            die(USAGE, "unknown flag '%.80s'; all flags: --help", name);
        }
        if (row->is_set) die(USAGE, "%s is given twice ('%.80s' is the second); give it once", row->long_name, name);
        if (name[n] == '=') text = name + n + 1;
        else if (i + 1 < argc) text = argv[++i];
        // A flag in place of a value means that the value is missing, also for text.
        if (text && name[n] != '=' && flags_find(rows, count, text, strcspn(text, "="))) text = NULL;
        if (!text) {
            char range[FLAG_TEXT_SIZE];
            flags_format_range(row, range, sizeof(range));
            die(USAGE, "%s needs a value; allowed: %s; all flags: --help", name, range);
        }
        if (flags_assign(row, text, error) != 0) die(USAGE, "%s", error);
        row->is_set = FLAG_IS_GIVEN;
    }
}

#endif
