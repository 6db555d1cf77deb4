/* fuzz_readers.h's part for tokenizers: tokenizer.json, vocab.json, vocab.txt, merges, and texts through byte-level
 * BPE. */
#ifndef FUZZ_TOKENIZERS_H
#define FUZZ_TOKENIZERS_H

#include "fuzz_readers.h"
#include "llmc/text/bpe.h"
#include "llmc/text/tokenizer.h"
#include "llmc/text/wordpiece.h"

static const char TOKENIZER_JSON[] =
    "{\"version\":\"1.0\",\"added_tokens\":[{\"id\":9,\"content\":\"<|endoftext|>\",\"special\":true}],"
    "\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\"},{\"type\":\"ByteLevel\"}]},"
    "\"decoder\":{\"type\":\"ByteLevel\",\"add_prefix_space\":false},\"model\":{\"type\":\"BPE\",\"vocab\":"
    "{\"a\":0,\"b\":1,\"\xc4\xa0\":2,\"\xc4\xa0"
    "ab\":3,\"\xc2\xa1\":4,\"\xe2\x82\xac\":5,\"ab\":6,\"\xc5\x83\":7,\"!\":8},"
    "\"merges\":[\"a b\",\"\xc4\xa0 ab\"]}}";
static const char VOCAB_JSON[] =
    "{\"a\": 0, \"b\": 1, \"c\": 2, \"\xc4\xa0the\": 5, \"<|endoftext|>\": 9, \"\xc4\x8a\": 7}";

static void tokenizer_seeds(CaseList* list) {
    seed_text(list, "tokenizer.json", TOKENIZER_JSON);
    seed_text(list, "vocab.json", VOCAB_JSON);
    seed_text(list, "encoder.json", VOCAB_JSON);
    Text tokens = {NULL, 0, 0};
    uint32_t header[LLMC_HEADER_INTS] = {LLMC_TOKENS_MAGIC, 2, 7, 6};
    text_append(&tokens, (const char*)header, sizeof header);
    text_printf(&tokens, "\001a\001b\003the\002\xc3\xa9\001 \004 the\015<|endoftext|>");
    case_add(case_new(list), "gpt2_tokenizer.bin", tokens.text, tokens.length);
    free(tokens.text);
    case_add(&list->cases[1], "merges.txt", "#version: 0.2\na b\n\xc4\xa0t h\n", 22);
}

static void tokenizer_read(void) {
    Tokenizer t;
    if (tokenizer_open(&t, CASE_DIR) != 0) die(USAGE, "no tokenizer");
    size_t total = 0;
    for (int id = -1; id <= t.size; id += id < 4096 ? 1 : 4096) {
        size_t n;
        const char* bytes = tokenizer_decode(&t, id, &n);
        if (bytes && (id < 0 || id >= t.size || bytes < t.bytes.text || bytes + n > t.bytes.text + t.bytes.length))
            fuzz_broken("token %d has %zu bytes", id, n);
        for (size_t i = 0; bytes && i < n; i++) total += (unsigned char)bytes[i];
    }
    if (t.end_of_text >= t.size || total == SIZE_MAX) fuzz_broken("the end of text is %d of %d", t.end_of_text, t.size);
    tokenizer_free(&t);
}

static const char VOCAB_TXT[] =
    "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n##a\n##b\n##ing\nthe\n.\n,\n\xc3\xa9\n\xe4\xb8\xad\n"
    "##\xe1\x84\x80\nab\n##ab\n!\n1\n##2\n";
static const char SOME_TEXT[] = "The aab [MASK] b\xc3\xa9"
                                "bing \xe4\xb8\xad\xe6\x96\x87, \xea\xb0\x80! 12\xcc\x81 [SEP]\xff\xf0\x9f\x98\x80 [";

static const char WORDPIECE_JSON[] =
    "{\"added_tokens\": [{\"id\": 0, \"content\": \"[PAD]\", \"lstrip\": false}, {\"id\": 1, \"content\": \"[UNK]\"}, "
    "{\"id\": 2, \"content\": \"[CLS]\"}, {\"id\": 3, \"content\": \"[SEP]\"}, {\"id\": 4, \"content\": \"[MASK]\"}], "
    "\"normalizer\": {\"type\": \"BertNormalizer\", \"clean_text\": true, \"strip_accents\": null, \"lowercase\": "
    "true}, "
    "\"pre_tokenizer\": {\"type\": \"BertPreTokenizer\"}, \"model\": {\"type\": \"WordPiece\", \"unk_token\": "
    "\"[UNK]\", \"continuing_subword_prefix\": \"##\", \"max_input_chars_per_word\": 100, \"vocab\": {\"[PAD]\": 0, "
    "\"[UNK]\": 1, \"[CLS]\": 2, \"[SEP]\": 3, \"[MASK]\": 4, \"the\": 5, \"ab\": 7, \"a\": 6, \"##\\u00e9\": 8}}}";

static void wordpiece_seeds(CaseList* list) {
    Text bytes = {NULL, 0, 0};
    int byte_of[BYTE_ALPHABET_END], character_of[256];
    byte_alphabet(byte_of);
    for (int c = 0; c < BYTE_ALPHABET_END; c++)
        if (byte_of[c] >= 0) character_of[byte_of[c]] = c;
    for (int byte = 0; byte < 256; byte++) {
        wordpiece_put(&bytes, (uint32_t)character_of[byte]);
        text_append(&bytes, "\n", 1);
    }
    text_printf(&bytes, "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n");
    for (int i = 0; i < 3; i++) {
        Case* c = case_new(list);
        case_add(c, "vocab.txt", i == 2 ? bytes.text : VOCAB_TXT, i == 2 ? bytes.length : strlen(VOCAB_TXT));
        case_add(c, "text.txt", SOME_TEXT, strlen(SOME_TEXT));
        if (i == 1) case_add(c, "tokenizer_config.json", "{\"do_lower_case\": false}", 24);
    }
    Case* c = case_new(list);
    case_add(c, "tokenizer.json", WORDPIECE_JSON, strlen(WORDPIECE_JSON));
    case_add(c, "text.txt", SOME_TEXT, strlen(SOME_TEXT));
    free(bytes.text);
}

static void wordpiece_read(void) {
    WordPiece w;
    size_t n;
    TokenIds ids = {NULL, 0, 0};
    Text decoded = {NULL, 0, 0};
    if (wordpiece_open(&w, CASE_DIR, CASE_OF_MODEL) != 0) die(USAGE, "no vocab.txt");
    char* text = read_exactly(CASE_DIR "/text.txt", &n);
    wordpiece_encode(&ids, &w, text, n);
    for (size_t i = 0; i < ids.count; i++)
        if (ids.id[i] < 0 || ids.id[i] >= w.size) fuzz_broken("token %d of %d", ids.id[i], w.size);
    if (ids.count > 3 * n) fuzz_broken("%zu tokens of %zu bytes", ids.count, n);
    wordpiece_decode(&decoded, &w, ids.id, ids.count);
    free(text), free(ids.id), free(decoded.text);
    wordpiece_free(&w);
}

// ---------------------------------------------------------------------------------------------------------
// Byte-level BPE: the tokens of a text are the text

// A vocabulary of the 256 bytes and what `more` adds, with or without the spaces of JSON that people write.
static void bpe_vocabulary(Text* t, const char* more) {
    int byte_of[BYTE_ALPHABET_END];
    Text spelling = {NULL, 0, 0};
    byte_alphabet(byte_of);
    text_printf(t, "{");
    for (int c = 0; c < BYTE_ALPHABET_END; c++) {
        if (byte_of[c] < 0) continue;
        spelling.length = 0;
        wordpiece_put(&spelling, (uint32_t)c);
        text_json_string(t, spelling.text, spelling.length);
        text_printf(t, ": %d, ", byte_of[c]);
    }
    text_printf(t, "%s}", more);
    free(spelling.text);
}

static void bpe_seeds(CaseList* list) {
    static const char merges[] = "#version: 0.2\nh e\nt he\n\xc4\xa0 the\n\xc4\xa0 \xc4\xa0\ni n\nin g\n\xc3 \xa9\n";
    Text vocabulary = {NULL, 0, 0}, whole = {NULL, 0, 0};
    bpe_vocabulary(&vocabulary, "\"he\": 256, \"the\": 257, \"\xc4\xa0the\": 258, \"\xc4\xa0\xc4\xa0\": 259, \"in\": "
                                "260, \"ing\": 261, \"<|endoftext|>\": 262");
    text_printf(&whole,
                "{\"added_tokens\": [{\"id\": 262, \"content\": \"<|endoftext|>\", \"special\": true, \"normalized\": "
                "false}, {\"id\": 263, \"content\": \"<x>\"}], \"normalizer\": null, \"pre_tokenizer\": {\"type\": "
                "\"ByteLevel\", \"add_prefix_space\": false}, \"decoder\": {\"type\": \"ByteLevel\"}, \"model\": "
                "{\"type\": \"BPE\", \"vocab\": %s, \"merges\": [\"h e\", [\"t\", \"he\"], \"i n\", \"in g\"]}}",
                vocabulary.text);
    for (int is_whole = 0; is_whole < 2; is_whole++) {
        Case* c = case_new(list);
        if (is_whole) case_add(c, "tokenizer.json", whole.text, whole.length);
        else case_add(c, "vocab.json", vocabulary.text, vocabulary.length);
        if (!is_whole) case_add(c, "merges.txt", merges, strlen(merges));
        case_add(c, "text.txt", SOME_TEXT, strlen(SOME_TEXT));
    }
    free(vocabulary.text), free(whole.text);
}

static void bpe_read(void) {
    Bpe b;
    Tokenizer t;
    size_t n;
    int* ids;
    Text repaired = {NULL, 0, 0}, decoded = {NULL, 0, 0};
    if (bpe_open(&b, CASE_DIR) != 0) die(USAGE, "no tokenizer");
    if (tokenizer_open(&t, CASE_DIR) != 0) fuzz_broken("text can be encoded, but not decoded");
    char* text = read_exactly(CASE_DIR "/text.txt", &n);
    bpe_repair(&repaired, text, n);
    for (int special = AS_TEXT; special <= AS_TOKEN; special++) {
        size_t count = bpe_encode(&ids, &b, text, n, (SpecialTokens)special);
        decoded.length = 0;
        for (size_t i = 0; i < count; i++) {
            size_t length;
            const char* bytes = tokenizer_decode(&t, ids[i], &length);
            if (!bytes) fuzz_broken("token %d of %d", ids[i], t.size);
            text_append(&decoded, bytes, length);
        }
        // An added token may stand in the place of another one.
        int is_same = decoded.length == repaired.length &&
                      (!repaired.length || memcmp(decoded.text, repaired.text, repaired.length) == 0);
        if (!is_same && !file_exists(CASE_DIR "/tokenizer.json"))
            fuzz_broken("%zu bytes become %zu tokens of %zu bytes", n, count, decoded.length);
        free(ids);
    }
    free(text), free(repaired.text), free(decoded.text);
    bpe_free(&b);
    tokenizer_free(&t);
}

#endif
