"""The frontend's metrics; names that people have on their dashboards already, with our prefix."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_GAP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)


class Metrics:
    """One set a process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "headrace_requests",
            "Requests that ended, by operation and HTTP status (499: the client went first)",
            ["operation", "status"],
            registry=registry,
        )
        self.inflight = Gauge("headrace_inflight_requests", "Requests now between arrival and end", registry=registry)
        self.first_token = Histogram(
            "headrace_time_to_first_token_seconds",
            "From the tokenised prompt to its first output token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.inter_token = Histogram(
            "headrace_inter_token_latency_seconds",
            "Time per token between two step frames of one request",
            buckets=_GAP_SECONDS,
            registry=registry,
        )
        self.input_tokens = Histogram(
            "headrace_input_sequence_tokens", "Prompt tokens of a request", buckets=_TOKENS, registry=registry
        )
        self.output_tokens = Histogram(
            "headrace_output_sequence_tokens", "Output tokens of a request", buckets=_TOKENS, registry=registry
        )
        self.cached_tokens = Counter(
            "headrace_cached_tokens", "Prompt tokens that a prefix cache had", registry=registry
        )
        self.disconnected = Counter(
            "headrace_disconnected_clients", "Clients that went before their answer was complete", registry=registry
        )
        self.cancellations = Counter(
            "headrace_model_cancellation", "Attempts withdrawn from a worker, for whatever reason", registry=registry
        )
        self.migrations = Counter(
            "headrace_model_migration", "Attempts that continued or repeated a lost one", registry=registry
        )
        self.router_retries = Counter(
            "headrace_router_retries", "Questions put to another router because one did not answer", registry=registry
        )
        self.rejections = Counter(
            "headrace_model_rejection", "Requests refused at the bound of running requests", registry=registry
        )
        self.stray_parts = Counter(
            "headrace_stray_parts", "Parts of step frames for requests that are over", registry=registry
        )
        self.dropped_frames = Counter(
            "headrace_dropped_frames", "Step frames lost at the subscription's bound", registry=registry
        )
        self.unanswerable = Counter(
            "headrace_unanswerable_requests", "Requests over NATS without a reply subject", registry=registry
        )
        self.unsent = Counter(
            "headrace_unsent_load_events", "Load events dropped while NATS was away", registry=registry
        )
