/* Faster than coalesced: a block of 32 x 32 threads copies a tile of 32 rows of x and one of 32 rows of w to shared
 * memory, with neighbouring threads at neighbouring i, so a load uses all that it fetches. Every element that was
 * fetched then serves 32 outputs. A row of a tile has a 33rd element: without it a column would lie in one bank.
 * What limits it now is shared memory: two loads for each product. */
enum { TILE = 32 };

static __global__ void tiles_kernel(floatX* y, const floatX* x, Linear p, int N, int IC, int OC, Mode mode) {
    __shared__ float xs[TILE][TILE + 1], ws[TILE][TILE + 1];
    int tx = (int)threadIdx.x, ty = (int)threadIdx.y, n0 = (int)blockIdx.y * TILE, o0 = (int)blockIdx.x * TILE;
    float sum = 0;
    for (int i0 = 0; i0 < IC; i0 += TILE) {
        int i = i0 + tx;
        xs[ty][tx] = n0 + ty < N && i < IC ? to_float(x[(size_t)(n0 + ty) * IC + i]) : 0;
        ws[ty][tx] = o0 + ty < OC && i < IC ? to_float(p.w[(size_t)(o0 + ty) * IC + i]) : 0;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < TILE; k++) sum += xs[ty][k] * ws[tx][k];
        __syncthreads();
    }
    int n = n0 + ty, o = o0 + tx;
    if (n >= N || o >= OC) return;
    if (p.b) sum += to_float(p.b[o]);
    floatX* to = &y[(size_t)n * OC + o];
    *to = from_float<floatX>(mode == ADD ? to_float(*to) + sum : sum);
}

static inline void tiles_matmul_forward(floatX* y, const floatX* x, Linear p, int N, int IC, int OC, Mode mode,
                                        Context* ctx) {
    dim3 grid((OC + TILE - 1) / TILE, (N + TILE - 1) / TILE), block(TILE, TILE);
    tiles_kernel<<<grid, block, 0, ctx->stream>>>(y, x, p, N, IC, OC, mode);
    cudaCheck(cudaGetLastError());
}
