/* layernorm.h's backward kernel; forward.cuh explains the teams. */
#ifndef LLMC_OPS_LAYERNORM_BACKWARD_CUH
#define LLMC_OPS_LAYERNORM_BACKWARD_CUH

// What the backward pass does besides dx, d.w and d.b. BACKWARD: nothing. RESIDUAL: dbias. RESIDUAL_DROPOUT: dbranch
// and dbias.
typedef enum { LAYERNORM_BACKWARD, LAYERNORM_BACKWARD_RESIDUAL, LAYERNORM_BACKWARD_RESIDUAL_DROPOUT } LayerNormForm;

typedef struct {
    LayerNormTargets to;
    float* partial;  // [blocks, layernorm_sums(form), C]: each block's partial sums of d.w, d.b and dbias
    unsigned* arrivals;
    const floatX *dy, *x;
    LayerNormStats stats;
    const floatX* w;
    int N, C;
    Mode d_mode;
    DropoutRows dropout;
} LayerNormBackward;

// Whether a dropout mask is computed.
HOST_DEVICE static constexpr int layernorm_masked(LayerNormForm form) {
    return form == LAYERNORM_BACKWARD_RESIDUAL_DROPOUT;
}
// Column sums: d.w, d.b and, with a residual, dbias.
HOST_DEVICE static constexpr int layernorm_sums(LayerNormForm form) { return form == LAYERNORM_BACKWARD ? 2 : 3; }

// Number of sums in shared memory: dbias, and d.b too if the dropout masks need its registers.
HOST_DEVICE static constexpr int layernorm_shared_dbias(LayerNormForm form) { return layernorm_sums(form) - 2; }
HOST_DEVICE static constexpr int layernorm_shared_sums(LayerNormForm form) {
    return layernorm_shared_dbias(form) + layernorm_masked(form);
}

// Resident blocks per multiprocessor. This bounds a thread's registers, which hold two sums for each of E channels and
// the thread's part of a row.
HOST_DEVICE static constexpr int layernorm_backward_threads(int team) { return team == WARP ? 128 : team; }
HOST_DEVICE static constexpr int layernorm_backward_residents(int E, int team, LayerNormForm form) {
    if (layernorm_masked(form) && team == WARP) return E <= 8 ? 5 : sizeof(floatX) > 2 ? 2 : 3;
    if (layernorm_masked(form)) return (E <= 8 ? 768 : 512) / team;
    if (team == WARP) return E <= 8 ? 6 : sizeof(floatX) > 2 ? 2 : E <= 24 ? 4 : 3;
    if (E <= 8) return 1024 / team;
    return sizeof(floatX) > 2 ? 2 : 3;
}

// Whether a row is read twice because it does not fit into registers.
HOST_DEVICE static constexpr int layernorm_backward_rereads(int E, int team, LayerNormForm form) {
    return layernorm_masked(form) && team > WARP && E * team > 4096;
}

// Whether a fence keeps ptxas from hoisting loads. On sm_100 ptxas hoists the loads of a whole row if a thread has many
// channels, and spills. On every architecture it does the same with the inputs of the dropout masks.
HOST_DEVICE static constexpr int layernorm_backward_fenced(int E, int team, LayerNormForm form) {
    return team > WARP && (layernorm_masked(form) || (LAYERNORM_ARCH >= 1000 && E > 8));
}

// A thread's sums in shared memory form groups of up to four (G), each read and written as one vector. The same groups
// of all threads are contiguous.
template <int G> __device__ inline void layernorm_add_group(float* sums, const float* d) {
    if constexpr (G == 4) {
        float4 sum = *(const float4*)sums;
        *(float4*)sums = make_float4(sum.x + d[0], sum.y + d[1], sum.z + d[2], sum.w + d[3]);
    } else {
        *sums += *d;
    }
    static_assert(G == 4 || G == 1, "four or one");
}

// Adds the blocks' partial sums [blocks, columns] into d.w, d.b and dbias. A block takes `width` columns at a time.
// Groups of `width` threads take the rows of `partial` in turn.
template <int THREADS> __device__ inline void layernorm_sum_blocks(LayerNormBackward a, int columns, float* shared) {
    int blocks = (int)gridDim.x, each = (columns + blocks - 1) / blocks;
    int width = min(THREADS, (each + 7) / 8 * 8);  // whole sectors of 32 bytes
    int slices = THREADS / width, slice = (int)threadIdx.x / width, at = (int)threadIdx.x % width;
    for (int first = (int)blockIdx.x * width; first < columns; first += blocks * width) {
        int column = first + at;
        float sum = 0;
        if (slice < slices && column < columns) {
#pragma unroll 4
            for (int b = slice; b < blocks; b += slices) sum += a.partial[(size_t)b * (size_t)columns + (size_t)column];
        }
        __syncthreads();
        shared[threadIdx.x] = sum;
        __syncthreads();
        if (slice > 0 || column >= columns) continue;
#pragma unroll 4
        for (int i = 1; i < slices; i++) sum += shared[i * width + at];
        real* to = column < a.C       ? a.to.d.w + column
                   : column < 2 * a.C ? a.to.d.b + (column - a.C)
                   : a.to.r.dbias     ? a.to.r.dbias + (column - 2 * a.C)
                                      : NULL;
        if (to) *to = a.d_mode == ADD ? *to + sum : sum;
    }
}

// All blocks must be resident at once (cooperative launch). Teams take rows in turn. Each team accumulates d.w and d.b
// over its rows in registers if there are enough, and the other sums in shared memory.
template <int W, int E, int TEAM, Mode DX_MODE, LayerNormForm FORM>
__global__ void __launch_bounds__(layernorm_backward_threads(TEAM), layernorm_backward_residents(E, TEAM, FORM))
    layernorm_backward_kernel(LayerNormBackward a) {
    constexpr int THREADS = layernorm_backward_threads(TEAM), G = W < 4 ? 1 : 4;
    constexpr int VECTORS = E / W, TEAMS = THREADS / TEAM;
    constexpr int EARLY = TEAM == WARP;          // block-wide teams have registers only for dy and x
    constexpr int EARLY_OLD = EARLY && E <= 24;  // more channels would spill a register or two
    constexpr int REREAD = layernorm_backward_rereads(E, TEAM, FORM);
    constexpr int FENCED = layernorm_backward_fenced(E, TEAM, FORM);
    constexpr int SHARED_DBIAS = layernorm_shared_dbias(FORM), SHARED_DB = layernorm_masked(FORM);
    constexpr int SHARED_SUMS = SHARED_DBIAS + SHARED_DB, SUMS = layernorm_sums(FORM);
    extern __shared__ float4 layernorm_shared[];  // [sums][E / G][THREADS][G]; at the end THREADS floats
    float* shared_sums = (float*)layernorm_shared;
    int team = (int)threadIdx.x / TEAM, first = (int)(threadIdx.x % TEAM) * W, turn = 0;
    Vector<floatX, W> kept[VECTORS] = {};
    float dw[E] = {}, db[SHARED_DB ? 1 : E] = {};
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        if (EARLY && first + i * TEAM * W < a.C) kept[i] = load_vector<W>(a.w + first + i * TEAM * W);
    for (int e = 0; e < SHARED_SUMS * E; e++) shared_sums[e * THREADS + (int)threadIdx.x] = 0;
    if (SHARED_SUMS > 0) __syncthreads();
    for (unsigned row = blockIdx.x * TEAMS + team; row < (unsigned)a.N; row += gridDim.x * TEAMS) {
        size_t start = (size_t)row * (size_t)a.C;
        Vector<floatX, W> x[VECTORS] = {}, dy[VECTORS] = {}, old[VECTORS] = {};  // old: dx before ADD
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            int c = first + i * TEAM * W;
            if (c < a.C) dy[i] = load_vector<W>(a.dy + start + c);
            if (c < a.C) x[i] = load_vector<W>(a.x + start + c);
            if (DX_MODE == ADD && EARLY_OLD && c < a.C) old[i] = load_vector<W>(a.to.r.dx + start + c);
        }
        float mean = a.stats.mean[row], rstd = a.stats.rstd[row];
        DropoutPlace place = {0, 0};
        float2 sums = make_float2(0, 0);  // of e and of e * u; past the row's end both are 0 because dy is 0
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            float g[W], u[W], weight[W];
            Vector<floatX, W> w = kept[i];
            int c = first + i * TEAM * W;
            if (!EARLY && c < a.C) w = load_vector<W>(a.w + c);
            to_floats(g, dy[i]);
            to_floats(u, x[i]);
            to_floats(weight, w);
#pragma unroll
            for (int k = 0; k < W; k++) {
                float e = g[k] * weight[k];
                u[k] = (u[k] - mean) * rstd;
                sums.x += e;
                sums.y += e * u[k];
                dw[i * W + k] += g[k] * u[k];
                if constexpr (!SHARED_DB) db[i * W + k] += g[k];
            }
#pragma unroll
            for (int k = 0; k < W && SHARED_DB; k += G)
                layernorm_add_group<G>(shared_sums + ((SHARED_DBIAS * E + i * W + k) * THREADS + (int)threadIdx.x * G),
                                       g + k);
        }
        sums = team_sum<TEAM>(sums, turn);
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            keep_packed(&x[i]);
            keep_packed(&dy[i]);
            keep_packed(&kept[i]);
        }
        turn ^= 1;
        // Divide instead of multiplying by 1 / C: the division's rare path ends a basic block, which also keeps ptxas
        // from holding the converted floats in registers. With a multiplication the kernel for 768 channels spills 300
        // bytes.
        float average = sums.x / (float)a.C, slope = sums.y / (float)a.C;
        if (FORM == LAYERNORM_BACKWARD_RESIDUAL_DROPOUT) place = dropout_place(a.dropout, (int)row);
#pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            int c = first + i * TEAM * W;
            if (c >= a.C) break;
            float d[W], u[W], weight[W], sum[W];
            Vector<floatX, W> w = kept[i];
            if (FENCED) __syncwarp(__activemask());
            if (REREAD) {
                dy[i] = load_vector<W>(a.dy + start + c);
                x[i] = load_vector<W>(a.x + start + c);
            }
            if (!EARLY) w = load_vector<W>(a.w + c);
            if (!EARLY_OLD && DX_MODE == ADD) old[i] = load_vector<W>(a.to.r.dx + start + c);
            to_floats(d, dy[i]);
            to_floats(u, x[i]);
            to_floats(weight, w);
            to_floats(sum, old[i]);
#pragma unroll
            for (int k = 0; k < W; k++) {
                d[k] = rstd * (d[k] * weight[k] - average - (u[k] - mean) * rstd * slope);
                if (DX_MODE == ADD) d[k] += sum[k];
            }
            store_vector(a.to.r.dx + start + c, from_floats<floatX, W>(d));
            if constexpr (FORM == LAYERNORM_BACKWARD_RESIDUAL_DROPOUT) {
                dropout_multiply<W>(d, a.dropout.dropout, place, c);
                store_vector(a.to.r.dbranch + start + c, from_floats<floatX, W>(d));
            }
#pragma unroll
            for (int k = 0; k < W && SHARED_DBIAS; k += G)
                layernorm_add_group<G>(shared_sums + ((i * W + k) * THREADS + (int)threadIdx.x * G), d + k);
        }
    }
    // Add up the teams' sums one after the other, then write the block's partial sums.
    float *weight = a.partial + (size_t)blockIdx.x * SUMS * (size_t)a.C, *bias = weight + a.C;
    if constexpr (TEAMS > 1) {
        __shared__ float shared[SHARED_DB ? 1 : 2][E][WARP];  // [e][lane], so that lanes use different banks
        int lane = (int)threadIdx.x % WARP;
        for (int t = 0; t < TEAMS; t++) {
#pragma unroll
            for (int e = 0; e < E && team == t; e++) {
                shared[0][e][lane] = t ? shared[0][e][lane] + dw[e] : dw[e];
                if constexpr (!SHARED_DB) shared[1][e][lane] = t ? shared[1][e][lane] + db[e] : db[e];
            }
            __syncthreads();
        }
        for (int c = (int)threadIdx.x; c < a.C; c += (int)blockDim.x) {
            int e = c / (WARP * W) * W + c % W, owner = c % (WARP * W) / W;
            weight[c] = shared[0][e][owner];
            if constexpr (!SHARED_DB) bias[c] = shared[1][e][owner];
        }
    } else {
#pragma unroll
        for (int e = 0; e < E; e++) {
            int c = first + e / W * TEAM * W + e % W;
            if (c >= a.C) continue;
            weight[c] = dw[e];
            if constexpr (!SHARED_DB) bias[c] = db[e];
        }
    }
    if (SHARED_SUMS > 0) __syncthreads();
    for (int s = 0; s < SHARED_SUMS; s++)  // dbias, d.b
        for (int c = (int)threadIdx.x; c < a.C; c += THREADS) {
            int e = s * E + c / (TEAM * W) * W + c % W / G * G, owner = c % (TEAM * W) / W;
            float sum = 0;
            for (int t = 0; t < TEAMS; t++) sum += shared_sums[e * THREADS + (t * TEAM + owner) * G + c % G];
            bias[(SHARED_DBIAS - s) * a.C + c] = sum;
        }
    wait_for_grid(a.arrivals);
    layernorm_sum_blocks<THREADS>(a, SUMS * a.C, shared_sums);
}

// A variant of the kernel, and its launch: threads of a block, at most `residents` blocks per multiprocessor, rows that
// a block takes at a time, bytes of shared memory, column sums.
typedef struct {
    void (*kernel)(LayerNormBackward);
    int threads, residents, rows, shared, sums;
} LayerNormVariant;

template <int W, int E, int TEAM, LayerNormForm FORM, Mode DX_MODE>
static inline LayerNormVariant layernorm_backward_variant(void) {
    constexpr int threads = layernorm_backward_threads(TEAM), shared_sums = layernorm_shared_sums(FORM);
    LayerNormVariant v = {.kernel = layernorm_backward_kernel<W, E, TEAM, DX_MODE, FORM>,
                          .threads = threads,
                          .residents = layernorm_backward_residents(E, TEAM, FORM),
                          .rows = threads / TEAM,
                          .shared = threads * (shared_sums ? shared_sums * E : 1) * (int)sizeof(float),
                          .sums = layernorm_sums(FORM)};
    return v;
}

// The variant for rows of C channels. ODD: rows that are not whole vectors.
template <LayerNormForm FORM, Mode DX_MODE> static inline LayerNormVariant layernorm_backward_choose(int C) {
    constexpr int W = Vector<floatX>::SIZE;
    constexpr int ODD_E = layernorm_masked(FORM) ? 16 : 8, ODD_TEAM = layernorm_masked(FORM) ? 512 : 1024;
    if (!rows_are_vectors<floatX>(C)) return layernorm_backward_variant<1, ODD_E, ODD_TEAM, FORM, DX_MODE>();
    if (C <= 24 * WARP) return layernorm_backward_variant<W, 24, WARP, FORM, DX_MODE>();
    if (C <= 32 * WARP) return layernorm_backward_variant<W, 32, WARP, FORM, DX_MODE>();
    if (C <= 8 * 256) return layernorm_backward_variant<W, 8, 256, FORM, DX_MODE>();
    return layernorm_backward_variant<W, 16, 256, FORM, DX_MODE>();
}

// The blocks of a launch, and its scratch: partial sums of each block.
static inline int layernorm_backward_grid(LayerNormVariant v, int N, const Context* ctx) {
    return min_int(ctx->multiprocessors * v.residents, (int)blocks_for((size_t)N, (size_t)v.rows));
}
static inline size_t layernorm_backward_bytes(LayerNormVariant v, int N, int C, const Context* ctx) {
    return (size_t)layernorm_backward_grid(v, N, ctx) * (size_t)v.sums * (size_t)C * sizeof(float);
}

// Upper bound of the scratch of a launch for up to N rows.
static inline size_t layernorm_scratch_bytes(int N, int C, const Context* ctx) {
    LayerNormVariant residual = layernorm_backward_choose<LAYERNORM_BACKWARD_RESIDUAL, SET>(C),
                     dropped = layernorm_backward_choose<LAYERNORM_BACKWARD_RESIDUAL_DROPOUT, SET>(C);
    return max_size(layernorm_backward_bytes(residual, N, C, ctx), layernorm_backward_bytes(dropped, N, C, ctx));
}

static inline void layernorm_backward_launch(LayerNormVariant v, LayerNormTargets to, LayerNormInputs in, Mode d_mode,
                                             Context* ctx) {
    LayerNormBackward a = {.to = to, .dy = in.dy, .x = in.x, .stats = in.stats, .w = in.w};
    a.N = in.size.N, a.C = in.size.C;
    a.d_mode = d_mode;
    a.dropout = dropout_rows(to.r.dropout);
    void (*kernel)(LayerNormBackward) = v.kernel;
    layernorm_check_size(a.N, a.C);
    if (v.shared > 32 << 10)  // opt in to more than the default
        kernel_allow_shared(kernel, (size_t)v.shared, ctx);
    int residents;
    cudaCheck(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&residents, kernel, v.threads, (size_t)v.shared));
    v.residents = min_int(v.residents, residents);
    a.arrivals = ctx->arrivals;
    a.partial = (float*)device_scratch(ctx, layernorm_backward_bytes(v, a.N, a.C, ctx));
    void* arguments[] = {&a};
    cudaCheck(cudaLaunchCooperativeKernel((const void*)kernel, dim3((unsigned)layernorm_backward_grid(v, a.N, ctx)),
                                          dim3((unsigned)v.threads), arguments, (size_t)v.shared, ctx->stream));
}

#endif
