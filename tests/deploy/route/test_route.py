"""deploy/local/route/route.py: the servers that are wanted. tests/integration/test_route.py has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.local.route.route import FILE_LIMIT_BYTES, WantedServers
from deploy.local.usage import RouteFlags
from shared.errors import ConfigError

ONE, TWO = "http://127.0.0.1:8001", "http://127.0.0.1:8002"


def urls(wanted: WantedServers) -> list[str]:
    return [target.url for target in wanted.targets]


def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "servers"
    file.write_text(f"{ONE}\n")
    wanted = WantedServers(RouteFlags(file=file))
    assert (wanted.look(), urls(wanted)) == ("", [ONE])
    file.write_text(f"{ONE}\n{TWO}\n")
    assert (wanted.look(), urls(wanted)) == ("", [ONE, TWO])
    file.write_text("")
    assert (wanted.look(), urls(wanted)) == ("", [])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"what\n", "what: not a URL such as http://127.0.0.1:8001; the servers stay as they are"),
        (b"http://a\nhttp://a", "http://a: the same server as http://a; the servers stay as they are"),
        (b"\xff", "not UTF-8; the servers stay as they are"),
        (b"#" * (FILE_LIMIT_BYTES + 1), "more than 1048576 bytes; the servers stay as they are"),
        (None, "No such file or directory; the servers stay as they are"),
    ],
)
def test_a_file_that_became_wrong_changes_nothing_and_is_said_once(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    file = tmp_path / "servers"
    file.write_text(f"{ONE}\n")
    wanted = WantedServers(RouteFlags(file=file))
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    assert wanted.look().endswith(f"{file}: {said}")
    assert (wanted.look(), urls(wanted)) == ("", [ONE])
    file.write_text(f"{TWO}\n")
    assert (wanted.look(), urls(wanted)) == ("", [TWO])


def test_a_file_that_is_wrong_at_first_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "servers"
    file.write_text("what\n")
    with pytest.raises(ConfigError, match=rf"^--file {file}: what: not a URL"):
        WantedServers(RouteFlags(file=file))
