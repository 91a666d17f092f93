#!/bin/bash
#SBATCH --job-name=imagenet
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4  # processes, one a GPU
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G            # per node
#SBATCH --time=03:00:00      # Slurm ends the job then
#SBATCH --signal=B:USR1@180  # and warns this script 180 s before, which warns main.py
#SBATCH --requeue            # Slurm may start the job again, to resume
#SBATCH --open-mode=append   # in the same log
#SBATCH --propagate=CORE     # of the login shell's limits (ulimit), only that on core files
#SBATCH --wait-all-nodes=1   # start when all are ready
# EDIT: add the #SBATCH lines your cluster asks for: --account, --partition, a GPU's type,
# and --tmp=160G if some nodes' own disks are too small for ImageNet.
# EDIT: write the folder of ImageNet's archives, or your own .tar, .zip or class folders, after -
# or export it before sbatch. If it is empty, use --synthetic or --data-dir.
export IMAGENET_DIR=${IMAGENET_DIR-}
# EDIT: how Python starts. The default is the Python that `uv sync` has installed. For conda or
# a module, load it here, then python=(python -X faulthandler). In a container, --bind the disks
# of the clone, the data and the node:
# python=(apptainer exec --nv --bind /scratch,/local /scratch/image python -E -s -X faulthandler)
# With -X faulthandler, a crash prints where Python was. -E and -s ignore PYTHONPATH, ~/.local
# and the like, which may be of other software.
python=(../.venv/bin/python -E -X faulthandler)
# EDIT: the node's own disk. Some clusters set SLURM_TMPDIR. If yours has another one, write it
# in place of /tmp.
local_disk=${SLURM_TMPDIR:-/tmp}
# EDIT: what to add to the first node's name for the fast network: i on JSC's machines.
master_suffix=
# EDIT: staging can shrink the images, if GPUs wait for the data: prepare=(--resize 400).
prepare=()

main() {
    # With safe_sbatch, a job runs a commit. Relative paths of checkpoints start in JOB_WORK_DIR.
    export GIT_COMMIT=${SLURM_GIT_COMMIT:-} JOB_WORK_DIR=$PWD clone=${PWD%/*}
    check_job
    forget_other_jobs
    ask_slurm
    restarts=${job#* Restarts=}
    export SLURM_RESTART_COUNT=${restarts%% *}
    # If an array's task has submitted this job, its variables are here, too.
    [[ $job == *ArrayJobId=* ]] || unset "${!SLURM_ARRAY_@}"
    this_job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
    echo "Job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, $(date)," \
        "requeued $SLURM_RESTART_COUNT times"
    # Ignore ~/.local, which a Python without an environment would use first.
    export PYTHONNOUSERSITE=1
    make_run_dir "$PWD/checkpoints/$this_job"
    # The data goes to a folder of this job's own on the node's disk, removed at the end. If Slurm
    # gives no time for that, this job's next start does it. mktemp draws a name that nobody else
    # can foresee.
    LOCAL_JOB_DIR=$local_disk/slurm-job-$SLURM_JOB_ID-$SLURM_CLUSTER_NAME.$(mktemp -u XXXXXXXX)
    export LOCAL_JOB_DIR
    # Slurm ends this job itself: scancel, the time limit, scontrol requeue.
    trap 'ended_by_slurm=yes' TERM
    # Slurm warns only this script. If it warned the whole job, some clusters would end the step
    # that holds the job's own /tmp.
    trap 'warned=yes; kill -USR1 "${training:-}" 2> /dev/null || :' USR1
    trap finish EXIT
    # Once on each node, with all the CPUs that the job has there, not one task's.
    on_each_node=(env -u SLURM_CPUS_PER_TASK srun --ntasks="$SLURM_JOB_NUM_NODES"
        --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1)
    "${on_each_node[@]}" bash -euc "$(declare -f stage fail); stage"
    # In /tmp, another user could put code into PyTorch's cache.
    export TMPDIR=$LOCAL_JOB_DIR TORCHINDUCTOR_CACHE_DIR=$LOCAL_JOB_DIR/compiled
    if [ -n "$GIT_COMMIT" ]; then use_commit; fi
    type "${python[0]}" &>/dev/null || fail "$SLURMD_NODENAME has no ${python[0]}: uv sync --locked"
    # Each task of an array has a seed of its own, unless the arguments name one.
    [[ -z ${SLURM_ARRAY_TASK_ID:-} || ${1:-} == @* ]] || set -- --seed="$SLURM_ARRAY_TASK_ID" "$@"
    choose_arguments "$@"
    case " ${arguments[*]}" in *" --synthetic"* | *" --data-dir"*) IMAGENET_DIR="" ;; esac
    if [ -n "$IMAGENET_DIR" ]; then
        # A wrong argument ends the job here, not when the data has been copied.
        "${python[@]}" main.py "${arguments[@]}" --only-check-arguments
        "${on_each_node[@]}" "${python[@]}" prepare_data.py "${prepare[@]}"
    fi

    # Rank 0 listens on its node, on a port of the job's own. From Slurm 26.05 on, that may be
    # another node than this script's.
    # shellcheck disable=SC2016 # each task's shell expands this
    MASTER_ADDR=$(srun bash -c '((SLURM_PROCID)) || echo "rank 0 is on $SLURMD_NODENAME"' |
        sed -n 's/.*rank 0 is on //p')
    export MASTER_ADDR=${MASTER_ADDR:?srun does not answer}$master_suffix
    export MASTER_PORT=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}
    # If ranks cannot meet, export both as INFO to see more.
    export NCCL_DEBUG=${NCCL_DEBUG:-WARN} TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}

    # Slurm 22.05 and 23.02 give a task one CPU unless SRUN_CPUS_PER_TASK is set.
    export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:?give --cpus-per-task}
    # A rank's other CPUs are for its workers, which decode the images.
    export OMP_NUM_THREADS=1
    train "${python[@]}" main.py "${arguments[@]}"
}

# Start the tasks, and pass Slurm's warning on to them.
train() {
    [ -z "${warned:-}" ] || fail "Slurm's warning came before the training"
    # When a rank has ended, the others have a minute (--wait).
    srun --kill-on-bad-exit=1 --wait=60 "$@" &
    training=$!
    wait_for_srun
    wait "$training"
}
# A signal ends wait, but not srun.
wait_for_srun() { while kill -0 "${training:-}" 2> /dev/null; do wait "$training"; done || :; }

stage() {
    [ ! -k . ] || fail "the job's folder is missing on $SLURMD_NODENAME"
    # What Slurm gave an earlier start of this job no time to remove. A link, or what is another
    # user's, is left alone.
    find "${LOCAL_JOB_DIR%/*}/" -maxdepth 1 -type d -user "$UID" -perm -700 \
        -name "slurm-job-$SLURM_JOB_ID-$SLURM_CLUSTER_NAME.*" ! -name "${LOCAL_JOB_DIR##*/}" \
        -exec rm -rf {} + || :
    # mkdir fails where local_disk is missing, or where the nodes share it.
    mkdir -m 700 "$LOCAL_JOB_DIR" || fail "$SLURMD_NODENAME cannot use ${LOCAL_JOB_DIR%/*}"
}
# Every node takes the commit to its own disk, and the job runs there.
use_commit() {
    script=$(git show "$GIT_COMMIT:./code_checkpointing.sh") || fail "no commit $GIT_COMMIT in $PWD"
    eval "$script"
}
remove_data() {
    # A controller that has just come back takes some seconds to find its nodes: try three times.
    # If the job has not finished, the time limit may be near.
    for _ in 1 2 3; do
        timeout $((status ? 20 : 600)) "${on_each_node[@]}" --overlap --immediate=10 \
            rm -rf "$LOCAL_JOB_DIR" && return
        # Where a node is missing, this one removes its own.
        timeout 20 rm -rf "$LOCAL_JOB_DIR"
    done
}

# What main.py saves goes to RUN_DIR. A job has the same one when it starts again. To go on with
# another job's, export RUN_DIR before sbatch.
make_run_dir() {
    # If another job has submitted this one, RUN_DIR may be that job's.
    [ -z "${LOCAL_JOB_DIR:-}" ] || unset RUN_DIR
    go_on=${RUN_DIR:-}
    export RUN_DIR=${RUN_DIR:-$1}
    mkdir -p "$RUN_DIR" || fail "cannot make RUN_DIR"
    [[ ! $go_on || ${SLURM_ARRAY_TASK_COUNT:-1} == 1 ]] || fail "unset RUN_DIR, or all tasks share it"
    list_checkpoints >> "$RUN_DIR/seen" || fail "cannot write $RUN_DIR/seen"
    # Slurm's job numbers come again, as with a new controller.
    [[ $go_on || ! -s $RUN_DIR/seen ]] || ((SLURM_RESTART_COUNT)) ||
        fail "$RUN_DIR is an earlier job's: move it away, or export RUN_DIR='$RUN_DIR'"
}
# A checkpoint has that in its name, or ends as people's do, and is no empty folder. What ends in
# tmp, part or partial is not whole: the disk may be full.
list_checkpoints() {
    find "$RUN_DIR/" -mindepth 1 ! \( -type d -empty \) -printf '/%P\n' |
        grep -aEi '(checkpoint|ckpt)[^/]*$|\.(pt|pth|pth\.tar|th|bin|pkl|safetensors)$|/done$' |
        grep -aEiv '[/._-](tmp|part|partial|damaged)([/.-]|$)' || [ $? = 1 ]  # none
}
# With `--array=1-8 job.sh @sweep.txt`, each task of the array takes its own line of sweep.txt.
# Arguments after @sweep.txt are for all tasks.
choose_arguments() {
    # $RUN_DIR in an argument is the job's.
    arguments=("${@//\$RUN_DIR/"$RUN_DIR"}")
    [[ ${1:-} == @* ]] || return 0
    # The line is kept for the next start, because you may edit the file.
    [ -s "$RUN_DIR/line" ] ||
        awk "NR == ${SLURM_ARRAY_TASK_ID:?give --array}" < "${1#@}" > "$RUN_DIR/line"
    words=() line=$(tr -d '\r' < "$RUN_DIR/line")  # Windows ends lines with \r
    (read_words "$line") || fail "${1#@}: line $SLURM_ARRAY_TASK_ID is wrong, see above"
    read_words "$line"
    set +f
    ((${#words[@]})) || fail "${1#@}: line $SLURM_ARRAY_TASK_ID is empty or missing"
    arguments=("${words[@]}" "${arguments[@]:1}")
}
# A line's words, as a shell reads them: quotes, ~ and $SCRATCH work. But * stays *.
read_words() {
    set -fu
    # Or the ) below would not end the list.
    [[ $1 != *\\ ]] || { echo "it ends in a backslash: a run is one line"; exit 1; }
    eval "words+=($1
    )"
}

# The one rule: a job that has not finished starts again if RUN_DIR has a checkpoint of a name
# that no earlier start had, or if Slurm preempted it. Otherwise it fails. This runs however the
# script ends.
finish() {
    status=$?
    # Even where the disk of the log is full, and echo fails.
    set +e
    cd "$JOB_WORK_DIR"
    # When Slurm ends the job, ranks may still be saving.
    wait_for_srun
    # How busy the GPUs were, if gpu_report stands in front of Python.
    [[ ${python[0]} != *gpu_report ]] || "${python[0]}"
    # In variables: bash would forget a TERM of Slurm's that comes while [[ ]] runs a command.
    found=$(list_checkpoints)
    new=$(echo "$found" | grep -avxFf "$RUN_DIR/seen")
    # The next lines need Slurm's controller.
    [ "${ended_by_slurm:-}" ] || ask_slurm
    remove_data
    if [ "$status" = 0 ]; then
        # Or Slurm 24.11 would start a finished job again that was preempted once.
        scontrol update JobId="$this_job" Requeue=0
        exit 0
    fi
    # Then Slurm decides whether it comes back. A requeue would bring a cancelled job back.
    [ -z "${ended_by_slurm:-}" ] || exit "$status"
    if [[ $new || $job == *PreemptTime=2* ]]; then  # 2026-…, or None
        for _ in 1 2 3; do
            # A requeue ends this job. If that ends scontrol, too, it has still succeeded.
            if scontrol requeue "$this_job" || [ "${ended_by_slurm:-}" ]; then
                echo "job.sh: status $status: starts again, to resume"
                exit "$status"
            fi
            sleep 5
            ask_slurm || break
        done
        fail "Slurm does not start it again. To go on: RUN_DIR='$RUN_DIR' sbatch job.sh"
    fi
    there=$(echo "$found" | sort -V | tail -n 3 | paste -sd ' ')
    fail "status $status, no new checkpoint in $RUN_DIR (there: ${there:-none}): not started again
job.sh: what now: python3 '$clone/docs/explain.py' '$(readlink -f /dev/stderr)'"
}

# Again until Slurm's controller answers: it may be busy. The last task of an array has the
# array's number, for which Slurm shows all tasks.
ask_slurm() {
    for _ in {1..60}; do
        # Without the 0, it would be the status of the script, when that is ending.
        job=$(scontrol show job --oneliner "$SLURM_JOB_ID" | grep "^JobId=$SLURM_JOB_ID ") &&
            return 0
        echo "job.sh: waiting for Slurm's controller" >&2
        sleep 10
    done
    echo "job.sh: error: no answer of Slurm's controller in ten minutes" >&2
    return 1
}

# Checks before the training.
check_job() {
    # Only sbatch sets ENVIRONMENT. In a shell of srun --pty, another srun would only wait.
    [ "${ENVIRONMENT:-}" ] || fail "start it with sbatch"
    # Where the job's folder is missing, Slurm starts in /tmp, whose files may be anybody's.
    [ ! -k . ] || fail "the job's folder is missing on $SLURMD_NODENAME"
    [ -e main.py ] || fail "no main.py in $PWD"
    type scontrol > /dev/null
    # In a container, this prints the version, or why not: the disk may lack --bind.
    look='import os, sys; print("Python", sys.version.split()[0]); os.stat(sys.argv[1])'
    [[ ${python[1]:-} != @(exec|run) ]] || "${python[@]}" -c "$look" "$local_disk" ||
        fail "fails: ${python[*]}"
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
    # With it, bash forgets how a command ended, and Slurm's read no option after a name.
    unset POSIXLY_CORRECT
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
