/* Cases of attention: unequal lengths, odd head sizes, both masks, dropout, large scores, packed against alone. On the
 * GPU every case runs as materialized and as flash attention (which falls back to materialized). Both are compared. */
#ifndef DEV_OPS_ATTENTION_H
#define DEV_OPS_ATTENTION_H

#include "attention_scratch.h"
#include "harness.h"
#include "llmc/device/cublaslt.cuh"
#include "llmc/ops/attention/attention.h"

#ifdef __CUDACC__

// A sum of n products of numbers that lie `i` and `j` apart, halved, and the same of absolute values.
static void batched_sum(real* sum, real* magnitude, const real* x, size_t i, const real* y, size_t j, int n) {
    double total = 0, size = 0;
    for (int k = 0; k < n; k++, x += i, y += j) {
        double product = (double)*x * (double)*y;
        total += product, size += fabs(product);
    }
    *sum = (real)(0.5 * total), *magnitude = (real)(0.5 * size);
}

// Batches of products, by cuBLASLt and by the kernel for what it does not support: the rows of a head times another's
// transpose, in fp32, and the transpose of that times rows, in floatX. Each element is compared with its sum of
// products.
static void test_batched_product(Harness* h, int T, int NH, int HS) {
    size_t C = (size_t)(NH * HS), width = round_up((size_t)T, 8), pairs = (size_t)NH * (size_t)T * width, N = (size_t)T;
    case_begin(h, "attention/batched product T=%d NH=%d HS=%d", T, NH, HS);
    Array qkv = input(h, N * 3 * C, 1.0), weights = input(h, pairs, 1.0);
    BatchMatrix q = {qkv.device, {cublaslt_type(), CUBLAS_OP_N, (int64_t)(3 * C), HS}}, k = q, w = q;
    k.p = qkv.device + C, k.layout.op = CUBLAS_OP_T;
    w.p = weights.device, w.layout.op = CUBLAS_OP_T;
    w.layout.row = (int64_t)width, w.layout.next = (int64_t)(N * width);
    for (int plain = 0; plain < 2; plain++) {
        const BatchAddend nothing = {NULL, 0};
        Array s = output(h, pairs, SET), o = output(h, N * C, SET);
        real *want = copy_of(h, s), *sum = copy_of(h, s), *want_o = copy_of(h, o), *sum_o = copy_of(h, o);
        for (size_t i = 0; i < pairs; i++) {  // columns past T belong to no product: they must be unchanged
            size_t head = i / width / N, m = i / width % N, n = i % width;
            const real* of_head = qkv.host + head * (size_t)HS;
            sum[i] = 1;
            if (n < N) batched_sum(want + i, sum + i, of_head + m * 3 * C, 1, of_head + n * 3 * C + C, 1, HS);
        }
        for (size_t i = 0; i < N * C; i++) {
            const real* row = weights.host + i % C / (size_t)HS * N * width + i / C;
            batched_sum(want_o + i, sum_o + i, row, width, qkv.host + i % C, 3 * C, T);
        }
        BatchMatrix c = {s.device_real, {CUDA_R_32F, CUBLAS_OP_N, (int64_t)width, w.layout.next}};
        BatchMatrix d = {o.device, {cublaslt_type(), CUBLAS_OP_N, (int64_t)C, HS}};
        BatchSize c_size = {T, T, HS, NH}, d_size = {T, HS, T, NH};
        BatchKey c_key = batch_key(&c, &q, &k, c_size, &h->ctx), d_key = batch_key(&d, &w, &q, d_size, &h->ctx);
        if (plain) {
            batched_product_plain(c.p, q.p, k.p, &c_key, 0.5f, nothing, &h->ctx);
            batched_product_plain(d.p, w.p, q.p, &d_key, 0.5f, nothing, &h->ctx);
        } else {
            batched_product(c, q, k, c_size, 0.5f, &h->ctx);
            batched_product(d, w, q, d_size, 0.5f, &h->ctx);
        }
        array_download(s);
        for (size_t i = 0; i < pairs; i++) {
            int is_padding = i % width >= N;
            double got = (double)s.host[i], tol = tolerance(1e-6) * fmax(1e-6, (double)sum[i]);
            if (is_padding ? !isnan(got) : !(fabs(got - (double)want[i]) <= tol))
                case_fail(h, "%s: element %zu is %.9g, expected %.9g", plain ? "kernel" : "cuBLASLt", i, got,
                          (double)want[i]);
        }
        expect_close_to_sum(h, plain ? "rows by the kernel" : "rows", o, want_o, sum_o, tolerance(1e-6));
    }
    case_end(h);
}

#endif

typedef struct {
    Array out, lse, qkv, dqkv, dout;
    Sequences s;
    AttentionShape shape;
    double scale;  // of qkv
    Context* ctx;
} AttentionCase;

static void attention_run_forward(void* state) {
    AttentionCase* a = (AttentionCase*)state;
    attention_forward(a->out.device, a->lse.device_real, a->qkv.device, &a->s, a->shape, a->ctx);
}

static void attention_run_backward(void* state) {
    AttentionCase* a = (AttentionCase*)state;
    attention_backward(a->dqkv.device, a->dout.device, a->qkv.device, a->out.device, a->lse.device_real, &a->s,
                       a->shape, a->ctx);
}

// Call after case_begin().
static AttentionCase attention_case(Harness* h, const int* lengths, int count, int NH, int HS, Mask mask, double p,
                                    double scale) {
    AttentionCase a;
    a.s = sequences_of(h, lengths, count, 5);
    a.shape = (AttentionShape){NH, HS, mask, dropout_make(p, 42, 7, 3, SITE_DROPOUT_ATTENTION, NULL)};
    a.scale = scale, a.ctx = &h->ctx;
    size_t N = (size_t)a.s.rows, C = (size_t)(NH * HS);
    a.qkv = input(h, N * 3 * C, scale), a.dout = input(h, N * C, 1.0);
    a.out = output(h, N * C, SET), a.lse = output(h, N * (size_t)NH, SET), a.dqkv = output(h, N * 3 * C, SET);
    return a;
}

// What rounding inside the op may add where floatX is short: P and ds are rounded before the products they enter, and
// delta is made from a rounded out. An output is a sum of P[k] V[k], where the P sum to 1 (dropout: to its scale) and
// an element of V is within 4 of its standard deviations. 0 where nothing is rounded inside.
static double attention_rounding(const AttentionCase* a) {
    double unit = sizeof(floatX) == sizeof(real) ? 0 : array_rounding(a->out);
    return 4 * unit * a->scale * (double)a->shape.dropout.scale;
}

// What the references make of it.
static void attention_reference(Harness* h, AttentionCase* a) {
    a->out.want = copy_of(h, a->out), a->lse.want = copy_of(h, a->lse), a->dqkv.want = copy_of(h, a->dqkv);
    attention_forward_ref(a->out.want, a->lse.want, a->qkv.host, &a->s, a->shape);
    attention_backward_ref(a->dqkv.want, a->dout.host, a->qkv.host, &a->s, a->shape);
}

static const char* const ATTENTION_NAMES[][4] = {
    [FLASH] = {"flash forward", "flash out", "flash backward", "flash dqkv"},
    [MATERIALIZED] = {"materialized forward", "materialized out", "materialized backward", "materialized dqkv"}};

// Compares one path of the launchers with the references. With inputs of size 1 a score is correct to a few 1e-7. What
// is computed from it is an average of numbers near 1. A gradient adds about as many of these as there are queries, and
// is a product of two operands of the inputs' scale. Tensor cores truncate what falls below the largest term's last bit
// instead of rounding it, which shows in lse.
static void attention_check_forward(Harness* h, AttentionCase* a, AttentionPath path, double tol) {
    Array forward[2] = {a->out, a->lse};
    device_set_attention(a->ctx, path);
    expect_same_for_any_threads(h, ATTENTION_NAMES[path][0], attention_run_forward, a, forward, 2);
    double rounding = attention_rounding(a), cut = rounding > 0 ? 3 : 1;
    expect_close(h, ATTENTION_NAMES[path][1], a->out, a->out.want, tolerance(tol) + rounding);
    expect_close(h, "lse", a->lse, a->lse.want, tolerance(cut * tol));
}

static void attention_check_path(Harness* h, AttentionCase* a, AttentionPath path, double tol) {
    attention_check_forward(h, a, path, tol);
    double rounding = attention_rounding(a);
    expect_same_for_any_threads(h, ATTENTION_NAMES[path][2], attention_run_backward, a, &a->dqkv, 1);
    expect_close(h, ATTENTION_NAMES[path][3], a->dqkv, a->dqkv.want, tolerance(3 * tol) + 3 * rounding * a->scale);
}

// What the roundings of the backward pass are relative to: dqkv's sums with |D| and |ds| and absolute operands, where
// |ds| also has the part `noise` of the products that fp32 made it from and that may cancel.
static real* attention_gradient_magnitude(Harness* h, const AttentionCase* a, double noise) {
    size_t HS = (size_t)a->shape.HS, C = (size_t)a->shape.NH * HS;
    double factor = 1 / sqrt((double)HS), *p = (double*)case_memory(h, (size_t)a->s.max_length * sizeof *p);
    real* sums = (real*)case_memory(h, a->dqkv.n * sizeof *sums);
    const real *qkv = a->qkv.host, *dout = a->dout.host, *out = a->out.host;
    for (int b = 0; b < a->s.count; b++)
        for (int head = 0; head < a->shape.NH; head++)
            for (int row = a->s.cu_seqlens[b]; row < a->s.cu_seqlens[b + 1]; row++) {
                int query = row - a->s.cu_seqlens[b], length = a->s.cu_seqlens[b + 1] - a->s.cu_seqlens[b];
                int visible = attention_visible(a->shape.mask, query, length);
                size_t begin = (size_t)a->s.cu_seqlens[b], channel = (size_t)head * HS;
                size_t at_q = (size_t)row * 3 * C + channel, at_g = (size_t)row * C + channel;
                double delta = 0, delta_sum = 0;
                attention_probabilities_ref(p, qkv + begin * 3 * C, query, visible, head, a->shape);
                for (size_t i = 0; i < HS; i++) {
                    delta += (double)dout[at_g + i] * (double)out[at_g + i];
                    delta_sum += fabs((double)dout[at_g + i] * (double)out[at_g + i]);
                }
                for (int k = 0; k < visible; k++) {
                    size_t at_k = (begin + (size_t)k) * 3 * C + C + channel, at_v = at_k + C;
                    double keep = attention_keep_ref(a->shape.dropout, sequences_number(&a->s, b), head, query, k);
                    double dp = 0, dp_sum = 0;
                    for (size_t i = 0; i < HS; i++) {
                        dp += (double)dout[at_g + i] * (double)qkv[at_v + i];
                        dp_sum += fabs((double)dout[at_g + i] * (double)qkv[at_v + i]);
                    }
                    double ds = p[k] * (fabs(keep * dp - delta) + noise * (keep * dp_sum + delta_sum)) * factor;
                    for (size_t i = 0; i < HS; i++) {
                        sums[at_q + i] += (real)(ds * fabs((double)qkv[at_k + i]));
                        sums[at_k + i] += (real)(ds * fabs((double)qkv[at_q + i]));
                        sums[at_v + i] += (real)(p[k] * keep * fabs((double)dout[at_g + i]));
                    }
                }
            }
    return sums;
}

// Compares the results of flash attention, by `path`, and of materialized attention. Each rounds P, ds and what it
// stores to floatX once each. The results may be three such roundings apart, of which the comparison itself allows one.
// Far below 1, fp16's error is no longer relative.
static void attention_check_paths(Harness* h, AttentionCase* a, AttentionPath path, const real* materialized_out,
                                  double tol) {
    double unit = sizeof(floatX) == sizeof(real) ? 0 : array_rounding(a->out), floor = 1e-2;
    AttentionCase positive = *a;
    size_t C = (size_t)(a->shape.NH * a->shape.HS);
    real* magnitude = (real*)case_memory(h, a->out.n * sizeof(real));
    real* lse = (real*)case_memory(h, a->lse.n * sizeof(real));
    positive.qkv.host = copy_of(h, a->qkv);
    for (size_t i = 0; i < a->qkv.n; i++)
        if (i % (3 * C) >= 2 * C) positive.qkv.host[i] = (real)fabs((double)positive.qkv.host[i]);
    attention_forward_ref(magnitude, lse, positive.qkv.host, &a->s, a->shape);
    for (size_t i = 0; i < a->out.n; i++) magnitude[i] = (real)fmax(magnitude[i], floor);
    expect_close_to_sum(h, "flash out against materialized", a->out, materialized_out, magnitude,
                        3 * unit + tolerance(3 * tol));

    real* flash = copy_of(h, a->dqkv);
    device_set_attention(a->ctx, MATERIALIZED);
    attention_run_backward(a);  // from what flash's forward pass left
    device_set_attention(a->ctx, path);
    magnitude = attention_gradient_magnitude(h, a, unit > 0 ? tolerance(3 * tol) / unit : 1);
    for (size_t i = 0; i < a->dqkv.n; i++) magnitude[i] = (real)fmax(magnitude[i], floor);
    expect_close_to_sum(h, "materialized dqkv against flash", a->dqkv, flash, magnitude, 3 * unit + tolerance(3 * tol));
}

// Sequence b of a case alone, after both passes.
static AttentionCase attention_alone(Harness* h, const AttentionCase* packed, int b) {
    size_t C = (size_t)(packed->shape.NH * packed->shape.HS);
    int first = packed->s.cu_seqlens[b], length = packed->s.cu_seqlens[b + 1] - first;
    AttentionCase alone = attention_case(h, &length, 1, packed->shape.NH, packed->shape.HS, packed->shape.mask, 0, 1.0);
    alone.s.first = packed->s.first + (packed->s.is_numbered_by_row ? first : b);
    alone.shape.dropout = packed->shape.dropout;
    memcpy(alone.qkv.host, packed->qkv.host + (size_t)first * 3 * C, alone.qkv.n * sizeof(real));
    memcpy(alone.dout.host, packed->dout.host + (size_t)first * C, alone.dout.n * sizeof(real));
    array_upload(alone.qkv);
    array_upload(alone.dout);
    attention_run_forward(&alone);
    attention_run_backward(&alone);
    return alone;
}

// A sequence among others gives the same bits as the same sequence alone.
static void attention_expect_alone(Harness* h, const AttentionCase* packed, const AttentionCase* alone, int b) {
    size_t first = (size_t)packed->s.cu_seqlens[b], C = (size_t)(packed->shape.NH * packed->shape.HS);
    expect_equal(h, "out of a sequence alone", alone->out, packed->out.host + first * C);
    expect_equal(h, "dqkv of a sequence alone", alone->dqkv, packed->dqkv.host + first * 3 * C);
}

static void attention_check_packing(Harness* h, const AttentionCase* packed) {
    for (int b = 0; b < packed->s.count; b++) {
        AttentionCase alone = attention_alone(h, packed, b);
        attention_expect_alone(h, packed, &alone, b);
    }
}

// Both flash attention by `path` and materialized attention.
static void attention_check(Harness* h, AttentionCase* a, AttentionPath path, double tol) {
    real* materialized_out = NULL;
    attention_reference(h, a);
    if (HAS_DEVICE_MEMORY) {
        attention_check_path(h, a, MATERIALIZED, tol);
        attention_check_packing(h, a);
        materialized_out = copy_of(h, a->out);
    }
    attention_check_path(h, a, path, tol);
    if (HAS_DEVICE_MEMORY) {
        attention_check_paths(h, a, path, materialized_out, tol);
        attention_run_backward(a);
        array_download(a->dqkv);
    }
    attention_check_packing(h, a);
}

// The number of sequences, their lengths, heads, their size, and the per cent that dropout takes. The last four have
// the channels of models that are trained: 768, 1024, 1600.
static const int ATTENTION_SIZES[][8] = {
    {1, 1, 0, 0, 0, 1, 1, 0},        {2, 1, 1, 0, 0, 3, 16, 50},      {3, 17, 1, 77, 0, 3, 16, 0},
    {3, 17, 1, 77, 0, 2, 33, 30},    {2, 64, 64, 0, 0, 2, 64, 0},     {4, 6, 23, 24, 25, 2, 5, 10},
    {2, 130, 47, 0, 0, 1, 32, 20},   {3, 16, 0, 8, 0, 2, 8, 10},      {3, 1, 17, 77, 0, 2, 64, 0},
    {3, 77, 300, 1, 0, 2, 64, 10},   {3, 1, 77, 17, 0, 2, 128, 0},    {2, 300, 65, 0, 0, 1, 128, 10},
    {2, 77, 33, 0, 0, 3, 48, 10},    {3, 129, 64, 63, 0, 1, 80, 0},   {1, 1024, 0, 0, 0, 1, 64, 10},
    {2, 40, 33, 0, 0, 1, 200, 10},   {2, 1, 77, 0, 0, 2, 1, 10},      {3, 17, 77, 1, 0, 2, 96, 10},
    {2, 77, 17, 0, 0, 2, 160, 0},    {3, 33, 77, 1, 0, 1, 256, 10},   {2, 1024, 17, 0, 0, 1, 33, 10},
    {1, 1024, 0, 0, 0, 2, 64, 0},    {3, 1, 17, 77, 0, 2, 64, 50},    {1, 128, 0, 0, 0, 5, 64, 10},
    {2, 200, 128, 0, 0, 2, 64, 50},  {3, 17, 512, 200, 0, 3, 64, 10}, {2, 129, 257, 0, 0, 2, 40, 10},
    {3, 200, 1, 130, 0, 2, 128, 50}, {3, 17, 77, 1, 0, 12, 64, 10},   {2, 77, 1, 0, 0, 16, 64, 10},
    {2, 1, 17, 0, 0, 25, 64, 0},     {1, 17, 0, 0, 0, 20, 80, 10}};

// Calls case_begin().
static AttentionCase attention_case_of(Harness* h, const char* what, const int* z, Mask mask) {
    case_begin(h, "attention/%s %s T=%d,.. of %d NH=%d HS=%d p=%g", what, mask == CAUSAL ? "CAUSAL" : "FULL", z[1],
               z[0], z[5], z[6], z[7] / 100.0);
    return attention_case(h, z + 1, z[0], z[5], z[6], mask, z[7] / 100.0, 1.0);
}

static void test_attention_nan(Harness* h, AttentionPath path) {
    int length = 50;
    case_begin(h, "attention/forward a NaN is not hidden%s", path == MATERIALIZED ? ", materialized" : "");
    device_set_attention(&h->ctx, path);
    AttentionCase nan_case = attention_case(h, &length, 1, 2, 16, CAUSAL, 0, 1.0);
    nan_case.qkv.host[20 * 3 * 32] = (real)NAN;  // head 0 of query 20
    array_upload(nan_case.qkv);
    attention_run_forward(&nan_case);
    array_download(nan_case.out);
    array_download(nan_case.lse);
    int shown = isnan(nan_case.lse.host[20]);
    for (size_t c = 0; c < 16; c++) shown &= isnan(nan_case.out.host[20 * 32 + c]);
    expect_true(h, "NaN in q gives NaN in lse and out", shown);
    expect_true(h, "the other head stays", !isnan(nan_case.lse.host[70]) && !isnan(nan_case.out.host[20 * 32 + 16]));
    case_end(h);
}

static void test_attention(Harness* h) {
    for (size_t i = 0; i < COUNT_OF(ATTENTION_SIZES); i++)
        for (int mask = CAUSAL; mask <= FULL; mask++) {
            const int* z = ATTENTION_SIZES[i];
            double pairs = 0;
            for (int b = 0; b < z[0]; b++) pairs += (double)z[1 + b] * z[1 + b];
            if (case_is_left_out(h, pairs * z[5])) continue;
            AttentionCase a = attention_case_of(h, "both", z, (Mask)mask);
            attention_check(h, &a, FLASH, 3e-6);
            case_end(h);
        }

    // Scores up to some hundreds: the softmax is nearly one-hot, masked scores would overflow, and a score of 300
    // is right to 3e-5.
    int length = 50;
    case_begin(h, "attention/both large scores");
    AttentionCase large = attention_case(h, &length, 1, 2, 16, CAUSAL, 0.1, 8.0);
    attention_check(h, &large, FLASH, 3e-4);
    case_end(h);

    for (int path = FLASH; path <= (HAS_DEVICE_MEMORY ? MATERIALIZED : FLASH); path++)
        test_attention_nan(h, (AttentionPath)path);
    device_set_attention(&h->ctx, FLASH);
    test_attention_keep(h, 0.1);
    test_attention_keep(h, 0.5);
    static const int mixed[] = {130, 1, 300, 17, 128, 0, 8, 33, 0}, equal[] = {257, 257, 257};
    int documents[1024], lengths[300], count = attention_documents(documents, COUNT_OF(documents), 16, 8192);
    for (int i = 0; i < (int)COUNT_OF(lengths); i++) lengths[i] = i;
    for (int form = 0; form < 2; form++)
        for (int mask = CAUSAL; mask <= FULL; mask++) {
            test_attention_draws(h, "mixed", mixed, COUNT_OF(mixed), (DrawForm)form, (Mask)mask);
            test_attention_draws(h, "equal", equal, COUNT_OF(equal), (DrawForm)form, (Mask)mask);
            test_attention_draws(h, "all lengths", lengths, COUNT_OF(lengths), (DrawForm)form, (Mask)mask);
            test_attention_draws(h, "documents", documents, count, (DrawForm)form, (Mask)mask);
        }
    test_attention_grid(h);
    test_attention_scratch(h);
#ifdef ATTENTION_FLASH
    static const int bits[][5] = {{130, 1, 300, 17, 128}, {129, 129, 129, 129, 129}, {0, 513, 0, 8, 33}};
    for (size_t i = 0; i < COUNT_OF(bits); i++) {
        test_attention_bits(h, bits[i], CAUSAL, 0.1);
        test_attention_bits(h, bits[i], FULL, 0.5);
    }
#endif
#ifdef __CUDACC__
    test_batched_product(h, 17, 3, 33);
    test_batched_product(h, 77, 2, 64);
    test_batched_product(h, 1, 1, 1);
#endif
}

// Documents with dropout, at a length where one thread for each pair of a row's tokens would be too many: -t 8192 -b 16
// --doc-mask 1 and 16 heads. The CPU takes as many documents of another length.
static void test_attention_documents(Harness* h) {
    enum { B = 16, T = HAS_DEVICE_MEMORY ? 8192 : 128, NH = 16, HS = 8 };
    int lengths[1024], count = attention_documents(lengths, COUNT_OF(lengths), B, T);
    case_begin(h, "attention_documents/B=%d T=%d NH=%d documents=%d", B, T, NH, count);
    AttentionCase a = attention_case(h, lengths, count, NH, HS, CAUSAL, 0.1, 1.0);
    a.s.is_numbered_by_row = 1;
    expect_true(h, "documents are many", count * NH >= 4096);
    attention_run_forward(&a);
    attention_run_backward(&a);
    array_download(a.out), array_download(a.dqkv);
    for (int b = 0; b < count; b += 20) {
        if (lengths[b] > T / 8) continue;  // the references take their time
        AttentionCase alone = attention_alone(h, &a, b);
        attention_reference(h, &alone);
        double rounding = attention_rounding(&alone);
        expect_close(h, "out", alone.out, alone.out.want, tolerance(1e-5) + rounding);
        expect_close(h, "dqkv", alone.dqkv, alone.dqkv.want, tolerance(3e-5) + 3 * rounding);
        attention_expect_alone(h, &a, &alone, b);
    }
    case_end(h);
}

static double attention_loss(void* state) {
    AttentionCase* a = (AttentionCase*)state;
    double loss = 0;
    attention_forward_ref(a->out.host, a->lse.host, a->qkv.host, &a->s, a->shape);
    for (size_t i = 0; i < a->out.n; i++) loss += (double)a->dout.host[i] * (double)a->out.host[i];
    return loss;
}

static void grad_attention(Harness* h) {
    static const int lengths[] = {7, 1, 26};
    for (int mask = CAUSAL; mask <= FULL; mask++)
        for (int dropped = 0; dropped < 2; dropped++) {
            double p = dropped ? 0.25 : 0;
            case_begin(h, "attention/grad %s p=%g", mask == CAUSAL ? "CAUSAL" : "FULL", p);
            AttentionCase a = attention_case(h, lengths, 3, 2, 3, (Mask)mask, p, 1.0);
            attention_reference(h, &a);
            attention_run_forward(&a);
            attention_run_backward(&a);
            expect_gradient(h, "dqkv of the reference", attention_loss, &a, a.qkv.host, a.qkv.n, a.dqkv.want, 1e-8);
            expect_gradient(h, "dqkv", attention_loss, &a, a.qkv.host, a.qkv.n, a.dqkv.host, 1e-8);
            case_end(h);
        }
}

// What a CPU does in seconds, or the shapes at which other libraries were measured on an H200.
typedef struct {
    int B, T, NH, HS;
    Mask mask;
    double p;
    AttentionPath path;
} AttentionBench;

static void bench_attention_case(Harness* h, AttentionBench b) {
    int lengths[256];
    char suffix[64];
    CHECK(b.B <= (int)COUNT_OF(lengths));
    for (int i = 0; i < b.B; i++) lengths[i] = b.T;
    case_begin(h, "attention bench");
    AttentionCase a = attention_case(h, lengths, b.B, b.NH, b.HS, b.mask, b.p, 1.0);
    a.s = resident_sequences(h, a.s);
    device_set_attention(a.ctx, b.path);
    snprintf(suffix, sizeof suffix, " B=%d T=%d NH=%d HS=%d %s p=%g%s", b.B, b.T, b.NH, b.HS,
             b.mask == CAUSAL ? "CAUSAL" : "FULL", b.p, b.path == MATERIALIZED ? " materialized" : "");
    bench(h, suffix, attention_run_forward, &a);
    bench(h, suffix, attention_run_backward, &a);
    device_set_attention(a.ctx, FLASH);
    case_free(h);
}

static void bench_attention(Harness* h) {
    static const AttentionBench host[] = {{4, 256, 4, 32, CAUSAL, 0, FLASH},
                                          {4, 64, 12, 64, CAUSAL, 0, FLASH},
                                          {4, 1024, 12, 64, CAUSAL, 0, FLASH},
                                          {4, 1024, 12, 64, FULL, 0, FLASH},
                                          {4, 1024, 12, 64, CAUSAL, 0.1, FLASH}};
    static const AttentionBench device[] = {
        {32, 1024, 12, 64, CAUSAL, 0, FLASH},       {64, 1024, 12, 64, CAUSAL, 0, FLASH},
        {16, 1024, 25, 64, CAUSAL, 0, FLASH},       {32, 1024, 12, 64, CAUSAL, 0.1, FLASH},
        {256, 128, 16, 64, FULL, 0, FLASH},         {256, 128, 16, 64, FULL, 0.1, FLASH},
        {64, 512, 16, 64, FULL, 0, FLASH},          {64, 512, 16, 64, FULL, 0.1, FLASH},
        {8, 4096, 16, 128, CAUSAL, 0, FLASH},       {8, 1024, 12, 64, CAUSAL, 0, FLASH},
        {8, 1024, 12, 64, CAUSAL, 0, MATERIALIZED}, {8, 1024, 12, 64, CAUSAL, 0.1, MATERIALIZED},
    };
    size_t count = HAS_DEVICE_MEMORY ? COUNT_OF(device) : COUNT_OF(host);
    for (size_t i = 0; i < count; i++) bench_attention_case(h, HAS_DEVICE_MEMORY ? device[i] : host[i]);
}

#endif
