"""Computes a digest of a model's weights, so that cached blocks of other weights are never used for it.

The digest covers the parts of config.json that are read, and each tensor's name, shape and type. It covers PIECES
pieces of a tensor's bytes, the first and the last among them; tensors of up to 64 KiB, so all norms and biases of
today's
models, are covered completely. Fine-tuning, merging and quantising change every piece. A change that leaves all pieces
of all tensors as they were is not found: after editing single rows of a matrix, give the model another name. How the
weights are split into files does not matter. It takes 30 ms for 270 tensors; reading all bytes would take seconds.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from services.worker.native.config import ModelConfig
from services.worker.native.weights import Checkpoint
from shared.errors import ModelError

PIECES = 16
"""How many pieces of a tensor are covered."""
PIECE_BYTES = 4096
_ARITHMETIC = b"headrace 1"
"""The version of the decoder's arithmetic. Change it whenever the decoder computes something else."""


def weights_digest(directory: Path, config: ModelConfig) -> str:
    """Return the digest as 16 hex digits. Raise ModelError."""
    digest = hashlib.sha256(_ARITHMETIC + _said(config))
    checkpoint = Checkpoint(directory, config)
    for name in sorted(checkpoint.shapes):
        entry = checkpoint.entry(name)
        digest.update(msgspec.json.encode((name, entry.dtype, entry.shape)))
        for piece in checkpoint.pieces(name, PIECES, PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()[:16]


def check_digest(directory: Path, config: ModelConfig, digest: str) -> None:
    """Raise ModelError if a directory's weights do not have this digest any longer."""
    if weights_digest(directory, config) != digest:
        raise ModelError(f"{directory}: the weights have changed since the worker started; start it again")


def _said(config: ModelConfig) -> bytes:
    """Return the config without fields that have their defaults, so that a new field changes no digest, and without the
    tokens that end an answer, which change no block."""
    fields = msgspec.to_builtins(config)
    del fields["eos_token_ids"]
    for field in msgspec.structs.fields(config):
        if getattr(config, field.name) == field.default:
            del fields[field.name]
    return msgspec.json.encode(fields)
