/* NeuMF's training step on the GPU for the published widths: factors 64, embeddings 128 + 128, layers 256, 128, 64.
 *
 * The same sums as the ops of train_ncf.cu's list, with less traffic:
 *   products    the first layer is linear in its halves, W0 [u | i] = W0u u + W0i i. So every row of both tables is
 *               multiplied once: user_products [users, 256], item_products [items, 256]
 *   step        one persistent block per multiprocessor takes tiles of 64 samples through the other layers, forward and
 *               backward, in shared memory. It writes dz0 [B, 256], the gradient of what goes into the first ReLU, and
 *               dlogits [B]; its sums of the gradients of W1, W2, ... stay in registers until the end
 *   rows        S[r] = the sum of dz0 over the samples of row r; G[r] = w_mf * the sum of dlogit times the other factor
 *   gradients   of an embedding row: S[r] W0u; of W0u: S^T times the table. Both are matmuls over rows, not over samples
 *   reduce      adds the blocks' partial sums in their order
 *   adam        all four tables in one launch
 *
 * h0 [B, 256] and its gradient never exist. Products are mma.sync of bf16 with fp32 sums; activations, products and S are
 * rounded to bf16. Deterministic: a block's tiles and rows depend on the shape and the number of multiprocessors only. */
#ifndef DEV_RECSYS_OPS_NCF_FUSED_CUH
#define DEV_RECSYS_OPS_NCF_FUSED_CUH

#include "dev/recsys/ops/embedding_rows.h"
#include "dev/recsys/ops/gmf.h"
#include "dev/recsys/ops/linear_bce.h"
#include "dev/recsys/ops/matmul_relu.h"
#include "llmc/device/cublaslt.cuh"
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

// This thread's id or label of a tile, as bits; then it goes to shared memory. Loads and stores are apart, so that nobody waits.
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

// The last layer and the loss: eight threads per sample, each with 8 columns of either half. Writes h2 after dropout, dz2 and
// dlogit; adds the loss and dlogit to the row's sums.
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

// Columns of dz0 from two neighbouring 16 x 8 tiles of gradients, masked by h0: lanes exchange halves, so that each stores 8
// bytes. h and out: the row's first column of the two tiles; out NULL: past the end.
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

// One block per multiprocessor; sixteen warps share each product as 4 x 4.
static __global__ void __launch_bounds__(NCF_STEP_THREADS, 1) ncf_step_kernel(NcfStep s) {
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
}

// ---------------------------------------------------------------------------------------------------------
// Sums by row

// One table's rows: sums S [rows, 256] of dz0 and G [rows, 64] of the factors' gradients.
typedef struct {
    RowSegments segments;
    const int* others;            // [B] the other id of each sample
    const floatX *mine, *theirs;  // factors
    floatX* S;
    float* G;
} NcfRows;

// The sums of row r; a lane has eight columns of dz0 and two of the factors.
__device__ inline void ncf_store_row(const NcfRows& t, int r, const float (&S)[8], float g0, float g1) {
    int lane = threadIdx.x % WARP;
    store128(t.S + (size_t)r * NCF_H0 + lane * 8, from_floats<floatX>(S));
    *(float2*)(t.G + (size_t)r * NCF_F + lane * 2) = make_float2(g0, g1);
}

// Rows begin .. end - 1 have no samples.
__device__ inline void ncf_clear_rows(const NcfRows& t, int begin, int end) {
    const float zeros[8] = {0};
    for (int r = begin; r < end; r++) ncf_store_row(t, r, zeros, 0, 0);
}

// Sums over the rows of one table that a warp has seen.
typedef struct {
    float db0[8], dw3[2];
} NcfRowTotals;

// IS_USER: add to the totals too. One warp: the rows that begin among the WARP positions from `begin` on, and the empty rows before each of them.
template <bool IS_USER>
__device__ __forceinline__ void ncf_rows_chunk(const NcfStep& s, const NcfRows& t, int begin, const float (&w)[2],
                                               NcfRowTotals& totals) {
    const RowSegments& segments = t.segments;
    int lane = threadIdx.x % WARP;
    float S[8] = {0}, G[2] = {0};
    for (int first = begin; first < segments.N; first += WARP) {
        RowChunk c = row_chunk(segments, first);
        if (first == begin && !c.heads) return;  // all belongs to a row that began before
        int other = t.others[c.source], k = first == begin ? __ffs((int)c.heads) - 1 : 0, end = c.count;
        float dlogit = s.dlogits[c.source];
        if (first > begin && c.tails) end = __ffs((int)c.tails);
        unsigned gaps = __ballot_sync(ALL_LANES, lane >= k && lane < end && c.key > c.before + 1);
        for (; gaps; gaps &= gaps - 1) {
            int at = __ffs((int)gaps) - 1;
            ncf_clear_rows(t, __shfl_sync(ALL_LANES, c.before, at) + 1, __shfl_sync(ALL_LANES, c.key, at));
        }
        if (first + end == segments.N) ncf_clear_rows(t, __shfl_sync(ALL_LANES, c.key, end - 1) + 1, segments.rows);
        for (; k < end; k += ROWS_LOADS) {
            Vector<floatX> x[ROWS_LOADS];
            __nv_bfloat162 f[ROWS_LOADS];
#pragma unroll
            for (int j = 0; j < ROWS_LOADS; j++) {
                int at = min(k + j, end - 1), n = __shfl_sync(ALL_LANES, c.source, at),
                    o = __shfl_sync(ALL_LANES, other, at);
                x[j] = load128_streaming(s.dz0 + (size_t)n * NCF_H0 + lane * 8);
                f[j] = *(const __nv_bfloat162*)(t.theirs + (size_t)o * NCF_F + lane * 2);
            }
#pragma unroll
            for (int j = 0; j < ROWS_LOADS; j++) {
                int at = min(k + j, end - 1), r = __shfl_sync(ALL_LANES, c.key, at);
                float d = __shfl_sync(ALL_LANES, dlogit, at), values[8];
                if (k + j >= end) break;
                to_floats(values, x[j]);
#pragma unroll
                for (int e = 0; e < 8; e++) S[e] += values[e];
                G[0] += d * __low2float(f[j]), G[1] += d * __high2float(f[j]);
                if (!(c.tails >> at & 1)) continue;
                ncf_store_row(t, r, S, w[0] * G[0], w[1] * G[1]);
                if constexpr (IS_USER) {
                    __nv_bfloat162 mine = *(const __nv_bfloat162*)(t.mine + (size_t)r * NCF_F + lane * 2);
#pragma unroll
                    for (int e = 0; e < 8; e++) totals.db0[e] += S[e];
                    totals.dw3[0] += G[0] * __low2float(mine), totals.dw3[1] += G[1] * __high2float(mine);
                }
#pragma unroll
                for (int e = 0; e < 8; e++) S[e] = 0;
                G[0] = G[1] = 0;
            }
        }
        if (c.tails >> (end - 1) & 1) return;
    }
}

// A warp takes every so many chunks of the users' sorted samples, then of the items'. Sums over all samples, db0 and the last
// layer's, come from the users' rows.
static __global__ void __launch_bounds__(NCF_THREADS) ncf_rows_kernel(NcfStep s, NcfRows user, NcfRows item) {
    __shared__ float sums[NCF_THREADS / WARP][NCF_ROW_PARTIAL];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, stride = gridDim.x * NCF_THREADS;
    int begin = (blockIdx.x * (NCF_THREADS / WARP) + warp) * WARP;
    float w[2] = {to_float(s.w3[lane * 2]), to_float(s.w3[lane * 2 + 1])};
    NcfRowTotals totals = {{0}, {0}};
    for (int first = begin; first < s.B; first += stride) ncf_rows_chunk<true>(s, user, first, w, totals);
    for (int first = begin; first < s.B; first += stride) ncf_rows_chunk<false>(s, item, first, w, totals);
#pragma unroll
    for (int c = 0; c < 8; c++) sums[warp][lane * 8 + c] = totals.db0[c];
    sums[warp][NCF_H0 + lane * 2] = totals.dw3[0], sums[warp][NCF_H0 + lane * 2 + 1] = totals.dw3[1];
    __syncthreads();
    for (int c = threadIdx.x; c < NCF_ROW_PARTIAL; c += NCF_THREADS) {
        float total = 0;
        for (int k = 0; k < NCF_THREADS / WARP; k++) total += sums[k][c];
        s.row_partial[(size_t)blockIdx.x * NCF_ROW_PARTIAL + c] = total;
    }
}

// Where the sums go.
typedef struct {
    real *db0, *dw1, *db1, *dw2, *db2, *dw3, *db3, *loss;
} NcfSums;

// A block adds the partial sums of WARP elements of all blocks: each warp every so many of them, in order. The last block adds
// the losses.
static __global__ void __launch_bounds__(NCF_THREADS)
    ncf_reduce_kernel(NcfSums out, NcfStep s, int blocks, int row_blocks) {
    constexpr int WARPS = NCF_THREADS / WARP;
    __shared__ float sums[WARPS][WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, e = blockIdx.x * WARP + lane;
    if (blockIdx.x + 1 == gridDim.x) {
        double loss = threadIdx.x < blocks ? s.partial_loss[threadIdx.x] : 0;
        loss = block_sum(loss);
        if (threadIdx.x == 0) *out.loss = (real)(s.scale * loss);
        return;
    }
    int of_rows = e >= NCF_PARTIAL, count = of_rows ? row_blocks : blocks, k = of_rows ? e - NCF_PARTIAL : e;
    const float* from = of_rows ? s.row_partial + k : s.partial + k;
    size_t stride = of_rows ? NCF_ROW_PARTIAL : NCF_PARTIAL;
    float sum = 0;
    if (e < NCF_PARTIAL + NCF_ROW_PARTIAL) {
#pragma unroll 8
        for (int b = warp; b < count; b += WARPS) sum += from[(size_t)b * stride];
    }
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp || e >= NCF_PARTIAL + NCF_ROW_PARTIAL) return;
    sum = 0;
#pragma unroll
    for (int i = 0; i < WARPS; i++) sum += sums[i][lane];
    if (of_rows && k < NCF_H0) out.db0[k] = sum;
    else if (of_rows) out.dw3[k - NCF_H0] = sum;
    else if (k < NCF_DW2) out.dw1[k] = sum;
    else if (k < NCF_DB1) out.dw2[k - NCF_DW2] = sum;
    else if (k < NCF_DB2) out.db1[k - NCF_DB1] = sum;
    else if (k < NCF_DW3) out.db2[k - NCF_DB2] = sum;
    else if (k < NCF_DB3) out.dw3[NCF_F + k - NCF_DW3] = sum;
    else *out.db3 = sum;
}

// ---------------------------------------------------------------------------------------------------------
// Adam of all tables

// `g32` or `g16` [n]: the gradient.
typedef struct {
    EmbeddingTable table;
    const float* g32;
    const floatX* g16;
    size_t n;
} NcfAdamJob;

typedef struct {
    NcfAdamJob job[4];
    unsigned first_block[5];
} NcfAdamJobs;

// Each thread updates four adjacent elements of one table.
static __global__ void __launch_bounds__(NCF_THREADS)
    ncf_adam_kernel(NcfAdamJobs jobs, AdamWCoefficients c, const AdamWStep* step) {
    int j = 0;
    while (blockIdx.x >= jobs.first_block[j + 1]) j++;
    const NcfAdamJob& job = jobs.job[j];
    size_t i = 4 * ((size_t)(blockIdx.x - jobs.first_block[j]) * NCF_THREADS + threadIdx.x);
    if (i >= job.n || !step->is_taken) return;
    const EmbeddingTable& t = job.table;
    Vector<real> w = load128(t.w + i), m = load128(t.m + i), v = load128(t.v + i);
    float g[4];
    if (job.g32) {
        *(float4*)g = *(const float4*)(job.g32 + i);
    } else {
        Vector<floatX, 4> narrow;
        *(int2*)&narrow = *(const int2*)(job.g16 + i);
        to_floats(g, narrow);
    }
#pragma unroll
    for (int k = 0; k < 4; k++) {
        m.v[k] = fmaf(c.beta1, m.v[k], c.beta1_rest * g[k]);
        v.v[k] = fmaf(c.beta2_rest, g[k] * g[k], c.beta2 * v.v[k]);
        w.v[k] -= step->step_size * m.v[k] / fmaf(step->root_scale, sqrtf(v.v[k]), c.eps);
    }
    store128(t.m + i, m);
    store128(t.v + i, v);
    row_store(t, i, w);
}

// ---------------------------------------------------------------------------------------------------------
// Launchers

// C [M, N] = A [M, K] B [K, N]; row: elements between rows, T: stored transposed.
typedef struct {
    const void* p;
    int row;
    cublasOperation_t op;
} NcfMatrix;

static inline void ncf_matmul(void* c, int c_row, int c_is_real, NcfMatrix a, NcfMatrix b, BatchSize n, Context* ctx) {
    double elements = (double)n.M * n.K + (double)n.K * n.N, bytes = c_is_real ? sizeof(real) : sizeof(floatX);
    Scope scope = scope_open(ctx, "ncf_matmul", 2.0 * n.M * n.N * n.K,
                             elements * sizeof(floatX) + (double)n.M * n.N * bytes, "M=%d N=%d K=%d", n.M, n.N, n.K);
    BatchMatrix C = {c, {c_is_real ? CUDA_R_32F : cublaslt_type(), CUBLAS_OP_N, c_row, 0}};
    BatchMatrix A = {(void*)a.p, {cublaslt_type(), a.op, a.row, 0}},
                B = {(void*)b.p, {cublaslt_type(), b.op, b.row, 0}};
    batched_product(C, A, B, n, 1, ctx);
    scope_close(&scope);
}

static inline unsigned ncf_row_blocks(const Context* ctx) { return (unsigned)(NCF_ROW_BLOCKS * ctx->multiprocessors); }

static inline void ncf_step(NcfStep s, Context* ctx) {
    Scope scope = scope_open(ctx, "ncf_step", 6.0 * s.B * (NCF_H0 * NCF_H1 + NCF_H1 * NCF_H2),
                             (double)s.B * (3.0 * NCF_H0 + 2 * NCF_F) * sizeof(floatX), "B=%d", s.B);
    CHECK(ctx->multiprocessors <= (int)NCF_THREADS);
    cudaCheck(
        cudaFuncSetAttribute(ncf_step_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(NcfShared)));
    ncf_step_kernel<<<(unsigned)ctx->multiprocessors, NCF_STEP_THREADS, sizeof(NcfShared), ctx->stream>>>(s);
    cudaCheck(cudaGetLastError());
    scope_close(&scope);
}

static inline void ncf_rows(NcfStep s, NcfRows user, NcfRows item, Context* ctx) {
    double rows = user.segments.rows + item.segments.rows;
    Scope scope = scope_open(ctx, "ncf_rows", 2.0 * s.B * (NCF_H0 + 2 * NCF_F),
                             2.0 * s.B * (NCF_H0 + NCF_F) * sizeof(floatX) +
                                 rows * (NCF_H0 * sizeof(floatX) + NCF_F * sizeof(float)),
                             "B=%d rows=%.0f", s.B, rows);
    ncf_rows_kernel<<<ncf_row_blocks(ctx), NCF_THREADS, 0, ctx->stream>>>(s, user, item);
    cudaCheck(cudaGetLastError());
    scope_close(&scope);
}

static inline void ncf_reduce(NcfSums out, NcfStep s, Context* ctx) {
    Scope scope =
        scope_open(ctx, "ncf_reduce", 0, 4.0 * ctx->multiprocessors * NCF_PARTIAL, "blocks=%d", ctx->multiprocessors);
    ncf_reduce_kernel<<<blocks_for(NCF_PARTIAL + NCF_ROW_PARTIAL, WARP) + 1, NCF_THREADS, 0, ctx->stream>>>(
        out, s, ctx->multiprocessors, (int)ncf_row_blocks(ctx));
    cudaCheck(cudaGetLastError());
    scope_close(&scope);
}

static inline void ncf_adam(NcfAdamJobs jobs, OptimizerSettings h, const AdamWStep* step, Context* ctx) {
    double n = 0;
    for (int j = 0; j < 4; j++) {
        n += (double)jobs.job[j].n;
        jobs.first_block[j + 1] = jobs.first_block[j] + blocks_for(jobs.job[j].n, 4 * NCF_THREADS);
    }
    Scope scope = scope_open(ctx, "ncf_adam", 15 * n, n * (7 * sizeof(real) + sizeof(floatX)), "n=%.0f", n);
    ncf_adam_kernel<<<jobs.first_block[4], NCF_THREADS, 0, ctx->stream>>>(jobs, adamw_coefficients(h), step);
    cudaCheck(cudaGetLastError());
    scope_close(&scope);
}

#endif
#endif
