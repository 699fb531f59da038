"""Headrace's boards. After a change: `python -m deploy.monitoring.boards`, which writes boards/*.json.

tests/monitoring/ runs each query with a real Prometheus, which scrapes a stack under load.
"""

from __future__ import annotations

from pathlib import Path

from deploy.monitoring.grafana import Board, Panel, Query, Row, render

DIRECTORY = Path(__file__).parent / "boards"
GPU = "a GPU"
"""Panels that only a native engine on a GPU lights."""
NVML = "a GPU whose driver answers"
"""Panels that any worker on a GPU lights."""


def _of(service: str, more: str = "") -> str:
    """Return the selector of a service's series, with the namespace that the viewer chose."""
    return f'{{namespace=~"$namespace",service="{service}"{more}}}'


MODEL = ',model=~"$model"'
FRONTEND, ROUTER, WORKER = _of("frontend", MODEL), _of("router", MODEL), _of("worker", MODEL)
KVBM, ANY_FRONTEND, ANY_ROUTER, ANY_WORKER = (_of(service) for service in ("kvbm", "frontend", "router", "worker"))
TTFT = "headrace_time_to_first_token_seconds"
IN_TIME = _of("frontend", MODEL + ',le="2.5"')
ANY = '{namespace=~"$namespace"}'


def _rate(metric: str, selector: str = FRONTEND, by: str = "model") -> str:
    return f"sum by ({by}) (rate({metric}{selector}[$__rate_interval]))"


def _energy_a_token(tokens: str) -> str:
    """Return the joules of all GPUs of a model over its tokens. A GPU of several workers counts once."""
    energy = f"max by (model, uuid) (rate(headrace_gpu_energy_joules_total{WORKER}[$__rate_interval]))"
    return f"sum by (model) ({energy}) / ({_rate(tokens, WORKER)} > 0)"


def _mean(histogram: str) -> str:
    return f"{_rate(histogram + '_sum')} / {_rate(histogram + '_count')}"


def rate(counter: str, selector: str, by: str, legend: str = "") -> Query:
    """Return a counter's rate, in a line for each value of the labels `by`. Without a legend they are the legend."""
    return Query(_rate(counter, selector, by), legend or " ".join(f"{{{{{label}}}}}" for label in by.split(", ")))


def quantile(share: float, histogram: str, selector: str, by: str, legend: str = "") -> Query:
    """Return a quantile of a histogram, in a line for each value of the label `by`."""
    rates = f"sum by (le, {by}) (rate({histogram}_bucket{selector}[$__rate_interval]))"
    return Query(f"histogram_quantile({share}, {rates})", legend or f"{{{{{by}}}}}")


def quantiles(histogram: str, selector: str) -> list[Query]:
    """Return three quantiles of a histogram for each model."""
    return [
        quantile(share, histogram, selector, "model", f"p{100 * share:g} {{{{model}}}}") for share in (0.5, 0.9, 0.99)
    ]


FAILED = _rate("headrace_requests_total", _of("frontend", MODEL + ',status=~"5.."'))
ALL = _rate("headrace_requests_total")
FAILED_SHARE = f"(({FAILED}) or 0 * ({ALL})) / ({ALL} > 0)"
"""The share of requests that failed: 0, and not undefined, for a model without failed requests."""

# fmt: off
SERVICE = Board("headrace-service", "Headrace: service",
    "What clients see, by model.", [
    Row("Requests", [
        Panel("Requests", "reqps", "Requests that ended, by HTTP status; 499 are clients that left.",
            [rate("headrace_requests_total", FRONTEND, "model, status")]),
        Panel("Failed share", "percentunit",
            "Answers with a status of 500 or more. When it is high, Errors by reason says why.",
            [Query(FAILED_SHARE, "{{model}}")]),
        Panel("In flight", "short",
            "Requests that have arrived and not ended. It grows without bound where workers are too few.",
            [Query(f"sum by (instance) (headrace_inflight_requests{ANY_FRONTEND})", "{{instance}}")]),
    ]),
    Row("Latency", [
        Panel("Time to the first token", "s",
            "From the tokenised prompt. When it is high, see Queue and Prefill on the board of workers.",
            quantiles("headrace_time_to_first_token_seconds", FRONTEND)),
        Panel("Time between tokens", "s",
            "When it is high, steps are long: too many requests at a worker, or large prefills between.",
            quantiles("headrace_inter_token_latency_seconds", FRONTEND)),
        Panel("Whole request", "s", "From the headers to the end of an answer with status 200.",
            quantiles("headrace_request_duration_seconds", FRONTEND)),
        Panel("Parts of a request's way, p90", "s",
            "tokenise, select (a router), offer (a worker accepts), first_token (from there), rest. It shows which "
            "service to look at.",
            [quantile(0.9, "headrace_hop_seconds", ANY_FRONTEND, "hop")]),
    ]),
    Row("Tokens", [
        Panel("Output tokens", "cps", "Tokens that came from workers.",
            [rate("headrace_output_tokens_total", FRONTEND, "model")]),
        Panel("Prompt tokens", "cps", "Tokens of prompts, and how many of them were found in a cache.",
            [rate("headrace_prompt_tokens_total", FRONTEND, "model", "{{model}} all"),
             rate("headrace_cached_tokens_total", FRONTEND, "model", "{{model}} cached")]),
        Panel("Prompt and output, mean", "short", "Mean number of tokens of a request.",
            [Query(_mean("headrace_input_sequence_tokens"), "{{model}} input"),
             Query(_mean("headrace_output_sequence_tokens"), "{{model}} output")]),
    ]),
    Row("Service level", [
        Panel("Budget burn, first token", "none",
            "Share of first tokens later than 2.5 s, over the allowed 1 %. At 1 the budget lasts exactly its period; "
            "at 14.4 a month's is gone in two days.",
            [Query(f"(1 - {_rate(f'{TTFT}_bucket', IN_TIME)} / ({_rate(f'{TTFT}_count')} > 0)) / 0.01", "{{model}}")]),
        Panel("Budget burn, requests", "none",
            "Share of requests with a status of 500 or more, over the allowed 0.1 %.",
            [Query(FAILED_SHARE + " / 0.001", "{{model}}")]),
    ]),
    Row("Errors by reason", [
        Panel("Attempts lost", "cps",
            "Attempts at a worker that did not end, by reason (docs/states.md). Others continue them.",
            [rate("headrace_attempts_lost_total", ANY_FRONTEND, "reason")], lit_by="a worker that is killed"),
        Panel("Moved, cancelled, disconnected", "cps",
            "Attempts that continued at another worker, attempts cancelled, clients that left.",
            [rate("headrace_model_migration_total", FRONTEND, "model", "moved {{model}}"),
             rate("headrace_model_cancellation_total", ANY_FRONTEND, "namespace", "cancelled"),
             rate("headrace_disconnected_clients_total", ANY_FRONTEND, "namespace", "clients left")]),
        Panel("Refused at a limit", "cps",
            "Requests refused by a frontend, by the setting that bounds them: raise it, or add frontends.",
            [rate("headrace_model_rejection_total", ANY_FRONTEND, "bound")],
            lit_by="more requests than limits.requests"),
        Panel("By API key", "reqps", "Accepted requests of each key, and those refused for a limit of the key.",
            [rate("headrace_key_requests_total", ANY_FRONTEND, "key"),
             rate("headrace_key_refused_requests_total", ANY_FRONTEND, "key, reason", "{{key}} refused: {{reason}}")],
            lit_by="a keys file"),
    ]),
], by_model=True)

ROUTING = Board("headrace-routing", "Headrace: routing and cache",
    "Where requests go, how much of their prompts is found there, and whether the index is true.", [
    Row("Cache", [
        Panel("Hit rate by tier", "percentunit",
            "Share of prompt tokens found in the device's memory, in host memory and on disk.",
            [Query(_rate("headrace_cached_tokens_total", FRONTEND, "model, tier") + " / on (model) group_left () ("
                   + _rate("headrace_prompt_tokens_total") + " > 0)", "{{model}} {{tier}}")]),
        Panel("Predicted against found", "cps",
            "Cached tokens that routers predicted, and that workers found. With less found, events are late or lost, "
            "or blocks are evicted while requests queue.",
            [rate("headrace_cached_tokens_total", ROUTER, "model, kind")]),
        Panel("Error of the prediction", "percentunit", "Difference between the two, as a share of the prompt.",
            quantiles("headrace_kv_hit_rate_error", ROUTER)),
    ]),
    Row("Choices", [
        Panel("Choices", "ops", "Selects answered, by outcome. Anything but selected is a request that waits or fails.",
            [rate("headrace_selects_total", ROUTER, "model, outcome")]),
        Panel("Time of a choice", "s",
            "From a Select's arrival to its answer. When it is high, the router's core is full: add a router.",
            quantiles("headrace_select_seconds", ROUTER)),
        Panel("Imbalance", "none",
            "Requests at the fullest worker over those at the mean one. Above 2 for long: see explain.",
            [Query(f"max by (model) (headrace_inflight_requests{WORKER}) / "
                   f"(avg by (model) (headrace_inflight_requests{WORKER}) > 0)", "{{model}}")]),
        Panel("Candidates", "short",
            "Ranks of workers that may be chosen, as each router knows them, and workers that stand still.",
            [Query(f"headrace_candidates{ROUTER}", "{{model}} at {{instance}}"),
             Query(f"headrace_workers_standing_still{ROUTER}", "standing still, {{model}} at {{instance}}")]),
        Panel("Reservations", "short",
            "Attempts that are reserved and have not ended; and those released because a worker did not know them.",
            [Query(f"headrace_reservations{ROUTER}", "{{model}} at {{instance}}"),
             Query(f"headrace_reservations_forgotten{ROUTER}", "forgotten, {{model}} at {{instance}}")]),
        Panel("Troubles of the policy", "cps", "A policy of your own that failed, was too slow, or is off.",
            [rate("headrace_policy_troubles_total", ROUTER, "model, kind")], lit_by="a policy that raises"),
    ]),
    Row("Index", [
        Panel("Blocks in the index", "short", "Distinct blocks, and (block, candidate) pairs by tier.",
            [Query(f"headrace_index_blocks{ROUTER}", "blocks, {{model}} at {{instance}}"),
             Query(f"headrace_index_pairs{ROUTER}", "{{tier}}, {{model}} at {{instance}}")]),
        Panel("Size of the index", "bytes",
            "Estimated; blocks dropped at the limit make predictions too low: raise index.limit_bytes.",
            [Query(f"headrace_index_bytes{ROUTER}", "{{model}} at {{instance}}")]),
        Panel("Event sources", "short",
            "Sources by state. One that is not live or partial for long is not counted in choices.",
            [Query(f"sum by (instance, state) (headrace_kv_sources{ANY_ROUTER}) > 0", "{{state}} {{instance}}"),
             Query(f"headrace_kv_sources_silent{ANY_ROUTER}", "silent {{instance}}")]),
        Panel("Event batches", "cps", "Batches of KV events, by outcome.",
            [rate("headrace_kv_events_total", ANY_ROUTER, "outcome")]),
        Panel("Gaps, replays, snapshots", "cps", "What was lost on the way, and how it was made good.",
            [rate("headrace_kv_event_gaps_total", ANY_ROUTER, "namespace", "gaps"),
             rate("headrace_kv_replays_total", ANY_ROUTER, "outcome", "replays {{outcome}}"),
             rate("headrace_kv_snapshots_total", ANY_ROUTER, "outcome", "snapshots {{outcome}}")]),
        Panel("Comparisons of the index", "cps",
            "Each source's digest is compared once a minute. One that differed is a fault of Headrace.",
            [rate("headrace_kv_digests_total", ANY_ROUTER, "outcome")], lit_by="a minute of life"),
    ]),
], by_model=True)

WORKERS = Board("headrace-workers", "Headrace: workers and GPUs",
    "What engines do: queue, prefill, decode, memory.", [
    Row("Load", [
        Panel("Running and waiting", "short",
            "Attempts at each worker. Waiting ones for long: too few workers, or too little KV memory.",
            [Query(f"headrace_inflight_requests{WORKER}", "running {{instance}}"),
             Query(f"headrace_queued_requests{WORKER}", "waiting {{instance}}")]),
        Panel("Oldest waiting", "s", "Age of the attempt that has waited longest for its first token.",
            [Query(f"headrace_oldest_queued_request_seconds{WORKER}", "{{instance}}")]),
        Panel("Tokens", "cps", "Tokens drawn, and tokens computed (prompts included).",
            [rate("headrace_output_tokens_total", WORKER, "instance", "drawn {{instance}}"),
             rate("headrace_computed_tokens_total", WORKER, "instance", "computed {{instance}}")]),
        Panel("Attempts", "cps", "Attempts that ended, by outcome.",
            [rate("headrace_requests_total", WORKER, "outcome")]),
    ]),
    Row("Time", [
        Panel("Queue", "s", "From an attempt's arrival to the first step that computes it.",
            quantiles("headrace_queue_seconds", WORKER)),
        Panel("Prefill", "s", "From that step to the first token.",
            quantiles("headrace_prefill_seconds", WORKER)),
        Panel("Steps", "s", "Time of a step's arithmetic.",
            quantiles("headrace_step_seconds", WORKER)),
        Panel("Tokens of a prefill step", "short",
            "Many short ones make decoding smooth, few long ones make prefill fast.",
            quantiles("headrace_prefill_step_tokens", WORKER)),
    ]),
    Row("Memory", [
        Panel("Blocks of KV", "short",
            "Held by running attempts, cached, free. No free and no cached ones: attempts are preempted.",
            [Query(f"headrace_blocks{WORKER}", "{{state}} {{instance}}")]),
        Panel("Preemptions", "cps",
            "Attempts that gave their blocks back and wait again. When they are many, give KV more memory.",
            [rate("headrace_preemptions_total", WORKER, "instance")]),
        Panel("Memory of the GPU", "bytes",
            "Of the native engine: used, kept for the next allocations, others' and free.",
            [Query(f"headrace_gpu_memory_bytes{WORKER}", "{{state}} {{instance}}")], lit_by=GPU),
        Panel("Blocks by rank", "short", "Of each data-parallel rank.",
            [Query(f"headrace_rank_blocks{WORKER}", "{{state}} rank {{rank}} {{instance}}")]),
    ]),
    Row("GPUs", [
        Panel("Utilization", "percentunit",
            "Share of the time in which the GPU computed anything, for any process. Kernels may still use a part of "
            "it.",
            [Query(f"headrace_gpu_utilization_ratio{WORKER}", "{{gpu}} {{instance}}")], lit_by=NVML),
        Panel("Memory by NVML", "bytes", "Memory of the GPU that any process uses, and all there is.",
            [Query(f"headrace_gpu_memory_used_bytes{WORKER}", "used {{gpu}} {{instance}}"),
             Query(f"headrace_gpu_memory_size_bytes{WORKER}", "all {{gpu}} {{instance}}")], lit_by=NVML),
        Panel("Power", "watt", "Power that the GPU takes, and its limit.",
            [Query(f"headrace_gpu_power_watts{WORKER}", "{{gpu}} {{instance}}"),
             Query(f"headrace_gpu_power_limit_watts{WORKER}", "limit {{gpu}} {{instance}}")], lit_by=NVML),
        Panel("Energy of a token", "joule",
            "Joules of a model's GPUs over its tokens: drawn ones, and all that were computed, prompts included.",
            [Query(_energy_a_token("headrace_output_tokens_total"), "drawn {{model}}"),
             Query(_energy_a_token("headrace_computed_tokens_total"), "computed {{model}}")], lit_by=NVML),
        Panel("Temperature", "celsius",
            "Temperature of the GPU, and the degrees that are left until it slows down.",
            [Query(f"headrace_gpu_temperature_celsius{WORKER}", "{{gpu}} {{instance}}"),
             Query(f"headrace_gpu_slowdown_margin_celsius{WORKER}", "left {{gpu}} {{instance}}")], lit_by=NVML),
        Panel("Clocks lowered", "percentunit", "Share of the last minute in which the clocks were lower, by reason.",
            [Query(f"avg_over_time(headrace_gpu_throttled{WORKER}[1m])", "{{reason}} {{gpu}} {{instance}}")],
            lit_by=NVML),
        Panel("Errors of the GPU", "short",
            "Errors of memory since the driver was loaded, and Xid errors. Uncorrected ones: replace the GPU.",
            [Query(f"headrace_gpu_ecc_errors_total{WORKER}", "{{kind}} {{gpu}} {{instance}}"),
             Query(f"headrace_gpu_xid_errors_total{WORKER}", "Xid {{xid}} {{gpu}} {{instance}}")],
            lit_by="an Xid error"),
    ]),
    Row("Engines", [
        Panel("Engines started and lost", "short",
            "Since the workers started. The worker's log and /health say why an engine was lost.",
            [Query(f"headrace_engine_starts_total{WORKER}", "started {{instance}}"),
             Query(f"headrace_engine_restarts_total{WORKER}", "lost {{instance}}")]),
        Panel("Time to load", "s", "Of the last start of each engine, its model included.",
            [Query(f"headrace_model_load_seconds{WORKER}", "{{instance}}")]),
        Panel("Probes of idle engines", "cps", "An engine that is idle is asked for tokens now and then.",
            [rate("headrace_engine_probes_total", WORKER, "instance, outcome", "{{outcome}} {{instance}}")],
            lit_by="an idle engine"),
        Panel("Numbers that are not finite", "cps",
            "Sequences computed once more, or failed, since NaN or infinity came out. Suspect the GPU.",
            [rate("headrace_not_finite_sequences_total", WORKER, "instance, outcome", "{{outcome}} {{instance}}")]),
    ]),
], by_model=True)

STORE = Board("headrace-store", "Headrace: block store",
    "kvbm's tiers, what enters and leaves them, and its disk.", [
    Row("Use", [
        Panel("Hit rate", "percentunit",
            "Blocks found over blocks that engines asked for, by tier, over the last minutes.",
            [Query(f"headrace_kvbm_hit_rate{KVBM}", "{{tier}} {{instance}}")]),
        Panel("Blocks asked for and found", "cps", "By tier.",
            [rate("headrace_kvbm_asked_blocks_total", KVBM, "instance", "asked {{instance}}"),
             rate("headrace_kvbm_hit_blocks_total", KVBM, "instance, tier", "found {{tier}} {{instance}}")],
            lit_by="blocks that come back from the store"),
        Panel("Offered and written", "cps", "Blocks that workers offered, by outcome, and that they wrote.",
            [rate("headrace_kvbm_store_blocks_total", KVBM, "outcome"),
             rate("headrace_kvbm_committed_blocks_total", KVBM, "namespace", "written")]),
    ]),
    Row("Tiers", [
        Panel("Slots of host memory", "short", "By state. Quarantined ones wait for the proof that an engine is dead.",
            [Query(f"sum by (instance, state) (headrace_kvbm_slots{KVBM})", "{{state}} {{instance}}")]),
        Panel("Records on disk", "short", "By state.",
            [Query(f"sum by (instance, state) (headrace_kvbm_disk_records{KVBM})", "{{state}} {{instance}}")]),
        Panel("Evictions", "cps",
            "Blocks that left a tier, by reason. Many for room: the tier is smaller than what is asked for.",
            [rate("headrace_kvbm_evicted_blocks_total", KVBM, "tier, reason", "{{tier}}: {{reason}}")],
            lit_by="a full tier"),
        Panel("Pool", "bytes", "Size of the shared memory, and how much of it is made.",
            [Query(f"headrace_kvbm_pool_bytes{KVBM}", "size {{instance}}"),
             Query(f"headrace_kvbm_pool_reserved_bytes{KVBM}", "made {{instance}}")]),
    ]),
    Row("Disk", [
        Panel("Disk traffic", "Bps", "Bytes read and written.",
            [rate("headrace_kvbm_disk_bytes_total", KVBM, "instance, operation", "{{operation}} {{instance}}")],
            lit_by="a disk tier with blocks"),
        Panel("Time of a disk request, p99", "s", "Without its time in the queue.",
            [quantile(0.99, "headrace_kvbm_disk_seconds", KVBM, "operation")], lit_by="a disk tier with blocks"),
        Panel("Blocks lost on disk", "cps",
            "Blocks that could not be read or written: a full disk, a failing one, damaged records.",
            [rate("headrace_kvbm_disk_lost_blocks_total", KVBM, "operation, reason", "{{operation}}: {{reason}}")],
            lit_by="a disk that fails"),
        Panel("Disk tiers and the writes that wait", "short", "State of each disk tier; off after too many errors.",
            [Query(f"headrace_kvbm_disks{KVBM}", "{{state}} {{instance}}"),
             Query(f"headrace_kvbm_spills_waiting_blocks{KVBM}", "writes waiting {{instance}}")]),
    ]),
    Row("Engines and tickets", [
        Panel("Tickets", "short", "Open promises to engines, by kind. Expired ones are engines that died or hang.",
            [Query(f"headrace_kvbm_tickets{KVBM}", "{{kind}} {{instance}}")]),
        Panel("Engines attached", "short", "As kvbm counts them, and as workers do.",
            [Query(f"headrace_kvbm_owners{KVBM}", "at {{instance}}"),
             Query(f"sum(headrace_kvbm_attached{ANY_WORKER})", "workers attached")]),
        Panel("Time of a request", "s", "From its arrival to the first reply.",
            [quantile(0.99, "headrace_kvbm_request_seconds", KVBM, "operation", "p99 {{operation}}")]),
        Panel("Copies of engines", "Bps", "Bytes copied to and from the pool.",
            [rate("headrace_kvbm_copied_bytes_total", ANY_WORKER, "direction")]),
        Panel("Requests to kvbm by outcome", "cps", "As engines see them: answered, away, late.",
            [rate("headrace_kvbm_asks_total", ANY_WORKER, "operation, outcome")]),
        Panel("Blocks waited for in vain", "cps",
            "Attempts that stopped waiting for blocks from kvbm and computed them.",
            [rate("headrace_late_onboardings_total", ANY_WORKER, "instance")]),
    ]),
])

INFRASTRUCTURE = Board("headrace-infrastructure", "Headrace: infrastructure",
    "NATS, etcd and our processes.", [
    Row("Processes", [
        Panel("Scraped", "short", "1 where Prometheus reaches a target.",
            [Query("up", "{{job}} {{service}} {{instance}}")]),
        Panel("CPU", "none", "Cores that each process uses. A frontend or router near 1 is full: add one.",
            [rate("process_cpu_seconds_total", ANY, "service, instance")]),
        Panel("Memory", "bytes", "Resident memory of each process.",
            [Query(f"process_resident_memory_bytes{ANY}", "{{service}} {{instance}}")]),
        Panel("Open files", "percentunit", "Of the most that each process may open.",
            [Query(f"process_open_fds{ANY} / process_max_fds{ANY}", "{{service}} {{instance}}")]),
    ]),
    Row("NATS", [
        Panel("Messages", "cps", "In and out of the server.",
            [Query("rate(gnatsd_varz_in_msgs[$__rate_interval])", "in"),
             Query("rate(gnatsd_varz_out_msgs[$__rate_interval])", "out")]),
        Panel("Bytes", "Bps", "In and out of the server.",
            [Query("rate(gnatsd_varz_in_bytes[$__rate_interval])", "in"),
             Query("rate(gnatsd_varz_out_bytes[$__rate_interval])", "out")]),
        Panel("Connections and slow consumers", "short", "A slow consumer did not read fast enough and was cut off.",
            [Query("gnatsd_varz_connections", "connections"),
             Query("gnatsd_varz_slow_consumers", "slow consumers since the start")]),
        Panel("Messages that were lost or not read", "cps",
            "By our processes: dropped on the way, too large to send, or not readable.",
            [rate("headrace_unreadable_messages_total", ANY, "service", "not readable {{service}}"),
             rate("headrace_dropped_frames_total", ANY, "service", "frames dropped {{service}}"),
             rate("headrace_unsendable_messages_total", ANY, "service", "not sendable {{service}}")]),
    ]),
    Row("etcd", [
        Panel("Leader", "short", "1 while etcd has a leader.",
            [Query("etcd_server_has_leader", "{{instance}}")]),
        Panel("Size", "bytes", "Of its database.",
            [Query("etcd_mvcc_db_total_size_in_bytes", "{{instance}}")]),
        Panel("Time to disk, p99", "s", "When it is above 0.1 s, leases may run out.",
            [quantile(0.99, "etcd_disk_wal_fsync_duration_seconds", "", "instance")]),
        Panel("Troubles with discovery", "cps", "Calls to etcd that failed, and values in it that could not be read.",
            [rate("headrace_discovery_failures_total", ANY, "service", "failed calls {{service}}"),
             rate("headrace_directory_unreadable_values_total", ANY, "service", "not readable {{service}}")]),
    ]),
])
# fmt: on

BOARDS = (SERVICE, ROUTING, WORKERS, STORE, INFRASTRUCTURE)


def main() -> None:
    """Write the JSON of all boards."""
    DIRECTORY.mkdir(exist_ok=True)
    for board in BOARDS:
        (DIRECTORY / f"{board.uid.removeprefix('headrace-')}.json").write_text(render(board), encoding="utf-8")


if __name__ == "__main__":
    main()
