/* The training step of NeuMF in one kernel: the `step` of ncf_fused.cuh, which describes all kernels. This file has
 * their sizes and parameters, the step's layout of shared memory, the products of a warp, the parts of a tile, and the
 * kernel. */
#ifndef DEV_RECSYS_OPS_NCF_STEP_CUH
#define DEV_RECSYS_OPS_NCF_STEP_CUH

#include "dev/recsys/ops/embedding_rows.h"
#include "dev/recsys/ops/linear_bce.h"
#include "dev/recsys/ops/matmul_relu.h"
#include "llmc/device/ptx/mma.cuh"

#if defined(__CUDACC__) && defined(PRECISION_BF16)

enum {
    NCF_F = 64,
    NCF_E = 128,
    NCF_H0 = 256,
    NCF_H1 = 128,
    NCF_H2 = 64,
    NCF_TILE = 64,  // samples
    NCF_THREADS = 256,
    NCF_STEP_THREADS = 512,  // of the step: 4 x 4 warps share each product
    NCF_STEP_WARPS = NCF_STEP_THREADS / WARP,
    NCF_SHARERS = NCF_STEP_THREADS / NCF_TILE,  // threads of a sample, in the last layer
    NCF_QUARTERS = NCF_STEP_THREADS / NCF_H1,   // parts of a tile's rows, in column sums
    NCF_SLOTS = 3,                              // tiles whose ids are in shared memory
    NCF_SKEW = 8,  // elements between rows in shared memory, so that ldmatrix has no bank conflicts
    NCF_ROW0 = NCF_H0 + NCF_SKEW,
    NCF_ROW1 = NCF_H1 + NCF_SKEW,
    NCF_ROW2 = NCF_H2 + NCF_SKEW,
    // A block's partial sums.
    NCF_DW1 = 0,
    NCF_DW2 = NCF_DW1 + NCF_H1 * NCF_H0,
    NCF_DB1 = NCF_DW2 + NCF_H2 * NCF_H1,
    NCF_DB2 = NCF_DB1 + NCF_H1,
    NCF_DW3 = NCF_DB2 + NCF_H2,  // of the part of the last layer that reads the MLP
    NCF_DB3 = NCF_DW3 + NCF_H2,
    NCF_PARTIAL = NCF_DB3 + 1,
    NCF_ROW_PARTIAL = NCF_H0 + NCF_F,  // db0, and the other part of the last layer
    NCF_ROW_BLOCKS = 4                 // per multiprocessor
};

// Everything that the kernels read and write, but for the tables' moments.
typedef struct {
    const floatX *user_products, *item_products, *mf_user, *mf_item;
    const floatX *b0, *w1, *b1, *w2, *b2, *w3, *b3;  // w3: last layer, factors first
    const int *users, *items;
    const real* labels;
    ReluDropout dropout[3];
    float scale;  // of the loss
    int B;
    floatX* dz0;
    float *dlogits, *partial, *row_partial;
    double* partial_loss;
} NcfStep;

// Shared memory of the step.
struct NcfShared {
    floatX w1[NCF_H1 * NCF_ROW0], w2[NCF_H2 * NCF_ROW1];
    floatX h0[2][NCF_TILE * NCF_ROW0];  // first the users' products; one of the two is loaded ahead
    floatX item[NCF_TILE * NCF_ROW0];
    floatX h1[NCF_TILE * NCF_ROW1];  // then dz1
    floatX h2[NCF_TILE * NCF_ROW2], dz2[NCF_TILE * NCF_ROW2];
    floatX b0[NCF_H0], b1[NCF_H1], b2[NCF_H2];
    float w3[NCF_F + NCF_H2], b3, dlogit[NCF_TILE];
    int users[NCF_SLOTS][NCF_TILE], items[NCF_SLOTS][NCF_TILE];
    float labels[NCF_SLOTS][NCF_TILE], dbias[NCF_TILE];  // sums over tiles: dbias, loss
    double loss[NCF_TILE];
    float sums[NCF_QUARTERS][2 * NCF_H1];  // of columns, over a quarter of the rows: db1, then dW3 and db2
};
static_assert(sizeof(NcfShared) + 1024 <= 227 * 1024, "shared memory of an sm_90 block, with that of block_sum()");

__device__ inline uint32_t ncf_shared(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// ---------------------------------------------------------------------------------------------------------
// Products of a warp from shared memory: c [16 MT, 8 NT] += a b. `row_...`: elements between stored rows.

// The fragment of the left operand at `p`: 16 rows m, 16 columns k, stored [m][k] or, transposed, [k][m].
template <bool TRANSPOSED> __device__ inline void ncf_load_a(uint32_t (&a)[4], const floatX* p, int row) {
    int lane = threadIdx.x % WARP;
    if constexpr (TRANSPOSED) ldmatrix_x4_trans(a, ncf_shared(p + (lane / 16 * 8 + lane % 8) * row + lane / 8 % 2 * 8));
    else ldmatrix_x4(a, ncf_shared(p + lane % 16 * row + lane / 16 * 8));
}

// The fragments of the right operand at `p`: 16 rows k, 2 x 8 columns n, stored [k][n] or, transposed, [n][k].
template <bool TRANSPOSED> __device__ inline void ncf_load_b(uint32_t (&b)[4], const floatX* p, int row) {
    int lane = threadIdx.x % WARP;
    if constexpr (TRANSPOSED) ldmatrix_x4(b, ncf_shared(p + (lane / 16 * 8 + lane % 8) * row + lane / 8 % 2 * 8));
    else ldmatrix_x4_trans(b, ncf_shared(p + lane % 16 * row + lane / 16 * 8));
}

template <int MT, int NT, int K, bool A_TRANSPOSED, bool B_TRANSPOSED>
__device__ inline void ncf_product(float (&c)[MT][NT][4], const floatX* a, int row_a, const floatX* b, int row_b) {
#pragma unroll 2
    for (int k = 0; k < K; k += 16) {
        uint32_t left[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++)
            ncf_load_a<A_TRANSPOSED>(left[m], a + (A_TRANSPOSED ? k * row_a + m * 16 : m * 16 * row_a + k), row_a);
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            uint32_t right[4];
            ncf_load_b<B_TRANSPOSED>(right, b + (B_TRANSPOSED ? n * 8 * row_b + k : k * row_b + n * 8), row_b);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma_m16n8k16(c[m][n], left[m], right[0], right[1]);
                mma_m16n8k16(c[m][n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// Call f(row, column, x, y) for pairs of neighbouring columns of c.
template <int MT, int NT, typename F> __device__ inline void ncf_each_pair(float (&c)[MT][NT][4], F f) {
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                f(m * 16 + half * 8 + lane / 4, n * 8 + lane % 4 * 2, c[m][n][2 * half], c[m][n][2 * half + 1]);
}

// ---------------------------------------------------------------------------------------------------------
// Parts of a tile

// This thread's id or label of a tile, as bits; then it goes to shared memory. Loads and stores are apart, so that
// nobody waits.
__device__ inline int ncf_load_id(const NcfStep& s, int tile) {
    int i = threadIdx.x / NCF_TILE, n = min(tile * NCF_TILE + (int)threadIdx.x % NCF_TILE, s.B - 1);
    return i == 0 ? s.users[n] : i == 1 ? s.items[n] : i == 2 ? __float_as_int(s.labels[n]) : 0;
}

__device__ inline void ncf_store_id(NcfShared& m, int slot, int bits) {
    int i = threadIdx.x / NCF_TILE, row = threadIdx.x % NCF_TILE;
    if (i == 0) m.users[slot][row] = bits;
    if (i == 1) m.items[slot][row] = bits;
    if (i == 2) m.labels[slot][row] = __int_as_float(bits);
}

// Start loading the products of a tile's users and items.
__device__ inline void ncf_prefetch(NcfShared& m, int buffer, int slot, const NcfStep& s) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int i = 0; i < NCF_TILE / NCF_STEP_WARPS; i++) {
        int row = i * NCF_STEP_WARPS + warp;
        uint32_t at = (uint32_t)((row * NCF_ROW0 + lane * 8) * sizeof(floatX));
        const floatX *user = s.user_products + (size_t)m.users[slot][row] * NCF_H0 + lane * 8,
                     *item = s.item_products + (size_t)m.items[slot][row] * NCF_H0 + lane * 8;
        cp_async_cg_16(ncf_shared(m.h0[buffer]) + at, user, 1);
        cp_async_cg_16(ncf_shared(m.item) + at, item, 1);
    }
}

// Eight channels of sample n after ReLU and dropout.
__device__ inline void ncf_relu_dropout(float (&x)[8], const ReluDropout& d, uint64_t n, int group) {
    Philox bits = {{0, 0, 0, 0}};
    if (d.threshold) bits = relu_dropout_bits(d, n, (uint32_t)group);
#pragma unroll
    for (int k = 0; k < 8; k++) x[k] = x[k] > 0 && relu_dropout_keeps(d, bits, k) ? x[k] * d.scale : 0;
}

// h0 = dropout(relu(user + item + b0)) in place of `user`.
__device__ inline void ncf_first_layer(floatX* user, const floatX* item, const floatX* b0, const NcfStep& s, int tile) {
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll 1
    for (int i = 0; i < NCF_TILE / NCF_STEP_WARPS; i++) {
        int row = i * NCF_STEP_WARPS + warp, at = row * NCF_ROW0 + lane * 8;
        float x[8], y[8], b[8];
        to_floats(x, load128(user + at));
        to_floats(y, load128(item + at));
        to_floats(b, load128(b0 + lane * 8));
#pragma unroll
        for (int k = 0; k < 8; k++) x[k] += y[k] + b[k];
        ncf_relu_dropout(x, s.dropout[0], (uint64_t)tile * NCF_TILE + row, lane);
        store128(user + at, from_floats<floatX>(x));
    }
}

// The last layer and the loss: eight threads per sample, each with 8 columns of either half. Writes h2 after dropout,
// dz2 and dlogit; adds the loss and dlogit to the row's sums.
__device__ inline void ncf_last_layer(NcfShared& m, const NcfStep& s, int tile, int slot, float product) {
    int row = threadIdx.x / NCF_SHARERS, group = threadIdx.x % NCF_SHARERS, n = tile * NCF_TILE + row;
    const float* w = m.w3 + NCF_F + group * 8;
    float x[8], sum = product;
    floatX* p = m.h2 + row * NCF_ROW2 + group * 8;
    to_floats(x, load128(p));
    ncf_relu_dropout(x, s.dropout[2], (uint64_t)n, group);
    store128(p, from_floats<floatX>(x));
#pragma unroll
    for (int k = 0; k < 8; k++) sum += x[k] * w[k];
#pragma unroll
    for (int other = 1; other < NCF_SHARERS; other *= 2) sum += __shfl_xor_sync(ALL_LANES, sum, other);
    float logit = sum + m.b3, d = 0;
    if (n < s.B) {
        float y = m.labels[slot][row];
        d = s.scale * (1 / (1 + expf(-logit)) - y);
        if (group == 0) {
            m.loss[row] += (double)(fmaxf(logit, 0) - logit * y + log1pf(expf(-fabsf(logit))));
            m.dbias[row] += d;
            s.dlogits[n] = d;
        }
    }
    if (group == 0) m.dlogit[row] = d;
#pragma unroll
    for (int k = 0; k < 8; k++) x[k] = relu_gradient(d * w[k], x[k], s.dropout[2].scale);
    store128(m.dz2 + row * NCF_ROW2 + group * 8, from_floats<floatX>(x));
}

// This thread's share of the factors of a sample: 8 of 64 columns. Their product with the last layer comes later.
typedef struct {
    Vector<floatX> user, item;
} NcfFactors;

__device__ inline NcfFactors ncf_load_factors(const NcfShared& m, const NcfStep& s, int slot) {
    int row = threadIdx.x / NCF_SHARERS, first = threadIdx.x % NCF_SHARERS * 8;
    NcfFactors f;
    f.user = load128(s.mf_user + (size_t)m.users[slot][row] * NCF_F + first);
    f.item = load128(s.mf_item + (size_t)m.items[slot][row] * NCF_F + first);
    return f;
}

__device__ inline float ncf_factors(const float* w, const NcfFactors& f) {
    float x[8], y[8], sum = 0;
    int first = threadIdx.x % NCF_SHARERS * 8;
    to_floats(x, f.user);
    to_floats(y, f.item);
#pragma unroll
    for (int k = 0; k < 8; k++) sum += x[k] * y[k] * w[first + k];
    return sum;
}

// Columns of dz0 from two neighbouring 16 x 8 tiles of gradients, masked by h0: lanes exchange halves, so that each
// stores 8 bytes. h and out: the row's first column of the two tiles; out NULL: past the end.
__device__ inline void ncf_store_dz0(floatX* out, const floatX* h, uint32_t left, uint32_t right) {
    int odd = threadIdx.x % 2, t = threadIdx.x % 4, at = odd ? 8 + 2 * (t - 1) : 2 * t;
    uint32_t other = __shfl_xor_sync(ALL_LANES, odd ? left : right, 1);
    uint2 mask = *(const uint2*)(h + at);  // a positive number of 16 bits is a positive integer
    uint2 both = odd ? make_uint2(other, right) : make_uint2(left, other);
    both.x &= __vcmpgts2(mask.x, 0), both.y &= __vcmpgts2(mask.y, 0);
    if (out) *(uint2*)(out + at) = both;
}

__device__ inline void ncf_load_weights(NcfShared& m, const NcfStep& s) {
    for (int i = threadIdx.x * 8; i < NCF_H1 * NCF_H0; i += NCF_STEP_THREADS * 8)
        store128(m.w1 + i / NCF_H0 * NCF_ROW0 + i % NCF_H0, load128(s.w1 + i));
    for (int i = threadIdx.x * 8; i < NCF_H2 * NCF_H1; i += NCF_STEP_THREADS * 8)
        store128(m.w2 + i / NCF_H1 * NCF_ROW1 + i % NCF_H1, load128(s.w2 + i));
    int i = threadIdx.x;
    if (i < NCF_H0) m.b0[i] = s.b0[i];
    if (i == 0) m.b3 = to_float(*s.b3);
    if (i < NCF_H1) m.b1[i] = s.b1[i], m.w3[i] = to_float(s.w3[i]);
    if (i < NCF_H2) m.b2[i] = s.b2[i];
}

// Store dW1, dW2 and the vectors as the block's partial sums. sums [QUARTERS][2 H1]: of the quarters of the rows.
__device__ inline void ncf_store_sums(float (&dw1)[2][8][4], float (&dw2)[1][4][4], const float* sums, float* out) {
    int warp = threadIdx.x / WARP, c = threadIdx.x;
    ncf_each_pair(dw1, [&](int row, int column, float x, float y) {
        float* p = out + NCF_DW1 + (warp / 4 * 32 + row) * NCF_H0 + warp % 4 * 64 + column;
        p[0] = x, p[1] = y;
    });
    ncf_each_pair(dw2, [&](int row, int column, float x, float y) {
        float* p = out + NCF_DW2 + (warp / 4 * 16 + row) * NCF_H1 + warp % 4 * 32 + column;
        p[0] = x, p[1] = y;
    });
    if (c >= 2 * NCF_H1) return;
    float total = 0;
#pragma unroll
    for (int q = 0; q < NCF_QUARTERS; q++) total += sums[q * 2 * NCF_H1 + c];
    if (c < NCF_H1) out[NCF_DB1 + c] = total;
    else if (c < NCF_H1 + NCF_H2) out[NCF_DW3 + c - NCF_H1] = total;
    else out[NCF_DB2 + c - NCF_H1 - NCF_H2] = total;
}

// One block per multiprocessor; sixteen warps share each product as 4 x 4. Before compute capability 9.0 a block has
// less shared memory than this needs (ncf_step_fits()).
static __global__ void __launch_bounds__(NCF_STEP_THREADS, 1) ncf_step_kernel(NcfStep s) {
#if __CUDA_ARCH__ >= 900
    extern __shared__ int4 memory[];
    NcfShared& m = *(NcfShared*)memory;
    int warp = threadIdx.x / WARP, wm = warp / 4, wn = warp % 4, buffer = 0, slot = 0;
    int column = threadIdx.x % NCF_H1, first_row = threadIdx.x / NCF_H1 * (NCF_TILE / NCF_QUARTERS);
    float dw1[2][8][4] = {{{0}}}, dw2[1][4][4] = {{{0}}};
    float* column_sums = m.sums[threadIdx.x / NCF_H1] + column;
    column_sums[0] = column_sums[NCF_H1] = 0;
    int tiles = (s.B + NCF_TILE - 1) / NCF_TILE;
    ncf_load_weights(m, s);
    if (threadIdx.x < NCF_TILE) m.dbias[threadIdx.x] = 0, m.loss[threadIdx.x] = 0;
    ncf_store_id(m, 0, ncf_load_id(s, blockIdx.x));
    ncf_store_id(m, 1, ncf_load_id(s, blockIdx.x + gridDim.x));
    __syncthreads();
    if ((int)blockIdx.x < tiles) ncf_prefetch(m, 0, 0, s);

    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, buffer ^= 1, slot = (slot + 1) % NCF_SLOTS) {
        floatX* h0 = m.h0[buffer];
        int id = ncf_load_id(s, tile + 2 * gridDim.x);
        cp_async_wait_all();
        __syncthreads();
        ncf_first_layer(h0, m.item, m.b0, s, tile);
        NcfFactors factors = ncf_load_factors(m, s, slot);
        float product = ncf_factors(m.w3, factors);
        ncf_store_id(m, (slot + 2) % NCF_SLOTS, id);
        __syncthreads();
        if (tile + (int)gridDim.x < tiles) ncf_prefetch(m, buffer ^ 1, (slot + 1) % NCF_SLOTS, s);
        {  // h1 before ReLU, then h1
            float c[1][4][4] = {{{0}}};
            ncf_product<1, 4, NCF_H0, false, true>(c, h0 + wm * 16 * NCF_ROW0, NCF_ROW0, m.w1 + wn * 32 * NCF_ROW0,
                                                   NCF_ROW0);
            ncf_each_pair(c, [&](int row, int col, float x, float y) {
                int at = wn * 32 + col;
                *(uint32_t*)(m.h1 + (wm * 16 + row) * NCF_ROW1 + at) =
                    pack_floatx2(x + to_float(m.b1[at]), y + to_float(m.b1[at + 1]));
            });
        }
        __syncthreads();
#pragma unroll
        for (int i = threadIdx.x; i < NCF_TILE * NCF_H1 / 8; i += NCF_STEP_THREADS) {
            int row = i / (NCF_H1 / 8), group = i % (NCF_H1 / 8);
            floatX* p = m.h1 + row * NCF_ROW1 + group * 8;
            float x[8];
            to_floats(x, load128(p));
            ncf_relu_dropout(x, s.dropout[1], (uint64_t)tile * NCF_TILE + row, group);
            store128(p, from_floats<floatX>(x));
        }
        __syncthreads();
        {
            float c[1][2][4] = {{{0}}};
            ncf_product<1, 2, NCF_H1, false, true>(c, m.h1 + wm * 16 * NCF_ROW1, NCF_ROW1, m.w2 + wn * 16 * NCF_ROW1,
                                                   NCF_ROW1);
            ncf_each_pair(c, [&](int row, int col, float x, float y) {
                int at = wn * 16 + col;
                *(uint32_t*)(m.h2 + (wm * 16 + row) * NCF_ROW2 + at) =
                    pack_floatx2(x + to_float(m.b2[at]), y + to_float(m.b2[at + 1]));
            });
        }
        __syncthreads();
        ncf_last_layer(m, s, tile, slot, product);
        __syncthreads();
        // Column sums over a quarter of the rows: dW3 for the first 64 threads of a quarter, db2 for the others.
        float dlast = 0, db1 = 0;
#pragma unroll 8
        for (int i = 0; i < NCF_TILE / NCF_QUARTERS; i++) {
            int row = first_row + i, c = column % NCF_H2;
            dlast += column < NCF_H2 ? m.dlogit[row] * to_float(m.h2[row * NCF_ROW2 + c])
                                     : to_float(m.dz2[row * NCF_ROW2 + c]);
        }
        column_sums[NCF_H1] += dlast;
        ncf_product<1, 4, NCF_TILE, true, false>(dw2, m.dz2 + wm * 16, NCF_ROW2, m.h1 + wn * 32, NCF_ROW1);
        {
            float c[1][4][4] = {{{0}}};
            ncf_product<1, 4, NCF_H2, false, false>(c, m.dz2 + wm * 16 * NCF_ROW2, NCF_ROW2, m.w2 + wn * 32, NCF_ROW1);
            __syncthreads();  // all have read h1
            ncf_each_pair(c, [&](int row, int col, float x, float y) {
                floatX* p = m.h1 + (wm * 16 + row) * NCF_ROW1 + wn * 32 + col;
                float scale = s.dropout[1].scale;
                *(uint32_t*)p =
                    pack_floatx2(relu_gradient(x, to_float(p[0]), scale), relu_gradient(y, to_float(p[1]), scale));
            });
        }
        __syncthreads();
#pragma unroll 8
        for (int i = 0; i < NCF_TILE / NCF_QUARTERS; i++) db1 += to_float(m.h1[(first_row + i) * NCF_ROW1 + column]);
        column_sums[0] += db1;
        ncf_product<2, 8, NCF_TILE, true, false>(dw1, m.h1 + wm * 32, NCF_ROW1, h0 + wn * 64, NCF_ROW0);
#pragma unroll 1
        for (int side = 0; side < 2; side++) {
            float c[1][4][4] = {{{0}}}, scale = s.dropout[0].scale;
            int first = side * 128 + wn * 32;
            ncf_product<1, 4, NCF_H1, false, false>(c, m.h1 + wm * 16 * NCF_ROW1, NCF_ROW1, m.w1 + first, NCF_ROW0);
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int n = 0; n < 4; n += 2) {
                    int row = wm * 16 + half * 8 + (int)threadIdx.x % WARP / 4, sample = tile * NCF_TILE + row;
                    floatX* out = sample < s.B ? s.dz0 + (size_t)sample * NCF_H0 + first + n * 8 : NULL;
                    const float *left = &c[0][n][2 * half], *right = &c[0][n + 1][2 * half];
                    ncf_store_dz0(out, h0 + row * NCF_ROW0 + first + n * 8,
                                  pack_floatx2(scale * left[0], scale * left[1]),
                                  pack_floatx2(scale * right[0], scale * right[1]));
                }
        }
    }
    double loss = block_sum(threadIdx.x < NCF_TILE ? m.loss[threadIdx.x] : 0);
    float dbias = block_sum(threadIdx.x < NCF_TILE ? m.dbias[threadIdx.x] : 0);
    __syncthreads();
    float* out = s.partial + (size_t)blockIdx.x * NCF_PARTIAL;
    ncf_store_sums(dw1, dw2, m.sums[0], out);
    if (threadIdx.x == 0) out[NCF_DB3] = dbias, s.partial_loss[blockIdx.x] = loss;
#endif
}

#endif
#endif
