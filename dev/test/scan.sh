#!/usr/bin/env bash
# A signal ends a scan of the data. dev/test/refuse.txt has what else scans do.
#
#     bash dev/test/scan.sh GPT2          the trainer, from the repository's root
#
# Ends with `N passed, N failed, N skipped`; exit status 1 if one failed.
set -u
PROGRAM=${1:-}
. "$(dirname "$0")/shell.sh"

# A scan of 20 GB, without a block on the disk, that is stopped while it reads: /proc says when SIGTERM is not caught.
mkdir "$work/large"
{ little_endian 4 20240520; little_endian 4 1; little_endian 4 50000000; } >"$work/large/train_0.bin"
truncate -s $((1024 + 2 * 50000000)) "$work/large/train_0.bin"
for ((i = 1; i < 200; i++)); do ln "$work/large/train_0.bin" "$work/large/train_$i.bin"; done
"$PROGRAM" -e L=1,C=16,NH=2,T=16 -b 2 -x 2 -v 0 -s 0 -n 0 -i "$work/large/train_*.bin" -o "$work/stopped" </dev/null \
    >"$work/stdout" 2>"$work/stderr" &
pid=$!
is_scanning() {
    local caught
    # The data first: once it is open, the handlers of the start are in place.
    ls -l /proc/$pid/fd 2>/dev/null | grep -q large/train_ || return
    caught=$(sed -n 's/^SigCgt:[[:space:]]*/0x/p' /proc/$pid/status 2>/dev/null)
    [ -n "$caught" ] && ! ((caught & 1 << 14))
}
until is_scanning || ! kill -0 $pid 2>/dev/null; do sleep 0.01; done
kill -TERM $pid 2>/dev/null
{ wait $pid; status=$?; } 2>/dev/null
verdict 'a signal ends a scan' "$(ended_with 143)$([ ! -e "$work/stopped" ] || echo 'something was written')"
finish
