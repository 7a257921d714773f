"""onecrop: self-supervised pretraining of image backbones. One crop, one network, one pass."""

from onecrop.embed import embed, search
from onecrop.errors import UserError
from onecrop.evaluate import evaluate
from onecrop.export import export
from onecrop.nets import load_backbone
from onecrop.recipe import Recipe
from onecrop.train import pretrain

__version__ = "0.1.0"
__all__ = ["Recipe", "UserError", "embed", "evaluate", "export", "load_backbone", "pretrain", "search"]
