"""Weighted k-nearest-neighbour vote on frozen features, in chunks (Wu et al. 2018: k = 200, T = .1, cosine)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onecrop.data import ImageSet
from onecrop.distributed import world
from onecrop.evaluate.features import Probe, extract, labels_on

TEMPERATURE = 0.1
CHUNK = 1024


def knn(backbone: nn.Module, train: ImageSet, test: ImageSet, probe: Probe) -> dict[str, Any]:
    """vote of the nearest training images"""
    k = min(probe.k, len(train))
    predicted = knn_predict(
        extract(backbone, train, probe), labels_on(train, probe.device), extract(backbone, test, probe), k, TEMPERATURE
    )
    accuracy = (predicted == labels_on(test, probe.device)).double().mean().item() * 100
    return {"accuracy": accuracy, "protocol": f"k {k}, T {TEMPERATURE}, cosine, central crop"}


def knn_predict(bank: Tensor, labels: Tensor, queries: Tensor, k: int, temperature: float) -> Tensor:
    """The class with the largest Σ exp(cosine / T) over the k nearest -> [queries]; several processes share them."""
    bank, queries = F.normalize(bank, dim=1), F.normalize(queries, dim=1)
    classes = int(labels.max()) + 1
    out = [labels[:0]]
    chunks = queries.split(CHUNK)
    for chunk in chunks[world().part(len(chunks))]:
        similarity, nearest = (chunk @ bank.T).topk(k, dim=1)
        votes = torch.zeros(len(chunk), classes, device=bank.device, dtype=bank.dtype)
        votes.scatter_add_(1, labels[nearest], ((similarity - 1) / temperature).exp())
        out.append(votes.argmax(1))
    return world().concatenate(torch.cat(out))
