"""The frontend's metrics; names that people have on their dashboards already, with our prefix."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.frontend.auth.accounts import Accounts
from shared.metrics import REQUEST_SECONDS, STEP_SECONDS, TOKENS, counter, distribution, gauge, histogram


class Metrics:
    """One set a process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
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
            "What came of texts that began like a call of a tool, by format and outcome: complete; unfinished (the "
            "answer ended); broken (some of it had gone out); or text after all: malformed, unknown_tool, too_long",
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
            "Attempts that were lost, by reason: services/frontend/requests/retry.py explains each",
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
            "new one), full (a new one, and none to make room), handshake (no TLS came of it)",
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
        self.unauthorized = counter(
            registry,
            "headrace_unauthorized_requests",
            "Requests refused with 401: missing (no key), unknown (one that the keys' file does not have)",
            ["reason"],
        )
        self.kept_responses = gauge(registry, "headrace_kept_responses", "Responses that can be continued")
        self.kept_response_bytes = gauge(registry, "headrace_kept_response_bytes", "What they take")
        self.dropped_responses = counter(
            registry,
            "headrace_dropped_responses",
            "Responses no longer kept that nobody deleted: age, or for room: count, bytes",
            ["reason"],
        )
        self.stale_files = gauge(
            registry,
            "headrace_stale_files",
            "1: the file (keys, tls) cannot be read, and what it held before is in force",
            ["file"],
        )

    def register_accounts(self, accounts: Accounts) -> None:
        """From now on."""
        self._registry.register(_ByKey(accounts))


class _ByKey(Collector):
    """Of the keys that their file names at the scrape: as many series, and no more."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts

    def describe(self) -> Iterator[Metric]:
        """So that a second one of the same name is refused."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "headrace_key_requests", "Requests let in, by the name of their key", None, ["key"]
        )
        running = GaugeMetricFamily("headrace_key_running_requests", "Those between arrival and end", None, ["key"])
        tokens = CounterMetricFamily(
            "headrace_key_tokens", "Tokens of requests that ended: prompt, output", None, ["key", "kind"]
        )
        refused = CounterMetricFamily(
            "headrace_key_refused_requests",
            "Requests refused with 429 for what their key has: requests and tokens (a minute), concurrency, share (of "
            "what all keys have together)",
            None,
            ["key", "reason"],
        )
        for name, account in self._accounts.by_name.items():
            requests.add_metric([name], account.requests)
            running.add_metric([name], account.running)
            tokens.add_metric([name, "prompt"], account.prompt_tokens)
            tokens.add_metric([name, "output"], account.output_tokens)
            for reason, count in account.refused.items():
                refused.add_metric([name, reason], count)
        yield from (requests, running, tokens, refused)
