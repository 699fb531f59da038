"""LoadedWeights: whether a model's files still have the weights with which the engine was started, since a wake from
level 2 reads them again, and blocks in a kvbm are of these weights."""

from __future__ import annotations

from pathlib import Path

from services.worker.vllm.connector.identity import weights_digest
from shared.errors import ConfigError


class LoadedWeights:
    """The weights of one engine, by a digest of pieces of their files."""

    def __init__(self, model: Path) -> None:
        """To be made before vLLM loads the model of this directory."""
        self._model = model
        self._digest = _digest(model)

    def fault(self) -> str:
        """Return why they cannot be read again. Empty if they can."""
        if _digest(self._model) == self._digest:
            return ""
        return f"{self._model}: the weights have changed since the worker started; start it again"


def _digest(model: Path) -> str:
    """Return the digest. Empty if the directory has no weights, as where `vllm.load_format` makes or fetches them."""
    try:
        return weights_digest(model, {}, {})
    except ConfigError:
        return ""
