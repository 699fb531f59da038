"""`headrace bench --driver aiperf`: runs the same sweep with NVIDIA's load generator, if it is installed."""

from __future__ import annotations

import shutil
import subprocess

from deploy.local.bench.plan import Point
from deploy.local.bench.sweep import BenchOptions
from shared.errors import ConfigError


def run(options: BenchOptions) -> int:
    """Run all points. Return the exit status of the first run that failed, or 0. Each point's files are in a directory
    below `out`. Raise ConfigError."""
    program = shutil.which("aiperf")
    if program is None:
        raise ConfigError(
            "--driver aiperf: no such program in PATH; run `pip install aiperf` in an environment of its own"
        )
    if not options.model or not options.tokenizer:
        raise ConfigError("--driver aiperf needs --model, and --tokenizer with a directory or a name on the hub")
    if options.given:
        raise ConfigError("--driver aiperf makes its own prompts; remove --prompts")
    if options.api_key:
        raise ConfigError("--driver aiperf takes a key only as a flag, which `ps` shows; give no API key")
    for point in options.points:
        status = subprocess.run([program, *arguments(options, point)], check=False).returncode
        if status:
            return status
    return 0


def arguments(options: BenchOptions, point: Point) -> list[str]:
    """Return aiperf's arguments for a point. Lengths that are words here are tokens there."""
    load = ["--concurrency", f"{point.value:g}"] if point.loop == "closed" else ["--request-rate", f"{point.value:g}"]
    prefix = ["--shared-system-prompt-length", str(options.shared_words)] if options.shared_words else []
    warmup = ["--warmup-request-count", str(options.warmup)] if options.warmup else []
    return [
        "profile",
        *("--model", options.model, "--tokenizer", options.tokenizer),
        *("--url", options.url.removesuffix("/v1"), "--endpoint-type", "chat", "--streaming"),
        *("--use-server-token-count", *([] if options.may_stop else ["--extra-inputs", "ignore_eos:true"])),
        *("--isl", str(options.words - options.shared_words), "--osl", str(options.output_tokens), *prefix),
        *(*load, "--request-count", str(point.requests), *warmup),
        *("--request-timeout-seconds", f"{options.timeout_s:g}", "--random-seed", str(options.seed)),
        *("--output-artifact-dir", f"{options.out}/{point.name.replace(' ', '-')}"),
    ]
