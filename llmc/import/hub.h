/* -e hub:NAME: a model from the Hugging Face Hub, in the cache of `huggingface_hub`. scripts/download.py downloads it;
 * the trainer itself does not access the network.
 *
 *   CACHE/models--ORGANIZATION--MODEL/refs/main              the commit that was downloaded last
 *   CACHE/models--ORGANIZATION--MODEL/snapshots/COMMIT/      its files
 *
 * CACHE is $HF_HUB_CACHE, else $HF_HOME/hub, else $XDG_CACHE_HOME/huggingface/hub, else ~/.cache/huggingface/hub. */
#ifndef LLMC_IMPORT_HUB_H
#define LLMC_IMPORT_HUB_H

#include "llmc/base/util.h"

#define HUB_PREFIX "hub:"

static inline int hub_is_name(const char* source) { return strncmp(source, HUB_PREFIX, strlen(HUB_PREFIX)) == 0; }

// The value of an environment variable; NULL if it is empty. A leading ~ is $HOME, as in `huggingface_hub`.
static inline char* hub_variable(const char* name) {
    const char *value = getenv(name), *home = getenv("HOME");
    if (!value || !*value) return NULL;
    int is_home = value[0] == '~' && (value[1] == '/' || value[1] == '\0') && home;
    return is_home ? xprintf("%s%s", home, value + 1) : xprintf("%s", value);
}

// The cache's directory (caller frees).
static inline char* hub_cache(void) {
    static const char* const places[][2] = {{"HF_HUB_CACHE", ""},
                                            {"HF_HOME", "/hub"},
                                            {"XDG_CACHE_HOME", "/huggingface/hub"},
                                            {"HOME", "/.cache/huggingface/hub"}};
    char* cache = NULL;
    for (size_t i = 0; i < COUNT_OF(places) && !cache; i++) {
        char* base = hub_variable(places[i][0]);
        if (base) cache = xprintf("%s%s", base, places[i][1]);
        free(base);
    }
    return cache ? cache : xprintf(".cache/huggingface/hub");
}

// Whether a name on the Hub has the form MODEL or ORGANIZATION/MODEL. It becomes part of a path.
static inline int hub_is_valid(const char* name, size_t n) {
    static const char letters[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-/";
    int slashes = 0;
    for (size_t i = 0; i < n; i++) {
        if (!strchr(letters, name[i])) return 0;
        slashes += name[i] == '/';
        if (i + 1 < n && (name[i] == '.' || name[i] == '-') && name[i + 1] == name[i]) return 0;
    }
    return n > 0 && slashes <= 1 && name[0] != '/' && name[n - 1] != '/' && name[0] != '.' && name[0] != '-';
}

// The snapshot of `revision`, a branch, tag or commit, in a model's folder of the cache (caller frees), or NULL.
static inline char* hub_snapshot(const char* folder, const char* revision) {
    char commit[128] = "";
    char* ref = xprintf("%s/refs/%s", folder, revision);
    int fd = open_file(ref);
    ssize_t n = fd < 0 ? 0 : read(fd, commit, sizeof commit - 1);
    if (fd >= 0) close(fd);
    commit[n > 0 ? n : 0] = '\0';
    commit[strcspn(commit, "/\r\n \t")] = '\0';
    char* snapshot = xprintf("%s/snapshots/%s", folder, *commit ? commit : revision);
    char *config = xprintf("%s/config.json", snapshot), *weights = xprintf("%s/model.safetensors", snapshot);
    char* index = xprintf("%s.index.json", weights);
    int is_there = file_exists(config) && (file_exists(weights) || file_exists(index));
    free(ref), free(config), free(weights), free(index);
    if (is_there) return snapshot;
    free(snapshot);
    return NULL;
}

// The directory of hub:NAME or hub:NAME@REVISION (caller frees); NULL if `source` is something else. Ends with USAGE if
// the model is not in the cache.
static inline char* hub_find(const char* source) {
    if (!hub_is_name(source)) return NULL;
    const char* name = source + strlen(HUB_PREFIX);
    size_t n = strcspn(name, "@");
    const char* revision = name[n] ? name + n + 1 : "main";
    if (!hub_is_valid(name, n) || !hub_is_valid(revision, strlen(revision)))
        die(USAGE, "-e %s: is not a name on the Hub; allowed: hub:MODEL, hub:ORGANIZATION/MODEL, then @REVISION",
            source);
    Text folder = {NULL, 0, 0};
    char* cache = hub_cache();
    text_printf(&folder, "%s/models--", cache);
    for (size_t i = 0; i < n; i++) text_append(&folder, name[i] == '/' ? "--" : name + i, name[i] == '/' ? 2 : 1);
    char* found = hub_snapshot(folder.text, revision);
    if (!found) die(USAGE, "-e %s: is not in %s; fetch it once: python3 scripts/download.py %s", source, cache, name);
    free(folder.text), free(cache);
    return found;
}

#endif
