"""Fine-tuning a detector: the loop, from a recipe to a run folder with detections and their score in it."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from onecrop.checkpoint import loop_state, read_means, restore_loop
from onecrop.detect.batches import Batches, Sample
from onecrop.detect.coco import coco_tools, load_coco
from onecrop.detect.infer import detect_all
from onecrop.detect.model import Detector
from onecrop.detect.recipe import DetectRecipe
from onecrop.detect.run import DetectRun, provenance
from onecrop.detect.score import score_run
from onecrop.detect.sets import DetectionSet
from onecrop.detect.voc import load_voc
from onecrop.detect.weights import Start, load_start
from onecrop.device import choose_device, choose_precision, describe, peak_memory, seed_step
from onecrop.errors import StoppedError, UserError
from onecrop.progress import Progress, duration, interruptible

ROW_EVERY = 20  # steps a row of metrics


def detect(recipe: DetectRecipe, *, resume: bool = False) -> list[dict[str, Any]]:
    """Fine-tune a detector as the recipe says, find the objects of the test pictures, and score them -> result rows.

    A killed run continues with `resume` to the same bits on a CPU; a finished one is scored again from its files.
    """
    run = DetectRun(recipe.out)
    if resume and run.finished:
        run.refuse_changes(cast(Any, recipe))
        run.say(f"{run.folder} is finished: scored again from its files")
        return score_run(run.folder, recipe.metric)
    recipe = recipe.resolved()
    run.refuse(cast(Any, recipe), resume)
    if recipe.masks or recipe.metric == "coco":
        coco_tools()  # now, not after the last step
    device = choose_device(recipe.device)
    start = load_start(recipe.weights, recipe.backbone, recipe.seed)
    train, test = load_sets(recipe)
    recipe = replace(recipe, backbone=start.backbone, precision=recipe.precision or choose_precision(device))
    training = Training(recipe, run, start, train, device)
    run.need_room(2 * sum(value.nbytes for value in training.model.state_dict().values()))  # with its momentum
    with run.exclusively():
        run.begin(cast(Any, recipe), provenance(recipe, start, train, test, device), resume)
        _introduce(run, recipe, start, train, test, device)
        training.restore()
        training.run_to_end()
        run.write_truth(test.truth)
        with interruptible() as interrupted:
            found = detect_all(training.model, test, recipe.sizes(), device, interrupted)
        if interrupted:
            raise StoppedError(f"stopped while testing, with all steps taken and saved: {run.way_on}")
        run.write_detections(found)
        return score_run(run.folder)


def load_sets(recipe: DetectRecipe) -> tuple[DetectionSet, DetectionSet]:
    """What to train and to test on. VOC07+12 is tested on VOC07, as everywhere."""
    folder, skip = Path(recipe.data), recipe.skip_broken
    assert recipe.train_part is not None
    assert recipe.test_part is not None
    if not folder.is_dir():
        raise UserError(f"no folder {folder}: --data is where VOCdevkit, or COCO's annotations and pictures, lie")
    if recipe.set == "coco":
        masks = bool(recipe.masks)
        train = load_coco(folder, recipe.train_part, masks, skip)
        test = load_coco(folder, recipe.test_part, masks, skip)
        if train.categories != test.categories:
            raise UserError(f"{train.name} and {test.name} in {folder} have other categories")
    else:
        train = load_voc(folder, (2007,) if recipe.set == "voc07" else (2007, 2012), recipe.train_part, skip)
        test = load_voc(folder, (2007,), recipe.test_part, skip)
    if not any(not row["iscrowd"] for row in test.truth["annotations"]):
        raise UserError(f"{test.name} has no object to find: there is nothing to score")
    return train.with_objects(), test


def _introduce(
    run: DetectRun, recipe: DetectRecipe, start: Start, train: DetectionSet, test: DetectionSet, device: torch.device
) -> None:
    steps, sizes = recipe.steps(), recipe.sizes()
    origin = f"all {start.loaded} tensors of stem and stages 1–4 from {recipe.weights}" if start.loaded else "scratch"
    run.say(f"{train.name}: {len(train):,} pictures; {test.name}: {len(test):,}; {len(train.categories)} categories")
    for part in (train, test):
        if part.notes:
            run.say(f"{part.name}: " + "; ".join(f"{count:,} {what}" for what, count in part.notes.items()))
    run.say(
        f"{'Mask' if recipe.masks else 'Faster'} R-CNN C4, {start.backbone}, {recipe.norm} norm, {origin}; "
        f"{steps.iterations:,} steps of {recipe.batch_size} (schedule {recipe.schedule} × {recipe.scale:g}), "
        f"{sizes.train[0]}–{sizes.train[-1]} px, tested at {sizes.test}; {describe(device)}, {recipe.precision}"
    )


class Training:
    """The state of a detection run: network, optimiser, step, and the sums since the last row of metrics."""

    def __init__(
        self, recipe: DetectRecipe, run: DetectRun, start: Start, train: DetectionSet, device: torch.device
    ) -> None:
        self.recipe, self.run, self.device, self.steps = recipe, run, device, recipe.steps()
        torch.manual_seed(recipe.seed)  # of the new layers
        self.model = Detector(
            start.net,
            len(train.categories),
            masks=bool(recipe.masks),
            frozen_norm=recipe.norm == "frozen",
            size_scale=recipe.size_scale,
            num_crops=recipe.crops,
            dtype=getattr(torch, recipe.precision or "float32"),
        )
        self.model = self.model.to(device).to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(
            parameter_groups(self.model, recipe.weight_decay), lr=recipe.lr, momentum=recipe.momentum
        )
        self.batches = Batches(train, recipe.batch_size, recipe.sizes(), bool(recipe.masks), recipe.seed)
        self.step, self.sums = 0, dict[str, Tensor]()

    def run_to_end(self) -> None:
        total, last_saved = self.steps.iterations, time.monotonic()
        if self.step:
            self.run.say(f"resumed at step {self.step:,} of {total:,}")
        self.progress, self.begun_at, self.row_began = Progress(), self.step, time.monotonic()
        try:
            with interruptible() as interrupted:
                while self.step < total:
                    self._take_step()
                    self._report()
                    due = time.monotonic() - last_saved >= self.recipe.checkpoint_seconds
                    if interrupted or due or self.step == total:
                        self._save()
                        last_saved = time.monotonic()
                    if interrupted:
                        raise StoppedError(f"stopped at step {self.step:,} of {total:,}; saved: {self.run.way_on}")
                self._measure_norms(interrupted)
        finally:
            self.batches.close()

    def _take_step(self) -> None:
        try:
            samples = [sample.to(self.device) for sample in self.batches.at(self.step)]
        except UserError:  # a picture that cannot be decoded: keep what was learned
            if self.step:
                self._save()
            raise
        self.learn(samples)

    def learn(self, samples: list[Sample]) -> None:
        self.model.train()
        seed_step(self.recipe.seed, self.step)  # which anchors and proposals are sampled
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.lr * self.steps.share(self.step)
        terms = self.model(samples)
        self.optimizer.zero_grad(set_to_none=True)
        torch.stack(list(terms.values())).sum().backward()
        self.optimizer.step()
        for name, value in terms.items():
            self.sums[name] = self.sums.get(name, torch.zeros((), device=self.device)) + value.detach()
        self.step += 1

    @torch.no_grad()
    def _measure_norms(self, interrupted: Sequence[int]) -> None:
        """Batch norm's statistics anew, as plain means over training batches by the final weights.

        MoCo's detection code asks detectron2 for the same (TEST.PRECISE_BN): running means lag behind the weights.
        """
        norms = [module for module in self.model.modules() if isinstance(module, nn.BatchNorm2d)]
        count = min(self.recipe.norm_steps, self.steps.iterations)
        if not norms or not count:
            return
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # torch's word for a plain mean
        self.model.train()
        for step in range(self.steps.iterations, self.steps.iterations + count):
            seed_step(self.recipe.seed, step)
            self.model([sample.to(self.device) for sample in self.batches.at(step)])
            if interrupted:
                raise StoppedError(f"stopped while measuring norms, with all steps taken and saved: {self.run.way_on}")
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        self.run.say(f"batch norm's statistics measured over {count} batches")

    def _report(self) -> None:
        """A progress line when one is due, and a row of metrics every so many steps."""
        whole = self.step % ROW_EVERY == 0 or self.step == self.steps.iterations
        if not (whole or self.progress.due()):
            return
        means = self._means()
        rate = (self.step - self.begun_at) / max(time.monotonic() - self.progress.started, 1e-9)
        left = duration((self.steps.iterations - self.step) / max(rate, 1e-9))
        values = "  ".join(f"{name} {value:.3f}" for name, value in means.items())
        speed = f"{rate * self.recipe.batch_size:.1f} pictures/s  {left} left"
        line = f"step {self.step:,}/{self.steps.iterations:,}  {speed}  {values}"
        self.progress.update(line, final=self.step == self.steps.iterations)
        if whole:
            seconds, self.row_began = time.monotonic() - self.row_began, time.monotonic()
            lr = self.recipe.lr * self.steps.share(self.step - 1)
            row = {"step": self.step, "lr": lr, **means, "seconds": seconds, "peak_memory": peak_memory(self.device)}
            self.run.add_metrics(row)
            self.sums = {}

    def _means(self) -> dict[str, float]:
        """Terms since the last row; reading them back is the loop's only synchronisation."""
        return read_means(self.sums, (self.step - 1) % ROW_EVERY + 1, self.step, self.run.checkpoint_file)

    def _save(self) -> None:
        self._means()  # never replace a good checkpoint by a broken one
        self.run.save(self.step, loop_state("model", self.model, self.optimizer, self.sums, self.step))

    def restore(self) -> None:
        """Go back to the run's last checkpoint, where it has one."""
        self.step, tensors = self.run.restore()
        if not self.step:
            return
        sums = restore_loop(tensors, "model", self.model, self.optimizer, self.run.checkpoint_file)
        self.sums = {name: value.to(self.device) for name, value in sums.items()}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Weights of norms do not decay, as in detectron2."""
    norms = {
        parameter
        for module in model.modules()
        if isinstance(module, nn.BatchNorm2d)
        for parameter in module.parameters()
    }
    rest = [parameter for parameter in model.parameters() if parameter not in norms]
    return [
        {"params": rest, "weight_decay": weight_decay},
        {"params": [parameter for parameter in model.parameters() if parameter in norms], "weight_decay": 0.0},
    ]
