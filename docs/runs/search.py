"""A search with Optuna: each task of a job array is a trial. Copy it beside main.py."""

import os
from pathlib import Path

import optuna
import resume
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock


class Trial:
    """This task's trial. Without an array, there is no search, and it does nothing.

    `suggest` gets Optuna's trial, and returns the settings to try. All ranks call all
    methods, as rank 0 asks Optuna for all.
    """

    def __init__(self, suggest, direction="maximize"):
        self.run_dir = os.environ.get("RUN_DIR", ".")
        self.suggest, self.direction = suggest, direction
        self.settings, self.stops = {}, False
        self.searches = "SLURM_ARRAY_JOB_ID" in os.environ
        if self.searches:
            self.settings = resume.on_rank_0("cannot open the study", self._begin)
            resume.say(f"Trial: {self.settings}")

    def should_stop(self, value, epoch):
        """Report a value after an epoch. Say whether the trial is worse than most."""
        if self.searches:
            self.stops = resume.on_rank_0(
                "cannot report", lambda: self._report(value, epoch)
            )
        return self.stops

    def end(self, value):
        """Tell Optuna the result, and print the best trial so far."""
        if self.searches:
            resume.on_rank_0("cannot report", lambda: self._tell(value))

    # On rank 0:

    def _begin(self):
        # The tasks share a file: there is no server.
        job = os.environ["SLURM_ARRAY_JOB_ID"]
        path = str(Path(self.run_dir).absolute().with_name(f"{job}.journal"))
        backend = JournalFileBackend(path, JournalFileOpenLock(path))
        self.study = optuna.create_study(
            storage=optuna.storages.JournalStorage(backend),
            study_name=job,
            direction=self.direction,
            load_if_exists=True,
        )
        self.trial = self._trial()
        return self.suggest(self.trial)

    def _trial(self):
        """Return a new trial, or that of this job from before a requeue."""
        for trial in self.study.trials:
            if trial.user_attrs.get("run_dir") == self.run_dir:
                if trial.state.is_finished():
                    raise resume.RunError(f"its trial is {trial.state.name}")
                return optuna.Trial(self.study, trial._trial_id)
        trial = self.study.ask()
        trial.set_user_attr("run_dir", self.run_dir)
        return trial

    def _report(self, value, epoch):
        if value != value:
            self.study.tell(self.trial, state=optuna.trial.TrialState.FAIL)
            raise resume.RunError(f"the value after epoch {epoch} is NaN")
        self.trial.report(value, epoch)
        return bool(self.trial.should_prune())  # NumPy has its own

    def _tell(self, value):
        if self.stops:
            self.study.tell(self.trial, state=optuna.trial.TrialState.PRUNED)
        else:
            self.study.tell(self.trial, value)
        ended = self.study.get_trials(states=[optuna.trial.TrialState.COMPLETE])
        if ended:  # or all so far were stopped
            best = self.study.best_trial
            print(f"Best of {len(ended)}:", best.value, best.params, best.user_attrs)
