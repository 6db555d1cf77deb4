/* Attention without tensor cores, for fp32 and for head sizes that the flash kernels do not take. It is also the text
 * to read first: the same walk over tiles, but every product is one plain function on arrays in shared memory.
 *
 * Forward: a block takes a tile of queries of one head of one sequence and walks over tiles of keys; it keeps the
 * largest score so far, the sum of exponentials and the output of each query, and shrinks the last two when a larger
 * score turns up. Backward: one kernel sums dQ for a tile of queries, another dK and dV for a tile of keys; both
 * compute P and ds again, so no sum crosses blocks.
 * Numerics: everything in fp32; rounded to floatX where it is stored. */
#ifndef LLMC_ATTENTION_EXPLICIT_CUH
#define LLMC_ATTENTION_EXPLICIT_CUH

#include "../base/rng.h"
#include "../device/device.cuh"

enum { EXPLICIT_SIDE = 16, EXPLICIT_THREADS = EXPLICIT_SIDE * EXPLICIT_SIDE };  // a block is a square of threads

// What the three kernels know besides their tensors.
typedef struct {
    const int* cu_seqlens;
    int N, NH, HS, first;
    float factor;  // 1 / sqrt(HS)
    Mask mask;
    Dropout dropout;
} ExplicitArguments;

// Where the block's rows lie.
typedef struct {
    int start, T;       // first row and length of the sequence
    int head, origin;   // the tile's first query, or key
    int width;          // of a row of channels in shared memory: odd, so that a column's elements lie in all banks
    size_t C, channel;  // channels of a row of out, the head's first
    uint32_t sequence;  // in the whole step
} ExplicitTile;

__device__ inline ExplicitTile explicit_tile(const ExplicitArguments& z, int rows) {
    ExplicitTile t;
    t.start = z.cu_seqlens[blockIdx.z];
    t.T = z.cu_seqlens[blockIdx.z + 1] - t.start;
    t.head = (int)blockIdx.y;
    t.origin = (int)blockIdx.x * rows;
    t.width = z.HS | 1;
    t.C = (size_t)z.NH * z.HS;
    t.channel = (size_t)t.head * z.HS;
    t.sequence = (uint32_t)z.first + blockIdx.z;
    return t;
}

// The next `count` floats of the block's shared memory.
__device__ inline float* explicit_take(float** shared, int count) {
    float* p = *shared;
    *shared += count;
    return p;
}

// c[i, j] (+)= sum over l < K of a[i * a_row + l * a_step] * b[j * b_column + l * b_step], i < TILE, j < columns. A
// thread computes rows y, y + 16, .. of columns x, x + 16, ..
template <int TILE, Mode mode>
__device__ inline void explicit_product(float* c, int c_row, const float* a, int a_row, int a_step, const float* b,
                                        int b_column, int b_step, int columns, int K) {
    constexpr int EACH = TILE / EXPLICIT_SIDE;
    int y = threadIdx.x / EXPLICIT_SIDE, x = threadIdx.x % EXPLICIT_SIDE;
    for (int j0 = x; j0 < columns; j0 += TILE) {
        float sum[EACH][EACH] = {};
        for (int l = 0; l < K; l++) {
            float left[EACH], right[EACH];
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                left[i] = a[(y + i * EXPLICIT_SIDE) * a_row + l * a_step];
                right[i] = b[min(j0 + i * EXPLICIT_SIDE, columns - 1) * b_column + l * b_step];
            }
#pragma unroll
            for (int i = 0; i < EACH; i++)
#pragma unroll
                for (int j = 0; j < EACH; j++) sum[i][j] += left[i] * right[j];
        }
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                int column = j0 + j * EXPLICIT_SIDE;
                float* to = c + (y + i * EXPLICIT_SIDE) * c_row + column;
                if (column < columns) *to = mode == ADD ? *to + sum[i][j] : sum[i][j];
            }
    }
}

// TILE rows of HS channels; zeros past the rows that exist.
template <int TILE>
__device__ inline void explicit_load(float* tile, int width, const floatX* x, size_t stride, int exist, int HS) {
    for (int i = threadIdx.x; i < TILE * HS; i += EXPLICIT_THREADS) {
        int row = i / HS, c = i % HS;
        tile[row * width + c] = row < exist ? to_float(x[(size_t)row * stride + c]) : 0;
    }
}

template <int TILE>
__device__ inline void explicit_store(floatX* x, size_t stride, int exist, const float* tile, int width, int HS,
                                      float scale) {
    for (int i = threadIdx.x; i < TILE * HS; i += EXPLICIT_THREADS) {
        int row = i / HS, c = i % HS;
        if (row < exist) x[(size_t)row * stride + c] = from_float<floatX>(tile[row * width + c] * scale);
    }
}

__device__ inline void explicit_zero(float* x, int n) {
    for (int i = threadIdx.x; i < n; i += EXPLICIT_THREADS) x[i] = 0;
}

// What dropout multiplies one probability with.
__device__ inline float explicit_keep(const Dropout& d, uint32_t sequence, int head, int query, int key) {
    if (!d.threshold) return 1;
    Philox r = dropout_bits_attention(d, sequence, (uint32_t)head, (uint32_t)query, (uint32_t)key / 4);
    uint32_t bits = key % 4 == 0 ? r.v[0] : key % 4 == 1 ? r.v[1] : key % 4 == 2 ? r.v[2] : r.v[3];
    return bits >= d.threshold ? d.scale : 0;
}

// ---------------------------------------------------------------------------------------------------------
// Kernels. Grid: (tiles of the longest sequence, heads, sequences)

template <int TILE> HOST_DEVICE constexpr int explicit_forward_floats(int width) {
    return 4 * TILE * width + TILE * (TILE + 1) + 2 * TILE;
}

template <int TILE>
__global__ void __launch_bounds__(EXPLICIT_THREADS)
    attention_forward_explicit_kernel(floatX* out, float* lse, const floatX* qkv, ExplicitArguments z) {
    extern __shared__ float explicit_shared[];
    ExplicitTile t = explicit_tile(z, TILE);
    if (t.origin >= t.T) return;
    int WIDTH = t.width, HS = z.HS, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float* shared = explicit_shared;
    float *q = explicit_take(&shared, TILE * WIDTH), *k = explicit_take(&shared, TILE * WIDTH);
    float *v = explicit_take(&shared, TILE * WIDTH), *o = explicit_take(&shared, TILE * WIDTH);
    float* s = explicit_take(&shared, TILE * (TILE + 1));
    float *largest = explicit_take(&shared, TILE), *sum = explicit_take(&shared, TILE);
    const floatX* base = qkv + (size_t)t.start * 3 * t.C + t.channel;

    explicit_load<TILE>(q, WIDTH, base + (size_t)t.origin * 3 * t.C, 3 * t.C, t.T - t.origin, HS);
    explicit_zero(o, TILE * WIDTH);
    explicit_zero(sum, TILE);
    if (threadIdx.x < TILE) largest[threadIdx.x] = -INFINITY;

    int keys = min(t.T, attention_visible(z.mask, t.origin + TILE - 1, t.T));
    for (int k0 = 0; k0 < keys; k0 += TILE) {
        const floatX* at = base + (size_t)k0 * 3 * t.C;
        __syncthreads();  // the last step's tiles have been read
        explicit_load<TILE>(k, WIDTH, at + t.C, 3 * t.C, t.T - k0, HS);
        explicit_load<TILE>(v, WIDTH, at + 2 * t.C, 3 * t.C, t.T - k0, HS);
        __syncthreads();
        explicit_product<TILE, SET>(s, TILE + 1, q, WIDTH, 1, k, WIDTH, 1, TILE, HS);
        __syncthreads();
        // A warp takes a row at a time, a lane a key.
        for (int row = warp; row < TILE; row += EXPLICIT_THREADS / WARP) {
            int query = t.origin + row, key = k0 + lane, visible = min(t.T, attention_visible(z.mask, query, t.T));
            float* p = s + row * (TILE + 1) + lane;
            float score = lane < TILE && key < visible ? *p * z.factor : -INFINITY, old = largest[row];
            float top = fmaxf(old, warp_max(score));  // key 0 is visible to all: a number after the first step
            float e = real_exp(score - top), shrink = real_exp(old - top), total = warp_sum(e);
            if (lane < TILE) *p = e == 0 ? 0 : e * explicit_keep(z.dropout, t.sequence, t.head, query, key);
            for (int c = lane; c < HS; c += WARP) o[row * WIDTH + c] *= shrink;
            __syncwarp();  // every lane has read largest[row]
            if (lane == 0) {
                largest[row] = top;
                sum[row] = sum[row] * shrink + total;
            }
            __syncwarp();
        }
        __syncthreads();
        explicit_product<TILE, ADD>(o, WIDTH, s, TILE + 1, 1, v, 1, WIDTH, HS, TILE);
    }
    __syncthreads();
    for (int row = warp; row < TILE; row += EXPLICIT_THREADS / WARP) {
        int query = t.origin + row;
        for (int c = lane; c < HS; c += WARP) o[row * WIDTH + c] /= sum[row];
        if (lane == 0 && query < t.T) lse[(size_t)t.head * z.N + t.start + query] = largest[row] + logf(sum[row]);
    }
    __syncthreads();
    explicit_store<TILE>(out + (size_t)(t.start + t.origin) * t.C + t.channel, t.C, t.T - t.origin, o, WIDTH, HS, 1);
}

// From scores and dout . V, both [queries, keys]: D and ds in their place. Zero where the mask or an end hides the pair.
template <int TILE>
__device__ inline void explicit_gradients(float* s, float* ds, const float* lse, const float* delta, int q0, int k0,
                                          const ExplicitTile& t, const ExplicitArguments& z) {
    for (int i = threadIdx.x; i < TILE * TILE; i += EXPLICIT_THREADS) {
        int row = i / TILE, column = i % TILE, query = q0 + row, key = k0 + column, at = row * (TILE + 1) + column;
        bool visible = query < t.T && key < attention_visible(z.mask, query, t.T);
        float p = visible ? real_exp(s[at] * z.factor - lse[row]) : 0;
        float keep = visible ? explicit_keep(z.dropout, t.sequence, t.head, query, key) : 0;
        ds[at] = visible ? p * (ds[at] * keep - delta[row]) : 0;
        s[at] = p * keep;
    }
}

template <int TILE> HOST_DEVICE constexpr int explicit_query_floats(int width) {
    return 5 * TILE * width + 2 * TILE * (TILE + 1) + 2 * TILE;
}

// dQ for a tile of queries, and delta [NH, N] for the other kernel.
template <int TILE>
__global__ void __launch_bounds__(EXPLICIT_THREADS)
    attention_backward_explicit_query_kernel(floatX* dqkv, float* deltas, const floatX* dout, const floatX* qkv,
                                             const floatX* out, const float* lses, ExplicitArguments z) {
    extern __shared__ float explicit_shared[];
    ExplicitTile t = explicit_tile(z, TILE);
    if (t.origin >= t.T) return;
    int WIDTH = t.width, HS = z.HS, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    float* shared = explicit_shared;
    float *q = explicit_take(&shared, TILE * WIDTH), *g = explicit_take(&shared, TILE * WIDTH);
    float *k = explicit_take(&shared, TILE * WIDTH), *v = explicit_take(&shared, TILE * WIDTH);
    float* dq = explicit_take(&shared, TILE * WIDTH);
    float *s = explicit_take(&shared, TILE * (TILE + 1)), *ds = explicit_take(&shared, TILE * (TILE + 1));
    float *lse = explicit_take(&shared, TILE), *delta = explicit_take(&shared, TILE);
    const floatX* base = qkv + (size_t)t.start * 3 * t.C + t.channel;
    const floatX* o = out + (size_t)(t.start + t.origin) * t.C + t.channel;
    int exist = t.T - t.origin;

    explicit_load<TILE>(q, WIDTH, base + (size_t)t.origin * 3 * t.C, 3 * t.C, exist, HS);
    explicit_load<TILE>(g, WIDTH, dout + (size_t)(t.start + t.origin) * t.C + t.channel, t.C, exist, HS);
    explicit_zero(dq, TILE * WIDTH);
    __syncthreads();
    for (int row = warp; row < TILE; row += EXPLICIT_THREADS / WARP) {
        size_t stat = (size_t)t.head * z.N + t.start + t.origin + row;
        float sum = 0;
        for (int c = lane; c < HS && row < exist; c += WARP) sum += g[row * WIDTH + c] * to_float(o[row * t.C + c]);
        sum = warp_sum(sum);
        if (lane == 0) delta[row] = sum;
        if (lane == 0) lse[row] = row < exist ? lses[stat] : 0;
        if (lane == 0 && row < exist) deltas[stat] = sum;
    }

    int keys = min(t.T, attention_visible(z.mask, t.origin + TILE - 1, t.T));
    for (int k0 = 0; k0 < keys; k0 += TILE) {
        const floatX* at = base + (size_t)k0 * 3 * t.C;
        __syncthreads();
        explicit_load<TILE>(k, WIDTH, at + t.C, 3 * t.C, t.T - k0, HS);
        explicit_load<TILE>(v, WIDTH, at + 2 * t.C, 3 * t.C, t.T - k0, HS);
        __syncthreads();
        explicit_product<TILE, SET>(s, TILE + 1, q, WIDTH, 1, k, WIDTH, 1, TILE, HS);
        explicit_product<TILE, SET>(ds, TILE + 1, g, WIDTH, 1, v, WIDTH, 1, TILE, HS);
        __syncthreads();
        explicit_gradients<TILE>(s, ds, lse, delta, t.origin, k0, t, z);
        __syncthreads();
        explicit_product<TILE, ADD>(dq, WIDTH, ds, TILE + 1, 1, k, 1, WIDTH, HS, TILE);
    }
    __syncthreads();
    explicit_store<TILE>(dqkv + (size_t)(t.start + t.origin) * 3 * t.C + t.channel, 3 * t.C, exist, dq, WIDTH, HS,
                         z.factor);
}

template <int TILE> HOST_DEVICE constexpr int explicit_key_floats(int width) {
    return 6 * TILE * width + 2 * TILE * (TILE + 1) + 2 * TILE;
}

// dK and dV for a tile of keys.
template <int TILE>
__global__ void __launch_bounds__(EXPLICIT_THREADS)
    attention_backward_explicit_key_kernel(floatX* dqkv, const floatX* dout, const floatX* qkv, const float* lses,
                                           const float* deltas, ExplicitArguments z) {
    extern __shared__ float explicit_shared[];
    ExplicitTile t = explicit_tile(z, TILE);
    if (t.origin >= t.T) return;
    int WIDTH = t.width, HS = z.HS, exist = t.T - t.origin;
    float* shared = explicit_shared;
    float *q = explicit_take(&shared, TILE * WIDTH), *g = explicit_take(&shared, TILE * WIDTH);
    float *k = explicit_take(&shared, TILE * WIDTH), *v = explicit_take(&shared, TILE * WIDTH);
    float *dk = explicit_take(&shared, TILE * WIDTH), *dv = explicit_take(&shared, TILE * WIDTH);
    float *s = explicit_take(&shared, TILE * (TILE + 1)), *ds = explicit_take(&shared, TILE * (TILE + 1));
    float *lse = explicit_take(&shared, TILE), *delta = explicit_take(&shared, TILE);
    const floatX* base = qkv + (size_t)t.start * 3 * t.C + t.channel;
    const floatX* own = base + (size_t)t.origin * 3 * t.C;

    explicit_load<TILE>(k, WIDTH, own + t.C, 3 * t.C, exist, HS);
    explicit_load<TILE>(v, WIDTH, own + 2 * t.C, 3 * t.C, exist, HS);
    explicit_zero(dk, TILE * WIDTH);
    explicit_zero(dv, TILE * WIDTH);
    for (int q0 = z.mask == CAUSAL ? t.origin : 0; q0 < t.T; q0 += TILE) {
        __syncthreads();
        explicit_load<TILE>(q, WIDTH, base + (size_t)q0 * 3 * t.C, 3 * t.C, t.T - q0, HS);
        explicit_load<TILE>(g, WIDTH, dout + (size_t)(t.start + q0) * t.C + t.channel, t.C, t.T - q0, HS);
        if (threadIdx.x < TILE) {
            int row = threadIdx.x;
            size_t stat = (size_t)t.head * z.N + t.start + q0 + row;
            lse[row] = q0 + row < t.T ? lses[stat] : 0;
            delta[row] = q0 + row < t.T ? deltas[stat] : 0;
        }
        __syncthreads();
        explicit_product<TILE, SET>(s, TILE + 1, q, WIDTH, 1, k, WIDTH, 1, TILE, HS);
        explicit_product<TILE, SET>(ds, TILE + 1, g, WIDTH, 1, v, WIDTH, 1, TILE, HS);
        __syncthreads();
        explicit_gradients<TILE>(s, ds, lse, delta, q0, t.origin, t, z);
        __syncthreads();
        explicit_product<TILE, ADD>(dv, WIDTH, s, 1, TILE + 1, g, 1, WIDTH, HS, TILE);
        explicit_product<TILE, ADD>(dk, WIDTH, ds, 1, TILE + 1, q, 1, WIDTH, HS, TILE);
    }
    __syncthreads();
    floatX* to = dqkv + (size_t)(t.start + t.origin) * 3 * t.C + t.channel;
    explicit_store<TILE>(to + t.C, 3 * t.C, exist, dk, WIDTH, HS, z.factor);
    explicit_store<TILE>(to + 2 * t.C, 3 * t.C, exist, dv, WIDTH, HS, 1);
}

// ---------------------------------------------------------------------------------------------------------
// Launches

static inline ExplicitArguments explicit_arguments(const Sequences* s, AttentionShape shape) {
    ExplicitArguments z;
    z.cu_seqlens = s->cu_seqlens;
    z.N = s->rows;
    z.NH = shape.NH;
    z.HS = shape.HS;
    z.first = s->first;
    z.factor = (float)(1 / sqrt((double)shape.HS));
    z.mask = shape.mask;
    z.dropout = shape.dropout;
    return z;
}

static inline size_t explicit_shared_limit(void) {
    int device, bytes;
    cudaCheck(cudaGetDevice(&device));
    cudaCheck(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return (size_t)bytes;
}

// Launch with room for `floats` in shared memory.
template <typename... Arguments>
static void explicit_launch(void (*kernel)(Arguments...), const Sequences* s, int NH, int rows, int floats,
                            Context* ctx, Arguments... arguments) {
    dim3 grid((unsigned)((s->max_length + rows - 1) / rows), (unsigned)NH, (unsigned)s->count);
    size_t bytes = (size_t)floats * sizeof(float);
    cudaCheck(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes));
    kernel<<<grid, EXPLICIT_THREADS, bytes, ctx->stream>>>(arguments...);
    cudaCheck(cudaGetLastError());
}

template <int TILE>
static void explicit_forward_of(floatX* out, real* lse, const floatX* qkv, const Sequences* s, ExplicitArguments z,
                                Context* ctx) {
    explicit_launch(attention_forward_explicit_kernel<TILE>, s, z.NH, TILE, explicit_forward_floats<TILE>(z.HS | 1),
                    ctx, out, lse, qkv, z);
}

template <int TILE>
static void explicit_backward_of(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out,
                                 const real* lse, const Sequences* s, ExplicitArguments z, Context* ctx) {
    int width = z.HS | 1;
    real* delta = (real*)device_scratch(ctx, (size_t)z.NH * (size_t)z.N * sizeof *delta);
    explicit_launch(attention_backward_explicit_query_kernel<TILE>, s, z.NH, TILE, explicit_query_floats<TILE>(width),
                    ctx, dqkv, delta, dout, qkv, out, lse, z);
    explicit_launch(attention_backward_explicit_key_kernel<TILE>, s, z.NH, TILE, explicit_key_floats<TILE>(width), ctx,
                    dqkv, dout, qkv, lse, (const real*)delta, z);
}

// Whether the backward kernels' tiles of so many rows fit; a head size that fits no tile cannot be trained.
template <int TILE> static int explicit_fits(int HS) {
    return (size_t)explicit_key_floats<TILE>(HS | 1) * sizeof(float) <= explicit_shared_limit();
}

static inline void explicit_check(int HS) {
    if (!explicit_fits<16>(HS))
        die(USAGE, "head size %d does not fit into this GPU's shared memory; use more heads", HS);
}

static inline void explicit_forward(floatX* out, real* lse, const floatX* qkv, const Sequences* s, AttentionShape shape,
                                    Context* ctx) {
    ExplicitArguments z = explicit_arguments(s, shape);
    explicit_check(shape.HS);
    if (explicit_fits<32>(shape.HS)) explicit_forward_of<32>(out, lse, qkv, s, z, ctx);
    else explicit_forward_of<16>(out, lse, qkv, s, z, ctx);
}

static inline void explicit_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out,
                                     const real* lse, const Sequences* s, AttentionShape shape, Context* ctx) {
    ExplicitArguments z = explicit_arguments(s, shape);
    explicit_check(shape.HS);
    if (explicit_fits<32>(shape.HS)) explicit_backward_of<32>(dqkv, dout, qkv, out, lse, s, z, ctx);
    else explicit_backward_of<16>(dqkv, dout, qkv, out, lse, s, z, ctx);
}

#endif
