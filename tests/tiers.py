"""Which tests run when. Pure.

    check   before each commit: what runs in one process or starts little, 200 new seeds, one whole stack
    all     in CI too: whole stacks, a third of other projects' clients, a short chaos run
    long    at a release too: all clients, all faults, all installations, 5,000 new seeds, storms, vLLM,
            containers, a GPU

A test is of one tier. `./check` runs the tests of `check`, `./check all` those of `check` and `all`, `./check long`
those of all three.

FILES gives the tier of the files whose path begins in a way. The longest beginning counts; a file that has none of them
is of `all`. A test of a later tier than its file has the mark `pytest.mark.tier("long")`, or one of MARKS.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import date
from typing import Literal, get_args

Tier = Literal["check", "all", "long"]
TIERS: tuple[Tier, ...] = get_args(Tier)
MARKS: Mapping[str, Tier] = {"gpu": "long", "vllm": "long", "diffusers": "long"}
"""The tiers of tests with these marks: what they need is not there in CI."""
FILES: Mapping[str, Tier] = {
    "tests/test_": "check",
    "tests/deploy/": "check",
    "tests/frontend/": "check",
    "tests/kvbm/": "check",
    "tests/monitoring/": "check",
    "tests/router/": "check",
    "tests/shared/": "check",
    "tests/simulation/": "check",
    "tests/vllm/": "check",
    "tests/worker/": "check",
    # Needs podman, which CI has not.
    "tests/containers/": "long",
    # Needs Ray, 80 MB to fetch.
    "tests/ray/": "long",
    # One whole stack.
    "tests/integration/test_smoke.py": "check",
    # Programs and servers that take long, and random cases that take much.
    "tests/deploy/bench/test_compare.py": "all",
    "tests/deploy/autoscale/test_capacity.py": "all",
    "tests/deploy/autoscale/test_day_curve.py": "all",
    "tests/deploy/autoscale/test_lead.py": "all",
    "tests/deploy/bench/test_sweep.py": "all",
    "tests/deploy/check/test_run.py": "all",
    "tests/deploy/ray/test_actor.py": "all",
    "tests/deploy/ray/test_cluster.py": "all",
    "tests/deploy/size/": "all",
    "tests/deploy/stack/test_check.py": "all",
    "tests/deploy/stack/test_hub": "all",
    "tests/deploy/stack/test_model.py": "all",
    "tests/deploy/test_cli.py": "all",
    "tests/deploy/test_etcd_users.py": "all",
    "tests/deploy/test_install_diffusers.py": "all",
    "tests/deploy/test_install_vllm.py": "all",
    "tests/frontend/media/": "all",
    "tests/frontend/serving/test_pictures.py": "all",
    "tests/frontend/serving/test_videos.py": "all",
    "tests/worker/diffusers/": "all",
    "tests/deploy/test_nats_cluster.py": "all",
    "tests/deploy/test_unit.py": "all",
    "tests/deploy/test_usage.py": "all",
    "tests/deploy/test_user_documents.py": "all",
    "tests/deploy/top/test_app.py": "all",
    "tests/frontend/auth/test_access.py": "all",
    "tests/frontend/models/test_bpe_cache.py": "all",
    "tests/frontend/models/test_template_trial.py": "all",
    "tests/frontend/openapi/test_document.py": "all",
    "tests/frontend/serving/test_text_proxy.py": "all",
    "tests/frontend/structured/test_compiler.py": "all",
    "tests/frontend/test_flood.py": "all",
    "tests/frontend/test_main.py": "all",
    "tests/kvbm/disk/test_disk_killed.py": "all",
    "tests/kvbm/test_main.py": "all",
    "tests/kvbm/test_peer_machines.py": "all",
    "tests/kvbm/test_peer_storm.py": "all",
    "tests/kvbm/test_storm.py": "all",
    "tests/monitoring/test_alerts.py": "all",
    "tests/router/test_main.py": "all",
    "tests/shared/bus/test_curve.py": "all",
    "tests/shared/bus/test_event_planes.py": "all",
    "tests/shared/bus/test_jetstream.py": "all",
    "tests/shared/bus/test_nats_access.py": "all",
    "tests/shared/bus/test_nats_connection.py": "all",
    "tests/shared/discovery/test_etcd.py": "all",
    "tests/shared/discovery/test_etcd_access.py": "all",
    "tests/shared/discovery/test_etcd_client.py": "all",
    "tests/shared/runtime/test_lifecycle.py": "all",
    "tests/shared/runtime/test_usage.py": "all",
    "tests/shared/test_vllm_args.py": "all",
    "tests/simulation/test_world.py": "all",
    "tests/worker/attached/test_engine.py": "all",
    "tests/worker/kv_connector/test_connector.py": "all",
    "tests/worker/memory/test_memory_processes.py": "all",
    "tests/worker/native/cuda/test_splits.py": "all",
    "tests/worker/native/parallel/test_group.py": "all",
    "tests/worker/native/test_logprobs.py": "all",
    "tests/worker/native/test_pooling.py": "all",
    "tests/worker/native/test_prompt_logprobs.py": "all",
    "tests/worker/native/test_runner.py": "all",
    "tests/worker/native/test_sampler.py": "all",
    "tests/worker/native/test_structured.py": "all",
    "tests/worker/reports/test_gpus.py": "all",
    "tests/worker/sharing/test_sharing_processes.py": "all",
    "tests/worker/test_checkpoint.py": "all",
    "tests/worker/test_engine_main.py": "all",
    "tests/worker/test_main.py": "all",
    "tests/worker/test_service.py": "all",
    "tests/worker/test_tensor_parallel.py": "all",
    "tests/worker/test_standby.py": "all",
    "tests/worker/test_with_kvbm.py": "all",
    "tests/worker/vllm/connector/test_machine.py": "all",
    "tests/worker/vllm/connector/test_scheduler_half.py": "all",
    "tests/worker/vllm/connector/test_troubles.py": "all",
    "tests/worker/vllm/encoder_cache/": "all",
}
CLIENTS = "tests/clients/"
"""Other projects' clients: a third of the files below belongs to `all` each day, and the rest to `long`."""
THIRDS: tuple[tuple[str, ...], ...] = (
    ("agents", "aiperf", "guidellm", "instructor", "lm_eval", "ollama", "openapi"),
    ("anthropic", "documents", "dspy", "inspect_ai", "llama_index", "llm", "terminal_agents"),
    ("langchain", "litellm", "litellm_proxy", "npm", "outlines", "pydantic_ai", "responses"),
)
"""The names between `test_` and `.py`. A file of tests/clients that is in none of them runs each day."""


def tier_of(file: str) -> Tier:
    """Return the tier of a file of tests, given as its path in the repository."""
    return FILES.get(max(filter(file.startswith, FILES), key=len, default=""), "all")


def tier_with_marks(file: str, marks: Iterable[Tier]) -> Tier:
    """Return the tier of a test in a file, given the tiers that its marks name: the last of all these."""
    return max((tier_of(file), *marks), key=TIERS.index)


def tiers_within(file: str, text: str) -> set[Tier]:
    """Return the tiers that tests of a file may have, by the text of the file; a mark of a variable may be any."""
    words = {word.strip('"') for word in re.findall(r"\bmark\.tier\(([^)]*)\)", text)}
    marked = [tier for tier in TIERS if words.difference(TIERS) or tier in words]
    needs = [tier for mark, tier in MARKS.items() if re.search(rf"\bmark\.{mark}\b|\bneeds_{mark}\b", text)]
    return {tier_with_marks(file, [tier]) for tier in (tier_of(file), *marked, *needs)}


def third_of(day: date) -> int:
    """Return which third of the clients runs on a day: 0, 1, 2, and again from 0."""
    return day.toordinal() % len(THIRDS)


def clients_left_out(files: Iterable[str], third: int) -> list[str]:
    """Return the files of clients that belong to another third."""
    others = {f"{CLIENTS}test_{name}.py" for number, names in enumerate(THIRDS) if number != third for name in names}
    return sorted(others.intersection(files))


def picked(texts: Mapping[str, str], tiers: Collection[Tier], third: int) -> list[str]:
    """Return the files that have tests of these tiers, given the text of every file of tests, and the clients' third.

    With `long` among the tiers all clients run, whichever third it is.
    """
    left_out = [] if "long" in tiers else clients_left_out(texts, third)
    found = [file for file, text in texts.items() if tiers_within(file, text).intersection(tiers)]
    return sorted(set(found).difference(left_out))


def tiers_of(words: str) -> Sequence[Tier]:
    """Return the tiers of a text such as `check,all`. Raises ValueError for an unknown one."""
    wanted = words.split(",")
    if unknown := set(wanted).difference(TIERS):
        raise ValueError(f"unknown tiers: {', '.join(sorted(unknown))}; there are {', '.join(TIERS)}")
    return [tier for tier in TIERS if tier in wanted]
