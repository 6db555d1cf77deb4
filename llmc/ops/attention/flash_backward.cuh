/* The backward pass of flash attention on mma.sync: two kernels. Each recomputes P and ds, so no sum crosses blocks and
 * the order of blocks does not matter:
 *   query kernel   a block takes queries, iterates over keys and sums dQ. It writes (lse, delta) of its rows for the
 *                  key kernel
 *   key kernel     a block takes keys, iterates over queries and sums dK and dV. Its scores are transposed (a row is a
 *                  key), so that P and ds are left operands without leaving their registers
 * See flash_tiles.cuh. Scratch: dropout's bits and FlashRowStats. */
#ifndef LLMC_OPS_ATTENTION_FLASH_BACKWARD_CUH
#define LLMC_OPS_ATTENTION_FLASH_BACKWARD_CUH

#include "llmc/ops/attention/flash_tiles.cuh"

// Writes dQ and row_stats [NH, N]. Grid: (tiles of queries of the longest sequence, heads, sequences), as in the
// forward pass.
template <int D, Mask mask, bool dropped>
__global__ void __launch_bounds__(FLASH_THREADS, FlashTiles<D>::QUERY_BLOCKS)
    attention_backward_query_kernel(floatX* dqkv, FlashRowStats* rows, const floatX* dout, const floatX* qkv,
                                    const floatX* out, const float* lse, FlashParams z) {
    constexpr int M = FlashTiles<D>::QUERY_ROWS, QUERIES = FLASH_WARPS * 16 * M, KEYS = FLASH_TILE, CHUNK = FLASH_CHUNK;
    constexpr int COLUMNS = CHUNK / 8;
    constexpr uint32_t TILE_BYTES = flash_tile_bytes<D>(KEYS);
    extern __shared__ __align__(1024) unsigned char flash_shared[];
    uint32_t q_tile = (uint32_t)__cvta_generic_to_shared(flash_shared), g_tile = q_tile + flash_tile_bytes<D>(QUERIES);
    uint32_t kv_tiles = g_tile + flash_tile_bytes<D>(QUERIES);

    if (!FlashTiles<D>::RUNS) return;
    int head = blockIdx.y, start = z.cu_seqlens[blockIdx.z], T = z.cu_seqlens[blockIdx.z + 1] - start;
    int q0 = QUERIES * (int)(mask == CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    if (q0 >= T) return;
    int C = z.NH * z.HS, stride = 3 * C, channel = head * z.HS;
    const floatX* q = qkv + (size_t)start * stride + channel;
    int warp_row = threadIdx.x / WARP * 16 * M, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    int query = q0 + warp_row;
    int steps = ((mask == CAUSAL ? min(T, q0 + QUERIES) : T) + KEYS - 1) / KEYS;
    float scale = z.softmax_scale * LOG2_E;

    flash_load<D, QUERIES>(q_tile, q + (size_t)q0 * stride, stride, T - q0, z.HS);
    flash_load<D, QUERIES>(g_tile, dout + (size_t)(start + q0) * C + channel, C, T - q0, z.HS);
    flash_load<D, KEYS>(kv_tiles, q + C, stride, T, z.HS);
    flash_load<D, KEYS>(kv_tiles + TILE_BYTES, q + 2 * C, stride, T, z.HS);

    // During these copies the four lanes of a row compute its delta. Rows past the end get unused but finite values.
    FlashRowStats row[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int i = query + 16 * m + 8 * half + g;
            size_t at = (size_t)(start + i) * C + channel;
            float delta = 0;
            for (int c = 8 * t; c < z.HS && i < T; c += 32) {
                Vector<floatX> x = load128(dout + at + c), y = load128(out + at + c);
#pragma unroll
                for (int j = 0; j < 8; j++) delta += to_float(x.v[j]) * to_float(y.v[j]);
            }
            delta = quad_sum(delta);
            size_t stat = (size_t)head * z.N + start + i;
            row[m][half].x = i < T ? lse[stat] * LOG2_E : 0;
            row[m][half].y = delta;
            if (t == 0 && i < T) rows[stat] = row[m][half];
        }

    float dq[M][D / 8][4] = {};
    for (int step = 0; step < steps; step++) {
        uint32_t k_tile = kv_tiles + (uint32_t)(step & 1) * 2 * TILE_BYTES, v_tile = k_tile + TILE_BYTES;
        cp_async_wait_all();
        __syncthreads();
        if (step + 1 < steps) {
            uint32_t next = kv_tiles + (uint32_t)(~step & 1) * 2 * TILE_BYTES;
            int k1 = (step + 1) * KEYS;
            flash_load_next<D>(next, q + C + (size_t)k1 * stride, C, stride, T - k1, z.HS);
        }
        if (query >= T) continue;
#pragma unroll
        for (int chunk = 0; chunk < KEYS; chunk += CHUNK) {
            int k0 = step * KEYS + chunk;
            if (k0 >= T || (mask == CAUSAL && k0 > query + 16 * M - 1)) continue;
            uint32_t keep[M][2];
            if (dropped)
#pragma unroll
                for (int m = 0; m < M; m++) flash_dropout_bits(keep[m], z, head, start + query + 16 * m, k0);
            float s[M][COLUMNS][4] = {}, ds[M][COLUMNS][4] = {};
            flash_product_nt<D, M, COLUMNS>(s, flash_lane_rows_first<D>(q_tile), warp_row,
                                            flash_lane_columns_first<D>(k_tile), chunk);
            flash_product_nt<D, M, COLUMNS>(ds, flash_lane_rows_first<D>(g_tile), warp_row,
                                            flash_lane_columns_first<D>(v_tile), chunk);
            flash_mask<mask>(s, query, k0, T);
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int n = 0; n < COLUMNS; n++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float p = ex2_approx(fmaf(s[m][n][i], scale, -row[m][i / 2].x)), dp = ds[m][n][i];
                        if (dropped) dp = flash_is_kept(keep[m], n, i) ? dp * z.keep_scale : 0;
                        ds[m][n][i] = p * (dp - row[m][i / 2].y);
                    }
                }
            flash_product_nn<D, M, COLUMNS>(dq, ds, flash_lane_rows_first<D>(k_tile), chunk);
        }
    }
    if (query >= T) return;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) dq[m][n][i] *= z.softmax_scale;
    flash_store<D, M>(dqkv + (size_t)(start + q0) * stride + channel, stride, T - q0, z.HS, dq, q_tile, warp_row);
}

// Write dK and dV, using the row statistics `rows` of the query kernel. Grid: (tiles of keys of the longest sequence,
// heads, sequences). M: blocks of 16 keys that a warp owns. A query past the end contributes nothing: P = 1 there, but
// everything that P multiplies is zero.
template <int D, Mask mask, int M, bool dropped>
__global__ void __launch_bounds__(FLASH_THREADS,
                                  dropped ? FlashTiles<D>::KEY_BLOCKS_DROPPED : FlashTiles<D>::KEY_BLOCKS)
    attention_backward_key_kernel(floatX* dqkv, const floatX* dout, const floatX* qkv, const FlashRowStats* rows,
                                  FlashParams z) {
    constexpr int KEYS = FLASH_WARPS * 16 * M, QUERIES = FLASH_TILE,
                  CHUNK = dropped ? FLASH_CHUNK : FlashTiles<D>::KEY_CHUNK;
    constexpr int COLUMNS = CHUNK / 8;
    constexpr uint32_t TILE_BYTES = flash_tile_bytes<D>(QUERIES), ROWS_BYTES = QUERIES * sizeof(FlashRowStats);
    extern __shared__ __align__(1024) unsigned char flash_shared[];
    uint32_t k_tile = (uint32_t)__cvta_generic_to_shared(flash_shared), v_tile = k_tile + flash_tile_bytes<D>(KEYS);
    uint32_t qg_tiles = v_tile + flash_tile_bytes<D>(KEYS), row_tiles = qg_tiles + 4 * TILE_BYTES;

    if (!FlashTiles<D>::RUNS) return;
    int head = blockIdx.y, start = z.cu_seqlens[blockIdx.z], T = z.cu_seqlens[blockIdx.z + 1] - start;
    int k0 = KEYS * (int)blockIdx.x;
    if (k0 >= T) return;
    size_t C = (size_t)z.NH * z.HS, stride = 3 * C, channel = (size_t)head * z.HS;
    const floatX* q = qkv + (size_t)start * stride + channel;
    const floatX* dy = dout + (size_t)start * C + channel;
    rows += (size_t)head * z.N + start;
    int warp_row = threadIdx.x / WARP * 16 * M, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    int key = k0 + warp_row;  // the warp's first
    int step = mask == CAUSAL ? k0 / QUERIES : 0, steps = (T + QUERIES - 1) / QUERIES;
    float scale = z.softmax_scale * LOG2_E;

    // Start copying step i's Q, dout and rows.
    auto load = [&](int i) {
        uint32_t q_tile = qg_tiles + (uint32_t)(i & 1) * 2 * TILE_BYTES;
        int first = i * QUERIES, at = (int)threadIdx.x;
        flash_load<D, QUERIES>(q_tile, q + (size_t)first * stride, stride, T - first, z.HS);
        flash_load<D, QUERIES>(q_tile + TILE_BYTES, dy + (size_t)first * C, C, T - first, z.HS);
        if (at < QUERIES) {
            bool exists = first + at < T;
            cp_async_ca_8(row_tiles + (uint32_t)(i & 1) * ROWS_BYTES + (uint32_t)at * sizeof(FlashRowStats),
                          exists ? rows + first + at : rows, exists);
        }
    };
    flash_load<D, KEYS>(k_tile, q + C + (size_t)k0 * stride, stride, T - k0, z.HS);
    flash_load<D, KEYS>(v_tile, q + 2 * C + (size_t)k0 * stride, stride, T - k0, z.HS);
    load(step);

    float dk[M][D / 8][4] = {}, dv[M][D / 8][4] = {};
    for (; step < steps; step++) {
        uint32_t q_tile = qg_tiles + (uint32_t)(step & 1) * 2 * TILE_BYTES, g_tile = q_tile + TILE_BYTES;
        uint32_t row_tile = row_tiles + (uint32_t)(step & 1) * ROWS_BYTES;
        cp_async_wait_all();
        __syncthreads();
        if (step + 1 < steps) load(step + 1);
        if (key >= T) continue;
#pragma unroll
        for (int chunk = 0; chunk < QUERIES; chunk += CHUNK) {
            int query = step * QUERIES + chunk;
            if (query >= T || (mask == CAUSAL && query + CHUNK - 1 < key)) continue;
            uint32_t keep[M][2];
            if (dropped)
#pragma unroll
                for (int m = 0; m < M; m++) flash_dropout_bits(keep[m], z, head, start + key + 16 * m, query);
            float p[M][COLUMNS][4] = {}, ds[M][COLUMNS][4] = {};
            flash_product_nt<D, M, COLUMNS>(p, flash_lane_rows_first<D>(k_tile), warp_row,
                                            flash_lane_columns_first<D>(q_tile), chunk);
            flash_product_nt<D, M, COLUMNS>(ds, flash_lane_rows_first<D>(v_tile), warp_row,
                                            flash_lane_columns_first<D>(g_tile), chunk);
            bool diagonal = mask == CAUSAL && query < key + 16 * M - 1;
#pragma unroll
            for (int n = 0; n < COLUMNS; n++) {
                // Statistics of queries query + 8 n + 2 t and the next.
                int4 stats =
                    ld_shared_v4(row_tile + (uint32_t)(chunk + 8 * n + 2 * t) * (uint32_t)sizeof(FlashRowStats));
                float lse[2] = {__int_as_float(stats.x), __int_as_float(stats.z)};
                float delta[2] = {__int_as_float(stats.y), __int_as_float(stats.w)};
#pragma unroll
                for (int m = 0; m < M; m++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float e = ex2_approx(fmaf(p[m][n][i], scale, -lse[i % 2])), dp = ds[m][n][i];
                        if (diagonal && key + 16 * m + 8 * (i / 2) + g > query + 8 * n + 2 * t + i % 2) e = 0;
                        bool kept = !dropped || flash_is_kept(keep[m], n, i);
                        p[m][n][i] = kept ? e : 0;
                        if (dropped) dp = kept ? dp * z.keep_scale : 0;
                        ds[m][n][i] = e * (dp - delta[i % 2]);
                    }
                }
            }
            flash_product_nn<D, M, COLUMNS>(dv, p, flash_lane_rows_first<D>(g_tile), chunk);
            flash_product_nn<D, M, COLUMNS>(dk, ds, flash_lane_rows_first<D>(q_tile), chunk);
        }
    }
    if (key >= T) return;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < D / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                dk[m][n][i] *= z.softmax_scale;
                if (dropped) dv[m][n][i] *= z.keep_scale;
            }
    floatX* to = dqkv + (size_t)(start + k0) * stride + channel;
    flash_store<D, M>(to + C, stride, T - k0, z.HS, dk, k_tile, warp_row);
    flash_store<D, M>(to + 2 * C, stride, T - k0, z.HS, dv, v_tile, warp_row);
}

// Shared memory of the key kernel, in which a warp owns M blocks of 16 keys, and of the query kernel.
template <int D, int M> constexpr size_t flash_key_bytes(void) {
    return flash_tile_bytes<D>(2 * FLASH_WARPS * 16 * M + 4 * FLASH_TILE) + 2 * FLASH_TILE * sizeof(FlashRowStats);
}

template <int D> constexpr size_t flash_query_bytes(void) {
    return flash_tile_bytes<D>(2 * FLASH_WARPS * 16 * FlashTiles<D>::QUERY_ROWS + 4 * FLASH_TILE);
}

// Whether the tiles fit in shared memory. The backward pass needs more of it than the forward pass.
static inline int flash_fits(int HS, const Context* ctx) {
    size_t query = HS <= 64 ? flash_query_bytes<64>() : flash_query_bytes<128>();
    size_t key = HS <= 64 ? flash_key_bytes<64, 1>() : flash_key_bytes<128, 1>();
    return max_size(query, key) <= ctx->shared_of_block;
}

static inline size_t flash_scratch_bound(int N, int fewest, int most, int T, AttentionShape shape, const Context* ctx) {
    return (void)fewest, (void)ctx, flash_bits_bytes(N, most, T, shape) + flash_row_stats_bytes(N, shape.NH);
}

static inline void flash_backward(floatX* dqkv, const floatX* dout, const floatX* qkv, const floatX* out,
                                  const real* lse, const Sequences* s, AttentionShape shape, Context* ctx) {
    size_t bits_bytes = flash_bits_bytes(s->rows, s->count, s->max_length, shape);
    uint32_t* bits = (uint32_t*)device_scratch(ctx, bits_bytes + flash_row_stats_bytes(s->rows, shape.NH));
    FlashRowStats* rows = (FlashRowStats*)((char*)bits + bits_bytes);
    FlashParams z = flash_params(s, shape, bits);
    flash_dispatch(shape, [&](auto v) {
        typedef decltype(v) V;
        constexpr int D = V::D, QUERIES = FLASH_WARPS * 16 * FlashTiles<D>::QUERY_ROWS;
        constexpr int M = V::DROPPED ? FlashTiles<D>::KEY_ROWS_DROPPED : FlashTiles<D>::KEY_ROWS;
        if (V::DROPPED) draw_by_query(bits, s, shape, ctx);
        flash_launch(attention_backward_query_kernel<D, V::MASK, V::DROPPED>, s, z.NH, QUERIES, flash_query_bytes<D>(),
                     ctx, dqkv, rows, dout, qkv, out, lse, z);
        if (V::DROPPED) draw_by_key(bits, s, shape, ctx);
        if (flash_key_bytes<D, M>() <= ctx->shared_of_block)
            flash_launch(attention_backward_key_kernel<D, V::MASK, M, V::DROPPED>, s, z.NH, FLASH_WARPS * 16 * M,
                         flash_key_bytes<D, M>(), ctx, dqkv, dout, qkv, (const FlashRowStats*)rows, z);
        else
            flash_launch(attention_backward_key_kernel<D, V::MASK, 1, V::DROPPED>, s, z.NH, FLASH_WARPS * 16,
                         flash_key_bytes<D, 1>(), ctx, dqkv, dout, qkv, (const FlashRowStats*)rows, z);
    });
}

#endif
