/* Attention of the newest token of each of N texts to itself and all earlier tokens, for text generation. The new keys
 * and values are appended to the KV cache. This is one row of CAUSAL attention a text, without dropout.
 *
 *   cache[n, p]  = qkv[n]                              p = position[n], below T
 *   s[k]         = Q . K[k] / sqrt(HS)                 k = 0 .. p; Q of qkv[n], K and V of the text's cache
 *   P[k]         = exp(s[k]) / sum over j of exp(s[j])
 *   out[n]       = sum over k of P[k] V[k]
 *
 * Shapes: cache [N, T, 3C], qkv [N, 3C], each row Q | K | V, each of these [NH, HS]; out [N, C]; C = NH * HS; position
 * [N], on the device. Of the cache, K and V are used. attention_decode_takes() checks HS.
 * Numerics: dot products and softmax accumulate in double on the CPU, which runs the reference, and in float on the
 * GPU. P is not rounded. The GPU splits the keys into parts of DECODE_KEYS, so a text has the same bits in any batch.
 * Cost: memory-bound; keys and values are read once. Counted as if all T positions were taken, which the host does not
 * know.
 * Source: Dao et al., arXiv 2205.14135, for the running maximum and sum; Dao et al., "Flash-Decoding", 2023, for parts. */
#ifndef APPS_USE_DECODE_H
#define APPS_USE_DECODE_H

#include "llmc/device/cuda_utils.cuh"
#include "llmc/ops/attention/attention.h"

#define ATTENTION_DECODE_FLOPS(T, NH, HS) ATTENTION_FORWARD_FLOPS((double)(T), NH, HS)
#define ATTENTION_DECODE_BYTES(T, NH, HS) ((2.0 * (T) + 4.0) * (NH) * (HS) * sizeof(floatX))

typedef struct {
    int N, T, NH, HS;  // texts, and positions of a cache
} DecodeShape;

// ---------------------------------------------------------------------------------------------------------
// Reference, which the CPU runs too: a head of a text belongs to one thread

static inline void attention_decode_ref(real* out, real* cache, const real* qkv, const int* position, DecodeShape s) {
    AttentionShape shape = {.NH = s.NH, .HS = s.HS, .mask = CAUSAL, .dropout = dropout_none(NULL)};
    size_t HS = (size_t)s.HS, C = (size_t)s.NH * HS;
#pragma omp parallel for schedule(static)
    for (int i = 0; i < s.N * s.NH; i++) {
        int n = i / s.NH, head = i % s.NH, p = position[n];
        size_t first = (size_t)head * HS;
        real* text = cache + (size_t)n * (size_t)s.T * 3 * C;
        double *weight = (double*)xcalloc((size_t)p + 1 + HS, sizeof *weight), *sum = weight + p + 1;
        for (size_t part = 0; part < 3; part++)
            memcpy(text + ((size_t)p * 3 + part) * C + first, qkv + ((size_t)n * 3 + part) * C + first,
                   HS * sizeof *qkv);
        attention_probabilities_ref(weight, text, p, p + 1, head, shape);
        for (int k = 0; k <= p; k++)
            for (size_t c = 0; c < HS; c++) sum[c] += weight[k] * (double)text[((size_t)k * 3 + 2) * C + first + c];
        for (size_t c = 0; c < HS; c++) out[(size_t)n * C + first + c] = (real)sum[c];
        free(weight);
    }
}

#ifdef __CUDACC__
// ---------------------------------------------------------------------------------------------------------
// GPU

// Let the next kernel of the stream begin, and wait until all earlier ones have ended (programmatic dependent launch).
// Before it, a kernel of decode_launch() may read only what no kernel of the stream writes, such as weights.
__device__ inline void wait_for_earlier_kernels(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;" ::: "memory");
#endif
}

// Launch a kernel that calls wait_for_earlier_kernels() in every thread.
template <typename... P, typename... A>
static inline void decode_launch(void (*kernel)(P...), dim3 grid, unsigned threads, size_t shared, Context* ctx,
                                 A... arguments) {
    cudaLaunchAttribute early[1] = {};
    cudaLaunchConfig_t launch = {};
    early[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early[0].val.programmaticStreamSerializationAllowed = 1;
    launch.gridDim = grid, launch.blockDim = dim3(threads), launch.dynamicSmemBytes = shared;
    launch.stream = ctx->stream, launch.attrs = early, launch.numAttrs = ctx->capability >= 90;
    cudaCheck(cudaLaunchKernelEx(&launch, kernel, arguments...));
}

enum { DECODE_THREADS = 256, DECODE_HS = 256, DECODE_KEYS = 128 };

static inline int attention_decode_takes(int HS) { return HS <= DECODE_HS; }

// The most texts that can be decoded together.
static inline int attention_decode_texts(int NH) { return DEVICE_ARRIVALS / NH; }

// This thread's part of a row of HS elements: COUNT vectors of W elements, TEAM vectors apart; zeros past the row.
template <int W, int TEAM, int COUNT>
__device__ inline void decode_load(float (&x)[COUNT][W], const floatX* row, int member, int HS) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        int at = (i * TEAM + member) * W;
        if (at < HS) to_floats(x[i], load_vector<W>(row + at));
        else
#pragma unroll
            for (int j = 0; j < W; j++) x[i][j] = 0;
    }
}

// Combine `parts` results of a head: channel i of each, weighted, relative to its maximum, and the sums of the weights.
// A result is `stride` floats from the next; max and total are at its end.
__device__ inline float decode_combine(const float* part, int parts, int stride, int i, float2* stats) {
    float highest = -INFINITY, sum = 0, all = 0;
    for (int t = 0; t < parts; t++) highest = fmaxf(highest, part[(t + 1) * stride - 2]);
    for (int t = 0; t < parts; t++) {
        float scale = expf(part[(t + 1) * stride - 2] - highest);  // 0 for a part without keys
        all += scale * part[(t + 1) * stride - 1];
        sum += scale * part[t * stride + i];
    }
    *stats = make_float2(highest, all);
    return sum;
}

// One block per head, text and part of the keys. A team of TEAM lanes takes every TEAMS-th key. It tracks the maximum
// of its scores, the sum of their exponentials relative to it, and the values weighted by these. At the end the block
// combines the teams, and the last block of a head the parts.
template <int W, int TEAM, int COUNT>
__global__ void __launch_bounds__(DECODE_THREADS)
    attention_decode_kernel(floatX* out, floatX* cache, const floatX* qkv, const int* position, DecodeShape s,
                            float* parts, unsigned* arrivals) {
    constexpr int TEAMS = DECODE_THREADS / TEAM, STRIDE = TEAM * COUNT * W + 2;
    __shared__ float of_team[TEAMS * STRIDE];
    wait_for_earlier_kernels();
    int team = threadIdx.x / TEAM, member = threadIdx.x % TEAM, HS = s.HS, n = blockIdx.y, newest = position[n];
    int begin = blockIdx.z * DECODE_KEYS, end = ::min(begin + DECODE_KEYS, newest + 1);
    if (begin > newest) return;
    size_t C = (size_t)s.NH * (size_t)HS, head = (size_t)blockIdx.x * (size_t)HS;
    const floatX* row = qkv + (size_t)n * 3 * C + head;
    floatX* text = cache + (size_t)n * (size_t)s.T * 3 * C + head;
    float q[COUNT][W], mix[COUNT][W] = {}, max = -INFINITY, total = 0, factor = 1 / sqrtf((float)HS);
    decode_load<W, TEAM, COUNT>(q, row, member, HS);
#pragma unroll 4
    for (int first = begin; first < end; first += TEAMS) {
        // All lanes of a warp must take part in the shuffles, so a team without a key loads the last one again.
        bool has_key = first + team < end;
        int at = has_key ? first + team : end - 1;
        const floatX* key = (at == newest ? row : text + (size_t)at * 3 * C) + C;
        float k[COUNT][W], v[COUNT][W], score = 0;
        decode_load<W, TEAM, COUNT>(k, key, member, HS);
        decode_load<W, TEAM, COUNT>(v, key + C, member, HS);
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
            for (int j = 0; j < W; j++) score += q[i][j] * k[i][j];
#pragma unroll
        for (int distance = TEAM / 2; distance; distance /= 2) score += __shfl_xor_sync(ALL_LANES, score, distance);
        score *= factor;
        if (!has_key) continue;
        float higher = fmaxf(max, score), scale = expf(max - higher), weight = expf(score - higher);
        max = higher;
        total = total * scale + weight;
#pragma unroll
        for (int i = 0; i < COUNT; i++)
#pragma unroll
            for (int j = 0; j < W; j++) mix[i][j] = mix[i][j] * scale + weight * v[i][j];
    }
    float* mine = of_team + team * STRIDE;
    if (member == 0) mine[STRIDE - 2] = max, mine[STRIDE - 1] = total;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
#pragma unroll
        for (int j = 0; j < W; j++) mine[(i * TEAM + member) * W + j] = mix[i][j];
    __syncthreads();
    int i = threadIdx.x, count = newest / DECODE_KEYS + 1, slot = n * s.NH + (int)blockIdx.x;
    float2 stats = {};
    float *part = parts + (size_t)slot * gridDim.z * (HS + 2), sum = 0;
    if (i < HS) sum = decode_combine(of_team, TEAMS, STRIDE, i, &stats);
    if (i < HS && end > newest)
        for (size_t from = 0; from < 3 * C; from += C) text[(size_t)newest * 3 * C + from + i] = row[from + i];
    if (count > 1) {
        float* of_block = part + blockIdx.z * (HS + 2);
        if (i < HS) of_block[i] = sum;
        if (i == 0) of_block[HS] = stats.x, of_block[HS + 1] = stats.y;
        if (!last_to_arrive(arrivals + slot, (unsigned)count)) return;
        if (i < HS) sum = decode_combine(part, count, HS + 2, i, &stats);
    }
    if (i < HS) out[(size_t)n * C + head + i] = from_float<floatX>(sum / stats.y);
}

// Copy n elements within device memory.
static inline void decode_copy(floatX* to, const floatX* from, size_t n, Context* ctx) {
    cudaCheck(cudaMemcpyAsync(to, from, n * sizeof *to, cudaMemcpyDeviceToDevice, ctx->stream));
}

#else
static inline int attention_decode_takes(int HS) { return HS > 0; }
static inline int attention_decode_texts(int NH) { return INT32_MAX / NH; }
static inline void decode_copy(floatX* to, const floatX* from, size_t n, Context* ctx) {
    (void)ctx;
    memcpy(to, from, n * sizeof *to);
}
#endif

static inline void attention_decode(floatX* out, floatX* cache, const floatX* qkv, const int* position, DecodeShape s,
                                    Context* ctx) {
    CHECK(s.N > 0 && s.T > 0 && attention_decode_takes(s.HS) && s.N <= attention_decode_texts(s.NH));
    Scope scope =
        scope_open(ctx, "attention_decode", s.N * ATTENTION_DECODE_FLOPS(s.T, s.NH, s.HS),
                   s.N * ATTENTION_DECODE_BYTES(s.T, s.NH, s.HS), "N=%d T=%d NH=%d HS=%d", s.N, s.T, s.NH, s.HS);
#ifdef __CUDACC__
    constexpr int W = Vector<floatX>::SIZE, WIDE = DECODE_HS / (WARP * W);
    auto kernel = !rows_are_vectors<floatX>(s.HS) ? attention_decode_kernel<1, WARP, DECODE_HS / WARP>
                  : s.HS <= 64                    ? attention_decode_kernel<W, 64 / W, 1>
                  : s.HS <= 128                   ? attention_decode_kernel<W, 128 / W, 1>
                                                  : attention_decode_kernel<W, WARP, WIDE>;
    dim3 grid((unsigned)s.NH, (unsigned)s.N, blocks_for((size_t)s.T, DECODE_KEYS));
    size_t parts = (size_t)s.N * (size_t)s.NH * grid.z * (size_t)(s.HS + 2) * sizeof(float);
    decode_launch(kernel, grid, DECODE_THREADS, 0, ctx, out, cache, qkv, position, s,
                  (float*)device_scratch(ctx, parts), ctx->arrivals);
#else
    attention_decode_ref(out, cache, qkv, position, s);
#endif
    scope_close(&scope);
}

#endif
