/* The tokenizers of llmc/text and apps/use for dev/test/check_tokenizers.py, which compares them with the library:
 *
 *     test_tokenizers words|text|token|wordpiece DIRECTORY FILE...
 *
 * writes for each file, as 32-bit integers, their number and: the lengths of its words in bytes, or its tokens with
 * special ones as text or as tokens, or those of WordPiece.
 *
 *     test_tokenizers ids DIRECTORY
 *
 * writes the end of text, then the bytes of each token from -1 on, in hexadecimal, "-" for none. */
#include "apps/use/bpe.h"
#include "llmc/run/find_files.h"
#include "llmc/text/tokenizer.h"
#include "llmc/text/wordpiece.h"

static int print_ids(const char* directory) {
    Tokenizer t;
    if (tokenizer_open(&t, directory) != 0) die(USAGE, "%s: holds no tokenizer", directory);
    printf("%d", tokenizer_end_of_text(&t));
    for (int id = -1; id <= t.size; id++) {
        size_t n = 0;
        const char* text = tokenizer_decode(&t, id, &n);
        printf(text ? "\n" : "\n-");
        for (size_t i = 0; text && i < n; i++) printf("%02x", (unsigned char)text[i]);
    }
    tokenizer_free(&t);
    return DONE;
}

static int print_files(const char* form, const char* directory, char** files, int n) {
    Bpe b;
    WordPiece w;
    int is_wordpiece = strcmp(form, "wordpiece") == 0;
    if ((is_wordpiece ? wordpiece_open(&w, directory, CASE_OF_MODEL) : bpe_open(&b, directory)) != 0)
        die(USAGE, "%s: holds no tokenizer", directory);
    for (int i = 0; i < n; i++) {
        size_t length;
        TokenIds found = {NULL, 0, 0};
        char* text = read_file(files[i], TOKENIZER_MAX_FILE, &length, USAGE);
        if (is_wordpiece) {
            wordpiece_encode(&found, &w, text, length);
        } else if (strcmp(form, "words") == 0) {
            found.id = (int*)xmalloc(length * sizeof(int));
            for (size_t at = 0; at < length; at += (size_t)found.id[found.count++])
                found.id[found.count] = (int)bpe_word(text + at, length - at);
        } else {
            found.count = bpe_encode(&found.id, &b, text, length, strcmp(form, "token") == 0 ? AS_TOKEN : AS_TEXT);
        }
        int count = (int)found.count;
        fwrite(&count, sizeof count, 1, stdout);
        fwrite(found.id, sizeof(int), found.count, stdout);
        free(found.id), free(text);
    }
    if (is_wordpiece) wordpiece_free(&w);
    else bpe_free(&b);
    return DONE;
}

int main(int argc, char** argv) {
    if (argc == 3 && strcmp(argv[1], "ids") == 0) return print_ids(argv[2]);
    if (argc < 4) die(USAGE, "usage: the first lines of dev/test/tokenizers.c show it");
    return print_files(argv[1], argv[2], argv + 3, argc - 3);
}
