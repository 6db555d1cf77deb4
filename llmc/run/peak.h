/* The FLOP/s that MFU is relative to: the peak of the GPU's data sheet, or the rate of large matmuls, measured. */
#ifndef LLMC_RUN_PEAK_H
#define LLMC_RUN_PEAK_H

#include "llmc/base/rng.h"
#include "llmc/device/copies.h"
#include "llmc/ops/matmul/matmul.h"

#ifdef __CUDACC__
// Dense peak FLOP/s of the tensor cores in the build's type, from the vendor's data sheets; 0 for a GPU that is not in
// the table.
static inline double peak_of_data_sheet(void) {
    static const struct {
        const char* name;
        double half, tf32;
    } known[] = {{"H100 PCIe", 756e12, 378e12},
                 {"H100", 989.4e12, 494.7e12},
                 {"H200", 989.4e12, 494.7e12},
                 {"A100", 312e12, 156e12}};
    struct cudaDeviceProp properties;
    cudaCheck(cudaGetDeviceProperties(&properties, 0));
    for (size_t i = 0; i < COUNT_OF(known); i++)
        if (strstr(properties.name, known[i].name)) return sizeof(floatX) == 2 ? known[i].half : known[i].tf32;
    return 0;
}
#define PEAK_SIZES 8192
enum { PEAK_SIZE = 8192, PEAK_REPEATS = 60 };
#define PEAK_SECONDS 0.1
#else
static inline double peak_of_data_sheet(void) { return 0; }
#define PEAK_SIZES 384, 512, 768, 1024
enum { PEAK_SIZE = 1024, PEAK_REPEATS = 1000 };
#define PEAK_SECONDS 0.4
#endif

#define PEAK_ELEMENTS ((size_t)PEAK_SIZE * PEAK_SIZE)

// Random x and w of square matmuls, with room for y: [3, PEAK_SIZE, PEAK_SIZE].
static inline floatX* peak_operands(Context* ctx) {
    const size_t n = PEAK_ELEMENTS;
    floatX* x = (floatX*)device_alloc(ctx, 3 * n * sizeof(floatX), "measurement");
    HostView view = host_view_open(x, 2 * n, VIEW_FLOATX);
    for (size_t i = 0; i < 2 * n; i++) view.values[i] = (real)(rng_uniform((uint32_t)i * 2654435761u) - 0.5);
    host_view_write(ctx, &view);
    host_view_close(&view);
    return x;
}

static inline void peak_product(const void* operands, int size, Context* ctx) {
    floatX* x = (floatX*)operands;
    Linear w = {.w = x + PEAK_ELEMENTS};
    matmul_forward(x + 2 * PEAK_ELEMENTS, x, w, size, size, size, SET, ctx);
}

// The best FLOP/s of repeated square matmuls with the library's default algorithm: timing others would heat the GPU. On
// the CPU each size gets the same time: large ones are the fastest on an idle machine, small ones sometimes on a busy
// one, where they fit into a time slice.
static inline double peak_measure(void (*product)(const void* operands, int size, Context* ctx), const void* operands,
                                  Context* ctx) {
    static const int sizes[] = {PEAK_SIZES};
    int autotune = device_set_autotune(ctx, 0);
    double best = 0, began = 0, spent[COUNT_OF(sizes)] = {0};
    for (int i = -1; i < PEAK_REPEATS; i++) {
        size_t k = 0;  // the size that has had the least time
        for (size_t j = 1; j < COUNT_OF(sizes); j++)
            if (i >= 0 && spent[j] < spent[k]) k = j;
        int size = sizes[k];
        if (i > 1 && now_seconds() - began >= PEAK_SECONDS) break;
        device_synchronize(ctx);
        double start = now_seconds();
        product(operands, size, ctx);
        device_synchronize(ctx);
        double took = now_seconds() - start, flops = MATMUL_FLOPS(size, size, size) / took;
        if (i < 0) {  // the first one loads its kernel
            began = now_seconds();
            continue;
        }
        best = fmax(best, flops);
        spent[k] += took;
    }
    device_set_autotune(ctx, autotune);
    return best;
}

static inline double peak_matmul_flops(Context* ctx) {
    floatX* x = peak_operands(ctx);
    double flops = peak_measure(peak_product, x, ctx);
    device_free(x, 3 * PEAK_ELEMENTS * sizeof(floatX));
    return flops;
}

#endif
