"""deploy/local/show/fleet.py: how the commands that look at a fleet reach it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy.local import cli
from deploy.local.show.fleet import fleet_config
from deploy.local.stack.stack import toml
from tests.servers import nats_server

PASSWORD = 'authorization { users = [{ user: "services", password: "secret" }] }'


@pytest.mark.parametrize(
    ("user", "password", "who"),
    [("", "", "a connection without a user"), ("services", "other", "user 'services'")],
)
def test_a_nats_that_refuses_the_user_is_shown_with_the_settings_that_name_one(
    user: str,
    password: str,
    who: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADRACE_NATS_USER", user)
    monkeypatch.setenv("HEADRACE_NATS_PASSWORD", password)
    with nats_server(tmp_path, PASSWORD) as server:
        record = tmp_path / "state" / "run" / "up.json"
        record.parent.mkdir(parents=True)
        record.write_text(json.dumps({"nats": server.url}))
        files = {"backend": "file", "path": str(tmp_path / "discovery")}
        record.with_name("fleet.toml").write_text(toml({"nats": {"url": server.url}, "discovery": files}))
        assert cli.main(["status", "--state", str(tmp_path / "state")]) == 0
        said = capsys.readouterr().out
    assert f"NATS at {server.url} refuses {who}" in said
    assert "Authorization Violation" in said
    assert "HEADRACE_NATS_USER" in said
    assert "does not answer" not in said


def test_the_variable_of_the_models_cache_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", "/big")
    assert fleet_config(namespace="x", nats="", etcd="").namespace == "x"
