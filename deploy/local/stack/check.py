"""Checks that the services of an `up` would start as they are configured, before anything is fetched or started.

Each service checks its own settings, with `--check`: deployment imports no service, and a policy may be a module of the
user."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

from deploy.local.stack import servers
from deploy.local.stack.stack import (
    Launch,
    ServiceName,
    UpOptions,
    module_of,
    named_workers,
    plan,
    ports_needed,
    separated,
)
from deploy.local.state import StateDirectory
from shared.chat_templates import NAMES
from shared.errors import ConfigError
from shared.installation import help_command

LIMIT_S = 600.0
"""Limit of all checks together. On a busy machine, the vocabulary of a large GGUF file takes a minute."""
NOTICE_AFTER_S = 2.0
"""A check that takes longer than this is shown."""
BUILT_IN = ("kv", "round-robin", "random", "least-loaded", "power-of-two")
"""Policies of the router, which need no check; a test compares the two lists."""
TEMPLATE_CHECK = "services.frontend.models.template_check"
"""The program that checks chat template and tokenizer: a frontend reads them only when a worker is there."""
ACCESS_FLAGS = {"http.tls_cert": "--tls-cert", "http.tls_key": "--tls-key", "access.keys_file": "--keys"}
"""Setting of a frontend → the flag of `up` that sets it."""
CHECK_ALL, CHECK_SETTINGS = "--check", "--check-settings"


def check(
    options: UpOptions,
    state_dir: StateDirectory,
    *,
    python: str,
    model: bool,
    notice: Callable[[str], None] = lambda _: None,
) -> None:
    """Run the check of each service that the user has configured. Raise ConfigError with the service's own message.

    `model` says that the model is on this machine and is checked too. `notice` is called for a check that takes long.
    A service whose settings all come from `up` itself is not checked, which saves time. One worker is checked, and one
    of those that only encode, which need a model that takes images.
    """
    asked = _asked(options, model)
    template = _template_arguments(options, model)
    if not asked and not template:
        return
    options = separated(options)
    ports = list(range(1, ports_needed(options) + 1))
    stack = plan(options, state_dir, ports, python=python, cores=1, password="none is needed")  # noqa: S106
    with TemporaryDirectory(prefix="headrace-check-") as aside, ExitStack() as ended:
        for file, text in stack.files.items():
            (Path(aside) / file.name).write_text(text, encoding="utf-8")
        running: list[tuple[ServiceName, subprocess.Popen[str]]] = []
        checked, roles = set[tuple[str, bool]](), dict(named_workers(options))
        for launch in stack.launches:
            service, encodes = _service(launch), roles.get(launch.program.name) == "encode"
            if service is not None and (service, encodes) not in checked and service in asked:
                checked.add((service, encodes))
                arguments = [argument.replace(f"{state_dir.run}/", f"{aside}/") for argument in launch.arguments]
                program = ended.enter_context(_started([*arguments, asked[service]], aside))
                ended.callback(program.kill)
                running.append((service, program))
        if template:
            program = ended.enter_context(_started([python, "-m", TEMPLATE_CHECK, *template], aside))
            ended.callback(program.kill)
            running.append(("frontend", program))
        until_s = time.monotonic() + LIMIT_S
        for service, program in running:
            files = f"the model {options.model_name}" if model and service == "worker" else "its files"
            said = _said(service, program, until_s, partial(notice, f"{service}: checking its settings and {files}"))
            if program.returncode:
                wrong = translated(service, said, aside)
                raise ConfigError(wrong or f"{service}: its check ended with status {program.returncode}")


def _asked(options: UpOptions, model: bool) -> Mapping[ServiceName, str]:
    """Map each service that the user has configured to the flag of its check."""
    asked: dict[ServiceName, str] = dict.fromkeys(options.overrides, CHECK_ALL)
    if options.access.keys or options.access.tls_cert:
        asked["frontend"] = CHECK_ALL
    if options.policy not in BUILT_IN:
        asked["router"] = CHECK_ALL
    if model:
        asked["worker"] = CHECK_ALL
    elif "worker" in asked or options.simulated or (options.gpus is not None and options.gpus.settings):
        asked["worker"] = CHECK_SETTINGS
    return asked


def _template_arguments(options: UpOptions, model: bool) -> list[str]:
    """Return the arguments of the check of template and tokenizer; empty if the template is one of ours and the
    tokenizer not in a directory on this machine, and for pictures, which need neither."""
    if options.engine == "diffusers":
        return []
    here = model and Path(options.model).is_dir()
    if options.chat_template and (here or options.chat_template not in NAMES):
        return [options.model, options.chat_template]
    return [options.model] if here else []


def _service(launch: Launch) -> ServiceName | None:
    """Return the service of a launch; None for NATS and etcd. A worker with a role is not called worker."""
    return next((name for name in get_args(ServiceName) if module_of(name) in launch.arguments), None)


def _started(arguments: Sequence[str], aside: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=aside,
        # Its temporary files go with the directory, even if it is killed.
        env=servers.program_environment() | {"TMPDIR": aside},
    )


def _said(service: ServiceName, program: subprocess.Popen[str], until_s: float, long: Callable[[], None]) -> str:
    """Wait for the program and return its stderr. Call `long` if that takes a while. Raise ConfigError at the
    limit."""
    with suppress(subprocess.TimeoutExpired):
        return program.communicate(timeout=min(NOTICE_AFTER_S, max(0.0, until_s - time.monotonic())))[1]
    long()
    try:
        return program.communicate(timeout=max(0.0, until_s - time.monotonic()))[1]
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{service}: its check did not end within {LIMIT_S:g} s") from None


def translated(service: ServiceName, said: str, aside: str) -> str:
    """Return the last lines of a service's output, one a fault, with its flags as `--set` names them."""
    lines, prefix = said.strip().splitlines(), f"headrace-{service}: "
    faults = list(takewhile(lambda line: line.startswith(prefix), reversed(lines))) or lines[-1:]
    return "\n".join(_translated_line(service, line.removeprefix(prefix), aside) for line in reversed(faults))


def _translated_line(service: ServiceName, line: str, aside: str) -> str:
    line = re.sub(re.escape(aside) + r"/\S+\.toml: ", f"{service}: ", line)
    line = re.sub(r"^\w+Config: (?=[^\s:]+: )", f"{service}.", line)
    line = re.sub(r"^\w+Config: ", f"{service}: ", line)
    if line.startswith("--"):
        line = re.sub(r"(?<!\S)--(?=\w)", f"{service}.", line)
    line = re.sub(r"^(?=(access|http|observe|peers)\.)", f"{service}.", line)
    for setting, flag in ACCESS_FLAGS.items():
        line = re.sub(rf"(frontend\.)?\b{re.escape(setting)}\b", flag, line)
    if service == "kvbm" and ": no such setting; " in line:
        line += "; those of workers for it begin with worker.kvbm"
    return line.replace("`--help`", "docs/model_turns.md" if service == "turns" else f"`{help_command(service)}`")
