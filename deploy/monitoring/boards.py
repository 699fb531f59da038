"""Headrace's boards. After a change: `python -m deploy.monitoring.boards`, which writes boards/*.json.

tests/monitoring/ runs each query with a real Prometheus, which scrapes a stack under load.
"""

from __future__ import annotations

from pathlib import Path

from deploy.monitoring.grafana import Board, Panel, Query, Row, render

DIRECTORY = Path(__file__).parent / "boards"
GPU = "a GPU"
"""Panels that only a native engine on a GPU lights."""


def _of(service: str, more: str = "") -> str:
    """Return the selector of a service's series, with the namespace that the viewer chose."""
    return f'{{namespace=~"$namespace",service="{service}"{more}}}'


MODEL = ',model=~"$model"'
FRONTEND, ROUTER, WORKER = _of("frontend", MODEL), _of("router", MODEL), _of("worker", MODEL)
KVBM, ANY_ROUTER, ANY_WORKER = _of("kvbm"), _of("router"), _of("worker")
TTFT = "headrace_time_to_first_token_seconds"
IN_TIME = _of("frontend", MODEL + ',le="2.5"')
ANY = '{namespace=~"$namespace"}'


def _rate(metric: str, selector: str, by: str) -> str:
    return f"sum by ({by}) (rate({metric}{selector}[$__rate_interval]))"


def _quantile(share: float, metric: str, selector: str, by: str) -> str:
    return f"histogram_quantile({share}, sum by (le, {by}) (rate({metric}_bucket{selector}[$__rate_interval])))"


def _quantiles(metric: str, selector: str, by: str) -> list[Query]:
    return [
        Query(_quantile(share, metric, selector, by), f"p{100 * share:g} {{{{{by}}}}}") for share in (0.5, 0.9, 0.99)
    ]


def _share_of(part: str, whole: str) -> str:
    """Return a share that is 0, and not undefined, where there is a whole without the part."""
    return f"(({part}) or 0 * ({whole})) / ({whole} > 0)"


FAILED_SHARE = _share_of(
    _rate("headrace_requests_total", _of("frontend", MODEL + ',status=~"5.."'), "model"),
    _rate("headrace_requests_total", FRONTEND, "model"),
)

SERVICE = Board(
    "headrace-service",
    "Headrace: service",
    "What clients see, by model.",
    [
        Row(
            "Requests",
            [
                Panel(
                    "Requests",
                    "Requests that ended, by HTTP status; 499 are clients that left.",
                    "reqps",
                    [Query(_rate("headrace_requests_total", FRONTEND, "model, status"), "{{model}} {{status}}")],
                ),
                Panel(
                    "Failed share",
                    "Answers with a status of 500 or more. When it is high, Errors by reason says why.",
                    "percentunit",
                    [
                        Query(
                            FAILED_SHARE,
                            "{{model}}",
                        )
                    ],
                ),
                Panel(
                    "In flight",
                    "Requests that have arrived and not ended. It grows without bound where workers are too few.",
                    "short",
                    [Query(f"sum by (instance) (headrace_inflight_requests{_of('frontend')})", "{{instance}}")],
                ),
            ],
        ),
        Row(
            "Latency",
            [
                Panel(
                    "Time to the first token",
                    "From the tokenised prompt. When it is high, see Queue and Prefill on the board of workers.",
                    "s",
                    _quantiles("headrace_time_to_first_token_seconds", FRONTEND, "model"),
                ),
                Panel(
                    "Time between tokens",
                    "When it is high, steps are long: too many requests at a worker, or large prefills between.",
                    "s",
                    _quantiles("headrace_inter_token_latency_seconds", FRONTEND, "model"),
                ),
                Panel(
                    "Whole request",
                    "From the headers to the end of an answer with status 200.",
                    "s",
                    _quantiles("headrace_request_duration_seconds", FRONTEND, "model"),
                ),
                Panel(
                    "Parts of a request's way, p90",
                    "tokenise, select (a router), offer (a worker accepts), first_token (from there), rest. "
                    "It shows which service to look at.",
                    "s",
                    [Query(_quantile(0.9, "headrace_hop_seconds", _of("frontend"), "hop"), "{{hop}}")],
                ),
            ],
        ),
        Row(
            "Tokens",
            [
                Panel(
                    "Output tokens",
                    "Tokens that came from workers.",
                    "cps",
                    [Query(_rate("headrace_output_tokens_total", FRONTEND, "model"), "{{model}}")],
                ),
                Panel(
                    "Prompt tokens",
                    "Tokens of prompts, and how many of them were found in a cache.",
                    "cps",
                    [
                        Query(_rate("headrace_prompt_tokens_total", FRONTEND, "model"), "{{model}} all"),
                        Query(_rate("headrace_cached_tokens_total", FRONTEND, "model"), "{{model}} cached"),
                    ],
                ),
                Panel(
                    "Prompt and output, mean",
                    "Mean number of tokens of a request.",
                    "short",
                    [
                        Query(
                            f"{_rate(f'headrace_{side}_sequence_tokens_sum', FRONTEND, 'model')} / "
                            f"{_rate(f'headrace_{side}_sequence_tokens_count', FRONTEND, 'model')}",
                            f"{{{{model}}}} {side}",
                        )
                        for side in ("input", "output")
                    ],
                ),
            ],
        ),
        Row(
            "Service level",
            [
                Panel(
                    "Budget burn, first token",
                    "Share of first tokens later than 2.5 s, over the allowed 1 %. At 1 the budget lasts exactly its "
                    "period; at 14.4 a month's is gone in two days.",
                    "none",
                    [
                        Query(
                            f"(1 - {_rate(f'{TTFT}_bucket', IN_TIME, 'model')} / "
                            f"({_rate(f'{TTFT}_count', FRONTEND, 'model')} > 0)) / 0.01",
                            "{{model}}",
                        )
                    ],
                ),
                Panel(
                    "Budget burn, requests",
                    "Share of requests with a status of 500 or more, over the allowed 0.1 %.",
                    "none",
                    [
                        Query(
                            FAILED_SHARE + " / 0.001",
                            "{{model}}",
                        )
                    ],
                ),
            ],
        ),
        Row(
            "Errors by reason",
            [
                Panel(
                    "Attempts lost",
                    "Attempts at a worker that did not end, by reason (docs/states.md). Others continue them.",
                    "cps",
                    [Query(_rate("headrace_attempts_lost_total", _of("frontend"), "reason"), "{{reason}}")],
                    lit_by="a worker that is killed",
                ),
                Panel(
                    "Moved, cancelled, disconnected",
                    "Attempts that continued at another worker, attempts cancelled, clients that left.",
                    "cps",
                    [
                        Query(_rate("headrace_model_migration_total", FRONTEND, "model"), "moved {{model}}"),
                        Query(_rate("headrace_model_cancellation_total", _of("frontend"), "namespace"), "cancelled"),
                        Query(
                            _rate("headrace_disconnected_clients_total", _of("frontend"), "namespace"), "clients left"
                        ),
                    ],
                ),
                Panel(
                    "Refused at a limit",
                    "Requests refused by a frontend, by the setting that bounds them: raise it, or add frontends.",
                    "cps",
                    [Query(_rate("headrace_model_rejection_total", _of("frontend"), "bound"), "{{bound}}")],
                    lit_by="more requests than limits.requests",
                ),
                Panel(
                    "By API key",
                    "Accepted requests of each key, and those refused for a limit of the key.",
                    "reqps",
                    [
                        Query(_rate("headrace_key_requests_total", _of("frontend"), "key"), "{{key}}"),
                        Query(
                            _rate("headrace_key_refused_requests_total", _of("frontend"), "key, reason"),
                            "{{key}} refused: {{reason}}",
                        ),
                    ],
                    lit_by="a keys file",
                ),
            ],
        ),
    ],
    by_model=True,
)

ROUTING = Board(
    "headrace-routing",
    "Headrace: routing and cache",
    "Where requests go, how much of their prompts is found there, and whether the index is true.",
    [
        Row(
            "Cache",
            [
                Panel(
                    "Hit rate by tier",
                    "Share of prompt tokens found in the device's memory, in host memory and on disk.",
                    "percentunit",
                    [
                        Query(
                            f"{_rate('headrace_cached_tokens_total', FRONTEND, 'model, tier')}"
                            " / on (model) group_left () "
                            f"({_rate('headrace_prompt_tokens_total', FRONTEND, 'model')} > 0)",
                            "{{model}} {{tier}}",
                        )
                    ],
                ),
                Panel(
                    "Predicted against found",
                    "Cached tokens that routers predicted, and that workers found. With less found, events are late "
                    "or lost, or blocks are evicted while requests queue.",
                    "cps",
                    [Query(_rate("headrace_cached_tokens_total", ROUTER, "model, kind"), "{{model}} {{kind}}")],
                ),
                Panel(
                    "Error of the prediction",
                    "Difference between the two, as a share of the prompt.",
                    "percentunit",
                    _quantiles("headrace_kv_hit_rate_error", ROUTER, "model"),
                ),
            ],
        ),
        Row(
            "Choices",
            [
                Panel(
                    "Choices",
                    "Selects answered, by outcome. Anything but selected is a request that waits or fails.",
                    "ops",
                    [Query(_rate("headrace_selects_total", ROUTER, "model, outcome"), "{{model}} {{outcome}}")],
                ),
                Panel(
                    "Time of a choice",
                    "From a Select's arrival to its answer. When it is high, the router's core is full: add a router.",
                    "s",
                    _quantiles("headrace_select_seconds", ROUTER, "model"),
                ),
                Panel(
                    "Imbalance",
                    "Requests at the fullest worker over those at the mean one. Above 2 for long: see explain.",
                    "none",
                    [
                        Query(
                            f"max by (model) (headrace_inflight_requests{WORKER}) / "
                            f"(avg by (model) (headrace_inflight_requests{WORKER}) > 0)",
                            "{{model}}",
                        )
                    ],
                ),
                Panel(
                    "Candidates",
                    "Ranks of workers that may be chosen, as each router knows them, and workers that stand still.",
                    "short",
                    [
                        Query(f"headrace_candidates{ROUTER}", "{{model}} at {{instance}}"),
                        Query(f"headrace_workers_standing_still{ROUTER}", "standing still, {{model}} at {{instance}}"),
                    ],
                ),
                Panel(
                    "Reservations",
                    "Attempts that are reserved and have not ended; and those released because a worker did not know "
                    "them.",
                    "short",
                    [
                        Query(f"headrace_reservations{ROUTER}", "{{model}} at {{instance}}"),
                        Query(f"headrace_reservations_forgotten{ROUTER}", "forgotten, {{model}} at {{instance}}"),
                    ],
                ),
                Panel(
                    "Troubles of the policy",
                    "A policy of your own that failed, was too slow, or is off.",
                    "cps",
                    [Query(_rate("headrace_policy_troubles_total", ROUTER, "model, kind"), "{{model}} {{kind}}")],
                    lit_by="a policy that raises",
                ),
            ],
        ),
        Row(
            "Index",
            [
                Panel(
                    "Blocks in the index",
                    "Distinct blocks, and (block, candidate) pairs by tier.",
                    "short",
                    [
                        Query(f"headrace_index_blocks{ROUTER}", "blocks, {{model}} at {{instance}}"),
                        Query(f"headrace_index_pairs{ROUTER}", "{{tier}}, {{model}} at {{instance}}"),
                    ],
                ),
                Panel(
                    "Size of the index",
                    "Estimated; blocks dropped at the limit make predictions too low: raise index.limit_bytes.",
                    "bytes",
                    [Query(f"headrace_index_bytes{ROUTER}", "{{model}} at {{instance}}")],
                ),
                Panel(
                    "Event sources",
                    "Sources by state. One that is not live or partial for long is not counted in choices.",
                    "short",
                    [
                        Query(
                            f"sum by (instance, state) (headrace_kv_sources{ANY_ROUTER}) > 0", "{{state}} {{instance}}"
                        ),
                        Query(f"headrace_kv_sources_silent{ANY_ROUTER}", "silent {{instance}}"),
                    ],
                ),
                Panel(
                    "Event batches",
                    "Batches of KV events, by outcome.",
                    "cps",
                    [Query(_rate("headrace_kv_events_total", ANY_ROUTER, "outcome"), "{{outcome}}")],
                ),
                Panel(
                    "Gaps, replays, snapshots",
                    "What was lost on the way, and how it was made good.",
                    "cps",
                    [
                        Query(_rate("headrace_kv_event_gaps_total", ANY_ROUTER, "namespace"), "gaps"),
                        Query(_rate("headrace_kv_replays_total", ANY_ROUTER, "outcome"), "replays {{outcome}}"),
                        Query(_rate("headrace_kv_snapshots_total", ANY_ROUTER, "outcome"), "snapshots {{outcome}}"),
                    ],
                ),
                Panel(
                    "Comparisons of the index",
                    "Each source's digest is compared once a minute. One that differed is a fault of Headrace.",
                    "cps",
                    [Query(_rate("headrace_kv_digests_total", ANY_ROUTER, "outcome"), "{{outcome}}")],
                    lit_by="a minute of life",
                ),
            ],
        ),
    ],
    by_model=True,
)

WORKERS = Board(
    "headrace-workers",
    "Headrace: workers and GPUs",
    "What engines do: queue, prefill, decode, memory.",
    [
        Row(
            "Load",
            [
                Panel(
                    "Running and waiting",
                    "Attempts at each worker. Waiting ones for long: too few workers, or too little KV memory.",
                    "short",
                    [
                        Query(f"headrace_inflight_requests{WORKER}", "running {{instance}}"),
                        Query(f"headrace_queued_requests{WORKER}", "waiting {{instance}}"),
                    ],
                ),
                Panel(
                    "Oldest waiting",
                    "Age of the attempt that has waited longest for its first token.",
                    "s",
                    [Query(f"headrace_oldest_queued_request_seconds{WORKER}", "{{instance}}")],
                ),
                Panel(
                    "Tokens",
                    "Tokens drawn, and tokens computed (prompts included).",
                    "cps",
                    [
                        Query(_rate("headrace_output_tokens_total", WORKER, "instance"), "drawn {{instance}}"),
                        Query(_rate("headrace_computed_tokens_total", WORKER, "instance"), "computed {{instance}}"),
                    ],
                ),
                Panel(
                    "Attempts",
                    "Attempts that ended, by outcome.",
                    "cps",
                    [Query(_rate("headrace_requests_total", WORKER, "outcome"), "{{outcome}}")],
                ),
            ],
        ),
        Row(
            "Time",
            [
                Panel(
                    "Queue",
                    "From an attempt's arrival to the first step that computes it.",
                    "s",
                    _quantiles("headrace_queue_seconds", WORKER, "model"),
                ),
                Panel(
                    "Prefill",
                    "From that step to the first token.",
                    "s",
                    _quantiles("headrace_prefill_seconds", WORKER, "model"),
                ),
                Panel(
                    "Steps",
                    "Time of a step's arithmetic.",
                    "s",
                    _quantiles("headrace_step_seconds", WORKER, "model"),
                ),
                Panel(
                    "Tokens of a prefill step",
                    "Many short ones make decoding smooth, few long ones make prefill fast.",
                    "short",
                    _quantiles("headrace_prefill_step_tokens", WORKER, "model"),
                ),
            ],
        ),
        Row(
            "Memory",
            [
                Panel(
                    "Blocks of KV",
                    "Held by running attempts, cached, free. No free and no cached ones: attempts are preempted.",
                    "short",
                    [Query(f"headrace_blocks{WORKER}", "{{state}} {{instance}}")],
                ),
                Panel(
                    "Preemptions",
                    "Attempts that gave their blocks back and wait again. When they are many, give KV more memory.",
                    "cps",
                    [Query(_rate("headrace_preemptions_total", WORKER, "instance"), "{{instance}}")],
                ),
                Panel(
                    "Memory of the GPU",
                    "Of the native engine: used, kept for the next allocations, others' and free.",
                    "bytes",
                    [Query(f"headrace_gpu_memory_bytes{WORKER}", "{{state}} {{instance}}")],
                    lit_by=GPU,
                ),
                Panel(
                    "Blocks by rank",
                    "Of each data-parallel rank.",
                    "short",
                    [Query(f"headrace_rank_blocks{WORKER}", "{{state}} rank {{rank}} {{instance}}")],
                ),
            ],
        ),
        Row(
            "Engines",
            [
                Panel(
                    "Engines started and lost",
                    "Since the workers started. The worker's log and /health say why an engine was lost.",
                    "short",
                    [
                        Query(f"headrace_engine_starts_total{WORKER}", "started {{instance}}"),
                        Query(f"headrace_engine_restarts_total{WORKER}", "lost {{instance}}"),
                    ],
                ),
                Panel(
                    "Time to load",
                    "Of the last start of each engine, its model included.",
                    "s",
                    [Query(f"headrace_model_load_seconds{WORKER}", "{{instance}}")],
                ),
                Panel(
                    "Probes of idle engines",
                    "A vLLM that is idle is asked for tokens now and then.",
                    "cps",
                    [
                        Query(
                            _rate("headrace_engine_probes_total", WORKER, "instance, outcome"),
                            "{{outcome}} {{instance}}",
                        )
                    ],
                    lit_by="an idle vLLM engine",
                ),
                Panel(
                    "Numbers that are not finite",
                    "Sequences computed once more, or failed, since NaN or infinity came out. Suspect the GPU.",
                    "cps",
                    [
                        Query(
                            _rate("headrace_not_finite_sequences_total", WORKER, "instance, outcome"),
                            "{{outcome}} {{instance}}",
                        )
                    ],
                ),
            ],
        ),
    ],
    by_model=True,
)

STORE = Board(
    "headrace-store",
    "Headrace: block store",
    "kvbm's tiers, what enters and leaves them, and its disk.",
    [
        Row(
            "Use",
            [
                Panel(
                    "Hit rate",
                    "Blocks found over blocks that engines asked for, by tier, over the last minutes.",
                    "percentunit",
                    [Query(f"headrace_kvbm_hit_rate{KVBM}", "{{tier}} {{instance}}")],
                ),
                Panel(
                    "Blocks asked for and found",
                    "By tier.",
                    "cps",
                    [
                        Query(_rate("headrace_kvbm_asked_blocks_total", KVBM, "instance"), "asked {{instance}}"),
                        Query(
                            _rate("headrace_kvbm_hit_blocks_total", KVBM, "instance, tier"),
                            "found {{tier}} {{instance}}",
                        ),
                    ],
                    lit_by="blocks that come back from the store",
                ),
                Panel(
                    "Offered and written",
                    "Blocks that workers offered, by outcome, and that they wrote.",
                    "cps",
                    [
                        Query(_rate("headrace_kvbm_store_blocks_total", KVBM, "outcome"), "{{outcome}}"),
                        Query(_rate("headrace_kvbm_committed_blocks_total", KVBM, "namespace"), "written"),
                    ],
                ),
            ],
        ),
        Row(
            "Tiers",
            [
                Panel(
                    "Slots of host memory",
                    "By state. Quarantined ones wait for the proof that an engine is dead.",
                    "short",
                    [Query(f"sum by (instance, state) (headrace_kvbm_slots{KVBM})", "{{state}} {{instance}}")],
                ),
                Panel(
                    "Records on disk",
                    "By state.",
                    "short",
                    [Query(f"sum by (instance, state) (headrace_kvbm_disk_records{KVBM})", "{{state}} {{instance}}")],
                ),
                Panel(
                    "Evictions",
                    "Blocks that left a tier, by reason. Many for room: the tier is smaller than what is asked for.",
                    "cps",
                    [Query(_rate("headrace_kvbm_evicted_blocks_total", KVBM, "tier, reason"), "{{tier}}: {{reason}}")],
                    lit_by="a full tier",
                ),
                Panel(
                    "Pool",
                    "Size of the shared memory, and how much of it is made.",
                    "bytes",
                    [
                        Query(f"headrace_kvbm_pool_bytes{KVBM}", "size {{instance}}"),
                        Query(f"headrace_kvbm_pool_reserved_bytes{KVBM}", "made {{instance}}"),
                    ],
                ),
            ],
        ),
        Row(
            "Disk",
            [
                Panel(
                    "Disk traffic",
                    "Bytes read and written.",
                    "Bps",
                    [
                        Query(
                            _rate("headrace_kvbm_disk_bytes_total", KVBM, "instance, operation"),
                            "{{operation}} {{instance}}",
                        )
                    ],
                    lit_by="a disk tier with blocks",
                ),
                Panel(
                    "Time of a disk request, p99",
                    "Without its time in the queue.",
                    "s",
                    [Query(_quantile(0.99, "headrace_kvbm_disk_seconds", KVBM, "operation"), "{{operation}}")],
                    lit_by="a disk tier with blocks",
                ),
                Panel(
                    "Blocks lost on disk",
                    "Blocks that could not be read or written: a full disk, a failing one, damaged records.",
                    "cps",
                    [
                        Query(
                            _rate("headrace_kvbm_disk_lost_blocks_total", KVBM, "operation, reason"),
                            "{{operation}}: {{reason}}",
                        )
                    ],
                    lit_by="a disk that fails",
                ),
                Panel(
                    "Disk tiers and the writes that wait",
                    "State of each disk tier; off after too many errors.",
                    "short",
                    [
                        Query(f"headrace_kvbm_disks{KVBM}", "{{state}} {{instance}}"),
                        Query(f"headrace_kvbm_spills_waiting_blocks{KVBM}", "writes waiting {{instance}}"),
                    ],
                ),
            ],
        ),
        Row(
            "Engines and tickets",
            [
                Panel(
                    "Tickets",
                    "Open promises to engines, by kind. Expired ones are engines that died or hang.",
                    "short",
                    [Query(f"headrace_kvbm_tickets{KVBM}", "{{kind}} {{instance}}")],
                ),
                Panel(
                    "Engines attached",
                    "As kvbm counts them, and as workers do.",
                    "short",
                    [
                        Query(f"headrace_kvbm_owners{KVBM}", "at {{instance}}"),
                        Query(f"sum(headrace_kvbm_attached{ANY_WORKER})", "workers attached"),
                    ],
                ),
                Panel(
                    "Time of a request",
                    "From its arrival to the first reply.",
                    "s",
                    [Query(_quantile(0.99, "headrace_kvbm_request_seconds", KVBM, "operation"), "p99 {{operation}}")],
                ),
                Panel(
                    "Copies of engines",
                    "Bytes copied to and from the pool.",
                    "Bps",
                    [Query(_rate("headrace_kvbm_copied_bytes_total", ANY_WORKER, "direction"), "{{direction}}")],
                ),
                Panel(
                    "Requests to kvbm by outcome",
                    "As engines see them: answered, away, late, too_many, failed.",
                    "cps",
                    [
                        Query(
                            _rate("headrace_kvbm_asks_total", ANY_WORKER, "operation, outcome"),
                            "{{operation}} {{outcome}}",
                        )
                    ],
                ),
                Panel(
                    "Blocks waited for in vain",
                    "Attempts that stopped waiting for blocks from kvbm and computed them.",
                    "cps",
                    [Query(_rate("headrace_late_onboardings_total", ANY_WORKER, "instance"), "{{instance}}")],
                ),
            ],
        ),
    ],
)

INFRASTRUCTURE = Board(
    "headrace-infrastructure",
    "Headrace: infrastructure",
    "NATS, etcd and our processes.",
    [
        Row(
            "Processes",
            [
                Panel(
                    "Scraped",
                    "1 where Prometheus reaches a target.",
                    "short",
                    [Query("up", "{{job}} {{service}} {{instance}}")],
                ),
                Panel(
                    "CPU",
                    "Cores that each process uses. A frontend or router near 1 is full: add one.",
                    "none",
                    [Query(_rate("process_cpu_seconds_total", ANY, "service, instance"), "{{service}} {{instance}}")],
                ),
                Panel(
                    "Memory",
                    "Resident memory of each process.",
                    "bytes",
                    [Query(f"process_resident_memory_bytes{ANY}", "{{service}} {{instance}}")],
                ),
                Panel(
                    "Open files",
                    "Of the most that each process may open.",
                    "percentunit",
                    [Query(f"process_open_fds{ANY} / process_max_fds{ANY}", "{{service}} {{instance}}")],
                ),
            ],
        ),
        Row(
            "NATS",
            [
                Panel(
                    "Messages",
                    "In and out of the server.",
                    "cps",
                    [
                        Query("rate(gnatsd_varz_in_msgs[$__rate_interval])", "in"),
                        Query("rate(gnatsd_varz_out_msgs[$__rate_interval])", "out"),
                    ],
                ),
                Panel(
                    "Bytes",
                    "In and out of the server.",
                    "Bps",
                    [
                        Query("rate(gnatsd_varz_in_bytes[$__rate_interval])", "in"),
                        Query("rate(gnatsd_varz_out_bytes[$__rate_interval])", "out"),
                    ],
                ),
                Panel(
                    "Connections and slow consumers",
                    "A slow consumer did not read fast enough and was cut off.",
                    "short",
                    [
                        Query("gnatsd_varz_connections", "connections"),
                        Query("gnatsd_varz_slow_consumers", "slow consumers since the start"),
                    ],
                ),
                Panel(
                    "Messages that were lost or not read",
                    "By our processes: dropped on the way, too large to send, or not readable.",
                    "cps",
                    [
                        Query(_rate("headrace_unreadable_messages_total", ANY, "service"), "not readable {{service}}"),
                        Query(_rate("headrace_dropped_frames_total", ANY, "service"), "frames dropped {{service}}"),
                        Query(_rate("headrace_unsendable_messages_total", ANY, "service"), "not sendable {{service}}"),
                    ],
                ),
            ],
        ),
        Row(
            "etcd",
            [
                Panel(
                    "Leader", "1 while etcd has a leader.", "short", [Query("etcd_server_has_leader", "{{instance}}")]
                ),
                Panel("Size", "Of its database.", "bytes", [Query("etcd_mvcc_db_total_size_in_bytes", "{{instance}}")]),
                Panel(
                    "Time to disk, p99",
                    "When it is above 0.1 s, leases may run out.",
                    "s",
                    [
                        Query(
                            "histogram_quantile(0.99, sum by (le, instance) "
                            "(rate(etcd_disk_wal_fsync_duration_seconds_bucket[$__rate_interval])))",
                            "{{instance}}",
                        )
                    ],
                ),
                Panel(
                    "Troubles with discovery",
                    "Calls to etcd that failed, and values in it that could not be read.",
                    "cps",
                    [
                        Query(_rate("headrace_discovery_failures_total", ANY, "service"), "failed calls {{service}}"),
                        Query(
                            _rate("headrace_directory_unreadable_values_total", ANY, "service"),
                            "not readable {{service}}",
                        ),
                    ],
                ),
            ],
        ),
    ],
)

BOARDS = (SERVICE, ROUTING, WORKERS, STORE, INFRASTRUCTURE)


def main() -> None:
    """Write the JSON of all boards."""
    DIRECTORY.mkdir(exist_ok=True)
    for board in BOARDS:
        (DIRECTORY / f"{board.uid.removeprefix('headrace-')}.json").write_text(render(board), encoding="utf-8")


if __name__ == "__main__":
    main()
