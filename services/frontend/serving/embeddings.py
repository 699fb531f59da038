"""Embeddings: vectors of texts, for /v1/embeddings.

    EmbeddingRequest ─▶ find the model ─▶ inputs to tokens ─┬▶ InferenceRequest ─▶ vector ─┬▶ cut ─▶ written in turns
                                                            ├▶ …     `inputs_at_once`      │
                                                            └▶ …                           ┘

Each input is a request of its own to routers and workers. So it is routed by itself, and computed again if its worker
is lost. If one input fails for good, all do. A large answer has some 85 MB: it is written in turns of NUMBERS_PER_TURN,
and other tasks run between them.
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
from services.frontend.models.preprocess import CHARACTERS_PER_TURN, check_encoded, check_vocabulary, encode
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

NUMBERS_PER_TURN = 8192
"""The count of numbers that are written before other tasks run: about a millisecond."""
_JOINED_BYTES = 1 << 20
"""The size from which an answer is joined in a thread, where `bytes.join` releases Python's lock."""


class _EmbeddingPlan(Struct, frozen=True):
    """What all inputs of one request have in common."""

    model: Model
    sampling: Sampling
    size: int
    """The count of numbers in a worker's vector."""
    dimensions: int
    """The count of leading numbers that the client gets."""
    salt: str
    unique: str
    """The id of the whole request."""
    deadline: float
    """The time at which the request fails, on the loop's clock."""

    def inference_request(self, name: str, prompt: bytes, *, is_follower: bool) -> InferenceRequest:
        """Return the request of one input. With mean pooling nothing comes from a cache: such a request has no hashes
        and goes to the least loaded worker."""
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
            deadline=self.deadline,
            output=Output(self.model.token_bytes, ()),
            embedding_size=self.size,
            is_follower=is_follower,
        )


class ServingEmbeddings:
    """Answers requests for embeddings."""

    def __init__(self, service: RequestService, models: ModelRegistry, pool: Executor) -> None:
        self._service = service
        self._models = models
        self._pool = pool

    async def answer(self, request: EmbeddingRequest, context: RequestContext) -> bytes:
        """Return the JSON answer, and note what it cost its key. Raises InvalidRequest, Overloaded, RateLimited,
        Unavailable and RequestTimeout."""
        loop = asyncio.get_running_loop()
        deadline = deadline_of(request.deadline_s, context.deadline_header, context.received_s, self._service.limits)
        model, limits = self._models.find(request.model)
        plan = _plan(request, model, limits, context.id.unique, deadline.at)
        inputs = inputs_of(request)
        if len(inputs) * plan.dimensions > NUMBERS_LIMIT:
            wrong = f"input: {len(inputs)} vectors of {plan.dimensions} numbers, more than {NUMBERS_LIMIT} in all"
            raise InvalidRequest(f"{wrong}; ask for fewer, or for fewer `dimensions`", param="input")
        try:
            async with asyncio.timeout_at(deadline.at):
                prompts = await self._prompts(inputs, model, limits)
        except TimeoutError:
            raise RequestTimeout("the request's deadline passed before its input was tokenised") from None
        as_text = request.encoding_format == "base64"
        del request, inputs
        tokens, permit = sum(map(len, prompts)) // 4, context.permit
        at_once = min(len(prompts), self._service.limits.inputs_at_once, self._service.limits.requests)
        permit.add_tokens(tokens + len(prompts) * plan.dimensions, at_once)
        if permit.account is not None:
            permit.account.charge_tokens(tokens, loop.time())
        vectors = _Vectors(self._service, plan, prompts)
        try:
            await vectors.compute(at_once)
        finally:
            # The same rule as for text before its first token.
            free = vectors.failed and not (deadline.shortened and vectors.timed_out)
            permit.spent = TokenUse(tokens, 0 if free else vectors.begun_tokens)
        usage = EmbeddingUsage(tokens, tokens)
        ending = msgspec.json.encode({"model": model.name, "usage": usage, "id": f"embd-{plan.unique}"})
        pieces = [piece async for piece in write_answer(vectors.found, plan.dimensions, ending, as_text=as_text)]
        if sum(map(len, pieces)) < _JOINED_BYTES:
            return b"".join(pieces)
        return await loop.run_in_executor(self._pool, b"".join, pieces)

    async def _prompts(self, inputs: dict[str, Input], model: Model, limits: ModelLimits) -> list[bytes]:
        """Return the packed tokens of each input. Raises InvalidRequest that names the input."""
        prompts: list[bytes] = []
        tokens, characters = 0, 0
        for name, given in inputs.items():
            characters += len(given)
            if characters > CHARACTERS_PER_TURN:
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
    """The inputs of one request, some of which are computed at the same time."""

    def __init__(self, service: RequestService, plan: _EmbeddingPlan, prompts: Sequence[bytes]) -> None:
        self._service = service
        self._plan = plan
        self._left: Iterator[tuple[int, bytes]] = iter(enumerate(prompts))
        self._alone = len(prompts) == 1
        self.found = [b""] * len(prompts)
        self.begun_tokens = 0
        """The tokens of the inputs that were sent to workers."""
        self.failed = self.timed_out = False
        """Whether an input could not be computed; whether that was because time was over."""

    async def compute(self, at_once: int) -> None:
        """Compute all vectors, `at_once` at the same time. Raises the error that ended one of them."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(at_once):
                    tasks.create_task(self._some(), name=f"embed {self._plan.unique} {number}")
        except* HeadraceError as wrong:
            self.failed = True
            first = wrong.exceptions[0]
        else:
            return
        self.timed_out = isinstance(first, RequestTimeout)
        raise first

    async def _some(self) -> None:
        """Compute one input after another, as long as any is left."""
        for index, prompt in self._left:
            name = self._plan.unique if self._alone else f"{self._plan.unique}/{index}"
            self.begun_tokens += len(prompt) // 4
            # As followers, inputs are not refused for waiting for those before them.
            request = self._plan.inference_request(name, prompt, is_follower=index > 0)
            async with self._service.open(request) as stream:
                async for _ in stream:
                    raise AssertionError("an embedding has no text")
                self.found[index] = stream.embedding


async def write_answer(
    vectors: Sequence[bytes], dimensions: int, ending: bytes, *, as_text: bool
) -> AsyncIterator[bytes]:
    """Yield an EmbeddingAnswer in pieces. Other tasks run after every NUMBERS_PER_TURN.

    `vectors` are packed float32, of which the leading `dimensions` are written, in base64 (`as_text`) or in decimal.
    `ending` is a JSON object of the other fields.
    """
    numbers = 0
    yield b'{"object":"list","data":['
    for index, vector in enumerate(vectors):
        if numbers > NUMBERS_PER_TURN:
            numbers = 0
            await asyncio.sleep(0)
        numbers += len(vector) // 4
        left = _cut(vector, dimensions)
        text = b'"' + b2a_base64(left, newline=False) + b'"' if as_text else msgspec.json.encode(_floats(left))
        yield b'%b{"object":"embedding","index":%d,"embedding":%b}' % (b"," if index else b"", index, text)
    yield b"]," + ending[1:]


def _plan(request: EmbeddingRequest, model: Model, limits: ModelLimits, unique: str, deadline: float) -> _EmbeddingPlan:
    """Return what all inputs have in common. Raises InvalidRequest."""
    size = limits.embedding_size
    if not size:
        wrong = f"model: not every worker of {model.name!r} makes embeddings"
        raise InvalidRequest(wrong, param="model", code="unsupported_value")
    pooling: Pooling = request.pooling or limits.pooling
    if not pooling:
        wrong = f"pooling: {model.name!r} has a kind of pooling that is not supported; ask for mean or last"
        raise InvalidRequest(wrong, param="pooling", code="unsupported_value")
    dimensions = request.dimensions or size
    if dimensions > size:
        raise InvalidRequest(f"dimensions: {dimensions}, but {model.name!r} has {size}", param="dimensions")
    sampling = Sampling(max_tokens=1, pooling=pooling)
    return _EmbeddingPlan(model, sampling, size, dimensions, request.cache_salt or "", unique, deadline)


def _check_length(tokens: int, limits: ModelLimits, name: str) -> None:
    """Raise InvalidRequest for an empty input, and for one that does not fit the context."""
    if not tokens:
        raise InvalidRequest(f"{name} has no tokens", param=name)
    if tokens > limits.context_length:
        wrong = f"{name} has {tokens} tokens; the model's context is {limits.context_length}"
        raise InvalidRequest(wrong, param=name, code="context_length_exceeded")


def _cut(vector: bytes, dimensions: int) -> bytes:
    """Return the leading numbers, scaled to length 1 again."""
    if len(vector) == 4 * dimensions:
        return vector
    numbers = _floats(vector[: 4 * dimensions])
    length = hypot(*numbers) or 1.0
    return pack(f"<{dimensions}f", *(number / length for number in numbers))


def _floats(vector: bytes) -> tuple[float, ...]:
    return unpack(f"<{len(vector) // 4}f", vector)
