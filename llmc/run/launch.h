/* Which rank of how many a process is, and how it finds the others: from flags and from what mpirun, torchrun or srun
 * put into the environment. Nothing is opened here. */
#ifndef LLMC_LAUNCH_H
#define LLMC_LAUNCH_H

#include "tcp.h"

typedef enum { START_AUTO, START_MPI, START_ENV, START_TCP, START_FS } CommStart;
#define COMM_START_CHOICES "auto|mpi|env|tcp|fs"  // of -pi, in the order of CommStart

// What the user said. Numbers are -1, strings NULL or empty, where nothing was said.
typedef struct {
    int start;                   // -pi, a CommStart
    int rank, size;              // -pr, -pn
    int local_size;              // -pg: processes on each machine
    const char* server_address;  // -ps: where rank 0 is, HOST or HOST:PORT
    int port;                    // of rank 0; 0: what the environment says, else COMM_PORT
    const char* directory;       // -pf: that all ranks see
    double timeout;              // --timeout, seconds; 0: 60
} CommSettings;

enum { COMM_PORT = 29500 };

// ---------------------------------------------------------------------------------------------------------
// Finding out which rank this is

// What a launcher's variables are called. A launcher is taken for present where its size is there.
typedef struct {
    const char *name, *rank, *size, *local;
} CommLauncher;

typedef enum { LAUNCHER_OPENMPI, LAUNCHER_PMI, LAUNCHER_ENV, LAUNCHER_SLURM, LAUNCHERS } CommLauncherKind;

// How this process finds the others.
typedef struct {
    int start;  // a CommStart; START_AUTO: it is alone
    int rank, size, local_rank;
    TcpPlace place;
    const char* file;  // in which rank 0 writes the place; NULL where it is known
} CommPlan;

static inline CommLauncher comm_launcher(CommLauncherKind kind) {
    static const CommLauncher all[LAUNCHERS] = {
        {"mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"},
        {"mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"},
        {"the environment", "RANK", "WORLD_SIZE", "LOCAL_RANK"},
        {"srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"}};
    CommLauncher l = all[kind];
    // A step may have fewer tasks than its job.
    if (kind == LAUNCHER_SLURM && getenv("SLURM_STEP_NUM_TASKS")) l.size = "SLURM_STEP_NUM_TASKS";
    return l;
}

// A variable's value, NULL where it is absent or empty.
static inline const char* comm_variable(const char* name) {
    const char* text = getenv(name);
    return text && *text ? text : NULL;
}

// A whole number from 0 to `most`, -1 where the variable is absent.
static inline int comm_variable_number(const char* name, int most) {
    const char* text = comm_variable(name);
    if (!text) return -1;
    char* end = NULL;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (*text < '0' || *text > '9' || *end != '\0' || errno || value > most)
        die(USAGE, "the environment's %s is '%.80s'; allowed: 0..%d", name, text, most);
    return (int)value;
}

// Is this a task that srun started? Batch scripts see the variables of tasks too; their step has no ordinary number.
static inline int comm_in_slurm_step(void) {
    const char* step = comm_variable("SLURM_STEP_ID");
    return step && comm_variable("SLURM_PROCID") && strtoul(step, NULL, 10) < 0xFFFFFFF0ul;
}

// The launcher whose word counts, or LAUNCHERS for none.
static inline CommLauncherKind comm_find_launcher(int start) {
    int env = comm_variable("RANK") || comm_variable("WORLD_SIZE");
    if (start == START_ENV) return env ? LAUNCHER_ENV : comm_variable("SLURM_PROCID") ? LAUNCHER_SLURM : LAUNCHERS;
    // torchrun may itself have been started by mpirun or srun, whose variables are then of another number of processes.
    if (env && start != START_MPI && comm_variable("TORCHELASTIC_RUN_ID")) return LAUNCHER_ENV;
    if (comm_variable("OMPI_COMM_WORLD_SIZE")) return LAUNCHER_OPENMPI;
    if (comm_in_slurm_step() && (start == START_MPI || comm_variable("PMIX_RANK"))) return LAUNCHER_SLURM;
    if (comm_variable("PMI_SIZE") && !comm_in_slurm_step()) return LAUNCHER_PMI;
    if (start == START_MPI) return LAUNCHERS;
    return env ? LAUNCHER_ENV : comm_in_slurm_step() ? LAUNCHER_SLURM : LAUNCHERS;
}

// Continue a hash with a text, which may be NULL, and what ends it.
static inline uint64_t comm_hash(uint64_t hash, const char* text) {
    return fnv_update(fnv_update(hash, text, text ? strlen(text) : 0), "/", 1);
}

// What tells apart the runs that a launcher has started: the same on all ranks of a run. Runs by hand are all the same.
static inline uint64_t comm_job(CommLauncherKind kind) {
    static const char* names[LAUNCHERS + 1][2] = {{"PMIX_NAMESPACE", NULL},
                                                  {NULL, NULL},
                                                  {"TORCHELASTIC_RUN_ID", "MASTER_PORT"},
                                                  {"SLURM_JOB_ID", "SLURM_STEP_ID"},
                                                  {NULL, NULL}};
    uint64_t hash = FNV_START;
    for (int i = 0; i < 2; i++) hash = comm_hash(hash, names[kind][i] ? getenv(names[kind][i]) : NULL);
    return hash;
}

// A number for the machine that this process runs on, the same for all of its containers and namespaces.
static inline uint64_t comm_machine(void) {
    char text[64] = "";
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t got = fd >= 0 ? read(fd, text, sizeof text - 1) : 0;
    if (fd >= 0) close(fd);
    if (got <= 0 && gethostname(text, sizeof text - 1) != 0) text[0] = '\0';
    return comm_hash(FNV_START, text);
}

// The first host of Slurm's list, "node[01-04,7]" or "a,b": rank 0 runs there. Returns whether there is one.
static inline int comm_slurm_first_host(char* out, size_t n) {
    const char* list = comm_variable("SLURM_STEP_NODELIST");
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

// Take "HOST", "HOST:PORT" or "[IPV6]:PORT" as the only name of the place; more than one colon without brackets is an
// IPv6 address. `what` names the source for a complaint.
static inline void comm_set_address(TcpPlace* place, const char* address, const char* what) {
    char host[TCP_NAME_SIZE];
    const char *begin = address + (*address == '['), *first = strchr(address, ':'), *last = strrchr(address, ':');
    const char* end = *address == '[' ? strchr(address, ']') : first == last ? first : NULL;
    size_t length = end ? (size_t)(end - begin) : strlen(begin);
    if (length < 1 || length >= sizeof host) die(USAGE, "%s '%.80s' is not the name of a host", what, address);
    if (end && last && last >= end) {
        char* rest = NULL;
        long port = strtol(last + 1, &rest, 10);
        if (last[1] < '0' || last[1] > '9' || *rest || port < 1 || port > 65535)
            die(USAGE, "%s '%.80s': the port is not a number from 1 to 65535", what, address);
        place->port = (int)port;
    }
    snprintf(host, sizeof host, "%.*s", (int)length, begin);
    tcp_add_name(place, host);
}

// Where rank 0 of a run without MPI and without a directory is: as the user says, else as the launcher does.
static inline void comm_find_place(TcpPlace* place, const CommSettings* s, CommLauncherKind kind) {
    char host[TCP_NAME_SIZE];
    const int slurm = kind == LAUNCHER_SLURM, by_hand = s->start == START_TCP || kind == LAUNCHERS;
    const int master_port = by_hand ? -1 : comm_variable_number("MASTER_PORT", 65535);
    const char* address = comm_variable("MASTER_ADDR");
    const char* agent = comm_variable("TORCHELASTIC_USE_AGENT_STORE");
    if (s->server_address && *s->server_address) {
        comm_set_address(place, s->server_address, "-ps");
    } else if (by_hand) {
        die(USAGE,
            "%s needs the address of rank 0: -ps HOST or -ps HOST:PORT (or -pf DIRECTORY, or a start by mpirun, "
            "torchrun or srun)",
            s->start == START_TCP ? "-pi tcp" : "-pn");
    } else {
        if (!address && slurm) address = comm_slurm_first_host(host, sizeof host) ? host : NULL;
        if (!address && slurm) address = comm_variable("SLURM_LAUNCH_NODE_IPADDR");
        if (!address)
            die(USAGE,
                "%s started several ranks, but %s does not say where rank 0 is; set it, or give -ps HOST or "
                "-pf DIRECTORY",
                comm_launcher(kind).name,
                slurm ? "neither SLURM_STEP_NODELIST nor SLURM_LAUNCH_NODE_IPADDR" : "MASTER_ADDR");
        comm_set_address(place, address, "MASTER_ADDR");
        if (master_port <= 0 && !slurm)
            die(USAGE,
                "MASTER_ADDR is set, but MASTER_PORT does not say on which port rank 0 listens; allowed: 1..65535");
    }
    if (s->port > 0) place->port = s->port;
    if (place->port != 0) return;
    place->port = master_port > 0 ? master_port : COMM_PORT;
    // torchrun itself listens on MASTER_PORT; the ranks take one of those that follow. So do Slurm's jobs, which have
    // no port of their own.
    if (master_port > 0 && master_port < 65520 && agent && strcmp(agent, "True") == 0) place->port++, place->ports = 8;
    if (master_port <= 0 && slurm) place->port = 20000 + (int)(comm_job(kind) % 1000) * 10, place->ports = 8;
}

// Rank and size as the launcher says; the user may add what it leaves out, but not contradict it.
static inline void comm_rank_of_launcher(CommPlan* plan, const CommSettings* s, CommLauncherKind kind) {
    const int most = 1 << 20;
    const CommLauncher l = comm_launcher(kind);
    int rank = comm_variable_number(l.rank, most), size = comm_variable_number(l.size, most);
    int env_rank = comm_variable_number("RANK", most), env_size = comm_variable_number("WORLD_SIZE", most);
    plan->local_rank = comm_variable_number(l.local, most);
    if (s->rank >= 0 && rank >= 0 && s->rank != rank)
        die(USAGE, "-pr %d: but %s says that this is rank %d (%s); leave -pr out", s->rank, l.name, rank, l.rank);
    if (s->size >= 0 && size >= 0 && s->size != size)
        die(USAGE, "-pn %d: but %s says that there are %d ranks (%s); leave -pn out", s->size, l.name, size, l.size);
    if (rank < 0) rank = s->rank;
    if (size < 0) size = s->size;
    if (rank < 0 || size < 0)
        die(USAGE, "the environment has %s without %s; set both, or neither", rank < 0 ? l.size : l.rank,
            rank < 0 ? l.rank : l.size);
    if (rank >= size) die(USAGE, "%s=%d is not below %s=%d; ranks are numbered from 0", l.rank, rank, l.size, size);
    if (s->start == START_AUTO && kind == LAUNCHER_OPENMPI && env_size >= 0 && (env_rank != rank || env_size != size))
        die(USAGE,
            "mpirun says that this is rank %d of %d, but RANK and WORLD_SIZE say rank %d of %d; choose with -pi mpi or "
            "-pi env",
            rank, size, env_rank, env_size);
    plan->rank = rank, plan->size = size;
}

// Rank and size as the user alone says; size 1 where nothing is said.
static inline void comm_rank_by_hand(CommPlan* plan, const CommSettings* s, int has_place) {
    plan->rank = max_int(s->rank, 0), plan->size = max_int(s->size, 1), plan->local_rank = -1;
    if (s->start == START_MPI) return;
    if (s->start == START_ENV)
        die(USAGE, "-pi env: the environment has neither RANK and WORLD_SIZE nor SLURM_PROCID; start with torchrun or "
                   "srun, or choose another of " COMM_START_CHOICES);
    if (s->rank < 0 && s->size < 0 && s->start == START_AUTO && !has_place) return;
    if (s->size < 0) die(USAGE, "-pn is missing: how many ranks are there?");
    if (s->rank < 0 && s->size > 1) die(USAGE, "-pr is missing: which of the %d ranks is this?", s->size);
    if (s->rank >= s->size) die(USAGE, "-pr %d is not below -pn %d; ranks are numbered from 0", s->rank, s->size);
}

// Settle from settings and environment how this process finds the others.
static inline void comm_plan(CommPlan* plan, const CommSettings* s) {
    const int has_address = s->server_address && *s->server_address, has_directory = s->directory && *s->directory;
    const CommLauncherKind kind = comm_find_launcher(s->start);
    memset(plan, 0, sizeof *plan);
    memcpy(plan->place.magic, TCP_MAGIC, 8);
    if (kind != LAUNCHERS) comm_rank_of_launcher(plan, s, kind);
    else comm_rank_by_hand(plan, s, has_address || has_directory);
    if (s->start == START_TCP && has_directory)
        die(USAGE, "-pi tcp and -pf contradict each other; leave one of them out");
    if (s->start == START_FS && !has_directory)
        die(USAGE, "-pi fs needs the directory that all ranks see: -pf DIRECTORY");
    plan->start = s->start;
    if (s->start == START_AUTO) {
        int mpi =
            kind == LAUNCHER_OPENMPI || kind == LAUNCHER_PMI || (kind == LAUNCHER_SLURM && comm_variable("PMIX_RANK"));
#ifndef USE_MPI
        // srun needs no MPI, and mpirun's numbers will do where the user says how to meet.
        mpi = mpi && kind != LAUNCHER_SLURM && !has_directory && !has_address;
#endif
        plan->start = mpi ? START_MPI : has_directory ? START_FS : kind != LAUNCHERS ? START_ENV : START_TCP;
    }
    if (plan->size <= 1 && !(s->start == START_MPI && kind == LAUNCHERS)) {
        plan->start = START_AUTO;
        return;
    }
    if (s->local_size > 0) plan->local_rank = plan->rank % s->local_size;
#ifndef USE_MPI
    if (plan->start == START_MPI && kind == LAUNCHERS)
        die(USAGE, "-pi mpi: this program was built without MPI; build it where mpicc is found (make setup)");
    if (plan->start == START_MPI)
        die(USAGE,
            "mpirun started %d ranks, but this program was built without MPI; build it where mpicc is found (make "
            "setup), or add -pf DIRECTORY, which all ranks must see",
            plan->size);
#endif
    plan->place.ports = 1;
    if (plan->start == START_MPI || has_directory) {
        if (has_address) comm_set_address(&plan->place, s->server_address, "-ps");
        else tcp_add_own_names(&plan->place);
        if (s->port > 0) plan->place.port = s->port;
        plan->place.key = tcp_random();
    } else {
        comm_find_place(&plan->place, s, kind);
        plan->place.key = comm_job(kind) | 1;
    }
    if (plan->start == START_MPI || !has_directory) return;
    // Launched runs have names of their own. What a dead run has left does no harm: nobody knows its key any more, and
    // rank 0 replaces it.
    if (!is_directory(s->directory)) die(USAGE, "-pf %s: is not a directory", s->directory);
    plan->file = xprintf("%s/rank0-%016llx", s->directory, (unsigned long long)comm_job(kind));
}

#endif
