/* The op's own tests, and what is timed: the update of GPT-2 124M's parameters. On the CPU, of 8 million. */
#include "dev/ops/adamw.h"

enum {
    LADDER_L = HAS_DEVICE_MEMORY ? 12 : 1,
    LADDER_C = 768,
    LADDER_V = HAS_DEVICE_MEMORY ? 50304 : 1024,
    LADDER_SPANS = 12,
    LADDER_OTHERS = 4
};

static void ladder_test(Harness* h) {
    test_adamw_variants(h);
    if (ADAMW_HAS_MASTER) test_adamw_rounded(h);
    test_adamw_shards(h);
    test_adamw_update(h);
}

// The tensors of GPT-2: of a layer, then those outside.
static int ladder_spans(ParamSpan* spans, size_t* elements) {
    static const int LAYER[LADDER_SPANS] = {1, 1, 3 * LADDER_C, 3, LADDER_C, 1, 1, 1, 4 * LADDER_C, 4, 4 * LADDER_C, 1};
    static const int OTHERS[LADDER_OTHERS] = {LADDER_V, 1024, 1, 1};
    int count = 0;
    *elements = 0;
    for (int i = 0; i < LADDER_L * LADDER_SPANS + LADDER_OTHERS; i++) {
        int rows = i < LADDER_L * LADDER_SPANS ? LAYER[i % LADDER_SPANS] : OTHERS[i - LADDER_L * LADDER_SPANS];
        ParamSpan span = {
            .offset = *elements, .size = (size_t)rows * LADDER_C, .decay = rows > 4 ? 1.0f : 0, .rate = 1};
        spans[count++] = span;
        *elements += round_up(span.size, 128);
    }
    return count;
}

static double ladder_peak(Harness* h) {
    ParamSpan spans[LADDER_L * LADDER_SPANS + LADDER_OTHERS];
    size_t n;
    ladder_spans(spans, &n);
    return ladder_memory_peak(h, 4.0 * (double)n * sizeof(real), 3.0 * (double)n * sizeof(real));
}

static LadderWork ladder_time(Harness* h) {
    ParamSpan spans[LADDER_L * LADDER_SPANS + LADDER_OTHERS];
    size_t n;
    int count = ladder_spans(spans, &n);
    LadderWork work = {0, 0, ADAMW_UPDATE_BYTES(n, ADAMW_HAS_MASTER), 124475904.0 / (double)n};
    case_begin(h, "adamw ladder");
    AdamWCase* k = adamw_case(h, 128, spans, count);
    Array noise = input(h, 1 << 20, 0.1), positive = input(h, 1 << 20, 0.1);
    for (size_t i = 0; i < positive.n; i++) positive.host[i] = (real)fabs((double)positive.host[i]);
    array_upload(positive);
    k->p.n = n;
    k->p.device = (floatX*)bench_memory(h, n, sizeof(floatX), noise);
    k->g.device_real = (real*)bench_memory(h, n, sizeof(real), noise);
    k->m.device_real = (real*)bench_memory(h, n, sizeof(real), noise);
    k->v.device_real = (real*)bench_memory(h, n, sizeof(real), positive);
    k->master.device_real = (real*)bench_memory(h, n, sizeof(real), noise);
    work.seconds = ladder_seconds(h, adamw_run, k);
    return work;
}
