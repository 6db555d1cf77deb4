/* A process's rank, the number of ranks, and how it finds the others: from flags, and from the environment of mpirun,
 * torchrun or srun. This file opens no connections. */
#ifndef LLMC_DIST_RENDEZVOUS_H
#define LLMC_DIST_RENDEZVOUS_H

#include "llmc/dist/handshake.h"

typedef enum { START_AUTO, START_MPI, START_ENV, START_TCP, START_FS } RendezvousMethod;
#define RENDEZVOUS_METHODS "auto|mpi|env|tcp|fs"  // -pi, in the order of RendezvousMethod

// Flags. Numbers are -1, strings NULL or empty, if the user gave none.
typedef struct {
    int start;                   // -pi, a RendezvousMethod
    int rank, size;              // -pr, -pn
    int local_size;              // -pg: processes on each machine
    const char* server_address;  // -ps: rank 0's HOST or HOST:PORT
    int port;                    // of rank 0; 0: from the environment, else RENDEZVOUS_PORT
    const char* directory;       // -pf: that all ranks see
    double timeout;              // --timeout, seconds; 0: 60
} RendezvousSettings;

enum { RENDEZVOUS_PORT = 29500 };

// How this process finds the others.
typedef struct {
    int start;  // a RendezvousMethod; START_AUTO: it is alone
    int rank, size, local_rank;
    Endpoint endpoint;
    const char* file;  // where rank 0 writes the endpoint; NULL: every rank knows it
    Identity* ranks;   // of all ranks, while they connect
} Rendezvous;

// ---------------------------------------------------------------------------------------------------------
// Launchers

// The variables that a launcher sets. It is present if its `size` is set.
typedef struct {
    const char *name, *rank, *size, *local;
} Launcher;

typedef enum { LAUNCHER_OPENMPI, LAUNCHER_PMI, LAUNCHER_ENV, LAUNCHER_SLURM, LAUNCHERS } LauncherKind;

static inline Launcher launcher_of(LauncherKind kind) {
    static const Launcher all[LAUNCHERS] = {
        {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
        {"mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},
        {"the environment", "RANK", "WORLD_SIZE", "LOCAL_RANK"},
        {"srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"}};
    Launcher l = all[kind];
    // A step may have fewer tasks than its job.
    if (kind == LAUNCHER_SLURM && getenv("SLURM_STEP_NUM_TASKS")) l.size = "SLURM_STEP_NUM_TASKS";
    return l;
}

// A variable's value; NULL if it is absent or empty.
static inline const char* environment_text(const char* name) {
    const char* text = getenv(name);
    return text && *text ? text : NULL;
}

// A whole number from 0 to `most`; -1 if the variable is absent.
static inline int environment_number(const char* name, int most) {
    const char* text = environment_text(name);
    if (!text) return -1;
    char* end = NULL;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (*text < '0' || *text > '9' || *end != '\0' || errno || value > most)
        die(USAGE, "the environment's %s is '%.80s'; allowed: 0..%d", name, text, most);
    return (int)value;
}

// Whether srun started this task. Batch scripts see task variables too, but their step has no ordinary number.
static inline int launcher_is_slurm_step(void) {
    const char* step = environment_text("SLURM_STEP_ID");
    return step && environment_text("SLURM_PROCID") && strtoul(step, NULL, 10) < 0xFFFFFFF0ul;
}

// The launcher to follow, or LAUNCHERS for none.
static inline LauncherKind launcher_find(int start) {
    int env = environment_text("RANK") || environment_text("WORLD_SIZE"), is_step = launcher_is_slurm_step();
    if (start == START_ENV) return env ? LAUNCHER_ENV : environment_text("SLURM_PROCID") ? LAUNCHER_SLURM : LAUNCHERS;
    // torchrun may itself have been started by mpirun or srun, whose variables then count other processes.
    if (env && start != START_MPI && environment_text("TORCHELASTIC_RUN_ID")) return LAUNCHER_ENV;
    if (environment_text("OMPI_COMM_WORLD_SIZE")) return LAUNCHER_OPENMPI;
    if (is_step && (start == START_MPI || environment_text("PMIX_RANK"))) return LAUNCHER_SLURM;
    if (environment_text("PMI_SIZE") && !is_step) return LAUNCHER_PMI;
    if (start == START_MPI) return LAUNCHERS;
    return env ? LAUNCHER_ENV : is_step ? LAUNCHER_SLURM : LAUNCHERS;
}

// Continue a hash with a text, which may be NULL, and a separator.
static inline uint64_t rendezvous_hash(uint64_t hash, const char* text) {
    return fnv_update(fnv_update(hash, text, text ? strlen(text) : 0), "/", 1);
}

// A number for the launched run, the same on all its ranks. Runs that are started by hand share one number.
static inline uint64_t rendezvous_run_id(LauncherKind kind) {
    static const char* names[LAUNCHERS + 1][2] = {{"PMIX_NAMESPACE", NULL},
                                                  {NULL, NULL},
                                                  {"TORCHELASTIC_RUN_ID", "MASTER_PORT"},
                                                  {"SLURM_JOB_ID", "SLURM_STEP_ID"},
                                                  {NULL, NULL}};
    uint64_t hash = FNV_START;
    for (int i = 0; i < 2; i++) hash = rendezvous_hash(hash, names[kind][i] ? getenv(names[kind][i]) : NULL);
    return hash;
}

// A number for this machine, the same in all of its containers and namespaces.
static inline uint64_t rendezvous_machine_id(void) {
    char text[64] = "";
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t got = fd >= 0 ? read(fd, text, sizeof text - 1) : 0;
    if (fd >= 0) close(fd);
    if (got <= 0 && gethostname(text, sizeof text - 1) != 0) text[0] = '\0';
    return rendezvous_hash(FNV_START, text);
}

// The first host of Slurm's list, "node[01-04,7]" or "a,b": rank 0 runs there. Returns whether there is one.
static inline int slurm_first_host(char* out, size_t n) {
    const char* list = environment_text("SLURM_STEP_NODELIST");
    if (!list) return 0;
    size_t prefix = strcspn(list, "[,");
    const char* number = list[prefix] == '[' ? list + prefix + 1 : "";
    size_t digits = strspn(number, "0123456789");
    const char* close = strchr(number, ']');
    size_t suffix = close ? strcspn(close + 1, "[,") : 0;
    if (list[prefix] == '[' && (digits == 0 || !close)) return 0;
    return snprintf(out, n, "%.*s%.*s%.*s", (int)prefix, list, (int)digits, number, (int)suffix,
                    close ? close + 1 : "") < (int)n;
}

// ---------------------------------------------------------------------------------------------------------
// Rank 0's endpoint

// Make "HOST", "HOST:PORT" or "[IPV6]:PORT" the endpoint's only name; more than one colon without brackets is an IPv6
// address. `what` names the source in an error.
static inline void endpoint_set(Endpoint* e, const char* address, const char* what) {
    char host[ENDPOINT_NAME_SIZE];
    const char *begin = address + (*address == '['), *first = strchr(address, ':'), *last = strrchr(address, ':');
    const char* end = *address == '[' ? strchr(address, ']') : first == last ? first : NULL;
    size_t length = end ? (size_t)(end - begin) : strlen(begin);
    if (length < 1 || length >= sizeof host) die(USAGE, "%s '%.80s' is not the name of a host", what, address);
    if (end && last && last >= end) {
        char* rest = NULL;
        long port = strtol(last + 1, &rest, 10);
        if (last[1] < '0' || last[1] > '9' || *rest || port < 1 || port > 65535)
            die(USAGE, "%s '%.80s': the port is not a number from 1 to 65535", what, address);
        e->port = (int)port;
    }
    snprintf(host, sizeof host, "%.*s", (int)length, begin);
    endpoint_add_name(e, host);
}

// The endpoint of a run without MPI and without a directory: from the flags, else from the launcher.
static inline void rendezvous_find_endpoint(Endpoint* e, const RendezvousSettings* s, LauncherKind kind) {
    char host[ENDPOINT_NAME_SIZE];
    const int slurm = kind == LAUNCHER_SLURM, by_hand = s->start == START_TCP || kind == LAUNCHERS;
    const int master_port = by_hand ? -1 : environment_number("MASTER_PORT", 65535);
    const char* address = environment_text("MASTER_ADDR");
    const char* agent = environment_text("TORCHELASTIC_USE_AGENT_STORE");
    if (s->server_address && *s->server_address) {
        endpoint_set(e, s->server_address, "-ps");
    } else if (by_hand) {
        die(USAGE,
            "%s needs the address of rank 0: -ps HOST or -ps HOST:PORT (or -pf DIRECTORY, or a start by mpirun, "
            "torchrun or srun)",
            s->start == START_TCP ? "-pi tcp" : "-pn");
    } else {
        if (!address && slurm) address = slurm_first_host(host, sizeof host) ? host : NULL;
        if (!address && slurm) address = environment_text("SLURM_LAUNCH_NODE_IPADDR");
        if (!address)
            die(USAGE,
                "%s started several ranks, but %s does not give the address of rank 0; set it, or give -ps HOST or "
                "-pf DIRECTORY",
                launcher_of(kind).name,
                slurm ? "neither SLURM_STEP_NODELIST nor SLURM_LAUNCH_NODE_IPADDR" : "MASTER_ADDR");
        endpoint_set(e, address, "MASTER_ADDR");
        if (master_port <= 0 && !slurm)
            die(USAGE, "MASTER_ADDR is set, but MASTER_PORT does not give the port of rank 0; allowed: 1..65535");
    }
    if (s->port > 0) e->port = s->port;
    if (e->port != 0) return;
    e->port = master_port > 0 ? master_port : RENDEZVOUS_PORT;
    // torchrun itself listens on MASTER_PORT, so ranks take one of the ports after it. So do Slurm's jobs, which have
    // no port of their own.
    if (master_port > 0 && master_port < 65520 && agent && strcmp(agent, "True") == 0) e->port++, e->ports = 8;
    if (master_port <= 0 && slurm) e->port = 20000 + (int)(rendezvous_run_id(kind) % 1000) * 10, e->ports = 8;
}

// ---------------------------------------------------------------------------------------------------------
// Rank and size

// From the launcher. Flags may add values that it lacks, but not contradict it.
static inline void rendezvous_rank_of_launcher(Rendezvous* r, const RendezvousSettings* s, LauncherKind kind) {
    const int most = 1 << 20;
    const Launcher l = launcher_of(kind);
    int rank = environment_number(l.rank, most), size = environment_number(l.size, most);
    int env_rank = environment_number("RANK", most), env_size = environment_number("WORLD_SIZE", most);
    r->local_rank = environment_number(l.local, most);
    if (s->rank >= 0 && rank >= 0 && s->rank != rank)
        die(USAGE, "-pr %d: but %s makes this rank %d (%s); leave -pr out", s->rank, l.name, rank, l.rank);
    if (s->size >= 0 && size >= 0 && s->size != size)
        die(USAGE, "-pn %d: but %s started %d ranks (%s); leave -pn out", s->size, l.name, size, l.size);
    if (rank < 0) rank = s->rank;
    if (size < 0) size = s->size;
    if (rank < 0 || size < 0)
        die(USAGE, "the environment has %s without %s; set both, or neither", rank < 0 ? l.size : l.rank,
            rank < 0 ? l.rank : l.size);
    if (rank >= size) die(USAGE, "%s=%d is not below %s=%d; ranks are numbered from 0", l.rank, rank, l.size, size);
    if (s->start == START_AUTO && kind == LAUNCHER_OPENMPI && env_size >= 0 && (env_rank != rank || env_size != size))
        die(USAGE,
            "mpirun makes this rank %d of %d, but RANK and WORLD_SIZE say rank %d of %d; choose with -pi mpi or -pi "
            "env",
            rank, size, env_rank, env_size);
    r->rank = rank, r->size = size;
}

// From the flags alone; one rank if they give none.
static inline void rendezvous_rank_by_hand(Rendezvous* r, const RendezvousSettings* s, int has_endpoint) {
    r->rank = max_int(s->rank, 0), r->size = max_int(s->size, 1), r->local_rank = -1;
    if (s->start == START_MPI) return;
    if (s->start == START_ENV)
        die(USAGE, "-pi env: the environment has neither RANK and WORLD_SIZE nor SLURM_PROCID; start with torchrun or "
                   "srun, or choose another of " RENDEZVOUS_METHODS);
    if (s->rank < 0 && s->size < 0 && s->start == START_AUTO && !has_endpoint) return;
    if (s->size < 0) die(USAGE, "-pn is missing: how many ranks are there?");
    if (s->rank < 0 && s->size > 1) die(USAGE, "-pr is missing: which of the %d ranks is this?", s->size);
    if (s->rank >= s->size) die(USAGE, "-pr %d is not below -pn %d; ranks are numbered from 0", s->rank, s->size);
}

// Decide from flags and environment how this process finds the others.
static inline void rendezvous_plan(Rendezvous* r, const RendezvousSettings* s) {
    const int has_address = s->server_address && *s->server_address, has_directory = s->directory && *s->directory;
    const LauncherKind kind = launcher_find(s->start);
    memset(r, 0, sizeof *r);
    memcpy(r->endpoint.magic, TCP_MAGIC, 8);
    if (kind != LAUNCHERS) rendezvous_rank_of_launcher(r, s, kind);
    else rendezvous_rank_by_hand(r, s, has_address || has_directory);
    if (s->start == START_TCP && has_directory)
        die(USAGE, "-pi tcp and -pf contradict each other; leave one of them out");
    if (s->start == START_FS && !has_directory)
        die(USAGE, "-pi fs needs the directory that all ranks see: -pf DIRECTORY");
    r->start = s->start;
    if (s->start == START_AUTO) {
        int mpi = kind == LAUNCHER_OPENMPI || kind == LAUNCHER_PMI ||
                  (kind == LAUNCHER_SLURM && environment_text("PMIX_RANK"));
#ifndef USE_MPI
        // srun needs no MPI. Nor does mpirun if the user gives the meeting point: its variables give rank and size.
        mpi = mpi && kind != LAUNCHER_SLURM && !has_directory && !has_address;
#endif
        r->start = mpi ? START_MPI : has_directory ? START_FS : kind != LAUNCHERS ? START_ENV : START_TCP;
    }
    if (r->size <= 1 && !(s->start == START_MPI && kind == LAUNCHERS)) {
        r->start = START_AUTO;
        return;
    }
    if (s->local_size > 0) r->local_rank = r->rank % s->local_size;
#ifndef USE_MPI
    if (r->start == START_MPI && kind == LAUNCHERS)
        die(USAGE, "-pi mpi: this program was built without MPI; build it where mpicc is found (make setup)");
    if (r->start == START_MPI)
        die(USAGE,
            "mpirun started %d ranks, but this program was built without MPI; build it where mpicc is found (make "
            "setup), or add -pf DIRECTORY, which all ranks must see",
            r->size);
#endif
    Endpoint* e = &r->endpoint;
    e->ports = 1;
    if (r->start != START_MPI && !has_directory) {
        rendezvous_find_endpoint(e, s, kind);
        e->key = rendezvous_run_id(kind) | 1;
        return;
    }
    if (has_address) endpoint_set(e, s->server_address, "-ps");
    else endpoint_add_own_names(e);
    if (s->port > 0) e->port = s->port;
    e->key = random_key();
    if (r->start == START_MPI) return;
    // Each launched run has its own file name. The file of a dead run is harmless: its key is no longer in use, and
    // rank 0 replaces it.
    if (!is_directory(s->directory)) die(USAGE, "-pf %s: is not a directory", s->directory);
    r->file = xprintf("%s/rank0-%016llx", s->directory, (unsigned long long)rendezvous_run_id(kind));
}

#endif
