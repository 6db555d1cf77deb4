#!/usr/bin/env bash
# Ranks under Slurm: srun --mpi=pmix -K trains and resumes, and ends if a rank is lost. This script starts Slurm's daemons,
# with all of their files in its own folder, for a cluster of this machine, and stops them.
#
#     bash dev/test/slurm.sh PROGRAM          from the repository's root, as root; needs Debian's slurm-wlm and munge
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"
prepare_ranks
for tool in munged slurmctld slurmd srun; do PATH=$PATH:/usr/sbin command -v $tool >/dev/null || why=${why:-"$tool was not found (apt install slurm-wlm munge)"}; done
[ "$(id -u)" = 0 ] || why=${why:-'its daemons need root'}
if [ -n "$why" ]; then
    skip slurm "$why"
    finish
    exit
fi
PATH=$PATH:/usr/sbin
for name in $(compgen -e | grep -E '^(SLURM|PMI|OMPI_COMM)'); do unset "$name"; done

daemons=()
stop_daemons() {
    local i
    for ((i = ${#daemons[@]} - 1; i >= 0; i--)); do kill "${daemons[i]}" 2>/dev/null && wait "${daemons[i]}"; done
}
trap 'stop_daemons; cleanup' EXIT
daemon() { # COMMAND...
    "$@" </dev/null >"$work/$1.log" 2>&1 &
    daemons+=($!)
}
host=$(hostname -s) port=$((20000 + $$ % 10000 * 2))
export SLURM_CONF=$work/slurm.conf
mkdir state spool
cat >slurm.conf <<END
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmdPort=$((port + 1))
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$work/munge.socket
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
NodeName=$host NodeAddr=127.0.0.1 CPUs=8
PartitionName=all Nodes=$host Default=YES
END
head -c 1024 /dev/urandom >munge.key && chmod 400 munge.key
daemon munged -F --force --key-file="$work/munge.key" --socket="$work/munge.socket" --pid-file="$work/munge.pid" \
    --log-file="$work/munge.log" --seed-file="$work/munge.seed"
for ((i = 0; i < 100; i++)); do [ ! -S munge.socket ] || break; sleep 0.1; done
daemon slurmctld -D
daemon slurmd -D -N "$host"
for ((i = 0; i < 300; i++)); do [ "$(sinfo -h -o %T 2>/dev/null)" != idle ] || break; sleep 0.1; done
if [ "$(sinfo -h -o %T 2>/dev/null)" != idle ]; then
    fail 'the daemons start' "$(tail -n 2 munged.log slurmctld.log slurmd.log)"
    finish
    exit
fi
ok 'the daemons start'

begin() { # OUT FLAG...
    srun --mpi=pmix -K -n 2 bash -c 'echo $$ >"pid.$SLURM_PROCID"; exec "$@"' rank "$PROGRAM" "${@:2}" -o "$1" </dev/null >"$work/stdout" 2>"$work/stderr" &
    long=$!
}
start() { # OUT FLAG...
    begin "$@"
    wait $long
    status=$?
}
model="-e L=2,C=16,NH=2,T=16 -b 2 -t 16 -v 0 -s 0 -z 1 --bucket 0"
start straight $model -x 12 -n 6
why=$(ended_with 0)
grep -q '2 ranks' "$work/stdout" || why=${why:-"not two ranks: $(head -n 3 "$work/stdout")"}
verdict 'srun --mpi=pmix -K: two ranks train' "$why"
start half $model -x 12 -n 6 --stop-after 6
why=$(ended_with 0)
start half -y 1
why=${why:-$(ended_with 0)}
verdict 'and resume: the same bits' "${why:-$(cmp straight/model.safetensors half/model.safetensors 2>&1)}"

for signal in KILL STOP; do
    start lost$signal $model -x 100000 -n 0 --stop-after 5
    begin lost$signal -y 1 --timeout 5
    for ((i = 0; i < 300; i++)); do grep -qs '"step": 10,' lost$signal/log.jsonl && break; sleep 0.1; done
    victim=$(cat pid.1) began=$SECONDS why=
    kill -$signal "$victim"
    for ((i = 0; i < 300; i++)); do kill -0 $long 2>/dev/null || break; sleep 0.1; done
    took=$((SECONDS - began))
    echo "SIG$signal: $took s"
    [ $took -le 15 ] || why="it took $took s"
    ! kill -KILL $long 2>/dev/null || why="srun does not end"
    wait $long
    [ $? -ne 0 ] || why=${why:-'srun ended with 0'}
    ! kill -KILL "$victim" 2>/dev/null || why=${why:-'the rank still runs'}
    verdict "SIG$signal to a rank: the step ends" "$why"
    start lost$signal -y 1 --stop-after 8
    verdict 'after that: resumed' "$(ended_with 0)"
done
finish
