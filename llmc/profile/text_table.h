/* A table that is filled once and printed as aligned text, CSV (RFC 4180) or JSON.
 *
 *     static const TableColumn columns[] = {{"op", TABLE_TEXT, 0, 0}, {"ms", TABLE_NUMBER, 3, 0}};
 *     Table t;
 *     table_open(&t, "ops", "By op", columns, COUNT_OF(columns));
 *     table_text(&t, "matmul"), table_number(&t, 1.5);     // a row, cell by cell
 *     table_put_text(&text, &t);
 *     table_free(&t);
 *
 * Cells are filled from left to right, row after row. */
#ifndef LLMC_PROFILE_TEXT_TABLE_H
#define LLMC_PROFILE_TEXT_TABLE_H

#include "llmc/base/json.h"

typedef enum { TABLE_TEXT, TABLE_NUMBER } TableType;

typedef struct {
    const char* name;
    TableType type;
    int digits;    // of numbers, after the decimal point
    int only_csv;  // 1: too long for aligned text
} TableColumn;

// Text, or a number if `text` is NULL; NaN is an empty cell.
typedef struct {
    char* text;
    double number;
} TableCell;

typedef struct {
    const char *id, *title;
    char* note;  // a sentence or two below the title; NULL: none
    const TableColumn* columns;
    size_t column_count;
    TableCell* cells;
    size_t count, capacity;  // of cells
} Table;

static inline void table_open(Table* t, const char* id, const char* title, const TableColumn* columns, size_t count) {
    memset(t, 0, sizeof *t);
    t->id = id, t->title = title;
    t->columns = columns, t->column_count = count;
}

static inline void table_free(Table* t) {
    for (size_t i = 0; i < t->count; i++) free(t->cells[i].text);
    free(t->cells), free(t->note);
    memset(t, 0, sizeof *t);
}

static inline size_t table_rows(const Table* t) { return t->count / t->column_count; }

static inline void table_add(Table* t, TableType type, char* text, double number) {
    CHECK(t->columns[t->count % t->column_count].type == type);
    t->cells = (TableCell*)array_reserve(t->cells, &t->capacity, t->count + 1, sizeof *t->cells);
    TableCell cell = {.text = text, .number = number};
    t->cells[t->count++] = cell;
}

// NULL: an empty cell.
static inline void table_text(Table* t, const char* text) {
    table_add(t, TABLE_TEXT, text ? xprintf("%s", text) : NULL, (double)NAN);
}

// NaN: an empty cell.
static inline void table_number(Table* t, double number) { table_add(t, TABLE_NUMBER, NULL, number); }

// The cell as text; "" if it is empty.
static inline const char* table_cell(const Table* t, size_t row, size_t column, char number[48]) {
    const TableCell* cell = &t->cells[row * t->column_count + column];
    if (cell->text) return cell->text;
    number[0] = '\0';
    if (isfinite(cell->number)) snprintf(number, 48, "%.*f", t->columns[column].digits, cell->number);
    return number;
}

// ---------------------------------------------------------------------------------------------------------
// Writing

// Columns padded to their widest cell, numbers right-aligned; an empty cell is "-". Unless `keep_spaces`, spaces inside
// cells become commas, so that each word of a line is one cell.
static inline void table_put_text(Text* out, const Table* t, int keep_spaces) {
    size_t rows = table_rows(t);
    char number[48];
    size_t* width = (size_t*)xcalloc(t->column_count, sizeof *width);
    for (size_t c = 0; c < t->column_count; c++) {
        width[c] = strlen(t->columns[c].name);
        for (size_t r = 0; r < rows; r++) width[c] = max_size(width[c], strlen(table_cell(t, r, c, number)));
    }
    for (size_t r = 0; r <= rows; r++) {
        size_t begin = out->length;
        for (size_t c = 0; c < t->column_count; c++) {
            if (t->columns[c].only_csv) continue;
            const char* cell = r == 0 ? t->columns[c].name : table_cell(t, r - 1, c, number);
            size_t at = out->length;
            if (!*cell) cell = "-";
            if (t->columns[c].type == TABLE_TEXT) text_printf(out, "%-*s  ", (int)width[c], cell);
            else text_printf(out, "%*s  ", (int)width[c], cell);
            for (size_t i = at; !keep_spaces && i < at + strlen(cell); i++)
                if (out->text[i] == ' ' && t->columns[c].type == TABLE_TEXT) out->text[i] = ',';
        }
        while (out->length > begin && out->text[out->length - 1] == ' ') out->length--;
        text_append(out, "\n", 1);
    }
    free(width);
}

static inline void table_put_csv(Text* out, const Table* t) {
    size_t rows = table_rows(t);
    char number[48];
    for (size_t c = 0; c < t->column_count; c++) text_printf(out, "%s%s", c ? "," : "", t->columns[c].name);
    text_append(out, "\r\n", 2);
    for (size_t r = 0; r < rows; r++) {
        for (size_t c = 0; c < t->column_count; c++) {
            const char* cell = table_cell(t, r, c, number);
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
    char number[48];
    text_append(out, "{", 1);
    json_put_string(out, "id", t->id);
    json_put_string(out, "title", t->title);
    json_put_string(out, "note", t->note ? t->note : "");
    text_printf(out, ",\n\"columns\": [");
    for (size_t c = 0; c < t->column_count; c++)
        text_printf(out, "%s[\"%s\", \"%s\"]", c ? ", " : "", t->columns[c].name,
                    t->columns[c].type == TABLE_NUMBER ? "number" : "text");
    text_printf(out, "],\n\"rows\": [");
    for (size_t r = 0; r < rows; r++) {
        text_printf(out, "%s\n[", r ? "," : "");
        for (size_t c = 0; c < t->column_count; c++) {
            const char* cell = table_cell(t, r, c, number);
            if (c) text_append(out, ", ", 2);
            if (!*cell) text_append(out, "null", 4);
            else if (t->columns[c].type == TABLE_NUMBER) text_append(out, cell, strlen(cell));
            else text_json_string(out, cell, strlen(cell));
        }
        text_append(out, "]", 1);
    }
    text_append(out, "]}", 2);
}

#endif
