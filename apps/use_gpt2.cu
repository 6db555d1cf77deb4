/* Use a GPT-2 model: generate text, answer a message, score held-out text and multiple-choice sets, or look inside it.
 * On the CPU (gcc) or the GPU (nvcc). train_gpt2.cu has the model.
 *
 *   use_gpt2 -e DIR --generate 100 --prompt "Anna takes"     texts, here from a prompt; --chat: from a user's message
 *   use_gpt2 -e DIR --evaluate 1 --choices SET               the loss on held-out text, and scores of a set
 *   use_gpt2 -e DIR --explain "Anna takes the ball."         a page of what every op computes for a text */
#define OTHER_MAIN
#include "train_gpt2.cu"

#include "apps/use/decoder.h"     // --generate: prompts, texts, and the ops for one token of each
#include "apps/use/explain_lm.h"  // --explain
#include "apps/use/settings.h"

typedef struct {
    Trainer trainer;  // its run does not train
    GenerateSettings generate;
    Generation text;
    ExplainSettings explain;
    Explanation explanation;
} Program;

// ---------------------------------------------------------------------------------------------------------
// Decode: the forward pass of the newest token of each text. It multiplies in floatX, with --fp8 too.

// forward_block(), in place on the residual stream.
static void decode_block(Model* m, Decoder* d, int l, Context* ctx) {
    const Gpt2Config* c = &m->config;
    const BlockParams* p = &m->p.h[l];
    const BlockActs* a = &m->a.h[l];
    int N = d->shape.N, C = c->C;
    LinearFusion add = {.mode = ADD}, norm = {.norm = p->ln1, .u = a->ln1.v, .stats = a->ln1_stats}, gelu = norm;
    norm.eps = gelu.eps = (real)c->eps, gelu.norm = p->ln2, gelu.pre = a->fc_pre, gelu.gelu = c->gelu;

    scope_at(ctx, FORWARD, l);
    linear_decode(d->qkv, d->stream, p->qkv, (LinearSize){N, C, 3 * C}, norm, ctx);
    attention_decode(a->att.v, decoder_cache(d, l), d->qkv, d->newest.position, d->shape, ctx);
    linear_decode(d->stream, a->att.v, p->attproj, (LinearSize){N, C, C}, add, ctx);
    linear_decode(a->fc.v, d->stream, p->fc, (LinearSize){N, C, c->F}, gelu, ctx);
    linear_decode(d->stream, a->fc.v, p->fcproj, (LinearSize){N, c->F, C}, add, ctx);
}

// Compute the texts' windows of `rows` tokens from the start. Texts that have only the prompt share one pass.
static void prefill(Model* m, LmData* data, Decoder* d, const Generation* g, int rows, Context* ctx) {
    for (int n = 0; n < d->shape.N; n++) {
        int is_same = n > 0 && g->count == g->prompt;
        Batch b = lm_data_text(data, generation_text(g, n) + g->begin, rows, 0, ctx);
        if (!is_same) forward(m, &b, ctx);
        decoder_take_stream(d, n, residual_into(m, m->config.L), rows, ctx);
        for (int l = 0; l < m->config.L; l++) decoder_take_layer(d, n, l, m->a.h[l].qkv, rows, ctx);
    }
    decoder_begin(d, g, rows, ctx);
}

// Launch the pass that draws token number `count` of each text. `decodes`: first forward() for the token before it.
static void launch_draw(Model* m, Decoder* d, const Generation* g, int count, int decodes, Context* ctx) {
    Sequences s = {.rows = d->shape.N, .count = d->shape.N, .max_length = 1, .position = d->newest.position};
    Embeddings tables = {.word = m->p.wte, .position = m->p.wpe};
    EmbeddingInputs in = {.tokens = d->newest.token, .types = NULL, .s = &s};
    LinearFusion norm = {.norm = m->p.lnf, .u = m->a.lnf, .stats = m->a.lnf_stats, .eps = (real)m->config.eps};
    if (!decodes || !step_graph_repeat(&d->graph, ctx)) {
        if (decodes) step_graph_begin(&d->graph, 0, 0, ctx);
        if (decodes) embedding_forward(d->stream, in, tables, m->buffers.step.embedding, dropout_none(&s), ctx);
        for (int l = 0; l < m->config.L && decodes; l++) decode_block(m, d, l, ctx);
        scope_at(ctx, FORWARD, -1);
        linear_decode(m->a.logits, d->stream, m->p.head, (LinearSize){s.rows, m->config.C, m->Vp}, norm, ctx);
        draw(d->newest, m->a.logits, s.rows, g->V, m->Vp, g->sampler, ctx);
        if (decodes) step_graph_end(&d->graph, ctx), d->graph.steps++;
    }
    readback_record(ctx, &d->arrived[count % 2]);
}

// ---------------------------------------------------------------------------------------------------------
// What the program can do

// --generate: print the texts and the speed. A signal ends them early. On the GPU tokens are read one step late.
static void generate(Trainer* t, Generation* g, const GenerateSettings* s) {
    Run* r = &t->run;
    Model* m = &t->model;
    Decoder d;
    double start = now_seconds();
    decoder_open(&d, g, (DecodeShape){1, m->T, m->config.NH, m->config.C / m->config.NH}, m->config.L, r);
    for (int number = 0, most = g->texts; number < s->samples && !stop_signal; number += g->texts) {
        generation_begin(g, r, number, min_int(most, s->samples - number));
        d.shape.N = g->texts;
        while (g->going && g->count < g->room && !stop_signal) {
            int rows = generation_window(g), first = g->count, launched = first, more;
            int end = min_int(g->room, g->can_cache ? g->begin + g->T + 1 : first + 1);
            prefill(m, &t->data, &d, g, rows, &r->ctx);
            while ((more = launched < end && g->going && !stop_signal) || g->count < launched) {
                group_begin_work(&r->group);
                if (more) launch_draw(m, &d, g, launched, launched > first, &r->ctx), launched++;
                if (!more || launched > g->count + READBACK_LAG) decoder_read(&d, g);
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
