/* Faster than registers: loads of 16 bytes. A thread copies eight bf16 in one instruction, and reads four of a
 * tile's floats at once: 4 loads from shared memory for 64 products, where there were 16. For this a thread's rows
 * and columns are two groups of four neighbours. Now the multiply-adds themselves are most of the instructions, and
 * all are fp32 ones of the ordinary kind; tensor cores, on the next rung, have several times their rate. */
enum { SIDE = 128, DEPTH = 16, EACH = 8 };  // of a block's tile; outputs of a thread in a row and in a column

// The tile's rows r0 .. r0 + SIDE - 1 of m, columns i0 .. i0 + DEPTH - 1, transposed. A thread copies EACH elements.
static __device__ inline void vectors_copy(float (*tile)[SIDE + 4], const floatX* m, int rows, int r0, int columns,
                                           int i0) {
    constexpr int W = Vector<floatX>::SIZE;
    int r = (int)threadIdx.x / 2, k = (int)threadIdx.x % 2 * EACH;
    const floatX* from = m + (size_t)(r0 + r) * columns + i0 + k;
    float v[EACH];
    if (columns % W == 0 && r0 + r < rows && i0 + k + EACH <= columns)
#pragma unroll
        for (int j = 0; j < EACH; j += W) to_floats(v + j, load128(from + j));
    else
#pragma unroll
        for (int j = 0; j < EACH; j++) v[j] = r0 + r < rows && i0 + k + j < columns ? to_float(from[j]) : 0;
#pragma unroll
    for (int j = 0; j < EACH; j++) tile[k + j][r] = v[j];
}

// A thread's rows, or columns, of the tile: four from 4 t on, and four from SIDE / 2 + 4 t on. Neighbouring
// threads read adjacent banks.
static __device__ inline int vectors_place(int t, int j) { return j < 4 ? 4 * t + j : SIDE / 2 + 4 * t + j - 4; }

static __global__ void __launch_bounds__(256)
    vectors_kernel(floatX* y, const floatX* x, Linear p, int N, int IC, int OC, Mode mode) {
    __shared__ __align__(16) float xs[DEPTH][SIDE + 4], ws[DEPTH][SIDE + 4];
    int tx = (int)threadIdx.x % 16, ty = (int)threadIdx.x / 16, n0 = (int)blockIdx.y * SIDE,
        o0 = (int)blockIdx.x * SIDE;
    float sum[EACH][EACH] = {};
    for (int i0 = 0; i0 < IC; i0 += DEPTH) {
        vectors_copy(xs, x, N, n0, IC, i0);
        vectors_copy(ws, p.w, OC, o0, IC, i0);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            float a[EACH], b[EACH];
#pragma unroll
            for (int j = 0; j < EACH; j += 4) {
                *(float4*)(a + j) = *(const float4*)&xs[k][vectors_place(ty, j)];
                *(float4*)(b + j) = *(const float4*)&ws[k][vectors_place(tx, j)];
            }
#pragma unroll
            for (int r = 0; r < EACH; r++)
#pragma unroll
                for (int c = 0; c < EACH; c++) sum[r][c] += a[r] * b[c];
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < EACH; r++)
#pragma unroll
        for (int c = 0; c < EACH; c++) {
            int n = n0 + vectors_place(ty, r), o = o0 + vectors_place(tx, c);
            if (n >= N || o >= OC) continue;
            float value = sum[r][c] + (p.b ? to_float(p.b[o]) : 0);
            floatX* to = &y[(size_t)n * OC + o];
            *to = from_float<floatX>(mode == ADD ? to_float(*to) + value : value);
        }
}

static inline void vectors_matmul_forward(floatX* y, const floatX* x, Linear p, int N, int IC, int OC, Mode mode,
                                          Context* ctx) {
    dim3 grid((OC + SIDE - 1) / SIDE, (N + SIDE - 1) / SIDE);
    vectors_kernel<<<grid, 256, 0, ctx->stream>>>(y, x, p, N, IC, OC, mode);
    cudaCheck(cudaGetLastError());
}
