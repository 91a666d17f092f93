"""What a job gets of the job from whose shell it is submitted: nothing."""

import re
import shlex

import pytest
from slurm_jobs import REPOSITORY, tracked
from test_launch import ONE_EACH, ONE_EPOCH, SMALL

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(scope="module")
def jobs(binding_jobs):
    return binding_jobs


def test_all_job_scripts_forget_the_same():
    """So it is enough that a test calls one of them."""
    function = re.compile(r"^forget_other_jobs\(\) \{\n(?:.+\n)+?\}\n", re.MULTILINE)
    paths = [path for path in tracked() if re.fullmatch(r"job.*\.sh", path.name)]
    scripts = [(REPOSITORY / path).read_text() for path in paths]
    assert len(scripts) == 6
    assert len({function.search(script)[0] for script in scripts}) == 1
    assert all("\n    forget_other_jobs\n" in script for script in scripts)


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
