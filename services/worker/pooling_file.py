"""What embeddings of a model are meant to be of, as sentence-transformers' files beside it say.

modules.json             [{"type": "sentence_transformers.models.Transformer", …}, …Pooling, …Normalize]
1_Pooling/config.json    {"pooling_mode_mean_tokens": false, "pooling_mode_lasttoken": true, …}
"""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct

from shared.messages import Pooling
from shared.model_file import read_model_json

_MODULES = frozenset(("Transformer", "Pooling", "Normalize"))
"""What is computed here; another one, as a Dense, would change the vector."""
_POOLINGS: dict[str, Pooling] = {"pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "last"}


class _Module(Struct):
    type: str


def read_pooling(directory: Path) -> Pooling:
    """The mean where no file says anything; empty where they ask for what is not built. Raises ModelError."""
    modules = read_model_json(directory / "modules.json", list[_Module], missing=b"[]")
    default = b'{"pooling_mode_mean_tokens": true}'
    config = read_model_json(directory / "1_Pooling" / "config.json", dict[str, object], missing=default)
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
    known = all(module.type.rpartition(".")[2] in _MODULES for module in modules)
    if not known or len(modes) != 1 or config.get("include_prompt") is False:
        return ""
    return _POOLINGS.get(modes[0], "")
