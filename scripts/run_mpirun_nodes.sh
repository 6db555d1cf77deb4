#!/usr/bin/env bash
# Start any of these runs on several machines with mpirun, which reaches them by ssh.
#
#     HOSTS=node1:8,node2:8 TRAINER=./train_gpt2cu bash scripts/run_mpirun_nodes.sh -i 'data/web/train_*.bin' -e d12 ...
#
# Needs: the same folder at the same path on all machines (a shared file system), with the trainer built for their GPUs;
# ssh from here to each without a password; the same Open MPI on all. HOSTS: machines with their numbers of GPUs.
# IFACE: the network interface that all machines share, if they have several networks.
# Not run on several machines yet; for one machine see dev/BENCH.md, "Several GPUs".
set -eu
cd "$(dirname "$0")/.."
HOSTS=${HOSTS:?"name the machines and their GPUs: HOSTS=node1:8,node2:8"} TRAINER=${TRAINER:-./train_gpt2cu}
RANKS=$(tr ',' '\n' <<<"$HOSTS" | sed 's/.*://' | paste -sd+ | bc)
network=()
[ -z "${IFACE:-}" ] || network=(--mca btl_tcp_if_include "$IFACE" -x NCCL_SOCKET_IFNAME="$IFACE")
exec mpirun -np "$RANKS" --host "$HOSTS" --bind-to none "${network[@]}" "$TRAINER" "$@"
