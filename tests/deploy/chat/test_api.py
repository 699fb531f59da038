"""deploy/local/chat/api.py against a small HTTP server that answers as the frontend does, or does not."""

from __future__ import annotations

import json
import re
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from deploy.local.chat import api
from deploy.local.chat.api import ChatApi, ChatError
from deploy.local.chat.chat import chat as command
from deploy.local.usage import ChatFlags
from shared.errors import ConfigError

MODELS = json.dumps({"object": "list", "data": [{"id": "tiny"}]}).encode()
USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}


def event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def piece(text: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}}]})


def chat(url: str, question: str, *, model: str = "", api_key: str = "") -> None:
    command(ChatApi(url, api_key), ChatFlags(question=question, model=model))


class Peer:
    """Answers every question with `status` and `body`, and keeps the questions."""

    def __init__(self) -> None:
        self.status, self.body, self.models = 200, b"", MODELS
        self.health = b""
        self.announced: int | None = None
        """The length that is announced for every body. None if its end is that of the connection."""
        self.repeated = b""
        """What follows each body again and again, until the client leaves."""
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.over = threading.Event()
        peer = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                peer.keys.append(self.headers["Authorization"])
                if self.path == "/health":
                    self._answer(503, peer.health)
                else:
                    self._answer(200, peer.models)

            def do_POST(self) -> None:
                peer.keys.append(self.headers["Authorization"])
                peer.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self._answer(peer.status, peer.body)

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                if peer.announced is not None:
                    self.send_header("Content-Length", str(peer.announced))
                self.end_headers()
                self.wfile.write(body)
                with suppress(ConnectionError):
                    while peer.repeated:
                        self.wfile.write(peer.repeated)
                        peer.over.wait(0.02)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 the name is the base class's
                return

        self.server = HTTPServer(("127.0.0.1", 0), Answer)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1"


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    serving = threading.Thread(target=peer.server.serve_forever, args=(0.01,))
    serving.start()
    yield peer
    peer.server.shutdown()
    serving.join()
    peer.server.server_close()


def test_the_answer_goes_to_stdout_and_the_usage_to_stderr(peer: Peer, capsys: pytest.CaptureFixture[str]) -> None:
    peer.body = piece("Par") + piece("is.") + event({"choices": [], "usage": USAGE}) + b"data: [DONE]\n\n"
    chat(peer.url, "Where?")
    said = capsys.readouterr()
    assert said.out == "Paris.\n"
    assert said.err == "[9 prompt tokens, 8 of them cached; 2 generated]\n"
    (asked,) = peer.asked
    assert asked["model"] == "tiny"
    assert asked["messages"] == [{"role": "user", "content": "Where?"}]
    assert asked["stream"] is True


def test_a_frontend_that_asks_for_a_key_is_answered_with_how_to_give_one(peer: Peer) -> None:
    peer.status, peer.body = 401, json.dumps({"error": {"message": "You didn't provide an API key."}}).encode()
    with pytest.raises(ChatError, match=r"an API key; give the key with --api-key-file FILE .* OPENAI_API_KEY"):
        chat(peer.url, "Where?", model="tiny")


def test_an_error_is_shown_in_the_frontends_words(peer: Peer) -> None:
    peer.status, peer.body = 503, json.dumps({"error": {"message": "no worker yet"}}).encode()
    with pytest.raises(ChatError, match="no worker yet"):
        chat(peer.url, "Where?", model="other")


def test_an_error_in_the_middle_of_the_stream_is_shown(peer: Peer) -> None:
    peer.body = piece("Par") + event({"error": {"message": "the worker is gone"}})
    with pytest.raises(ChatError, match="the worker is gone"):
        chat(peer.url, "Where?")


def test_a_stream_that_breaks_off_is_an_error(peer: Peer) -> None:
    peer.body = piece("Par")
    with pytest.raises(ChatError, match="broke off"):
        chat(peer.url, "Where?")


def test_a_list_of_models_that_breaks_off_is_an_error(peer: Peer) -> None:
    peer.models, peer.announced = MODELS[:10], len(MODELS)
    with pytest.raises(
        ChatError, match=rf"^the list of models of .*/v1 broke off: {len(MODELS) - 10} bytes are missing$"
    ):
        chat(peer.url, "Where?")


def test_an_error_that_breaks_off_is_an_error_of_one_line(peer: Peer) -> None:
    peer.status, peer.body, peer.announced = 503, b'{"error": {"mess', 100
    with pytest.raises(ChatError, match=r"^status 503 from .*/v1/chat/completions, whose text broke off: 84 bytes"):
        chat(peer.url, "Where?", model="tiny")


@pytest.mark.parametrize(
    "models", [b"", b"[]", b"<html>", b'{"data": {}}', b'{"data": ["tiny"]}', b'{"data": [{}]}', b"[" * 100_000]
)
def test_what_is_no_list_of_models_is_refused(peer: Peer, models: bytes) -> None:
    peer.models = models
    with pytest.raises(ChatError, match=r"/v1/models does not answer with a list of models: is it an OpenAI endpoint"):
        chat(peer.url, "Where?")


def test_a_list_of_models_that_comes_byte_by_byte_is_left_after_the_limit(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "LIST_LIMIT_S", 0.2)
    peer.models, peer.repeated = b"{", b" "
    with pytest.raises(ChatError, match=r"/v1/models did not go on within 0.2 s$"):
        chat(peer.url, "Where?")


@pytest.mark.parametrize(
    ("status", "body", "repeated"), [(200, b"", b"x"), (200, piece("Par"), b"x"), (503, b"", b"x")]
)
def test_an_answer_whose_line_never_ends_is_left_after_the_limit(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, repeated: bytes
) -> None:
    monkeypatch.setattr(api, "SILENCE_LIMIT_S", 0.2)
    peer.status, peer.body, peer.repeated = status, body, repeated
    # On a busy machine the peer itself may be silent for so long.
    with pytest.raises(ChatError, match=r"/v1/chat/completions did not go on within 0.2 s$|broke off: timed out$"):
        chat(peer.url, "Where?", model="tiny")


def test_a_list_of_models_without_an_end_is_not_read(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "LIST_LIMIT_BYTES", 10)
    with pytest.raises(ChatError, match=r"^the list of models of .* has more than 10 bytes$"):
        chat(peer.url, "Where?")


@pytest.mark.parametrize("url", ["nonsense", "http://x:abc/v1", "http://x:99999/v1", "http://[::1/v1", "http://a b/v1"])
def test_a_url_that_is_none_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match=f"^--url {re.escape(url)}: "):
        chat(url, "Where?")


def test_a_temperature_is_sent_only_if_it_is_given(peer: Peer) -> None:
    peer.body = piece("x") + b"data: [DONE]\n\n"
    chat(peer.url, "?")
    for temperature in (0.0, 0.7):
        command(ChatApi(peer.url), ChatFlags(question="?", temperature=temperature))
    assert [asked.get("temperature") for asked in peer.asked] == [None, 0.0, 0.7]
    assert "temperature" not in peer.asked[0]


def test_chunks_of_other_servers_without_choices_or_delta_are_passed_over(
    peer: Peer, capsys: pytest.CaptureFixture[str]
) -> None:
    peer.body = event({"choices": None}) + event({"choices": [{"delta": None}]}) + piece("x") + b"data: [DONE]\n\n"
    chat(peer.url, "?")
    assert capsys.readouterr().out == "x\n"


def test_the_streams_of_other_servers_are_read(peer: Peer, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a space after `data:`, with other line ends, and with the newer name of what a model thinks."""
    thought = event({"choices": [{"index": 0, "delta": {"reasoning": "hm"}}]})
    written = thought + piece("Paris.") + b"data: [DONE]\n\n"
    peer.body = written.replace(b"data: ", b"data:").replace(b"\n", b"\r\n")
    chat(peer.url, "Where?")
    said = capsys.readouterr()
    assert said.out == "Paris.\n"
    assert said.err.startswith("[thinking]\nhm\n[answer]\n")


def test_no_model_yet_is_said(peer: Peer) -> None:
    peer.models = b'{"data": []}'
    with pytest.raises(ChatError, match="no model is served yet"):
        chat(peer.url, "Where?")


def test_why_no_model_is_served_is_said_in_the_words_of_health(peer: Peer) -> None:
    peer.models = b'{"object": "list", "data": []}'
    why = ["model tiny: none of its workers decodes", "router: silent"]
    peer.health = json.dumps({"ready": False, "reasons": why}).encode()
    with pytest.raises(ChatError, match=rf"^no model is served: {why[0]}; {why[1]}; see ./headrace status$"):
        chat(peer.url, "Where?")


@pytest.mark.parametrize("health", [b"<html>not found</html>", b'{"reasons": []}', b'{"reasons": 3}', b"[]"])
def test_a_server_whose_health_says_nothing_serves_no_model_yet(peer: Peer, health: bytes) -> None:
    peer.models, peer.health = b'{"object": "list", "data": []}', health
    with pytest.raises(ChatError, match=r"^no model is served yet; see ./headrace status$"):
        chat(peer.url, "Where?")


def test_a_server_that_does_not_run_is_said_with_what_to_do() -> None:
    with pytest.raises(ChatError, match=r"nothing answers at .*headrace up"):
        chat("http://127.0.0.1:1/v1", "Where?")


@pytest.fixture
def self_signed(peer: Peer) -> str:
    """The URL of the peer, which speaks TLS."""
    certificates = Path(__file__).parents[2] / "frontend" / "certificates"
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificates / "one.pem", certificates / "one.key")
    peer.server.socket = tls.wrap_socket(peer.server.socket, server_side=True)
    return peer.url.replace("http:", "https:")


def test_a_certificate_that_is_not_trusted_is_said_with_what_to_do(
    self_signed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    with pytest.raises(ChatError, match=r"self-signed certificate; set SSL_CERT_FILE to a file with the certificates"):
        chat(self_signed, "Where?")


def test_a_file_of_trusted_certificates_that_is_not_there_is_said(
    self_signed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "typo.pem"))
    with pytest.raises(ChatError, match=r"self-signed certificate; SSL_CERT_FILE is .*typo\.pem, which does not exist"):
        chat(self_signed, "Where?")


def test_a_key_is_shown_where_there_is_one(peer: Peer) -> None:
    peer.body = piece("x") + b"data: [DONE]\n\n"
    chat(peer.url, "?", api_key="hr-mine")
    assert peer.keys == ["Bearer hr-mine"] * 2
    chat(peer.url, "?", model="tiny")
    assert peer.keys[2:] == [None]
