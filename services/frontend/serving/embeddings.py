"""Embeddings: vectors of texts, for /v1/embeddings.

    EmbeddingRequest ─▶ find the model ─▶ inputs to tokens ─┬▶ InferenceRequest ─▶ vector ─┬▶ cut ─▶ written in turns
                                                            ├▶ …     `inputs_at_once`      │
                                                            └▶ …                           ┘

Each input is a request of its own to routers and workers. So it is routed by itself, and computed again if its worker
is lost. If one input fails for good, all do. A large answer has some 85 MB: it is written in turns of NUMBERS_PER_TURN,
and other tasks run between them.

One request for all inputs would put 2,048 texts on one worker, and lose all with it.
"""

from __future__ import annotations

import asyncio
from binascii import b2a_base64
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import nullcontext
from math import hypot
from struct import pack, unpack
from typing import Any

import msgspec
from msgspec import Struct

from services.frontend.auth.accounts import TokenUse
from services.frontend.models.encode_pool import EncodePool
from services.frontend.models.model import Model, ModelLimits
from services.frontend.models.preprocess import CHARACTERS_PER_TURN, check_encoded, check_vocabulary, encode
from services.frontend.models.registry import ModelRegistry
from services.frontend.output.output import Output
from services.frontend.protocol import embeddings
from services.frontend.protocol.errors import field_error
from services.frontend.requests.admission import Permit
from services.frontend.requests.service import RequestService
from services.frontend.requests.stream import InferenceRequest
from services.frontend.requests.terms import deadline_of, served_priority
from services.frontend.serving.prompts import KNOWN, key_pool, until
from services.frontend.serving.request_context import RequestContext
from shared.errors import HeadraceError, InvalidRequest, RequestTimeout
from shared.hashing import pack_hashes, pack_tokens, seed_of, sequence_hashes
from shared.messages.cards import Pooling
from shared.messages.generate import Sampling

NUMBERS_PER_TURN = 8192
"""The count of numbers that are written before other tasks run: about a millisecond."""
_JOINED_BYTES = 1 << 20
"""The size from which an answer is joined in a thread, where `bytes.join` releases Python's lock."""


class ServingEmbeddings(Struct, frozen=True):
    """Answers requests for embeddings."""

    service: RequestService
    models: ModelRegistry
    pool: EncodePool

    async def answer(
        self,
        request: embeddings.EmbeddingRequest,
        context: RequestContext,
        bare: Callable[[int], dict[str, Any]] | None = None,
    ) -> bytes:
        """Return the JSON answer, and note what it cost its key. With `bare`, it has the vectors alone in
        `embeddings`, and what `bare` returns for the count of tokens. Raise InvalidRequest, Overloaded, RateLimited,
        Unavailable and RequestTimeout."""
        loop = asyncio.get_running_loop()
        deadline = deadline_of(request.deadline_s, context.deadline_header, context.received_s, self.service.limits)
        priority = served_priority(request.priority, context.lowest_priority)
        await until(deadline.at, KNOWN, self.models.wait_expected(request.model))
        context.permit.model = self.models.base_of(request.model)
        trace = context.trace
        if trace is not None:
            trace.attributes["gen_ai.request.model"] = request.model or ""
        model, limits = self.models.find(request.model)
        sampling, dimensions = _pooled(request, model, limits)
        inputs = embeddings.inputs_of(request)
        if len(inputs) * dimensions > embeddings.NUMBERS_LIMIT:
            wrong = f"input: {len(inputs)} vectors of {dimensions} numbers, more than {embeddings.NUMBERS_LIMIT} in all"
            raise InvalidRequest(f"{wrong}; ask for fewer, or for fewer `dimensions`", param="input")
        at_once = min(len(inputs), self.service.limits.inputs_at_once, self.service.limits.requests)
        context.permit.check_least(len(inputs), at_once, loop.time())
        with nullcontext() if trace is None else trace.span("tokenise"):
            reading = self._prompts(inputs, model, limits, context.permit)
            prompts = await until(deadline.at, "its input was tokenised", reading)
        as_text, salt, unique = request.encoding_format == "base64", context.salt(request.cache_salt), context.id.unique
        del request, inputs
        tokens, permit = sum(map(len, prompts)) // 4, context.permit
        if trace is not None:
            trace.attributes |= {"gen_ai.response.model": model.name, "gen_ai.usage.input_tokens": tokens}
        permit.add_tokens(tokens + len(prompts) * dimensions, at_once)
        permit.charge(tokens, loop.time())
        vectors = _Vectors(
            self.service, model, sampling, limits.embedding_size, salt, prompts, context, deadline.at, priority
        )
        try:
            found = await vectors.compute(at_once)
        finally:
            # The same rule as for text before its first token.
            free = vectors.error and not (deadline.shortened and isinstance(vectors.error, RequestTimeout))
            permit.spent = TokenUse(tokens, 0 if free else vectors.begun_tokens)
        usage = embeddings.EmbeddingUsage(tokens, tokens)
        ours = {"model": model.name, "usage": usage, "id": f"embd-{unique}"}
        form = (dimensions, msgspec.json.encode(ours if bare is None else bare(tokens)))
        pieces = [piece async for piece in write_answer(found, *form, as_text=as_text, bare=bare is not None)]
        if sum(map(len, pieces)) < _JOINED_BYTES:
            return b"".join(pieces)
        return await loop.run_in_executor(self.pool.executor, b"".join, pieces)

    async def _prompts(
        self, inputs: dict[str, embeddings.Input], model: Model, limits: ModelLimits, permit: Permit
    ) -> list[bytes]:
        """Return the packed tokens of each input. Raise InvalidRequest that names the input."""
        pool = key_pool(self.pool, permit)
        prompts: list[bytes] = []
        tokens, characters = 0, 0
        for name, given in inputs.items():
            characters += len(given)
            if characters > CHARACTERS_PER_TURN:
                characters = 0
                await asyncio.sleep(0)
            if isinstance(given, str):
                prompt = await encode(model, given, pool, special=True, param=name, most=limits.context_length)
                check_encoded(model, prompt, limits, param=name)
            else:
                _check_length(len(given), limits, name)
                check_vocabulary(given, limits, param=name)
                prompt = pack_tokens(given)
            _check_length(len(prompt) // 4, limits, name)
            tokens += len(prompt) // 4
            if tokens > embeddings.TOKENS_LIMIT:
                raise InvalidRequest(f"input: more than {embeddings.TOKENS_LIMIT} tokens in one request", param=name)
            prompts.append(prompt)
        return prompts


class _Vectors(Struct):
    """The vectors of one request's inputs, some of which are computed at the same time."""

    service: RequestService
    model: Model
    sampling: Sampling
    size: int
    """The count of numbers in a worker's vector."""
    salt: str
    prompts: list[bytes]
    context: RequestContext
    deadline: float
    """The time at which the request fails, on the loop's clock."""
    priority: int
    found: dict[int, bytes] = {}
    begun_tokens: int = 0
    """The tokens of the inputs that were sent to workers."""
    error: Exception | None = None
    """Why an input could not be computed."""

    async def compute(self, at_once: int) -> list[bytes]:
        """Compute all vectors, `at_once` at the same time. Raise the error that ended one of them."""
        left = iter(enumerate(self.prompts))
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(at_once):
                    tasks.create_task(self._compute_some(left), name=f"embed {self.context.id.unique} {number}")
        except* HeadraceError as wrong:
            self.error = wrong.exceptions[0]
        if self.error is not None:
            raise self.error
        return [self.found[index] for index in range(len(self.prompts))]

    async def _compute_some(self, left: Iterator[tuple[int, bytes]]) -> None:
        """Compute one input after another, as long as any is left."""
        for index, prompt in left:
            self.begun_tokens += len(prompt) // 4
            with self.service.open(self._request(index, prompt)) as stream:
                async for _ in stream:
                    raise AssertionError("an embedding has no text")
                self.found[index] = stream.embedding

    def _request(self, index: int, prompt: bytes) -> InferenceRequest:
        """Return the request of one input. With mean pooling nothing comes from a cache: such a request has no hashes
        and goes to the least loaded worker."""
        reuses, seed = self.sampling.pooling == "last", seed_of(self.model.lora, self.salt)
        unique = self.context.id.unique
        return InferenceRequest(
            id=unique if len(self.prompts) == 1 else f"{unique}/{index}",
            model=self.model.base,
            lora=self.model.lora,
            prompt=prompt,
            prompt_tokens=len(prompt) // 4,
            hashes=pack_hashes(sequence_hashes(prompt, self.model.block_size, seed)) if reuses else b"",
            sampling=self.sampling,
            salt=self.salt,
            affinity_key="",
            deadline=self.deadline,
            output=Output(self.model.token_bytes, ()),
            embedding_size=self.size,
            trace=self.context.trace,
            priority=self.priority,
            served=self.context.permit.served,
            is_follower=index > 0,  # not refused for waiting for the inputs before it
        )


async def write_answer(
    vectors: Sequence[bytes], dimensions: int, ending: bytes, *, as_text: bool, bare: bool = False
) -> AsyncIterator[bytes]:
    """Yield an EmbeddingAnswer in pieces. Other tasks run after every NUMBERS_PER_TURN.

    `vectors` are packed float32, of which the leading `dimensions` are written, in base64 (`as_text`) or in decimal.
    `ending` is a JSON object of the other fields. `bare`: the vectors alone, in a list named `embeddings`.
    """
    numbers = 0
    yield b'{"embeddings":[' if bare else b'{"object":"list","data":['
    for index, vector in enumerate(vectors):
        if numbers > NUMBERS_PER_TURN:
            numbers = 0
            await asyncio.sleep(0)
        numbers += len(vector) // 4
        left = _cut(vector, dimensions)
        text = b'"' + b2a_base64(left, newline=False) + b'"' if as_text else msgspec.json.encode(_floats(left))
        item = text if bare else b'{"object":"embedding","index":%d,"embedding":%b}' % (index, text)
        yield b"," + item if index else item
    yield b"]," + ending[1:]


def _pooled(request: embeddings.EmbeddingRequest, model: Model, limits: ModelLimits) -> tuple[Sampling, int]:
    """Return how workers make the vectors, and the count of leading numbers that the client gets. Raise
    InvalidRequest."""
    size = limits.embedding_size
    if not size:
        raise field_error(
            "model",
            f"not every worker of {model.name!r} makes embeddings (vLLM does with worker.vllm.runner=pooling)",
            "unsupported_value",
        )
    pooling: Pooling = request.pooling or limits.pooling
    if not pooling:
        why = f"{model.name!r} has a kind of pooling that is not supported; ask for mean or last"
        raise field_error("pooling", why, "unsupported_value")
    dimensions = request.dimensions or size
    if dimensions > size:
        raise field_error("dimensions", f"{dimensions}, but {model.name!r} has {size}")
    return Sampling(max_tokens=1, pooling=pooling), dimensions


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
