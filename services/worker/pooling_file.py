"""What embeddings of a model are meant to be of, as sentence-transformers' files beside it say.

modules.json             [{"type": "sentence_transformers.models.Transformer", …}, …Pooling, …Normalize]
1_Pooling/config.json    {"pooling_mode_mean_tokens": false, "pooling_mode_lasttoken": true, …}
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from shared.errors import ModelError
from shared.messages import Pooling

_MODULES = frozenset(("Transformer", "Pooling", "Normalize"))
"""What is computed here; another one, as a Dense, would change the vector."""
_POOLINGS: dict[str, Pooling] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}


class _Module(Struct):
    type: str


def read_pooling(directory: Path) -> Pooling:
    """The mean where no file says anything; empty where they ask for what is not built. Raises ModelError."""
    modules = _read(directory / "modules.json", list[_Module], [])
    default: dict[str, object] = {"pooling_mode_mean_tokens": True}
    config = _read(directory / "1_Pooling" / "config.json", dict[str, object], default)
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
    known = all(module.type.rpartition(".")[2] in _MODULES for module in modules)
    if not known or len(modes) != 1 or config.get("include_prompt") is False:
        return ""
    return _POOLINGS.get(modes[0], "")


T = TypeVar("T")


def _read(file: Path, kind: type[T], missing: T) -> T:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (FileNotFoundError, NotADirectoryError):
        return missing
    except OSError as wrong:
        raise ModelError(f"{file}: {wrong.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as wrong:
        raise ModelError(f"{file}: {wrong}") from None
