"""docs/first_aid.rst: what sacct shows, on a cluster that keeps accounts."""

import os
import re
import shutil
import socket
import subprocess
import textwrap
import time

import first_aid
import pytest
from slurm_jobs import REPOSITORY, Jobs, listing
from test_first_aid import ENDS, PAGES, ROWS

PAGE = "".join(PAGES)
CONF = """AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={address}
AccountingStoragePort={port}
AccountingStoragePass={state}/munge.socket
AccountingStorageTRES=gres/gpu
"""
DBD_CONF = """AuthInfo=socket={state}/munge.socket
DbdHost={host}
DbdPort={port}
PidFile={state}/slurmdbd.pid
SlurmUser=root
StorageType=accounting_storage/mysql
"""
MARIADBD = "mariadbd --no-defaults --user=root --skip-networking --skip-grant-tables"


@pytest.fixture(scope="module")
def jobs(start_cluster):
    path = os.environ["PATH"] + ":/usr/sbin"
    if not all(shutil.which(each, path=path) for each in ("slurmdbd", "mariadbd")):
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no slurmdbd, mariadbd")
    with first_aid.start_cluster(nodes=2) as cluster:
        state, host = cluster.state, socket.gethostname()
        jobs = Jobs(cluster, clone=state, archive=state, logs=state)
        jobs.env["MYSQL_UNIX_PORT"] = f"{state}/db.socket"
        jobs.env["PATH"] += ":/usr/sbin"
        address = cluster.address(host)
        port = 22000 + int(address.split(".")[2])  # of this cluster alone
        for name, text in (("slurm.conf", CONF), ("slurmdbd.conf", DBD_CONF)):
            with (state / name).open("a") as conf:
                where = {"address": address, "host": host, "port": port, "state": state}
                conf.write(text.format(**where))
        (state / "slurmdbd.conf").chmod(0o600)
        files = f"--datadir={state}/db --socket={state}/db.socket"
        until(jobs, f"mariadb-install-db --user=root {files}", "OK")
        commands = [f"{MARIADBD} {files}", "slurmdbd -D"]
        daemons = [subprocess.Popen(each.split(), env=jobs.env) for each in commands]
        try:
            until(jobs, "sacctmgr --immediate add cluster cluster", "Adding Cluster")
            for each in ("controller", *cluster.nodes):
                cluster.crash(each)
            cluster.revive()  # with the new slurm.conf
            until(jobs, "sinfo --noheader --partition=main --format=%D%T", "2idle")
            yield jobs
        finally:
            for daemon in daemons:
                daemon.kill()
                daemon.wait()


def until(jobs, command: str, pattern: str) -> None:
    """Call a command until it prints what it should."""
    deadline = time.monotonic() + 120
    while not re.search(pattern, output := jobs.run(["bash", "-c", command]).output):
        assert time.monotonic() < deadline, f"no {pattern} from {command}:\n{output}"
        time.sleep(0.2)


def test_how_the_job_ended(jobs):
    """Slurm gives a job the state and the exit code of the first table.

    sacct's are in brackets where it has some.
    """
    # Of a job without an error, and in sessions of their own.
    others = {code for _, code, _ in ROWS} - ENDS.keys()
    assert others == {"0:0", "0:53", "0:125"}
    ends, shown = {}, {}
    for state, code, own in ROWS:
        if code in ENDS:
            flags = ["--no-requeue", "--mem=1G", f"--ntasks={1 + (code == '143:0')}"]
            job = jobs.submit("", *flags, f"--wrap={ENDS[code]}")
            ends[job] = f"{state} .*{own or code}"
            shown[job] = (state, code)
    again = "[ $SLURM_RESTART_COUNT ] || scontrol requeue $SLURM_JOB_ID; sleep 1"
    ends[jobs.submit("", f"--wrap={again}")] = r"REQUEUED (?s:.*)COMPLETED"
    for node, end in (("node1", "PREEMPTED"), ("node2", "NODE_FAIL")):
        where = ["--no-requeue", f"--nodelist={node}"]
        job = jobs.submit("", *where, "--wrap=sleep 600")
        until(jobs, f"squeue --noheader --jobs={job} --format=%T", "RUNNING")
        ends[job] = end
    one_fails = ["--array=1-2", "--no-requeue", "--wrap=[ $SLURM_ARRAY_TASK_ID = 1 ]"]
    array = jobs.submit("", *one_fails)
    jobs.submit("", "--nodelist=node1", "--partition=urgent", "--wrap=true")
    jobs.run("scontrol update NodeName=node2 State=DOWN Reason=lost".split())
    for job, end in shown.items():
        assert (jobs.wait(job).state, jobs.show(job)["ExitCode"]) == end
    sacct, failed = re.findall(r"^    (sacct --jobs=7 .*)$", PAGE, re.M)
    for job, end in ends.items():
        until(jobs, sacct.replace("=7", f"={job}"), rf"(?m)^{job} +{end}")
    only_task_2 = rf"JobID .*\n-.*\n{array}_2 +FAILED +1:0 *\n\Z"
    until(jobs, failed.replace("=7", f"={array}"), only_task_2)
    for command in re.findall(r"``(sacct(?:mgr)? [^`]*)``", PAGE):
        result = jobs.run(["bash", "-c", command.replace("\n", " ")])
        assert result.exit_code == 0, (command, result)


def test_gpu_hours(jobs):
    """Of two GPUs for some seconds, as the page on what a job has used counts them."""
    job = jobs.submit("", "--gpus=2", "--wrap=sleep 3")
    count = textwrap.dedent(listing("after_a_job.rst", "gpu_hours()"))
    until(
        jobs,
        count.replace("=8", f"={job}"),
        r"^0\.00[2-5] GPU-hours\n0\.00[2-5] GPU-hours\n$",
    )
    page = (REPOSITORY / "docs" / "after_a_job.rst").read_text()
    (usage,) = re.findall(r"``(sacct [^`]*TRESUsageInAve[^`]*)``", page)
    for command in (usage, listing("after_a_job.rst", "sreport")):
        result = jobs.run(["bash", "-c", textwrap.dedent(command)])
        assert result.exit_code == 0 and "error" not in result.output, result
