"""Which vLLM this connector fits: the promised versions, and the methods that it overrides."""

from __future__ import annotations

import inspect

from services.worker.vllm.used_names import CONNECTOR, CONNECTOR_METHODS
from services.worker.vllm.version import check
from shared.errors import ConfigError


def check_interface(version: str, base: type) -> None:
    """Raise ConfigError if this vLLM is not one that the connector fits."""
    check(version, "Headrace's connector", CONNECTOR)
    for name, needed in CONNECTOR_METHODS.items():
        method = getattr(base, name, None)
        if method is None:
            raise ConfigError(f"vLLM {version}: KVConnectorBase_V1 has no method {name}")
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        has = [each.name for each in inspect.signature(method).parameters.values() if each.kind not in kinds][1:]
        if tuple(has) != needed:
            raise ConfigError(f"vLLM {version}: KVConnectorBase_V1.{name} takes {has}, not {list(needed)}")
