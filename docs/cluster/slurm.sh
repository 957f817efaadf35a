#!/bin/bash
# Run a recipe on the nodes of a Slurm job: Ray is started on each, `etude run` on the first. Not run on a Slurm cluster yet.
#
#   sbatch docs/cluster/slurm.sh recipes/own.toml /shared/runs/own
#
# The environment with etude[ray] and the run directory are on storage that all nodes share.
#SBATCH --job-name=etude
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@60
set -euo pipefail

recipe=$1 out=$2
export OMP_WAIT_POLICY=PASSIVE
export RAY_raylet_start_wait_time_s=120
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}'):6379

# symmetric-run starts Ray on every node, waits for all of them, runs the command on the node with the address, and stops Ray.
exec srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" \
    ray symmetric-run --address "$address" --min-nodes "$SLURM_NNODES" -- \
    etude run "$recipe" --out "$out" --cluster ray --resume
