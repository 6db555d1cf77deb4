/* Short stories about a small world: people move, take things, give them away and find eggs; questions about who has
 * what and who is where are asked and answered on the way. To answer them a model must follow the story.
 *
 *   Anna goes to the park. Where is Anna? Anna is in the park. Ben takes the ball. Who has the ball? Ben has the ball.
 *
 * A block of T tokens begins with the end-of-text token and holds whole stories, each with an end-of-text token behind
 * it if there is room. A story is a row of sentences, each of which is two choices: its kind, by the integer weights of
 * KIND_WEIGHTS, and one of the sentences of that kind that are true in the story, all equally likely. A question is not
 * about the last event if another one can be asked. What does not fit into the rest of the block is not a choice: the
 * weights of the others count, and nothing is drawn and discarded. When no story fits, the block is filled with
 * end-of-text tokens. An answer is not a choice: it follows from the story.
 *
 * So a block's probability is the product over its choices. Different choices make different texts, so that is the
 * text's probability too, and no model can do better on average than the mean of
 * -log p(block). Choices are integer arithmetic on Philox(seed, block, choice): the same on every machine. */
#ifndef DEV_DATA_WORLD_H
#define DEV_DATA_WORLD_H

#include "llmc/base/rng.h"

enum { MOST_PEOPLE = 6, MOST_THINGS = 5, MOST_PLACES = 5, MOST_EGGS = 4, MOST_SENTENCES = 128, MOST_WORDS = 12 };

// The words, in the order of their numbers. The sign of each class is what its words stand for in TEMPLATES.
enum {
    PEOPLE = 0,
    THINGS = PEOPLE + MOST_PEOPLE,
    PLACES = THINGS + MOST_THINGS,
    DIGITS = PLACES + MOST_PLACES,  // 1 .. 2 * MOST_EGGS
    OTHERS = DIGITS + 2 * MOST_EGGS,
    OTHER_WORDS = 20,
    WORDS = OTHERS + OTHER_WORDS,
    END_OF_STORY = WORDS
};
static const char* const WORD[WORDS] = {"Anna", "Ben",   "Eva",  "Max",    "Mia",  "Tom",    "ball",  "book", "cup",
                                        "hat",  "pen",   "barn", "garden", "park", "school", "shop",  "1",    "2",
                                        "3",    "4",     "5",    "6",      "7",    "8",      "Where", "is",   "it",
                                        "in",   "the",   "Who",  "has",    "How",  "many",   "eggs",  "goes", "to",
                                        "from", "takes", "gets", "finds",  "and",  "more",   ".",     "?"};

typedef enum { GO, TAKE, GIVE, FIND, WHERE_IS_PERSON, WHO_HAS, WHERE_IS_THING, HOW_MANY, END, KINDS } Kind;
typedef enum { STORY_BEGINS, EVENT_HAPPENED, QUESTION_ANSWERED, PHASES } Phase;

typedef struct {
    Kind kind;
    int person, receiver, thing, place, eggs, more;
} Sentence;

// $a person, $b who gets something, $t thing, $p place, $n eggs, $m more eggs. The answer has * in place of $.
static const char* const TEMPLATES[KINDS] = {"$a goes to the $p .",
                                             "$a takes the $t .",
                                             "$b gets the $t from $a .",
                                             "$a finds $n eggs and $m more .",
                                             "Where is $a ? $a is in the *p .",
                                             "Who has the $t ? *a has the $t .",
                                             "Where is the $t ? $a has it in the *p .",
                                             "How many eggs has $a ? $a has *n eggs .",
                                             ""};

// clang-format off
static const uint32_t KIND_WEIGHTS[PHASES][KINDS] = {
    //                     GO TAKE GIVE FIND  questions    END
    [STORY_BEGINS]      = { 6,   4,   0,   1, 0, 0, 0, 0,   0},
    [EVENT_HAPPENED]    = { 0,   0,   0,   0, 4, 4, 3, 4,   0},
    [QUESTION_ANSWERED] = { 5,   4,   5,   1, 0, 0, 0, 0,   1},
};
// clang-format on
enum { KIND_LENGTH_END = 1, QUESTION_ROOM = 10 };  // an event leaves room for a question about it

// How much of the world there is. The tests have a smaller one, whose entropy can be computed.
typedef struct {
    int T;
    int people, things, places, eggs;
} WorldSize;

static const WorldSize FULL_WORLD = {64, MOST_PEOPLE, MOST_THINGS, MOST_PLACES, MOST_EGGS};

// A block while it is written: what the story has told so far. -1: not told, nobody.
typedef struct {
    int8_t place[MOST_PEOPLE], eggs[MOST_PEOPLE], holder[MOST_THINGS];
    int8_t phase;
    int8_t person, thing;  // of the last event
    int16_t room;          // tokens left in the block
} World;

static inline void world_begin_story(World* w) {
    memset(w->place, -1, sizeof w->place), memset(w->eggs, 0, sizeof w->eggs);
    memset(w->holder, -1, sizeof w->holder);
    w->phase = STORY_BEGINS;
    w->person = w->thing = -1;
}

// A block after its first token.
static inline World world_begin(const WorldSize* size) {
    World w;
    memset(&w, 0, sizeof w);
    world_begin_story(&w);
    w.room = (int16_t)(size->T - 1);
    return w;
}

// The number of tokens of a sentence.
static inline int kind_length(Kind kind) {
    int length = 1;
    if (kind == END) return KIND_LENGTH_END;
    for (const char* p = TEMPLATES[kind]; *p; p++) length += *p == ' ';
    return length;
}

static inline void sentences_append(Sentence* list, int* count, Sentence s) {
    CHECK(*count < MOST_SENTENCES);
    list[(*count)++] = s;
}

// Remove questions about the last event, which are too easy, unless no others would be left. Returns how many are left.
static inline int sentences_prefer(const World* w, Sentence* list, int count) {
    int kept = 0;
    for (int i = 0; i < count; i++) {
        Kind kind = list[i].kind;
        int is_easy = kind == WHERE_IS_PERSON || kind == HOW_MANY ? list[i].person == w->person
                      : kind == WHO_HAS || kind == WHERE_IS_THING ? list[i].thing == w->thing
                                                                  : 0;
        if (!is_easy) list[kept++] = list[i];
    }
    return kept ? kept : count;
}

// All sentences of a kind that may come next: list [MOST_SENTENCES]. Returns their number.
static inline int world_sentences(const World* w, const WorldSize* size, Kind kind, Sentence* list) {
    int count = 0;
    Sentence s = {kind, 0, 0, 0, 0, 0, 0};
    if (kind == END) sentences_append(list, &count, s);
    for (s.person = 0; s.person < size->people; s.person++) {
        s.place = w->place[s.person], s.eggs = w->eggs[s.person];
        if (kind == WHERE_IS_PERSON && s.place >= 0) sentences_append(list, &count, s);
        if (kind == HOW_MANY && s.eggs > 0) sentences_append(list, &count, s);
        for (s.place = 0; kind == GO && s.place < size->places; s.place++)
            if (s.place != w->place[s.person]) sentences_append(list, &count, s);
        if (kind == FIND && w->eggs[s.person] == 0)
            for (int i = 0; i < size->eggs * size->eggs; i++) {
                s.eggs = 1 + i / size->eggs, s.more = 1 + i % size->eggs;
                sentences_append(list, &count, s);
            }
        s.place = w->place[s.person];
        for (s.thing = 0; s.thing < size->things; s.thing++) {
            int holds = w->holder[s.thing] == s.person;
            if (kind == TAKE && w->holder[s.thing] < 0) sentences_append(list, &count, s);
            if (kind == WHO_HAS && holds) sentences_append(list, &count, s);
            if (kind == WHERE_IS_THING && holds && s.place >= 0) sentences_append(list, &count, s);
            for (s.receiver = 0; kind == GIVE && holds && s.receiver < size->people; s.receiver++)
                if (s.receiver != s.person) sentences_append(list, &count, s);
        }
    }
    return sentences_prefer(w, list, count);
}

// What the next sentence is chosen from: its kind by these weights, then one of `counts` sentences of that kind.
typedef struct {
    uint32_t weights[KINDS], sum;  // sum 0: nothing is left to choose, the block is filled
    int counts[KINDS];
} Choices;

static inline Choices world_choices(const World* w, const WorldSize* size) {
    Sentence list[MOST_SENTENCES];
    Choices c;
    memset(&c, 0, sizeof c);
    for (int kind = 0; kind < KINDS; kind++) {
        int length = kind_length((Kind)kind) + (kind <= FIND ? QUESTION_ROOM : 0);
        if (KIND_WEIGHTS[w->phase][kind] && length <= w->room)
            c.counts[kind] = world_sentences(w, size, (Kind)kind, list);
        if (c.counts[kind]) c.weights[kind] = KIND_WEIGHTS[w->phase][kind];
        c.sum += c.weights[kind];
    }
    return c;
}

// -log of the probability that the next sentence is a certain one of a kind, in nats.
static inline double choices_nats(const Choices* c, Kind kind) {
    return log((double)c->sum / c->weights[kind]) + log(c->counts[kind]);
}

// The mean of choices_nats() over what may be chosen.
static inline double choices_entropy(const Choices* c) {
    double entropy = 0;
    for (int kind = 0; kind < KINDS; kind++)
        if (c->weights[kind]) entropy += choices_nats(c, (Kind)kind) * c->weights[kind] / c->sum;
    return entropy;
}

// The state after a sentence.
static inline void world_apply(World* w, Sentence s) {
    w->room = (int16_t)(w->room - kind_length(s.kind));
    w->phase = s.kind <= FIND ? EVENT_HAPPENED : QUESTION_ANSWERED;
    if (s.kind == GO) w->place[s.person] = (int8_t)s.place;
    if (s.kind == TAKE) w->holder[s.thing] = (int8_t)s.person;
    if (s.kind == GIVE) w->holder[s.thing] = (int8_t)s.receiver;
    if (s.kind == FIND) w->eggs[s.person] = (int8_t)(s.eggs + s.more);
    if (s.kind <= FIND)
        w->person = (int8_t)s.person, w->thing = (int8_t)(s.kind == TAKE || s.kind == GIVE ? s.thing : -1);
    if (s.kind == END) world_begin_story(w);
}

static inline int word_find(const char* text, size_t length) {
    for (int i = 0; i < WORDS; i++)
        if (strlen(WORD[i]) == length && memcmp(WORD[i], text, length) == 0) return i;
    die(FAILED, "'%.*s' is not a word of the world", (int)length, text);
}

// The words of a sentence: words [MOST_WORDS]. Returns their number; *answer is the place of the answer among them,
// -1 if the sentence is not a question.
static inline int sentence_words(Sentence s, int* words, int* answer) {
    int count = 0;
    *answer = -1;
    if (s.kind == END) words[count++] = END_OF_STORY;
    for (const char* p = TEMPLATES[s.kind]; *p;) {
        size_t length = strcspn(p, " ");
        const struct {
            char sign;
            int word;
        } slots[] = {{'a', PEOPLE + s.person}, {'b', PEOPLE + s.receiver}, {'t', THINGS + s.thing},
                     {'p', PLACES + s.place},  {'n', DIGITS + s.eggs - 1}, {'m', DIGITS + s.more - 1}};
        CHECK(count < MOST_WORDS);
        int is_slot = *p == '$' || *p == '*';
        for (size_t i = 0; i < COUNT_OF(slots); i++)
            if (is_slot && p[1] == slots[i].sign) words[count] = slots[i].word;
        if (!is_slot) words[count] = word_find(p, length);
        if (*p == '*') *answer = count;
        count++;
        p += length + (p[length] == ' ');
    }
    return count;
}

// ---------------------------------------------------------------------------------------------------------
// Blocks

typedef struct {
    int* words;      // [T]; END_OF_STORY for end-of-text
    int* is_answer;  // [T] 1: the word answers a question
    double nats;     // -log p(block)
    double entropy;  // sum over the choices of their entropies: its mean is that of `nats`, with less noise
} Block;

static inline void block_alloc(Block* b, const WorldSize* size) {
    memset(b, 0, sizeof *b);
    b->words = (int*)xmalloc((size_t)size->T * sizeof(int));
    b->is_answer = (int*)xmalloc((size_t)size->T * sizeof(int));
}

static inline void block_free(Block* b) { free(b->words), free(b->is_answer); }

// A number below n for choice number `choice` of a block.
static inline uint32_t choice_draw(uint64_t seed, uint64_t block, uint32_t choice, uint32_t n) {
    Philox r = philox(choice, (uint32_t)block, (uint32_t)(block >> 32), 0, seed);
    return (uint32_t)(((uint64_t)r.v[1] << 32 | r.v[0]) % n);
}

// Write block number `block` of the text of a seed.
static inline void block_make(Block* b, const WorldSize* size, uint64_t seed, uint64_t block) {
    Sentence list[MOST_SENTENCES];
    World w = world_begin(size);
    uint32_t choice = 0;
    for (int i = 0; i < size->T; i++) b->words[i] = END_OF_STORY, b->is_answer[i] = 0;
    b->nats = b->entropy = 0;
    for (Choices c = world_choices(&w, size); c.sum > 0; c = world_choices(&w, size)) {
        uint32_t drawn = choice_draw(seed, block, choice++, c.sum);
        int kind = 0, answer, at = size->T - w.room;
        while (drawn >= c.weights[kind]) drawn -= c.weights[kind++];
        uint32_t count = (uint32_t)world_sentences(&w, size, (Kind)kind, list);
        Sentence s = list[choice_draw(seed, block, choice++, count)];
        b->nats += choices_nats(&c, (Kind)kind);
        b->entropy += choices_entropy(&c);
        sentence_words(s, b->words + at, &answer);
        if (answer >= 0) b->is_answer[at + answer] = 1;
        world_apply(&w, s);
    }
}

#endif
