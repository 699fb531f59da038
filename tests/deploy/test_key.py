"""deploy/local/key.py: keys that the frontend lets in, and files that only their owner reads."""

from __future__ import annotations

import base64
import json
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deploy.local import cli, key
from deploy.local.key import add_entry, remove_entry
from services.frontend.auth.accounts import Accounts
from shared import api_keys
from shared.api_keys import read_keys
from shared.errors import ConfigError

ONE, TWO, THREE = ("0" * 64, "1" * 64, "2" * 64)
COMMENTED = f"""\
# keys of the team
alice = {{ sha256 = "{ONE}", concurrency = 3 }}  # until May

# keys of machines
"bob" = {{ sha256 = "{TWO}" }}
"""
TABLES = f"""\
# first
[alice]
sha256 = "{ONE}"
concurrency = 3  # few

# second
[ "bob" ]
sha256 = "{TWO}"
"""
DOTTED = f'alice.sha256 = "{ONE}"\nalice.concurrency = 3\nbob.sha256 = "{TWO}"'
JSON = json.dumps({"alice": {"sha256": ONE, "concurrency": 3}, "bob": {"sha256": TWO}})


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
        (["Alice"], "error: Alice: a name has 1 to 64 of "),
        (["a" * 65], "a name has 1 to 64 of "),
        ([""], "error: : a name has 1 to 64 of "),
        (["alice", "--concurrency", "0"], "error: --concurrency 0: Expected `int` >= 1"),
        (["alice", "--requests-per-minute", "-3"], "error: --requests-per-minute -3: Expected `int` >= 1"),
        (["alice", "--tokens-per-minute", "1000000000001"], "--tokens-per-minute 1000000000001: Expected `int` <= "),
    ],
)
def test_what_the_frontend_would_not_read_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["key", "new", *words]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""


def mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def names(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.iterdir())


def test_a_key_goes_into_files_of_its_owner_and_is_listed_and_revoked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, out = tmp_path / "keys.toml", tmp_path / "alice.key"
    assert cli.main(["key", "new", "alice", "--file", str(keys), "--out", str(out), "--concurrency", "3"]) == 0
    said = capsys.readouterr().out
    made = out.read_text().strip()
    assert made not in said
    assert said.splitlines() == [
        f"The key of alice is in {out}",
        f"alice is in {keys}; a running frontend follows within 2 s",
    ]
    assert (mode(keys), mode(out)) == (0o600, 0o600)
    accounts = Accounts()
    accounts.replace(read_keys(keys.read_bytes()), 0.0)
    assert accounts.authenticate(f"Bearer {made}").name == "alice"

    assert cli.main(["key", "list", "--file", str(keys)]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head == "NAME   REQUESTS/MINUTE  TOKENS/MINUTE  CONCURRENCY  MIN PRIORITY  SALT  SHA256"
    assert row.split() == ["alice", "3", read_keys(keys.read_bytes())["alice"].sha256[: key.DIGITS_SHOWN]]

    assert cli.main(["key", "revoke", "alice", "--file", str(keys)]) == 0
    assert "alice is no longer in " in capsys.readouterr().out
    assert read_keys(keys.read_bytes()) == {}


def test_a_key_gets_a_salt_of_its_own_or_one_of_several_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys.toml"
    for name, salt in (("alice", "own"), ("bob", "team-1")):
        assert cli.main(["key", "new", name, "--file", str(keys), "--salt", salt]) == 0
        assert read_keys(keys.read_bytes())[name].salt == salt
    assert cli.main(["key", "new", "carol", "--file", str(keys), "--salt", "A secret"]) == 2
    assert (
        "--salt A secret: Expected `own`, or 1 to 64 of the characters a-z, 0-9, - and _, beginning with"
        in capsys.readouterr().err
    )
    assert "carol" not in read_keys(keys.read_bytes())


def test_a_file_that_is_there_is_not_replaced_and_nothing_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, out = tmp_path / "keys.toml", tmp_path / "alice.key"
    out.write_text("precious")
    assert cli.main(["key", "new", "alice", "--file", str(keys), "--out", str(out)]) == 2
    assert f"error: --out {out}: this file is there already" in capsys.readouterr().err
    assert out.read_text() == "precious"
    assert not keys.exists()


def test_a_keys_file_that_cannot_be_changed_leaves_no_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys, out = tmp_path / "keys.toml", tmp_path / "alice.key"
    keys.write_text("alice = {")
    assert cli.main(["key", "new", "bob", "--file", str(keys), "--out", str(out)]) == 2
    assert f"error: {keys}: the file is not TOML: " in capsys.readouterr().err
    assert names(tmp_path) == ["keys.toml"]
    assert keys.read_text() == "alice = {"


ONE, TWO = "0" * 64, "1" * 64
CAROL = f'carol = {{ sha256 = "{TWO}" }}\n'
REFUSED = {
    f'bob = {{ sha256 = "{ONE}", concurrency = 1000000000001 }}\n{CAROL}': "bob: Expected `int` <=",
    f'bob = {{ sha256 = "{ONE}", limit = 3 }}\n{CAROL}': "bob: Object contains unknown field",
    f'bob = {{ sha256 = "X" }}\n{CAROL}': "bob: Expected 64 digits of 0-9 and a-f",
    f'{{"bob": {{"sha256": "{ONE}"}}, "bob": {{"sha256": "{ONE}"}}, "carol": {{"sha256": "{TWO}"}}}}': "a name twice",
    "".join(f'{name} = {{ sha256 = "{ONE}" }}\n' for name in ("bob", "dan", "carol")): "dan: this is the same key",
    f'Bob = {{ sha256 = "{ONE}" }}\n{CAROL}': "entry 1: a name has 1 to 64",
    CAROL + " " * (1 << 20): "larger than 1048576 bytes",
}
"""Keys files that a frontend refuses, and why."""


@pytest.mark.parametrize("text", REFUSED, ids=REFUSED.values())
@pytest.mark.parametrize("words", [["new", "alice"], ["revoke", "carol"], ["list"]], ids=lambda words: words[0])
def test_a_file_that_a_frontend_would_refuse_is_refused_by_name_and_left_as_it_is(
    text: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=REFUSED[text]):
        read_keys(text.encode())
    keys = tmp_path / "keys.toml"
    keys.write_text(text)
    assert cli.main(["key", *words, "--file", str(keys)]) == 2
    shown = capsys.readouterr()
    assert f"error: {keys}: " in shown.err
    assert REFUSED[text] in shown.err
    assert shown.out == ""
    assert keys.read_text() == text
    assert names(tmp_path) == ["keys.toml"]


def test_the_entry_that_a_frontend_refuses_can_be_revoked(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'bob = {{ sha256 = "{ONE}", limit = 3 }}\ncarol = {{ sha256 = "{TWO}" }}\n')
    assert cli.main(["key", "revoke", "bob", "--file", str(keys)]) == 0
    assert list(read_keys(keys.read_bytes())) == ["carol"]


def test_a_disk_without_room_leaves_no_file(tmp_path: Path) -> None:
    keys, out = tmp_path / "keys.toml", tmp_path / "alice.key"
    words = ["key", "new", "alice", "--file", str(keys), "--out", str(out)]
    command = 'ulimit -f 0; exec "$@"'  # a file may have no byte: a write fails as on a full disk
    program = [sys.executable, "-c", f"import sys; from deploy.local.cli import main; sys.exit(main({words!r}))"]
    done = subprocess.run(["sh", "-c", command, "sh", *program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: --out {out}: File too large" in done.stderr
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["new", "alice", "--file", "x", "--out", "./x"], "error: --file and --out must be different files"),
        (["new", "alice", "--file", "no/such/keys"], "/no/such: No such file or directory"),
        (["new", "alice", "--out", "no/such/key"], "error: --out no/such/key: No such file or directory"),
        (
            ["list", "--file", "keys"],
            "error: --file keys: no such file; `./headrace key new NAME --file keys` makes one",
        ),
        (["revoke", "alice", "--file", "keys"], "keys: no such file; `./headrace key new NAME --file "),
        (["list", "--state", "."], "error: name the keys file with --file: no `up` with --keys runs here"),
    ],
)
def test_wrong_files_are_named(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["key", *words]) == 2
    assert said in capsys.readouterr().err
    assert names(tmp_path) == []


def test_the_file_of_the_up_that_runs_is_found_through_a_link_and_keeps_its_mode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, link, record = tmp_path / "real.toml", tmp_path / "keys.toml", tmp_path / "run" / "up.json"
    link.symlink_to(file.name)
    file.write_text('# mine\nalice = { sha256 = "' + "0" * 64 + '" }\n')
    file.chmod(0o640)
    record.parent.mkdir()
    record.write_text(json.dumps({"keys": str(link)}))
    assert cli.main(["key", "revoke", "alice", "--state", str(tmp_path)]) == 0
    assert link.is_symlink()
    assert file.read_text() == "# mine\n"
    assert mode(file) == 0o640
    assert names(tmp_path) == ["keys.toml", "real.toml", "run"]


def test_keys_made_at_the_same_time_are_all_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys.toml"
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: key.new(f"k{number}", {}, keys), range(32)))
    assert len(read_keys(keys.read_bytes())) == 32


def parsed(text: str) -> dict[str, object]:
    return api_keys.parse_keys(text.encode())


@pytest.mark.parametrize("text", [COMMENTED, TABLES, DOTTED, JSON, COMMENTED.replace("\n", "\r\n")])
def test_an_entry_comes_and_goes_in_every_form(text: str) -> None:
    more = add_entry(text, "carol", {"sha256": THREE, "requests_per_minute": 5})
    read = api_keys.read_keys(more.encode())
    assert list(read) == ["alice", "bob", "carol"]
    assert read["carol"].requests_per_minute == 5
    assert parsed(remove_entry(more, "carol")) == parsed(text)
    fewer = remove_entry(more, "alice")
    assert list(api_keys.read_keys(fewer.encode())) == ["bob", "carol"]
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        line for line in fewer.splitlines() if line.startswith("#")
    ]


def test_the_first_entry_makes_the_file() -> None:
    text = add_entry("", "alice", {"sha256": ONE})
    assert text == f'alice = {{ sha256 = "{ONE}" }}\n'
    assert remove_entry(text, "alice") == ""


def test_names_that_are_part_of_others_stay() -> None:
    text = f'alice = {{ sha256 = "{ONE}" }}\nalice-2 = {{ sha256 = "{TWO}" }}\n'
    assert list(parsed(remove_entry(text, "alice"))) == ["alice-2"]


@pytest.mark.parametrize("text", ["alice = 1\n", "alice = {", "[1", '{"a": 1}', "[" * 100_000, "{" * 100_000])
def test_what_is_no_keys_file_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        add_entry(text, "bob", {"sha256": ONE})


def test_a_name_that_is_there_or_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="alice: this name is there already"):
        add_entry(COMMENTED, "alice", {"sha256": THREE})
    with pytest.raises(ConfigError, match=r"alise: no such name in the file; did you mean alice\?"):
        remove_entry(COMMENTED, "alise")


def test_a_file_that_lines_cannot_change_is_refused_and_not_written_wrongly() -> None:
    text = f'"ali\\u0063e" = {{ sha256 = "{ONE}" }}\n'
    assert list(parsed(text)) == ["alice"]
    with pytest.raises(ConfigError, match="edit it by hand"):
        remove_entry(text, "alice")


def test_a_full_file_is_refused_because_a_frontend_would_refuse_it() -> None:
    text = "".join(f'k{number} = {{ sha256 = "{number:064x}" }}\n' for number in range(api_keys.KEYS_LIMIT))
    with pytest.raises(ConfigError, match="at most 1000"):
        add_entry(text, "one-more", {"sha256": ONE})
