"""`headrace chat "…"`: sends one question to the frontend and streams the answer to the terminal."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import sys
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from shared.errors import HeadraceError

CONNECT_LIMIT_S = 10.0
SILENCE_LIMIT_S = 600.0
"""The longest wait for the next piece of the answer: a long prompt takes a while on a slow machine."""
LINE_LIMIT_BYTES = 1 << 20
KEY_HINT = "give the key with --api-key-file FILE or in the environment variable OPENAI_API_KEY"


class ChatError(HeadraceError):
    """The frontend did not answer, or answered with an error."""


def chat(
    url: str,
    question: str,
    *,
    model: str = "",
    max_tokens: int = 512,
    temperature: float = 0.0,
    api_key: str = "",
) -> None:
    """Print the answer to stdout as it arrives, and the usage to stderr. `url` ends with /v1. Raises ChatError."""
    body = {
        "model": model or _only_model(url, api_key),
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    usage: dict[str, Any] = {}
    with _open(url, api_key, "POST", "/chat/completions", json.dumps(body).encode()) as answer:
        for chunk in _events(answer):
            if "error" in chunk:
                raise ChatError(f"\n{chunk['error'].get('message', chunk['error'])}")
            for choice in chunk.get("choices", []):
                sys.stdout.write(choice.get("delta", {}).get("content") or "")
                sys.stdout.flush()
            usage = chunk.get("usage") or usage
    sys.stdout.write("\n")
    sys.stdout.flush()
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    print(
        f"[{usage.get('prompt_tokens', '?')} prompt tokens, {cached} of them cached; "
        f"{usage.get('completion_tokens', '?')} generated]",
        file=sys.stderr,
    )


def _only_model(url: str, api_key: str) -> str:
    """Return the name of the first model served."""
    with _open(url, api_key, "GET", "/models") as answer:
        models = json.load(answer).get("data", [])
    if not models:
        raise ChatError("no model is served yet; see ./headrace status")
    return str(models[0]["id"])


def _open(url: str, api_key: str, method: str, path: str, body: bytes | None = None) -> IO[bytes]:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=CONNECT_LIMIT_S)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        connection.connect()
        connection.sock.settimeout(SILENCE_LIMIT_S)
        connection.request(method, f"{parts.path}{path}", body, headers)
        answer = connection.getresponse()
    except ssl.SSLCertVerificationError as wrong:
        connection.close()
        raise ChatError(f"{url}: {wrong.verify_message}; {_trust_hint()}") from None
    except OSError as wrong:
        connection.close()
        raise ChatError(
            f"nothing answers at {url}: {wrong.strerror or wrong}; does `./headrace up` run? (--state)"
        ) from None
    if answer.status != 200:
        text = answer.read(LINE_LIMIT_BYTES)
        connection.close()
        message = _message(text) or f"status {answer.status} from {url}{path}"
        keyless = answer.status == HTTPStatus.UNAUTHORIZED
        raise ChatError(f"{message.rstrip('.') + '; ' + KEY_HINT if keyless else message}")
    return answer


def _trust_hint() -> str:
    """Say how to trust a certificate. OpenSSL reports no error if the file is missing: it then trusts none."""
    named = os.environ.get("SSL_CERT_FILE", "")
    if named and not Path(named).is_file():
        return f"SSL_CERT_FILE is {named}, which does not exist"
    return "set SSL_CERT_FILE to a file with the certificates to trust"


def _message(text: bytes) -> str:
    """Return the message of an OpenAI error object, or an empty string."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""


def _events(answer: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the JSON chunks of an SSE stream up to [DONE]. Raises ChatError if the stream ends before."""
    while line := answer.readline(LINE_LIMIT_BYTES):
        if not line.startswith(b"data: "):
            continue
        payload = line.removeprefix(b"data: ").strip()
        if payload == b"[DONE]":
            return
        yield json.loads(payload)
    raise ChatError("\nthe answer broke off")
