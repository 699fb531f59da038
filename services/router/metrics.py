"""The router's metrics. Label sets are small: one scrape must not stall the loop."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.router.index import IndexStatistics
from shared.messages import SelectRefused, SelectReply

_SELECT_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1, 0.25)
_SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Metrics:
    """One set a process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.selects = Counter(
            "headrace_selects", "Questions answered, by outcome: selected, or why not", ["outcome"], registry=registry
        )
        self.select_seconds = Histogram(
            "headrace_select_seconds",
            "From a question's arrival to its answer",
            buckets=_SELECT_SECONDS,
            registry=registry,
        )
        self.hit_rate = Histogram(
            "headrace_kv_hit_rate",
            "Share of a prompt's tokens found cached: predicted at the choice, actual at the first token",
            ["kind"],
            buckets=_SHARES,
            registry=registry,
        )
        self.cached_tokens = Counter(
            "headrace_cached_tokens", "Prompt tokens cached, predicted and actual", ["kind"], registry=registry
        )
        self.prompt_tokens = Counter(
            "headrace_prompt_tokens", "Prompt tokens of requests whose first token was told", registry=registry
        )
        self.events = Counter(
            "headrace_kv_events",
            "KV event batches: applied, ignored (a tier or rank we do not know), rejected (malformed)",
            ["outcome"],
            registry=registry,
        )
        self.gaps = Counter("headrace_kv_event_gaps", "Gaps in event streams", registry=registry)
        self.replays = Counter(
            "headrace_kv_replays", "Replays asked of event sources, by outcome", ["outcome"], registry=registry
        )
        self.snapshots = Counter(
            "headrace_kv_snapshots", "Snapshots asked of event sources, by outcome", ["outcome"], registry=registry
        )
        self.refused_sources = Counter(
            "headrace_kv_sources_refused", "Event sources that contradict their model card", registry=registry
        )
        self.sources = Gauge("headrace_kv_sources", "Event sources now, by state", ["state"], registry=registry)
        self.malformed = Counter(
            "headrace_malformed_messages", "Messages that could not be read, by channel", ["channel"], registry=registry
        )
        self.policy_errors = Counter(
            "headrace_policy_errors", "Times the policy failed and kv chose instead", registry=registry
        )
        self.index_blocks = Gauge("headrace_index_blocks", "Distinct blocks in the index", registry=registry)
        self.index_pairs = Gauge(
            "headrace_index_pairs", "(block, candidate) pairs in the index", ["tier"], registry=registry
        )
        self.index_bytes = Gauge("headrace_index_bytes", "Estimated size of the index", registry=registry)
        self.index_dropped = Gauge(
            "headrace_index_dropped_blocks", "Blocks given up at the index's limit", registry=registry
        )
        self.reservations = Gauge("headrace_reservations", "Attempts reserved and not ended", registry=registry)
        self.forgotten = Gauge(
            "headrace_reservations_forgotten",
            "Reservations released because the worker did not know them, or at the limit",
            registry=registry,
        )

    def answered(self, reply: SelectReply, seconds: float) -> None:
        """A question was answered."""
        self.selects.labels(reply.code if isinstance(reply, SelectRefused) else "selected").inc()
        self.select_seconds.observe(seconds)

    def predicted(self, prompt_tokens: int, predicted_tokens: int, actual_tokens: int) -> None:
        """The first token of a request that we routed has come."""
        self.prompt_tokens.inc(prompt_tokens)
        for kind, tokens in (("predicted", predicted_tokens), ("actual", actual_tokens)):
            self.cached_tokens.labels(kind).inc(tokens)
            self.hit_rate.labels(kind).observe(tokens / prompt_tokens)

    def indexed(self, statistics: list[IndexStatistics]) -> None:
        """The sizes of all models' indexes."""
        self.index_blocks.set(sum(each.blocks for each in statistics))
        self.index_bytes.set(sum(each.bytes for each in statistics))
        self.index_dropped.set(sum(each.dropped_blocks for each in statistics))
        for tier in ("device", "host", "disk"):
            self.index_pairs.labels(tier).set(sum(each.pairs[tier] for each in statistics))
