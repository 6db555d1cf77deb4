/* Tests of train_gpt2.cu as a whole: it is included here without its main(). Golden files of transformers, equalities,
 * finite differences (double build). The golden files and the script that made them are in dev/reference/. */
#define NO_MAIN
#include "train_gpt2.cu"

#include "dev/test/bench_gpt2.h"
#include "dev/test/model_tests.h"

// Losses and gradients of the sequences in b->data, which are number first and up of step number `step`.
static void train_batch(Bench* b, uint64_t step, int first, double scale, Mode mode) {
    Model* m = &b->m;
    Batch batch = lm_data_batch(&b->data, m->B, first);
    m->buffers.dropout.is_on = 1, m->buffers.dropout.step = step;
    forward(m, &batch, &b->ctx);
    forward_head(m, m->a.lnf, batch.s.rows, &b->ctx);
    compute_loss(m, &batch, scale, BACKWARD, mode, &b->ctx);
    backward(m, &batch, mode, &b->ctx);
    m->buffers.dropout.is_on = 0;
}

// Logits and losses of the sequences in b->data.
static void evaluate_bench(Bench* b, double scale) {
    Batch batch = lm_data_batch(&b->data, b->m.B, 0);
    evaluate_batch(&b->m, &batch, scale, SET, &b->ctx);
}

static void bench_batch(Bench* b, const int* inputs, const int* targets) {
    device_upload(&b->ctx, b->data.inputs, inputs, (size_t)b->m.N * sizeof(int));
    device_upload(&b->ctx, b->data.targets, targets, (size_t)b->m.N * sizeof(int));
    device_synchronize(&b->ctx);
}

static void random_tokens(int* tokens, int n, int V, uint64_t seed) {
    for (int i = 0; i < n; i++) tokens[i] = (int)(philox((uint32_t)i, 0, 0, 0, seed).v[0] % (uint32_t)V);
}

// ---------------------------------------------------------------------------------------------------------
// Goldens

static void golden_tokens(const SafeTensors* file, const char* name, int* out, size_t n) {
    const SafeTensor* entry = safetensors_find(file, name);
    if (!entry || entry->elements != n || strcmp(entry->dtype, "I32") != 0)
        die(FAILED, "golden file: \"%s\" is missing or of another size", name);
    safetensors_read_bytes(entry, 0, n * sizeof(int), out);
}

// Logits, loss, the gradient of every tensor and ten AdamW steps, as transformers and torch computed them in float64.
// 1e-5 is what fp32 allows on the CPU: torch's own fp32 is within 1.4e-6 on these models. The GPU sums in another
// order. In bf16 and fp16 this is a check of plumbing only: 2^-8 an operation adds up to a few per cent of a logit.
static void test_golden(Tests* t, const char* directory) {
#ifdef __CUDACC__
    const double tolerance = sizeof(floatX) == sizeof(real) ? 1e-4 : 6e-2;
#else
    const double tolerance = 1e-5;
#endif
    char *path = xprintf("%s/config.json", directory), *weights = xprintf("%s/model.safetensors", directory);
    char *golden = xprintf("%s/golden.safetensors", directory), name[192];
    SafeTensors file;
    Bench* b = (Bench*)xcalloc(1, sizeof *b);
    Config config = config_read(path);
    safetensors_open(&file, golden);
    const SafeTensor* tokens = safetensors_find(&file, "tokens");
    int B = (int)tokens->shape[0], T = (int)tokens->shape[1];
    bench_open(b, config, B, T, 0, 1);
    Model* m = &b->m;
    bench_load(b, weights);
    int* ids = (int*)xmalloc(2 * (size_t)m->N * sizeof(int));
    golden_tokens(&file, "tokens", ids, (size_t)m->N);
    golden_tokens(&file, "targets", ids + m->N, (size_t)m->N);
    bench_batch(b, ids, ids + m->N);
    free(ids);

    size_t V = (size_t)config.V, N = (size_t)m->N;
    real *want = (real*)xmalloc(N * V * sizeof(real)), *got = (real*)xmalloc(N * V * sizeof(real)), loss;
    evaluate_bench(b, 1.0 / (double)N);
    double evaluated = model_loss(m, &b->ctx), error;
    real* logits = device_values(&b->ctx, m->a.logits, N * (size_t)m->Vp, VIEW_FLOATX);
    for (size_t i = 0; i < N; i++) memcpy(got + i * V, logits + i * (size_t)m->Vp, V * sizeof(real));
    free(logits);
    golden_values(&file, "logits", want, N * V);
    error = largest_error(got, want, N * V);
    snprintf(name, sizeof name, "%s logits", directory);
    report(t, error <= tolerance, name, error, tolerance);
    golden_values(&file, "loss", &loss, 1);
    error = fabs(evaluated - (double)loss);
    snprintf(name, sizeof name, "%s loss", directory);
    report(t, error <= tolerance, name, error, tolerance);

    train_batch(b, 0, 0, 1.0 / (double)N, SET);
    real* grads = device_values(&b->ctx, m->buffers.grads, m->buffers.table.elements, VIEW_REAL);
    for (int i = 0; i < m->buffers.table.count; i++) {
        const Tensor* tensor = &m->buffers.table.tensors[i];
        size_t n = tensor_elements(tensor);
        uint64_t shape[2];
        real *reference = (real*)xmalloc(n * sizeof(real)), *turned = (real*)xmalloc(n * sizeof(real));
        snprintf(name, sizeof name, "grad.%s", tensor->name);
        golden_values(&file, name, reference, n);
        tensor_file_shape(tensor, shape);
        if (tensor->file == TRANSPOSED) transpose(turned, reference, (int)shape[0], (int)shape[1]);
        else memcpy(turned, reference, n * sizeof(real));
        error = largest_error(grads + tensor->offset, turned, n);
        snprintf(name, sizeof name, "%s gradient of %s", directory, tensor->name);
        report(t, error <= tolerance, name, error, tolerance);
        free(reference), free(turned);
    }
    free(grads);

    real losses[10], norms[10], want_losses[10], want_norms[10];
    for (int step = 0; step < 10; step++) {
        OptimizerSettings adamw = {
            .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .max_norm = 1.0};
        train_batch(b, (uint64_t)step, 0, 1.0 / (double)N, SET);
        losses[step] = (real)model_loss(m, &b->ctx);
        optimizer_step(&b->o, m->buffers.params, m->buffers.grads, adamw, NULL, NULL, &b->ctx);
        real* norm = device_values(&b->ctx, b->o.norm, 1, VIEW_REAL);
        norms[step] = *norm;
        free(norm);
    }
    golden_values(&file, "losses", want_losses, 10);
    golden_values(&file, "norms", want_norms, 10);
    error = largest_error(losses, want_losses, 10);
    snprintf(name, sizeof name, "%s losses of ten AdamW steps", directory);
    report(t, error <= tolerance, name, error, tolerance);
    error = largest_error(norms, want_norms, 10);
    snprintf(name, sizeof name, "%s gradient norms of ten AdamW steps", directory);
    report(t, error <= tolerance, name, error, tolerance);

    double stray = 0;  // rows of padding must never be touched; wte is the first tensor
    real* params = device_values(&b->ctx, m->buffers.params, m->buffers.table.elements, VIEW_FLOATX);
    for (size_t i = V * (size_t)config.C; i < (size_t)m->Vp * (size_t)config.C; i++)
        stray = fmax(stray, fabs((double)params[i]));
    free(params);
    snprintf(name, sizeof name, "%s padding of the vocabulary stays zero", directory);
    report(t, stray == 0, name, stray, 0);

    free(want), free(got), free(path), free(weights), free(golden);
    safetensors_close(&file);
    bench_close(b);
    free(b);
}

// ---------------------------------------------------------------------------------------------------------
// Equalities

static Config tiny_config(int tied, double dropout) {
    Config c = config_from_descriptor("L=2,C=36,NH=3,V=53,T=19,F=100", 0);
    c.tied = tied;
    c.embedding_dropout = c.attention_dropout = c.residual_dropout = dropout;
    c.init_range = 0.2;  // far from zero, so that every path of the gradient matters
    return c;
}

// The gradients of one batch under some way of computing them.
static real* gradients(Config config, int B, int micro_batches, int recompute, int threads) {
    Bench* b = (Bench*)xcalloc(1, sizeof *b);
    bench_open(b, config, B / micro_batches, 13, recompute, 5);
    Model* m = &b->m;
    int all[2 * 4 * 13], T = 13, n = B / micro_batches * T;
    random_tokens(all, 2 * B * T, config.V, 9);
#ifdef _OPENMP
    int before = omp_get_max_threads();
    omp_set_num_threads(threads);
#else
    (void)threads;
#endif
    for (int k = 0; k < micro_batches; k++) {
        bench_batch(b, all + k * n, all + B * T + k * n);
        train_batch(b, 3, k * (B / micro_batches), 1.0 / (B * T), k == 0 ? SET : ADD);
    }
#ifdef _OPENMP
    omp_set_num_threads(before);
#endif
    real* result = device_values(&b->ctx, m->buffers.grads, m->buffers.table.elements, VIEW_REAL);
    bench_close(b);
    free(b);
    return result;
}

static void report_bits(Tests* t, const real* got, const real* want, size_t n, int tied, const char* what) {
    int same = memcmp(got, want, n * sizeof(real)) == 0;
    char* name = xprintf("%s: %s the same bits", tied ? "tied" : "untied", what);
    report(t, same, name, !same, 0);
    free(name);
}

static void test_equalities(Tests* t, int tied) {
    Config config = tiny_config(tied, 0.15);
    Model plan;
    model_plan(&plan, config, 4, 13, 0, 0);
    size_t n = plan.buffers.table.elements;
    real* plain = gradients(config, 4, 1, 0, 2);
    for (int recompute = 1; recompute <= 2; recompute++) {
        real* other = gradients(config, 4, 1, recompute, 2);
        report_bits(t, other, plain, n, tied, recompute == 1 ? "recompute 1 gives" : "recompute 2 gives");
        free(other);
    }
    for (int threads = 1; threads <= 4; threads *= 4) {
        real* other = gradients(config, 4, 1, 0, threads);
        report_bits(t, other, plain, n, tied, threads == 1 ? "1 thread gives" : "4 threads give");
        free(other);
    }
    // With dropout on: masks depend on a sequence's number in the whole step, not on how the step is cut.
    real* cut = gradients(config, 4, 4, 0, 2);
    double error = largest_error(cut, plain, n), tolerance = sizeof(real) == 8 ? 1e-13 : 1e-6;
    if (sizeof(floatX) != sizeof(real)) tolerance = 1e-3;  // matmuls of other shapes round activations differently
    report(t, error <= tolerance,
           tied ? "tied: accumulation over 4 micro-batches equals one batch"
                : "untied: accumulation over 4 micro-batches equals one batch",
           error, tolerance);
    free(cut), free(plain);
    model_buffers_free_tables(&plan.buffers);
}

// Training from scratch begins as GPT-2 did: N(0, 0.02), projections onto the residual stream N(0, 0.02 / sqrt(2 L)),
// biases 0, layernorms the identity. Judged by the names, not by the table that made the values.
static void test_initial_values(Tests* t, int tied) {
    Bench* b = (Bench*)xcalloc(1, sizeof *b);
    bench_open(b, config_from_descriptor(tied ? "L=3,C=96,NH=3,V=257,T=64" : "L=3,C=96,NH=3,V=257,T=64,tied=0", 0), 1,
               1, 0, 4);
    real* params = device_values(&b->ctx, b->m.buffers.params, b->m.buffers.table.elements, VIEW_FLOATX);
    for (int k = 0; k < b->m.buffers.table.count; k++) {
        const Tensor* tensor = &b->m.buffers.table.tensors[k];
        const real* w = params + tensor->offset;
        size_t n = tensor_elements(tensor);
        int is_bias = strstr(tensor->name, ".bias") != NULL, is_norm = strstr(tensor->name, ".ln_") != NULL;
        double std = is_bias || is_norm ? 0 : strstr(tensor->name, ".c_proj.") ? 0.02 / sqrt(2.0 * 3) : 0.02;
        double mean = 0, square = 0, want = is_norm && !is_bias;
        for (size_t i = 0; i < n; i++) mean += (double)w[i] / (double)n;
        for (size_t i = 0; i < n; i++) square += ((double)w[i] - mean) * ((double)w[i] - mean) / (double)n;
        // Five standard errors of a mean and of a deviation, and what storing in bf16 may add.
        double error = fabs(mean - want) + fabs(sqrt(square) - std);
        double tolerance = 5 * std * (1 / sqrt((double)n) + 1 / sqrt(2.0 * (double)n)) + 1e-3 * std + 1e-12;
        char* name = xprintf("%s: initial values of %s", tied ? "tied" : "untied", tensor->name);
        report(t, error <= tolerance, name, error, tolerance);
        free(name);
    }
    free(params);
    bench_close(b);
    free(b);
}

static void test_epsilon(Tests* t) {
    enum { B = 2, T = 13, N = B * T };
    const double eps = 0.5, tolerance = sizeof(floatX) == sizeof(real) ? 1e-5 : 2e-2;
    Config config = tiny_config(1, 0);
    Bench* b = (Bench*)xcalloc(1, sizeof *b);
    int tokens[2 * N], C = config.C;
    config.eps = eps;
    bench_open(b, config, B, T, 0, 5);
    Acts* a = &b->m.a;
    random_tokens(tokens, 2 * N, config.V, 9);
    bench_batch(b, tokens, tokens + N);
    evaluate_bench(b, 1.0 / N);
    const struct {
        const char* name;
        floatX* x;
        real* rstd;
    } norms[] = {{"the first layernorm", a->embedded, a->h[0].ln1_stats.rstd},
                 {"ln_2", a->h[0].mid, a->h[0].ln2_stats.rstd},
                 {"ln_1", a->h[0].out, a->h[1].ln1_stats.rstd},
                 {"ln_f", a->h[1].out, a->lnf_stats.rstd}};
    for (size_t i = 0; i < COUNT_OF(norms); i++) {
        double error = epsilon_error(&b->ctx, norms[i].x, norms[i].rstd, N, C, eps);
        char* name = xprintf("epsilon of %s", norms[i].name);
        report(t, error <= tolerance, name, error, tolerance);
        free(name);
    }
    bench_close(b);
    free(b);
}

static void test_counts(Tests* t) {
    static const struct {
        const char* name;
        int tensors;
        size_t parameters;
    } sizes[] = {{"d12", 148, 124439808}, {"d24", 292, 354823168}, {"d36", 436, 774030080}, {"d48", 580, 1557611200}};
    for (size_t i = 0; i < COUNT_OF(sizes); i++) {
        Model m;
        model_plan(&m, config_from_descriptor(sizes[i].name, 0), 1, 1, 0, 0);
        int same = m.buffers.table.count == sizes[i].tensors && m.buffers.table.parameters == sizes[i].parameters,
            aligned = 1;
        for (int k = 0; k < m.buffers.table.count; k++)
            aligned &= m.buffers.table.tensors[k].offset % TENSOR_ALIGNMENT == 0;
        report(t, same && aligned, sizes[i].name, !same, 0);
        report_decay(t, &m.buffers.table);
        model_buffers_free_tables(&m.buffers);
    }
}

// ---------------------------------------------------------------------------------------------------------
// Dropout by the rates of config.json, drawn by (seed, step, layer, site)

enum { DROPOUT_B = 3, DROPOUT_T = 13, DROPOUT_N = DROPOUT_B * DROPOUT_T, DROPOUT_FIRST = 5 };

// The activations of a step's sequences first .. first + B - 1; in evaluation all rates are 0.
static void check_dropout(Tests* t, Bench* b, uint64_t seed, uint64_t step, int first, int training) {
    const double embedding = training ? 0.1 : 0, attention = training ? 0.3 : 0, residual = training ? 0.6 : 0;
    Model* m = &b->m;
    int layout[DROPOUT_B + 1 + 2 * DROPOUT_N], C = m->config.C;
    Sequences on_device = lm_data_batch(&b->data, m->B, first).s, s = on_device;
    sequences_uniform(layout, layout + DROPOUT_B + 1, layout + DROPOUT_B + 1 + DROPOUT_N, DROPOUT_B, DROPOUT_T);
    s.sequence = layout + DROPOUT_B + 1, s.position = s.sequence + DROPOUT_N;
    char* what = training ? xprintf("dropout, step %d", (int)step) : xprintf("evaluation after step %d", (int)step);
    char* name = xprintf("%s, embeddings", what);
    report_dropped(t, name, m->a.embedded, NULL, C, dropout_make(embedding, seed, step, 0, SITE_DROPOUT_EMBEDDING, &s),
                   &b->ctx);
    free(name);
    for (int l = 0; l < m->config.L; l++) {
        const BlockActs* a = &m->a.h[l];
        AttentionShape shape = {.NH = m->config.NH, .HS = C / m->config.NH, .mask = CAUSAL};
        shape.dropout = dropout_make(attention, seed, step, l, SITE_DROPOUT_ATTENTION, &on_device);
        name = xprintf("%s, layer %d, attention", what, l);
        report_attention(t, name, a->att.v, a->qkv, &on_device, shape, &b->ctx);
        free(name), name = xprintf("%s, layer %d, after attention", what, l);
        report_dropped(t, name, a->mid, residual_into(m, l), C,
                       dropout_make(residual, seed, step, l, SITE_DROPOUT_ATTENTION_OUT, &s), &b->ctx);
        free(name), name = xprintf("%s, layer %d, after the MLP", what, l);
        report_dropped(t, name, a->out, a->mid, C, dropout_make(residual, seed, step, l, SITE_DROPOUT_MLP_OUT, &s),
                       &b->ctx);
        free(name);
    }
    free(what);
}

static void test_dropout(Tests* t) {
    const uint64_t seed = 7 | (uint64_t)3 << 40;
    Config config =
        config_of("{\"model_type\": \"gpt2\", \"n_layer\": 2, \"n_head\": 3, \"n_embd\": 48, \"n_positions\": 19, "
                  "\"vocab_size\": 53, "
                  "\"initializer_range\": 0.2, \"embd_pdrop\": 0.1, \"attn_pdrop\": 0.3, \"resid_pdrop\": 0.6}");
    int tokens[2 * DROPOUT_N];
    Bench* b = (Bench*)xcalloc(1, sizeof *b);
    bench_open(b, config, DROPOUT_B, DROPOUT_T, 0, seed);
    random_tokens(tokens, 2 * DROPOUT_N, config.V, 9);
    bench_batch(b, tokens, tokens + DROPOUT_N);
    for (uint64_t step = 2; step < 4; step++) {
        train_batch(b, step, DROPOUT_FIRST, 1.0 / DROPOUT_N, SET);
        check_dropout(t, b, seed, step, DROPOUT_FIRST, 1);
    }
    evaluate_bench(b, 1.0 / DROPOUT_N);
    check_dropout(t, b, seed, 3, 0, 0);
    bench_close(b);
    free(b);
}

// ---------------------------------------------------------------------------------------------------------
// Documents that attention keeps apart

enum { DOCUMENT_B = 4, DOCUMENT_T = 13, DOCUMENT_N = DOCUMENT_B * DOCUMENT_T, END_OF_TEXT = 52 };

// inputs, then targets: 9 documents of 1 to 13 tokens, some over a whole row.
static void document_tokens(int* tokens, int V) {
    static const int begins[] = {4, 5, 13, 30, 38, 51};
    random_tokens(tokens, 2 * DOCUMENT_N, V - 1, 9);
    for (size_t i = 0; i < COUNT_OF(begins); i++) tokens[begins[i]] = END_OF_TEXT;
}

// Loss, then gradients, of rows first_row .. of the step, in micro-batches of `rows`; `mask`: documents are kept apart.
static real* document_gradients(Config config, const int* tokens, int rows, int mask) {
    Bench* b = (Bench*)xcalloc(1, sizeof *b);
    bench_open(b, config, rows, DOCUMENT_T, 0, 5);
    Model* m = &b->m;
    size_t ints = documents_ints(m->N), n = m->buffers.table.elements;
    int *host = (int*)xmalloc(ints * sizeof(int)), *device = (int*)device_alloc(&b->ctx, ints * sizeof(int), "batch");
    Documents found, placed;
    documents_place(&found, host, m->N), documents_place(&placed, device, m->N);
    for (int row = 0; row < DOCUMENT_B; row += rows) {
        const int* inputs = tokens + row * DOCUMENT_T;
        documents_find(&found, inputs, rows, DOCUMENT_T, END_OF_TEXT);
        device_upload(&b->ctx, device, host, ints * sizeof(int));
        Sequences s = {
            .rows = m->N,
            .count = found.count,
            .max_length = found.longest,
            .sum_sq_len = found.sum_sq_len,
            .cu_seqlens = placed.cu_seqlens,
            .sequence = placed.document,
            .position = placed.position,
            .host_cu_seqlens = found.cu_seqlens,
            .is_numbered_by_row = 1,
        };
        if (mask) b->data.parts = s;
        bench_batch(b, inputs, inputs + DOCUMENT_N);
        train_batch(b, 3, row, 1.0 / DOCUMENT_N, row == 0 ? SET : ADD);
    }
    real* result = device_values(&b->ctx, m->buffers.grads, n, VIEW_REAL);
    result = (real*)xrealloc(result, (n + 1) * sizeof(real));
    result[n] = (real)model_loss(m, &b->ctx);
    free(host), device_free(device, ints * sizeof(int));
    bench_close(b);
    free(b);
    return result;
}

#ifndef __CUDACC__
// The same from each document alone, with the positions that it has in its row.
static real* documents_alone(Config config, const int* tokens) {
    real* sums = NULL;
    for (int begin = 0, end; begin < DOCUMENT_N; begin = end) {
        for (end = begin + 1; end % DOCUMENT_T != 0 && tokens[end] != END_OF_TEXT;) end++;
        Bench* b = (Bench*)xcalloc(1, sizeof *b);
        bench_open(b, config, 1, end - begin, 0, 5);
        Model* m = &b->m;
        size_t n = m->buffers.table.elements;
        for (int i = 0; i < m->N; i++) b->data.layout[2 + m->N + i] += begin % DOCUMENT_T;
        bench_batch(b, tokens + begin, tokens + DOCUMENT_N + begin);
        train_batch(b, 3, 0, 1.0 / DOCUMENT_N, SET);
        if (!sums) sums = (real*)xcalloc(n + 1, sizeof(real));
        for (size_t i = 0; i < n; i++) sums[i] += m->buffers.grads[i];
        sums[n] += (real)model_loss(m, &b->ctx);
        bench_close(b);
        free(b);
    }
    return sums;
}
#endif

static void test_documents(Tests* t, int tied) {
    Config config = tiny_config(tied, 0), dropped = tiny_config(tied, 0.15);
    config.C = dropped.C = 48;  // heads of 16 channels, which every kind of attention takes
    Model plan;
    int tokens[2 * DOCUMENT_N], plain[2 * DOCUMENT_N];
    model_plan(&plan, config, 1, 1, 0, 0);
    size_t n = plan.buffers.table.elements + 1;
    model_buffers_free_tables(&plan.buffers);
    document_tokens(tokens, config.V);
    random_tokens(plain, 2 * DOCUMENT_N, config.V - 1, 9);  // none begins inside a row
    real *apart = document_gradients(config, tokens, DOCUMENT_B, 1),
         *whole = document_gradients(config, plain, DOCUMENT_B, 1);
    real *without = document_gradients(config, plain, DOCUMENT_B, 0),
         *mixed = document_gradients(config, tokens, DOCUMENT_B, 0);
    report_bits(t, whole, without, n, tied, "a document a row, kept apart, gives");
    double effect = largest_error(apart, mixed, n), error, tolerance;
    report(t, effect > 1e-3, tied ? "tied: keeping documents apart matters" : "untied: keeping documents apart matters",
           effect, 1e-3);
#ifndef __CUDACC__
    real* alone = documents_alone(config, tokens);
    error = largest_error(apart, alone, n), tolerance = sizeof(real) == 8 ? 1e-10 : 1e-5;
    report(t, error <= tolerance,
           tied ? "tied: loss and gradients of packed documents are those of each alone"
                : "untied: loss and gradients of packed documents are those of each alone",
           error, tolerance);
    free(alone);
#endif
    // Dropout's masks do not depend on how many documents there are in the micro-batches before.
    real *one = document_gradients(dropped, tokens, DOCUMENT_B, 1), *cut = document_gradients(dropped, tokens, 1, 1);
    error = largest_error(cut, one, n - 1), tolerance = sizeof(real) == 8 ? 1e-13 : 1e-6;
    if (sizeof(floatX) != sizeof(real)) tolerance = 1e-3;  // matmuls of other shapes round activations differently
    report(t, error <= tolerance,
           tied ? "tied: documents in 4 micro-batches drop what they drop in one batch"
                : "untied: documents in 4 micro-batches drop what they drop in one batch",
           error, tolerance);
    free(apart), free(whole), free(without), free(mixed), free(one), free(cut);
}

// ---------------------------------------------------------------------------------------------------------
// Loss scaling and master weights

// A model that trains on one batch.
static Bench* overfit_open(MasterWeights master, double scale, LossScaleKind kind, int growth_interval) {
    Bench* b = (Bench*)xcalloc(1, sizeof *b);
    Config config = tiny_config(1, 0.1);
    int tokens[2 * 2 * 13];
    LossScale state = {.scale = (real)scale};
    LossScaleRule rule = {.kind = kind, .growth_interval = growth_interval};
    bench_open(b, config, 2, 13, 0, 5);
    if (master == NO_MASTER) {
        optimizer_free(&b->o);
        optimizer_init_shard(&b->o, &b->m.buffers.table, (UpdateSettings){.kind = ADAMW, .master = master},
                             tensors_updated(&b->m.buffers.table), &b->ctx);
        b->m.buffers.master = b->o.master;
    }
    optimizer_set_loss_scale(&b->o, state, rule, &b->ctx);
    b->m.buffers.loss_scale = &b->o.loss_scale->scale;
    random_tokens(tokens, COUNT_OF(tokens), config.V, 9);
    bench_batch(b, tokens, tokens + b->m.N);
    return b;
}

static void overfit_close(Bench* b) {
    bench_close(b);
    free(b);
}

// One step, number `step` of the masks; `planted` becomes one of the gradients unless it is 0. Returns the loss.
static double overfit_step(Bench* b, int step, double planted) {
    Model* m = &b->m;
    OptimizerSettings adamw = {.lr = 1e-2,
                               .beta1 = 0.9,
                               .beta2 = 0.95,
                               .eps = 1e-8,
                               .weight_decay = 0.1,
                               .max_norm = 1.0,
                               .rounding = rng_stream(5, (uint64_t)step, 0, SITE_ROUNDING)};
    real value = (real)planted;
    train_batch(b, (uint64_t)step, 0, 1.0 / m->N, SET);
    if (planted != 0) device_upload(&b->ctx, m->buffers.grads + m->buffers.table.elements / 2, &value, sizeof value);
    optimizer_step(&b->o, m->buffers.params, m->buffers.grads, adamw, NULL, NULL, &b->ctx);
    return model_loss(m, &b->ctx);
}

// The parameters and the moments, `n` numbers; free() them.
static real* overfit_state(Bench* b, size_t* n) {
    size_t elements = b->m.buffers.table.elements, more = optimizer_buffers(WITH_MASTER) * elements;
    *n = elements + more;
    real *params = device_values(&b->ctx, b->m.buffers.params, elements, VIEW_FLOATX),
         *rest = device_values(&b->ctx, b->o.m, more, VIEW_REAL);
    params = (real*)xrealloc(params, *n * sizeof(real));
    memcpy(params + elements, rest, more * sizeof(real));
    free(rest);
    return params;
}

static void test_loss_scaling(Tests* t) {
    const int is_fp16 = strcmp(FLOATX_NAME, "F16") == 0;
    size_t n;
    // Powers of two change no bit where gradients have the exponents for it.
    Bench* plain = overfit_open(WITH_MASTER, 1, LOSS_SCALE_FIXED, 0);
    Bench* scaled = overfit_open(WITH_MASTER, 1024, LOSS_SCALE_DYNAMIC, 2);
    for (int step = 0; step < 5; step++) overfit_step(plain, step, 0), overfit_step(scaled, step, 0);
    real *want = overfit_state(plain, &n), *got = overfit_state(scaled, &n);
    double error = largest_error(got, want, n), tolerance = 1e-6;
    if (is_fp16) tolerance = 0.12;  // what vanishes without a scale moves a parameter by two learning rates a step
    report(t, error <= tolerance, "five steps with loss scales 1024 to 4096 equal those without", error, tolerance);
    LossScale state = optimizer_loss_scale(&scaled->o, &scaled->ctx);
    report(t, state.scale == 4096 && state.good == 1 && state.updates == 5, "the loss scale has doubled twice",
           (double)state.scale, 4096);
    free(want), free(got);

    // An infinite gradient: the step is skipped. It changes nothing, not even the optimizer's count, except that the
    // scale is halved.
    for (int bad = 0; bad < 2; bad++) {
        real* before = overfit_state(scaled, &n);
        state = optimizer_loss_scale(&scaled->o, &scaled->ctx);
        overfit_step(scaled, 5, bad ? (double)NAN : -INFINITY);
        LossScale after = optimizer_loss_scale(&scaled->o, &scaled->ctx);
        real* left = overfit_state(scaled, &n);
        int untouched = memcmp(before, left, n * sizeof(real)) == 0;
        report(t, untouched, bad ? "NaN among the gradients skips the step" : "an overflow skips the step", !untouched,
               0);
        report(t, after.scale == state.scale / 2 && after.good == 0 && after.updates == state.updates,
               "and halves the loss scale", (double)after.scale, (double)state.scale / 2);
        free(before), free(left);
    }
    overfit_step(plain, 5, 0), overfit_step(scaled, 5, 0);
    want = overfit_state(plain, &n), got = overfit_state(scaled, &n);
    error = largest_error(got, want, n);
    report(t, error <= tolerance, "training continues as if the step had not been taken", error, tolerance);
    free(want), free(got);
    overfit_close(plain), overfit_close(scaled);

    // A scale that itself causes the overflow is halved until the first update is made.
    double start = is_fp16 ? 1 << 30 : sizeof(real) == 8 ? 1e156 : 3e38;
    Bench* b = overfit_open(WITH_MASTER, start, LOSS_SCALE_DYNAMIC, 1000);
    double loss = 0, scale = start;
    int skipped = -1;
    do {
        loss = overfit_step(b, 0, 0);
        state = optimizer_loss_scale(&b->o, &b->ctx);
        scale = state.updates ? scale : scale / 2;
        skipped++;
    } while (!state.updates && skipped < 50);
    real* params = device_values(&b->ctx, b->m.buffers.params, b->m.buffers.table.elements, VIEW_FLOATX);
    int finite = isfinite(loss) && tensors_first_not_finite(&b->m.buffers.table, params) < 0;
    report(t, finite && skipped > 0 && skipped < 50 && state.scale == (real)scale,
           "a loss scale that is too large is lowered, steps skipped", skipped, 50);
    free(params);
    overfit_close(b);
}

// Without master weights training works and repeats. In full precision there is no difference to see.
static void test_no_master(Tests* t) {
    Bench *with = overfit_open(WITH_MASTER, 1, LOSS_SCALE_FIXED, 0),
          *b = overfit_open(NO_MASTER, 1, LOSS_SCALE_FIXED, 0);
    Bench* again = overfit_open(NO_MASTER, 1, LOSS_SCALE_FIXED, 0);
    size_t elements = b->m.buffers.table.elements;
    double first = 0, last = 0, exact = 0;
    for (int step = 0; step < 40; step++) {
        last = overfit_step(b, step, 0);
        exact = overfit_step(with, step, 0);
        overfit_step(again, step, 0);
        if (step == 0) first = last;
    }
    real* params = device_values(&b->ctx, b->m.buffers.params, elements, VIEW_FLOATX);
    real* other = device_values(&again->ctx, again->m.buffers.params, elements, VIEW_FLOATX);
    report(t, b->o.master == NULL && memcmp(params, other, elements * sizeof(real)) == 0,
           "without master weights two runs give the same bits", 0, 0);
    report(t, last < first / 2 && fabs(last - exact) < first / 10, "and the loss falls as it does with them",
           fabs(last - exact), first / 10);
    free(params), free(other);
    overfit_close(with), overfit_close(b), overfit_close(again);
}

// ---------------------------------------------------------------------------------------------------------
// What a step launches

static void test_ops(Tests* t, int recompute) {
    static const char forward_ops[] =
        "matmul_forward attention_forward matmul_forward residual_layernorm_forward matmul_gelu_forward matmul_forward "
        "residual_layernorm_forward ";
    static const char backward_ops[] =
        "matmul_backward_weight matmul_gelu_backward_input matmul_backward_weight matmul_backward_input "
        "residual_layernorm_backward matmul_backward_weight matmul_backward_input attention_backward "
        "matmul_backward_weight matmul_backward_input residual_layernorm_backward ";
    static const char recomputing_ops[] =
        "gelu_forward layernorm_forward matmul_backward_weight matmul_gelu_backward_input matmul_backward_weight "
        "matmul_backward_input residual_layernorm_backward matmul_backward_weight matmul_backward_input "
        "attention_backward layernorm_forward matmul_backward_weight matmul_backward_input "
        "residual_layernorm_backward ";
    enum { LAYERS = 3, MIDDLE = 1, OUTSIDE = 10, A_LAYER = 18 };
    Bench* b = (Bench*)xcalloc(1, sizeof *b);
    LoggedStep logged;
    OptimizerSettings adamw = {
        .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .max_norm = 1.0};
    char* what = xprintf("recompute %d", recompute);
    bench_open(b, config_from_descriptor("L=3,C=128,NH=2,V=53,T=64", 0), 2, 64, recompute, 5);
    Model* m = &b->m;
    int* tokens = (int*)xmalloc(2 * (size_t)m->N * sizeof(int));
    random_tokens(tokens, 2 * m->N, m->config.V, 5);
    bench_batch(b, tokens, tokens + m->N);
    for (int again = 0; again < 2; again++) {
        if (again) logged_begin(&logged, &b->ctx);
        train_batch(b, 0, 0, 1.0 / m->N, SET);
        optimizer_step(&b->o, m->buffers.params, m->buffers.grads, adamw, NULL, NULL, &b->ctx);
    }
    logged_end(&logged, &b->ctx);
    for (int layer = 0; layer < LAYERS; layer++) {
        report_ops(t, what, &logged, FORWARD, layer, forward_ops);
        report_ops(t, what, &logged, BACKWARD, layer, recompute ? recomputing_ops : backward_ops);
    }
    int widens = fp32_copies_bytes(&m->buffers.table) > 0,
        want = OUTSIDE + widens + LAYERS * (A_LAYER + (recompute ? 3 : 0));
    report(t, logged.log.count == (size_t)want, "and as many ops in the whole step", (double)logged.log.count, want);
    if (logged.is_tracing) {
        ProfileStep step;
        profile_from_log(&step, &logged.log, 1);
        report_kernels(t, what, &logged, &step, FORWARD, MIDDLE, 7);
        // An op is one kernel, but for two that sum a bias apart, and attention, which is two.
        report_kernels(t, what, &logged, &step, BACKWARD, MIDDLE, 14 + (recompute ? 3 : 0));
        profile_step_free(&step);
    }
    logged_close(&logged);
    bench_close(b);
    free(b), free(tokens), free(what);
}

// ---------------------------------------------------------------------------------------------------------
// The plan of the memory against what a step uses

static void test_memory(Tests* t) {
    const int paths = 1 + GPU_BUILD;  // the CPU has one attention
    // Attention, the head or a block needs the most scratch; sizes that are multiples of nothing.
    static const struct {
        Config config;
        int B, T, recompute, fp8;
    } cases[] = {
        {{2, 2, 32, 128, 257, 64, 1, GELU_TANH, 1e-5, 0.02, 0.1, 0.1, 0.1}, 1, 64, 0, 0},
        {{1, 3, 48, 192, 61, 160, 0, GELU_TANH, 1e-5, 0.02, 0, 0, 0}, 3, 150, 1, 0},
        {{3, 1, 65, 77, 3001, 40, 1, GELU_ERF, 1e-5, 0.02, 0, 0.1, 0}, 5, 33, 2, 0},
        {{1, 12, 768, 3072, 300, 32, 1, GELU_TANH, 1e-5, 0.02, 0, 0, 0}, 2, 32, 0, 0},
        {{2, 2, 32, 128, 257, 64, 1, GELU_TANH, 1e-5, 0.02, 0.1, 0.1, 0.1}, 1, 64, 0, 1},
        {{1, 3, 48, 192, 61, 160, 0, GELU_TANH, 1e-5, 0.02, 0, 0, 0}, 3, 150, 1, 1},
#ifdef __CUDACC__
        {{1, 12, 768, 3072, 50257, 1024, 1, GELU_TANH, 1e-5, 0.02, 0.1, 0.1, 0.1}, 8, 1024, 0, 0},
        {{1, 12, 768, 3072, 50257, 1024, 1, GELU_TANH, 1e-5, 0.02, 0.1, 0.1, 0.1}, 8, 1024, 0, 1},
#endif
    };
    const int has_fp8 = !GPU_BUILD || strcmp(FLOATX_NAME, "BF16") == 0;
    for (size_t i = 0; i < COUNT_OF(cases); i++)
        for (int path = FLASH; path < FLASH + paths && (has_fp8 || !cases[i].fp8); path++) {
            char name[96];
            OptimizerSettings adamw = {
                .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .max_norm = 1.0};
            Bench* b = (Bench*)xcalloc(1, sizeof *b);
            bench_open_fp8(b, cases[i].config, cases[i].B, cases[i].T, cases[i].recompute, cases[i].fp8, 3);
            Model* m = &b->m;
            device_set_attention(&b->ctx, (AttentionPath)path);
            UpdateSettings alone = {.kind = ADAMW, .master = WITH_MASTER, .ranks = 1};
            MemoryPlan plan = model_buffers_memory(&m->buffers, alone, &b->ctx);
            int* tokens = (int*)xmalloc(2 * (size_t)m->N * sizeof(int));
            random_tokens(tokens, 2 * m->N, m->config.V, 5);
            bench_batch(b, tokens, tokens + m->N);
            fp8_state_begin_step(&m->buffers.fp8);
            train_batch(b, 0, 0, 1.0 / m->N, SET);
            optimizer_step(&b->o, m->buffers.params, m->buffers.grads, adamw, NULL, NULL, &b->ctx);
            device_synchronize(&b->ctx);
            snprintf(name, sizeof name, "memory of B=%d T=%d C=%d --fp8 %d%s", m->B, m->T, m->config.C, cases[i].fp8,
                     path == MATERIALIZED ? ", materialized attention" : "");
            report_memory(t, name, &plan, &b->ctx);
            bench_close(b);
            free(b), free(tokens);
        }
}

// An evaluation takes the memory that the plan gives, which has neither gradients nor moments, and finds the same
// losses.
static void test_forward_alone(Tests* t, int tied) {
    const UpdateSettings settings = {.kind = ADAMW, .master = WITH_MASTER, .ranks = 1};
    const int levels[2] = {RECOMPUTE_NOTHING, FORWARD_ONLY};
    Config config = tiny_config(tied, 0.15);
    MemoryPlan plans[2];
    real* losses[2];
    int N = 0;
    for (int i = 0; i < 2; i++) {
        Bench* b = (Bench*)xcalloc(1, sizeof *b);
        bench_open(b, config, 4, 13, levels[i], 3);
        N = b->m.N;
        plans[i] = model_buffers_memory(&b->m.buffers, settings, &b->ctx);
        int* tokens = (int*)xmalloc(2 * (size_t)N * sizeof(int));
        random_tokens(tokens, 2 * N, config.V, 5);
        bench_batch(b, tokens, tokens + N);
        evaluate_bench(b, 1);
        losses[i] = device_values(&b->ctx, b->m.a.losses, (size_t)N, VIEW_REAL);
        if (i == 1) report_memory(t, "memory of forward passes only", &plans[i], &b->ctx);
        if (i == 1) report_forward_alone(t, &plans[1], &plans[0]);
        bench_close(b);
        free(b), free(tokens);
    }
    report_bits(t, losses[1], losses[0], (size_t)N, tied, "forward passes only give");
    free(losses[0]), free(losses[1]);
}

// ---------------------------------------------------------------------------------------------------------
// Finite differences of the whole model: sharp in the double build, so it runs only there

#ifdef REAL_DOUBLE
static void test_finite_differences(Tests* t, int tied, double dropout, Gelu gelu) {
    Config config = tiny_config(tied, dropout);
    config.gelu = gelu;
    Bench* b = (Bench*)xcalloc(1, sizeof *b);
    bench_open(b, config, 2, 13, 0, 7);
    Model* m = &b->m;
    random_tokens(b->data.inputs, 2 * m->N, config.V, 21);
    for (size_t i = 0; i < m->buffers.table.elements; i++)  // biases and layernorms away from their 0 and 1
        if (m->buffers.params[i] == 0 || m->buffers.params[i] == 1) m->buffers.params[i] += 0.1 * rng_normal(11, i);
    memset(m->p.wte + (size_t)config.V * (size_t)config.C, 0,
           (size_t)(m->Vp - config.V) * (size_t)config.C * sizeof(real));
    if (!tied)
        memset(m->p.head.w + (size_t)config.V * (size_t)config.C, 0,
               (size_t)(m->Vp - config.V) * (size_t)config.C * sizeof(real));
    train_batch(b, 3, 0, 1.0 / m->N, SET);
    real* analytic = (real*)xmalloc(m->buffers.table.elements * sizeof(real));
    memcpy(analytic, m->buffers.grads, m->buffers.table.elements * sizeof(real));
    double worst = 0;
    const char* where = "";
    const double tolerance = 1e-8, h = 1e-5;
    for (int k = 0; k < m->buffers.table.count; k++) {
        const Tensor* tensor = &m->buffers.table.tensors[k];
        for (int sample = 0; sample < 12; sample++) {
            size_t i = tensor->offset + philox((uint32_t)k, (uint32_t)sample, 0, 0, 77).v[0] % tensor_elements(tensor);
            real kept = m->buffers.params[i];
            m->buffers.params[i] = kept + h;
            train_batch(b, 3, 0, 1.0 / m->N, SET);
            double above = model_loss(m, &b->ctx);
            m->buffers.params[i] = kept - h;
            train_batch(b, 3, 0, 1.0 / m->N, SET);
            double below = model_loss(m, &b->ctx);
            m->buffers.params[i] = kept;
            double error = fabs((above - below) / (2 * h) - analytic[i]) / fmax(1, fabs(analytic[i]));
            if (!(error <= worst)) worst = error, where = tensor->name;
        }
    }
    char name[192];
    snprintf(name, sizeof name, "finite differences, %s, dropout %g, %s (worst in %s)", tied ? "tied" : "untied",
             dropout, gelu == GELU_TANH ? "tanh" : "erf", where);
    report(t, worst <= tolerance, name, worst, tolerance);
    free(analytic);
    bench_close(b);
    free(b);
}
#endif

// ---------------------------------------------------------------------------------------------------------

static void test_muon_step(Tests* t) {
    Config config = tiny_config(0, 0);
    Bench* b = (Bench*)xcalloc(1, sizeof *b);
    bench_open(b, config, 2, 13, 0, 5);
    int tokens[2 * 2 * 13];
    random_tokens(tokens, COUNT_OF(tokens), config.V, 9);
    bench_batch(b, tokens, tokens + b->m.N);
    train_batch(b, 0, 0, 1.0 / b->m.N, SET);
    report_muon_step(t, &b->m.buffers, &b->o, &b->ctx);
    bench_close(b);
    free(b);
}

int main(void) {
    Tests t;
    tests_open(&t);
    test_golden(&t, "dev/reference/golden_gpt2_tied");
    test_golden(&t, "dev/reference/golden_gpt2_untied");
    for (int tied = 0; tied < 2; tied++) test_equalities(&t, tied);
    test_dropout(&t);
    for (int tied = 0; tied < 2; tied++) test_documents(&t, tied);
    for (int tied = 0; tied < 2; tied++) test_initial_values(&t, tied);
    test_counts(&t);
    test_epsilon(&t);
    test_loss_scaling(&t);
    test_no_master(&t);
    test_muon_step(&t);
    for (int recompute = 0; recompute <= 2; recompute += 2) test_ops(&t, recompute);
    test_memory(&t);
    for (int tied = 0; tied < 2; tied++) test_forward_alone(&t, tied);
#ifdef REAL_DOUBLE
    test_finite_differences(&t, 1, 0.15, GELU_TANH);
    test_finite_differences(&t, 0, 0.15, GELU_TANH);
    test_finite_differences(&t, 1, 0, GELU_ERF);
#endif
    return tests_close(&t);
}
