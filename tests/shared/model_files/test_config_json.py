"""The forms in which files have the parameters of rotary embeddings, alone and in conflict, held to transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ModelError
from shared.model_files.config_json import read_config_json, rope_parameters, token_ids

LINEAR = {"rope_type": "linear", "factor": 2.0}
OLD_LINEAR = {"type": "linear", "factor": 2.0}

CASES: dict[str, tuple[str, dict[str, Any], float, str]] = {
    # model_type, config.json, the base and the kind of the rotation
    "nothing": ("llama", {}, 1e4, "default"),
    "the base at the top": ("llama", {"rope_theta": 5e5}, 5e5, "default"),
    "scaling of transformers 4": ("llama", {"rope_theta": 5e5, "rope_scaling": OLD_LINEAR}, 5e5, "linear"),
    "scaling without a base": ("llama", {"rope_scaling": LINEAR}, 1e4, "linear"),
    "no scaling": ("llama", {"rope_theta": 5e5, "rope_scaling": None}, 5e5, "default"),
    "an empty scaling": ("llama", {"rope_theta": 5e5, "rope_scaling": {}}, 5e5, "default"),
    "scaling that is none": ("llama", {"rope_theta": 5e5, "rope_scaling": {"type": "default"}}, 5e5, "default"),
    "parameters": ("llama", {"rope_parameters": {**LINEAR, "rope_theta": 5e5}}, 5e5, "linear"),
    "parameters without a kind": ("llama", {"rope_parameters": {"rope_theta": 5e5}}, 5e5, "default"),
    "parameters without a base": ("llama", {"rope_parameters": LINEAR}, 1e4, "linear"),
    "parameters with the old name": ("llama", {"rope_parameters": {**OLD_LINEAR, "rope_theta": 5e5}}, 5e5, "linear"),
    "no parameters": ("llama", {"rope_theta": 5e5, "rope_parameters": None}, 5e5, "default"),
    "the base beside the parameters": (
        "llama",
        {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}},
        5e5,
        "default",
    ),
    "two bases": ("llama", {"rope_theta": 5e5, "rope_parameters": {**LINEAR, "rope_theta": 1e6}}, 1e6, "linear"),
    "scaling and parameters": (
        "llama",
        {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        1e4,
        "linear",
    ),
    "scaling with a base": ("qwen2", {"rope_theta": 1e6, "rope_scaling": {**LINEAR, "rope_theta": 5e5}}, 5e5, "linear"),
    "the class's base": ("smollm3", {}, 2e6, "default"),
    "the class's base and parameters": ("smollm3", {"rope_parameters": {"rope_type": "default"}}, 2e6, "default"),
    "the class's base and scaling": ("smollm3", {"rope_scaling": LINEAR}, 2e6, "linear"),
    "a base against the class's": ("smollm3", {"rope_theta": 5e6, "rope_parameters": LINEAR}, 5e6, "linear"),
}
NESTED: dict[str, tuple[dict[str, Any], tuple[float, str], tuple[float, str]]] = {
    # config.json of Gemma 3, the rotations of full and of sliding layers
    "nothing": ({}, (1e6, "default"), (1e4, "default")),
    "transformers 4": (
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR},
        (5e5, "linear"),
        (2e4, "default"),
    ),
    "transformers 5": (
        {
            "rope_parameters": {
                "full_attention": {**LINEAR, "rope_theta": 5e5},
                "sliding_attention": {"rope_theta": 2e4},
            }
        },
        (5e5, "linear"),
        (2e4, "default"),
    ),
    "one of the two": ({"rope_parameters": {"full_attention": LINEAR}}, (1e6, "linear"), (1e4, "default")),
    "no bases inside": (
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_parameters": {"full_attention": LINEAR}},
        (5e5, "linear"),
        (2e4, "default"),
    ),
    "parameters and scaling": (
        {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}, "rope_scaling": LINEAR},
        (5e5, "linear"),
        (1e4, "default"),
    ),
    "parameters that are not nested": (
        {"rope_parameters": {**LINEAR, "rope_theta": 7e5}},
        (1e6, "default"),
        (1e4, "default"),
    ),
}
BASES = {"llama": 1e4, "qwen2": 1e4, "smollm3": 2e6}


def shown(parameters: dict[str, Any] | None) -> tuple[float, str]:
    assert parameters is not None
    return parameters["rope_theta"], parameters.get("rope_type") or parameters.get("type") or "default"


@pytest.mark.parametrize("case", CASES)
def test_the_rotation_is_the_one_that_transformers_finds(case: str) -> None:
    kind, config, *expected = CASES[case]
    found, local = rope_parameters(config, "config.json", default_theta=BASES[kind])
    assert (shown(found), local) == (tuple(expected), None)
    try:
        from transformers import AutoConfig  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return
    theirs = AutoConfig.for_model(kind, **json.loads(json.dumps(config))).rope_parameters
    assert shown(theirs) == tuple(expected)


@pytest.mark.parametrize("case", NESTED)
def test_layers_that_slide_have_the_rotation_that_transformers_finds(case: str) -> None:
    config, *expected = NESTED[case]
    found = rope_parameters(config, "config.json", default_theta=1e6, default_local_theta=1e4)
    assert [shown(each) for each in found] == expected
    try:
        from transformers import AutoConfig  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        return
    theirs = AutoConfig.for_model("gemma3_text", **json.loads(json.dumps(config))).rope_parameters
    assert [shown(theirs[kind]) for kind in ("full_attention", "sliding_attention")] == expected


def test_nested_parameters_of_models_whose_layers_rotate_alike_are_one() -> None:
    same = {"full_attention": {**LINEAR, "rope_theta": 5e5}, "sliding_attention": {**LINEAR, "rope_theta": 5e5}}
    assert shown(rope_parameters({"rope_parameters": same}, "x", default_theta=1e4)[0]) == (5e5, "linear")
    other = {**same, "sliding_attention": {"rope_theta": 1e4}}
    with pytest.raises(ModelError, match="x: rope_parameters differ between layers"):
        rope_parameters({"rope_parameters": other}, "x", default_theta=1e4)
    with pytest.raises(ModelError, match="x: rope_scaling is a list; expected an object"):
        rope_parameters({"rope_scaling": []}, "x", default_theta=1e4)


def test_settings_of_the_text_part_count_first_but_for_ties(tmp_path: Path) -> None:
    outer = {"vocab_size": 9, "hidden_size": 8, "tie_word_embeddings": False}
    text = {"vocab_size": 300, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps({**outer, "text_config": text}))
    config = read_config_json(tmp_path)
    assert (config.settings["vocab_size"], config.settings["hidden_size"], config.tied) == (300, 8, False)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    assert read_config_json(tmp_path).tied is True
    (tmp_path / "config.json").write_text(json.dumps({"text_config": 7}))
    assert (read_config_json(tmp_path).text, read_config_json(tmp_path).tied) == (None, None)


def test_a_setting_with_token_ids_has_one_several_or_none() -> None:
    assert [list(token_ids(value, "x", "f")) for value in (7, [7, 8], None, [])] == [[7], [7, 8], [], []]
    for wrong in ("7", [7.0], {"id": 7}, True):
        with pytest.raises(ModelError, match=r"f: x is .*; expected a token id or a list of token ids"):
            token_ids(wrong, "x", "f")
