"""Headers of every HTTP answer, and the answers to browsers' preflights."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from services.frontend.config import AccessConfig, FrontendConfig, HttpConfig, UiConfig
from tests.frontend.peers import DEADLINE_S, MODEL, clients, world

BODY = {"model": MODEL, "prompt": "x"}
PAGE = "https://chat.example.org"
PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


async def test_every_answer_says_no_store_and_nosniff_and_names_no_server(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        w.say("x")
        for method, path, body in (
            ("POST", "/v1/completions", json.dumps(BODY)),
            ("POST", "/v1/completions", json.dumps({**BODY, "stream": True})),
            ("POST", "/v1/completions", "{"),
            ("GET", "/v1/models", ""),
            ("GET", "/v1/models/nobody", ""),
            ("GET", "/nothing", ""),
            ("GET", "/health", ""),
        ):
            async with http.request(method, path, data=body) as response:
                assert response.headers["X-Content-Type-Options"] == "nosniff"
                assert response.headers.getall("Cache-Control") == ["no-store"]
                assert "Server" not in response.headers
                assert not [name for name in response.headers if name.startswith("Access-Control")]


@pytest.mark.parametrize(
    "sent",
    [
        b"hr-secret at all\r\n\r\n",
        b"GET / HTTP/1.1\r\nAuthorization: Bearer hr-secret" + b"x" * 20_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nAuthorization: Bearer hr-secret\x01\r\n\r\n",
    ],
)
async def test_a_client_that_speaks_no_http_gets_an_openai_error_that_repeats_nothing_it_sent(
    directory: Path, sent: bytes
) -> None:
    async with world(directory) as w, asyncio.timeout(DEADLINE_S):
        url = urlsplit(w.url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(sent)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        assert b" 400 " in head.splitlines()[0]
        assert b"server:" not in head.lower()
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        assert b"secret" not in body


async def test_a_page_of_an_origin_that_is_set_may_ask_and_read(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("")
    access = AccessConfig(keys_file=str(tmp_path / "keys"))
    async with world(directory, http=HttpConfig(cors_origins=(PAGE,)), access=access) as w, clients(w) as (_, http):
        async with http.options("/v1/chat/completions", headers=PREFLIGHT) as response:
            assert response.status == 204, "no key is needed to ask what may be asked"
            assert response.headers["Access-Control-Allow-Origin"] == PAGE
            assert response.headers["Access-Control-Allow-Methods"] == "GET, POST, DELETE"
            assert response.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
            assert response.headers["Vary"] == "Origin"
            assert "Access-Control-Allow-Credentials" not in response.headers
        async with http.options("/v1/models", headers={**PREFLIGHT, "Origin": "https://evil.example"}) as response:
            assert response.status == 403
            assert "Access-Control-Allow-Origin" not in response.headers
        async with http.get("/v1/models", headers={"Origin": PAGE}) as response:
            assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (401, PAGE)
        async with http.get("/v1/models", headers={"Origin": "https://evil.example"}) as response:
            assert "Access-Control-Allow-Origin" not in response.headers
            assert response.headers["Vary"] == "Origin"


async def test_streams_may_be_read_by_pages_too(directory: Path) -> None:
    async with world(directory, http=HttpConfig(cors_origins=("*",))) as w, clients(w) as (_, http):
        w.say("x")
        async with http.post("/v1/completions", json={**BODY, "stream": True}, headers={"Origin": PAGE}) as response:
            assert response.headers["Access-Control-Allow-Origin"] == "*"
            assert "X-Request-Id" in response.headers["Access-Control-Expose-Headers"]
            await response.read()


async def test_where_no_origin_is_set_options_is_refused_as_any_method_that_is_not_there(directory: Path) -> None:
    async with (
        world(directory) as w,
        clients(w) as (_, http),
        http.options("/v1/chat/completions", headers=PREFLIGHT) as response,
    ):
        assert (response.status, response.headers["Allow"]) == (405, "POST")
        assert not [name for name in response.headers if name.startswith("Access-Control")]


EVIL = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
PATHS = ("/live", "/health", "/metrics", "/sd", "/v1/models", "/openapi.json", "/version", "/api/tags", "/nothing")


async def test_without_keys_a_page_of_another_site_gets_nothing_at_any_path(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        w.say("x")
        for headers in ({"Host": "evil.example:8000", "Sec-Fetch-Site": "same-origin"}, EVIL):
            for path in PATHS:
                async with http.get(path, headers=headers) as response:
                    assert response.status == 403, (path, headers)
            for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/api/chat", "/v1/embeddings"):
                plain = {"Content-Type": "text/plain", **headers}
                async with http.post(path, data=json.dumps(BODY), headers=plain) as response:
                    assert response.status == 403
                    assert "http." in await response.text(), "it names the setting"
        assert not w.workers[0].generates.all
        for headers in ({}, {"Origin": "app://program"}, {"Host": "host.docker.internal:8000"}):
            async with http.post("/v1/completions", data=json.dumps(BODY), headers=headers) as response:
                assert response.status == 200, headers


async def test_a_name_that_is_set_reaches_every_path_and_the_page_too(directory: Path) -> None:
    for settings in (FrontendConfig(ui=UiConfig(hosts=("llm.example",))), None):
        config = HttpConfig() if settings else HttpConfig(hosts=("llm.example",))
        async with world(directory, http=config, settings=settings) as w, clients(w) as (_, http):
            for path in ("/v1/models", "/metrics", "/ui"):
                async with http.get(path, headers={"Host": "llm.example"}) as response:
                    assert response.status == 200


async def test_with_keys_any_name_reaches_the_port_since_a_page_has_none(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("")
    async with world(directory, access=AccessConfig(keys_file=str(tmp_path / "keys"))) as w, clients(w) as (_, http):
        for path, status in (("/health", 200), ("/v1/models", 401)):
            async with http.get(path, headers={"Host": "llm.example", **EVIL}) as response:
                assert response.status == status


async def test_the_pages_own_port_refuses_pages_of_other_sites_too(directory: Path) -> None:
    settings = FrontendConfig(ui=UiConfig(serve="port", port=0))
    async with world(directory, settings=settings) as w, clients(w) as (_, http):
        for headers in (EVIL, {"Host": "evil.example"}):
            async with http.post(f"{w.page_url}/v1/chat/completions", data="{}", headers=headers) as response:
                assert response.status == 403
