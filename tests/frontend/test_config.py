"""services/frontend/config.py: limits that contradict one another are refused where they are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.frontend.config import FrontendConfig
from shared.config import load
from shared.errors import ConfigError


def configured(*flags: str) -> FrontendConfig:
    return load(FrontendConfig, flags=flags, environ={})


def test_all_limits_are_on_by_default() -> None:
    limits = configured().limits
    assert (limits.deadline_s, limits.deadline_most_s) == (600.0, 3600.0)
    assert (limits.first_token_s, limits.stall_s, limits.attempts, limits.rescue_s) == (300.0, 30.0, 3, 20.0)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--limits-deadline-s", "4000"), "deadline_s of 4000 is more than deadline_most_s of 3600"),
        (("--limits-deadline-most-s", "60"), "deadline_s of 600 is more than deadline_most_s of 60"),
        (("--limits-quiet-s", "20"), "quiet_s of 20 is more than frozen_s of 10"),
        (("--limits-stall-s", "0.5"), "quiet_s of 1 is more than stall_s of 0.5"),
        (("--limits-stall-s", "0"), "stall_s"),
        (("--limits-stall-s", "nan"), "stall_s"),
        (("--limits-first-token-s", "-1"), "first_token_s"),
        (("--limits-first-token-s", "inf"), "first_token_s"),
        (("--limits-attempts", "0"), "attempts"),
        (("--limits-deadline-s", "soon"), "deadline_s"),
    ],
)
def test_limits_that_cannot_be_are_refused_by_name(flags: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        configured(*flags)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--picker-tls-cert", "c"), "tls_cert and tls_key need each other"),
        (("--picker-tls-ca", "a"), "tls_ca needs tls_cert and tls_key"),
    ],
)
def test_files_of_the_pickers_tls_that_need_others_are_refused(flags: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        configured(*flags)


def test_parsers_are_named_by_model_and_an_unknown_one_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "frontend.toml"
    file.write_text('[tool_parser]\n"a/b" = "hermes"\nc = "none"\n[reasoning_parser]\n"a/b" = "think"\n')
    config = load(FrontendConfig, file=file, flags=(), environ={})
    assert config.tool_parser == {"a/b": "hermes", "c": "none"}
    assert config.reasoning_parser == {"a/b": "think"}
    for field in ("tool_parser", "reasoning_parser"):
        file.write_text(f'[{field}]\n"a/b" = "hermès"\n')
        with pytest.raises(ConfigError, match=f"hermès.*{field}|{field}.*hermès"):
            load(FrontendConfig, file=file, flags=(), environ={})
