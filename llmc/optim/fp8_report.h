/* Rounding statistics of the fp8 tensors of the last step (--fp8), for log.jsonl. A tensor is an operand of a linear
 * layer, named by the layer's weight.
 *
 *   amax     its largest absolute value          scale    the factor on its elements
 *   clipped  the share of elements stored as the format's largest number
 *   flushed  the share of elements stored as 0, zeros included
 *
 * Statistics cover all ranks and micro-batches of the step. Reading them waits for the device, so it is done only at
 * validations. */
#ifndef LLMC_OPTIM_FP8_REPORT_H
#define LLMC_OPTIM_FP8_REPORT_H

#include "llmc/optim/fp8_state.h"

typedef struct {
    const char *tensor, *operand, *format;
    double amax, scale, clipped, flushed;
} Fp8ReportRow;

// The rows of all tensors (the caller frees them), and their number in *count: 0 if the last step of this process
// was not in fp8, or there was none. A collective call.
static inline Fp8ReportRow* fp8_report(const Fp8State* s, const ProcessGroup* group, int* count, Context* ctx) {
    static const char* const OPERANDS[] = {"x", "w", "dy"};
    const Fp8Operands* o = &s->operands;
    size_t n = (size_t)o->scales.count, ranks = (size_t)group->size;
    *count = n && o->elements[0] > 0 ? (int)n : 0;
    if (!*count) return NULL;
    Fp8ReportRow* rows = (Fp8ReportRow*)xcalloc(n, sizeof *rows);
    Fp8Recorded* all = (Fp8Recorded*)xmalloc((ranks + 1) * n * sizeof *all);
    double* elements = (double*)xmalloc(n * sizeof *elements);
    device_download(ctx, all + ranks * n, o->scales.recorded, n * sizeof *all);
    memcpy(elements, o->elements, n * sizeof *elements);
    group_gather(group, all, all + ranks * n, n * sizeof *all);
    group_sum_counts(group, elements, n);
    for (size_t t = 0; t < n; t++) {
        Fp8Stats sum = {0, 0, 0};
        for (size_t r = 0; r < ranks; r++) {
            const Fp8Stats* seen = &all[r * n + t].stats;
            sum.clipped += seen->clipped, sum.flushed += seen->flushed;
            if (seen->amax > sum.amax) sum.amax = seen->amax;
        }
        float amax;
        memcpy(&amax, &sum.amax, sizeof amax);
        Fp8ReportRow* row = &rows[t];
        int operand = (int)t % FP8_OPERANDS;
        row->tensor = s->names[t / FP8_OPERANDS], row->operand = OPERANDS[operand];
        row->format = fp8_operand_format(operand) == FP8_E4M3 ? "E4M3" : "E5M2";
        row->amax = (double)amax, row->scale = (double)all[t].scale;
        row->clipped = (double)sum.clipped / elements[t], row->flushed = (double)sum.flushed / elements[t];
    }
    free(all), free(elements);
    return rows;
}

#endif
