/* The forward pass of flash attention on mma.sync. A block takes 128 queries of one head of one sequence and iterates
 * over tiles of 64 keys. For each query it keeps the running maximum of the scores. It also keeps the running sum of
 * exponentials and the output, both relative to the maximum. See flash_tiles.cuh.
 * Scratch: dropout's bits. */
#ifndef LLMC_OPS_ATTENTION_FLASH_FORWARD_CUH
#define LLMC_OPS_ATTENTION_FLASH_FORWARD_CUH

#include "llmc/ops/attention/flash_tiles.cuh"

// Process one tile of scores s, of which this lane has COLUMNS columns of two rows. s becomes exp(s - row_max), and the
// output o so far is rescaled. Every query sees key 0, so row_max is above -infinity after the first tile.
template <int COLUMNS, int CHANNELS>
__device__ __forceinline__ void flash_online_softmax(float (&s)[COLUMNS][4], float (&o)[CHANNELS][4],
                                                     float (&row_max)[2], float (&row_sum)[2], float scale) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float new_max = row_max_of(s, half, row_max[half]);
        float rescale = ex2_approx((row_max[half] - new_max) * scale);
        row_max[half] = new_max;
        row_sum[half] = row_sum[half] * rescale + row_exp2(s, half, scale, new_max * scale);
#pragma unroll
        for (int n = 0; n < CHANNELS; n++) {
            o[n][2 * half] *= rescale;
            o[n][2 * half + 1] *= rescale;
        }
    }
}

// Grid: (tiles of queries of the longest sequence, heads, sequences). With CAUSAL the last tile, which has the most
// keys, runs first, so that short tiles fill up the end.
template <int D, Mask mask, bool dropped>
__global__ void __launch_bounds__(FLASH_THREADS, FlashTiles<D>::FORWARD_BLOCKS)
    attention_forward_flash_kernel(floatX* out, float* lse, const floatX* qkv, FlashParams z) {
    constexpr int M = FlashTiles<D>::FORWARD_ROWS, QUERIES = FLASH_WARPS * 16 * M, KEYS = FLASH_TILE;
    constexpr int CHUNK = dropped ? FlashTiles<D>::FORWARD_CHUNK_DROPPED : FlashTiles<D>::FORWARD_CHUNK,
                  COLUMNS = CHUNK / 8;
    constexpr uint32_t TILE_BYTES = flash_tile_bytes<D>(KEYS);
    extern __shared__ __align__(1024) unsigned char flash_shared[];
    uint32_t q_tile = (uint32_t)__cvta_generic_to_shared(flash_shared),
             kv_tiles = q_tile + flash_tile_bytes<D>(QUERIES);

    if (!FlashTiles<D>::RUNS) return;
    int head = blockIdx.y, start = z.cu_seqlens[blockIdx.z], T = z.cu_seqlens[blockIdx.z + 1] - start;
    int q0 = QUERIES * (int)(mask == CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    if (q0 >= T) return;
    int C = z.NH * z.HS, stride = 3 * C;
    const floatX* q = qkv + (size_t)start * stride + (size_t)head * z.HS;
    int warp_row = threadIdx.x / WARP * 16 * M, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    int query = q0 + warp_row;  // the warp's first
    int steps = ((mask == CAUSAL ? min(T, q0 + QUERIES) : T) + KEYS - 1) / KEYS;
    float scale = z.softmax_scale * LOG2_E;

    flash_load<D, QUERIES>(q_tile, q + (size_t)q0 * stride, stride, T - q0, z.HS);
    flash_load<D, KEYS>(kv_tiles, q + C, stride, T, z.HS);
    flash_load<D, KEYS>(kv_tiles + TILE_BYTES, q + 2 * C, stride, T, z.HS);

    float o[M][D / 8][4] = {}, row_max[M][2], row_sum[M][2] = {};
#pragma unroll
    for (int m = 0; m < M; m++) row_max[m][0] = row_max[m][1] = -INFINITY;

    for (int step = 0; step < steps; step++) {
        uint32_t k_tile = kv_tiles + (uint32_t)(step & 1) * 2 * TILE_BYTES, v_tile = k_tile + TILE_BYTES;
        cp_async_wait_all();
        __syncthreads();  // this step's tiles have arrived, and the other two are no longer read
        if (step + 1 < steps) {
            uint32_t next = kv_tiles + (uint32_t)(~step & 1) * 2 * TILE_BYTES;
            int k1 = (step + 1) * KEYS;
            flash_load_next<D>(next, q + C + (size_t)k1 * stride, C, stride, T - k1, z.HS);
        }
        if (query >= T) continue;
#pragma unroll
        for (int chunk = 0; chunk < KEYS; chunk += CHUNK) {
            int k0 = step * KEYS + chunk;
            if (k0 >= T || (mask == CAUSAL && k0 > query + 16 * M - 1))
                continue;  // masked for all of this warp's queries

            uint32_t keep[M][2];
            if (dropped)
#pragma unroll
                for (int m = 0; m < M; m++) flash_dropout_bits(keep[m], z, head, start + query + 16 * m, k0);
            float s[M][COLUMNS][4] = {};
            flash_product_nt<D, M, COLUMNS>(s, flash_lane_rows_first<D>(q_tile), warp_row,
                                            flash_lane_columns_first<D>(k_tile), chunk);
            flash_mask<mask>(s, query, k0, T);
#pragma unroll
            for (int m = 0; m < M; m++) flash_online_softmax(s[m], o[m], row_max[m], row_sum[m], scale);
            if (dropped) {
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
                        for (int i = 0; i < 4; i++)
                            if (!flash_is_kept(keep[m], n, i)) s[m][n][i] = 0;
                    }
            }
            flash_product_nn<D, M, COLUMNS>(o, s, flash_lane_rows_first<D>(v_tile), chunk);
        }
    }
    if (query >= T) return;

#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float total = quad_sum(row_sum[m][half]);
            int row = query + 16 * m + 8 * half + g;
            if (t == 0 && row < T)
                lse[(size_t)head * z.N + start + row] = row_max[m][half] * z.softmax_scale + logf(total);
            float inverse = (dropped ? z.keep_scale : 1.0f) / total;
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                o[m][n][2 * half] *= inverse;
                o[m][n][2 * half + 1] *= inverse;
            }
        }
    flash_store<D, M>(out + (size_t)(start + q0) * C + (size_t)head * z.HS, C, T - q0, z.HS, o, q_tile, warp_row);
}

static inline void flash_forward(floatX* out, real* lse, const floatX* qkv, const Sequences* s, AttentionShape shape,
                                 Context* ctx) {
    const uint32_t* bits = flash_draw_by_query(s, shape, ctx);
    flash_dispatch(shape, [&](auto v) {
        typedef decltype(v) V;
        constexpr int QUERIES = FLASH_WARPS * 16 * FlashTiles<V::D>::FORWARD_ROWS;
        flash_launch(attention_forward_flash_kernel<V::D, V::MASK, V::DROPPED>, s, shape.NH, QUERIES,
                     flash_tile_bytes<V::D>(QUERIES + 4 * FLASH_TILE), ctx, out, lse, qkv,
                     flash_params(s, shape, bits));
    });
}

#endif
