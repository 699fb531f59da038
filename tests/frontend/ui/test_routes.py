"""The page's paths at a whole frontend: what is served, which clients get it, and what bad input gets."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from services.frontend.config import AccessConfig, FrontendConfig, UiConfig
from services.frontend.ui.routes import HEADERS, PATH, POLICY, QUESTIONS_LIMIT, REQUEST_LIMIT_CHARACTERS, page_files
from shared import subjects
from shared.api_keys import key_digest
from shared.bus.contract import Message
from shared.errors import ConfigError
from shared.messages.codec import JSON_HEADER
from shared.messages.frontends import RECENT_REQUESTS, RecentRequests, RequestWay
from shared.messages.people import EXPLANATIONS, Explanation, Explanations
from shared.messages.select import Candidate, Overlap
from tests.frontend.peers import DEADLINE_S, MODEL, NAMESPACE, World, instance_entry, world

KEY = "sk-test-0123456789abcdef"


@pytest.fixture
def keys(tmp_path: Path) -> AccessConfig:
    file = tmp_path / "keys.toml"
    file.write_text(f'alice = {{ sha256 = "{key_digest(KEY).hex()}" }}\n')
    return AccessConfig(keys_file=str(file))


@asynccontextmanager
async def client(w: World, **headers: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with (
        asyncio.timeout(DEADLINE_S),
        aiohttp.ClientSession(w.url, headers=headers, timeout=aiohttp.ClientTimeout(DEADLINE_S)) as http,
    ):
        yield http


async def snapshots(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the snapshots of a stream."""
    assert answer.status == 200, await answer.text()
    assert answer.content_type == "text/event-stream"
    while line := await answer.content.readuntil(b"\n\n"):
        assert line.startswith(b"data: ")
        yield json.loads(line.removeprefix(b"data: "))


async def test_the_page_and_its_files_are_served_with_headers_that_keep_it_to_itself(directory: Path) -> None:
    async with world(directory) as w, client(w) as http:
        for path, file in page_files().items():
            async with http.get(path) as answer:
                assert answer.status == 200
                assert answer.content_type == file.content_type
                assert await answer.read() == file.content
                assert {name: answer.headers[name] for name in HEADERS} == HEADERS
        async with http.get("/ui/", allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (308, "../ui")


async def test_a_stream_shows_the_fleet_its_load_and_a_request_from_its_arrival_to_its_end(directory: Path) -> None:
    async with world(directory) as w, client(w) as http, http.get("/ui/events") as answer:
        tokens = [*w.say("fine"), 2]
        asked = False
        async for seen in snapshots(answer):
            assert [each["process"]["id"] for each in seen["workers"]] == ["w1", "w2"]
            assert seen["routers"][0]["process"]["id"] == "r1"
            assert seen["models"][0]["name"] == MODEL
            if not asked:
                async with http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}) as said:
                    assert said.status == 200
                asked = True
            elif seen["requests"] and seen["workers"][0]["state"] != "silent":
                break
            await w.workers[0].report(3, [])
        (request,) = seen["requests"]
        assert (request["outcome"], request["instances"], request["output"]) == ("stop", ["w1"], len(tokens))
        assert None not in request["times"]
        assert request["times"] == sorted(request["times"])
        assert [each["process"]["id"] for each in seen["frontends"]] == ["f1"]
        assert seen["totals"]["begun"] == 1


async def test_requests_of_other_frontends_are_shown_too(directory: Path) -> None:
    async with world(directory, more=instance_entry("frontend", "f2")) as w, client(w) as http:
        other = RecentRequests("f2", 0, 1, 7, [RequestWay("0123456789ab", MODEL, 1.0, 40)])

        async def answer_recent(message: Message) -> None:
            await w.router.bus.publish(message.reply, RECENT_REQUESTS.encode(other, message.headers))

        await w.router.bus.subscribe(subjects.recent_requests(NAMESPACE, "f2"), answer_recent)
        async with http.get("/ui/events") as answer:
            seen = await anext(snapshots(answer))
        assert [each["id"] for each in seen["requests"]] == ["0123456789ab"]
        assert seen["totals"]["begun"] == 7


async def test_a_frontend_tells_others_of_its_requests(directory: Path) -> None:
    async with world(directory) as w, client(w) as http:
        w.say("fine")
        async with http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}) as said:
            own = (await said.json())["id"]
        reply = await w.router.bus.request(subjects.recent_requests(NAMESPACE, "f1"), b"", timeout_s=DEADLINE_S)
        recent = RECENT_REQUESTS.decode(reply.payload)
        assert [way.name for way in recent.requests] == [own.removeprefix("cmpl-")[:12]]


async def test_a_decision_is_asked_from_routers_and_names_no_whole_id(directory: Path) -> None:
    async with world(directory) as w, client(w) as http:
        asked: list[str] = []
        name = "0123456789abcdef" * 2
        row = Candidate("w1", 0, Overlap(1, 0, 0), 5.0, 2, 3, "uncached 5")
        one = Explanation(MODEL, "r1", name, 1, 2.0, "w1", 0, "uncached 5", (row,), 21, 16)

        async def explain(message: Message) -> None:
            asked.append(message.payload.decode())
            answer = EXPLANATIONS.encode(Explanations("r1", [one]), JSON_HEADER)
            await w.router.bus.publish(message.reply, answer, headers=JSON_HEADER)

        await w.router.bus.subscribe(subjects.explain(NAMESPACE, "r1"), explain)
        async with http.get("/ui/decision", params={"request": f"chatcmpl-{name}"}) as answer:
            assert answer.status == 200
            text = await answer.text()
        assert asked == [f"chatcmpl-{name}"]
        assert name not in text
        (found,) = json.loads(text)["decisions"]
        assert (found["request"], found["candidates"][0]["instance"]) == (name[:12], "w1")


async def test_without_a_router_that_answers_a_decision_is_503(directory: Path) -> None:
    async with world(directory) as w, client(w) as http, http.get("/ui/decision", params={"request": "x"}) as answer:
        assert answer.status == 503
        assert "no router answers" in await answer.text()


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("", "request"),
        ("request=", "request"),
        ("request=%20", "request"),
        ("request=a&request=b", "request"),
        ("request=%00", "request"),
        ("request=" + "x" * (REQUEST_LIMIT_CHARACTERS + 1), "request"),
        ("request=%22", "request"),
        ("request=%20%22%20%22%20", "request"),
        ("request=a&evil=1", "'evil'"),
    ],
)
async def test_a_bad_question_is_400_and_names_the_parameter(directory: Path, query: str, param: str) -> None:
    async with world(directory) as w, client(w) as http, http.get(f"/ui/decision?{query}") as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["param"] == param


async def test_unknown_paths_other_methods_and_queries_are_refused(directory: Path) -> None:
    async with world(directory) as w, client(w) as http:
        for method, path, status in (
            ("GET", "/ui/nothing", 404),
            ("GET", "/ui/../app.py", 404),
            ("GET", "/ui/%2e%2e/config.py", 404),
            ("GET", "/ui/page/index.html", 404),
            ("POST", "/ui", 405),
            ("POST", "/ui/events", 405),
            ("DELETE", "/ui/decision", 405),
            ("HEAD", "/ui/events", 405),
            ("GET", "/ui/events?x=1", 400),
            ("GET", "/ui/events?" + "x" * 20_000, 400),
            ("GET", "/ui?" + "x" * 20_000, 400),
            ("GET", "/ui?utm_source=mail", 200),
        ):
            async with http.request(method, path) as answer:
                assert answer.status == status, (method, path[:40])


async def test_other_origins_and_names_of_others_get_nothing(directory: Path) -> None:
    async with world(directory) as w, client(w) as http:
        for headers in (
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {"Sec-Fetch-Site": "cross-site"},
            {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate"},
            {"Host": "evil.example"},
        ):
            for path in ("/ui/events", "/ui/decision?request=x", "/ui/main.js"):
                async with http.get(path, headers=headers) as answer:
                    assert answer.status == 403, (headers, path)
                    assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        settings = FrontendConfig(ui=UiConfig(hosts=("llm.example",)))
    async with (
        world(directory, settings=settings) as w,
        client(w, Host="llm.example:8000") as http,
        http.get("/ui") as answer,
    ):
        assert answer.status == 200


async def test_with_keys_the_page_loads_without_one_and_the_data_does_not(directory: Path, keys: AccessConfig) -> None:
    settings = FrontendConfig(ui=UiConfig(serve="api"))
    async with world(directory, access=keys, settings=settings) as w, client(w) as http:
        for path in page_files():
            async with http.get(path) as answer:
                assert answer.status == 200
        for path in ("/ui/events", "/ui/decision?request=x", "/ui/nothing"):
            async with http.get(path) as answer:
                assert answer.status == 401
            async with http.get(path, headers={"Authorization": "Bearer wrong"}) as answer:
                assert answer.status == 401
        async with http.get("/ui/events", headers={"Authorization": f"Bearer {KEY}"}) as answer:
            assert (await anext(snapshots(answer)))["workers"]


@pytest.mark.parametrize(
    ("serve", "with_keys", "status"),
    [("auto", False, 200), ("auto", True, 401), ("off", False, 404), ("api", True, 200)],
)
async def test_the_page_is_on_where_no_key_is_needed_unless_the_settings_say_otherwise(
    directory: Path, keys: AccessConfig, serve: Any, with_keys: bool, status: int
) -> None:
    settings = FrontendConfig(ui=UiConfig(serve=serve))
    async with (
        world(directory, access=keys if with_keys else None, settings=settings) as w,
        client(w) as http,
        http.get("/ui") as answer,
    ):
        assert answer.status == status


async def test_beyond_the_limit_a_page_gets_503_and_finds_a_place_when_one_closes(directory: Path) -> None:
    settings = FrontendConfig(ui=UiConfig(pages=2))
    async with world(directory, settings=settings) as w, client(w) as http:
        async with http.get("/ui/events") as first, http.get("/ui/events") as second:
            for opened in (first, second):
                await anext(snapshots(opened))
            answers = await asyncio.gather(*(http.get("/ui/events") for _ in range(100)))
            assert {answer.status for answer in answers} == {503}
            assert {answer.headers["Retry-After"] for answer in answers} == {"5"}
            assert "ui.pages" in await answers[0].text()
            for answer in answers:
                answer.close()
            await anext(snapshots(first))
        while True:
            async with http.get("/ui/events") as third:
                if third.status == 200:
                    await anext(snapshots(third))
                    return
            await asyncio.sleep(0.01)


async def test_too_many_questions_at_once_are_refused(directory: Path) -> None:
    async with world(directory) as w, client(w) as http:
        silent = asyncio.Event()

        async def wait(message: Message) -> None:
            await silent.wait()

        await w.router.bus.subscribe(subjects.explain(NAMESPACE, "r1"), wait)
        asked = [http.get("/ui/decision?request=x") for _ in range(3 * QUESTIONS_LIMIT)]
        answers = await asyncio.gather(*asked)
        silent.set()
        texts = [await answer.text() for answer in answers]
        assert {answer.status for answer in answers} == {503}
        assert sum("questions to routers are open" in text for text in texts) >= 1


async def test_a_port_of_its_own_has_the_page_and_the_chat_and_no_more(directory: Path) -> None:
    settings = FrontendConfig(ui=UiConfig(serve="port", port=0))
    async with world(directory, settings=settings) as w, client(w) as api:
        w.say("fine")
        async with api.get("/ui") as answer:
            assert answer.status == 404
        async with aiohttp.ClientSession(w.page_url) as http:
            async with http.get("/ui") as answer:
                assert answer.status == 200
            async with http.get("/ui/events") as answer:
                assert (await anext(snapshots(answer)))["workers"]
            body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
            async with http.post("/v1/chat/completions", json=body) as answer:
                assert (await answer.json())["choices"][0]["message"]["content"] == "fine"
            async with http.get("/v1/models") as answer:
                assert answer.status == 404


async def test_a_port_of_its_own_that_is_taken_is_an_error_that_names_the_table(directory: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = FrontendConfig(ui=UiConfig(serve="port", port=taken.getsockname()[1]))
        with pytest.raises(ConfigError, match=r"ui: cannot listen on 127\.0\.0\.1:"):
            async with world(directory, settings=settings):
                pass


def test_settings_say_where_the_page_is() -> None:
    for serve, keyless, keyed in (("auto", "api", "off"), ("off", "off", "off"), ("port", "port", "port")):
        config = msgspec.convert({"serve": serve}, UiConfig)
        assert (config.place(keys=False), config.place(keys=True)) == (keyless, keyed)


FOLDER = Path(__file__).parents[3] / "services" / "frontend" / "ui" / "page"


def text(path: str) -> str:
    return page_files()[path].content.decode()


def test_every_file_of_the_folder_is_served_with_its_type() -> None:
    served = page_files()
    assert len(served) == len(list(FOLDER.iterdir()))
    assert served[PATH].content_type == "text/html"
    assert {served[path].content_type for path in served if path.endswith(".js")} == {"text/javascript"}


def test_all_that_the_page_names_is_served_and_nothing_comes_from_elsewhere() -> None:
    named = re.findall(r'(?:src|href)="([^"]+)"', text(PATH))
    assert named
    assert {f"/{each}" for each in named if not each.startswith("#")} <= set(page_files())
    for path, file in page_files().items():
        if file.content_type == "text/javascript":
            modules = re.findall(r'from "\./([^"]+)"', file.content.decode())
            assert {f"{PATH}/{each}" for each in modules} <= set(page_files()), path
        addresses = re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", file.content.decode())
        assert [each for each in addresses if "www.w3.org" not in each] == [], path


def test_nothing_is_inline_and_no_text_becomes_markup() -> None:
    page = text(PATH)
    assert not re.search(r"<script(?![^>]*src=)|<style|\sstyle=|\son[a-z]+=|javascript:", page)
    for path, file in page_files().items():
        if file.content_type == "text/javascript":
            forbidden = (
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|setAttribute\(\"style"
            )
            assert not re.search(forbidden, file.content.decode()), path


def test_the_policy_allows_no_inline_code_no_other_host_and_no_frame() -> None:
    rules = {rule.split(" ")[0]: rule.split(" ")[1:] for rule in POLICY.split("; ")}
    assert rules["default-src"] == ["'none'"]
    assert rules["frame-ancestors"] == ["'none'"]
    assert rules.pop("img-src") == ["'self'", "data:"], "a picture that a model makes comes as data"
    assert {source for rule in rules.values() for source in rule} == {"'none'", "'self'", "'script'"}
    assert HEADERS["X-Frame-Options"] == "DENY"
    assert HEADERS["Referrer-Policy"] == "no-referrer"
