#!/bin/bash
#SBATCH --job-name=fullbatch
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
# SIGTERM two minutes before the end saves a checkpoint; a job that is requeued, or submitted again, continues.
# The run folder must lie where all nodes see it.
set -euo pipefail

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --max-restarts 3 \
  --rdzv-backend c10d --rdzv-endpoint "$head_node:29500" --rdzv-id "$SLURM_JOB_ID" \
  -m fullbatch train --data 'shards/{00000..00331}.tar' --model ViT-B-32 --batch-size 32768 --precision bf16 --compile \
  --workers 10 --runs runs --name vit-b-32 --resume auto
