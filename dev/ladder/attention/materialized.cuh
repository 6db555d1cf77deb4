/* The definition, one launch after the other: a thread for each score, a warp for each row of the softmax, a thread
 * for each element of the output. Between the launches lies a matrix of T x T numbers for each head: 400 MB for 8
 * sequences of 1,024 tokens, written twice and read three times. And as in matmul's first rung each element of K and
 * V is loaded again for every query. */
typedef struct {
    const int* cu_seqlens;
    int NH, HS, N, T;  // T: of the longest sequence
    int first, is_numbered_by_row;
    float scale;
    Mask mask;
    Dropout dropout;
} AttentionArgs;

static inline AttentionArgs attention_args(const Sequences* s, AttentionShape shape) {
    AttentionArgs a = {s->cu_seqlens, shape.NH, shape.HS, s->rows, s->max_length, s->first, s->is_numbered_by_row};
    a.scale = (float)(1 / sqrt((double)shape.HS));
    a.mask = shape.mask;
    a.dropout = shape.dropout;
    return a;
}

// Dropout's factor on a probability.
static __device__ inline float attention_keep(const AttentionArgs& a, int sequence, int head, int query, int key) {
    if (a.dropout.threshold == 0) return 1;
    uint32_t number = (uint32_t)(a.first + (a.is_numbered_by_row ? a.cu_seqlens[sequence] : sequence));
    Philox r = dropout_bits_attention(a.dropout, number, head, query, key / 8);
    uint32_t word = key & 4 ? (key & 2 ? r.v[3] : r.v[2]) : (key & 2 ? r.v[1] : r.v[0]);
    return (word >> 16 * (key % 2) & 0xffff) >= dropout_threshold_attention(a.dropout) ? a.dropout.scale : 0;
}

// Grid: keys, queries, (sequence, head). scores [sequences, NH, T, T].
static __global__ void materialized_scores_kernel(float* scores, const floatX* qkv, AttentionArgs a) {
    int key = (int)(blockIdx.x * blockDim.x + threadIdx.x), query = (int)(blockIdx.y * blockDim.y + threadIdx.y);
    int sequence = (int)blockIdx.z / a.NH, head = (int)blockIdx.z % a.NH, C = a.NH * a.HS;
    int start = a.cu_seqlens[sequence], T = a.cu_seqlens[sequence + 1] - start;
    if (query >= T || key >= attention_visible(a.mask, query, T)) return;
    const floatX* q = qkv + (size_t)(start + query) * 3 * C + (size_t)(head * a.HS);
    const floatX* k = qkv + (size_t)(start + key) * 3 * C + (size_t)(C + head * a.HS);
    float dot = 0;
    for (int i = 0; i < a.HS; i++) dot += to_float(q[i]) * to_float(k[i]);
    scores[((size_t)blockIdx.z * a.T + query) * a.T + key] = a.scale * dot;
}

// A warp for each query; the scores become probabilities. Grid: queries, (sequence, head).
static __global__ void materialized_softmax_kernel(float* scores, real* lse, AttentionArgs a) {
    int query = (int)((blockIdx.x * blockDim.x + threadIdx.x) / WARP), lane = (int)threadIdx.x % WARP;
    int sequence = (int)blockIdx.y / a.NH, head = (int)blockIdx.y % a.NH;
    int start = a.cu_seqlens[sequence], T = a.cu_seqlens[sequence + 1] - start;
    if (query >= T) return;
    float *s = scores + ((size_t)blockIdx.y * a.T + query) * a.T, max = -INFINITY, sum = 0;
    int visible = attention_visible(a.mask, query, T);
    for (int key = lane; key < visible; key += WARP) max = fmaxf(max, s[key]);
    max = warp_max(max);
    for (int key = lane; key < visible; key += WARP) sum += exp_approx(s[key] - max);
    sum = warp_sum(sum);
    for (int key = lane; key < visible; key += WARP)
        s[key] = exp_approx(s[key] - max) / sum * attention_keep(a, sequence, head, query, key);
    if (lane == 0) lse[(size_t)head * a.N + start + query] = max + logf(sum);
}

// Grid: channels, queries, (sequence, head).
static __global__ void materialized_output_kernel(floatX* out, const float* scores, const floatX* qkv,
                                                  AttentionArgs a) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x), query = (int)(blockIdx.y * blockDim.y + threadIdx.y);
    int sequence = (int)blockIdx.z / a.NH, head = (int)blockIdx.z % a.NH, C = a.NH * a.HS;
    int start = a.cu_seqlens[sequence], T = a.cu_seqlens[sequence + 1] - start;
    if (query >= T || i >= a.HS) return;
    const float* p = scores + ((size_t)blockIdx.z * a.T + query) * a.T;
    const floatX* v = qkv + (size_t)start * 3 * C + (size_t)(2 * C + head * a.HS + i);
    int visible = attention_visible(a.mask, query, T);
    float sum = 0;
    for (int key = 0; key < visible; key++) sum += p[key] * to_float(v[(size_t)key * 3 * C]);
    out[(size_t)(start + query) * C + (size_t)(head * a.HS + i)] = from_float<floatX>(sum);
}

static inline void materialized_attention_forward(floatX* out, real* lse, const floatX* qkv, const Sequences* s,
                                                  AttentionShape shape, Context* ctx) {
    AttentionArgs a = attention_args(s, shape);
    unsigned heads = (unsigned)(s->count * shape.NH);
    size_t T = (size_t)s->max_length;
    if (s->rows == 0) return;
    float* scores = (float*)device_scratch(ctx, heads * T * T * sizeof(float));
    dim3 block(WARP, 8), pairs(blocks_for(T, WARP), blocks_for(T, 8), heads), rows(blocks_for(T, 8), heads);
    dim3 outputs(blocks_for((size_t)shape.HS, WARP), blocks_for(T, 8), heads);
    materialized_scores_kernel<<<pairs, block, 0, ctx->stream>>>(scores, qkv, a);
    materialized_softmax_kernel<<<rows, 8 * WARP, 0, ctx->stream>>>(scores, lse, a);
    materialized_output_kernel<<<outputs, block, 0, ctx->stream>>>(out, scores, qkv, a);
    cudaCheck(cudaGetLastError());
}
