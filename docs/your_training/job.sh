#!/bin/bash
#SBATCH --job-name=your_training
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1  # processes, one a GPU
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G            # per node
#SBATCH --time=01:00:00      # Slurm ends the job then
#SBATCH --signal=USR1@180    # and warns main.py 180 s before
#SBATCH --requeue            # Slurm may start the job again, to resume
#SBATCH --open-mode=append   # in the same log
#SBATCH --propagate=CORE     # of the login shell's limits (ulimit), only that on core files
#SBATCH --wait-all-nodes=1   # start when all are ready
# EDIT: add the #SBATCH lines your cluster asks for: --account, --partition, a GPU's type.
# EDIT: write the path of a tar file after :- or export it before sbatch. Each node unpacks it
# in $LOCAL_JOB_DIR/data. If it is empty, nothing is unpacked.
export DATA_ARCHIVE=${DATA_ARCHIVE:-}
# What your shell has set may be for another Python.
unset "${!PYTHON@}"
# EDIT: what your Python needs. PYTHONPATH=src finds your own packages in src.
export PYTHONUNBUFFERED=1 PYTHONPATH=
# EDIT: how Python starts. The default is the Python of your project's environment. For conda or
# a module, load it here, then python=(python -X faulthandler). In a container, --bind the disks
# of the clone, the data and the node:
# python=(apptainer exec --nv --bind /scratch,/local /scratch/image python -X faulthandler)
# With -X faulthandler, a crash prints where Python was.
python=(.venv/bin/python -X faulthandler)
# EDIT: the node's own disk. Some clusters set SLURM_TMPDIR. If yours has another one, write it
# in place of /tmp.
local_disk=${SLURM_TMPDIR:-/tmp}
# EDIT: what to add to the first node's name for the fast network: i on JSC's machines.
master_suffix=

main() {
    check_job
    forget_other_jobs
    echo "Job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, $(date)"
    # Ignore ~/.local, which a Python without an environment would use first.
    export PYTHONNOUSERSITE=1
    make_run_dir
    choose_arguments "$@"
    # The data goes to a folder of this job's own on the node's disk, removed at the end. After
    # scancel or the time limit, it may stay. $RANDOM makes its name unique: whatever else is
    # on that disk is left alone.
    export LOCAL_JOB_DIR=$local_disk/slurm-job-$SLURM_JOB_ID-$SLURM_CLUSTER_NAME.$RANDOM
    # Slurm ends this job itself: scancel, the time limit, scontrol requeue.
    trap 'trap - EXIT; remove_data; exit 143' TERM
    trap finish EXIT
    export -f on_each_node stage name_rank_0 remove_data fail
    on_each_node bash -euc stage

    # Rank 0 listens on its node, on a port of the job's own. From Slurm 26.05 on, that may be
    # another node than this script's.
    MASTER_ADDR=$(srun bash -c name_rank_0 | sed -n 's/^rank 0 is on //p')$master_suffix
    export MASTER_ADDR
    export MASTER_PORT=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}
    # If ranks cannot meet, export both as INFO to see more.
    export NCCL_DEBUG=${NCCL_DEBUG:-WARN} TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
    # By its source, PyTorch 2.15's new NCCL backend makes backward() wait for each all-reduce.
    # With 0, it takes the old one.
    export TORCH_DIST_USE_NCCL2=${TORCH_DIST_USE_NCCL2:-0}

    # Slurm 22.05 and 23.02 give a task one CPU unless SRUN_CPUS_PER_TASK is set.
    export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:?give --cpus-per-task}
    export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
    # When a rank has ended, the others have a minute (--wait).
    srun --kill-on-bad-exit=1 --wait=60 "${python[@]}" main.py "${arguments[@]}"
}

on_each_node() { srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 "$@"; }
stage() {
    # What Slurm gave an earlier start of this job no time to remove.
    rm -rf "${LOCAL_JOB_DIR%.*}".*
    # mkdir fails where local_disk is missing, or where the nodes share it.
    mkdir "$LOCAL_JOB_DIR" || fail "$(hostname) needs its own local_disk"
    [ -z "$DATA_ARCHIVE" ] || tar -xf "$DATA_ARCHIVE" --one-top-level="$LOCAL_JOB_DIR/data" ||
        fail "$(hostname) cannot unpack DATA_ARCHIVE=$DATA_ARCHIVE"
    # tar does not notice that a file is cut between two members. A whole one ends in zeros.
    [[ $(head -c 262 "$DATA_ARCHIVE" 2> /dev/null | tail -c 5) != ustar ]] ||
        [ -z "$(tail -c 1024 "$DATA_ARCHIVE" | tr -d '\0')" ] || fail "$DATA_ARCHIVE is cut"
    # What is read-only in the archive could not be removed.
    chmod -R u+rwX "$LOCAL_JOB_DIR"
}
name_rank_0() { ((SLURM_PROCID)) || echo "rank 0 is on $SLURMD_NODENAME"; }

# With || : no job fails because its folder cannot be removed.
remove_data() {
    rm -rf "$LOCAL_JOB_DIR" || :  # here first: Slurm may leave no time for the other nodes
    on_each_node --immediate=30 rm -rf "$LOCAL_JOB_DIR" || :
}

# What main.py saves goes to RUN_DIR. A job has the same one when it starts again. That of an
# array's task is runs/7_3.
make_run_dir() {
    job=$(show_job)
    # If an array's task has submitted this job, its variables are here, too.
    [[ $job == *ArrayJobId=* ]] || unset "${!SLURM_ARRAY_@}"
    this_job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
    export RUN_DIR=runs/$this_job
    mkdir -p "$RUN_DIR"
    saved_before=$(list_checkpoints)
    # Slurm's job numbers come again, as with a new controller.
    [[ -z $saved_before || $job != *Restarts=0* ]] || fail "move $RUN_DIR away: it is not empty"
}
# With `--array=1-8 job.sh @sweep.txt`, each task of the array takes its own line of sweep.txt.
# Arguments after @sweep.txt are for all tasks.
choose_arguments() {
    arguments=("$@")
    if [[ ${1:-} == @* ]]; then
        # The line is kept for the next start, because you may edit the file.
        [ -s "$RUN_DIR/line" ] ||
            awk "NR == ${SLURM_ARRAY_TASK_ID:?give --array}" < "${1#@}" > "$RUN_DIR/line"
        # Read as a shell does it: quotes, ~ and $SCRATCH work there. Windows ends lines with \r.
        eval "arguments=($(tr -d '\r' < "$RUN_DIR/line")
        )"
        ((${#arguments[@]})) || fail "${1#@}: line $SLURM_ARRAY_TASK_ID is empty or missing"
        arguments+=("${@:2}")
    fi
}
# A checkpoint is checkpoint.pt, checkpoint-500 or the like, also in a folder below, or done. What
# ends in tmp, part or partial is not whole: the disk may be full.
list_checkpoints() {
    find "$RUN_DIR" -regex '.*/\(checkpoint[.-].*\|done\)' \
        ! -regex '.*[._-]\(tmp\|part\|partial\)' -printf '%p %T@\n' | sort
}
# The one rule: a job that has not finished starts again if RUN_DIR has a checkpoint that it did
# not have at this start, or if Slurm preempted the job. Otherwise it fails.
finish() {
    status=$?
    # Even where the disk of the log is full, and echo fails.
    set +e
    # How busy the GPUs were, if gpu_report stands in front of Python.
    [[ ${python[0]} != *gpu_report ]] || "${python[0]}"
    if [ "$status" = 0 ]; then
        # Or Slurm 24.11 would start a finished job again that was preempted once.
        scontrol update JobId="$this_job" Requeue=0
        remove_data
        exit 0
    fi
    # In variables: bash would forget a TERM of Slurm's that comes while [[ ]] runs a command.
    checkpoints=$(list_checkpoints)
    job=$(show_job)
    if [[ $checkpoints != "$saved_before" || $job == *PreemptTime=2* ]]; then
        echo "job.sh: status $status: starts again, to resume"
        # The time limit may be near. The next start of this job removes the rest.
        timeout 60 bash -c remove_data
        # A busy controller may not answer. A requeue ends this script.
        for _ in {1..12}; do scontrol requeue "$this_job" && break; sleep 10; done
    else
        remove_data
        fail "status $status, no new checkpoint in $RUN_DIR: not started again"
    fi
}
# Again until Slurm's controller answers: it may be busy. The last task of an array has the
# array's number, for which Slurm shows all tasks.
show_job() {
    until scontrol -o show job "$SLURM_JOB_ID" | grep "^JobId=$SLURM_JOB_ID "; do sleep 10; done
}

# Checks before the training.
check_job() {
    # Only sbatch sets ENVIRONMENT. In a shell of srun --pty, another srun would only wait.
    [ "${ENVIRONMENT:-}" ] || fail "start it with sbatch"
    [[ ${SLURM_JOB_ID_HET_GROUP_0:-} != "$SLURM_JOB_ID" ]] || fail "heterogeneous job"
    [ -e main.py ] || fail "no main.py in $PWD"
    type "${python[0]}" &> /dev/null || fail "$(hostname) has no ${python[0]}: uv sync --locked"
    # In a container, this prints the version, or Apptainer says why not.
    [[ ${python[1]:-} != @(exec|run) ]] || "${python[@]}" -V || fail "fails: ${python[*]}"
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
