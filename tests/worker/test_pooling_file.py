from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.worker.model_card import card_of
from services.worker.model_facts import facts_of
from services.worker.pooling_file import read_pooling
from shared.errors import ModelError
from tests.tiny_model import write_tiny_model

TYPE = "sentence_transformers.models."


def written(directory: Path, config: Any = None, modules: Any = None) -> Path:
    if config is not None:
        (directory / "1_Pooling").mkdir()
        (directory / "1_Pooling" / "config.json").write_text(json.dumps(config))
    if modules is not None:
        (directory / "modules.json").write_text(json.dumps([{"idx": 0, "type": TYPE + name} for name in modules]))
    return directory


def test_a_model_that_says_nothing_is_meant_for_the_mean(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == "mean"
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    assert read_pooling(file) == "mean"


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"word_embedding_dimension": 64, "pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, "mean"),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode_cls_token": True}, ""),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, ""),
        ({"pooling_mode_mean_tokens": True, "include_prompt": False}, ""),
        ({}, ""),
    ],
)
def test_sentence_transformers_settings_are_read(tmp_path: Path, config: Any, pooling: str) -> None:
    assert read_pooling(written(tmp_path, config, ["Transformer", "Pooling", "Normalize"])) == pooling


def test_a_module_that_is_not_built_leaves_no_default(tmp_path: Path) -> None:
    assert (
        read_pooling(written(tmp_path, {"pooling_mode_mean_tokens": True}, ["Transformer", "Pooling", "Dense"])) == ""
    )


def test_a_model_card_has_it_where_the_engine_embeds(tmp_path: Path) -> None:
    written(write_tiny_model(tmp_path), {"pooling_mode_lasttoken": True})
    facts = facts_of(tmp_path, block_size=16, capacity_blocks=8)
    for one, size, pooling in ((facts, 64, "last"), (msgspec.structs.replace(facts, embedding_size=0), 0, "")):
        card = card_of(one, model=str(tmp_path), model_name="tiny", instance="w1")
        assert (card.embedding_size, card.pooling) == (size, pooling)


@pytest.mark.parametrize("text", ["[", "[]", '"\xff"'])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str) -> None:
    written(tmp_path, {})
    (tmp_path / "1_Pooling" / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"1_Pooling/config\.json"):
        read_pooling(tmp_path)
