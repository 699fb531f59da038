"""frontend → worker: compute a prompt and decode from it. Pure."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.messages.cards import Pooling
from shared.messages.codec import Codec


class Sampling(Struct, frozen=True):
    """The sampling parameters. The frontend has checked that each is within the range that its comment gives."""

    max_tokens: int
    """The maximum number of tokens, ≥ 1, over all attempts of the request."""
    temperature: float = 1.0
    """The temperature, 0 … 2; 0 is greedy."""
    top_p: float = 1.0
    """The nucleus sampling threshold, 0 < p ≤ 1."""
    top_k: int = 0
    """The number of likeliest tokens to draw from, ≥ 0; 0 is off."""
    min_p: float = 0.0
    """The least probability relative to the likeliest token, 0 … 1."""
    seed: int = 0
    """The random seed, a u64; the frontend draws one if the client gives none."""
    presence_penalty: float = 0.0
    """The presence penalty, -2 … 2, over the tokens produced so far."""
    frequency_penalty: float = 0.0
    """The frequency penalty, -2 … 2, over the tokens produced so far."""
    repetition_penalty: float = 1.0
    """The repetition penalty, > 0, over prompt and output."""
    logprobs: int = -1
    """How many of the likeliest tokens have their log probabilities returned (≤ 20), in addition to the drawn token. -1
    means none at all."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: str = ""
    """The grammar that constrains the whole output, as llguidance reads it (JSON, or its dialect of Lark). Empty if
    there is none. Only for instances whose card has `grammars`, and never with `ignore_eos`."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, each at most once (≤ 300), and the bias that is added to the logit first, -100 … 100. Only for
    instances whose card has `biases`."""
    pooling: Pooling = ""
    """The pooling of an embedding. Empty if the request generates text. With it, no token is drawn, and the attempt's
    only Part has finish "stop", no tokens and an `embedding`. Only for instances whose card has an `embedding_size`,
    and only for a prompt without output; the prompt may fill the context."""
    min_tokens: int = 0
    """The number of tokens, ≤ `max_tokens`, over all attempts of the request, before which no end-of-sequence token and
    no token of `stop_token_ids` is drawn, unless the grammar allows nothing else. Only for instances whose card has
    `min_tokens`."""
    prompt_logprobs: int = -1
    """The log probabilities of the prompt's tokens to return, in numbers as for `logprobs`; they come in
    `Part.prompt_logprobs`. Only for instances whose card has `prompt_logprobs`, and only for a prompt without
    output."""
    allowed_tokens: bytes = b""
    """The token ids that alone may be drawn, packed u32 (≤ 16,384), unless the grammar allows none of them. Empty
    means all. Only for instances whose card has `allowed_tokens`."""


class Image(Struct, frozen=True):
    """An image of the prompt, as the model's processor has prepared it."""

    key: bytes
    """SHA-256 of the source's bytes and of all that prepared it (32 bytes): equal keys mean equal embeddings, as far as
    the model is the same."""
    start: int
    """The index in `Generate.tokens` of the first token that stands for it."""
    tokens: int
    """How many of them there are, all with the id of the card's `ImageInput.token_id`."""
    pixels: bytes
    """RGB, one byte a value, rows from the top: as many as the card's `ImageInput` says."""
    width: int = 0
    """The pixels of a row. 0 means those of the card's `ImageInput`, as for `height`."""
    height: int = 0


FRAMES_PER_S = 16
"""The frames a second of videos, as Wan's pipelines are trained for."""


class Picture(Struct, frozen=True):
    """A picture or a video to make from a text, perhaps together with images. The frontend has checked it against the
    card's `pictures`."""

    prompt: str
    width: int
    """Pixels, as `height`."""
    height: int
    steps: int
    """The number of denoising steps, as many as `Generate.tokens` has tokens."""
    seed: int
    """The random seed, a u64: it alone decides the noise that the picture begins with."""
    negative: str = ""
    """What the picture must not show."""
    guidance: float | None = None
    """How closely it follows the prompt, ≥ 0. None means the pipeline's own default."""
    frames: int = 0
    """The number of a video's frames. 0 for a picture."""
    format: Literal["png", "jpeg", "webp", "mp4"] = "png"
    """The format of the file."""
    previews: int = 0
    """How many times (0 … 3) the unfinished picture is sent."""
    images: tuple[bytes, ...] = ()
    """The images that it is made from, each as a PNG file in RGB. One that is alone has this width and height."""
    mask: bytes = b""
    """Where the image is changed, as a PNG file in grey of the same width and height: white is made again, black stays.
    Empty if there is none."""
    strength: float | None = None
    """How much of the image is changed, 0 < strength ≤ 1, at least one step. None if the pipeline takes none."""


class Generate(Struct, frozen=True, tag="generate"):
    """Compute a prompt and decode from it. The tokens go to the frontend's stream subject."""

    request: str
    attempt: int
    model: str
    frontend: str
    """The instance id of the frontend whose `stream` subject gets the step frames."""
    tokens: bytes
    """The prompt and, on a continuation, the output so far, packed u32."""
    prompt_tokens: int
    """The length of the original prompt in tokens; less than len(tokens) / 4 on a continuation."""
    sampling: Sampling
    time_left_s: float
    rank: int = 0
    lora: str = ""
    salt: str = ""
    priority: int = 0
    """Attempts of a higher priority are computed first, and those of a lower one give their blocks back first."""
    wait_left_s: float | None = None
    """The time within which the worker must begin to compute the prompt, in seconds. If it does not, the attempt ends
    with NOT_BEGUN. None if there is no such limit."""
    prefill_only: bool = False
    """Whether the attempt ends with its first token, as "handed_over", unless that token ends the request. The worker
    offers all full blocks of the prompt to its kvbm, also those that it found in its cache. Only for instances whose
    card has the role prefill."""
    images: tuple[Image, ...] = ()
    """The images of the prompt by `start`; they do not overlap. Only for instances whose card has `images`."""
    picture: Picture | None = None
    """The picture to make. Then each token stands for one of its steps, and the answer comes in `Part.picture`. Only
    for instances whose card has `pictures`."""
    prefill_by: str = ""
    """In advice that this attempt is expected: the instance that computes the prompt, and may share its blocks."""


class Accepted(Struct, frozen=True, tag="accepted"):
    """The worker owns the attempt now. It will end the attempt with a Part that has a finish reason."""

    request: str
    attempt: int


class Refused(Struct, frozen=True, tag="refused"):
    """The worker does not accept the attempt, and has done nothing."""

    request: str
    attempt: int
    code: Literal["overloaded", "draining", "bad_request", "wrong_model", "not_ready"]
    reason: str


GenerateReply = Accepted | Refused


class Cancel(Struct, frozen=True, tag="cancel"):
    """Free everything that this attempt uses. Idempotent; unknown attempts are ignored."""

    request: str
    attempt: int


GENERATE: Codec[Generate] = Codec(Generate, "generate")
GENERATE_REPLY: Codec[GenerateReply] = Codec(GenerateReply, "generate reply")
CANCEL: Codec[Cancel] = Codec(Cancel, "cancel")
