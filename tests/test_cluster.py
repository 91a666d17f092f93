"""The test cluster itself.

Its nodes are hosts of their own, and nothing of it stays, however it ends.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import cluster as slurm
import pytest
from slurm_jobs import call as run

pytestmark = pytest.mark.usefixtures("start_cluster")  # it says what is missing
COMMAND = [sys.executable, slurm.__file__]
# A test run with a cluster.
OWNER = """
import os, sys, time
import cluster
read_end, write_end = os.pipe()
running, supervisor = cluster.start(nodes=1, gpus=1, cpus=2, lifeline=read_end)
print(running.state, running.address("node1"), supervisor.pid, flush=True)
time.sleep(1000)
"""


def traces(state: Path, address: str = "no.network") -> list[str]:
    """Return what is left of a cluster: its folder, network and processes."""
    left = [str(state)] if state.exists() else []
    subnet = f" {address.rpartition('.')[0]}."
    for command in ("ps -ww -eo args=", "ip -4 -o address"):
        lines = run(command.split()).output.splitlines()
        left += [line for line in lines if str(state) in line or subnet in line]
    return left


def test_nodes_are_hosts_of_their_own(cluster):
    """Jobs tell their host names, and meet on their network: other tests see that."""

    def on(node: str, command: str) -> str:
        return run([*cluster.namespaces(node), "sh", "-c", command]).output

    on("node1", "echo mine > /tmp/test-cluster-file")
    assert on("node2", "ls -A /tmp") != on("node1", "ls -A /tmp")
    assert not Path("/tmp/test-cluster-file").exists()
    on("node1", "rm /tmp/test-cluster-file")
    assert "node1" not in Path("/etc/hosts").read_text()
    # A mount over that file alone would go when the machine replaces its own.
    assert on("node2", "findmnt -n -o TARGET -T /etc/hosts") == "/etc\n"


def test_killed():
    """Without the supervisor, its folder stays, and the next start removes that.

    When a test run is killed, all goes: see test_conftest.py.
    """
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        cwd=Path(slurm.__file__).parent,
        stdout=subprocess.PIPE,
        text=True,
    )
    folder, address, supervisor = owner.stdout.readline().split()
    state = Path(folder)
    assert len(traces(state, address)) > 3
    os.kill(int(supervisor), signal.SIGKILL)
    deadline = time.monotonic() + 10
    while (left := traces(state, address)) != [folder]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    owner.kill()
    os.utime(state, (0, 0))  # as if it had been a while
    slurm.remove_leftovers()
    assert traces(state, address) == []


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
    assert traces(state) == []
    shell = f'{up.stdout}\n{down.stdout}\necho "${{SLURM_CONF-none}} $PATH"'
    assert call("bash", "-c", shell).stdout == f"none {os.environ['PATH']}\n"


@pytest.mark.every_case
def test_demo():
    """The job that loses a node ends with the weights of the one that does not."""
    command = [sys.executable, slurm.__file__.replace("cluster.py", "demo.py")]
    result = run(command)
    assert result.exit_code == 0, result
    assert "requeued 1 times" in result.output, result
