#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4  # processes, one a GPU
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G            # per node
#SBATCH --time=03:00:00      # Slurm ends the job then
#SBATCH --requeue            # and may be started again
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@180  # seconds before the time limit
#SBATCH --wait-all-nodes=1   # start when all are ready
# EDIT: add the #SBATCH lines your cluster asks for: --account, --partition, a GPU's type.
# EDIT: the folder of the archives. If it is empty, train with --synthetic.
export IMAGENET_DIR=${IMAGENET_DIR:-}
# EDIT: a node's folder that your jobs share. If it is empty, each has its own.
export DATA_DIR=${DATA_DIR:-}

# sbatch copies the variables of your shell, and srun reads them as options. If that shell
# is in another job, they do not fit here. Without them, srun uses all that this job has.
forget_other_jobs() {
    unset "${!SRUN_@}" "${!SLURM_GPU@}" "${!SLURM_MEM_PER_@}" "${!SLURM_TRES_@}"
    unset SLURM_CPUS_PER_GPU SLURM_NTASKS_PER_GPU
    [[ ${SLURM_CPU_BIND:-} != *mask_cpu:* ]] || unset SLURM_CPU_BIND
    [[ ${SLURM_TMPDIR:-} != /tmp/slurm-job-* ]] || unset SLURM_TMPDIR MASTER_PORT
    job=$(scontrol show job "$SLURM_JOB_ID")
    [[ $job == *ArrayJobId=* ]] || unset "${!SLURM_ARRAY_@}"
    # The tasks get this script's variables, also after sbatch --export.
    export SLURM_EXPORT_ENV=ALL
}
set -euo pipefail
echo "Job ${SLURM_JOB_ID:?use sbatch} on $SLURM_JOB_NODELIST, $(date), requeued ${SLURM_RESTART_COUNT:-0} times"
forget_other_jobs

# A shell acts on a signal when its command is over, unless that runs in the background.
attend() {
    "$@" &
    child=$!
    until wait "$child" || ! kill -0 "$child" 2> /dev/null; do :; done
    wait "$child"
}
# With all the CPUs that the job has there.
on_each_node() { attend env -u SLURM_CPUS_PER_TASK srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none "$@"; }
# Only this shell gets the warning before the time limit. main.py takes it on once it has made a file `7.training`: it
# saves and ends with status 75. Before that, there is nothing to save.
warned() {
    if [ -e "$SLURM_TMPDIR/$SLURM_JOB_ID.training" ]; then signal=USR1; else signal=TERM warned=yes; fi
    kill -s "$signal" "${child:-}" || exit 1 # where there is none, it is too late to begin with one
}
trap warned USR1
# Where Slurm ends the job, no step can start any more, and ranks may still be saving, with files in SLURM_TMPDIR.
ranks_are_here() { [[ $(scontrol listpids "$SLURM_JOB_ID" 2> /dev/null) =~ $'\n'[0-9]+\ +[0-9]+\ +[0-9] ]]; }
end() {
    trap '' USR1
    until scontrol ping > /dev/null; do echo "job.sh: waiting for Slurm's controller" >&2 && sleep 20; done
    # An error that would come again makes it `7.failed`. --immediate: Slurm may not miss a node that is gone.
    if [ "$1" != 0 ] && [ "${staged:-}" ] && [ -e "$SLURM_TMPDIR/$SLURM_JOB_ID.training" ]; then
        if on_each_node --overlap --immediate=30 bash -c may_pass || [ $? != 66 ]; then again=yes; fi
    fi
    # Three times: a controller that has just come back takes some seconds to find its nodes.
    for _ in 1 2 3; do on_each_node --overlap --immediate=10 bash -c clean_up && break; done ||
        { for _ in {1..300}; do ranks_are_here || break; sleep 0.1; done && clean_up; } || true
    # In an array, the last task has the number of them all: scontrol needs its other name, 7_3.
    until me=$(squeue --noheader --states=all --jobs="$SLURM_JOB_ID" --format="%A %i" | sed -n "s/^$SLURM_JOB_ID //p") &&
        me=${me:-$SLURM_JOB_ID} job=$(SLURM_TIME_FORMAT=standard scontrol show job "$me"); do sleep 20; done
    [ -z "${trained:-}" ] || scontrol update JobId="$me" Requeue=0 || true # if preempted once, it would start again
    [[ $1 != 0 && $job != *JobState=CANCELLED* ]] || exit "$1" # it must not come back
    if [[ ${again:-} || $job == *PreemptTime=2* ]]; then
        echo "job.sh: status $1: to be requeued"
        for _ in 1 2 3; do if scontrol requeue "$me"; then exit "$1"; else sleep 20; fi; done
        echo "job.sh: error: not requeued: sbatch it again with --checkpoint-dir" >&2
    elif [ -n "${warned:-}" ]; then
        echo "job.sh: error: the time limit came before the training had begun: ask for more --time" >&2
    fi
    exit "$1"
}
trap 'end $?' EXIT

# The data goes to the node's own disk: to SLURM_TMPDIR if the cluster sets it, else to a
# folder that this script makes and removes. After scancel or the time limit, it may stay.
if [ -z "${SLURM_TMPDIR:-}" ]; then
    export SLURM_TMPDIR=/tmp/slurm-job-$SLURM_JOB_ID
fi
export DATA; DATA=$(realpath -ms "${DATA_DIR:-$SLURM_TMPDIR/data}") # this script may go elsewhere below
IMAGENET_DIR=${IMAGENET_DIR:+$(realpath -ms "$IMAGENET_DIR")}
case " $* " in *" --synthetic "*) IMAGENET_DIR="" ;; esac # it needs no data
stage() {
    mkdir -p "$SLURM_TMPDIR"
    if [[ $SLURM_TMPDIR == /tmp/slurm-job-* && (-L $SLURM_TMPDIR || ! -O $SLURM_TMPDIR) ]]; then
        echo "job.sh: error: $SLURM_TMPDIR on $(hostname) is another user's: sbatch again" >&2
        exit 1
    fi
    rm -f "$SLURM_TMPDIR/$SLURM_JOB_ID".{training,failed}
    [ -z "$IMAGENET_DIR" ] || uv run --no-sync python prepare_data.py --source "$IMAGENET_DIR" --data-dir "$DATA"
}
may_pass() { [ ! -e "$SLURM_TMPDIR/$SLURM_JOB_ID.failed" ] || exit 66; }
clean_up() {
    [ -z "$IMAGENET_DIR" ] || uv run --no-sync python prepare_data.py --data-dir "$DATA" --release
    if [[ $SLURM_TMPDIR == /tmp/slurm-job-* ]]; then rm -rf "$SLURM_TMPDIR"; else rm -f "$SLURM_TMPDIR/$SLURM_JOB_ID".{training,failed}; fi
}
export -f stage may_pass clean_up

# Rank 0 listens there. Jobs may share a node: each has a port of its own.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
MASTER_PORT=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}
export MASTER_ADDR MASTER_PORT WORK_DIR=$PWD # checkpoints go here, unless there is a $SCRATCH

export SYNC_FLAGS=--locked
case " $* " in *" --wandb"*) SYNC_FLAGS="--locked --group wandb" ;; esac
# safe_sbatch names a commit in GIT_COMMIT: every node takes it to its own disk, and the job goes on there.
export GIT_COMMIT=${GIT_COMMIT:-${SLURM_GIT_COMMIT:-}}
if [ -n "$GIT_COMMIT" ]; then
    code_checkpointing=$(git show "$GIT_COMMIT:./code_checkpointing.sh") ||
        { echo "job.sh: error: no commit $GIT_COMMIT of $PWD on $(hostname), see above: is that a shared disk?" >&2 && exit 1; }
    eval "$code_checkpointing"
else
    # Once, here: tasks that all do this at the same time get in each other's way.
    # shellcheck disable=SC2086 # several flags
    attend uv sync --inexact --quiet $SYNC_FLAGS
fi
on_each_node bash -euc stage
staged=yes

# Slurm 22.05 and 23.02 give a task one CPU unless SRUN_CPUS_PER_TASK is set.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:?give --cpus-per-task}
# PYTHONFAULTHANDLER: a crash prints where Python was.
export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK PYTHONFAULTHANDLER=1
# If ranks cannot meet, export both as INFO to see more.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN} TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
# PyTorch 2.15's new NCCL backend makes backward() wait for each all-reduce.
export TORCH_DIST_USE_NCCL2=${TORCH_DIST_USE_NCCL2:-0}
# In a job array, the task's number is the seed, unless the arguments say otherwise.
TMPDIR=$SLURM_TMPDIR attend srun --kill-on-bad-exit=1 --wait=60 uv run --no-sync python main.py --data-dir "$DATA" \
    ${SLURM_ARRAY_TASK_ID:+--seed="$SLURM_ARRAY_TASK_ID"} "$@" && trained=yes # a shell that is killed ends with 0, too
