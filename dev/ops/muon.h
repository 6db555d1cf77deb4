/* muon, on the cases of adamw. */
#ifndef DEV_OPS_MUON_H
#define DEV_OPS_MUON_H

#include "adamw.h"
#include "llmc/device/copies.h"
#include "llmc/muon/muon.h"

typedef struct {
    Optimizer o;  // first: what is shared finds it in `own`
    MuonGroup groups[4];
    MuonMatrix* host;  // of all groups
    MuonMatrices m;
} MuonCase;

// By S: matrices of four shapes; of odd ones; of d12's and of BERT-large's layers; of one small layer.
static const MuonGroup MUON_GROUPS[][4] = {
    {{96, 64, 0, 2, 2}, {64, 96, 0, 3, 3}, {64, 64, 0, 6, 6}, {5, 7, 0, 3, 3}},
    {{7, 5, 0, 3, 3}, {1, 9, 0, 2, 2}, {9, 1, 0, 2, 2}, {13, 13, 0, 1, 1}},
    {{768, 768, 0, 48, 48}, {3072, 768, 0, 12, 12}, {768, 3072, 0, 12, 12}},
    {{1024, 1024, 0, 96, 96}, {4096, 1024, 0, 24, 24}, {1024, 4096, 0, 24, 24}},
    {{256, 256, 0, 4, 4}, {1024, 256, 0, 1, 1}, {256, 1024, 0, 1, 1}},
};

static inline void muon_want_of(const OpCase* k, AdamWRefState state) {
    const MuonCase* c = OP_OWN(MuonCase);
    for (int i = 0; i < c->m.group_count; i++)
        muon_update_ref(state, c->o.norm, c->o.scale, c->host + c->groups[i].first, c->groups[i], c->o.h);
}

// What the order of sums in fp32 changes of an update, as a part of its norm, where floatX is narrow. The reference
// rounds X, A and B to floatX as launchers do. So an element differs only where another order takes a sum across the
// middle between two numbers, once in about 10,000 sums: by 2^-8 in bf16 and by 2^-11 in fp16, which five iterations
// enlarge by up to 3.4^5. Measured: 1.5e-3 in fp16 and 1.1e-2 in bf16 (H200).
static inline double muon_error(void) { return strcmp(FLOATX_NAME, "F16") == 0 ? 0.004 : 0.02; }

// Whether a weight decays cautiously depends on the sign of its O. Rounding in 16 bits moves an element of O by the
// part muon_error() of their RMS. Where five times that could change the sign, the weight is 0, which does not decay.
static inline void muon_make_sure(OpCase* k) {
    const Optimizer* o = OP_OWN(Optimizer);
    size_t n = k->params.n, bytes = n * sizeof(real);
    real *step = (real*)case_memory(k->h, 3 * bytes), *m = step + n, *v = m + n;
    memcpy(m, k->m.initial, bytes), memcpy(v, k->v.initial, bytes);
    muon_want_of(k, (AdamWRefState){step, m, v, k->g.host});
    for (int s = 0; s < o->count; s++) {
        size_t begin = o->spans[s].offset, end = begin + o->spans[s].size;
        double sum = 0;
        for (size_t e = begin; e < end; e++) sum += (double)step[e] * (double)step[e];
        double least = 5 * muon_error() * sqrt(sum / (double)(end - begin));
        for (size_t e = begin; e < end; e++)
            if (fabs((double)step[e]) < least) k->params.initial[e] = k->master.initial[e] = 0;
    }
    array_restore(k->params), array_restore(k->master);
}

// Matrices of a group are adjacent, and every other one decays. Kind 1: NorMuon.
OP_FN(muon_prepare) {
    MuonCase* c = (MuonCase*)case_memory(k->h, sizeof *c);
    size_t end = 128;
    int count = 0, at = 0;
    memcpy(c->groups, MUON_GROUPS[k->S], sizeof c->groups);
    for (int i = 0; i < 4; i++) count += c->groups[i].count, c->m.group_count += c->groups[i].count > 0;
    c->host = (MuonMatrix*)case_memory(k->h, (size_t)count * sizeof *c->host);
    ParamSpan* spans = (ParamSpan*)case_memory(k->h, (size_t)count * sizeof *spans);
    for (int i = 0; i < c->m.group_count; i++) {
        MuonGroup* g = &c->groups[i];
        g->first = at, end = round_up(end, 128);
        for (int n = 0; n < g->count; n++, at++, end += muon_elements(*g)) {
            c->host[at].offset = spans[at].offset = end, spans[at].size = muon_elements(*g);
            c->host[at].decay = n % 2 == 0;
        }
    }
    CHECK((size_t)k->n == round_up(end + 1, 128));
    optimizer_start(k, &c->o, spans, count);
    c->o.has_master = OPTIMIZER_HAS_MASTER;
    c->o.h.lr = 0.02, c->o.h.muon.momentum = 0.95, c->o.h.muon.is_normuon = k->kind;
    optimizer_set_step(k, c->o.h);
    if (c->o.h.cautious && sizeof(floatX) < sizeof(real)) muon_make_sure(k);
    c->m.matrices = (MuonMatrix*)resident(k->h, c->host, (size_t)count * sizeof *c->host);
    c->m.groups = c->groups;
    void* space = case_block(k->h, muon_space_bind(NULL, NULL, c->groups, c->m.group_count), ON_DEVICE);
    muon_space_bind(&c->m.space, space, c->groups, c->m.group_count);
}

OP_FN(muon_run) { muon_update(optimizer_state(k), &OP_OWN(MuonCase)->m, OP_OWN(Optimizer)->h, k->ctx); }

OP_FN(muon_want) { muon_want_of(k, optimizer_want(k)); }

// The parameters in full precision.
static inline Array muon_weights(const OpCase* k) { return OP_OWN(Optimizer)->has_master ? k->master : k->params; }

// In full precision an update is as exact as the rounding of the parameter that it changes. In 16 bits its error is
// judged by the norm of each matrix's update.
OP_FN(muon_after) {
    const Optimizer* o = OP_OWN(Optimizer);
    int is_exact = sizeof(floatX) == sizeof(real) || !isfinite(o->norm);
    const real* got = muon_weights(k).host;
    optimizer_after(k);
    k->params.slack = k->master.slack = sizeof(real) == sizeof(double) ? 1e-13 : is_exact ? 0 : 1;
    k->v.slack = is_exact ? 0 : 0.01;  // of elements of O^2, whose mean is 1 / l
    for (int s = 0; s < o->count && !is_exact; s++) {
        double error = 0, norm = 0;
        for (size_t e = o->spans[s].offset; e < o->spans[s].offset + o->spans[s].size; e++) {
            double want = (double)k->params.want[e];
            error += pow((double)got[e] - want, 2), norm += pow(want - (double)k->params.initial[e], 2);
        }
        expect_within(k->h, "error of a matrix's update", sqrt(error / norm), 0, muon_error());
    }
}

enum { MUON_EVEN_SIZE = 55552, MUON_ODD_SIZE = 768 };
static const int MUON_SIZES[][3] = {{MUON_EVEN_SIZE, 0, 0}, {MUON_EVEN_SIZE, 1, 0}, {MUON_EVEN_SIZE, 3, 0},
                                    {MUON_EVEN_SIZE, 4, 0}, {MUON_ODD_SIZE, 1, 1},  {MUON_ODD_SIZE, 2, 1},
                                    {MUON_ODD_SIZE, 5, 1}};
static const int MUON_GPU[][3] = {{84934912, 0, 2}, {301990144, 0, 3}}, MUON_CPU[][3] = {{786688, 0, 4}};

static const Op MUON = {OP_OF("muon", "n M S", OPTIMIZER_ARGS, MUON_SIZES), OP_BENCH(MUON_GPU, MUON_CPU),
                        .passes = {{"update", OPTIMIZER_WRITES, muon_run, muon_want, NULL, muon_after}},
                        .prepare = muon_prepare, .kinds = {"Muon", "NorMuon"}};

// ---------------------------------------------------------------------------------------------------------
// Values that do not come from the reference

// Orthogonalize x, one matrix of rows x cols, by the launcher and by the reference.
static inline void muon_run_iterations(Harness* h, double* got, double* reference, const double* x, int rows,
                                       int cols) {
    const MuonGroup group = {rows, cols, 0, 1, 1};
    const MuonChunk chunk = {NULL, rows, cols, 1, 1};
    MuonSpace space;
    size_t n = muon_elements(group);
    muon_space_bind(&space, case_block(h, muon_space_bind(NULL, NULL, &group, 1), ON_DEVICE), &group, 1);
    HostView in = host_view_open(space.x, n, VIEW_FLOATX);
    for (size_t i = 0; i < n; i++) in.values[i] = (real)(reference[i] = x[i]);
    host_view_write(&h->ctx, &in);
    host_view_close(&in);
    muon_orthogonalize_ref(reference, rows, cols);
    HostView out = host_view_open((void*)muon_orthogonalize(&space, chunk, &h->ctx), n, VIEW_FLOATX);
    host_view_read(&h->ctx, &out);
    for (size_t i = 0; i < n; i++) got[i] = (double)out.values[i];
    host_view_close(&out);
}

// P diag(s) Q^T, rows x cols, with two reflections P and Q becomes P diag(f(s)) Q^T.
static inline void test_muon_values(Harness* h) {
    enum { SIDE = 9, VALUES = 5 };
    static const double S[] = {1, 0.5, 0.1, 0.01, 0.001};
    static const double NEWTON_SCHULZ[] = {0.696436, 0.765439, 0.712120, 0.698917, 0.470544};
    static const int SHAPES[][2] = {{VALUES, SIDE}, {SIDE, VALUES}, {VALUES, VALUES}};
    for (size_t shape = 0; shape < COUNT_OF(SHAPES); shape++) {
        int rows = SHAPES[shape][0], cols = SHAPES[shape][1];
        double in[SIDE * SIDE] = {0}, want[SIDE * SIDE] = {0}, out[SIDE * SIDE], ref[SIDE * SIDE];
        case_begin(h, "muon/orthogonalize %d x %d with singular vectors", rows, cols);
        for (int i = 0; i < rows * cols; i++)
            for (int k = 0; k < VALUES; k++) {
                int r = i / cols, c = i % cols;
                double p = (r == k) - 2.0 / rows * (r % 2 ? -1 : 1) * (k % 2 ? -1 : 1), q = (c == k) - 2.0 / cols;
                in[i] += p * S[k] * q, want[i] += p * NEWTON_SCHULZ[k] * q;
            }
        muon_run_iterations(h, out, ref, in, rows, cols);
        // In 16 bits the smallest singular value is lost, which is below the rounding of the others.
        for (int i = 0; i < rows * cols; i++) {
            if (sizeof(floatX) < sizeof(real)) expect_within(h, "launcher", out[i], ref[i], 0.02);
            else expect_within(h, "launcher", out[i], want[i], 2e-5);
            if (sizeof(floatX) == sizeof(real)) expect_within(h, "reference", ref[i], want[i], 1e-6);  // of six digits
        }
        case_end(h);
    }
}

// NorMuon's first step, from v = 0, keeps the update's norm, and gives all parts of the longer side the same norm.
static inline void test_normuon(Harness* h, int rows, int cols) {
    enum { S = 24, L = 40 };
    double o[S * L], norm[L] = {0}, before = 0, after = 0;
    real v[L] = {0};
    case_begin(h, "muon/NorMuon of %d x %d", rows, cols);
    for (int i = 0; i < S * L; i++) {
        o[i] = rng_normal(h->key, h->drawn++) * (1 + i % cols % 3 + i / cols % 4);
        before += o[i] * o[i];
    }
    muon_normalize_ref(o, v, rows, cols);
    for (int i = 0; i < S * L; i++) after += o[i] * o[i], norm[rows == L ? i / cols : i % cols] += o[i] * o[i];
    expect_within(h, "norm", after / before, 1, 1e-6);
    for (int l = 0; l < L; l++) expect_within(h, "a part's norm", norm[l] * L / after, 1, 1e-5);
    case_end(h);
}

static inline OpCase* muon_case(Harness* h, const int* row, int is_normuon) {
    OpWay way = {SET, SET, is_normuon, 0, 0};
    return op_case(h, &MUON, MUON.passes, row, way);
}

// Gradients of zero move nothing, tiny ones do.
static inline void test_muon_zeros(Harness* h, int is_normuon) {
    OpCase* k = muon_case(h, MUON_SIZES[0], is_normuon);
    const Array w = muon_weights(k);
    size_t odd = 0, moved = 0;
    real* g = copy_of(h, k->g);
    OP_OWN(Optimizer)->h.weight_decay = 0;
    array_clear(k->m), array_clear(k->v), array_clear(k->g);
    muon_run(k);
    expect_equal(h, "gradients of zero", w, w.initial);
    for (size_t i = 0; i < k->g.n; i++) k->g.host[i] = (real)(1e-9 * g[i]);
    array_upload_real(k->g);
    muon_run(k);
    array_download(w), array_download(k->v);
    for (size_t i = 0; i < w.n; i++) {
        odd += !is_finite_number((double)w.host[i]) || !is_finite_number((double)k->v.host[i]);
        moved += w.host[i] != w.initial[i];
    }
    expect_true(h, "all finite", odd == 0);
    expect_true(h, "tiny gradients move", moved > w.n / 2);
    case_end(h);
}

static inline void test_muon_rounded(Harness* h) {
    OpCase* k = muon_case(h, MUON_SIZES[4], 0);
    muon_run(k);
    real* want = copy_of(h, k->master);
    array_restore(k->params), array_restore(k->m);
    OP_OWN(Optimizer)->has_master = 0;
    muon_run(k);
    array_download(k->params);
    optimizer_expect_keyed(k, want);
    case_end(h);
}

#if defined(__CUDACC__) && (defined(PRECISION_BF16) || defined(PRECISION_FP16))
// The kernel for symmetric products against cuBLASLt's, on tiles of all kinds: several, cut ones, several matrices.
static inline void test_muon_symmetric(Harness* h) {
    // s, k, matrices, x^T is stored
    static const int SIZES[][4] = {{64, 96, 3, 0}, {200, 128, 2, 1}, {136, 72, 5, 0}, {1024, 256, 30, 1}};
    for (size_t i = 0; i < COUNT_OF(SIZES) && h->ctx.capability == 90; i++)
        for (int adds = 0; adds < 2; adds++) {
            int s = SIZES[i][0], k = adds ? s : SIZES[i][1], count = SIZES[i][2], is_tall = !adds && SIZES[i][3];
            if (case_is_left_out(h, (double)count * s * k)) continue;
            case_begin(h, "muon/symmetric product of %d x [%d,%d]%s%s", count, s, k, is_tall ? " transposed" : "",
                       adds ? ", added" : "");
            size_t n = (size_t)count * (size_t)s * (size_t)s;
            Array x = input(h, (size_t)count * (size_t)s * (size_t)k, 1 / sqrt((double)k));
            Array got = output(h, n, SET), other = output(h, n, SET);
            SymmetricProduct z = {got.device, x.device, NULL, s, k, count, is_tall, 1, 0};
            BatchMatrix xs = muon_operand(x.device, is_tall ? k : s, is_tall ? s : k, CUBLAS_OP_N), xt = xs,
                        want = muon_operand(other.device, s, s, CUBLAS_OP_N);
            BatchSize size = {s, s, k, count, count};
            xt.layout.op = CUBLAS_OP_T;
            batched_product(want, is_tall ? xt : xs, is_tall ? xs : xt, size, 1, &h->ctx);
            if (adds) {  // (x x^T)^2 and a part of it; x x^T is symmetric
                Array square = output(h, n, SET);
                BatchMatrix sum = muon_operand(square.device, s, s, CUBLAS_OP_N);
                batched_product_add(sum, want, want, size, 0.5f, want.p, -0.75f, &h->ctx);
                z.x = z.d0 = (const floatX*)want.p, z.alpha = 0.5f, z.beta = -0.75f;
                other = square;
            }
            expect_true(h, "runs", muon_symmetric(z, &h->ctx));
            array_download(got), array_download(other);
            size_t odd = 0;
            for (size_t e = 0; e < n; e++) {
                size_t m = e / (size_t)(s * s), r = e / (size_t)s % (size_t)s, c = e % (size_t)s;
                odd += got.host[e] != got.host[(m * (size_t)s + c) * (size_t)s + r];
            }
            expect_true(h, "symmetric, bit for bit", odd == 0);
            // Both round a sum in fp32 once.
            expect_close(h, "the product", got, other.host, 2 * array_rounding(got));
            case_end(h);
        }
}
#endif

static inline void test_muon(Harness* h) {
    test_muon_values(h);
#if defined(__CUDACC__) && (defined(PRECISION_BF16) || defined(PRECISION_FP16))
    test_muon_symmetric(h);
#endif
    test_normuon(h, 40, 24), test_normuon(h, 24, 40);
    for (int is_normuon = 0; is_normuon < 2; is_normuon++) test_muon_zeros(h, is_normuon);
    if (OPTIMIZER_HAS_MASTER) test_muon_rounded(h);
    case_begin(h, "muon/scale");
    expect_within(h, "tall", muon_scale(3072, 768), 11.085126, 1e-6);
    case_end(h);
}

#endif
