/* The validation with the lowest loss so far. --keep-best keeps a checkpoint of it. trainer.json holds this
 * state, so a resumed run decides as an uninterrupted one. Validations before the first step do not count. */
#ifndef LLMC_RUN_BEST_H
#define LLMC_RUN_BEST_H

#include "llmc/base/json.h"
#include "llmc/base/json_write.h"

typedef struct {
    double loss;     // the lowest
    int64_t step;    // its step; 0: none yet
    int64_t judged;  // the newest step that was counted: a validation repeated after a resume does not count twice
} Best;

// Record the loss of a validation after `step` steps.
static inline void best_judge(Best* b, int64_t step, double loss) {
    if (step <= b->judged) return;
    b->judged = step;
    if (!isfinite(loss) || (b->step > 0 && loss >= b->loss)) return;
    b->loss = loss, b->step = step;
}

// The next validation becomes the best. Those so far still count as judged.
static inline void best_forget(Best* b) { b->loss = 0, b->step = 0; }

static inline void best_put(Text* t, const Best* b) {
    if (b->judged == 0) return;
    json_put_key(t, "best");
    text_append(t, "{", 1);
    json_put_integer(t, "judged", b->judged);
    json_put_integer(t, "step", b->step);
    json_put_number(t, "loss", b->loss);
    text_append(t, "}", 1);
}

// Read what best_put() wrote into an object; it writes nothing before the first validation.
static inline Best best_get(const JsonNode* object, const char* file) {
    const JsonNode* saved = json_get(object, "best");
    Best b;
    memset(&b, 0, sizeof b);
    if (!saved) return b;
    b.judged = json_get_int(saved, "judged", file), b.step = json_get_int(saved, "step", file);
    b.loss = json_get_double_or(saved, "loss", NAN, file);
    if (b.step < 0 || b.step > b.judged || (b.step > 0 && !isfinite(b.loss)))
        die(USAGE, "%s: key \"best\": is not the state of a run's validations", file);
    return b;
}

#endif
