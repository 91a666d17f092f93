#!/bin/bash
# job.sh reads this part of itself from git, at the commit that safe_sbatch names. It puts
# that commit and its environment on every node's own disk, and goes there: what is edited
# or committed after the submission changes nothing. Tasks also start quicker there than
# when they all load Python's modules from a network disk.
set -euo pipefail
unset UV_PROJECT_ENVIRONMENT VIRTUAL_ENV # the copy gets an environment of its own
export code=$SLURM_TMPDIR/code-$SLURM_JOB_ID
code_folder=$code/$(git rev-parse --show-prefix)
export code_folder
# Checkpoints go below WORK_DIR, unless there is a $SCRATCH. They and IMAGENET_DIR stay where
# they are; other relative paths, as of @sweep.txt and --data-dir, are those of the copy.
export WORK_DIR=$PWD
IMAGENET_DIR=${IMAGENET_DIR:+$(realpath -ms "$IMAGENET_DIR")}

copy_code() {
    # Slurm may have ended this job while it was here before.
    { rm -rf "$code" && mkdir "$code"; } || fail "cannot write to $code on $(hostname)"
    git -C "$(git rev-parse --show-toplevel)" archive "$GIT_COMMIT" | tar -x -C "$code" ||
        fail "cannot copy commit $GIT_COMMIT from $PWD to $code on $(hostname)"
    # uv takes from its cache what is there: a node needs internet for the rest only.
    uv sync --locked --quiet --directory "$code_folder" ||
        fail "cannot install what uv.lock lists into $code on $(hostname)." \
            "Without internet there, call uv sync --inexact --locked elsewhere first"
    echo "Commit $GIT_COMMIT is on the disk of $(hostname), after $SECONDS s"
}
export -f copy_code
on_each_node bash -euo pipefail -c copy_code
cd "$code_folder"
