"""The paper's tables and figures, and the tests of its claims: one command each, at full size or honestly shrunk."""

from onecrop.reproduce.catalogue import TABLES
from onecrop.reproduce.options import Options
from onecrop.reproduce.run import reproduce

__all__ = ["TABLES", "Options", "reproduce"]
