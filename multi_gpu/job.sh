#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4  # processes, one a GPU
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G            # per node
#SBATCH --time=01:00:00      # Slurm ends the job then
#SBATCH --no-requeue         # do not start over if a node fails
# EDIT: add the #SBATCH lines your cluster asks for: --account, --partition, a GPU's type.
# EDIT: the path of cifar-10-python.tar.gz. If it is empty, main.py downloads the data.
export CIFAR10_ARCHIVE=${CIFAR10_ARCHIVE:-}

# sbatch copies the variables of your shell, and srun reads them as options. If that shell
# is in another job, they do not fit here. Without them, srun uses all that this job has.
forget_other_jobs() {
    unset "${!SRUN_@}" "${!SLURM_GPU@}" "${!SLURM_MEM_PER_@}" "${!SLURM_TRES_@}"
    unset SLURM_CPUS_PER_GPU SLURM_NTASKS_PER_GPU
    [[ ${SLURM_CPU_BIND:-} != *mask_cpu:* ]] || unset SLURM_CPU_BIND
    [[ ${SLURM_TMPDIR:-} != /tmp/slurm-job-* ]] || unset SLURM_TMPDIR MASTER_PORT
    job=$(scontrol show job "$SLURM_JOB_ID")
    [[ $job == *ArrayJobId=* ]] || unset "${!SLURM_ARRAY_@}"
    # The tasks get this script's variables, even after sbatch --export.
    export SLURM_EXPORT_ENV=ALL
}
set -euo pipefail
fail() {
    echo "job.sh: error: $*" >&2
    exit 1
}
echo "Job ${SLURM_JOB_ID:?use sbatch} on $SLURM_JOB_NODELIST, $(date)"
forget_other_jobs
((SLURM_JOB_NUM_NODES == 1)) || fail "several nodes: use multi_node"

# The data goes to the node's own disk: to SLURM_TMPDIR if the cluster sets it, else to a
# folder that this script makes and removes. After scancel or the time limit, it may stay.
if [ -z "${SLURM_TMPDIR:-}" ]; then
    export SLURM_TMPDIR=/tmp/slurm-job-$SLURM_JOB_ID
    trap 'rm -rf "$SLURM_TMPDIR"' EXIT
fi
stage() {
    # No -p: this fails if the folder exists, perhaps made by another user.
    [[ $SLURM_TMPDIR != /tmp/slurm-job-* ]] || mkdir "$SLURM_TMPDIR"
    mkdir -p "$SLURM_TMPDIR/data"
    [ -z "$CIFAR10_ARCHIVE" ] || tar -xf "$CIFAR10_ARCHIVE" -C "$SLURM_TMPDIR/data" ||
        fail "cannot unpack CIFAR10_ARCHIVE=$CIFAR10_ARCHIVE on $(hostname)"
}
stage

# Rank 0 listens there. Jobs may share a node: each has a port of its own.
MASTER_ADDR=127.0.0.1
MASTER_PORT=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}
export MASTER_ADDR MASTER_PORT

# Once, here: tasks that all do this at the same time get in each other's way.
uv sync --locked --inexact --quiet
# Slurm 22.05 and 23.02 give a task one CPU unless SRUN_CPUS_PER_TASK is set.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:?give --cpus-per-task}
# PYTHONFAULTHANDLER: a crash prints where Python was.
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK PYTHONFAULTHANDLER=1
# If ranks cannot meet, export both as INFO to see more.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN} TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
# PyTorch 2.15's new NCCL backend makes backward() wait for each all-reduce.
export TORCH_DIST_USE_NCCL2=${TORCH_DIST_USE_NCCL2:-0}
TMPDIR=$SLURM_TMPDIR srun --kill-on-bad-exit=1 uv run --no-sync python main.py "$@"
