#!/bin/bash
# All that wants a GPU, in one command: what it prints goes to a folder, too, a file a step.
#
#     tests/benchmarks/on_gpu.sh OUT CIFAR10_DIR [IMAGENET_DIR] [STEP...]
#
# CIFAR10_DIR has cifar-10-python.tar.gz or cifar-10-batches-py, IMAGENET_DIR the three archives (or is `-`); of the
# whole ImageNet, OUT takes 450 GB. Steps, all of them if none is named (`reference` takes longest):
# machine nccl sync accuracy reference rate step float16 requeue synthetic photographs
# A step that fails is named at the end, and the next ones run.
# PYTHON=python3 before it takes that Python, where there is no uv. PYTHONPATH=tests/any_checksum lets main.py take
# images that are not byte for byte CIFAR-10's.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,12s/^# \{0,1\}//p' "$0" >&2 && exit 2; }
mkdir -p "$1"
out=$(realpath "$1") cifar10=$(realpath "$2") imagenet=${3:--}
shift $(($# > 3 ? 3 : $#))
steps=${*:-machine nccl sync accuracy reference rate step float16 requeue synthetic photographs}
[ "$imagenet" = - ] || imagenet=$(realpath "$imagenet")
PYTHONPATH=${PYTHONPATH:+$(realpath "$PYTHONPATH")}
export PYTHONPATH
cd "$(dirname "$0")/../.."
# The examples would take an allocation's numbers for their own.
while read -r name; do unset "$name"; done < <(compgen -v SLURM_)
export TORCH_DIST_USE_NCCL2=${TORCH_DIST_USE_NCCL2:-0} # as main.py
if [ -n "${PYTHON:-}" ]; then python=("$PYTHON"); else uv sync --locked && python=(.venv/bin/python); fi
gpus=$("${python[@]}" -c "import torch; print(torch.cuda.device_count())")
[ "$gpus" != 0 ] || { echo "on_gpu.sh: error: PyTorch sees no GPU: nvidia-smi may say why" >&2 && exit 1; }
# By itself, imagenet's --synthetic is small. This is a real training's model, images and steps.
large=(--synthetic --model resnet50 --image-size 224 --batch-size 256 --workers 8)
torchrun=("${python[@]}" -m torch.distributed.run --standalone --nproc-per-node="$gpus")

run() {
    local name=$1
    shift
    echo "== $name: $*"
    SECONDS=0
    "$@" 2>&1 | tee "$out/$name.log"
    echo "== $name: $SECONDS s" | tee -a "$out/$name.log"
}

machine() {
    run machine nvidia-smi
    run versions "${python[@]}" -c "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.nccl.version(),
        torch.cuda.get_device_name())"
    run commit git -c safe.directory='*' log -1 --format=%H
}
# NCCL is set up, reduces, meets at a barrier and is shut down, with one rank and with all GPUs; it must not warn.
nccl() {
    export NCCL_DEBUG=WARN
    rm -rf "$out"/nccl*
    run nccl "${python[@]}" multi_gpu/main.py --synthetic --epochs 2
    run nccl-imagenet "${python[@]}" imagenet/main.py --synthetic --epochs 1 --batch-size 16 --profile \
        --checkpoint-dir "$out/nccl"
    if [ "$gpus" -gt 1 ]; then
        run nccl-all "${torchrun[@]}" multi_gpu/main.py --synthetic --epochs 2
        run nccl-imagenet-all "${torchrun[@]}" imagenet/main.py --synthetic --epochs 1 --batch-size 16 --profile \
            --checkpoint-dir "$out/nccl-all"
        # PyTorch 2.15's new way to NCCL, and the old one: traces show what each hides of all-reduce.
        for engine in 1 0; do
            TORCH_DIST_USE_NCCL2=$engine run "nccl-hidden-$engine" "${torchrun[@]}" imagenet/main.py "${large[@]}" \
                --limit-train-samples $((12800 * gpus)) --epochs 1 --profile --checkpoint-dir "$out/nccl-hidden-$engine"
        done
    fi
    # c10d, of a host whose name does not resolve, and PyTorch 2.11's profiler: no fault of NCCL's.
    if cat "$out"/nccl*.log | grep -v -e "socket\.cpp" -e "profiler\.py" | grep -E "NCCL WARN|Warning:|^warning:|\[W[0-9]{3,4} "; then
        echo "on_gpu.sh: error: NCCL or PyTorch warns, see above" >&2 && exit 1
    fi
}
sync() { # from the second step on, nothing in a step waits for the GPU: PyTorch raises where something does
    local half
    for half in True False; do # bfloat16, and float16 as on a V100
        run "sync-$half" "${python[@]}" -c "import sys, torch; sys.path.insert(0, 'single_gpu'); import main
torch.cuda.is_bf16_supported = lambda **_: $half
train = main.train
def checked_train(*args):
    def batches():
        for step, batch in enumerate(args[-1]):
            torch.cuda.set_sync_debug_mode('error' if step else 'default')
            yield batch
        torch.cuda.set_sync_debug_mode('default')
    return train(*args[:-1], batches())
main.train = checked_train
main.main()" --synthetic
    done
}
accuracy() {
    run accuracy "${python[@]}" single_gpu/main.py --data-dir "$cifar10"
}
reference() { # a plain, long schedule on the same files: what accuracy is to be compared with
    run reference "${python[@]}" single_gpu/main.py --data-dir "$cifar10" --epochs 100
}
rate() {
    run rate "${python[@]}" tests/benchmarks/cifar10_training.py --data-dir "$cifar10"
    run input "${python[@]}" tests/benchmarks/cifar10_input.py --data-dir "$cifar10"
}
step() {
    run step "${python[@]}" tests/benchmarks/training_step.py --ranks "$gpus" --steps 100 --batch-size 256
}
float16() { # as on a V100, beside what this GPU takes by itself
    run float16 "${python[@]}" -c "import sys, torch; sys.path.insert(0, 'single_gpu'); import main
torch.cuda.is_bf16_supported = lambda **_: False; main.main()" --data-dir "$cifar10" --epochs 5
    run float16-not "${python[@]}" single_gpu/main.py --data-dir "$cifar10" --epochs 5
}
warned() { # a command of imagenet's, warned after its first epoch
    coproc "$@"
    local training=$COPROC_PID log=${COPROC[0]} line
    while read -r -u "$log" line; do
        echo "$line"
        [[ $line != "Epoch 1: "* ]] || kill -USR1 "$training"
    done
    wait "$training"
}
requeue() { # the same weights, whether it is stopped or not; and what that costs in images/s
    local kind start weights
    rm -rf "$out"/requeue-*
    cp -r imagenet "$out/requeue-as-it-is"
    cp -r imagenet "$out/requeue-not-deterministic"
    sed -i "s/cudnn.deterministic = True/cudnn.deterministic = False/" "$out/requeue-not-deterministic/main.py"
    ! cmp -s "$out"/requeue-*/main.py || { echo "on_gpu.sh: error: main.py has changed" >&2 && exit 1; }
    for kind in as-it-is not-deterministic; do
        for start in whole stopped; do
            local command=("${python[@]}" "$out/requeue-$kind/main.py" "${large[@]}" --epochs 2
                --limit-train-samples 25600 --checkpoint-dir "$out/requeue-$kind/$start")
            # It ends with 75, which `run` passes on; the next start goes on.
            [ $start = whole ] || run "requeue-$kind-signalled" warned "${command[@]}" || true
            [ $start = whole ] || grep -q "^Asked to stop" "$out/requeue-$kind-signalled.log" ||
                { echo "on_gpu.sh: error: it was over before it was stopped" >&2 && exit 1; }
            run "requeue-$kind-$start.end" "${command[@]}"
        done
        weights=$(cat "$out/requeue-$kind"-*.end.log | grep -o "SHA-256 [0-9a-f]*" | sort -u | wc -l)
        echo "== requeue: $kind: $weights different weights" | tee -a "$out/requeue.log"
        [ "$weights" = 1 ] || [ $kind = not-deterministic ] ||
            { echo "on_gpu.sh: error: other weights after a stop" >&2 && exit 1; }
    done
}
synthetic() { # as people run it; photographs() has it beside the bare step
    rm -rf "$out/synthetic"
    run synthetic "${python[@]}" imagenet/main.py "${large[@]}" --limit-train-samples 128000 --epochs 2 \
        --checkpoint-dir "$out/synthetic"
}
photographs() {
    [ "$imagenet" != - ] || { echo "on_gpu.sh: no archives of ImageNet: no photographs" && return; }
    local cores scratch=$out/scratch
    for count in 4 8 16; do # the example and the usual way to feed the GPU, beside the bare step
        cores=$("${python[@]}" -c "import os; print(*sorted(os.sched_getaffinity(0))[:$count], sep=',')")
        run "photographs-$count" taskset --cpu-list "$cores" "${python[@]}" \
            tests/benchmarks/imagenet_training.py --source "$imagenet" --scratch "$scratch" --workers "$count"
    done
    run photographs-input "${python[@]}" tests/benchmarks/imagenet_input.py --source "$imagenet" --scratch "$scratch"
    rm -rf "$out/profile"
    run photographs-profile "${python[@]}" imagenet/main.py --data-dir "$scratch/copied" --epochs 1 --profile \
        --limit-train-samples 12800 --limit-valid-samples 2560 --checkpoint-dir "$out/profile"
}

failed=
for step in $steps; do
    set +e
    (set -e; "$step")
    status=$?
    set -e
    [ "$status" = 0 ] || failed+=" $step"
done
[ -z "$failed" ] || { echo "on_gpu.sh: error: failed:$failed" >&2 && exit 1; }
