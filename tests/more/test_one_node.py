"""What imagenet meets on a node: a folder of its own, a long TMPDIR, OpenMP's binding.

And what it takes of its memory.
"""

import ctypes
import functools
import os
import resource
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_checkpoint import RECIPE, begin, files, load, names, refused, run_ranks, write
from test_imagenet_training import DUMMY, data, options, run_to_its_end

pytestmark = pytest.mark.timeout(400)


def test_a_long_tmpdir(tmp_path):
    """The path of a worker's socket would be too long in it."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    arguments = [*DUMMY, "--epochs=1", "--timeout=30"]
    run_to_its_end(tmp_path, 1, *arguments, TMPDIR=str(folder))


def test_openmp_binds(monkeypatch, caplog):
    """It would keep all the workers on one CPU, and say nothing."""
    for value, warnings in (("FALSE", 0), ("close", 1)):
        monkeypatch.setenv("OMP_PROC_BIND", value)
        data.load_data(options())
        assert len(caplog.messages) == warnings
    assert caplog.messages[0].startswith("warning: OMP_PROC_BIND keeps all workers on")


def load_without_the_folder(folder: Path) -> str:
    """Return what ranks are told of which one is on a node that does not have it."""
    if dist.get_rank() == 1:
        assert ctypes.CDLL(None).unshare(0x20000) == 0  # CLONE_NEWNS
        for mount in ("--make-rprivate /", f"-t tmpfs none {folder}"):
            subprocess.run(["mount", *mount.split()], check=True)
    return refused(load, folder)


def test_a_folder_of_one_node(tmp_path):
    run_ranks(1, write, tmp_path, (1, 1))
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    said = f"not every node has {tmp_path}/{files((1, 1))[0]}: move it to a shared disk"
    assert run_ranks(2, load_without_the_folder, tmp_path) == [said] * 2
    assert names(tmp_path) == files((1, 1))


def load_and_look(folder: Path, megabytes: int) -> int:
    """Go on from a checkpoint; return by how much the memory's peak rose."""
    torch.nn.Linear(2**18 * megabytes, 1)  # the weights, and nothing else, before
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin(folder, 3, RECIPE, 2**10 * megabytes)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 2**10


def test_memory(tmp_path):
    """A rank copies a checkpoint once at most, whoever reads it."""
    run_ranks(1, functools.partial(write, kilobytes=2**18), tmp_path, (1, 1))
    rose = run_ranks(2, load_and_look, tmp_path, 2**8)
    # The file's own pages count, too, which the two ranks share.
    assert all(megabytes < 2.3 * 2**8 for megabytes in rose), rose
