/* Multiple-choice sets for dev/test/choices.py: packing into micro-batches, and counting, with a made-up model.
 *
 *     test_choices SET V                  opens a set for a model of V tokens
 *     test_choices SET V N T RANKS        counts, in micro-batches of N rows, sequences of T tokens, on RANKS ranks */
#include "llmc/choices/multiple_choice.h"

// Its loss on a target after the n tokens before it, an integer, so that ties happen, or NaN for one in 100. Whether it
// finds the target likeliest.
static int number(const char* text) { return (int)strtol(text, NULL, 10); }

static real model(const int* tokens, int n, int target, int* is_right) {
    uint32_t u = 0;
    for (int i = 0; i <= n; i++) u = u * 31 + (uint32_t)(i < n ? tokens[i] : target);
    u ^= u >> 15;
    *is_right = u / 100 % 4 != 0;
    return u % 100 == 0 ? (real)NAN : (real)(u % 5);
}

// Micro-batches of a rank's share: their layout, and what they add to the sums.
static void evaluate_share(MultipleChoiceEvaluation* e) {
    for (int rows, before = -1; (rows = multiple_choice_pack(e)) > 0; before = rows) {
        const Documents* packed = &e->packed;
        int64_t squares = 0;
        int longest = 0, scored = 0;
        // No ending that would have fitted in the micro-batch before was moved to this one.
        CHECK(rows <= e->N && e->count == packed->count && (before < 0 || before + packed->cu_seqlens[1] > e->N));
        for (int i = 0; i < e->count; i++) {
            const MultipleChoiceSequence* s = &e->sequences[i];
            int begin = packed->cu_seqlens[i], length = packed->cu_seqlens[i + 1] - begin;
            for (int k = begin; k < begin + length; k++)
                CHECK(packed->document[k] == i && packed->position[k] == k - begin);
            squares += (int64_t)length * length, longest = max_int(longest, length), scored += s->count;
            e->correct[i] = 0;
            for (int k = s->first; k < s->first + s->count; k++) {
                int is_right;
                e->losses[k] = model(e->inputs + begin, e->rows[k] + 1 - begin, e->targets[k], &is_right);
                e->correct[i] += (real)is_right;
            }
        }
        CHECK(squares == packed->sum_sq_len && longest == packed->longest && scored == e->scored);
        multiple_choice_score(e, e->losses, e->correct);
    }
}

int main(int argc, char** argv) {
    MultipleChoice c;
    if (argc != 3 && argc != 6) die(USAGE, "usage: the first lines of dev/test/choices.c show it");
    multiple_choice_open(&c, argv[1], number(argv[2]));
    MultipleChoiceSums sums = {0, 0, 0, 0, 0};
    for (int rank = 0, ranks = argc == 6 ? number(argv[5]) : 0; rank < ranks; rank++) {
        MultipleChoiceEvaluation e;
        multiple_choice_begin(&e, &c, number(argv[3]), number(argv[4]), rank, ranks);
        evaluate_share(&e);
        sums.examples += e.sums.examples, sums.correct += e.sums.correct, sums.correct_norm += e.sums.correct_norm;
        sums.cloze_loss += e.sums.cloze_loss, sums.not_finite += e.sums.not_finite;
        multiple_choice_end(&e);
    }
    printf("%g %g %g %g %g\n", sums.examples, sums.correct, sums.correct_norm, sums.cloze_loss, sums.not_finite);
    multiple_choice_close(&c);
    return DONE;
}
