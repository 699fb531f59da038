"""What a worker says of the model that its engine serves."""

from __future__ import annotations

import hashlib
from pathlib import Path

from services.worker.messages import Ready
from services.worker.pooling_file import read_pooling
from shared import hashing
from shared.messages import ModelCard
from shared.model_file import TOKENIZER_LIMIT_BYTES, read_model_file


def card_of(facts: Ready, *, model: str, model_name: str, instance: str, device: str = "") -> ModelCard:
    """Of the engine that is ready; `model` is where the tokenizer lies, unless the engine names another directory.
    Reads some MB. Raises ModelError."""
    path, digest = _tokenizer(Path(facts.path or model))
    return ModelCard(
        model=model_name,
        instance=instance,
        path=str(path),
        tokenizer_digest=digest,
        hash_self_test=hashing.self_test(facts.block_size),
        context_length=facts.context_length,
        vocab_size=facts.vocab_size,
        block_size=facts.block_size,
        capacity_blocks=facts.capacity_blocks,
        kv_layout=facts.kv_layout,
        eos_token_ids=facts.eos_token_ids,
        grammars=facts.grammars,
        biases=facts.biases,
        embedding_size=facts.embedding_size,
        pooling=read_pooling(Path(model)) if facts.embedding_size else "",
        device=device,
    )


def name_of(model: Path) -> str:
    """A file's name without its suffix; a directory's whole name, for that may have dots in it."""
    return model.stem if model.is_file() else model.resolve().name


def _tokenizer(directory: Path) -> tuple[Path, str]:
    """The absolute path, and the SHA-256 (hex) of its tokenizer.json. Raises ModelError."""
    file = directory.resolve() / "tokenizer.json"
    return file.parent, hashlib.sha256(read_model_file(file, TOKENIZER_LIMIT_BYTES)).hexdigest()
