#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4  # processes, one a GPU
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G            # per node
#SBATCH --time=03:00:00      # Slurm ends the job then
#SBATCH --signal=USR1@180    # and warns main.py so many seconds before
#SBATCH --requeue            # the job may be started again, to go on
#SBATCH --open-mode=append   # in the same log
#SBATCH --wait-all-nodes=1   # start when all are ready
# EDIT: add the #SBATCH lines your cluster asks for: --account, --partition, a GPU's type,
# and --tmp=160G if some nodes' own disks are too small for ImageNet.
# EDIT: the folder of the archives. If it is empty, use --synthetic or --data-dir.
export IMAGENET_DIR=${IMAGENET_DIR-}

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
    # Without this, srun may say that a task failed before it says why.
    sleep 1
    exit 1
}
echo "Job ${SLURM_JOB_ID:?use sbatch} on $SLURM_JOB_NODELIST, $(date)," \
    "requeued ${SLURM_RESTART_COUNT:-0} times"
forget_other_jobs

# Run a command once on each node, with all the CPUs that the job has there.
on_each_node() {
    env -u SLURM_CPUS_PER_TASK srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
        --cpu-bind=none --kill-on-bad-exit=1 "$@"
}
# The data goes to the node's own disk: to SLURM_TMPDIR if the cluster sets it, else to a
# folder that this script makes and removes. After scancel or the time limit, it may stay.
export SLURM_TMPDIR=${SLURM_TMPDIR:-/tmp/slurm-job-$SLURM_JOB_ID}
# main.py makes this file when it saves a checkpoint further than where it started.
export GOT_FURTHER=$SLURM_TMPDIR/$SLURM_JOB_ID.got_further
rm -f "$GOT_FURTHER"

# The one rule: a job that has not finished is requeued if it got further since it started,
# or if Slurm preempted it. Else it fails. One task of an array is 7_3.
this_job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
finish() {
    status=$?
    # Slurm ends this job, and decides. Nothing is removed: ranks may still be saving.
    [ -z "${ended_by_slurm:-}" ] || exit "$status"
    [ ! -e "$GOT_FURTHER" ] || got_further=yes
    until scontrol ping > /dev/null; do
        echo "job.sh: waiting for Slurm's controller" >&2
        sleep 20
    done
    if [[ $SLURM_TMPDIR == /tmp/slurm-job-* ]]; then
        # A controller that has just come back takes some seconds to find its nodes.
        for _ in 1 2 3; do
            on_each_node --overlap --immediate=10 rm -rf "$SLURM_TMPDIR" && break
        done
        rm -rf "$SLURM_TMPDIR" || true
    fi
    # After scancel meanwhile, a requeue would bring the job back.
    [ -z "${ended_by_slurm:-}" ] || exit "$status"
    if [ "$status" = 0 ]; then
        # Slurm 24.11 would start a finished job again if it was preempted once.
        scontrol update JobId="$this_job" Requeue=0 || true
    elif [[ ${got_further:-} || $(scontrol show job "$this_job") == *PreemptTime=2* ]]; then
        echo "job.sh: status $status: to be requeued"
        scontrol requeue "$this_job" || fail "not requeued: sbatch it with --checkpoint-dir"
    else
        fail "status $status, and no new checkpoint since this start: not requeued." \
            "See above. If the time limit was near, ask for more --time"
    fi
    exit "$status"
}
trap 'ended_by_slurm=yes' TERM
# This warning is for main.py, not for this shell.
trap : USR1
trap finish EXIT

make_folder() {
    mkdir -p "$SLURM_TMPDIR"
    [[ $SLURM_TMPDIR != /tmp/slurm-job-* || (-O $SLURM_TMPDIR && ! -L $SLURM_TMPDIR) ]] ||
        fail "$SLURM_TMPDIR on $(hostname) is another user's: sbatch again"
}
export -f fail make_folder
on_each_node bash -euc make_folder

# Rank 0 listens there. Jobs may share a node: each has a port of its own.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
MASTER_PORT=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}
export MASTER_ADDR MASTER_PORT

# safe_sbatch names a commit: every node takes it to its own disk, and the job runs there.
export GIT_COMMIT=${SLURM_GIT_COMMIT:-}
# It is not for a job that this one submits.
unset SLURM_GIT_COMMIT
if [ -n "$GIT_COMMIT" ]; then
    code_checkpointing=$(git show "$GIT_COMMIT:./code_checkpointing.sh") ||
        fail "no commit $GIT_COMMIT in $PWD on $(hostname)"
    eval "$code_checkpointing"
else
    # Once, here: tasks that all do this at the same time get in each other's way.
    uv sync --locked --inexact --quiet
fi

# With `--array=1-8 job.sh @sweep.txt`, each task takes its own line of sweep.txt. What all
# of them get comes after @sweep.txt.
if [[ ${1:-} == @* ]]; then
    line=$(sed -n "${SLURM_ARRAY_TASK_ID:?give --array}p" "${1#@}")
    [ -n "$line" ] || fail "${1#@} has no line $SLURM_ARRAY_TASK_ID"
    mapfile -t words < <(xargs -n1 printf '%s\n' <<< "$line")
    # A quote that is not closed ends the job.
    wait $!
    set -- "${words[@]}" "${@:2}"
elif [ "${SLURM_ARRAY_TASK_ID:-}" ]; then
    # Each task has a seed of its own, unless the arguments name one.
    set -- --seed="$SLURM_ARRAY_TASK_ID" "$@"
fi
[[ " $* " != *" --synthetic "* ]] || IMAGENET_DIR=""
[ -z "$IMAGENET_DIR" ] || on_each_node uv run --no-sync python prepare_data.py

# Slurm 22.05 and 23.02 give a task one CPU unless SRUN_CPUS_PER_TASK is set.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:?give --cpus-per-task}
# PYTHONFAULTHANDLER: a crash prints where Python was.
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK PYTHONFAULTHANDLER=1
# If ranks cannot meet, export both as INFO to see more.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN} TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
# PyTorch 2.15's new NCCL backend makes backward() wait for each all-reduce.
export TORCH_DIST_USE_NCCL2=${TORCH_DIST_USE_NCCL2:-0}
TMPDIR=$SLURM_TMPDIR srun --kill-on-bad-exit=1 --wait=60 uv run --no-sync python main.py "$@"
