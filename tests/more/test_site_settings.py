"""What sites add to Slurm, and where a job's data goes then.

A TaskProlog runs before the batch script and again before every task of every srun: the
variables that it sets win over what job.sh has exported meanwhile. Here it is what the
variable TASK_PROLOG says, so one cluster is several sites.
"""

import shlex
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import start_jobs
from drawn_imagenet import draw_imagenet
from slurm_jobs import TINY
from test_launch import ONE_EACH, ONE_EPOCH, SMALL, TWO_EACH, trained

# The Prolog makes a folder for each job on its nodes. The Epilog removes it, and notes
# what else it finds in it.
SITE = "/tmp/localscratch"
FOLDER = f"{SITE}/$SLURM_JOB_USER.$SLURM_JOB_ID.0"
PROLOG = f"mkdir -p {FOLDER}; touch '{FOLDER}/the site'; chown $SLURM_JOB_UID {FOLDER}"
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
SITES = {
    "a folder for each job": (OF_THE_JOB, f"{SITE}/root.JOB.0"),
    "/tmp": ("echo export SLURM_TMPDIR=/tmp", "/tmp"),
}
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
        jobs.env["SCRATCH"] = str(tmp_path_factory.mktemp("scratch"))
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
    for node in jobs.cluster.nodes:
        noted = jobs.on(node, "sh", "-c", f"cat {SITE}/noted.*; rm -f {SITE}/noted.*")
        left = [line for line in noted.output.splitlines() if "/the site" not in line]
        assert left == [], node
    assert on_disks(jobs) == before


def finished(result, name: str, data: str) -> None:
    """Assert that a training was whole, and where its data was."""
    trained(result, name.split("/")[0], CASES[name][1])
    assert result.find(f"'data_dir': '{data}/data'"), result


@pytest.mark.parametrize("site", SITES)
def test_sbatch(jobs, site):
    task_prolog, disk = SITES[site]
    submitted = {}
    for name, (flags, _) in CASES.items():
        folder, script = name.split("/")
        arguments = IMAGENET if folder == "imagenet" else ONE_EPOCH
        command = [*SMALL, *flags, script, *arguments]
        submitted[name] = jobs.submit(folder, *command, TASK_PROLOG=task_prolog)
    for name, job in submitted.items():
        own = rf"/slurm-job-{job}-cluster(\.\d+)?"
        finished(jobs.wait(job), name, disk.replace("JOB", job) + own)


# Under salloc, people put the data there, and remove it.
STAGE = 'tar -xf "$CIFAR10_ARCHIVE" --one-top-level="$SLURM_TMPDIR/data"'
PYTHON = "uv run --no-sync python"


@pytest.mark.parametrize("site", SITES)
def test_salloc_and_srun(jobs, site):
    """Without --data-dir, main.py and prepare_data.py take the site's folder."""
    task_prolog, disk = SITES[site]

    def start(name):
        flags, tasks = CASES[name]
        nodes = 2 if "[" in flags[0] else 1
        on_each_node = f"srun --ntasks={nodes} --ntasks-per-node=1"
        stage = f"bash -c {shlex.quote(STAGE)}"
        main = f"main.py {' '.join(ONE_EPOCH)}"
        if name.startswith("imagenet"):
            stage = f"{PYTHON} prepare_data.py"
            main = (
                f"main.py {' '.join(IMAGENET)} --checkpoint-dir=$SCRATCH/$SLURM_JOB_ID"
            )
        remove = "bash -c 'rm -r \"$SLURM_TMPDIR/data\"'"
        script = f"""
            export UV_PYTHON=../.venv/bin/python
            echo "This is job $SLURM_JOB_ID"
            {on_each_node} {stage}
            srun {PYTHON} {main}
            {on_each_node} {remove}
        """
        salloc = ["salloc", *SMALL, f"--ntasks={tasks}", *flags, "bash", "-euc", script]
        return jobs.run(salloc, name.split("/")[0], TASK_PROLOG=task_prolog)

    with ThreadPoolExecutor() as pool:
        names = [name for name in CASES if "torchrun" not in name]
        results = list(pool.map(start, names))
    for name, result in zip(names, results, strict=True):
        (job,) = result.find("^This is job (.*)$")
        finished(result, name, disk.replace("JOB", job))
