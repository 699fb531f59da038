"""What may be typed after `headrace`."""

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
    """One that takes no flag for a part of its name: a flag that is added later would change what the part means."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)


def parser() -> argparse.ArgumentParser:
    """Of all commands."""
    parser = CommandParser(prog="headrace", description="Serves language models from many workers as one.")
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
    up.add_argument("--port", type=int, default=8000, help="of the HTTP API, on 127.0.0.1 (%(default)s)")
    up.add_argument("--workers", type=int, default=2, help="how many (%(default)s)")
    usual = "2, and 1 where there are no more than two cores"
    up.add_argument("--frontends", type=int, help=f"how many, on one port ({usual})")
    up.add_argument("--routers", type=int, help=f"how many ({usual})")
    up.add_argument(
        "--model", default=DEFAULT_MODEL, help="directory or GGUF file (SmolLM2-135M-Instruct, fetched once)"
    )
    up.add_argument("--model-name", default="", metavar="NAME", help="what clients call it (the file's name)")
    up.add_argument(
        "--policy", default="kv", help="kv, round-robin, random, least-loaded, power-of-two or module:attribute"
    )
    up.add_argument("--discovery", choices=("etcd", "file"), default="etcd", help="who is alive (%(default)s)")
    up.add_argument(
        "--engine",
        choices=("native", "simulated", "echo"),
        default="native",
        help="%(default)s; simulated takes a GPU's time and needs none, echo says the prompt back",
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
        help="where the native engine computes (%(default)s); cuda: workers take the GPUs that CUDA shows in turn",
    )
    up.add_argument(
        "--gpu-memory-share",
        type=float,
        metavar="SHARE",
        help=f"of each GPU's memory, for all of its workers together ({GPU_MEMORY_SHARE})",
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
        help="of memory for KV blocks, shared by all workers: 512M, 2G; 0: none (a 16th of all, at most 1G; with GPUs"
        " an 8th, at most 32G)",
    )
    up.add_argument("--kvbm-disk", type=Path, metavar="DIR", help="for blocks that this memory has no room for (none)")
    up.add_argument("--kvbm-disk-bytes", default="", metavar="SIZE", help="of that directory (10G)")
    up.add_argument("--keys", type=Path, metavar="FILE", help="ask for API keys: those that it names (docs/access.md)")
    up.add_argument(
        "--tls-cert", type=Path, metavar="FILE", help="speak TLS alone, with this certificate and its chain"
    )
    up.add_argument("--tls-key", type=Path, metavar="FILE", help="of that certificate")
    up.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SERVICE.SETTING=VALUE",
        help="of all frontends, routers, workers or the kvbm: frontend.limits.requests=64, worker.max_running=8, …; all"
        " that there are: `.venv/bin/python -m services.frontend --help`",
    )
    up.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="of all services (%(default)s)",
    )
    up.add_argument("--nats", default="", metavar="URL", help="a NATS that runs already")
    up.add_argument("--etcd", default="", metavar="HOST:PORT", help="an etcd that runs already")

    fleet = CommandParser(add_help=False)
    fleet.add_argument("--json", action="store_true", help="one JSON object")
    fleet.add_argument("--nats", default="", metavar="URL", help="(those of `up`)")
    fleet.add_argument("--etcd", default="", metavar="HOST:PORT", help="(that of `up`)")
    fleet.add_argument("--namespace", default="default")
    commands.add_parser("status", parents=[state, fleet], help="what is alive, and how busy")
    explain = commands.add_parser("explain", parents=[state, fleet], help="why a request went where it went")
    explain.add_argument(
        "request", nargs="?", help="the `id` of its answer, or its X-Request-Id (the latest ones, a line each)"
    )

    chat = commands.add_parser("chat", parents=[state], help="ask one question")
    chat.add_argument("question")
    chat.add_argument("--url", default="", help=f"the API (that of `up`, or {DEFAULT_URL})")
    chat.add_argument("--model", default="", help="(the first one served)")
    chat.add_argument("--max-tokens", type=int, default=512, help="%(default)s")
    chat.add_argument("--temperature", type=float, default=0.0, help="%(default)s: greedy")
    chat.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="with the key alone in it (OPENAI_API_KEY of the environment)"
    )

    bench = commands.add_parser(
        "bench", parents=[state], help="measure an OpenAI endpoint", description="A sweep of loads; docs/bench.md."
    )
    bench.add_argument("--url", default="", help=f"any OpenAI endpoint (that of `up`, or {DEFAULT_URL})")
    bench.add_argument("--model", default="", help="(the first one served)")
    bench.add_argument("--concurrency", default="", metavar="N,…", help="requests in flight, one load after the other")
    bench.add_argument("--rate", default="", metavar="R,…", help="or requests a second, sent at random times")
    bench.add_argument(
        "--requests", type=int, default=0, help="of each load (4 x concurrency, 20 s x rate; at least 32)"
    )
    bench.add_argument("--words", type=int, default=512, help="of each prompt (%(default)s)")
    bench.add_argument("--shared-words", type=int, default=0, help="that all prompts begin with (%(default)s)")
    bench.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt a line, instead of made-up ones")
    bench.add_argument("--output-tokens", type=int, default=128, help="of each answer (%(default)s)")
    bench.add_argument("--may-stop", action="store_true", help="answers may be shorter: `ignore_eos` is not sent")
    bench.add_argument("--warmup", type=int, default=2, help="requests before each load, not measured (%(default)s)")
    bench.add_argument("--timeout-s", type=float, default=120.0, help="of each request (%(default)s)")
    bench.add_argument("--seed", type=int, default=0, help="of prompts and times (%(default)s)")
    bench.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="with the key alone in it (OPENAI_API_KEY of the environment)"
    )
    bench.add_argument("--out", default="bench", metavar="PREFIX", help="of the .json and .png written (%(default)s)")
    bench.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    bench.add_argument("--driver", choices=("own", "aiperf"), default="own", help="who sends (%(default)s)")
    bench.add_argument("--tokenizer", default="", help="for aiperf: a directory, or a hub's name")
    commands.add_parser(
        "install-gpu",
        help="fetch what --device cuda needs (0.6 GB)",
        description="CuPy, cuBLAS and CUDA's compiler, into .venv; ./headrace keeps them there from then on.",
    )
    commands.add_parser("version", help="print the version")

    key = commands.add_parser("key", help="API keys, for frontends that ask for one: docs/access.md")
    new = key.add_subparsers(dest="verb", required=True, metavar="VERB").add_parser("new", help="make and print one")
    new.add_argument("name", metavar="NAME", help="whose it is, of a-z, 0-9, - and _")
    for limit in ("requests-per-minute", "tokens-per-minute", "concurrency"):
        new.add_argument(f"--{limit}", type=int, metavar="N", help="(no limit)")
    return parser
