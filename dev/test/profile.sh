#!/bin/bash
# A trainer with --profile: what it writes. dev/test/equal.txt has that it changes no bit of a run, refuse.txt the rest.
#
#     bash dev/test/profile.sh PROGRAM          from the repository's root; with mpirun also on two ranks
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"

model="-e L=2,C=16,NH=2,T=16 -b 2 -d 64 --dropout 0.1 -l 1e-2 -v 0 -s 0"

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

run $model -x 9 --profile 2 -o whole
why=$(ended_with 0)$(wrong whole/profile backward forward optimizer)
why+=$(says "$work/stdout" '^By op$')$(says "$work/stdout" '^whole profile: whole/profile/profile.txt')
why+=$(says whole/profile/profile.txt '^step +(8|9), the median of 8 to 9 by time, after 5 warm-up and 2 plain steps$')
command="$PROGRAM $model -x 9 --profile 2 -o whole"
[ "$(head -n 1 whole/profile/profile.txt)" = "$command" ] || why+='the command is another'
verdict 'files and the printed report' "$why"

prepare_ranks || { skip 'two ranks' "$why"; finish; exit; }
timeout --foreground 180 mpirun --oversubscribe --bind-to none -np 2 "$PROGRAM" $model -x 9 --profile 1 -o two \
    </dev/null >"$work/stdout" 2>"$work/stderr"
status=$?
why=$(ended_with 0)$(says "$work/stdout" '^slowest +rank [01]')
[ "$(grep -c '^By op$' "$work/stdout")" = 1 ] || why+='not printed once'
for rank in 0 1; do
    why+=$(wrong two/profile/rank_$rank backward communication forward optimizer)
    why+=$(says two/profile/rank_$rank/profile.txt 'The slowest is rank [01], [0-9.]+ % slower than rank')
    why+=$(says two/profile/rank_$rank/profile.txt '^overlap +[0-9.]+ % of')
done
table() { sed -n '/^The ranks$/,/^$/p' "two/profile/rank_$1/profile.txt"; }
[ "$(table 0)" = "$(table 1)" ] || why+='the ranks report different steps'
verdict 'two ranks: a profile of each, rank 0 prints, the table of ranks names the slowest' "$why"
finish
