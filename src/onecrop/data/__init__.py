"""Data: from the disk to batches on the device."""

from onecrop.data.images import Batch, ImageSet, Loader
from onecrop.data.sources import SOURCES, load

__all__ = ["SOURCES", "Batch", "ImageSet", "Loader", "load"]
