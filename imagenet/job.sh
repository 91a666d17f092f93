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
# EDIT: how Python starts. This is the one of `uv sync`. For conda or a module, load it here,
# then python=(python). In a container: python=(apptainer exec --nv image.sif python). -E
# ignores PYTHONPATH and the like, which may belong to other software. faulthandler: a crash
# prints where Python was.
python=(../.venv/bin/python -E -X faulthandler)
# EDIT: the node's own disk. Some clusters set SLURM_TMPDIR. On others, write $TMPDIR here, or
# leave /tmp.
local_disk=${SLURM_TMPDIR:-/tmp}
# EDIT: what to add to the first node's name for the fast network: an i on JSC's machines.
master_suffix=
# EDIT: staging can shrink the images, if GPUs wait for the data: prepare=(--resize 400).
prepare=()

main() {
    # safe_sbatch names a commit to run. It is not for a job that this one submits.
    export GIT_COMMIT=${SLURM_GIT_COMMIT:-}
    check_job
    forget_other_jobs
    ask_slurm
    echo "Job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, $(date)," \
        "requeued $SLURM_RESTART_COUNT times"
    # The data goes to a folder of this job's own on the node's disk, removed at the end. After
    # scancel or the time limit, it may stay.
    export LOCAL_JOB_DIR=$local_disk/slurm-job-$SLURM_JOB_ID-$SLURM_CLUSTER_NAME
    # main.py makes this file when it saves a checkpoint further than where it started.
    export GOT_FURTHER=$LOCAL_JOB_DIR/got_further
    rm -f "$GOT_FURTHER"
    trap 'ended_by_slurm=yes' TERM
    # This warning is for main.py, not for this shell.
    trap : USR1
    trap finish EXIT
    export -f on_each_node make_folder remove_folder fail
    on_each_node bash -euc make_folder
    if [ -n "$GIT_COMMIT" ]; then use_commit; fi
    type "${python[0]}" &> /dev/null || fail "$(hostname) has no ${python[0]}: uv sync --locked"
    choose_arguments "$@"
    [ -z "$IMAGENET_DIR" ] || on_each_node "${python[@]}" prepare_data.py "${prepare[@]}"

    # This script runs on the first node. Rank 0 listens there, on a port of the job's own, and
    # another one after each requeue: the last one may be taken.
    export MASTER_ADDR=$SLURMD_NODENAME$master_suffix
    export MASTER_PORT=${MASTER_PORT:-$((10000 + (SLURM_JOB_ID + 97 * SLURM_RESTART_COUNT) % 20000))}
    # If ranks cannot meet, export both as INFO to see more.
    export NCCL_DEBUG=${NCCL_DEBUG:-WARN} TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
    # PyTorch 2.15's new NCCL backend makes backward() wait for each all-reduce.
    export TORCH_DIST_USE_NCCL2=${TORCH_DIST_USE_NCCL2:-0}

    # Slurm 22.05 and 23.02 give a task one CPU unless SRUN_CPUS_PER_TASK is set.
    export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:?give --cpus-per-task}
    # The workers need the other CPUs.
    export OMP_NUM_THREADS=1
    # Packages in ~/.local are for another Python.
    export PYTHONNOUSERSITE=1
    srun --kill-on-bad-exit=1 --wait=60 "${python[@]}" main.py "${arguments[@]}"
}

# Run a command once on each node, with all the CPUs that the job has there.
on_each_node() {
    env -u SLURM_CPUS_PER_TASK srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
        --cpu-bind=none --kill-on-bad-exit=1 "$@"
}

make_folder() {
    # The start before a requeue may have made it. This node then finds its mark in it.
    mark=$LOCAL_JOB_DIR/made-on-$SLURMD_NODENAME
    [ -O "$mark" ] || mkdir "$LOCAL_JOB_DIR" || fail "$(hostname) needs its own local_disk"
    touch "$mark"
    # What a killed prepare_data.py has left.
    rm -rf "$LOCAL_JOB_DIR"/data.unfinished-*
}

remove_folder() {
    [ -O "$LOCAL_JOB_DIR/made-on-$SLURMD_NODENAME" ] || return 0
    # The index goes first: without it, nobody takes what is left for the whole data. The mark
    # goes last.
    rm -rf "$LOCAL_JOB_DIR"/{data/index.json,data*,code*} "$LOCAL_JOB_DIR"
}

# Every node takes the commit to its own disk, and the job runs there.
use_commit() {
    git show "$GIT_COMMIT:./code_checkpointing.sh" > "$LOCAL_JOB_DIR/code_checkpointing.sh" ||
        fail "no commit $GIT_COMMIT in $PWD"
    # shellcheck source=imagenet/code_checkpointing.sh
    source "$LOCAL_JOB_DIR/code_checkpointing.sh"
}

# With `--array=1-8 job.sh @sweep.txt`, each task takes its own line of sweep.txt. What all
# of them get comes after @sweep.txt.
choose_arguments() {
    arguments=("$@")
    if [[ ${1:-} == @* ]]; then
        # Windows ends lines with \r, too.
        line=$(tr -d '\r' < "${1#@}" | awk "NR == ${SLURM_ARRAY_TASK_ID:?give --array}")
        [ -n "$line" ] || fail "${1#@} has no line $SLURM_ARRAY_TASK_ID: the first is 1"
        mapfile -t words < <(xargs -n1 printf '%s\n' <<< "$line")
        # A quote that is not closed ends the job.
        wait $!
        arguments=("${words[@]}" "${@:2}")
    elif [ "${SLURM_ARRAY_TASK_ID:-}" ]; then
        # Each task has a seed of its own, unless the arguments name one.
        arguments=(--seed="$SLURM_ARRAY_TASK_ID" "$@")
    fi
    [[ " ${arguments[*]} " != *" --synthetic "* ]] || IMAGENET_DIR=""
}

# The one rule: a job that has not finished is requeued if it got further since it started,
# or if Slurm preempted it. Otherwise it fails.
finish() {
    status=$?
    # Slurm ends this job, and decides. Nothing is removed: ranks may still be saving.
    [ -z "${ended_by_slurm:-}" ] || exit "$status"
    [ ! -e "$GOT_FURTHER" ] || got_further=yes
    # One task of an array is 7_3.
    this_job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
    # Here, and not later: the answer may take as long as the controller is away.
    job=$(show_job "$this_job") || true
    # A controller that has just come back takes some seconds to find its nodes. But the time
    # limit may be near: what is there after a minute is left to your next job.
    for _ in 1 2 3; do
        timeout 20 bash -c 'on_each_node --overlap --immediate=10 bash -c remove_folder' && break
        # Where a node is missing, this one removes its own.
        timeout 20 bash -c remove_folder || true
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

# Ask Slurm about a job, again until it answers: a busy controller may not.
show_job() {
    for _ in {1..60}; do
        scontrol show job "$1" && return
        echo "job.sh: waiting for Slurm's controller" >&2
        sleep 10
    done
    fail "no answer of Slurm's controller in ten minutes"
}

# What guards.
check_job() {
    # Only sbatch sets ENVIRONMENT. In a shell of srun --pty bash, another srun would only wait.
    [ "${ENVIRONMENT:-}" ] || fail "start it with sbatch"
    [[ ${SLURM_JOB_ID_HET_GROUP_0:-} != "$SLURM_JOB_ID" ]] || fail "heterogeneous job"
    [ -e main.py ] || fail "no $PWD/main.py"
}
# Only Slurm knows what of these is this job's, and not another's that has submitted it.
ask_slurm() {
    job=$(show_job "$SLURM_JOB_ID")
    [[ $job == *ArrayJobId=* ]] || unset "${!SLURM_ARRAY_@}"
    job=${job#* Restarts=}
    export SLURM_RESTART_COUNT=${job%% *}
}
# sbatch copies the variables of your shell. Forget those that are options of srun and OpenMP,
# or belong to what submits this job: another one, or torchrun. Without them, srun uses all
# that this job has. ${!SLURM_@} stands for all names that begin with SLURM_.
forget_other_jobs() {
    ours='ARRAY_*|CLUSTER_NAME|CONF*|CPUS_ON_NODE|CPUS_PER_TASK|CPU_FREQ_REQ|DIST*'
    ours+='|GPUS_ON_NODE|HINT|JOB*|JWT|MPI_TYPE|NETWORK|NNODES|NODE*|NPROCS|NTASKS|NTASKS_PER_NODE'
    ours+='|PROFILE|SPANK*|SUBMIT*|TASKS_PER_NODE|THREADS_PER_CORE|TOPOLOGY*|WORKING_CLUSTER'
    ours="SLURM_@($ours|*SCRATCH*|*TMP*)"
    for name in "${!SLURM_@}" "${!SRUN_@}" "${!OMP_@}" "${!GOMP_@}" "${!TORCHELASTIC_@}"; do
        # shellcheck disable=SC2053 # a pattern
        [[ $name == $ours ]] || unset "$name"
    done
    # A port that comes with an address is another job's. By itself, it is your choice.
    [ -z "${MASTER_ADDR:-}" ] || unset MASTER_PORT
    # After sbatch --export, the tasks would not get this script's variables.
    export SLURM_EXPORT_ENV=ALL
}
fail() {
    echo "job.sh: error: $*" >&2
    # Without this, srun may say that a task failed before it says why.
    sleep 1
    exit 1
}

set -euo pipefail
main "$@"
