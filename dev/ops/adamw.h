/* adamw: test and bench. */
#ifndef DEV_OPS_ADAMW_H
#define DEV_OPS_ADAMW_H

#include "../../llmc/ops/adamw.h"
#include "harness.h"

// Two spans that decay, two that do not, pads between them and at the end; the second needs several blocks.
static const ParamSpan ADAMW_SPANS[] = {{0, 100, 1}, {128, 40000, 1}, {40192, 33, 0}, {40320, 1, 0}};
#define ADAMW_SIZE 40448

// Where floatX is narrow the parameters have a master copy in full precision; elsewhere it is not used.
enum { ADAMW_HAS_MASTER = sizeof(floatX) < sizeof(real) };

typedef struct {
    Array p, m, v, g, norm, master;
    const ParamSpan* spans;         // for the reference
    const ParamSpan* device_spans;  // the same, for the launcher
    int count;
    AdamW h;
    Context* ctx;
} AdamWCase;

static inline AdamWCase* adamw_case(Harness* h, size_t n, const ParamSpan* spans, int count) {
    AdamWCase* k = (AdamWCase*)case_memory(h, sizeof *k);
    k->p = input(h, n, 1.0);
    k->m = input(h, n, 0.1);
    k->v = input(h, n, 0.1);
    k->g = input(h, n, 0.3);
    k->norm = input(h, 1, 1.0);
    k->master = input(h, n, 1.0);
    memcpy(k->master.initial, k->p.initial, n * sizeof(real));
    for (size_t i = 0; i < n; i++) k->v.initial[i] *= k->v.initial[i];
    double sum = 0;
    for (size_t i = 0; i < n; i++) sum += (double)k->g.host[i] * (double)k->g.host[i];
    k->norm.initial[0] = (real)sqrt(sum);
    array_restore(k->v), array_restore(k->norm), array_restore(k->master);
    ParamSpan* device_spans = (ParamSpan*)case_block(h, (size_t)count * sizeof *spans, ON_DEVICE);
    device_upload(&h->ctx, device_spans, spans, (size_t)count * sizeof *spans);
    device_synchronize(&h->ctx);
    k->spans = spans;
    k->device_spans = device_spans;
    k->count = count;
    k->h.lr = 3e-3;
    k->h.beta1 = 0.9;
    k->h.beta2 = 0.999;
    k->h.eps = 1e-8;
    k->h.weight_decay = 0.1;
    k->h.max_norm = 1;
    k->h.step = 1;
    k->ctx = &h->ctx;
    return k;
}

static inline void adamw_run(void* state) {
    AdamWCase* k = (AdamWCase*)state;
    AdamWState a = {k->p.device,      ADAMW_HAS_MASTER ? k->master.device_real : NULL,
                    k->m.device_real, k->v.device_real,
                    k->g.device_real, k->norm.device_real};
    adamw_update(a, k->p.n, k->device_spans, k->count, k->h, k->ctx);
}

static inline void test_adamw(Harness* h) {
    static const int64_t STEPS[] = {1, 2, 1000, 5000000000};
    for (size_t i = 0; i < COUNT_OF(STEPS); i++)
        for (int clipped = 0; clipped < 2; clipped++) {
            case_begin(h, "adamw/update step=%lld %s", (long long)STEPS[i], clipped ? "clipped" : "not clipped");
            AdamWCase* k = adamw_case(h, ADAMW_SIZE, ADAMW_SPANS, (int)COUNT_OF(ADAMW_SPANS));
            k->h.step = STEPS[i];
            k->h.max_norm = clipped ? 1 : 0;
            real *p = copy_of(h, k->p), *m = copy_of(h, k->m), *v = copy_of(h, k->v);
            adamw_update_ref(p, m, v, k->g.host, k->norm.host, k->spans, k->count, k->h);
            Array written[] = {k->p, k->m, k->v, k->master};
            expect_same_for_any_threads(h, "update", adamw_run, k, written, 4);
            expect_close(h, "params", k->p, p, tolerance(1e-6));
            if (ADAMW_HAS_MASTER) expect_close(h, "master", k->master, p, tolerance(1e-6));
            expect_close(h, "m", k->m, m, tolerance(5e-7));
            expect_close(h, "v", k->v, v, tolerance(5e-7));
            size_t end = 0, touched = 0;  // between the spans
            for (int s = 0; s <= k->count; s++) {
                size_t next = s < k->count ? k->spans[s].offset : k->p.n;
                for (; end < next; end++)
                    touched += memcmp(k->p.host + end, k->p.initial + end, sizeof(real)) != 0 ||
                               memcmp(k->master.host + end, k->master.initial + end, sizeof(real)) != 0 ||
                               memcmp(k->m.host + end, k->m.initial + end, sizeof(real)) != 0 ||
                               memcmp(k->v.host + end, k->v.initial + end, sizeof(real)) != 0;
                if (s < k->count) end += k->spans[s].size;
            }
            expect_true(h, "pads keep their bits", touched == 0);
            case_end(h);
        }

    // By hand: at step 1 from m = v = 0, m / (1 - beta1) = g and v / (1 - beta2) = g^2, so p moves by
    // lr * g / (|g| + eps), after it shrank by lr * weight_decay where decay applies.
    case_begin(h, "adamw/update first step, worked out by hand");
    AdamWCase* k = adamw_case(h, ADAMW_SIZE, ADAMW_SPANS, (int)COUNT_OF(ADAMW_SPANS));
    k->h.max_norm = 0;
    memset(k->m.host, 0, k->m.n * sizeof(real));
    memset(k->v.host, 0, k->v.n * sizeof(real));
    array_upload_real(k->m), array_upload_real(k->v);
    real* p = copy_of(h, k->p);
    for (int s = 0; s < k->count; s++)
        for (size_t i = k->spans[s].offset; i < k->spans[s].offset + k->spans[s].size; i++) {
            double g = k->g.host[i];
            p[i] = (real)(p[i] * (k->spans[s].decay ? 1 - 3e-4 : 1) - 3e-3 * g / (fabs(g) + 1e-8));
        }
    adamw_run(k);
    expect_close(h, "params", k->p, p, tolerance(1e-6));
    case_end(h);

    // A norm below max_norm does not scale the gradient: the same bits as without clipping.
    case_begin(h, "adamw/update norm below max_norm");
    k = adamw_case(h, ADAMW_SIZE, ADAMW_SPANS, (int)COUNT_OF(ADAMW_SPANS));
    k->h.max_norm = 1e9;
    adamw_run(k);
    p = copy_of(h, k->p);
    array_restore(k->p), array_restore(k->m), array_restore(k->v), array_restore(k->master);
    k->h.max_norm = 0;
    adamw_run(k);
    expect_equal(h, "params", k->p, p);
    case_end(h);

    static const double ODD[] = {NAN, INFINITY};
    for (size_t i = 0; i < COUNT_OF(ODD); i++) {
        case_begin(h, "adamw/update gradient norm is %g: nothing moves", ODD[i]);
        k = adamw_case(h, ADAMW_SIZE, ADAMW_SPANS, (int)COUNT_OF(ADAMW_SPANS));
        k->norm.host[0] = (real)ODD[i];
        array_upload_real(k->norm);
        adamw_run(k);
        expect_equal(h, "params", k->p, k->p.initial);
        expect_equal(h, "master", k->master, k->master.initial);
        expect_equal(h, "m", k->m, k->m.initial);
        expect_equal(h, "v", k->v, k->v.initial);
        case_end(h);
    }
}

static inline void bench_adamw(Harness* h) {
    size_t n = (size_t)(HAS_DEVICE_MEMORY ? 64 : 8) << 20;
    char shapes[64];
    snprintf(shapes, sizeof shapes, "n=%zu", n);
    ParamSpan* span = (ParamSpan*)case_memory(h, sizeof *span);
    span->size = n;
    span->decay = 1;
    AdamWCase* k = adamw_case(h, n, span, 1);
    bench_report(h, "adamw_update", shapes, bench_seconds(h, adamw_run, k), ADAMW_UPDATE_FLOPS(n),
                 ADAMW_UPDATE_BYTES(n));
}

#endif
