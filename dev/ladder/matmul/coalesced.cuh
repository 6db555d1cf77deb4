/* Faster than loops: a warp computes one output, and its 32 threads read neighbouring i. A load of the warp is then
 * one piece of 64 bytes of x or of w, all of which is used, where it was 32 sectors with one element in each. The 32
 * partial sums are added by shuffles. Every element still is loaded again for each output that needs it: one load
 * instruction for each half of a product, and 600 GB from the caches. */
enum { OUTPUTS = 8 };  // of a block: neighbouring o, which share a row of x

static __global__ void coalesced_kernel(floatX* y, const floatX* x, Linear p, int N, int IC, int OC, Mode mode) {
    int o = (int)blockIdx.x * OUTPUTS + (int)threadIdx.y, n = (int)blockIdx.y, lane = (int)threadIdx.x;
    if (o >= OC) return;
    float sum = 0;
#pragma unroll 4
    for (int i = lane; i < IC; i += WARP) sum += to_float(x[(size_t)n * IC + i]) * to_float(p.w[(size_t)o * IC + i]);
    sum = warp_sum(sum);
    if (lane > 0) return;
    if (p.b) sum += to_float(p.b[o]);
    floatX* to = &y[(size_t)n * OC + o];
    *to = from_float<floatX>(mode == ADD ? to_float(*to) + sum : sum);
}

static inline void coalesced_matmul_forward(floatX* y, const floatX* x, Linear p, int N, int IC, int OC, Mode mode,
                                            Context* ctx) {
    // The grid's second dimension ends at 65,535.
    for (int n = 0; n < N; n += 32768) {
        dim3 grid((OC + OUTPUTS - 1) / OUTPUTS, min_int(32768, N - n)), block(WARP, OUTPUTS);
        coalesced_kernel<<<grid, block, 0, ctx->stream>>>(y + (size_t)n * OC, x + (size_t)n * IC, p, N - n, IC, OC,
                                                          mode);
    }
    cudaCheck(cudaGetLastError());
}
