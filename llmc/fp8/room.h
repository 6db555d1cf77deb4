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
#include "llmc/base/rooms.h"

typedef struct {
    int is_wanted, keeps_x;
    int64_t steps;
    const char* exact_forward;
    size_t scratch_bytes;
} Fp8State;

#define fp8_fill(...) room_absent(0, __VA_ARGS__)
#define residual_layernorm_forward_fp8(...) room_absent(0, __VA_ARGS__)
#define fp8_linear_forward(...) room_absent(0, __VA_ARGS__)
#define fp8_linear_gelu_forward(...) room_absent(0, __VA_ARGS__)
#define fp8_linear_backward_weight(...) room_absent(0, __VA_ARGS__)
#define fp8_linear_backward_input(...) room_absent(0, __VA_ARGS__)
#define fp8_linear_gelu_backward_input(...) room_absent(0, __VA_ARGS__)
#define fp8_linear_classifier_backward(...) room_absent(0, __VA_ARGS__)
#define fp8_state_plan(...) room_absent(0, __VA_ARGS__)
#define fp8_state_parameter_bytes(...) (size_t) room_absent(0, __VA_ARGS__)
#define fp8_state_activation_bytes(...) (size_t) room_absent(0, __VA_ARGS__)
#define fp8_state_open(...) room_absent(0, __VA_ARGS__)
#define fp8_state_close(...) room_absent(0, __VA_ARGS__)
#define fp8_state_set(...) room_absent(0, __VA_ARGS__)
#define fp8_state_switch(...) room_absent(0, __VA_ARGS__)
#define fp8_state_begin_step(...) room_absent(0, __VA_ARGS__)
#define fp8_state_end_step(...) room_absent(0, __VA_ARGS__)
#define fp8_state_text(...) (room_absent(0, __VA_ARGS__), (char*)NULL)
#define fp8_report(...) room_absent(0, __VA_ARGS__)
#define fp8_peak_flops(...) room_absent(0, __VA_ARGS__)

#endif
#endif
