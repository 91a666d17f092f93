#!/bin/bash
#SBATCH --job-name=single_gpu
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1  # processes
#SBATCH --gpus-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G            # per node
#SBATCH --time=01:00:00      # Slurm ends the job then
#SBATCH --no-requeue         # do not start over if a node fails
#SBATCH --propagate=CORE     # of the login shell's limits (ulimit), only that on core files
# EDIT: add the #SBATCH lines your cluster asks for: --account, --partition, a GPU's type.
# EDIT: write the path of cifar-10-python.tar.gz after :- or export it before sbatch. If it is
# empty, main.py downloads the data.
export CIFAR10_ARCHIVE=${CIFAR10_ARCHIVE:-}
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

main() {
    check_job
    forget_other_jobs
    echo "Job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, $(date)"
    # Ignore ~/.local, which a Python without an environment would use first.
    export PYTHONNOUSERSITE=1
    # The data goes to a folder of this job's own on the node's disk, removed at the end. After
    # scancel or the time limit, it may stay. mktemp draws a name that nobody else can foresee.
    LOCAL_JOB_DIR=$local_disk/slurm-job-$SLURM_JOB_ID-$SLURM_CLUSTER_NAME.$(mktemp -u XXXXXXXX)
    export LOCAL_JOB_DIR
    # With || : no job fails because its folder cannot be removed.
    trap 'rm -rf "$LOCAL_JOB_DIR" || :' EXIT
    stage
    # In /tmp, another user could put code into PyTorch's cache.
    export TMPDIR=$LOCAL_JOB_DIR TORCHINDUCTOR_CACHE_DIR=$LOCAL_JOB_DIR/compiled

    # Slurm 22.05 and 23.02 give a task one CPU unless SRUN_CPUS_PER_TASK is set.
    export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:?give --cpus-per-task}
    export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
    srun --kill-on-bad-exit=1 "${python[@]}" main.py "$@"
}

stage() {
    # mkdir fails where local_disk is missing, or where the nodes share it.
    mkdir -m 700 "$LOCAL_JOB_DIR" || fail "$SLURMD_NODENAME cannot use ${LOCAL_JOB_DIR%/*}"
    [ -z "$CIFAR10_ARCHIVE" ] || tar -xf "$CIFAR10_ARCHIVE" --one-top-level="$LOCAL_JOB_DIR/data" ||
        fail "$SLURMD_NODENAME cannot unpack CIFAR10_ARCHIVE=$CIFAR10_ARCHIVE"
    # What is read-only in the archive could not be removed.
    chmod -R u+rwX "$LOCAL_JOB_DIR"
}

# Checks before the training.
check_job() {
    # Only sbatch sets ENVIRONMENT. In a shell of srun --pty, another srun would only wait.
    [ "${ENVIRONMENT:-}" ] || fail "start it with sbatch"
    # Where the job's folder is missing, Slurm starts in /tmp, whose files may be anybody's.
    [ ! -k . ] || fail "the job's folder is missing on $SLURMD_NODENAME"
    [ -e main.py ] || fail "no main.py in $PWD"
    ((SLURM_JOB_NUM_NODES == 1)) || fail "use multi_node"
    type "${python[0]}" &>/dev/null || fail "$SLURMD_NODENAME has no ${python[0]}: uv sync --locked"
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
    exit 1
}

# Only now: in the lines above main, a module or conda may have harmless errors.
set -euo pipefail
main "$@"
