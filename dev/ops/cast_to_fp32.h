/* cast_to_fp32: test and bench. */
#ifndef DEV_OPS_CAST_TO_FP32_H
#define DEV_OPS_CAST_TO_FP32_H

#include "harness.h"
#include "llmc/ops/cast_to_fp32.h"

typedef struct {
    Array params, master, copies;
    CastSpan* spans;
    int has_master, count;
    size_t begin, n;  // of a shard
    Context* ctx;
} CastToFp32Case;

static inline void cast_to_fp32_run(void* state) {
    CastToFp32Case* k = (CastToFp32Case*)state;
    cast_to_fp32(k->copies.device_real, k->params.device, k->has_master ? k->master.device_real : NULL, k->spans,
                 k->count, k->copies.n, k->ctx);
}

static inline void cast_to_fp32_run_shard(void* state) {
    CastToFp32Case* k = (CastToFp32Case*)state;
    cast_to_fp32_shard(k->copies.device_real, k->master.device_real + k->begin, k->begin, k->n, k->spans, 3, 1000,
                       k->ctx);
}

static const CastSpan CAST_SPANS[] = {{0, 700, 1}, {128, 0, 199}, {400, 200, 500}};

static inline CastToFp32Case* cast_to_fp32_case(Harness* h, size_t n) {
    CastToFp32Case* k = (CastToFp32Case*)case_memory(h, sizeof *k);
    k->params = input(h, n, 1), k->master = input(h, n, 1), k->copies = output(h, 800, SET);
    k->spans = (CastSpan*)pinned_memory(h, sizeof CAST_SPANS);
    memcpy(k->spans, CAST_SPANS, sizeof CAST_SPANS);
    k->count = 3, k->ctx = &h->ctx;
    return k;
}

// Spans of one element, of fewer than a block's threads and of more; what no span names stays.
static inline void test_cast_to_fp32(Harness* h) {
    for (int has_master = 0; has_master < 2; has_master++) {
        case_begin(h, "cast_to_fp32/forward of %s", has_master ? "master weights" : "parameters");
        CastToFp32Case* k = cast_to_fp32_case(h, 900);
        for (size_t i = 0; i < 900; i++) k->master.host[i] = (real)(1 + 1e-4 * (double)i);  // floatX holds few of these
        array_upload_real(k->master);
        k->has_master = has_master;
        real* want = copy_of(h, k->copies);
        cast_to_fp32_ref(want, k->params.host, has_master ? k->master.host : NULL, CAST_SPANS, 3);
        expect_same_for_any_threads(h, "forward", cast_to_fp32_run, k, &k->copies, 1);
        expect_equal(h, "copies", k->copies, want);
        case_end(h);
    }

    // Each shard's copies, added up, are those of the whole: shards without any, with a part of a span, with all.
    static const size_t ENDS[][4] = {
        {1024, 1024, 1024, 1024}, {0, 128, 512, 1024}, {256, 256, 640, 1024}, {128, 256, 384, 1024}};
    for (size_t c = 0; c < COUNT_OF(ENDS); c++) {
        case_begin(h, "cast_to_fp32/forward of shards that end at %zu, %zu, %zu", ENDS[c][0], ENDS[c][1], ENDS[c][2]);
        CastToFp32Case* k = cast_to_fp32_case(h, 1024);
        real *want = copy_of(h, k->copies), *sum = (real*)case_memory(h, 800 * sizeof(real));
        real* untouched = copy_of(h, k->copies);
        cast_to_fp32_ref(want, NULL, k->master.host, CAST_SPANS, 3);
        for (int i = 0; i < 4; k->begin = ENDS[c][i++]) {
            k->n = ENDS[c][i] - k->begin;
            real* part = copy_of(h, k->copies);
            cast_to_fp32_shard_ref(part, k->master.host + k->begin, k->begin, k->n, CAST_SPANS, 3);
            expect_same_for_any_threads(h, "forward", cast_to_fp32_run_shard, k, &k->copies, 1);
            expect_equal(h, "copies", k->copies, part);
            for (size_t j = 0; j < 800; j++) sum[j] += part[j];
        }
        for (size_t j = 0; j < 800; j++)
            if (memcmp(&want[j], &untouched[j], sizeof(real)) == 0) sum[j] = untouched[j];
        expect_true(h, "the sum", memcmp(sum, want, 800 * sizeof(real)) == 0);
        case_end(h);
    }
}

// The layernorms of BERT-large, as far apart as its smallest tensors allow.
static inline void bench_cast_to_fp32(Harness* h) {
    enum { COUNT = 50, C = 1024, APART = 128 * C };
    CastSpan spans[COUNT];
    CastToFp32Case* k = (CastToFp32Case*)case_memory(h, sizeof *k);
    case_begin(h, "cast_to_fp32 bench");
    for (size_t s = 0; s < COUNT; s++) spans[s].from = s * APART, spans[s].to = s * C, spans[s].size = C;
    k->params = input(h, (size_t)COUNT * APART, 1), k->master = input(h, (size_t)COUNT * APART, 1);
    k->copies = output(h, (size_t)COUNT * C, SET);
    k->spans = (CastSpan*)resident_ints(h, (const int*)spans, COUNT * (sizeof(CastSpan) / sizeof(int)));
    k->count = COUNT, k->has_master = 1, k->ctx = &h->ctx;
    bench(h, "", cast_to_fp32_run, k);
    case_free(h);
}

#endif
