"""Reads a file with arguments of vLLM, as `vllm serve --config` takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared.errors import ConfigError

FILE_LIMIT_BYTES = 1 << 20
"""The maximum size of such a file in bytes."""


def read_file(path: str) -> dict[str, Any]:
    """Return the arguments of a YAML file as `vllm serve --config` takes it; `path` empty: none. Raise ConfigError."""
    if not path:
        return {}
    import yaml

    try:
        with Path(path).open("rb") as file:
            content = file.read(FILE_LIMIT_BYTES + 1)
        if len(content) > FILE_LIMIT_BYTES:
            raise ConfigError(f"vllm_args: {path} has more than {FILE_LIMIT_BYTES} bytes")
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(content)):
            raise ConfigError(f"vllm_args: {path}: aliases (*name) are not read")  # they may grow without bound
        table = yaml.safe_load(content)
    except OSError as wrong:
        raise ConfigError(f"vllm_args: {path}: {wrong.strerror}") from None
    except RecursionError:
        raise ConfigError(f"vllm_args: {path}: lists and tables are nested too deep") from None
    except (yaml.YAMLError, ValueError) as wrong:  # also a date that there is not
        raise ConfigError(f"vllm_args: {path}: {' '.join(str(wrong).split())}") from None
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise ConfigError(f"vllm_args: {path}: not a table of arguments")
    return table
