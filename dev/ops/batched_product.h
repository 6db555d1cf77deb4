/* Cases of cuBLASLt's products of batches of matrices, as materialized attention uses them. */
#ifndef DEV_OPS_BATCHED_PRODUCT_H
#define DEV_OPS_BATCHED_PRODUCT_H

#include "harness.h"
#include "llmc/device/cublaslt.cuh"

#ifdef __CUDACC__

// A sum of n products of numbers that lie `i` and `j` apart, halved, and the same of absolute values.
static void batched_sum(real* sum, real* magnitude, const real* x, size_t i, const real* y, size_t j, int n) {
    double total = 0, size = 0;
    for (int k = 0; k < n; k++, x += i, y += j) {
        double product = (double)*x * (double)*y;
        total += product, size += fabs(product);
    }
    *sum = (real)(0.5 * total), *magnitude = (real)(0.5 * size);
}

// Batches of products, by cuBLASLt and by the kernel for what it does not support: the rows of a head times another's
// transpose, in fp32, and the transpose of that times rows, in floatX. Each element is compared with its sum of
// products.
static void test_batched_product(Harness* h, int T, int NH, int HS) {
    size_t C = (size_t)(NH * HS), width = round_up((size_t)T, 8), pairs = (size_t)NH * (size_t)T * width, N = (size_t)T;
    case_begin(h, "attention/batched product T=%d NH=%d HS=%d", T, NH, HS);
    Array qkv = input(h, N * 3 * C, 1.0), weights = input(h, pairs, 1.0);
    BatchMatrix q = {qkv.device, {cublaslt_type(), CUBLAS_OP_N, (int64_t)(3 * C), HS}}, k = q, w = q;
    k.p = qkv.device + C, k.layout.op = CUBLAS_OP_T;
    w.p = weights.device, w.layout.op = CUBLAS_OP_T;
    w.layout.row = (int64_t)width, w.layout.next = (int64_t)(N * width);
    for (int plain = 0; plain < 2; plain++) {
        const BatchAddend nothing = {NULL, 0};
        Array s = output(h, pairs, SET), o = output(h, N * C, SET);
        real *want = copy_of(h, s), *sum = copy_of(h, s), *want_o = copy_of(h, o), *sum_o = copy_of(h, o);
        for (size_t i = 0; i < pairs; i++) {  // columns past T belong to no product: they must be unchanged
            size_t head = i / width / N, m = i / width % N, n = i % width;
            const real* of_head = qkv.host + head * (size_t)HS;
            sum[i] = 1;
            if (n < N) batched_sum(want + i, sum + i, of_head + m * 3 * C, 1, of_head + n * 3 * C + C, 1, HS);
        }
        for (size_t i = 0; i < N * C; i++) {
            const real* row = weights.host + i % C / (size_t)HS * N * width + i / C;
            batched_sum(want_o + i, sum_o + i, row, width, qkv.host + i % C, 3 * C, T);
        }
        BatchMatrix c = {s.device_real, {CUDA_R_32F, CUBLAS_OP_N, (int64_t)width, w.layout.next}};
        BatchMatrix d = {o.device, {cublaslt_type(), CUBLAS_OP_N, (int64_t)C, HS}};
        BatchSize c_size = {T, T, HS, NH}, d_size = {T, HS, T, NH};
        BatchKey c_key = batch_key(&c, &q, &k, c_size, &h->ctx), d_key = batch_key(&d, &w, &q, d_size, &h->ctx);
        if (plain) {
            batched_product_plain(c.p, q.p, k.p, &c_key, 0.5f, nothing, &h->ctx);
            batched_product_plain(d.p, w.p, q.p, &d_key, 0.5f, nothing, &h->ctx);
        } else {
            batched_product(c, q, k, c_size, 0.5f, &h->ctx);
            batched_product(d, w, q, d_size, 0.5f, &h->ctx);
        }
        array_download(s);
        for (size_t i = 0; i < pairs; i++) {
            int is_padding = i % width >= N;
            double got = (double)s.host[i], tol = tolerance(1e-6) * fmax(1e-6, (double)sum[i]);
            if (is_padding ? !isnan(got) : !(fabs(got - (double)want[i]) <= tol))
                case_fail(h, "%s: element %zu is %.9g, expected %.9g", plain ? "kernel" : "cuBLASLt", i, got,
                          (double)want[i]);
        }
        expect_close_to_sum(h, plain ? "rows by the kernel" : "rows", o, want_o, sum_o, tolerance(1e-6));
    }
    case_end(h);
}

#endif

#endif
