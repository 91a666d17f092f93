"""What main.py says of GPUs, and how it asks for them. Here are none: PyTorch's answers
about them are made up.
"""

import os

import pytest
import torch
import torch.distributed as dist
from test_checkpoint import load_module

DISTRIBUTED = ("multi_gpu", "multi_node", "imagenet")
# The second of two tasks on a node.
TASK = {"RANK": "0", "LOCAL_RANK": "1", "WORLD_SIZE": "1"}


@pytest.fixture
def example(request, monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM_", "MASTER"))]:
        monkeypatch.delenv(name)
    for name, value in TASK.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return load_module(f"{request.param}/main.py")


@pytest.mark.parametrize("example", DISTRIBUTED, indirect=True)
@pytest.mark.parametrize("visible", [1, 2])
def test_a_task_sees_one_gpu(example, visible, monkeypatch):
    """As with --gpus-per-task under salloc, or all GPUs of its node."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    assert example.find_device() == torch.device("cuda", visible - 1)


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
