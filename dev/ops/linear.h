/* linear: fp8 products against sums in double over the operands as stored, and the operands against their tensors.
 * matmul.h tests the products in floatX. */
#ifndef DEV_OPS_LINEAR_H
#define DEV_OPS_LINEAR_H

#include "harness.h"
#include "llmc/fp8/quantize.h"
#include "llmc/fp8/state.h"
#include "llmc/model/linear.h"
#include "llmc/ops/matmul/matmul.h"

typedef struct {
    Operand x, h, dpre, dy;
} LinearActs;

// A layer and the one before it, with GELU between: h = gelu(pre), pre = x w0^T + b0, y = h w1^T + b1.
typedef struct {
    LinearSize size[2];
    Array x, w[2], b[2], pre, h, y, dy, dpre, dx, dw[2], db[2];
    Linear p[2];
    LinearGrads d[2];
    LinearActs a;
    Fp8State state;
    Gelu gelu;
    Mode mode;
    Context* ctx;
} LinearCase;

typedef struct {
    Gelu gelu;
    int keeps_x;
    const char* exact_forward;  // parts of names; NULL: none
} LinearKind;

static inline LinearCase* linear_case(Harness* h, LinearKind kind, int N, int C, int F, Mode mode) {
    LinearCase* k = (LinearCase*)case_memory(h, sizeof *k);
    LinearSize size[] = {{N, C, F}, {N, F, C}};
    const int dims[] = {0, C, F};
    TensorRow rows[] = {{"w0", offsetof(Linear, w), {2, 1}}, {"w1", offsetof(Linear, w), {1, 2}}};
    rows[0].x_q = offsetof(LinearActs, x.q), rows[0].dy_q = offsetof(LinearActs, dpre.q);
    rows[1].x_q = offsetof(LinearActs, h.q), rows[1].dy_q = offsetof(LinearActs, dy.q);
    TensorTable table;
    memset(&table, 0, sizeof table);
    memset(&k->state, 0, sizeof k->state);
    memcpy(k->size, size, sizeof size);
    k->mode = mode, k->gelu = kind.gelu, k->ctx = &h->ctx;
    k->state.is_wanted = 1, k->state.keeps_x = kind.keeps_x;
    k->state.exact_forward = kind.exact_forward;
    tensors_add(&table, rows, 2, dims, 0);
    fp8_state_plan(&k->state, &table, N);
    fp8_state_open(&k->state, &table, NULL, &k->a, sizeof k->a, k->ctx);
    k->x = input(h, (size_t)N * (size_t)C, 1), k->dy = input(h, (size_t)N * (size_t)C, 1e-4);
    k->pre = output(h, (size_t)N * (size_t)F, SET), k->h = output(h, (size_t)N * (size_t)F, SET);
    k->y = output(h, (size_t)N * (size_t)C, SET);
    k->dpre = output(h, (size_t)N * (size_t)F, SET), k->dx = output(h, (size_t)N * (size_t)C, mode);
    for (int i = 0; i < 2; i++) {
        size_t out = (size_t)size[i].OC;
        k->w[i] = input(h, (size_t)C * (size_t)F, 0.1), k->b[i] = input(h, out, 0.1);
        k->dw[i] = output(h, (size_t)C * (size_t)F, mode), k->db[i] = output(h, out, mode);
        k->p[i] = (Linear){k->w[i].device, k->b[i].device};
        k->d[i] = (LinearGrads){k->dw[i].device_real, k->db[i].device_real};
    }
    k->a.x.v = k->x.device, k->a.h.v = k->h.device, k->a.dpre.v = k->dpre.device, k->a.dy.v = k->dy.device;
    tensors_free(&table);
    return k;
}

// The numbers that stored bytes of a layer's operand stand for, [N, C].
static inline real* linear_numbers(Harness* h, const Fp8Linear* f, int which, const uint8_t* device, int N, int C,
                                   int is_transposed) {
    Fp8Format format = which == FP8_DY ? FP8_E5M2 : FP8_E4M3;
    size_t rows = (size_t)N, columns = (size_t)C, stride = which == FP8_W ? rows : quantize_rows(N);
    size_t n = is_transposed ? columns * stride : rows * columns;
    uint8_t* bytes = (uint8_t*)case_memory(h, n);
    real *x = (real*)case_memory(h, rows * columns * sizeof *x), scale;
    device_download(&h->ctx, bytes, device, n);
    device_download(&h->ctx, &scale, fp8_inverse(f, which), sizeof scale);
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < columns; c++)
            x[r * columns + c] =
                (real)fp8_to_float(bytes[is_transposed ? c * stride + r : r * columns + c], format) * scale;
    return x;
}

// Each number is as near to the tensor's as its format allows: half of its last bit, relative, or of the smallest.
static inline void linear_expect_rounded(Harness* h, const char* what, const real* got, const real* want, size_t n,
                                         Fp8Format format) {
    double last = format == FP8_E4M3 ? 1.0 / 16 : 1.0 / 8, range = format == FP8_E4M3 ? 1.0 / 131072 : 1.0 / 4194304;
    double largest = 0;
    size_t far = 0;
    for (size_t i = 0; i < n; i++) largest = fmax(largest, fabs((double)want[i]));
    for (size_t i = 0; i < n; i++)
        far += !(fabs((double)got[i] - (double)want[i]) <= 1.01 * last * fabs((double)want[i]) + range * largest);
    expect_true(h, what, far == 0);
}

// The operands of a product as numbers: w and x, w and dy, or x and dy.
typedef struct {
    const real *a, *b, *bias;
} LinearOperands;

// A product against its reference on the numbers in its operands.
static inline void linear_expect(Harness* h, const char* what, MatmulPass pass, Array got, const real* before,
                                 LinearOperands o, LinearSize z, Mode mode) {
    size_t na = (size_t)(pass == MATMUL_BACKWARD_WEIGHT ? z.N : z.OC) * (size_t)z.IC;
    size_t nb = (size_t)z.N * (size_t)(pass == MATMUL_FORWARD ? z.IC : z.OC);
    real *want = (real*)case_memory(h, got.n * sizeof *want), *sum = (real*)case_memory(h, got.n * sizeof *sum);
    const real *size_a = absolute_of(h, o.a, na), *size_b = absolute_of(h, o.b, nb);
    memcpy(want, before, got.n * sizeof *want);
    if (pass == MATMUL_FORWARD) {
        matmul_forward_ref(want, o.b, o.a, o.bias, z.N, z.IC, z.OC, SET);
        matmul_forward_ref(sum, size_b, size_a, NULL, z.N, z.IC, z.OC, SET);
    } else if (pass == MATMUL_BACKWARD_INPUT) {
        matmul_backward_input_ref(want, o.b, o.a, z.N, z.IC, z.OC, mode);
        matmul_backward_input_ref(sum, size_b, size_a, z.N, z.IC, z.OC, SET);
    } else {
        matmul_backward_weight_ref(want, NULL, o.b, o.a, z.N, z.IC, z.OC, mode);
        matmul_backward_weight_ref(sum, NULL, size_b, size_a, z.N, z.IC, z.OC, SET);
    }
    // Tensor cores keep 13 bits or so of a fast sum. What is added to, and the bias, count too.
    for (size_t i = 0; i < got.n; i++) sum[i] += (real)fabs((double)want[i]) + 1;
    expect_close_to_sum(h, what, got, want, sum, HAS_DEVICE_MEMORY ? 2e-4 : 1e-6);
}

static inline void linear_run_first(LinearCase* k) {
    LinearSize z = k->size[0];
    operand_fill(k->a.x, z.N, z.IC, k->ctx);
    linear_forward(k->pre.device, k->a.x, k->p[0], z.N, z.IC, z.OC, k->ctx);
}

static inline void linear_run_forward(void* state) {
    LinearCase* k = (LinearCase*)state;
    GeluInput gelu = {k->pre.device, k->gelu};
    operand_fill(k->a.x, k->size[0].N, k->size[0].IC, k->ctx);
    linear_gelu_forward(k->a.h, gelu, k->a.x, k->p[0], k->size[0], k->ctx);
    linear_forward(k->y.device, k->a.h, k->p[1], k->size[1].N, k->size[1].IC, k->size[1].OC, k->ctx);
}

static inline void linear_run_backward(void* state) {
    LinearCase* k = (LinearCase*)state;
    GeluInput gelu = {k->pre.device, k->gelu};
    const LinearSize *z0 = &k->size[0], *z1 = &k->size[1];
    LinearGrads weight_only = {.w = k->d[0].w};
    linear_backward_weight(k->d[1], k->a.dy, k->a.h, z1->N, z1->IC, z1->OC, k->mode, k->ctx);
    linear_gelu_backward_input(k->a.dpre, k->d[0], k->mode, k->a.dy, k->p[1], gelu, *z1, k->ctx);
    linear_backward_weight(weight_only, k->a.dpre, k->a.x, z0->N, z0->IC, z0->OC, k->mode, k->ctx);
    linear_backward_input(k->dx.device, k->a.dpre, k->p[0], z0->N, z0->IC, z0->OC, k->mode, k->ctx);
}

// The bias with which the mean of y over the sampled rows is that of x and the weight before they were rounded to
// `stored` and `w`.
static inline const real* linear_bias(Harness* h, const LinearCase* k, int i, const real* x, const real* stored,
                                      const real* w) {
    LinearSize z = k->size[i];
    real* bias = copy_of(h, k->b[i]);
    int rows = mean_bias_rows(z.N);
    for (size_t c = 0; c < (size_t)z.IC; c++) {
        double mean = 0, of_stored = 0;
        for (int r = 0; r < rows; r++) {
            size_t at = (size_t)mean_bias_row(r, z.N) * (size_t)z.IC + c;
            mean += (double)x[at] / rows, of_stored += (double)stored[at] / rows;
        }
        for (size_t o = 0; o < (size_t)z.OC; o++) {
            size_t at = o * (size_t)z.IC + c;
            bias[o] += (real)((double)k->w[i].host[at] * mean - (double)w[at] * of_stored);
        }
    }
    return bias;
}

// What is in the shared buffers after the last product of each pass belongs to the layer of `z`.
static inline void linear_check_layer(Harness* h, LinearCase* k, int i, const real* x, Array y) {
    LinearSize z = k->size[i];
    const Fp8Copy* q = i ? k->a.h.q : k->a.x.q;
    const Fp8Linear* f = q->layer;
    size_t nx = (size_t)z.N * (size_t)z.IC, nw = (size_t)z.IC * (size_t)z.OC;
    const real* w = linear_numbers(h, f, FP8_W, f->w, z.OC, z.IC, 0);
    const real* wt = linear_numbers(h, f, FP8_W, f->wt, z.OC, z.IC, 1);
    const real* stored = linear_numbers(h, f, FP8_X, q->y, z.N, z.IC, 0);
    expect_true(h, "the weight's transpose has its numbers", memcmp(w, wt, nw * sizeof *w) == 0);
    linear_expect_rounded(h, "the weight is rounded to E4M3", w, k->w[i].host, nw, FP8_E4M3);
    linear_expect_rounded(h, "the input is rounded to E4M3", stored, x, nx, FP8_E4M3);
    if (q->yt) {
        const real* xt = linear_numbers(h, f, FP8_X, q->yt, z.N, z.IC, 1);
        expect_true(h, "the kept transpose has the input's numbers", memcmp(stored, xt, nx * sizeof *xt) == 0);
    }
    LinearOperands operands = {w, stored, linear_bias(h, k, i, x, stored, w)};
    if (f->exact_forward) {
        LinearOperands exact = {k->w[i].host, i ? copy_of(h, k->h) : x, k->b[i].host};
        if (i) expect_close(h, "the activation", k->h, x, 1e-5);
        operands = exact;
    }
    linear_expect(h, i ? "y" : "pre", MATMUL_FORWARD, y, y.host, operands, z, SET);
}

static inline void test_linear_case(Harness* h, LinearKind kind, int N, int C, int F, Mode mode) {
    Gelu gelu = kind.gelu;
    case_begin(h, "linear/fp8 N=%d C=%d F=%d %s %s%s%s", N, C, F, mode == ADD ? "ADD" : "SET",
               gelu == GELU_ERF ? "erf" : "tanh", kind.keeps_x ? " kept" : "",
               kind.exact_forward ? " exact forward" : "");
    LinearCase* k = linear_case(h, kind, N, C, F, mode);
    Fp8Shared* s = &k->state.shared;
    size_t n = (size_t)N * (size_t)F, nx = (size_t)N * (size_t)C;
    fp8_state_begin_step(&k->state);
    linear_run_first(k);
    linear_check_layer(h, k, 0, k->x.host, k->pre);
    linear_run_forward(k);
    real* activated = (real*)case_memory(h, n * sizeof *activated);
    for (size_t i = 0; i < n; i++) activated[i] = (real)gelu_exact(k->pre.host[i], gelu);
    linear_check_layer(h, k, 1, activated, k->y);

    // The gradients: dy of layer 1 is an input, dpre that of layer 0.
    real *dw0 = copy_of(h, k->dw[0]), *dx = copy_of(h, k->dx);
    real *db0 = copy_of(h, k->db[0]), *db1 = copy_of(h, k->db[1]);
    if (!kind.keeps_x) gelu_forward(k->h.device, k->pre.device, n, gelu, k->ctx);
    linear_run_backward(k);
    const Fp8Linear* f = k->a.x.q->layer;
    const real* dpre = linear_numbers(h, f, FP8_DY, s->dy, N, F, 0);
    const real* dpret = linear_numbers(h, f, FP8_DY, s->dyt, N, F, 1);
    const uint8_t* kept = k->a.x.q->yt ? k->a.x.q->yt : s->xt;
    const real* xt = linear_numbers(h, f, FP8_X, kept, N, C, 1);
    const real* wt = linear_numbers(h, f, FP8_W, f->wt, F, C, 1);
    real *exact = (real*)case_memory(h, n * sizeof *exact), *sums = (real*)case_memory(h, (size_t)F * sizeof *sums);
    array_download(k->dpre);
    memset(sums, 0, (size_t)F * sizeof *sums);
    for (size_t i = 0; i < n; i++) {
        exact[i] = (real)((double)k->dpre.host[i] * gelu_derivative_exact(k->pre.host[i], gelu));
        sums[i % (size_t)F] += (real)fabs((double)k->dpre.host[i]);  // GELU's derivative has an absolute error
    }
    expect_true(h, "dpre's transpose has its numbers", memcmp(dpre, dpret, n * sizeof *dpre) == 0);
    linear_expect_rounded(h, "dpre is rounded to E5M2", dpre, exact, n, FP8_E5M2);
    LinearOperands of_dw = {xt, dpret, NULL}, of_dx = {wt, dpre, NULL};
    linear_expect(h, "dw of layer 0", MATMUL_BACKWARD_WEIGHT, k->dw[0], dw0, of_dw, k->size[0], mode);
    linear_expect(h, "dx", MATMUL_BACKWARD_INPUT, k->dx, dx, of_dx, k->size[0], mode);
    matmul_backward_bias_ref(db0, exact, N, F, mode);
    matmul_backward_bias_ref(db1, k->dy.host, N, C, mode);
    for (int o = 0; o < F; o++) sums[o] += (real)fabs((double)db0[o]);
    expect_close_to_sum(h, "db of layer 0", k->db[0], db0, sums, 1e-5);
    expect_close(h, "db of layer 1", k->db[1], db1, 1e-5);
    // The largest elements make the scales of the next step.
    GradSync alone;
    ProcessGroup group;
    memset(&alone, 0, sizeof alone), memset(&group, 0, sizeof group);
    group.size = 1, alone.collectives.group = &group;
    fp8_state_end_step(&k->state, 0, &alone, k->ctx);
    real scale, largest = 0;
    for (size_t i = 0; i < nx; i++) largest = (real)fmax(largest, fabs((double)k->x.host[i]));
    device_download(k->ctx, &scale, s->scales.scale + f->row + FP8_X, sizeof scale);
    double room = (double)scale * (double)largest;
    expect_true(h, "the next scale leaves a factor of 2 to 4", room <= 224 && room > 112);
    // A gradient that was zero in one step, below a weight that starts at zero, has no scale yet.
    expect_true(h, "the next step measures tensors too", s->calibrates);
    // Another weight, as after an update; from now on with the scales of the step.
    s->calibrates = 0;
    for (size_t i = 0; i < k->w[0].n; i++) k->w[0].host[i] = -k->w[0].host[i];
    array_upload_real(k->w[0]);
    linear_run_first(k);
    s->records = 1;  // the check reads the kept transpose
    linear_run_first(k);
    linear_check_layer(h, k, 0, k->x.host, k->pre);
    // Another input outside a step: the backward pass takes this one, not the one that the step kept.
    s->records = 0;
    for (size_t i = 0; i < nx; i++) k->x.host[i] = -k->x.host[i];
    array_upload_real(k->x);
    linear_run_forward(k);
    gelu_forward(k->h.device, k->pre.device, n, gelu, k->ctx);
    dw0 = copy_of(h, k->dw[0]);
    linear_run_backward(k);
    dpret = linear_numbers(h, f, FP8_DY, s->dyt, N, F, 1);
    xt = linear_numbers(h, f, FP8_X, s->xt, N, C, 1);
    linear_expect_rounded(h, "x is rounded to E4M3", xt, k->x.host, nx, FP8_E4M3);
    LinearOperands of_other = {xt, dpret, NULL};
    linear_expect(h, "dw of another input", MATMUL_BACKWARD_WEIGHT, k->dw[0], dw0, of_other, k->size[0], mode);
    fp8_state_close(&k->state);
    case_end(h);
}

// The logits are those of x without its mean, with the mean of the exact ones.
static inline void linear_check_logits(Harness* h, LinearCase* k) {
    LinearSize z = k->size[0];
    const Fp8Linear* f = k->a.x.q->layer;
    size_t n = (size_t)z.N * (size_t)z.IC;
    const real* w = linear_numbers(h, f, FP8_W, f->w, z.OC, z.IC, 0);
    const real* stored = linear_numbers(h, f, FP8_X, f->shared->x, z.N, z.IC, 0);
    real* centered = (real*)case_memory(h, n * sizeof *centered);
    for (size_t i = 0; i < (size_t)z.IC; i++) {
        double mean = 0;
        for (int r = 0; r < mean_bias_rows(z.N); r++)
            mean += (double)k->x.host[(size_t)mean_bias_row(r, z.N) * (size_t)z.IC + i] / mean_bias_rows(z.N);
        for (size_t at = i; at < n; at += (size_t)z.IC) centered[at] = (real)((double)k->x.host[at] - mean);
    }
    linear_expect_rounded(h, "x is rounded without its mean", stored, centered, n, FP8_E4M3);
    LinearOperands operands = {w, stored, linear_bias(h, k, 0, k->x.host, stored, w)};
    linear_expect(h, "logits", MATMUL_FORWARD, k->pre, k->pre.host, operands, z, SET);
}

// The column whose probability is nearest to 0.07: its gradient is 0.93 below zero, where E5M2 rounds off most.
static inline int linear_target(const real* logits, int V) {
    double sum = 0, nearest = INFINITY;
    int target = 0;
    for (int v = 0; v < V; v++) sum += exp((double)logits[v]);
    for (int v = 0; v < V; v++) {
        double away = fabs(exp((double)logits[v]) / sum - 0.07);
        if (away < nearest) nearest = away, target = v;
    }
    return target;
}

// The output matrix: the share of the targets in dx is that of dlogits before it was rounded.
static inline void test_linear_logits(Harness* h, int N, int C, int Vp) {
    case_begin(h, "linear/fp8 logits N=%d C=%d Vp=%d", N, C, Vp);
    LinearCase* k = linear_case(h, (LinearKind){.gelu = GELU_TANH, .keeps_x = 0}, N, C, Vp, SET);
    const Fp8Linear* f = k->a.x.q->layer;
    const LinearSize z = k->size[0];
    Operand dlogits = {.v = k->pre.device, .q = k->a.dpre.q};
    LinearGrads weight_only = {.w = k->d[0].w};
    Array each = output(h, (size_t)N, SET), sum = output(h, 1, SET);
    int* targets = int_array(h, (size_t)N);
    LogitsGradient d = {.losses = {.each = each.device_real, .sum = sum.device_real, .scale = 1, .mode = SET},
                        .targets = targets,
                        .V = Vp};
    for (size_t i = 0; i < k->x.n; i++) k->x.host[i] += (real)(1.0 + (double)(i % 3));
    array_upload(k->x);
    array_download(k->x);
    fp8_state_begin_step(&k->state);
    k->a.x.q->is_centered = 1;
    linear_forward(k->pre.device, k->a.x, k->p[0], N, C, Vp, k->ctx);
    linear_check_logits(h, k);
    for (int n = 0; n < N; n++) targets[n] = n % 4 == 2 ? -1 : linear_target(k->pre.host + (size_t)n * (size_t)Vp, Vp);
    linear_classifier_backward(dlogits, d.losses, targets, NULL, N, Vp, Vp, k->ctx);
    linear_backward_weight(weight_only, dlogits, k->a.x, N, C, Vp, SET, k->ctx);
    linear_backward_input(k->dx.device, dlogits, k->p[0], N, C, Vp, SET, k->ctx);
    array_download(each);
    const real* dy = linear_numbers(h, f, FP8_DY, f->shared->dy, N, Vp, 0);
    const real* wt = linear_numbers(h, f, FP8_W, f->wt, Vp, C, 1);
    real* given_back = (real*)case_memory(h, (size_t)N * (size_t)C * sizeof *given_back);
    int lost = 0;
    for (size_t n = 0; n < (size_t)N; n++)
        for (size_t c = 0; c < (size_t)C && targets[n] >= 0; c++) {
            size_t t = (size_t)targets[n], at = n * (size_t)Vp + t;
            real left = (real)expm1(-(double)each.host[n]) - dy[at];
            given_back[n * (size_t)C + c] = left * k->w[0].host[t * (size_t)C + c];
            lost += fabs((double)left) > 0.04;
        }
    LinearOperands operands = {wt, dy, NULL};
    expect_true(h, "rounding takes much at the targets", lost > 0);
    linear_expect(h, "dx", MATMUL_BACKWARD_INPUT, k->dx, given_back, operands, z, ADD);
    fp8_state_close(&k->state);
    case_end(h);
}

// ---------------------------------------------------------------------------------------------------------
// All

// Whether this build and GPU have fp8 products.
static inline int linear_has_fp8(const Harness* h) {
#ifdef __CUDACC__
    return strcmp(FLOATX_NAME, "BF16") == 0 && h->ctx.capability >= 89;
#else
    return (void)h, 1;
#endif
}

// Sums over channels and outputs of a layer are added up fast, those over tokens and over the vocabulary are not.
static inline void test_linear_sums(Harness* h) {
    case_begin(h, "linear/fp8 sums");
    expect_true(h, "channels", matmul_fp8_is_fast(matmul_terms(MATMUL_FORWARD, 65536, 3072, 50304)));
    expect_true(h, "outputs", matmul_fp8_is_fast(matmul_terms(MATMUL_BACKWARD_INPUT, 65536, 50304, 3072)));
    expect_true(h, "tokens", !matmul_fp8_is_fast(matmul_terms(MATMUL_BACKWARD_WEIGHT, 65536, 768, 3072)));
    expect_true(h, "the vocabulary", !matmul_fp8_is_fast(matmul_terms(MATMUL_BACKWARD_INPUT, 65536, 768, 50304)));
    case_end(h);
}

static inline void test_linear(Harness* h) {
    if (!linear_has_fp8(h)) return;
    test_linear_sums(h);
    test_linear_logits(h, 35, 64, 112);
    test_linear_case(h, (LinearKind){GELU_TANH, 0, NULL}, 1, 64, 256, SET);
    test_linear_case(h, (LinearKind){GELU_TANH, 1, NULL}, 64, 128, 512, SET);
    test_linear_case(h, (LinearKind){GELU_ERF, 1, NULL}, 100, 48, 192, ADD);
    test_linear_case(h, (LinearKind){GELU_TANH, 0, NULL}, 300, 768, 96, ADD);
    test_linear_case(h, (LinearKind){GELU_TANH, 0, "w0,1"}, 40, 64, 256, ADD);
    test_linear_case(h, (LinearKind){GELU_ERF, 1, "w"}, 100, 64, 128, SET);
}

#endif
