"""What sites add to Slurm, and where a job's data goes then.

A TaskProlog runs before the batch script and again before every task of every srun: the
variables that it sets win over what job.sh has exported meanwhile. Here it is what the
variable TASK_PROLOG says, so one cluster is several sites.
"""

import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import start_jobs
from drawn_imagenet import draw_imagenet
from slurm_jobs import TINY, listings
from test_imagenet_page import PAGE, joined, make_smaller
from test_launch import ONE_EACH, ONE_EPOCH, SMALL, TWO_EACH, trained

# The Prolog makes a folder for each job on its nodes. The Epilog removes it, and notes
# what else it finds in it.
SITE = "/tmp/localscratch"
FOLDER = f"{SITE}/$SLURM_JOB_USER.$SLURM_JOB_ID.0"
PROLOG = f"mkdir -p {FOLDER}; touch {FOLDER}/site; chown $SLURM_JOB_UID {FOLDER}"
# uv and PyTorch have files there that do not belong to one job.
CACHES = "! -path '*/uv-*.lock' ! -path '*/torchinductor_*'"
EPILOG = f"find {FOLDER} -mindepth 1 {CACHES} > {SITE}/noted.$SLURM_JOB_ID; "
EPILOG += f"rm -r {FOLDER}"
OF_THE_JOB = f"""\
echo export SLURM_TMPDIR={FOLDER}
echo export TMPDIR={FOLDER}
echo export OMP_NUM_THREADS=1
echo export http_proxy=http://proxy.invalid:3128
"""
CASES = {  # folder and script: flags, ranks
    "single_gpu/job.sh": (["--nodelist=node1"], 1),
    "multi_gpu/job.sh": (["--nodelist=node2", *TWO_EACH], 2),
    "multi_node/job.sh": (["--nodelist=node[3-4]", *ONE_EACH], 2),
    "multi_node/job_torchrun.sh": (["--nodelist=node[1-2]", *ONE_EACH], 2),
    "imagenet/job.sh": (["--nodelist=node[5-6]", *ONE_EACH], 2),
}
IMAGENET = [*TINY, "--epochs=1"]


@pytest.fixture(scope="module")
def jobs(start_cluster, clone, archive, tmp_path_factory):
    how = {"prolog": PROLOG, "epilog": EPILOG, "task_prolog": 'eval "$TASK_PROLOG"'}
    images = tmp_path_factory.mktemp("images")
    draw_imagenet(images, classes=4, train=5, valid=2, resolution=40)
    with start_cluster(nodes=6, **how) as cluster:
        jobs = start_jobs(cluster, clone, archive, tmp_path_factory.mktemp("logs"))
        jobs.env |= {"IMAGENET_DIR": str(images), "TASK_PROLOG": ""}
        yield jobs


def on_disks(jobs) -> dict[str, list[str]]:
    """Return what is in the nodes' /tmp, but for folders of the machine."""
    find = ["sh", "-c", f"find /tmp -xdev {CACHES}"]
    return {
        node: sorted(jobs.on(node, *find).output.splitlines())
        for node in jobs.cluster.nodes
    }


@pytest.fixture(autouse=True)
def nothing_left(jobs):
    """A job leaves nothing in the site's folders, and what others have there stays."""
    for node in jobs.cluster.nodes:
        others = [f"{SITE}/another", f"{SITE}/another's file", "/tmp/data.another"]
        jobs.on(node, "mkdir", "-p", *others)
    before = on_disks(jobs)
    yield
    for job in jobs.unfinished():
        jobs.cancel(job)
    ended = []
    for node in jobs.cluster.nodes:
        take = f"cd {SITE}; ls noted.*; cat noted.*; rm noted.*"
        lines = jobs.on(node, "sh", "-c", f"({take}) 2> /dev/null").output.splitlines()
        found = [line for line in lines if line.startswith("/")]
        here = [line.split(".")[1] for line in lines if line not in found]
        # What the Prolog has made there is all that the Epilog has found.
        assert found == [f"{SITE}/root.{job}.0/site" for job in here], node
        ended += here
    assert ended
    assert on_disks(jobs) == before


def finished(result, name: str, data: str) -> None:
    """Assert that a training was whole, and where its data was."""
    trained(result, name.split("/")[0], CASES[name][1])
    assert result.find(f"^  data_dir: {data}/data$"), result


def test_sbatch(jobs):
    """Each job has a folder of the site's own."""
    submitted = {}
    for name, (flags, _) in CASES.items():
        folder, script = name.split("/")
        arguments = IMAGENET if folder == "imagenet" else ONE_EPOCH
        command = [*SMALL, *flags, script, *arguments]
        submitted[name] = jobs.submit(folder, *command, TASK_PROLOG=OF_THE_JOB)
    for name, job in submitted.items():
        own = rf"{SITE}/root.{job}.0/slurm-job-{job}-cluster\.\w+"
        finished(jobs.wait(job), name, own)


# Under salloc, people put the data of the first examples there, and remove it.
SCRIPT = """
export UV_PYTHON=$PWD/../.venv/bin/python
{each} bash -c 'tar -xf "$CIFAR10_ARCHIVE" --one-top-level="$SLURM_TMPDIR/data"'
srun uv run --no-sync python main.py {arguments}
{each} bash -c 'rm -r "$SLURM_TMPDIR/data"'
"""


def test_salloc_and_srun(jobs, tmp_path):
    """main.py takes the site's folder. imagenet's page names one of the job's own."""

    def start(name):
        flags, tasks = CASES[name]
        nodes = 2 if "[" in flags[0] else 1
        each = f"srun --ntasks={nodes} --ntasks-per-node=1"
        salloc = ["salloc", *SMALL, f"--ntasks={tasks}"]
        script = SCRIPT.format(each=each, arguments=" ".join(ONE_EPOCH))
        if name == "imagenet/job.sh":
            (page,) = listings(PAGE, "In an allocation")
            more = {"/datasets/imagenet": jobs.env["IMAGENET_DIR"]}
            more["main.py"] = f"main.py {' '.join(IMAGENET)}"
            more["checkpoints/"] = f"{tmp_path}/"
            _, line, *lines = joined(make_smaller(page, more)).splitlines()
            salloc, script = line.split(), "\n".join(lines)
        script = f'echo "This is job $SLURM_JOB_ID"\n{script}'
        command = [*salloc, *flags, "bash", "-euc", script]
        return jobs.run(command, name.split("/")[0], TASK_PROLOG=OF_THE_JOB)

    with ThreadPoolExecutor() as pool:
        names = [name for name in CASES if "torchrun" not in name]
        results = list(pool.map(start, names))
    for name, result in zip(names, results, strict=True):
        (job,) = result.find("^This is job (.*)$")
        site = f"{SITE}/root.{job}.0"
        own = f"/tmp/slurm-job-{job}-cluster" if "imagenet" in name else site
        finished(result, name, own)


LONG = f"{SITE}/{'long' * 25}"
TMPDIRS = ["unset TMPDIR", "export TMPDIR=/nowhere/at/all", f"export TMPDIR={LONG}"]


def test_tmpdir(jobs):
    """None, one that is missing, and one whose path is too long for a socket."""
    jobs.on("node1", "mkdir", LONG)
    submitted = []
    for line in TMPDIRS:
        flags = [*SMALL, "--nodelist=node1", "--nodes=1", *ONE_EACH]
        task_prolog = f"echo {line}"
        job = jobs.submit(
            "imagenet", *flags, "job.sh", *IMAGENET, TASK_PROLOG=task_prolog
        )
        submitted.append(job)
    for job in submitted:
        trained(jobs.wait(job), "imagenet", 1)
    # PyTorch makes a cache of its own there.
    left = jobs.on("node1", "find", LONG, "-mindepth", "1", "-maxdepth", "1").output
    assert re.fullmatch(rf"({re.escape(LONG)}/torchinductor_\w+\n)?", left), left
    assert jobs.on("node1", "rm", "-r", LONG).exit_code == 0


def refused(result, folder: str, disk) -> None:
    """Assert that a job has failed in one line of its own before it trained."""
    assert result.state == "FAILED" and "World size" not in result.output, result
    said = result.find("^job.sh: error: (.*)$")
    # imagenet's last line says that it is not requeued.
    assert said[: 2 if folder == "imagenet" else 1] == said, result
    assert re.fullmatch(f"node[34] cannot use {disk}", said[0]), result


@pytest.mark.parametrize("where", ["of all nodes", "of node3 alone"])
def test_disk_that_is_not_each_nodes_own(jobs, tmp_path, where):
    """One line says so, and what others have there stays."""
    disk = tmp_path
    if where == "of node3 alone":
        disk = Path("/tmp/of-one-node")
        jobs.on("node3", "mkdir", disk)
    else:
        (disk / "another's").touch()
    task_prolog = f"echo export SLURM_TMPDIR={shlex.quote(str(disk))}"
    flags = [*SMALL, "--nodelist=node[3-4]", *ONE_EACH]
    cases = ["multi_node/job.sh", "multi_node/job_torchrun.sh", "imagenet/job.sh"]
    submitted = []
    for case in cases:
        folder, script = case.split("/")
        command = [*flags, script, "--synthetic"]
        submitted.append(jobs.submit(folder, *command, TASK_PROLOG=task_prolog))
    for job, case in zip(submitted, cases, strict=True):
        refused(jobs.wait(job), case.split("/")[0], disk)
    if where == "of node3 alone":
        assert jobs.on("node3", "rmdir", disk).exit_code == 0
    else:
        assert [path.name for path in disk.iterdir()] == ["another's"]
