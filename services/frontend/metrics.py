"""The frontend's metrics. Many have the names of Dynamo's metrics, with our prefix, so that dashboards can be kept.

The label `model` has the name of the base model. The registry of models bounds its values.
"""

from __future__ import annotations

from functools import cache
from http import HTTPStatus
from typing import Literal, get_args

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Histogram

from shared.metrics import (
    REQUEST_SECONDS,
    ROUND_TRIP_SECONDS,
    STEP_SECONDS,
    TOKENS,
    DistributionSeries,
    counter,
    distribution,
    gauge,
    histogram,
    register_metrics,
)

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
    input_tokens: DistributionSeries
    output_tokens: DistributionSeries
    prompt_count: Counter
    output_count: Counter
    migrations: Counter
    hand_overs: Counter
    cached: tuple[Counter, Counter, Counter]
    """The counters of device, host and disk."""


class Metrics:
    """The metrics of one process."""

    # fmt: off
    _requests = counter("headrace_requests", "operation status model",
        "Requests that ended, by operation, HTTP status (499: the client disconnected first) and model (empty: none "
        "that is known)",
        "Answers of 5xx: see Errors by reason on the board, then the log line of the request.")
    _request_s = distribution("headrace_request_duration_seconds", "model", REQUEST_SECONDS,
        "Time from a request's headers to the end of its answer, of requests that were answered with 200",
        "Follow the parts: `headrace_hop_seconds`.")
    _hop_s = distribution("headrace_hop_seconds", "hop", _HOP_SECONDS,
        "Time of the parts of a request's way: tokenise, select, offer (a worker accepts), first_token (from there "
        "on), rest (to the end)",
        "`tokenise`: the frontend's cores are full. `select`: the routers' are. `offer`: a worker's loop or NATS is "
        "slow. `first_token`: workers queue. `rest`: long answers, or slow steps.")
    inflight = gauge("headrace_inflight_requests", "",
        "Requests that have arrived and not ended", "More arrives than is answered: add workers.")
    _first_token = histogram("headrace_time_to_first_token_seconds", "model", REQUEST_SECONDS,
        "Time from the tokenised prompt to its first output token",
        "Compare with `headrace_queue_seconds` and `headrace_prefill_seconds`: add workers, or shorten prompts.")
    _inter_token = distribution("headrace_inter_token_latency_seconds", "model", STEP_SECONDS,
        "Time per token between two step frames of one request",
        "Steps are long: too many requests at a worker, or large prefills between (`headrace_prefill_step_tokens`).")
    _input_tokens = distribution("headrace_input_sequence_tokens", "model", TOKENS,
        "Prompt tokens of a request", "Long prompts: see `headrace_prefill_seconds`.")
    _output_tokens = distribution("headrace_output_sequence_tokens", "model", TOKENS, "Output tokens of a request")
    _prompt_count = counter("headrace_prompt_tokens", "model", "Prompt tokens of requests")
    _output_count = counter("headrace_output_tokens", "model", "Output tokens, as they come from workers")
    _cached_tokens = counter("headrace_cached_tokens", "tier model",
        "Prompt tokens found in a prefix cache, by tier",
        "The higher the better. Low: prompts share little, or the caches are too small.")
    ignored_fields = counter("headrace_ignored_fields", "field",
        "Requests with a field that has no effect, by the field's name; other: names that no known API has, and names "
        "beyond the first 200",
        "Clients ask for what is not done: see [fields.md](fields.md).")
    tool_calls = counter("headrace_tool_calls", "format outcome",
        "Texts that began like a tool call, by format and outcome: complete; unfinished (the answer ended); broken (a "
        "part was sent already); or sent as text: malformed, unknown_tool, too_long",
        "`malformed`, `broken`: the model or its parser does not fit; see [tools.md](tools.md).")
    disconnected = counter("headrace_disconnected_clients", "",
        "Clients that disconnected before their answer was complete",
        "Clients give up: see the time to the first token.")
    cancellations = counter("headrace_model_cancellation", "",
        "Attempts cancelled at a worker, for any reason",
        "As `headrace_disconnected_clients_total`, and attempts that were moved.")
    cancellation = histogram("headrace_cancellation_seconds", "", STEP_SECONDS,
        "Time from the moment that a client is found gone until its worker reports the end of the attempt",
        "Workers go on computing for clients that have gone: long steps, or NATS is slow.")
    unnoticed = histogram("headrace_unnoticed_disconnect_seconds", "", REQUEST_SECONDS,
        "Longest time that a NATS client can have been gone before the frontend noticed it",
        "NATS clients that do not probe: see [protocol.md](protocol.md).")
    _migrations = counter("headrace_model_migration", "model",
        "Attempts that continued or repeated a lost attempt",
        "Workers die or stand still: `headrace_attempts_lost_total` has the reasons.")
    _hand_overs = counter("headrace_hand_overs", "model",
        "Prompts that one worker computed and another one decodes from",
        "Nothing to do: that is what roles are for ([disaggregation.md](disaggregation.md)).")
    images_apart = counter("headrace_images_apart", "outcome",
        "Images that encode workers were asked to encode, by outcome: encoded, or failed (the worker of the request "
        "then encodes it)",
        "`failed`: an encode worker is gone, or slower than was expected; see [encoder_cache.md](encoder_cache.md).")
    lost = counter("headrace_attempts_lost", "reason",
        "Lost attempts, by reason; docs/states.md explains each", "[states.md](states.md) explains each reason.")
    router_retries = counter("headrace_router_retries", "",
        "Requests sent to another router because one did not answer", "A router is slow or gone.")
    turn_waits = counter("headrace_turn_waits", "outcome",
        "Waits for the turn of a model that takes turns with others, by outcome: woken, late (`limits.asleep_s`), "
        "failed (it could not wake), left (by then the client had gone, or its deadline had passed)",
        "`late`, `failed`: see [model_turns.md](model_turns.md).")
    turn_wait = histogram("headrace_turn_wait_seconds", "", REQUEST_SECONDS,
        "Time of these waits", "Models change often, or wake slowly: see `headrace_turn_operation_seconds`.")
    rejections = counter("headrace_model_rejection", "bound",
        "Requests refused at a limit of this frontend, by the name of its setting",
        "Raise the setting that `bound` names, or add frontends.")
    connections = gauge("headrace_open_connections", "",
        "Open connections of HTTP clients", "It is bounded by `http.connections`.")
    closed_connections = counter("headrace_closed_connections", "reason",
        "Connections closed by the frontend: idle (too long), header (a slow request head), room (idle, closed for a "
        "new one), full (a new one, and none was idle), handshake (TLS failed)",
        "`full`, `room`: raise `http.connections`. `header`: slow or hostile clients.")
    stray_parts = counter("headrace_stray_parts", "",
        "Parts of step frames for requests that have ended", "Some after each cancellation are normal.")
    dropped_frames = counter("headrace_dropped_frames", "",
        "Step frames lost because the subscription was full",
        "The frontend cannot keep up: add frontends. Tokens are sent again.")
    frames_out_of_turn = counter("headrace_frames_out_of_turn", "kind",
        "Step frames dropped: repeated, or ahead of a missing one, which is asked for again",
        "Some after an outage of NATS are normal.")
    resends = counter("headrace_resends", "outcome",
        "Requests to workers to send step frames again: resent, too_old (no longer kept), unanswered",
        "`too_old`, `unanswered`: attempts are then moved. NATS loses messages, or workers are overloaded.")
    unanswerable = counter("headrace_unanswerable_requests", "",
        "Requests over NATS without a usable reply subject", "A NATS client without an inbox of its own.")
    unauthorized = counter("headrace_unauthorized_requests", "reason",
        "Requests refused with 401: missing (no key), unknown (a key that the keys file does not have)",
        "A client has an old key, or a stranger tries keys.")
    picker_choice = histogram("headrace_picker_choice_seconds", "by", ROUND_TRIP_SECONDS,
        "Time from a gateway's whole request to its endpoints, by what they were chosen by: prompt, or load (the "
        "prompt was not read)",
        "`load`: `headrace explain` says why a prompt was not read. Slow: compare with `headrace_hop_seconds`.")
    picker_streams = gauge("headrace_picker_streams", "",
        "Requests of gateways that are open", "It is bounded by `picker.streams`.")
    picker_moves = counter("headrace_picker_moves", "",
        "Requests that a gateway sent to another endpoint than the first one of its answer",
        "An endpoint is dead, or the gateway ignores the answer.")
    picker_faults = counter("headrace_picker_faults", "",
        "Streams of gateways that did not keep to the protocol", "The log says what was wrong.")
    kept_responses = gauge("headrace_kept_responses", "", "Stored responses", "It is bounded by `responses.kept`.")
    kept_response_bytes = gauge("headrace_kept_response_bytes", "",
        "Bytes of the stored responses", "It is bounded by `responses.kept_bytes`.")
    dropped_responses = counter("headrace_dropped_responses", "reason",
        "Stored responses removed without a request: age; or to make room: count, bytes",
        "`count`, `bytes`: raise these two settings.")
    stale_files = gauge("headrace_stale_files", "file",
        "1 if the file (keys, tls, picker_tls) cannot be read and its former content is still used",
        "Mend the file: [access.md](access.md).")
    # fmt: on

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        register_metrics(self, registry)
        self.hops: dict[Hop, DistributionSeries] = {hop: self._hop_s.labels(hop) for hop in get_args(Hop)}
        self._models: dict[str, ModelMetrics] = {}
        self._ended = cache(self._requests.labels)

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
        """Count a request that ended. `model` is the base model's name. Empty if unknown."""
        self._ended(operation, status, model).inc()
        if status == HTTPStatus.OK and model:
            self._request_s.labels(model).observe(seconds)
