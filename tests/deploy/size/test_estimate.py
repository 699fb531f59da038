"""`headrace estimate` against rows that others have published, and with input that it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from deploy.local.autoscale.flags import worker_times
from deploy.local.cli import main
from deploy.local.size.estimate import BUNDLED_CONFIG, estimate_of, find_gpu
from deploy.local.size.files import read_profile
from deploy.local.size.roofline import ENGINES, GpuSplit, Roofline
from deploy.local.size.shape import shape_of
from deploy.local.stack.model import FILE
from deploy.local.stack.model import NAME as BUNDLED
from deploy.local.stack.model_source import cache_directory
from deploy.local.state import StateDirectory
from deploy.local.usage import EstimateFlags, UpFlags, parse
from services.worker.native.gguf_file import GgufFile
from tests.hub_server import HubServer, Repository, files_of, use_hub

PUBLIC = Path(__file__).with_name("public_rows.json")


class PublicRow(Struct, frozen=True):
    """One measurement that others have published."""

    source: str
    gpu: str
    model: str
    tensor: int
    bits: float
    kv_bits: float
    batch: int
    input: int
    output: int
    kind: str
    """`decode`: a step without prompts in between. `whole`: the prompts of a batch are computed in between."""
    itl_ms: float


class PublicRows(Struct, frozen=True):
    """The content of the file."""

    sources: dict[str, dict[str, str]]
    configs: dict[str, dict[str, Any]]
    rows: list[PublicRow]
    held_out: list[PublicRow]
    """Rows on other GPUs, looked up after the terms were set."""


ROWS = msgspec.json.decode(PUBLIC.read_bytes(), type=PublicRows)


def error_of(row: PublicRow) -> float:
    """Return by which share of the measured time the estimate is off."""
    shape = shape_of(ROWS.configs[row.model], row.model)
    fit = Roofline(shape, find_gpu(row.gpu), GpuSplit(row.tensor), ENGINES["vllm"], row.bits, row.kv_bits)
    if row.kind == "whole":
        return abs(fit.loaded_s(row.batch, row.input, row.output) / row.itl_ms * 1e3 - 1)
    return abs(fit.decode(row.batch, row.input + row.output / 2).seconds / row.itl_ms * 1e3 - 1)


def config(folder: Path, **changes: object) -> str:
    settings = {name: value for name, value in {**ROWS.configs["Llama-3-8B"], **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return str(folder)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["estimate", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    return shown.err


def test_the_time_a_token_of_published_rows_is_met_within_twenty_percent_in_the_median() -> None:
    errors = [error_of(row) for row in ROWS.rows]
    assert len(errors) >= 40
    assert {row.gpu for row in ROWS.rows} == {"H100", "H200"}
    assert median(errors) <= 0.16
    for gpu, most in (("H100", 0.10), ("H200", 0.18)):
        assert median(error_of(row) for row in ROWS.rows if row.gpu == gpu) <= most
    assert {row.source for row in [*ROWS.rows, *ROWS.held_out]} == ROWS.sources.keys()


def test_rows_on_other_gpus_with_a_newer_engine_are_met_within_thirty_percent() -> None:
    errors = [error_of(row) for row in ROWS.held_out if row.source == "accelmark-0.20"]
    assert len(errors) == 3
    assert max(errors) <= 0.30


def test_the_rows_that_the_fractions_come_from_are_met_within_nine_percent() -> None:
    measured = json.loads(Path("benchmarks/results/vllm_gpu_engines.json").read_text(encoding="utf-8"))["rows"]
    shape = shape_of(ROWS.configs["Llama-3-8B"], "Llama-3-8B")
    checked = 0
    for row in measured:
        fit = Roofline(shape, find_gpu("H200"), GpuSplit(), ENGINES[row["engine"]], 16, 16)
        if row["what"] == "decode":
            assert fit.decode(row["batch"], row["context"]).seconds == pytest.approx(row["step_ms"] / 1e3, rel=0.05)
            checked += 1
        elif row["what"] == "prefill":
            assert fit.first_s(row["tokens"]) == pytest.approx(row["ms"] / 1e3, rel=0.09)
            checked += 1
    assert checked == 10


def test_kv_of_8_bits_is_read_no_faster_from_a_faster_memory_and_of_16_bits_it_is() -> None:
    shape = shape_of(ROWS.configs["Llama-3-8B"], "Llama-3-8B")

    def kv_s(gpu: str, bits: float) -> float:
        return Roofline(shape, find_gpu(gpu), GpuSplit(), ENGINES["vllm"], 16, bits).decode(64, 4096).kv_s

    assert kv_s("H200", 8) == kv_s("H100", 8)  # attention's arithmetic is the limit, which is the same
    assert kv_s("H200", 16) == pytest.approx(kv_s("H100", 16) * 3350 / 4800)
    assert kv_s("L4", 8) == pytest.approx(kv_s("L4", 16) / 2)  # its memory is slower than its arithmetic


def test_a_model_of_70b_on_two_gpus_has_room_and_a_batch_costs_a_token_more(tmp_path: Path) -> None:
    model = config(tmp_path, **ROWS.configs["Llama-3-70B"])
    made = estimate_of(EstimateFlags(model=model, gpu="h200", tensor_parallel=2))
    assert made.weights_gb == pytest.approx(70.6, abs=0.1)
    assert made.largest_batch == made.kv_tokens // (2048 + 256)
    assert [load.batch for load in made.loads] == [1, 8, 32, 128, made.largest_batch]
    assert made.loads[2].itl_s == pytest.approx(0.0246, abs=0.001)
    times = [load.itl_s for load in made.loads]
    assert times == sorted(times)


def test_a_cached_share_shortens_the_first_token_and_the_load(tmp_path: Path) -> None:
    model = config(tmp_path)
    whole = estimate_of(EstimateFlags(model=model, gpu="H100", prompt=8192, batch="8"))
    cached = estimate_of(EstimateFlags(model=model, gpu="H100", prompt=8192, batch="8", cached=0.9))
    assert cached.ttft_s < 0.3 * whole.ttft_s
    assert cached.loads[0].loaded_itl_s < whole.loads[0].loaded_itl_s
    assert cached.loads[0].itl_s == whole.loads[0].itl_s


def test_fewer_bits_make_room_and_steps_shorter_and_a_quantised_config_says_so(tmp_path: Path) -> None:
    flags = EstimateFlags(model=config(tmp_path), gpu="H100", batch="1")
    plain, eight = estimate_of(flags), estimate_of(msgspec.structs.replace(flags, dtype="fp8"))
    assert eight.kv_tokens > plain.kv_tokens
    assert eight.loads[0].itl_s < 0.75 * plain.loads[0].itl_s
    config(tmp_path, quantization_config={"quant_method": "fp8"})
    assert estimate_of(flags).weights_gb == eight.weights_gb
    native = msgspec.structs.replace(flags, engine="native")
    assert estimate_of(native).weights_gb == plain.weights_gb  # it expands them
    config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    assert estimate_of(flags).weights_gb < 0.7 * eight.weights_gb


def test_a_mixture_of_experts_reads_few_experts_for_one_sequence_and_all_for_many(tmp_path: Path) -> None:
    model = config(tmp_path, num_local_experts=8, num_experts_per_tok=2)
    made = estimate_of(EstimateFlags(model=model, gpu="H200", batch="1,32"))
    dense = estimate_of(EstimateFlags(model=config(tmp_path), gpu="H200", batch="1,32"))
    assert made.weights_gb > 5 * dense.weights_gb
    assert made.loads[0].itl_s < 2.5 * dense.loads[0].itl_s
    assert made.loads[1].itl_s > 3 * dense.loads[1].itl_s


MIXED = {"model_type": "llama4_text", "head_dim": 128, "num_attention_heads": 40, "num_experts_per_tok": 1}
MADE_OF = {"hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "vocab_size": 202048}
NEXT = {
    **{"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2},
    **{"head_dim": 256, "intermediate_size": 5120, "vocab_size": 151936, "num_experts": 512},
    **{"moe_intermediate_size": 512, "num_experts_per_tok": 10, "shared_expert_intermediate_size": 512},
    **{"linear_num_value_heads": 32, "linear_num_key_heads": 16, "full_attention_interval": 4},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
}
"""Qwen3-Next-80B-A3B's: three of four layers are linear attention."""


@pytest.mark.parametrize(
    ("changes", "billions", "active"),
    [
        (
            {**MIXED, **MADE_OF, "num_hidden_layers": 48, "num_local_experts": 16, "interleave_moe_layer_step": 1},
            109,
            17,
        ),
        (
            {**MIXED, **MADE_OF, "num_hidden_layers": 48, "num_local_experts": 128, "interleave_moe_layer_step": 2},
            400,
            17,
        ),
        (NEXT, 80, 3.8),
        ({**NEXT, "decoder_sparse_step": 2}, 41.6, 3.75),
        ({**NEXT, "mlp_only_layers": [0, 1]}, 77, 3.8),
        ({**NEXT, "moe_layer_freq": [0, *[1] * 47]}, 78, 3.8),
    ],
)
def test_the_parameters_of_mixtures_are_those_of_their_names(
    changes: dict[str, Any], billions: float, active: float
) -> None:
    shape = shape_of({**ROWS.configs["Llama-3-8B"], **changes}, "made")
    tables = 2 * shape.table_weights
    assert shape.decoder_weights + tables == pytest.approx(billions * 1e9, rel=0.02)
    assert shape.active_weights + tables == pytest.approx(active * 1e9, rel=0.03)


def test_layers_of_linear_attention_keep_a_state_for_a_sequence_in_place_of_keys_for_a_token(tmp_path: Path) -> None:
    flags = EstimateFlags(model=config(tmp_path, **NEXT), gpu="H200", tensor_parallel=2, batch="1")
    made = estimate_of(flags)
    assert made.kv_token_bytes == 12 * 2 * 2 * 256 * 2 / 2, "12 layers, keys and values, 2 heads, 16 bits, 2 GPUs"
    config(tmp_path, **{**NEXT, "layer_types": ["linear_attention", "full_attention"] * 24})
    assert estimate_of(flags).kv_token_bytes == 2 * made.kv_token_bytes
    config(tmp_path, **NEXT)
    longer = estimate_of(msgspec.structs.replace(flags, prompt=100_000))
    assert longer.kv_tokens > 1.5 * made.kv_tokens, "fewer sequences, of which each has one state"
    state = 36 * 32 * 128 * 128 * 4 / 2
    room = made.largest_batch * ((flags.prompt + flags.output) * made.kv_token_bytes + state)
    assert room == pytest.approx((0.9 * 150.8 - made.weights_gb) * 1e9, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"moe_num_experts": 64, "moe_k": 6}, "moe_num_experts: mixtures of experts of this kind are not known here"),
        ({"layer_types": ["conv"] * 32}, "layer_types has 'conv': layers of this kind are not known here"),
        ({"mamba_d_conv": 4, "attn_layer_period": 8}, "mamba_d_conv: layers of this kind are not known here"),
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input: layers of this kind are not known"),
        ({"full_attention_interval": 4}, "linear_num_key_heads is missing"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, which does not fit the other sizes"),
    ],
)
def test_layers_of_other_kinds_are_refused_by_the_setting_that_has_them(
    changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"config.json: {said}" in refused(capsys, config(tmp_path, **changes), "--gpu", "H200")


def test_a_model_whose_settings_name_what_it_has_none_of_is_estimated(tmp_path: Path) -> None:
    plain = estimate_of(EstimateFlags(model=config(tmp_path), gpu="H100"))
    attention = {"layer_types": ["attention"] * 32, "mamba_d_conv": 4}
    config(tmp_path, **attention, num_local_experts=0, num_experts_per_tok=0, n_shared_experts=1, moe_layer_freq=1)
    assert estimate_of(EstimateFlags(model=str(tmp_path), gpu="H100")) == plain
    config(tmp_path, attn_type_list=[1] * 32)  # MiniMax's
    assert estimate_of(EstimateFlags(model=str(tmp_path), gpu="H100")) == plain


def test_modelopts_four_bits_are_not_taken_for_eight(tmp_path: Path) -> None:
    flags = EstimateFlags(model=config(tmp_path, quantization_config={"quant_method": "modelopt"}), gpu="H100")
    eight = estimate_of(flags).weights_gb
    config(tmp_path, quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    assert estimate_of(flags).weights_gb < 0.7 * eight


def test_the_native_engine_shares_a_model_among_gpus_and_the_plan_starts_it_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = config(tmp_path, **ROWS.configs["Llama-3-70B"])
    words = ["estimate", model, "--gpu", "H200", "--engine", "native", "--tensor-parallel", "2", "--out", "p.json"]
    assert main([*words, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    table = ROWS.configs["Llama-3-70B"]["vocab_size"] * 8192 * 2 / 1e9
    assert made["weights_gb"] == pytest.approx(70.6 + table / 2, abs=0.1), "each GPU has the whole embedding"
    load = ["--rate", "1", "--requests", "20", "--ttft-p90", "2", "--most", "1", "--step-s", "0.25", "--jobs", "1"]
    assert main(["plan", "--profile", "p.json", *load, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"]["gpus"] == 2
    flags = parse(["up", "@plan.up"])
    assert isinstance(flags, UpFlags)
    assert (flags.engine, flags.device, flags.tensor_parallel) == ("native", "cuda", 2)


def test_json_has_the_same_figures_and_where_they_come_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", config(tmp_path), "--gpu", "H200", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["kv_token_bytes"] == 131072
    assert len(made["assumed"]) == 3
    load = made["loads"][0]  # one GPU of 700 W
    assert load["watt_hours_a_million_tokens"] == pytest.approx(1e6 / load["output_tokens_per_s"] * 700 / 3600)
    assert main(["estimate", str(tmp_path / "config.json"), "--gpu", "H200"]) == 0
    assert f"{made['kv_tokens']:,} tokens of KV" in capsys.readouterr().out


def test_the_times_as_a_profile_are_what_plan_and_autoscale_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = config(tmp_path, **ROWS.configs["Llama-3-70B"])
    words = ["estimate", model, "--gpu", "H200", "--tensor-parallel", "2", "--out"]
    assert main([*words, "none/p.json"]) == 2
    assert "no such directory: none" in capsys.readouterr().err
    assert main([*words, "p.json", "--json"]) == 0
    made, profile = json.loads(capsys.readouterr().out), read_profile(Path("p.json"))
    assert main([*words, "p.json"]) == 2
    assert "there is such a file, maybe with measured times" in capsys.readouterr().err
    times = worker_times(profile, 1.0)
    assert times.step_s(8, 2176) == pytest.approx(made["loads"][1]["itl_s"], rel=1e-6)
    assert times.prefill.at(2048, 0) + profile.overhead_s == pytest.approx(made["ttft_s"])
    load = ["--rate", "1", "--requests", "20", "--ttft-p90", "2", "--most", "1", "--step-s", "0.25", "--jobs", "1"]
    assert main(["plan", "--profile", "p.json", *load, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"]["gpus"] == 2
    flags = parse(["up", "@plan.up"])
    assert isinstance(flags, UpFlags)
    assert (flags.engine, flags.model) == ("vllm", str(tmp_path))
    assert "worker.vllm.tensor_parallel_size=2" in flags.set


def test_aiconfigurators_times_get_a_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "aiconfigurator"
    said = "  Generation lat.:  1252.238 ms\\n  TPOT:             4.911 ms\\n"  # as version 0.12.0 says it
    program.write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/asked\nprintf "{said}"\n', encoding="utf-8")
    program.chmod(0o755)
    words = [config(tmp_path), "--gpu", "H200", "--batch", "1", "--aiconfigurator", str(program)]
    assert main(["estimate", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loads"][0]["aiconfigurator_itl_s"] == pytest.approx(0.004911)
    asked = (tmp_path / "asked").read_text(encoding="utf-8")
    assert "--system h200_sxm --backend vllm --isl 2048 --osl 256 --batch-size 1 --tp-size 1" in asked
    assert main(["estimate", *words]) == 0
    assert "AICONFIGURATOR" in capsys.readouterr().out
    program.write_text("#!/bin/sh\necho no data for this >&2\nexit 1\n", encoding="utf-8")
    assert "no data for this" in refused(capsys, *words)
    program.unlink()
    assert "No such file" in refused(capsys, *words)
    assert "it has no H100-NVL" in refused(capsys, *[word.replace("H200", "H100-NVL") for word in words])


def test_an_unknown_gpu_lists_those_that_are_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, config(tmp_path), "--gpu", "H300")
    assert "--gpu H300: not known" in said
    assert "H200, H100" in said
    assert "name a GPU with --gpu" in refused(capsys, config(tmp_path))


def test_a_config_without_a_size_is_refused_by_the_name_of_the_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, config(tmp_path, num_hidden_layers=None), "--gpu", "H200")
    assert "config.json: num_hidden_layers is missing" in said
    said = refused(capsys, config(tmp_path, hidden_size="big"), "--gpu", "H200")
    assert "hidden_size is 'big'; expected a size" in said
    assert "no such file or directory; a model" in refused(capsys, str(tmp_path / "none.json"), "--gpu", "H200")
    said = refused(capsys, config(tmp_path, quantization_config={"quant_method": "new"}), "--gpu", "H200")
    assert "quantization new is not known here: give --dtype" in said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"head_dim": 0}, "head_dim is 0, which does not fit the other sizes"),
        ({"hidden_size": 1, "head_dim": None}, "head_dim is 0, which"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0, which"),
        ({"num_key_value_heads": 33}, "num_key_value_heads is 33, which"),
        ({"num_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok is 9, which"),
        (
            {"num_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 33},
            "first_k_dense_replace is 33, which",
        ),
        ({"quantization_config": {"config_groups": {"all": "int4"}}}, "quantization without a name is not known here"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(
    settings: dict[str, object], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"config.json: {said}" in refused(capsys, config(tmp_path, **settings), "--gpu", "H200")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tensor-parallel", "3"], "--tensor-parallel 3 does not divide the model's 32 heads"),
        (["--pipeline-parallel", "33"], "--pipeline-parallel 33 is more than the model's 32 layers"),
        (["--expert-parallel", "2"], "--expert-parallel 2: the model has no experts"),
        (["--engine", "native", "--pipeline-parallel", "2"], "the native engine shares a model among up to 8 GPUs"),
        (["--engine", "native", "--tensor-parallel", "16"], "the native engine shares a model among up to 8 GPUs"),
        (["--cached", "1"], "--cached is a share of the prompt"),
        (["--prompt", "0"], "--prompt is 1 to"),
        (["--batch", "8,x"], "--batch: 'x': must be whole numbers"),
        (["--batch", "100000"], "--batch 100000: there is room for"),
        (["--memory-share", "0"], "--memory-share is above 0"),
    ],
)
def test_what_does_not_fit_together_gets_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, config(tmp_path), "--gpu", "H100", *words)


def test_a_model_that_does_not_fit_is_refused_with_how_much_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = config(tmp_path, **ROWS.configs["Llama-3-70B"])
    said = refused(capsys, model, "--gpu", "H200")
    assert "141.1 GB of each H200, 5.4 GB more than 0.9 of its 150.8 GB: --tensor-parallel 2 leaves 65 GB" in said
    config(tmp_path, **ROWS.configs["Llama-3-70B"], num_local_experts=64, num_experts_per_tok=2)
    assert "of its 150.8 GB: use more GPUs, or fewer bits for a weight" in refused(capsys, model, "--gpu", "H200")
    config(tmp_path, **ROWS.configs["Llama-3-70B"])
    said = refused(capsys, model, "--gpu", "H200", "--tensor-parallel", "2", "--prompt", "400000")
    assert "fewer than one sequence has" in said
    limited = config(tmp_path, max_position_embeddings=4096)
    assert "the model's context has 4096" in refused(capsys, limited, "--gpu", "H200", "--prompt", "4096")


def test_a_model_on_the_hub_is_estimated_by_its_small_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "made").mkdir()
    files = {**files_of(Path(config(tmp_path / "made"))), "tokenizer.json": b"{}", "model.safetensors": bytes(1 << 20)}
    hub = HubServer()
    hub.repositories["org/made"] = Repository(files)
    with hub.running(), monkeypatch.context() as patched:
        use_hub(hub, tmp_path / "hub", patched)
        patched.chdir(tmp_path)
        assert main(["estimate", "org/made", "--gpu", "H200", "--out", "made.json", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["model"] == "org/made"
        assert not [asked for asked in hub.asked if "safetensors" in asked.path], "no weights are fetched"
        profile = read_profile(Path("made.json"))
        assert profile.subject.model == "org/made"
        assert "--model org/made" in profile.subject.server
        assert main(["estimate", "org/none", "--gpu", "H200"]) == 1
        said = capsys.readouterr().err.splitlines()[-1]
    assert "has no model org/none, or it is private" in said
    assert said.endswith("; config.json alone is enough: give its path in place of org/none")


def test_the_bundled_model_is_estimated_by_its_name_without_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "empty"))
    assert main(["estimate", BUNDLED, "--gpu", "L4", "--engine", "native", "--out", "p.json"]) == 0
    assert f"{BUNDLED} on NVIDIA L4" in capsys.readouterr().out
    subject = read_profile(Path("p.json")).subject
    assert subject.model == BUNDLED
    assert f"--model {BUNDLED}" in subject.server
    assert not (tmp_path / "empty").exists()


def test_the_bundled_models_sizes_are_those_of_its_file() -> None:
    source = cache_directory(StateDirectory(Path(".headrace"))) / FILE
    if not source.exists():
        pytest.skip(f"{source} is not there")
    kept = json.loads(BUNDLED_CONFIG.read_text(encoding="utf-8"))
    described = {**GgufFile(source).config(), "torch_dtype": "bfloat16"}
    assert shape_of(kept, "kept") == shape_of(described, "described")


def test_what_is_no_model_is_refused_with_what_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nosuch: no such file or directory; a model on the hub is ORG/NAME" in refused(
        capsys, "nosuch", "--gpu", "H200"
    )
    assert "this directory has no config.json, which is all that `estimate` reads" in refused(
        capsys, str(tmp_path), "--gpu", "H200"
    )
    (tmp_path / "large.gguf").write_bytes(bytes(1 << 21))
    said = refused(capsys, str(tmp_path / "large.gguf"), "--gpu", "H200")
    assert "a GGUF file; `estimate` takes the ORG/NAME or the config.json of its model" in said
