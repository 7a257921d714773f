"""npid: non-parametric instance discrimination, where sid comes from.

Wu et al., "Unsupervised Feature Learning via Non-Parametric Instance Discrimination" (2018). A random bank, the plain
update, noise-contrastive estimation (or the full softmax) and the proximal term ‖z − w‖². Settings are the paper's:
T .07, 4,096 noise samples, m .5, λ 30, 128 dimensions, a linear head. The augmentation is sid's; the released code
jitters every image, the hue by .4, and blurs none.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecrop.bank import MemoryBank
from onecrop.data import Batch
from onecrop.losses import instance_loss
from onecrop.losses.contrastive import noise_contrastive, proximal
from onecrop.methods.base import Method, Settings, augmentation, autocast, spread
from onecrop.nets.backbones import Backbone


@dataclass(frozen=True)
class NpidSettings(Settings):
    dim: Annotated[int, "length of a feature and of a bank row"] = 128
    temperature: Annotated[float, "of the softmax over the bank"] = 0.07
    objective: Annotated[Literal["nce", "softmax"], "estimate against noise, or all rows"] = "nce"
    noise_samples: Annotated[int, "rows drawn for each image under nce"] = 4096
    bank_momentum: Annotated[float, "m"] = 0.5
    proximal_weight: Annotated[float, "weight of ‖z − w‖², which keeps a feature near its last one"] = 30.0


class Npid(Method):
    """non-parametric instance discrimination: random bank, plain update, proximal term"""

    Settings = NpidSettings
    shards = ("bank.weight",)
    normaliser: Tensor  # Z, estimated once from the first batch; 0 until then

    def __init__(
        self, settings: NpidSettings, backbone: Backbone, num_images: int, image_size: int, dtype: torch.dtype
    ) -> None:
        super().__init__(backbone, dtype)
        self.settings = settings
        self.head = nn.Linear(backbone.dim, settings.dim)
        self.bank = MemoryBank(num_images, settings.dim, settings.bank_momentum, dtype, self.group)
        self.register_buffer("normaliser", torch.zeros(()))
        self.augment = augmentation(settings, image_size)

    @classmethod
    def tables(
        cls, settings: NpidSettings, feature_dim: int, num_images: int, batch_size: int, dtype: torch.dtype
    ) -> dict[str, int]:
        bank = {"bank": num_images * settings.dim * dtype.itemsize}
        if settings.objective == "softmax":
            return bank
        return {**bank, "drawn rows": batch_size * settings.noise_samples * settings.dim * torch.float32.itemsize}

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        s = self.settings
        x = self.augment(batch.images, batch.aspect, batch.draws)
        with autocast(x, self.dtype):
            features = self.head(self.backbone(x.contiguous(memory_format=torch.channels_last)))
        z = F.normalize(self.gather(features, batch), dim=1)  # [B, D]
        own = self.bank.rows(batch.index).to(z.dtype)
        if s.objective == "softmax":
            out = instance_loss(
                z,
                self.bank.weight,
                self.bank.place(batch.index),
                temperature=s.temperature,
                kl_temperature=1.0,
                kl="none",
                group=self.group,
            )
            terms, accuracy = {"cross_entropy": out.cross_entropy}, out.accuracy
        else:
            terms, accuracy = self.estimate(z, own, batch)
        terms["proximal"] = s.proximal_weight * proximal(z, own)
        self.bank.update(batch.index, z.detach())  # written after it was read
        self.watch = {"accuracy": accuracy, "spread": spread(z)}
        return terms

    def estimate(self, z: Tensor, own: Tensor, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """Noise-contrastive estimation -> its term, and how often the own row beats the drawn ones."""
        count, total = self.settings.noise_samples, self.bank.num_images
        drawn = (batch.draws.whole().uniform("noise", count) * total).long()  # [B, m], uniform with replacement
        own_cosine = (z * own).sum(1)
        noise_cosine = self.cosines(z, drawn)
        positive = (own_cosine / self.settings.temperature).exp()
        negatives = (noise_cosine / self.settings.temperature).exp()
        with torch.no_grad():
            estimate = negatives.mean() * total
            self.normaliser.copy_(torch.where(self.normaliser == 0, estimate, self.normaliser))
        loss = noise_contrastive(positive, negatives, self.normaliser.clone(), total)
        return {"nce": loss}, (own_cosine > noise_cosine.amax(1)).float().mean()

    def cosines(self, z: Tensor, drawn: Tensor) -> Tensor:
        """Of each feature with the rows drawn for it -> [B, m]; each process works out those of the rows it holds."""
        if self.group.size == 1:
            noise = self.bank.rows(drawn).to(z.dtype)  # [B, m, D]
            return torch.bmm(noise, z[:, :, None])[:, :, 0]
        place = self.bank.place(drawn)
        image, number = (place >= 0).nonzero(as_tuple=True)
        rows = self.bank.weight[place[image, number]].to(z.dtype)
        cosines = z.new_zeros(drawn.shape).index_put((image, number), (self.group.fan_out(z)[image] * rows).sum(1))
        return self.group.total(cosines)
