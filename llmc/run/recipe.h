/* Recipes: files of flags. One flag per line, with its value after a blank or =. "#" begins a comment. If several lines
 * set a flag, the last one wins. A flag on the command line overrides the recipe.
 *
 * The values are ordinary settings, so trainer.json has them. A resumed run takes them from there and does not open the
 * recipe, which may have changed or be gone. */
#ifndef LLMC_RUN_RECIPE_H
#define LLMC_RUN_RECIPE_H

#include "llmc/run/find_files.h"

// The file of a recipe: `name` itself if it has a slash or a dot, else NAME.flags in scripts/recipes, in the working
// directory or next to the program. The caller frees it.
static inline char* recipe_path(const char* name) {
    if (strpbrk(name, "./")) return xprintf("%s", name);
    char *file = xprintf("scripts/recipes/%s.flags", name), *path = find_beside_program(file);
    free(file);
    return path;
}

// Apply one line. Overwrites `line`.
static inline void recipe_apply_line(Flag* flags, int count, char* line, const char* path, int number) {
    char error[FLAG_ERROR_SIZE];
    line[strcspn(line, "#")] = '\0';
    line += strspn(line, " \t");
    size_t n = strcspn(line, " \t=");
    char* text = line + n + strspn(line + n, " \t");
    if (*text == '=') text += 1 + strspn(text + 1, " \t");
    for (size_t end = strlen(text); end > 0 && strchr(" \t", text[end - 1]); end--) text[end - 1] = '\0';
    if (n == 0) return;
    Flag* row = flags_find(flags, count, line, n);
    if (!row) {
        char where[4200];  // a path is at most 4096 bytes long
        snprintf(where, sizeof where, "%s:%d: ", path, number);
        flags_refuse_retired(line, n, where);
    }
    if (!row || strcmp(row->long_name, "--recipe") == 0)
        die(USAGE, "%s:%d: '%.*s' is not a flag of this program that a recipe may set", path, number, (int)n, line);
    if (*text == '\0') die(USAGE, "%s:%d: %s needs a value", path, number, row->long_name);
    int is_given = row->is_set & FLAG_IS_GIVEN;
    Flag copy = *row;
    union {
        int integer;
        int64_t size;
        double number;
        const char* string;
    } value;
    if (is_given) copy.value = &value;  // the command line wins, but a mistake in the recipe is reported
    if ((is_given ? flags_assign(&copy, text, error) : flags_set(row, text, error)) != 0)
        die(USAGE, "%s:%d: %s", path, number, error);
}

// Apply a recipe to the rows that the command line has not set.
static inline void recipe_apply(Flag* flags, int count, const char* name) {
    enum { MOST_BYTES = 1 << 20 };
    size_t n, length;
    char *path = recipe_path(name), *text = read_file(path, MOST_BYTES, &n, USAGE);
    int number = 1;
    for (size_t at = utf8_mark(text, n); at < n; at += length + 1, number++) {
        char *line = text + at, *end = (char*)memchr(line, '\n', n - at);
        size_t kept = length = end ? (size_t)(end - line) : n - at;
        if (kept > 0 && line[kept - 1] == '\r') kept--;
        line[kept] = '\0';
        if (strcspn(line, "\r") != kept) die(USAGE, "%s:%d: has a CR or NUL inside; end lines with LF", path, number);
        recipe_apply_line(flags, count, line, path, number);
    }
    free(text), free(path);
}

#endif
