"""Measure the time from srun to PyTorch imported in every task, on a test cluster.

The usual way is `srun uv run` in every task, which has each look whether the
environment is up to date. The examples' job.sh runs `uv sync` once and then
`srun uv run --no-sync`; both are counted. The limit is one process that imports
PyTorch. All tasks, on two nodes, share this machine's cores. Needs root and Slurm, as
the tests do.
"""

import functools
import os
import subprocess

from side_by_side import ROOT, argument_parser, compare, start_cluster, take_turns


def main() -> None:
    args = argument_parser(__doc__, rounds=3, tasks=8).parse_args()
    with start_cluster(nodes=2) as cluster:
        env = os.environ | cluster.env
        srun = f"srun --nodes=1-2 --ntasks={args.tasks} --mem-per-cpu=1G"
        python = "python -c 'import torch'"
        commands = {
            "srun uv run": f"{srun} uv run {python}",
            "uv sync; srun uv run --no-sync": (
                f"uv sync --locked --quiet && {srun} uv run --no-sync {python}"
            ),
            "one process": f"uv run --no-sync {python}",
        }
        variants = {
            name: functools.partial(
                subprocess.run, command, shell=True, cwd=ROOT, env=env, check=True
            )
            for name, command in commands.items()
        }
        title = f"From srun to PyTorch imported in {args.tasks} tasks"
        compare(title, take_turns(variants, args.rounds))


if __name__ == "__main__":
    main()
