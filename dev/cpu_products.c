/* Every matrix product of a step of GPT-2 124M on the CPU, by llmc/ops/matmul/cpu.h and by OpenBLAS in turn.
 *
 *     make build/cpu_products && build/cpu_products [TOKENS [LAYER ...]]     256 tokens, all layers
 *
 * OpenBLAS must be the version for OpenMP (libopenblas-openmp-dev), which shares the threads of ours. The Makefile
 * compiles this file twice: with USE_BLAS it is the products by OpenBLAS, else ours and main().
 *
 * For each layer y = x w^T, dx = dy w and dw = dy^T x, without bias and GELU, which OpenBLAS lacks. A turn takes each
 * set of operands first to ours, then to OpenBLAS. The sets are more than the L3 cache holds, as in a step, where every
 * layer has its own. Seven turns after a warm-up; the best of each counts. Prints a table in Markdown; "difference" is
 * the largest one between the results, over the largest number in them. */
#include "llmc/ops/matmul/matmul.h"

typedef struct {
    floatX *x, *w, *y, *dx, *dw;  // y also stands for dy
    int N, IC, OC;
} Operands;

#ifdef USE_BLAS
#define PRODUCT product_by_openblas
#else
#define PRODUCT product_by_ours
#endif

void product_by_ours(const Operands* o, MatmulPass pass, Context* ctx);
void product_by_openblas(const Operands* o, MatmulPass pass, Context* ctx);

void PRODUCT(const Operands* o, MatmulPass pass, Context* ctx) {
    Linear p = {.w = o->w};
    LinearGrads d = {.w = o->dw};
    if (pass == MATMUL_FORWARD) matmul_forward(o->y, o->x, p, o->N, o->IC, o->OC, SET, ctx);
    if (pass == MATMUL_BACKWARD_INPUT) matmul_backward_input(o->dx, o->y, o->w, o->N, o->IC, o->OC, SET, ctx);
    if (pass == MATMUL_BACKWARD_WEIGHT) matmul_backward_weight(d, o->y, o->x, o->N, o->IC, o->OC, SET, ctx);
}

#ifndef USE_BLAS

enum { TURNS = 7, MOST_SETS = 12 };

typedef struct {
    const char* name;
    int IC, OC;
} Layer;

static const Layer LAYERS[] = {
    {"qkv", 768, 2304}, {"attproj", 768, 768}, {"fc", 768, 3072}, {"fcproj", 3072, 768}, {"head", 768, 50304},
};
static const char* const PASSES[] = {"forward", "dx", "dw"};

static floatX* random_numbers(Context* ctx, size_t n, uint64_t key) {
    floatX* p = (floatX*)device_alloc(ctx, n * sizeof *p, "operands");
    for (size_t i = 0; i < n; i++) {
        key = key * 6364136223846793005u + 1442695040888963407u;
        p[i] = (floatX)((double)(key >> 40) / 8388608.0 - 1);
    }
    return p;
}

typedef void (*ProductBy)(const Operands*, MatmulPass, Context*);

static double seconds_of(ProductBy product, const Operands* o, MatmulPass pass, Context* ctx) {
    double start = now_seconds();
    product(o, pass, ctx);
    return now_seconds() - start;
}

static double largest_difference(const floatX* a, const floatX* b, size_t n) {
    double difference = 0, largest = 0;
    for (size_t i = 0; i < n; i++) {
        difference = fmax(difference, fabs((double)a[i] - b[i]));
        largest = fmax(largest, fabs((double)b[i]));
    }
    return difference / largest;
}

static void bench_layer(Layer l, int N, Context* ctx) {
    Operands sets[MOST_SETS];
    size_t sizes[3] = {(size_t)N * l.OC, (size_t)N * l.IC, (size_t)l.OC * l.IC};
    int count = max_int(1, min_int(MOST_SETS, MOST_SETS * 256 * 3072 / N / l.OC));
    for (int i = 0; i < count; i++) {
        Operands o = {.x = random_numbers(ctx, sizes[1], 1),
                      .w = random_numbers(ctx, sizes[2], 2),
                      .y = random_numbers(ctx, sizes[0], 3),
                      .dx = random_numbers(ctx, sizes[1], 4),
                      .dw = random_numbers(ctx, sizes[2], 5),
                      .N = N,
                      .IC = l.IC,
                      .OC = l.OC};
        sets[i] = o;
    }
    floatX* outputs[3] = {sets[0].y, sets[0].dx, sets[0].dw};
    for (int pass = 0; pass < MATMUL_PASSES; pass++) {
        double best[2] = {1e9, 1e9};
        floatX* other = (floatX*)malloc(sizes[pass] * sizeof *other);
        product_by_openblas(&sets[0], (MatmulPass)pass, ctx);
        memcpy(other, outputs[pass], sizes[pass] * sizeof *other);
        product_by_ours(&sets[0], (MatmulPass)pass, ctx);
        double difference = largest_difference(outputs[pass], other, sizes[pass]);
        free(other);
        for (int t = 0; t < TURNS; t++) {
            double sums[2] = {0, 0};
            for (int i = 0; i < count; i++) {
                sums[0] += seconds_of(product_by_ours, &sets[i], (MatmulPass)pass, ctx) / count;
                sums[1] += seconds_of(product_by_openblas, &sets[i], (MatmulPass)pass, ctx) / count;
            }
            for (int side = 0; side < 2; side++) best[side] = fmin(best[side], sums[side]);
        }
        double gflop = 1e-9 * MATMUL_FLOPS(N, l.IC, l.OC);
        printf("| %s %s | %d x %d x %d | %.2f | %.1f | %.1f | %.3f | %.0e |\n", l.name, PASSES[pass], N, l.IC, l.OC,
               1e3 * best[0], gflop / best[0], gflop / best[1], best[1] / best[0], difference);
        fflush(stdout);
    }
    for (int i = 0; i < count; i++) {
        device_free(sets[i].x, sizes[1] * sizeof(floatX));
        device_free(sets[i].w, sizes[2] * sizeof(floatX));
        device_free(sets[i].y, sizes[0] * sizeof(floatX));
        device_free(sets[i].dx, sizes[1] * sizeof(floatX));
        device_free(sets[i].dw, sizes[2] * sizeof(floatX));
    }
}

int main(int argc, char** argv) {
    char* end = NULL;
    long N = argc > 1 ? strtol(argv[1], &end, 10) : 256;
    if (N < 1 || N > 1 << 20 || (end && *end)) die(USAGE, "usage: cpu_products [TOKENS] [LAYER ...]");
    for (int a = 2; a < argc; a++) {
        size_t i = 0;
        while (i < COUNT_OF(LAYERS) && strcmp(argv[a], LAYERS[i].name) != 0) i++;
        if (i == COUNT_OF(LAYERS)) die(USAGE, "%s is no layer; there are qkv, attproj, fc, fcproj and head", argv[a]);
    }
    Context ctx;
    context_init(&ctx);
    printf("| product | N x IC x OC | ms | ours, GFLOP/s | OpenBLAS | ratio | difference |\n"
           "|---|---|---:|---:|---:|---:|---:|\n");
    for (size_t i = 0; i < COUNT_OF(LAYERS); i++) {
        int wanted = argc < 3;
        for (int a = 2; a < argc; a++) wanted |= strcmp(argv[a], LAYERS[i].name) == 0;
        if (wanted) bench_layer(LAYERS[i], (int)N, &ctx);
    }
    context_free(&ctx);
    return DONE;
}

#endif
