"""sid: single-branch instance discrimination, the paper's method.

Cao and Wu, "On Improving the Algorithm-, Model-, and Data-Efficiency of Self-Supervised Learning": every image is its
own class; one crop, one network, one bank row an image; cross-entropy over the rows plus λ·SqrtKL. Each of the paper's
ablations is a setting. Temperatures, head and CutMix are those of the released code, which the paper leaves out.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from onecrop.augment import CutMix
from onecrop.bank import MemoryBank, SoftLabels, corrected_direction
from onecrop.data import Batch, Loader
from onecrop.draws import Draws
from onecrop.losses import instance_loss
from onecrop.losses.contrastive import proximal
from onecrop.losses.instance import KL, Relation
from onecrop.methods.base import Method, Settings, augmentation, autocast, spread, wide
from onecrop.nets import mlp
from onecrop.nets.backbones import Backbone


@dataclass(frozen=True)
class SidSettings(Settings):
    # None: chosen; on a GPU 256 and 2048 (the released code: 2048 both)
    dim: Annotated[int | None, "length of a feature and of a bank row"] = None
    hidden: Annotated[int | None, "width of the head"] = None
    temperature: Annotated[float, "of the cross-entropy"] = 0.2
    kl_temperature: Annotated[float, "of SqrtKL, on the raw cosines: with one temperature for both it fails"] = 1.0
    kl: Annotated[KL, "the self-distillation term: SqrtKL, one of its two parts, or none"] = "sqrt"
    kl_weight: Annotated[float, "λ"] = 20.0
    proximal_weight: Annotated[float, "weight of ‖z − w‖², NPID's term in its place; 0 switches it off"] = 0.0
    calibrate: Annotated[bool, "start the bank from the untrained network's features"] = True
    # soft: beyond the paper, whose Eq. 4 has one label an image
    update: Annotated[
        Literal["corrected", "soft", "plain"], "rule of the bank: Grad Update, with CutMix's labels, or the plain one"
    ] = "corrected"
    bank_momentum: Annotated[float | None, "m"] = None  # chosen; the paper's .5, on many images .2
    bank_momentum_end: Annotated[float | None, "m at the end of the run, reached linearly"] = None  # None: m stays
    sampled_rows: Annotated[int, "bank rows beside the batch's own; 0 takes all"] = 0
    # None: chosen; .5 as in the released code, but for the smallest network
    cutmix: Annotated[float | None, "α of Beta(α, α); 0 switches it off"] = None
    mixing: Annotated[Literal["batch", "image"], "CutMix draws one box for the whole batch, or one an image"] = "batch"
    # beyond the paper: neighbours in the bank as soft targets
    # None: chosen; from many images a share that grows along the run, as in the recipe `sid`
    relation: Annotated[float | None, "share of the target that neighbours of the own row get; 0: off"] = None
    relation_temperature: Annotated[float, "of the softmax over neighbours"] = 0.1
    relation_start: Annotated[float, "share of the run before it"] = 0.05
    relation_rise: Annotated[float | None, "share of the run over which it grows from 0"] = None


class Sid(Method):
    """single-branch instance discrimination: the paper's method"""

    Settings = SidSettings
    shards = ("bank.weight",)
    # what changes along the run lies on the device, and is saved
    relation_weight: Tensor  # [] the relation's share in this step
    bank_momentum: Tensor | None  # [] m in this step, where it changes

    def __init__(self, settings: SidSettings, backbone: Backbone, num_images: int, image_size: int, dtype: torch.dtype):
        super().__init__(backbone, dtype)
        self.settings = settings
        assert settings.dim is not None, "the recipe is not resolved"
        assert settings.hidden is not None
        assert settings.cutmix is not None
        assert settings.bank_momentum is not None
        self.head = mlp(backbone.dim, settings.hidden, settings.dim)
        self.bank = MemoryBank(num_images, settings.dim, settings.bank_momentum, dtype, self.group)
        self.register_buffer("relation_weight", torch.zeros(()))
        changing = None if settings.bank_momentum_end is None else torch.tensor(settings.bank_momentum)
        self.register_buffer("bank_momentum", changing)
        self.augment = augmentation(settings, image_size)
        self.cutmix = CutMix(settings.cutmix, self.group, each=settings.mixing == "image")

    @classmethod
    def tables(
        cls, settings: SidSettings, feature_dim: int, num_images: int, batch_size: int, dtype: torch.dtype
    ) -> dict[str, int]:
        assert settings.dim is not None, "the recipe is not resolved"
        return {"bank": num_images * settings.dim * dtype.itemsize}

    def features(self, x: Tensor) -> Tensor:
        with autocast(x, self.dtype):
            features = self.head(self.backbone(x.contiguous(memory_format=torch.channels_last)))
        return F.normalize(wide(features), dim=1)  # [b, D]

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        s = self.settings
        x = self.augment(batch.images, batch.aspect, batch.draws)  # one crop
        x, partner, mix = self.cutmix(x, batch.draws)
        z = self.gather(self.features(x), batch)  # [B, D]
        rows, own = self.rows(batch.index, batch.draws)
        out = instance_loss(
            z,
            rows,
            own,
            temperature=s.temperature,
            kl_temperature=s.kl_temperature,
            kl=s.kl,
            kl_weight=s.kl_weight,
            mixed_target=None if partner is None else own[partner],
            mix=mix,
            relation=Relation(self.relation_weight, s.relation_temperature) if s.relation else None,
            group=self.group,
        )
        terms = {"cross_entropy": out.cross_entropy}
        if s.kl != "none":
            terms["sqrt_kl"] = s.kl_weight * out.sqrt_kl
        if s.proximal_weight:
            last = self.bank.rows(batch.index)
            pulled = proximal(z, last, mix)
            if partner is not None:
                pulled = pulled + proximal(z, last[partner], 1 - mix)
            terms["proximal"] = s.proximal_weight * pulled
        probabilities = None if s.update == "plain" else out.batch_probabilities
        labels = None
        if s.update == "soft" and partner is not None:
            assert isinstance(mix, Tensor)
            labels = SoftLabels(partner, mix)
        self.bank.update(batch.index, z.detach(), probabilities, labels, self.bank_momentum)  # after it was read
        correction = (corrected_direction(z.detach(), out.batch_probabilities) - z.detach()).norm(dim=1).mean()
        self.watch = {"accuracy": out.accuracy, "spread": spread(z), "correction": correction}
        return terms

    def rows(self, index: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
        """-> the rows that the loss runs over, those of them that this process holds; where each image's own stands."""
        count, total = self.settings.sampled_rows, self.bank.num_images
        if not count or count + len(index) >= total:
            return self.bank.weight, self.bank.place(index)
        # The smallest of N hashed keys: distinct rows; the batch's own are kept out, so that none counts twice.
        keys = draws.once("sampled rows", total).index_fill(0, index, 2.0)
        sampled = keys.topk(count, largest=False, sorted=False).indices
        chosen = torch.cat([index, sampled])  # [B + K]
        if self.group.size == 1:
            return self.bank.rows(chosen), torch.arange(len(index), device=index.device)
        place = self.bank.place(chosen)
        held = place >= 0
        return self.bank.weight[place[held]], torch.where(held, held.cumsum(0) - 1, -1)[: len(index)]

    def after_step(self, progress: Tensor) -> None:
        """For the next step the relation's weight, 0 up to its start and then rising linearly, and m."""
        s = self.settings
        if s.relation:
            assert s.relation_rise is not None
            risen = ((progress - s.relation_start) / s.relation_rise).clamp(0, 1)
            self.relation_weight.copy_(s.relation * risen)
        if self.bank_momentum is not None:
            assert s.bank_momentum is not None
            assert s.bank_momentum_end is not None
            self.bank_momentum.copy_(s.bank_momentum + (s.bank_momentum_end - s.bank_momentum) * progress)

    @torch.no_grad()
    def prepare(self, loader: Loader) -> None:
        """Feature Calibrate: w_i = f_0(x_i) for every image, in train mode with training augmentation."""
        if not self.settings.calibrate:
            return
        self.train()
        for batch, count in loader.in_order():
            z = self.gather(self.features(self.augment(batch.images, batch.aspect, batch.draws)), batch)
            self.bank.write(batch.index[:count], z[:count])
