"""Another user of the node and of its network: a real one, made and removed here."""

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_jobs import EPOCHS, TWO, environment

pytestmark = pytest.mark.usefixtures("nothing_left")
NAME = f"a-stranger-{os.getpid()}"
NODES = ["node1", "node2"]


@pytest.fixture(scope="module")
def stranger(user):
    """Return what runs a script as another user on a node."""
    add = ["useradd", "--system", "--no-create-home", "--user-group", NAME]
    subprocess.run(add, check=True)
    number = pwd.getpwnam(NAME).pw_uid  # the nodes do not know the name
    identity = f"setpriv --reuid={number} --regid={number} --clear-groups".split()

    def run(node: str, script: str):
        return user.on(node, *identity, "bash", "-c", script)

    yield run
    for node in NODES:
        user.on(node, "bash", "-c", f"find /tmp -user {number} -delete")
    subprocess.run(["userdel", NAME], check=True)


# What a stranger may make as soon as squeue shows the job: folders with names that
# could be the job's, open to all, with a mark as if the job had made them.
PLANT = """
set -e
for suffix in '' .x .1; do
    folder=/tmp/slurm-job-$1-cluster$suffix
    mkdir -m 777 $folder $folder/data
    ln -s / $folder/.made-on-$SLURMD_NODENAME
    echo '{}' > $folder/data/index.json
    echo 'touch /tmp/ran' > $folder/code_checkpointing.sh
done
"""
SCRIPTS = {
    "imagenet/job.sh": EPOCHS,
    "multi_node/job.sh": ["--synthetic", "--epochs=1"],
    "multi_node/job_torchrun.sh": ["--synthetic", "--epochs=1"],
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_folders_with_the_names_of_a_job(user, stranger, undisturbed, name):
    """A job uses none of them, and does not fail for them, and removes none."""
    folder, script = name.split("/")
    flags = ["--hold", *TWO, "--nodelist=node[1-2]"]
    if folder == "imagenet":
        job = user.train(*EPOCHS, "--save-steps=3", flags=flags)
    else:
        job = user.submit(folder, *flags, script, *SCRIPTS[name])
    for node in NODES:
        made = stranger(node, f"SLURMD_NODENAME={node}; set -- {job}; {PLANT}")
        assert made.exit_code == 0, made
    assert user.run(["scontrol", "release", job]).exit_code == 0
    result = user.wait(job)
    assert result.state == "COMPLETED", result
    if folder == "imagenet":
        assert undisturbed in result.output, result
    for node in NODES:
        left = stranger(node, f"ls -d /tmp/slurm-job-{job}-*").output.split()
        assert len(left) == 3, left
        assert stranger(node, "rm -r /tmp/slurm-job-*; ls /tmp/ran").exit_code == 2


def test_nothing_of_a_job_is_readable(user, stranger):
    """Data, code and what PyTorch compiles lie in a folder of the user alone."""
    job = user.train(*EPOCHS, "--save-steps=3")
    rank = user.stop_rank(job)
    folder = Path(user.job_folder(job, "node2"))
    assert user.on("node2", "ls", folder / "data").exit_code == 0
    for command in (f"ls {folder}", f"cat {folder}/data/*", f"touch {folder}/a"):
        refused = stranger("node2", command)
        assert "Permission denied" in refused.output, refused
    variables = environment(rank)
    for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert Path(variables[name], "x").is_relative_to(folder), variables[name]
    user.cancel(job)


PLANTED = """
mkdir -p /tmp/.venv/bin
echo 'print("planted")' > /tmp/main.py
printf '#!/bin/sh\\necho planted\\n' > /tmp/.venv/bin/python
chmod +x /tmp/.venv/bin/python
"""


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("name", [*SCRIPTS, "docs/your_training/job.sh"])
def test_missing_folder(user, stranger, name, node):
    """Slurm starts a job in /tmp where its folder is missing, and so a stranger's code.

    On the first node that is job.sh itself, and on another one its tasks.
    """
    folder, script = name.rsplit("/", 1)
    there = user.clone
    if folder.endswith("your_training") and not (there / folder / ".venv").exists():
        (there / folder / ".venv").symlink_to(there / ".venv")
    assert stranger(node, PLANTED).exit_code == 0
    user.on(node, "mount", "-t", "tmpfs", "x", there)
    try:
        flags = [
            "--nodes=2",
            *TWO,
            "--nodelist=node[1-2]",
            f"--output={user.logs}/%j.out",
        ]
        job = user.submit(folder, *flags, script)
        result = user.wait(job)
    finally:
        assert user.on(node, "umount", there).exit_code == 0
        stranger(node, "rm -r /tmp/main.py /tmp/.venv")
    assert result.state == "FAILED", result
    assert "planted" not in result.output, result
    said = result.find(r"^job.sh: error: .*")
    missing = f"job.sh: error: the job's folder is missing on {node}"
    assert said[:1] == [missing], result


# It puts a pickle where torchrun's c10d rendezvous would look, once there is a store.
ATTACK = """
import base64, os, pickle, sys, time
from datetime import timedelta
from torch.distributed import TCPStore
host, port, run_id, made = sys.argv[1:]
class Command:
    def __reduce__(self):
        return os.system, (f"touch '{made}'",)
pickled = base64.b64encode(pickle.dumps(Command()))
while True:
    try:
        store = TCPStore(host, int(port), None, False, timedelta(seconds=1))
        while True:
            store.set(f"torch.rendezvous.{run_id}", pickled)
            print("set", flush=True)
            time.sleep(0.05)
    except Exception as error:
        time.sleep(0.05)
"""


def test_a_pickle_in_the_store_of_torchrun(user, stranger, tmp_path):
    """Whoever reaches the port of job_torchrun.sh does not get code run so."""
    flags = ["--hold", *TWO, "--nodelist=node[1-2]"]
    job = user.submit("multi_node", *flags, "job_torchrun.sh", "--synthetic")
    port = str(10000 + int(job) % 20000)
    made = tmp_path / "made"
    address = user.cluster.address("node1")
    node3 = user.cluster.namespaces("node3")
    command = [*node3, sys.executable, "-c", ATTACK, address, port, job, str(made)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attack:
        try:
            assert user.run(["scontrol", "release", job]).exit_code == 0
            assert attack.stdout.readline() == "set\n"
            result = user.wait(job)
        finally:
            user.on("node3", "pkill", "-KILL", "--full", "torch.rendezvous")
    assert not made.exists()
    assert result.state == "COMPLETED", result
