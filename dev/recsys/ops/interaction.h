/* Dot interaction of DLRM: the pairwise dot products of a sample's feature vectors. The embedding gather is fused in.
 *
 *   forward    T = [bottom; table[rows[0]]; ...; table[rows[tables - 1]]]          one sample's vectors [tables + 1, E]
 *              z = [T_0 (E) | T_i . T_j for 0 <= j < i <= tables, at i (i - 1) / 2 + j | zeros up to `width`]
 *   backward   S_ij = S_ji = gradient of T_i . T_j, S_ii = 0;   dT = S T;   dT_0 += dz[0 .. E - 1]
 *              dbottom = dT_0 where bottom > 0, else 0: bottom is the output of a ReLU
 *              dvectors = dT_1 .. dT_tables: a row for each lookup, which embedding_rows.h sums
 *
 *   mask       z = 0 at the pairs of two tables, i > j >= 1: without them no two tables interact. Both passes use it
 *
 * Shapes: bottom, dbottom [B, E], table [all rows, E], rows [B, tables] row numbers in `table`, z, dz [B, width],
 * dvectors [B, tables, E]. All outputs are SET. Vectors are gathered in both passes: keeping them would cost as much.
 * dtypes: floatX; rows int.
 * Numerics: dot products and dT accumulate in real (CPU), fp32 (GPU, on tensor cores if floatX has 16 bits).
 * Errors: row numbers must be in range; whoever loads a batch checks them.
 * Source: Naumov et al., arXiv 1906.00091; layout as in NVIDIA's DeepLearningExamples. */
#ifndef DEV_RECSYS_OPS_INTERACTION_H
#define DEV_RECSYS_OPS_INTERACTION_H

#include "llmc/device/scope.h"
#ifdef __CUDACC__
#include "llmc/device/cuda_utils.cuh"
#include "llmc/device/ptx/mma.cuh"
#endif

typedef struct {
    int B, tables, E, width;
} InteractionShape;

#define INTERACTION_PAIRS(tables) ((tables) * ((tables) + 1) / 2)
// Below the diagonal only. The backward pass multiplies the full symmetric matrix.
#define INTERACTION_FORWARD_FLOPS(s) (2.0 * (s).B * INTERACTION_PAIRS((s).tables) * (s).E)
#define INTERACTION_BACKWARD_FLOPS(s) (2 * INTERACTION_FORWARD_FLOPS(s))
#define INTERACTION_FORWARD_BYTES(s)                                                                                   \
    ((double)(s).B * ((((s).tables + 1.0) * (s).E + (s).width) * sizeof(floatX) + (s).tables * sizeof(int)))
#define INTERACTION_BACKWARD_BYTES(s)                                                                                  \
    ((double)(s).B * ((2 * ((s).tables + 1.0) * (s).E + (s).width) * sizeof(floatX) + (s).tables * sizeof(int)))

#define INTERACTION_MASK_BYTES(s) ((double)(s).B * ((s).tables * ((s).tables - 1) / 2) * sizeof(floatX))

// The width of z: the bottom vector and all pairs, rounded up to a multiple of 8 elements.
static inline int interaction_width(int tables, int E) {
    return (int)round_up((size_t)(E + INTERACTION_PAIRS(tables)), 8);
}

// ---------------------------------------------------------------------------------------------------------
// References

// Vector i of sample b.
static inline const real* interaction_vector(const real* bottom, const real* table, const int* rows, InteractionShape s,
                                             int b, int i) {
    size_t row = i ? (size_t)rows[(size_t)b * (size_t)s.tables + (size_t)i - 1] : (size_t)b;
    return (i ? table : bottom) + row * (size_t)s.E;
}

static inline void interaction_forward_ref(real* z, const real* bottom, const real* table, const int* rows,
                                           InteractionShape s) {
    for (int b = 0; b < s.B; b++) {
        real* out = z + (size_t)b * (size_t)s.width;
        memcpy(out, bottom + (size_t)b * (size_t)s.E, (size_t)s.E * sizeof *out);
        out += s.E;
        for (int i = 1; i <= s.tables; i++)
            for (int j = 0; j < i; j++) {
                const real *x = interaction_vector(bottom, table, rows, s, b, i),
                           *y = interaction_vector(bottom, table, rows, s, b, j);
                double sum = 0;
                for (int e = 0; e < s.E; e++) sum += (double)x[e] * (double)y[e];
                *out++ = (real)sum;
            }
        while (out < z + (size_t)(b + 1) * (size_t)s.width) *out++ = 0;
    }
}

// The first and the end of the columns of z that hold T_i . T_j for 1 <= j < i.
HOST_DEVICE static inline int interaction_masked_begin(InteractionShape s, int i) { return s.E + i * (i - 1) / 2 + 1; }
HOST_DEVICE static inline int interaction_masked_end(InteractionShape s, int i) { return s.E + i * (i + 1) / 2; }

// What a backward pass reads and writes, and the same in full precision for the reference.
typedef struct {
    floatX *dbottom, *dvectors;
    const floatX *dz, *bottom, *table;
    const int* rows;
} InteractionBackward;

typedef struct {
    real *dbottom, *dvectors;
    const real *dz, *bottom, *table;
    const int* rows;
} InteractionBackwardRef;

static inline void interaction_backward_ref(InteractionBackwardRef g, InteractionShape s) {
    for (int b = 0; b < s.B; b++) {
        const real *dz = g.dz + (size_t)b * (size_t)s.width, *pairs = dz + s.E;
        for (int i = 0; i <= s.tables; i++)
            for (int e = 0; e < s.E; e++) {
                double sum = i ? 0 : (double)dz[e];
                for (int j = 0; j <= s.tables; j++) {
                    int high = max_int(i, j), low = min_int(i, j);
                    if (i == j) continue;
                    sum += (double)pairs[high * (high - 1) / 2 + low] *
                           (double)interaction_vector(g.bottom, g.table, g.rows, s, b, j)[e];
                }
                size_t at = (size_t)b * (size_t)s.E + (size_t)e;
                if (i == 0) g.dbottom[at] = g.bottom[at] > 0 ? (real)sum : 0;
                else g.dvectors[((size_t)b * (size_t)s.tables + (size_t)i - 1) * (size_t)s.E + (size_t)e] = (real)sum;
            }
    }
}

#ifdef __CUDACC__
#include "dev/recsys/ops/interaction.cuh"
#else
// ---------------------------------------------------------------------------------------------------------
// CPU: a sample belongs to one thread, so the number of threads changes no bit

static inline void interaction_forward(floatX* z, const floatX* bottom, const floatX* table, const int* rows,
                                       InteractionShape s, Context* ctx) {
    Scope scope = scope_open(ctx, "interaction_forward", INTERACTION_FORWARD_FLOPS(s), INTERACTION_FORWARD_BYTES(s),
                             "B=%d tables=%d E=%d", s.B, s.tables, s.E);
#pragma omp parallel for schedule(static)
    for (int b = 0; b < s.B; b++) {
        real* out = z + (size_t)b * (size_t)s.width;
        memcpy(out, bottom + (size_t)b * (size_t)s.E, (size_t)s.E * sizeof *out);
        out += s.E;
        for (int i = 1; i <= s.tables; i++)
            for (int j = 0; j < i; j++) {
                const real *x = interaction_vector(bottom, table, rows, s, b, i),
                           *y = interaction_vector(bottom, table, rows, s, b, j);
                real sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int e = 0; e < s.E; e++) sum += x[e] * y[e];
                *out++ = sum;
            }
        while (out < z + (size_t)(b + 1) * (size_t)s.width) *out++ = 0;
    }
    scope_close(&scope);
}

static inline void interaction_mask(floatX* z, InteractionShape s, Context* ctx) {
    Scope scope = scope_open(ctx, "interaction_mask", 0, INTERACTION_MASK_BYTES(s), "B=%d tables=%d", s.B, s.tables);
#pragma omp parallel for schedule(static)
    for (int b = 0; b < s.B; b++)
        for (int i = 2; i <= s.tables; i++)
            for (int k = interaction_masked_begin(s, i); k < interaction_masked_end(s, i); k++)
                z[(size_t)b * (size_t)s.width + (size_t)k] = 0;
    scope_close(&scope);
}

static inline void interaction_backward(InteractionBackward g, InteractionShape s, Context* ctx) {
    Scope scope = scope_open(ctx, "interaction_backward", INTERACTION_BACKWARD_FLOPS(s), INTERACTION_BACKWARD_BYTES(s),
                             "B=%d tables=%d E=%d", s.B, s.tables, s.E);
#pragma omp parallel for schedule(static)
    for (int b = 0; b < s.B; b++) {
        const real *dz = g.dz + (size_t)b * (size_t)s.width, *pairs = dz + s.E;
        size_t first = (size_t)b * (size_t)s.tables * (size_t)s.E;
        for (int i = 0; i <= s.tables; i++) {
            real* dx = i ? g.dvectors + first + (size_t)(i - 1) * (size_t)s.E : g.dbottom + (size_t)b * (size_t)s.E;
            for (int e = 0; e < s.E; e++) dx[e] = i ? 0 : dz[e];
            for (int j = 0; j <= s.tables; j++) {
                if (i == j) continue;
                int high = max_int(i, j), low = min_int(i, j);
                const real d = pairs[high * (high - 1) / 2 + low],
                           *x = interaction_vector(g.bottom, g.table, g.rows, s, b, j);
                for (int e = 0; e < s.E; e++) dx[e] += d * x[e];
            }
        }
        for (size_t e = (size_t)b * (size_t)s.E; e < (size_t)(b + 1) * (size_t)s.E; e++)
            if (!(g.bottom[e] > 0)) g.dbottom[e] = 0;
    }
    scope_close(&scope);
}
#endif
#endif
