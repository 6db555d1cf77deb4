/* Faster than materialized: no score reaches memory. A thread keeps its query and its output in registers. Keys and
 * values come by in tiles of shared memory that serve 128 queries, and the softmax is computed as they come (Milakov
 * and Gimelshein, arXiv 1805.02867): sum and output are relative to the maximum so far, and where a key raises the
 * maximum both are multiplied by exp(old - new). It still is fp32 arithmetic, two loads from shared memory for eight
 * products. Heads of up to 64 channels; wider ones take the rung above. */
#include "dev/ladder/attention/materialized.cuh"

enum { FUSED_QUERIES = 128, FUSED_KEYS = 64, FUSED_HS = 64, FUSED_GROUP = 8 };  // GROUP: keys between two rescalings

// A tile of keys or values, zeros where there are none.
static __device__ inline void fused_load(float (*tile)[FUSED_HS], const floatX* x, int stride, int rows, int HS) {
    for (int i = (int)threadIdx.x; i < FUSED_KEYS * FUSED_HS; i += FUSED_QUERIES) {
        int row = i / FUSED_HS, c = i % FUSED_HS;
        tile[row][c] = row < rows && c < HS ? to_float(x[(size_t)row * (size_t)stride + (size_t)c]) : 0;
    }
}

// Grid: tiles of queries, heads, sequences. A thread has one query.
static __global__ void __launch_bounds__(FUSED_QUERIES)
    fused_kernel(floatX* out, real* lse, const floatX* qkv, AttentionArgs a) {
    __shared__ __align__(16) float keys[FUSED_KEYS][FUSED_HS], values[FUSED_KEYS][FUSED_HS];
    int head = (int)blockIdx.y, sequence = (int)blockIdx.z, C = a.NH * a.HS, stride = 3 * C;
    int start = a.cu_seqlens[sequence], T = a.cu_seqlens[sequence + 1] - start;
    // With CAUSAL the last queries have the most keys: they begin.
    int q0 = FUSED_QUERIES * (int)(gridDim.x - 1 - blockIdx.x), query = q0 + (int)threadIdx.x;
    if (q0 >= T) return;
    const floatX* x = qkv + (size_t)start * stride + (size_t)(head * a.HS);
    float q[FUSED_HS], o[FUSED_HS] = {}, max = -INFINITY, sum = 0, scale = a.scale * LOG2_E;
#pragma unroll
    for (int i = 0; i < FUSED_HS; i++)
        q[i] = query < T && i < a.HS ? scale * to_float(x[(size_t)query * stride + i]) : 0;
    int visible = attention_visible(a.mask, query, T), steps = a.mask == CAUSAL ? min(T, q0 + FUSED_QUERIES) : T;
    for (int k0 = 0; k0 < steps; k0 += FUSED_KEYS) {
        __syncthreads();
        fused_load(keys, x + (size_t)k0 * stride + C, stride, T - k0, a.HS);
        fused_load(values, x + (size_t)k0 * stride + 2 * C, stride, T - k0, a.HS);
        __syncthreads();
        for (int j0 = 0; j0 < FUSED_KEYS && k0 + j0 < steps; j0 += FUSED_GROUP) {
            float s[FUSED_GROUP] = {}, most = max;
#pragma unroll
            for (int i = 0; i < FUSED_HS; i += 4)
#pragma unroll
                for (int j = 0; j < FUSED_GROUP; j++) {
                    float4 k = *(const float4*)&keys[j0 + j][i];
                    s[j] += q[i] * k.x + q[i + 1] * k.y + q[i + 2] * k.z + q[i + 3] * k.w;
                }
#pragma unroll
            for (int j = 0; j < FUSED_GROUP; j++) {
                if (k0 + j0 + j >= min(visible, T)) s[j] = -INFINITY;
                most = fmaxf(most, s[j]);
            }
            float rescale = ex2_approx(max - most);
            max = most, sum *= rescale;
#pragma unroll
            for (int i = 0; i < FUSED_HS; i++) o[i] *= rescale;
#pragma unroll
            for (int j = 0; j < FUSED_GROUP; j++) {
                float p = ex2_approx(s[j] - max);
                sum += p;
                if (a.dropout.threshold) p *= attention_keep(a, sequence, head, query, k0 + j0 + j);
#pragma unroll
                for (int i = 0; i < FUSED_HS; i += 4) {
                    float4 v = *(const float4*)&values[j0 + j][i];
                    o[i] += p * v.x, o[i + 1] += p * v.y, o[i + 2] += p * v.z, o[i + 3] += p * v.w;
                }
            }
        }
    }
    if (query >= T) return;
#pragma unroll
    for (int i = 0; i < FUSED_HS; i++)
        if (i < a.HS) out[(size_t)(start + query) * C + (size_t)(head * a.HS + i)] = from_float<floatX>(o[i] / sum);
    lse[(size_t)head * a.N + start + query] = (max + log2f(sum)) / LOG2_E;
}

static inline void fused_attention_forward(floatX* out, real* lse, const floatX* qkv, const Sequences* s,
                                           AttentionShape shape, Context* ctx) {
    if (s->rows == 0) return;
    if (shape.HS > FUSED_HS) {
        materialized_attention_forward(out, lse, qkv, s, shape, ctx);
        return;
    }
    dim3 grid(blocks_for((size_t)s->max_length, FUSED_QUERIES), shape.NH, s->count);
    fused_kernel<<<grid, FUSED_QUERIES, 0, ctx->stream>>>(out, lse, qkv, attention_args(s, shape));
    cudaCheck(cudaGetLastError());
}
