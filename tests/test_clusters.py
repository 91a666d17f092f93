"""docs/clusters.rst: a Slurm of a cluster's shape takes a job with the page's lines."""

import os
import re
import subprocess
import time

import cluster as slurm
import pytest
from slurm_jobs import REPOSITORY

PAGE = (REPOSITORY / "docs" / "clusters.rst").read_text()
# By the first word of a cluster's paragraph: a partition,
# and a node as the cluster's documentation has them.
SHAPES = {
    "Mila": ("long", "l40s", "CPUs=48 RealMemory=1000000"),
    "Narval": ("gpus", "a100", "CPUs=48 RealMemory=510000"),
    "Trillium": ("gpus", "h100", "CPUs=96 RealMemory=770000"),
    "Ibex": ("batch", "a100", "CPUs=62 RealMemory=512000 Features=a100,4gpus"),
    "Perlmutter": (
        "gpus",
        "a100",
        "CoresPerSocket=64 ThreadsPerCore=2 RealMemory=256000 Features=gpu",
    ),
    "Jean": ("gpus", "h100", "CPUs=96 RealMemory=512000 Features=h100"),
}


def read_lines() -> dict[str, tuple[str, str]]:
    """Return the paragraph and the lines that the page has for each cluster."""
    section = PAGE.split("The lines to edit\n===")[1].split("\n===")[0]
    blocks = re.findall(
        r"(?<=\n\n)((\w+)[^\n]*(?:\n[^\n]+)*)::\n\n((?:    #SBATCH .*\n)+)", section
    )
    return {name: (text, block.replace("    ", "")) for text, name, block in blocks}


LINES = read_lines()


def test_every_cluster_has_lines():
    assert LINES.keys() == SHAPES.keys()


@pytest.fixture(scope="module")
def small(pytestconfig):
    """A node, of whatever Slurm the tests run on."""
    if reason := slurm.missing_requirements():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    read_end, write_end = os.pipe()
    release = pytestconfig.getoption("slurm") or "installed"
    running, supervisor = slurm.start(
        nodes=1, gpus=4, cpus=64, slurm=release, lifeline=read_end
    )
    os.close(read_end)
    yield running
    os.close(write_end)
    supervisor.wait()


def reshape(cluster: slurm.Cluster, partition: str, gpu: str, node: str) -> None:
    """Give a cluster another node, and another name to its partition."""
    config, gres = cluster.state / "slurm.conf", cluster.state / "gres.conf"
    text = re.sub(
        r"(NodeName=\S+ NodeAddr=\S+) .*",
        rf"\1 {node} Gres=gpu:{gpu}:4",
        config.read_text(),
    )
    config.write_text(
        re.sub(r"PartitionName=\w+ (.*Default)", rf"PartitionName={partition} \1", text)
    )
    gres.write_text(
        re.sub(r"Name=gpu.*File", f"Name=gpu Type={gpu} File", gres.read_text())
    )
    cluster.crash("controller")
    cluster.crash("node1")
    cluster.revive()
    deadline = time.monotonic() + 60
    expected = f"{partition}* idle gpu:{gpu}:4"
    while (
        state := run(cluster, "sinfo", "-h", "-o", "%P %T %G").stdout.splitlines()[:1]
    ) != [expected]:
        assert time.monotonic() < deadline, state
        time.sleep(0.1)


def run(
    cluster: slurm.Cluster, *command: str, script: str = ""
) -> subprocess.CompletedProcess:
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM", "SBATCH"))
    }
    env |= cluster.env
    return subprocess.run(
        command, env=env, input=script, capture_output=True, text=True
    )


@pytest.mark.parametrize("name", SHAPES)
def test_lines_fit_the_cluster(small, name):
    reshape(small, *SHAPES[name])
    text, lines = LINES[name]
    own = r"(#SBATCH --(?:ntasks|gpus|cpus|mem).*\n)+"
    script, replaced = re.subn(
        own, lines, (REPOSITORY / "multi_gpu" / "job.sh").read_text()
    )
    assert replaced == 1
    result = run(small, "sbatch", "--test-only", script=script)
    assert (
        result.returncode == 0 and " on nodes node1 in partition " in result.stderr
    ), result
    gpus = re.search(r"--(gpus-per-node|gres)=(.*)4$", lines, re.MULTILINE)
    for wrong in (f"--{gpus[1]}={gpus[2]}5", "--nodes=2", "--cpus-per-task=33"):
        result = run(small, "sbatch", "--test-only", wrong, script=script)
        assert result.returncode != 0 and "allocation failure" in result.stderr, (
            wrong,
            result,
        )
    # job.sh needs it.
    assert ("--cpus-per-task=" in lines) != ("export SLURM_CPUS_PER_TASK=" in text)


@pytest.mark.parametrize(
    "path", sorted(REPOSITORY.glob("*/job*.sh")), ids=lambda path: path.parent.name
)
def test_the_command_takes_uv_out_of_a_job_script(path):
    (command,) = re.findall(r"^    sed -i ('s.*') job\.sh$", PAGE, re.MULTILINE)
    edited = subprocess.run(
        ["sed", command[1:-1], path], capture_output=True, text=True, check=True
    ).stdout
    code = [line for line in edited.splitlines() if not line.strip().startswith("#")]
    assert "uv" in path.read_text() and not [
        line for line in code if re.search(r"\buv\b", line)
    ]
    syntax = subprocess.run(
        ["bash", "-n"], input=edited, capture_output=True, text=True
    )
    assert syntax.returncode == 0, syntax.stderr
    # The place that the page names.
    assert edited.index("# EDIT") < edited.index("set -euo pipefail")
