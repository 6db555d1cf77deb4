/* Checkpoints: complete or absent, even if the process is killed, and verified before they are used.
 *
 *   OUT/ckpt/00000120/   config.json, model.safetensors, tokenizer files, README.md: a Hugging Face directory
 *                        optimizer.safetensors: the moments, and the master weights if there are any; with ZeRO-1,
 *                        each rank writes its shard, optimizer-00002-of-00004.safetensors (counted from 0)
 *                        trainer.json: step, position in the data, settings
 *                        manifest.json: size and CRC-32 of every other file, and of itself
 *   OUT/                 the newest model: copies of the same files, which users may edit
 *
 * A checkpoint is written as 00000120.tmp. Every file and the directory are flushed, then it is renamed: the rename is
 * the commit. Older checkpoints are deleted only after that. If a resumed run finds a damaged checkpoint, it keeps it
 * for its owner as 00000120.damaged. Any number of ranks can resume from either kind of optimizer files. All ranks share
 * one file system.
 *
 * This file: the contents of a checkpoint. directory.h: its manifest, and the directories of OUT. resume.h: find, verify
 * and load. writer.h: save, by all ranks together, while the run continues. */
#ifndef LLMC_CHECKPOINT_CHECKPOINT_H
#define LLMC_CHECKPOINT_CHECKPOINT_H

#include "llmc/base/run_lock.h"
#include "llmc/dist/process_group.h"
#include "llmc/model/model_writer.h"
#include "llmc/model/tokenizer_files.h"
#include "llmc/optim/fp32_copies.h"

enum { CHECKPOINT_NAME = 64, CHECKPOINT_WHY = 1024 };

// The model card. In OUT it replaces only a file that has this line; any other README is the user's own.
#define CHECKPOINT_CARD "README.md"
#define CHECKPOINT_CARD_MARKER "<!-- Written with each checkpoint. Delete this line to keep a card of your own. -->"

// A run's checkpoints: where they are, what they hold and which are kept.
typedef struct {
    const char* out;  // the run's directory
    const TensorTable* table;
    floatX* params;
    Optimizer* optimizer;
    const TokenizerFiles* tokenizer;  // copied into each; NULL: none
    int keep;                         // number of newest checkpoints to keep; 0 = all
    int keep_every;                   // also keep those at multiples of this step; 0 = none
    Context* ctx;
    RunLock* lock;    // of `out`; NULL: there is none
    int64_t best;     // also keep the checkpoint of this step; 0 = none
    int starts_anew;  // to load: skip the average of another run's weights
} Checkpoints;

// ---------------------------------------------------------------------------------------------------------
// The optimizer's files

#define CHECKPOINT_AVERAGE "ema."
enum { CHECKPOINT_PARTS = 4 };

// The buffers that are saved with the optimizer. Returns their number.
static inline int checkpoint_optimizer_parts(const Checkpoints* c, TensorPart parts[CHECKPOINT_PARTS]) {
    const TensorPart all[CHECKPOINT_PARTS] = {{"m.", c->optimizer->m, VIEW_REAL},
                                              {"v.", c->optimizer->v, VIEW_REAL},
                                              {"master.", c->optimizer->master, VIEW_REAL},
                                              {CHECKPOINT_AVERAGE, c->optimizer->average, VIEW_REAL}};
    int count = 0;
    for (int i = 0; i < CHECKPOINT_PARTS; i++)
        if (all[i].device) parts[count++] = all[i];
    return count;
}

// The name of the optimizer's file: of rank `rank` of `ranks` if `sharded`, else of the whole state.
static inline void checkpoint_optimizer_name(char name[CHECKPOINT_NAME], int sharded, int rank, int ranks) {
    if (sharded) snprintf(name, CHECKPOINT_NAME, "optimizer-%05d-of-%05d.safetensors", rank, ranks);
    else snprintf(name, CHECKPOINT_NAME, "optimizer.safetensors");
}

// ---------------------------------------------------------------------------------------------------------
// The file of a rank's shard of the optimizer state: a range of the flat buffers as in memory, padding included. The
// file's metadata holds the range. A part's tensor has the name of its prefix without the dot.

// CRC-32 of the flat buffer's layout: names, shapes and offsets.
static inline uint32_t tensors_fingerprint(const TensorTable* table) {
    Text text = {NULL, 0, 0};
    for (int i = 0; i < table->count; i++) {
        const Tensor* t = &table->tensors[i];
        text_printf(&text, "%s %d %d %d %zu\n", t->name, t->ndim, t->shape[0], t->shape[1], t->offset);
    }
    uint32_t result = crc32_of(0, text.text, text.length);
    free(text.text);
    return result;
}

static inline void tensors_shard_name(char name[16], const TensorPart* part) {
    snprintf(name, 16, "%.*s", (int)strlen(part->prefix) - 1, part->prefix);
}

// Write parts that hold the elements `range`. Returns 0 and the file's digest, or -1 with errno.
static inline int tensors_write_shard(const char* path, const TensorTable* table, const TensorPart* parts, int count,
                                      FlatRange range, FileDigest* digest, Context* ctx) {
    enum { PIECE = 1 << 20 };  // elements
    const struct {
        const char* key;
        unsigned long long value;
    } facts[] = {{"begin", range.begin},
                 {"size", range.size},
                 {"elements", table->elements},
                 {"table", tensors_fingerprint(table)}};
    const uint64_t shape = range.size;
    SafeTensorsWriter w;
    char name[16], number[24];
    safetensors_writer_create(&w, path);
    safetensors_writer_metadata(&w, "format", "pt");
    for (size_t i = 0; i < COUNT_OF(facts); i++) {
        snprintf(number, sizeof number, "%llu", facts[i].value);
        safetensors_writer_metadata(&w, facts[i].key, number);
    }
    for (int p = 0; p < count; p++) {
        tensors_shard_name(name, &parts[p]);
        safetensors_writer_add(&w, name, tensor_part_dtype(&parts[p]), 1, &shape);
    }
    safetensors_writer_begin(&w);
    void* space = xmalloc(PIECE * sizeof(real));
    for (int p = 0; p < count; p++) {
        for (size_t at = 0, n; at < range.size && !w.error; at += n) {
            n = min_size(range.size - at, PIECE);
            const void* values = tensor_part_elements(&parts[p], at, n, space, ctx);
            safetensors_writer_append(&w, values, n * tensor_part_element(&parts[p]));
        }
    }
    free(space);
    return tensors_close(&w, digest);
}

static inline uint64_t tensors_shard_fact(const SafeTensors* file, const char* key) {
    const JsonNode* metadata = json_get(file->header.root, "__metadata__");
    const JsonNode* fact = metadata ? json_get(metadata, key) : NULL;
    size_t n = fact ? strlen(fact->string) : 0;
    if (n == 0 || n > 19 || strspn(fact->string, "0123456789") != n)
        die(USAGE, "%s: its __metadata__ has no number \"%s\"; it is not a shard of an optimizer", file->file, key);
    return strtoull(fact->string, NULL, 10);
}

// Open a shard of this table. Returns the range of its elements.
static inline FlatRange tensors_open_shard(SafeTensors* file, const char* path, const TensorTable* table) {
    safetensors_open(file, path);
    FlatRange range = {.begin = (size_t)tensors_shard_fact(file, "begin"),
                       .size = (size_t)tensors_shard_fact(file, "size")};
    if (tensors_shard_fact(file, "table") != tensors_fingerprint(table) ||
        tensors_shard_fact(file, "elements") != table->elements)
        die(USAGE, "%s: is a shard of another model's optimizer", path);
    if (range.begin > table->elements || range.size > table->elements - range.begin)
        die(USAGE, "%s: claims %zu elements from %zu, but there are %zu; the file is damaged", path, range.size,
            range.begin, table->elements);
    return range;
}

// Read the elements of a part that are in `wanted` from an open shard with the elements `held`. `values` begins with
// the first element of `wanted`.
static inline void tensors_read_shard(const SafeTensors* file, FlatRange held, const TensorPart* part, FlatRange wanted,
                                      real* values) {
    char name[16];
    tensors_shard_name(name, part);
    const SafeTensor* entry = safetensors_find(file, name);
    if (!entry || entry->elements != held.size)
        die(USAGE, "%s: tensor \"%s\" is missing or not of %zu elements; the file is damaged", file->file, name,
            held.size);
    size_t from = held.begin > wanted.begin ? held.begin : wanted.begin;
    size_t to = min_size(held.begin + held.size, wanted.begin + wanted.size);
    if (from >= to) return;
    safetensors_read_real(entry, from - held.begin, to - from, values + from - wanted.begin);
    tensor_check_finite(entry, part, values + from - wanted.begin, to - from);
}

#endif
