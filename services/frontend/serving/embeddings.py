"""Vectors of texts: /v1/embeddings.

    request ─▶ find the model ─▶ inputs to tokens ─┬▶ Job ─▶ Frontend.open ─▶ vector ─┬▶ cut ─▶ written, in turns
                                                   ├▶ …       `inputs_at_once`        │
                                                   └▶ …                               ┘

Each input is a request of its own to routers and workers, so that it is routed, and computed again when its worker is
lost, by itself. Where one fails for good, all do. A large answer is some 85 MB: it is written in turns of TURN_NUMBERS,
between which others have theirs.
"""

from __future__ import annotations

import asyncio
from binascii import b2a_base64
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Executor
from math import hypot
from struct import pack, unpack

import msgspec
from msgspec import Struct

from services.frontend.auth.accounts import TokenUse
from services.frontend.models.model import Model, ModelLimits
from services.frontend.models.preprocess import TURN_CHARACTERS, check_encoded, check_vocabulary, encode
from services.frontend.models.registry import ModelRegistry
from services.frontend.output.output import Output
from services.frontend.protocol.embeddings import (
    NUMBERS_LIMIT,
    TOKENS_LIMIT,
    EmbeddingRequest,
    EmbeddingUsage,
    Input,
    inputs_of,
)
from services.frontend.requests.deadline import deadline_of
from services.frontend.requests.service import RequestService
from services.frontend.requests.stream import InferenceRequest
from services.frontend.serving.request_context import RequestContext
from shared.errors import HeadraceError, InvalidRequest, RequestTimeout
from shared.hashing import pack_hashes, pack_tokens, seed_of, sequence_hashes
from shared.messages import Pooling, Sampling

TURN_NUMBERS = 8192
"""Written before others have a turn: 1 ms or so."""
_JOINED_BYTES = 1 << 20
"""An answer longer than this is put together in a thread: `bytes.join` lets go of Python's lock for that."""


class _Asked(Struct, frozen=True):
    """What is asked of each input."""

    model: Model
    sampling: Sampling
    size: int
    """Numbers that workers answer with …"""
    dimensions: int
    """… and those that are left of them."""
    salt: str
    unique: str
    """The name of the whole request."""

    def job(self, name: str, prompt: bytes, *, follows: bool) -> InferenceRequest:
        """A mean takes nothing from a cache: it has no hashes, and goes where there is least to do."""
        reuses = self.sampling.pooling == "last"
        seed = seed_of("", self.salt)
        return InferenceRequest(
            id=name,
            model=self.model.name,
            prompt=prompt,
            prompt_tokens=len(prompt) // 4,
            hashes=pack_hashes(sequence_hashes(prompt, self.model.block_size, seed)) if reuses else b"",
            sampling=self.sampling,
            salt=self.salt,
            affinity_key="",
            embedding_size=self.size,
            is_follower=follows,
        )


class ServingEmbeddings:
    """Answers such requests."""

    def __init__(self, frontend: RequestService, models: ModelRegistry, pool: Executor) -> None:
        self._frontend = frontend
        self._models = models
        self._pool = pool

    async def answer(self, request: EmbeddingRequest, asking: RequestContext) -> bytes:
        """JSON. Says what it has cost its key. Raises InvalidRequest, Unavailable and RequestTimeout."""
        loop = asyncio.get_running_loop()
        deadline = deadline_of(request.deadline_s, asking.deadline_header, asking.received_s, self._frontend.limits)
        model, limits = self._models.find(request.model)
        asked = _asked(request, model, limits, asking.id.unique)
        inputs = inputs_of(request)
        if len(inputs) * asked.dimensions > NUMBERS_LIMIT:
            wrong = f"input: {len(inputs)} vectors of {asked.dimensions} numbers, more than {NUMBERS_LIMIT} in all"
            raise InvalidRequest(f"{wrong}; ask for fewer, or for fewer `dimensions`", param="input")
        try:
            async with asyncio.timeout_at(deadline.at):
                prompts = await self._prompts(inputs, model, limits)
        except TimeoutError:
            raise RequestTimeout("the request's deadline passed before its input was tokenised") from None
        as_text = request.encoding_format == "base64"
        del request, inputs
        tokens, place = sum(map(len, prompts)) // 4, asking.permit
        at_once = min(len(prompts), self._frontend.limits.inputs_at_once, self._frontend.limits.requests)
        place.add_tokens(tokens + len(prompts) * asked.dimensions, at_once)
        if place.account is not None:
            place.account.charge_tokens(tokens, loop.time())
        vectors = _Vectors(self._frontend, asked, prompts, deadline.at)
        try:
            await vectors.compute(at_once)
        finally:
            # As for other requests before their first token.
            free = vectors.failed and not (deadline.shortened and vectors.late)
            place.spent = TokenUse(tokens, 0 if free else vectors.begun_tokens)
        usage = EmbeddingUsage(tokens, tokens)
        ending = msgspec.json.encode({"model": model.name, "usage": usage, "id": f"embd-{asked.unique}"})
        pieces = [piece async for piece in write_answer(vectors.found, asked.dimensions, ending, as_text=as_text)]
        if sum(map(len, pieces)) < _JOINED_BYTES:
            return b"".join(pieces)
        return await loop.run_in_executor(self._pool, b"".join, pieces)

    async def _prompts(self, inputs: dict[str, Input], model: Model, limits: ModelLimits) -> list[bytes]:
        """Packed tokens. Raises InvalidRequest, naming the input."""
        prompts: list[bytes] = []
        tokens, characters = 0, 0
        for name, given in inputs.items():
            characters += len(given)
            if characters > TURN_CHARACTERS:
                characters = 0
                await asyncio.sleep(0)
            if isinstance(given, str):
                prompt = await encode(model, given, self._pool, special=True, param=name)
                check_encoded(model, prompt, limits, param=name)
            else:
                _check_length(len(given), limits, name)
                check_vocabulary(given, limits, param=name)
                prompt = pack_tokens(given)
            _check_length(len(prompt) // 4, limits, name)
            tokens += len(prompt) // 4
            if tokens > TOKENS_LIMIT:
                raise InvalidRequest(f"input: more than {TOKENS_LIMIT} tokens in one request", param=name)
            prompts.append(prompt)
        return prompts


class _Vectors:
    """The inputs of one request on their way, some at once."""

    def __init__(self, frontend: RequestService, asked: _Asked, prompts: Sequence[bytes], deadline: float) -> None:
        self._frontend = frontend
        self._asked = asked
        self._deadline = deadline
        self._left: Iterator[tuple[int, bytes]] = iter(enumerate(prompts))
        self._alone = len(prompts) == 1
        self.found = [b""] * len(prompts)
        self.begun_tokens = 0
        """Of the inputs that were asked for."""
        self.failed = self.late = False
        """One could not be computed, or not in time."""

    async def compute(self, at_once: int) -> None:
        """Until all are found. Raises what ended one of them."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(at_once):
                    tasks.create_task(self._some(), name=f"embed {self._asked.unique} {number}")
        except* HeadraceError as wrong:
            self.failed = True
            first = wrong.exceptions[0]
        else:
            return
        self.late = isinstance(first, RequestTimeout)
        raise first

    async def _some(self) -> None:
        """One after another, as long as there are any that no other task has taken."""
        for index, prompt in self._left:
            name = self._asked.unique if self._alone else f"{self._asked.unique}/{index}"
            self.begun_tokens += len(prompt) // 4
            job = self._asked.job(name, prompt, follows=index > 0)  # else it could be refused for its own inputs
            nothing = Output(self._asked.model.token_bytes, ())
            async with self._frontend.open(job, nothing, self._deadline) as stream:
                async for _ in stream:
                    raise AssertionError("what is embedded says nothing")
                self.found[index] = stream.embedding


async def write_answer(
    vectors: Sequence[bytes], dimensions: int, ending: bytes, *, as_text: bool
) -> AsyncIterator[bytes]:
    """An EmbeddingAnswer in pieces: of float32 vectors the leading `dimensions`, in base64 or in decimal. `ending` is a
    JSON object of the other fields. The loop has a turn every TURN_NUMBERS."""
    numbers = 0
    yield b'{"object":"list","data":['
    for index, vector in enumerate(vectors):
        if numbers > TURN_NUMBERS:
            numbers = 0
            await asyncio.sleep(0)
        numbers += len(vector) // 4
        left = _cut(vector, dimensions)
        text = b'"' + b2a_base64(left, newline=False) + b'"' if as_text else msgspec.json.encode(_floats(left))
        yield b'%b{"object":"embedding","index":%d,"embedding":%b}' % (b"," if index else b"", index, text)
    yield b"]," + ending[1:]


def _asked(request: EmbeddingRequest, model: Model, limits: ModelLimits, unique: str) -> _Asked:
    """Raises InvalidRequest."""
    size = limits.embedding_size
    if not size:
        wrong = f"model: not every worker of {model.name!r} embeds"
        raise InvalidRequest(wrong, param="model", code="unsupported_value")
    pooling: Pooling = request.pooling or limits.pooling
    if not pooling:
        wrong = f"pooling: what {model.name!r} is meant for is not built; mean and last are"
        raise InvalidRequest(wrong, param="pooling", code="unsupported_value")
    dimensions = request.dimensions or size
    if dimensions > size:
        raise InvalidRequest(f"dimensions: {dimensions}, but {model.name!r} has {size}", param="dimensions")
    sampling = Sampling(max_tokens=1, pooling=pooling)
    return _Asked(model, sampling, size, dimensions, request.cache_salt or "", unique)


def _check_length(tokens: int, limits: ModelLimits, name: str) -> None:
    """Raises InvalidRequest."""
    if not tokens:
        raise InvalidRequest(f"{name} has no tokens", param=name)
    if tokens > limits.context_length:
        wrong = f"{name} has {tokens} tokens; the model's context is {limits.context_length}"
        raise InvalidRequest(wrong, param=name, code="context_length_exceeded")


def _cut(vector: bytes, dimensions: int) -> bytes:
    """The leading ones, scaled to length 1 again."""
    if len(vector) == 4 * dimensions:
        return vector
    numbers = _floats(vector[: 4 * dimensions])
    length = hypot(*numbers) or 1.0
    return pack(f"<{dimensions}f", *(number / length for number in numbers))


def _floats(vector: bytes) -> tuple[float, ...]:
    return unpack(f"<{len(vector) // 4}f", vector)
