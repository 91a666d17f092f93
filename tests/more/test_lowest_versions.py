"""The examples with Python 3.11 and the lowest versions that pyproject.toml allows.

The clone has an environment of its own, made by README.rst's line for old GPUs.
"""

import re
import shutil
import subprocess

import pytest
from slurm_jobs import REPOSITORY, TINY, TWO, WEIGHTS_LINE, Jobs, take_any_checksum

pytestmark = pytest.mark.usefixtures("nothing_left")
SMALL = ["--cpus-per-task=1", "--mem=2G"]
ONE_EPOCH = ["--epochs=1", "--batch-size=4"]
# torchrun leaves a folder behind.
TMPDIR = "export TMPDIR=$(mktemp -d); trap 'rm -r $TMPDIR' EXIT; "
LOWEST = {"numpy": "2.0", "rich": "13.9", "tqdm": "4.67"}
IMAGENET = [*TINY, "--synthetic", "--epochs=2", "--limit-train-samples=160"]
IMAGENET += ["--limit-valid-samples=8"]


@pytest.fixture(scope="module")
def lowest(cluster, clone, archive, tmp_path_factory) -> Jobs:
    path = tmp_path_factory.mktemp("lowest versions") / "clone"
    shutil.copytree(clone, path, ignore=shutil.ignore_patterns(".venv"))
    jobs = Jobs(cluster, path, archive, tmp_path_factory.mktemp("logs"))
    jobs.env |= {"IMAGENET_DIR": "", "UV_PYTHON": "3.11"}
    (line,) = re.findall(r"^ +(uv add .*)$", (path / "README.rst").read_text(), re.M)
    pins = [f"{name}=={version}.*" for name, version in LOWEST.items()]
    for command in (["bash", "-c", line], ["uv", "add", *pins]):
        result = jobs.run(command, timeout=1200)
        assert result.exit_code == 0, result
    take_any_checksum(path)
    git = "git -c user.name=tests -c user.email=tests commit -qam Lowest".split()
    subprocess.run(git, cwd=path, check=True)
    dependencies = (path / "pyproject.toml").read_text()
    show = "import sys, torch, torchvision, numpy; print(sys.version_info[:2], torch."
    show += "__version__, torchvision.__version__, numpy.__version__)"
    result = jobs.run(["uv", "run", "--no-sync", "python", "-c", show])
    expected = r"\(3, 11\) 2\.7\.1\S* 0\.22\.1\S* 2\.0\.\d+\n"
    assert re.fullmatch(expected, result.output), (result, dependencies)
    return jobs


def test_every_start(lowest):
    """By srun and by torchrun."""
    two = ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=2"]
    cases = [  # folder, flags and script, ranks
        ("single_gpu", ["job.sh", *ONE_EPOCH], 1),
        ("multi_gpu", [*two, "job.sh", *ONE_EPOCH], 2),
        ("multi_node", [*TWO, "job.sh", *ONE_EPOCH], 2),
        ("multi_node", [*TWO, "job_torchrun.sh", *ONE_EPOCH], 2),
    ]
    ids = [lowest.submit(folder, *SMALL, *command) for folder, command, _ in cases]
    for job, (_, _, ranks) in zip(ids, cases, strict=True):
        result = lowest.wait(job, timeout=600)
        result.trained(ranks, batch_size=4)


def test_resumed(lowest):
    """imagenet ends with the same weights, also under torchrun."""
    torchrun = "--nodes=1 --ntasks=1 --wrap=uv run --no-sync torchrun --standalone "
    flags, wrap = torchrun.split("--wrap=")
    wrap = f"--wrap={TMPDIR}{wrap} --nproc-per-node=2 main.py {' '.join(IMAGENET)}"
    ids = [lowest.submit("imagenet", *TWO, "job.sh", *IMAGENET) for _ in range(2)]
    ids.append(lowest.submit("imagenet", *SMALL, *flags.split(), wrap))
    lowest.until(ids[0], "^World size", timeout=300)
    assert lowest.run(["scancel", "--batch", "--signal=USR1", ids[0]]).exit_code == 0
    results = [lowest.wait(job, timeout=600) for job in ids]
    assert [result.restarts for result in results] == [1, 0, 0], results
    weights = {WEIGHTS_LINE.findall(result.output)[-1] for result in results}
    assert len(weights) == 1, results


def test_wheels(tmp_path):
    """uv may download the newest Python that is allowed: nothing is to be compiled.

    Nor on the Arm CPUs of NVIDIA's Grace Hopper.
    """
    allowed = (REPOSITORY / "pyproject.toml").read_text()
    pythons = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', allowed).groups()
    export = "uv export --quiet --locked --no-hashes --all-groups".split()
    locked = subprocess.check_output(export, cwd=REPOSITORY, text=True)
    install = "uv pip install --dry-run --only-binary=:all: --requirements=- --target=."
    for minor in range(*map(int, pythons)):
        for cpu in ("x86_64", "aarch64"):
            command = [*install.split(), f"--python-version=3.{minor}"]
            command += [f"--python-platform={cpu}-manylinux_2_28"]
            subprocess.run(command, input=locked, cwd=tmp_path, text=True, check=True)
