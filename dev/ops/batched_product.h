/* Cases of cuBLASLt's products of batches of matrices, as materialized attention uses them. */
#ifndef DEV_OPS_BATCHED_PRODUCT_H
#define DEV_OPS_BATCHED_PRODUCT_H

#include "harness.h"
#include "llmc/device/cublaslt.cuh"

#ifdef __CUDACC__

// Batches of products, by cuBLASLt and by the kernel for what it does not support: the rows of a head times another's
// transpose, in fp32, and the transpose of that times rows, in floatX. Each element is compared with its sum of
// products.
static void test_batched_product(Harness* h, int T, int NH, int HS) {
    enum { WAYS = 2 };
    size_t C = (size_t)(NH * HS), width = round_up((size_t)T, 8), pairs = (size_t)NH * (size_t)T * width;
    case_begin(h, "attention/batched product T=%d NH=%d HS=%d", T, NH, HS);
    Array qkv = input(h, (size_t)T * 3 * C, 1.0), weights = input(h, pairs, 1.0);
    BatchMatrix q = {qkv.device, {cublaslt_type(), CUBLAS_OP_N, (int64_t)(3 * C), HS}}, k = q, w = q;
    k.p = qkv.device + C;
    k.layout.op = CUBLAS_OP_T;
    w.p = weights.device;
    w.layout.op = CUBLAS_OP_T, w.layout.row = (int64_t)width, w.layout.next = (int64_t)((size_t)T * width);
    const BatchAddend nothing = {NULL, 0};
    for (int plain = 0; plain < WAYS; plain++) {
        Array s = output(h, pairs, SET), o = output(h, (size_t)T * C, SET);
        real *want = copy_of(h, s), *sum = copy_of(h, s), *want_o = copy_of(h, o), *sum_o = copy_of(h, o);
        for (int head = 0; head < NH; head++)
            for (int m = 0; m < T; m++) {
                for (int n = 0; n < T; n++) {
                    size_t to = ((size_t)head * (size_t)T + (size_t)m) * width + (size_t)n;
                    double total = 0, magnitude = 0;
                    for (int i = 0; i < HS; i++) {
                        double product = (double)qkv.host[(size_t)m * 3 * C + (size_t)(head * HS + i)] *
                                         (double)qkv.host[(size_t)n * 3 * C + C + (size_t)(head * HS + i)];
                        total += product, magnitude += fabs(product);
                    }
                    want[to] = (real)(0.5 * total), sum[to] = (real)(0.5 * magnitude);
                }
                for (int i = 0; i < HS; i++) {
                    double total = 0, magnitude = 0;
                    for (int l = 0; l < T; l++) {
                        double product =
                            (double)weights.host[((size_t)head * (size_t)T + (size_t)l) * width + (size_t)m] *
                            (double)qkv.host[(size_t)l * 3 * C + (size_t)(head * HS + i)];
                        total += product, magnitude += fabs(product);
                    }
                    size_t to = (size_t)m * C + (size_t)(head * HS + i);
                    want_o[to] = (real)(0.5 * total), sum_o[to] = (real)(0.5 * magnitude);
                }
            }
        BatchMatrix c = {s.device_real, {CUDA_R_32F, CUBLAS_OP_N, (int64_t)width, w.layout.next}};
        BatchMatrix d = {o.device, {cublaslt_type(), CUBLAS_OP_N, (int64_t)C, HS}};
        BatchSize c_size = {T, T, HS, NH}, d_size = {T, HS, T, NH};
        BatchKey c_key = batch_key(&c, &q, &k, c_size, &h->ctx);
        BatchKey d_key = batch_key(&d, &w, &q, d_size, &h->ctx);
        if (plain) {
            batched_product_plain(c.p, q.p, k.p, &c_key, 0.5f, nothing, &h->ctx);
            batched_product_plain(d.p, w.p, q.p, &d_key, 0.5f, nothing, &h->ctx);
        } else {
            batched_product(c, q, k, c_size, 0.5f, &h->ctx);
            batched_product(d, w, q, d_size, 0.5f, &h->ctx);
        }
        // Columns past T belong to no product: they must be unchanged.
        array_download(s);
        for (size_t i = 0; i < pairs; i++)
            if ((int)(i % width) >= T) {
                if (!isnan(s.host[i])) case_fail(h, "padding column %zu was written", i);
                s.host[i] = want[i] = 0, sum[i] = 1;
            }
        for (size_t i = 0; i < pairs; i++)
            if (!(fabs((double)s.host[i] - (double)want[i]) <= tolerance(1e-6) * fmax(1e-6, sum[i])))
                case_fail(h, "%s: element %zu is %.9g, expected %.9g", plain ? "kernel" : "cuBLASLt", i,
                          (double)s.host[i], (double)want[i]);
        expect_close_to_sum(h, plain ? "rows by the kernel" : "rows", o, want_o, sum_o, tolerance(1e-6));
    }
    case_end(h);
}

#endif

#endif
