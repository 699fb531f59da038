"""`headrace sleep`, `wake`, `drain`, `resume`, `clear`, `lora` and `log`: asks processes for a change, and waits for
it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence

from deploy.local.show.fleet import (
    ANSWER_LIMIT_S,
    FleetConfig,
    by_prefix,
    connect_bus,
    discovery_entries,
    readable_entries,
)
from shared import subjects
from shared.bus.nats_bus import NatsBus
from shared.errors import ConfigError, ProtocolError, Unavailable
from shared.installation import COMMAND
from shared.lora import name_of_lora
from shared.messages.cards import ASLEEP, Instance, ModelCard
from shared.messages.control import CONTROL, LOG_LEVEL_CHANGED, ChangeLogLevel
from shared.messages.people import OPERATE_WORKER, WORKER_OPERATED, OperateWorker, WorkerOperated

MOST_SECONDS = 86400.0
"""Upper limit of the seconds that a command waits for a worker."""
RAMP_S = 10
"""The default of the routers' `load.ramp_s`."""
RAMP_UP = (
    f"Other workers serve too: routers send it a growing share of the requests, its full one after {RAMP_S} s"
    " (router.load.ramp_s)."
)
_LISTED = 8
"""Most names in one error."""


def operate(
    config: FleetConfig, asked: OperateWorker, prefixes: Sequence[str], model: str = "", *, timeout_s: float
) -> int:
    """Have workers do an operation, all at once, and print a line of each; return 1 if any did not. `prefixes` are the
    beginnings of their ids; without one, all of the model's workers are asked. Raise ConfigError and Unavailable."""
    if not 0 < timeout_s <= MOST_SECONDS:
        raise ConfigError(f"--timeout-s is more than 0 and at most {MOST_SECONDS:g}")
    return asyncio.run(_operate(config, asked, prefixes, model, timeout_s))


async def _operate(
    config: FleetConfig, asked: OperateWorker, prefixes: Sequence[str], model: str, timeout_s: float
) -> int:
    values = await discovery_entries(config)
    workers = choose_workers(config.namespace, values, asked, prefixes, model)
    async with connect_bus(config, f"headrace {asked.operation}") as bus:
        done = await asyncio.gather(*(_ask(bus, config.namespace, worker, asked, timeout_s) for worker in workers))
    if any(done) and asked.operation in ("resume", "wake") and others_serve(config.namespace, values, workers):
        print(RAMP_UP, file=sys.stderr)
    for each in () if prefixes else sleepers(config.namespace, values, workers):
        remedy = f"`{COMMAND} wake {each.instance}`, then give this command again"
        print(f"worker {each.instance} is asleep and was not asked: {remedy}", file=sys.stderr)
    return 0 if all(done) else 1


async def _ask(bus: NatsBus, namespace: str, worker: Instance, asked: OperateWorker, timeout_s: float) -> bool:
    subject = subjects.worker(namespace, worker.instance, "operate")
    failed, operated = "", None
    try:
        if "operate" not in worker.subjects:
            raise Unavailable(f"it is of version {worker.version}, which has no operations")
        answer = await bus.request(subject, OPERATE_WORKER.encode(asked), timeout_s=timeout_s)
        operated = WORKER_OPERATED.decode(answer.payload, answer.headers)
        failed = operated.failed
    except (Unavailable, ProtocolError) as wrong:
        failed = f"{wrong}; `{COMMAND} status` shows what became of it"
    if failed or operated is None:
        print(f"error: worker {worker.instance}: {failed}", file=sys.stderr)
        return False
    print(f"worker {worker.instance} {summary(operated)}")
    return True


def summary(operated: WorkerOperated) -> str:
    """Return what a worker is after an operation, for people."""
    state = f"is {operated.state}" if operated.state else "serves"
    return f"{state}, with the LoRAs {', '.join(operated.lora)}" if operated.lora else state


def sleepers(namespace: str, values: Mapping[str, bytes], chosen: Sequence[Instance]) -> list[Instance]:
    """Return the workers of the chosen ones' model that sleep. `values` are discovery's keys and values."""
    models = {each.model for each in chosen} - {""}
    entries = [each for each in readable_entries(namespace, values) if isinstance(each, Instance)]
    return [each for each in entries if each.model in models and each.state == ASLEEP]


def others_serve(namespace: str, values: Mapping[str, bytes], chosen: Sequence[Instance]) -> bool:
    """Return whether workers that are not chosen serve a model of the chosen ones. `values` are discovery's keys and
    values."""
    own, models = {each.instance for each in chosen}, {each.model for each in chosen}
    cards = [each for each in readable_entries(namespace, values) if isinstance(each, ModelCard)]
    return any(card.model in models and card.instance not in own for card in cards)


def choose_workers(
    namespace: str, values: Mapping[str, bytes], asked: OperateWorker, prefixes: Sequence[str], model: str
) -> list[Instance]:
    """Return the workers that are meant, at least one. `values` are discovery's keys and values. Raise ConfigError."""
    workers: dict[str, Instance] = {}
    cards: list[ModelCard] = []
    for entry in readable_entries(namespace, values):
        if isinstance(entry, ModelCard):
            cards.append(entry)
        elif isinstance(entry, Instance) and entry.service == "worker":
            workers[entry.instance] = entry
    if not workers:
        raise ConfigError("no worker is registered")
    if prefixes:
        found = [by_prefix(prefix, sorted(workers), "worker") for prefix in prefixes]
        return [workers[instance] for instance in dict.fromkeys(found)]
    if asked.operation == "unload_lora":
        cards = [card for card in cards if asked.name in map(name_of_lora, card.lora)]
    models = sorted({card.model for card in cards if model in ("", card.model)})
    if not models:
        holding = f"has the LoRA {asked.name}" if asked.operation == "unload_lora" else "serves now"
        asleep = [each.instance for each in workers.values() if each.state == ASLEEP and model in ("", each.model)]
        remedy = f"; asleep, until `{COMMAND} wake`: {', '.join(sorted(asleep)[:_LISTED])}" if asleep else ""
        raise ConfigError(f"no worker {'of ' + model + ' ' if model else ''}{holding}{remedy}")
    if len(models) > 1:
        raise ConfigError(f"several models are served, name one with --model: {', '.join(models[:_LISTED])}")
    meant = {card.instance for card in cards if card.model == models[0]}
    return [workers[instance] for instance in sorted(meant & workers.keys())]


def change_level(config: FleetConfig, level: str, prefixes: Sequence[str], *, for_s: float) -> int:
    """Have processes log from a level on, and print a line of each; return 1 if any did not. `prefixes` are the
    beginnings of their ids; without one, all are asked. Raise ConfigError and Unavailable."""
    if not 0 <= for_s <= 86_400:
        raise ConfigError("--for-s is 0 to 86400")
    return asyncio.run(_change_level(config, ChangeLogLevel(level, for_s), prefixes))


async def _change_level(config: FleetConfig, asked: ChangeLogLevel, prefixes: Sequence[str]) -> int:
    meant = choose_processes(config.namespace, await discovery_entries(config), prefixes)
    async with connect_bus(config, "headrace log") as bus:
        done = await asyncio.gather(*(_ask_level(bus, config.namespace, one, asked) for one in meant))
    return 0 if all(done) else 1


async def _ask_level(bus: NatsBus, namespace: str, one: Instance, asked: ChangeLogLevel) -> bool:
    subject = subjects.control(namespace, one.service, one.instance)
    try:
        answer = await bus.request(subject, CONTROL.encode(asked), timeout_s=ANSWER_LIMIT_S)
        failed = LOG_LEVEL_CHANGED.decode(answer.payload, answer.headers).failed
    except (Unavailable, ProtocolError) as wrong:
        failed = f"{wrong}; a process of an earlier version does not know it"
    if failed:
        print(f"error: {one.service} {one.instance}: {failed}", file=sys.stderr)
        return False
    until = f" for {asked.for_s:g} s" if asked.for_s else ""
    print(f"{one.service} {one.instance} logs from level {asked.level} on{until}")
    return True


def choose_processes(namespace: str, values: Mapping[str, bytes], prefixes: Sequence[str]) -> list[Instance]:
    """Return the processes that are meant, at least one. `values` are discovery's keys and values. Raise
    ConfigError."""
    there = {one.instance: one for one in readable_entries(namespace, values) if isinstance(one, Instance)}
    if not there:
        raise ConfigError("no process is registered")
    meant = {by_prefix(prefix, sorted(there), "process") for prefix in prefixes} or there.keys()
    return sorted((there[name] for name in meant), key=lambda one: (one.service, one.instance))
