"""deploy/local/stack/turns.py: the models of `up --models`, and what is refused of them in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from deploy.local.stack.model import CHAT_TEMPLATE, FILE, NAME
from deploy.local.stack.model_source import ModelSource
from deploy.local.stack.options import checked_options
from deploy.local.stack.stack import TurnModel
from deploy.local.stack.turns import (
    MOST_MODELS,
    check_names,
    check_room,
    device_name,
    find_model,
    turn_model,
    turn_words,
    weights_bytes,
)
from deploy.local.usage import UpFlags
from services.worker.config import ENGINES_BY_TURNS
from services.worker.turns import decider
from shared.errors import ConfigError
from shared.subjects import is_id

TWO = UpFlags(models="a, b")


def test_models_are_named_with_commas_and_one_is_awake_at_once() -> None:
    assert turn_words(UpFlags()) == []
    assert turn_words(TWO) == ["a", "b"]
    options, _ = checked_options(replace(TWO, engine="echo"))
    assert (options.workers, options.awake, options.chat_template, options.sampling) == (2, 1, "", {})
    assert checked_options(replace(TWO, awake=2))[0].awake == 2


def test_deployment_and_services_agree_on_what_takes_turns() -> None:
    assert MOST_MODELS == decider.MOST_MODELS
    for engine in ENGINES_BY_TURNS:
        assert turn_words(replace(TWO, engine=engine))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (UpFlags(awake=1), "--awake needs --models"),
        (replace(TWO, models="a"), "--models a: 2 to 64 models, commas between them; --model serves one"),
        (replace(TWO, models="a,,b"), "--models a,,b: 2 to 64 models, commas between them; --model serves one"),
        (replace(TWO, models="a,b,a"), "--models: a is named twice"),
        (replace(TWO, awake=3), "--awake 3: 1 to 2, the number of --models"),
        (replace(TWO, awake=0), "--awake 0: 1 to 2, the number of --models"),
        (replace(TWO, model="c"), "--model: not with --models, whose models take turns"),
        (replace(TWO, workers=2), "--workers: not with --models, whose models take turns"),
        (replace(TWO, single=True), "--single: not with --models, whose models take turns"),
        (replace(TWO, tensor_parallel=2), "--tensor-parallel: not with --models, whose models take turns"),
        (replace(TWO, engine="attached"), "--engine attached: not with --models, whose models take turns"),
        (replace(TWO, on="ray"), "--on ray: not with --models, whose models take turns"),
        (replace(TWO, set=["turns.device=x"]), "--set turns.device: `up` sets that itself"),
        (replace(TWO, set=["worker.turns=x"]), "--set worker.turns: `up` sets that itself"),
        (UpFlags(set=["turns.turn_s=9"]), "--set turns.turn_s: it needs --models"),
    ],
)
def test_what_fits_in_no_turn_is_refused_by_its_flag(flags: UpFlags, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        checked_options(flags)
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


def test_machines_of_a_fleet_have_devices_of_different_names() -> None:
    names = [
        device_name("host.example", "boot-1"),
        device_name("host.example", "boot-2"),
        device_name("other", "boot-1"),
    ]
    assert len(set(names)) == 3
    assert names[0].startswith("host-example-cpu-")
    assert all(is_id(name) for name in (*names, device_name("", ""), device_name("x" * 64, "b")))


def test_the_bundled_model_takes_turns_by_its_name_with_its_own_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = find_model(NAME, tmp_path / "cache", weights=True)
    assert (found.path, found.name, found.here) == (tmp_path / "cache" / FILE, NAME, False)
    assert turn_model(NAME, found.name, found.path).chat_template == CHAT_TEMPLATE
    (tmp_path / NAME).mkdir()
    assert find_model(NAME, tmp_path / "cache", weights=True).here
    assert turn_model(NAME, NAME, tmp_path / NAME).chat_template == ""


def test_two_models_of_one_name_are_refused() -> None:
    check_names([ModelSource(Path("/a/m"), "m"), ModelSource(Path("/a/n"), "n")])
    with pytest.raises(ConfigError, match="--models: 2 are called m, after their directories or files; rename one"):
        check_names([ModelSource(Path("/a/m"), "m"), ModelSource(Path("/b/m"), "m")])


def test_models_that_do_not_fit_into_memory_are_refused_alone_or_together(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "model.safetensors").write_bytes(bytes(600))
    (tmp_path / "a" / "tokenizer.json").write_bytes(bytes(5000))
    (tmp_path / "b.gguf").write_bytes(bytes(500))
    models = [TurnModel("a", str(tmp_path / "a")), TurnModel("b", str(tmp_path / "b.gguf"))]
    assert [weights_bytes(Path(model.path)) for model in models] == [600, 500]
    check_room(models, 1, 600)
    check_room(models, 2, 1100)
    with pytest.raises(ConfigError) as refused:
        check_room(models, 1, 599)
    assert str(refused.value) == "--models: a, 600 B of files, fit in no turn of this machine's 599 B of memory"
    with pytest.raises(ConfigError) as refused:
        check_room(models, 2, 1099)
    assert str(refused.value) == (
        "--awake 2: a, b, 1.1 kB of files, fit in no turn of this machine's 1.1 kB of memory; let fewer be awake"
    )
