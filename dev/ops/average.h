/* average: test and bench. */
#ifndef DEV_OPS_AVERAGE_H
#define DEV_OPS_AVERAGE_H

#include "harness.h"
#include "llmc/average/average.h"

typedef struct {
    Array average, params, master, kept;
    int has_master;
    double rate;
    Context* ctx;
} AverageCase;

static inline void average_run_update(void* state) {
    AverageCase* k = (AverageCase*)state;
    average_update(k->average.device_real, k->params.device, k->has_master ? k->master.device_real : NULL, k->average.n,
                   k->rate, k->ctx);
}

static inline void average_run_exchange(void* state) {
    AverageCase* k = (AverageCase*)state;
    average_exchange(k->params.device, k->kept.device, k->average.device_real, k->average.n, k->ctx);
}

static inline void average_run_restore(void* state) {
    AverageCase* k = (AverageCase*)state;
    average_restore(k->params.device, k->kept.device, k->average.n, k->ctx);
}

static inline AverageCase* average_case(Harness* h, size_t n) {
    AverageCase* k = (AverageCase*)case_memory(h, sizeof *k);
    k->average = input(h, n, 1), k->params = input(h, n, 1), k->master = input(h, n, 1), k->kept = output(h, n, SET);
    array_upload_real(k->average), array_upload_real(k->master);
    k->ctx = &h->ctx;
    return k;
}

static inline void test_average(Harness* h) {
    static const double RATES[] = {1, 0.25, 1e-4};
    static const size_t SIZES[] = {1, 255, 2000};
    for (int way = 0; way < 18; way++) {
        size_t n = SIZES[way % 3];
        case_begin(h, "average/update of %zu, rate %g, %s", n, RATES[way / 3 % 3], way / 9 ? "master" : "params");
        AverageCase* k = average_case(h, n);
        k->rate = RATES[way / 3 % 3], k->has_master = way / 9;
        if (k->rate == 1) memset(k->average.host, 0, n * sizeof(real)), array_upload_real(k->average);
        real* want = copy_of(h, k->average);
        average_update_ref(want, k->has_master ? k->master.host : k->params.host, n, k->rate);
        average_run_update(k);
        array_download(k->average);
        if (k->rate == 1) expect_equal(h, "the weights exactly", k->average, want);
        else  // three roundings of numbers up to 2
            expect_close(h, "average", k->average, want, tolerance(3 * 1.2e-7));
        case_end(h);
    }
    case_begin(h, "average/exchange and restore");
    AverageCase* k = average_case(h, 1000);
    real *params = copy_of(h, k->params), *average = copy_of(h, k->average);
    average_run_exchange(k);
    array_download(k->params), array_download(k->kept);
    size_t wrong = 0;
    for (size_t i = 0; i < k->average.n; i++)
        wrong += k->params.host[i] != array_stored(k->params, average[i]) || k->kept.host[i] != params[i];
    expect_true(h, "the average, rounded; the parameters are kept", wrong == 0);
    average_run_restore(k);
    expect_equal(h, "params", k->params, params);
    expect_equal(h, "average", k->average, average);
    case_end(h);
}

// Of GPT-2 124M.
static inline void bench_average(Harness* h) {
    size_t n = HAS_DEVICE_MEMORY ? 124475904 : 1 << 20;
    char shapes[64];
    snprintf(shapes, sizeof shapes, "n=%zu", n);
    case_begin(h, "average bench");
    AverageCase* k = average_case(h, n);
    k->has_master = 1, k->rate = 0.001;
    bench_report(h, "average_update", shapes, bench_seconds(h, average_run_update, k), AVERAGE_UPDATE_FLOPS(n),
                 AVERAGE_UPDATE_BYTES(n, 1));
    bench_report(h, "average_exchange", shapes, bench_seconds(h, average_run_exchange, k), 0,
                 AVERAGE_EXCHANGE_BYTES(n));
    bench_report(h, "average_restore", shapes, bench_seconds(h, average_run_restore, k), 0, AVERAGE_RESTORE_BYTES(n));
    case_free(h);
}

#endif
