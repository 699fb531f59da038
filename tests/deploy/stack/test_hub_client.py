"""deploy/local/stack/hub_client.py: a file comes whole or the error says why not, within bounds; the token stays."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from deploy.local.stack import hub_client
from deploy.local.stack.hub_client import HubClient
from deploy.local.stack.hub_files import HubFile, HubModel, parse_listing
from shared.errors import ModelError
from tests.hub_server import WITHOUT_END, HubServer, Repository, use_hub
from tests.servers import free_port

MODEL = HubModel("org/name")
CONTENT = os.urandom(1 << 20)
HALF = len(CONTENT) // 2
FILES = {"config.json": b"{}", "model.safetensors": CONTENT}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(hub_client, "PAUSE_S", 0.0)
    hub = HubServer()
    hub.repositories["org/name"] = Repository(FILES)
    use_hub(hub, tmp_path / "cache", monkeypatch)
    with hub.running():
        yield hub


Fetch = Callable[..., list[int]]


@pytest.fixture
def part(tmp_path: Path) -> Path:
    return tmp_path / "part"


@pytest.fixture
def fetch(hub: HubServer, part: Path) -> Fetch:
    def fetched(name: str = "model.safetensors", until: int | None = None) -> list[int]:
        repository, shown = hub.repositories["org/name"], list[int]()
        file = HubFile(name, len(FILES[name]), repository.digest(name))
        with HubClient() as client:
            client.fetch(
                MODEL, repository.commit, file, part, file.size_bytes if until is None else until, shown.append
            )
        return shown

    return fetched


def refused(fetch: Fetch, **how: object) -> str:
    with pytest.raises(ModelError) as wrong:
        fetch(**how)
    assert "\n" not in str(wrong.value)
    return str(wrong.value)


@pytest.mark.parametrize("name", FILES)
def test_a_file_comes_whole_and_its_digest_is_that_of_the_hub(
    hub: HubServer, fetch: Fetch, part: Path, name: str
) -> None:
    shown = fetch(name)
    assert part.read_bytes() == FILES[name]
    assert shown == sorted(shown)
    assert shown[-1] == len(FILES[name])


def test_a_part_that_is_there_is_continued(hub: HubServer, fetch: Fetch, part: Path) -> None:
    fetch(until=8)
    assert part.read_bytes() == CONTENT[:8]
    fetch(until=1000)
    fetch()
    assert part.read_bytes() == CONTENT
    large = [asked.range for asked in hub.asked if asked.path.startswith("/large/")]
    assert large == ["bytes=0-7", "bytes=8-999", f"bytes=1000-{len(CONTENT) - 1}"]
    fetch()
    assert len(hub.asked) == 6, "a whole part is not asked for"


def test_a_body_that_is_cut_is_continued_where_it_ended(hub: HubServer, fetch: Fetch, part: Path) -> None:
    hub.faults["model.safetensors"] = ["cut", "503", "429", "cut"]
    fetch()
    assert part.read_bytes() == CONTENT
    ranges = [asked.range for asked in hub.asked if asked.path.startswith("/large/")]
    assert ranges[:4] == ["", *[f"bytes={HALF}-{len(CONTENT) - 1}"] * 3]


def test_a_server_without_ranges_sends_all_again(hub: HubServer, fetch: Fetch, part: Path) -> None:
    hub.faults["model.safetensors"] = ["cut", "whole"]
    fetch()
    assert part.read_bytes() == CONTENT


def test_a_server_without_ranges_is_stopped_after_a_head(hub: HubServer, fetch: Fetch, part: Path) -> None:
    hub.faults["model.safetensors"] = ["whole"]
    fetch(until=8)
    assert part.read_bytes() == CONTENT[:8]


def test_tries_without_progress_are_few(hub: HubServer, fetch: Fetch, part: Path) -> None:
    hub.faults["model.safetensors"] = ["503"] * 100
    assert refused(fetch).endswith("answers 503; the next start continues there")
    assert len(hub.asked) == 2 * hub_client.TRIES
    assert part.read_bytes() == b""


def test_tries_with_little_progress_are_bounded_too(
    hub: HubServer, fetch: Fetch, part: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_client, "LEAST_BYTES", 1)
    hub.faults["model.safetensors"] = ["drip"] * 1000
    assert refused(fetch).endswith("; the next start continues there")
    assert len(hub.faults["model.safetensors"]) == 900
    assert part.read_bytes() == CONTENT[: 100 * 4096]


def test_the_time_of_a_file_is_bounded(
    hub: HubServer, fetch: Fetch, part: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_client, "FILE_LIMIT_S", 0.0)
    assert refused(fetch).endswith("model.safetensors: not whole after 0 s; the next start continues there")
    assert len(hub.asked) == 2


@pytest.mark.parametrize("faults", [["503", "cut", "500"], ["cut"] * 3])
def test_a_list_of_files_is_asked_for_again(hub: HubServer, faults: list[str]) -> None:
    hub.faults["listing"] = faults
    notices: list[str] = []
    with HubClient() as client:
        listing = parse_listing(MODEL, client.listing(MODEL, 1 << 20, notices.append))
    assert set(listing.files) == set(FILES)
    assert len(notices) == 3
    assert all(notice.endswith("; it is asked again in 0 s") for notice in notices)
    assert len(hub.asked) == 4


@pytest.mark.parametrize(("fault", "said"), [("503", "answers 503"), ("cut", "cannot be reached")])
def test_tries_for_a_list_of_files_are_few(hub: HubServer, fault: str, said: str) -> None:
    hub.faults["listing"] = [fault] * 100
    with HubClient() as client, pytest.raises(ModelError, match=rf"^127.0.0.1:\d+ {said}.*; try again later$"):
        client.listing(MODEL, 1 << 20)
    assert len(hub.asked) == hub_client.TRIES


def test_a_hub_that_falls_silent_is_left_after_the_time_limit(
    hub: HubServer, fetch: Fetch, part: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1.0)
    monkeypatch.setattr(hub_client, "LEAST_BYTES", len(CONTENT))
    hub.faults["model.safetensors"] = ["stall"] * 100
    said = refused(fetch)
    assert "did not answer within 1 s; the next start continues there" in said
    assert part.read_bytes() == CONTENT[: part.stat().st_size], "what came is kept"
    assert part.stat().st_size >= HALF


@pytest.mark.parametrize("fault", WITHOUT_END)
def test_an_answer_that_never_becomes_whole_is_left_after_the_limit(
    hub: HubServer, fetch: Fetch, part: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    monkeypatch.setattr(hub_client, "ANSWER_LIMIT_S", 0.5)
    hub.faults["listing"] = [fault] * 100
    with HubClient() as client, pytest.raises(ModelError, match=r"did not answer whole within 0.5 s; try again later"):
        client.listing(MODEL, 1 << 20)
    assert len(hub.asked) == hub_client.TRIES
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 2.0)  # a busy machine answers within that
    monkeypatch.setattr(hub_client, "ANSWER_LIMIT_S", 2.0)
    hub.faults["config.json"] = [fault]
    fetch("config.json")
    assert part.read_bytes() == FILES["config.json"]


def test_a_hub_that_is_too_slow_is_left(fetch: Fetch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_client, "WINDOW_S", 0.0)
    monkeypatch.setattr(hub_client, "LEAST_BYTES", len(CONTENT))
    assert re.search(r"sent only \d+ bytes in 0 s; the next start continues there", refused(fetch))


def test_a_hub_that_asks_for_a_long_wait_is_not_waited_for(hub: HubServer) -> None:
    hub.faults["listing"] = ["429"]
    with HubClient() as client, pytest.raises(ModelError, match=r"429 \(too many requests\) and asks to wait 7200 s"):
        client.listing(MODEL, 1 << 20)


def test_a_hub_that_is_down_is_named(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://user:secret@127.0.0.1:{port}")
    with HubClient() as client, pytest.raises(ModelError) as wrong:
        client.listing(MODEL, 1 << 20)
    assert str(wrong.value).startswith(f"127.0.0.1:{port} cannot be reached: ")
    assert "secret" not in str(wrong.value)


def test_a_list_without_an_end_is_not_read(hub: HubServer) -> None:
    with HubClient() as client, pytest.raises(ModelError, match="the list of its files has more than 10 bytes"):
        client.listing(MODEL, 10)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("larger", f"{len(CONTENT)} bytes were announced, but 127.0.0.1:"),
        ("endless", f"longer than the {len(CONTENT)} bytes announced"),
    ],
)
def test_another_size_than_announced_is_refused(
    hub: HubServer, fetch: Fetch, part: Path, fault: str, said: str
) -> None:
    hub.faults["model.safetensors"] = [fault]
    assert said in refused(fetch)
    assert part.stat().st_size <= len(CONTENT)


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("file:///etc/passwd", "redirects to an address that begins with file:, which is not followed"),
        ("ftp://127.0.0.1/x", "redirects to an address that begins with ftp:, which is not followed"),
        ("/org/name/resolve/main/config.json", "redirects more than 5 times"),
        ("http://127.0.0.1:99999/x", "127.0.0.1:99999 cannot be reached: "),
    ],
)
def test_a_redirect_elsewhere_than_to_http_is_not_followed(
    hub: HubServer, fetch: Fetch, part: Path, to: str, said: str
) -> None:
    hub.faults["config.json"] = [f"to {to}"] * 100
    assert said in refused(fetch, name="config.json")
    assert part.read_bytes() == b""


def test_the_token_goes_to_the_hub_and_nowhere_else(
    hub: HubServer, fetch: Fetch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.token)
    fetch()
    fetch("config.json")
    sent = {asked.path.partition("/")[2].partition("/")[0]: asked.authorization for asked in hub.asked}
    assert sent == {"org": f"Bearer {hub.token}", "large": ""}


def test_a_token_comes_from_a_file_too(hub: HubServer, tmp_path: Path, fetch: Fetch) -> None:
    (tmp_path / "token").write_text(f"{hub.token}\n")
    hub.repositories["org/name"].gated = True
    fetch("config.json")


@pytest.mark.parametrize(
    ("change", "token", "said"),
    [
        (
            "gated",
            "",
            "org/name is gated: accept its terms, then set HF_TOKEN, or log in with `.venv/bin/hf auth login`: http",
        ),
        ("gated", "hf_other", "org/name is gated: this account has no access yet: http"),
        ("private", "", "has no model org/name, or it is private: check the name; if it is private, set HF_TOKEN, or"),
        ("private", "hf_other", "org/name: 127.0.0.1:PORT refuses the token of HF_TOKEN"),
        ("none", "hf_right", "has no model org/none, or it is private: check the name"),
    ],
)
def test_a_refusal_says_what_to_do_and_does_not_show_the_token(
    hub: HubServer, fetch: Fetch, monkeypatch: pytest.MonkeyPatch, change: str, token: str, said: str
) -> None:
    repository = hub.repositories["org/name"]
    repository.gated, repository.private = change == "gated", change == "private"
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    model = HubModel("org/none") if change == "none" else MODEL

    def ask(client: HubClient) -> None:
        client.listing(model, 1 << 20)
        fetch("config.json")

    with HubClient() as client, pytest.raises(ModelError) as wrong:
        ask(client)
    shown = str(wrong.value).replace(hub.url.rpartition(":")[2], "PORT")
    assert said in shown
    assert "hf_" not in shown.replace("HF_TOKEN", "")


def test_a_revision_that_is_not_there_is_named(hub: HubServer) -> None:
    with HubClient() as client, pytest.raises(ModelError, match="org/name has no revision v9"):
        client.listing(HubModel("org/name", "v9"), 1 << 20)


def test_a_token_with_other_characters_is_not_sent_and_not_shown(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_ü")
    with pytest.raises(ModelError) as wrong:
        HubClient()
    assert str(wrong.value) == "HF_TOKEN must contain only a token"


def test_a_token_file_that_cannot_be_read_is_named(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "token").mkdir()
    with pytest.raises(ModelError) as wrong:
        HubClient()
    assert str(wrong.value) == f"{tmp_path}/token: Is a directory"


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("HTTPS_PROXY", "odd://user:secret@host:1", "ValueError"),
        ("HTTPS_PROXY", "socks5://user:secret@host:1", "ImportError"),
        ("SSL_CERT_FILE", "/no/secret", "No such file or directory"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_reported_without_its_password(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ModelError) as wrong:
        HubClient()
    assert str(wrong.value).endswith(f": HTTPS_PROXY, SSL_CERT_FILE or another variable of that kind: {said}")
    assert "secret" not in str(wrong.value)


@pytest.mark.parametrize("endpoint", ["file:///etc", "huggingface.co", "http://"])
def test_an_endpoint_that_is_no_address_is_refused(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with pytest.raises(ModelError, match="HF_ENDPOINT is not an address"):
        HubClient()
