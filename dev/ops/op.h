/* An op is declared once: its arguments, and for each of its passes the launcher and the reference.
 *
 *     RUN_AND_WANT(tanh, forward, tanh_forward(k->y.device, k->x.device, k->x.n, k->ctx),
 *                  tanh_forward_ref(k->y.want, k->x.host, k->x.n));
 *     static const Arg TANH_ARGS[] = ARGS(ARG(x, "n", IN, 3), ARG(y, "n", OUT, 0, 1e-6), ...);
 *     static const int TANH_ROWS[] = {1, 33};
 *     static const Op TANH = {OP_OF("tanh", "n", TANH_ARGS, TANH_ROWS),
 *                             .passes = {{"forward", "y", OP_PAIR(tanh, forward)}, ...}, ...};
 *
 * From that the harness makes each case: random inputs; outputs that hold NaN where they are SET, numbers where they
 * are added to; canaries; each pass in each mode for any number of threads against its reference; finite differences;
 * times.
 * A launcher reads and writes `device` or `device_real` of an array. A reference reads `host` and writes `want`. */
#ifndef DEV_OPS_OP_H
#define DEV_OPS_OP_H

#include <stddef.h>

#include "harness.h"

// OUT: is SET. BY_MODE, BY_OTHER_MODE: SET or ADD. IN_OUT: read, then overwritten. SCRATCH: read by a pass whose
// before() fills it; NaN until then.
typedef enum { IN, OUT, BY_MODE, BY_OTHER_MODE, IN_OUT, SCRATCH } Role;

typedef struct {
    const char* name;
    size_t at;          // of the Array in the case
    const char* shape;  // the sizes whose product is the number of elements: "N C"; "" for one
    Role role;
    double size;     // standard deviation of what is read
    double tol;      // tolerance() of what is written, in float; 0: exact
    const char* of;  // the argument whose gradient it is; NULL: none
    int is_sum;      // the tolerance is relative to the same sums of absolute values
} Arg;

typedef struct {
    const char *name, *writes;  // "forward", "y mean rstd"
    void (*run)(void* k);
    void (*ref)(void* k);
    void (*before)(void* k);  // what the pass reads of an earlier one; NULL: nothing
    void (*after)(void* k);   // what the reference knows only when the launcher has run; NULL: nothing
    int kinds;                // how many of the op's kinds; 0: all
} Pass;

typedef struct {
    const int* first;
    int count;
} SizeRows;

typedef struct {
    const char* name;
    const char* sizes;  // names of the numbers in a row of sizes
    const Arg* args;    // up to a row without a name
    SizeRows rows;      // of tests
    SizeRows gpu_bench, cpu_bench;
    Pass passes[6];
    void (*prepare)(void* k);                  // makes what is no argument: indices, targets, dropout; NULL: nothing
    const char* kinds[4];                      // each pass runs as each; none: one kind
    double rates[2];                           // and with each of these dropout rates, up to the last that is not 0
    int (*takes)(const Harness* h, int* row);  // whether this build runs a row of sizes, which it may change; NULL: all
    const int* grad;                           // a row for finite differences; NULL: none
    double grad_tol;                           // 0: 1e-8
    const char* loss;  // the output that is the loss; NULL: the sum of each output times its gradient, an input
} Op;

// An output of bytes, which prepare() makes: any number of threads must write the reference's.
typedef struct {
    const char* name;
    uint8_t *device, *start, *want;             // start: what it holds before
    size_t n;                                   // 0: the case has none
    int (*same)(const void* a, const void* b);  // NULL: every byte is compared
} Bytes;

enum { BYTES_FILL = 0xa5 };

// How a case runs, besides its sizes.
typedef struct {
    Mode mode, other_mode;
    int kind;
    double p;
    int is_bench;
} OpWay;

static const OpWay OP_PLAIN = {SET, SET, 0, 0, 0};

// A case: sizes, modes, and what the ops have. Of the arrays a case has those that its op declares.
typedef struct {
    Harness* h;
    Context* ctx;
    const Op* op;
    const Pass* pass;
    Mode mode, other_mode;
    int kind;
    double p;
    int is_bench, is_grad;
    int n, N, M, C, V, Vp, S, T, IC, OC, NH, HS, B, E, tables, types, padding, tokens;
    Array x, y, w, b, r, sum, mean, rstd, pre, before, dx, dy, dw, db, dbias, dbranch, dbefore;
    Array logits, each, loss, loss_scale, correct, labels, means, average, params, master, kept, qkv, out, lse, dout,
        dqkv, m, v, g;
    Array word, position, type, dword, dposition, dtype, bottom, table, dbottom, dvectors, bias;
    int *targets, *index, *token_of, *type_of;
    Bytes bytes[3];
    Sequences sequences;
    Dropout dropout;
    void* own;  // of one op alone
} OpCase;

// clang-format off
#define SIZE_ROWS(rows) {(const int*)(rows), (int)COUNT_OF(rows)}
#define ARGS(...) {__VA_ARGS__, {NULL}}
#define ARG_AS(name, array, ...) {name, offsetof(OpCase, array), __VA_ARGS__}
#define ARG(array, ...) ARG_AS(#array, array, __VA_ARGS__)
#define OP_OF(id, names, table, tests) .name = id, .sizes = names, .args = table, .rows = SIZE_ROWS(tests)
#define OP_BENCH(gpu, cpu) .gpu_bench = SIZE_ROWS(gpu), .cpu_bench = SIZE_ROWS(cpu)
#define OP_PAIR(op, pass) op##_run_##pass, op##_want_##pass
#define OP_OWN(type) ((type*)k->own)
// A function of a case, k, that the harness calls.
#define OP_FN(name)                                              \
    static inline void name##_body(OpCase* k);                     \
    static inline void name(void* k) { name##_body((OpCase*)k); }  \
    static inline void name##_body(OpCase* k)
// A pass: the launcher's call and the reference's.
#define RUN_AND_WANT(op, pass, launch, reference)   \
    OP_FN(op##_run_##pass) { launch; }              \
    OP_FN(op##_want_##pass) { reference; }          \
    static inline void op##_run_##pass(void* k)
// clang-format on

// The size that the first `length` characters of `name` name.
static inline int* op_size(OpCase* z, const char* name, size_t length) {
    const struct {
        const char* name;
        int* size;
    } SIZES[] = {
        // clang-format off
        {"n", &z->n}, {"N", &z->N}, {"M", &z->M}, {"C", &z->C}, {"V", &z->V}, {"Vp", &z->Vp}, {"S", &z->S},
        {"T", &z->T}, {"IC", &z->IC}, {"OC", &z->OC}, {"NH", &z->NH}, {"HS", &z->HS}, {"B", &z->B}, {"E", &z->E},
        {"tables", &z->tables}, {"types", &z->types}, {"padding", &z->padding}, {"tokens", &z->tokens},
        // clang-format on
    };
    for (size_t i = 0; i < COUNT_OF(SIZES); i++)
        if (strlen(SIZES[i].name) == length && strncmp(SIZES[i].name, name, length) == 0) return SIZES[i].size;
    die(FAILED, "op.h: no size is called %s", name);
}

// The length of the first word of *names, which moves behind it. 0: there is none.
static inline size_t op_word(const char** names, const char** word) {
    *word = *names + strspn(*names, " ");
    size_t length = strcspn(*word, " ");
    *names = *word + length;
    return length;
}

static inline size_t op_elements(OpCase* z, const char* shape) {
    size_t n = 1, length;
    for (const char* word; (length = op_word(&shape, &word)) > 0;)
        n *= *word >= '0' && *word <= '9' ? (size_t)(*word - '0') : (size_t)*op_size(z, word, length);
    return n;
}

// Whether `name` is a word of `names`.
static inline int op_has(const char* names, const char* name) {
    size_t length;
    for (const char* word; (length = op_word(&names, &word)) > 0;)
        if (strlen(name) == length && strncmp(word, name, length) == 0) return 1;
    return 0;
}

static inline Array* op_array(OpCase* k, const Arg* arg) { return (Array*)((char*)k + arg->at); }

// Whether the pass writes an argument with this role.
static inline int op_writes(const Op* op, const Pass* pass, Role role) {
    for (const Arg* arg = op->args; arg->name; arg++)
        if (arg->role == role && op_has(pass->writes, arg->name)) return 1;
    return 0;
}

// ---------------------------------------------------------------------------------------------------------
// A case

static inline void op_set_sizes(OpCase* z, const Op* op, const int* row) {
    const char *sizes = op->sizes, *name;
    for (size_t length; (length = op_word(&sizes, &name)) > 0;) *op_size(z, name, length) = *row++;
}

// Begin a case: its name, its arguments, and what the pass reads of an earlier one.
static inline OpCase* op_case(Harness* h, const Op* op, const Pass* pass, const int* row, OpWay way) {
    OpCase z = {h, &h->ctx, op, pass, way.mode, way.other_mode, way.kind, way.p, way.is_bench};
    Text title = {NULL, 0, 0};
    const char *sizes = op->sizes, *name;
    op_set_sizes(&z, op, row);
    text_printf(&title, "%s/%s%s%s", h->op ? h->op : op->name, pass->name, op->kinds[way.kind] ? " " : "",
                op->kinds[way.kind] ? op->kinds[way.kind] : "");
    for (size_t length; (length = op_word(&sizes, &name)) > 0; row++)
        text_printf(&title, " %.*s=%d", (int)length, name, *row);
    if (op_writes(op, pass, BY_MODE)) text_printf(&title, " %s", mode_name(way.mode));
    if (op_writes(op, pass, BY_OTHER_MODE)) text_printf(&title, " %s", mode_name(way.other_mode));
    if (way.p > 0) text_printf(&title, " p=%g", way.p);
    case_begin(h, "%s", title.text);
    free(title.text);
    OpCase* k = (OpCase*)case_memory(h, sizeof *k);
    *k = z;
    for (const Arg* arg = op->args; arg->name; arg++) {
        size_t n = op_elements(&z, arg->shape);
        Mode mode = arg->role == BY_MODE ? way.mode : arg->role == BY_OTHER_MODE ? way.other_mode : SET;
        int is_read = arg->role == IN || arg->role == IN_OUT;
        *op_array(k, arg) = is_read ? input(h, n, arg->size) : output(h, n, mode);
    }
    if (op->prepare) op->prepare(k);
    if (pass->before) pass->before(k);
    return k;
}

// For prepare(): indices that a launcher of a bench reads at full speed, which the host may not read then.
static inline int* op_ints(const OpCase* z, int* ints, int n) {
    return z->is_bench ? resident_ints(z->h, ints, (size_t)n) : ints;
}

// ---------------------------------------------------------------------------------------------------------
// Outputs of bytes

// `start`: NULL: BYTES_FILL everywhere.
static inline Bytes bytes_output(Harness* h, const char* name, size_t n, const void* start) {
    Bytes b = {name, (uint8_t*)case_block(h, n, ON_DEVICE), (uint8_t*)case_memory(h, n), (uint8_t*)case_memory(h, n), n,
               NULL};
    if (start) memcpy(b.start, start, n);
    else memset(b.start, BYTES_FILL, n);
    return b;
}

static inline void op_restore_bytes(const OpCase* k) {
    for (size_t i = 0; i < COUNT_OF(k->bytes); i++) {
        const Bytes* b = &k->bytes[i];
        if (b->n) device_upload(k->ctx, b->device, b->start, b->n);
    }
    device_synchronize(k->ctx);
}

static inline void op_expect_bytes(const OpCase* k) {
    for (size_t i = 0; i < COUNT_OF(k->bytes); i++) {
        const Bytes* b = &k->bytes[i];
        uint8_t* got = (uint8_t*)case_memory(k->h, b->n);
        if (!b->n) continue;
        device_download(k->ctx, got, b->device, b->n);
        expect_true(k->h, b->name, b->same ? b->same(got, b->want) : memcmp(got, b->want, b->n) == 0);
    }
}

static inline void op_run(void* state) {
    OpCase* k = (OpCase*)state;
    op_restore_bytes(k);
    k->pass->run(k);
    op_expect_bytes(k);
}

// ---------------------------------------------------------------------------------------------------------
// Test

static inline void op_reference(Harness* h, OpCase* k, const Op* op, const Pass* pass) {
    for (size_t i = 0; i < COUNT_OF(k->bytes); i++)
        if (k->bytes[i].n) memcpy(k->bytes[i].want, k->bytes[i].start, k->bytes[i].n);
    for (const Arg* arg = op->args; arg->name; arg++)
        if (op_has(pass->writes, arg->name)) op_array(k, arg)->want = copy_of(h, *op_array(k, arg));
    pass->ref(k);
}

// What the sums of a pass are relative to: its reference on absolute values.
static inline void op_magnitudes(Harness* h, OpCase* k, const Op* op, const Pass* pass) {
    real* host[16];
    for (const Arg* arg = op->args; arg->name; arg++) {
        Array* a = op_array(k, arg);
        host[arg - op->args] = a->host;
        a->host = array_absolute(h, *a);
        if (!op_has(pass->writes, arg->name)) continue;
        a->magnitude = a->want;
        a->want = (real*)case_memory(h, a->n * sizeof(real));
        memcpy(a->want, a->host, a->n * sizeof(real));
    }
    pass->ref(k);
    for (const Arg* arg = op->args; arg->name; arg++) {
        Array* a = op_array(k, arg);
        real* sums = a->want;
        a->host = host[arg - op->args];
        if (op_has(pass->writes, arg->name)) a->want = a->magnitude, a->magnitude = arg->is_sum ? sums : NULL;
    }
}

// The launcher of the case against its reference, and for any number of threads. An output that the reference leaves
// alone must keep its bits; one that is added to may get the rounding of a sum that is zero.
static inline void op_check(Harness* h, OpCase* k, const Op* op, const Pass* pass) {
    Array written[8] = {{0}};
    int count = 0, has_sums = 0;
    op_reference(h, k, op, pass);
    for (const Arg* arg = op->args; arg->name; arg++)
        if (op_has(pass->writes, arg->name)) written[count++] = *op_array(k, arg), has_sums |= arg->is_sum;
    if (has_sums) op_magnitudes(h, k, op, pass);
    expect_same_for_any_threads(h, pass->name, op_run, k, written, count);
    for (int i = 0; i < count; i++) array_download(written[i]);
    if (pass->after) pass->after(k);
    for (const Arg* arg = op->args; arg->name; arg++) {
        const Array a = *op_array(k, arg);
        if (!op_has(pass->writes, arg->name)) continue;
        double tol = (arg->tol > 0 ? tolerance(arg->tol) : 0) + a.slack;
        Mode mode = arg->role == BY_MODE ? k->mode : arg->role == BY_OTHER_MODE ? k->other_mode : SET;
        int is_left = mode == SET && memcmp(a.want, a.initial, a.n * sizeof(real)) == 0;
        if (tol == 0 || a.n == 0 || is_left) expect_equal(h, arg->name, a, a.want);
        else expect_close_to_sum(h, arg->name, a, a.want, a.magnitude, tol);
    }
}

static inline int op_kinds(const Op* op, const Pass* pass) {
    int count = 1;
    while (op->kinds[count]) count++;
    return pass->kinds ? pass->kinds : count;
}
static inline int op_rates(const Op* op) { return op->rates[1] > 0 ? 2 : 1; }
static inline int op_row_length(const Op* op) {
    int count = 0;
    const char *names = op->sizes, *word;
    while (op_word(&names, &word) > 0) count++;
    return count;
}

// Whether a quick test leaves a row of sizes out.
static inline int op_is_left_out(const Harness* h, const Op* op, const int* row) {
    OpCase z;
    size_t largest = 0;
    memset(&z, 0, sizeof z);
    op_set_sizes(&z, op, row);
    for (const Arg* arg = op->args; arg->name; arg++) largest = max_size(largest, op_elements(&z, arg->shape));
    return case_is_left_out(h, (double)largest);
}

// A pass at one row of sizes: each kind, dropout rate and mode.
static inline void op_test_row(Harness* h, const Op* op, const Pass* pass, const int* row) {
    int modes = op_writes(op, pass, BY_MODE) ? 2 : 1, others = op_writes(op, pass, BY_OTHER_MODE) ? 2 : 1;
    for (int way = 0; way < op_kinds(op, pass) * op_rates(op) * modes * others; way++) {
        int rest = way / modes / others;
        OpWay w = {way % modes ? ADD : SET, way / modes % others ? ADD : SET, rest % op_kinds(op, pass),
                   op->rates[rest / op_kinds(op, pass)], 0};
        if (h->is_quick && modes * others == 4 && w.mode != w.other_mode) continue;
        OpCase* k = op_case(h, op, pass, row, w);
        op_check(h, k, op, pass);
        case_end(h);
    }
}

static inline void op_test_pass(Harness* h, const Op* op, int pass) {
    for (int i = 0, length = op_row_length(op); i < op->rows.count; i++) {
        int row[8];
        memcpy(row, op->rows.first + i * length, (size_t)length * sizeof *row);
        if ((!op->takes || op->takes(h, row)) && !op_is_left_out(h, op, row))
            op_test_row(h, op, &op->passes[pass], row);
    }
}

static inline void op_test(Harness* h, const Op* op) {
    for (int pass = 0; op->passes[pass].name; pass++) op_test_pass(h, op, pass);
}

// ---------------------------------------------------------------------------------------------------------
// Finite differences

static inline const Arg* op_arg(const Op* op, const char* name) {
    const Arg* arg = op->args;
    while (arg->name && strcmp(arg->name, name) != 0) arg++;
    CHECK(arg->name);
    return arg;
}

// The loss of the first pass's reference.
static inline double op_loss(void* state) {
    OpCase* k = (OpCase*)state;
    const Op* op = k->op;
    double loss = 0;
    for (const Arg* arg = op->args; arg->name; arg++) {
        Array* a = op_array(k, arg);
        if (op_has(op->passes->writes, arg->name)) memcpy(a->want, a->host, a->n * sizeof(real));
    }
    op->passes->ref(k);
    if (op->loss) return (double)op_array(k, op_arg(op, op->loss))->want[0];
    for (const Arg* arg = op->args; arg->name; arg++) {
        if (!arg->of || arg->role != IN) continue;
        Array *dy = op_array(k, arg), *y = op_array(k, op_arg(op, arg->of));
        for (size_t i = 0; i < y->n; i++) loss += (double)dy->host[i] * (double)y->want[i];
    }
    return loss;
}

// Every gradient that a later pass writes, of its reference and of its launcher.
static inline void op_grad(Harness* h, const Op* op) {
    for (const Pass* pass = op->passes + 1; op->grad && pass->name; pass++)
        for (int way = 0; way < op_kinds(op, pass) * op_rates(op); way++) {
            OpWay w = {SET, SET, way % op_kinds(op, pass), op->rates[way / op_kinds(op, pass)], 0};
            OpCase* k = op_case(h, op, pass, op->grad, w);
            double tol = op->grad_tol > 0 ? op->grad_tol : 1e-8;
            k->is_grad = 1;
            real *want[16] = {NULL}, *got[16] = {NULL};
            op_reference(h, k, op, pass);
            pass->run(k);
            for (const Arg* arg = op->args; arg->name; arg++) {
                Array* a = op_array(k, arg);
                int i = (int)(arg - op->args);
                if (op_has(pass->writes, arg->name)) {
                    want[i] = a->want, got[i] = copy_of(h, *a);
                    array_restore(*a);
                }
                a->want = copy_of(h, *a);  // for op_loss()
            }
            for (const Arg* arg = op->args; arg->name; arg++) {
                int i = (int)(arg - op->args);
                if (!arg->of || !want[i]) continue;
                Array *x = op_array(k, op_arg(op, arg->of)), *dx = op_array(k, arg);
                if (memcmp(want[i], dx->initial, dx->n * sizeof(real)) == 0) continue;  // without dropout: none
                char what[64];
                snprintf(what, sizeof what, "%s of the reference", arg->name);
                expect_gradient(h, what, op_loss, k, x->host, x->n, want[i], tol);
                expect_gradient(h, arg->name, op_loss, k, x->host, x->n, got[i], tol);
            }
            case_end(h);
        }
}

// ---------------------------------------------------------------------------------------------------------
// Bench

// Each pass at the rows of sizes that belong to this build.
static inline void op_bench(Harness* h, const Op* op) {
    const SizeRows rows = HAS_DEVICE_MEMORY ? op->gpu_bench : op->cpu_bench;
    const int* row = rows.first;
    for (int i = 0; i < rows.count; i++, row += op_row_length(op))
        for (const Pass* pass = op->passes; pass->name; pass++)
            for (int way = 0; way < 2 * op_kinds(op, pass) * op_rates(op); way++) {
                int kind = way / 2 % op_kinds(op, pass), has_mode = op_writes(op, pass, BY_MODE);
                Mode mode = way % 2 ? ADD : SET;
                OpWay w = {mode, mode, kind, op->rates[way / 2 / op_kinds(op, pass)], 1};
                char suffix[64], rate[16] = "";
                if (mode == ADD && !has_mode) continue;
                if (w.p > 0) snprintf(rate, sizeof rate, " p=%g", w.p);
                snprintf(suffix, sizeof suffix, "%s%s%s%s%s", op->kinds[kind] ? " " : "",
                         op->kinds[kind] ? op->kinds[kind] : "", has_mode ? " " : "", has_mode ? mode_name(mode) : "",
                         rate);
                bench(h, suffix, pass->run, op_case(h, op, pass, row, w));
                case_free(h);
            }
}

#endif
