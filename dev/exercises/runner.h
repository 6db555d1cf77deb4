/* What dev/exercises/run.sh puts around a learner's function: a time limit, a message after a crash, and a timer. The
 * file that run.sh generates includes, in this order: the shipped header, this one, the learner's file; then it directs
 * calls of the op to the learner's function, and includes cases.h. */
#ifndef DEV_EXERCISES_RUNNER_H
#define DEV_EXERCISES_RUNNER_H

#include <signal.h>

#include "dev/ops/harness.h"

static int exercise_is_shipped;  // 1: calls go to the shipped op
static Harness exercise_harness;

// Both are written by cases.h.
static void exercise_test(Harness* h);
static void exercise_bench(Harness* h);

// The last line of a program that a signal ends. Only write() is safe here.
static void exercise_on_signal(int number) {
    const char* what = number == SIGALRM ? "TIMEOUT "
                       : number == SIGABRT
                           ? "CRASH (abort: an assertion failed, or memory outside of its outputs was overwritten) "
                       : number == SIGFPE ? "CRASH (division of an integer by zero) "
                                          : "CRASH (it touched memory that is not its own) ";
    const char* name = exercise_harness.name;
    if (write(1, what, strlen(what)) < 0 || write(1, name, strlen(name)) < 0 || write(1, "\n", 1) < 0) _exit(FAILED);
    _exit(FAILED);
}

static inline void exercise_watch(unsigned seconds) {
    static const int SIGNALS[] = {SIGALRM, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
    static char stack[1 << 16];  // of the handler: the learner's may be full
    stack_t other = {.ss_sp = stack, .ss_size = sizeof stack};
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = exercise_on_signal;
    action.sa_flags = SA_ONSTACK;
    sigaltstack(&other, NULL);
    for (size_t i = 0; i < COUNT_OF(SIGNALS); i++) sigaction(SIGNALS[i], &action, NULL);
    alarm(seconds);
}

// The fastest of some runs of run(state), about half a second in all: of what takes longer, one.
static inline double exercise_fastest(void (*run)(void*), void* state) {
    double fastest = INFINITY, total = 0;
    for (int i = 0; i < 100 && total < 0.5; i++) {
        double start = now_seconds();
        run(state);
        double seconds = now_seconds() - start;
        fastest = fmin(fastest, seconds), total += seconds;
    }
    return fastest;
}

// Time run(state) with the learner's function and with the shipped one.
static inline void exercise_time(const char* shapes, void (*run)(void*), void* state) {
    double yours = exercise_fastest(run, state);
    exercise_is_shipped = 1;
    double shipped = exercise_fastest(run, state);
    printf("speed, %s: %.0f us, the shipped one %.0f us: %.0f %% of its speed\n", shapes, 1e6 * yours, 1e6 * shipped,
           100 * shipped / yours);
}

// exercise test|shipped|bench SECONDS. "shipped" runs the same cases with the shipped op.
static int exercise_main(int argc, char** argv) {
    Harness* h = &exercise_harness;
    CHECK(argc == 3);
    setvbuf(stdout, NULL, _IOLBF, 0);
    context_init(&h->ctx);
    exercise_watch((unsigned)strtol(argv[2], NULL, 10));
    exercise_is_shipped = strcmp(argv[1], "shipped") == 0;
    if (strcmp(argv[1], "bench") == 0) {
        exercise_bench(h);
        case_free(h);
    } else {
        exercise_test(h);
        printf("%d passed, %d failed\n", h->passed, h->failed);
    }
    context_free(&h->ctx);
    return h->failed ? FAILED : DONE;
}

#endif
