/* Labelled text as tab-separated values: a class for each text, or pair of texts.
 *
 *   a line     label <tab> text [<tab> second text], UTF-8; a line without anything in it is passed over
 *   a header   a first line with a field "label" or "gold_label" names the columns instead: that one, then text, text_a,
 *              sentence, sentence1, question, question1 or premise, and where there are pairs text_b, sentence2,
 *              question2 or hypothesis, or beside question sentence, text, passage or context. All others are passed over
 *   a label    the class's number from 0, or its name. Names are those of the model, where it has them; else those of
 *              the training data in the order of their bytes
 *   no labels  where only predictions are wanted, the file may be lines of one text without a tab, or begin with a header
 *              that names a text and no label. Then every line counts, so that predictions are those of the lines: an
 *              empty one is an empty text, or where a line has several columns refused
 *
 * Nothing is quoted: a quotation mark is a character like others. Texts become [CLS] A [SEP] or [CLS] A [SEP] B [SEP].
 * What is too long for T tokens is cut at its end, of a pair the longer text first, as Hugging Face's `tokenizers` cuts
 * it (longest_first): where the room for both is odd, the second text has one token more than the first, unless the first
 * is longer and the second below T tokens. */
#ifndef LLMC_LABELLED_H
#define LLMC_LABELLED_H

#include "examples.h"
#include "wordpiece.h"

#define LABELLED_MAX_FILE ((size_t)1 << 32)
enum { LABELLED_COLUMNS = 1 << 10, LABEL_NAME_SIZE = 256 };

// Names of the classes; count 0: they are numbers.
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

// The class of that name, -1 where there is none.
static inline int label_names_find(const LabelNames* n, const char* text, size_t length) {
    for (int i = 0; i < n->count; i++)
        if (strlen(n->name[i]) == length && memcmp(n->name[i], text, length) == 0) return i;
    return -1;
}

static inline int label_names_compare(const void* a, const void* b) {
    return strcmp(*(const char* const*)a, *(const char* const*)b);
}

// Whether no name is there twice.
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

// A whole number below `labels`, -1 where the text is anything else.
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

// A file on its way: its columns, and the line that was read last.
typedef struct {
    const char* path;
    char* text;
    size_t size, begin, at;
    int line;           // number of the last line
    int label, a, b;    // columns; label -1: there are no labels; b -1: there are no pairs
    int least, header;  // fields of a line, at least; 1: the first line is a header
    int has_empty;      // 1: an empty line has one field without anything in it; 0: it is passed over
} Labelled;

static inline int field_is(Field f, const char* names) {
    size_t n = f.length;
    for (const char* p = strchr(names, ' '); n > 0 && p && p[1]; p = strchr(p + 1, ' '))
        if (strncmp(p + 1, f.text, n) == 0 && p[1 + n] == ' ') return 1;
    return 0;
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
        for (const char* p = begin; p <= end && count < LABELLED_COLUMNS;) {
            const char* tab = (const char*)memchr(p, '\t', (size_t)(end - p));
            Field f = {p, (size_t)((tab ? tab : end) - p)};
            field[count++] = f;
            p = tab ? tab + 1 : end + 1;
        }
    }
    return count;
}

// Find the columns that a header names, if the first line is one. With NULL `names` there are labels. Else there may be
// none, and a first line that begins with a number or one of the names is no header without them.
static inline void labelled_read_header(Labelled* l, const LabelNames* names) {
    static const char* const columns[][2] = {
        {" text text_a sentence sentence1 question1 premise ", " text_b sentence2 question2 hypothesis "},
        {" question ", " sentence text passage context "}};
    Field field[LABELLED_COLUMNS];
    int count = labelled_split(l, field), found[2][2] = {{-1, -1}, {-1, -1}}, label = -1;
    l->label = 0, l->a = 1, l->b = count > 2 ? 2 : -1, l->least = count > 2 ? 3 : 2;
    for (int i = 0; i < count; i++) {
        if (field_is(field[i], " label gold_label ")) label = i;
        for (int kind = 0; kind < 2; kind++)
            for (int k = 0; k < 2; k++)
                if (field_is(field[i], columns[kind][k])) found[kind][k] = i;
    }
    int kind = found[1][0] >= 0;  // a question with a sentence: that is no pair of its own without the question
    int begins_with_label = count > 1 && names &&
                            (label_number(field[0].text, field[0].length, 1 << 30) >= 0 ||
                             label_names_find(names, field[0].text, field[0].length) >= 0);
    l->header = label >= 0 || (names && !begins_with_label && found[kind][0] >= 0);
    if (!l->header) {
        if (names && count == 1) l->label = -1, l->a = 0, l->least = 1;
        l->at = l->begin, l->line = 0;
        return;
    }
    l->label = label, l->a = found[kind][0], l->b = found[kind][1];
    if (l->a < 0)
        die(USAGE,
            "%s: line 1 has a column for labels, but none called text, sentence, sentence1, question, question1 or "
            "premise",
            l->path);
    l->least = max_int(l->label, max_int(l->a, l->b)) + 1;
}

// `names`: of the classes, where predictions are wanted and the file may be without labels; else NULL.
static inline void labelled_open(Labelled* l, const char* path, const LabelNames* names) {
    memset(l, 0, sizeof *l);
    l->path = path;
    l->text = read_file(path, LABELLED_MAX_FILE, &l->size, USAGE);
    if (l->size >= 3 && memcmp(l->text, "\xEF\xBB\xBF", 3) == 0) l->begin = 3;  // a byte order mark
    l->at = l->begin;
    l->has_empty = names != NULL;
    labelled_read_header(l, names);
}

// Split the next line, which has to have all columns. Returns 0 at the end of the file.
static inline int labelled_next(Labelled* l, Field field[LABELLED_COLUMNS]) {
    int count = labelled_split(l, field);
    if (count > 0 && count < l->least)
        die(USAGE, "%s: line %d has %d field%s with tabs between them; it needs %d%s", l->path, l->line, count,
            count == 1 ? "" : "s", l->least, l->header ? "" : ", a label and what line 1 has after its own");
    if (count > l->least && l->label >= 0 && !l->header)
        die(USAGE,
            "%s: line %d has %d fields with tabs between them, but a label and what line 1 has after its own are %d",
            l->path, l->line, count, l->least);
    if (count > 1 && l->label < 0 && !l->header)
        die(USAGE, "%s: line %d has %d fields with tabs between them, but line 1 is a text without a label", l->path,
            l->line, count);
    return count > 0;
}

// ---------------------------------------------------------------------------------------------------------
// Examples

// Take the names of the classes from training data, at most `labels`; none where all labels are numbers below that.
static inline void labelled_find_names(LabelNames* names, const char* path, int labels) {
    Labelled l;
    Field field[LABELLED_COLUMNS];
    int are_numbers = 1;
    labelled_open(&l, path, NULL);
    while (labelled_next(&l, field)) {
        Field label = field[l.label];
        for (size_t i = 0, n; i < label.length; i += n)  // what config.json can hold
            if ((n = utf8_sequence(label.text + i, label.length - i)) == 0)
                die(USAGE, "%s: line %d: the label is not UTF-8", path, l.line);
        if (label.length == 0 || label_names_find(names, label.text, label.length) >= 0) continue;
        if (label_number(label.text, label.length, labels) < 0) are_numbers = 0;
        if (names->count == labels)
            die(USAGE, "%s: line %d: \"%.*s\" is one more label than --labels %d allows", path, l.line,
                (int)min_size(label.length, 80), label.text, labels);
        label_names_add(names, label.text, label.length);
    }
    if (!are_numbers && names->count < labels)
        die(USAGE, "%s: has %d different labels, not the %d of --labels; lower that, or number the classes", path,
            names->count, labels);
    if (are_numbers) label_names_free(names);
    else qsort(names->name, (size_t)names->count, sizeof(char*), label_names_compare);
    free(l.text);
}

// Append one text or a pair (b->text NULL: none) as a sequence of at most T tokens.
static inline void labelled_add(Examples* e, const WordPiece* words, Field a, Field b, int T, int label) {
    TokenIds first = {NULL, 0, 0, 0, NULL}, second = {NULL, 0, 0, 0, NULL}, all = {NULL, 0, 0, 0, NULL};
    wordpiece_encode(&first, words, a.text, a.length);
    if (b.text) wordpiece_encode(&second, words, b.text, b.length);
    // Both are cut to half the room where both are longer; else the longer one gives way. Which one is longer is told of
    // their first T tokens.
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

// Read a file of texts with one of `labels` classes, as sequences of at most T >= 8 tokens. `may_lack` 1: it may be
// without labels, and the class of all examples is -1 then.
static inline void labelled_read(Examples* e, const char* path, const WordPiece* words, const LabelNames* names,
                                 int labels, int T, int may_lack) {
    Labelled l;
    Field field[LABELLED_COLUMNS];
    int has_numbers = 0;  // among the names: then a number is no other class's
    for (int i = 0; i < names->count; i++)
        has_numbers |= label_number(names->name[i], strlen(names->name[i]), 1 << 30) >= 0;
    examples_open(e, 1);
    labelled_open(&l, path, may_lack ? names : NULL);
    while (labelled_next(&l, field)) {
        const Field none = {NULL, 0};
        Field label = l.label >= 0 ? field[l.label] : none;
        int number = l.label >= 0 ? label_names_find(names, label.text, label.length) : -1;
        if (number < 0 && l.label >= 0 && !has_numbers) number = label_number(label.text, label.length, labels);
        if (number < 0 && l.label >= 0)
            die(USAGE,
                "%s: line %d: the label \"%.*s\" is neither a number from 0 to %d (--labels) nor one of the model's "
                "names%s%s",
                path, l.line, (int)min_size(label.length, 80), label.text, labels - 1, names->count ? ", such as " : "",
                names->count ? names->name[0] : "");
        labelled_add(e, words, field[l.a], l.b >= 0 ? field[l.b] : none, T, number);
    }
    if (e->count == 0) die(USAGE, "%s: holds no %stext", path, l.label < 0 ? "" : "labelled ");
    free(l.text);
}

#endif
