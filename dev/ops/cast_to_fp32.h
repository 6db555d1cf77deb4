/* cast_to_fp32: of parameters or of their master copies, and of shards. */
#ifndef DEV_OPS_CAST_TO_FP32_H
#define DEV_OPS_CAST_TO_FP32_H

#include "llmc/ops/cast_to_fp32.h"
#include "op.h"

// Spans of one element, of fewer than a block's threads and of more; what no span names stays.
static const CastSpan CAST_SPANS[] = {{0, 700, 1}, {128, 0, 199}, {400, 200, 500}};
enum { CAST_FROM = 1024, CAST_TO = 800 };

// `own`: the spans, M of them. Of a bench: the layernorms of BERT-large, as far apart as its smallest tensors allow.
OP_FN(cast_to_fp32_prepare) {
    CastSpan* spans = (CastSpan*)(k->own = pinned_memory(k->h, (size_t)k->M * sizeof *spans));
    if (!k->is_bench) memcpy(spans, CAST_SPANS, sizeof CAST_SPANS);
    for (int s = 0; s < k->M && k->is_bench; s++) spans[s] = (CastSpan){(size_t)s * 131072, (size_t)s * 1024, 1024};
    if (k->is_bench) k->own = resident(k->h, spans, (size_t)k->M * sizeof *spans);
    // floatX holds few of these
    for (size_t i = 0; i < k->master.n; i++) k->master.initial[i] = (real)(1 + 1e-4 * (double)(i % 1000));
    array_restore(k->master);
}

RUN_AND_WANT(cast_to_fp32, forward,
             cast_to_fp32(k->y.device_real, k->params.device, k->kind ? k->master.device_real : NULL,
                          OP_OWN(const CastSpan), k->M, k->y.n, k->ctx),
             cast_to_fp32_ref(k->y.want, k->params.host, k->kind ? k->master.host : NULL, OP_OWN(const CastSpan),
                              k->M));

static const Arg CAST_ARGS[] = ARGS(ARG(params, "N", IN, 1), ARG(master, "N", IN, 1), ARG(y, "V", OUT));
static const int CAST_ROWS[][3] = {{CAST_FROM, CAST_TO, COUNT_OF(CAST_SPANS)}};
static const int CAST_BENCH[][3] = {{50 * 131072, 50 * 1024, 50}};

static const Op CAST_TO_FP32 = {OP_OF("cast_to_fp32", "N V M", CAST_ARGS, CAST_ROWS), OP_BENCH(CAST_BENCH, CAST_BENCH),
                                .passes = {{"forward", "y", OP_PAIR(cast_to_fp32, forward)}},
                                .prepare = cast_to_fp32_prepare, .kinds = {"params", "master"}};

// Each shard's copies, added up, are those of the whole: shards without any, with a part of a span, with all.
static inline void test_cast_to_fp32(Harness* h) {
    static const size_t ENDS[][4] = {{1024, 1024, 1024, 1024}, {0, 128, 512, 1024}, {128, 256, 384, 1024}};
    for (size_t c = 0; c < COUNT_OF(ENDS); c++) {
        OpWay way = {SET, SET, 1, 0, 0};
        OpCase* k = op_case(h, &CAST_TO_FP32, CAST_TO_FP32.passes, CAST_ROWS[0], way);
        real *sum = (real*)case_memory(h, CAST_TO * sizeof *sum), *untouched = copy_of(h, k->y);
        const CastSpan* spans = OP_OWN(const CastSpan);
        size_t wrong = 0;
        for (size_t i = 0, begin = 0; i < 4; begin = ENDS[c][i++]) {
            const real* master = k->master.host + begin;
            size_t n = ENDS[c][i] - begin;
            real* part = copy_of(h, k->y);
            cast_to_fp32_shard_ref(part, master, begin, n, spans, k->M);
            cast_to_fp32_shard(k->y.device_real, k->master.device_real + begin, begin, n, spans, k->M, 1000, k->ctx);
            expect_equal(h, "copies", k->y, part);
            for (size_t j = 0; j < CAST_TO; j++) sum[j] += part[j];
        }
        op_reference(h, k, &CAST_TO_FP32, CAST_TO_FP32.passes);
        for (size_t j = 0; j < CAST_TO; j++) {
            int is_named = j < 199 || (j >= 200 && j < 701);
            wrong += is_named && sum[j] != k->y.want[j];
            wrong += !is_named && memcmp(&k->y.host[j], &untouched[j], sizeof *sum) != 0;
        }
        expect_true(h, "the sum, and what no span names", wrong == 0);
        case_end(h);
    }
}

#endif
