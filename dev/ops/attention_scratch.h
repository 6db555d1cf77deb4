/* Cases of the scratch of attention's kernels: dropout's decisions, their bits and the threads that draw them, and the
 * sizes and offsets of the backward pass on Hopper GPUs. */
#ifndef DEV_OPS_ATTENTION_SCRATCH_H
#define DEV_OPS_ATTENTION_SCRATCH_H

#include "harness.h"
#include "llmc/hopper/attention_scratch.h"
#include "llmc/ops/attention/attention.h"

#include "llmc/ops/attention/dropout.cuh"  // a part of it

// The decisions themselves: the share of pairs that is kept, for each of the eight places of a key in a draw, and the
// independence of neighbouring keys, all within four deviations.
static void test_attention_keep(Harness* h, double p) {
    enum { SEQUENCES = 2, HEADS = 2, QUERIES = 64, KEYS = 512, PLACES = 8 };
    case_begin(h, "attention/share of kept pairs p=%g", p);
    Dropout d = dropout_make(p, 42, 7, 3, SITE_DROPOUT_ATTENTION, NULL);
    double kept[PLACES] = {0}, both[PLACES] = {0}, n = SEQUENCES * HEADS * QUERIES * (KEYS / PLACES), q = 1 - p;
    for (int pair = 0; pair < SEQUENCES * HEADS * QUERIES * KEYS; pair++) {
        int key = pair % KEYS, query = pair / KEYS % QUERIES, head = pair / KEYS / QUERIES % HEADS;
        uint32_t b = (uint32_t)(pair / KEYS / QUERIES / HEADS);
        int next = key - key % PLACES + (key + 1) % PLACES;  // the last one's neighbour is the first
        double keep = attention_keep_ref(d, b, head, query, key);
        kept[key % PLACES] += keep > 0;
        both[key % PLACES] += keep > 0 && attention_keep_ref(d, b, head, query, next) > 0;
    }
    for (int i = 0; i < PLACES; i++) {
        expect_within(h, "share", kept[i] / n, q, 4 * sqrt(p * q / n));
        expect_within(h, "share of two", both[i] / n, q * q, 4 * sqrt(q * q * (1 - q * q) / n));
    }
    expect_within(h, "threshold of 16 bits", dropout_threshold_attention(d) / 65536.0, p, 1.0 / (1 << 17));
    d.threshold = 0xffffffff;
    expect_true(h, "the largest threshold drops all", dropout_threshold_attention(d) == 65536);
    case_end(h);
}

// Which thread draws which bits: every word of bits that attention reads is drawn by one thread, no thread is idle, and
// none draws what does not exist. The threads are counted through as the kernels do it.
static void test_attention_draws(Harness* h, const char* name, const int* lengths, int count, DrawForm form,
                                 Mask mask) {
    int by_query = form == ROWS_ARE_QUERIES;
    case_begin(h, "attention/draws %s %s %s", name, mask == CAUSAL ? "CAUSAL" : "FULL",
               by_query ? "by query" : "by key");
    Sequences s = sequences_of(h, lengths, count, 5);
    int64_t* begins = (int64_t*)case_memory(h, (size_t)count * sizeof *begins);
    int64_t threads = 0, idle = 0, outside = 0, again = 0, missing = 0;
    size_t words = 0, *at = (size_t*)case_memory(h, (size_t)count * sizeof *at);
    for (int b = 0; b < count; b++) {
        begins[b] = threads, at[b] = words;
        threads += draw_threads(form, mask, lengths[b]);
        words += (size_t)lengths[b] * (size_t)((lengths[b] + 31) / 32);
    }
    // Of a row that is a query, words from the first up to its own key; of a key, from its own query on.
    for (int b = 0; b < count; b++)
        for (int row = 0, all = (lengths[b] + 31) / 32; row < lengths[b]; row++)
            missing += mask == FULL ? all : by_query ? row / 32 + 1 : all - row / 32;
    unsigned char* drawn = (unsigned char*)case_memory(h, words + 1);
    expect_true(h, "all threads of a head", threads == draw_threads_of_head(form, mask, &s));
    for (int64_t thread = 0; thread < threads; thread++) {
        DrawSequences sequences = {draw_is_uniform(&s) ? NULL : begins, s.cu_seqlens, count, s.max_length};
        DrawPlace place = draw_find(sequences, form, mask, thread);
        int b = place.sequence, first = place.row, column = place.column, live = 0;
        int T = lengths[b], all = (T + 31) / 32;
        if (b >= count || first < 0 || column < 0 || first >= T || column >= T || column % (by_query ? 128 : 32) != 0 ||
            (!by_query && first % 8 != 0)) {
            outside++;
            continue;
        }
        for (int row = first; row < min_int(first + (by_query ? 1 : 8), T); row++)
            for (int w = column / 32; w < min_int(column / 32 + (by_query ? 4 : 1), all); w++) {
                if (mask == CAUSAL && (by_query ? 32 * w > row : 32 * w + 31 < row)) continue;
                unsigned char* word = drawn + at[b] + (size_t)row * (size_t)all + (size_t)w;
                again += *word, missing -= !*word, *word = 1, live = 1;
            }
        idle += !live;
    }
    if (idle || outside || again || missing)
        case_fail(h, "%lld threads: %lld idle, %lld outside, %lld words again, %lld missing", (long long)threads,
                  (long long)idle, (long long)outside, (long long)again, (long long)missing);
    case_end(h);
}

// The sums of a batch's heads in the backward pass on Hopper GPUs: each is in the scratch, and no two share a place
// that is in use at the same time.
static void attention_check_sums(Harness* h, const HopperScratch* z, const int* lengths, int count, int NH, int most) {
    int blocks = min_int((int)z->heads * z->parts, most), start = 0, stride = hopper_sum_stride(z->slot_tiles, NH);
    unsigned char* taken = (unsigned char*)xcalloc(z->sums + 1, 1);
    for (int b = 0; b < count; start += lengths[b++])
        for (int head = 0; head < NH; head++) {
            int tiles = (lengths[b] + HOPPER_QUERIES - 1) / HOPPER_QUERIES;
            size_t first = hopper_sum_at(z->slot_tiles, blocks - 1, 0, start, b, head, NH);
            if (z->slot_tiles && (z->parts > 1 || tiles > z->slot_tiles))
                case_fail(h, "sequence %d, head %d: does not fit into a slot", b, head);
            for (int i = 0; i < tiles; i++) {
                size_t at = hopper_sum_at(z->slot_tiles, blocks - 1, i, start, b, head, NH);
                if (at >= z->sums || at != first + (size_t)i * (size_t)stride || (!z->slot_tiles && taken[at]))
                    case_fail(h, "sequence %d, head %d, tile %d: sums at %zu of %zu", b, head, i, at, z->sums);
                else taken[at] = 1;
            }
        }
    free(taken);
}

// Batches of all kinds of lengths, on a GPU so small that all ways of dividing heads come up: their sums, and the size
// of the scratch against what is planned.
static void test_attention_scratch(Harness* h) {
    enum { MULTIPROCESSORS = 7 };
    int lengths[24], slots = 0, own = 0, none = 0;
    case_begin(h, "attention/scratch of the backward pass");
    for (int draw = 0; draw < 4000; draw++) {
        int count = 1 + random_below(h, (int)COUNT_OF(lengths)), NH = 1 + random_below(h, 5), longest = 0, N = 0;
        int T = 1 + random_below(h, draw % 4 ? 700 : 130);
        for (int b = 0; b < count; b++) {
            lengths[b] = draw % 3 ? random_below(h, T + 1) : T;
            longest = max_int(longest, lengths[b]), N += lengths[b];
        }
        if (N == 0) continue;
        HopperScratch z = hopper_scratch(N, count, longest, NH, MULTIPROCESSORS);
        if (longest > HOPPER_KEYS) attention_check_sums(h, &z, lengths, count, NH, MULTIPROCESSORS);
        slots += z.slot_tiles > 0, own += !z.slot_tiles && z.sums, none += !z.sums;
        // Planned as it is, and with more rows, longer sequences, and a range of numbers of them.
        size_t bytes = hopper_scratch_bytes(&z);
        if (hopper_scratch_most(N, count, count, longest, NH, MULTIPROCESSORS) != bytes ||
            hopper_scratch_most(N + 100, max_int(1, count - 3), count + 2, T, NH, MULTIPROCESSORS) < bytes)
            case_fail(h, "N=%d, %d sequences: %zu bytes, not what is planned", N, count, bytes);
    }
    expect_true(h, "with slots, without, and no sums at all", slots > 100 && own > 100 && none > 100);
    case_end(h);
}

#endif
