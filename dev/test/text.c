/* The text that tests train on: the same bytes on every machine, whatever becomes of the sources.
 *
 *   test_text FOLDER
 *
 * Writes documents 000.md, 001.md, ... into FOLDER; byte_corpus makes shards of them. A document has a topic, so
 * its sentences belong together: a title, then paragraphs of one sentence a line. Each sixth is a program, 005.c. Words
 * have frequencies that follow Zipf's law. All choices are integer arithmetic on random numbers from a fixed seed, in
 * an order that the language defines; dev/test/text.sh holds the checksums. */
#include "llmc/base/util.h"

enum { BYTES = 1500000, TOPICS = 16, WORD_LENGTH = 24, LARGEST_POOL = 400 };

static uint64_t random_state = 20261123;

// SplitMix64.
static uint32_t random_below(uint32_t n) {
    uint64_t z = random_state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (uint32_t)((z ^ (z >> 31)) >> 32) % n;
}

typedef struct {
    int count;
    uint32_t until[LARGEST_POOL];  // sums of the weights, each of which is inverse to the word's rank
    char word[LARGEST_POOL][WORD_LENGTH];
} Pool;

static Pool nouns, topic_nouns[TOPICS], verbs, adjectives, adverbs, names;

static void pool_add(Pool* p, const char* word) {
    CHECK(p->count < LARGEST_POOL && strlen(word) < WORD_LENGTH);
    uint32_t weight = 1000000 / (uint32_t)(p->count + 1);
    p->until[p->count] = weight + (p->count ? p->until[p->count - 1] : 0);
    strcpy(p->word[p->count++], word);
}

// Add `count` words. The first, which are frequent, are short.
static void pool_fill(Pool* p, int count, const char* ending) {
    static const char* const onsets[] = {"b",  "d",  "f",  "g",  "h",  "k",  "l",  "m",  "n",  "p",  "r",
                                         "s",  "t",  "v",  "w",  "z",  "br", "dr", "fl", "gr", "kl", "pr",
                                         "sh", "st", "th", "tr", "ch", "qu", "j",  "sk", "sl", ""};
    static const char* const vowels[] = {"a", "e", "i", "o", "u", "ai", "ea", "oo", "ou", "y"};
    static const char* const codas[] = {"", "", "", "n", "r", "l", "s", "t", "m", "nd", "rk", "x", "st", "ck"};
    for (int i = 0; i < count; i++) {
        char word[64] = "";
        int syllables = 1 + (i > 8) + (int)random_below(2);
        for (int s = 0; s < syllables; s++) {
            strcat(word, onsets[random_below(COUNT_OF(onsets))]);
            strcat(word, vowels[random_below(COUNT_OF(vowels))]);
            if (s == syllables - 1 || random_below(3) == 0) strcat(word, codas[random_below(COUNT_OF(codas))]);
        }
        strcat(word, ending);
        pool_add(p, word);
    }
}

static const char* draw(const Pool* p) {
    uint32_t at = random_below(p->until[p->count - 1]);
    int i = 0;
    while (p->until[i] <= at) i++;
    return p->word[i];
}

static void make_words(void) {
    static const char* const accented[] = {"zoë", "rené", "jürg", "søren", "iñigo", "łukasz", "漢", "Ωmega"};
    pool_fill(&nouns, 300, "");
    for (int t = 0; t < TOPICS; t++) pool_fill(&topic_nouns[t], 40, "");
    pool_fill(&verbs, 120, "s");
    pool_fill(&adjectives, 120, "");
    pool_fill(&adverbs, 40, "ly");
    pool_fill(&names, 60, "");
    for (size_t i = 0; i < COUNT_OF(accented); i++) pool_add(&names, accented[i]);
    for (int i = 0; i < names.count; i++)
        if (names.word[i][0] >= 'a' && names.word[i][0] <= 'z') names.word[i][0] -= 'a' - 'A';
}

// ---------------------------------------------------------------------------------------------------------
// Documents: a grammar, from which alternatives are drawn; one that is listed twice is twice as frequent

typedef struct {
    const Pool* topic;
    const char* name[2];  // who it is about
} Subject;

// $n noun, $v verb, $a adjective, $d adverb, $p name, $9 digit; capitals are other rules.
enum { RULES = 8, ALTERNATIVES = 11 };
static const struct {
    char symbol;
    const char* text[ALTERNATIVES];
} GRAMMAR[RULES] = {
    {'S',
     {"$C.", "$C.", "$C.", "$C, and $C.", "$C, but $C.", "$C because $C.", "$C; $C.", "$C?", "in 1$9$9$9, $C.",
      "\"$C!\" said $p.", "$C: $C ($9$9.$9 %)."}},
    {'C', {"$N $v $O", "$p $v $O", "$p $d $v $O", "$N $d $v $O"}},
    {'O', {"$N", "$N $R $N", "$N $R $N", "$9$9 $ns"}},
    {'N', {"the $n", "the $n", "the $a $n", "a $a $n", "every $n", "his $n", "no $n"}},
    {'R', {"in", "on", "with", "under", "of", "near"}},
    {'T', {"# $p and the $n\n"}},
    {'F',
     {"\nint $v_$n(int $n, float* $n) {\n$L$L$L    return $n;\n}\n",
      "\nint $v_$n(int $n, float* $n) {\n$L$L$L$L$L    return $n;\n}\n"}},
    {'L',
     {"    // $S\n", "    $n += $9$9 * $n[i];\n", "    if ($n > 0x$9$9) {\n\t$v(&$n);\n    }\n",
      "    for (int i = 0; i < $n; i++) $n[i] = $9.$9$9f;\n"}},
};

static void expand(Text* t, const Subject* s, const char* text) {
    for (; *text; text++) {
        if (*text != '$') {
            text_append(t, text, 1);
            continue;
        }
        const Pool* pool = NULL;
        int rule = 0, alternatives = 0;
        text++;
        if (*text == 'n') pool = random_below(10) < 7 ? s->topic : &nouns;
        if (*text == 'v') pool = &verbs;
        if (*text == 'a') pool = &adjectives;
        if (*text == 'd') pool = &adverbs;
        if (pool) text_printf(t, "%s", draw(pool));
        else if (*text == 'p') text_printf(t, "%s", s->name[random_below(2)]);
        else if (*text == '9') text_printf(t, "%u", random_below(10));
        else {
            while (rule < RULES - 1 && GRAMMAR[rule].symbol != *text) rule++;
            while (alternatives < ALTERNATIVES && GRAMMAR[rule].text[alternatives]) alternatives++;
            expand(t, s, GRAMMAR[rule].text[random_below((uint32_t)alternatives)]);
        }
    }
}

static void put_prose(Text* t, const Subject* s, size_t length) {
    expand(t, s, "$T");
    while (t->length < length) {
        text_printf(t, "\n");
        for (uint32_t i = 3 + random_below(5); i > 0; i--) {
            size_t first = t->length;
            expand(t, s, "$S\n");
            first += t->text[first] == '"';
            if (t->text[first] >= 'a' && t->text[first] <= 'z') t->text[first] -= 'a' - 'A';
        }
    }
}

static void put_document(const char* folder, int number, const char* ending, const Text* t) {
    char* path = xprintf("%s/%03d.%s", folder, number, ending);
    FILE* f = fopen(path, "wb");
    if (!f || fwrite(t->text, 1, t->length, f) != t->length || fclose(f) != 0)
        die(FAILED, "%s: cannot be written: %s", path, strerror(errno));
    free(path);
}

int main(int argc, char** argv) {
    if (argc != 2) die(USAGE, "one argument is needed: test_text FOLDER");
    size_t all = 0;
    make_words();
    for (int document = 0; all < BYTES; document++) {
        Subject s = {&topic_nouns[random_below(TOPICS)], {NULL, NULL}};
        size_t length = 3000 + random_below(14000);
        Text t = {NULL, 0, 0};
        for (int i = 0; i < 2; i++) s.name[i] = draw(&names);
        int is_program = document % 6 == 5;
        if (!is_program) put_prose(&t, &s, length);
        while (is_program && t.length < length) expand(&t, &s, "$F");
        put_document(argv[1], document, is_program ? "c" : "md", &t);
        all += t.length;
        free(t.text);
    }
    return DONE;
}
