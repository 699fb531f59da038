"""The overlays of deploy/compose: keys, TLS and roles."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deploy.local import key
from tests.authority import Authority, needs_openssl
from tests.containers.engine import Engine
from tests.containers.stack import LIMIT_S, Stack, load
from tests.integration.stack import eventually


@pytest.fixture(scope="module")
def base(engine: Engine) -> Iterator[Stack]:
    """Volumes that all tests here share, so that the model is converted once."""
    one = Stack(engine)
    one.copy()
    yield one
    one.down("--volumes")


@contextmanager
def running(base: Stack, *files: str) -> Iterator[Stack]:
    one = Stack(base.engine, *files)
    one.up()
    try:
        yield one
    finally:
        one.down()


def test_keys_are_asked_for_and_a_revoked_one_ends_while_it_runs(base: Stack, tmp_path: Path) -> None:
    file = base.directory / "keys" / "keys.toml"
    file.parent.mkdir()
    key.new("alice", {}, file, tmp_path / "alice.key")
    file.chmod(0o644)
    secret = (tmp_path / "alice.key").read_text().strip()
    with running(base, "compose.keys.yaml") as stack:
        assert stack.chat().status == 401
        assert stack.chat(key=secret).status == 200
        key.revoke("alice", file)
        eventually(lambda: stack.chat(key=secret).status == 401, limit_s=LIMIT_S, what="the key has ended")


@needs_openssl
def test_the_api_speaks_tls_alone_with_the_certificate_of_the_overlay(base: Stack, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, secret = authority.sign("127.0.0.1")
    (base.directory / "tls").mkdir()
    (base.directory / "tls" / "api.pem").write_text(cert.read_text() + secret.read_text())
    tls = ssl.create_default_context(cafile=authority.pem)
    with running(base, "compose.tls.yaml") as stack:
        assert stack.chat(url="https://127.0.0.1:8000", tls=tls).status == 200
        assert stack.chat().status in (0, 400), "no plain HTTP"


def test_workers_of_both_roles_serve_and_prompts_are_handed_over(base: Stack) -> None:
    handed_over = "sum(headrace_hand_overs_total) > 0"
    with running(base, "compose.roles.yaml") as stack:
        assert stack.chat().status == 200
        with load(stack, 8, fresh=True) as seen:
            eventually(lambda: stack.metric(handed_over), limit_s=LIMIT_S, what="a prompt was handed over")
        assert seen.lost == []
        stack.compose("stop", "worker")
        eventually(lambda: stack.get("http://127.0.0.1:8000/health").status == 503, limit_s=LIMIT_S, what="no decoder")
