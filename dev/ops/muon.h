/* muon: tests; muon_bench.h times it. */
#ifndef DEV_OPS_MUON_H
#define DEV_OPS_MUON_H

#include "adamw.h"
#include "llmc/device/copies.h"
#include "llmc/muon/muon.h"
#include "muon_bench.h"

typedef struct {
    AdamWCase* k;
    MuonGroup groups[4];
    MuonMatrix* host;  // of all groups
    MuonMatrices m;
    int count;
} MuonCase;

static inline void muon_run(void* state) {
    MuonCase* c = (MuonCase*)state;
    muon_update(adamw_state(c->k, c->k->h), &c->m, c->k->h, c->k->ctx);
}

static inline void muon_want(AdamWCase* k, AdamWRefState reference) {
    const MuonCase* c = (const MuonCase*)k->state;
    for (int i = 0; i < c->m.group_count; i++)
        muon_update_ref(reference, k->norm, 1, c->host + c->groups[i].first, c->groups[i], k->h);
}

// Matrices of up to four shapes {rows, cols, first, count, model_count}, of which those of a group are adjacent. The
// parameters begin as W, the momentum and NorMuon's second moments are not 0.
static inline MuonCase* muon_case(Harness* h, const MuonGroup* groups, int group_count) {
    MuonCase* c = (MuonCase*)case_memory(h, sizeof *c);
    size_t n = 128;
    memcpy(c->groups, groups, (size_t)group_count * sizeof *groups);
    for (int i = 0; i < group_count; i++) c->count += groups[i].count;
    c->host = (MuonMatrix*)case_memory(h, (size_t)c->count * sizeof *c->host);
    for (int i = 0, at = 0; i < group_count; i++) {
        c->groups[i].first = at;
        n = round_up(n, 128);
        for (int k = 0; k < groups[i].count; k++, n += muon_elements(groups[i])) {
            MuonMatrix matrix = {n, (float)(k % 2 == 0)};
            c->host[at++] = matrix;
        }
    }
    ParamSpan* spans = (ParamSpan*)case_memory(h, (size_t)c->count * sizeof *spans);
    for (int i = 0; i < group_count; i++)
        for (int k = c->groups[i].first; k < c->groups[i].first + groups[i].count; k++)
            spans[k].offset = c->host[k].offset, spans[k].size = muon_elements(groups[i]);
    c->k = adamw_case(h, round_up(n + 1, 128), spans, c->count);
    c->k->run = muon_run, c->k->state = c, c->k->want = muon_want;
    c->k->h.lr = 0.02;
    c->k->h.muon.momentum = 0.95;
    c->m.matrices = (MuonMatrix*)resident(h, c->host, (size_t)c->count * sizeof *c->host);
    c->m.groups = c->groups, c->m.group_count = group_count;
    void* space = case_block(h, muon_space_bind(NULL, NULL, c->groups, group_count), ON_DEVICE);
    muon_space_bind(&c->m.space, space, c->groups, group_count);
    return c;
}

// The parameters in full precision.
static inline Array muon_weights(const MuonCase* c) { return c->k->has_master ? c->k->master : c->k->p; }

// What the order of sums in fp32 changes of an update, as a part of its norm. In full precision five iterations enlarge
// its roundings by up to 3.4^5. The reference rounds X, A and B to floatX as launchers do. So in 16 bits an element
// differs only where another order takes a sum across the middle between two numbers, once in about 10,000 sums: by
// 2^-8 in bf16 and by 2^-11 in fp16, enlarged as above.
// Measured: 1.2e-6 in fp32, 1.5e-3 in fp16 and 1.1e-2 in bf16 (H200).
static inline double muon_error(void) {
    if (sizeof(floatX) == sizeof(real)) return sizeof(real) == sizeof(double) ? 1e-12 : 4e-6;
    return strcmp(FLOATX_NAME, "F16") == 0 ? 0.004 : 0.02;
}

// The distance of n numbers from others, as a part of the others' distance from where they began; from 0: NULL.
static inline double muon_distance(const real* a, const real* b, const real* begin, size_t n) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < n; i++) {
        double d = (double)a[i] - (double)b[i], u = (double)b[i] - (begin ? (double)begin[i] : 0);
        error += d * d, norm += u * u;
    }
    return sqrt(error / norm);
}

// The error of an update of each matrix against the reference's, `want`, as a part of the update's norm.
static inline void muon_expect_updates(Harness* h, const MuonCase* c, const real* want) {
    Array got = muon_weights(c);
    array_download(got);
    for (int i = 0; i < c->m.group_count; i++)
        for (int k = 0; k < c->groups[i].count; k++) {
            size_t begin = c->host[c->groups[i].first + k].offset, n = muon_elements(c->groups[i]);
            double error = muon_distance(got.host + begin, want + begin, got.initial + begin, n);
            char what[64];
            snprintf(what, sizeof what, "update %d of %d x %d", k, c->groups[i].rows, c->groups[i].cols);
            expect_within(h, what, error, 0, muon_error());
        }
}

// Whether a weight decays cautiously depends on the sign of its O. Rounding in 16 bits moves an element of O by the
// part muon_error() of their RMS. Where five times that could change the sign, `want` becomes the closer one of the
// updates with and without decay.
static inline void muon_accept_either_decay(Harness* h, const MuonCase* c, real* want) {
    Array got = muon_weights(c);
    const OptimizerSettings kept = c->k->h;
    real* way[2];
    array_download(got);
    for (int decays = 0; decays < 2; decays++) {
        real *m = (real*)case_memory(h, got.n * sizeof *m), *v = (real*)case_memory(h, got.n * sizeof *v);
        AdamWRefState reference = {way[decays] = (real*)case_memory(h, got.n * sizeof(real)), m, v, c->k->g.host};
        memcpy(way[decays], got.initial, got.n * sizeof(real));
        memcpy(m, c->k->m.initial, got.n * sizeof *m), memcpy(v, c->k->v.initial, got.n * sizeof *v);
        c->k->h.cautious = 0, c->k->h.weight_decay = decays * kept.weight_decay;
        muon_want(c->k, reference);
        c->k->h = kept;
    }
    for (int i = 0; i < c->m.group_count; i++)
        for (int k = 0; k < c->groups[i].count; k++) {
            size_t begin = c->host[c->groups[i].first + k].offset, n = muon_elements(c->groups[i]);
            double sum = 0;
            for (size_t e = begin; e < begin + n; e++) {
                double u = (double)way[0][e] - (double)got.initial[e];
                sum += u * u;
            }
            for (size_t e = begin; e < begin + n; e++) {
                double u = (double)way[0][e] - (double)got.initial[e], x = (double)got.host[e];
                if (fabs(u) > 5 * muon_error() * sqrt(sum / (double)n)) continue;
                want[e] = fabs(x - (double)way[0][e]) < fabs(x - (double)way[1][e]) ? way[0][e] : way[1][e];
            }
        }
}

static inline void muon_check(Harness* h, MuonCase* c) {
    AdamWCase* k = c->k;
    // In full precision an update is as exact as the rounding of the parameter that it changes.
    if (sizeof(floatX) == sizeof(real)) {
        adamw_check(h, k, sizeof(real) == sizeof(double) ? 1e-13 : tolerance(1e-6));
        return;
    }
    AdamWRefState want = adamw_wanted(h, k);
    size_t touched = 0;
    adamw_run_for_any_threads(h, k);
    if (k->h.cautious) muon_accept_either_decay(h, c, want.params);
    muon_expect_updates(h, c, want.params);
    expect_close(h, "m", k->m, want.m, tolerance(5e-7));
    expect_close(h, "v", k->v, want.v, 0.01);  // of elements of O^2, whose mean is 1 / l
    array_download(k->p);
    for (int i = 0; i < ADAMW_WRITTEN; i++) touched += adamw_touched(k, adamw_written(k, i));
    expect_true(h, "what lies between matrices keeps its bits", touched == 0);
}

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

// Without momentum, decay and clipping, from parameters of 0: they become -O times the rate, by which O is returned.
static inline real* muon_direction_of(Harness* h, const real* g, int rows, int cols, int is_normuon) {
    const MuonGroup group = {rows, cols, 0, 1, 1};
    MuonCase* c = muon_case(h, &group, 1);
    AdamWCase* k = c->k;
    size_t n = muon_elements(group), begin = c->host->offset;
    k->h.weight_decay = 0, k->h.max_norm = 0, k->h.muon.momentum = 0, k->h.muon.is_normuon = is_normuon;
    k->h.lr = 1 / muon_scale(rows, cols);
    array_clear(k->p), array_clear(k->master), array_clear(k->m), array_clear(k->v);
    memcpy(k->g.host + begin, g, n * sizeof(real));
    array_upload_real(k->g);
    muon_run(c);
    real* o = copy_of(h, muon_weights(c)) + begin;
    for (size_t i = 0; i < n; i++) o[i] = -o[i];
    return o;
}

static inline void test_muon_normuon(Harness* h) {
    static const int SHAPES[][2] = {{40, 24}, {24, 40}, {24, 24}};
    for (size_t i = 0; i < COUNT_OF(SHAPES); i++) {
        int rows = SHAPES[i][0], cols = SHAPES[i][1];
        size_t n = (size_t)(rows * cols);
        case_begin(h, "muon/update NorMuon of %d x %d", rows, cols);
        real* g = copy_of(h, input(h, n, 0.3));
        for (int e = 0; e < rows * cols; e++) g[e] *= (real)(1 + e % cols % 3 + e / cols % 4);
        real *plain = muon_direction_of(h, g, rows, cols, 0), *scaled = muon_direction_of(h, g, rows, cols, 1);
        double norm = 0, norm_scaled = 0, least = INFINITY, most = 0;
        expect_true(h, "changes the update", muon_distance(scaled, plain, NULL, n) > 0.02);
        for (size_t e = 0; e < n; e++)
            norm += (double)plain[e] * plain[e], norm_scaled += (double)scaled[e] * scaled[e];
        expect_within(h, "keeps its norm", sqrt(norm_scaled / norm), 1, 1e-5);
        // After the first step, from v = 0, every row or column has the same norm.
        for (int l = 0; l < max_int(rows, cols); l++) {
            double sum = 0;
            for (int s = 0; s < min_int(rows, cols); s++) {
                double x = (double)scaled[rows >= cols ? l * cols + s : s * cols + l];
                sum += x * x;
            }
            least = fmin(least, sum), most = fmax(most, sum);
        }
        expect_within(h, "equal norms along the longer side", most / least, 1, 1e-5);
        case_end(h);
    }
}

// ---------------------------------------------------------------------------------------------------------
// The update

static const MuonGroup MUON_GROUPS[] = {{96, 64, 0, 2, 2}, {64, 96, 0, 3, 3}, {64, 64, 0, 6, 6}, {5, 7, 0, 3, 3}};
static const MuonGroup MUON_ODD[] = {{7, 5, 0, 3, 3}, {1, 9, 0, 2, 2}, {9, 1, 0, 2, 2}, {13, 13, 0, 1, 1}};

static inline void test_muon_zeros(Harness* h) {
    for (int is_normuon = 0; is_normuon < 2; is_normuon++) {
        case_begin(h, "muon/update gradients of zero, then tiny ones%s", is_normuon ? ", NorMuon" : "");
        MuonCase* c = muon_case(h, MUON_GROUPS, COUNT_OF(MUON_GROUPS));
        AdamWCase* k = c->k;
        real* g = copy_of(h, k->g);
        k->h.weight_decay = 0, k->h.muon.is_normuon = is_normuon;
        array_clear(k->m), array_clear(k->v), array_clear(k->g);
        muon_run(c);
        expect_equal(h, "params do not move", k->p, k->p.initial);
        if (ADAMW_HAS_MASTER) expect_equal(h, "master does not move", k->master, k->master.initial);
        for (int step = 1; step < 10; step++) {
            for (size_t i = 0; i < k->g.n; i++) k->g.host[i] = (real)(step > 2 ? 1e-9 * g[i] : 0);
            array_upload_real(k->g);
            muon_run(c);
        }
        Array w = muon_weights(c);
        array_download(w), array_download(k->v);
        size_t odd = 0, moved = 0;
        for (size_t i = 0; i < w.n; i++) {
            odd += !is_finite_number((double)w.host[i]) || !is_finite_number((double)k->v.host[i]);
            moved += w.host[i] != w.initial[i];
        }
        expect_true(h, "all finite", odd == 0);
        expect_true(h, "tiny gradients move", moved > w.n / 2);
        case_end(h);
    }
}

// The matrices in two lists, as two ranks have them: the same bits.
static inline void test_muon_shards(Harness* h) {
    case_begin(h, "muon/update in shards");
    MuonCase* c = muon_case(h, MUON_GROUPS, COUNT_OF(MUON_GROUPS));
    AdamWCase* k = c->k;
    k->h.muon.is_normuon = 1;
    AdamWBits want = adamw_bits_after(h, k);
    for (int rank = 0; rank < 2; rank++) {
        for (size_t i = 0; i < COUNT_OF(MUON_GROUPS); i++) {
            c->groups[i].first += rank ? c->groups[i].count : 0;
            c->groups[i].count = rank ? MUON_GROUPS[i].count - 1 : 1;
        }
        muon_run(c);
    }
    adamw_expect_bits(h, k, want);
    case_end(h);
}

static inline void test_muon_rounded(Harness* h) {
    case_begin(h, "muon/update without master weights");
    MuonCase* c = muon_case(h, MUON_ODD, COUNT_OF(MUON_ODD));
    muon_run(c);
    real* want = copy_of(h, c->k->master);
    adamw_restore(c->k);
    c->k->has_master = 0;
    c->k->h.rounding = rng_stream(7, 1, 0, SITE_ROUNDING);
    muon_run(c);
    adamw_expect_keyed(h, c->k, want);
    case_end(h);
}

static inline AdamWCase* muon_usual_case(Harness* h) {
    AdamWCase* k = muon_case(h, MUON_GROUPS, 4)->k;
    k->h.muon.is_normuon = 1;
    return k;
}

#if defined(__CUDACC__) && (defined(PRECISION_BF16) || defined(PRECISION_FP16))
// The kernel for symmetric products against cuBLASLt's, on tiles of all kinds: several, cut ones, several matrices.
static inline void test_muon_symmetric(Harness* h) {
    static const int SIZES[][4] = {// s, k, matrices, x^T is stored
                                   {64, 96, 3, 0},   {200, 128, 2, 1},   {136, 72, 5, 0},
                                   {768, 768, 2, 0}, {1024, 256, 30, 1}, {1600, 6400, 1, 1}};
    for (size_t i = 0; i < COUNT_OF(SIZES); i++)
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
            if (h->ctx.capability == 90) expect_true(h, "runs", muon_symmetric(z, &h->ctx));
            else {
                expect_true(h, "is left to cuBLASLt", HOPPER_BUILD || !muon_symmetric(z, &h->ctx));
                case_end(h);
                continue;
            }
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
    test_muon_normuon(h);
    for (int way = 0; way < 16; way++) {
        int odd = way & 1, normuon = way >> 1 & 1, clipped = way >> 2 & 1, cautious = way >> 3;
        case_begin(h, "muon/update %s, %s, %s, %s shapes", normuon ? "NorMuon" : "Muon",
                   clipped ? "clipped" : "not clipped", cautious ? "cautious" : "plain decay", odd ? "odd" : "even");
        MuonCase* c = muon_case(h, odd ? MUON_ODD : MUON_GROUPS, 4);
        c->k->h.muon.is_normuon = normuon;
        c->k->h.cautious = cautious;
        c->k->h.max_norm = clipped;
        muon_check(h, c);
        case_end(h);
    }
    test_muon_zeros(h);
    test_muon_shards(h);
    if (ADAMW_HAS_MASTER) test_muon_rounded(h);

    test_optimizer(h, "muon", muon_usual_case);

    case_begin(h, "muon/momentum in its first steps, and scale");
    expect_within(h, "at the first step", muon_momentum_at(300, 0), 0.85, 1e-12);
    expect_within(h, "half way", muon_momentum_at(300, 150), 0.9, 1e-12);
    expect_within(h, "after it", muon_momentum_at(300, 300), 0.95, 0);
    expect_within(h, "without", muon_momentum_at(0, 0), 0.95, 0);
    expect_within(h, "tall", muon_scale(3072, 768), 11.085126, 1e-6);
    expect_within(h, "wide", muon_scale(768, 3072), 11.085126, 1e-6);
    case_end(h);
}

#endif
