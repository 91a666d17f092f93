"""What main.py says of GPUs, and how it asks for them. Here are none: PyTorch's answers
about them are made up.
"""

import os

import pytest
import torch
import torch.distributed as dist
from test_checkpoint import load_module

DISTRIBUTED = ("multi_gpu", "multi_node", "imagenet")
# The first of two tasks on a node.
TASK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture
def example(request, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM_", "MASTER"))]:
        monkeypatch.delenv(name)
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return load_module(f"{request.param}/main.py")


@pytest.mark.parametrize("example", DISTRIBUTED, indirect=True)
@pytest.mark.parametrize("visible, said", [(1, 1), (2, 0)])
def test_a_task_sees_one_gpu(example, visible, said, monkeypatch, caplog):
    """As with --gpus-per-task under salloc: NCCL may not find the way between GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert example.find_device() == torch.device("cuda", 0)
    assert caplog.text.count("use --gpus-per-node, or NCCL may fail or be slow") == said


@pytest.mark.parametrize("example", ["single_gpu", *DISTRIBUTED], indirect=True)
def test_pytorch_for_cpus(example, monkeypatch):
    """It is no broken GPU, which one would --exclude."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(SystemExit, match="this PyTorch is for CPUs only, beside a GPU"):
        example.find_device()


@pytest.mark.parametrize("example", ["single_gpu", *DISTRIBUTED], indirect=True)
def test_precision_is_asked_for_once(example, monkeypatch):
    """Not in each step, where the CPU hardly keeps up with a GPU."""
    asked = []
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda **_: not asked.append(1)
    )
    for _ in range(3):
        assert example.find_dtype(torch.device("cuda", 0)) == torch.bfloat16
    assert len(asked) == 1


@pytest.mark.parametrize("example", DISTRIBUTED, indirect=True)
@pytest.mark.parametrize(
    "chosen, creator",
    [(None, "_create_nccl_process_group"), ("1", "_create_nccl2_process_group")],
)
def test_nccl_backend(example, chosen, creator, monkeypatch):
    """PyTorch registers its old NCCL backend, unless somebody wants the new one.

    It looks at TORCH_DIST_USE_NCCL2 when NCCL is first used, not when it is imported.
    """
    monkeypatch.setenv("TORCH_DIST_USE_NCCL2", chosen or "")
    if chosen is None:
        monkeypatch.delenv("TORCH_DIST_USE_NCCL2")
    plugins = dist.Backend._plugins
    monkeypatch.setattr(dist.Backend, "_plugins", {})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    example.setup_distributed()
    try:
        dist.Backend._ensure_backend_registered("nccl")
        assert dist.Backend._plugins["NCCL"].creator_fn.__name__ == creator
    finally:
        dist.destroy_process_group()
        dist.Backend._plugins = plugins
