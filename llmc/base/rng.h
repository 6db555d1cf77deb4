/* Random numbers without state: Philox4x32-10, keyed by the purpose of the number.
 *
 * (seed, step, layer, site) identifies a stream; up to four counters identify an element of it. So the CPU and the GPU,
 * one rank and many, packed and unpacked batches draw the same numbers, in any order. Nothing has to be saved for the
 * backward pass or for a resumed run.
 *
 * Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. */
#ifndef LLMC_BASE_RNG_H
#define LLMC_BASE_RNG_H

#include "llmc/base/sequences.h"
#include "llmc/base/util.h"

// The purpose of a stream. The values are part of the contract: changing one changes every run.
enum {
    SITE_INIT = 0,
    SITE_DROPOUT_EMBEDDING = 1,
    SITE_DROPOUT_ATTENTION = 2,
    SITE_DROPOUT_ATTENTION_OUT = 3,
    SITE_DROPOUT_MLP_OUT = 4,
    SITE_SHUFFLE = 5,
    SITE_SAMPLE = 6,
    SITE_ROUNDING = 7,
    SITE_PAIR = 8,
    SITE_MASK = 9,
    SITE_DROPOUT_POOLED = 10
};

typedef struct {
    uint32_t v[4];
} Philox;

HOST_DEVICE static inline Philox philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint64_t key) {
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
#ifdef __CUDA_ARCH__  // nvcc needs a third more instructions for a 64-bit multiply
        uint32_t a = 0xD2511F53u * c0, a_high = __umulhi(0xD2511F53u, c0);
        uint32_t b = 0xCD9E8D57u * c2, b_high = __umulhi(0xCD9E8D57u, c2);
#else
        uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
        uint32_t a_high = (uint32_t)(a >> 32), b_high = (uint32_t)(b >> 32);
#endif
        c0 = b_high ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = a_high ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    Philox r;
    r.v[0] = c0, r.v[1] = c1, r.v[2] = c2, r.v[3] = c3;
    return r;
}

// The key of a stream; draw from it with philox(counters..., key).
HOST_DEVICE static inline uint64_t rng_stream(uint64_t seed, uint64_t step, uint32_t layer, uint32_t site) {
    Philox r = philox((uint32_t)step, (uint32_t)(step >> 32), layer, site, seed);
    return (uint64_t)r.v[1] << 32 | r.v[0];
}

// Uniform in (0, 1): never 0, so that its logarithm is finite.
HOST_DEVICE static inline double rng_uniform(uint32_t bits) { return ((double)bits + 0.5) * (1.0 / 4294967296.0); }

// Element `i` of a stream of standard normal numbers (Box and Muller).
static inline double rng_normal(uint64_t key, uint64_t i) {
    Philox r = philox((uint32_t)i, (uint32_t)(i >> 32), 0, 0, key);
    return sqrt(-2.0 * log(rng_uniform(r.v[0]))) * cos(6.283185307179586 * rng_uniform(r.v[1]));
}

// Element i of a seeded permutation of 0 .. n - 1. A four-round Feistel network over the next even number of bits,
// applied until the result is below n (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains",
// 2002): fewer than four times on average. It needs no memory, so all ranks and resumed runs agree.
HOST_DEVICE static inline uint64_t rng_permute(uint64_t i, uint64_t n, uint64_t key) {
    int half = 1;
    while (half < 32 && (uint64_t)1 << (2 * half) < n) half++;
    uint64_t mask = ((uint64_t)1 << half) - 1;
    do {
        uint64_t left = i >> half, right = i & mask;
        for (uint32_t round = 0; round < 4; round++) {
            uint64_t mixed = left ^ (philox((uint32_t)right, round, 0, 0, key).v[0] & mask);
            left = right;
            right = mixed;
        }
        i = left << half | right;
    } while (i >= n);
    return i;
}

// ---------------------------------------------------------------------------------------------------------
// Dropout masks

// Inverted dropout: an element is kept with probability 1 - p and then scaled by 1 / (1 - p). Passed by value. p = 0
// gives threshold 0 and scale 1, which keeps everything.
typedef struct {
    uint64_t key;        // of the stream (seed, step, layer, site)
    uint32_t threshold;  // an element is kept if its random bits are >= threshold
    float scale;
    const Sequences* sequences;  // masks are keyed by (sequence, position), not by row: packing does not change them
} Dropout;

static inline Dropout dropout_make(double p, uint64_t seed, uint64_t step, int layer, int site,
                                   const Sequences* sequences) {
    Dropout dropout;
    dropout.key = rng_stream(seed, step, (uint32_t)layer, (uint32_t)site);
    dropout.threshold = (uint32_t)(p * 4294967296.0);
    dropout.scale = (float)(1.0 / (1.0 - p));
    dropout.sequences = sequences;
    return dropout;
}

static inline Dropout dropout_none(const Sequences* sequences) { return dropout_make(0, 0, 0, 0, 0, sequences); }

// The settings that all masks of a step share. All zero: no dropout, as in an evaluation.
typedef struct {
    int is_on;
    uint64_t seed, step;
} DropoutStep;

static inline Dropout dropout_of(DropoutStep step, double p, int layer, int site, const Sequences* sequences) {
    return step.is_on ? dropout_make(p, step.seed, step.step, layer, site, sequences) : dropout_none(sequences);
}

// Random bits for four neighbouring channels 4 * group .. 4 * group + 3 of one token. `sequence` is counted over the
// whole step: Sequences.first + local index.
HOST_DEVICE static inline Philox dropout_bits_hidden(Dropout dropout, uint32_t sequence, uint32_t position,
                                                     uint32_t group) {
    return philox(group, position, sequence, 0, dropout.key);
}

// Random bits for eight neighbouring keys 8 * group .. 8 * group + 7 of one attention row: 16 bits per key, because
// there are many more of these decisions than of all others.
HOST_DEVICE static inline Philox dropout_bits_attention(Dropout dropout, uint32_t sequence, uint32_t head,
                                                        uint32_t query, uint32_t group) {
    return philox(group, query, sequence, 1 + head, dropout.key);
}

// A key is kept if its bits are >= this, the threshold rounded to 16 bits. p is exact to 2^-17, so the expected kept
// value times the scale is exact to a relative 2^-17 / (1 - p), below 1e-5 for the usual p. 65536 drops everything.
HOST_DEVICE static inline uint32_t dropout_threshold_attention(Dropout dropout) {
    return (uint32_t)(((uint64_t)dropout.threshold + 0x8000) >> 16);
}

// Whether the i-th of the eight keys is kept.
HOST_DEVICE static inline int dropout_keeps_attention(Philox r, int i, uint32_t threshold) {
    return (r.v[i / 2] >> 16 * (i % 2) & 0xffff) >= threshold;
}

#endif
