/* Multiple-choice sets (-h), as the rest of a program sees them. With -DNO_CHOICES there are none. */
#ifndef LLMC_CHOICES_ROOM_H
#define LLMC_CHOICES_ROOM_H

#ifndef NO_CHOICES
#include "llmc/choices/multiple_choice.h"
#else
#include "llmc/base/rooms.h"
#include "llmc/run/step.h"

typedef struct {
    const char* file;
    int count, is_cloze;
} MultipleChoice;

typedef struct {
    int count, every;
    const char* files;
    MultipleChoice* set;
} MultipleChoiceSets;

typedef struct {
    const uint16_t* tokens;
    int length;
} MultipleChoiceText;

typedef struct {
    MultipleChoiceText context;
} MultipleChoiceExample;

typedef struct {
    double examples, acc, perplexity, not_finite;
    int is_cloze;
} MultipleChoiceResult;

typedef struct {
    int scored;
} MultipleChoiceEvaluation;

// The rows of the settings, for flags_refuse_rooms(). Returns the new count.
static inline int multiple_choice_rows(MultipleChoiceSets* s, Flag* table, int count) {
    // clang-format off
    const Flag rows[] = {
        {"-h", "--hellaswag", FLAG_INT,    &s->every, "0", 0, 1e9, NULL, SCOPE_FREE, TOPIC_VALIDATION, "Not in this build."},
        {NULL, "--choices",   FLAG_STRING, &s->files, "",  0, 0,   NULL, SCOPE_FREE, TOPIC_VALIDATION, "Not in this build."},
    };
    // clang-format on
    return settings_add_rows(table, count, rows, COUNT_OF(rows));
}

#define multiple_choice_sets_open(...) room_absent(0, __VA_ARGS__)
#define multiple_choice_sets_close(...) room_absent(0, __VA_ARGS__)
#define multiple_choice_next_set(...) room_absent(0, __VA_ARGS__)
#define multiple_choice_last_key(...) (room_absent(0, __VA_ARGS__), (const char*)NULL)
#define multiple_choice_device_bytes(...) (size_t) room_absent(0, __VA_ARGS__)
#define multiple_choice_example(...) ((MultipleChoiceExample){{NULL, 0}})
#define multiple_choice_next(text) (text)
#define multiple_choice_gather(...) room_absent(0, __VA_ARGS__)
#define multiple_choice_evaluation_next(...) room_absent(0, __VA_ARGS__)
#define multiple_choice_load(...) room_absent(0, __VA_ARGS__)
#define multiple_choice_take(...) room_absent(0, __VA_ARGS__)
#define multiple_choice_show(...) room_absent(0, __VA_ARGS__)

#endif
#endif
