#!/bin/bash
#SBATCH --job-name=single_gpu
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1  # processes
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G            # per node
#SBATCH --time=01:00:00      # Slurm ends the job then
#SBATCH --no-requeue         # do not start over if a node fails
#SBATCH --propagate=NONE     # the limits of the login node's shell stay there
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
    exit 1
}
# Only sbatch sets ENVIRONMENT. In a shell of srun --pty bash, the srun below would only wait.
: "${ENVIRONMENT:?use sbatch}"
echo "Job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, $(date)"
forget_other_jobs
[[ ${SLURM_JOB_ID_HET_GROUP_0:-} != "$SLURM_JOB_ID" ]] || fail "heterogeneous job"
[ -e main.py ] || fail "no $PWD/main.py"
((SLURM_JOB_NUM_NODES == 1)) || fail "use multi_node"

# The data goes to a folder of this job's own on the node's disk, removed at the end. After
# scancel or the time limit, it may stay. Without -p, mkdir refuses another user's folder.
export SLURM_TMPDIR=${local_disk%/slurm-job-*}/slurm-job-$SLURM_JOB_ID
trap 'rm -rf "$SLURM_TMPDIR"' EXIT
stage() {
    mkdir "$SLURM_TMPDIR"
    [ -z "$CIFAR10_ARCHIVE" ] || tar -xf "$CIFAR10_ARCHIVE" --one-top-level="$SLURM_TMPDIR/data" ||
        fail "$(hostname) cannot unpack CIFAR10_ARCHIVE=$CIFAR10_ARCHIVE"
}
stage

# Only look whether the environment is complete, without uv's cache: nodes may not be able to
# write to it, or to lock it. The dev group has the tests' tools: uv add may not install it.
export TMPDIR=$SLURM_TMPDIR UV_NO_CACHE=1
[ "${python[0]}" != uv ] || uv sync --frozen --inexact --no-dev --quiet --check ||
    fail "on login nodes: uv sync --locked"
# Slurm 22.05 and 23.02 give a task one CPU unless SRUN_CPUS_PER_TASK is set.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:?give --cpus-per-task}
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
srun --kill-on-bad-exit=1 "${python[@]}" main.py "$@"
