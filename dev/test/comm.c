/* Tests of what ranks exchange. comm.sh starts them: one process is one rank.
 *
 *     test_comm collectives     sums, gathers and broadcasts of the host; `N passed, N failed`
 *     test_comm save OUT OTHER WEIGHT         a checkpoint in OUT; the last rank has a directory OTHER and a WEIGHT */
#include "dev/test/tests.h"
#include "llmc/checkpoint/writer.h"

enum { N = 1000, MOST_BYTES = 3000001 };

// Like expect(), but a case that passes is only counted: all ranks write to the same terminal.
static void expect_here(Tests* t, int good, const ProcessGroup* group, const char* name) {
    if (good) t->passed++;
    else expect(t, 0, name, "rank %d of %d", group->rank, group->size);
}

static unsigned char byte_of(int rank, size_t i) { return (unsigned char)(i * 7 + (size_t)rank * 13); }

static void test_gather(Tests* t, const ProcessGroup* group, size_t bytes) {
    unsigned char *mine = (unsigned char*)xcalloc(bytes, 1), *all = (unsigned char*)xcalloc(bytes, (size_t)group->size);
    int good = 1;
    for (size_t i = 0; i < bytes; i++) mine[i] = byte_of(group->rank, i);
    group_gather(group, all, mine, bytes);
    for (int root = 0; root < group->size; root++) {
        for (size_t i = 0; i < bytes; i++) mine[i] = byte_of(group->rank, i);
        group_broadcast_from(group, mine, bytes, root);
        for (size_t i = 0; i < bytes; i++)
            good &= mine[i] == byte_of(root, i) && all[(size_t)root * bytes + i] == mine[i];
    }
    expect_here(t, good, group, "gather and broadcast");
    free(mine), free(all);
}

// Numbers whose sum depends on the order in which they are added.
static double awkward(int rank, size_t i) {
    return (rank % 2 ? -1 : 1) * ldexp(1.0 / (double)(3 + i), 17 * (rank % 5));
}

static void test_collectives(Tests* t, const ProcessGroup* group) {
    double sums[100], expected[100];
    int good = group->local_size == group->size && group->local_rank == group->rank;
    expect_here(t, good, group, "ranks of one machine");
    test_gather(t, group, 1);
    test_gather(t, group, MOST_BYTES);
    for (size_t i = 0; i < COUNT_OF(sums); i++) {
        sums[i] = awkward(group->rank, i), expected[i] = 0;
        for (int r = 0; r < group->size; r++) expected[i] += awkward(r, i);
    }
    group_sum_counts(group, sums, COUNT_OF(sums));
    expect_here(t, memcmp(sums, expected, sizeof sums) == 0, group, "sums, to the bit");
    for (int r = -1; r < group->size; r++) good &= group_any(group, group->rank == r ? 8 : 0) == (r >= 0);
    expect_here(t, good, group, "any");
    group_check_same(group, "nothing", "-b 4\n-t 1024\n");
}

// Every rank has a shard of the optimizer's state.
static void save(ProcessGroup* group, const char* out, double weight) {
    static const TensorRow rows[] = {{"a", 0, {0, 0}, OWN, 0, INIT_ZERO}};
    const int dims[] = {N, 1};
    TensorTable table;
    Context ctx;
    Optimizer optimizer;
    CheckpointWriter writer;
    memset(&table, 0, sizeof table), memset(&optimizer, 0, sizeof optimizer), memset(&writer, 0, sizeof writer);
    context_init(&ctx);
    tensors_add(&table, rows, 1, dims, -1);
    tensors_finish(&table);
    real *params = (real*)xcalloc(table.elements, sizeof(real)), *m = (real*)xcalloc(table.elements, sizeof(real));
    params[3] = (real)weight;
    optimizer.m = optimizer.v = m;
    optimizer.shard = (FlatRange){(size_t)group->rank * TENSOR_ALIGNMENT, TENSOR_ALIGNMENT};
    Checkpoints c = {out, &table, params, &optimizer, NULL, 0, 0, &ctx};
    writer_open(&writer, group, NULL, -1);
    writer_begin(&writer, &c, 1, "{}", "{}", NULL, 1);
    writer_close(&writer);
    free(params), free(m);
    tensors_free(&table);
    context_free(&ctx);
}

int main(int argc, char** argv) {
    ProcessGroup group;
    const char* mode = argc > 1 ? argv[1] : "";
    Tests t;
    tests_open(&t);
    alarm(60);  // a hanging test must not stop the script
    group_init(&group, 30);
    if (strcmp(mode, "collectives") == 0) {
        test_collectives(&t, &group);
        double totals[2] = {t.passed, t.failed};
        group_sum_counts(&group, totals, 2);
        if (group.rank == 0) printf("%d ranks: %g passed, %g failed\n", group.size, totals[0], totals[1]);
    } else if (strcmp(mode, "save") == 0 && argc == 5) {
        int is_last = group.rank == group.size - 1;
        save(&group, argv[is_last ? 3 : 2], is_last ? strtod(argv[4], NULL) : 0);
    } else die(USAGE, "'%s' is not a mode", mode);
    group_close(&group);
    return t.failed != 0;
}
