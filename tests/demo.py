"""Watch a node lose its power in a training, which goes on to the same weights.

    uv run python tests/demo.py     as root, with Slurm; three minutes on two CPU cores

A real Slurm with three nodes starts on this machine, and imagenet's job.sh twice on it:
left alone, and not.
"""

import re
import sys
import tempfile
import time
from pathlib import Path

import cluster as slurm
from first_aid import OVER, start_cluster
from rich.console import Console
from slurm_jobs import REPOSITORY, User

console = Console(soft_wrap=True, highlight=False)
ARGUMENTS = "--synthetic --limit-train-samples=160 --epochs=5 --save-steps=4".split()
ARGUMENTS += ["--learning-rate=0.05", "--timeout=15"]


def main() -> None:
    say("A controller and three nodes start.")
    try:
        with tempfile.TemporaryDirectory() as folder, start_cluster(gpus=1) as cluster:
            user = User(cluster, REPOSITORY, archive=Path(), logs=Path(folder))
            user.env |= {"IMAGENET_DIR": "", "SCRATCH": folder}
            say("A job trains for five epochs on two nodes, and nothing happens to it.")
            undisturbed = follow(user, user.train(*ARGUMENTS))
            say("The same job again.")
            weights = follow(user, user.train(*ARGUMENTS), crash_after="Epoch 2: ")
    except slurm.ClusterError as error:
        sys.exit(f"demo.py: error: {error}")
    if weights != undisturbed:
        sys.exit("\ndemo.py: error: the weights are not the same")
    say("The weights are the same, bit for bit. The cluster is gone.")


def say(text: str) -> None:
    console.print(f"\n[bold]{text}[/bold]")


def follow(user: User, job: str, crash_after: str = "") -> str:
    """Print what a job prints, until it is over; return the SHA-256 of its weights."""
    printed = 0
    over = False
    while not over:
        over = user.show(job)["JobState"] in OVER  # before the last look
        lines = user.log(job).splitlines(keepends=True)
        for line in lines[printed:]:
            if line.endswith("\n"):
                printed += 1
                console.print(line, end="", markup=False)
                if crash_after and line.startswith(crash_after):
                    crash_after = ""
                    user.cluster.crash("node2")
                    say(
                        "node2 has lost its power. Slurm finds out in half a minute, "
                        "and requeues the job."
                    )
        time.sleep(0.2)
    if not (
        found := re.search("^Weights SHA-256 ([0-9a-f]+)", user.log(job), re.MULTILINE)
    ):
        sys.exit(f"\ndemo.py: error: job {job} has not trained to its end")
    return found[1]


if __name__ == "__main__":
    main()
