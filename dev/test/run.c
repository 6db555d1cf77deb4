/* Tests of llmc/run: drawing tokens, configuration rows, showing a checkpoint where there are no hard links.
 * Prints a line a case and `N passed, N failed`; exit status 1 if one failed. */
#include <sys/wait.h>

#include "llmc/run/checkpoint.h"
#include "llmc/run/config.h"
#include "llmc/run/sampler.h"
#include "llmc/run/settings.h"

typedef struct {
    int passed, failed, skipped;
} Tests;

__attribute__((format(printf, 4, 5))) static void expect(Tests* t, int good, const char* name, const char* format,
                                                         ...) {
    printf("%s %s", good ? "ok  " : "FAIL", name);
    if (good) t->passed++;
    else t->failed++;
    if (!good) {
        va_list args;
        va_start(args, format);
        printf(": ");
        vprintf(format, args);
        va_end(args);
    }
    putchar('\n');
}

// ---------------------------------------------------------------------------------------------------------
// Sampler

enum { V = 7, DRAWS = 100000 };
static const real LOGITS[V] = {(real)0.5, (real)2, (real)-1, (real)1.5, (real)-30, (real)0, (real)1};

// How often each token comes out for uniforms spread evenly over (0, 1).
static void draw_many(double share[V], Sampler sampler) {
    for (int i = 0; i < V; i++) share[i] = 0;
    for (int k = 0; k < DRAWS; k++) {
        int token = sampler_draw(LOGITS, V, sampler, (k + 0.5) / DRAWS);
        CHECK(token >= 0 && token < V);
        share[token] += 1.0 / DRAWS;
    }
}

// The largest difference of the shares to softmax(LOGITS / temperature) over the `k` largest.
static double share_error(const double share[V], double temperature, int k) {
    double p[V], total = 0, worst = 0;
    for (int i = 0; i < V; i++) {
        int larger = 0;
        for (int j = 0; j < V; j++) larger += LOGITS[j] > LOGITS[i];
        p[i] = larger < k ? exp((double)LOGITS[i] / temperature) : 0;
        total += p[i];
    }
    for (int i = 0; i < V; i++) worst = fmax(worst, fabs(share[i] - p[i] / total));
    return worst;
}

static void test_sampler(Tests* t) {
    double share[V], before = 0;
    const double tolerance = 2.0 / DRAWS;  // evenly spread uniforms miss a share by one draw at each end
    for (int top_k = 0; top_k <= 3; top_k += 3) {
        Sampler greedy = {0, top_k};
        draw_many(share, greedy);
        expect(t, fabs(share[1] - 1) < 1e-9, top_k ? "sampler/temperature 0, top 3" : "sampler/temperature 0",
               "the most likely token has a share of %g", share[1]);
    }
    for (int top_k = 1; top_k <= V; top_k++) {
        Sampler sampler = {1, top_k};
        char* name = xprintf("sampler/top %d", top_k);
        int seen = 0;
        draw_many(share, sampler);
        for (int i = 0; i < V; i++) seen += share[i] > 0;
        // The least likely of the seven has e^-30: it is a candidate that is never drawn.
        double error = share_error(share, 1, top_k);
        expect(t, seen == min_int(top_k, V - 1) && error <= tolerance, name, "%d tokens were drawn, error %g", seen,
               error);
        free(name);
    }
    static const double temperatures[] = {100, 2, 1, 0.5, 0.1, 0.001};
    for (size_t k = 0; k < COUNT_OF(temperatures); k++) {
        Sampler sampler = {temperatures[k], 0}, beyond = {temperatures[k], V + 5};
        double same[V];
        char* name = xprintf("sampler/temperature %g", temperatures[k]);
        draw_many(share, sampler);
        draw_many(same, beyond);
        double error = share_error(share, temperatures[k], V);
        expect(t, error <= tolerance && share[1] > before - 1e-9 && memcmp(share, same, sizeof share) == 0, name,
               "error %g, share of the most likely %g after %g", error, share[1], before);
        before = share[1];  // it grows as the temperature falls
        free(name);
    }
    static const real equal[5] = {1, 2, 1, 1, 0};
    int seen[5] = {0, 0, 0, 0, 0};
    for (int k = 0; k < DRAWS; k++) {
        Sampler three = {1, 3};
        seen[sampler_draw(equal, 5, three, (k + 0.5) / DRAWS)]++;
    }
    expect(t, seen[0] && seen[1] && seen[2] && !seen[3] && !seen[4], "sampler/top 3 of equal ones", "%d %d %d %d %d",
           seen[0], seen[1], seen[2], seen[3], seen[4]);
    static const real one[1] = {3};
    Sampler plain = {1, 0};
    expect(t, sampler_draw(one, 1, plain, 0.999999) == 0, "sampler/one token", "not token 0");
}

// ---------------------------------------------------------------------------------------------------------
// Configuration rows

typedef struct {
    int layers;
    double rate;
} Sizes;

static const ConfigRow ROWS[] = {{"layers", CONFIG_INT, offsetof(Sizes, layers), 1, 1, 1 << 24},
                                 {"rate", CONFIG_REAL, offsetof(Sizes, rate), 0, 0, 0.5}};

static void refuse_file(const char* text) {
    Sizes sizes;
    Json json;
    char error[JSON_ERROR_SIZE];
    if (json_parse(&json, text, strlen(text), error) != 0) die(FAILED, "%s", error);
    config_rows_read(&sizes, ROWS, COUNT_OF(ROWS), json.root, "file");
}

static void refuse_descriptor(const char* text) {
    Sizes sizes = {1 << 25, 0};
    (void)text;
    config_rows_check(&sizes, ROWS, COUNT_OF(ROWS), "source");
}

// What `body` says in a process of its own, which must end with USAGE.
static void expect_refusal(Tests* t, const char* name, void (*body)(const char*), const char* text, const char* want) {
    int ends[2], status;
    char got[512];
    fflush(stdout);
    if (pipe(ends) != 0) die(FAILED, "pipe: %s", strerror(errno));
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 2);
        body(text);
        _exit(DONE);
    }
    close(ends[1]);
    size_t n = 0;
    for (ssize_t m; n < sizeof got - 1 && (m = read(ends[0], got + n, sizeof got - 1 - n)) > 0;) n += (size_t)m;
    got[n] = '\0';
    close(ends[0]);
    waitpid(child, &status, 0);
    expect(t, WIFEXITED(status) && WEXITSTATUS(status) == USAGE && strcmp(got, want) == 0, name, "got %s", got);
}

static void test_config(Tests* t) {
    expect_refusal(t, "config/whole numbers", refuse_file, "{\"layers\": 0, \"rate\": 0}",
                   "error: file: key \"layers\": 0 is out of range; allowed: 1..16777216\n");
    expect_refusal(t, "config/fractions", refuse_file, "{\"layers\": 16777216, \"rate\": 0.75}",
                   "error: file: key \"rate\": 0.75 is out of range; allowed: 0..0.5\n");
    expect_refusal(t, "config/a descriptor's numbers", refuse_descriptor, "",
                   "error: source: key \"layers\": 33554432 is out of range; allowed: 1..16777216\n");
}

// ---------------------------------------------------------------------------------------------------------
// Settings: strings that differ only behind what is printed of other values

static void restore(const char* saved_tail) {
    const char* value;
    Flag row = {"-o", "--out", FLAG_STRING, &value, "", 0, 0, NULL, "", 0};
    char long_text[401], program[] = "program", name[] = "-o", error[JSON_ERROR_SIZE];
    char* argv[] = {program, name, long_text};
    Json json;
    memset(long_text, 'x', 400);
    long_text[400] = '\0';
    char* saved = xprintf("{\"out\": \"%.399s%s\"}", long_text, saved_tail);
    flags_parse(&row, 1, 3, argv, "");
    if (json_parse(&json, saved, strlen(saved), error) != 0) die(FAILED, "%s", error);
    settings_restore(&row, 1, json.root, "", "", 0, "file");
    die(USAGE, "the same");
}

static void restore_and_count(const char* saved_tail) {
    int ends[2], status;
    char c;
    size_t n = 0;
    if (pipe(ends) != 0) die(FAILED, "pipe: %s", strerror(errno));
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 2);
        restore(saved_tail);
    }
    close(ends[1]);
    while (read(ends[0], &c, 1) == 1) n++;
    waitpid(child, &status, 0);
    die(USAGE, "%s", n > 800 ? "both are named in full" : "the same");
}

static void test_settings(Tests* t) {
    expect_refusal(t, "settings/equal long strings", restore_and_count, "x", "error: the same\n");
    expect_refusal(t, "settings/long strings that differ at their end", restore_and_count, "y",
                   "error: both are named in full\n");
}

// ---------------------------------------------------------------------------------------------------------
// Showing a checkpoint

static void test_publish(Tests* t, const char* other) {
    char out[] = "/tmp/llmc_run_XXXXXX";
    struct stat here, there;
    if (!mkdtemp(out)) die(FAILED, "%s: %s", out, strerror(errno));
    char* dir = xprintf("%s/llmc_run_%d", other, (int)getpid());
    if (mkdir(dir, 0777) != 0 || stat(out, &here) != 0 || stat(dir, &there) != 0 || here.st_dev == there.st_dev) {
        printf("skip publish/another file system: %s is none that can be written\n", other);
        t->skipped++;
    } else {
        enum { BYTES = (1 << 20) + 12345 };  // more than one piece
        char *from = xprintf("%s/model.safetensors", dir), *to = xprintf("%s/model.safetensors", out);
        char *tmp = xprintf("%s.tmp", to), *bytes = (char*)xmalloc(BYTES);
        size_t n = 0;
        for (int i = 0; i < BYTES; i++) bytes[i] = (char)(i * 31 >> 3);
        if (write_file(from, bytes, BYTES) != 0) die(FAILED, "%s: %s", from, strerror(errno));
        int result = checkpoint_publish(out, dir);
        char* got = file_exists(to) ? read_file(to, BYTES, &n, FAILED) : NULL;
        expect(t, result == 0 && n == BYTES && memcmp(got, bytes, BYTES) == 0 && !file_exists(tmp),
               "publish/another file system", "result %d, %zu bytes", result, n);
        free(got), free(from), free(to), free(tmp), free(bytes);
    }
    checkpoint_remove(dir);
    checkpoint_remove(out);
    free(dir);
}

int main(void) {
    Tests t = {0, 0, 0};
    test_sampler(&t);
    test_config(&t);
    test_settings(&t);
    test_publish(&t, "/dev/shm");
    printf("%d passed, %d failed, %d skipped\n", t.passed, t.failed, t.skipped);
    return t.failed != 0;
}
