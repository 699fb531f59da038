"""services/worker/vllm/connector/interface.py: a vLLM that does not fit is refused by its version or by a method."""

from __future__ import annotations

from typing import Any

import pytest

from services.worker.vllm.connector.interface import check_interface
from services.worker.vllm.used_names import CONNECTOR_METHODS as METHODS
from shared.errors import ConfigError


def base(**changed: Any) -> type:
    """Return a class with the methods of vLLM's, but for those that are changed. None if it is not there."""
    space: dict[str, Any] = {}
    for name, parameters in METHODS.items():
        exec(f"def {name}(self, {', '.join(parameters)}): ...", space)
    methods = {name: space[name] for name in METHODS} | changed
    return type("Base", (), {name: method for name, method in methods.items() if method is not None})


def test_what_it_was_built_for_fits() -> None:
    check_interface("0.32.0", base())
    check_interface("0.33.1rc1+cpu", base())


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0.0", "dev"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(
        ConfigError, match=f"vLLM {version} is not supported.*; Headrace's connector works with 0.32 and"
    ):
        check_interface(version, base())


def test_a_method_that_is_gone_is_named() -> None:
    with pytest.raises(ConfigError, match="has no method has_pending_push_work"):
        check_interface("0.32.0", base(has_pending_push_work=None))


def test_a_method_with_other_parameters_is_named() -> None:
    def request_finished(self: Any, request: Any, block_ids: Any, reason: Any) -> None: ...

    with pytest.raises(ConfigError, match=r"request_finished takes \['request', 'block_ids', 'reason'\]"):
        check_interface("0.32.0", base(request_finished=request_finished))
