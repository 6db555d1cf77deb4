/* Basics for everything else: exit status, fatal errors, checked memory and files, growing arrays, checksums.
 *
 * Every user error ends in die(): one line with what, where and what to do, and an exit status that scripts can rely
 * on. Nothing here knows about tensors or devices. */
#ifndef LLMC_BASE_UTIL_H
#define LLMC_BASE_UTIL_H

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

// COMPILED_IF_CALLED stands before launchers whose kernels are templates. nvcc compiles every kernel that a function
// references, even if the function is never called, unless the function is a template.
#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#define COMPILED_IF_CALLED template <int = 0>
#else
#define HOST_DEVICE
#define COMPILED_IF_CALLED
#endif

// The type of everything that stays in full precision (statistics, losses, moments), and of references.
// The double build exists for tests: finite differences are sharp there.
#ifdef REAL_DOUBLE
typedef double real;
#else
typedef float real;
#endif

// Exit status of every program here.
enum { DONE = 0, FAILED = 1, USAGE = 2, STOPPED_BY_NAN = 3, LOST_PEER = 4 };

#define COUNT_OF(array) (sizeof(array) / sizeof((array)[0]))

// ---------------------------------------------------------------------------------------------------------
// Errors

// One line on stderr. A message may quote a file: control characters become "?".
__attribute__((format(printf, 2, 0))) static inline void print_message(const char* kind, const char* format,
                                                                       va_list args) {
    char* text = NULL;
    fflush(stdout);
    int n = vasprintf(&text, format, args);
    for (int i = 0; i < n; i++)
        if ((unsigned char)text[i] < ' ' || text[i] == 127) text[i] = '?';
    fprintf(stderr, "%s: %s\n", kind, n < 0 ? format : text);  // out of memory: at least the format
    if (n >= 0) free(text);
}

// The status that die() ends the process with, for functions that exit() calls; DONE until then.
static inline int* exit_status(void) {
    static int status = DONE;
    return &status;
}

// Print "error: <message>" and end with `status`. The message names the thing, then the remedy.
__attribute__((format(printf, 2, 3), noreturn)) static inline void die(int status, const char* format, ...) {
    va_list args;
    va_start(args, format);
    print_message("error", format, args);
    va_end(args);
    exit(*exit_status() = status);
}

__attribute__((format(printf, 1, 2))) static inline void warn(const char* format, ...) {
    va_list args;
    va_start(args, format);
    print_message("warning", format, args);
    va_end(args);
}

// For conditions that only a bug in this project can violate. Users' mistakes go to die() with a remedy.
#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) die(FAILED, "%s:%d: internal check failed: %s", __FILE__, __LINE__, #condition);             \
    } while (0)

// ---------------------------------------------------------------------------------------------------------
// Memory

static inline void* xmalloc(size_t bytes) {
    void* p = malloc(bytes ? bytes : 1);
    if (!p) die(FAILED, "out of memory: %zu bytes could not be allocated", bytes);
    return p;
}

static inline void* xcalloc(size_t count, size_t size) {
    void* p = calloc(count ? count : 1, size ? size : 1);
    if (!p) die(FAILED, "out of memory: %zu x %zu bytes could not be allocated", count, size);
    return p;
}

static inline void* xrealloc(void* old, size_t bytes) {
    void* p = realloc(old, bytes ? bytes : 1);
    if (!p) die(FAILED, "out of memory: %zu bytes could not be allocated", bytes);
    return p;
}

// A newly allocated formatted string (caller frees).
__attribute__((format(printf, 1, 2))) static inline char* xprintf(const char* format, ...) {
    va_list args;
    char* text = NULL;
    va_start(args, format);
    int n = vasprintf(&text, format, args);
    va_end(args);
    if (n < 0) die(FAILED, "out of memory while formatting a string");
    return text;
}

// A path, as a value that needs no free().
typedef struct {
    char text[4096];
} Path;

__attribute__((format(printf, 1, 2))) static inline Path path_of(const char* format, ...) {
    Path path;
    va_list args;
    va_start(args, format);
    int n = vsnprintf(path.text, sizeof path.text, format, args);
    va_end(args);
    if (n < 0 || (size_t)n >= sizeof path.text) die(USAGE, "%.80s...: is too long for a path", path.text);
    return path;
}

static inline size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }
static inline size_t min_size(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t max_size(size_t a, size_t b) { return a > b ? a : b; }
static inline int min_int(int a, int b) { return a < b ? a : b; }
HOST_DEVICE static inline int max_int(int a, int b) { return a > b ? a : b; }

// For printing: NaN without its sign, which has no meaning.
static inline double plain_nan(double x) { return isnan(x) ? (double)NAN : x; }

// 1234567 -> 1,234,567
static inline void format_count(char out[32], int64_t n) {
    char digits[24];
    int length = snprintf(digits, sizeof(digits), "%lld", (long long)n), at = 0;
    for (int i = 0; i < length; i++) {
        out[at++] = digits[i];
        if (digits[i] != '-' && i + 1 < length && (length - 1 - i) % 3 == 0) out[at++] = ',';
    }
    out[at] = '\0';
}

// Seconds on a monotonic clock.
static inline double now_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// ---------------------------------------------------------------------------------------------------------
// Arrays and text that grow

// Make room for `needed` elements of `size` bytes. Returns the array, which may have moved. The capacity doubles, so
// that adding elements one at a time costs constant time for each. Start with NULL and a capacity of 0.
static inline void* array_reserve(void* array, size_t* capacity, size_t needed, size_t size) {
    if (needed <= *capacity) return array;
    *capacity = max_size(max_size(needed, 2 * *capacity), 16);
    return xrealloc(array, *capacity * size);
}

// A growing, always NUL-terminated string. Zero-initialise it; free `text` when done.
typedef struct {
    char* text;
    size_t length, capacity;
} Text;

static inline void text_append(Text* t, const char* bytes, size_t n) {
    CHECK(n < PTRDIFF_MAX);
    t->text = (char*)array_reserve(t->text, &t->capacity, t->length + n + 1, 1);
    if (n) memcpy(t->text + t->length, bytes, n);
    t->length += n;
    t->text[t->length] = '\0';
}

__attribute__((format(printf, 2, 3))) static inline void text_printf(Text* t, const char* format, ...) {
    va_list args;
    char* piece = NULL;
    va_start(args, format);
    int n = vasprintf(&piece, format, args);
    va_end(args);
    if (n < 0) die(FAILED, "out of memory while formatting a string");
    text_append(t, piece, (size_t)n);
    free(piece);
}

// ---------------------------------------------------------------------------------------------------------
// Checksums

// CRC-32 (as in zlib and PNG: polynomial 0xEDB88320), continued from `crc`; start with 0. Eight bytes per step through
// eight tables, about 1.5 GB/s: checkpoints are verified at disk speed.
typedef struct {
    uint32_t table[8][256];
} Crc32;

static inline void crc32_init(Crc32* c) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t r = i;
        for (int k = 0; k < 8; k++) r = (r >> 1) ^ (r & 1 ? 0xEDB88320u : 0);
        c->table[0][i] = r;
    }
    for (int t = 1; t < 8; t++)
        for (int i = 0; i < 256; i++)
            c->table[t][i] = (c->table[t - 1][i] >> 8) ^ c->table[0][c->table[t - 1][i] & 255];
}

static inline uint32_t crc32_update(const Crc32* c, uint32_t crc, const void* bytes, size_t n) {
    const unsigned char* p = (const unsigned char*)bytes;
    crc = ~crc;
    for (; n >= 8; n -= 8, p += 8) {
        uint32_t lo = crc ^ ((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);
        crc = c->table[7][lo & 255] ^ c->table[6][lo >> 8 & 255] ^ c->table[5][lo >> 16 & 255] ^ c->table[4][lo >> 24] ^
              c->table[3][p[4]] ^ c->table[2][p[5]] ^ c->table[1][p[6]] ^ c->table[0][p[7]];
    }
    for (; n; n--, p++) crc = (crc >> 8) ^ c->table[0][(crc ^ *p) & 255];
    return ~crc;
}

// The same where one call is all.
static inline uint32_t crc32_of(uint32_t crc, const void* bytes, size_t n) {
    Crc32 c;
    crc32_init(&c);
    return crc32_update(&c, crc, bytes, n);
}

// FNV-1a, 64 bits, continued from `hash`; start with FNV_START. Fast for a few bytes, and the same in every run.
#define FNV_START 0xCBF29CE484222325u

static inline uint64_t fnv_update(uint64_t hash, const char* bytes, size_t n) {
    for (size_t i = 0; i < n; i++) hash = (hash ^ (unsigned char)bytes[i]) * 0x100000001B3u;
    return hash;
}

// ---------------------------------------------------------------------------------------------------------
// Files. O_NONBLOCK has no effect on a regular file, but a FIFO in its place becomes an error instead of a wait.

static inline int file_exists(const char* path) { return access(path, F_OK) == 0; }

static inline int is_directory(const char* path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

// Create `path` and its parents. Returns 0, or -1 with errno.
static inline int make_directories(const char* path) {
    Path copy = path_of("%s", path);
    int result = 0;
    for (char* p = copy.text + 1; result == 0; p++) {
        if (*p != '/' && *p != '\0') continue;
        char end = *p;
        *p = '\0';
        if (mkdir(copy.text, 0777) != 0) {
            int why = errno == EEXIST ? ENOTDIR : errno;  // there is a file, unless:
            if (!is_directory(copy.text)) result = -1, errno = why;
        }
        *p = end;
        if (end == '\0') break;
    }
    return result;
}

// Open a regular file for reading. Returns -1 with errno if it cannot be opened or is not a regular file.
static inline int open_file(const char* path) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 || (fstat(fd, &st) == 0 && S_ISREG(st.st_mode))) return fd;
    close(fd);
    errno = EINVAL;
    return -1;
}

// What is left to read of an open file, NUL-terminated (caller frees); its length in *length (may be NULL). Dies with
// `status` if it cannot be read or has more than `limit` bytes. Closes the file.
static inline char* read_open_file(int fd, const char* path, size_t limit, size_t* length, int status) {
    size_t n = 0, capacity = 0;
    ssize_t got = 1;
    char* text = NULL;
    while (got != 0) {
        text = (char*)array_reserve(text, &capacity, n + 65536, 1);
        got = read(fd, text + n, capacity - n - 1);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) die(status, "%s: cannot be read: %s", path, strerror(errno));
        n += (size_t)got;
        if (n > limit) die(status, "%s: more than the %zu bytes that are expected of such a file", path, limit);
    }
    close(fd);
    text[n] = '\0';
    if (length) *length = n;
    return text;
}

// Open an input, a regular file, which is read with pread, and put its size in *size. Dies with `status` if it cannot be
// opened. `kind` is what it should be.
static inline int open_input(const char* path, uint64_t* size, const char* kind, int status) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &st) != 0)
        die(status, "%s: cannot be read: %s; %s", path, strerror(errno),
            errno == EMFILE ? "raise the limit on open files: ulimit -n" : "check the path and its permissions");
    if (!S_ISREG(st.st_mode)) die(status, "%s: is not a regular file; give a %s", path, kind);
    *size = (uint64_t)st.st_size;
    return fd;
}

// The contents of a regular file, as read_open_file() gives them.
static inline char* read_file(const char* path, size_t limit, size_t* length, int status) {
    uint64_t size;
    return read_open_file(open_input(path, &size, "file", status), path, limit, length, status);
}

// The same for anything that can be read to its end, such as a pipe.
static inline char* read_to_end(const char* path, size_t limit, size_t* length, int status) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) die(status, "%s: cannot be read: %s", path, strerror(errno));
    return read_open_file(fd, path, limit, length, status);
}

// Write all bytes at the file's position. Returns 0, or -1 with errno.
static inline int write_all(int fd, const void* bytes, size_t n) {
    const char* p = (const char*)bytes;
    while (n) {
        ssize_t put = write(fd, p, n);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return -1;
        p += put;
        n -= (size_t)put;
    }
    return 0;
}

// Read exactly n bytes at `offset`. Returns 0, or -1 with errno (0: the file ends early). Not inlined: with the
// buffer's size in sight, gcc 13 warns of lengths that CHECK() has excluded (_FORTIFY_SOURCE, which Ubuntu sets).
__attribute__((noinline, unused)) static int pread_all(int fd, void* bytes, size_t n, uint64_t offset) {
    for (size_t done = 0; done < n;) {
        ssize_t got = pread(fd, (char*)bytes + done, n - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got == 0) errno = 0;
        if (got <= 0) return -1;
        done += (size_t)got;
    }
    return 0;
}

// Why pread_all() failed.
static inline const char* pread_error(void) { return errno ? strerror(errno) : "the file became shorter"; }

// Read bytes of an open input. Dies if that fails.
static inline void read_input(int fd, const char* path, void* bytes, size_t n, uint64_t offset) {
    if (pread_all(fd, bytes, n, offset) != 0) die(FAILED, "%s: cannot be read: %s", path, pread_error());
}

// Create or replace a file, flushed to the disk. Returns 0, or -1 with errno.
static inline int write_file(const char* path, const void* bytes, size_t n) {
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NONBLOCK, 0666);
    if (fd < 0) return -1;
    int bad = write_all(fd, bytes, n) != 0 || fsync(fd) != 0;
    int saved = errno;
    if (close(fd) != 0 && !bad) return -1;
    errno = saved;
    return bad ? -1 : 0;
}

// Create or replace `to` with the bytes of `from`, flushed to the disk. Returns 0, or -1 with errno.
static inline int copy_file(const char* from, const char* to) {
    enum { COPY_BYTES = 1 << 20 };
    int in = open_file(from);
    int out = in < 0 ? -1 : open(to, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NONBLOCK, 0666);
    int bad = in < 0 || out < 0, saved = errno;
    char* bytes = (char*)xmalloc(COPY_BYTES);
    // The kernel copies, or shares blocks if the file system can. The loop copies the rest.
    while (!bad && copy_file_range(in, NULL, out, NULL, 1 << 30, 0) > 0) continue;
    for (ssize_t got = 1; got != 0 && !bad;) {
        got = read(in, bytes, COPY_BYTES);
        if (got > 0) bad = write_all(out, bytes, (size_t)got) != 0;
        else bad = got < 0 ? errno != EINTR : fsync(out) != 0;
        saved = errno;
    }
    free(bytes);
    if (in >= 0) close(in);
    if (out >= 0 && close(out) != 0 && !bad) bad = 1, saved = errno;
    errno = saved;
    return bad ? -1 : 0;
}

// Flush a directory, so that a rename inside it survives a power cut. Returns 0, or -1 with errno.
static inline int sync_directory(const char* path) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return -1;
    int bad = fsync(fd) != 0;
    close(fd);
    return bad ? -1 : 0;
}

// Rename what is flushed, and flush the directory, so that a power cut leaves the old or the new one. Returns 0, or -1
// with errno.
static inline int rename_into_place(const char* from, const char* to) {
    const char* slash = strrchr(to, '/');
    Path parent = slash ? path_of("%.*s", (int)(slash - to) + 1, to) : path_of(".");
    return rename(from, to) != 0 || sync_directory(parent.text) != 0 ? -1 : 0;
}

#endif
