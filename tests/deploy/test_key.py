from __future__ import annotations

import base64

import pytest

from deploy.local import cli
from services.frontend.auth.accounts import Accounts
from services.frontend.auth.api_keys import read_keys


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """The key and the line."""
    assert cli.main(["key", "new", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    [key] = [line.strip() for line in lines if line.startswith("    ")]
    return key, lines[-1]


def test_a_new_key_is_let_in_with_its_line_in_the_file_and_the_file_does_not_hold_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    key, line = printed(["alice", "--tokens-per-minute", "5000", "--concurrency", "3"], capsys)
    other, more = printed(["bob-2"], capsys)
    accounts = Accounts()
    accounts.replace(read_keys(f"{line}\n{more}\n".encode()), 0.0)
    alice = accounts.authenticate(f"Bearer {key}")
    assert (alice.name, alice.entry.requests_per_minute, alice.entry.tokens_per_minute) == ("alice", None, 5000)
    assert alice.entry.concurrency == 3
    assert accounts.authenticate(f"Bearer {other}").name == "bob-2"
    assert key not in line


def test_a_key_is_256_random_bits(capsys: pytest.CaptureFixture[str]) -> None:
    keys = {printed(["alice"], capsys)[0] for _ in range(20)}
    assert len(keys) == 20
    assert all(len(base64.urlsafe_b64decode(key.removeprefix("hr-") + "=")) == 32 for key in keys)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["Alice"], "error: Alice: a name is 1 to 64 of "),
        (["a" * 65], "a name is 1 to 64 of "),
        ([""], "error: : a name is 1 to 64 of "),
        (["alice", "--concurrency", "0"], "error: --concurrency is at least 1"),
        (["alice", "--requests-per-minute", "-3"], "error: --requests-per-minute is at least 1"),
    ],
)
def test_what_the_frontend_would_not_read_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["key", "new", *words]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""
