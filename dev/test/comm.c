/* Tests of how ranks start, agree and notice each other's end. One process is one rank; ranks_start.sh starts them.
 *
 *     test_comm MODE [-pi ..] [-ps ..] [-pf ..] [-pr N] [-pn N] [-pg N] [--timeout S] [--rank R] [--seconds S]
 *
 * Modes: `collectives` checks sums, gathers and broadcasts and prints `N passed, N failed`; the others act a part and
 * leave the judgement to the script. R and S say which rank does what the mode is about, and for how long. */
#include "llmc/run/comm.h"
#include "llmc/base/flags.h"
#include "llmc/data/safetensors.h"

typedef struct {
    CommSettings start;
    int rank;  // that does what the mode is about
    double seconds;
} Part;

typedef struct {
    int passed, failed;
} Tests;

static volatile sig_atomic_t stop_signal;
static void on_signal(int number) { stop_signal = number; }

static void expect(Tests* t, int good, const Comm* comm, const char* name) {
    if (good) t->passed++;
    else t->failed++;
    if (!good) printf("FAIL rank %d of %d: %s\n", comm->rank, comm->size, name);
}

static void sleep_seconds(double seconds) {
    for (double end = now_seconds() + seconds; now_seconds() < end;) usleep(2000);
}

static void test_gather(Tests* t, const Comm* comm, size_t bytes) {
    unsigned char *mine = (unsigned char*)xcalloc(bytes, 1), *all = (unsigned char*)xcalloc(bytes, (size_t)comm->size);
    int good = 1;
    memset(all, 0xAA, bytes * (size_t)comm->size);
    for (size_t i = 0; i < bytes; i++) mine[i] = (unsigned char)(i * 7 + (size_t)comm->rank * 13);
    comm_gather(comm, all, mine, bytes);
    for (int r = 0; r < comm->size; r++)
        for (size_t i = 0; i < bytes; i++)
            good &= all[(size_t)r * bytes + i] == (unsigned char)(i * 7 + (size_t)r * 13);
    expect(t, good, comm, "gather");
    for (size_t i = 0; i < bytes; i++) mine[i] = (unsigned char)(comm->rank == 0 ? i * 3 : 0xBB);
    comm_broadcast(comm, mine, bytes);
    good = 1;
    for (size_t i = 0; i < bytes; i++) good &= mine[i] == (unsigned char)(i * 3);
    expect(t, good, comm, "broadcast");
    free(mine), free(all);
}

// Numbers whose sum depends on the order in which they are added.
static double awkward(int rank, size_t i) {
    return (rank % 2 ? -1 : 1) * ldexp(1.0 / (double)(3 + i), 17 * (rank % 5));
}

static void test_collectives(Tests* t, const Comm* comm) {
    double sums[100], expected[100];
    expect(t, comm->local_size >= 1 && comm->local_rank >= 0 && comm->local_rank < comm->local_size, comm,
           "local rank");
    for (size_t bytes = 0; bytes < 4; bytes++) test_gather(t, comm, bytes);
    test_gather(t, comm, 1000);
    test_gather(t, comm, 3000001);  // more than the sockets hold
    for (size_t i = 0; i < COUNT_OF(sums); i++) {
        sums[i] = awkward(comm->rank, i), expected[i] = 0;
        for (int r = 0; r < comm->size; r++) expected[i] += awkward(r, i);
    }
    comm_sum_counts(comm, sums, COUNT_OF(sums));
    expect(t, memcmp(sums, expected, sizeof sums) == 0, comm, "sums, to the bit");
    int good = comm_any(comm, 0) == 0;
    for (int r = 0; r < comm->size; r++) good &= comm_any(comm, comm->rank == r ? 8 : 0) == 1;
    expect(t, good, comm, "any");
    for (int i = 0; i < 200; i++) comm_barrier(comm);
    // Nobody passes a barrier before the last one has come.
    double now[2];
    if (comm->rank == comm->size - 1) sleep_seconds(0.2);
    now[0] = now_seconds();
    comm_barrier(comm);
    now[1] = now_seconds();
    double* all = (double*)xmalloc((size_t)comm->size * sizeof now);
    comm_gather(comm, all, now, sizeof now);
    for (int r = 0, s; r < comm->size; r++)
        for (s = 0; s < comm->size; s++) good &= all[2 * r] <= all[2 * s + 1];
    expect(t, good, comm, "barrier");
    comm_check_same(comm, "nothing", "-b 4\n-t 1024\n");
    free(all);
}

// Steps as a trainer makes them, until something happens.
static void act_steps(const Comm* comm, double seconds) {
    int64_t step = 0;
    double end = now_seconds() + seconds, values[4] = {1, 2, 3, 4};
    for (int stop = 0; !stop; step++) {
        comm_progress(comm, step);
        usleep(5000);
        comm_sum_counts(comm, values, 4);
        stop = comm_any(comm, now_seconds() > end || stop_signal != 0);
    }
}

// Read values.safetensors, which is in the working directory, ten times, so slowly that it takes these seconds.
static void act_slow_reads(double seconds) {
    static real values[1000];
    SafeTensors file;
    safetensors_open(&file, "values.safetensors");
    CHECK(file.tensors[0].elements == COUNT_OF(values));
    for (int i = 0; i < 10; i++) {
        sleep_seconds(seconds / 10);
        safetensors_read_real(&file, &file.tensors[0], 0, COUNT_OF(values), values);
    }
    safetensors_close(&file);
}

int main(int argc, char** argv) {
    Part part;
    Comm comm;
    memset(&part, 0, sizeof part);
    CommSettings* s = &part.start;
    const char* mode = argc > 1 ? argv[1] : "";
    Flag rows[] = {
        {"-pi", "--start", FLAG_CHOICE, &s->start, "auto", 0, 0, COMM_START_CHOICES, "", 0},
        {"-pr", "--process-rank", FLAG_INT, &s->rank, "-1", -1, 1e6, NULL, "", 0},
        {"-pn", "--processes", FLAG_INT, &s->size, "-1", -1, 1e6, NULL, "", 0},
        {"-pg", "--per-machine", FLAG_INT, &s->local_size, "-1", -1, 1e6, NULL, "", 0},
        {"-ps", "--server", FLAG_STRING, &s->server_address, "", 0, 0, NULL, "", 0},
        {"-pf", "--directory", FLAG_STRING, &s->directory, "", 0, 0, NULL, "", 0},
        {NULL, "--timeout", FLAG_REAL, &s->timeout, "10", 1, 1e6, NULL, "", 0},
        {NULL, "--rank", FLAG_INT, &part.rank, "-1", -1, 1e6, NULL, "", 0},
        {NULL, "--seconds", FLAG_REAL, &part.seconds, "1", 0, 1e6, NULL, "", 0},
    };
    flags_parse(rows, COUNT_OF(rows), argc - 1, argv + 1, "test_comm MODE [flags]");
    signal(SIGTERM, on_signal);
    alarm(60);  // whatever is broken, the script goes on
    comm_init(&comm, s);
    int is_the_one = comm.rank == part.rank;
    Tests t = {0, 0};

    if (strcmp(mode, "collectives") == 0) {
        test_collectives(&t, &comm);
        double totals[2] = {t.passed, t.failed};
        comm_sum_counts(&comm, totals, 2);
        if (comm.rank == 0) printf("%d ranks: %g passed, %g failed\n", comm.size, totals[0], totals[1]);
    } else if (strcmp(mode, "who") == 0) {
        // One write a rank, so that lines do not mix.
        char* line = xprintf("rank %d of %d, local %d of %d\n", comm.rank, comm.size, comm.local_rank, comm.local_size);
        write_all(STDOUT_FILENO, line, strlen(line));
        free(line);
    } else if (strcmp(mode, "steps") == 0) {
        // What waits for this may stop or kill ranks: all have begun.
        if (comm.rank == 0) write_all(STDOUT_FILENO, "begun\n", 6);
        act_steps(&comm, part.seconds);
    } else if (strcmp(mode, "die") == 0) {
        act_steps(&comm, 0.3);
        if (is_the_one) die(FAILED, "a part that dies");
        act_steps(&comm, 60);
    } else if (strcmp(mode, "die_all") == 0) {
        act_steps(&comm, 0.3);
        sleep_seconds(0.02 * comm.rank);
        die(USAGE, "the same on all ranks");
    } else if (strcmp(mode, "crash") == 0) {
        act_steps(&comm, 0.3);
        if (is_the_one) kill(getpid(), SIGKILL);
        act_steps(&comm, 60);
    } else if (strcmp(mode, "crash_wait") == 0) {
        // The others are where no connection of their own would tell them.
        act_steps(&comm, 0.3);
        if (is_the_one) kill(getpid(), SIGKILL);
        comm_wait_begin(&comm);
        sleep_seconds(60);
    } else if (strcmp(mode, "hang") == 0) {
        act_steps(&comm, 0.3);
        if (is_the_one) sleep_seconds(part.seconds);
        act_steps(&comm, 0.1);
    } else if (strcmp(mode, "busy") == 0) {
        // A rank that takes long, but shows that it is at work, may.
        act_steps(&comm, 0.3);
        if (is_the_one)
            for (int i = 0; i < 10; i++) sleep_seconds(part.seconds / 10), comm_progress(&comm, 100 + i);
        act_steps(&comm, 0.1);
    } else if (strcmp(mode, "reads") == 0) {
        act_steps(&comm, 0.3);
        if (is_the_one) act_slow_reads(part.seconds);
        act_steps(&comm, 0.1);
    } else if (strcmp(mode, "behind") == 0) {
        // All wait, but one for something else than the others.
        act_steps(&comm, 0.3);
        if (!is_the_one) comm_wait_begin(&comm), comm_wait_end(&comm);
        comm_wait_begin(&comm);
        sleep_seconds(60);
    } else if (strcmp(mode, "apart") == 0) {
        act_steps(&comm, 0.3);
        if (is_the_one) sleep_seconds(part.seconds);
    } else if (strcmp(mode, "leave") == 0) {
        act_steps(&comm, 0.3);
        if (!is_the_one) comm_barrier(&comm);
    } else if (strcmp(mode, "disagree") == 0) {
        char* text = xprintf("--batch 4\n--lr %s\n--seq-len 1024\n", is_the_one ? "0.001" : "0.0003");
        comm_check_same(&comm, "settings", text);
        free(text);
    } else if (strcmp(mode, "disagree_long") == 0) {
        char text[600];
        memset(text, 'x', sizeof text);
        memcpy(text + 500, is_the_one ? " here" : "", is_the_one ? 6 : 1);
        comm_check_same(&comm, "text", text);
    } else if (strcmp(mode, "spin") == 0) {
        // More work than cores: the watch must not take a busy machine for a dead one.
        double end = now_seconds() + part.seconds;
        for (volatile double x = 0; now_seconds() < end;)
            for (int i = 0; i < 1000000; i++) x = x * 0.5 + i;
        comm_barrier(&comm);
    } else {
        die(USAGE, "'%s' is not a mode", mode);
    }
    comm_close(&comm);
    return t.failed != 0;
}
