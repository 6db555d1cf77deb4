/* Rounding statistics of the fp8 tensors of the last step (--fp8), for log.jsonl. A tensor is an operand of a linear
 * layer, named by the layer's weight.
 *
 *   amax     its largest absolute value          scale    the factor on its elements
 *   clipped  the share of elements stored as the format's largest number
 *   flushed  the share of elements stored as 0, zeros included
 *
 * Statistics cover all ranks and micro-batches of the step. Reading them waits for the device, so it is done only at
 * validations. */
#ifndef LLMC_FP8_REPORT_H
#define LLMC_FP8_REPORT_H

#include "llmc/base/log.h"
#include "llmc/fp8/state.h"

// Log the statistics of step `step`, this process's last. Does nothing if it was not in fp8, or there was none. A
// collective call.
static inline void fp8_report(const Fp8State* s, const ProcessGroup* group, Log* log, int64_t step, Context* ctx) {
    static const char* const OPERANDS[] = {"x", "w", "dy"};
    const Fp8Shared* o = &s->shared;
    size_t n = (size_t)o->scales.count, ranks = (size_t)group->size;
    Text line = {NULL, 0, 0};
    if (n == 0 || !(o->elements[0] > 0)) return;
    Fp8Recorded* all = (Fp8Recorded*)xmalloc((ranks + 1) * n * sizeof *all);
    double* elements = (double*)xmalloc(n * sizeof *elements);
    device_download(ctx, all + ranks * n, o->scales.recorded, n * sizeof *all);
    memcpy(elements, o->elements, n * sizeof *elements);
    group_gather(group, all, all + ranks * n, n * sizeof *all);
    group_sum_counts(group, elements, n);
    text_append(&line, "{", 1);
    json_put_integer(&line, "step", step);
    json_put_key(&line, "fp8");
    for (size_t t = 0; t < n; t++) {
        Fp8Stats sum = {0, 0, 0};
        for (size_t r = 0; r < ranks; r++) {
            const Fp8Stats* seen = &all[r * n + t].stats;
            sum.clipped += seen->clipped, sum.flushed += seen->flushed;
            if (seen->amax > sum.amax) sum.amax = seen->amax;
        }
        float amax;
        memcpy(&amax, &sum.amax, sizeof amax);
        int operand = (int)t % FP8_OPERANDS;
        text_printf(&line, "%s{", t ? ", " : "[");
        json_put_string(&line, "tensor", s->names[t / FP8_OPERANDS]);
        json_put_string(&line, "operand", OPERANDS[operand]);
        json_put_string(&line, "format", fp8_operand_format(operand) == FP8_E4M3 ? "E4M3" : "E5M2");
        log_put(&line, "amax", (double)amax, 6);
        log_put(&line, "scale", (double)all[t].scale, 17);  // a power of two: exact
        log_put(&line, "clipped", (double)sum.clipped / elements[t], 6);
        log_put(&line, "flushed", (double)sum.flushed / elements[t], 6);
        text_append(&line, "}", 1);
    }
    text_append(&line, "]}", 2);
    log_line(log, &line);
    free(line.text), free(all), free(elements);
}

#endif
