/* GPT-2 in one file: tokens in, forward pass, loss, backward pass, AdamW, a sample out. Plain C, one thread, only the
 * C library. This is the first rung of the ladder: the same model as train_gpt2.cu, without anything that makes it
 * fast. Read it from top to bottom.
 *
 *     cc -O2 dev/ladder/gpt2_in_one_file.c -o build/gpt2 -lm
 *     build/gpt2                               1000 steps on data/builtin/train.bin, which `make` generates; a story
 *     build/gpt2 20 out/start                  20 steps from a model that ./train_gpt2 wrote to out/start
 *
 * It runs in a web page too, docs/live/index.html, which shows this file while it trains.
 *
 * B sequences of T tokens each are N = B * T rows. V vocabulary size, L layers, NH heads of HS channels, C = NH * HS.
 * A row of N and then a channel: element (n, c) of a tensor [N, C] is v[n * C + c]. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 4, WARMUP = 10, SAMPLE_TOKENS = 63 };  // warm-up: the first tenth of the steps
static const double LEARNING_RATE = 2e-3, FINAL_LR = 0.05, BETA1 = 0.9, BETA2 = 0.95, EPS = 1e-8;
static const double WEIGHT_DECAY = 0.1, MAX_NORM = 1.0, NORM_EPS = 1e-5, PI = 3.14159265358979;

static void die(const char* message, const char* what) {
    fprintf(stderr, "error: %s %s\n", message, what);
    exit(1);
}

// ---- Tensors. Each has its values and, in the same order, the derivative of the loss with respect to each value.
typedef struct {
    float *v, *d;
    float *mean, *square;  // of parameters: AdamW's running means of the derivative and of its square
    int size, decays;
    char name[40];
} Tensor;

typedef struct {
    Tensor w, b;  // weight and bias of a linear layer or a layernorm
} Layer;

static Tensor tensors[4096];  // all of them
static int tensor_count;

static float* zeros(int n) {
    float* x = calloc((size_t)n, sizeof(float));
    return x ? x : (die("out of memory", ""), x);
}

// The name of a layer's tensor has %d for the layer.
static Tensor new_tensor(const char* format, int l, int size) {
    Tensor t = {zeros(size), zeros(size), NULL, NULL, size, 0, ""};
    if (tensor_count == 4096) die("too many layers", "");
    snprintf(t.name, sizeof t.name, format, l);
    return tensors[tensor_count++] = t;
}

// Two loops do nearly all the work: a dot product, and a row added to another. The four sums are independent, so the
// processor does not wait for one addition before it begins the next.
static float dot(const float* a, const float* b, int n) {
    float sum[4] = {0, 0, 0, 0};
    int i = 0;
    for (; i + 4 <= n; i += 4)
        for (int j = 0; j < 4; j++) sum[j] += a[i + j] * b[i + j];
    for (; i < n; i++) sum[0] += a[i] * b[i];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

static void add_scaled(float* y, float factor, const float* x, int n) {
    for (int i = 0; i < n; i++) y[i] += factor * x[i];
}

// ---- The ops. A forward function reads values and writes y.v. Its backward function takes the same arguments, reads
// y.d, and adds to the derivatives of what the forward function read. By the chain rule, uses of a tensor add up.

// y[n] = token[n]'s row of wte + the row of wpe of n's position
static void embedding_forward(Tensor y, const int* tokens, Tensor wte, Tensor wpe, int N, int T, int C) {
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) y.v[n * C + c] = wte.v[tokens[n] * C + c] + wpe.v[n % T * C + c];
}

static void embedding_backward(Tensor y, const int* tokens, Tensor wte, Tensor wpe, int N, int T, int C) {
    for (int n = 0; n < N; n++) {
        add_scaled(wte.d + tokens[n] * C, 1, y.d + n * C, C);
        add_scaled(wpe.d + n % T * C, 1, y.d + n * C, C);
    }
}

// y[n, o] = b[o] + sum over i of x[n, i] w[o, i]. The head has no b.
static void linear_forward(Tensor y, Tensor x, Layer p, int N, int IC, int OC) {
    for (int n = 0; n < N; n++)
        for (int o = 0; o < OC; o++) y.v[n * OC + o] = (p.b.v ? p.b.v[o] : 0) + dot(x.v + n * IC, p.w.v + o * IC, IC);
}

static void linear_backward(Tensor y, Tensor x, Layer p, int N, int IC, int OC) {
    for (int n = 0; n < N; n++)
        for (int o = 0; o < OC; o++) {
            float dy = y.d[n * OC + o];
            add_scaled(x.d + n * IC, dy, p.w.v + o * IC, IC);
            add_scaled(p.w.d + o * IC, dy, x.v + n * IC, IC);
            if (p.b.d) p.b.d[o] += dy;
        }
}

// The mean of a row, and 1 / its standard deviation.
static void row_statistics(const float* x, int C, float* mean, float* rstd) {
    double sum = 0, square = 0;
    for (int c = 0; c < C; c++) sum += x[c];
    for (int c = 0; c < C; c++) square += (x[c] - sum / C) * (x[c] - sum / C);
    *mean = (float)(sum / C);
    *rstd = (float)(1 / sqrt(square / C + NORM_EPS));
}

// y = u w + b, where u = (x - mean) rstd
static void layernorm_forward(Tensor y, Tensor x, Layer p, int N, int C) {
    for (int n = 0; n < N; n++) {
        float mean, rstd;
        row_statistics(x.v + n * C, C, &mean, &rstd);
        for (int c = 0; c < C; c++) y.v[n * C + c] = (x.v[n * C + c] - mean) * rstd * p.w.v[c] + p.b.v[c];
    }
}

// With e = dy w, the derivative in u: dx = rstd (e - average(e) - u average(e u)). The averages are there because every
// x of the row moves its mean and its standard deviation.
static void layernorm_backward(Tensor y, Tensor x, Layer p, int N, int C) {
    for (int n = 0; n < N; n++) {
        const float *dy = y.d + n * C, *row = x.v + n * C;
        float mean, rstd;
        double e_sum = 0, eu_sum = 0;
        row_statistics(row, C, &mean, &rstd);
        for (int c = 0; c < C; c++) {
            float u = (row[c] - mean) * rstd, e = dy[c] * p.w.v[c];
            e_sum += e, eu_sum += e * u;
            p.w.d[c] += dy[c] * u, p.b.d[c] += dy[c];
        }
        for (int c = 0; c < C; c++) {
            float u = (row[c] - mean) * rstd, e = dy[c] * p.w.v[c];
            x.d[n * C + c] += rstd * (float)(e - e_sum / C - u * eu_sum / C);
        }
    }
}

// p = softmax(x), over n elements. The largest x is subtracted first, so that exp() cannot overflow.
static void softmax(float* p, const float* x, int n) {
    float largest = x[0];
    double sum = 0;
    for (int i = 1; i < n; i++) largest = fmaxf(largest, x[i]);
    for (int i = 0; i < n; i++) sum += p[i] = expf(x[i] - largest);
    for (int i = 0; i < n; i++) p[i] = (float)(p[i] / sum);
}

// A row of qkv [N, 3C] holds queries, keys and values; C channels are NH heads of HS. A query sees the keys at its own
// and earlier positions: p = softmax(q . k / sqrt(HS)), and y is the mean of the values, weighted by p [B, NH, T, T].
static void attention_forward(Tensor y, Tensor p, Tensor qkv, int B, int T, int NH, int HS) {
    int C = NH * HS;
    float scale = 1 / sqrtf((float)HS);
    memset(y.v, 0, (size_t)(B * T * C) * sizeof(float));
    for (int b = 0; b < B; b++)
        for (int h = 0; h < NH; h++)
            for (int t = 0; t < T; t++) {
                const float *rows = qkv.v + b * T * 3 * C + h * HS, *q = rows + t * 3 * C, *k = rows + C, *v = k + C;
                float* prob = p.v + ((b * NH + h) * T + t) * T;
                for (int s = 0; s <= t; s++) prob[s] = scale * dot(q, k + s * 3 * C, HS);
                softmax(prob, prob, t + 1);
                for (int s = 0; s <= t; s++) add_scaled(y.v + (b * T + t) * C + h * HS, prob[s], v + s * 3 * C, HS);
            }
}

// dp[s] = dy . v[s]. Through the softmax, the score gets ds = p (dp - sum of p dp): probabilities add up to 1, so what
// one gains the others lose.
static void attention_backward(Tensor y, Tensor p, Tensor qkv, int B, int T, int NH, int HS) {
    int C = NH * HS;
    float scale = 1 / sqrtf((float)HS);
    for (int b = 0; b < B; b++)
        for (int h = 0; h < NH; h++)
            for (int t = 0; t < T; t++) {
                int at = b * T * 3 * C + h * HS, row = ((b * NH + h) * T + t) * T;  // of head h: first q; p of t
                const float *prob = p.v + row, *dy = y.d + (b * T + t) * C + h * HS;
                const float *q = qkv.v + at + t * 3 * C, *k = qkv.v + at + C, *v = k + C;
                float *dprob = p.d + row, *dq = qkv.d + at + t * 3 * C, *dk = qkv.d + at + C, *dv = dk + C;
                for (int s = 0; s <= t; s++) {
                    dprob[s] = dot(dy, v + s * 3 * C, HS);
                    add_scaled(dv + s * 3 * C, prob[s], dy, HS);
                }
                float mean = dot(prob, dprob, t + 1);
                for (int s = 0; s <= t; s++) {
                    float ds = scale * prob[s] * (dprob[s] - mean);
                    add_scaled(dq, ds, k + s * 3 * C, HS);
                    add_scaled(dk + s * 3 * C, ds, q, HS);
                }
            }
}

// y = x / 2 (1 + tanh(k (x + 0.044715 x^3))), k = sqrt(2 / pi): nearly x for large x, nearly 0 for negative x
static const float GELU_K = 0.79788456f;

static float gelu_tanh(float x) { return tanhf(GELU_K * (x + 0.044715f * x * x * x)); }

static void gelu_forward(Tensor y, Tensor x, int n) {
    for (int i = 0; i < n; i++) y.v[i] = 0.5f * x.v[i] * (1 + gelu_tanh(x.v[i]));
}

static void gelu_backward(Tensor y, Tensor x, int n) {
    for (int i = 0; i < n; i++) {
        float z = x.v[i], t = gelu_tanh(z);
        x.d[i] += y.d[i] * (0.5f * (1 + t) + 0.5f * z * (1 - t * t) * GELU_K * (1 + 3 * 0.044715f * z * z));
    }
}

// The residual connection: y = a + b. Both get the derivative of the sum.
static void residual_forward(Tensor y, Tensor a, Tensor b, int n) {
    for (int i = 0; i < n; i++) y.v[i] = a.v[i] + b.v[i];
}

static void residual_backward(Tensor y, Tensor a, Tensor b, int n) {
    add_scaled(a.d, 1, y.d, n);
    add_scaled(b.d, 1, y.d, n);
}

// The mean over the rows of -log(probability of the target). Its derivative in the logits is p - (1 at the target).
static double cross_entropy(Tensor logits, const int* targets, int N, int V) {
    double loss = 0;
    for (int n = 0; n < N; n++) {
        float* p = logits.d + n * V;
        softmax(p, logits.v + n * V, V);
        loss -= log(p[targets[n]]) / N;
        p[targets[n]] -= 1;
        for (int v = 0; v < V; v++) p[v] /= (float)N;
    }
    return loss;
}

// ---- The model: embeddings, L blocks, a last layernorm, and the head, which is the token embedding again
typedef struct {
    Layer to_ln1, to_qkv, to_proj, to_ln2, to_fc, to_fcproj;            // the parameters that lead to
    Tensor ln1, qkv, prob, att, proj, mid, ln2, fc, gelu, fcproj, out;  // the activations
} Block;

typedef struct {
    int L, NH, C, T, V;
    Tensor wte, wpe, embedded, lnf, logits;
    Layer to_lnf, to_logits;
    Block* block;
} Model;

static void forward(Model* m, const int* tokens, int B, int T) {
    int N = B * T, C = m->C, HS = C / m->NH;
    Tensor x = m->embedded;  // the residual stream
    embedding_forward(x, tokens, m->wte, m->wpe, N, T, C);
    for (int l = 0; l < m->L; l++) {
        Block* k = &m->block[l];
        layernorm_forward(k->ln1, x, k->to_ln1, N, C);
        linear_forward(k->qkv, k->ln1, k->to_qkv, N, C, 3 * C);
        attention_forward(k->att, k->prob, k->qkv, B, T, m->NH, HS);
        linear_forward(k->proj, k->att, k->to_proj, N, C, C);
        residual_forward(k->mid, x, k->proj, N * C);
        layernorm_forward(k->ln2, k->mid, k->to_ln2, N, C);
        linear_forward(k->fc, k->ln2, k->to_fc, N, C, 4 * C);
        gelu_forward(k->gelu, k->fc, N * 4 * C);
        linear_forward(k->fcproj, k->gelu, k->to_fcproj, N, 4 * C, C);
        residual_forward(k->out, k->mid, k->fcproj, N * C);
        x = k->out;
    }
    layernorm_forward(m->lnf, x, m->to_lnf, N, C);
    linear_forward(m->logits, m->lnf, m->to_logits, N, C, m->V);
}

// The same list from its end. logits.d is set already; every other derivative is 0 and is added to.
static void backward(Model* m, const int* tokens, int B, int T) {
    int N = B * T, C = m->C, HS = C / m->NH;
    linear_backward(m->logits, m->lnf, m->to_logits, N, C, m->V);
    layernorm_backward(m->lnf, m->block[m->L - 1].out, m->to_lnf, N, C);
    for (int l = m->L - 1; l >= 0; l--) {
        Block* k = &m->block[l];
        Tensor x = l ? m->block[l - 1].out : m->embedded;
        residual_backward(k->out, k->mid, k->fcproj, N * C);
        linear_backward(k->fcproj, k->gelu, k->to_fcproj, N, 4 * C, C);
        gelu_backward(k->gelu, k->fc, N * 4 * C);
        linear_backward(k->fc, k->ln2, k->to_fc, N, C, 4 * C);
        layernorm_backward(k->ln2, k->mid, k->to_ln2, N, C);
        residual_backward(k->mid, x, k->proj, N * C);
        linear_backward(k->proj, k->att, k->to_proj, N, C, C);
        attention_backward(k->att, k->prob, k->qkv, B, T, m->NH, HS);
        linear_backward(k->qkv, k->ln1, k->to_qkv, N, C, 3 * C);
        layernorm_backward(k->ln1, x, k->to_ln1, N, C);
    }
    embedding_backward(m->embedded, tokens, m->wte, m->wpe, N, T, C);
}

// AdamW, update number `update` from 1. If the norm of all gradients is above MAX_NORM, they are scaled down to it.
static void adamw(int update, double rate) {
    double sum = 0, unbias1 = 1 - pow(BETA1, update), unbias2 = 1 - pow(BETA2, update);
    for (Tensor* p = tensors; p < tensors + tensor_count; p++)
        for (int i = 0; p->mean && i < p->size; i++) sum += (double)p->d[i] * p->d[i];
    double clip = sqrt(sum) > MAX_NORM ? MAX_NORM / sqrt(sum) : 1;
    for (Tensor* p = tensors; p < tensors + tensor_count; p++)
        for (int i = 0; p->mean && i < p->size; i++) {
            double g = clip * p->d[i];
            p->mean[i] = (float)(BETA1 * p->mean[i] + (1 - BETA1) * g);
            p->square[i] = (float)(BETA2 * p->square[i] + (1 - BETA2) * g * g);
            double step = p->mean[i] / unbias1 / (sqrt(p->square[i] / unbias2) + EPS);
            p->v[i] = (float)(p->v[i] * (1 - rate * WEIGHT_DECAY * p->decays) - rate * step);
        }
}

// Linear warm-up, then half a cosine down to FINAL_LR of the peak.
static double learning_rate(int step, int steps) {
    int warmup = steps / WARMUP;
    if (step < warmup) return LEARNING_RATE * (step + 1) / warmup;
    double cosine = cos(PI * (step - warmup) / (steps - warmup));
    return LEARNING_RATE * (FINAL_LR + (1 - FINAL_LR) * (1 + cosine) / 2);
}

static uint64_t random_state = 1337;

static double random_uniform(void) {  // in (0, 1): xorshift64*
    random_state ^= random_state >> 12, random_state ^= random_state << 25, random_state ^= random_state >> 27;
    return ((double)(random_state * 2685821657736338717u >> 11) + 0.5) / 9007199254740992.0;
}

// ---- Files: a Hugging Face directory with config.json, model.safetensors and vocab.json; token shards
static long file_size;  // of the last file that was read

// A file's bytes, and a zero behind them.
static char* read_file(const char* folder, const char* name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE* f = fopen(path, "rb");
    if (!f) die("cannot open", path);
    fseek(f, 0, SEEK_END), file_size = ftell(f), rewind(f);
    char* bytes = calloc((size_t)file_size + 1, 1);
    if (!bytes || fread(bytes, 1, (size_t)file_size, f) != (size_t)file_size) die("cannot read", path);
    fclose(f);
    return bytes;
}

static int config_number(const char* json, const char* key, int standard) {
    const char* at = json ? strstr(json, key) : NULL;
    if (json && (!at || sscanf(at + strlen(key), "\": %d", &standard) != 1)) die("config.json lacks", key);
    return standard;
}

// A parameter: random numbers with this mean and standard deviation, or from `weights`, the bytes of a
// model.safetensors. That file is the length of its header (8 bytes), the header, which is JSON, and the numbers.
// There, GPT-2's matrices named c_... are [in, out].
static Tensor new_param(const char* weights, const char* name, int OC, int IC, double mean, double std) {
    Tensor *t = &tensors[tensor_count], made = new_tensor(name, 0, OC * IC);
    t->mean = zeros(t->size), t->square = zeros(t->size), t->decays = IC > 1;
    for (int i = 0; !weights && i < t->size; i++) t->v[i] = (float)(mean + std * sqrt(12) * (random_uniform() - 0.5));
    if (!weights) return made;
    uint64_t header;
    unsigned long begin, end;
    memcpy(&header, weights, sizeof header);
    const char *at = strstr(weights + 8, name), *offsets = at ? strstr(at, "data_offsets\":[") : NULL;
    if (!offsets || sscanf(offsets + 15, "%lu,%lu", &begin, &end) != 2 || end - begin != 4 * (unsigned long)t->size)
        die("model.safetensors lacks, or has in another size,", name);
    const char* numbers = weights + 8 + header + begin;
    int is_transposed = IC > 1 && strstr(name, "c_");
    for (int o = 0; o < OC; o++)
        for (int i = 0; i < IC; i++)
            memcpy(&t->v[o * IC + i], numbers + 4 * (is_transposed ? i * OC + o : o * IC + i), sizeof(float));
    return made;
}

static Layer new_layer(const char* weights, const char* format, int l, int OC, int IC, double mean, double std) {
    char name[80];
    int length = snprintf(name, sizeof name, format, l);
    Layer p;
    strcpy(name + length, ".weight");
    p.w = new_param(weights, name, OC, IC, mean, std);
    strcpy(name + length, ".bias");
    p.b = new_param(weights, name, OC, 1, 0, 0);
    return p;
}

// The model in `folder`, or one of L, C and NH with random weights if that is NULL.
static Model new_model(const char* folder, int L, int C, int NH) {
    char *json = folder ? read_file(folder, "config.json") : NULL,
         *w = folder ? read_file(folder, "model.safetensors") : NULL;
    L = config_number(json, "n_layer", L), C = config_number(json, "n_embd", C), NH = config_number(json, "n_head", NH);
    if (NH < 1 || C % NH) die("the channels are not a multiple of the heads", "");
    int T = config_number(json, "n_positions", 64), V = config_number(json, "vocab_size", 384), N = BATCH * T;
    double std = 0.02, branch_std = 0.02 / sqrt(2.0 * L);  // smaller where a branch joins the residual stream
    Model m = {.L = L, .NH = NH, .C = C, .T = T, .V = V, .block = calloc((size_t)L, sizeof(Block))};
    m.wte = new_param(w, "wte.weight", V, C, 0, std), m.wpe = new_param(w, "wpe.weight", T, C, 0, std);
    for (int l = 0; l < L; l++) {
        Block* k = &m.block[l];
        k->to_ln1 = new_layer(w, "h.%d.ln_1", l, C, 1, 1, 0);
        k->to_qkv = new_layer(w, "h.%d.attn.c_attn", l, 3 * C, C, 0, std);
        k->to_proj = new_layer(w, "h.%d.attn.c_proj", l, C, C, 0, branch_std);
        k->to_ln2 = new_layer(w, "h.%d.ln_2", l, C, 1, 1, 0);
        k->to_fc = new_layer(w, "h.%d.mlp.c_fc", l, 4 * C, C, 0, std);
        k->to_fcproj = new_layer(w, "h.%d.mlp.c_proj", l, C, 4 * C, 0, branch_std);
        k->ln1 = new_tensor("h.%d.ln1", l, N * C), k->qkv = new_tensor("h.%d.qkv", l, N * 3 * C);
        k->prob = new_tensor("h.%d.prob", l, N * NH * T), k->att = new_tensor("h.%d.att", l, N * C);
        k->proj = new_tensor("h.%d.proj", l, N * C), k->mid = new_tensor("h.%d.mid", l, N * C);
        k->ln2 = new_tensor("h.%d.ln2", l, N * C), k->fc = new_tensor("h.%d.fc", l, N * 4 * C);
        k->gelu = new_tensor("h.%d.gelu", l, N * 4 * C), k->fcproj = new_tensor("h.%d.fcproj", l, N * C);
        k->out = new_tensor("h.%d.out", l, N * C);
    }
    m.to_lnf = new_layer(w, "ln_f", 0, C, 1, 1, 0), m.to_logits.w = m.wte;
    m.embedded = new_tensor("embedded", 0, N * C), m.lnf = new_tensor("lnf", 0, N * C);
    m.logits = new_tensor("logits", 0, N * V);
    return m;
}

// Print a token by vocab.json, {"text":number, ...}. There an invisible byte is a letter from U+0100 on: of
// those that occur in stories, U+0120 is a blank and U+010A a line break.
static void print_token(const char* vocab, int token) {
    char end[32];
    snprintf(end, sizeof end, "\":%d,", token);
    const char *at = strstr(vocab, end), *begin = at;
    if (!at) printf("<%d>", token);
    while (at && (begin[-1] != '"' || !strchr("{,", begin[-2]))) begin--;
    for (; begin < at; begin++) {
        if (!memcmp(begin, "\xc4\xa0", 2)) putchar(' '), begin++;
        else if (!memcmp(begin, "\xc4\x8a", 2)) putchar('\n'), begin++;
        else putchar(*begin == '\\' ? *++begin : *begin);
    }
}

// Draw tokens one after the other, each from the probabilities that the model gives after those before it.
static void sample(Model* m, const char* vocab) {
    int tokens[SAMPLE_TOKENS + 1] = {m->V - 1};  // <|endoftext|>, which documents begin with, is the last token
    for (int n = 1; n <= SAMPLE_TOKENS && n <= m->T; n++) {
        float* p = m->logits.v + (n - 1) * m->V;
        forward(m, tokens, 1, n);
        softmax(p, p, m->V);
        for (double rest = random_uniform(); tokens[n] < m->V - 1 && (rest -= p[tokens[n]]) > 0;) tokens[n]++;
        if (tokens[n] == m->V - 1) break;
        print_token(vocab, tokens[n]);
    }
    putchar('\n');
}

// ---- A run. main() and the web page (dev/live) call start(), then step(), and text() and tensor() between two steps.
static const char *folder, *stories = "data/builtin";  // folder: of the model to start from, or NULL
static Model model;
static char* vocabulary;
static const uint16_t* data;  // the stories, as tokens
static long data_size;
static int *inputs, *targets, steps, steps_done;

// Begin a run of `total` steps, which the learning rate follows, with random weights unless `folder` is set.
void start(int seed, int L, int C, int NH, int total) {
    char* file = read_file(stories, "train.bin");
    data = (const uint16_t*)(file + 1024), data_size = (file_size - 1024) / 2;  // behind a header of 256 int32
    vocabulary = read_file(folder ? folder : stories, "vocab.json");
    random_state = seed ? (uint64_t)seed : 1, steps = total, steps_done = 0;
    model = new_model(folder, L, C, NH);
    inputs = calloc((size_t)(BATCH * model.T), sizeof(int)), targets = calloc((size_t)(BATCH * model.T), sizeof(int));
    if (data_size <= model.T) die("too few tokens in", stories);
}

static void zero_derivatives(void) {
    for (Tensor* t = tensors; t < tensors + tensor_count; t++) memset(t->d, 0, (size_t)t->size * sizeof(float));
}

// Train on the next batch. Returns its loss.
double step(void) {
    int T = model.T, N = BATCH * T;
    for (int n = 0; n < N; n++) {  // sequences in the order of the file; a target is the next token
        long at = ((long)steps_done * BATCH + n / T) % ((data_size - 1) / T) * T + n % T;
        inputs[n] = data[at], targets[n] = data[at + 1];
        if (inputs[n] >= model.V || targets[n] >= model.V) die("a token is outside the model's vocabulary in", stories);
    }
    zero_derivatives();
    forward(&model, inputs, BATCH, T);
    double loss = cross_entropy(model.logits, targets, N, model.V);
    backward(&model, inputs, BATCH, T);
    adamw(steps_done + 1, learning_rate(steps_done, steps));
    steps_done++;
    return loss;
}

// Print a story.
void text(void) {
    sample(&model, vocabulary);
    fflush(stdout);
}

// The tensor of this name, NULL if there is none: a parameter is named as in model.safetensors, an activation as in
// new_model(). What forward() and backward() computed last is in it.
Tensor* tensor(const char* name) {
    for (Tensor* t = tensors; t < tensors + tensor_count; t++)
        if (strcmp(t->name, name) == 0) return t;
    return NULL;
}

int main(int argc, char** argv) {
    int total = argc > 1 ? (int)strtol(argv[1], NULL, 10) : 1000;
    folder = argc > 2 ? argv[2] : NULL;
    start(1337, 2, 64, 8, total);
    for (int i = 0; i < total; i++) printf("step %d/%d | loss %.8f\n", i + 1, total, step());
    text();
    return 0;
}
