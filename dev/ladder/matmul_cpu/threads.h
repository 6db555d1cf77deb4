/* Faster than packed: the panels are independent, so each core takes one after the other. Every output is still one
 * sum in the same order by one thread: the number of threads changes no bit. */
#include "dev/ladder/matmul_cpu/packed.h"

static void threads_matmul_forward(floatX* y, const floatX* x, Linear p, int N, int IC, int OC, Mode mode,
                                   Context* ctx) {
    PackedProduct m = {y, x, p, N, IC, OC, mode};
    size_t each = round_up((size_t)IC * (size_t)TILE_COLS, 64);
    real* panels = (real*)device_scratch(ctx, (size_t)device_threads() * each * sizeof *panels);
#pragma omp parallel for schedule(dynamic)
    for (int o = 0; o < OC; o += TILE_COLS) {
        real* panel = panels + (size_t)device_thread_index() * each;
        packed_panel(panel, p.w + (size_t)o * (size_t)IC, IC, min_int(TILE_COLS, OC - o));
        packed_columns(&m, panel, o);
    }
}
