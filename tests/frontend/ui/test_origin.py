"""Who may ask for the page and its data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.ui.origin import refusal

NAVIGATION = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


def refused(headers: dict[str, str], *hosts: str, keys: bool = False, is_document: bool = False) -> str:
    return refusal(headers, hosts, keys=keys, is_document=is_document)


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "localhost:8000", "localhost", "[::1]:8000", "10.1.2.3", "a.localhost:80", ""]
)
def test_addresses_and_localhost_are_hosts_without_a_setting(host: str) -> None:
    assert not refused({"Host": host})


@pytest.mark.parametrize("host", ["evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "1.2.3"])
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
    assert not refused(linked, is_document=True)
    for embedded in ("iframe", "object", "script"):
        assert refused({**linked, "Sec-Fetch-Dest": embedded}, is_document=True)
    assert refused({**linked, "Sec-Fetch-Mode": "no-cors"}, is_document=True)


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:9", "http://[", "localhost:8000"])
def test_another_origin_is_refused(origin: str) -> None:
    assert refused({"Host": "localhost:8000", "Origin": origin}, keys=True).startswith("Origin: ")


def test_the_own_origin_is_not_whatever_the_scheme_says_behind_a_proxy() -> None:
    for origin in ("http://localhost:8000", "https://localhost:8000"):
        assert not refused({"Host": "localhost:8000", "Origin": origin})
    assert not refused({"Host": "inside:8000", "Origin": "https://llm.example"}, "llm.example", keys=True)


@given(st.dictionaries(st.sampled_from(["Host", "Origin", "Sec-Fetch-Site"]), st.text(max_size=300)))
def test_any_headers_get_an_answer_of_one_short_line(headers: dict[str, str]) -> None:
    why = refused(headers)
    assert "\n" not in why
    assert len(why) < 500
