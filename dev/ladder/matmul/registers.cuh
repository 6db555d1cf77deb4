/* Faster than tiles: a thread has 8 x 8 outputs, so 16 numbers from shared memory serve 64 products, where they
 * served 8. A block of 256 threads computes 128 x 128 outputs, from tiles that lie transposed, [i][row]: what the
 * threads of a warp read at once are neighbours. An element of global memory that was fetched serves 128 outputs.
 * Loads are still of single elements, 16 from shared memory for 64 products. */
enum { SIDE = 128, DEPTH = 16, EACH = 8 };  // of a block's tile; outputs of a thread in a row and in a column

// The tile's rows r0 .. r0 + SIDE - 1 of m, columns i0 .. i0 + DEPTH - 1, transposed.
static __device__ inline void registers_copy(float (*tile)[SIDE + 1], const floatX* m, int rows, int r0, int columns,
                                             int i0) {
    int k = (int)threadIdx.x % DEPTH;
#pragma unroll
    for (int r = (int)threadIdx.x / DEPTH; r < SIDE; r += 256 / DEPTH)
        tile[k][r] = r0 + r < rows && i0 + k < columns ? to_float(m[(size_t)(r0 + r) * columns + i0 + k]) : 0;
}

static __global__ void __launch_bounds__(256)
    registers_kernel(floatX* y, const floatX* x, Linear p, int N, int IC, int OC, Mode mode) {
    __shared__ float xs[DEPTH][SIDE + 1], ws[DEPTH][SIDE + 1];
    int tx = (int)threadIdx.x % 16, ty = (int)threadIdx.x / 16, n0 = (int)blockIdx.y * SIDE,
        o0 = (int)blockIdx.x * SIDE;
    float sum[EACH][EACH] = {};
    for (int i0 = 0; i0 < IC; i0 += DEPTH) {
        registers_copy(xs, x, N, n0, IC, i0);
        registers_copy(ws, p.w, OC, o0, IC, i0);
        __syncthreads();
#pragma unroll
        for (int k = 0; k < DEPTH; k++) {
            float a[EACH], b[EACH];
#pragma unroll
            for (int j = 0; j < EACH; j++) a[j] = xs[k][ty + 16 * j], b[j] = ws[k][tx + 16 * j];
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
            int n = n0 + ty + 16 * r, o = o0 + tx + 16 * c;
            if (n >= N || o >= OC) continue;
            float value = sum[r][c] + (p.b ? to_float(p.b[o]) : 0);
            floatX* to = &y[(size_t)n * OC + o];
            *to = from_float<floatX>(mode == ADD ? to_float(*to) + value : value);
        }
}

static inline void registers_matmul_forward(floatX* y, const floatX* x, Linear p, int N, int IC, int OC, Mode mode,
                                            Context* ctx) {
    dim3 grid((OC + SIDE - 1) / SIDE, (N + SIDE - 1) / SIDE);
    registers_kernel<<<grid, 256, 0, ctx->stream>>>(y, x, p, N, IC, OC, mode);
    cudaCheck(cudaGetLastError());
}
