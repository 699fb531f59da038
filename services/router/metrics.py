"""The router's metrics.

Label sets are small, so that one scrape does not block the loop. The series of a model end when the router forgets it.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics import MetricWrapperBase

from services.router.index.index import IndexStatistics
from shared.messages.people import SourceState
from shared.messages.select import SelectRefused, SelectReply
from shared.metrics import ROUND_TRIP_SECONDS, SHARES, counter, gauge, histogram, register_metrics, rows_of

MODEL = "model"
"""The label with a model's name; its values are those of the models that the router knows, which are bounded."""


class ModelGauges(Struct, frozen=True):
    """What the gauges of one model show."""

    candidates: int
    """Candidates that the router may choose."""
    standing_still: int
    reservations: int
    forgotten: int
    index: IndexStatistics


class _ModelSeries(Struct, frozen=True):
    """The series of one model that requests touch, looked up once: labels() costs as much as three increments."""

    selected: Counter
    select_seconds: Histogram
    prompt_tokens: Counter
    hit_rate_error: Histogram
    cached: tuple[tuple[Counter, Histogram], ...]
    """What was predicted, and what was found."""


class RouterMetrics:
    """All metrics of one router process."""

    # fmt: off
    _selects = counter("headrace_selects", "outcome model",
        "Selects answered, by outcome: selected, or the code of the refusal; model is empty if it is unknown",
        "Anything but `selected`: no worker, or none that may be chosen.")
    _select_seconds = histogram("headrace_select_seconds", "model", ROUND_TRIP_SECONDS,
        "Seconds from the arrival of a Select to its answer", "The router's core is full: add routers.")
    _hit_rate = histogram("headrace_kv_hit_rate", "kind model", SHARES,
        "Share of a prompt's tokens found cached: predicted at the choice, actual at the first token",
        "The higher the better.")
    _hit_rate_error = histogram("headrace_kv_hit_rate_error", "model", SHARES,
        "Difference between the predicted and the actual share of a prompt's tokens found cached",
        "See `headrace_kv_event_gaps_total` and the evictions of workers.")
    _cached_tokens = counter("headrace_cached_tokens", "kind model",
        "Prompt tokens cached, predicted and actual",
        "Predicted far above actual: events are late, or blocks are evicted while requests queue.")
    _prompt_tokens = counter("headrace_prompt_tokens", "model",
        "Prompt tokens of requests whose first token was reported")
    _candidates = gauge("headrace_candidates", "model",
        "Candidates that may be chosen: ranks of workers", "0: no worker serves the model.")
    events = counter("headrace_kv_events", "outcome",
        "KV event batches, by outcome: applied, ignored (an unknown tier or rank), rejected (malformed), dropped (too "
        "many batches waited)",
        "`dropped`: the router is too slow. `rejected`: a worker of another version.")
    events_followed = gauge("headrace_kv_events_followed", "",
        "1 if the router follows KV events; 0 if the setting `events` is off", "0: routing by load alone.")
    gaps = counter("headrace_kv_event_gaps", "",
        "Gaps in event streams",
        "Batches were lost on the way. They are replayed; many: the network or the router is too slow.")
    replays = counter("headrace_kv_replays", "outcome",
        "Replays requested from event sources, by outcome", "`failed` leads to a snapshot.")
    snapshots = counter("headrace_kv_snapshots", "outcome",
        "Snapshots requested from event sources, by outcome",
        "`failed`, again and again: the source counts as not there. See the router's log.")
    refused_sources = counter("headrace_kv_sources_refused", "",
        "Event sources that contradict their model card",
        "A worker says one thing in its card and another in its events: see the log.")
    sources = gauge("headrace_kv_sources", "state",
        "Event sources now, by state", "Many that are `syncing` or `replaying` for long: see the log.")
    silent_sources = gauge("headrace_kv_sources_silent", "",
        "Event sources that send no events while requests compute blocks there",
        "Events do not reach the router: a firewall between it and the worker's port.")
    torn = gauge("headrace_kv_events_torn", "",
        "Messages from the event sources followed now that were not event batches",
        "Something else sends to the port of the events.")
    digests = counter("headrace_kv_digests", "outcome",
        "Comparisons of a source's digest with ours, by outcome: agreed, differed (all blocks requested again), "
        "exempt (blocks were left out)",
        "`differed`: a fault of Headrace. The index mends itself; please report it.")
    malformed = counter("headrace_malformed_messages", "channel",
        "Messages that could not be read, by channel", "A process of another version, or a stranger on NATS.")
    dropped = gauge("headrace_dropped_messages", "",
        "Messages lost on the current subscriptions because they came faster than they were read",
        "The router is too slow: add routers.")
    joins = counter("headrace_router_joins", "outcome",
        "Requests to other routers for the reservations of a model, by outcome; alone: there was no other router",
        "`failed`: the router began without the others' reservations, and learns of them from reports.")
    _policy_faults = counter("headrace_policy_troubles", "kind model",
        "Faults of the policy, by kind: failed (kv chose, or no reason), slow (over its budget), off (for good)",
        "Mend the policy: [policies.md](policies.md).")
    _standing_still = gauge("headrace_workers_standing_still", "model",
        "Workers passed over because they have work but make no step, or send no report",
        "See that worker's log; its engine is killed after `worker.stall_s`.")
    left_out = gauge("headrace_workers_left_out", "reason",
        "Workers that live and get no requests: unregistered (they report, and discovery does not have them), no_card, "
        "refused (their cards), unused (for a minute in which prompts waited at others)",
        "`headrace status` names them and says why.")
    _index_blocks = gauge("headrace_index_blocks", "model", "Distinct blocks in the index")
    _index_pairs = gauge("headrace_index_pairs", "tier model",
        "(block, holder) pairs in the index; holders are candidates and block stores")
    _index_bytes = gauge("headrace_index_bytes", "model",
        "Estimated size of the index", "At `index.limit_bytes` blocks are dropped.")
    _index_dropped = gauge("headrace_index_dropped_blocks", "model",
        "Blocks dropped at the index's limit since the start", "Raise `index.limit_bytes`.")
    _reservations = gauge("headrace_reservations", "model", "Attempts that are reserved and have not ended")
    _forgotten = gauge("headrace_reservations_forgotten", "model",
        "Reservations released since the start because the worker did not know them, or at the limit",
        "Frontends that died, or NATS lost messages.")
    # fmt: on

    def __init__(self, registry: CollectorRegistry) -> None:
        register_metrics(self, registry)
        rare = ((self.replays, "done"), (self.replays, "failed"), (self.snapshots, "taken"), (self.snapshots, "failed"))
        for metric, outcome in (*rare, *((self.digests, each) for each in ("agreed", "differed", "exempt"))):
            metric.labels(outcome)  # for a query, a series that begins with 1 has not risen
        self._of_model: list[MetricWrapperBase] = [
            getattr(self, attribute) for attribute, row in rows_of(type(self)).items() if MODEL in row.labels.split()
        ]
        self._models: dict[str, _ModelSeries] = {}
        # Looked up once, since these run for every batch.
        self.applied_events, self.ignored_events = (self.events.labels(kind) for kind in ("applied", "ignored"))

    def _series(self, model: str) -> _ModelSeries:
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = _ModelSeries(
                self._selects.labels("selected", model),
                self._select_seconds.labels(model),
                self._prompt_tokens.labels(model),
                self._hit_rate_error.labels(model),
                tuple(
                    (self._cached_tokens.labels(kind, model), self._hit_rate.labels(kind, model))
                    for kind in ("predicted", "actual")
                ),
            )
        return found

    def count_select(self, model: str, reply: SelectReply, seconds: float) -> None:
        """Count a Select for a model that was answered; `model` is empty for one that the router does not know."""
        series = self._series(model)
        (self._selects.labels(reply.code, model) if isinstance(reply, SelectRefused) else series.selected).inc()
        series.select_seconds.observe(seconds)

    def count_first_token(self, model: str, prompt_tokens: int, predicted_tokens: int, actual_tokens: int) -> None:
        """Record the first token of a request that this router routed."""
        series = self._series(model)
        series.prompt_tokens.inc(prompt_tokens)
        series.hit_rate_error.observe(abs(predicted_tokens - actual_tokens) / prompt_tokens)
        for (cached, hit_rate), tokens in zip(series.cached, (predicted_tokens, actual_tokens), strict=True):
            cached.inc(tokens)
            hit_rate.observe(tokens / prompt_tokens)

    def count_policy_fault(self, model: str, kind: str) -> None:
        self._policy_faults.labels(kind, model).inc()

    def show_models(self, shown: Mapping[str, ModelGauges]) -> None:
        """Show the state of all models, and end the series of those that are gone."""
        for model, gauges in shown.items():
            self._series(model)
            self._candidates.labels(model).set(gauges.candidates)
            self._standing_still.labels(model).set(gauges.standing_still)
            self._reservations.labels(model).set(gauges.reservations)
            self._forgotten.labels(model).set(gauges.forgotten)
            self._index_blocks.labels(model).set(gauges.index.blocks)
            self._index_bytes.labels(model).set(gauges.index.bytes)
            self._index_dropped.labels(model).set(gauges.index.dropped_blocks)
            for tier in ("device", "host", "disk"):
                self._index_pairs.labels(tier, model).set(gauges.index.pairs[tier])
        gone = [model for model in self._models if model and model not in shown]
        for model in gone:
            del self._models[model]
            for metric in self._of_model:
                metric.remove_by_labels({MODEL: model})

    def show_sources(self, sources: list[SourceState]) -> None:
        """Show the states of all event sources; a source that is live and partial counts as partial."""
        states = ["partial" if each.partial and each.state == "live" else each.state for each in sources]
        for state in ("syncing", "live", "partial", "replaying", "refused"):
            self.sources.labels(state).set(states.count(state))
        self.silent_sources.set(sum(each.silent for each in sources))
        self.torn.set(sum(each.torn for each in sources))
