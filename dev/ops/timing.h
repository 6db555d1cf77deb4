/* Times of launchers: the median of many runs, and a line of the report. */
#ifndef DEV_OPS_TIMING_H
#define DEV_OPS_TIMING_H

#include "arrays.h"

static inline int compare_doubles(const void* a, const void* b) {
    double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

// Memory for n elements of `size` bytes, filled with the numbers of `noise`, again and again where the element is
// floatX: normal numbers for all would take longer than the bench.
static inline void* bench_memory(Harness* h, size_t n, size_t size, Array noise) {
#ifdef __CUDACC__
    unsigned char* p = (unsigned char*)case_block(h, n * size, ON_DEVICE);
    size_t bytes = n * size, done = min_size(bytes, noise.n * sizeof(floatX));
    cudaCheck(cudaMemcpyAsync(p, noise.device, done, cudaMemcpyDeviceToDevice, h->ctx.stream));
    for (; done < bytes; done = min_size(bytes, 2 * done))
        cudaCheck(cudaMemcpyAsync(p + done, p, min_size(done, bytes - done), cudaMemcpyDeviceToDevice, h->ctx.stream));
    return p;
#else
    real* p = (real*)case_memory(h, n * size);
    for (size_t i = 0; i < n; i++) p[i] = noise.host[i % noise.n];
    return p;
#endif
}

static inline double bench_median(Harness* h, double* seconds, int n) {
    qsort(seconds, (size_t)n, sizeof *seconds, compare_doubles);
    h->spread = (seconds[3 * n / 4] - seconds[n / 4]) / seconds[n / 2];
    return seconds[n / 2];
}

#ifdef __CUDACC__

enum { BENCH_RUNS = 100, FLUSH_BYTES = 256 << 20 };  // the flush is three times the L2 of any GPU that is meant

// One thread for 16 bytes of a buffer of zeros; `never` keeps the compiler from leaving the reads out.
static __global__ void bench_flush_kernel(const int4* p, int* never) {
    int4 v = p[(size_t)blockIdx.x * blockDim.x + threadIdx.x];
    if (v.x | v.y | v.z | v.w) *never = 1;
}

// Median seconds of run(state) by events, after a warm-up: 20 to 100 runs, about half a second in all. Before each of
// them a read of FLUSH_BYTES pushes the operands out of the L2, and gives the host time to queue the run: neither
// cached data nor launch latency is timed.
static inline double bench_seconds(Harness* h, void (*run)(void* state), void* state) {
    cudaEvent_t start[BENCH_RUNS], stop[BENCH_RUNS];
    double seconds[BENCH_RUNS];
    int n = 20;
    if (!h->flush) {
        cudaCheck(cudaMalloc(&h->flush, FLUSH_BYTES));
        cudaCheck(cudaMemset(h->flush, 0, FLUSH_BYTES));
    }
    for (int i = 0; i < 3; i++) run(state);
    device_synchronize(&h->ctx);
    double first = now_seconds();
    run(state);
    device_synchronize(&h->ctx);
    n = (int)fmin(BENCH_RUNS, fmax(n, 0.5 / (now_seconds() - first)));
    for (int i = 0; i < n; i++) {
        cudaCheck(cudaEventCreate(&start[i]));
        cudaCheck(cudaEventCreate(&stop[i]));
    }
    for (int i = 0; i < n; i++) {
        bench_flush_kernel<<<FLUSH_BYTES / 16 / 256, 256, 0, h->ctx.stream>>>((const int4*)h->flush, (int*)h->flush);
        cudaCheck(cudaGetLastError());
        cudaCheck(cudaEventRecord(start[i], h->ctx.stream));
        run(state);
        cudaCheck(cudaEventRecord(stop[i], h->ctx.stream));
    }
    device_synchronize(&h->ctx);
    for (int i = 0; i < n; i++) {
        float milliseconds;
        cudaCheck(cudaEventElapsedTime(&milliseconds, start[i], stop[i]));
        seconds[i] = 1e-3 * milliseconds;
        cudaCheck(cudaEventDestroy(start[i]));
        cudaCheck(cudaEventDestroy(stop[i]));
    }
    return bench_median(h, seconds, n);
}

#else

// Median seconds of run(state), after a warm-up: at least 5 runs, at most 100, about a second in all.
static inline double bench_seconds(Harness* h, void (*run)(void* state), void* state) {
    double seconds[100], total = 0;
    int n = 0;
    run(state);
    while (n < (int)COUNT_OF(seconds) && (n < 5 || total < 1)) {
        double start = now_seconds();
        run(state);
        seconds[n] = now_seconds() - start;
        total += seconds[n++];
    }
    return bench_median(h, seconds, n);
}

#endif

static inline void bench_report(Harness* h, const char* name, const char* shapes, double seconds, double flops,
                                double bytes) {
    double gflops = 1e-9 * flops / seconds, gbs = 1e-9 * bytes / seconds;
    printf("%-40s %-34s %10.1f us (+-%2.0f %%)  %9.2f GFLOP/s", name, shapes, 1e6 * seconds, 50 * h->spread, gflops);
    if (h->ceiling_tflops > 0) printf(" (%3.0f %%)", 0.1 * gflops / h->ceiling_tflops);
    printf("  %8.2f GB/s", gbs);
    if (h->ceiling_gbs > 0) printf(" (%3.0f %%)", 100 * gbs / h->ceiling_gbs);
    putchar('\n');
    fflush(stdout);
}

#endif
