"""How many epochs fit into a time: real steps of a trial are timed, which is then thrown away."""

import statistics
from typing import Any

from onecrop.choices import Choice
from onecrop.forecast import timed
from onecrop.step import TrainStep

TRIED_STEPS = 20  # at full speed
TRIAL_SHARE = 0.03  # of the time may go into finding out how fast a step is
LEAST_TRIED = 3


def fitting_epochs(trial: TrainStep, minutes: float) -> Choice:
    """Its steps change no weight, but fill a bank and an optimiser. Several processes make as many, by one's clock."""
    loader, group, taken, enough = trial.loader, trial.method.group, list[float](), False
    while not enough:
        was_ready = trial.ready
        seconds = timed(lambda: trial(len(taken), 0.0, 0.0), loader.device)
        if was_ready:
            taken.append(seconds)
        slow = len(taken) >= LEAST_TRIED and sum(taken) > 60 * minutes * TRIAL_SHARE
        (enough,) = group.any(slow or len(taken) == TRIED_STEPS)
    a_step = group.said_by(0, statistics.median(taken[1:]))  # the first one prepares much
    epochs = epochs_within(minutes, a_step * loader.batches_per_epoch, trial.method.settings)
    fits = "what fits" if epochs > 1 else "the least, whether or not it fits"
    return Choice(epochs, f"{fits} into {minutes:g} minutes at {loader.batch_size / a_step:,.0f} images/s")


def epochs_within(minutes: float, an_epoch: float, settings: Any) -> int:
    """an_epoch: seconds. Before the first one a bank may be calibrated, by forward passes: a third of an epoch."""
    calibration = 1 / 3 if getattr(settings, "calibrate", False) else 0
    return max(1, int(60 * minutes / an_epoch - calibration))
