"""Detection and instance segmentation: what a pretrained backbone is worth to Faster and Mask R-CNN."""

from onecrop.detect.recipe import DetectRecipe
from onecrop.detect.score import score_run
from onecrop.detect.train import detect

__all__ = ["DetectRecipe", "detect", "score_run"]
