#!/usr/bin/env bash
# How ranks start, compare settings, and notice that another rank is lost:
#
#     bash dev/test/ranks_start.sh TEST_COMM [TEST_COMM_MPI]          from the repository's root
#
# TEST_COMM is dev/test/comm.c built without MPI, TEST_COMM_MPI with -DUSE_MPI. Ends with `N passed, N failed, N skipped`;
# exit status 1 if one failed.
set -u
[ -x "${1:-}" ] || { echo "usage: bash $0 TEST_COMM [TEST_COMM_MPI]" >&2; exit 2; }
plain=$(realpath "$1") mpi= here=$(realpath "$(dirname "$0")")
[ -z "${2:-}" ] || mpi=$(realpath "$2")
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 LC_ALL=C
# This script may itself run under a launcher.
for name in $(compgen -e | grep -E '^(OMPI_COMM|PMI|SLURM|TORCHELASTIC|RANK$|WORLD_SIZE$|LOCAL_RANK$|MASTER_)'); do unset "$name"; done

passed=0 failed=0 skipped=0
verdict() { # NAME WHY: ok where WHY is empty
    if [ -z "$2" ]; then passed=$((passed + 1)); printf 'ok   %s\n' "$1"
    else failed=$((failed + 1)); printf 'FAIL %s: %s\n' "$1" "$2"; fi
}
skip() { skipped=$((skipped + 1)); printf 'skip %s: %s\n' "$1" "$2"; }

work=$(mktemp -d) || exit 1
spaces=()
cleanup() {
    for space in "${spaces[@]}"; do ip netns del "$space" 2>/dev/null; done
    rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 1' INT TERM HUP PIPE
cd "$work" && mkdir shared || exit 1

# A port for each start, below the system's ephemeral ports.
port=$((10000 + RANDOM % 10000))
# Sanitizers slow things down.
slack=0
grep -qE '__(tsan|asan)_init' "$plain" && slack=3000
[ -z "$mpi" ] || export LSAN_OPTIONS="suppressions=$here/mpi.supp:fast_unwind_on_malloc=0:print_suppressions=0"

# Start rank R, with its output in files: begin R [VAR=VALUE...] COMMAND...
began=()
begin() {
    local r=$1
    shift
    env "$@" >"out.$r" 2>"err.$r" </dev/null &
    began[r]=$!
}

# Wait for all ranks that were started; their exit statuses go to `status`, the milliseconds since mark() to `took`.
status=()
finish() {
    local r
    status=()
    for r in "${!began[@]}"; do
        wait "${began[r]}" 2>/dev/null
        status[r]=$?
    done
    took=$(since)
    began=()
}
mark() { marked=$(date +%s%N); }
since() { echo $((($(date +%s%N) - marked) / 1000000)); }

# Start N ranks with the method WAY: start WAY N [FLAG...]
start() {
    local way=$1 n=$2 r
    shift 2
    port=$((port + 16))
    rm -f out.* err.*
    mark
    for ((r = n - 1; r >= 0; r--)); do
        case $way in
            env) begin $r RANK=$r WORLD_SIZE="$n" LOCAL_RANK=$r MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "$plain" "$@" ;;
            slurm) begin $r SLURM_PROCID=$r SLURM_STEP_NUM_TASKS="$n" SLURM_NTASKS=99 SLURM_LOCALID=$r SLURM_JOB_ID=$port \
                SLURM_STEP_ID=3 SLURM_LAUNCH_NODE_IPADDR=127.0.0.1 "$plain" "$@" ;;
            tcp) begin $r "$plain" "$@" -pi tcp -ps localhost:$port -pn "$n" -pr $r ;;
            fs) begin $r "$plain" "$@" -pi fs -pf shared -pn "$n" -pr $r ;;
        esac
    done
}

# Wait until each of these ranks 0 (mode steps) has printed that all ranks have begun, and for some steps more.
have_begun() {
    local r i
    for r; do
        for i in {1..400}; do [ -s "out.$r" ] && break; sleep 0.05; done
    done
    sleep 0.5
}

# Print why the exit statuses are not these, or nothing: statuses 4 4 137 4
statuses() {
    [ "${status[*]}" = "$*" ] || echo "exit statuses ${status[*]} where $* are promised; stderr: $(cat err.* | tail -n 4)"
}
# Print which rank has not printed exactly one line that matches, or nothing: lines PATTERN RANK...
lines() {
    local pattern=$1 r
    shift
    for r; do
        [ "$(grep -c . "err.$r")" = 1 ] && grep -Eq -- "$pattern" "err.$r" && continue
        echo "stderr of rank $r is not one line '$pattern': $(head -n 5 "err.$r")"
        return
    done
}
# Print why the time is not between so many milliseconds, or nothing: within LEAST MOST
within() { [ "$took" -ge "$1" ] && [ "$took" -le $(($2 + slack)) ] || echo "it took $took ms where $1 to $2 are promised"; }
# The first reason of several.
first() { local why; for why; do [ -z "$why" ] || { echo "$why"; return; }; done; }

# ---------------------------------------------------------------------------------------------------------
# Starting

"$plain" collectives >out.0 2>err.0
verdict 'one rank' "$([ "$(tail -n 1 out.0)" = '1 ranks: 20 passed, 0 failed' ] || cat out.0 err.0)"
for way in env slurm tcp fs; do
    for n in 2 4; do
        start $way $n collectives
        finish
        verdict "$way, $n ranks" "$([ "$(cat out.*)" = "$n ranks: $((n == 1 ? 20 : 24 * n)) passed, 0 failed" ] && [ -z "$(cat err.*)" ] || cat out.* err.*)"
    done
done
verdict 'the shared directory is left empty' "$(ls -A shared)"
head -c 4000 /dev/urandom >shared/rank0-0000000000000000
start fs 3 who -pg 2
finish
verdict 'local ranks' "$([ "$(cat out.? | tr '\n' ';')" = 'rank 0 of 3, local 0 of 3;rank 1 of 3, local 1 of 3;rank 2 of 3, local 0 of 3;' ] || cat out.* err.*)"

# The file that a dead run left must not be mistaken for rank 0's.
start fs 2 steps --seconds 20 --timeout 2
sleep 0.01
for _ in {1..100}; do [ -n "$(ls shared | grep -v 0000000000000000)" ] && break; sleep 0.01; done
kill -KILL "${began[@]}" 2>/dev/null
finish
start fs 2 collectives
finish
verdict 'fs after a run that was killed' "$(statuses 0 0)"

# torchrun itself listens on MASTER_PORT: what answers there is not rank 0.
port=$((port + 16))
rm -f out.* err.*
for r in 0 1; do
    begin $r RANK=$r WORLD_SIZE=2 LOCAL_RANK=$r MASTER_ADDR=localhost MASTER_PORT=$port TORCHELASTIC_RUN_ID=x \
        TORCHELASTIC_USE_AGENT_STORE=True OMPI_COMM_WORLD_SIZE=7 OMPI_COMM_WORLD_RANK=5 "$plain" collectives
done
finish
verdict 'torchrun below mpirun' "$(statuses 0 0)"

# Two runs, of 2 and of 3 ranks, on the same ports: the key tells their ranks apart.
port=$((port + 16))
rm -f out.* err.*
side_by_side() { # N RANK
    begin $((2 * $2 + $1)) RANK="$2" WORLD_SIZE="$1" LOCAL_RANK="$2" MASTER_ADDR=localhost MASTER_PORT=$port \
        TORCHELASTIC_RUN_ID="$1" TORCHELASTIC_USE_AGENT_STORE=True "$plain" collectives
}
side_by_side 2 0
sleep 0.3
side_by_side 3 1
side_by_side 3 2
sleep 0.3
side_by_side 3 0
side_by_side 2 1
finish
verdict 'two runs on the same ports' "$(statuses 0 0 0 0 0)"

if grep -q ' lo$' /proc/net/if_inet6 2>/dev/null; then
    port=$((port + 16))
    rm -f out.* err.*
    for r in 0 1; do begin $r "$plain" collectives -ps "[::1]:$port" -pn 2 -pr $r; done
    finish
    verdict 'IPv6' "$(statuses 0 0)"
else
    skip 'IPv6' 'this machine has no ::1'
fi

# Other connections: one that sends nothing, one of another protocol, and many that open and close.
start tcp 2 collectives --timeout 20 >/dev/null
kill -STOP "${began[1]}"
sleep 0.1
exec 7<>/dev/tcp/localhost/$port 8<>/dev/tcp/localhost/$port
printf 'GET / HTTP/1.1\r\n\r\n' >&8
for _ in {1..80}; do : <>/dev/tcp/localhost/$port; done 2>/dev/null
kill -CONT "${began[1]}"
finish
exec 7>&- 8>&-
verdict 'connections of other programs do no harm' "$(first "$(statuses 0 0)" "$(within 0 8000)")"

start env 4 disagree --rank 3
finish
verdict 'ranks that disagree' "$(first "$(statuses 2 2 2 2)" "$(lines "^error: ranks 0 and 3 disagree about settings: '--lr 0.0003' / '--lr 0.001'$" 0 1 2 3)")"

# ---------------------------------------------------------------------------------------------------------
# Wrong usage

wrong() { # NAME PATTERN [VAR=VALUE...] COMMAND...
    local name=$1 pattern=$2
    shift 2
    rm -f out.* err.*
    mark
    begin 0 "$@"
    finish
    verdict "$name" "$(first "$(statuses 2)" "$(lines "$pattern" 0)" "$(within 0 3000)")"
}
wrong 'WORLD_SIZE without RANK' 'WORLD_SIZE without RANK' WORLD_SIZE=2 "$plain" who
wrong 'RANK without WORLD_SIZE' 'RANK without WORLD_SIZE' RANK=0 "$plain" who
wrong 'RANK too large' 'RANK=2 is not below WORLD_SIZE=2' RANK=2 WORLD_SIZE=2 "$plain" who
wrong 'RANK no number' "RANK is '-1'" RANK=-1 WORLD_SIZE=2 "$plain" who
wrong 'no MASTER_ADDR' 'MASTER_ADDR' RANK=0 WORLD_SIZE=2 "$plain" who
wrong 'no MASTER_PORT' 'MASTER_PORT' RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost "$plain" who
wrong '-pr against RANK' 'pr 1: but' RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=$port "$plain" who -pr 1
wrong 'RANK against mpirun' 'choose with -pi' RANK=1 WORLD_SIZE=2 OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4 "$plain" who
wrong 'env without environment' 'pi env: the environment has neither' "$plain" who -pi env
wrong 'tcp without -ps' 'tcp needs the address' "$plain" who -pi tcp -pn 2 -pr 0
wrong 'tcp without -pn' 'pn is missing' "$plain" who -pi tcp -ps localhost
wrong 'tcp with a bad port' 'the port is not a number' "$plain" who -ps localhost:99999 -pn 2 -pr 0
wrong 'fs without -pf' 'pi fs needs the directory' "$plain" who -pi fs -pn 2 -pr 0
wrong 'fs with no directory' 'is not a directory' "$plain" who -pf nowhere -pn 2 -pr 0
wrong '-pr too large' 'pr 2 is not below -pn 2' "$plain" who -pf shared -pn 2 -pr 2
wrong '-pn alone' 'pr is missing' "$plain" who -pn 2
wrong 'mpirun without MPI' 'built without MPI' OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=4 "$plain" who
wrong 'mpi without MPI' 'built without MPI' "$plain" who -pi mpi

port=$((port + 16))
rm -f out.* err.*
for r in 0 1 2; do begin $r "$plain" who -ps localhost:$port -pn 3 -pr $((r < 2 ? r : 1)); done
finish
verdict 'two ranks 1' "$(first "$(statuses 2 2 2)" "$(lines 'two processes are rank 1 of 3' 0 1 2)")"
port=$((port + 16))
rm -f out.* err.*
for r in 0 1; do begin $r "$plain" who -ps localhost:$port -pn 2 -pr 0; sleep 0.2; done
finish
verdict 'two ranks 0' "$(first "$(statuses 2 2)" "$(lines 'two processes are rank 0 of 2' 0 1)")"
rm -f out.* err.*
for r in 0 1; do begin $r "$plain" who -pf shared -pn 3 -pr 0 --timeout 4; sleep 0.2; done
sleep 1.2
kill "${began[1]}"
kill -KILL "${began[1]}"
finish
verdict 'two ranks 0, fs' "$(first "$(statuses 2 137)" "$(lines 'was replaced: two processes are rank 0' 0)")"
port=$((port + 16))
rm -f out.* err.*
for r in 0 1; do begin $r "$plain" who -ps localhost:$port -pn $((3 - r)) -pr $r; done
finish
verdict 'two numbers of ranks' "$(first "$(statuses 2 2)" "$(lines 'disagree about their number: rank 0 .* expects 3, rank 1 .* 2' 0 1)")"

# All ranks that did start name the missing ones.
port=$((port + 16))
rm -f out.* err.*
mark
for r in 0 2; do begin $r "$plain" who -ps localhost:$port -pn 4 -pr $r --timeout 1; done
finish
verdict 'missing ranks' "$(first "$(statuses 1 1)" "$(lines "ranks 1 and 3 of 4 did not connect to rank 0 \(localhost port $port\) within 1 s" 0 2)" "$(within 1000 3500)")"
port=$((port + 16))
rm -f out.* err.*
begin 0 "$plain" who -ps localhost:$port -pn 2 -pr 1 --timeout 1
mkdir empty
begin 1 "$plain" who -pf empty -pn 2 -pr 1 --timeout 1
finish
verdict 'missing rank 0' "$(first "$(statuses 1 1)" "$(lines "rank 1 of 2: rank 0 (is missing: localhost port $port|has not written)" 0 1)")"

# ---------------------------------------------------------------------------------------------------------
# Losing a rank

for r in 2 0; do
    start env 4 crash --rank $r
    finish
    expected=(4 4 4 4) others=()
    expected[r]=137
    for other in 0 1 2 3; do [ $other = $r ] || others+=($other); done
    verdict "rank $r killed" "$(first "$(statuses "${expected[@]}")" "$(lines "^error: rank $r of 4 \(.*, process [0-9]+\) is gone: its connection broke; step [0-9]+$" "${others[@]}")" "$(within 300 2000)")"
    start fs 4 crash_wait --rank $r
    finish
    verdict "rank $r killed while others wait outside a collective" "$(first "$(statuses "${expected[@]}")" "$(lines "^error: rank $r of 4 .* is gone" "${others[@]}")" "$(within 300 2000)")"
    start tcp 4 die --rank $r
    finish
    expected[r]=1
    verdict "rank $r dies" "$(first "$(statuses "${expected[@]}")" "$(lines "^error: rank $r of 4 .* ended with an error \(exit status 1\)" "${others[@]}")" "$(lines 'an error of one rank' $r)" "$(within 300 2500)")"
done
start env 4 die_all
finish
verdict 'all end with the same error' "$(first "$(statuses 2 2 2 2)" "$(lines '^error: the same on all ranks$' 0 1 2 3)")"

# The slow cases run at the same time, each in its own folder.
side=()
aside() { # NAME FUNCTION
    side+=("$1")
    mkdir "side.${#side[@]}"
    (
        cd "side.${#side[@]}" && mkdir shared && port=$((port + 500 * ${#side[@]})) && began=()
        "$2" >why
    ) &
}
stopped() { # RANK
    local others=() expected=(4 4 4 4) other
    start env 4 steps --seconds 30 --timeout 5
    have_begun 0
    mark
    kill -STOP "${began[$1]}"
    for other in 0 1 2 3; do
        [ "$other" != "$1" ] || continue
        others+=("$other")
        wait "${began[other]}"
        status[other]=$?
    done
    took=$(since)
    kill -CONT "${began[$1]}"
    wait "${began[$1]}"
    status[$1]=$?
    began=()
    # When it continues, it reads the verdict.
    first "$(statuses "${expected[@]}")" "$(lines "^error: rank $1 of 4 .* has not answered for 5 s; step [0-9]+$" 0 1 2 3)" "$(within 3900 8000)"
}
stopped_0() { stopped 0; }
stopped_2() { stopped 2; }
stopped_briefly() {
    start env 4 steps --seconds 5 --timeout 3
    have_begun 0
    kill -STOP "${began[0]}" "${began[1]}"
    sleep 1.5
    kill -CONT "${began[0]}" "${began[1]}"
    finish
    statuses 0 0 0 0
}
all_stopped() {
    start env 4 steps --seconds 8 --timeout 3
    have_begun 0
    kill -STOP "${began[@]}"
    sleep 4.5
    kill -CONT "${began[@]}"
    finish
    statuses 0 0 0 0
}
hangs() {
    start env 4 hang --rank "$1" --seconds 40 --timeout 3
    finish
    first "$(statuses 4 4 4 4)" "$(lines "^error: rank $1 of 4 .* hangs at step [0-9]+: the others have waited 3 s for it$" 0 1 2 3)" "$(within 3000 6500)"
}
hangs_0() { hangs 0; }
hangs_3() { hangs 3; }
busy() {
    start env 2 busy --rank 1 --seconds 5 --timeout 2
    finish
    statuses 0 0
}
reads() {
    # The script writes the file: a rank that waits for a busy disk shows no progress.
    local header='{"x":{"dtype":"F32","shape":[1000],"data_offsets":[0,4000]}}'
    { printf "\\$(printf %o ${#header})\0\0\0\0\0\0\0%s" "$header"; head -c 4000 /dev/zero; } >values.safetensors
    start env 2 reads --rank 1 --seconds 5 --timeout 2
    finish
    statuses 0 0
}
behind() {
    start env 3 behind --rank 2 --timeout 2
    finish
    first "$(statuses 4 4 4)" "$(lines '^error: rank 2 of 3 .* hangs at step' 0 1 2)"
}
nobody() {
    start env 3 behind --rank 7 --timeout 2
    finish
    first "$(statuses 4 4 4)" "$(lines '^error: no rank makes progress at step [0-9]+: all 3 have waited 2 s for each other' 0 1 2)"
}
apart() {
    start env 3 apart --rank "$1" --seconds 2
    finish
    first "$(statuses 0 0 0)" "$(cat err.*)" "$(within 2000 6000)"
}
apart_0() { apart 0; }
apart_2() { apart 2; }
leaves() {
    start env 3 leave --rank 2 --timeout 2
    finish
    first "$(statuses 4 4 0)" "$(lines '^error: rank 2 of 3 .* has ended at step' 0 1)"
}
overloaded() {
    start env 4 spin --seconds 12 --timeout 10
    finish
    first "$(statuses 0 0 0 0)" "$(cat err.*)"
}
aside 'rank 0 stopped' stopped_0
aside 'rank 2 stopped' stopped_2
aside 'stopped for less than the timeout' stopped_briefly
aside 'all stopped, for longer than the timeout' all_stopped
aside 'rank 0 hangs' hangs_0
aside 'rank 3 hangs' hangs_3
aside 'a rank is at work for longer than the timeout' busy
aside 'a rank reads a file for longer than the timeout' reads
aside 'one rank waits in another collective' behind
aside 'all wait for each other' nobody
aside 'rank 0 ends later' apart_0
aside 'rank 2 ends later' apart_2
aside 'a rank leaves early' leaves
aside 'more work than cores' overloaded
wait
side_names=("${side[@]}")
for i in "${!side_names[@]}"; do verdict "${side_names[i]}" "$(cat "side.$((i + 1))/why" 2>&1)"; done

# ---------------------------------------------------------------------------------------------------------
# Two machines are disconnected

a=llmc$$a b=llmc$$b
if ! ip netns add $a 2>/dev/null; then
    skip 'a cable is cut' 'no network namespaces here: ip netns add needs root'
else
    spaces=($a $b)
    ip netns add $b && ip link add v0 netns $a type veth peer name v1 netns $b &&
        ip -n $a addr add 10.77.0.1/24 dev v0 && ip -n $b addr add 10.77.0.2/24 dev v1 &&
        ip -n $a link set lo up && ip -n $b link set lo up && ip -n $a link set v0 up && ip -n $b link set v1 up
    rm -f out.* err.*
    for r in 0 1 2; do
        [ $r = 2 ] && space=$b || space=$a
        at=(ip netns exec $space "$plain" steps --seconds 30 --timeout 3)
        begin $r "${at[@]}" -ps 10.77.0.1:$port -pn 3 -pr $r
        begin $((r + 3)) RANK=$r WORLD_SIZE=3 MASTER_ADDR=10.77.0.1 MASTER_PORT=$((port + 1)) "${at[@]}"
        begin $((r + 6)) "${at[@]}" -pf shared -pn 3 -pr $r
    done
    have_begun 0 3 6
    mark
    ip -n $b link set v1 down
    finish
    # In this order: tcp, env, fs; of each, two ranks on one machine and one on the other.
    verdict 'a cable is cut' "$(first "$(statuses 4 4 4 4 4 4 4 4 4)" "$(lines '^error: rank 2 of 3 .* has not answered for 3 s; step [0-9]+$' 0 1 3 4 6 7)" \
        "$(lines '^error: rank 0 of 3 .* has not answered for 3 s; step [0-9]+$' 2 5 8)" "$(within 1900 6000)")"
fi

# ---------------------------------------------------------------------------------------------------------
# MPI

if [ -z "$mpi" ]; then
    skip 'mpirun' 'no build with MPI was given'
elif ! command -v mpirun >/dev/null; then
    skip 'mpirun' 'mpirun was not found'
else
    # Each rank runs under a shell that records its exit status and stderr.
    cat >rank.sh <<'END'
r=$OMPI_COMM_WORLD_RANK
trap '' TERM
"$@" 2>err.$r &
wait $!
echo $? >status.$r
exit "$(cat status.$r)"
END
    start_mpi() { # N FLAG...
        local n=$1 r
        shift
        rm -f out.* err.* status.*
        mark
        # Leave the shells time to record the exit statuses.
        timeout 60 mpirun --oversubscribe --mca odls_base_sigkill_timeout 2 -np "$n" bash rank.sh "$mpi" "$@" >out.mpi 2>mpirun.err </dev/null
        took=$(since)
        status=()
        for ((r = 0; r < n; r++)); do status[r]=$(cat status.$r 2>/dev/null || echo none); done
    }
    "$mpi" collectives >out.0 2>err.0
    verdict 'a build with MPI, one rank' "$([ "$(tail -n 1 out.0)" = '1 ranks: 20 passed, 0 failed' ] || cat out.0 err.0)"
    for n in 1 2 4; do
        start_mpi $n collectives
        verdict "mpirun, $n ranks" "$(first "$(statuses $(yes 0 | head -n $n))" "$(grep -q "^$n ranks: $((n == 1 ? 20 : 24 * n)) passed, 0 failed" out.mpi || cat out.mpi)")"
    done
    start_mpi 2 who -pi mpi
    verdict 'mpirun, local ranks' "$([ "$(sort out.mpi | tr '\n' ';')" = 'rank 0 of 2, local 0 of 2;rank 1 of 2, local 1 of 2;' ] || cat out.mpi)"
    start_mpi 3 disagree --rank 1
    verdict 'mpirun, ranks that disagree' "$(first "$(statuses 2 2 2)" "$(lines "^error: ranks 0 and 1 disagree about settings: '--lr 0.0003' / '--lr 0.001'$" 0 1 2)")"
    start_mpi 3 apart --rank 2 --seconds 2
    verdict 'mpirun, a rank ends later' "$(first "$(statuses 0 0 0)" "$(cat err.*)")"
    for r in 0 2; do
        start_mpi 4 crash --rank $r
        expected=(4 4 4 4) others=()
        expected[r]=137
        for other in 0 1 2 3; do [ $other = $r ] || others+=($other); done
        verdict "mpirun, rank $r killed" "$(first "$(statuses "${expected[@]}")" "$(lines "^error: rank $r of 4 .* is gone: its connection broke" "${others[@]}")" "$(within 300 9000)")"
    done
    start_mpi 2 hang --rank 1 --seconds 40 --timeout 2
    verdict 'mpirun, a rank hangs' "$(first "$(statuses 4 4)" "$(lines '^error: rank 1 of 2 .* hangs at step' 0 1)")"
fi

printf '%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
[ "$failed" -eq 0 ]
