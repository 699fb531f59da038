"""deploy/local/operate.py: which workers an operation is for."""

from __future__ import annotations

import msgspec
import pytest

from deploy.local.operate import RAMP_S, choose_workers, operate, others_serve, sleepers, summary
from deploy.local.show.fleet import FleetConfig
from services.router.config import LoadConfig
from shared import subjects
from shared.errors import ConfigError
from shared.messages.cards import INSTANCE, MODEL_CARD, Instance, KvLayout, ModelCard
from shared.messages.codec import JSON_HEADER
from shared.messages.people import OperateWorker, WorkerOperated

NAMESPACE = "default"
CLEAR, UNLOAD = OperateWorker("clear"), OperateWorker("unload_lora", "sql")


def entries(*workers: tuple[str, str, tuple[str, ...]], asleep: str = "") -> dict[str, bytes]:
    """Discovery's entries of workers: id, model (empty: no card), LoRAs. Those without a card sleep, and are of the
    model `asleep` unless that is empty."""
    found: dict[str, bytes] = {}
    for worker, model, loras in workers:
        instance = Instance(NAMESPACE, "worker", worker, 1, "machine", 42, 1.0, "0.1.0")
        if asleep and not model:
            instance = msgspec.structs.replace(instance, state="asleep", model=asleep)
        found[subjects.instance_key(NAMESPACE, "worker", worker)] = INSTANCE.encode(instance, JSON_HEADER)
        if model:
            card = ModelCard(
                model=model,
                instance=worker,
                path="",
                context_length=64,
                vocab_size=10,
                eos_token_ids=(2,),
                block_size=16,
                capacity_blocks=4,
                kv_layout=KvLayout("float32", 1, 1, 1, 16),
                lora=loras,
                tokenizer_digest="",
                hash_self_test="",
            )
            found[subjects.model_key(NAMESPACE, model, worker)] = MODEL_CARD.encode(card, JSON_HEADER)
    return found


def chosen(values: dict[str, bytes], asked: OperateWorker, *prefixes: str, model: str = "") -> list[str]:
    return [each.instance for each in choose_workers(NAMESPACE, values, asked, prefixes, model)]


def test_the_ramp_that_resume_and_wake_name_is_the_routers() -> None:
    assert LoadConfig().ramp_s == RAMP_S


def test_a_worker_is_named_by_how_its_id_begins() -> None:
    values = entries(("0aa1", "m", ()), ("0ab2", "", ()))
    assert chosen(values, CLEAR, "0aa") == ["0aa1"]
    assert chosen(values, CLEAR, "0ab2") == ["0ab2"], "one that sleeps has no card"
    assert chosen(values, CLEAR, "0aa", "0aa1") == ["0aa1"]
    with pytest.raises(ConfigError, match="several workers begin with '0a': 0aa1, 0ab2"):
        chosen(values, CLEAR, "0a")
    with pytest.raises(ConfigError, match="no worker begins with 'zz': 0aa1, 0ab2"):
        chosen(values, CLEAR, "zz")


def test_without_an_id_all_workers_of_the_only_model_are_meant() -> None:
    values = entries(("0a", "m", ("sql@1",)), ("0b", "m", ()), ("0c", "", ()))
    load = OperateWorker("load_lora", "law", path="/law")
    assert chosen(values, load) == ["0a", "0b"]
    assert chosen(values, UNLOAD) == ["0a"]
    with pytest.raises(ConfigError, match="no worker has the LoRA law"):
        chosen(values, OperateWorker("unload_lora", "law"))


def test_workers_that_sleep_are_said_to_be_passed_over() -> None:
    values = entries(("0a", "m", ()), ("0b", "n", ()), ("0c", "", ()), asleep="m")
    load = OperateWorker("load_lora", "law", path="/law")
    for model, passed_over in (("m", ["0c"]), ("n", [])):
        chosen = [
            msgspec.structs.replace(each, model=model) for each in choose_workers(NAMESPACE, values, load, (), model)
        ]
        assert [each.instance for each in sleepers(NAMESPACE, values, chosen)] == passed_over
    with pytest.raises(ConfigError, match=r"no worker of m serves now; asleep, until `.*headrace wake`: 0c, 0d"):
        choose_workers(NAMESPACE, entries(("0d", "", ()), ("0c", "", ()), asleep="m"), load, (), "m")


def test_a_worker_gets_its_share_in_steps_only_where_others_serve_its_model() -> None:
    wake = OperateWorker("wake")
    for workers, others in (
        ([("0a", "", ()), ("0b", "n", ())], False),
        ([("0a", "", ()), ("0b", "m", ())], True),
        ([("0a", "m", ())], False),
    ):
        values = entries(*workers, asleep="m")
        chosen = [
            msgspec.structs.replace(each, model="m") for each in choose_workers(NAMESPACE, values, wake, ["0a"], "")
        ]
        assert others_serve(NAMESPACE, values, chosen) == others


def test_of_several_models_one_is_named() -> None:
    values = entries(("0a", "m", ()), ("0b", "n", ()))
    load = OperateWorker("load_lora", "law", path="/law")
    assert chosen(values, load, model="n") == ["0b"]
    with pytest.raises(ConfigError, match="several models are served, name one with --model: m, n"):
        chosen(values, load)
    with pytest.raises(ConfigError, match="no worker of x serves now"):
        chosen(values, load, model="x")


def test_a_fleet_without_workers_says_so() -> None:
    with pytest.raises(ConfigError, match="no worker is registered"):
        chosen({}, CLEAR, "0a")


def test_what_is_printed() -> None:
    assert summary(WorkerOperated("0a")) == "serves"
    assert summary(WorkerOperated("0a", state="asleep", lora=("sql@1",))) == "is asleep, with the LoRAs sql@1"


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), 1e9])
def test_a_wait_has_bounds(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="--timeout-s is more than 0"):
        operate(FleetConfig(), CLEAR, ["0a"], timeout_s=timeout_s)
