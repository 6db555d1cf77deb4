/* The text that tests train on, and shards of it with bytes as tokens: the same bytes on every machine, whatever
 * becomes of the sources.
 *
 *   test_text FOLDER
 *
 * FOLDER/text gets documents 000.md, 001.md, ... A document has a topic, so its sentences belong together: a title,
 * then paragraphs of one sentence a line. Each sixth is a program, 005.c. Words have frequencies that follow Zipf's
 * law. All choices are integer arithmetic on random numbers from a fixed seed, in an order that the language defines.
 *
 * FOLDER/builtin gets token shards: token id = byte, and 256 before each document. Of the resulting row of tokens every
 * tenth block of 2,048 is validation. With them are the files that make GPT-2's byte-level tokenizer of it, with no
 * merges. FOLDER/builtin/bert gets the same text as sentences: token id = byte, then [PAD] [UNK] [CLS] [SEP] [MASK]. A
 * line with its line break is a sentence, but for lines of white space, which are left out. A line that begins in a
 * validation block is validation: that divides a document into some of training and of validation by turns.
 *
 * dev/test/text.sh holds the checksums. */
#include "dev/data/corpus_files.h"

enum { BYTES = 1500000, TOPICS = 16, WORD_LENGTH = 24, LARGEST_POOL = 400 };
enum { BYTE_PAD = 256, BYTE_UNK, BYTE_CLS, BYTE_SEP, BYTE_MASK, BYTE_VOCABULARY };
enum { END_OF_TEXT = 256, BLOCK = 2048, VALIDATION_EVERY = 10 };

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

// ---------------------------------------------------------------------------------------------------------
// Shards

static int is_validation(size_t position) { return position / BLOCK % VALIDATION_EVERY == VALIDATION_EVERY - 1; }

typedef struct {
    Tokens tokens, begin, first;  // begin: of the sentences among the tokens; first: sentences of the documents
} SentenceSet;

// Cut the row of tokens into sentences: set[0] for training, set[1] for validation.
static void sentences_of_tokens(SentenceSet* set, const Tokens* all) {
    SentenceSet* open_set = NULL;  // whose last document may go on
    for (size_t i = 0, end; i < all->count; i = end) {
        int is_blank = 1;
        end = i + 1;
        if (all->id[i] == END_OF_TEXT) {
            open_set = NULL;
            continue;
        }
        while (end < all->count && all->id[end] != END_OF_TEXT && all->id[end - 1] != '\n') end++;
        for (size_t k = i; k < end; k++)
            is_blank = is_blank && (all->id[k] == ' ' || (all->id[k] >= 9 && all->id[k] <= 13));
        if (is_blank) continue;
        SentenceSet* to = &set[is_validation(i)];
        int token = (int)to->tokens.count, sentence = (int)to->begin.count;
        if (to != open_set) tokens_add(&to->first, &sentence, 1);
        open_set = to;
        tokens_add(&to->begin, &token, 1);
        tokens_add(&to->tokens, all->id + i, end - i);
    }
}

static void put_output(const char* folder, const char* name, Text text) {
    char* path = xprintf("%s/%s", folder, name);
    if (write_file(path, text.text, text.length) != 0) die(FAILED, "%s: %s", path, strerror(errno));
    free(path), free(text.text);
}

static void put_tokenizers(const char* folder) {
    const Merges none = {NULL, 0};
    Text words = {NULL, 0, 0}, settings = {NULL, 0, 0};
    for (int b = 0; b < 256; b++) append_byte_name(&words, b), text_printf(&words, "\n");
    text_printf(&words, "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n");
    text_printf(&settings, "{\n  \"do_lower_case\": false\n}\n");
    put_output(folder, "vocab.json", vocab_json(none));
    put_output(folder, "merges.txt", merges_txt(none));
    put_output(folder, "tokenizer.json", tokenizer_json(none));
    put_output(folder, "tokenizer_config.json", tokenizer_config_json());
    put_output(folder, "bert/vocab.txt", words);
    put_output(folder, "bert/tokenizer_config.json", settings);
}

// A file of tokens, and one of sentences.
static void put_shards(const char* folder, const char* name, const Tokens* tokens, SentenceSet* set) {
    char *shard = xprintf("%s/%s", folder, name), *path = xprintf("%s/bert/%s", folder, name);
    int end = (int)set->tokens.count, sentences = (int)set->begin.count, documents = (int)set->first.count;
    SentencesHeader h = {0, 0, (uint32_t)documents, BYTE_VOCABULARY, BYTE_PAD, BYTE_UNK, BYTE_CLS, BYTE_SEP, BYTE_MASK};
    h.tokens = (uint32_t)end, h.sentences = (uint32_t)sentences;
    uint32_t continues[(BYTE_VOCABULARY + 31) / 32] = {0};
    tokens_add(&set->begin, &end, 1), tokens_add(&set->first, &sentences, 1);
    if (shard_write(shard, tokens->id, tokens->count, 2) != 0 ||
        sentences_write(path, h, set->tokens.id, (const uint32_t*)set->begin.id, (const uint32_t*)set->first.id,
                        continues) != 0)
        die(FAILED, "%s, %s: %s", shard, path, strerror(errno));
    free(shard), free(path);
}

int main(int argc, char** argv) {
    if (argc != 2) die(USAGE, "one argument is needed: test_text FOLDER");
    char *text = xprintf("%s/text", argv[1]), *builtin = xprintf("%s/builtin", argv[1]);
    Tokens all = {NULL, 0, 0}, sides[2] = {{NULL, 0, 0}, {NULL, 0, 0}};
    SentenceSet set[2] = {{{NULL, 0, 0}, {NULL, 0, 0}, {NULL, 0, 0}}, {{NULL, 0, 0}, {NULL, 0, 0}, {NULL, 0, 0}}};
    if (make_directories(text) != 0) die(FAILED, "%s: %s", text, strerror(errno));
    output_directories(builtin);
    make_words();
    for (int document = 0; all.count < BYTES + (size_t)document; document++) {
        Subject s = {&topic_nouns[random_below(TOPICS)], {NULL, NULL}};
        size_t length = 3000 + random_below(14000);
        const int first = END_OF_TEXT, is_program = document % 6 == 5;
        Text t = {NULL, 0, 0};
        for (int i = 0; i < 2; i++) s.name[i] = draw(&names);
        if (!is_program) put_prose(&t, &s, length);
        while (is_program && t.length < length) expand(&t, &s, "$F");
        tokens_add(&all, &first, 1);
        for (size_t i = 0; i < t.length; i++) tokens_add(&all, (int[]){(unsigned char)t.text[i]}, 1);
        put_output(text, xprintf("%03d.%s", document, is_program ? "c" : "md"), t);
    }
    for (size_t i = 0; i < all.count; i += BLOCK)
        tokens_add(&sides[is_validation(i)], all.id + i, min_size(BLOCK, all.count - i));
    sentences_of_tokens(set, &all);
    put_tokenizers(builtin);
    put_shards(builtin, "train.bin", &sides[0], &set[0]);
    put_shards(builtin, "val.bin", &sides[1], &set[1]);
    return DONE;
}
