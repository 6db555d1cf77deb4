/* A table that is filled once and printed as aligned text, CSV (RFC 4180) or, for the page, JSON.
 *
 *     Table t;
 *     table_open(&t, "ops", "By op");
 *     table_text(&t, "op", "matmul"), table_number(&t, "ms", 3, 1.5);     // a row, cell by cell
 *     table_put_text(&text, &t);
 *     table_free(&t);
 *
 * The cells of the first row name the columns. All rows have the same ones. */
#ifndef LLMC_PROFILE_TEXT_TABLE_H
#define LLMC_PROFILE_TEXT_TABLE_H

#include "llmc/base/json_write.h"

enum { TABLE_COLUMNS = 25, TABLE_TEXT = -1, TABLE_LONG_TEXT = -2 };

typedef struct {
    const char* name;
    int digits;  // of numbers, after the decimal point; TABLE_TEXT; TABLE_LONG_TEXT: too long for aligned text
} TableColumn;

typedef struct {
    const char *id, *title;
    char* note;  // a sentence or two below the title; NULL: none
    TableColumn columns[TABLE_COLUMNS];
    size_t column_count;
    char** cells;            // "": an empty one
    size_t count, capacity;  // of cells
} Table;

static inline void table_open(Table* t, const char* id, const char* title) {
    memset(t, 0, sizeof *t);
    t->id = id, t->title = title;
}

static inline void table_free(Table* t) {
    for (size_t i = 0; i < t->count; i++) free(t->cells[i]);
    free(t->cells), free(t->note);
    memset(t, 0, sizeof *t);
}

static inline size_t table_rows(const Table* t) { return t->column_count ? t->count / t->column_count : 0; }

static inline int table_is_text(const Table* t, size_t column) { return t->columns[column].digits < 0; }

static inline const char* table_cell(const Table* t, size_t row, size_t column) {
    return t->cells[row * t->column_count + column];
}

// Takes ownership of `cell`.
static inline void table_add(Table* t, const char* column, int digits, char* cell) {
    size_t c = 0;
    while (c < t->column_count && strcmp(t->columns[c].name, column) != 0) c++;
    if (c == t->column_count) {
        CHECK(c == t->count && c < TABLE_COLUMNS);  // in the first row
        t->columns[c].name = column, t->columns[c].digits = digits;
        t->column_count++;
    }
    CHECK(c == t->count % t->column_count && t->columns[c].digits == digits);
    t->cells = (char**)array_reserve(t->cells, &t->capacity, t->count + 1, sizeof *t->cells);
    t->cells[t->count++] = cell;
}

// NULL: an empty cell.
static inline void table_text(Table* t, const char* column, const char* text) {
    table_add(t, column, TABLE_TEXT, xprintf("%s", text ? text : ""));
}

// Not finite: an empty cell. `digits`: after the decimal point.
static inline void table_number(Table* t, const char* column, int digits, double number) {
    table_add(t, column, digits, isfinite(number) ? xprintf("%.*f", digits, number) : xprintf("%s", ""));
}

// ---------------------------------------------------------------------------------------------------------
// Writing

// Columns padded to their widest cell, numbers right-aligned; an empty cell is "-".
static inline void table_put_text(Text* out, const Table* t) {
    size_t rows = table_rows(t);
    size_t* width = (size_t*)xcalloc(t->column_count, sizeof *width);
    for (size_t c = 0; c < t->column_count; c++) {
        width[c] = strlen(t->columns[c].name);
        for (size_t r = 0; r < rows; r++) width[c] = max_size(width[c], strlen(table_cell(t, r, c)));
    }
    for (size_t r = 0; r <= rows; r++) {
        size_t begin = out->length;
        for (size_t c = 0; c < t->column_count; c++) {
            if (t->columns[c].digits == TABLE_LONG_TEXT) continue;
            const char* cell = r == 0 ? t->columns[c].name : table_cell(t, r - 1, c);
            if (!*cell) cell = "-";
            text_printf(out, table_is_text(t, c) ? "%-*s  " : "%*s  ", (int)width[c], cell);
        }
        while (out->length > begin && out->text[out->length - 1] == ' ') out->length--;
        text_append(out, "\n", 1);
    }
    free(width);
}

static inline void table_put_csv(Text* out, const Table* t) {
    size_t rows = table_rows(t);
    for (size_t c = 0; c < t->column_count; c++) text_printf(out, "%s%s", c ? "," : "", t->columns[c].name);
    text_append(out, "\r\n", 2);
    for (size_t r = 0; r < rows; r++) {
        for (size_t c = 0; c < t->column_count; c++) {
            const char* cell = table_cell(t, r, c);
            if (c) text_append(out, ",", 1);
            if (!cell[strcspn(cell, ",\"\r\n")]) {
                text_append(out, cell, strlen(cell));
                continue;
            }
            text_append(out, "\"", 1);
            for (; *cell; cell++) text_append(out, *cell == '"' ? "\"\"" : cell, *cell == '"' ? 2 : 1);
            text_append(out, "\"", 1);
        }
        text_append(out, "\r\n", 2);
    }
}

// {"id": ..., "title": ..., "note": ..., "columns": [[name, type], ...], "rows": [[cell, ...], ...]}
static inline void table_put_json(Text* out, const Table* t) {
    size_t rows = table_rows(t);
    text_append(out, "{", 1);
    json_put_string(out, "id", t->id);
    json_put_string(out, "title", t->title);
    json_put_string(out, "note", t->note ? t->note : "");
    text_printf(out, ",\n\"columns\": [");
    for (size_t c = 0; c < t->column_count; c++)
        text_printf(out, "%s[\"%s\", \"%s\"]", c ? ", " : "", t->columns[c].name,
                    table_is_text(t, c) ? "text" : "number");
    text_printf(out, "],\n\"rows\": [");
    for (size_t r = 0; r < rows; r++) {
        text_printf(out, "%s\n[", r ? "," : "");
        for (size_t c = 0; c < t->column_count; c++) {
            const char* cell = table_cell(t, r, c);
            if (c) text_append(out, ", ", 2);
            if (!*cell) text_append(out, "null", 4);
            else if (table_is_text(t, c)) text_json_string(out, cell, strlen(cell));
            else text_append(out, cell, strlen(cell));
        }
        text_append(out, "]", 1);
    }
    text_append(out, "]}", 2);
}

#endif
