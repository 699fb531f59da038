from __future__ import annotations

import pytest

from shared import plugin
from shared.errors import ConfigError
from shared.plugin import PROBLEM_LIMIT, load_plugin, problem_of, sendable


class Silent(Exception):
    """An exception without a text."""

    def __str__(self) -> str:
        raise ValueError


def test_a_plug_in_is_found_by_module_and_attribute() -> None:
    assert load_plugin("policy", "shared.plugin:sendable", ["kv"]) is sendable


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("fastest", "policy fastest: not one of kv, random and not module:attribute"),
        ("no.such.module:P", "policy no.such.module:P: ModuleNotFoundError: "),
        ("shared.plugin:nothing", "policy shared.plugin:nothing: AttributeError: "),
        ("tests.router.module_that_fails:P", "policy tests.router.module_that_fails:P: "),
        (":x", "policy :x: ValueError: "),
    ],
)
def test_what_cannot_be_loaded_is_a_config_error_that_names_it(name: str, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_plugin("policy", name, ["kv", "random"])
    assert str(raised.value).startswith(problem)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (ValueError("no"), "ValueError: no"),
        (ValueError("\udc80"), "ValueError: ?"),
        (ValueError("x" * 1000), f"ValueError: {'x' * 1000}"[:PROBLEM_LIMIT]),
        (Silent(), "Silent"),
        (SystemExit(2), "SystemExit: 2"),
    ],
)
def test_a_problem_is_a_text_that_can_be_sent(wrong: BaseException, text: str) -> None:
    assert problem_of(wrong) == text


def test_the_failures_of_a_plug_in_are_not_those_that_end_the_process() -> None:
    assert not issubclass(KeyboardInterrupt, plugin.FAILURES)
