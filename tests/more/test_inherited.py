"""What a job gets of the job from whose shell it is submitted: nothing."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from slurm_jobs import REPOSITORY
from test_launch import ONE_EACH, ONE_EPOCH, SMALL


@pytest.fixture(scope="module")
def jobs(binding_jobs):
    return binding_jobs


FUNCTION = re.compile(r"^(\w+)\(\) \{(?: .*\}|\n(?:.*\n)+?\})$", re.MULTILINE)
FIRST = ["single_gpu/job.sh", "multi_gpu/job.sh"]
SECOND = ["multi_node/job.sh", "multi_node/job_torchrun.sh"]
THIRD = ["imagenet/job.sh", "docs/your_training/job.sh"]


@pytest.mark.parametrize(
    "names, but_for, count",
    [
        (FIRST, {"main"}, 4),
        (SECOND, {"main"}, 5),
        # What one's own project needs, imagenet has found out.
        (THIRD, {"main"}, 13),
        # With one test for them all, and not one for each.
        ([*FIRST, *SECOND, *THIRD], {"main", "fail", "check_job", "stage"}, 1),
        (["imagenet/job.sh", "docs/runs/each_line"], {"fail"}, 1),
    ],
)
def test_scripts_have_the_same_functions(names, but_for, count):
    """What has the same name is the same, word for word."""
    scripts = [(REPOSITORY / name).read_text() for name in names]
    functions = [
        {match[1]: match[0] for match in FUNCTION.finditer(script)}
        for script in scripts
    ]
    common = set.intersection(*map(set, functions)) - but_for
    assert len(common) == count, common
    for function in common:
        assert len({found[function] for found in functions}) == 1, function


# What people call what they save: it lets a job come back. And what is no such thing.
COUNT = """ckpt.pt last.ckpt checkpoint_last.pt model_3.pth epoch_1.pth last.pth.tar
Best.PT checkpoint-500/model.bin a/b/epoch=3-step=7.ckpt model.safetensors
state.pkl net.th"""
DO_NOT_COUNT = """seen line metrics.jsonl log.txt model.pt.tmp ckpt.pt.part
best.pth.partial epoch-1.pt.damaged tmp/ckpt.pt .tmp-checkpoint/x.pt gpus/node1.csv"""


def test_what_counts_as_a_checkpoint(tmp_path):
    """Also beside one whose name is not of this locale, and where RUN_DIR is a link."""
    script = (REPOSITORY / "docs" / "your_training" / "job.sh").read_text()
    function = {match[1]: match[0] for match in FUNCTION.finditer(script)}
    run_dir = tmp_path / "runs" / "7"
    for name in [*COUNT.split(), *DO_NOT_COUNT.split(), "a\udce8.ckpt"]:
        path = run_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for name in ("checkpoints", "2026/ckpt"):  # of a script that makes folders first
        (run_dir / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to(run_dir)
    env = {"RUN_DIR": str(tmp_path / "link"), "LC_ALL": "C.UTF-8"}
    env |= {"SLURM_ARRAY_TASK_COUNT": "2", "SLURM_RESTART_COUNT": "0"}
    parts = map(function.get, ("fail", "list_checkpoints", "make_run_dir"))
    functions = "\n".join(["set -eo pipefail", *parts, ""])

    def run(command: str) -> subprocess.CompletedProcess:
        command = ["bash", "-c", functions + command]
        return subprocess.run(command, env=os.environ | env, capture_output=True)

    found = run("list_checkpoints")
    names = os.fsdecode(found.stdout).splitlines()
    folders = {f"/{Path(name).parts[0]}" for name in COUNT.split() if "/" in name}
    expected = {f"/{name}" for name in [*COUNT.split(), "a\udce8.ckpt"]}
    assert set(names) - folders == expected
    # A full disk may not lose the list: all would count as new in the next start.
    assert run("list_checkpoints > /dev/full").returncode == 1
    assert (
        b"error: unset RUN_DIR, or all tasks share it" in run("make_run_dir x").stderr
    )
    env["RUN_DIR"] = str(tmp_path / "new")
    env["SLURM_ARRAY_TASK_COUNT"] = "1"
    assert run("make_run_dir x").returncode == 0


@pytest.mark.usefixtures("nothing_left")
def test_sbatch_in_a_task(jobs, tmp_path):
    """Slurm passes on what the calling shell has of its own job: job.sh drops it.

    test_hostile_shell, of the faults, has what salloc's shells and arrays have, too.
    """
    flags = [*SMALL, "--nodes=2", *ONE_EACH]
    sbatch = ["sbatch", "--parsable", *flags, f"--output={jobs.logs}/%j.out", "job.sh"]
    passed_on = "$SLURM_CPU_BIND == *mask_cpu:* && $SLURM_MEM_PER_CPU && $SLURM_GPUS"
    caller, answer = tmp_path / "caller.sh", tmp_path / "answer"
    caller.write_text(
        f"#!/bin/bash\n[[ {passed_on} ]] && SRUN_CPUS_PER_TASK=64 "
        f"{shlex.join([*sbatch, *ONE_EPOCH])} > {shlex.quote(str(answer))}\n"
    )
    caller.chmod(0o755)
    command = "salloc --nodes=1 --cpus-per-task=2 --mem-per-cpu=100 --gpus=1 srun "
    command += "--cpu-bind=cores"
    # With jobs' SLURM_CPU_BIND, it would be bound to none.
    outer = jobs.run([*command.split(), caller], "multi_node", SLURM_CPU_BIND="")
    assert outer.exit_code == 0, outer
    result = jobs.wait(answer.read_text().strip())
    assert result.state == "COMPLETED", result
    # What srun says where the controller has not yet noted
    # that the step before has ended.
    busy = (
        r"srun: (Job \d+ step creation temporarily disabled, retrying|"
        r"Step created for )"
    )
    lines = [line for line in result.output.splitlines() if not re.match(busy, line)]
    assert lines[-1].startswith("Test loss "), result
    assert not [line for line in lines if "srun: " in line], result
    assert "\n  seed: 0\n" in result.output, result
