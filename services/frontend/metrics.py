"""The frontend's metrics; names that people have on their dashboards already, with our prefix."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from shared.metrics import REQUEST_SECONDS, STEP_SECONDS, TOKENS, counter, distribution, gauge, histogram


class Metrics:
    """One set a process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = counter(
            registry,
            "headrace_requests",
            "Requests that ended, by operation and HTTP status (499: the client went first)",
            ["operation", "status"],
        )
        self.inflight = gauge(registry, "headrace_inflight_requests", "Requests now between arrival and end")
        self.first_token = histogram(
            registry,
            "headrace_time_to_first_token_seconds",
            "From the tokenised prompt to its first output token",
            REQUEST_SECONDS,
        )
        self.inter_token = distribution(
            registry,
            "headrace_inter_token_latency_seconds",
            "Time per token between two step frames of one request",
            STEP_SECONDS,
        )
        self.input_tokens = histogram(registry, "headrace_input_sequence_tokens", "Prompt tokens of a request", TOKENS)
        self.output_tokens = histogram(
            registry, "headrace_output_sequence_tokens", "Output tokens of a request", TOKENS
        )
        self.cached_tokens = counter(
            registry, "headrace_cached_tokens", "Prompt tokens that a prefix cache had, by tier", ["tier"]
        )
        self.tool_calls = counter(
            registry,
            "headrace_tool_calls",
            "What came of texts that began like a call of a tool, by format and outcome: complete; broken (some of it "
            "had gone out); or text after all: malformed, unfinished, unknown_tool, too_long",
            ["format", "outcome"],
        )
        self.disconnected = counter(
            registry, "headrace_disconnected_clients", "Clients that went before their answer was complete"
        )
        self.cancellations = counter(
            registry, "headrace_model_cancellation", "Attempts withdrawn from a worker, for whatever reason"
        )
        self.cancellation = histogram(
            registry,
            "headrace_cancellation_seconds",
            "From a client's going, as noticed here, until its worker said that the attempt has ended",
            STEP_SECONDS,
        )
        self.unnoticed = histogram(
            registry,
            "headrace_unnoticed_disconnect_seconds",
            "How long at most a NATS client was gone before it was noticed; one over HTTP is noticed as TCP tells",
            REQUEST_SECONDS,
        )
        self.migrations = counter(
            registry, "headrace_model_migration", "Attempts that continued or repeated a lost one"
        )
        self.lost = counter(
            registry,
            "headrace_attempts_lost",
            "Attempts that were lost, by reason: services/frontend/tries.py explains each",
            ["reason"],
        )
        self.router_retries = counter(
            registry, "headrace_router_retries", "Questions put to another router because one did not answer"
        )
        self.rejections = counter(
            registry,
            "headrace_model_rejection",
            "Requests refused at a bound of this frontend, named as in its settings",
            ["bound"],
        )
        self.connections = gauge(registry, "headrace_open_connections", "Connections of HTTP clients")
        self.closed_connections = counter(
            registry,
            "headrace_closed_connections",
            "Connections closed by this side: idle (too long), header (slow with a request's head), room (idle, for a "
            "new one), full (a new one, and none to make room)",
            ["reason"],
        )
        self.stray_parts = counter(registry, "headrace_stray_parts", "Parts of step frames for requests that are over")
        self.dropped_frames = counter(
            registry, "headrace_dropped_frames", "Step frames lost at the subscription's bound"
        )
        self.frames_out_of_turn = counter(
            registry,
            "headrace_frames_out_of_turn",
            "Step frames dropped: repeated, or ahead because one before them is missing (it is asked for)",
            ["kind"],
        )
        self.resends = counter(
            registry,
            "headrace_resends",
            "Questions to workers for step frames that are missing: resent, too_old (not kept any more), unanswered",
            ["outcome"],
        )
        self.unanswerable = counter(
            registry, "headrace_unanswerable_requests", "Requests over NATS without a usable reply subject"
        )
