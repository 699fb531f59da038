"""services/worker/vllm/kv_transfer.py: vLLM's connectors from a worker's settings, and what ours says in statistics."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from services.worker.config import KVConnectorConfig, WorkerConfig
from services.worker.contracts.messages import Exchanged, KvbmLink
from services.worker.kv_connector.stores import COLLECT_S
from services.worker.vllm.connector.settings import read_settings
from services.worker.vllm.kv_transfer import (
    ConnectorSaid,
    ImageCounts,
    connector_stats,
    ec_transfer,
    expected_params,
    hand_over_name,
    hand_over_params,
    image_counts,
    is_expected,
    kv_transfer,
    sum_exchanged,
)
from shared.config import load
from shared.errors import ConfigError

POOL = {"pool": "/dev/shm/p"}


OWN = "/tmp/own"


def worker(**fields: Any) -> WorkerConfig:
    return msgspec.convert({"model": "m", "engine": "vllm", **fields}, WorkerConfig)


def test_without_a_pool_vllm_has_none() -> None:
    assert kv_transfer(worker()) is None


def test_a_pool_alone_means_our_connector_with_the_workers_settings() -> None:
    one = kv_transfer(worker(model_name="name", kvbm=POOL | {"offload": "off", "wait_s": 2.5, "checksums": True}))
    assert one is not None
    assert (one["kv_connector"], one["kv_role"], one["kv_load_failure_policy"]) == (
        "HeadraceConnector",
        "kv_both",
        "recompute",
    )
    settings = read_settings(one["kv_connector_extra_config"])
    assert (settings.pool, settings.offload, settings.wait_s) == ("/dev/shm/p", "off", 2.5)
    assert (settings.model_name, settings.checksums) == ("name", True)
    assert settings.lora_names_are_ids
    assert settings.image_names_are_keys
    assert settings.keep_on_reset
    assert read_settings(kv_transfer(worker(kvbm=POOL))["kv_connector_extra_config"]).wait_s == 1.0  # type: ignore[index]


def test_a_setting_that_was_removed_says_what_to_do_instead() -> None:
    for flags in (["--connectors", "nixl"], ["--connectors=headrace"]):
        with pytest.raises(
            ConfigError, match=r"no such setting; kvbm\.pool alone .* by vllm\.kv_transfer_config, without"
        ):
            load(WorkerConfig, environ={}, flags=["--model", "m", *flags])
    with pytest.raises(ConfigError, match=r"HEADRACE_CONNECTORS; kvbm\.pool alone"):
        load(WorkerConfig, environ={"HEADRACE_CONNECTORS": "nixl"}, flags=["--model", "m"])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kvbm": POOL | {"offload": "evicted"}}, "kvbm.offload is evicted"),
        (
            {"kvbm": POOL | {"embeddings": True}, "vllm": {"ec_transfer_config": {"ec_connector": "x"}}},
            "vllm.ec_transfer_config is set, and so is kvbm.embeddings; set one of them",
        ),
        ({"kvbm": POOL, "vllm": {"kv_transfer_config": "{}"}}, "set one of them"),
        ({"kvbm": POOL, "engine": "attached", "attached": {"url": "http://h:1"}}, "the attached engine exchanges no"),
    ],
)
def test_contradictions_are_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=said):
        worker(**fields)


def test_what_our_connector_says_is_found_alone_and_in_a_chain() -> None:
    exchanged, link = Exchanged(saved_blocks=3, saved_by={"memmove": 3}), KvbmLink("k", "layout")
    data = {**msgspec.to_builtins(exchanged), "late_lookups": 1, "link": msgspec.to_builtins(link)}
    said = ConnectorSaid(exchanged, link, [], 0)
    assert connector_stats(data) == said
    assert connector_stats({"NixlConnector": {"num": 1}, "HeadraceConnector": data}) == said
    assert connector_stats({"HeadraceConnector": {"data": data}}) == said
    told = data | {"stored": ["7"], "prefetched_blocks": 5}
    assert connector_stats(told) == ConnectorSaid(exchanged, link, ["7"], 5)
    assert connector_stats({"NixlConnector": {"num": 1}}) is None
    assert connector_stats(None) is None


@pytest.mark.parametrize(
    "params", [None, {}, {"do_remote_prefill": True}, {"headrace_hand_over": 7}, {"headrace_hand_over": "x" * 33}, "x"]
)
def test_what_a_vllm_serves_clients_send_is_no_hand_over(params: object) -> None:
    assert hand_over_name(hand_over_params("12")) == "12"
    assert hand_over_name(params) == ""


def test_a_prefill_worker_stores_at_once_what_another_worker_waits_for() -> None:
    waits = [
        read_settings(kv_transfer(worker(kvbm=POOL, role=role))["kv_connector_extra_config"]).collect_s  # type: ignore[index]
        for role in ("prefill", "decode", "aggregated")
    ]
    assert waits == [0.0, COLLECT_S, COLLECT_S]


def test_only_a_decode_worker_keeps_requests_for_prompts_that_others_compute() -> None:
    keeps = [
        read_settings(kv_transfer(worker(kvbm=POOL, role=role))["kv_connector_extra_config"]).prefetches  # type: ignore[index]
        for role in ("prefill", "decode", "aggregated")
    ]
    assert keeps == [False, True, False]
    assert is_expected(expected_params())
    assert not any(is_expected(params) for params in (None, {}, "x", {"headrace_expected": 1}, hand_over_params("1")))


def test_the_counts_of_all_ranks_are_added() -> None:
    one = Exchanged(saved_blocks=3, save_s=0.5, saved_by={"a": 3}, fallbacks={"x": 1})
    other = Exchanged(saved_blocks=4, save_s=0.25, saved_by={"a": 1, "b": 3})
    assert sum_exchanged([one, other]) == Exchanged(
        saved_blocks=7, save_s=0.75, saved_by={"a": 4, "b": 3}, fallbacks={"x": 1}
    )
    assert sum_exchanged([]) == Exchanged()


@pytest.mark.parametrize("fails", [False, True])
def test_the_sum_can_be_sent(fails: bool) -> None:
    total = sum_exchanged([Exchanged(saved_blocks=3, save_s=0.5, saved_by={"a": 3}), Exchanged(sharing_fails=fails)])
    assert total.sharing_fails is fails
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(total), type=Exchanged) == total


def test_the_default_is_no_pool() -> None:
    assert KVConnectorConfig().pool == ""


def test_embeddings_need_a_pool_the_setting_and_a_worker_that_takes_images() -> None:
    for fields in ({}, {"kvbm": POOL}, {"kvbm": POOL | {"embeddings": True}, "most_images": 0}):
        assert ec_transfer(worker(**fields), OWN) is None
    kvbm = POOL | {"embeddings": True, "timeout_s": 3.0}
    one = ec_transfer(worker(model_name="name", kvbm=kvbm), OWN)
    assert one is not None
    assert (one["ec_connector"], one["ec_role"]) == ("HeadraceECConnector", "ec_both")
    given = {"pool": "/dev/shm/p", "model_name": "name", "timeout_s": 3.0, "reports": "/tmp/own"}
    assert one["ec_connector_extra_config"] == given


def test_a_worker_that_only_encodes_exchanges_embeddings_and_no_blocks() -> None:
    encodes = worker(kvbm=POOL | {"embeddings": True}, role="encode")
    assert kv_transfer(encodes) is None
    one = ec_transfer(encodes, OWN)
    assert one is not None
    assert one["ec_role"] == "ec_producer"


def test_what_became_of_images_is_read_from_a_steps_statistics() -> None:
    assert image_counts(None) is None
    said = {"hits": 1, "encoded": 2, "fetched": 3, "entries": 4, "size_bytes": 5}
    assert image_counts(said) == ImageCounts(1, 2, 3, 4, 5)
