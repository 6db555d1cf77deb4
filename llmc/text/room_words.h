/* WordPiece vocabularies, as the rest of a program sees them. With -DNO_TEXT no directory has one: samples are numbers
 * of tokens. */
#ifndef LLMC_TEXT_ROOM_WORDS_H
#define LLMC_TEXT_ROOM_WORDS_H

#ifndef NO_TEXT
#include "llmc/text/wordpiece.h"
#else
#include "llmc/text/room.h"

enum { CASE_OF_MODEL };

typedef struct {
    int size, pad, unk, cls, sep, mask, is_bytes;
} WordPiece;

#define wordpiece_open(...) room_absent(-1, __VA_ARGS__)
#define wordpiece_free(...) room_absent(0, __VA_ARGS__)
#define wordpiece_decode(...) room_absent(0, __VA_ARGS__)
#define wordpiece_token(words, id, length) (*(length) = 0, room_absent(0, words, id), "")

#endif
#endif
