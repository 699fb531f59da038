"""The frontend's metrics. Many have the names of Dynamo's metrics, with our prefix, so that dashboards can be kept."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from typing import Literal, get_args

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.frontend.auth.accounts import Accounts
from shared import metrics
from shared.metrics import (
    REQUEST_SECONDS,
    STEP_SECONDS,
    TOKENS,
    DistributionSeries,
    distribution,
)

MODEL = "model"
"""The label with the name of the base model. The registry of models bounds its values."""
Hop = Literal["tokenise", "select", "offer", "first_token", "rest"]
"""A part of a request's way.

    tokenise      from the whole body to the tokenised prompt, its grammar included
    select        a router's choice, other routers' included where one did not answer
    offer         from Generate to the worker's Accepted or Refused
    first_token   from Accepted to the first token: the worker's queue, blocks from a lower tier, prefill
    rest          from the first token to the end
"""


_HOP_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0)
"""The buckets for hops: a choice takes a millisecond, an answer minutes."""


class ModelMetrics(Struct, frozen=True):
    """The series of one model that requests touch often, looked up once: `labels` costs as much as three increments."""

    first_token: Histogram
    inter_token: DistributionSeries
    input_tokens: Histogram
    output_tokens: Histogram
    prompt_count: Counter
    output_count: Counter
    migrations: Counter
    hand_overs: Counter
    cached: tuple[Counter, Counter, Counter]
    """The counters of device, host and disk."""


class Metrics:
    """The metrics of one process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        counter, gauge = partial(metrics.counter, registry), partial(metrics.gauge, registry)
        histogram = partial(metrics.histogram, registry)
        self._requests = counter(
            "headrace_requests",
            "Requests that ended, by operation, HTTP status (499: the client disconnected first) and model (empty: "
            "none that is known)",
            ["operation", "status", MODEL],
        )
        self._request_s = histogram(
            "headrace_request_duration_seconds",
            "Time from a request's headers to the end of its answer, of requests that were answered with 200",
            REQUEST_SECONDS,
            [MODEL],
        )
        hops = histogram(
            "headrace_hop_seconds",
            "Time of the parts of a request's way: tokenise, select, offer (a worker accepts), first_token (from there "
            "on), rest (to the end)",
            _HOP_SECONDS,
            ["hop"],
        )
        self.hops: dict[Hop, Histogram] = {hop: hops.labels(hop) for hop in get_args(Hop)}
        self.inflight = gauge("headrace_inflight_requests", "Requests that have arrived and not ended")
        self._first_token = histogram(
            "headrace_time_to_first_token_seconds",
            "Time from the tokenised prompt to its first output token",
            REQUEST_SECONDS,
            [MODEL],
        )
        self._inter_token = distribution(
            registry,
            "headrace_inter_token_latency_seconds",
            "Time per token between two step frames of one request",
            STEP_SECONDS,
            MODEL,
        )
        self._input_tokens = histogram("headrace_input_sequence_tokens", "Prompt tokens of a request", TOKENS, [MODEL])
        self._output_tokens = histogram(
            "headrace_output_sequence_tokens", "Output tokens of a request", TOKENS, [MODEL]
        )
        self._prompt_count = counter("headrace_prompt_tokens", "Prompt tokens of requests", [MODEL])
        self._output_count = counter("headrace_output_tokens", "Output tokens, as they come from workers", [MODEL])
        self._cached_tokens = counter(
            "headrace_cached_tokens", "Prompt tokens found in a prefix cache, by tier", ["tier", MODEL]
        )
        self.ignored_fields = counter(
            "headrace_ignored_fields",
            "Requests with a field that has no effect, by the field's name; other: names that no known API has, "
            "and names beyond the first 200",
            ["field"],
        )
        self.tool_calls = counter(
            "headrace_tool_calls",
            "Texts that began like a tool call, by format and outcome: complete; unfinished (the answer ended); broken "
            "(a part was sent already); or sent as text: malformed, unknown_tool, too_long",
            ["format", "outcome"],
        )
        self.disconnected = counter(
            "headrace_disconnected_clients", "Clients that disconnected before their answer was complete"
        )
        self.cancellations = counter("headrace_model_cancellation", "Attempts cancelled at a worker, for any reason")
        self.cancellation = histogram(
            "headrace_cancellation_seconds",
            "Time from the moment that a client is found gone until its worker reports the end of the attempt",
            STEP_SECONDS,
        )
        self.unnoticed = histogram(
            "headrace_unnoticed_disconnect_seconds",
            "Longest time that a NATS client can have been gone before the frontend noticed it",
            REQUEST_SECONDS,
        )
        self._migrations = counter(
            "headrace_model_migration", "Attempts that continued or repeated a lost attempt", [MODEL]
        )
        self._hand_overs = counter(
            "headrace_hand_overs", "Prompts that one worker computed and another one decodes from", [MODEL]
        )
        self.lost = counter(
            "headrace_attempts_lost", "Lost attempts, by reason; docs/states.md explains each", ["reason"]
        )
        self.router_retries = counter(
            "headrace_router_retries", "Requests sent to another router because one did not answer"
        )
        self.rejections = counter(
            "headrace_model_rejection",
            "Requests refused at a limit of this frontend, by the name of its setting",
            ["bound"],
        )
        self.connections = gauge("headrace_open_connections", "Open connections of HTTP clients")
        self.closed_connections = counter(
            "headrace_closed_connections",
            "Connections closed by the frontend: idle (too long), header (a slow request head), room (idle, closed for "
            "a new one), full (a new one, and none was idle), handshake (TLS failed)",
            ["reason"],
        )
        self.stray_parts = counter("headrace_stray_parts", "Parts of step frames for requests that have ended")
        self.dropped_frames = counter("headrace_dropped_frames", "Step frames lost because the subscription was full")
        self.frames_out_of_turn = counter(
            "headrace_frames_out_of_turn",
            "Step frames dropped: repeated, or ahead of a missing one, which is asked for again",
            ["kind"],
        )
        self.resends = counter(
            "headrace_resends",
            "Requests to workers to send step frames again: resent, too_old (no longer kept), unanswered",
            ["outcome"],
        )
        self.unanswerable = counter(
            "headrace_unanswerable_requests", "Requests over NATS without a usable reply subject"
        )
        self.unauthorized = counter(
            "headrace_unauthorized_requests",
            "Requests refused with 401: missing (no key), unknown (a key that the keys file does not have)",
            ["reason"],
        )
        self.kept_responses = gauge("headrace_kept_responses", "Stored responses")
        self.kept_response_bytes = gauge("headrace_kept_response_bytes", "Bytes of the stored responses")
        self.dropped_responses = counter(
            "headrace_dropped_responses",
            "Stored responses removed without a request: age; or to make room: count, bytes",
            ["reason"],
        )
        self.stale_files = gauge(
            "headrace_stale_files",
            "1 if the file (keys, tls) cannot be read and its former content is still used",
            ["file"],
        )
        self._models: dict[str, ModelMetrics] = {}

    def of_model(self, name: str) -> ModelMetrics:
        """Return the series of a base model."""
        found = self._models.get(name)
        if found is None:
            found = self._models[name] = ModelMetrics(
                self._first_token.labels(name),
                self._inter_token.labels(name),
                self._input_tokens.labels(name),
                self._output_tokens.labels(name),
                self._prompt_count.labels(name),
                self._output_count.labels(name),
                self._migrations.labels(name),
                self._hand_overs.labels(name),
                (
                    self._cached_tokens.labels("device", name),
                    self._cached_tokens.labels("host", name),
                    self._cached_tokens.labels("disk", name),
                ),
            )
        return found

    def count_request(self, operation: str, status: int, model: str, seconds: float) -> None:
        """Count a request that ended. `model` is the base model's name; empty: unknown."""
        self._requests.labels(operation, str(status), model).inc()
        if status == HTTPStatus.OK and model:
            self._request_s.labels(model).observe(seconds)

    def register_accounts(self, accounts: Accounts) -> None:
        """Show the accounts of API keys from now on."""
        self._registry.register(_ByKey(accounts))


class _ByKey(Collector):
    """The metrics of the API keys that their file has at the time of the scrape, with a series for each key."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts

    def describe(self) -> Iterator[Metric]:
        """Describe the metrics, so that a second one of the same name is refused."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "headrace_key_requests", "Accepted requests, by the name of their key", None, ["key"]
        )
        running = GaugeMetricFamily(
            "headrace_key_running_requests", "Requests of the key that have arrived and not ended", None, ["key"]
        )
        tokens = CounterMetricFamily(
            "headrace_key_tokens", "Tokens of requests that ended: prompt, output", None, ["key", "kind"]
        )
        refused = CounterMetricFamily(
            "headrace_key_refused_requests",
            "Requests refused with 429 for a limit of their key: requests and tokens (per minute), concurrency, share "
            "(of what all keys have together)",
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
