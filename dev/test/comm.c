/* Tests of what ranks exchange. comm.sh starts them: one process is one rank.
 *
 *     test_comm MODE [RANK]
 *
 * Modes: `collectives` checks sums, gathers and broadcasts, of the host and of the device, and prints `N passed, N
 * failed`; `who` prints the ranks; in `disagree` and `disagree_long` RANK has another text than the others. */
#include "dev/test/tests.h"
#include "llmc/dist/collectives.h"

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
    test_gather(t, group, 3000001);
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

int main(int argc, char** argv) {
    ProcessGroup group;
    const char* mode = argc > 1 ? argv[1] : "";
    alarm(60);  // a hanging test must not stop the script
    group_init(&group, 30);
    int is_the_one = argc > 2 && group.rank == strtol(argv[2], NULL, 10);
    Tests t;
    tests_open(&t);

    if (strcmp(mode, "collectives") == 0) {
        test_collectives(&t, &group);
        test_device_sums(&t, &group);
        double totals[2] = {t.passed, t.failed};
        group_sum_counts(&group, totals, 2);
        if (group.rank == 0) printf("%d ranks: %g passed, %g failed\n", group.size, totals[0], totals[1]);
    } else if (strcmp(mode, "who") == 0) {
        // One write per rank, so that lines do not mix.
        char* line =
            xprintf("rank %d of %d, local %d of %d\n", group.rank, group.size, group.local_rank, group.local_size);
        write_all(STDOUT_FILENO, line, strlen(line));
        free(line);
    } else if (strcmp(mode, "disagree") == 0) {
        char* text = xprintf("--batch 4\n--lr %s\n--seq-len 1024\n", is_the_one ? "0.001" : "0.0003");
        group_check_same(&group, "settings", text);
        free(text);
    } else if (strcmp(mode, "disagree_long") == 0) {
        char text[600];
        memset(text, 'x', sizeof text);
        memcpy(text + 500, is_the_one ? " here" : "", is_the_one ? 6 : 1);
        group_check_same(&group, "text", text);
    } else {
        die(USAGE, "'%s' is not a mode", mode);
    }
    group_close(&group);
    return t.failed != 0;
}
