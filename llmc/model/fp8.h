/* Training in fp8 (--fp8) as the core sees it: llmc/fp8/, or with -DNO_FP8 what stands here. Then --fp8 1 is refused,
 * no operand has an 8-bit copy, and nothing else of this is called. */
#ifndef LLMC_MODEL_FP8_H
#define LLMC_MODEL_FP8_H

#ifndef NO_FP8
#include "llmc/fp8/room.h"
#else
#include "llmc/base/rooms.h"

typedef struct {
    int is_wanted, keeps_x;
    int64_t steps;
    const char* exact_forward;
    size_t scratch_bytes;
} Fp8State;

static inline void fp8_state_plan(const Fp8State* s, ...) {
    if (s->is_wanted) die(USAGE, "--fp8 1: built without fp8");
}

#define fp8_fill(...) room_absent(0, __VA_ARGS__)
#define residual_layernorm_forward_fp8(...) room_absent(0, __VA_ARGS__)
#define fp8_linear_forward(...) room_absent(0, __VA_ARGS__)
#define fp8_linear_gelu_forward(...) room_absent(0, __VA_ARGS__)
#define fp8_linear_backward_weight(...) room_absent(0, __VA_ARGS__)
#define fp8_linear_backward_input(...) room_absent(0, __VA_ARGS__)
#define fp8_linear_gelu_backward_input(...) room_absent(0, __VA_ARGS__)
#define fp8_linear_classifier_backward(...) room_absent(0, __VA_ARGS__)
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
