/* An HTML page with its data: page.html of a room, made complete by llmc/profile/head.html, which the Makefile puts before
 * it. The data are JSON in place of a marker. */
#ifndef LLMC_PROFILE_PAGE_H
#define LLMC_PROFILE_PAGE_H

#include "llmc/base/json_write.h"

#define PAGE_PLACE "/*DATA*/null"

// "<" in the data is escaped, so that nothing there ends the enclosing script or begins a comment.
static inline void page_put(Text* out, const unsigned char* page, const Text* data) {
    const char *text = (const char*)page, *place = strstr(text, PAGE_PLACE);
    CHECK(place);
    text_append(out, text, (size_t)(place - text));
    for (size_t i = 0; i < data->length;) {
        size_t n = strcspn(data->text + i, "<");
        text_append(out, data->text + i, n);
        i += n;
        if (i < data->length) text_append(out, "\\u003c", 6), i++;
    }
    place += strlen(PAGE_PLACE);
    text_append(out, place, strlen(place));
}

#endif
