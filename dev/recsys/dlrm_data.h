/* Clicks for DLRM: the file of dev/data/prepare_recsys.py or generated samples, the batches of a run, and the AUC.
 *
 * A sample has numbers, an id for each table, and a label. Samples 0 .. train - 1 are for training, the held_out ones
 * after them for the AUC.
 *
 * Generated samples: sample n and row r of table t are drawn by (seed, n) and (seed, t, r), so nothing is stored.
 *   id      Zipf: P(id) = log((id + 2) / (id + 1)) / log(rows + 1), about 1 / (id + 1)
 *   logit   CLICK_BASE + CLICK_NUMBERS_SD sum_i a_i x_i + CLICK_IDS_SD sum_t effect_t[id_t]
 *           + CLICK_PAIRS_SD sum_p h_2p[id_2p] . h_2p+1[id_2p+1]       each sum is scaled to unit variance
 *   label   1 with probability sigmoid(logit)
 * Numbers x, weights a, effects and hidden vectors h have mean 0 and variance 1. The AUC of the true logit is the best
 * that a model can reach. */
#ifndef DEV_RECSYS_DLRM_DATA_H
#define DEV_RECSYS_DLRM_DATA_H

#include <sys/mman.h>

#include "llmc/base/log.h"
#include "llmc/base/rng.h"
#include "llmc/base/util.h"
#include "llmc/device/copies.h"

enum { CLICKS_MAGIC = 20261124, CLICKS_VERSION = 1, CLICKS_HEADER = 256, CLICK_TABLES = 32, CLICK_NUMBERS = 64 };
enum { CLICK_HIDDEN = 3 };  // width of the generator's hidden vectors
enum { SITE_CLICK = 14 };   // the purpose of a random stream, beside those of llmc/base/rng.h
#define CLICK_BASE (-1.0)
#define CLICK_NUMBERS_SD 0.5
#define CLICK_IDS_SD 0.8
#define CLICK_PAIRS_SD 1.1

typedef struct {
    int tables, numbers, rows[CLICK_TABLES];
    uint64_t train, held_out;
    const int* records;         // of a file: label, numbers as float, ids; NULL: generated
    uint64_t samples, entries;  // generated: streams of samples and of tables' rows
    uint32_t fingerprint;
    void* file;
    size_t bytes;
} Clicks;

// Samples that are generated: tables of `rows` rows.
static inline void clicks_generate(Clicks* c, int tables, int rows, int64_t train, int64_t held_out, uint64_t seed) {
    memset(c, 0, sizeof *c);
    c->tables = tables, c->numbers = 13;
    for (int t = 0; t < tables; t++) c->rows[t] = rows;
    c->train = (uint64_t)train, c->held_out = (uint64_t)held_out;
    c->samples = rng_stream(seed, 0, 0, SITE_CLICK), c->entries = rng_stream(seed, 0, 1, SITE_CLICK);
    c->fingerprint = (uint32_t)c->samples;
}

// Words of a record.
static inline size_t clicks_words(const Clicks* c) { return 1 + (size_t)c->numbers + (size_t)c->tables; }

// Check the labels, numbers and ids of all records.
static inline void clicks_check(const Clicks* c, const char* path) {
    uint64_t n = c->train + c->held_out, bad = UINT64_MAX;
    size_t words = clicks_words(c);
#pragma omp parallel for schedule(static) reduction(min : bad)
    for (uint64_t k = 0; k < n; k++) {
        const int *record = c->records + k * words, *ids = record + 1 + c->numbers;
        int is_good = record[0] == 0 || record[0] == 1;
        for (int i = 0; i < c->numbers; i++) {
            float x;
            memcpy(&x, record + 1 + i, sizeof x);
            is_good &= isfinite(x) != 0;
        }
        for (int t = 0; t < c->tables; t++) is_good &= ids[t] >= 0 && ids[t] < c->rows[t];
        if (!is_good && k < bad) bad = k;
    }
    if (bad != UINT64_MAX)
        die(USAGE, "%s: sample %llu: a label is not 0 or 1, a number not finite, or an id not in its table", path,
            (unsigned long long)bad);
}

// Map and check a prepared file.
static inline void clicks_open(Clicks* c, const char* path) {
    struct stat st;
    Crc32 crc;
    int fd = open_file(path);
    memset(c, 0, sizeof *c);
    if (fd < 0 || fstat(fd, &st) != 0) die(USAGE, "%s: cannot be read: %s", path, strerror(errno));
    c->bytes = (size_t)st.st_size;
    if (c->bytes >= CLICKS_HEADER * sizeof(int)) c->file = mmap(NULL, c->bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (c->file == MAP_FAILED) die(USAGE, "%s: cannot be read: %s", path, strerror(errno));
    close(fd);
    const int* header = (const int*)c->file;
    if (!header || header[0] != CLICKS_MAGIC)
        die(USAGE, "%s: is not a file of clicks; make one with dev/data/prepare_recsys.py --format criteo", path);
    if (header[1] != CLICKS_VERSION) die(USAGE, "%s: version %d is not known", path, header[1]);
    c->tables = header[2], c->numbers = header[3];
    if (c->tables < 1 || c->tables > CLICK_TABLES || c->numbers < 1 || c->numbers > CLICK_NUMBERS)
        die(USAGE, "%s: %d tables and %d numbers; 1 to %d and 1 to %d are known", path, c->tables, c->numbers,
            CLICK_TABLES, CLICK_NUMBERS);
    memcpy(&c->train, header + 4, sizeof c->train), memcpy(&c->held_out, header + 6, sizeof c->held_out);
    memcpy(c->rows, header + 8, (size_t)c->tables * sizeof *c->rows);
    uint64_t n = (c->bytes / sizeof(int) - CLICKS_HEADER) / clicks_words(c);
    if (c->train > n || c->held_out != n - c->train || c->bytes != (CLICKS_HEADER + n * clicks_words(c)) * sizeof(int))
        die(USAGE, "%s: has %zu bytes, which are not %llu and %llu samples; prepare it again", path, c->bytes,
            (unsigned long long)c->train, (unsigned long long)c->held_out);
    if (!c->train) die(USAGE, "%s: has no samples to train on", path);
    c->records = header + CLICKS_HEADER;
    clicks_check(c, path);
    crc32_init(&crc);
    c->fingerprint = crc32_update(&crc, 0, c->file, c->bytes);
}

// ---------------------------------------------------------------------------------------------------------
// Samples

// 32 random bits as a number of mean 0 and variance 1.
static inline double clicks_unit(uint32_t bits) { return 3.4641016151377544 * (rng_uniform(bits) - 0.5); }

// Draw sample n. Returns the label.
static inline int clicks_draw(const Clicks* c, uint64_t n, float* numbers, int* ids, double* logit) {
    uint32_t low = (uint32_t)n, high = (uint32_t)(n >> 32);
    double of_numbers = 0, of_ids = 0, of_pairs = 0;
    Philox draw = {{0}}, weight = {{0}}, left = {{0}};
    for (int i = 0; i < c->numbers; i++) {
        if (i % 4 == 0)
            draw = philox(low, high, (uint32_t)i, 0, c->samples), weight = philox((uint32_t)i, 0, 0, 1, c->entries);
        numbers[i] = (float)clicks_unit(draw.v[i % 4]);
        of_numbers += clicks_unit(weight.v[i % 4]) * numbers[i];
    }
    for (int t = 0; t < c->tables; t++) {
        if (t % 4 == 0) draw = philox(low, high, (uint32_t)t, 1, c->samples);
        ids[t] = (int)pow(c->rows[t] + 1.0, rng_uniform(draw.v[t % 4])) - 1;
        Philox entry = philox((uint32_t)ids[t], (uint32_t)t, 0, 0, c->entries);
        of_ids += clicks_unit(entry.v[CLICK_HIDDEN]);
        for (int k = 0; k < CLICK_HIDDEN && t % 2; k++) of_pairs += clicks_unit(left.v[k]) * clicks_unit(entry.v[k]);
        left = entry;
    }
    *logit = CLICK_BASE + CLICK_NUMBERS_SD * of_numbers / sqrt(c->numbers) + CLICK_IDS_SD * of_ids / sqrt(c->tables) +
             CLICK_PAIRS_SD * of_pairs / sqrt(CLICK_HIDDEN * (c->tables / 2));
    return rng_uniform(philox(low, high, 0, 2, c->samples).v[0]) < 1 / (1 + exp(-*logit));
}

// Sample n: numbers [numbers], ids [tables], the true logit (NaN if it is not known). Returns the label.
static inline int clicks_sample(const Clicks* c, uint64_t n, float* numbers, int* ids, double* logit) {
    if (!c->records) return clicks_draw(c, n, numbers, ids, logit);
    const int* record = c->records + n * clicks_words(c);
    memcpy(numbers, record + 1, (size_t)c->numbers * sizeof *numbers);
    memcpy(ids, record + 1 + c->numbers, (size_t)c->tables * sizeof *ids);
    *logit = NAN;
    return record[0];
}

// ---------------------------------------------------------------------------------------------------------
// Batches

// A batch on the host or on the device. Row numbers count from the first row of the first table.
typedef struct {
    floatX* numbers;  // [B, padded], padding is 0
    real* labels;     // [B]
    int* rows;        // [B, tables]
    int B;
} Batch;

// Uploads batches of at most B samples, whose numbers are padded to `padded` columns.
typedef struct {
    Staging staging;
    Batch host, device;
    int B, tables, padded;
} BatchLoader;

// The columns of a batch's numbers.
static inline int clicks_padded(const Clicks* c) { return (int)round_up((size_t)c->numbers, 8); }

static inline size_t batch_loader_bytes(const Clicks* c, int B) {
    size_t numbers = (size_t)clicks_padded(c) * sizeof(floatX), ids = (size_t)c->tables * sizeof(int);
    return (size_t)B * (numbers + sizeof(real) + ids);
}

// Split memory of B samples.
static inline Batch batch_split(const BatchLoader* l, void* memory) {
    floatX* numbers = (floatX*)memory;
    real* labels = (real*)(numbers + (size_t)l->B * (size_t)l->padded);
    Batch batch = {numbers, labels, (int*)(labels + l->B), l->B};
    return batch;
}

static inline void batch_loader_open(BatchLoader* l, const Clicks* c, int B, Context* ctx) {
    size_t bytes = batch_loader_bytes(c, B);
    l->B = B, l->tables = c->tables, l->padded = clicks_padded(c);
    staging_open(&l->staging, bytes);
    l->device = batch_split(l, device_alloc(ctx, bytes, "batch"));
}

static inline void batch_loader_close(BatchLoader* l) {
    device_free(l->device.numbers, l->staging.bytes);
    staging_close(&l->staging);
}

// Upload samples first .. first + B - 1 of an epoch's order, or with `order` 0 of the data. `first_row` [tables]:
// numbers of the tables' first rows. `logits` [B]: the true ones; NULL: not wanted.
static inline Batch batch_load(BatchLoader* l, const Clicks* c, uint64_t first, int B, uint64_t order,
                               const int* first_row, double* logits, Context* ctx) {
    Batch host = l->host = batch_split(l, staging_begin(&l->staging));
    size_t n = (size_t)B;
#pragma omp parallel for schedule(static)
    for (int b = 0; b < B; b++) {
        float numbers[CLICK_NUMBERS];
        double logit;
        uint64_t at = first + (uint64_t)b;
        int* rows = host.rows + b * l->tables;
        host.labels[b] = (real)clicks_sample(c, order ? rng_permute(at, c->train, order) : at, numbers, rows, &logit);
        for (int i = 0; i < l->padded; i++) host.numbers[b * l->padded + i] = (floatX)(i < c->numbers ? numbers[i] : 0);
        for (int t = 0; t < l->tables; t++) rows[t] += first_row[t];
        if (logits) logits[b] = logit;
    }
    device_upload(ctx, l->device.numbers, host.numbers, n * (size_t)l->padded * sizeof(floatX));
    device_upload(ctx, l->device.labels, host.labels, n * sizeof(real));
    device_upload(ctx, l->device.rows, host.rows, n * (size_t)l->tables * sizeof(int));
    staging_end(&l->staging, ctx);
    Batch batch = l->device;
    batch.B = B;
    return batch;
}

// ---------------------------------------------------------------------------------------------------------
// Evaluation

typedef struct {
    double score;
    int label;
} Scored;

static inline int scored_compare(const void* a, const void* b) {
    double x = ((const Scored*)a)->score, y = ((const Scored*)b)->score;
    return (x > y) - (x < y);
}

// The area under the ROC curve: the probability that a positive scores above a negative, where an equal score counts
// half. Equal scores share the mean of their ranks; sums of ranks are integers, so the result is exact. Sorts `s` [n].
// NaN if a label or a score is missing.
static inline double area_under_curve(Scored* s, size_t n) {
    uint64_t positives = 0, twice = 0;  // twice the sum of the positives' ranks
    for (size_t i = 0; i < n; i++) {
        if (isnan(s[i].score)) return NAN;
        positives += (uint64_t)s[i].label;
    }
    uint64_t negatives = n - positives;
    if (!positives || !negatives) return NAN;
    qsort(s, n, sizeof *s, scored_compare);
    for (size_t i = 0, end; i < n; i = end) {
        uint64_t labels = 0;
        for (end = i; end < n && s[end].score == s[i].score; end++) labels += (uint64_t)s[end].label;
        twice += labels * (uint64_t)(i + 1 + end);  // ranks i + 1 .. end
    }
    return (double)(twice - positives * (positives + 1)) / (2.0 * (double)positives * (double)negatives);
}

#endif
