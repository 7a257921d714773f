"""What every process of a group does for the tests, the same in groups of any size; the first one writes what came out.

python -m tests.distributed.cases OUT EARLIER  # EARLIER: what another group wrote, to go on from
"""

import copy
import io
import sys
import tempfile
import time
from contextlib import redirect_stderr
from unittest.mock import patch

import numpy as np
import torch

from onecrop import Recipe, pretrain
from onecrop.augment import central_crop
from onecrop.bank import MemoryBank
from onecrop.build import build_method, build_network
from onecrop.choices import resolve
from onecrop.data import ImageSet, Loader, load
from onecrop.data.sources import Request
from onecrop.distributed import ALONE, joined, own_state, whole_state, world
from onecrop.evaluate import features
from onecrop.evaluate.features import Probe, RandomViews, extract
from onecrop.evaluate.knn import knn_predict
from onecrop.evaluate.linear import linear, linear_fast
from onecrop.nets import save_backbone
from onecrop.nets.depth import Depth, share_depth
from onecrop.nets.norms import share_norms
from onecrop.optim import OPTIMIZERS, optimizer_tensors, restore_optimizer
from onecrop.progress import Progress
from onecrop.recipe import hints
from onecrop.step import TrainStep

CPU = torch.device("cpu")
knn = sys.modules["onecrop.evaluate.knn"]  # the package has a function of that name
IMAGES, STEPS, SAVED = 23, 3, 1  # neither 23 images nor a batch of 7 can be shared evenly by 2 or 3
SMALL = {"dim": 16, "hidden": 32, "bottleneck": 8, "queue_size": 24, "norm_groups": 2, "noise_samples": 20}
SMALL["cutmix"] = 0.5  # which `tiny` would be spared
NEIGHBOURS = {"relation": 0.5, "relation_start": 0.0}
# name -> method, its settings, optimiser, batch
CASES = {
    "sid": ("sid", {}, "sgd", 7),
    "sid muon": ("sid", {}, "muon", 7),
    "sid relation": ("sid", NEIGHBOURS, "sgd", 7),
    "sid sampled": ("sid", {**NEIGHBOURS, "sampled_rows": 9}, "sgd", 7),
    "sid mixed": ("sid", {"update": "soft", "mixing": "image", "bank_momentum_end": 0.9}, "sgd", 7),
    "sid few sampled": ("sid", {"sampled_rows": 1}, "sgd", 3),  # a process may hold none of the four rows
    "sid plain l1": ("sid", {"kl": "l1", "update": "plain", "cutmix": 0.0}, "sgd", 8),
    "npid nce": ("npid", {}, "sgd", 7),
    "npid softmax": ("npid", {"objective": "softmax"}, "adamw", 7),
    "pid": ("pid", {}, "sgd", 7),
    "pid lars": ("pid", {}, "lars", 7),
    "moco": ("moco", {}, "sgd", 7),
    "moco groups": ("moco", {"norm_groups": 4}, "sgd", 8),
    "simclr": ("simclr", {}, "sgd", 7),
    "simsiam": ("simsiam", {}, "sgd", 7),
    "byol": ("byol", {}, "sgd", 7),
    "jigclu": ("jigclu", {}, "muon", 7),
    "moco efficientnet": ("moco", {}, "sgd", 7),  # both networks drop branches of images at random
}
RESUMED = ("sid", "npid softmax", "pid", "moco")  # bank, optimisers of two kinds, classifier, queue


class Case:
    """A training in float64, taken step by step."""

    def __init__(self, name):
        method, settings, optimizer, batch_size = CASES[name]
        images = load("shapes", request=Request(subset=IMAGES, image_size=16))
        backbone = "efficientnet_b0" if "efficientnet" in name else "tiny"
        recipe = Recipe(data="shapes", method=method, backbone=backbone, batch_size=batch_size)
        known = hints(type(recipe.settings))
        recipe = recipe.override({**{k: v for k, v in SMALL.items() if k in known}, **settings})
        recipe = resolve(recipe, images, CPU)
        images = ImageSet("shapes", images.images.astype(np.float64) / 255, image_size=16)
        self.group = world()
        self.method = build_method(recipe, IMAGES, build_network(recipe)).double()
        if settings.get("cutmix", 1) and hasattr(self.method, "cutmix"):
            self.method.cutmix.quantiles = self.method.cutmix.quantiles.float()  # as the draws are
        if self.group.size > 1:
            share_norms(self.method, self.group, batch_size, CPU)
        self.loader = Loader(images, batch_size, CPU, 0, self.group)
        lr = 1.0 if optimizer == "lars" else 0.05
        self.optimizer = OPTIMIZERS[optimizer].build(self.method.parameters(), torch.tensor(lr), 0.9, 1e-4)
        self.step, self.lr = TrainStep(self.method, self.optimizer, self.loader, 0, fast=False), lr

    def train(self, begin, end):
        if begin == 0:
            self.method.prepare(self.loader)
        for step in range(begin, end):
            self.step(step, self.lr, (step + 1) / STEPS)

    def state(self):
        """As a checkpoint holds it, on the first process."""
        state = {f"method.{k}": v.clone() for k, v in self.method.state_dict().items()}
        state |= {f"optimizer.{k}": v.clone() for k, v in optimizer_tensors(self.optimizer, self.method).items()}
        state = whole_state(state, self.method.shards, IMAGES, self.group)
        return state | {f"sums.{k}": v.clone() for k, v in self.step.sums.items()}

    def restore(self, state):
        def part(prefix):
            return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}

        state = own_state(state if self.group.first else {}, self.method.shards, self.group)
        self.method.load_state_dict(part("method."))
        restore_optimizer(self.optimizer, self.method, part("optimizer."))
        self.step.sums = part("sums.")


def trained(name):
    """-> the states after SAVED and after all steps."""
    case = Case(name)
    case.train(0, SAVED)
    saved = case.state()
    case.train(SAVED, STEPS)
    return {"saved": saved, "final": case.state()}


def resumed(name, earlier):
    """-> where another group's checkpoint leads."""
    case = Case(name)
    case.restore(earlier[name]["saved"])
    case.train(SAVED, STEPS)
    return case.state()


def same_bits(name, states):
    """-> tensors that differ, where a group goes on from its own checkpoint, from what it got without a stop."""
    state = resumed(name, {name: copy.deepcopy(states)})  # training goes on in place
    return [key for key, value in state.items() if not torch.equal(value, states["final"][key])]


def finds_no_backbone():
    """-> is there a process that finds none after pretraining? The first one writes it slowly."""

    def slowly(*given):
        time.sleep(0.3)
        save_backbone(*given)

    group, recipe = world(), Recipe(data="shapes", subset=8, image_size=16, backbone="tiny", batch_size=4, epochs=1)
    with tempfile.TemporaryDirectory() as folder, patch("onecrop.runs.save_backbone", slowly):
        out = group.said_by(0, folder) + "/run"
        run = pretrain(recipe.override({"out": out, "dim": 8, "hidden": 16, "device": "cpu"}))
        return group.any(not (run / "backbone.safetensors").exists())[0]


def collectives():
    """-> what the functions of a group give for a known whole, on whichever process something is wrong."""
    group, whole = world(), torch.arange(21.0).view(7, 3)
    mine = whole[group.part(7)].clone().requires_grad_()
    gathered = group.gather(mine, 7)
    (gathered * whole).sum().backward()
    order = torch.tensor([3, 6, 0, 5, 1, 4, 2])
    place = group.place(order, 7)
    units = torch.arange(12.0)[:, None][4 * group.part(3).start : 4 * group.part(3).stop]
    shuffled = torch.arange(12).flip(0)
    table = group.collect(mine.detach(), 7)
    began, ended = turns(group).T
    right = [
        torch.equal(gathered, whole),
        torch.equal(mine.grad, group.size * whole[group.part(7)]),
        torch.equal(group.take(mine.detach(), order), whole[order][group.part(7)]),
        torch.equal(
            group.take(units, shuffled, unit=4)[:, 0], shuffled[4 * group.part(3).start : 4 * group.part(3).stop]
        ),
        torch.equal(group.following(mine.detach()), whole.roll(-1, 0)[group.part(7)]),
        torch.equal(group.fetch(mine.detach(), place), whole[order]),
        torch.equal(group.hand_out(table, [7, 3], torch.float32), mine.detach()),
        torch.equal(group.concatenate(whole[: group.rank]), torch.cat([whole[:r] for r in range(group.size)])),
        group.said_by(group.size - 1, {"rank": group.rank}) == {"rank": group.size - 1},
        group.any(group.rank == 1, False) == [group.size > 1, False],
        bool((began[1:] >= ended[0]).all()),
        torch.equal(dropped(group), dropped(ALONE)[..., group.part(7)]),
    ]
    return group.any(*(not good for good in right))


def turns(group):
    """-> when each process began and ended its turn, the first one slowly: [process, 2]."""
    with group.by_turns():
        began = time.monotonic()
        time.sleep(0.1 * group.first)
        ended = time.monotonic()
    return group.stack(torch.tensor([began, ended], dtype=torch.float64))


def dropped(group):
    """What random depth leaves of two views of a process' part of seven images, in two calls -> [call, view, image]."""
    layer, part = Depth(0.5), group.part(7)
    share_depth(layer, group, 7)
    torch.manual_seed(0)
    views = torch.ones(2 * (part.stop - part.start))
    return torch.stack([layer(views).unflatten(0, (2, -1)) for _ in range(2)])


def drawn():
    """A bank's random rows, and what the generator gives after them: nothing may depend on the number of processes."""
    torch.manual_seed(0)
    bank = MemoryBank(IMAGES, 5, group=world())
    return {"rows": world().collect(bank.weight, IMAGES), "after": torch.rand(3)}


def evaluated():
    """Features, votes and a probe over batches small enough that every process gets some, and one of them none."""
    whole = features.BATCH, knn.CHUNK
    features.BATCH, knn.CHUNK = 8, 8
    try:
        return _evaluated()
    finally:
        features.BATCH, knn.CHUNK = whole


def _evaluated():
    train, test = (load("shapes", split, Request(subset=40, image_size=16)) for split in ("train", "test"))
    test = test.take(np.arange(12))
    net = build_network(resolve(Recipe(data="shapes", backbone="tiny", image_size=16), train, CPU)).eval()
    probe = Probe(16, CPU)
    found, wanted = extract(net, train, probe), extract(net, test, probe)
    return {
        "features": found,
        "view": RandomViews(net, train, probe, crop_scale=0.2)(1),
        "votes": knn_predict(found, torch.from_numpy(train.labels), wanted, 5, 0.1),
        "accuracy": torch.tensor(linear_fast(net, train, test, probe)["accuracy"]),
        "speakers": speakers(lambda: linear(net, train, test, probe, epochs=1)),
        "crops": central_crop(torch.from_numpy(test.images), torch.ones(12), 16),
    }


def speakers(work):
    """How many processes say how far they have come."""
    with redirect_stderr(io.StringIO()) as said, patch.object(Progress, "due", lambda self: True):
        work()
    return world().sum(torch.tensor(bool(said.getvalue())).long())


def everything(earlier=None):
    torch.set_num_threads(1)
    result = {name: trained(name) for name in CASES}
    result |= {"differing": {name: same_bits(name, result[name]) for name in RESUMED}}
    result |= {"blind": finds_no_backbone(), "wrong": collectives(), "drawn": drawn(), "evaluated": evaluated()}
    return result | {"resumed": {name: resumed(name, earlier) for name in RESUMED} if earlier else {}}


@joined()
def main(out, earlier):
    result = everything(torch.load(earlier))
    if world().first:
        torch.save(result, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
