"""The router's metrics. Label sets are small, so that one scrape does not block the loop."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry

from services.router.index.index import IndexStatistics
from services.router.selection.load import LoadStatistics
from shared.messages import SelectRefused, SelectReply, SourceState
from shared.metrics import ROUND_TRIP_SECONDS, SHARES, counter, gauge, histogram


class RouterMetrics:
    """All metrics of one router process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        count, show, spread = partial(counter, registry), partial(gauge, registry), partial(histogram, registry)
        self.selects = count(
            "headrace_selects", "Selects answered, by outcome: selected, or the code of the refusal", ["outcome"]
        )
        self.select_seconds = spread(
            "headrace_select_seconds", "Seconds from the arrival of a Select to its answer", ROUND_TRIP_SECONDS
        )
        self.hit_rate = spread(
            "headrace_kv_hit_rate",
            "Share of a prompt's tokens found cached: predicted at the choice, actual at the first token",
            SHARES,
            ["kind"],
        )
        self.hit_rate_error = spread(
            "headrace_kv_hit_rate_error",
            "Difference between the predicted and the actual share of a prompt's tokens found cached",
            SHARES,
        )
        self.cached_tokens = count("headrace_cached_tokens", "Prompt tokens cached, predicted and actual", ["kind"])
        self.prompt_tokens = count("headrace_prompt_tokens", "Prompt tokens of requests whose first token was reported")
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
        self.policy_faults = count(
            "headrace_policy_troubles",
            "Faults of the policy, by kind: failed (kv chose, or no reason), slow (over its budget), off (for good)",
            ["kind"],
        )
        self.frozen_workers = show(
            "headrace_workers_standing_still",
            "Workers passed over because they have work but make no step, or send no report",
        )
        self.index_blocks = show("headrace_index_blocks", "Distinct blocks in the index")
        self.index_pairs = show("headrace_index_pairs", "(block, candidate) pairs in the index", ["tier"])
        self.index_bytes = show("headrace_index_bytes", "Estimated size of the index")
        self.index_dropped = show(
            "headrace_index_dropped_blocks", "Blocks dropped at the index's limit since the start"
        )
        self.reservations = show("headrace_reservations", "Attempts that are reserved and have not ended")
        self.forgotten = show(
            "headrace_reservations_forgotten",
            "Reservations released since the start because the worker did not know them, or at the limit",
        )

        # Looked up once: labels() costs as much as three increments, and these run for every request or batch.
        self.applied_events, self.ignored_events = (self.events.labels(kind) for kind in ("applied", "ignored"))
        self._selected = self.selects.labels("selected")
        self._cached = [
            (self.cached_tokens.labels(kind), self.hit_rate.labels(kind)) for kind in ("predicted", "actual")
        ]

    def count_select(self, reply: SelectReply, seconds: float) -> None:
        """Count a Select that was answered."""
        (self.selects.labels(reply.code) if isinstance(reply, SelectRefused) else self._selected).inc()
        self.select_seconds.observe(seconds)

    def count_first_token(self, prompt_tokens: int, predicted_tokens: int, actual_tokens: int) -> None:
        """Record the first token of a request that this router routed."""
        self.prompt_tokens.inc(prompt_tokens)
        self.hit_rate_error.observe(abs(predicted_tokens - actual_tokens) / prompt_tokens)
        for (cached, hit_rate), tokens in zip(self._cached, (predicted_tokens, actual_tokens), strict=True):
            cached.inc(tokens)
            hit_rate.observe(tokens / prompt_tokens)

    def show_load(self, statistics: list[LoadStatistics]) -> None:
        """Show the reservations of all models."""
        self.reservations.set(sum(each.reservations for each in statistics))
        self.forgotten.set(sum(each.forgotten for each in statistics))

    def show_sources(self, sources: list[SourceState]) -> None:
        """Show the states of all event sources; a source that is live and partial counts as partial."""
        states = ["partial" if each.partial and each.state == "live" else each.state for each in sources]
        for state in ("syncing", "live", "partial", "replaying", "refused"):
            self.sources.labels(state).set(states.count(state))
        self.silent_sources.set(sum(each.silent for each in sources))
        self.torn.set(sum(each.torn for each in sources))

    def show_index(self, statistics: list[IndexStatistics]) -> None:
        """Show the sizes of all models' indexes."""
        self.index_blocks.set(sum(each.blocks for each in statistics))
        self.index_bytes.set(sum(each.bytes for each in statistics))
        self.index_dropped.set(sum(each.dropped_blocks for each in statistics))
        for tier in ("device", "host", "disk"):
            self.index_pairs.labels(tier).set(sum(each.pairs[tier] for each in statistics))
