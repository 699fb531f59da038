"""Whether the files of a LoRA fit a model; vLLM is not needed for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.vllm.lora_check import check_lora, lora_fault, lora_shapes, model_shapes
from tests.tiny_lora import write_lora
from tests.tiny_model import write_tiny_model

LAYERS = 2
RANKS = (8,)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", shards=3)


def test_a_lora_of_the_model_fits(model: Path, tmp_path: Path) -> None:
    assert check_lora(write_lora(tmp_path / "all", model), model, LAYERS, RANKS) == ""
    some = write_lora(tmp_path / "some", model, targets=("q_proj",), layers=(1,), dtype="bfloat16")
    assert check_lora(some, model, LAYERS, RANKS) == ""


def test_a_lora_of_another_model_is_named_by_its_first_module_that_does_not_fit(model: Path, tmp_path: Path) -> None:
    wide = write_tiny_model(tmp_path / "wide", hidden=128)
    deep = write_tiny_model(tmp_path / "deep", layers=3)
    thick = write_tiny_model(tmp_path / "thick", intermediate=192)
    for other, why in (
        (wide, "model.layers.0.self_attn.q_proj has 64 inputs here, and 128 in the LoRA"),
        (deep, "it has model.layers.2.self_attn.q_proj, and this model has 2 layers"),
        (thick, "model.layers.0.mlp.gate_proj has 128 outputs here, and 192 in the LoRA"),
    ):
        fault = check_lora(write_lora(tmp_path / f"of {other.name}", other), model, LAYERS, RANKS)
        assert fault.startswith("it is of another model: ")
        assert fault.endswith(why)


def test_modules_that_the_model_names_in_another_way_are_not_compared(model: Path, tmp_path: Path) -> None:
    lora = lora_shapes(write_lora(tmp_path / "lora", model))
    quantized = {name.replace(".weight", ".qweight"): shape for name, shape in model_shapes(model).items()}
    assert lora_fault(lora, quantized, LAYERS, RANKS) == ""
    assert lora_fault(lora, {}, LAYERS, RANKS) == ""


def test_a_file_without_matrices_of_a_lora_is_refused(model: Path) -> None:
    assert "no matrices of a LoRA" in lora_fault(model_shapes(model), model_shapes(model), LAYERS, RANKS)


def test_a_torn_or_missing_file_is_named(model: Path, tmp_path: Path) -> None:
    file = write_lora(tmp_path / "torn", model) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    assert check_lora(file.parent, model, LAYERS, RANKS).startswith(f"{file}: torn")
    file.unlink()
    assert check_lora(file.parent, model, LAYERS, RANKS).startswith(f"{file}: ")


def test_ranks_are_those_of_the_config_and_both_matrices_are_there(model: Path, tmp_path: Path) -> None:
    lora = lora_shapes(write_lora(tmp_path / "lora", model))
    module = "model.layers.0.self_attn.q_proj"
    a, b = (f"base_model.model.{module}.lora_{matrix}.weight" for matrix in "AB")
    fit = model_shapes(model)
    assert lora_fault(lora, fit, LAYERS, (8, 9)) == ""
    assert lora_fault(lora, fit, LAYERS, (4,)) == f"{module} has rank 8 in A and 8 in B; the config says 4"
    uneven = lora | {b: (lora[b][0], 4)}
    assert lora_fault(uneven, fit, LAYERS, (4, 8)) == f"{module} has rank 8 in A and 4 in B; the config says 4 or 8"
    assert lora_fault({name: shape for name, shape in lora.items() if name != a}, fit, LAYERS, RANKS) == (
        f"{module} has a matrix B only"
    )


def test_numbers_that_are_not_finite_are_refused(model: Path, tmp_path: Path) -> None:
    directory = write_lora(tmp_path / "lora", model)
    file = directory / "adapter_model.safetensors"
    stored = file.read_bytes()
    file.write_bytes(stored[:-4] + b"\x00\x00\xc0\x7f")  # a float32 that is not a number
    assert check_lora(directory, model, LAYERS, RANKS).endswith("has numbers that are not finite")
