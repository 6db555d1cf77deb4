/* Training in fp8 (--fp8), as the rest of a program sees it. With -DNO_FP8 no operand has an 8-bit copy, and nothing calls
 * what stands here for the room. */
#ifndef LLMC_FP8_ROOM_H
#define LLMC_FP8_ROOM_H

#ifndef NO_FP8
#include "llmc/fp8/linear.h"
#include "llmc/fp8/peak.h"
#include "llmc/fp8/report.h"
#include "llmc/fp8/state.h"
#else

typedef struct {
    int is_wanted, keeps_x;
    int64_t steps;
    const char* exact_forward;
    size_t scratch_bytes;
} Fp8State;

#define fp8_fill(x, N, C, ctx) ((void)(N), (void)(C), (void)(ctx))
#define residual_layernorm_forward_fp8(...) 0
#define fp8_linear_forward(...) ((void)0)
#define fp8_linear_gelu_forward(...) ((void)0)
#define fp8_linear_backward_weight(...) ((void)0)
#define fp8_linear_backward_input(...) ((void)0)
#define fp8_linear_gelu_backward_input(...) ((void)0)
#define fp8_linear_classifier_backward(...) ((void)0)
#define fp8_state_plan(...) ((void)0)
#define fp8_state_parameter_bytes(...) 0
#define fp8_state_activation_bytes(...) 0
#define fp8_state_open(...) ((void)0)
#define fp8_state_close(...) ((void)0)
#define fp8_state_set(...) ((void)0)
#define fp8_state_switch(...) ((void)0)
#define fp8_state_begin_step(...) ((void)0)
#define fp8_state_end_step(...) ((void)0)
#define fp8_state_text(...) NULL
#define fp8_report(...) ((void)0)
#define fp8_peak_flops(...) 0

#endif
#endif
