"""docs/after_a_job.rst: what can be run without accounting, mail and a laptop."""

import os
import shutil
import subprocess

import pytest
from slurm_jobs import IMAGENET_EPOCH_LINE, REPOSITORY, call, listings

PAGE = (REPOSITORY / "docs" / "after_a_job.rst").read_text()


@pytest.mark.parametrize("awk", ["mawk", "gawk"])
def test_the_winner_in_a_german_shell(tmp_path, awk):
    """There, a number has a comma, and mawk would take 98.90 for 98."""
    locale = "localedef -i de_DE -f UTF-8".split()
    subprocess.run([*locale, tmp_path / "de_DE.UTF-8"], check=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "awk").symlink_to(shutil.which(awk))
    accuracies = {1: (98.10, 98.2), 2: (9.5, 98.15), 3: (98.9, 98.05), 4: (97.99, 9.9)}
    for line, found in accuracies.items():
        epochs = [
            f"Epoch {epoch}: train loss 0.100 accuracy 99.00%, "
            f"valid loss 0.200 accuracy {accuracy:.2f}%, "
            "5 images/s, 0% waiting for data"
            for epoch, accuracy in enumerate(found)
        ]
        assert all(map(IMAGENET_EPOCH_LINE.match, epochs))
        (tmp_path / f"slurm-28_{line}.out").write_text("\n".join(epochs))
    (tmp_path / "sweep.txt").write_text("".join(f"--seed {n}\n" for n in range(1, 5)))
    (command,) = listings(PAGE, r"Which line of the sweep won\?")
    env = {"LOCPATH": str(tmp_path), "LC_ALL": "de_DE.UTF-8"}
    env["PATH"] = f"{tmp_path}/bin:{os.environ['PATH']}"
    result = call(["bash", "-euc", command], cwd=tmp_path, env=os.environ | env)
    assert result.output.splitlines() == [
        f"{max(accuracies[line]):.2f}% slurm-28_{line}.out --seed {line}"
        for line in (3, 1, 2, 4)
    ], result
