"""The router's metrics.

Label sets are small, so that one scrape does not block the loop. The series of a model end when the router forgets it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics import MetricWrapperBase

from services.router.index.index import IndexStatistics
from shared.messages import SelectRefused, SelectReply, SourceState
from shared.metrics import ROUND_TRIP_SECONDS, SHARES, counter, gauge, histogram

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

    def __init__(self, registry: CollectorRegistry) -> None:
        count, show, spread = partial(counter, registry), partial(gauge, registry), partial(histogram, registry)
        self._selects = count(
            "headrace_selects",
            "Selects answered, by outcome: selected, or the code of the refusal; model is empty where it is unknown",
            ["outcome", MODEL],
        )
        self._select_seconds = spread(
            "headrace_select_seconds", "Seconds from the arrival of a Select to its answer", ROUND_TRIP_SECONDS, [MODEL]
        )
        self._hit_rate = spread(
            "headrace_kv_hit_rate",
            "Share of a prompt's tokens found cached: predicted at the choice, actual at the first token",
            SHARES,
            ["kind", MODEL],
        )
        self._hit_rate_error = spread(
            "headrace_kv_hit_rate_error",
            "Difference between the predicted and the actual share of a prompt's tokens found cached",
            SHARES,
            [MODEL],
        )
        self._cached_tokens = count(
            "headrace_cached_tokens", "Prompt tokens cached, predicted and actual", ["kind", MODEL]
        )
        self._prompt_tokens = count(
            "headrace_prompt_tokens", "Prompt tokens of requests whose first token was reported", [MODEL]
        )
        self._candidates = show("headrace_candidates", "Candidates that may be chosen: ranks of workers", [MODEL])
        self.events = count(
            "headrace_kv_events",
            "KV event batches, by outcome: applied, ignored (an unknown tier or rank), rejected (malformed), dropped "
            "(too many batches waited)",
            ["outcome"],
        )
        self.events_followed = show(
            "headrace_kv_events_followed", "1 if the router follows KV events; 0 if the setting `events` is off"
        )
        self.gaps = count("headrace_kv_event_gaps", "Gaps in event streams")
        self.replays = count("headrace_kv_replays", "Replays requested from event sources, by outcome", ["outcome"])
        self.snapshots = count(
            "headrace_kv_snapshots", "Snapshots requested from event sources, by outcome", ["outcome"]
        )
        self.refused_sources = count("headrace_kv_sources_refused", "Event sources that contradict their model card")
        self.sources = show("headrace_kv_sources", "Event sources now, by state", ["state"])
        self.silent_sources = show(
            "headrace_kv_sources_silent", "Event sources that send no events while requests compute blocks there"
        )
        self.torn = show(
            "headrace_kv_events_torn", "Messages from the event sources followed now that were not event batches"
        )
        self.digests = count(
            "headrace_kv_digests",
            "Comparisons of a source's digest with ours, by outcome: agreed, differed (all blocks requested again), "
            "exempt (blocks were left out)",
            ["outcome"],
        )
        rare = ((self.replays, "done"), (self.replays, "failed"), (self.snapshots, "taken"), (self.snapshots, "failed"))
        for metric, outcome in (*rare, *((self.digests, each) for each in ("agreed", "differed", "exempt"))):
            metric.labels(outcome)  # for a query, a series that begins with 1 has not risen
        self.malformed = count(
            "headrace_malformed_messages", "Messages that could not be read, by channel", ["channel"]
        )
        self.dropped = show(
            "headrace_dropped_messages",
            "Messages lost on the current subscriptions because they came faster than they were read",
        )
        self.joins = count(
            "headrace_router_joins",
            "Requests to other routers for the reservations of a model, by outcome; alone: there was no other router",
            ["outcome"],
        )
        self._policy_faults = count(
            "headrace_policy_troubles",
            "Faults of the policy, by kind: failed (kv chose, or no reason), slow (over its budget), off (for good)",
            ["kind", MODEL],
        )
        self._standing_still = show(
            "headrace_workers_standing_still",
            "Workers passed over because they have work but make no step, or send no report",
            [MODEL],
        )
        self._index_blocks = show("headrace_index_blocks", "Distinct blocks in the index", [MODEL])
        self._index_pairs = show("headrace_index_pairs", "(block, candidate) pairs in the index", ["tier", MODEL])
        self._index_bytes = show("headrace_index_bytes", "Estimated size of the index", [MODEL])
        self._index_dropped = show(
            "headrace_index_dropped_blocks", "Blocks dropped at the index's limit since the start", [MODEL]
        )
        self._reservations = show("headrace_reservations", "Attempts that are reserved and have not ended", [MODEL])
        self._forgotten = show(
            "headrace_reservations_forgotten",
            "Reservations released since the start because the worker did not know them, or at the limit",
            [MODEL],
        )
        self._of_model: tuple[MetricWrapperBase, ...] = (
            *(self._selects, self._select_seconds, self._hit_rate, self._hit_rate_error, self._cached_tokens),
            *(self._prompt_tokens, self._candidates, self._policy_faults, self._standing_still, self._index_blocks),
            *(self._index_pairs, self._index_bytes, self._index_dropped, self._reservations, self._forgotten),
        )
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
