#!/bin/bash
# How many threads a trainer uses, and whether they spin: by the affinity mask, by a control group's quota, by what the user
# sets. Without the variables that run.sh and shell.sh export.
#
#     bash dev/test/threads.sh ./train_gpt2          from the repository's root
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"
unset OMP_NUM_THREADS OMP_WAIT_POLICY GOMP_SPINCOUNT

# Start a run that takes long, and wait for its first step. The others read $pid's threads and environment.
pid=
begin() { # COMMAND...
    : >"$work/stdout"  # a line of the run before is not this one's
    "$@" "$PROGRAM" -e L=1,C=16,NH=1,T=16 -b 64 -x 1000000 -v 0 -s 0 -n 0 -o '' >"$work/stdout" 2>"$work/stderr" &
    pid=$!
    for _ in $(seq 1000); do
        grep -q '^step' "$work/stdout" && return
        kill -0 "$pid" 2>/dev/null || return
        sleep 0.1
    done
}
end() { kill -9 "$pid" 2>/dev/null; wait "$pid" 2>/dev/null; }
setting() { tr '\0' '\n' <"/proc/$pid/environ" | sed -n "s/^$1=//p"; }
# Threads that compute: the trainer has others that wait for data and for the disk.
expect_setting() { # NAME VARIABLE VALUE
    local found
    found=$(setting "$2")
    verdict "$1" "$([ "$found" = "$3" ] || echo "$2 is '$found', not '$3'; $(tail -n 1 "$work/stderr")")"
}

begin env
expect_setting 'threads that wait spin for a bounded time' GOMP_SPINCOUNT 1000
verdict 'it starts itself again only once' "$([ "$(tr '\0' ' ' <"/proc/$pid/cmdline" | cut -d ' ' -f 1)" = "$PROGRAM" ] || echo "$(tr '\0' ' ' <"/proc/$pid/cmdline")")"
name=$(cat "/proc/$pid/comm")
verdict 'ps and pkill find it by its name' "$([ "$name" = "$(basename "$PROGRAM" | cut -c 1-15)" ] || echo "$name")"
end
begin env OMP_WAIT_POLICY=active
expect_setting 'a policy of the user stays' GOMP_SPINCOUNT ''
end
begin env GOMP_SPINCOUNT=7
expect_setting 'a count of the user stays' GOMP_SPINCOUNT 7
end

# libgomp follows the mask; one CPU is one thread fewer than two.
threads() { ls "/proc/$pid/task" | wc -l; }
cpus=$(taskset -cp $$ | sed 's/.*: //; s/[,-].*//')
begin taskset -c "$cpus"
one=$(threads)
end
begin taskset -c "$cpus" env OMP_NUM_THREADS=2
two=$(threads)
end
verdict 'one thread on one CPU' "$([ "$two" = $((one + 1)) ] || echo "$one threads, and $two where two are asked for")"

# A control group of half a core.
group=
for parent in /sys/fs/cgroup/cpu /sys/fs/cgroup; do
    [ -z "$group" ] || continue
    mkdir "$parent/llmc_threads_$$" 2>/dev/null || continue
    group=$parent/llmc_threads_$$
    if [ -e "$group/cpu.cfs_quota_us" ]; then echo 50000 >"$group/cpu.cfs_quota_us"
    else echo '50000 100000' >"$group/cpu.max"; fi 2>/dev/null || { rmdir "$group"; group=; }
done
if [ -z "$group" ] || ! sh -c 'echo $$ >"$0/cgroup.procs"' "$group" 2>/dev/null; then
    skip 'half a core is one thread' 'no control group with a quota can be made here'
elif [ "$(nproc)" -lt 2 ]; then
    skip 'half a core is one thread' 'there is one CPU'
else
    begin sh -c 'echo $$ >"$0/cgroup.procs" && exec "$@"' "$group"
    expect_setting 'half a core is one thread' OMP_NUM_THREADS 1
    end
    begin sh -c 'echo $$ >"$0/cgroup.procs" && exec "$@"' "$group" env OMP_NUM_THREADS=2
    expect_setting 'a number of the user stays' OMP_NUM_THREADS 2
    end
fi
[ -z "$group" ] || rmdir "$group"
finish
