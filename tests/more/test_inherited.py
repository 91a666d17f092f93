"""What a job gets of the job from whose shell it is submitted: nothing."""

import re
import shlex

import pytest
from slurm_jobs import REPOSITORY
from test_launch import ONE_EACH, ONE_EPOCH, SMALL, SYNTHETIC

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(scope="module")
def jobs(binding_jobs):
    return binding_jobs


# How the shell that calls sbatch comes to be in another job, and what it has of it.
SHELLS = {
    "a task": (
        "salloc --nodes=1 --cpus-per-task=2 --mem-per-cpu=100 --gpus=1 "
        "srun --cpu-bind=cores",
        "$SLURM_CPU_BIND == *mask_cpu:* && $SLURM_MEM_PER_CPU && $SLURM_GPUS",
    ),
    "salloc's shell": (
        "salloc --ntasks=1 --gpus-per-task=1",
        "${SLURM_GPUS_PER_TASK:-}${SLURM_TRES_BIND:-}",
    ),
    "salloc's shell, by GPU": (
        "salloc --gpus=2 --cpus-per-gpu=2 --ntasks-per-gpu=1",
        "$SLURM_CPUS_PER_GPU && $SLURM_NTASKS_PER_GPU",
    ),
    "a task of an array": ("sbatch --wait --array=3", "$SLURM_ARRAY_TASK_ID == 3"),
}


def test_all_job_scripts_forget_the_same():
    """So it is enough that each of SHELLS calls sbatch with one of them."""
    function = re.compile(r"^forget_other_jobs\(\) \{\n(?:.+\n)+?\}\n", re.MULTILINE)
    scripts = [path.read_text() for path in REPOSITORY.glob("*/job*.sh")]
    assert len(scripts) == 5
    assert len({function.search(script)[0] for script in scripts}) == 1
    assert all("\n    forget_other_jobs\n" in script for script in scripts)


@pytest.mark.parametrize(
    "shell, folder, last_line",
    [
        ("a task", "multi_node", "Test loss "),
        ("salloc's shell", "multi_node", "Test loss "),
        ("salloc's shell, by GPU", "multi_node", "Test loss "),
        # imagenet's seed is the number of its task, in an array of its own.
        ("a task of an array", "imagenet", "To use the best weights: "),
    ],
)
def test_sbatch_in_a_job(jobs, shell, folder, last_line, tmp_path):
    """Slurm passes on what the calling shell has of its own job: job.sh drops it."""
    command, passed_on = SHELLS[shell]
    flags = [*SMALL, "--nodes=2", *ONE_EACH]
    sbatch = ["sbatch", "--parsable", *flags, f"--output={jobs.logs}/%j.out", "job.sh"]
    sbatch += ONE_EPOCH
    if folder == "imagenet":
        # Another cluster of the tests may have had a job of this number.
        sbatch += [*SYNTHETIC, f"--checkpoint-dir={tmp_path}/checkpoints"]
    caller, answer = tmp_path / "caller.sh", tmp_path / "answer"
    caller.write_text(
        f"#!/bin/bash\n[[ {passed_on} ]] && "
        f"SRUN_CPUS_PER_TASK=64 {shlex.join(sbatch)} > {shlex.quote(str(answer))}\n"
    )
    caller.chmod(0o755)
    env = {"IMAGENET_DIR": "/nowhere"}  # --synthetic takes nothing from there
    if shell == "a task":
        env["SLURM_CPU_BIND"] = ""  # or it would be bound to none
    outer = jobs.run([*command.split(), caller], folder, **env)
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
    assert lines[-1].startswith(last_line), result
    assert not [line for line in lines if "srun: " in line], result
    assert "\n  seed: 0\n" in result.output, result
