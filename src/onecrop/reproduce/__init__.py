"""The paper's tables and figures, one command each, at full size or honestly shrunk."""

from onecrop.reproduce.plan import Options
from onecrop.reproduce.run import reproduce
from onecrop.reproduce.tables import TABLES

__all__ = ["TABLES", "Options", "reproduce"]
