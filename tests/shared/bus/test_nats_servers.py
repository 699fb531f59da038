"""shared/bus/nats_servers.py: one URL, several, and what is none."""

from __future__ import annotations

import pytest

from shared.bus.nats_servers import SERVERS_LIMIT, server_urls, without_password
from shared.errors import ConfigError


@pytest.mark.parametrize(
    ("setting", "urls"),
    [
        ("nats://a:4222", ("nats://a:4222",)),
        ("nats://a", ("nats://a",)),
        ("nats://a:1,tls://b:2", ("nats://a:1", "tls://b:2")),
        (" nats://a:1 , nats://[::1]:2 ", ("nats://a:1", "nats://[::1]:2")),
        ("nats://a:1,nats://a:1", ("nats://a:1",)),
        ("nats://user:pass,word@a:1,nats://b:2", ("nats://user:pass,word@a:1", "nats://b:2")),
    ],
)
def test_commas_separate_urls(setting: str, urls: tuple[str, ...]) -> None:
    assert server_urls(setting) == urls


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("", ""),
        ("nats://a:1,", "nats://a:1,"),
        ("nats://a:1,b:2", "nats://a:1,b:2"),
        ("nats://a:1,http://b:2", "http://b:2"),
        ("nats://a:1,nats://b:port", "nats://b:port"),
        ("nats://a:1,nats://user:secret@:2", "nats://:2"),
        ("user:secret@a:1", "…@a:1"),
        ("nats:/user:secret@a", "…@a"),
        ("nats://a,b", "nats://a,b"),
    ],
)
def test_the_url_that_is_wrong_is_named_without_its_password(setting: str, named: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        server_urls(setting)
    assert f"nats.url: {named} is not nats://host:port" in str(wrong.value)
    assert "secret" not in str(wrong.value)


def test_more_servers_than_a_cluster_has_are_refused() -> None:
    urls = [f"nats://host-{number}:1" for number in range(SERVERS_LIMIT + 1)]
    assert len(server_urls(",".join(urls[1:]))) == SERVERS_LIMIT
    with pytest.raises(ConfigError, match=f"the limit is {SERVERS_LIMIT}"):
        server_urls(",".join(urls))


def test_users_and_passwords_are_not_shown() -> None:
    assert without_password("nats://user:se,cret@a:1,tls://b:2") == "nats://a:1, tls://b:2"
