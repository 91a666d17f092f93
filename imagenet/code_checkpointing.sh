#!/bin/bash
# job.sh reads this part of itself from git, at the commit that safe_sbatch names. It puts
# that commit on every node's own disk, and goes there: what is edited or committed after
# the submission changes nothing.
set -euo pipefail
export code=$LOCAL_JOB_DIR/code
code_folder=$code/$(git rev-parse --show-prefix)
export code_folder
repository=$(git rev-parse --show-toplevel)
export repository
# Checkpoints and IMAGENET_DIR stay where they are. Other relative paths, as of @sweep.txt and
# --data-dir, are those of the copy.
IMAGENET_DIR=${IMAGENET_DIR:+$(realpath -ms "$IMAGENET_DIR")}

copy_code() {
    mkdir "$code"
    # A checkout in all but its .git. git archive would leave files out that .gitattributes
    # has as export-ignore.
    GIT_INDEX_FILE=$code/.index git -C "$repository" --work-tree="$code" \
        read-tree -u --reset --no-sparse-checkout "$GIT_COMMIT" ||
        fail "cannot copy commit $GIT_COMMIT from $repository to $code on $SLURMD_NODENAME"
    # The environment that safe_sbatch has made stays on the shared disk.
    if lock=$(git rev-parse --quiet --verify "$GIT_COMMIT:../uv.lock" 2> /dev/null); then
        ln -sfn "$JOB_WORK_DIR/../.venvs/$lock" "$code_folder/../.venv"
    fi
    echo "Commit $GIT_COMMIT is on the disk of $SLURMD_NODENAME, after $SECONDS s"
}
# shellcheck disable=SC2154 # job.sh has it
"${on_each_node[@]}" bash -euo pipefail -c "$(declare -f copy_code fail); copy_code"
cd "$code_folder"
