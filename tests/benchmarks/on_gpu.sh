#!/bin/bash
# All that wants a GPU, in one command: what it prints goes to a folder, too, a file a step.
#
#     tests/benchmarks/on_gpu.sh OUT CIFAR10_DIR [IMAGENET_DIR] [STEP...]
#
# CIFAR10_DIR has cifar-10-python.tar.gz or cifar-10-batches-py, IMAGENET_DIR the three archives (or is `-`). Steps:
# machine nccl accuracy reference rate step synthetic photographs. Without any, all of them; `reference` takes longest.
# PYTHONPATH=tests/any_checksum before it lets main.py take pictures that are not byte for byte CIFAR-10's.
set -euo pipefail
out=$1 cifar10=$(realpath "$2") imagenet=${3:--}
shift $(($# > 3 ? 3 : $#))
steps=${*:-machine nccl accuracy reference rate step synthetic photographs}
[ "$imagenet" = - ] || imagenet=$(realpath "$imagenet")
mkdir -p "$out"
out=$(realpath "$out")
cd "$(dirname "$0")/../.."
python=(uv run --no-sync python)
uv sync --locked

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
    run commit git log -1 --format=%H
}
# World size 1: NCCL is set up, reduces, meets at a barrier and is shut down; it must not warn.
nccl() {
    NCCL_DEBUG=WARN run nccl "${python[@]}" multi_gpu/main.py --synthetic --epochs 2
    NCCL_DEBUG=WARN run nccl-imagenet "${python[@]}" imagenet/main.py --synthetic --epochs 1 --checkpoint-dir "$out/nccl"
    if grep -i "warn" "$out"/nccl*.log; then echo "on_gpu.sh: error: NCCL or PyTorch warns, see above" >&2 && exit 1; fi
}
accuracy() {
    run accuracy "${python[@]}" single_gpu/main.py --data-dir "$cifar10"
    run accuracy-compiled "${python[@]}" single_gpu/main.py --data-dir "$cifar10" --compile
}
reference() { # a plain, long schedule on the same files: what accuracy is to be compared with
    run reference "${python[@]}" single_gpu/main.py --data-dir "$cifar10" --epochs 100
}
rate() {
    run rate "${python[@]}" tests/benchmarks/cifar10_training.py --data-dir "$cifar10"
    run rate-compiled "${python[@]}" tests/benchmarks/cifar10_training.py --data-dir "$cifar10" --compile
    run input "${python[@]}" tests/benchmarks/cifar10_input.py --data-dir "$cifar10"
}
step() {
    run step "${python[@]}" tests/benchmarks/training_step.py --ranks "$(nvidia-smi -L | wc -l)" --steps 100 --batch-size 256
}
synthetic() { # as people run it; photographs() has it beside the bare step
    run synthetic "${python[@]}" imagenet/main.py --synthetic --limit-train-samples 12800 --epochs 3 \
        --checkpoint-dir "$out/synthetic"
}
photographs() {
    [ "$imagenet" != - ] || { echo "on_gpu.sh: no archives of ImageNet: no photographs" && return; }
    run staging "${python[@]}" imagenet/prepare_data.py --source "$imagenet" --data-dir "$out/data"
    for cores in 4 8 16; do # the example and every other way to feed the GPU, decoding on it too, beside the bare step
        run "photographs-$cores" taskset --cpu-list "0-$((cores - 1))" "${python[@]}" \
            tests/benchmarks/imagenet_training.py --source "$imagenet" --workers "$cores"
    done
    run photographs-input "${python[@]}" tests/benchmarks/imagenet_input.py --source "$imagenet"
    run photographs-profile "${python[@]}" imagenet/main.py --data-dir "$out/data" --epochs 1 --profile \
        --checkpoint-dir "$out/profile"
}

for step in $steps; do
    "$step"
done
