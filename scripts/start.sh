# Shared by the scripts that run on all GPUs of a machine. Each sources it with its own flags in "$@".
cd "$(dirname "${BASH_SOURCE[0]}")/.."
RANKS=${RANKS:-$(nvidia-smi -L | wc -l)} DATA=${DATA:?"name the files to train on: DATA='folder/train_*.bin'"} more=("$@")

# Build the trainers and start RANKS processes of one. If OUT holds a checkpoint, the run resumes with the settings stored
# there; a run that ended before its first checkpoint starts again.
start() { # PROGRAM FLAG...
    local launch=()
    make -s gpu
    [ "$RANKS" -eq 1 ] || launch=(mpirun -np "$RANKS" --bind-to none)
    if compgen -G "$OUT/ckpt/*[0-9]" >/dev/null; then exec "${launch[@]}" "$1" -y 1 -o "$OUT" "${more[@]}"; fi
    exec "${launch[@]}" "$@" -i "$DATA" -o "$OUT" "${more[@]}"
}
