from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.worker.config import SamplingConfig
from services.worker.contracts.messages import Ready
from services.worker.model.card import card_of
from services.worker.model.facts import facts_of, read_pooling, read_sampling
from shared.errors import ModelError
from shared.messages.cards import SamplingDefaults
from tests.tiny_model import write_tiny_model

SOUND = {"max_position_embeddings": 128, "vocab_size": 300, "eos_token_id": 2, "rope_theta": 1e4}


def facts(directory: Path, config: object, capacity_blocks: int = 0) -> Ready:
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return facts_of(directory, block_size=16, capacity_blocks=capacity_blocks)


def test_sizes_are_the_models_and_the_capacity_is_as_given_or_some_thousand_blocks(tmp_path: Path) -> None:
    found = facts(tmp_path, SOUND)
    assert (found.context_length, found.vocab_size, found.eos_token_ids) == (128, 300, (2,))
    assert (found.block_size, found.capacity_blocks, found.path) == (16, 4096, str(tmp_path))
    assert facts(tmp_path, SOUND, capacity_blocks=7).capacity_blocks == 7
    assert [facts(tmp_path, SOUND | more).embedding_size for more in ({}, {"hidden_size": 64})] == [0, 64]


def test_several_ends_of_sequence_are_kept_in_order(tmp_path: Path) -> None:
    assert facts(tmp_path, SOUND | {"eos_token_id": [9, 2]}).eos_token_ids == (9, 2)


def test_the_ends_of_generation_config_count_too_and_a_text_part_goes_first(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert facts(tmp_path, SOUND).eos_token_ids == (2, 7)
    assert facts(tmp_path, {"vocab_size": 9, "text_config": SOUND}).vocab_size == 300


def test_sizes_that_a_known_architecture_leaves_out_are_those_of_transformers(tmp_path: Path) -> None:
    found = facts(tmp_path, {"architectures": ["Qwen2ForCausalLM"], "eos_token_id": 2, "hidden_size": 64})
    assert (found.context_length, found.vocab_size, found.embedding_size) == (32_768, 151_936, 64)
    assert facts(tmp_path, {"architectures": ["LlamaForCausalLM"]}).eos_token_ids == (2,)
    for names in ("LlamaForCausalLM", {"0": "x"}, [], [7], ["NewForCausalLM"]):
        with pytest.raises(ModelError, match=r"config\.json: .*max_position_embeddings"):
            facts(tmp_path, {"architectures": names, "vocab_size": 9})


@pytest.mark.parametrize(
    "wrong",
    [
        {"eos_token_id": None},
        {"eos_token_id": []},
        {"eos_token_id": ["2"]},
        {"eos_token_id": [-1]},
        {"vocab_size": 0},
        {"max_position_embeddings": 0},
        {"max_position_embeddings": "long"},
    ],
)
def test_a_config_that_no_engine_could_serve_is_an_error_of_the_model(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        facts(tmp_path, SOUND | wrong)


def test_no_config_and_one_that_is_no_object_are_errors_of_the_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        facts_of(tmp_path, block_size=16, capacity_blocks=0)
    with pytest.raises(ModelError, match=r"config\.json"):
        facts(tmp_path, [SOUND])
    (tmp_path / "config.json").write_bytes(b"\xff{")
    with pytest.raises(ModelError, match=r"config\.json"):
        facts_of(tmp_path, block_size=16, capacity_blocks=0)


def test_a_config_that_is_a_pipe_or_nested_too_deeply_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"x": ' + "[" * 100_000)
    with pytest.raises(ModelError, match=r"config\.json: nested too deeply"):
        facts_of(tmp_path, block_size=16, capacity_blocks=0)
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelError, match=r"config\.json: not a regular file"):
        facts_of(tmp_path, block_size=16, capacity_blocks=0)


def test_the_weights_of_another_config_have_another_digest(tmp_path: Path) -> None:
    assert len(facts(tmp_path, SOUND).weights) == 16
    assert facts(tmp_path, SOUND).weights == facts(tmp_path, SOUND).weights
    assert facts(tmp_path, SOUND).weights != facts(tmp_path, SOUND | {"rope_theta": 1e5}).weights


def test_a_block_has_some_bytes_though_nothing_is_in_them(tmp_path: Path) -> None:
    assert facts(tmp_path, SOUND).kv_layout.block_bytes > 0


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


def test_what_the_model_recommends_is_read_and_settings_take_its_place(tmp_path: Path) -> None:
    assert read_sampling(tmp_path, SamplingConfig()) == SamplingDefaults()
    recommended = {"temperature": 0.6, "top_p": 0.95, "top_k": None, "do_sample": True, "eos_token_id": [1, 2]}
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    assert read_sampling(tmp_path, SamplingConfig()) == SamplingDefaults(temperature=0.6, top_p=0.95)
    set_ = SamplingConfig(temperature=0.0, top_k=5)
    assert read_sampling(tmp_path, set_) == SamplingDefaults(temperature=0.0, top_p=0.95, top_k=5)


@pytest.mark.parametrize("every", [0, -1, None])
def test_a_recommendation_of_all_tokens_may_be_written_as_transformers_or_as_vllm_has_it(
    tmp_path: Path, every: int | None
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": every}))
    assert read_sampling(tmp_path, SamplingConfig()).top_k == 0


@pytest.mark.parametrize(
    "content",
    ["[]", "{", '{"temperature": 5}', '{"top_p": 0}', '{"top_k": "x"}', '{"top_k": -2}', '{"repetition_penalty": -1}'],
)
def test_a_recommendation_that_no_engine_could_follow_names_its_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        read_sampling(tmp_path, SamplingConfig())
