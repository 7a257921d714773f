"""Losses over the batch and over a queue: what the two-view methods need.

z, a, b   unit features [B, D]        T   temperature        sg(x)   x without gradient
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def nt_xent(a: Tensor, b: Tensor, temperature: float) -> Tensor:
    """SimCLR: of 2B views each finds its partner among the 2B − 1 others -> [].

    mean over i of −log( e^(z_i·z_p(i)/T) / Σ_{k≠i} e^(z_i·z_k/T) )
    """
    z = torch.cat([a, b])
    logits = z @ z.T / temperature
    logits = logits.masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device), -torch.inf)
    return F.cross_entropy(logits, torch.arange(len(z), device=z.device).roll(len(a)))


def info_nce(query: Tensor, key: Tensor, queue: Tensor, temperature: float) -> Tensor:
    """MoCo: each query finds its key among the queue's rows; key and queue are constants -> [].

    mean over i of −log( e^(q_i·k_i/T) / (e^(q_i·k_i/T) + Σ_n e^(q_i·n/T)) )
    """
    positive = (query * key.detach()).sum(1, keepdim=True)
    logits = torch.cat([positive, query @ queue.detach().to(query.dtype).T], dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.int64, device=query.device))


def negative_cosine(prediction: Tensor, target: Tensor) -> Tensor:
    """SimSiam, BYOL: −mean cos(p, sg(z)) -> []."""
    return -F.cosine_similarity(prediction, target.detach(), dim=1).mean()


def noise_contrastive(positive: Tensor, negatives: Tensor, normaliser: Tensor, num_images: int) -> Tensor:
    """NPID: is this row the image's own, or one of m drawn uniformly from N? -> [].

    positive [B] and negatives [B, m] are e^(w·z/T); P = e/Z, noise 1/N, h = P / (P + m/N):
    mean over i of −log h(own) − Σ log(1 − h(drawn))
    """
    noise = negatives.shape[1] / num_images
    own, drawn = positive / normaliser, negatives / normaliser
    return -((own / (own + noise)).log() + (noise / (drawn + noise)).log().sum(1)).mean()


def patch_clustering(z: Tensor, image: Tensor, temperature: float) -> Tensor:
    """JigClu: each patch finds the others of its image among all patches of the batch -> [].

    mean over i of −1/|P_i| Σ_{p in P_i} log( e^(z_i·z_p/T) / Σ_{k≠i} e^(z_i·z_k/T) ), P_i: its image's other patches
    """
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    logits = (z @ z.T / temperature).masked_fill(itself, -torch.inf)
    positive = (image[:, None] == image) & ~itself
    log_p = logits.log_softmax(1).masked_fill(~positive, 0)
    return -(log_p.sum(1) / positive.sum(1)).mean()


def cluster_accuracy(z: Tensor, image: Tensor) -> Tensor:
    """Share of patches whose nearest patch is of the same image."""
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    nearest = (z.detach() @ z.detach().T).masked_fill(itself, -2.0).argmax(1)
    return (image[nearest] == image).float().mean()


def pair_accuracy(a: Tensor, b: Tensor) -> Tensor:
    """Share of images whose other view is the nearest of the batch: instance accuracy for methods without a bank."""
    nearest = (a.detach() @ b.detach().T).argmax(1)
    return (nearest == torch.arange(len(a), device=a.device)).float().mean()


def proximal(z: Tensor, rows: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """NPID: each feature stays near its bank row, a constant -> [].

    mean over i of μ_i·‖z_i − w_i‖², μ the weight [] or [B]
    """
    return (weight * (z - rows.detach().to(z.dtype)).square().sum(1)).mean()
