#!/bin/bash
# A trainer with --profile: what it writes and what it refuses. dev/test/equal.txt has that it changes no bit of a run.
#
#     bash dev/test/profile.sh PROGRAM          from the repository's root; with mpirun also on two ranks
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"

# Quickstart's model for sums of times (smaller under a sanitizer); a smaller one for the rest.
model="-e L=4,C=128,NH=4,T=64 -b 8 -v 0 -s 0 -n 0"
is_sanitized && model="-e L=4,C=64,NH=2,T=32 -b 4 -v 0 -s 0 -n 0"
small="-e L=2,C=16,NH=2,T=16 -b 2 -d 64 --dropout 0.1 -l 1e-2 -v 0 -s 0"

# A number of the step.
number() { # DIRECTORY NAME
    tr -d '\r' <"$1/summary.csv" | sed -n "s/^number,$2,//p"
}

# What is wrong with the files of a profile, and with the directions of its rows, which are sorted.
wrong() { # DIRECTORY DIRECTION...
    local found
    found=$(cd "$1" && find . -type f -size +0 | sort | tr '\n' ' ')
    [ "$found" = './kernels.csv ./profile.html ./profile.txt ./summary.csv ' ] || echo "$1 has $found"
    found="$(number "$1" unattributed) $(number "$1" dropped) "
    found+=$(tr -d '\r' <"$1/kernels.csv" | sed 1d | cut -d, -f2 | sort -u | tr '\n' ' ')
    [ "$found" = "0 0 ${*:2} " ] || echo "$1: rows without an op, that were dropped, and directions: $found"
}

# Print a message if FILE does not match PATTERN.
says() { # FILE PATTERN
    grep -Eq -- "$2" "$1" || echo "${1#"$work"/} does not say '$2'"
}

# ---------------------------------------------------------------------------------------------------------
# The report

# A busy machine may interrupt the program between two ops or in any step; hence five attempts.
attempts() { # NAME COMMAND FLAG...: COMMAND says why a run was not as it should be
    local attempt why='no attempt'
    for ((attempt = 0; attempt < 5 && ${#why} > 0; attempt++)); do
        run "${@:3}" --overwrite 1
        why=$(ended_with 0)
        [ -z "$why" ] || break
        why=$($2)
    done
    verdict "$1" "$why"
}
adds_up() {
    awk -v rows="$(number whole/profile kernels_ms)" -v step="$(number whole/profile profiled_ms)" \
        'BEGIN {d = step > 0 ? rows / step - 1 : 1; if (d * d > 0.0009) print "the rows take " rows " ms of " step}'
}
attempts 'the rows add up to the step, within 3 %' adds_up $model -x 9 --profile 2 -o whole
verdict 'files and rows' "$(wrong whole/profile backward forward optimizer)"
why=$(says "$work/stdout" '^By op$')$(says "$work/stdout" '^whole profile: whole/profile/profile.txt')
why+=$(says whole/profile/profile.txt '^step +(8|9), the median of 8 to 9 by time, after 5 warm-up and 2 plain steps$')
[ "$(head -n 1 whole/profile/profile.txt)" = "$PROGRAM $model -x 9 --profile 2 -o whole --overwrite 1" ] || why+='the command is another'
verdict 'the printed report' "$why"
python3 "$root/dev/reference/check_profile.py" whole/profile >check.out 2>&1 || true
verdict 'check_profile.py reads it' "$(says "$PWD/check.out" '^RESULT .*rows_and_gaps_ms=[0-9.]+ profiled_ms=')"

# On a GPU: a step that is captured as graphs computes the same. What is measured after the save is not waited for.
case $PROGRAM in *cu)
    run $small -x 12 -o plain
    timeout -s KILL 20 "$PROGRAM" $small -x 12 --profile 3 --profile-energy 1 -o captured >captured.out 2>&1
    cmp -s plain/model.safetensors captured/model.safetensors && why= || why="model.safetensors differs: $(tail -n 1 captured.out)"
    verdict '--profile-energy: the same bits' "$why" ;;
esac

# Check that the profiled step 7 and step 8 take less than so many milliseconds, or so many plain steps.
took() { # OUT MOST TIMES
    sed -nE 's/.*"step": ([0-9]+).*"ms": ([0-9.]+).*/\1 \2/p' "$1/log.jsonl" | awk -v most="$2" -v times="$3" '
        $1 == 6 {plain = $2}
        $1 == 7 || $1 == 8 {n++; if ($2 > most && $2 > times * plain) print "step " $1 " took " $2 " ms, a plain one " plain}
        END {if (n != 2) print "no times in log.jsonl"}'
}
# Writing the report takes as long as many such steps.
attempts 'no step in log.jsonl includes the report' 'took after 0 8' $small -x 9 --profile 1 -o after

for mode in forward backward; do
    directions=forward named='forward$'
    [ $mode = forward ] || directions='backward forward' named='forward and backward$'
    run $small -x 9 --profile 2 --mode $mode -m 3 -o "mode_$mode"
    why=$(ended_with 0)$(wrong "mode_$mode/profile" $directions)$(says "mode_$mode/profile/profile.txt" "^mode +$named")
    ! find "mode_$mode" -name '*.safetensors' | grep -q . || why+='a checkpoint was written'
    verdict "--mode $mode: neither an optimizer's rows nor a checkpoint" "$why"
done

# ---------------------------------------------------------------------------------------------------------
# Ways to end

run $small -x 3 --profile 1 --profile-warmup 1 -o ''
why=$(ended_with 0)$(says "$work/stdout" '^By op$')
! grep -q 'whole profile' "$work/stdout" || why+='files are named'
verdict "-o '': printed, no files" "$why"
# A run that gets SIGTERM when step N is logged.
terminated() { # N FLAG...
    "$PROGRAM" "${@:2}" </dev/null >"$work/stdout" 2>"$work/stderr" &
    local pid=$!
    until grep -q "^{\"step\": $1, " "${@: -1}/log.jsonl" 2>/dev/null || ! kill -0 $pid 2>/dev/null; do sleep 0.01; done
    kill -TERM $pid
    wait $pid
    status=$?
}
terminated 63 $model -x 400 --profile 60 --profile-warmup 0 -o cut
taken=$(sed -nE 's/^the run was stopped after ([0-9]+) of 60 profiled steps: the profile is of these$/\1/p' "$work/stdout")
last=$((60 + ${taken:-0}))
why=$(ended_with 0)$(wrong cut/profile backward forward optimizer)
why+=$(says "$work/stdout" "^stopped by signal 15 after step $last, saved\$")
why+=$(says cut/profile/profile.txt "^step .* the median of 61 to $last by time, .* was stopped before the rest\$")
verdict 'a signal between profiled steps: a profile of those' "$why"

refused 'too few steps until --stop-after' 2 '--profile 2 needs 9 steps .*5 are left' $small -x 20 --stop-after 5 --profile 2 -o "$box/new"
energy='-e L=2,C=16,NH=2,T=16 -b 2 -s 0 --profile-energy 1'
refused '--profile-energy without --profile' 2 '--profile-energy 1: needs --profile' $energy -v 0 -x 8 -o "$box/new"
refused '--profile-energy with steps after its own' 2 '10 steps, but 11 are left' $energy -v 0 -x 11 --profile 2 -o "$box/new"
refused '--profile-energy with validations' 2 '--profile-energy 1 needs -v 0' $energy -v 5 -x 10 --profile 2 -o "$box/new"
refused '--mode without --profile' 2 '--mode .*--profile' $small -x 8 --mode forward -o "$box/new"

# ---------------------------------------------------------------------------------------------------------
# Ranks

prepare_ranks || { skip 'two ranks' "$why"; finish; exit; }
# Rank 1 waits four seconds while it flushes its report.
"${CC:-gcc}" -shared -fPIC -x c -o slow.so - <<'EOP'
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
int fsync(int fd) {
    char link[64], path[4096] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (readlink(link, path, sizeof path - 1) > 0 && strstr(path, "/rank_1/profile.txt")) sleep(4);
    return (int)syscall(SYS_fsync, fd);
}
EOP
ranks() { # FLAG...
    LD_PRELOAD=$PWD/slow.so ASAN_OPTIONS=verify_asan_link_order=0 timeout --foreground 180 mpirun --oversubscribe \
        --bind-to none -np 2 "$PROGRAM" "$@" </dev/null >"$work/stdout" 2>"$work/stderr"
    status=$?
}
began=$SECONDS
ranks $small -x 9 --profile 1 -o two
[ $((SECONDS - began)) -ge 4 ] && why= || why='rank 1 did not wait'
verdict 'two ranks: no step includes a report that takes seconds' "$why$(ended_with 0)$(took two 1000 8)"
why=$(says "$work/stdout" '^slowest +rank [01]')
[ "$(grep -c '^By op$' "$work/stdout")" = 1 ] || why+='not printed once'
for rank in 0 1; do
    why+=$(wrong two/profile/rank_$rank backward communication forward optimizer)
    for pattern in "^rank +$rank of 2\$" 'The slowest is rank [01], [0-9.]+ % slower than rank [01]\.$' \
        '^slowest +rank [01] with [0-9.]+ ms of its own work' '^overlap +[0-9.]+ % of'; do
        why+=$(says two/profile/rank_$rank/profile.txt "$pattern")
    done
done
table() { sed -n '/^The ranks$/,/^$/p' "two/profile/rank_$1/profile.txt"; }
[ "$(table 0)" = "$(table 1)" ] || why+='the ranks report different steps'
verdict 'two ranks: a profile of each, rank 0 prints, the table of ranks names the slowest' "$why"
ranks $small -x 3 --profile 1 --profile-warmup 1 --mode backward -z 1 -o both
verdict 'two ranks: --mode backward' "$(ended_with 0)$(wrong both/profile/rank_1 backward communication forward)"
finish
