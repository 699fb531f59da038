"""Rotary position embeddings: the frequencies of each scaling variant, and the tables of cosine and sine.

    linear    every frequency ÷ factor                                      (kaiokendev)
    dynamic   no scaling within max_position_embeddings                     (bloc97; see below)
    llama3    long wavelengths ÷ factor, short ones kept, between blended   (Llama 3.1)
    yarn      the same idea by rotations, and the attention scaled          (arXiv 2309.00071)
    longrope  each frequency ÷ its short factor, and the attention scaled   (arXiv 2402.13753)

The formulas are those of transformers' modeling_rope_utils.py. A key is cached after its rotation, so the rotation may
depend only on the key's position. Dynamic scaling changes all frequencies once a sequence grows past
max_position_embeddings. Such sequences are not served, and below that length the factor is 1. LongRoPE has other
factors for sequences longer than original_max_position_embeddings. That length is served, with the short factors.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from shared.errors import ModelError

Angles = NDArray[np.float64]


class PlainRope(Struct, frozen=True, tag="default", tag_field="rope_type"):
    """Rotation without scaling."""

    rope_theta: float = 10_000.0


class LinearRope(Struct, frozen=True, tag="linear", tag_field="rope_type"):
    """Scaling by interpolation of positions."""

    factor: float
    rope_theta: float = 10_000.0


class DynamicRope(Struct, frozen=True, tag="dynamic", tag_field="rope_type"):
    """NTK scaling by length, which equals PlainRope within the served lengths."""

    factor: float
    rope_theta: float = 10_000.0


class Llama3Rope(Struct, frozen=True, tag="llama3", tag_field="rope_type"):
    """Llama 3.1's blend by wavelength."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    rope_theta: float = 10_000.0


class YarnRope(Struct, frozen=True, tag="yarn", tag_field="rope_type"):
    """YaRN's blend by rotations within the original context."""

    factor: float
    original_max_position_embeddings: int
    rope_theta: float = 10_000.0
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class LongRope(Struct, frozen=True, tag="longrope", tag_field="rope_type"):
    """LongRoPE's factors for sequences within the original context."""

    short_factor: tuple[float, ...]
    factor: float
    original_max_position_embeddings: int
    rope_theta: float = 10_000.0
    attention_factor: float | None = None


class NoRope(Struct, frozen=True, tag="none", tag_field="rope_type"):
    """No rotation: the layers without positions of some models. No file names it."""


Rope = PlainRope | LinearRope | DynamicRope | Llama3Rope | YarnRope | LongRope | NoRope


def parse_rope(
    where: str,
    parameters: dict[str, Any],
    max_positions: int,
    original_positions: int | None,
    *,
    outer_first: bool = False,
) -> tuple[Rope, int]:
    """Return a config's rope parameters, and the context length that they serve. Raise ModelError.

    `where` names the file in errors. `original_positions` is original_max_position_embeddings outside of the
    parameters, which counts before that inside with `outer_first`. YaRN configs state the
    original length as max_position_embeddings and serve factor times that; LongRoPE serves the original length; the
    others state the length that they serve.
    """
    named: Any = parameters.get("rope_type") or parameters.get("type") or "default"
    if "short_factor" in parameters:
        named = "longrope"  # the first releases of Phi-3 say su or yarn
    known = ["default", "dynamic", "linear", "llama3", "longrope", "yarn"]
    if named not in known:
        raise ModelError(f"{where}: rope type {named!r} is not supported; {', '.join(known)} are")
    if named != "default" and parameters.get("partial_rotary_factor", 1.0) != 1.0:  # the default one does not read it
        raise ModelError(f"{where}: partial_rotary_factor is not supported")
    inner = parameters.get("original_max_position_embeddings")
    given = (original_positions, inner) if outer_first else (inner, original_positions)
    original: Any = given[0] or given[1] or max_positions
    if not isinstance(original, int) or original < 1:
        raise ModelError(f"{where}: original_max_position_embeddings is {original!r}; expected a positive number")
    filled = {**parameters, "original_max_position_embeddings": original}
    if named in ("yarn", "longrope") and filled.get("factor") is None:
        filled["factor"] = max_positions / original
    try:
        rope = msgspec.convert({**filled, "rope_type": named}, Rope)
    except msgspec.ValidationError as wrong:
        raise ModelError(f"{where}: rope scaling {named}: {wrong}") from None
    _check(where, rope)
    if isinstance(rope, LongRope):
        return rope, min(max_positions, rope.original_max_position_embeddings)
    if isinstance(rope, YarnRope):
        return rope, max(max_positions, int(rope.factor * rope.original_max_position_embeddings))
    return rope, max_positions


def _check(where: str, rope: Rope) -> None:
    for field in ("rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor", "beta_fast"):
        value = getattr(rope, field, None)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ModelError(f"{where}: {field} is {value}; expected a positive number")
    if isinstance(rope, LongRope) and not all(0 < each < math.inf for each in rope.short_factor):
        raise ModelError(f"{where}: short_factor has a number that is not positive")
    if isinstance(rope, Llama3Rope) and not rope.high_freq_factor > rope.low_freq_factor:
        raise ModelError(f"{where}: high_freq_factor must be greater than low_freq_factor")


def frequencies(rope: Rope, rotated: int) -> tuple[Angles, float]:
    """Return by which angle one position turns each pair, (rotated / 2), and the factor on cosine and sine.

    `rotated` is the number of elements of a head that are rotated.
    """
    if isinstance(rope, NoRope):
        return np.zeros(rotated // 2), 1.0
    plain: Angles = np.power(rope.rope_theta, -np.arange(0, rotated, 2) / rotated)
    match rope:
        case PlainRope() | DynamicRope():
            return plain, 1.0
        case LinearRope():
            return plain / rope.factor, 1.0
        case Llama3Rope():
            return _llama3(rope, plain), 1.0
        case YarnRope():
            return _yarn(rope, plain), _yarn_attention(rope)
        case LongRope():
            return plain / np.asarray(rope.short_factor), _long_attention(rope)


def rope_tables(
    rope: Rope, head_dim: int, positions: int, rotated: int = 0
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return cosines and sines, each (positions, head_dim / 2).

    Only the first `rotated` elements of a head are rotated (0: all of them); the other pairs turn by no angle.
    """
    rotated = rotated or head_dim
    angles, scale = frequencies(rope, rotated)
    # float32 from here on, as in training: at large positions the rounding is part of the model.
    turned = np.arange(positions, dtype=np.float32)[:, None] * angles.astype(np.float32)
    cosines = np.ones((positions, head_dim // 2), np.float32)
    sines = np.zeros_like(cosines)
    cosines[:, : rotated // 2] = np.cos(turned) * np.float32(scale)
    sines[:, : rotated // 2] = np.sin(turned) * np.float32(scale)
    return cosines, sines


def _llama3(rope: Llama3Rope, plain: Angles) -> Angles:
    rotations = rope.original_max_position_embeddings * plain / (2 * math.pi)
    kept = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return _blend(plain, kept, rope.factor)


def _yarn(rope: YarnRope, plain: Angles) -> Angles:
    half = len(plain)

    def pair_of(rotations: float) -> float:
        """Return the pair that turns this often within the original context."""
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return half * math.log(turns) / math.log(rope.rope_theta)

    low, high = pair_of(rope.beta_fast or 32.0), pair_of(rope.beta_slow or 1.0)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001
    rotates_enough: Angles = 1 - (np.arange(half, dtype=np.float64) - low) / (high - low)
    return _blend(plain, rotates_enough, rope.factor)


def _blend(plain: Angles, kept: Angles, factor: float) -> Angles:
    """Mix each frequency, at the share `kept` (clipped to 0 … 1), with that frequency divided by `factor`."""
    share: Angles = np.clip(kept, 0.0, 1.0)
    return share * plain + (1 - share) * plain / factor


def _yarn_attention(rope: YarnRope) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def _long_attention(rope: LongRope) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1 or rope.original_max_position_embeddings <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))
