"""Tests of the cache of compiled grammars, and of the tokenizers that it needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.native import grammars as module
from services.worker.native.grammars import GrammarCache
from tests.tiny_model import write_tiny_model

VOCAB = 320
EOS = (0, 2)


@pytest.fixture
def grammars(tmp_path: Path) -> GrammarCache:
    found = GrammarCache.from_directory(write_tiny_model(tmp_path / "model"), VOCAB, EOS)
    assert found is not None
    return found


def test_matchers_of_one_grammar_are_independent(grammars: GrammarCache) -> None:
    first, second = (grammars.matcher('start: "a" "b"') for _ in range(2))
    assert first.consume_token(first.compute_ff_tokens()[0])
    assert first.compute_bitmask() != second.compute_bitmask()
    assert second.compute_bitmask() == grammars.matcher('start: "a" "b"').compute_bitmask()


def test_the_cache_is_bounded_in_number_and_length(grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT", 3)
    monkeypatch.setattr(module, "KEPT_CHARACTERS", 100)
    texts = [f'start: "{"x" * length}"' for length in (1, 2, 3, 4, 1, 60, 2, 200, 3)]
    for text in texts:
        assert not grammars.matcher(text).is_error()
        grammars.validate()


def test_an_invalid_grammar_gives_a_matcher_in_error_and_no_exception(grammars: GrammarCache) -> None:
    assert grammars.matcher("start: nothing").is_error()
    assert grammars.matcher('{"grammars": 7}').is_error()


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"{}", b'{"model": {"type": "BPE"}}'])
def test_without_a_readable_tokenizer_there_is_no_grammar_cache(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    assert GrammarCache.from_directory(tmp_path, VOCAB, EOS) is None
