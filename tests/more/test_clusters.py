"""docs/clusters.rst: a Slurm of a cluster's shape takes a job with the page's lines."""

import re
import subprocess
import time

import cluster as slurm
import pytest
from first_aid import user_of
from slurm_jobs import REPOSITORY, call

PAGE = (REPOSITORY / "docs" / "clusters.rst").read_text()
# By the first word of a cluster's paragraph: a node, as its documentation has them.
SHAPES = {
    "Mila": "CPUs=48 RealMemory=1000000 Gres=gpu:l40s:4",
    "Narval": "CPUs=48 RealMemory=510000 Gres=gpu:a100:4",
    "Trillium": "CPUs=96 RealMemory=770000 Gres=gpu:h100:4",
    "Ibex": "CPUs=62 RealMemory=512000 Features=a100,4gpus Gres=gpu:a100:4",
    "Perlmutter": (
        "CoresPerSocket=64 ThreadsPerCore=2 RealMemory=256000 "
        "Features=gpu Gres=gpu:a100:4"
    ),
    "Jean": "CPUs=96 RealMemory=512000 Features=h100 Gres=gpu:h100:4",
}
PARTITIONS = {name: name for name in SHAPES} | {"Mila": "long"}


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
def shaped(start_cluster):
    """A Slurm with a partition for each of SHAPES, which has a node of that shape."""
    with start_cluster(len(SHAPES)) as cluster:
        config, gres = cluster.state / "slurm.conf", cluster.state / "gres.conf"
        text, gpus, file = config.read_text(), "", gres.read_text().split()[-1]
        for node, (name, shape) in zip(cluster.nodes, SHAPES.items(), strict=True):
            text = re.sub(rf"(NodeName={node} \S+) .*", rf"\1 {shape}", text)
            text += f"PartitionName={PARTITIONS[name]} Nodes={node}\n"
            gpu = shape.split(":")[1]
            gpus += f"NodeName={node} Name=gpu Type={gpu} {file}\n"
        config.write_text(text)
        gres.write_text(gpus)
        for host in ("controller", *cluster.nodes):
            cluster.crash(host)
        cluster.revive()
        deadline = time.monotonic() + 60
        idle = {f"{partition} idle" for partition in PARTITIONS.values()}
        while not idle <= set(
            states := run(cluster, *"sinfo -hNo".split(), "%R %T").stdout.splitlines()
        ):
            assert time.monotonic() < deadline, states
            time.sleep(0.1)
        yield cluster


def run(
    cluster: slurm.Cluster, *command: str, script: str = ""
) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, env=user_of(cluster), input=script, capture_output=True, text=True
    )


@pytest.mark.parametrize("name", SHAPES)
def test_lines_fit_the_cluster(shaped, name):
    text, lines = LINES[name]
    own = r"(#SBATCH --(?:ntasks|gpus|cpus|mem).*\n)+"
    script, replaced = re.subn(
        own, lines, (REPOSITORY / "multi_gpu" / "job.sh").read_text()
    )
    assert replaced == 1
    sbatch = ["sbatch", "--test-only"]
    if "--partition=" not in lines:  # the cluster has a default, or chooses by the GPUs
        sbatch.append(f"--partition={PARTITIONS[name]}")
    result = run(shaped, *sbatch, script=script)
    assert f" in partition {PARTITIONS[name]}" in result.stderr, result
    assert result.returncode == 0, result
    gpus = re.search(r"--(gpus-per-node|gres)=(.*)4$", lines, re.MULTILINE)
    for wrong in (f"--{gpus[1]}={gpus[2]}5", "--nodes=2", "--cpus-per-task=33"):
        result = run(shaped, *sbatch, wrong, script=script)
        assert result.returncode != 0, (wrong, result)
        assert "allocation failure" in result.stderr, (wrong, result)
    # job.sh needs it.
    assert ("--cpus-per-task=" in lines) != ("export SLURM_CPUS_PER_TASK=" in text)


@pytest.mark.parametrize(
    "path", sorted(REPOSITORY.glob("*/job*.sh")), ids=lambda path: path.parent.name
)
def test_the_command_takes_uv_out_of_a_job_script(path):
    (command,) = re.findall(r"^    sed -i ('s.*') job\.sh$", PAGE, re.MULTILINE)
    edited = call(["sed", command[1:-1], path]).output
    in_code = re.compile(r"^[^#\n]*\buv\b", re.MULTILINE)
    assert in_code.search(path.read_text()) and not in_code.search(edited)
    syntax = call(["bash", "-nc", edited])
    assert syntax.exit_code == 0, syntax
    # The place that the page names.
    assert edited.index("# EDIT") < edited.index("set -euo pipefail")
