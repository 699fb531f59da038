"""Which requests of browsers are answered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.runtime.origin import OriginRule, rule_of

NAVIGATION = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
PAGE = "https://chat.example.org"


def refused(headers: dict[str, str], *hosts: str, keys: bool = False, linkable: bool = False) -> str:
    return OriginRule("ui", frozenset(hosts), any_host=keys).refusal(headers, linkable=linkable)


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1:8000", "localhost:8000", "localhost", "[::1]:8000", "10.1.2.3", "a.localhost:80", ""),
        *("host.docker.internal:8000", "balancer", "frontend:8000"),
    ],
)
def test_addresses_and_names_that_no_site_can_have_are_hosts_without_a_setting(host: str) -> None:
    assert not refused({"Host": host})


@pytest.mark.parametrize(
    "host", ["evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "1.2.3", "internal.evil.example"]
)
def test_without_keys_another_name_is_refused_unless_listed(host: str) -> None:
    assert refused({"Host": host}).startswith("Host: ")
    assert not refused({"Host": host}, host.partition(":")[0])
    assert not refused({"Host": host}, keys=True)


@pytest.mark.parametrize("site", ["cross-site", "same-site", "none-such"])
def test_a_page_of_another_site_gets_no_data_however_it_asks(site: str) -> None:
    for how in ({}, NAVIGATION):
        assert refused({"Host": "localhost", "Sec-Fetch-Site": site, **how}).startswith("Sec-Fetch-Site: ")


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_the_page_itself_and_a_typed_address_get_data(site: str) -> None:
    assert not refused({"Host": "localhost", "Sec-Fetch-Site": site})


def test_another_page_may_link_to_the_page_but_not_embed_it() -> None:
    linked = {"Host": "localhost", "Sec-Fetch-Site": "cross-site", **NAVIGATION}
    assert not refused(linked, linkable=True)
    for embedded in ("iframe", "object", "script"):
        assert refused({**linked, "Sec-Fetch-Dest": embedded}, linkable=True)
    assert refused({**linked, "Sec-Fetch-Mode": "no-cors"}, linkable=True)


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "file://", "http://localhost:9", "http://[", "localhost:8000"]
)
def test_another_origin_is_refused(origin: str) -> None:
    assert refused({"Host": "localhost:8000", "Origin": origin}, keys=True).startswith("Origin: ")


@pytest.mark.parametrize("origin", ["chrome-extension://abcdefgh", "app://obsidian.md", "vscode-webview://0f"])
def test_a_program_with_an_origin_that_no_page_can_have_is_answered(origin: str) -> None:
    assert not refused({"Host": "localhost:8000", "Origin": origin, "Sec-Fetch-Site": "cross-site"})


def test_the_own_origin_is_not_whatever_the_scheme_says_behind_a_proxy() -> None:
    for origin in ("http://localhost:8000", "https://localhost:8000"):
        assert not refused({"Host": "localhost:8000", "Origin": origin})
    assert not refused({"Host": "inside:8000", "Origin": "https://llm.example"}, "llm.example", keys=True)


def test_an_origin_that_is_set_may_ask_from_another_site_and_others_are_named_the_setting() -> None:
    rule = rule_of("http", "127.0.0.1", (), (PAGE,))
    asked = {"Host": "localhost:8000", "Sec-Fetch-Site": "cross-site"}
    assert not rule.refusal({**asked, "Origin": PAGE})
    assert "http.cors_origins" in rule.refusal({**asked, "Origin": "https://evil.example"})
    assert rule.refusal({"Host": "evil.example", "Origin": PAGE}).startswith("Host: ")
    assert not rule_of("http", "127.0.0.1", (), ("*",)).refusal({**asked, "Host": "evil.example", "Origin": "null"})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_a_listener_at_loopback_has_no_other_names(host: str) -> None:
    assert rule_of("http", host, ()).refusal({"Host": "llm.example"})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.1.2.3", "llm.example"])
def test_a_listener_that_others_can_reach_may_have_any_name_unless_its_names_are_listed(host: str) -> None:
    assert not rule_of("http", host, ()).refusal({"Host": "whatever.example"})
    listed = rule_of("http", host, ("LLM.example",))
    assert not listed.refusal({"Host": "llm.example:8000"})
    assert listed.refusal({"Host": "whatever.example"})


@given(st.dictionaries(st.sampled_from(["Host", "Origin", "Sec-Fetch-Site"]), st.text(max_size=300)))
def test_any_headers_get_an_answer_of_one_short_line(headers: dict[str, str]) -> None:
    why = refused(headers)
    assert "\n" not in why
    assert len(why) < 500
