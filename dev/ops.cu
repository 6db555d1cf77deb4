/* Every op of llmc/ops, one harness:
 *
 *     ./ops test  [op]   launchers against the plain references; the same bits for any number of threads
 *     ./ops quick [op]   the same without large cases
 *     ./ops grad  [op]   references and launchers against finite differences (build with -DREAL_DOUBLE)
 *     ./ops bench [op] [GB/s TFLOP/s]   time, GFLOP/s and GB/s of the launchers that the trainers call, in per cent
 *                        of the machine's peaks: those given, else on a GPU those measured first; "all": every op
 *
 * gcc builds the CPU's, nvcc the GPU's:
 *     nvcc -std=c++17 -O3 -arch=native -D_GNU_SOURCE -DPRECISION_BF16 -I. -Xcompiler -fopenmp -o ops dev/ops.cu \
 *         -lcublasLt
 *
 * A new op: declare it in dev/ops/<op>.h (ops/op.h), include that, add a row. */
#include "ops/accuracy.h"
#include "ops/adamw.h"
#include "ops/attention.h"
#include "ops/attention_decode.h"
#include "ops/average.h"
#include "ops/cast_to_fp32.h"
#include "ops/classifier.h"
#include "ops/draw.h"
#include "ops/dropout.h"
#include "ops/embedding.h"
#include "ops/embedding_rows.h"
#include "ops/fp8_scales.h"
#include "ops/gather.h"
#include "ops/gelu.h"
#include "ops/global_norm.h"
#include "ops/harness.h"
#include "ops/interaction.h"
#include "ops/lamb.h"
#include "ops/layernorm.h"
#include "ops/layernorm_fp8.h"
#include "ops/linear.h"
#include "ops/linear_bce.h"
#include "ops/linear_decode.h"
#include "ops/matmul.h"
#include "ops/matmul_bench.h"
#include "ops/matmul_epilogue.h"
#include "ops/matmul_parts.h"
#include "ops/matmul_relu.h"
#include "ops/mean_bias.h"
#include "ops/muon.h"
#include "ops/next_sentence.h"
#include "ops/quantize.h"
#include "ops/span.h"
#include "ops/squared_error.h"
#include "ops/tanh.h"
#include "ops/target_rounding.h"

typedef struct {
    const char* op;
    void (*test)(Harness*);     // NULL: its declaration says all
    void (*grad)(Harness*);     // NULL: its declaration says all, or there is nothing to differentiate
    void (*bench)(Harness*);    // NULL: its declaration says all, or it is not worth a clock
    const Op *declared, *also;  // NULL: by hand
} OpRow;

// clang-format off
static const OpRow TABLE[] = {
    {"layernorm", test_layernorm, NULL, NULL, &LAYERNORM, &RESIDUAL_LAYERNORM},
    {"layernorm_fp8", test_layernorm_fp8, NULL, bench_layernorm_fp8},
    {"dropout", test_dropout_masks, NULL, NULL, &DROPOUT},
    {"gather", NULL, NULL, NULL, &GATHER},
    {"adamw", test_adamw, NULL, NULL, &ADAMW},
    {"lamb", test_lamb, NULL, NULL, &LAMB},
    {"muon", test_muon, NULL, NULL, &MUON},
    {"average", NULL, NULL, NULL, &AVERAGE},
    {"global_norm", test_global_norm, NULL, NULL, &GLOBAL_NORM},
    {"loss_scale", test_loss_scale, NULL, NULL},
    {"outliers", test_outliers, NULL, NULL},
    {"cast_to_fp32", test_cast_to_fp32, NULL, NULL, &CAST_TO_FP32},
    {"quantize", test_quantize, NULL, bench_quantize, &QUANTIZE, &QUANTIZE_E4M3},
    {"fp8_scales", test_fp8_scales, NULL, NULL},
    {"mean_bias", test_mean_bias_rows, NULL, NULL, &MEAN_BIAS},
    {"linear", test_linear, NULL, NULL},
    {"target_rounding", NULL, NULL, NULL, &TARGET_ROUNDING},
    {"attention", test_attention, NULL, NULL, &ATTENTION_MATERIALIZED, &ATTENTION},
    {"attention_decode", test_attention_decode, NULL, NULL, &DECODE},
    {"linear_decode", NULL, NULL, NULL, &LINEAR_DECODE},
    {"draw", test_draw, NULL, NULL},
    {"classifier", test_classifier, NULL, NULL, &CLASSIFIER},
    {"span", NULL, NULL, NULL, &SPAN},
    {"squared_error", NULL, NULL, NULL, &SQUARED_ERROR},
    {"tanh", test_tanh_in_place, NULL, NULL, &TANH},
    {"embedding", NULL, NULL, NULL, &EMBEDDING},
    {"gelu", NULL, NULL, NULL, &GELU},
    {"matmul", test_matmul, grad_matmul_gelu, bench_matmul, &MATMUL, &MATMUL_GELU},
#ifdef __CUDACC__
    {"matmul_epilogue", NULL, NULL, NULL, &MATMUL_EPILOGUE_BIAS, &MATMUL_EPILOGUE},
#endif
    {"next_sentence", test_next_sentence, NULL, NULL, &NEXT_SENTENCE},
    {"accuracy", test_accuracy, NULL, NULL, &ACCURACY},
    {"interaction", NULL, NULL, NULL, &INTERACTION},
    {"linear_bce", NULL, NULL, NULL, &LINEAR_BCE},
    {"embedding_rows", NULL, NULL, NULL, &ROWS},
    {"matmul_relu", test_matmul_relu, NULL, NULL, &MATMUL_RELU},
    {"matmul_parts", NULL, NULL, NULL, &PARTS},
    {NULL, NULL, NULL, NULL},
};
// clang-format on

int main(int argc, char** argv) {
    static const char* const MODES[] = {"test", "grad", "bench", "quick"};
    static void (*const OF_DECLARED[])(Harness*, const Op*) = {op_test, op_grad, op_bench};
    int command = 0, known = 0;
    while (argc > 1 && command < 4 && strcmp(argv[1], MODES[command]) != 0) command++;
    if (argc < 2 || argc > 5 || argc == 4 || command == 4)
        die(USAGE, "usage: ops test|quick|grad|bench [op] [GB/s TFLOP/s]");
    if (command == 1 && (HAS_DEVICE_MEMORY || sizeof(real) < sizeof(double)))
        die(USAGE, "ops grad: finite differences are sharp on the CPU in double only: make grad");
    const char* only = argc > 2 && strcmp(argv[2], "all") != 0 ? argv[2] : NULL;
    Harness h;
    memset(&h, 0, sizeof h);
    h.is_quick = command == 3, command %= 3;
    if (argc == 5) {
        h.ceiling_gbs = strtod(argv[3], NULL);
        h.ceiling_tflops = strtod(argv[4], NULL);
    }
    context_init(&h.ctx);
#ifdef __CUDACC__
    if (command == 2 && argc < 5) bench_ceilings(&h);
#endif
    if (command == 2 && h.ceiling_gbs > 0)
        printf("RESULT ceilings copy_gbs=%.0f matmul_tflops=%.1f\n", h.ceiling_gbs, h.ceiling_tflops);
    for (const OpRow* row = TABLE; row->op; row++) {
        if (only && strcmp(only, row->op) != 0) continue;
        void (*run)(Harness*) = command == 0 ? row->test : command == 1 ? row->grad : row->bench;
        known = 1;
        h.op = row->op;
        if (row->declared) OF_DECLARED[command](&h, row->declared);
        if (row->also) OF_DECLARED[command](&h, row->also);
        if (run) run(&h);
        case_free(&h);  // a bench need not open cases
    }
    if (!known) {
        Text names = {NULL, 0, 0};
        text_printf(&names, "ops %s: no op is called %s; there are:", argv[1], argv[2]);
        for (const OpRow* row = TABLE; row->op; row++) text_printf(&names, " %s", row->op);
        die(USAGE, "%s", names.text);
    }
    matmul_plans_free(&h.ctx);
    context_free(&h.ctx);
    if (command < 2) printf("%d passed, %d failed\n", h.passed, h.failed);
    return h.failed ? FAILED : DONE;
}
