/* A GPT-2 for tests: the model, its optimizer and one batch, without files or flags. Include it after train_gpt2.cu. */
#ifndef DEV_TEST_BENCH_GPT2_H
#define DEV_TEST_BENCH_GPT2_H

typedef struct {
    Context ctx;
    Model m;
    LmData data;
    Optimizer o;
} Bench;

// `fp8`: --fp8.
static void bench_open_fp8(Bench* b, Config config, int B, int T, int recompute, int fp8, uint64_t seed) {
    context_init(&b->ctx);
    model_plan(&b->m, config, B, T, recompute, 0);
    b->m.buffers.fp8.is_wanted = fp8, b->m.buffers.fp8.keeps_x = recompute == RECOMPUTE_NOTHING;
    fp8_state_plan(&b->m.buffers.fp8, &b->m.buffers.table, b->m.N);
    model_buffers_alloc(&b->m.buffers, &b->ctx);
    lm_data_alloc(&b->data, B, T, NO_CUTS, &b->ctx);
    optimizer_init_shard(&b->o, &b->m.buffers.table, (UpdateSettings){.kind = ADAMW, .master = WITH_MASTER},
                         tensors_updated(&b->m.buffers.table), &b->ctx);
    b->m.buffers.master = b->o.master;
    WeightRules rules = gpt2_weight_rules(&config);
    model_buffers_init(&b->m.buffers, &b->o, &rules, seed, &b->ctx);
    b->m.buffers.dropout.seed = seed;
}

static void bench_open(Bench* b, Config config, int B, int T, int recompute, uint64_t seed) {
    bench_open_fp8(b, config, B, T, recompute, 0, seed);
}

// Read a file of weights.
static void bench_load(Bench* b, const char* path) {
    WeightRules rules = gpt2_weight_rules(&b->m.config);
    model_buffers_read(&b->m.buffers, &b->o, path, &rules.file, &b->ctx);
}

static void bench_close(Bench* b) {
    optimizer_free(&b->o);
    lm_data_close(&b->data);
    model_buffers_free(&b->m.buffers);
    matmul_plans_free(&b->ctx);
    context_free(&b->ctx);
}

#endif
