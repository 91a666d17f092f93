#!/bin/bash
#SBATCH --job-name=imagenet
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4  # processes, one a GPU
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G            # per node
#SBATCH --time=03:00:00      # Slurm ends the job then
#SBATCH --signal=USR1@180    # and warns main.py 180 s before
#SBATCH --requeue            # Slurm may start the job again, to resume
#SBATCH --open-mode=append   # in the same log
#SBATCH --propagate=CORE     # of the login shell's limits (ulimit), only that on core files
#SBATCH --wait-all-nodes=1   # start when all are ready
# EDIT: add the #SBATCH lines your cluster asks for: --account, --partition, a GPU's type,
# and --tmp=160G if some nodes' own disks are too small for ImageNet.
# EDIT: write the folder of ImageNet's archives, or your own .tar or .zip, after - or export it
# before sbatch. If it is empty, use --synthetic or --data-dir.
export IMAGENET_DIR=${IMAGENET_DIR-}
# EDIT: how Python starts. The default is the Python that `uv sync` has installed. For conda or
# a module, load it here, then python=(python -X faulthandler). In a container, --bind the disks
# of the clone, the data and the node:
# python=(apptainer exec --nv --bind /scratch,/local /scratch/image python -E -X faulthandler)
# With -X faulthandler, a crash prints where Python was. -E ignores PYTHONPATH and the like,
# which may be of other software.
python=(../.venv/bin/python -E -X faulthandler)
# EDIT: the node's own disk. Some clusters set SLURM_TMPDIR. If yours has another one, write it
# in place of /tmp.
local_disk=${SLURM_TMPDIR:-/tmp}
# EDIT: what to add to the first node's name for the fast network: i on JSC's machines.
master_suffix=
# EDIT: staging can shrink the images, if GPUs wait for the data: prepare=(--resize 400).
prepare=()

main() {
    # With safe_sbatch, a job runs a commit. Relative checkpoint paths start in JOB_WORK_DIR.
    export GIT_COMMIT=${SLURM_GIT_COMMIT:-} JOB_WORK_DIR=$PWD
    check_job
    forget_other_jobs
    ask_slurm
    echo "Job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, $(date)," \
        "requeued $SLURM_RESTART_COUNT times"
    # Ignore ~/.local, which a Python without an environment would use first.
    export PYTHONNOUSERSITE=1
    # The data goes to a folder of this job's own on the node's disk, removed at the end. After
    # scancel or the time limit, it may stay. A requeued job finds it again by this name.
    export LOCAL_JOB_DIR=$local_disk/slurm-job-$SLURM_JOB_ID-$SLURM_CLUSTER_NAME
    # main.py makes this file when it saves a checkpoint of a later step than it started from.
    # It is on the shared disk: a site may empty the node's, and a $SCRATCH of this job's own.
    disk=${SCRATCH:-$PWD}
    [[ ! /$disk/ =~ [^0-9]${SLURM_JOB_ID}[^0-9] ]] || disk=$PWD
    export GOT_FURTHER=$disk/checkpoints/got_further-$SLURM_JOB_ID-$SLURM_CLUSTER_NAME
    rm -f "$GOT_FURTHER"
    trap 'ended_by_slurm=yes' TERM
    # Without this, Slurm's warning could end this shell. It is for main.py, which then saves.
    trap : USR1
    trap finish EXIT
    export -f on_each_node make_folder remove_folder name_rank_0 fail
    on_each_node bash -euc make_folder
    if [ -n "$GIT_COMMIT" ]; then use_commit; fi
    type "${python[0]}" &> /dev/null || fail "$(hostname) has no ${python[0]}: uv sync --locked"
    choose_arguments "$@"
    if [ -n "$IMAGENET_DIR" ]; then
        # A wrong argument ends the job here, not when the data has been copied.
        "${python[@]}" main.py "${arguments[@]}" --only-check-arguments
        on_each_node "${python[@]}" prepare_data.py "${prepare[@]}"
    fi

    # Rank 0 listens on its node, on a port of the job's own. From Slurm 26.05 on, that may be
    # another node than this script's.
    MASTER_ADDR=$(srun bash -c name_rank_0 | sed -n 's/^rank 0 is on //p')$master_suffix
    export MASTER_ADDR
    # Another one after each requeue, because the last one may still be taken.
    port=$((10000 + (SLURM_JOB_ID + 97 * SLURM_RESTART_COUNT) % 20000))
    export MASTER_PORT=${MASTER_PORT:-$port}
    # If ranks cannot meet, export both as INFO to see more.
    export NCCL_DEBUG=${NCCL_DEBUG:-WARN} TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}

    # Slurm 22.05 and 23.02 give a task one CPU unless SRUN_CPUS_PER_TASK is set.
    export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:?give --cpus-per-task}
    # A rank's other CPUs are for its workers, which decode the images.
    export OMP_NUM_THREADS=1
    # When a rank has ended, the others have a minute (--wait).
    srun --kill-on-bad-exit=1 --wait=60 "${python[@]}" main.py "${arguments[@]}"
}

# Run a command once on each node, with all the CPUs that the job has there, not one task's.
on_each_node() {
    env -u SLURM_CPUS_PER_TASK srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
        --cpu-bind=none --kill-on-bad-exit=1 "$@"
}

make_folder() {
    # After a requeue, the folder may be there: this node's mark says that it is this job's.
    mark=$LOCAL_JOB_DIR/.made-on-$SLURMD_NODENAME
    [ -O "$mark" ] || mkdir "$LOCAL_JOB_DIR" || fail "$(hostname) needs its own local_disk"
    touch "$mark"
    # What a killed prepare_data.py has left.
    rm -rf "$LOCAL_JOB_DIR"/data.unfinished-*
}

remove_folder() {
    [ -O "$LOCAL_JOB_DIR/.made-on-$SLURMD_NODENAME" ] || return 0
    # The index goes first, so that no later start mistakes what is left for the whole data.
    # The mark, which * leaves out, goes only if all else has gone.
    rm -rf "$LOCAL_JOB_DIR/data/index.json" "${LOCAL_JOB_DIR:?}"/* && rm -rf "$LOCAL_JOB_DIR"
}

name_rank_0() { ((SLURM_PROCID)) || echo "rank 0 is on $SLURMD_NODENAME"; }

# Every node takes the commit to its own disk, and the job runs there.
use_commit() {
    git show "$GIT_COMMIT:./code_checkpointing.sh" > "$LOCAL_JOB_DIR/code_checkpointing.sh" ||
        fail "no commit $GIT_COMMIT in $PWD"
    # shellcheck source=imagenet/code_checkpointing.sh
    source "$LOCAL_JOB_DIR/code_checkpointing.sh"
}

# With `--array=1-8 job.sh @sweep.txt`, each task of the array takes its own line of sweep.txt.
# Arguments after @sweep.txt are for all tasks.
choose_arguments() {
    arguments=("$@")
    if [[ ${1:-} == @* ]]; then
        # Windows ends lines with \r, too.
        line=$(tr -d '\r' < "${1#@}" | awk "NR == ${SLURM_ARRAY_TASK_ID:?give --array}")
        # Read as a shell does it: quotes, ~ and $SCRATCH work there.
        eval "arguments=($line
        )"
        ((${#arguments[@]})) || fail "${1#@}: line $SLURM_ARRAY_TASK_ID is empty or missing"
        arguments+=("${@:2}")
    elif [ "${SLURM_ARRAY_TASK_ID:-}" ]; then
        # Each task has a seed of its own, unless the arguments name one.
        arguments=(--seed="$SLURM_ARRAY_TASK_ID" "$@")
    fi
    case " ${arguments[*]}" in *" --synthetic"* | *" --data-dir"*) IMAGENET_DIR="" ;; esac
}

# The one rule: a job that has not finished is requeued if it got further since it started, or
# if Slurm preempted it. Otherwise it fails. This runs however the script ends.
finish() {
    status=$?
    # Even where the disk of the log is full, and echo fails.
    set +e
    # The copy of the code may be gone.
    cd "$JOB_WORK_DIR"
    if rm "$GOT_FURTHER" 2> /dev/null; then got_further=yes; fi
    # Slurm is ending this job itself, and decides whether it comes back. Remove nothing: ranks
    # may still be saving there.
    [ -z "${ended_by_slurm:-}" ] || exit "$status"
    # One task of an array is 7_3.
    this_job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
    # This waits until Slurm's controller answers. The next lines need it, too.
    job=$(show_job "$this_job")
    # A controller that has just come back takes some seconds to find its nodes: try three times.
    # The time limit may be near. What stays is removed when you next stage data on that node.
    for _ in 1 2 3; do
        timeout 20 bash -c 'on_each_node --overlap --immediate=10 bash -c remove_folder' && break
        # Where a node is missing, this one removes its own.
        timeout 20 bash -c remove_folder
    done
    # If it was cancelled meanwhile, a requeue would bring it back.
    [ -z "${ended_by_slurm:-}" ] || exit "$status"
    if [ "$status" = 0 ]; then
        # Or Slurm 24.11 would start a finished job again that was preempted once.
        scontrol update JobId="$this_job" Requeue=0
    elif [[ ${got_further:-} || $job == *PreemptTime=2* ]]; then  # 2026-…, or None
        echo "job.sh: status $status: to be requeued"
        for _ in {1..12}; do
            # A requeue ends this job. If that ends scontrol, too, it has still succeeded.
            if scontrol requeue "$this_job" || [ "${ended_by_slurm:-}" ]; then exit "$status"; fi
            sleep 10
        done
        fail "not requeued: sbatch job.sh with --checkpoint-dir=…/$this_job"
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

# Checks before the training.
check_job() {
    # Only sbatch sets ENVIRONMENT. In a shell of srun --pty, another srun would only wait.
    [ "${ENVIRONMENT:-}" ] || fail "start it with sbatch"
    [[ ${SLURM_JOB_ID_HET_GROUP_0:-} != "$SLURM_JOB_ID" ]] || fail "heterogeneous job"
    [ -e main.py ] || fail "no main.py in $PWD"
    # In a container, this prints the version, or Apptainer says why not.
    [[ ${python[1]:-} != @(exec|run) ]] || "${python[@]}" -V || fail "fails: ${python[*]}"
}
# If another job has submitted this one, these variables may be that job's: ask Slurm.
ask_slurm() {
    job=$(show_job "$SLURM_JOB_ID")
    [[ $job == *ArrayJobId=* ]] || unset "${!SLURM_ARRAY_@}"
    job=${job#* Restarts=}
    export SLURM_RESTART_COUNT=${job%% *}
}
# sbatch passes on the variables of your shell. If another job or torchrun has started that
# shell, its variables would change how srun starts this one. Unset all but those that describe
# this job, that usual #SBATCH lines set (give --gpu-bind to srun), or that belong to the site.
# ${!SLURM_@} stands for all names that begin with SLURM_.
forget_other_jobs() {
    keep='ARRAY_*|CLUSTER_NAME|CONF*|CPUS_ON_NODE|CPUS_PER_TASK|CPU_FREQ_REQ|DIST*'
    keep+='|GPUS_ON_NODE|HINT|JOB*|JWT|MPI_TYPE|NETWORK|NNODES|NODE*|NPROCS|NTASKS|NTASKS_PER_NODE'
    keep+='|PROFILE|SPANK*|SUBMIT*|TASKS_PER_NODE|THREADS_PER_CORE|TOPOLOGY*|WORKING_CLUSTER'
    keep="SLURM_@($keep|*SCRATCH*|*TMP*)"
    for name in "${!SLURM_@}" "${!SRUN_@}" "${!OMP_@}" "${!GOMP_@}" "${!TORCHELASTIC_@}"; do
        # shellcheck disable=SC2053 # a pattern
        [[ $name == $keep ]] || unset "$name"
    done
    # A port that comes with an address is another job's. By itself, it is your choice.
    [ -z "${MASTER_ADDR:-}" ] || unset MASTER_PORT
    # After sbatch --export=…, srun would pass on only the variables named there. Where Slurm
    # cannot load the login environment then, bash has a PATH and its tasks have none.
    export SLURM_EXPORT_ENV=ALL PATH
}
fail() {
    echo "job.sh: error: $*" >&2
    # Or srun might say that a task has failed before this line says why.
    sleep 1
    exit 1
}

# Only now: in the lines above main, a module or conda may have harmless errors.
set -euo pipefail
main "$@"
