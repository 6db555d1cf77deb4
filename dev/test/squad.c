/* Question answering for dev/test/check_squad.py, which compares it with other programs and with its definition:
 *
 *     test_squad windows VOCABULARY FILE T STRIDE evaluate|train          a line for each window
 *     test_squad answers VOCABULARY FILE T STRIDE LOGITS PREDICTIONS      the score of the answers by these logits
 *     test_squad normalize TEXTS.json                                     texts as they are compared, a line each
 *
 * VOCABULARY is a directory with vocab.txt. LOGITS are float32, three for each token of all windows: the start of the
 * answer, its end, and one that does not count. */
#include "apps/tune/squad.h"

enum { MOST_QUESTION = 16, MOST_ANSWER = 6 };

static int number(const char* text) { return (int)strtol(text, NULL, 10); }

static void show_windows(const Squad* s, const Examples* e) {
    for (int i = 0; i < e->count; i++) {
        const SquadParagraph* p = &s->paragraph[s->question[e->group[i]].paragraph];
        const TextSpan* origin = s->tokens.origin + p->first_token + s->window[i];
        printf("%d %d %d %d\t", e->group[i], e->second[i], e->label[2 * i], e->label[2 * i + 1]);
        for (size_t k = e->begin[i]; k < e->begin[i + 1]; k++) printf("%d ", e->tokens[k]);
        printf("\t");
        for (int k = 0; k < examples_length(e, i) - 1 - e->second[i]; k++)
            printf("%u %u ", origin[k].begin, origin[k].end);
        printf("\n");
    }
}

static void show_answers(Squad* s, const Examples* e, const char* logits_path, const char* out) {
    size_t n;
    real* logits = (real*)read_file(logits_path, SQUAD_MAX_FILE, &n, USAGE);
    CHECK(n == 3 * sizeof(real) * e->begin[e->count]);
    for (int i = 0; i < e->count; i++) squad_take(s, e, i, logits + 3 * e->begin[i], 3);
    squad_write(s, out);
    free(logits);
    const SquadScore score = squad_score(s);
    printf("%d %.12g %.12g\n", score.questions, score.exact, score.f1);
}

static void normalize_all(const char* path) {
    Json json;
    Text out = {NULL, 0, 0}, line = {NULL, 0, 0};
    json_load(&json, path, SQUAD_MAX_FILE);
    for (const JsonNode* text = json.root->first; text; text = text->next) {
        squad_normalize(&out, text->string, text->length);
        line.length = 0;
        text_json_string(&line, out.text, out.length);
        puts(line.text);
    }
    free(out.text), free(line.text);
    json_free(&json);
}

int main(int argc, char** argv) {
    WordPiece words;
    Squad s;
    Examples e;
    if (argc == 3) return normalize_all(argv[2]), DONE;
    if (argc < 7) die(USAGE, "usage: the first lines of dev/test/squad.c show it");
    if (wordpiece_open(&words, argv[2], CASE_OF_MODEL) != 0) die(USAGE, "%s: holds no vocab.txt", argv[2]);
    SquadUse use = strcmp(argv[6], "train") == 0 ? SQUAD_TRAIN : SQUAD_EVALUATE;
    squad_open(&s, &e, argv[3], &words,
               (SquadSettings){number(argv[4]), number(argv[5]), MOST_QUESTION, MOST_ANSWER, use});
    squad_warn(&s);
    if (argc == 7) show_windows(&s, &e);
    else show_answers(&s, &e, argv[6], argv[7]);
    squad_close(&s), examples_close(&e), wordpiece_free(&words);
    return DONE;
}
