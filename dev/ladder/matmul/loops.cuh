/* One thread for each output: y[n, o] (SET or ADD) = b[o] + sum over i of x[n, i] w[o, i]. The threads of a warp
 * have neighbouring o, whose rows of w are 2 IC bytes apart: a load fetches 32 sectors to use one element of each.
 * And every element of x and w is fetched again for each output that needs it. */
static __global__ void loops_kernel(floatX* y, const floatX* x, Linear p, int N, int IC, int OC, Mode mode) {
    int o = (int)(blockIdx.x * blockDim.x + threadIdx.x), n = (int)(blockIdx.y * blockDim.y + threadIdx.y);
    if (n >= N || o >= OC) return;
    float sum = 0;
    for (int i = 0; i < IC; i++) sum += to_float(x[(size_t)n * IC + i]) * to_float(p.w[(size_t)o * IC + i]);
    if (p.b) sum += to_float(p.b[o]);
    floatX* to = &y[(size_t)n * OC + o];
    *to = from_float<floatX>(mode == ADD ? to_float(*to) + sum : sum);
}

static inline void loops_matmul_forward(floatX* y, const floatX* x, Linear p, int N, int IC, int OC, Mode mode,
                                        Context* ctx) {
    dim3 grid((OC + 31) / 32, (N + 7) / 8), block(32, 8);
    loops_kernel<<<grid, block, 0, ctx->stream>>>(y, x, p, N, IC, OC, mode);
    cudaCheck(cudaGetLastError());
}
