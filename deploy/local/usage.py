"""The commands and flags of `headrace`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from deploy.local.stack.stack import DEFAULT_HOME
from shared.version import VERSION

DEFAULT_URL = "http://127.0.0.1:8000/v1"
DEFAULT_MODEL = "default"
GPU_MEMORY_SHARE = 0.9


class CommandParser(argparse.ArgumentParser):
    """A parser that accepts no abbreviated flags: a flag that is added later would change their meaning."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = CommandParser(prog="headrace", description="Serves language models: one API for many workers.")
    parser.add_argument("--version", action="version", version=f"headrace {VERSION}")
    parser.set_defaults(state=DEFAULT_HOME)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    state = CommandParser(add_help=False)
    state.add_argument(
        "--state", type=Path, default=DEFAULT_HOME, metavar="DIR", help="where `up` keeps its files (.headrace)"
    )

    up = commands.add_parser(
        "up", parents=[state], help="run everything on this machine", description="Run everything, until Ctrl-C."
    )
    up.add_argument("--port", type=int, default=8000, help="port of the HTTP API on 127.0.0.1 (%(default)s)")
    up.add_argument("--workers", type=int, default=2, help="number of workers (%(default)s)")
    usual = "2; with one or two cores 1"
    up.add_argument("--frontends", type=int, help=f"number of frontends, on one port ({usual})")
    up.add_argument("--routers", type=int, help=f"number of routers ({usual})")
    up.add_argument(
        "--model", default=DEFAULT_MODEL, help="model directory or GGUF file (SmolLM2-135M-Instruct, fetched once)"
    )
    up.add_argument("--model-name", default="", metavar="NAME", help="name of the model for clients (the file's name)")
    up.add_argument(
        "--policy",
        default="kv",
        help="routing policy: kv, round-robin, random, least-loaded, power-of-two or module:attribute",
    )
    up.add_argument(
        "--discovery",
        choices=("etcd", "file"),
        default="etcd",
        help="where processes register and find each other (%(default)s)",
    )
    up.add_argument(
        "--engine",
        choices=("native", "simulated", "echo"),
        default="native",
        help="what workers run (%(default)s); simulated has the timing of a GPU without one, echo returns the prompt",
    )
    up.add_argument(
        "--simulated",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of the simulated engine: speed=2, fixed_s=0.02, …",
    )
    up.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where the native engine computes (%(default)s); cuda: workers take the visible GPUs in turn",
    )
    up.add_argument(
        "--gpu-memory-share",
        type=float,
        metavar="SHARE",
        help=f"share of each GPU's memory for all of its workers together ({GPU_MEMORY_SHARE})",
    )
    up.add_argument(
        "--cuda",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting of workers on GPUs: dtype=float16, graphs=false, …",
    )
    up.add_argument(
        "--kvbm-bytes",
        default="",
        metavar="SIZE",
        help="size of the memory for KV blocks that all workers share: 512M, 2G; 0: none (a 16th of the"
        " machine's memory, at most 1G; with GPUs an 8th, at most 32G)",
    )
    up.add_argument(
        "--kvbm-disk", type=Path, metavar="DIR", help="directory for blocks that do not fit into that memory (none)"
    )
    up.add_argument("--kvbm-disk-bytes", default="", metavar="SIZE", help="size of the blocks in that directory (10G)")
    up.add_argument(
        "--keys", type=Path, metavar="FILE", help="require one of the API keys in this file (docs/access.md)"
    )
    up.add_argument("--tls-cert", type=Path, metavar="FILE", help="serve only TLS, with this certificate and its chain")
    up.add_argument("--tls-key", type=Path, metavar="FILE", help="private key of that certificate")
    up.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SERVICE.SETTING=VALUE",
        help="a setting of all frontends, routers or workers, or of the kvbm: frontend.limits.requests=64,"
        " worker.max_running=8, …; `.venv/bin/python -m services.frontend --help` lists those of a service",
    )
    up.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="log level of all services (%(default)s)",
    )
    up.add_argument("--nats", default="", metavar="URL", help="use a NATS server that runs already")
    up.add_argument("--etcd", default="", metavar="HOST:PORT", help="use an etcd server that runs already")

    fleet = CommandParser(add_help=False)
    fleet.add_argument("--json", action="store_true", help="print one JSON object")
    fleet.add_argument("--nats", default="", metavar="URL", help="NATS server (that of `up`)")
    fleet.add_argument("--etcd", default="", metavar="HOST:PORT", help="etcd server (that of `up`)")
    fleet.add_argument("--namespace", default="default", help="namespace of the fleet (%(default)s)")
    commands.add_parser("status", parents=[state, fleet], help="show which processes are alive, and how busy they are")
    explain = commands.add_parser("explain", parents=[state, fleet], help="show why requests went to their workers")
    explain.add_argument(
        "request", nargs="?", help="`id` of the answer, or its X-Request-Id (the latest requests, one line each)"
    )

    chat = commands.add_parser("chat", parents=[state], help="ask one question")
    chat.add_argument("question", help="the text of the question")
    chat.add_argument("--url", default="", help=f"URL of the API (that of `up`, or {DEFAULT_URL})")
    chat.add_argument("--model", default="", help="name of the model (the first one served)")
    chat.add_argument("--max-tokens", type=int, default=512, help="limit of the answer (%(default)s)")
    chat.add_argument("--temperature", type=float, default=0.0, help="sampling temperature (%(default)s: greedy)")
    chat.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file that contains only the API key (OPENAI_API_KEY of the environment)",
    )

    bench = commands.add_parser(
        "bench",
        parents=[state],
        help="measure an OpenAI endpoint",
        description="Measure a sweep of loads; see docs/bench.md.",
    )
    bench.add_argument("--url", default="", help=f"URL of any OpenAI endpoint (that of `up`, or {DEFAULT_URL})")
    bench.add_argument("--model", default="", help="name of the model (the first one served)")
    bench.add_argument(
        "--concurrency", default="", metavar="N,…", help="numbers of requests in flight; each is one load"
    )
    bench.add_argument("--rate", default="", metavar="R,…", help="instead: requests per second, sent at random times")
    bench.add_argument(
        "--requests",
        type=int,
        default=0,
        help="number of requests of each load (4 x concurrency or 20 s x rate; at least 32)",
    )
    bench.add_argument("--words", type=int, default=512, help="words of each prompt (%(default)s)")
    bench.add_argument("--shared-words", type=int, default=0, help="words that all prompts begin with (%(default)s)")
    bench.add_argument(
        "--prompts", type=Path, metavar="FILE", help="file with one prompt per line, instead of generated prompts"
    )
    bench.add_argument("--output-tokens", type=int, default=128, help="tokens of each answer (%(default)s)")
    bench.add_argument("--may-stop", action="store_true", help="allow shorter answers: do not send `ignore_eos`")
    bench.add_argument("--warmup", type=int, default=2, help="unmeasured requests before each load (%(default)s)")
    bench.add_argument("--timeout-s", type=float, default=120.0, help="time limit of each request (%(default)s)")
    bench.add_argument("--seed", type=int, default=0, help="random seed of prompts and times (%(default)s)")
    bench.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file that contains only the API key (OPENAI_API_KEY of the environment)",
    )
    bench.add_argument(
        "--out",
        default="bench",
        metavar="PREFIX",
        help="path of the .json and .png files without their suffix (%(default)s)",
    )
    bench.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    bench.add_argument("--driver", choices=("own", "aiperf"), default="own", help="load generator (%(default)s)")
    bench.add_argument("--tokenizer", default="", help="tokenizer for aiperf: a directory or a name on the hub")
    commands.add_parser(
        "install-gpu",
        help="install what --device cuda needs (0.6 GB)",
        description="Install CuPy, cuBLAS and CUDA's compiler into .venv, where ./headrace keeps them.",
    )
    commands.add_parser("version", help="print the version")

    key = commands.add_parser("key", help="make API keys (docs/access.md)")
    new = key.add_subparsers(dest="verb", required=True, metavar="VERB").add_parser(
        "new", help="make a key and print it"
    )
    new.add_argument("name", metavar="NAME", help="name of the key's owner: a-z, 0-9, - and _")
    for limit in ("requests-per-minute", "tokens-per-minute", "concurrency"):
        new.add_argument(f"--{limit}", type=int, metavar="N", help="limit of the key (none)")
    return parser
