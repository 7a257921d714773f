"""Pretraining: the loop, from a recipe to a run folder with a backbone in it."""

import copy
import sys
import time
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import nn

from onecrop.build import build_method, share_batch_norm
from onecrop.checkpoint import loop_state, read_means, restore_loop
from onecrop.device import choose_device, peak_memory, reset_peak_memory, tune
from onecrop.distributed import joined, own_state, restarted, whole_state, world
from onecrop.errors import StoppedError
from onecrop.evaluate import Probe, run_probe
from onecrop.forecast import checkpoint_bytes, describe_memory, forecast_memory, need_step
from onecrop.nets.backbones import module_name
from onecrop.opening import Opening, open_run
from onecrop.optim import OPTIMIZERS, cosine, hold_learning_rate
from onecrop.pace import fitting_epochs
from onecrop.progress import EpochClock, Progress, duration, interruptible
from onecrop.recipe import Recipe
from onecrop.runs import Onlooker, Run, provenance
from onecrop.step import TrainStep

TIMED_STEPS = 20  # at full speed, before the run's time is forecast


@joined()
def pretrain(recipe: Recipe, *, resume: bool = False, backbone: nn.Module | None = None) -> Path:
    """Train as the recipe says and return the run folder. A killed run continues with `resume` to the same bits.

    backbone: a network of your own, [B, 3, S, S] -> [B, dim], in place of the recipe's; it stays as it is.
    Under torchrun all processes make one run, and a restarted one resumes by itself.
    """
    if backbone is not None:
        recipe = replace(recipe, backbone=module_name(backbone))
    group, resume = world(), resume or restarted()
    device = choose_device(recipe.device)
    tune(device)
    reset_peak_memory(device)
    run = Run(recipe.out) if group.first else Onlooker(recipe.out)
    if group.said_by(0, run.finished and resume):
        run.refuse_changes(recipe)
        print(f"{run.folder} is finished: nothing to resume")
        return run.folder
    if resume and run.recipe_file.exists():
        recipe = recipe.completed(run.recipe())
    run.refuse(recipe, resume)
    # a run that has a checkpoint has the weights to start from behind it
    opening = open_run(recipe, device, backbone, begun=group.said_by(0, run.checkpoint_file.exists()))
    if recipe.minutes is not None and not group.said_by(0, run.recipe_file.exists()):
        opening = _within_minutes(opening, run)
    training = Training(opening, run)
    run.need_room(checkpoint_bytes(opening.recipe, training.method))
    with run.exclusively():
        images, facts = opening.images, (device, opening.weights_sha256, group.size)
        run.begin(opening.recipe, provenance(opening.recipe, images.fingerprint, len(images), *facts), resume)
        for line in opening.describe():
            run.say(line)
        training.restore()
        training.run_to_end()
    return run.folder


def _within_minutes(opening: Opening, run: Run) -> Opening:
    """With the epochs that fit, by a trial on a copy of the network."""
    recipe, device = opening.recipe, opening.loader.device
    assert recipe.minutes is not None
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # the run's own draws come after it
        copied = opening._replace(recipe=replace(recipe, compile=False), network=copy.deepcopy(opening.network))
        trial = Training(copied, run)
        within = fitting_epochs(trial.train_step, recipe.minutes)
    if "epochs" in opening.chosen or within.value < trial.epochs:
        opening = opening.with_epochs(within)
    del trial
    reset_peak_memory(device)
    return opening


class Training:
    """The state of a run: network, bank, optimiser, step, and the sums of the epoch under way."""

    def __init__(self, opening: Opening, run: Run) -> None:
        recipe, loader, self.sets = opening.recipe, opening.loader, opening.sets
        assert recipe.lr is not None
        assert recipe.weight_decay is not None
        assert recipe.optimizer is not None
        assert recipe.epochs is not None
        assert recipe.batch_size is not None
        self.recipe, self.run, self.loader, self.device = recipe, run, loader, loader.device
        self.epochs, self.batch_size = recipe.epochs, recipe.batch_size
        assert recipe.image_size is not None
        assert recipe.precision is not None
        self.peak_lr, self.image_size = recipe.lr, recipe.image_size
        method = build_method(recipe, loader.num_images, opening.network)
        share_batch_norm(method, recipe, self.device)
        self.method, self.group = method.to(self.device).to(memory_format=torch.channels_last), method.group
        lr = torch.tensor(self.peak_lr, device=self.device)
        self.optimizer = OPTIMIZERS[recipe.optimizer].build(
            self.method.parameters(), lr, recipe.momentum, recipe.weight_decay
        )
        held = (p for name in method.undecayed for p in method.get_submodule(name).parameters())
        hold_learning_rate(self.optimizer, held)
        self.steps_per_epoch = loader.batches_per_epoch
        self.total_steps = self.epochs * self.steps_per_epoch
        self.warmup_steps = round(recipe.warmup_epochs * self.steps_per_epoch)
        fast = self.device.type == "cuda"
        self.train_step = TrainStep(self.method, self.optimizer, loader, recipe.seed, fast, bool(recipe.compile))
        dtype = getattr(torch, recipe.precision)
        self.forecast = forecast_memory(self.method, loader, recipe.crop_size, dtype)
        need_step(self.forecast, self.method, self.batch_size, self.device)
        self.step = 0
        self.prepared = 0.0  # seconds of what stands before the first step: they count to the first epoch

    def run_to_end(self) -> None:
        started = last_saved = time.monotonic()
        self.run.say(describe_memory(self.forecast))
        if self.step == 0:
            self.method.prepare(self.loader)
            self.prepared = self._since(started)
            calibrated = "bank calibrated, " * bool(getattr(self.recipe.settings, "calibrate", False))
            self.run.say(f"{calibrated}data loaded in {self.prepared:.1f} s")
        else:
            self.run.say(f"resumed at step {self.step:,} of {self.total_steps:,}")
        self.progress = Progress(None if self.group.first else sys.stdout)
        self.epoch = EpochClock(self.step, self.loader)
        timed_from, warm = self.step if self.train_step.ready else None, time.monotonic()
        with interruptible() as interrupted:
            while self.step < self.total_steps:
                begun = time.monotonic()
                was_ready = self.train_step.ready
                self.train_step(self.step, self.learning_rate(self.step), (self.step + 1) / self.total_steps)
                self.step += 1
                if not was_ready:  # compiling: reported apart, and not counted as training
                    self.epoch.exclude(self._since(begun), steps=1)
                    if self.train_step.ready:
                        done = "compiled and captured" if self.train_step.compiled else "captured"
                        self.run.say(f"step {done}; {self._since(started):.1f} s since the start")
                        timed_from, warm = self.step, time.monotonic()
                if timed_from is not None and self.step == timed_from + TIMED_STEPS:
                    self._expect(self._since(warm))
                self._report()
                due = time.monotonic() - last_saved >= self.recipe.checkpoint_seconds
                stop, due = self.group.any(bool(interrupted), due)
                if stop or due or self.step == self.total_steps:
                    begun = time.monotonic()
                    self._save()
                    last_saved = time.monotonic()
                    self.epoch.exclude(last_saved - begun)
                if stop:
                    raise StoppedError(
                        f"stopped at step {self.step:,} of {self.total_steps:,}; saved: "
                        f"continue with `onecrop pretrain --out {quote(self.run.folder.as_posix())} --resume`"
                    )
        self._finish()

    def _expect(self, seconds: float) -> None:
        """Say how long the run will take, from the first steps at full speed."""
        whole = duration(seconds / TIMED_STEPS * self.total_steps)
        rate = TIMED_STEPS * self.batch_size / seconds
        self.run.say(f"time to expect: {whole} for {self.epochs} epochs, {rate:,.0f} images/s")

    def _since(self, moment: float) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.monotonic() - moment

    def _report(self) -> None:
        """A progress line when one is due; at the end of an epoch its row of metrics, and a probe."""
        whole_epoch = self.step % self.steps_per_epoch == 0
        if not (whole_epoch or self.progress.due()):
            return
        means = self._means()
        line = self._line(means)
        last = self.step == self.total_steps
        self.progress.update(line, final=last or (whole_epoch and self.progress.due()))
        if whole_epoch:
            self._finish_epoch(means, line)
            self.epoch = EpochClock(self.step, self.loader)

    def learning_rate(self, step: int) -> float:
        return self.peak_lr * cosine(step, self.total_steps, self.warmup_steps)

    def _means(self) -> dict[str, float]:
        """Of the epoch so far: the loop's only synchronisation, once an epoch, a progress line or a checkpoint."""
        done = (self.step - 1) % self.steps_per_epoch + 1
        return read_means(self.train_step.sums, done, self.step, self.run.checkpoint_file)

    def _line(self, means: dict[str, float]) -> str:
        epoch = (self.step - 1) // self.steps_per_epoch + 1
        rate = self.epoch.steps_per_second(self.step) * self.batch_size
        left = duration((self.total_steps - self.step) * self.batch_size / rate) if rate else "?"
        values = "  ".join(f"{name} {value:.4g}" for name, value in means.items())
        if not self.loader.resident:
            values += f"  waiting for data {self.epoch.waiting():.1%}"
        return f"epoch {epoch}/{self.epochs}  {rate:,.0f} images/s  {left} left  {values}"

    def _finish_epoch(self, means: dict[str, float], line: str) -> None:
        epoch = self.step // self.steps_per_epoch
        row: dict[str, Any] = {"epoch": epoch, "step": self.step, "lr": self.learning_rate(self.step - 1), **means}
        rate = self.epoch.steps_per_second(self.step)
        # of all its steps at the rate of those that were timed: some may have run before a resume, or compiled
        steps = self.steps_per_epoch / rate if rate else self.epoch.seconds()
        row |= {
            "images_per_second": rate * self.batch_size,
            "seconds": self.prepared + steps,
            "data_wait": self.epoch.waiting(),
            "peak_memory": peak_memory(self.device),
        }
        self.prepared = 0.0
        self.run.add_metrics(row)
        self.run.log(line)
        self.train_step.reset_sums()
        every = self.recipe.probe_every
        if every and (epoch % every == 0 or self.step == self.total_steps):
            self._probe(epoch)

    def _probe(self, epoch: int) -> None:
        self.method.eval()
        self.group.adopt(self.method.backbone.buffers())  # running statistics, where each process had its own
        probe = Probe(self.image_size, self.device, self.recipe.seed)
        assert self.sets is not None
        row = run_probe(self.recipe.probe, self.method.backbone, self.sets, probe)
        self.run.add_result({"of": "pretrained", "epoch": epoch, "step": self.step, **row})
        self.run.say(f"epoch {epoch}: {row['evaluation']} {row['accuracy']:.2f} %")

    def _save(self) -> None:
        self._means()  # never replace a good checkpoint by a broken one
        state = loop_state("method", self.method, self.optimizer, self.train_step.sums, self.step)
        self.run.save(self.step, whole_state(state, self.method.shards, self.loader.num_images, self.group))
        self.group.wait()  # nobody goes on, or ends, before it is written

    def restore(self) -> None:
        """Go back to the run's last checkpoint, where it has one."""
        step, tensors = self.run.restore()
        self.step = self.group.said_by(0, step)
        if not self.step:
            return
        tensors = own_state(tensors, self.method.shards, self.group)
        sums = restore_loop(tensors, "method", self.method, self.optimizer, self.run.checkpoint_file)
        self.train_step.sums = {name: value.to(self.device) for name, value in sums.items()}

    def _finish(self) -> None:
        facts = {
            "backbone": self.recipe.backbone,
            "stem": self.recipe.stem,
            "image_size": self.recipe.image_size,
            "data": self.recipe.data,
            "method": self.recipe.method,
            "epoch": self.epochs,
            "seed": self.recipe.seed,
        }
        self.run.finish(self.method.backbone, facts)
        self.group.wait()  # whatever a process does next, it finds the backbone
        self.run.say(f"finished: {self.run.backbone_file}")
