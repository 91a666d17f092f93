#!/bin/bash
#SBATCH --job-name=imagenet
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4  # processes, one a GPU
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G            # per node
#SBATCH --time=03:00:00      # Slurm ends the job then
#SBATCH --signal=USR1@180    # and warns main.py so many seconds before
#SBATCH --requeue            # the job may be started again, to go on
#SBATCH --open-mode=append   # in the same log
#SBATCH --propagate=NONE     # the limits of the login node's shell stay there
#SBATCH --wait-all-nodes=1   # start when all are ready
# EDIT: add the #SBATCH lines your cluster asks for: --account, --partition, a GPU's type,
# and --tmp=160G if some nodes' own disks are too small for ImageNet.
# EDIT: the folder of the archives. If it is empty, use --synthetic or --data-dir.
export IMAGENET_DIR=${IMAGENET_DIR-}
# EDIT: how Python starts. Without uv: load conda or a module here, then python=(python). In
# a container: python=(apptainer exec --nv image.sif python). -E ignores PYTHONPATH and the
# like, which may belong to other software. faulthandler: a crash prints where Python was.
python=(uv run --no-sync python -E -X faulthandler)
# EDIT: the node's own disk. Some clusters set SLURM_TMPDIR. On others, write $TMPDIR here, or
# leave /tmp.
local_disk=${SLURM_TMPDIR:-/tmp}
# EDIT: what to add to the first node's name for the fast network: an i on JSC's machines.
master_suffix=

# Ask Slurm about a job, again until it answers: a busy controller may not.
show_job() {
    until scontrol show job "$1"; do
        echo "job.sh: waiting for Slurm's controller" >&2
        sleep 10
    done
}
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
    [[ $(show_job "$SLURM_JOB_ID") == *ArrayJobId=* ]] || unset "${!SLURM_ARRAY_@}"
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
echo "Job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, $(date)," \
    "requeued ${SLURM_RESTART_COUNT:-0} times"
forget_other_jobs
[[ ${SLURM_JOB_ID_HET_GROUP_0:-} != "$SLURM_JOB_ID" ]] || fail "heterogeneous job"
[ -e main.py ] || fail "no $PWD/main.py"

# Run a command once on each node, with all the CPUs that the job has there.
on_each_node() {
    env -u SLURM_CPUS_PER_TASK srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
        --cpu-bind=none --kill-on-bad-exit=1 "$@"
}
# The data goes to a folder of this job's own on the node's disk, removed at the end. After
# scancel or the time limit, it may stay.
export SLURM_TMPDIR=${local_disk%/slurm-job-*}/slurm-job-$SLURM_JOB_ID
# main.py makes this file when it saves a checkpoint further than where it started.
export GOT_FURTHER=$SLURM_TMPDIR/$SLURM_JOB_ID.got_further
rm -f "$GOT_FURTHER"

remove_data() {
    # The index goes first: without it, nobody takes what is left for the whole data. Where a
    # node is missing, this one removes its own, and srun tries again.
    on_each_node --overlap --immediate=10 rm -rf "$SLURM_TMPDIR/data/index.json" "$SLURM_TMPDIR" ||
        ! rm -rf "$SLURM_TMPDIR"
}
export -f on_each_node remove_data
# The one rule: a job that has not finished is requeued if it got further since it started,
# or if Slurm preempted it. Else it fails. One task of an array is 7_3.
this_job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
finish() {
    status=$?
    # Slurm ends this job, and decides. Nothing is removed: ranks may still be saving.
    [ -z "${ended_by_slurm:-}" ] || exit "$status"
    [ ! -e "$GOT_FURTHER" ] || got_further=yes
    # Here, and not later: the answer may take as long as the controller is away.
    job=$(show_job "$this_job")
    # A controller that has just come back takes some seconds to find its nodes. But the time
    # limit may be near: what is there after a minute is left to your next job.
    for _ in 1 2 3; do
        timeout 20 bash -c remove_data && break
    done
    # After scancel meanwhile, a requeue would bring the job back.
    [ -z "${ended_by_slurm:-}" ] || exit "$status"
    if [ "$status" = 0 ]; then
        # Slurm 24.11 would start a finished job again if it was preempted once.
        scontrol update JobId="$this_job" Requeue=0 || true
    elif [[ ${got_further:-} || $job == *PreemptTime=2* ]]; then
        echo "job.sh: status $status: to be requeued"
        for _ in {1..12}; do
            # A requeue ends this job, and perhaps scontrol before it has its answer.
            if scontrol requeue "$this_job" || [ "${ended_by_slurm:-}" ]; then exit "$status"; fi
            sleep 10
        done
        fail "not requeued: sbatch it with --checkpoint-dir"
    else
        fail "status $status, and no new checkpoint since this start: not requeued"
    fi
}
trap 'ended_by_slurm=yes' TERM
# This warning is for main.py, not for this shell.
trap : USR1
trap finish EXIT

make_folder() {
    mkdir -p "$SLURM_TMPDIR" || true
    [[ -O $SLURM_TMPDIR && ! -L $SLURM_TMPDIR ]] ||
        fail "cannot use $SLURM_TMPDIR on $(hostname): is it another user's?"
    # What a killed prepare_data.py has left.
    rm -rf "$SLURM_TMPDIR"/data.unfinished-*
}
export -f fail make_folder
on_each_node bash -euc make_folder

# This script runs on the first node. Rank 0 listens there, on a port of the job's own, and
# another one after each requeue: the last one may be taken.
export MASTER_ADDR=$SLURMD_NODENAME$master_suffix
restarts=${SLURM_RESTART_COUNT:-0}
export MASTER_PORT=${MASTER_PORT:-$((10000 + (SLURM_JOB_ID + 97 * restarts) % 20000))}

# safe_sbatch names a commit: every node takes it to its own disk, and the job runs there.
export GIT_COMMIT=${SLURM_GIT_COMMIT:-}
# It is not for a job that this one submits.
unset SLURM_GIT_COMMIT
if [ -n "$GIT_COMMIT" ]; then
    code_checkpointing=$(git show "$GIT_COMMIT:./code_checkpointing.sh") ||
        fail "no commit $GIT_COMMIT in $PWD"
    eval "$code_checkpointing"
fi
# Only look whether the environment is complete, without uv's cache: nodes may not be able to
# write to it, or to lock it. The dev group has the tests' tools: uv add may not install it.
export TMPDIR=$SLURM_TMPDIR UV_NO_CACHE=1
[ "${python[0]}" != uv ] || uv sync --frozen --inexact --no-dev --quiet --check ||
    fail "on login nodes: uv sync --locked"

# With `--array=1-8 job.sh @sweep.txt`, each task takes its own line of sweep.txt. What all
# of them get comes after @sweep.txt.
if [[ ${1:-} == @* ]]; then
    # Windows ends lines with \r, too.
    line=$(tr -d '\r' < "${1#@}" | awk "NR == ${SLURM_ARRAY_TASK_ID:?give --array}")
    [ -n "$line" ] || fail "${1#@} has no line $SLURM_ARRAY_TASK_ID: the first is 1"
    mapfile -t words < <(xargs -n1 printf '%s\n' <<< "$line")
    # A quote that is not closed ends the job.
    wait $!
    set -- "${words[@]}" "${@:2}"
elif [ "${SLURM_ARRAY_TASK_ID:-}" ]; then
    # Each task has a seed of its own, unless the arguments name one.
    set -- --seed="$SLURM_ARRAY_TASK_ID" "$@"
fi
[[ " $* " != *" --synthetic "* ]] || IMAGENET_DIR=""
[ -z "$IMAGENET_DIR" ] || on_each_node "${python[@]}" prepare_data.py

# Slurm 22.05 and 23.02 give a task one CPU unless SRUN_CPUS_PER_TASK is set.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:?give --cpus-per-task}
# The workers need the other CPUs.
export OMP_NUM_THREADS=1
# If ranks cannot meet, export both as INFO to see more.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN} TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
# PyTorch 2.15's new NCCL backend makes backward() wait for each all-reduce.
export TORCH_DIST_USE_NCCL2=${TORCH_DIST_USE_NCCL2:-0}
srun --kill-on-bad-exit=1 --wait=60 "${python[@]}" main.py "$@"
