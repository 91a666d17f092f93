#!/bin/bash
#SBATCH --job-name=multi_node
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4  # processes, one a GPU
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G            # per node
#SBATCH --time=01:00:00      # Slurm ends the job then
#SBATCH --no-requeue         # do not start over if a node fails
#SBATCH --propagate=NONE     # the limits of the login node's shell stay there
#SBATCH --wait-all-nodes=1   # start when all are ready
# EDIT: add the #SBATCH lines your cluster asks for: --account, --partition, a GPU's type.
# EDIT: the path of cifar-10-python.tar.gz. If it is empty, main.py downloads the data.
export CIFAR10_ARCHIVE=${CIFAR10_ARCHIVE:-}
# EDIT: how Python starts. Without uv: load conda or a module here, then python=(python). In
# a container: python=(apptainer exec --nv image.sif python). -E ignores PYTHONPATH and the
# like, which may belong to other software. faulthandler: a crash prints where Python was.
python=(uv run --no-sync python -E -X faulthandler)
# EDIT: the node's own disk. Some clusters set SLURM_TMPDIR. On others, write $TMPDIR here, or
# leave /tmp.
local_disk=${SLURM_TMPDIR:-/tmp}
# EDIT: what to add to the first node's name for the fast network: an i on JSC's machines.
master_suffix=

# sbatch copies the variables of your shell. Forget those that are options of srun and OpenMP,
# or belong to what submits this job: another one, or torchrun. Without them, srun uses all
# that this job has. ${!SRUN_@} stands for all names that begin with SRUN_.
forget_other_jobs() {
    unset "${!SRUN_@}" "${!OMP_@}" "${!GOMP_@}" "${!TORCHELASTIC_@}" VIRTUAL_ENV
    unset SLURM_{GPUS,GPUS_PER_NODE,GPUS_PER_SOCKET,GPUS_PER_TASK,GPU_BIND,GPU_FREQ,GRES,STEP_GRES}
    unset SLURM_{MEM_PER_CPU,MEM_PER_GPU,MEM_PER_NODE,MEM_BIND,TRES_BIND,TRES_PER_TASK,GRES_FLAGS}
    unset SLURM_{CPUS_PER_GPU,NTASKS_PER_GPU,NTASKS_PER_TRES,CPU_BIND,CONSTRAINT,HOSTFILE,HET_SIZE}
    unset SLURM_{EXACT,EXCLUSIVE,IMMEDIATE,WAIT,SIGNAL,TIMELIMIT,NO_KILL,EXIT_ERROR,EXIT_IMMEDIATE}
    unset SLURM_{STDINMODE,STDOUTMODE,STDERRMODE,OPEN_MODE,LABELIO,UMASK,WORKING_DIR,REMOTE_CWD}
    unset SLURM_{PROLOG,EPILOG,TASK_PROLOG,TASK_EPILOG,BCAST,CLUSTERS,TIME_FORMAT,RESV_PORTS}
    # A port that comes with an address is another job's. By itself, it is your choice.
    [ -z "${MASTER_ADDR:-}" ] || unset MASTER_PORT
    # After sbatch --export, the tasks would not get this script's variables.
    export SLURM_EXPORT_ENV=ALL
}
set -euo pipefail
fail() {
    echo "job.sh: error: $*" >&2
    # Without this, srun may say that a task failed before it says why.
    sleep 1
    exit 1
}
# Only sbatch sets ENVIRONMENT. In a shell of srun --pty bash, the srun below would only wait.
: "${ENVIRONMENT:?use sbatch}"
echo "Job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, $(date)"
forget_other_jobs
[[ ${SLURM_JOB_ID_HET_GROUP_0:-} != "$SLURM_JOB_ID" ]] || fail "heterogeneous job"
[ -e main.py ] || fail "no $PWD/main.py"

on_each_node() { srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 "$@"; }
# The data goes to a folder of this job's own on the node's disk, removed at the end. After
# scancel or the time limit, it may stay. Without -p, mkdir refuses another user's folder.
export SLURM_TMPDIR=${local_disk%/slurm-job-*}/slurm-job-$SLURM_JOB_ID
trap 'on_each_node --immediate=30 rm -rf "$SLURM_TMPDIR" || rm -rf "$SLURM_TMPDIR"' EXIT
stage() {
    mkdir "$SLURM_TMPDIR"
    [ -z "$CIFAR10_ARCHIVE" ] || tar -xf "$CIFAR10_ARCHIVE" --one-top-level="$SLURM_TMPDIR/data" ||
        fail "$(hostname) cannot unpack CIFAR10_ARCHIVE=$CIFAR10_ARCHIVE"
}
export -f fail stage
on_each_node bash -euc stage

# This script runs on the first node. Rank 0 listens there, on a port of the job's own.
export MASTER_ADDR=$SLURMD_NODENAME$master_suffix
export MASTER_PORT=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}

# Only look whether the environment is complete, without uv's cache: nodes may not be able to
# write to it, or to lock it. The dev group has the tests' tools: uv add may not install it.
export TMPDIR=$SLURM_TMPDIR UV_NO_CACHE=1
[ "${python[0]}" != uv ] || uv sync --frozen --inexact --no-dev --quiet --check ||
    fail "on login nodes: uv sync --locked"
# If ranks cannot meet, export both as INFO to see more.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN} TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
# PyTorch 2.15's new NCCL backend makes backward() wait for each all-reduce.
export TORCH_DIST_USE_NCCL2=${TORCH_DIST_USE_NCCL2:-0}
# One torchrun a node starts a process for each of the job's GPUs there. Nodes may differ:
# torchrun takes an option that is not given from a variable PET_….
launch() {
    export PET_NPROC_PER_NODE=${SLURM_GPUS_ON_NODE:-1} PET_LOCAL_ADDR=$SLURMD_NODENAME
    export OMP_NUM_THREADS=$(((SLURM_CPUS_ON_NODE - 1) / PET_NPROC_PER_NODE + 1))
    # Its processes do not get python's options, -E and -X.
    [ "$1" != uv ] || unset "${!PYTHON@}"
    PYTHONFAULTHANDLER=1 exec "$@"
}
export -f launch
# Otherwise torchrun and its processes would get the CPUs of one task.
unset SLURM_CPUS_PER_TASK
on_each_node -l --kill-on-bad-exit=1 --wait=60 --cpu-bind=none bash -c 'launch "$@"' launch \
    "${python[@]}" -m torch.distributed.run --nnodes="$SLURM_JOB_NUM_NODES" --rdzv-backend=c10d \
    --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv-id="$SLURM_JOB_ID" main.py "$@"
