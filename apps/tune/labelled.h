/* Labelled text as tab-separated values: a class for each text or pair of texts. labelled_files.h makes them of CSV
 * and of JSON lines.
 *
 *   line       label <tab> text [<tab> second text], UTF-8. Blank lines are skipped. A CR before the end of a line is
 *              part of the line ending
 *   header     a first line with a field "label", "gold_label", "is_duplicate", "Quality" or "score" names the columns:
 *              that one for the label; text, text_a, sentence, sentence1, question, question1, premise or #1 String for
 *              the text; for pairs also text_b, sentence2, question2, hypothesis or #2 String, or next to question:
 *              sentence, text, passage or context. Other columns are ignored. A first line that can only be a header
 *              with other names is refused
 *   label      the number of the class, from 0, or its name. Names are those of the model if it has names; else those
 *              of the training data, sorted by their bytes. With one label (a regression): any number
 *   no labels  for predictions only, the file may be lines of one text without tabs, or begin with a header that names
 *              a text and no label. Then there is one prediction per line: a blank line counts as an empty text in
 *              single-column files and is an error otherwise
 *
 * A quotation mark is a character like any other. Texts become [CLS] A [SEP] or [CLS] A [SEP] B [SEP]. Texts that are
 * too long for T tokens are truncated at the end, of a pair the longer text first, as by Hugging Face's `tokenizers`
 * (longest_first): if the number of tokens for both is odd, the second text has one token more than the first, unless
 * the first is longer and the second is below T tokens. */
#ifndef APPS_TUNE_LABELLED_H
#define APPS_TUNE_LABELLED_H

#include "apps/tune/labelled_files.h"
#include "llmc/bert/examples.h"
#include "llmc/model/model_files.h"
#include "llmc/text/wordpiece.h"

#define LABELLED_MAX_FILE ((size_t)1 << 32)
enum { LABELLED_COLUMNS = 1 << 10 };

// The names of the classes; count 0: classes are numbers.
typedef struct {
    char** name;
    int count;
} LabelNames;

static inline void label_names_free(LabelNames* n) {
    for (int i = 0; i < n->count; i++) free(n->name[i]);
    free(n->name);
    memset(n, 0, sizeof *n);
}

static inline void label_names_add(LabelNames* n, const char* text, size_t length) {
    n->name = (char**)xrealloc(n->name, ((size_t)n->count + 1) * sizeof(char*));
    n->name[n->count++] = xprintf("%.*s", (int)length, text);
}

// The class with that name, -1 if there is none.
static inline int label_names_find(const LabelNames* n, const char* text, size_t length) {
    for (int i = 0; i < n->count; i++)
        if (strlen(n->name[i]) == length && memcmp(n->name[i], text, length) == 0) return i;
    return -1;
}

static inline int label_names_compare(const void* a, const void* b) {
    return strcmp(*(const char* const*)a, *(const char* const*)b);
}

// Whether all names differ.
static inline int label_names_differ(const LabelNames* n) {
    size_t count = (size_t)n->count;
    int differ = 1;
    char** sorted = (char**)xmalloc(count * sizeof(char*));
    memcpy(sorted, n->name, count * sizeof(char*));
    qsort(sorted, count, sizeof(char*), label_names_compare);
    for (size_t i = 1; i < count; i++) differ &= strcmp(sorted[i], sorted[i - 1]) != 0;
    free(sorted);
    return differ;
}

// The value of a whole number below `labels`; -1 for any other text.
static inline int label_number(const char* text, size_t length, int labels) {
    int64_t value = 0;
    for (size_t i = 0; i < length; i++) {
        if (text[i] < '0' || text[i] > '9' || i > 8) return -1;
        value = 10 * value + text[i] - '0';
    }
    return length > 0 && value < labels ? (int)value : -1;
}

// ---------------------------------------------------------------------------------------------------------
// Lines

typedef struct {
    const char* text;
    size_t length;
} Field;

// The state of reading a file: its columns, and the last line.
typedef struct {
    const char* path;
    char* text;
    size_t size, begin, at;
    int line;         // number of the last line
    int label, a, b;  // columns; label -1: there are no labels; b -1: there are no pairs
    int least, most;  // number of fields of a line
    int header;       // 1: the first line is a header
    int has_empty;    // 1: a blank line is one empty field; 0: it is skipped
} Labelled;

// Whether the field is one of the names, "|a|b|c|".
static inline int field_is(Field f, const char* names) {
    size_t n = f.length;
    for (const char* p = names; n > 0 && p && p[1]; p = strchr(p + 1, '|'))
        if (strncmp(p + 1, f.text, n) == 0 && p[1 + n] == '|') return 1;
    return 0;
}

// A number that a regression can learn, else NaN: squared errors and their sum are floats.
static inline double field_number(Field f) {
    char text[64], *end;
    if (f.length == 0 || f.length >= sizeof text) return NAN;
    memcpy(text, f.text, f.length);
    text[f.length] = '\0';
    double x = strtod(text, &end);
    return *end == '\0' && strspn(text, "+-.eE0123456789") == f.length && fabs(x) <= 1e15 ? x : NAN;
}

// Split the next line. Returns its fields, 0 at the end of the file.
static inline int labelled_split(Labelled* l, Field field[LABELLED_COLUMNS]) {
    int count = 0;
    while (l->at < l->size && count == 0) {
        const char *begin = l->text + l->at, *end = (const char*)memchr(begin, '\n', l->size - l->at);
        if (!end) end = l->text + l->size;
        l->at = (size_t)(end - l->text) + 1;
        l->line++;
        if (end > begin && end[-1] == '\r') end--;
        if (begin == end && !l->has_empty) continue;
        for (size_t i = 0, left = (size_t)(end - begin), n; i < left; i += n)
            if ((n = utf8_length(begin + i, left - i)) == 0)
                die(USAGE, "%s: line %d: is not UTF-8 (byte %zu of the line); convert the file first", l->path, l->line,
                    i + 1);
        for (const char* p = begin; p <= end && count < LABELLED_COLUMNS;) {
            const char* tab = (const char*)memchr(p, '\t', (size_t)(end - p));
            Field f = {.text = p, .length = (size_t)((tab ? tab : end) - p)};
            field[count++] = f;
            p = tab ? tab + 1 : end + 1;
        }
    }
    return count;
}

#define LABELLED_LABELS "|label|gold_label|is_duplicate|Quality|score|"
#define LABELLED_TEXTS "text, sentence, sentence1, question, question1, premise or #1 String"

// If the first line is a header, find the columns that it names. With NULL `names` the file must have labels. Otherwise
// labels are optional, and a first line that begins with a number or one of the names is not taken for a header without
// labels.
static inline void labelled_read_header(Labelled* l, const LabelNames* names) {
    static const char* const columns[][2] = {{"|text|text_a|sentence|sentence1|question1|premise|#1 String|",
                                              "|text_b|sentence2|question2|hypothesis|#2 String|"},
                                             {"|question|", "|sentence|text|passage|context|"}};
    Field field[LABELLED_COLUMNS];
    int count = labelled_split(l, field), kind = 0, label = -1, found[2] = {-1, -1}, has_label = 0, has_text = 0;
    l->label = 0, l->a = 1, l->b = count > 2 ? 2 : -1, l->least = l->most = count > 2 ? 3 : 2;
    // Next to a question, "sentence" is the second text; otherwise it is the first.
    for (int i = 0; i < count; i++) kind |= field_is(field[i], columns[1][0]);
    for (int i = 0; i < count; i++)
        has_label |= field_is(field[i], LABELLED_LABELS), has_text |= field_is(field[i], columns[kind][0]);
    int begins_with_number = count > 1 && label_number(field[0].text, field[0].length, 1 << 30) >= 0;
    int begins_with_name = count > 1 && names && label_names_find(names, field[0].text, field[0].length) >= 0;
    l->header = !begins_with_number && ((has_label && count > 1) || (has_text && names && !begins_with_name));
    if (!l->header) {
        if (names && count == 1) l->label = -1, l->a = 0, l->least = l->most = 1;
        l->at = l->begin, l->line = 0;
        return;
    }
    for (int i = 0; i < count; i++) {
        int* column = field_is(field[i], LABELLED_LABELS)    ? &label
                      : field_is(field[i], columns[kind][0]) ? &found[0]
                      : field_is(field[i], columns[kind][1]) ? &found[1]
                                                             : NULL;
        if (!column) continue;
        if (*column >= 0)
            die(USAGE, "%s: line 1 names two columns, %d (\"%.*s\") and %d (\"%.*s\"), for the same; remove one",
                l->path, *column + 1, (int)field[*column].length, field[*column].text, i + 1, (int)field[i].length,
                field[i].text);
        *column = i;
    }
    l->label = label, l->a = found[0], l->b = found[1];
    if (l->a < 0) die(USAGE, "%s: line 1 has a column for labels, but none called " LABELLED_TEXTS, l->path);
    l->least = max_int(l->label, max_int(l->a, l->b)) + 1;
    l->most = count;
}

#define LABELLED_HINT "; if line 1 is a header, name its columns label and text, or label, sentence1 and sentence2"

// `names`: the names of the classes, for a file whose labels are optional (predictions); else NULL.
static inline void labelled_open(Labelled* l, const char* path, const LabelNames* names) {
    memset(l, 0, sizeof *l);
    l->path = path;
    l->text = read_file(path, LABELLED_MAX_FILE, &l->size, USAGE);
    if (name_ends_with(path, ".csv")) l->size = labelled_from_csv(path, l->text, l->size);
    int is_json = name_ends_with(path, ".jsonl");
    if (is_json) {
        Text lines = labelled_from_json(path, l->text, l->size);
        free(l->text);
        l->text = lines.text, l->size = lines.length, l->line = -1;
    }
    l->at = l->begin = utf8_mark(l->text, l->size);
    l->has_empty = names != NULL;
    labelled_read_header(l, names);
    if (is_json && !l->header) die(USAGE, "%s: line 1 has no key called label, or none called " LABELLED_TEXTS, path);
}

// Split the next line, which must have all columns. Returns 0 at the end of the file.
static inline int labelled_next(Labelled* l, Field field[LABELLED_COLUMNS]) {
    int count = labelled_split(l, field);
    if (count > 0 && count < l->least)
        die(USAGE, "%s: line %d has %d field%s with tabs between them; it needs %d%s", l->path, l->line, count,
            count == 1 ? "" : "s", l->least, l->header ? "" : ", a label and what line 1 has after its own");
    while (count > l->most && !field[count - 1].length) count--;  // tabs at the line's end
    if (count > l->most)
        die(USAGE, "%s: line %d has %d fields with tabs between them, but %s %d", l->path, l->line, count,
            l->header       ? "the header has"
            : l->label >= 0 ? "a label and what line 1 has after its own are"
                            : "line 1 is a text without a label:",
            l->most);
    return count > 0;
}

// ---------------------------------------------------------------------------------------------------------
// Examples

// Take the names of the classes, at most `labels`, from training data. None are set if all labels are numbers below
// `labels`, or if `labels` is 1 (a regression).
static inline void labelled_find_names(LabelNames* names, const char* path, int labels) {
    Labelled l;
    Field field[LABELLED_COLUMNS], first = {NULL, 0};
    int are_numbers = 1, lines = 0, numbers = 0;  // of all lines; of those with a number
    if (labels == 1) return;
    labelled_open(&l, path, NULL);
    while (labelled_next(&l, field)) {
        Field label = field[l.label];
        if (lines++ == 0) first = label;
        numbers += label_number(label.text, label.length, 1 << 30) >= 0;
        if (label.length == 0 || label_names_find(names, label.text, label.length) >= 0) continue;
        if (label_number(label.text, label.length, labels) < 0) are_numbers = 0;
        if (names->count == labels)
            die(USAGE, "%s: line %d: \"%.*s\" is one more label than --labels %d allows%s", path, l.line,
                (int)min_size(label.length, 80), label.text, labels, l.header ? "" : LABELLED_HINT);
        label_names_add(names, label.text, label.length);
    }
    if (!l.header && lines > 1 && numbers + 1 == lines && label_number(first.text, first.length, 1 << 30) < 0)
        die(USAGE, "%s: line 1: the label \"%.*s\" is not a number, as all others are" LABELLED_HINT, path,
            (int)min_size(first.length, 80), first.text);
    if (!are_numbers && names->count < labels)
        die(USAGE, "%s: has %d different labels, not the %d of --labels; lower that, or number the classes", path,
            names->count, labels);
    if (are_numbers) label_names_free(names);
    else qsort(names->name, (size_t)names->count, sizeof(char*), label_names_compare);
    free(l.text);
}

// Append a text or a pair (b.text is NULL without a second text) as a sequence of at most T tokens.
static inline void labelled_add(Examples* e, const WordPiece* words, Field a, Field b, int T, int label) {
    TokenIds first = {NULL, 0, 0, 0, NULL}, second = {NULL, 0, 0, 0, NULL}, all = {NULL, 0, 0, 0, NULL};
    wordpiece_encode(&first, words, a.text, a.length);
    if (b.text) wordpiece_encode(&second, words, b.text, b.length);
    // If both are longer than half, both are cut to half; else only the longer one is cut. Only the first T tokens of
    // each decide which is longer.
    size_t room = (size_t)T - (b.text ? 3 : 2), half = room / 2;
    first.count = min_size(first.count, (size_t)T), second.count = min_size(second.count, (size_t)T);
    if (first.count + second.count > room) {
        size_t shorter = min_size(first.count, second.count);
        size_t kept = min_size(shorter, half), rest = room - kept;
        int first_is_longer = first.count > second.count;
        first.count = first_is_longer ? rest : kept;
        second.count = b.text ? (first_is_longer ? kept : rest) : 0;
    }
    token_ids_add(&all, words->cls);
    for (size_t i = 0; i < first.count; i++) token_ids_add(&all, first.id[i]);
    token_ids_add(&all, words->sep);
    size_t begin = all.count;
    for (size_t i = 0; i < second.count; i++) token_ids_add(&all, second.id[i]);
    if (b.text) token_ids_add(&all, words->sep);
    examples_add(e, all.id, (int)all.count, (int)begin, label, 0, e->count);
    free(first.id), free(second.id), free(all.id);
}

// End with USAGE: the label is not a class or, for a regression, not a number.
static inline void labelled_refuse_label(const Labelled* l, Field label, const LabelNames* names, int labels) {
    int is_name = l->line == 1 && isnan(field_number(label)), length = (int)min_size(label.length, 80);
    const char* hint = is_name ? LABELLED_HINT : "";
    if (labels == 1)
        die(USAGE, "%s: line %d: the label \"%.*s\" is not a number, which --labels 1 takes%s", l->path, l->line,
            length, label.text, hint);
    die(USAGE,
        "%s: line %d: the label \"%.*s\" is neither a number from 0 to %d (--labels) nor one of the model's "
        "names%s%s%s",
        l->path, l->line, length, label.text, labels - 1, names->count ? ", such as " : "",
        names->count ? names->name[0] : "", hint);
}

// Read a file of texts, as sequences of at most T >= 8 tokens. Each has one of `labels` classes or, if `labels` is 1, a
// number (stored as the bits of a float). `may_lack` 1: labels are optional; without them the class of every example is
// -1.
static inline void labelled_read(Examples* e, const char* path, const WordPiece* words, const LabelNames* names,
                                 int labels, int T, int may_lack) {
    Labelled l;
    Field field[LABELLED_COLUMNS];
    int has_numbers = 0;  // some names are numbers: then a number is always a name
    for (int i = 0; i < names->count; i++)
        has_numbers |= label_number(names->name[i], strlen(names->name[i]), 1 << 30) >= 0;
    examples_open(e, 1);
    labelled_open(&l, path, may_lack ? names : NULL);
    while (labelled_next(&l, field)) {
        const Field none = {NULL, 0};
        Field label = l.label >= 0 ? field[l.label] : none;
        int number = -1;
        if (l.label >= 0 && labels == 1) {
            float value = (float)field_number(label);
            if (isnan(value)) labelled_refuse_label(&l, label, names, labels);
            memcpy(&number, &value, sizeof number);
        } else if (l.label >= 0) {
            number = label_names_find(names, label.text, label.length);
            if (number < 0 && !has_numbers) number = label_number(label.text, label.length, labels);
            if (number < 0) labelled_refuse_label(&l, label, names, labels);
        }
        labelled_add(e, words, field[l.a], l.b >= 0 ? field[l.b] : none, T, number);
    }
    if (e->count == 0) die(USAGE, "%s: contains no %stext", path, l.label < 0 ? "" : "labelled ");
    free(l.text);
}

#endif
