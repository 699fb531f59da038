"""Server: the HTTP client of an attached server. It turns every fault into an error that names the setting."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, Container
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError
from msgspec.structs import replace
from tokenizers import Tokenizer

from services.worker.attached.api import Api, ServerLoad, ServerOutput, read_metrics
from services.worker.config import AttachedConfig, WorkerConfig
from services.worker.contracts.messages import Ready, Submit
from services.worker.vllm.sampling import refusal
from shared.errors import MALFORMED, ConfigError, InvalidRequest, Unavailable
from shared.outbound import TlsFiles, TlsNames, describe_fault, open_connector, read_key, read_tls

ANSWER_LIMIT_BYTES = 8 << 20
"""Most bytes of an answer, or of a line of a stream, whose first one repeats the prompt."""
ALIAS_CHARACTERS = 512
"""Most characters of the server's own name for its model. If it is longer, clients do not have it."""
ABSENT = (404, 405)
"""Statuses of a path that a server does not have."""
TLS_NAMES = TlsNames("attached.ca_file", "attached.client_cert", "attached.client_key")
TEXT = "Grüße, 世界! 1234 tokens\n\tof <b>one</b> tokenizer."
"""What both sides tokenise, to compare them."""


class Server:
    """One server. `close` ends it."""

    def __init__(self, config: AttachedConfig, api: Api, connections: int) -> None:
        """`connections` is the most requests at once. Raise ConfigError for the files of the key and of TLS."""
        self._config, self._api, self._url = config, api, config.url.rstrip("/")
        self._model, self._context_length, self._vocab_size = config.model, 0, 0
        self.decode_events = api.events
        """Reads a batch of its KV events. Raises msgspec.MsgspecError."""
        key, tls = read_files(config)
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            connector=open_connector(config.ip, tls, most=connections),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=config.limit_s),
            json_serialize=lambda body: msgspec.json.encode(body).decode(),  # five times as fast for a long prompt
            read_bufsize=ANSWER_LIMIT_BYTES // 2,  # aiohttp's lines may be twice as long
        )

    async def close(self) -> None:
        await self._session.close()

    async def ask(self, path: str, body: dict[str, Any] | None = None, *, empty: Container[int] = ()) -> bytes:
        """Return an answer; empty if its status is one of `empty`. Raise ConfigError, InvalidRequest, Unavailable."""
        content = bytearray()
        try:
            async with asyncio.timeout(self._config.limit_s), self._request(path, body) as answer:
                if answer.status in empty:
                    return b""
                await self._check(answer, path)
                async for chunk in answer.content.iter_any():
                    content += chunk
                    if len(content) > ANSWER_LIMIT_BYTES:
                        raise self._fault(path, f"answers more than {ANSWER_LIMIT_BYTES} bytes")
        except TimeoutError:
            raise self._fault(path, f"did not answer in {self._config.limit_s:g} s") from None
        except (aiohttp.ClientError, OSError, HttpProcessingError, ValueError) as wrong:
            raise self._fault(path, f"does not answer: {describe_fault(wrong, TLS_NAMES.ca_file)}") from None
        return bytes(content)

    async def generate(self, submit: Submit) -> AsyncGenerator[ServerOutput]:
        """Yield the outputs of an attempt. Closing the generator closes the connection, so the server ends the attempt.
        Raise as `ask`."""
        sampling, continued = submit.sampling, len(submit.tokens) // 4 - submit.prompt_tokens
        fault = refusal(sampling, continued=continued)
        if fault or submit.lora:
            raise InvalidRequest(fault or f"lora: {submit.lora}: an attached server's LoRAs are not served")
        room, seen = self._context_length - submit.prompt_tokens, 0
        limits = {"max_tokens": min(sampling.max_tokens, room), "min_tokens": min(sampling.min_tokens, room)}
        allowed = limits["max_tokens"] - continued
        params: dict[str, Any] = {}
        for row in self._api.rows.values():
            params |= row(replace(sampling, **limits), continued)
        try:
            async with self._request(
                self._api.path, self._api.body(submit, self._config, self._model, params)
            ) as answer:
                await self._check(answer, self._api.path)
                async for line in answer.content:
                    if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                        output = self._api.read(line[5:], submit, seen)
                        if not all(0 <= token < self._vocab_size for token in output.tokens):
                            raise ValueError(f"token ids are 0 to {self._vocab_size - 1}, not {output.tokens}"[:200])
                        seen += len(output.tokens)
                        if seen > allowed:
                            raise ValueError(f"it sends more than the {allowed} tokens that it was asked for")
                        yield output
        # A line is too long, or no JSON, or nested too deeply.
        except (aiohttp.ClientError, HttpProcessingError, OSError, ValueError, RecursionError) as wrong:
            raise self._fault(self._api.path, f"broke off: {describe_fault(wrong, TLS_NAMES.ca_file)}") from None

    async def load(self) -> ServerLoad | None:
        """Return the load of a healthy server; None if it shows no metrics. Raise as `ask`."""
        await self.ask("/health")
        metrics = await self.ask("/metrics", empty=ABSENT)
        try:
            return read_metrics(metrics.decode(errors="replace"), self._api.metrics) if metrics else None
        except ValueError as wrong:
            raise self._fault("/metrics", f"cannot be read: {wrong}") from None

    async def facts(self, local: Ready, config: WorkerConfig, name: str) -> Ready:
        """Return what the server serves, as far as one can ask, and from here on use its model. `local` is what the
        worker's files say, `name` the model's name. Raise ConfigError, Unavailable."""
        await self._find_model(local, name)
        path, read = self._api.sizes
        block_size, blocks, ranks = read((await self.ask(path, empty=ABSENT)).decode(errors="replace"))
        if config.attached.events and ranks > 1:
            raise ConfigError(f"attached.events: leave it out: {self._url} has {ranks} data-parallel ranks")
        if block_size and config.block_size not in (WorkerConfig(model="").block_size, block_size):
            raise ConfigError(f"block_size: {config.block_size}: set {block_size}, as {self._url} has")
        if not blocks and not config.capacity_blocks:
            raise ConfigError(
                f"capacity_blocks, block_size: set them: {self._url} does not show how many blocks it has"
            )
        size = block_size or config.block_size
        return replace(
            local,
            context_length=self._context_length,
            block_size=size,
            capacity_blocks=blocks or config.capacity_blocks,
            kv_layout=replace(local.kv_layout, block_size=size),
            weights="",
            grammars=config.attached.grammars,
            biases=True,
            allowed_tokens=config.attached.kind == "vllm",
            embedding_size=0,
            address=await self.find_address(),
            alias=self._model if self._model != name and len(self._model) <= ALIAS_CHARACTERS else "",
        )

    async def find_address(self) -> str:
        """Return IP:PORT at which a gateway reaches the server. Raise Unavailable."""
        given, url = self._config.address, urlsplit(self._url)
        place = urlsplit(f"//{given}") if given else url
        host = place.hostname if given else self._config.ip or place.hostname
        setting = "address" if given else "url"
        try:
            port = place.port or (443 if url.scheme == "https" else 80)
            async with asyncio.timeout(self._config.limit_s):
                found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, ValueError) as wrong:  # TimeoutError and UnicodeError are among them
            raise Unavailable(f"attached.{setting}: {place.netloc} has no address: {wrong}"[:500]) from None
        ip = min(found, key=lambda one: one[0] != socket.AF_INET)[4][0]  # of a name with both, IPv4
        return f"[{ip}]:{port}" if ":" in str(ip) else f"{ip}:{port}"

    async def _find_model(self, local: Ready, name: str) -> None:
        listed = self._decoded("/v1/models", await self.ask("/v1/models")).get("data")
        models = {str(one.get("id")): one for one in listed or () if isinstance(one, dict) and not one.get("parent")}
        wanted = {self._model} if self._model else {name, Path(local.path).name}
        found = [one for one in models if one in wanted or (not self._model and Path(one).name in wanted)]
        if not found:
            said = f"{self._url} has no model {' or '.join(sorted(wanted))}; it has {', '.join(models) or 'none'}"
            raise ConfigError(f"attached.model: {said}"[:500])
        self._model, length = found[0], models[found[0]].get("max_model_len")
        if length is not None and (type(length) is not int or length < 1):
            raise ConfigError(f"attached.url: {self._url}/v1/models: max_model_len is {str(length)[:64]}")
        self._context_length = length or local.context_length
        self._vocab_size = local.vocab_size
        answer = await self.ask(
            "/tokenize", {"model": self._model, "prompt": TEXT, "add_special_tokens": False}, empty=ABSENT
        )
        file = str(Path(local.path, "tokenizer.json"))
        tokenizer = await asyncio.to_thread(Tokenizer.from_file, file)  # a large one takes half a second
        if answer and self._decoded("/tokenize", answer).get("tokens") != (
            tokenizer.encode(TEXT, add_special_tokens=False).ids
        ):
            raise ConfigError(
                f"attached.url: {self._url} serves another model: its tokenizer is not that of {local.path}"
            )

    def _request(self, path: str, body: dict[str, Any] | None) -> Any:
        method = "GET" if body is None else "POST"
        return self._session.request(method, self._url + path, json=body, allow_redirects=False)

    def _decoded(self, path: str, content: bytes) -> dict[str, Any]:
        try:
            return msgspec.json.decode(content, type=dict[str, Any])
        except MALFORMED as wrong:
            raise ConfigError(str(self._fault(path, f"answers no JSON object: {wrong}"))) from None

    def _fault(self, path: str, what: str) -> Unavailable:
        return Unavailable(f"attached.url: {self._url}{path} {' '.join(what.split())}"[:500])

    async def _check(self, answer: aiohttp.ClientResponse, path: str) -> None:
        """Raise what an answer without success stands for."""
        status = answer.status
        if status == 200:
            return
        text = " ".join((await answer.content.read(4096)).decode(errors="replace").split())[:500]
        said = f"{self._url}{path} answers {status} {text}"
        if status in (401, 403):
            raise ConfigError(f"attached.api_key_file: {said}")
        if status < 400 or status in (404, 405):
            raise ConfigError(f"attached.url: {said}")
        if status in (400, 413, 422):
            raise InvalidRequest(said)
        raise Unavailable(f"attached.url: {said}")


def read_files(config: AttachedConfig) -> tuple[str, ssl.SSLContext | None]:
    """Return the server's key, empty if it needs none, and the TLS to it. Raise ConfigError."""
    tls = read_tls(TlsFiles(config.ca_file, config.client_cert, config.client_key), TLS_NAMES)
    return read_key(config.api_key_file, f"attached.api_key_file: {config.api_key_file}"), tls
