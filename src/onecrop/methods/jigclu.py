"""jigclu: pictures cut into 2×2 patches, shuffled across the batch and stitched; find who belongs together, and where.

Chen, Liu and Jia, "Jigsaw Clustering for Unsupervised Visual Representation Learning" (2021). One forward pass of the
stitched pictures; its feature map is cut again, and each quarter says whose patch it was (clustering) and from which
corner (location). Settings are the paper's: T .3, patches from corners that overlap by .3, equal weights, a head as
wide as ResNet-50's features. The released code multiplies the clustering term by T/.07, and enlarges a map of 7×7 to
8×8 before it is cut; here its quarters share the middle row and column.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecrop.augment import CROP_TRIES, crop_boxes
from onecrop.data import Batch
from onecrop.errors import UserError
from onecrop.losses.contrastive import cluster_accuracy, patch_clustering
from onecrop.methods.base import Method, Settings, augmentation, autocast, spread
from onecrop.nets import two_layers
from onecrop.nets.backbones import Backbone, feature_map, need_feature_map


@dataclass(frozen=True)
class JigcluSettings(Settings):
    dim: Annotated[int, "length of a patch's feature"] = 128
    hidden: Annotated[int, "width of the head"] = 2048
    temperature: Annotated[float, "of the softmax over the batch's patches"] = 0.3
    overlap: Annotated[float, "by how much a corner reaches over the middle, as a share of the picture"] = 0.3
    location_weight: Annotated[float, "weight of the location term"] = 1.0


class Jigclu(Method):
    """2×2 patches, shuffled across the batch: whose are they, and from where?"""

    Settings = JigcluSettings

    def __init__(
        self, settings: JigcluSettings, backbone: Backbone, num_images: int, image_size: int, dtype: torch.dtype
    ) -> None:
        super().__init__(backbone, dtype)
        if image_size % 2:
            raise UserError(
                f"jigclu cuts crops in halves: {image_size} px must be even: change --image-size or --crop-resolution"
            )
        need_feature_map(backbone, image_size)
        self.settings = settings
        self.head = two_layers(backbone.dim, settings.hidden, settings.dim)
        self.locate = nn.Linear(backbone.dim, 4)
        self.augment = augmentation(settings, image_size // 2)

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        size = len(batch.index)
        patches = self.patches(batch)  # [4b, 3, S/2, S/2], corner by corner
        order = batch.draws.once("jigsaw", 4 * size).argsort()
        image, corner = order % size, order // size  # of each place in the stitched pictures
        if self.group.size == 1:
            shuffled = patches[order]
        else:  # an image's patches lie together: each process has a contiguous part of them
            by_image = patches.unflatten(0, (4, -1)).transpose(0, 1).flatten(0, 1)
            shuffled = self.group.take(by_image, 4 * image + corner, unit=4)
        with autocast(patches, self.dtype):
            maps = feature_map(self.backbone, stitch(shuffled))  # [b, C, h, w]
            quarters = cut(F.adaptive_avg_pool2d(maps, 2))  # [4b, C], in the order of the patches
            z, where = (self.of_all(head(quarters), batch) for head in (self.head, self.locate))  # [4B, …]
        z = F.normalize(z, dim=1)
        self.watch = {"accuracy": cluster_accuracy(z, image), "spread": spread(z)}
        return {
            "clustering": patch_clustering(z, image, self.settings.temperature),
            "location": self.settings.location_weight * F.cross_entropy(where, corner),
        }

    def of_all(self, patches: Tensor, batch: Batch) -> Tensor:
        """[4b, …] of this process' pictures -> [4B, …] of all."""
        return self.gather(patches.unflatten(0, (-1, 4)), batch).flatten(0, 1)

    def patches(self, batch: Batch) -> Tensor:
        """From each of the picture's overlapping corners a random crop, recoloured on its own -> [4B, 3, S/2, S/2]."""
        stored = batch.images.shape[-1]
        side = min(stored, round((0.5 + self.settings.overlap) * stored))  # of a corner
        out = []
        for corner in range(4):
            draw = batch.draws.uniform(f"corner {corner}", 2 * CROP_TRIES + 2)
            boxes = crop_boxes(draw, batch.aspect, side, self.augment.scale, self.augment.ratio)
            boxes[:, 0] += corner // 2 * (stored - side)
            boxes[:, 1] += corner % 2 * (stored - side)
            out.append(self.augment.recolour(batch.images, boxes, batch.draws, f"patch {corner}"))
        return torch.cat(out)


def stitch(patches: Tensor) -> Tensor:
    """[4B, C, h, h] -> [B, C, 2h, 2h]: four consecutive patches make a picture, row by row."""
    count, channels, side, _ = patches.shape
    grid = patches.view(count // 4, 2, 2, channels, side, side).permute(0, 3, 1, 4, 2, 5)
    return grid.reshape(count // 4, channels, 2 * side, 2 * side).contiguous(memory_format=torch.channels_last)


def cut(maps: Tensor) -> Tensor:
    """[B, C, 2, 2] -> [4B, C], the way back from `stitch`."""
    return maps.permute(0, 2, 3, 1).reshape(-1, maps.shape[1])
