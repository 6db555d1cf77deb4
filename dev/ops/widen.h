/* widen: test. */
#ifndef DEV_OPS_WIDEN_H
#define DEV_OPS_WIDEN_H

#include "../../llmc/ops/widen.h"
#include "harness.h"

typedef struct {
    Array params, master, copies;
    WidenSpan* spans;
    int has_master;
    Context* ctx;
} WidenCase;

static inline void widen_run(void* state) {
    WidenCase* k = (WidenCase*)state;
    widen_forward(k->copies.device_real, k->params.device, k->has_master ? k->master.device_real : NULL, k->spans, 3,
                  1000, k->ctx);
}

// Spans of one element, of fewer than a block's threads and of more; what no span names stays.
static inline void test_widen(Harness* h) {
    static const WidenSpan SPANS[] = {{0, 700, 1}, {128, 0, 199}, {400, 200, 500}};
    for (int has_master = 0; has_master < 2; has_master++) {
        case_begin(h, "widen/forward of %s", has_master ? "master weights" : "parameters");
        WidenCase* k = (WidenCase*)case_memory(h, sizeof *k);
        k->params = input(h, 900, 1), k->master = input(h, 900, 1), k->copies = output(h, 800, SET);
        for (size_t i = 0; i < 900; i++) k->master.host[i] = (real)(1 + 1e-4 * (double)i);  // floatX holds few of these
        array_upload_real(k->master);
        k->spans = (WidenSpan*)int_array(h, COUNT_OF(SPANS) * (sizeof(WidenSpan) / sizeof(int)));
        memcpy(k->spans, SPANS, sizeof SPANS);
        k->has_master = has_master, k->ctx = &h->ctx;
        real* want = copy_of(h, k->copies);
        widen_forward_ref(want, k->params.host, has_master ? k->master.host : NULL, SPANS, 3);
        expect_same_for_any_threads(h, "forward", widen_run, k, &k->copies, 1);
        expect_equal(h, "copies", k->copies, want);
        case_end(h);
    }
}

#endif
