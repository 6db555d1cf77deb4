/* quantize on the GPU: a block quantizes a tile of 128 rows and 8 COLUMNS columns. A thread takes 4 rows of COLUMNS
 * columns, so that its registers hold the 4 bytes of a word of the transpose. The words are exchanged through shared
 * memory, from which a warp writes 4 whole 128-byte lines of the transpose. A second kernel adds up the tiles' column
 * sums.
 *
 * Kernels that compute GELU are instruction-bound, not memory-bound. */
#ifndef LLMC_FP8_QUANTIZE_CUH
#define LLMC_FP8_QUANTIZE_CUH

#include "llmc/device/cuda_utils.cuh"
#include "llmc/fp8/quantize.h"
#include "llmc/fp8/words.cuh"

#ifdef __CUDACC__

enum {
    QUANTIZE_THREADS = 256,
    QUANTIZE_TILE_ROWS = 128,
    QUANTIZE_ROWS = 4,                                   // of a thread
    QUANTIZE_ACROSS = 8,                                 // threads that share a row; each takes COLUMNS columns
    QUANTIZE_BIAS_TILE = 8 * QUANTIZE_ACROSS,            // columns of a tile with row sums
    QUANTIZE_WORDS = QUANTIZE_TILE_ROWS / QUANTIZE_ROWS  // of the tile's transpose, in a row
};
static_assert(QUANTIZE_THREADS * QUANTIZE_ROWS == QUANTIZE_TILE_ROWS * QUANTIZE_ACROSS, "a whole tile");

// 16 bytes of a row of the tile's transpose. Rows are swizzled, so that neither the threads that write words nor those
// that read 16 bytes have bank conflicts.
template <int COLUMNS> __device__ inline int quantize_chunk(int column, int chunk) {
    return column * QUANTIZE_WORDS + 4 * (chunk ^ column / COLUMNS);
}

// Write the column sums of the tile to partial [tiles, C]. `sum`: of this thread's rows. `shared`: a row for each warp.
template <int COLUMNS>
__device__ inline void quantize_tile_sums(float* partial, const float* sum, float* shared, int column0, int C) {
    constexpr int WARPS = QUANTIZE_THREADS / WARP, TILE = COLUMNS * QUANTIZE_ACROSS;
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, c = threadIdx.x;
#pragma unroll
    for (int i = 0; i < COLUMNS; i++) {
        float total = sum[i];
#pragma unroll
        for (int apart = QUANTIZE_ACROSS; apart < WARP; apart *= 2) total += __shfl_xor_sync(ALL_LANES, total, apart);
        if (lane < QUANTIZE_ACROSS) shared[warp * TILE + lane * COLUMNS + i] = total;
    }
    __syncthreads();
    if (c < TILE && column0 + c < C) {
        float total = 0;
#pragma unroll
        for (int w = 0; w < WARPS; w++) total += shared[w * TILE + c];
        int tiles = (C + TILE - 1) / TILE;
        partial[(size_t)(blockIdx.x / tiles) * C + column0 + c] = total;
    }
    __syncthreads();
}

// bias.y of the tile's rows: a thread's sums over its columns, then sums over the tile's, then, by the last block of
// these rows, over those of all tiles, half of them by each of two threads. partial [tiles, rows of all tiles]; shared
// [QUANTIZE_TILE_ROWS]. All threads call it.
__device__ inline void quantize_bias(QuantizeBias bias, float* partial, unsigned* arrivals, float* sum, float* shared,
                                     int N, int C) {
    int tiles = (C + QUANTIZE_BIAS_TILE - 1) / QUANTIZE_BIAS_TILE, tile = (int)blockIdx.x % tiles;
    int down = (int)blockIdx.x / tiles, row0 = down * QUANTIZE_TILE_ROWS, at = threadIdx.x % QUANTIZE_TILE_ROWS;
    size_t rows = (size_t)(N + QUANTIZE_TILE_ROWS - 1) / QUANTIZE_TILE_ROWS * QUANTIZE_TILE_ROWS;
#pragma unroll
    for (int i = 0; i < QUANTIZE_ROWS; i++)
#pragma unroll
        for (int apart = 1; apart < QUANTIZE_ACROSS; apart *= 2) sum[i] += __shfl_xor_sync(ALL_LANES, sum[i], apart);
    if (threadIdx.x % QUANTIZE_ACROSS == 0)
        *(float4*)(partial + tile * rows + row0 + threadIdx.x / QUANTIZE_ACROSS * QUANTIZE_ROWS) =
            make_float4(sum[0], sum[1], sum[2], sum[3]);
    if (!last_to_arrive(arrivals + down, (unsigned)tiles)) return;
    int second = threadIdx.x >= QUANTIZE_TILE_ROWS, first = second ? tiles / 2 : 0;
    float total = sum_in_order(partial + first * rows + row0 + at, second ? tiles - first : tiles / 2, rows);
    if (second) shared[at] = total;
    __syncthreads();
    if (!second && row0 + at < N)
        bias.y[row0 + at] = from_float<floatX>((bias.b ? to_float(bias.b[row0 + at]) : 0) + total + shared[at]);
    __syncthreads();
}

// Elements [row, column...] of a tensor; zeros outside it, which do not change the statistics.
template <int COLUMNS>
__device__ inline void quantize_load(Vector<floatX>* to, const floatX* x, int row, int column, int N, int C) {
    constexpr int W = Vector<floatX>::SIZE;
#pragma unroll
    for (int j = 0; j < COLUMNS / W; j++) {
        to[j] = {};
        if (row < N && column < C) to[j] = load128_streaming(x + (size_t)row * C + column + j * W);
    }
}

// `zero` is 0, but if it comes from a barrier after all loads, the compiler does not know. With a literal 0, ptxas
// computes with the first rows before it loads the others, and a thread waits for memory several times instead of once.
// Only bf16, the type of builds that multiply in fp8, is unpacked so.
template <int COLUMNS>
__device__ inline void quantize_floats(float* v, const Vector<floatX>* from, [[maybe_unused]] unsigned zero) {
    constexpr int W = Vector<floatX>::SIZE;
    if constexpr (fp8_is_built()) {
        const unsigned* words = (const unsigned*)from;
#pragma unroll
        for (int j = 0; j < COLUMNS / 2; j++) {
            v[2 * j] = __int_as_float((int)(words[j] * (0x10000u + zero)));
            v[2 * j + 1] = __int_as_float((int)(words[j] & (0xffff0000u + zero)));
        }
    } else {
#pragma unroll
        for (int j = 0; j < COLUMNS / W; j++) to_floats(v + j * W, from[j]);
    }
}

#define QUANTIZE_LOG2_E 1.44269504f

// A row of logits: factor exp(x - lse) = 2^(log2(e) x + shift).
typedef struct {
    int target;  // below 0: the row is ignored, or is none
    float shift;
} QuantizeLogits;

__device__ inline QuantizeLogits quantize_logits(const QuantizeInput& in, int row, int N, int C) {
    QuantizeLogits r = {row < N ? in.logits.targets[row] : -1, 0};
    if (r.target < 0) return r;
    float lse = in.logits.losses.each[row] + to_float(in.x[(size_t)row * C + r.target]);
    r.shift = log2f((float)logits_gradient_factor(in.logits)) - QUANTIZE_LOG2_E * lse;
    return r;
}

// The gradients of a row's logits x, in place: COLUMNS of them, from column on. Few threads take the branches.
template <int COLUMNS>
__device__ inline void quantize_dlogits(float* x, const QuantizeLogits& row, const LogitsGradient& d, int column) {
#pragma unroll
    for (int j = 0; j < COLUMNS; j++) x[j] = ex2_approx(fmaf(QUANTIZE_LOG2_E, x[j], row.shift));
    if (column + COLUMNS > d.V) {
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            if (column + j >= d.V) x[j] = 0;
    }
    if (row.target < 0) {
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) x[j] = 0;
    }
    if ((unsigned)(row.target - column) < COLUMNS) {
        float factor = (float)logits_gradient_factor(d);
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            if (column + j == row.target) x[j] -= factor;
    }
}

// Minimum resident blocks per multiprocessor; 0: no bound. Without a bound, loading many partial sums at a time takes
// 128 registers, and two blocks are resident.
HOST_DEVICE static constexpr int quantize_residents(int bias) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890  // converts by several instructions, which take more registers
    return bias ? 2 : 0;
#else
    return bias && sizeof(floatX) == 2 ? 4 : 0;
#endif
}

// One block per tile, columns of tiles first. `partial`: column sums of the tiles, or row sums for the bias; NULL:
// skipped.
template <Fp8Format FORMAT, QuantizeSource SOURCE, Gelu GELU, int COLUMNS, bool BIAS>
__global__ void __launch_bounds__(QUANTIZE_THREADS, quantize_residents(BIAS))
    quantize_kernel(QuantizeOutput out, const __grid_constant__ QuantizeInput in, float* partial, unsigned* arrivals,
                    int N, int C) {
    constexpr int VECTORS = COLUMNS / Vector<floatX>::SIZE, TILE = COLUMNS * QUANTIZE_ACROSS;
    static_assert(!BIAS || TILE == QUANTIZE_BIAS_TILE, "quantize_bias() has the same tiles");
    __shared__ alignas(16) unsigned turned[TILE * QUANTIZE_WORDS];
    int tiles = (C + TILE - 1) / TILE;
    int row0 = (int)(blockIdx.x / tiles) * QUANTIZE_TILE_ROWS;
    int column0 = (int)(blockIdx.x % tiles) * TILE;
    int across = threadIdx.x % QUANTIZE_ACROSS, down = threadIdx.x / QUANTIZE_ACROSS;
    int row = row0 + QUANTIZE_ROWS * down, column = column0 + COLUMNS * across;
    float scale = (float)*out.scale, sum[COLUMNS] = {0}, mean[COLUMNS] = {0};
    if constexpr (SOURCE == QUANTIZE_CENTERED)
        if (column < C) load_reals<COLUMNS>(mean, in.center + column);
    float mean8[COLUMNS] = {0}, bias[QUANTIZE_ROWS] = {0}, inverse = 1 / scale;
    if constexpr (BIAS)
        if (column < C) {
            load_reals<COLUMNS>(mean, out.bias.means + column);
            load_reals<COLUMNS>(mean8, out.bias.means + C + column);
        }
    QuantizeSeen seen = {0, 0, 0};
    Vector<floatX> loaded[QUANTIZE_ROWS][VECTORS], before[QUANTIZE_ROWS][VECTORS];
#pragma unroll
    for (int i = 0; i < QUANTIZE_ROWS; i++) {
        quantize_load<COLUMNS>(loaded[i], in.x, row + i, column, N, C);
        if constexpr (SOURCE == QUANTIZE_GELU_BACKWARD)
            quantize_load<COLUMNS>(before[i], in.pre, row + i, column, N, C);
    }
    unsigned zero = (unsigned)__syncthreads_or(0);
    [[maybe_unused]] QuantizeLogits* rows = NULL;
    if constexpr (SOURCE == QUANTIZE_CLASSIFIER_BACKWARD) {
        __shared__ QuantizeLogits of_tile[QUANTIZE_TILE_ROWS];
        rows = of_tile + QUANTIZE_ROWS * down;
        if (threadIdx.x < QUANTIZE_TILE_ROWS) of_tile[threadIdx.x] = quantize_logits(in, row0 + (int)threadIdx.x, N, C);
        __syncthreads();
    }

    unsigned words[COLUMNS / 4][QUANTIZE_ROWS], zeros = 0;
#pragma unroll
    for (int i = 0; i < QUANTIZE_ROWS; i++) {
        float v[COLUMNS], at[COLUMNS];
        quantize_floats<COLUMNS>(v, loaded[i], zero);
        if constexpr (SOURCE == QUANTIZE_GELU_BACKWARD) quantize_floats<COLUMNS>(at, before[i], zero);
        if constexpr (SOURCE == QUANTIZE_CLASSIFIER_BACKWARD) quantize_dlogits<COLUMNS>(v, rows[i], in.logits, column);
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            if constexpr (SOURCE == QUANTIZE_GELU) v[j] = gelu_value(v[j], GELU);
            if constexpr (SOURCE == QUANTIZE_CENTERED) v[j] = row + i < N && column < C ? v[j] - mean[j] : 0;
            if constexpr (SOURCE == QUANTIZE_GELU_BACKWARD) v[j] *= gelu_derivative(at[j], GELU);
            if constexpr (FORMAT == FP8_E5M2 && SOURCE != QUANTIZE_CLASSIFIER_BACKWARD) sum[j] += v[j];
            seen.amax = quantize_max(seen.amax, fabsf(v[j]));
        }
#pragma unroll
        for (int j = 0; j < COLUMNS / 4; j++) words[j][i] = quantize_word<FORMAT>(v + 4 * j, scale);
        if constexpr (BIAS) {
            float rounded[COLUMNS];
#pragma unroll
            for (int j = 0; j < COLUMNS / 4; j++) quantize_numbers(rounded + 4 * j, words[j][i]);
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) bias[i] += v[j] * mean[j] - inverse * rounded[j] * mean8[j];
        }
        // A mask instead of a branch: with a branch the compiler duplicates everything that follows. The bits of 8
        // words are counted together.
        unsigned upper = row + i < N && column < C ? 0x80808080u : 0;
#pragma unroll
        for (int j = 0; j < COLUMNS / 4; j++) {
            zeros = zeros >> 1 | quantize_equal(words[j][i], 0, upper);
            if ((i * COLUMNS / 4 + j) % 8 == 7) seen.flushed += __popc(zeros), zeros = 0;
        }
    }
    if (!(seen.amax * scale < fp8_largest(FORMAT) / 2)) {  // else nothing is clipped
#pragma unroll
        for (int i = 0; i < QUANTIZE_ROWS; i++)
#pragma unroll
            for (int j = 0; j < COLUMNS / 4; j++)
                seen.clipped +=
                    quantize_count(words[j][i], fp8_top(FORMAT), row + i < N && column < C ? 0x80808080u : 0);
    }
    if (out.y && column < C) {
#pragma unroll
        for (int i = 0; i < QUANTIZE_ROWS; i++)
            if (row + i < N) {
                uint8_t* to = out.y + (size_t)(row + i) * C + column;
                if constexpr (COLUMNS == 16)
                    *(uint4*)to = make_uint4(words[0][i], words[1][i], words[2][i], words[3][i]);
                else *(uint2*)to = make_uint2(words[0][i], words[1][i]);
            }
    }
    if (out.stats) quantize_report(out.stats, seen);
    if (BIAS) quantize_bias(out.bias, partial, arrivals, bias, (float*)turned, N, C);
    if (FORMAT == FP8_E5M2 && partial) quantize_tile_sums<COLUMNS>(partial, sum, (float*)turned, column0, C);
    if (!out.yt) return;

#pragma unroll
    for (int j = 0; j < COLUMNS / 4; j++) {
        transpose_bytes(words[j]);
#pragma unroll
        for (int k = 0; k < 4; k++)
            turned[quantize_chunk<COLUMNS>(COLUMNS * across + 4 * j + k, down / 4) + down % 4] = words[j][k];
    }
    __syncthreads();
    size_t Np = (size_t)(N + QUANTIZE_ALIGNMENT - 1) / QUANTIZE_ALIGNMENT * QUANTIZE_ALIGNMENT;
    for (int i = threadIdx.x; i < QUANTIZE_TILE_ROWS * TILE / 16; i += QUANTIZE_THREADS) {
        int at = i / (QUANTIZE_TILE_ROWS / 16), chunk = i % (QUANTIZE_TILE_ROWS / 16);
        if (column0 + at < C && row0 + 16 * chunk < N)
            *(uint4*)(out.yt + (size_t)(column0 + at) * Np + row0 + 16 * chunk) =
                *(const uint4*)&turned[quantize_chunk<COLUMNS>(at, chunk)];
    }
}

// The column sums, from those of the tiles: bias.b [C] (SET or ADD) = sum over t of partial[t][c]. In fp32: each of WARPS
// warps adds every WARPS-th tile in order, then the warps are added in order. A block takes 32 columns.
template <int WARPS>
__global__ void __launch_bounds__(WARPS* WARP) tile_sums_kernel(BiasGrad bias, const float* partial, int tiles, int C) {
    __shared__ float rows[WARPS][WARP];
    int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, c = blockIdx.x * WARP + lane;
    float sum = 0;
    if (c < C)
#pragma unroll 8
        for (int t = warp; t < tiles; t += WARPS) sum += partial[(size_t)t * C + c];
    rows[warp][lane] = sum;
    __syncthreads();
    if (warp || c >= C) return;
    for (int w = 1; w < WARPS; w++) sum += rows[w][lane];
    bias.b[c] = bias.mode == ADD ? bias.b[c] + sum : sum;
}

// Scratch for the column sums of all tiles.
static inline size_t quantize_scratch_bytes(int N, int C) {
    return blocks_for((size_t)N, QUANTIZE_TILE_ROWS) * (size_t)C * sizeof(float);
}

// Scratch for the row sums of all tiles.
static inline size_t quantize_bias_bytes(int N, int C) {
    return blocks_for((size_t)N, QUANTIZE_TILE_ROWS) * QUANTIZE_TILE_ROWS * blocks_for((size_t)C, QUANTIZE_BIAS_TILE) *
           sizeof(float);
}

// Activations are E4M3, gradients E5M2; only gradients have column sums.
COMPILED_IF_CALLED static inline void quantize(QuantizeOutput out, QuantizeInput in, int N, int C, Context* ctx) {
    int is_erf = in.gelu == GELU_ERF;
    if (!N) return;
    CHECK(!out.sums.b || (out.format == FP8_E5M2 && in.source != QUANTIZE_CLASSIFIER_BACKWARD));
    int is_gradient = in.source == QUANTIZE_GELU_BACKWARD || in.source == QUANTIZE_CLASSIFIER_BACKWARD;
    CHECK(in.source == QUANTIZE_PLAIN || is_gradient == (out.format == FP8_E5M2));
    Scope scope = quantize_open(out, in, N, C, ctx);
    int columns = 16;  // of a thread; some kernels need more registers
    auto kernel = quantize_kernel<FP8_E5M2, QUANTIZE_PLAIN, GELU_TANH, 16, false>;
    if (out.bias.y) kernel = quantize_kernel<FP8_E4M3, QUANTIZE_PLAIN, GELU_TANH, 8, true>, columns = 8;
    else if (in.source == QUANTIZE_PLAIN && out.format == FP8_E4M3)
        kernel = quantize_kernel<FP8_E4M3, QUANTIZE_PLAIN, GELU_TANH, 16, false>;
    else if (in.source == QUANTIZE_CENTERED)
        kernel = quantize_kernel<FP8_E4M3, QUANTIZE_CENTERED, GELU_TANH, 16, false>;
    else if (in.source == QUANTIZE_CLASSIFIER_BACKWARD)
        kernel = quantize_kernel<FP8_E5M2, QUANTIZE_CLASSIFIER_BACKWARD, GELU_TANH, 16, false>;
    else if (in.source == QUANTIZE_GELU)
        kernel = is_erf ? quantize_kernel<FP8_E4M3, QUANTIZE_GELU, GELU_ERF, 16, false>
                        : quantize_kernel<FP8_E4M3, QUANTIZE_GELU, GELU_TANH, 16, false>;
    else if (in.source == QUANTIZE_GELU_BACKWARD) {
        columns = 8;
        kernel = is_erf ? quantize_kernel<FP8_E5M2, QUANTIZE_GELU_BACKWARD, GELU_ERF, 8, false>
                        : quantize_kernel<FP8_E5M2, QUANTIZE_GELU_BACKWARD, GELU_TANH, 8, false>;
    }
    unsigned down = blocks_for((size_t)N, QUANTIZE_TILE_ROWS);
    unsigned tiles = down * blocks_for((size_t)C, (size_t)columns * QUANTIZE_ACROSS);
    size_t bytes = out.bias.y ? quantize_bias_bytes(N, C) : out.sums.b ? quantize_scratch_bytes(N, C) : 0;
    float* partial = bytes ? (float*)device_scratch(ctx, bytes) : NULL;
    CHECK(!out.bias.y || down <= DEVICE_ARRIVALS);
    kernel<<<tiles, QUANTIZE_THREADS, 0, ctx->stream>>>(out, in, partial, ctx->arrivals, N, C);
    if (out.sums.b)
        tile_sums_kernel<QUANTIZE_THREADS / WARP>
            <<<blocks_for((size_t)C, WARP), QUANTIZE_THREADS, 0, ctx->stream>>>(out.sums, partial, (int)down, C);
    cudaCheck(cudaGetLastError());
    scope_close(&scope);
}

#endif
#endif
