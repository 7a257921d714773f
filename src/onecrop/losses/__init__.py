"""Losses: pure functions of tensors that carry their equation."""

from onecrop.losses.instance import InstanceLoss, instance_cross_entropy, instance_loss, sqrt_kl

__all__ = ["InstanceLoss", "instance_cross_entropy", "instance_loss", "sqrt_kl"]
