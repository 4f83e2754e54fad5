#!/bin/bash
# A run on one or several nodes of a SLURM cluster, in one process per GPU (or PROCESSES=2 sbatch ...: so many per node):
#
#   sbatch scripts/launch/slurm.sh CONFIG.yaml key=value ... --out FOLDER
#   sbatch --nodes=2 --gpus-per-node=4 scripts/launch/slurm.sh CONFIG.yaml --out FOLDER
#
# FOLDER, data, base and this clone lie on a disk that all nodes see. A job that is preempted or whose node fails is put
# into the queue again and continues, as the same command does. docs/machines.md explains the rest.
#SBATCH --job-name=llm-fed
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
set -euo pipefail

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" # compute nodes mostly have no network; the base was downloaded before
processes="${PROCESSES:-${SLURM_GPUS_ON_NODE:-1}}"
if [ "$processes" = 1 ] && [ "${SLURM_JOB_NUM_NODES:-1}" = 1 ]; then
  exec srun llm-fed run "$@"
fi
# One launcher per node. They meet at the first one, on a port that two jobs of one node do not share.
export MASTER_ADDR MASTER_PORT="$((20000 + SLURM_JOB_ID % 20000))" PROCESSES="$processes"
MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)"
exec srun bash -c 'exec torchrun --nnodes "$SLURM_JOB_NUM_NODES" --node_rank "$SLURM_NODEID" \
  --nproc_per_node "$PROCESSES" --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" \
  -m llm_fed.cli run "$@"' slurm.sh "$@"
