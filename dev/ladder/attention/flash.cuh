/* Faster than fused: both products run on tensor cores, which do 16 x 8 x 16 products in an instruction of a warp. A
 * warp has 16 queries. Their scores for 64 keys come out as fragments in registers, the softmax works on these, and
 * what it leaves is already the left operand of the second product: two neighbouring result tiles, rounded and
 * packed, are one (llmc/device/ptx/mma.cuh). Keys and values stay bf16 in shared memory, 128 bytes a row, in the
 * swizzled layout of tma.cuh that ldmatrix reads without bank conflicts. While a tile is used, the next is on its
 * way (cp.async).
 *
 * Heads of up to 64 channels in whole 16-byte vectors, without dropout; others take the rung above. The shipped
 * kernel of this kind, flash_forward.cuh, has these too, larger tiles, and head sizes as template parameters.
 * Source: Dao, "FlashAttention-2", arXiv 2307.08691. */
#include "dev/ladder/attention/fused.cuh"
#include "llmc/hopper/tma.cuh"

enum { QUERIES = 64, KEYS = 64, CHANNELS = 64, THREADS = QUERIES / 16 * WARP, TILE_BYTES = KEYS * 2 * CHANNELS };

// Start to copy 64 rows of a head to a tile: zeros past row `rows` and channel HS.
static __device__ inline void flash_copy(uint32_t tile, const floatX* x, int stride, int rows, int HS) {
#pragma unroll
    for (int i = 0; i < KEYS * CHANNELS / 8 / THREADS; i++) {
        int at = i * THREADS + (int)threadIdx.x, row = at / 8, piece = at % 8, exists = row < rows && 8 * piece < HS;
        cp_async_cg_16(swizzle_128b(tile, row, piece), exists ? x + (size_t)row * (size_t)stride + 8 * piece : x,
                       exists);
    }
}

// s [16 queries, 64 keys] = Q K^T. A row of K is a column of the right operand.
static __device__ inline void flash_scores(float (&s)[KEYS / 8][4], const uint32_t (&q)[CHANNELS / 16][4],
                                           uint32_t k_tile) {
#pragma unroll
    for (int k = 0; k < CHANNELS / 16; k++)
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            uint32_t b[4];
            ldmatrix_tile(b, k_tile, 16 * n, k);
            mma_m16n8k16(s[2 * n], q[k], b[0], b[2]);
            mma_m16n8k16(s[2 * n + 1], q[k], b[1], b[3]);
        }
}

// o [16 queries, 64 channels] += P V. A row of V is a row of the right operand, which ldmatrix transposes.
static __device__ inline void flash_output(float (&o)[CHANNELS / 8][4], const float (&p)[KEYS / 8][4],
                                           uint32_t v_tile) {
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) {
        uint32_t a[4] = {pack_floatx2(p[2 * k][0], p[2 * k][1]), pack_floatx2(p[2 * k][2], p[2 * k][3]),
                         pack_floatx2(p[2 * k + 1][0], p[2 * k + 1][1]),
                         pack_floatx2(p[2 * k + 1][2], p[2 * k + 1][3])};
#pragma unroll
        for (int n = 0; n < CHANNELS / 16; n++) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, fragment_address(v_tile, 16 * k, n));
            mma_m16n8k16(o[2 * n], a, b[0], b[1]);
            mma_m16n8k16(o[2 * n + 1], a, b[2], b[3]);
        }
    }
}

// The softmax of a tile, on the two rows of which this lane has elements: the update of the rung above, where a row is
// spread over four lanes (llmc/ops/attention/flash_tiles.cuh).
static __device__ inline void flash_softmax(float (&s)[KEYS / 8][4], float (&o)[CHANNELS / 8][4], float (&row_max)[2],
                                            float (&row_sum)[2], float scale) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = row_max_of(s, half, row_max[half]), rescale = ex2_approx((row_max[half] - most) * scale);
        row_max[half] = most;
        row_sum[half] = row_sum[half] * rescale + row_exp2(s, half, scale, most * scale);
#pragma unroll
        for (int n = 0; n < CHANNELS / 8; n++) o[n][2 * half] *= rescale, o[n][2 * half + 1] *= rescale;
    }
}

// Grid: tiles of queries, heads, sequences.
static __global__ void __launch_bounds__(THREADS)
    flash_kernel(floatX* out, real* lse, const floatX* qkv, AttentionArgs a) {
    __shared__ __align__(1024) unsigned char tiles[5 * TILE_BYTES];  // queries; twice keys and values
    uint32_t q_tile = (uint32_t)__cvta_generic_to_shared(tiles), kv_tiles = q_tile + TILE_BYTES;
    int head = (int)blockIdx.y, start = a.cu_seqlens[blockIdx.z], T = a.cu_seqlens[blockIdx.z + 1] - start;
    int q0 = QUERIES * (int)(gridDim.x - 1 - blockIdx.x), C = a.NH * a.HS, stride = 3 * C;
    if (q0 >= T) return;
    const floatX* x = qkv + (size_t)start * stride + (size_t)(head * a.HS);
    int lane = (int)threadIdx.x % WARP, g = lane / 4, t = lane % 4, warp_row = (int)threadIdx.x / WARP * 16;
    int keys = a.mask == CAUSAL ? min(T, q0 + QUERIES) : T;
    float scale = a.scale * LOG2_E, o[CHANNELS / 8][4] = {}, row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {};
    uint32_t q[CHANNELS / 16][4];

    flash_copy(q_tile, x + (size_t)q0 * stride, stride, T - q0, a.HS);
    flash_copy(kv_tiles, x + C, stride, T, a.HS);
    flash_copy(kv_tiles + TILE_BYTES, x + 2 * C, stride, T, a.HS);
    for (int k0 = 0, turn = 0; k0 < keys; k0 += KEYS, turn ^= 1) {
        uint32_t k_tile = kv_tiles + turn * 2 * TILE_BYTES, next = kv_tiles + (turn ^ 1) * 2 * TILE_BYTES;
        cp_async_wait_all();
        __syncthreads();  // this step's tiles are there, and the other two are no longer read
        if (k0 + KEYS < keys) {
            const floatX* ahead = x + (size_t)(k0 + KEYS) * stride;
            flash_copy(next, ahead + C, stride, T - k0 - KEYS, a.HS);
            flash_copy(next + TILE_BYTES, ahead + 2 * C, stride, T - k0 - KEYS, a.HS);
        }
        if (k0 == 0)
#pragma unroll
            for (int k = 0; k < CHANNELS / 16; k++) ldmatrix_tile(q[k], q_tile, warp_row, k);
        float s[KEYS / 8][4] = {};
        flash_scores(s, q, k_tile);
        if (k0 + KEYS > T || (a.mask == CAUSAL && k0 + KEYS > q0 + warp_row))
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int key = k0 + 8 * n + 2 * t + i % 2, query = q0 + warp_row + g + 8 * (i / 2);
                    if (key >= T || (a.mask == CAUSAL && key > query)) s[n][i] = -INFINITY;
                }
        flash_softmax(s, o, row_max, row_sum, scale);
        flash_output(o, s, k_tile + TILE_BYTES);
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int query = q0 + warp_row + g + 8 * half;
        float total = quad_sum(row_sum[half]);
        if (query >= T) continue;
        if (t == 0) lse[(size_t)head * a.N + start + query] = row_max[half] * a.scale + logf(total);
        floatX* to = out + (size_t)(start + query) * C + (size_t)(head * a.HS + 2 * t);
#pragma unroll
        for (int n = 0; n < CHANNELS / 8; n++)
            if (8 * n < a.HS)
                *(uint32_t*)(to + 8 * n) = pack_floatx2(o[n][2 * half] / total, o[n][2 * half + 1] / total);
    }
}

static inline void flash_attention_forward(floatX* out, real* lse, const floatX* qkv, const Sequences* s,
                                           AttentionShape shape, Context* ctx) {
    if (s->rows == 0) return;
    if (shape.HS > CHANNELS || shape.HS % 8 != 0 || shape.dropout.threshold) {
        fused_attention_forward(out, lse, qkv, s, shape, ctx);
        return;
    }
    dim3 grid(blocks_for((size_t)s->max_length, QUERIES), shape.NH, s->count);
    flash_kernel<<<grid, THREADS, 0, ctx->stream>>>(out, lse, qkv, attention_args(s, shape));
    cudaCheck(cudaGetLastError());
}
