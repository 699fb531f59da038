"""Validation: checks a Generate against what the engine serves. Pure.

The frontend has validated the client's request. The worker validates on its own, since any process that may publish to
NATS can send bytes here.
"""

from __future__ import annotations

import math

from services.worker.contracts.messages import Ready
from services.worker.limits import (
    MAX_BIASES,
    MAX_GUIDANCE,
    MAX_PREVIEWS,
    MAX_PROMPT_CHARACTERS,
    MAX_TOP_LOGPROBS,
)
from shared import subjects
from shared.hashing import pack_tokens, token_array
from shared.image_size import count_tokens
from shared.messages.cards import PictureOutput
from shared.messages.generate import Generate, Picture, Sampling

_MAX_REQUEST_CHARACTERS = 256
_MAX_SALT_CHARACTERS = 256
_MAX_TIME_LEFT_S = 7 * 24 * 3600.0
_MAX_STOP_TOKENS = 256
_MAX_ALLOWED_TOKENS = 1 << 14
_MAX_BIAS = 100.0
_MAX_REPETITION_PENALTY = 100.0
_MAX_PRIORITY = 1 << 31
_MAX_GRAMMAR_CHARACTERS = 1 << 18
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_HEADER_BYTES = 33
IMAGE_KEY_BYTES = 32
"""The length of an image's key, and of its embeddings' key."""


def find_fault(generate: Generate, facts: Ready) -> str:
    """Return why the Generate cannot be computed here, beginning with the field. Empty if it can."""
    return (
        _envelope(generate, facts)
        or _tokens(generate, facts)
        or _images(generate, facts)
        or _picture(generate, facts)
        or _sampling(generate.sampling, facts)
    )


def _envelope(generate: Generate, facts: Ready) -> str:
    if not 0 < len(generate.request) <= _MAX_REQUEST_CHARACTERS:
        return f"request: its id has {len(generate.request)} characters; 1 to {_MAX_REQUEST_CHARACTERS} are allowed"
    if generate.attempt < 0:
        return f"attempt: {generate.attempt}"
    if not subjects.is_id(generate.frontend):
        return "frontend: not an instance id"
    if not 0.0 < generate.time_left_s <= _MAX_TIME_LEFT_S:
        return f"time_left_s: {generate.time_left_s:g}"
    if generate.wait_left_s is not None and not generate.wait_left_s >= 0.0:  # NaN is refused, too
        return f"wait_left_s: {generate.wait_left_s:g}"
    if not 0 <= generate.rank < facts.ranks:
        return f"rank: {generate.rank}; this worker has the ranks 0 to {facts.ranks - 1}"
    if len(generate.salt) > _MAX_SALT_CHARACTERS:
        return f"salt: {len(generate.salt)} characters; at most {_MAX_SALT_CHARACTERS} are allowed"
    if abs(generate.priority) > _MAX_PRIORITY:
        return f"priority: {generate.priority}"
    return ""


def _tokens(generate: Generate, facts: Ready) -> str:
    if not generate.tokens or len(generate.tokens) % 4:
        return f"tokens: {len(generate.tokens)} bytes are not packed u32 ids"
    count = len(generate.tokens) // 4
    if count >= facts.context_length + bool(generate.sampling.pooling):
        return f"tokens: {count} leave no room in a context of {facts.context_length}"
    if -(-count // facts.block_size) > facts.capacity_blocks:
        return f"tokens: {count} do not fit into {facts.capacity_blocks} blocks of {facts.block_size}"
    largest = max(token_array(generate.tokens))
    if largest >= facts.vocab_size:
        return f"tokens: id {largest} is outside the vocabulary of {facts.vocab_size}"
    if not 0 < generate.prompt_tokens <= count:
        return f"prompt_tokens: {generate.prompt_tokens} of {count} tokens"
    if generate.sampling.pooling and generate.prompt_tokens < count:
        return f"prompt_tokens: {generate.prompt_tokens} of {count} tokens, but an embedding's tokens are all prompt"
    if generate.sampling.prompt_logprobs >= 0 and generate.prompt_tokens < count:
        return "sampling.prompt_logprobs: not for an answer that is continued"
    return ""


def _images(generate: Generate, facts: Ready) -> str:
    images, takes = generate.images, facts.images
    if not images:
        return ""
    if takes is None:
        return "images: this engine takes none"
    if len(images) > facts.most_images:
        return f"images: {len(images)}; at most {facts.most_images} are allowed (worker.most_images)"
    end = 0
    for number, image in enumerate(images):
        before, end = end, image.start + image.tokens
        if len(image.key) != IMAGE_KEY_BYTES:
            return f"images: number {number} has a key of {len(image.key)} bytes, not {IMAGE_KEY_BYTES}"
        size = (image.width, image.height) if takes.unit else (takes.width, takes.height)
        if image.tokens != (expected := count_tokens(takes, *size)) or not expected:
            return f"images: number {number} has {image.tokens} tokens; one of {size[0]} by {size[1]} has {expected}"
        if takes.unit and size[0] * size[1] > takes.most_pixels:
            return f"images: number {number} is of {size[0]} by {size[1]}; at most {takes.most_pixels} pixels are taken"
        if not before <= image.start <= end <= generate.prompt_tokens:
            return f"images: number {number} has the tokens {image.start} to {end - 1}: before {before}, or no prompt's"
        if generate.tokens[4 * image.start : 4 * end] != pack_tokens([takes.token_id] * image.tokens):
            return f"images: number {number} stands for other tokens than {takes.token_id}"
        if len(image.pixels) != 3 * size[0] * size[1]:
            return f"images: number {number} has {len(image.pixels)} bytes, not those of {size[0]} by {size[1]}"
    return ""


def _picture(generate: Generate, facts: Ready) -> str:
    picture, takes = generate.picture, facts.pictures
    if picture is None or takes is None:
        both_none = picture is None and takes is None
        return "" if both_none else f"picture: this engine makes {'no' if takes is None else 'only'} pictures"
    checks = (
        ("prompt", 0 < len(picture.prompt) <= MAX_PROMPT_CHARACTERS),
        ("negative", len(picture.negative) <= (MAX_PROMPT_CHARACTERS if takes.negative else 0)),
        ("width", picture.width > 0 and picture.width % takes.multiple == 0),
        ("height", picture.height > 0 and picture.height % takes.multiple == 0),
        ("width", picture.width * picture.height <= takes.most_pixels),
        ("steps", 1 <= picture.steps <= takes.most_steps),
        ("steps", picture.steps == len(generate.tokens) // 4),
        ("seed", 0 <= picture.seed < 1 << 64),
        ("guidance", picture.guidance is None or (takes.guidance and 0.0 <= picture.guidance <= MAX_GUIDANCE)),
        ("frames", bool(picture.frames) == bool(takes.frames) and 0 <= picture.frames <= takes.most_frames),
        ("frames", not picture.frames or picture.frames % takes.frame_multiple == 1 % takes.frame_multiple),
        ("format", (picture.format == "mp4") == bool(takes.frames)),
        ("previews", 0 <= picture.previews <= MAX_PREVIEWS),
    )
    wrong = next((name for name, fine in checks if not fine), "")  # NaN fails every comparison
    return f"picture.{wrong}: {str(getattr(picture, wrong))[:64]}" if wrong else _picture_images(picture, takes)


def _picture_images(picture: Picture, takes: PictureOutput) -> str:
    """Return what is wrong with the images that a picture is made from. Empty if nothing is."""
    edit = takes.edit_of(masked=bool(picture.mask))
    if not picture.images:
        fine = takes.texts and not picture.mask and picture.strength is None
        return "" if fine else "picture.images: none, and this engine makes no such picture from a text alone"
    if edit is None:
        return f"picture.images: this engine makes no pictures from images {'with' if picture.mask else 'without'} mask"
    if len(picture.images) > edit.images:
        return f"picture.images: {len(picture.images)}; at most {edit.images} are allowed"
    if picture.strength is not None and not (edit.strength and 0.0 < picture.strength <= 1.0):
        return f"picture.strength: {picture.strength:g}"
    for field, file in (*(("images", image) for image in picture.images), ("mask", picture.mask)):
        size = _png_size(file)
        exact = field == "mask" or len(picture.images) == 1
        fine = size == (picture.width, picture.height) if exact else 0 < math.prod(size) <= takes.most_pixels
        if not fine and (file or field == "images"):
            return f"picture.{field}: no PNG of the right size, but {size[0]} by {size[1]} pixels"
    return ""


def _png_size(file: bytes) -> tuple[int, int]:
    """Return the width and height that the header of a PNG file says. Zeros if it is none."""
    if file[:8] != _PNG or file[12:16] != b"IHDR" or len(file) < _PNG_HEADER_BYTES:
        return 0, 0
    return int.from_bytes(file[16:20], "big"), int.from_bytes(file[20:24], "big")


def _sampling(sampling: Sampling, facts: Ready) -> str:
    checks = (
        ("max_tokens", sampling.max_tokens >= 1),
        ("min_tokens", 0 <= sampling.min_tokens <= sampling.max_tokens),
        ("temperature", 0.0 <= sampling.temperature <= 2.0),
        ("top_p", 0.0 < sampling.top_p <= 1.0),
        ("top_k", sampling.top_k >= 0),
        ("min_p", 0.0 <= sampling.min_p <= 1.0),
        ("seed", 0 <= sampling.seed < 1 << 64),
        ("presence_penalty", -2.0 <= sampling.presence_penalty <= 2.0),
        ("frequency_penalty", -2.0 <= sampling.frequency_penalty <= 2.0),
        ("repetition_penalty", 0.0 < sampling.repetition_penalty <= _MAX_REPETITION_PENALTY),
        ("logprobs", -1 <= sampling.logprobs <= MAX_TOP_LOGPROBS),
        ("prompt_logprobs", -1 <= sampling.prompt_logprobs <= MAX_TOP_LOGPROBS),
        ("stop_token_ids", len(sampling.stop_token_ids) <= _MAX_STOP_TOKENS),
        ("stop_token_ids", all(0 <= token < facts.vocab_size for token in sampling.stop_token_ids)),
        ("logit_bias", len({token for token, _ in sampling.logit_bias}) == len(sampling.logit_bias) <= MAX_BIASES),
        ("logit_bias", all(0 <= token < facts.vocab_size for token, _ in sampling.logit_bias)),
        ("logit_bias", all(-_MAX_BIAS <= bias <= _MAX_BIAS for _, bias in sampling.logit_bias)),
        ("allowed_tokens", _are_tokens(sampling.allowed_tokens, facts.vocab_size)),
    )
    for name, fine in checks:
        if not fine:  # NaN fails every comparison
            value = getattr(sampling, name)
            shown = f"{len(value)} ids" if isinstance(value, tuple) else value
            shown = f"{len(value)} bytes" if isinstance(value, bytes) else shown
            return f"sampling.{name}: {shown if not isinstance(shown, float) or math.isfinite(shown) else 'not finite'}"
    if sampling.logit_bias and not facts.biases:
        return "sampling.logit_bias: this engine does not support it"
    if sampling.allowed_tokens and not facts.allowed_tokens:
        return "sampling.allowed_tokens: this engine does not support it"
    if sampling.min_tokens and not facts.min_tokens:
        return "sampling.min_tokens: this engine does not support it"
    if sampling.prompt_logprobs >= 0 and not facts.prompt_logprobs:
        return "sampling.prompt_logprobs: this engine does not support it"
    if sampling.prompt_logprobs >= 0 and sampling.pooling:
        return "sampling.prompt_logprobs: not with an embedding"
    if sampling.pooling and not facts.embedding_size:
        return "sampling.pooling: this engine makes no embeddings"
    if sampling.pooling and facts.pooling not in ("", sampling.pooling):
        return f"sampling.pooling: {sampling.pooling}; this engine was started with {facts.pooling}"
    if not sampling.pooling and not facts.generates and facts.pictures is None:
        return "sampling.pooling: this engine makes embeddings only"
    return _grammar(sampling, facts) if sampling.grammar else ""


def _are_tokens(packed: bytes, vocab_size: int) -> bool:
    if len(packed) % 4 or len(packed) // 4 > _MAX_ALLOWED_TOKENS:
        return False
    return max(token_array(packed), default=0) < vocab_size


def _grammar(sampling: Sampling, facts: Ready) -> str:
    if not facts.grammars:
        return "sampling.grammar: this engine does not support grammars"
    if len(sampling.grammar) > _MAX_GRAMMAR_CHARACTERS:
        return f"sampling.grammar: {len(sampling.grammar)} characters; at most {_MAX_GRAMMAR_CHARACTERS} are allowed"
    if sampling.ignore_eos:
        return "sampling.ignore_eos: not with a grammar, which decides where the output ends"
    return ""
