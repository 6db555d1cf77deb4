/* Use a GPT-2 model: generate text, answer a message, score held-out text and multiple-choice sets, or look inside it.
 * On the CPU (gcc) or the GPU (nvcc). train_gpt2.cu has the model.
 *
 *   use_gpt2 -e DIR --generate 100 --prompt "Anna takes"     texts, here from a prompt; --chat: from a user's message
 *   use_gpt2 -e DIR --evaluate 1 --choices SET               the loss on held-out text, and scores of a set
 *   use_gpt2 -e DIR --explain "Anna takes the ball."         a page of what every op computes for a text */
#define OTHER_MAIN
#include "train_gpt2.cu"

#include "apps/use/draw.h"           // the next tokens
#include "apps/use/explain_lm.h"     // --explain
#include "apps/use/generate.h"       // --generate: prompts, texts
#include "apps/use/linear_decode.h"  // linear layers and attention of one token a text
#include "apps/use/settings.h"

// What the newest tokens of the texts need that are generated together.
typedef struct {
    int texts;             // of this group
    floatX *stream, *qkv;  // of these tokens: the residual stream [texts, C], and [texts, 3C]
    floatX* cache;         // [L, texts, T, 3C]; NULL: one text, whose cache is the layers' qkv
    size_t bytes[2];       // of the memory at `stream`, and at `newest.key`
    Newest newest;
    Staging drawn;           // the memory at newest.drawn
    Readback arrived[2];     // of these tokens
    StepGraph graph;
} Decoder;

typedef struct {
    Trainer trainer;  // its run does not train
    GenerateSettings generate;
    Generation text;
    ExplainSettings explain;
    Explanation explanation;
} Program;

// ---------------------------------------------------------------------------------------------------------
// Decode: the forward pass of the newest token of each text. It multiplies in floatX, with --fp8 too.

// Allocate for as many of the texts as fit.
static void decoder_open(Decoder* d, Trainer* t, Generation* g) {
    const Gpt2Config* c = &t->model.config;
    Context* ctx = &t->run.ctx;
    size_t row = 3 * (size_t)c->C, cache = (size_t)c->L * (size_t)t->model.T * row;
    double fit = 0.9 * (double)device_memory_available() / (double)(cache * sizeof(floatX));
    g->texts = max_int(min_int(min_int(g->texts, (int)fmin(fit, INT_MAX)), attention_decode_texts(c->NH)), 1);
    size_t n = (size_t)g->texts;
    memset(d, 0, sizeof *d);
    d->bytes[0] = n * ((size_t)c->C + row + (n > 1 ? cache : 0)) * sizeof(floatX);
    d->bytes[1] = n * (sizeof(uint64_t) + 3 * sizeof(int));
    d->stream = (floatX*)device_alloc(ctx, d->bytes[0], "text generation");
    d->qkv = d->stream + n * (size_t)c->C, d->cache = n > 1 ? d->qkv + n * row : NULL;
    d->newest.key = (uint64_t*)device_alloc(ctx, d->bytes[1], "text generation");
    d->newest.token = (int*)(d->newest.key + n);
    d->newest.position = d->newest.token + n, d->newest.count = d->newest.position + n;
    staging_open(&d->drawn, n * sizeof(int));
    for (int i = 0; i < 2; i++) {
        d->newest.drawn[i] = (int*)d->drawn.buffers[i];
        readback_open(&d->arrived[i]);
    }
    step_graph_open(&d->graph, &t->run.settings, 1);
}

static void decoder_close(Decoder* d) {
    step_graph_close(&d->graph);
    for (int i = 0; i < 2; i++) readback_close(&d->arrived[i]);
    staging_close(&d->drawn);
    device_free(d->newest.key, d->bytes[1]);
    device_free(d->stream, d->bytes[0]);
}

static floatX* decoder_cache(const Decoder* d, const Model* m, int l) {
    size_t text = (size_t)m->T * 3 * (size_t)m->config.C;
    return d->cache ? d->cache + (size_t)(l * d->texts) * text : m->a.h[l].qkv;
}

// forward_block(), in place on the residual stream.
static void decode_block(Model* m, Decoder* d, int l, Context* ctx) {
    const Gpt2Config* c = &m->config;
    const BlockParams* p = &m->p.h[l];
    const BlockActs* a = &m->a.h[l];
    int N = d->texts, C = c->C;
    LinearFusion norm = {.norm = p->ln1, .u = a->ln1.v, .stats = a->ln1_stats, .eps = (real)c->eps};
    LinearFusion gelu = {.norm = p->ln2, .u = a->ln2.v, .pre = a->fc_pre, .stats = a->ln2_stats};
    LinearFusion add = {.mode = ADD};
    gelu.gelu = c->gelu, gelu.eps = (real)c->eps;

    scope_at(ctx, FORWARD, l);
    linear_decode(d->qkv, d->stream, p->qkv, (LinearSize){N, C, 3 * C}, norm, ctx);
    attention_decode(a->att.v, decoder_cache(d, m, l), d->qkv, d->newest.position,
                     (DecodeShape){N, m->T, c->NH, C / c->NH}, ctx);
    linear_decode(d->stream, a->att.v, p->attproj, (LinearSize){N, C, C}, add, ctx);
    linear_decode(a->fc.v, d->stream, p->fc, (LinearSize){N, C, c->F}, gelu, ctx);
    linear_decode(d->stream, a->fc.v, p->fcproj, (LinearSize){N, c->F, C}, add, ctx);
}

// forward() for the newest tokens.
static void decode(Model* m, Decoder* d, Context* ctx) {
    Sequences s = {.rows = d->texts, .count = d->texts, .max_length = 1, .position = d->newest.position};
    Embeddings tables = {.word = m->p.wte, .position = m->p.wpe};
    EmbeddingInputs in = {.tokens = d->newest.token, .types = NULL, .s = &s};
    scope_at(ctx, FORWARD, -1);
    embedding_forward(d->stream, in, tables, m->buffers.step.embedding, dropout_none(&s), ctx);
    for (int l = 0; l < m->config.L; l++) decode_block(m, d, l, ctx);
    scope_at(ctx, FORWARD, -1);
}

// Compute windows of `rows` tokens from the start: keys, values and the residual stream of the last token. Texts that
// have only the prompt share one pass.
static void prefill(Trainer* t, Decoder* d, const Generation* g, int rows) {
    Model* m = &t->model;
    Context* ctx = &t->run.ctx;
    size_t N = (size_t)g->texts, C = (size_t)m->config.C;
    int position[GENERATION_TEXTS], count[GENERATION_TEXTS];
    for (size_t n = 0; n < N; n++) {
        Batch b;
        if (n == 0 || g->count > g->prompt) {
            b = lm_data_text(&t->data, generation_text(g, (int)n) + g->begin, rows, 0, ctx);
            forward(m, &b, ctx);
        }
        decode_copy(d->stream + n * C, residual_into(m, m->config.L) + (size_t)(rows - 1) * C, C, ctx);
        for (int l = 0; l < m->config.L && d->cache; l++)
            decode_copy(decoder_cache(d, m, l) + n * (size_t)m->T * 3 * C, m->a.h[l].qkv, (size_t)rows * 3 * C, ctx);
        position[n] = rows - 1, count[n] = g->count;
    }
    device_upload(ctx, d->newest.position, position, N * sizeof *position);
    device_upload(ctx, d->newest.count, count, N * sizeof *count);
    device_upload(ctx, d->newest.key, g->key, N * sizeof *g->key);
    device_synchronize(ctx);
    step_graph_restart(&d->graph);  // scratch may have grown
}

// Launch the pass that draws token number `count` of each text. `decodes`: the token before it is not computed yet.
static void launch_draw(Trainer* t, Decoder* d, const Generation* g, int count, int decodes) {
    Model* m = &t->model;
    Context* ctx = &t->run.ctx;
    LinearSize head = {d->texts, m->config.C, m->Vp};
    LinearFusion norm = {.norm = m->p.lnf, .u = m->a.lnf, .stats = m->a.lnf_stats, .eps = (real)m->config.eps};
    group_begin_work(&t->run.group);
    if (!decodes || !step_graph_repeat(&d->graph, ctx)) {
        if (decodes) step_graph_begin(&d->graph, 0, 0, ctx), decode(m, d, ctx);
        linear_decode(m->a.logits, d->stream, m->p.head, head, norm, ctx);
        draw(d->newest, m->a.logits, d->texts, g->V, m->Vp, g->sampler, ctx);
        if (decodes) step_graph_end(&d->graph, ctx), d->graph.steps++;
    }
    readback_record(ctx, &d->arrived[count % 2]);
}

// ---------------------------------------------------------------------------------------------------------
// What the program can do

// --generate: print the texts and the speed. A signal ends them early. The host reads tokens while the device computes
// the next ones.
static void generate(Trainer* t, Generation* g, const GenerateSettings* s) {
    Run* r = &t->run;
    Decoder d;
    double start = now_seconds();
    decoder_open(&d, t, g);
    for (int number = 0, most = g->texts; number < s->samples && !stop_signal; number += g->texts) {
        generation_begin(g, r, number, min_int(most, s->samples - number));
        d.texts = g->texts;
        while (g->going && g->count < g->room && !stop_signal) {
            int rows = generation_window(g), first = g->count, launched = first, more;
            int end = min_int(g->room, g->can_cache ? g->begin + g->T + 1 : first + 1);
            prefill(t, &d, g, rows);
            while ((more = launched < end && g->going && !stop_signal) || g->count < launched) {
                if (more) launch_draw(t, &d, g, launched, launched > first), launched++;
                if (more && launched <= g->count + READBACK_LAG) continue;
                readback_wait(&d.arrived[g->count % 2]);
                generation_append(g, d.newest.drawn[g->count % 2]);
            }
        }
        generation_print(g, r, number);
    }
    decoder_close(&d);
    generation_print_speed(g, r, now_seconds() - start);
}

// --evaluate: print the loss on the held-out text and the scores of the sets.
static void evaluate(Trainer* t) {
    process_on_stop(SIG_DFL);  // a signal may end the process at once: nothing is written
    if (t->run.has_val) validate(&t->run);
    validate_choices(&t->run);
}

// --explain: run the text forward and backward. Then apply the head to the input of each layer (the logit lens).
static void explain(Trainer* t, Explanation* e) {
    Run* r = &t->run;
    Model* m = &t->model;
    const Gpt2Config* c = &m->config;
    ExplainSizes sizes = {.L = c->L, .NH = c->NH, .C = c->C, .V = c->V};
    Batch b = explain_lm_load(e, &t->data, &m->buffers, sizes, &r->ctx);
    Rows rows = {.N = b.s.rows, .C = c->C};
    forward(m, &b, &r->ctx);
    forward_head(m, m->a.lnf, b.s.rows, &r->ctx);
    compute_loss(m, &b, explain_scale(e), explain_direction(e), SET, &r->ctx);
    if (explain_direction(e) == BACKWARD) backward(m, &b, SET, &r->ctx);
    explain_end(e, &r->ctx);
    for (int l = 0; l <= c->L; l++) {
        layernorm_forward(m->a.lnf, m->a.lnf_stats, residual_into(m, l), m->p.lnf, rows, (real)c->eps, &r->ctx);
        forward_head(m, m->a.lnf, b.s.rows, &r->ctx);
        explain_lens(e, m->a.logits, m->Vp, &r->ctx);
    }
    explain_write(e, m->a.loss, &r->ctx);
}

// ---------------------------------------------------------------------------------------------------------
// Settings and startup

static int program_flags(Program* p) {
    Flag* table = p->trainer.run.flags;
    int count = use_rows(&p->trainer.run.settings, table, settings_flags(&p->trainer));
    return explain_rows(&p->explain, table, generate_rows(&p->generate, table, count), 0);
}

// Check and open everything that is needed, before anything is written.
static void program_open(Program* p, int argc, char** argv) {
    Trainer* t = &p->trainer;
    Run* r = &t->run;
    Model* m = &t->model;
    run_parse(r, program_flags(p), argc, argv,
              "./use_gpt2 -e MODEL --generate N | --evaluate 1 | --explain TEXT [flags]");
    const int generates = generate_check(&p->generate, &r->settings, r->flags, r->flag_count);
    const int explains = explain_check(&p->explain, &r->settings, r->flags, r->flag_count);
    if (!r->settings.evaluate) die(USAGE, "nothing to do: give --generate N, --evaluate 1 or --explain TEXT");
    run_join(r, generates || explains ? NULL : "data/builtin/train.bin");
    run_find_model(r, "", "");
    Gpt2Config config = find_config(r);
    int T = run_sequence_length(r, config.T), has_cache = attention_decode_takes(config.C / config.NH);
    if (generates) generation_open(&p->text, &p->generate, r, T, config.V, has_cache);
    if (explains) T = explain_lm_open(&p->explanation, &p->explain, r, config.V, T);
    plan_model(t, config, T, explains ? RECOMPUTE_NOTHING : FORWARD_ONLY);
    if (!generates && !explains) open_data(t);
    else if (!r->weights) warn("-e %s: has random weights; name a trained model", r->source);
    if (r->train_pattern && !t->data.has_val && !t->choices.count)
        die(USAGE, "--evaluate 1 needs validation data or multiple-choice sets; name them with -j or --choices");
    run_init_model(r, &m->buffers, gpt2_weight_rules(&m->config));
}

int main(int argc, char** argv) {
    static Program program, *p = &program;
    Trainer* t = &p->trainer;
    process_begin(on_signal, argv);
    program_open(p, argc, argv);
    if (explain_is_asked(&p->explain)) explain(t, &p->explanation);
    else if (p->generate.generate) generate(t, &p->text, &p->generate);
    else evaluate(t);
    generation_close(&p->text);
    trainer_close(t);
    return DONE;
}
