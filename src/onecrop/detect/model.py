"""Faster and Mask R-CNN with the C4 layout, from torchvision's parts and with detectron2's numbers.

    picture → stem, stages 1–3 (stride 16) → proposals → RoIAlign 14×14 → stage 4 → extra norm → [mean → class, box]
                                                                                               ↘ [deconvolution → mask]

The extra norm is that of MoCo's detection code (detection/train_net.py, Res5ROIHeadsExtraNorm): a batch norm appended
to stage 4, after the last block's ReLU and before the mean over the 7×7 map; the mask branch sees its output too. It
starts as the identity and evens out the scale of features that were never trained with labels.

Where torchvision and detectron2 differ, this follows detectron2, as the paper's tables do: box losses are plain L1,
RoIAlign samples adaptively on aligned pixels, and the mask branch shares the crops of the box branch.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNPredictor
from torchvision.models.detection.roi_heads import RoIHeads, maskrcnn_inference
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import FrozenBatchNorm2d, roi_align

from onecrop.augment import MEAN, STD
from onecrop.detect.batches import Sample

STRIDE = 16
CROP = 14  # RoIAlign's output; stage 4 halves it
ANCHORS = (32, 64, 128, 256, 512)  # pixels, for pictures with a short side of 800
RATIOS = (0.5, 1.0, 2.0)
# proposals of a picture before and after those that overlap are dropped
CANDIDATES = {"training": 12_000, "testing": 6_000}
KEPT = {"training": 2_000, "testing": 1_000}


class Trunk(nn.Module):
    """Stem and stages 1 to 3 of a ResNet -> [B, C, H/16, W/16]."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu, self.maxpool = net.conv1, net.bn1, net.relu, net.maxpool
        self.layer1, self.layer2, self.layer3 = net.layer1, net.layer2, net.layer3

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return cast(Tensor, self.layer3(self.layer2(self.layer1(x))))


class StageFour(nn.Module):
    """Crops [R, C, 14, 14] -> [R, dim, 7, 7], through stage 4 and the extra norm."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.layer4, self.norm = net.layer4, nn.BatchNorm2d(net.dim)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.norm(self.layer4(x)))


class Predictor(nn.Module):
    """Features [R, dim] -> class logits [R, K + 1], box changes [R, 4·(K + 1)]."""

    def __init__(self, dim: int, num_classes: int) -> None:
        super().__init__()
        self.classes, self.boxes = nn.Linear(dim, num_classes + 1), nn.Linear(dim, 4 * (num_classes + 1))
        for layer, spread in ((self.classes, 0.01), (self.boxes, 0.001)):
            nn.init.normal_(layer.weight, std=spread)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.classes(x), self.boxes(x)


class Proposals(RegionProposalNetwork):  # type: ignore[misc]
    """torchvision's region proposals, with the box loss in plain L1."""

    def compute_loss(
        self, objectness: Tensor, changes: Tensor, labels: list[Tensor], wanted: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        positive, negative = (torch.cat(marks).bool() for marks in self.fg_bg_sampler(labels))
        sampled = positive | negative
        box = (changes[positive] - torch.cat(wanted)[positive]).abs().sum() / sampled.sum()
        return F.binary_cross_entropy_with_logits(objectness.flatten()[sampled], torch.cat(labels)[sampled]), box


class Heads(RoIHeads):  # type: ignore[misc]
    """torchvision's matching, sampling and suppression around one stage 4 that boxes and masks share."""

    def __init__(self, stage_four: StageFour, dim: int, num_classes: int, masks: bool, num_crops: int) -> None:
        super().__init__(
            None,
            stage_four,
            Predictor(dim, num_classes),
            fg_iou_thresh=0.5,
            bg_iou_thresh=0.5,
            batch_size_per_image=num_crops,
            positive_fraction=0.25,
            bbox_reg_weights=(10.0, 10.0, 5.0, 5.0),
            score_thresh=0.05,
            nms_thresh=0.5,
            detections_per_img=100,
        )
        self.mask_branch = MaskRCNNPredictor(dim, 256, num_classes + 1) if masks else None
        if self.mask_branch is not None:
            nn.init.normal_(cast(Any, self.mask_branch).mask_fcn_logits.weight, std=0.001)

    def _features(self, features: Tensor, boxes: list[Tensor]) -> Tensor:
        crops = roi_align(features, boxes, CROP, spatial_scale=1 / STRIDE, sampling_ratio=-1, aligned=True)
        return cast(Tensor, self.box_head(crops))  # [R, dim, 7, 7]

    def losses(self, features: Tensor, proposals: list[Tensor], samples: list[Sample]) -> dict[str, Tensor]:
        targets = [sample._asdict() for sample in samples]
        proposals, matched, labels, wanted = self.select_training_samples(proposals, targets)
        seen = self._features(features, proposals)
        logits, changes = (part.float() for part in self.box_predictor(seen.mean((2, 3))))
        label = torch.cat(labels)
        positive = (label > 0).nonzero()[:, 0]
        of_class = changes.view(len(label), -1, 4)[positive, label[positive]]
        terms = {
            "classes": F.cross_entropy(logits, label),
            "boxes": (of_class - torch.cat(wanted)[positive]).abs().sum() / len(label),
        }
        if self.mask_branch is not None:
            drawn = [
                mask_targets(sample, boxes[own > 0], match[own > 0])
                for sample, boxes, match, own in zip(samples, proposals, matched, labels, strict=True)
            ]
            guess = self.mask_branch(seen[positive]).float()  # [P, K + 1, 14, 14]
            guess = guess[torch.arange(len(positive), device=guess.device), label[positive]]
            loss = F.binary_cross_entropy_with_logits(guess, torch.cat(drawn), reduction="sum")
            terms["masks"] = loss / max(guess.numel(), 1)  # there may be none
        return terms

    def detections(
        self, features: Tensor, proposals: list[Tensor], shapes: list[tuple[int, int]]
    ) -> list[dict[str, Tensor]]:
        logits, changes = (
            part.float() for part in self.box_predictor(self._features(features, proposals).mean((2, 3)))
        )
        found = self.postprocess_detections(logits, changes, proposals, shapes)
        results = [dict(zip(("boxes", "scores", "labels"), parts, strict=True)) for parts in zip(*found, strict=True)]
        if self.mask_branch is not None:
            guess = self.mask_branch(self._features(features, [result["boxes"] for result in results])).float()
            for result, masks in zip(results, maskrcnn_inference(guess, [r["labels"] for r in results]), strict=True):
                result["masks"] = masks  # [n, 1, 14, 14], the probability within the box
        return results


def mask_targets(sample: Sample, boxes: Tensor, match: Tensor) -> Tensor:
    """What the mask branch should say within each box -> 0 or 1 [n, 14, 14]."""
    assert sample.masks is not None
    where = torch.cat([match[:, None].to(boxes), boxes / sample.ratio], dim=1)  # masks have the size of the file
    drawn = roi_align(sample.masks[:, None].to(boxes), where, CROP, sampling_ratio=-1, aligned=True)[:, 0]
    return (drawn >= 0.5).to(boxes)


class Detector(nn.Module):
    """In training: samples -> loss terms. Else: samples -> detections in pixels of the samples' images."""

    def __init__(
        self,
        net: nn.Module,
        num_classes: int,
        *,
        masks: bool = False,
        frozen_norm: bool = False,
        size_scale: float = 1.0,
        num_crops: int = 512,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        resnet = cast(Any, net)
        self.trunk, dim = Trunk(resnet), resnet.dim
        anchors = AnchorGenerator((tuple(size * size_scale for size in ANCHORS),), (RATIOS,))
        self.proposals = Proposals(
            anchors,
            RPNHead(resnet.layer4[0].conv1.in_channels, len(ANCHORS) * len(RATIOS)),
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=256,
            positive_fraction=0.5,
            pre_nms_top_n=CANDIDATES,
            post_nms_top_n=KEPT,
            nms_thresh=0.7,
        )
        self.heads = Heads(StageFour(resnet), dim, num_classes, masks, num_crops)
        self.dtype = dtype
        if frozen_norm:
            freeze_norms(self)

    def forward(self, samples: list[Sample]) -> Any:
        images = pad([sample.image for sample in samples])
        targets = [sample._asdict() for sample in samples] if self.training else None
        # only the convolutions run in bfloat16: a box in it would be off by whole pixels
        with torch.autocast(images.tensors.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            features = self.trunk(images.tensors)
        features = features.float()
        boxes, terms = self.proposals(images, {"stride 16": features}, targets)
        with torch.autocast(images.tensors.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            if not self.training:
                return self.heads.detections(features, boxes, images.image_sizes)
            own = self.heads.losses(features, boxes, samples)
        return {"objectness": terms["loss_objectness"], "proposals": terms["loss_rpn_box_reg"], **own}


def pad(images: list[Tensor]) -> ImageList:
    """uint8 pictures of several sizes -> one normalised batch, zero where there is no picture, whole strides wide."""
    height, width = (-(-max(image.shape[side] for image in images) // STRIDE) * STRIDE for side in (1, 2))
    batch = torch.zeros(len(images), 3, height, width, device=images[0].device)
    mean, std = (torch.tensor(values, device=batch.device)[:, None, None] for values in (MEAN, STD))
    for row, image in zip(batch, images, strict=True):
        row[:, : image.shape[1], : image.shape[2]] = (image / 255 - mean) / std
    sizes = [(image.shape[1], image.shape[2]) for image in images]
    return ImageList(batch.contiguous(memory_format=torch.channels_last), sizes)


def freeze_norms(module: nn.Module) -> None:
    """Every batch norm becomes a fixed scale and shift."""
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            frozen = FrozenBatchNorm2d(child.num_features, eps=child.eps)
            frozen.load_state_dict(child.state_dict())
            setattr(module, name, frozen)
        else:
            freeze_norms(child)
