/* Use a BERT model: fill in masked words, make vectors of texts, score held-out text and sets of clozes, or look inside
 * it. On the CPU (gcc) or the GPU (nvcc). train_bert.cu has the model.
 *
 *   use_bert -e DIR --fill "Anna goes to the [MASK]."        the most likely words
 *   use_bert -e DIR --embed FILE                             a vector for each line of a file
 *   use_bert -e DIR --evaluate 1 --choices SET               the loss on held-out text, and scores of a set
 *   use_bert -e DIR --explain "Anna takes the [MASK=ball]."  a page of what every op computes for a text */
#define OTHER_MAIN
#include "train_bert.cu"

#include "apps/use/embed.h"        // --embed
#include "apps/use/explain_mlm.h"  // --explain
#include "apps/use/mlm_texts.h"    // --fill
#include "apps/use/settings.h"

typedef struct {
    Trainer trainer;  // its run does not train
    MlmTextSettings text;
    ExplainSettings explain;
    Explanation explanation;
} Program;

// ---------------------------------------------------------------------------------------------------------
// What the program can do

// --fill: predict the masked tokens of a text and print them.
static void fill(Trainer* t, const char* text) {
    Run* r = &t->run;
    Model* m = &t->model;
    MlmBatch* batch = &t->data.batches[0];
    fill_text_batch(batch, &t->data.words, text, m->T, m->config.V);
    MlmInput in = mlm_load(&t->data.loader, batch, &r->ctx);
    forward(m, &in, &r->ctx);
    fill_text_print(&t->data.words, batch, m->a.logits, m->config.V, m->Vp, &r->ctx);
}

// --embed: write one vector per line of a text file.
static void embed(Trainer* t, const MlmTextSettings* s) {
    Run* r = &t->run;
    Model* m = &t->model;
    MlmSource* data = &t->data;
    Embedding e = embed_open(s, &data->words, m->T, m->config.V, m->config.C);
    while (embed_next(&e, &data->batches[0])) {
        MlmInput in = mlm_load(&data->loader, &data->batches[0], &r->ctx);
        forward_encoder(m, &in, &r->ctx);
        embed_take(&e, input_of(m, m->config.L), &in.sequences, &r->ctx);
    }
    embed_close(&e);
}

// --evaluate: print the losses on the held-out text and the scores of the sets.
static void evaluate(Trainer* t) {
    const MultipleChoiceSets* choices = &t->mlm.choices;
    for (int i = -1; i < choices->count; i++) evaluate_text(&t->run, i < 0 ? NULL : &choices->set[i]);
}

// --explain: run the text forward and backward. Then apply the masked-token head to each layer's input (logit lens).
static void explain(Trainer* t, Explanation* e) {
    Run* r = &t->run;
    Model* m = &t->model;
    ExplainSizes sizes = {.L = m->config.L, .NH = m->config.NH, .C = m->config.C, .V = m->config.V};
    MlmInput in = explain_mlm_load(e, &t->data, &m->buffers, sizes, &r->ctx);
    forward(m, &in, &r->ctx);
    compute_loss(m, &in, (MlmScales){.masked = explain_scale(e)}, explain_direction(e), SET, &r->ctx);
    if (!e->why_no_loss) backward(m, &in, SET, &r->ctx);
    explain_end(e, &r->ctx);
    for (int l = 0; l <= sizes.L; l++) {
        forward_masked(m, input_of(m, l), &in, &r->ctx);
        explain_lens(e, m->a.logits, m->Vp, &r->ctx);
    }
    explain_write(e, m->a.loss, &r->ctx);
}

// ---------------------------------------------------------------------------------------------------------
// Settings and startup

static int program_flags(Program* p) {
    Flag* table = p->trainer.run.flags;
    int count = use_rows(&p->trainer.run.settings, table, settings_flags(&p->trainer));
    return explain_rows(&p->explain, table, mlm_text_rows(&p->text, table, count), 1);
}

// Check and open everything that is needed, before anything is written.
static void program_open(Program* p, int argc, char** argv) {
    Trainer* t = &p->trainer;
    Run* r = &t->run;
    run_parse(r, program_flags(p), argc, argv,
              "./use_bert -e MODEL --fill TEXT | --embed FILE | --evaluate 1 | --explain TEXT [flags]");
    const int has_text = mlm_text_check(&p->text, &r->settings, r->flags, r->flag_count);
    const int explains = explain_check(&p->explain, &r->settings, r->flags, r->flag_count);
    if (!r->settings.evaluate)
        die(USAGE, "nothing to do: give --fill TEXT, --embed FILE, --evaluate 1 or --explain TEXT");
    run_join(r, has_text || explains ? NULL : "data/builtin/bert/train.bin");
    run_find_model(r, "", "");
    BertConfig c = bert_config_of_run(r, &t->mlm, &t->data.words);
    embed_check_model(&p->text, r->weights, r->group.size);
    if (explains) explain_mlm_without_next(&c.next, r);
    int T = run_sequence_length(r, c.T);
    if (explains) T = explain_mlm_open(&p->explanation, &p->explain, r, &t->data.words, c.V, T);
    MlmRecipe recipe = embed_recipe(&p->text, T, explains ? p->explain.predictions : T);
    if (!has_text && !explains) recipe = mlm_settings_recipe(&t->mlm, T);
    plan_model(t, c, recipe, T, explains ? RECOMPUTE_NOTHING : FORWARD_ONLY);
    if (!has_text && !explains) mlm_run_open_data(r, &t->mlm, &t->data, c.V, T, bert_config_write_pretraining(&c));
    if (r->train_pattern && !t->data.has_val) die(USAGE, "--evaluate 1 needs validation data; name it with -j");
    bert_init_model(r, &t->model.buffers, bert_weight_rules(&t->model.config), BERT_UNREPORTED);
}

int main(int argc, char** argv) {
    static Program program, *p = &program;
    Trainer* t = &p->trainer;
    process_begin(on_signal, argv);
    program_open(p, argc, argv);
    process_on_stop(SIG_DFL);  // a signal may end the process at once: nothing is saved
    if (explain_is_asked(&p->explain)) explain(t, &p->explanation);
    else if (*p->text.fill) fill(t, p->text.fill);
    else if (*p->text.embed) embed(t, &p->text);
    else evaluate(t);
    trainer_close(t);
    return DONE;
}
