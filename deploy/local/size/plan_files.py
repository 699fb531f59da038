"""Writes a planned fleet as flags of `up`, as an overlay of deploy/compose and as values of the chart. Pure.

A plan knows the flags of the `up` that was profiled, and not where the model is for others: compose and the chart have
models of their own, so that both files say in a comment which one was profiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import msgspec
from msgspec import Struct

from deploy.local.size.search import FleetCandidate
from shared.errors import MALFORMED

PREFIX = "HEADRACE_"
"""The beginning of the variables that set a service's settings."""
POOL_EXTRA_MIB = 64
"""MiB that the volume of the block store has beyond the pool."""


class FleetOrder(Struct, frozen=True):
    """One fleet, as it is to be started."""

    fleet: FleetCandidate
    model: str
    started: Sequence[str]
    """The flags of the `up` that was profiled. Empty if an endpoint was."""
    store_bytes: int
    gpus_a_worker: int
    step_tokens: int
    """The tokens of a prompt that take one step's time, which bounds vLLM's steps."""

    @property
    def engine(self) -> str:
        """The engine that was profiled; empty if it is not known."""
        words = [part for word in self.started for part in word.split("=", 1)]
        return words[words.index("--engine") + 1] if "--engine" in words[:-1] else "native" if words else ""

    @property
    def on_gpu(self) -> bool:
        """Whether a worker takes GPUs. vLLM's flags do not say it: its image in the chart is one for GPUs."""
        return self.engine == "vllm" or "cuda" in " ".join(self.started).replace("=", " ").split()

    @property
    def planned(self) -> Mapping[str, object]:
        """The settings of workers that the plan has chosen. vLLM has limits of its own."""
        mine = self.fleet.setting
        if self.engine == "vllm":
            return {"vllm": {"max_num_seqs": mine.max_running, "max_num_batched_tokens": self.step_tokens}}
        return {"max_running": mine.max_running, "step_s": mine.step_s}

    @property
    def settings(self) -> Mapping[str, object]:
        """The settings that were chosen, and those with which the profile was measured."""
        profiled, planned = _profiled(self.started), self.planned
        return {**profiled, **{name: _merged(profiled.get(name), value) for name, value in planned.items()}}


def step_tokens(prefill: Sequence[tuple[float, float, float]], step_s: float) -> int:
    """Return how many tokens of a prompt take `step_s` seconds, by measured times of (tokens, context, seconds)."""
    least = min(context for _, context, _ in prefill)
    points = sorted((tokens, seconds) for tokens, context, seconds in prefill if context == least)
    for (x0, s0), (x1, s1) in pairwise(points):
        if s0 < step_s <= s1:
            return max(1, int(x0 + (step_s - s0) / (s1 - s0) * (x1 - x0)))
    return int(points[0][0] if step_s <= points[0][1] else points[-1][0])


def up_words(order: FleetOrder) -> list[str]:
    """Return the flags of `up`."""
    fleet, words = order.fleet, list(order.started)
    if fleet.prefill:
        words += ["--prefill", str(fleet.prefill), "--decode", str(fleet.workers - fleet.prefill)]
    else:
        words += ["--workers", str(fleet.workers)]
    words += ["--policy", fleet.setting.policy, "--kvbm-bytes", str(order.store_bytes)]
    for path, value in _leaves(order.planned, "worker"):
        words += ["--set", f"{path}={value}"]
    return words


def compose_overlay(order: FleetOrder) -> str:
    """Return an overlay of deploy/compose/compose.yaml."""
    fleet, names = order.fleet, {"worker": order.fleet.workers - order.fleet.prefill}
    engine = ["compose.vllm.yaml"] if order.engine == "vllm" else ["compose.gpu.yaml"] if order.on_gpu else []
    files = ["compose.yaml", *engine, *(["compose.roles.yaml"] if fleet.prefill else [])]
    if fleet.prefill:
        names["prefill"] = fleet.prefill
    variables = {PREFIX + path.replace(".", "_").upper(): _spelled(value) for path, value in _plain(order)}
    lines = [
        f"# Written by `headrace plan`: {fleet.name}",
        f"#   docker compose {' '.join(f'-f {file}' for file in files)} -f THIS FILE up --build",
        f"# The model is that of the workers' settings; {order.model} was profiled.",
        *(f"# Not in here, as no variable can hold it: vllm.{name}" for name in _left_out(order)),
        "services:",
        f"  router: {{environment: {{{PREFIX}POLICY: {_text(fleet.setting.policy)}}}}}",
    ]
    for name, number in names.items():
        lines += [f"  {name}:", f"    environment: {_text(variables)}", f"    deploy: {{replicas: {number}}}"]
    if not order.store_bytes:
        return "\n".join([*lines, "  kvbm: {deploy: {replicas: 0}}"]) + "\n"
    size = f"size={-(-order.store_bytes // (1 << 20)) + POOL_EXTRA_MIB}m"
    options = f"{size},mode=0700,uid=10001,gid=10001,huge=${{POOL_HUGE:-within_size}}"
    lines += [f"  kvbm: {{environment: {{{PREFIX}POOL_SIZE_BYTES: {_text(str(order.store_bytes))}}}}}"]
    return "\n".join([*lines, f"volumes: {{pool: {{driver_opts: {{o: {_text(options)}}}}}}}"]) + "\n"


def _left_out(order: FleetOrder) -> list[str]:
    vllm = order.settings.get("vllm")
    return [name for name, each in vllm.items() if not _pairs(each)] if isinstance(vllm, dict) else []


def chart_values(order: FleetOrder) -> str:
    """Return values of deploy/kubernetes/headrace."""
    fleet, each = order.fleet, dict[str, object](settings=order.settings)
    if order.engine:
        each["engine"] = order.engine
    if order.on_gpu:
        each["gpus"] = order.gpus_a_worker
    sets: dict[str, object] = {"worker": {"replicas": fleet.workers, **each}}
    if fleet.prefill:
        sets = {
            "prefill": {"role": "prefill", "replicas": fleet.prefill, **each},
            "decode": {"role": "decode", "replicas": fleet.workers - fleet.prefill, **each},
        }
    store = {"enabled": True, "poolBytes": order.store_bytes} if order.store_bytes else {"enabled": False}
    values = {"router": {"settings": {"policy": fleet.setting.policy}}, "kvbm": store, "workers": sets}
    head = (
        f"# Written by `headrace plan`: {fleet.name}\n"
        f"#   helm upgrade --install headrace deploy/kubernetes/headrace -f THIS FILE -f YOURS\n"
        f"# Yours say where the model is (workerDefaults.model); {order.model} was profiled.\n"
    )
    return head + msgspec.json.format(msgspec.json.encode(values)).decode() + "\n"  # JSON is YAML


def _pairs(value: object) -> bool:
    """Return whether a value of vLLM's arguments fits a variable, where a comma ends it."""
    return "," not in _spelled(value)


def _plain(order: FleetOrder) -> list[tuple[str, object]]:
    """Return the settings of workers as paths and values for the environment, in which vLLM's arguments are NAME=VALUE
    pairs."""
    settings: dict[str, object] = {**order.settings} if order.store_bytes else {**order.settings, "kvbm.pool": ""}
    if isinstance(vllm := settings.pop("vllm", None), dict):
        settings["vllm"] = ",".join(f"{name}={_spelled(each)}" for name, each in vllm.items() if _pairs(each))
    return _leaves(settings, "")


def _profiled(started: Sequence[str]) -> dict[str, object]:
    """Return the settings of workers among the flags of an `up`, as tables."""
    words = [part for word in started for part in (word.split("=", 1) if word.startswith("--") else [word])]
    found: dict[str, object] = {}
    for flag, text in pairwise(words):
        if flag == "--tensor-parallel":
            found["tensor_parallel"] = _number(text)
        elif flag == "--set" and text.startswith("worker."):
            path, _, value = text.removeprefix("worker.").partition("=")
            *tables, name = path.replace("-", "_").split(".")
            inner: dict[str, object] = {name: _number(value)}
            for table in reversed(tables):
                inner = {table: inner}
            found = {**found, **{key: _merged(found.get(key), each) for key, each in inner.items()}}
    return found


def _number(text: str) -> object:
    """Return what the text is in JSON, or the text itself."""
    try:
        return msgspec.json.decode(text.encode())
    except MALFORMED:
        return text


def _merged(old: object, new: object) -> object:
    """Return the newer of two values of a setting; of two tables the entries of both."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{name: _merged(old.get(name), value) for name, value in new.items()}}
    return new


def _leaves(table: Mapping[str, object], path: str) -> list[tuple[str, object]]:
    found = list[tuple[str, object]]()
    for name, value in table.items():
        place = f"{path}.{name}" if path else name
        found += _leaves(value, place) if isinstance(value, dict) else [(place, value)]
    return found


def _spelled(value: object) -> str:
    """Return a value as a variable of the environment has it."""
    return value if isinstance(value, str) else _text(value)


def _text(value: object) -> str:
    """Return a value as JSON, which YAML reads."""
    return msgspec.json.encode(value).decode()
