"""docs/containers.rst: the six job scripts start Python in a real Apptainer.

Apptainer is in Debian sid only. It goes into a layer above the root of Slurm 26.05 (see
cluster.py), which itself stays as it is. If it cannot be installed, one line says so.
The image is a folder, which the page's definition file makes of uv.lock. Clone, data
and the nodes' own disks lie where Apptainer binds nothing by itself.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import cluster as slurm
import pytest
from drawn_imagenet import draw_imagenet
from slurm_jobs import REPOSITORY, TINY, TWO, Jobs, listing, weights

PAGE = (REPOSITORY / "docs" / "containers.rst").read_text()
LINE = listing("containers.rst", "python=(apptainer").strip()
OWN = LINE.replace(" -E -s", "")  # your_training's job.sh unsets variables for Python
# Slurm 26.05 begins with a whole switch: on node1 and node2, rank 0 is on node2.
TOPOLOGY = "SwitchName=a Nodes=node[2-3]\nSwitchName=b Nodes=node1\n"
TOPOLOGY += "SwitchName=c Switches=a,b\n"
# Four ranks there.
FOUR = "-N2 --nodelist=node[1-2] --ntasks-per-node=2 --gpus-per-node=2".split()
DISKS = Path("/srv")  # with `scratch`, the shared one, and `local`, each node's own

# All mounts are in this run's own namespace, see conftest.py. What is written goes to
# memory.
INSTALL = """\
set -eu
root=$1 layers=$2
mount -t tmpfs layers "$layers"
cd "$layers"
mkdir root root.work lib lib.work etc
over() { mount -t overlay -o "lowerdir=$1,upperdir=$2,workdir=$2.work" overlay "$1"; }
over "$root" root
for folder in dev proc sys; do mount --rbind "/$folder" "$root/$folder"; done
cd "$root/etc/apt"
sed s/forky/sid/ sources.list > sources.list.d/sid.list
cat > apt.conf.d/sid <<'END'
APT::Default-Release "forky";
Acquire::Check-Valid-Until "false";
END
chroot "$root" apt-get update
DEBIAN_FRONTEND=noninteractive chroot "$root" \
    apt-get install --yes --no-install-recommends apptainer uidmap
chroot "$root" apptainer --version
# Apptainer's own folders, on this machine, and on the nodes that copy its /etc.
cd "$layers"
cp --archive /etc/. "$root/etc/apptainer" etc
mount --bind etc /etc
over /var/lib lib
mkdir -p /var/lib/apptainer/mnt/session
"""


def place(text: str) -> str:
    """Return lines of the page with this cluster's folders."""
    return re.sub("/(?=scratch|local)", f"{DISKS}/", text)


def edit(script: Path, line: str = LINE) -> Path:
    """Return a job script with a line that starts Python, and the node's own disk."""
    text = script.read_text()
    assert f"\n# {line}\n" in text or line not in (LINE, OWN)
    for new in (line, "local_disk=/local"):
        name = new.split("=")[0]
        text, replaced = re.subn(rf"(?m)^{name}=.*$", place(new), text)
        assert replaced == 1, script
    path = script.with_name(f"edited_{script.name}")
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def runtime(pytestconfig, start_cluster, tmp_path_factory) -> Path:
    """Install Apptainer; return the root whose /usr has it."""
    capture = pytestconfig.pluginmanager.get_plugin("capturemanager")
    try:
        root = slurm.root_of("26.05")
        layers = tmp_path_factory.mktemp("layers")
        command = ["timeout", "400", "sh", "-c", INSTALL, "sh", root, layers]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(command, **output, text=True)
        said = ("not run: " if done.returncode else "") + done.stdout.splitlines()[-1]
    except slurm.ClusterError as error:
        said = f"not run: {error}"
    with capture.global_and_fixture_disabled():
        print(f"\n{said}")
    if said.startswith("not run"):
        pytest.skip(said)
    return root


@pytest.fixture(scope="module")
def clone(runtime, clone):
    folder = tempfile.mkdtemp(prefix="containers-", dir=slurm.PARENT)
    subprocess.run(["mount", "--bind", folder, DISKS], check=True)
    (DISKS / "local").mkdir()
    yield shutil.copytree(clone, DISKS / "scratch" / "clone", symlinks=True)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def image(runtime, clone) -> Path:
    """Build the page's image on a login node, with a base that is not downloaded."""
    definition = listing("containers.rst", "Bootstrap: docker").splitlines()
    base = f"Bootstrap: localimage\nFrom: {slurm.root_of('22.05')}\n"
    (clone / "image.def").write_text(base + "\n".join(x[4:] for x in definition[2:]))
    build = place(listing("containers.rst", "export APPTAINER_TMPDIR"))
    # The folder of uv itself, not of a script that starts it.
    uv = Path(os.environ.get("UV") or shutil.which("uv"))
    path = f"{uv.parent}:{os.environ['PATH']}"
    take_usr = 'mount --rbind "$0/usr" /usr && exec bash -euc "$1"'
    command = ["unshare", "--mount", "sh", "-c", take_usr, runtime, build]
    env = os.environ | {"APPTAINER_USERNS": "1", "PATH": path}
    subprocess.run(command, cwd=clone, env=env, check=True)
    image = DISKS / "scratch" / "image"
    # The tests' CIFAR-10 is not the published one.
    (packages,) = image.glob("opt/environment/.venv/lib/python*/site-packages")
    first = f"import sys; sys.path.insert(0, '{clone}/tests/any_checksum')\n"
    (packages / "any_checksum.pth").write_text(first)  # before Debian's sitecustomize
    return image


@pytest.fixture(scope="module")
def jobs(start_cluster, clone, image, archive, tmp_path_factory):
    with start_cluster(slurm="26.05", topology=TOPOLOGY) as cluster:
        jobs = Jobs(cluster, clone, archive, tmp_path_factory.mktemp("logs"))
        jobs.env["APPTAINER_USERNS"] = "1"  # root lacks capabilities here
        for node in cluster.nodes:
            mount = ["mount", "-t", "tmpfs", node, DISKS / "local"]
            assert jobs.on(node, *mount).exit_code == 0
        yield jobs


@pytest.fixture(scope="module")
def started(jobs) -> dict[str, str]:
    """The five job scripts, all at once: their jobs mostly wait for Python to start."""
    data = DISKS / "scratch" / "imagenet"
    draw_imagenet(data, classes=4, train=5, valid=6, resolution=40)
    started = {}
    for script in sorted(jobs.clone.glob("*/job*.sh")):
        folder = script.parent.name
        nodes = 1 if folder in ("single_gpu", "multi_gpu") else 2
        tasks = 2 if folder == "multi_gpu" else 1
        flags = [*TWO, f"--nodes={nodes}", f"--ntasks-per-node={tasks}"]
        flags.append(f"--gpus-per-node={tasks}")
        if nodes == 2 and script.name == "job.sh":
            flags += FOUR
        small = ["--epochs=1", *(TINY if folder == "imagenet" else ["--batch-size=4"])]
        job = jobs.submit(folder, *flags, edit(script), *small, IMAGENET_DIR=str(data))
        started[f"{folder}/{script.name}"] = job
    assert len(started) == 5
    return started


@pytest.mark.parametrize(
    "script, ranks",
    [
        ("single_gpu/job.sh", 1),
        ("multi_gpu/job.sh", 2),
        ("multi_node/job.sh", 4),
        ("multi_node/job_torchrun.sh", 2),
    ],
)
def test_cifar10(jobs, started, script, ranks):
    result = jobs.wait(started[script])
    result.trained(ranks, batch_size=4)
    assert result.find(r"^Python 3\.\d+\.\d+$"), result


def test_rank_0_is_on_the_second_node(jobs):
    """The jobs with four ranks have to find it there."""
    command = ["salloc", "--quiet", *TWO, *FOUR, "srun", "--label", "hostname"]
    result = jobs.run(command)
    assert result.find("^0: (.*)$") == ["node2"], result


def test_imagenet(jobs, started):
    """It stages the archives on each node, in the container, too."""
    result = jobs.wait(started["imagenet/job.sh"])
    weights(result, pictures=20)
    assert len(result.find("^node[12]: staged 44 images in /srv/local/")) == 2, result


def test_your_training(jobs):
    """Slurm warns the job. It saves, comes back and trains to its end."""
    folder = DISKS / "scratch" / "my_project"
    folder.mkdir()
    scripts = jobs.clone / "docs" / "your_training"
    shutil.copy(scripts / "whole" / "main.py", folder)
    shutil.copy(scripts / "job.sh", folder)
    shutil.copy(jobs.clone / "imagenet" / "resume.py", folder)
    job_sh = edit(folder / "job.sh", OWN)
    job = jobs.submit(folder, *TWO, *FOUR, job_sh, "--epochs=8")
    jobs.until(job, "^Epoch 0")
    jobs.run(["scancel", "--batch", "--signal=USR1", job])
    result = jobs.wait(job)
    assert (result.state, result.restarts) == ("COMPLETED", 1), result
    assert len(result.find(r"^Resuming from .*-step-\d+.pt$")) == 1, result
    assert result.find(r"^Epoch (\d): ") == [*"01234567"], result


def test_an_allocation(jobs, archive):
    """Slurm's commands are not in the container: the page's lines name the node."""
    data = DISKS / "scratch" / "data"
    data.mkdir()
    subprocess.run(["tar", "-xf", archive, "-C", data], check=True)
    lines = place(listing("containers.rst", "export MASTER_ADDR"))
    small = f"--epochs=1 --batch-size=4 --data-dir={data}"
    typed = lines.replace("--synthetic", small)
    command = ["salloc", *TWO, "--nodes=2", "bash", "-euc", typed]
    jobs.run(command, "multi_node").trained(2, batch_size=4)


def test_no_image(jobs):
    """job.sh looks into the container before it does anything else."""
    scripts = [*jobs.clone.glob("*/job*.sh"), jobs.clone / "docs/your_training/job.sh"]
    for script in scripts:
        line = LINE.replace("/image ", "/other ")
        result = jobs.sbatch(script.parent, *TWO, "--nodes=1", edit(script, line))
        assert result.state == "FAILED", result
        assert result.find("^FATAL: .*/scratch/other"), result
        error = "^job.sh: error: fails: apptainer exec .*/scratch/other python "
        assert result.find(error) and not result.find("^srun"), result


def test_not_bound(jobs):
    """A line names the command, above it Python the folder that it cannot see."""
    line = re.sub("--bind [^ ]* ", "", LINE)
    script = edit(jobs.clone / "single_gpu" / "job.sh", line)
    result = jobs.sbatch("single_gpu", *TWO, "--nodes=1", script)
    assert result.state == "FAILED", result
    assert result.find(f"^FileNotFoundError: .*'{DISKS}/local'$"), result
    assert result.find("^job.sh: error: fails: apptainer exec "), result


def test_the_environment_as_one_file(jobs):
    """Each node unpacks it, and starts Python from there. It needs no container."""
    folder = DISKS / "scratch" / "packed"
    for name in ("multi_node", "imagenet"):
        (folder / name).mkdir(parents=True)
    venv = [sys.executable, "-m", "venv", "--without-pip", folder / ".venv"]
    subprocess.run(venv, check=True)
    pack = ["bash", "-euc", place(listing("containers.rst", "tar -cf"))]
    subprocess.run(pack, cwd=folder, check=True)
    added = re.findall(r"^     (.*)\n    \+(.*)\n", PAGE, re.MULTILINE)
    assert len(added) == 3
    for name in ("multi_node", "imagenet", "docs/your_training"):
        to = folder if name == "docs/your_training" else folder / name
        environment = ".venv" if to == folder else "../.venv"
        (to / "main.py").write_text("import sys; print(sys.prefix)")
        text = (jobs.clone / name / "job.sh").read_text()
        for before, line in added:
            assert text.count(f"{before}\n") == 1, before
            text = text.replace(f"{before}\n", f"{before}\n{place(line)}\n")
        (to / "job.sh").write_text(text)
        line = f"python=({environment}/bin/python -X faulthandler)"
        result = jobs.sbatch(to, *TWO, "--nodes=2", edit(to / "job.sh", line))
        assert result.state == "COMPLETED", result
        assert len(result.find(f"^{DISKS}/local/slurm-job-.*/.venv$")) == 2, result


def test_nothing_is_left(jobs):
    """After all these jobs, the nodes' own disks are empty."""
    assert jobs.leftovers() == []
    for node in jobs.cluster.nodes:
        assert jobs.on(node, "ls", "-A", DISKS / "local").output == ""
