/* Tests of how ranks start, exchange data and notice a lost rank. One process is one rank; ranks_start.sh starts them.
 *
 *     test_comm MODE [-pi ..] [-ps ..] [-pf ..] [-pr N] [-pn N] [-pg N] [--timeout S] [--rank R] [--seconds S]
 *
 * Modes: `collectives` checks sums, gathers and broadcasts, of the host and of the device, and prints `N passed, N
 * failed`; the others act out a case, which the script judges. R and S: which rank acts, and for how many seconds. */
#include "dev/test/tests.h"
#include "llmc/base/flags.h"
#include "llmc/data/files/safetensors.h"
#include "llmc/dist/collectives.h"

typedef struct {
    RendezvousSettings start;
    int rank;  // that acts out the case
    double seconds;
} Part;

static volatile sig_atomic_t stop_signal;
static void on_signal(int number) { stop_signal = number; }

// Like expect(), but a case that passes is only counted: all ranks write to the same terminal.
static void expect_here(Tests* t, int good, const ProcessGroup* group, const char* name) {
    if (good) t->passed++;
    else expect(t, 0, name, "rank %d of %d", group->rank, group->size);
}

static void sleep_seconds(double seconds) {
    for (double end = now_seconds() + seconds; now_seconds() < end;) usleep(2000);
}

static void test_gather(Tests* t, const ProcessGroup* group, size_t bytes) {
    unsigned char *mine = (unsigned char*)xcalloc(bytes, 1), *all = (unsigned char*)xcalloc(bytes, (size_t)group->size);
    int good = 1;
    memset(all, 0xAA, bytes * (size_t)group->size);
    for (size_t i = 0; i < bytes; i++) mine[i] = (unsigned char)(i * 7 + (size_t)group->rank * 13);
    group_gather(group, all, mine, bytes);
    for (int r = 0; r < group->size; r++)
        for (size_t i = 0; i < bytes; i++)
            good &= all[(size_t)r * bytes + i] == (unsigned char)(i * 7 + (size_t)r * 13);
    expect_here(t, good, group, "gather");
    for (size_t i = 0; i < bytes; i++) mine[i] = (unsigned char)(group->rank == 0 ? i * 3 : 0xBB);
    group_broadcast(group, mine, bytes);
    good = 1;
    for (size_t i = 0; i < bytes; i++) good &= mine[i] == (unsigned char)(i * 3);
    expect_here(t, good, group, "broadcast");
    free(mine), free(all);
}

// Numbers whose sum depends on the order in which they are added.
static double awkward(int rank, size_t i) {
    return (rank % 2 ? -1 : 1) * ldexp(1.0 / (double)(3 + i), 17 * (rank % 5));
}

static void test_collectives(Tests* t, const ProcessGroup* group) {
    double sums[100], expected[100];
    expect_here(t, group->local_size >= 1 && group->local_rank >= 0 && group->local_rank < group->local_size, group,
                "local rank");
    for (size_t bytes = 0; bytes < 4; bytes++) test_gather(t, group, bytes);
    test_gather(t, group, 1000);
    test_gather(t, group, 3000001);  // more than fits into the sockets' buffers
    for (size_t i = 0; i < COUNT_OF(sums); i++) {
        sums[i] = awkward(group->rank, i), expected[i] = 0;
        for (int r = 0; r < group->size; r++) expected[i] += awkward(r, i);
    }
    group_sum_counts(group, sums, COUNT_OF(sums));
    expect_here(t, memcmp(sums, expected, sizeof sums) == 0, group, "sums, to the bit");
    int good = group_any(group, 0) == 0;
    for (int r = 0; r < group->size; r++) good &= group_any(group, group->rank == r ? 8 : 0) == 1;
    expect_here(t, good, group, "any");
    for (int i = 0; i < 200; i++) group_barrier(group);
    // No rank leaves a barrier before the last one has entered it.
    double now[2];
    if (group->rank == group->size - 1) sleep_seconds(0.2);
    now[0] = now_seconds();
    group_barrier(group);
    now[1] = now_seconds();
    double* all = (double*)xmalloc((size_t)group->size * sizeof now);
    group_gather(group, all, now, sizeof now);
    for (int r = 0, s; r < group->size; r++)
        for (s = 0; s < group->size; s++) good &= all[2 * r] <= all[2 * s + 1];
    expect_here(t, good, group, "barrier");
    group_check_same(group, "nothing", "-b 4\n-t 1024\n");
    free(all);
}

// Sums, the maximum and broadcasts of the device's collectives. The numbers are integers, which add up exactly in any
// order.
static void test_device_sums(Tests* t, ProcessGroup* group) {
    enum { N = 1000 };
    if (group->size == 1) return;
    real* values = (real*)xmalloc(N * sizeof *values);
    double numbers[2] = {1.0 + group->rank, 0.5}, all = group->size * (group->size + 1) / 2.0;
    uint32_t largest[2] = {(uint32_t)group->rank * 1000000000u + 5, 7};
    Collectives c;
    int good = 1, last = group->size - 1;
    collectives_open(&c, group);
    for (int i = 0; i < N; i++) values[i] = (real)(i + group->rank);
    all_reduce(&c, values, N, SUM_REAL);
    for (int i = 0; i < N; i++) good &= values[i] == (real)(group->size * i + group->size * last / 2);
    all_reduce(&c, numbers, 2, SUM_DOUBLE);
    all_reduce(&c, largest, 2, MAX_UINT32);
    expect_here(t, good && numbers[0] == all && numbers[1] == 0.5 * group->size, group, "sums on all ranks");
    expect_here(t, largest[0] == (uint32_t)last * 1000000000u + 5 && largest[1] == 7, group, "the maximum");
    good = 1;
    for (int root = 0; root < group->size; root++) {
        for (int i = 0; i < N; i++) values[i] = (real)(i + group->rank);
        reduce(&c, values, N, SUM_REAL, root);
        for (int i = 0; i < N; i++)
            good &=
                values[i] == (real)(group->rank == root ? group->size * i + group->size * last / 2 : i + group->rank);
    }
    expect_here(t, good, group, "a sum on one rank; the others keep their values");
    good = 1;
    for (int root = 0; root < group->size; root++) {
        for (int i = 0; i < N; i++) values[i] = (real)(i * (group->rank + 1));
        broadcast(&c, values, N * sizeof *values, root);
        for (int i = 0; i < N; i++) good &= values[i] == (real)(i * (root + 1));
    }
    expect_here(t, good, group, "broadcasts from each rank");
    collectives_close(&c);
    free(values);
}

// Steps like a trainer's, until the time is over or a signal comes.
static void act_steps(const ProcessGroup* group, double seconds) {
    int64_t step = 0;
    double end = now_seconds() + seconds, values[4] = {1, 2, 3, 4};
    for (int stop = 0; !stop; step++) {
        group_progress(group, step);
        usleep(5000);
        group_sum_counts(group, values, 4);
        stop = group_any(group, now_seconds() > end || stop_signal != 0);
    }
}

// Read values.safetensors in the working directory ten times, over so many seconds.
static void act_slow_reads(double seconds) {
    static real values[1000];
    SafeTensors file;
    safetensors_open(&file, "values.safetensors");
    CHECK(file.tensors[0].elements == COUNT_OF(values));
    for (int i = 0; i < 10; i++) {
        sleep_seconds(seconds / 10);
        safetensors_read_real(&file.tensors[0], 0, COUNT_OF(values), values);
    }
    safetensors_close(&file);
}

int main(int argc, char** argv) {
    Part part;
    ProcessGroup group;
    memset(&part, 0, sizeof part);
    RendezvousSettings* s = &part.start;
    const char* scenario = argc > 1 ? argv[1] : "";
    Flag rows[] = {
        {"-pi", "--start", FLAG_CHOICE, &s->start, "auto", 0, 0, RENDEZVOUS_METHODS, SCOPE_RUN, TOPIC_NONE, ""},
        {"-pr", "--process-rank", FLAG_INT, &s->rank, "-1", -1, 1e6, NULL, SCOPE_RUN, TOPIC_NONE, ""},
        {"-pn", "--processes", FLAG_INT, &s->size, "-1", -1, 1e6, NULL, SCOPE_RUN, TOPIC_NONE, ""},
        {"-pg", "--per-machine", FLAG_INT, &s->local_size, "-1", -1, 1e6, NULL, SCOPE_RUN, TOPIC_NONE, ""},
        {"-ps", "--server", FLAG_STRING, &s->server_address, "", 0, 0, NULL, SCOPE_RUN, TOPIC_NONE, ""},
        {"-pf", "--directory", FLAG_STRING, &s->directory, "", 0, 0, NULL, SCOPE_RUN, TOPIC_NONE, ""},
        {NULL, "--timeout", FLAG_REAL, &s->timeout, "10", 1, 1e6, NULL, SCOPE_RUN, TOPIC_NONE, ""},
        {NULL, "--rank", FLAG_INT, &part.rank, "-1", -1, 1e6, NULL, SCOPE_RUN, TOPIC_NONE, ""},
        {NULL, "--seconds", FLAG_REAL, &part.seconds, "1", 0, 1e6, NULL, SCOPE_RUN, TOPIC_NONE, ""},
    };
    flags_parse(rows, COUNT_OF(rows), argc - 1, argv + 1, "test_comm MODE [flags]");
    signal(SIGTERM, on_signal);
    alarm(60);  // a hanging test must not stop the script
    group_init(&group, s);
    int is_the_one = group.rank == part.rank;
    Tests t;
    tests_open(&t);

    if (strcmp(scenario, "collectives") == 0) {
        test_collectives(&t, &group);
        test_device_sums(&t, &group);
        double totals[2] = {t.passed, t.failed};
        group_sum_counts(&group, totals, 2);
        if (group.rank == 0) printf("%d ranks: %g passed, %g failed\n", group.size, totals[0], totals[1]);
    } else if (strcmp(scenario, "who") == 0) {
        // One write per rank, so that lines do not mix.
        char* line =
            xprintf("rank %d of %d, local %d of %d\n", group.rank, group.size, group.local_rank, group.local_size);
        write_all(STDOUT_FILENO, line, strlen(line));
        free(line);
    } else if (strcmp(scenario, "steps") == 0) {
        // The script waits for this before it stops or kills ranks: all have begun.
        if (group.rank == 0) write_all(STDOUT_FILENO, "begun\n", 6);
        act_steps(&group, part.seconds);
    } else if (strcmp(scenario, "die") == 0) {
        act_steps(&group, 0.3);
        if (is_the_one) die(FAILED, "an error of one rank");
        act_steps(&group, 60);
    } else if (strcmp(scenario, "die_all") == 0) {
        act_steps(&group, 0.3);
        sleep_seconds(0.02 * group.rank);
        die(USAGE, "the same on all ranks");
    } else if (strcmp(scenario, "crash") == 0) {
        act_steps(&group, 0.3);
        if (is_the_one) kill(getpid(), SIGKILL);
        act_steps(&group, 60);
    } else if (strcmp(scenario, "crash_wait") == 0) {
        // The others wait outside a collective: only the heartbeat can find out.
        act_steps(&group, 0.3);
        if (is_the_one) kill(getpid(), SIGKILL);
        group_wait_begin(&group);
        sleep_seconds(60);
    } else if (strcmp(scenario, "hang") == 0) {
        act_steps(&group, 0.3);
        if (is_the_one) sleep_seconds(part.seconds);
        act_steps(&group, 0.1);
    } else if (strcmp(scenario, "busy") == 0) {
        // A rank may take long if it shows progress.
        act_steps(&group, 0.3);
        if (is_the_one)
            for (int i = 0; i < 10; i++) sleep_seconds(part.seconds / 10), group_progress(&group, 100 + i);
        act_steps(&group, 0.1);
    } else if (strcmp(scenario, "reads") == 0) {
        act_steps(&group, 0.3);
        if (is_the_one) act_slow_reads(part.seconds);
        act_steps(&group, 0.1);
    } else if (strcmp(scenario, "behind") == 0) {
        // All wait, one of them in another collective than the others.
        act_steps(&group, 0.3);
        if (!is_the_one) group_wait_begin(&group), group_wait_end(&group);
        group_wait_begin(&group);
        sleep_seconds(60);
    } else if (strcmp(scenario, "apart") == 0) {
        act_steps(&group, 0.3);
        if (is_the_one) sleep_seconds(part.seconds);
    } else if (strcmp(scenario, "leave") == 0) {
        act_steps(&group, 0.3);
        if (!is_the_one) group_barrier(&group);
    } else if (strcmp(scenario, "disagree") == 0) {
        char* text = xprintf("--batch 4\n--lr %s\n--seq-len 1024\n", is_the_one ? "0.001" : "0.0003");
        group_check_same(&group, "settings", text);
        free(text);
    } else if (strcmp(scenario, "disagree_long") == 0) {
        char text[600];
        memset(text, 'x', sizeof text);
        memcpy(text + 500, is_the_one ? " here" : "", is_the_one ? 6 : 1);
        group_check_same(&group, "text", text);
    } else if (strcmp(scenario, "spin") == 0) {
        // More work than cores: the heartbeat must not mistake a busy machine for a dead one.
        double end = now_seconds() + part.seconds;
        for (volatile double x = 0; now_seconds() < end;)
            for (int i = 0; i < 1000000; i++) x = x * 0.5 + i;
        group_barrier(&group);
    } else {
        die(USAGE, "'%s' is not a mode", scenario);
    }
    group_close(&group);
    return t.failed != 0;
}
