#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G
#SBATCH --time=01:00:00
#SBATCH --no-requeue
#SBATCH --wait-all-nodes=1
# EDIT: add the #SBATCH lines your cluster asks for, such as --account, --partition or the GPU's type.
export CIFAR10_ARCHIVE=${CIFAR10_ARCHIVE:-} # EDIT: where cifar-10-python.tar.gz is; empty: main.py downloads it

set -euo pipefail
export SLURM_EXPORT_ENV=ALL # for tasks to have this script's variables even where sbatch --export said otherwise
unset SLURM_TRES_PER_TASK   # srun 23.11 and later refuse to start if it disagrees with SLURM_CPUS_PER_TASK
# Called in another job, sbatch passes on what that one has of memory, CPUs and GPUs, and srun would ask for it here. A
# step has all the GPUs of its job without being told.
unset SRUN_CPUS_PER_TASK SLURM_GPUS SLURM_GPUS_PER_NODE
[ -z "${SLURM_MEM_PER_CPU:-}${SLURM_MEM_PER_GPU:-}" ] || unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE
[[ ${SLURM_CPU_BIND:-} != *mask_cpu:* ]] || unset SLURM_CPU_BIND
[ -z "${OWN_TMPDIR:-}" ] || unset OWN_TMPDIR SLURM_TMPDIR MASTER_PORT # made by a job like this one
echo "Job ${SLURM_JOB_ID:?start this with sbatch} on $SLURM_JOB_NODELIST, $(date)"

on_each_node() { srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 "$@"; }
# Data goes to the node's own disk. Where the cluster names none in SLURM_TMPDIR, it goes to a folder under /tmp that
# is removed at the end of this script; after scancel or at the time limit, it may stay.
if [ -z "${SLURM_TMPDIR:-}" ]; then
    export SLURM_TMPDIR=/tmp/slurm-job-$SLURM_JOB_ID OWN_TMPDIR=yes
    trap 'on_each_node --immediate=30 rm -rf "$SLURM_TMPDIR" || rm -rf "$SLURM_TMPDIR"' EXIT
fi
stage() {
    mkdir -p "$SLURM_TMPDIR"
    if [[ $SLURM_TMPDIR == /tmp/slurm-job-* && (-L $SLURM_TMPDIR || ! -O $SLURM_TMPDIR) ]]; then
        echo "job.sh: error: $SLURM_TMPDIR on $(hostname) is another user's: sbatch again" >&2
        exit 1
    fi
    mkdir -p "$SLURM_TMPDIR/data"
    if [ -n "$CIFAR10_ARCHIVE" ] && ! tar -xf "$CIFAR10_ARCHIVE" -C "$SLURM_TMPDIR/data"; then
        echo "job.sh: error: cannot unpack CIFAR10_ARCHIVE=$CIFAR10_ARCHIVE on $(hostname): is it whole?" >&2
        sleep 1 # or srun says that the task has failed before it passes on why
        exit 1
    fi
}
export -f stage
on_each_node bash -euc stage

# Rank 0 waits for the other ranks here; the port follows the job, because jobs may share a node.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}
export MASTER_ADDR MASTER_PORT

# Once, here: tasks that all synchronise the environment at the same time get in each other's way.
uv sync --locked --inexact # another job may need more than this one
export PYTHONFAULTHANDLER=1 # a crash prints where Python was
export NCCL_DEBUG=WARN TORCH_CPP_LOG_LEVEL=ERROR # INFO, for either, tells more when ranks cannot meet
export TORCH_DIST_USE_NCCL2=0 # the new way to NCCL, of PyTorch 2.15, lets backward() wait for each all-reduce
# One torchrun a node starts a process for each GPU of the job there. The nodes may differ: look when on the node.
launch() {
    local gpus=${SLURM_GPUS_ON_NODE:-1}
    export OMP_NUM_THREADS=$((SLURM_CPUS_ON_NODE > gpus ? SLURM_CPUS_ON_NODE / gpus : 1))
    exec uv run --no-sync torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node="$gpus" \
        --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv-id="$SLURM_JOB_ID" \
        --local-addr="$SLURMD_NODENAME" main.py "$@"
}
export -f launch
unset SLURM_CPUS_PER_TASK SRUN_CPUS_PER_TASK # this task is to have all the CPUs of the job on its node
# TMPDIR: what killed processes leave there is removed, too.
TMPDIR=$SLURM_TMPDIR on_each_node -l --kill-on-bad-exit=1 --wait=60 --cpu-bind=none bash -c 'launch "$@"' launch "$@"
