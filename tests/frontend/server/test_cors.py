from __future__ import annotations

import pytest

from services.frontend.config import FrontendConfig
from services.frontend.protocol.errors import Failure
from services.frontend.server.cors import Cors
from shared.config import load
from shared.errors import ConfigError

PAGE = "https://chat.example.org"


def asking(**headers: str) -> dict[str, str]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return {"Origin": PAGE, "Access-Control-Request-Method": "POST", **named}


def test_without_origins_there_are_no_headers() -> None:
    off = Cors(())
    assert off.answer_headers(PAGE) == {}
    assert not off.is_preflight("OPTIONS", asking())


def test_a_page_of_an_origin_that_is_set_may_read_answers_and_others_may_not() -> None:
    some = Cors((PAGE, "http://localhost:3000"))
    headers = some.answer_headers(PAGE)
    assert (headers["Access-Control-Allow-Origin"], headers["Vary"]) == (PAGE, "Origin")
    assert "x-ratelimit-remaining-tokens" in headers["Access-Control-Expose-Headers"]
    for other in (None, "https://evil.example", "https://chat.example.org.evil.example", "null", ""):
        assert some.answer_headers(other) == {"Vary": "Origin"}


def test_any_page_may_where_a_star_is_set() -> None:
    assert Cors(("*",)).answer_headers("https://whoever.example")["Access-Control-Allow-Origin"] == "*"


def test_a_preflight_is_answered_with_the_methods_and_the_requested_headers() -> None:
    some = Cors((PAGE,))
    headers = asking(Access_Control_Request_Headers="authorization,content-type,x-stainless-lang")
    assert some.is_preflight("OPTIONS", headers)
    assert some.preflight_headers(headers) == {
        "Access-Control-Allow-Methods": "GET, POST, DELETE",
        "Access-Control-Allow-Headers": "authorization,content-type,x-stainless-lang",
        "Access-Control-Max-Age": "600",
    }
    assert some.preflight_headers(asking()) == {
        "Access-Control-Allow-Methods": "GET, POST, DELETE",
        "Access-Control-Max-Age": "600",
    }


@pytest.mark.parametrize(
    "headers",
    [
        asking(Origin="https://evil.example"),
        asking(Access_Control_Request_Method="PUT"),
        asking(Access_Control_Request_Headers="a b"),
        asking(Access_Control_Request_Headers="a\r\nX-Evil: 1"),
        asking(Access_Control_Request_Headers=",".join(["x"] * 65)),
        asking(Access_Control_Request_Headers="x" * 65),
    ],
)
def test_a_preflight_that_asks_for_what_is_not_allowed_is_refused(headers: dict[str, str]) -> None:
    refusal = Cors((PAGE,)).preflight_headers(headers)
    assert isinstance(refusal, Failure)
    assert refusal.status == 403


def test_other_requests_with_options_are_no_preflight() -> None:
    some = Cors((PAGE,))
    assert not some.is_preflight("POST", asking())
    assert not some.is_preflight("OPTIONS", {"Origin": PAGE})
    assert not some.is_preflight("OPTIONS", {"Access-Control-Request-Method": "POST"})


@pytest.mark.parametrize("origin", ["*", PAGE, "http://localhost:3000", "http://[::1]:80"])
def test_origins_are_taken_from_the_settings(origin: str) -> None:
    config = load(FrontendConfig, environ={"HEADRACE_HTTP_CORS_ORIGINS": f"{origin}, https://b.example"})
    assert config.http.cors_origins == (origin, "https://b.example")


@pytest.mark.parametrize(
    "origin", ["https://Chat.example.org", f"{PAGE}/", "chat.example.org", "https://*.example.org", "null"]
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors_origins: "):
        load(FrontendConfig, environ={"HEADRACE_HTTP_CORS_ORIGINS": origin})


@pytest.mark.parametrize("table", ["HTTP", "UI", "OBSERVE"])
@pytest.mark.parametrize("host", ["https://llm.example", "llm.example:8443", "llm.example/", "*.example", "*"])
def test_a_name_of_the_host_that_no_client_asks_for_is_refused(table: str, host: str) -> None:
    with pytest.raises(ConfigError, match=r"hosts: .* is no host name such as llm\.example"):
        load(FrontendConfig, environ={f"HEADRACE_{table}_HOSTS": host})


def test_names_of_the_host_are_taken_from_the_settings() -> None:
    config = load(FrontendConfig, environ={"HEADRACE_HTTP_HOSTS": "LLM.example, box, 10.1.2.3, [::1]"})
    assert config.http.hosts == ("LLM.example", "box", "10.1.2.3", "[::1]")
