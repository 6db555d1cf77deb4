#!/usr/bin/env bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@180
# Start any of these runs under Slurm: one task per GPU.
#
#     sbatch scripts/run_slurm.sh ./train_gpt2cu -i 'data/web/train_*.bin' -e d12 -b 64 -d 524288 -o out/run ...
#
# Needs: the repository on a file system that all nodes see, with the trainer built for their GPUs; Slurm with PMIx. The
# lines above are for two nodes of eight GPUs. Three minutes before the time limit the run saves and ends; submitted again,
# it resumes.
# Not run on a cluster yet.
set -eu
cd "${SLURM_SUBMIT_DIR:-.}"
trainer=${1:?"name the trainer and its flags"}
shift
out=out flags=("$@")
for ((i = 0; i < $#; i++)); do [[ ! ${flags[i]} =~ ^(-o|--output)$ ]] || out=${flags[i + 1]}; done
# A run that ended before its first checkpoint starts again.
if compgen -G "$out/ckpt/*[0-9]" >/dev/null; then exec srun --mpi=pmix -K "$trainer" -y 1 -o "$out"; fi
exec srun --mpi=pmix -K "$trainer" "$@"
