#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4  # processes, one a GPU
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G            # of each node
#SBATCH --time=01:00:00      # the job is ended then
#SBATCH --no-requeue         # or it starts over when a node fails
# EDIT: add the #SBATCH lines your cluster asks for: --account, --partition, a GPU's type.
# EDIT: where cifar-10-python.tar.gz is. Where it is empty, main.py downloads it.
export CIFAR10_ARCHIVE=${CIFAR10_ARCHIVE:-}

# sbatch passes on the variables of its shell, and srun obeys them. If that shell is in
# another job, they are about that one. A step has all of its own job without being told.
forget_other_jobs() {
    unset "${!SRUN_@}" "${!SLURM_GPU@}" "${!SLURM_MEM_PER_@}" "${!SLURM_TRES_@}"
    [[ ${SLURM_CPU_BIND:-} != *mask_cpu:* ]] || unset SLURM_CPU_BIND
    [[ ${SLURM_TMPDIR:-} != /tmp/slurm-job-* ]] || unset SLURM_TMPDIR MASTER_PORT
    [[ $(scontrol show job "$SLURM_JOB_ID") == *ArrayJobId=* ]] || unset "${!SLURM_ARRAY_@}"
    export SLURM_EXPORT_ENV=ALL
}
set -euo pipefail
fail() {
    echo "job.sh: error: $*" >&2
    exit 1
}
echo "Job ${SLURM_JOB_ID:?use sbatch} on $SLURM_JOB_NODELIST, $(date)"
forget_other_jobs
[ "$SLURM_JOB_NUM_NODES" = 1 ] || fail "several nodes: use multi_node"

# The data goes to the node's own disk: to a folder of the cluster's, or to one that this
# script makes and removes. After scancel or the time limit, it may stay.
if [ -z "${SLURM_TMPDIR:-}" ]; then
    export SLURM_TMPDIR=/tmp/slurm-job-$SLURM_JOB_ID
    trap 'rm -rf "$SLURM_TMPDIR"' EXIT
fi
stage() {
    # mkdir fails where another user has made that folder.
    [[ $SLURM_TMPDIR != /tmp/slurm-job-* ]] || mkdir "$SLURM_TMPDIR"
    mkdir -p "$SLURM_TMPDIR/data"
    [ -z "$CIFAR10_ARCHIVE" ] || tar -xf "$CIFAR10_ARCHIVE" -C "$SLURM_TMPDIR/data" ||
        fail "cannot unpack CIFAR10_ARCHIVE=$CIFAR10_ARCHIVE on $(hostname)"
}
stage

# The ranks meet at rank 0. Jobs may share a node: the port follows the job.
MASTER_ADDR=127.0.0.1
MASTER_PORT=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}
export MASTER_ADDR MASTER_PORT

# Once, here: tasks that all do this at the same time get in each other's way.
uv sync --locked --inexact --quiet
# Slurm 22.05 and 23.02 give a task one CPU unless SRUN_CPUS_PER_TASK is set.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:?give the job --cpus-per-task}
# PYTHONFAULTHANDLER: a crash prints where Python was.
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK PYTHONFAULTHANDLER=1
# INFO, for either, tells more when ranks cannot meet.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN} TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
# PyTorch 2.15's new way to NCCL lets backward() wait for each all-reduce.
export TORCH_DIST_USE_NCCL2=${TORCH_DIST_USE_NCCL2:-0}
TMPDIR=$SLURM_TMPDIR srun --kill-on-bad-exit=1 uv run --no-sync python main.py "$@"
