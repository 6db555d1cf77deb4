/* Cases of llmc/ops/sum.h. */
#ifndef DEV_OPS_SUM_H
#define DEV_OPS_SUM_H

#include "../../llmc/ops/sum.h"
#include "harness.h"

static inline void test_sum(Harness* h) {
    static const int SIZES[] = {1, 77, 1024, 70001};
    for (size_t i = 0; i < COUNT_OF(SIZES); i++)
        for (int add = 0; add < 2; add++) {
            Mode mode = add ? ADD : SET;
            case_begin(h, "sum/forward n=%d %s", SIZES[i], mode_name(mode));
            Array x = input(h, (size_t)SIZES[i], 1), sum = output(h, 1, mode);
            real* want = copy_of(h, sum);
            sum_forward_ref(want, x.host, SIZES[i], 0.25, mode);
            sum_forward(sum.device_real, x.device_real, SIZES[i], 0.25, mode, &h->ctx);
            expect_close(h, "sum", sum, want, tolerance(1e-6));
            case_end(h);
        }
}

#endif
