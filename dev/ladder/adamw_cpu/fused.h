/* Faster than passes: one loop does everything of an element, so each array is read and written once. The loop has
 * no branch, and its square root is an instruction (-fno-math-errno), so it vectorizes. adamw_block() is the shipped
 * op's (llmc/ops/adamw.h); what the op adds are threads, on blocks of equal size because tensors differ so much. */
static inline void rung_adamw_update(AdamWState a, size_t elements, const ParamSpan* spans, int count,
                                     OptimizerSettings h, Context* ctx) {
    AdamWCoefficients c = adamw_coefficients(h);
    (void)ctx, (void)elements;
    for (int s = 0; s < count && a.step->is_taken; s++) {
        real shrink = (real)(1 - h.lr * spans[s].rate * h.weight_decay * spans[s].decay);
        adamw_block(a, spans[s].offset, spans[s].size, spans[s].rate, shrink, &c);
    }
}
