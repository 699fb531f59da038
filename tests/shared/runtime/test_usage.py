"""shared/runtime/usage.py: `--help` has every setting of every service, and the docstring of its field."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from msgspec import Struct, field
from msgspec.structs import fields

from services.frontend.config import FrontendConfig
from services.kvbm.config import KvbmConfig
from services.router.config import RouterConfig
from services.worker.config import WorkerConfig
from shared.config import NatsConfig, load
from shared.errors import ConfigError
from shared.runtime.usage import usage


class Small(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A mill."""

    river: str
    """The river whose water
    turns the wheels."""
    wheels: tuple[str, ...] = ("one", "two")
    turns: bool = True
    nats: NatsConfig = NatsConfig()
    names: dict[str, str] = field(default_factory=dict)
    """The names of millers."""


def test_a_setting_is_shown_with_its_default_and_its_comment() -> None:
    lines = usage("mill", Small).splitlines()
    assert lines[0].startswith("usage: mill ")
    at = lines.index("A mill.")
    assert lines[at : lines.index("[nats] The connection to NATS.")] == [
        "A mill.",
        "  --river  required",
        "      The river whose water turns the wheels.",
        "  --wheels  one,two",
        "  --turns  true",
        "  --names NAME=VALUE,…",
        "      The names of millers.",
        "",
    ]
    assert "  --nats-url  nats://127.0.0.1:4222" in lines
    assert any(line.startswith("  HEADRACE_NATS_PASSWORD ") for line in lines)


@pytest.mark.parametrize("schema", [FrontendConfig, RouterConfig, WorkerConfig, KvbmConfig])
def test_every_flag_that_is_shown_is_one_and_all_are(schema: type[Struct]) -> None:
    shown = {line.split()[0] for line in usage("x", schema).splitlines() if line.startswith("  --")}
    known = {"--" + "-".join(path).replace("_", "-") for path in settings_of(schema)}
    secrets = {flag for flag in known if flag.endswith(("-password", "-token"))}
    assert shown == known - secrets
    for flag in shown:
        with pytest.raises(ConfigError, match=f"^{flag} needs a value$"):
            load(schema, flags=[flag])


def settings_of(schema: type[Struct]) -> Iterator[tuple[str, ...]]:
    for each in fields(schema):
        table = isinstance(each.type, type) and issubclass(each.type, Struct)
        yield from ((each.name, *path) for path in settings_of(each.type)) if table else [(each.name,)]


@pytest.mark.parametrize("service", ["frontend", "router", "worker", "kvbm"])
def test_a_service_shows_its_settings_with_help_and_ends_with_status_0(service: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", f"services.{service}", "--help"], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"usage: headrace-{service} ")
