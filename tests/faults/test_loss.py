"""A loss that is not a number."""

import pytest
from slurm_jobs import EPOCHS, every_case

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize("learning_rate", every_case("1e18", "1e10"))
def test_loss_is_not_finite(user, learning_rate):
    """All ranks stop when they next talk, a line says why, and nothing is saved."""
    job = user.train(
        *EPOCHS,
        f"--learning-rate={learning_rate}",
        "--weight-decay=0",
        "--save-steps=4",
    )
    result = user.wait(job)
    assert result.state == "FAILED" and result.restarts == 0, result
    (step,) = result.find(
        r"^main.py: error: the loss is (?:nan|inf) before step (\d+) of epoch 1: "
        "nothing of it is saved; "
        "try a smaller --learning-rate, or look at the data$"
    )
    # Ranks talk before they save: soon enough for what is lost at once.
    assert int(step) <= 4, result
    saved = [path.name for path in user.checkpoints(job).glob("epoch-*")]
    assert all(name < f"epoch-001-step-{int(step):06}" for name in saved), (
        saved,
        result,
    )
    assert "Traceback" not in result.output, result
