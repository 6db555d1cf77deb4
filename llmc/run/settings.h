/* Settings of a run that is resumed: those of its checkpoint win over flags, and a flag that contradicts them is
 * refused, because it would silently make another run of it. */
#ifndef LLMC_SETTINGS_H
#define LLMC_SETTINGS_H

#include "../base/flags.h"

// Does `name` (a long name) occur in the list, "--a --b --c"?
static inline int settings_listed(const char* list, const char* name) {
    size_t n = strlen(name);
    for (const char* p = strstr(list, name); p; p = strstr(p + 1, name))
        if ((p == list || p[-1] == ' ') && (p[n] == ' ' || p[n] == '\0')) return 1;
    return 0;
}

// Take the saved `settings` (an object as flags_to_json() writes it) into the rows. Flags of the list `of_process` belong
// to this process alone and are left as they are; those of `free` may be given anew; all others must not contradict
// what was saved unless `override` is set.
static inline void settings_restore(Flag* rows, int count, const JsonNode* settings, const char* of_process,
                                    const char* free_to_change, int override, const char* file) {
    for (int i = 0; i < count; i++) {
        const JsonNode* saved = json_get(settings, rows[i].long_name + 2);
        char was[FLAG_TEXT_SIZE], is[FLAG_TEXT_SIZE], error[FLAG_ERROR_SIZE];
        if (!saved || settings_listed(of_process, rows[i].long_name)) continue;
        if (!saved->string) die(USAGE, "%s: key \"%s\": is not a setting's value", file, rows[i].long_name + 2);
        if (rows[i].is_set) {
            // Compared as the same flag would print them: 1e-3 and 0.001 are no contradiction.
            Flag copy = rows[i];
            double number;
            int index;
            int64_t size;
            const char* string = NULL;
            copy.value = copy.type == FLAG_REAL     ? (void*)&number
                         : copy.type == FLAG_STRING ? (void*)&string
                         : copy.type == FLAG_SIZE   ? (void*)&size
                                                    : (void*)&index;
            if (flags_assign(&copy, saved->string, error) != 0) die(USAGE, "%s: %s", file, error);
            flags_format_value(&copy, was, sizeof was);
            flags_format_value(&rows[i], is, sizeof is);
            const char* was_text = copy.type == FLAG_STRING ? string : was;
            const char* is_text = copy.type == FLAG_STRING ? *(const char* const*)rows[i].value : is;
            if (strcmp(was_text, is_text) != 0 && !override && !settings_listed(free_to_change, rows[i].long_name))
                die(USAGE, "%s %s contradicts the run that is resumed (%s has %s); leave it out, or add --override 1",
                    rows[i].long_name, is_text, file, was_text);
            continue;
        }
        if (flags_set(&rows[i], saved->string, error) != 0) die(USAGE, "%s: %s", file, error);
    }
}

#endif
