#!/bin/bash
# The part of job.sh that puts the tree at GIT_COMMIT, with its environment, on every node's own disk, and goes there.
# Edits and commits made after the submission change nothing, not even if they are to this file: job.sh reads it from
# git, at that commit. Tasks also start quicker than they do when all load Python's modules from a network disk.
set -euo pipefail
unset UV_PROJECT_ENVIRONMENT VIRTUAL_ENV # the copy gets an environment of its own

code=$SLURM_TMPDIR/code/$GIT_COMMIT # jobs of other commits may share SLURM_TMPDIR
code_folder=$code/$(git rev-parse --show-prefix)
export code code_folder

copy_code() {
    fail() {
        echo "code_checkpointing.sh: error: cannot $1 on $(hostname)" >&2
        sleep 1 # or srun says that the task has failed before it passes on why
        exit 1
    }
    mkdir -p "$SLURM_TMPDIR/code" || fail "write to $code"
    [[ $SLURM_TMPDIR != /tmp/slurm-job-* || (-O $SLURM_TMPDIR && ! -L $SLURM_TMPDIR) ]] || fail "use another user's $SLURM_TMPDIR"
    exec 9> "$code.lock" || fail "write to $code"
    flock 9 # jobs of the same commit may share SLURM_TMPDIR, too
    if [ ! -e "$code.complete" ]; then
        { rm -rf "$code" && mkdir "$code"; } || fail "write to $code" # a job that was killed may have left a part
        git -C "$(git rev-parse --show-toplevel)" archive "$GIT_COMMIT" | tar -x -C "$code" ||
            fail "copy commit $GIT_COMMIT from $PWD to $code"
    fi
    # Takes from uv's cache what is there: a node needs internet only for what is not. Another job may have needed less.
    # shellcheck disable=SC2086 # several flags
    uv sync --quiet --inexact ${SYNC_FLAGS:---locked} --directory "$code_folder" ||
        fail "install what uv.lock lists into $code (no internet? first run uv sync --inexact ${SYNC_FLAGS:---locked} elsewhere)"
    [ -e "$code.complete" ] || echo "Commit $GIT_COMMIT and its environment are on the disk of $(hostname), after $SECONDS s"
    touch "$code.complete" || fail "write to $code"
}
export -f copy_code
on_each_node bash -euo pipefail -c copy_code
cd "$code_folder"
