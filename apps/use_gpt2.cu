/* Use a GPT-2 model: generate text, answer a message, score held-out text and multiple-choice sets, or look inside it.
 * On the CPU (gcc) or the GPU (nvcc). train_gpt2.cu has the model.
 *
 *   use_gpt2 -e DIR --generate 100 --prompt "Anna takes"     texts, here from a prompt; --chat: from a user's message
 *   use_gpt2 -e DIR --evaluate 1 --choices SET               the loss on held-out text, and scores of a set
 *   use_gpt2 -e DIR --explain "Anna takes the ball."         a page of what every op computes for a text */
#define OTHER_MAIN
#include "train_gpt2.cu"

#include "apps/use/decode.h"      // attention of one token
#include "apps/use/explain_lm.h"  // --explain
#include "apps/use/generate.h"    // --generate: prompts, sampling
#include "apps/use/settings.h"

typedef struct {
    Trainer trainer;  // its run does not train
    GenerateSettings generate;
    Generation text;
    ExplainSettings explain;
    Explanation explanation;
} Program;

// ---------------------------------------------------------------------------------------------------------
// Decode: the forward pass of one token. The keys and values of all tokens before it are in the layers' qkv, which
// thus is the KV cache.

// forward_block() for the token at `position`.
static void decode_block(Model* m, int l, int position, Context* ctx) {
    const Gpt2Config* c = &m->config;
    const BlockParams* p = &m->p.h[l];
    const BlockActs* a = &m->a.h[l];
    int last = l + 1 == c->L, C = c->C;
    floatX* qkv = a->qkv + (size_t)position * 3 * (size_t)C;
    Operand next = last ? (Operand){.v = m->a.lnf, .q = NULL} : a[1].ln1;
    LayerNormStats next_stats = last ? m->a.lnf_stats : a[1].ln1_stats;
    LayerNorm next_norm = last ? m->p.lnf : p[1].ln1;
    ResidualBranch attention = {.r = a->mid, .dropout = dropout_none(NULL)};
    ResidualBranch mlp = {.r = a->out, .dropout = dropout_none(NULL)};
    Rows rows = {.N = 1, .C = C};

    scope_at(ctx, FORWARD, l);
    linear_forward(qkv, a->ln1, p->qkv, 1, C, 3 * C, ctx);
    attention_decode(a->att.v, a->qkv, position, c->NH, C / c->NH, ctx);
    operand_fill(a->att, 1, C, ctx);
    linear_forward(a->mid, a->att, p->attproj, 1, C, C, ctx);
    residual_layernorm_forward(a->ln2, attention, a->ln2_stats, residual_into(m, l), p->ln2, rows, (real)c->eps, ctx);
    linear_gelu_forward(a->fc, (GeluInput){a->fc_pre, c->gelu}, a->ln2, p->fc, (LinearSize){1, C, c->F}, ctx);
    linear_forward(a->out, a->fc, p->fcproj, 1, c->F, C, ctx);
    residual_layernorm_forward(next, mlp, next_stats, a->mid, next_norm, rows, (real)c->eps, ctx);
}

// forward() for one token, at `position`. Its final layernorm is the first row of m->a.lnf.
static void decode(Model* m, int position, const Batch* b, Context* ctx) {
    const Gpt2Config* c = &m->config;
    const BlockActs* first = &m->a.h[0];
    Embeddings tables = {.word = m->p.wte, .position = m->p.wpe};
    EmbeddingInputs in = {.tokens = b->inputs, .types = NULL, .s = &b->s};
    scope_at(ctx, FORWARD, -1);
    embedding_forward(m->a.embedded, in, tables, m->buffers.step.embedding, dropout_none(&b->s), ctx);
    layernorm_forward(first->ln1.v, first->ln1_stats, m->a.embedded, m->p.h[0].ln1, (Rows){.N = 1, .C = c->C},
                      (real)c->eps, ctx);
    operand_fill(first->ln1, 1, c->C, ctx);
    for (int l = 0; l < c->L; l++) decode_block(m, l, position, ctx);
    scope_at(ctx, FORWARD, -1);
}

// Compute the logits of the token after a window into the first row of m->a.logits. If the keys and values of all
// tokens but the last are cached from the previous call, only the last token is computed.
static void predict_next(Model* m, LmData* data, Window w, Context* ctx) {
    int rows = w.count - w.past_len;
    CHECK(w.past_len == 0 || rows == 1);
    Batch b = lm_data_text(data, w.tokens + w.past_len, rows, w.past_len, ctx);
    if (w.past_len) decode(m, w.past_len, &b, ctx);
    else forward(m, &b, ctx);
    forward_head(m, m->a.lnf + (size_t)(rows - 1) * (size_t)m->config.C, 1, ctx);
}

// ---------------------------------------------------------------------------------------------------------
// What the program can do

// --generate: print the texts and the speed. A signal ends a text early.
static void generate(Trainer* t, Generation* g, const GenerateSettings* s) {
    Run* r = &t->run;
    Model* m = &t->model;
    double start = now_seconds();
    HostView logits = host_view_open(m->a.logits, (size_t)m->Vp, VIEW_FLOATX);
    for (int number = 0; number < s->samples && !stop_signal; number++) {
        generation_begin(g, r, number);
        for (int i = 0; i < s->generate && !stop_signal && !g->is_over; i++) {
            group_begin_work(&r->group);
            predict_next(m, &t->data, generation_window(g), &r->ctx);
            host_view_read(&r->ctx, &logits);
            generation_draw(g, logits.values);
        }
        generation_print(g, r, number);
    }
    host_view_close(&logits);
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
