#!/usr/bin/env bash
# What must happen at a moment: a tokenizer's directory is renamed during a run, whose checkpoints have it all the same;
# a signal ends a scan of the data. dev/test/equal.txt and dev/test/refuse.txt have what else tokenizers and scans do.
#
#     bash dev/test/tokenizer_files.sh GPT2          the trainer, from the repository's root
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"
SMALL=(-e L=1,C=16,NH=2,T=16 -b 2 -v 0 -s 0 -n 0)

start() { # FLAG...
    "$PROGRAM" "$@" </dev/null >"$work/stdout" 2>"$work/stderr" &
    pid=$!
}
stop() {
    kill -TERM $pid 2>/dev/null
    { wait $pid; status=$?; } 2>/dev/null
}

# Its only checkpoint comes at its end.
mv data/builtin "$work/texts"
start "${SMALL[@]}" -i "$work/texts/train.bin" -x 1000000 -o "$work/out"
until grep -q '"step": 1,' "$work/out/log.jsonl" 2>/dev/null || ! kill -0 $pid 2>/dev/null; do sleep 0.02; done
mv "$work/texts" data/builtin
stop
why=$(ended_with 0)
for file in vocab.json merges.txt tokenizer.json tokenizer_config.json; do
    cmp -s "$work"/out/ckpt/*/$file data/builtin/$file || why=${why:-"the checkpoint has another $file, or none"}
done
verdict 'the directory of the tokenizer is renamed during the run' "$why"

# A scan of 20 GB, without a block on the disk, that is stopped while it reads: /proc says when SIGTERM is not caught.
mkdir "$work/large"
{ little_endian 4 20240520; little_endian 4 1; little_endian 4 50000000; } >"$work/large/train_0.bin"
truncate -s $((1024 + 2 * 50000000)) "$work/large/train_0.bin"
for ((i = 1; i < 200; i++)); do ln "$work/large/train_0.bin" "$work/large/train_$i.bin"; done
start "${SMALL[@]}" -i "$work/large/train_*.bin" -x 2 -o "$work/stopped"
is_scanning() {
    local caught
    # The data first: once it is open, the handlers of the start are in place.
    ls -l /proc/$pid/fd 2>/dev/null | grep -q large/train_ || return
    caught=$(sed -n 's/^SigCgt:[[:space:]]*/0x/p' /proc/$pid/status 2>/dev/null)
    [ -n "$caught" ] && ! ((caught & 1 << 14))
}
until is_scanning || ! kill -0 $pid 2>/dev/null; do sleep 0.01; done
stop
verdict 'a signal ends a scan' "$(ended_with 143)$([ ! -e "$work/stopped" ] || echo 'something was written')"
finish
