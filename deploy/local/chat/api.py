"""The client of `headrace chat`: sends a chat to an OpenAI endpoint, and reads its answer as it arrives.

It uses the standard library alone, because loading a client's library takes longer than a short answer.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from shared.deadline import Deadline, cut_connection
from shared.errors import ConfigError, HeadraceError
from shared.installation import COMMAND

CONNECT_LIMIT_S = 10.0
SILENCE_LIMIT_S = 600.0
"""The longest wait for the next line of the answer: a long prompt takes a while on a slow machine."""
LIST_LIMIT_S = 30.0
"""The longest time for a whole list of models."""
LINE_LIMIT_BYTES = 1 << 20
LIST_LIMIT_BYTES = 16 << 20
"""The largest list of models that is read."""
Chunks = Generator[dict[str, Any], None, None]
KEY_HINT = "give the key with --api-key-file FILE or in the environment variable OPENAI_API_KEY"


class ChatError(HeadraceError):
    """The frontend did not answer, or answered with an error. `code` is OpenAI's, if there is one."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class ChatApi(Struct, frozen=True):
    """An OpenAI endpoint."""

    url: str
    """Its URL, which ends with /v1."""
    api_key: str = ""

    def models(self) -> list[str]:
        """Return the names of the models served, at least one. Raise ChatError."""
        with self._open("GET", "/models", LIST_LIMIT_S) as (answer, _):
            models = _read(answer, LIST_LIMIT_BYTES, f"the list of models of {self.url}").get("data")
        if not isinstance(models, list) or not all(isinstance(model, dict) and "id" in model for model in models):
            raise ChatError(f"{self.url}/models does not answer with a list of models: is it an OpenAI endpoint?")
        if not models:
            raise ChatError(f"no model is served{self._why_unready()}; see {COMMAND} status")
        return [str(model["id"]) for model in models]

    def _why_unready(self) -> str:
        """Return what the server's /health says against it, after a colon; else ` yet`."""
        root = ChatApi(self.url.removesuffix("/v1"))
        try:
            with root._open("GET", "/health", LIST_LIMIT_S, any_status=True) as (answer, _):
                reasons = _read(answer, LIST_LIMIT_BYTES, "").get("reasons")
        except ChatError:  # of another server
            reasons = None
        return f": {'; '.join(map(str, reasons))}" if isinstance(reasons, list) and reasons else " yet"

    def ask(self, messages: Sequence[Mapping[str, str]], **parameters: object) -> Chunks:
        """Yield the chunks of the answer. Closing the iterator ends the connection, which cancels the request.

        Raise ChatError, also if the stream ends before its [DONE].
        """
        asked = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, **parameters}
        asking = self._open("POST", "/chat/completions", SILENCE_LIMIT_S, json.dumps(asked).encode())
        with asking as (answer, deadline):
            while True:
                with _broken_off("the answer"):
                    line = answer.readline(LINE_LIMIT_BYTES)
                deadline.extend()
                if not line:
                    raise ChatError("the answer broke off")
                if not line.startswith(b"data:"):  # some servers put no space after it
                    continue
                payload = line.removeprefix(b"data:").strip()
                if payload == b"[DONE]":
                    return
                chunk = _decoded(payload)
                if "error" in chunk:
                    raise _error(chunk, str(chunk["error"]))
                yield chunk

    @contextmanager
    def _open(
        self, method: str, path: str, limit_s: float, body: bytes | None = None, *, any_status: bool = False
    ) -> Iterator[tuple[http.client.HTTPResponse, Deadline]]:
        """Yield the answer of a request, if its status is 200 or may be any, and its deadline, at first `limit_s`."""
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        connection, start = connection_to(self.url)
        with closing(connection), ExitStack() as entered:
            deadline = None
            try:
                try:
                    connection.connect()
                    cut = partial(cut_connection, connection.sock)
                    deadline = entered.enter_context(Deadline(limit_s, cut))
                    connection.sock.settimeout(limit_s)
                    connection.request(method, f"{start}{path}", body, {"Content-Type": "application/json"} | key)
                    answer = entered.enter_context(connection.getresponse())
                except ssl.SSLCertVerificationError as wrong:
                    raise ChatError(f"{self.url}: {wrong.verify_message}; {_trust_hint()}") from None
                except (OSError, http.client.HTTPException) as wrong:
                    reason = getattr(wrong, "strerror", None) or wrong
                    raise ChatError(
                        f"nothing answers at {self.url}: {reason}; does `{COMMAND} up` run? (--state)"
                    ) from None
                if answer.status != HTTPStatus.OK and not any_status:
                    status = f"status {answer.status} from {self.url}{path}"
                    refusal = _error(_read(answer, LINE_LIMIT_BYTES, f"{status}, whose text"), status)
                    keyless = answer.status == HTTPStatus.UNAUTHORIZED
                    raise ChatError(f"{str(refusal).rstrip('.')}; {KEY_HINT}") if keyless else refusal
                yield answer, deadline
            except ChatError:
                if deadline is None or not deadline.late:
                    raise
            if deadline is not None and deadline.late:  # also if the body seems to have ended, which a cut may do
                raise ChatError(f"{self.url}{path} did not go on within {limit_s:g} s")


def connection_to(url: str) -> tuple[http.client.HTTPConnection, str]:
    """Return a connection that is not open yet, and the beginning of its paths. Raise ConfigError."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {url}: not an address such as http://127.0.0.1:8000/v1")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.hostname, parts.port, timeout=CONNECT_LIMIT_S), parts.path
    except (ValueError, http.client.InvalidURL) as wrong:
        raise ConfigError(f"--url {url}: {wrong}") from None


@contextmanager
def _broken_off(what: str) -> Iterator[None]:
    """Translate what a read raises if the connection ends first."""
    try:
        yield
    except (OSError, http.client.HTTPException) as wrong:
        raise ChatError(f"{what} broke off: {wrong}") from None


def _read(answer: http.client.HTTPResponse, limit_bytes: int, what: str) -> dict[str, Any]:
    """Return a whole body, as `_decoded` does. Raise ChatError if it breaks off or is too long."""
    with _broken_off(what):
        body = answer.read(limit_bytes + 1)
    if len(body) > limit_bytes:
        raise ChatError(f"{what} has more than {limit_bytes} bytes")
    if answer.length:  # what was announced and did not come
        raise ChatError(f"{what} broke off: {answer.length} bytes are missing")
    return _decoded(body)


def _trust_hint() -> str:
    """Say how to trust a certificate. OpenSSL reports no error if the file is missing: it then trusts none."""
    named = os.environ.get("SSL_CERT_FILE", "")
    if named and not Path(named).is_file():
        return f"SSL_CERT_FILE is {named}, which does not exist"
    return "set SSL_CERT_FILE to a file with the certificates to trust"


def _decoded(text: bytes) -> dict[str, Any]:
    """Return a JSON object; an empty one if the text is anything else."""
    try:
        decoded = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _error(said: Mapping[str, Any], otherwise: str) -> ChatError:
    """Return the error that an answer or a chunk reports."""
    error = said.get("error")
    if not isinstance(error, dict):
        return ChatError(otherwise)
    return ChatError(str(error.get("message") or otherwise), str(error.get("code") or ""))
