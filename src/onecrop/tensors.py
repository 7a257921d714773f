"""Tensors in safetensors files: written whole or not at all, read without executing anything."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from onecrop.errors import UserError
from onecrop.files import atomically


def save_tensors(path: Path, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """One safetensors file; `facts` travel as JSON in its metadata."""
    on_host, taken = dict[str, Tensor](), set[int]()
    for key, value in tensors.items():
        value = value.detach().cpu().contiguous()
        place = value.untyped_storage().data_ptr()
        on_host[key] = value.clone() if place in taken else value  # tied weights: the format refuses shared memory
        taken.add(place)
    try:
        with atomically(path) as temporary:
            save_file(on_host, temporary, {"onecrop": json.dumps(facts)})
    except SafetensorError as error:
        raise UserError(f"cannot write {path}: {error}; what was there before is untouched") from None


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """-> tensors, facts (None where onecrop did not write the file). Nothing in the file is executed."""
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {}).get("onecrop", "null"))
            return {key: file.get_tensor(key) for key in file.keys()}, facts  # noqa: SIM118
    except (SafetensorError, ValueError, OSError) as error:
        raise UserError(f"{path} is damaged or not a safetensors file ({error})") from None
