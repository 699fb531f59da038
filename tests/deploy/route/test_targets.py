"""deploy/local/route/targets.py: which servers are meant, and one line for what is none."""

from __future__ import annotations

import pytest

from deploy.local.route.targets import MOST_TARGETS, parse_file, parse_targets
from shared.errors import ConfigError


def test_a_server_has_one_url_however_it_is_written() -> None:
    (one, other, secure) = parse_targets(["http://Gpu-1:8001/", "http://[::1]", "https://gpu-1"])
    assert (one.given, one.url, one.worker) == ("http://Gpu-1:8001/", "http://gpu-1:8001", "worker-http-gpu-1:8001")
    assert (other.url, other.host, other.port) == ("http://[::1]:80", "::1", 80)
    assert secure.url == "https://gpu-1:443"
    for given in ("http://gpu-1:8001/v1", "http://gpu-1:8001/v1/"):  # as clients have it
        assert parse_targets([given])[0].url == one.url


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("127.0.0.1:8001", "127.0.0.1:8001: not a URL such as http://127.0.0.1:8001"),
        ("gpu-1", "gpu-1: not a URL such as http://127.0.0.1:8001"),
        ("ftp://gpu-1", "ftp://gpu-1: not a URL such as http://127.0.0.1:8001"),
        ("http://", "http://: not a URL such as http://127.0.0.1:8001"),
        ("http://gpu-1:0", "'http://gpu-1:0': not a URL such as http://127.0.0.1:8001"),
        ("http://gpu 1", "'http://gpu 1': not a URL such as http://127.0.0.1:8001"),
        ("http://gpu-1:99999", "http://gpu-1:99999: Port out of range 0-65535"),
        ("http://[::1", "http://[::1: Invalid IPv6 URL"),
        ("http://gpu-1/openai/v1", "http://gpu-1/openai/v1: has a path; give http://gpu-1 alone"),
        ("http://gpu-1/v1/models", "http://gpu-1/v1/models: has a path; give http://gpu-1 alone"),
        ("http://me@gpu-1", "http://me@gpu-1: a user, a query or a fragment; a key belongs in the file of --api-key-f"),
        ("http://gpu-1?a=1", "http://gpu-1?a=1: a user, a query or a fragment; a key belongs in the file of --api-key"),
    ],
)
def test_what_is_no_server_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        parse_targets(["http://gpu-0:8001", text])
    assert str(wrong.value).startswith(said)


def test_the_same_server_twice_is_refused_in_any_spelling() -> None:
    with pytest.raises(ConfigError, match=r"^http://GPU-1:80/: the same server as http://gpu-1$"):
        parse_targets(["http://gpu-1", "http://GPU-1:80/"])
    with pytest.raises(ConfigError, match=r"^https://gpu-1:80: the same server as http://gpu-1$"):
        parse_targets(["http://gpu-1", "https://gpu-1:80"])


def test_the_number_of_servers_has_a_limit() -> None:
    urls = [f"http://gpu-{index}" for index in range(MOST_TARGETS + 1)]
    assert len(parse_targets(urls[:-1])) == MOST_TARGETS
    with pytest.raises(ConfigError, match=r"^65 servers: at most 64$"):
        parse_targets(urls)


def test_a_file_has_one_server_a_line_and_is_named_for_what_is_wrong_in_it() -> None:
    text = "# the first rack\nhttp://gpu-1\n\n  http://gpu-2:8001  \n"
    assert [target.url for target in parse_file("servers", text)] == ["http://gpu-1:80", "http://gpu-2:8001"]
    assert parse_file("servers", "# none yet\n") == ()
    with pytest.raises(ConfigError, match=r"^servers: gpu-3: not a URL"):
        parse_file("servers", text + "gpu-3\n")
