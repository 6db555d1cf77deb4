/* The readers that are the trainers': flags, the environment, models and runs. */
#ifndef FUZZ_RUNS_H
#define FUZZ_RUNS_H

#include <sys/wait.h>

#include "fuzz_binary.h"
#include "fuzz_tasks.h"
#include "llmc/checkpoint/resume.h"

// Either trainer's file, "gpt2..." or "bert...", whichever the input has.
static const FuzzTrainer* case_trainer(const char* name, char path[64]) {
    snprintf(path, 64, CASE_DIR "/gpt2%s", name);
    if (file_exists(path)) return &FUZZ_GPT2;
    snprintf(path, 64, CASE_DIR "/bert%s", name);
    if (!file_exists(path)) die(USAGE, "no file");
    return &FUZZ_BERT;
}

// ---------------------------------------------------------------------------------------------------------
// Command line; descriptors of -e

static void command_line_seeds(CaseList* list) {
    static const char* const texts[][2] = {
        {"gpt2.txt", "-e\nL=2,C=16,NH=2,T=32,V=300\n-b\n2\n-t\n16\n-l\n1e-3\n-k\nwsd\n--final-lr=0.5\n-r\n2\n"},
        {"gpt2.txt",
         "-e\nd12\n-b\n8\n-d\n524288\n--optimizer\nlamb\n-z\n1\n-u\n700\n-q\n0.1\n-c\n0.1\n--dropout\n0.1\n"},
        {"gpt2.txt",
         "-i\ntrain.bin\n-j\nval.bin\n-o\nout\n-y\n0\n--overwrite\n1\n-x\n100\n--stop-after\n10\n-v\n5\n-m\n0\n"
         "-n\n0\n-nk\n3\n-nm\n100\n--seed\n1\n--on-nan\nskip\n--doc-mask\n1\n"},
        {"gpt2.txt", "-s\n0\n-g\n64\n-a\n1\n--shuffle\n0\n--beta1\n0.8\n--eps=1e-9\n"
                     "--clip\n0\n-w\n0\n--loss-scale\n1024\n-f\n1\n"},
        {"gpt2.txt", "-sl\n3\n-sg\n4.5\n"},
        {"gpt2.txt", "--profile\n3\n--profile-warmup\n1\n--mode\nforward\n-h\n10\n--choices\na,b\n"},
        {"gpt2.txt", "--help\n"},
        {"gpt2.txt", ""},
        {"gpt2.txt", "--bucket\n0\n--timeout\n5\n-b\n1\n"},
        {"bert.txt", "-e\nL=1,C=8,NH=2,T=16,V=64\n-b\n2\n--nsp\n0\n--mask-fraction\n0.2\n--pack\n4\n"},
        {"bert.txt",
         "-e\nbert-base\n--optimizer\nlamb\n-k\npoly\n--poly-power\n0.5\n--loss-mean\nmicro\n-d\n65536\n-b\n8\n"},
        {"bert.txt", "--task\nclassify\n--labels\n3\n-i\ntexts.tsv\n--epochs\n2\n-e\nL=1,C=8,NH=2,T=16,V=64\n-b\n2\n"},
        {"bert.txt", "--whole-word-masking\n1\n--short-sequences\n0\n--phase2\nout\n"},
    };
    for (size_t i = 0; i < COUNT_OF(texts); i++) seed_text(list, texts[i][0], texts[i][1]);
}

// The lines of case/NAME as argv, with room for the program's name, which is its first.
static void command_line_read(void) {
    char path[64], program[] = "train";
    const FuzzTrainer* trainer = case_trainer(".txt", path);
    Lines words = lines_read(path);
    char** argv = (char**)xcalloc((size_t)words.count + 2, sizeof *argv);
    argv[0] = program;
    memcpy(argv + 1, words.word, (size_t)words.count * sizeof *argv);
    trainer->command_line(words.count + 1, argv);
    free(argv);
    lines_free(&words);
}

static void descriptor_seeds(CaseList* list) {
    static const char* const texts[][2] = {{"gpt2.txt", "L=4,C=128,NH=4,V=257,T=256,F=512,tied=1"},
                                           {"gpt2.txt", "d24"},
                                           {"gpt2.txt", "L=1,C=8,NH=2,T=16777216"},
                                           {"gpt2.txt", ""},
                                           {"bert.txt", "L=4,C=128,NH=4,V=261,T=128,F=512"},
                                           {"bert.txt", "bert-large"},
                                           {"bert.txt", "C=12,NH=3"}};
    for (size_t i = 0; i < COUNT_OF(texts); i++) seed_text(list, texts[i][0], texts[i][1]);
}

static void descriptor_read(void) {
    char path[64];
    const FuzzTrainer* trainer = case_trainer(".txt", path);
    Lines words = lines_read(path);
    char empty[] = "";
    trainer->descriptor(words.count ? words.word[0] : empty);
    lines_free(&words);
}

// ---------------------------------------------------------------------------------------------------------
// Models and runs, as the trainers read them. Their data is next to case/ and is valid.

static const char GPT2_CONFIG[] =
    "{\"architectures\": [\"GPT2LMHeadModel\"], \"model_type\": \"gpt2\", \"activation_function\": \"gelu_new\", "
    "\"n_layer\": 1, \"n_head\": 2, \"n_embd\": 4, \"n_inner\": null, \"n_positions\": 8, \"n_ctx\": 8, "
    "\"vocab_size\": 40, \"layer_norm_epsilon\": 1e-05, \"initializer_range\": 0.02, \"embd_pdrop\": 0.1, "
    "\"attn_pdrop\": 0, \"resid_pdrop\": 0.1, \"tie_word_embeddings\": true, \"scale_attn_weights\": true, "
    "\"scale_attn_by_inverse_layer_idx\": false, \"bos_token_id\": 9, \"eos_token_id\": 9, \"dtype\": \"float32\"}";
static const char BERT_CONFIG[] =
    "{\"model_type\": \"bert\", \"hidden_act\": \"gelu\", \"position_embedding_type\": \"absolute\", "
    "\"num_hidden_layers\": 1, \"num_attention_heads\": 2, \"hidden_size\": 4, \"intermediate_size\": 8, "
    "\"max_position_embeddings\": 8, \"vocab_size\": 40, \"type_vocab_size\": 2, \"layer_norm_eps\": 1e-12, "
    "\"initializer_range\": 0.02, \"hidden_dropout_prob\": 0.1, \"attention_probs_dropout_prob\": 0, "
    "\"pad_token_id\": 0, \"tie_word_embeddings\": true, \"is_decoder\": false}";

static void config_seeds(CaseList* list) {
    seed_text(list, "gpt2.json", GPT2_CONFIG);
    seed_text(list, "bert.json", BERT_CONFIG);
    seed_text(list, "gpt2.json",
              "{\"n_layer\":12,\"n_head\":12,\"n_embd\":768,\"n_positions\":1024,\"vocab_size\":50257}");
}

static void config_read_case(void) {
    char path[64];
    case_trainer(".json", path)->config(path);
}

// Let a trainer run by these flags, which are separated by spaces.
static void trainer_run(void (*run)(int argc, char** argv), const char* flags) {
    char *text = xprintf("train %s", flags), *argv[64], *rest = text;
    int argc = 0;
    for (char* word = strtok_r(text, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) argv[argc++] = word;
    argv[argc] = NULL;
    run(argc, argv);
    free(text);
}

// The same in a process of its own, which gives a run's lock back. It must end well.
static void trainer_run_apart(void (*run)(int argc, char** argv), const char* flags) {
    int status = 1;
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        trainer_run(run, flags);
        _exit(DONE);
    }
    if (child < 0 || waitpid(child, &status, 0) < 0 || status != 0)
        fuzz_broken("the run that makes inputs failed: %s", flags);
}

static void gpt2_make(int argc, char** argv) { FUZZ_GPT2.train(argc, argv, 2, 1 << 20); }
static void bert_make(int argc, char** argv) { FUZZ_BERT.train(argc, argv, 2, 1 << 20); }
static void gpt2_go_on(int argc, char** argv) { FUZZ_GPT2.train(argc, argv, 1, 256); }
static void bert_go_on(int argc, char** argv) { FUZZ_BERT.train(argc, argv, 1, 256); }
static void gpt2_shards(int argc, char** argv) { FUZZ_GPT2.write_shards(argc, argv, "made/ckpt/00000002"); }

#define GPT2_DATA "-i train.bin -j val.bin -t 8 -b 1 --threads 1 -m 1 "
#define BERT_DATA "-i sentences.bin -j sentences.bin -t 8 -b 1 --threads 1 -m 1 "
// A resumed run has the model too: where no checkpoint is complete, it starts a new run with this one.
#define TINY "-e L=1,C=4,NH=2,T=8,V=40 "

// The data, and what a run of two steps leaves in made/.
static void trainer_make(int is_bert) {
    CaseList list = {0, 0, NULL};
    Case* data = case_new(&list);
    shards_seeds(&list);
    sentences_seed(&list, FUZZ_V, "sentences.bin", data);
    case_add(data, "train.bin", list.cases[1].file[0].bytes.text, list.cases[1].file[0].bytes.length);
    case_add(data, "val.bin", list.cases[2].file[0].bytes.text, list.cases[2].file[0].bytes.length);
    case_write(&list.cases[0], ".");
    case_list_free(&list);
    if (is_bert) trainer_run_apart(bert_make, BERT_DATA TINY "-o made -x 4 -n 1 -nk 0");
    else trainer_run_apart(gpt2_make, GPT2_DATA TINY "-o made -x 4 -n 1 -nk 0");
}

// Make made/ empty, and give back what was there but for what only people look at.
static Case trainer_take(void) {
    Case c;
    c.count = 0;
    unlink("made/loss.svg"), unlink("made/.lock"), unlink("made/config.json"), unlink("made/model.safetensors");
    case_read(&c, "made", strlen("made/"));
    remove_tree("made");
    make_directories("made");
    return c;
}

// Of `from`, the files whose names begin with `prefix`, under the rest of their names.
static void case_take(Case* c, const Case* from, const char* prefix, const char* as) {
    for (int i = 0; i < from->count; i++) {
        const CaseFile* f = &from->file[i];
        char* name = xprintf("%s%s", as, f->name + min_size(strlen(prefix), strlen(f->name)));
        if (strncmp(f->name, prefix, strlen(prefix)) == 0) case_add(c, name, f->bytes.text, f->bytes.length);
        free(name);
    }
}

static void model_seeds(CaseList* list) {
    static const char* const files[] = {"config.json", "model.safetensors"};
    for (int is_bert = 0; is_bert < 2; is_bert++) {
        trainer_make(is_bert);
        Case made = trainer_take(), *c = case_new(list);
        for (size_t i = 0; i < COUNT_OF(files); i++) {
            char *from = xprintf("ckpt/00000002/%s", files[i]),
                 *to = xprintf("%s/%s", is_bert ? "bert" : "gpt2", files[i]);
            const CaseFile* f = case_find(&made, from);
            case_add(c, to, f->bytes.text, f->bytes.length);
            free(from), free(to);
        }
        if (is_bert) case_add(c, "bert/vocab.txt", VOCAB_TXT, strlen(VOCAB_TXT));
        else case_add(c, "gpt2/tokenizer.json", TOKENIZER_JSON, strlen(TOKENIZER_JSON));
        case_free(&made);
    }
    llmc_seed(list, "gpt2/model.bin", LLMC_VERSION_FLOAT32);
    llmc_seed(list, "gpt2/model.bin", LLMC_VERSION_BFLOAT16);
}

static void model_read(void) {
    char path[64];
    const FuzzTrainer* trainer = case_trainer("", path);
    if (trainer == &FUZZ_BERT) trainer_run(trainer->evaluate, BERT_DATA "-o out --evaluate 1 -e " CASE_DIR "/bert");
    else if (file_exists(CASE_DIR "/gpt2/model.bin"))
        trainer_run(trainer->evaluate, GPT2_DATA "-o out --evaluate 1 -e " CASE_DIR "/gpt2/model.bin");
    else trainer_run(trainer->evaluate, GPT2_DATA "-o out --evaluate 1 -e " CASE_DIR "/gpt2");
}

// Checkpoints of GPT-2 with the optimizer in one file and in two, and one of BERT; with the one before, which is to be
// used where the newest is damaged.
static void checkpoint_seeds(CaseList* list) {
    Case made[2], *c;
    trainer_make(0);
    made[0] = trainer_take();
    c = case_new(list);
    case_take(c, &made[0], "ckpt/00000002", "gpt2/ckpt/00000002");
    case_take(c, &made[0], "log.jsonl", "gpt2/log.jsonl");
    c = case_new(list);
    case_take(c, &made[0], "", "gpt2/");
    trainer_make(0);
    trainer_run_apart(gpt2_shards, GPT2_DATA TINY "-o made -y 1");
    unlink("made/ckpt/00000002/optimizer.safetensors");
    checkpoint_write_manifest("made/ckpt/00000002", NULL, 0);
    made[1] = trainer_take();
    c = case_new(list);
    case_take(c, &made[1], "ckpt/00000002", "gpt2/ckpt/00000002");
    case_free(&made[0]), case_free(&made[1]);
    trainer_make(1);
    made[0] = trainer_take();
    c = case_new(list);
    case_take(c, &made[0], "ckpt/00000002", "bert/ckpt/00000002");
    case_take(c, &made[0], "log.jsonl", "bert/log.jsonl");
    case_free(&made[0]);
}

// The manifest's last line vouches for those before it.
static void checkpoint_seal(CaseFile* manifest, size_t n) {
    char line[32];
    int length = snprintf(line, sizeof line, "\"crc32\": \"%08x\"}\n", crc32_of(0, manifest->bytes.text, n));
    text_splice(&manifest->bytes, n, manifest->bytes.length - n, line, (size_t)length);
}

// The manifest of a directory of the input vouches for its files, or for itself alone.
static void checkpoint_settle_one(Case* c, const char* directory, int outermost) {
    const size_t n = strlen(directory), last = strlen("\"crc32\": \"00000000\"}\n");
    char* name = xprintf("%smanifest.json", directory);
    CaseFile* manifest = case_find(c, name);
    Text t = {NULL, 0, 0};
    free(name);
    if (!manifest) return;
    if (outermost) {
        if (manifest->bytes.length > last) checkpoint_seal(manifest, manifest->bytes.length - last);
        return;
    }
    text_printf(&t, "{\"files\": [");
    for (int i = 0, written = 0; i < c->count; i++) {
        const CaseFile* f = &c->file[i];
        if (strncmp(f->name, directory, n) != 0 || f == manifest) continue;
        text_printf(&t, "%s\n  {\"name\": \"%s\", \"bytes\": %zu, \"crc32\": \"%08x\"}", written++ ? "," : "",
                    f->name + n, f->bytes.length, crc32_of(0, f->bytes.text, f->bytes.length));
    }
    text_printf(&t, "],\n");
    text_splice(&manifest->bytes, 0, manifest->bytes.length, t.text, t.length);
    checkpoint_seal(manifest, t.length);
    free(t.text);
}

static void checkpoint_settle(Case* c, int outermost) {
    checkpoint_settle_one(c, "gpt2/ckpt/00000001/", outermost);
    checkpoint_settle_one(c, "gpt2/ckpt/00000002/", outermost);
    checkpoint_settle_one(c, "bert/ckpt/00000002/", outermost);
}

static void checkpoint_read(void) {
    char path[64];
    if (case_trainer("", path) == &FUZZ_BERT) trainer_run(bert_go_on, BERT_DATA TINY "-y 1 -o " CASE_DIR "/bert");
    else trainer_run(gpt2_go_on, GPT2_DATA TINY "-y 1 -o " CASE_DIR "/gpt2");
}

// ---------------------------------------------------------------------------------------------------------

// clang-format off
static const Reader READERS[] = {
    // name           share batch answers     files most           seeds               read                settle
    {"json",            120, 1000, 0,          0, (size_t)16 << 20, json_seeds,         json_read,          NULL},
    {"log",              50,  500, 0,          0, (size_t)64 << 20, log_seeds,          log_read,           NULL},
    {"command_line",     80,  100, 0,          0, 0,                command_line_seeds, command_line_read,  NULL},
    {"descriptor",       30,  500, 0,          0, (size_t)16 << 20, descriptor_seeds,   descriptor_read,    NULL},
    {"safetensors",     120,  500, 0,          0, (size_t)16 << 20, safetensors_seeds,  safetensors_read,   safetensors_settle},
    {"llmc",             30, 1000, 0,          0, (size_t)16 << 20, llmc_seeds,         llmc_read,          NULL},
    {"tokenizer",        70,  500, 0,          0, (size_t)1 << 30,  tokenizer_seeds,    tokenizer_read,     NULL},
    {"bpe",              50,  200, 0,          0, (size_t)1 << 30,  bpe_seeds,          bpe_read,           NULL},
    {"wordpiece",        30,  500, 0,          0, (size_t)64 << 20, wordpiece_seeds,    wordpiece_read,     NULL},
    {"shards",           50,  500, 0,          0, (size_t)16 << 20, shards_seeds,       shards_read_case,   shards_settle},
    {"sentences",        50,  500, 0,          0, (size_t)64 << 20, sentences_seeds,    sentences_read_case, sentences_settle},
    {"choices",          40,  500, 0,          0, (size_t)64 << 20, multiple_choice_seeds,      multiple_choice_read_case,  multiple_choice_settle},
    {"labelled",         30,  500, 0,          0, (size_t)64 << 20, labelled_seeds,     labelled_read_case, NULL},
    {"unlabelled",       30,  500, 0,          0, (size_t)64 << 20, unlabelled_seeds,   unlabelled_read_case, NULL},
    {"squad",            40,  500, 0,          0, (size_t)64 << 20, squad_seeds,        squad_read_case,    NULL},
    {"config",           60,  500, 0,          0, (size_t)16 << 20, config_seeds,       config_read_case,   NULL},
    {"model",            30,   50, ANSWER_NAN, 1, 0,                model_seeds,        model_read,         NULL},
    {"checkpoint",       40,   50, ANSWER_NAN, 1, 0,                checkpoint_seeds,   checkpoint_read,    checkpoint_settle},
};
// clang-format on

#endif
