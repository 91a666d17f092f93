"""The test cluster by hand: the commands of README.rst, after which nothing stays."""

import os
import re
import subprocess
import sys
from pathlib import Path

import cluster as slurm
import pytest
from slurm_jobs import call as run

pytestmark = pytest.mark.usefixtures("start_cluster")  # it says what is missing
COMMAND = [sys.executable, slurm.__file__]


def test_commands(pytestconfig):
    """`up` tells a shell what it needs, `exec` looks into a node, `down` ends all."""
    if slurm.running():
        pytest.skip("`cluster.py up` has started one here, which `down` would stop")

    def call(*command: str) -> subprocess.CompletedProcess:
        return subprocess.run(command, capture_output=True, text=True)

    slurm_option = pytestconfig.getoption("slurm") or "installed"
    shape = ["--nodes", "2", "--gpus", "3", "--slurm", slurm_option]
    up = call(*COMMAND, "up", *shape)
    assert up.returncode == 0, up.stderr
    try:
        sinfo = "sinfo --noheader --Node --partition=main --format='%N %T %G'"
        nodes = call("bash", "-c", f"{up.stdout}\n{sinfo}")
        assert nodes.stdout == "node1 idle gpu:3\nnode2 idle gpu:3\n", nodes
        # Its nodes share this machine's CPUs.
        threads = "OMP_NUM_THREADS=8 srun printenv OMP_NUM_THREADS"
        assert call("bash", "-c", f"{up.stdout}\n{threads}").stdout == "1\n"
        hostname = call(*COMMAND, "exec", "node2", "hostname")
        assert hostname.stdout == "node2\n", hostname
        # For another shell.
        again = call(*COMMAND, "up", "--nodes=5")
        assert again.stdout == up.stdout, again
        assert again.stderr == "2 nodes were running already, as they are\n", again
    finally:
        state = Path(re.search("SLURM_CONF=(.*?)/slurm.conf", up.stdout)[1])
        down = call(*COMMAND, "down")
    assert down.returncode == 0, down.stderr
    assert down.stderr == f"1 stopped; in the shells that use it: {down.stdout}"
    assert not state.exists()
    assert str(state) not in run("ps -ww -eo args=".split()).output
    shell = f'{up.stdout}\n{down.stdout}\necho "${{SLURM_CONF-none}} $PATH"'
    assert call("bash", "-c", shell).stdout == f"none {os.environ['PATH']}\n"
