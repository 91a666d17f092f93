"""docs/clusters.rst: a Slurm of a cluster's shape takes a job with the page's lines."""

import re
import shutil
import subprocess
import sys
import time

import cluster as slurm
import pytest
from first_aid import user_of
from slurm_jobs import REPOSITORY, TINY, TWO, call

PAGE = "".join(
    (REPOSITORY / "docs" / name).read_text()
    for name in ("clusters.rst", "containers.rst")
)
# By the first word of a cluster's heading: a node, as its documentation has them.
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
    """Return the block and its #SBATCH lines for each cluster with four GPUs a node."""
    blocks = re.findall(
        r"\n(\w+).*\n-+\n\n\.\. code-block:: bash\n\n((?:   .*\n)+)", PAGE
    )
    return {
        name: (block, "".join(re.findall(r"^   (#SBATCH .*\n)", block, re.MULTILINE)))
        for name, block in blocks
        if "--ntasks-per-node=4" in block
    }


LINES = read_lines()


def test_every_cluster_has_lines():
    assert LINES.keys() == SHAPES.keys()


@pytest.fixture(scope="module")
def shaped(start_cluster):
    """A Slurm with a partition for each of SHAPES, which has a node of that shape."""
    with start_cluster(nodes=len(SHAPES)) as cluster:
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
    block, lines = LINES[name]
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
    assert ("--cpus-per-task=" in lines) != ("export SLURM_CPUS_PER_TASK=" in block)


PYTHON = "python=(../.venv/bin/python -E -X faulthandler)\n"


def small(folder: str) -> list[str]:
    """Return arguments for a training of seconds."""
    if folder == "imagenet":
        limits = ["--limit-train-samples=20", "--limit-valid-samples=4"]
        return [*TINY, "--synthetic", "--epochs=1", *limits]
    return ["--epochs=1", "--batch-size=4"]


@pytest.mark.usefixtures("nothing_left")
def test_python_without_uv(jobs, tmp_path):
    """One line of each job script takes another Python than uv's, and needs no uv."""
    python = "(python -X faulthandler)"
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "uv").write_text("#!/bin/bash\necho uv >&2\nexit 9\n")
    (programs / "uv").chmod(0o755)
    path = f"{programs}:{jobs.clone}/.venv/bin:{jobs.env['PATH']}"
    submitted = []
    for script in sorted(jobs.clone.glob("*/job*.sh")):
        text = script.read_text()
        assert text.count(PYTHON) == 1 and f"python={python}" in PAGE
        edited = tmp_path / f"{script.parent.name}_{script.name}"
        edited.write_text(text.replace(PYTHON, f"python={python}\n"))
        command = [*TWO, "--nodes=1", edited, *small(script.parent.name)]
        submitted.append(jobs.submit(script.parent.name, *command, PATH=path))
    assert len(submitted) == 5
    for job in submitted:
        result = jobs.wait(job)
        assert result.state == "COMPLETED" and "Epoch 1: " in result.output, result


@pytest.mark.usefixtures("nothing_left")
def test_home_is_read_only_on_the_nodes(jobs, tmp_path):
    """So is uv's cache there, or the file system refuses its locks.

    And the environment may name a mirror of the packages that is not there any more.
    """
    home = tmp_path / "home"
    home.mkdir()
    for node in ("node1", "node2"):
        mount = ["mount", "-t", "tmpfs", "-o", "ro", "x", home]
        assert jobs.on(node, *mount).exit_code == 0
    env = {"HOME": str(home), "UV_CACHE_DIR": "/proc/no/cache"}
    env["UV_DEFAULT_INDEX"] = "http://mirror.invalid/simple/"
    flags = [*TWO, "--nodes=2", "--nodelist=node[1-2]", "job.sh"]
    try:
        result = jobs.sbatch("imagenet", *flags, *small("imagenet"), **env)
    finally:
        for node in ("node1", "node2"):
            assert jobs.on(node, "umount", home).exit_code == 0
    assert result.state == "COMPLETED" and "Epoch 1: " in result.output, result
    assert "error" not in result.output, result


@pytest.fixture
def copy(jobs, tmp_path):
    """A copy of the examples. Its .venv has a Python that `hide` takes from nodes.

    So it is where Python lies in a home that some nodes do not have.
    """
    path = tmp_path / "a copy"
    shutil.copytree(jobs.clone, path, ignore=shutil.ignore_patterns(".venv", ".git"))
    home = tmp_path / "home"
    home.mkdir()
    real = jobs.clone / ".venv" / "bin" / "python"
    (home / "python").symlink_to(real)
    programs = path / ".venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "python").symlink_to(home / "python")
    (programs.parent / "pyvenv.cfg").write_text("home = /nowhere\n")
    hidden = []

    def hide(node: str) -> None:
        mount = ["mount", "-t", "tmpfs", "none", home]
        assert jobs.on(node, *mount).exit_code == 0
        hidden.append(node)

    yield path, hide
    for node in hidden:
        assert jobs.on(node, "umount", home).exit_code == 0


@pytest.mark.usefixtures("nothing_left")
def test_no_python_on_the_first_node(jobs, copy):
    """One line of job.sh names the node, and says what to do."""
    path, hide = copy
    hide("node1")
    submitted = []
    for script in sorted(path.glob("*/job*.sh")):
        flags = [*TWO, "--nodes=1", "--nodelist=node1", f"--chdir={script.parent}"]
        submitted.append(jobs.submit(script.parent.name, *flags, script))
    assert len(submitted) == 5
    for job in submitted:
        result = jobs.wait(job)
        error = "^job.sh: error: node1 has no ../.venv/bin/python: uv sync --locked$"
        assert result.state == "FAILED" and len(result.find(error)) == 1, result
        assert "Traceback" not in result.output, result


@pytest.mark.usefixtures("nothing_left")
def test_no_python_on_the_second_node(jobs, copy):
    """Slurm names the node, and the environment that all nodes share stays whole.

    So it does if uv starts Python there, as in an allocation, by the pages' lines.
    """
    path, hide = copy
    hide("node2")
    folder = path / "multi_node"
    before = sorted(path.glob(".venv/**/*"))
    flags = [*TWO, "--nodes=2", "--nodelist=node[1-2]"]
    command = [*flags, f"--chdir={folder}", folder / "job.sh"]
    result = jobs.sbatch("multi_node", *command)
    assert result.state == "FAILED", result
    # Slurm's line "execve(): …/python: No such file" is lost if srun is faster.
    assert result.find("^srun: error: node2: task 1: Exited with exit code 2$"), result
    page = (path / "README.rst").read_text()
    (line,) = re.findall("^    (export UV_PYTHON=.*)$", page, re.MULTILINE)
    script = f"{line}\nsrun uv run --no-sync python main.py --synthetic"
    result = call(
        ["salloc", *flags, "bash", "-c", script], cwd=folder, env=jobs.env, timeout=300
    )
    assert "No interpreter found at path" in result.output, result
    assert sorted(path.glob(".venv/**/*")) == before


@pytest.mark.usefixtures("nothing_left")
def test_packages_in_the_home_folder(jobs, tmp_path):
    """A Python that is no environment's takes no package of `pip install --user`."""
    real = (jobs.clone / ".venv" / "bin" / "python").resolve()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = tmp_path / "home" / ".local" / "lib" / version / "site-packages"
    (packages / "tqdm").mkdir(parents=True)
    (packages / "tqdm" / "__init__.py").write_text("raise ImportError('of another')")
    # As conda's, it has its packages without a virtual environment.
    conda = tmp_path / "conda"
    shutil.copytree(real.parent.parent, conda, symlinks=True)
    own = conda / "lib" / version / "site-packages"
    shutil.rmtree(own)
    own.symlink_to(next((jobs.clone / ".venv").glob("lib/python*/site-packages")))
    submitted = []
    for name in ("single_gpu/job.sh", "multi_node/job_torchrun.sh"):
        text = (jobs.clone / name).read_text()
        assert PYTHON in text
        edited = tmp_path / name.replace("/", "_")
        edited.write_text(text.replace(PYTHON, "python=(python3 -X faulthandler)\n"))
        folder = name.split("/")[0]
        command = [*TWO, "--nodes=1", edited, *small(folder)]
        path = f"{conda}/bin:{jobs.env['PATH']}"
        home = str(tmp_path / "home")
        submitted.append(jobs.submit(folder, *command, PATH=path, HOME=home))
    for job in submitted:
        result = jobs.wait(job)
        assert result.state == "COMPLETED" and "Epoch 1: " in result.output, result
