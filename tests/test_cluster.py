"""The test cluster itself.

Its nodes are hosts of their own, and nothing of it stays, however it ends.
"""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import cluster as slurm
import pytest

COMMAND = [sys.executable, slurm.__file__]


@pytest.fixture(autouse=True)
def requirements():
    if reason := slurm.missing_requirements():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def traces(state: Path) -> list[str]:
    """Return what is left of a cluster: its folder, and processes that name it."""
    processes = subprocess.run(
        ["ps", "-ww", "-eo", "args="], capture_output=True, text=True
    ).stdout.splitlines()
    left = [process for process in processes if str(state) in process]
    return left + [str(path) for path in [state] if path.exists()]


def links() -> set[str]:
    lines = subprocess.run(
        ["ip", "-o", "link"], capture_output=True, text=True
    ).stdout.splitlines()
    return {line.split()[1] for line in lines}


def wait_until(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "too late"
        time.sleep(0.05)


def test_nodes_are_hosts_of_their_own(cluster):
    def on(node: str, command: str) -> str:
        full = [*cluster.namespaces(node), "sh", "-c", command]
        return subprocess.run(full, check=True, capture_output=True, text=True).stdout

    assert cluster.nodes == ["node1", "node2", "node3"]
    assert [on(node, "hostname").strip() for node in cluster.nodes] == cluster.nodes
    assert len({on(node, "ip -4 -o address show eth0") for node in cluster.nodes}) == 3
    on("node1", "echo mine > /tmp/test-cluster-file")
    assert on("node2", "ls -A /tmp") != on("node1", "ls -A /tmp")
    assert not Path("/tmp/test-cluster-file").exists()
    on("node1", "rm /tmp/test-cluster-file")
    address = on("node1", "getent hosts node3").split()[0].removeprefix("::ffff:")
    assert f"inet {address}/" in on("node3", "ip -4 -o address show eth0")
    assert (
        "node1" in on("node2", "cat /etc/hosts")
        and "node1" not in Path("/etc/hosts").read_text()
    )


def test_machine_replaces_its_hosts_file(tmp_path):
    """The nodes know each other after /etc/hosts is a new file: `sed -i` makes one."""
    code = f"""
        import os, subprocess, sys
        sys.path.insert(0, {str(Path(slurm.__file__).parent)!r})
        import cluster
        read_end, write_end = os.pipe()
        running, supervisor = cluster.start(nodes=2, gpus=1, cpus=2, lifeline=read_end)
        subprocess.run(["sed", "-i", "", "/etc/hosts"], check=True)
        for host in ["controller", "node1"]:
            command = [*running.namespaces(host), "getent", "ahostsv4", "node2"]
            print(subprocess.run(command, capture_output=True, text=True).stdout)
        os.close(write_end)
        supervisor.wait()
    """
    # Here, the machine's /etc is a copy: the real one stays as it is.
    machine = 'cp --archive /etc "$0" && mount --bind "$0" /etc && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", machine, str(tmp_path / "etc")]
    command += [sys.executable, "-c", textwrap.dedent(code)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.stdout.count("STREAM node2") == 2, result


def test_owner_killed():
    """When a test run is killed, its cluster goes with it, within seconds."""
    owner_code = f"""
        import os, sys, time
        sys.path.insert(0, {str(Path(slurm.__file__).parent)!r})
        import cluster
        read_end, write_end = os.pipe()
        running, supervisor = cluster.start(nodes=1, gpus=1, cpus=2, lifeline=read_end)
        print(running.state, flush=True)
        time.sleep(1000)
    """
    before = links()
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(owner_code)],
        stdout=subprocess.PIPE,
        text=True,
    )
    state = Path(owner.stdout.readline().strip())
    assert len(traces(state)) > 3 and links() != before
    owner.kill()
    owner.wait()
    wait_until(lambda: not traces(state) and links() == before, seconds=10)


def test_supervisor_killed():
    """Even then no process and no network stays; the next start removes the folder."""
    before = links()
    read_end, write_end = os.pipe()
    running, supervisor = slurm.start(nodes=1, gpus=1, cpus=2, lifeline=read_end)
    os.close(read_end)
    os.kill(supervisor.pid, signal.SIGKILL)
    supervisor.wait()
    os.close(write_end)
    wait_until(
        lambda: traces(running.state) == [str(running.state)] and links() == before,
        seconds=10,
    )
    os.utime(running.state, (0, 0))  # as if it had been a while
    slurm.remove_leftovers()
    assert traces(running.state) == []


def test_commands(pytestconfig):
    """`up` tells a shell what it needs, `exec` looks into a node, `down` ends all."""
    if slurm.running():
        pytest.skip(
            "`cluster.py up` has started a cluster here, which `down` would stop"
        )
    slurm_option = pytestconfig.getoption("slurm") or "installed"
    up = [*COMMAND, "up", "--nodes", "2", "--gpus", "3", "--slurm", slurm_option]
    up = subprocess.run(up, capture_output=True, text=True)
    assert up.returncode == 0, up.stderr
    try:
        shell = (
            f"{up.stdout}\nsinfo --noheader --Node --partition=main --format='%N %T %G'"
        )
        sinfo = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
        assert sinfo.stdout.splitlines() == ["node1 idle gpu:3", "node2 idle gpu:3"], (
            sinfo
        )
        hostname = subprocess.run(
            [*COMMAND, "exec", "node2", "hostname"], capture_output=True, text=True
        )
        assert hostname.stdout == "node2\n", hostname
        again = subprocess.run([*COMMAND, "up"], capture_output=True, text=True)
        assert again.returncode == 1 and "one is running" in again.stderr
    finally:
        state = Path(re.search("SLURM_CONF=(.*?)/slurm.conf", up.stdout)[1])
        down = subprocess.run([*COMMAND, "down"], capture_output=True, text=True)
    assert down.returncode == 0, down.stderr
    assert down.stderr == f"1 stopped; in the shells that use it: {down.stdout}"
    assert traces(state) == []
    shell = f'{up.stdout}\n{down.stdout}\necho "${{SLURM_CONF-none}} $PATH"'
    after = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert after.stdout == f"none {os.environ['PATH']}\n", after


@pytest.mark.every_case
def test_demo():
    """The job that loses a node ends with the weights of the one that does not."""
    command = [sys.executable, slurm.__file__.replace("cluster.py", "demo.py")]
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert result.returncode == 0, result.stdout
    job = result.stdout.split("node2 has lost its power.")[1]
    assert "requeued 1 times" in job and "Resuming from " in job, job
    assert len(set(re.findall("Weights SHA-256 (.*),", result.stdout))) == 1, (
        result.stdout
    )
