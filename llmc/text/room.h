/* Tokenizers of language models, as the rest of a program sees them. With -DNO_TEXT no directory has one: samples are
 * numbers of tokens. */
#ifndef LLMC_TEXT_ROOM_H
#define LLMC_TEXT_ROOM_H

#ifndef NO_TEXT
#include "llmc/text/tokenizer.h"
#else
#include "llmc/base/rooms.h"

typedef struct {
    int size;
} Tokenizer;

#define tokenizer_open(...) room_absent(-1, __VA_ARGS__)
#define tokenizer_free(...) room_absent(0, __VA_ARGS__)
#define tokenizer_find(...) room_absent(-1, __VA_ARGS__)
#define tokenizer_decode(...) (room_absent(0, __VA_ARGS__), (const char*)NULL)
#define tokenizer_end_of_text(...) room_absent(-1, __VA_ARGS__)

#endif
#endif
