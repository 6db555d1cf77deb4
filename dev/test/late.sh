#!/bin/bash
# A trainer waits for the other ranks' data before it uses them: a build whose collectives do nothing until they are
# waited for (late.h) trains to the same bits.
#
#     bash dev/test/late.sh PROGRAM LATE   from the repository's root; needs mpirun
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
[ -x "${2:-}" ] || { echo "usage: bash $0 PROGRAM LATE (a trainer and its late build, from the repository's root)" >&2; exit 2; }
PROGRAM=$1 late=$(realpath "$2")
. "$(dirname "$0")/shell.sh"
prepare_ranks || { skip late "$why"; finish; exit; }

launch() { # PROGRAM FLAG...
    timeout --foreground 120 mpirun --oversubscribe --bind-to none -np 2 "$@" </dev/null >"$work/stdout" 2>"$work/stderr"
    status=$?
}
# Checkpoints are reported when they are written, between any two steps.
numbers() { grep -oE '"(loss|val_loss|grad_norm)": [^,}]+' "$1/log.jsonl"; grep -oE '"weights_hash": [^,}]+' "$1/log.jsonl"; }

# All ranks do the same, as late.h demands: no samples, and as many validation batches on each. Buckets of a layer, of two or
# of all; validations and checkpoints come between steps, micro-batches within them.
common="-e L=4,C=16,NH=2,T=16 -t 16 -b 2 -d 128 -x 8 --dropout 0.1 -l 1e-2 -v 3 -m 2 -s 0 -n 2 -nk 0"
for way in "-z 0 --bucket 0" "-z 1 --bucket 0" "-z 1 --bucket 0 --optimizer lamb" "-z 1 --bucket 0.02" "-z 1 --bucket 1"; do
    launch "$PROGRAM" $common $way -o now --overwrite 1
    why=$(ended_with 0)
    launch "$late" $common $way -o late --overwrite 1
    why=${why:-$(ended_with 0)}
    [ "$(numbers now | grep -c .)" -ge 16 ] || why=${why:-'the log has no numbers'}
    cmp -s <(numbers now) <(numbers late) || why=${why:-"other numbers: $(diff <(numbers now) <(numbers late) | sed -n 2p), and $(diff <(numbers now) <(numbers late) | grep -c '^<') in all"}
    cmp -s now/model.safetensors late/model.safetensors || why=${why:-'other weights'}
    verdict "2 ranks, $way: waited for" "$why"
done
finish
