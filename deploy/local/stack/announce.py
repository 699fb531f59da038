"""Says what the services of an `up` wait for, and prints `ready` once requests are served.

An `up` that joins a fleet with workers of one role may have to wait for the other role, which another machine brings.
It prints `joined` then, and `ready` when a request would be served.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence

from deploy.local import probe
from deploy.local.stack.stack import SINGLE, AccessFiles, Launch, Stack
from deploy.local.stack.supervise import Supervisor
from deploy.local.state import DEFAULT_HOME, StateDirectory
from deploy.local.terminal import Terminal, paint
from shared.bus.nats_servers import without_password
from shared.installation import COMMAND

PROBE_EVERY_S = 0.1
HAND_OVER_WAIT_S = 30.0
"""Most seconds for which a stack that would serve is not called ready, since workers with a role cannot hand over."""
LAST_LINE = "stop:    Ctrl-C"
"""The last line of what is said once requests are served."""
JOIN_WAIT_S = 5.0
"""Seconds for which frontends may find workers of the other role, once all other services are ready."""


class SharedTasks:
    """Decides which service shows the progress of a task that several do at once, such as loading the same model."""

    def __init__(self) -> None:
        self._at: dict[str, str] = {}
        """Service → the task that it does."""
        self._shown: dict[str, tuple[str, int]] = {}
        """Task → the service that shows it, and the share that it has shown, in percent."""

    def shows(self, service: str, task: str, percent: int) -> bool:
        """Note that a service has done `percent` of a task. Return whether to show that: for the first service, or for
        another one that is further than the first was when it left the task."""
        self._at[service] = task
        holder, most = self._shown.get(task, (service, -1))
        if service != holder and (self._at.get(holder) == task or percent <= most):
            return False
        self._shown[task] = service, percent
        return True

    def left(self, service: str) -> None:
        """Note that a service does something else."""
        self._at.pop(service, None)


class Announcer:
    """Watches the services of one `up` until all are ready."""

    def __init__(
        self,
        stack: Stack,
        state_dir: StateDirectory,
        terminal: Terminal,
        supervisor: Supervisor,
        serving: Callable[[], None],
    ) -> None:
        """Call `serving` once, when requests are served."""
        self._stack = stack
        self._state_dir = state_dir
        self._terminal = terminal
        self._supervisor = supervisor
        self._serving = serving
        self._waiting = {launch.program.name: launch for launch in stack.launches if launch.observe}
        """Services that are not ready yet."""
        self._frontends = {name for name in self._waiting if name.startswith(("frontend", SINGLE))}
        self._models = dict.fromkeys(self._frontends, stack.by_turns)
        if stack.by_turns and self._frontends:
            self._frontends |= {name for name in self._waiting if name.startswith("worker")}
        self._served = not self._frontends
        self._joined = not stack.other_role or not self._frontends
        """True once it is said that this machine waits for another one; also if it never does."""
        self._reasons: dict[str, str] = {}
        """Why a service is not ready, as it was shown last."""
        self._tasks = SharedTasks()

    async def run(self) -> None:
        """Show why services are not ready yet; print once that the frontends are ready, and hand-overs are possible."""
        if self._stack.other_role and not self._stack.shares_blocks:
            self._terminal.notice(
                "prompts are handed over between machines only where each has a kvbm.peers.listen: give it with"
                " --set kvbm.peers.listen=HOST:PORT (docs/peers.md)"
            )
        served_s: float | None = None
        """When `ready` is said without hand-overs. None if a frontend is missing."""
        joined_s: float | None = None
        """When `joined` is said. None if a service of this machine is missing."""
        while self._waiting:
            for launch in list(self._waiting.values()):
                if await self._is_ready(launch):
                    self._tasks.left(launch.program.name)
                    del self._waiting[launch.program.name]
            now_s = time.monotonic()
            if self._supervisor.stopping:
                pass
            elif not self._served and self._frontends.isdisjoint(self._waiting):
                served_s = now_s + HAND_OVER_WAIT_S if served_s is None else served_s
                missing = sorted(name for name, launch in self._waiting.items() if launch.hands_over)
                self._served = not missing or now_s >= served_s
                if self._served:
                    self._say_serving(missing)
            elif not self._joined and self._frontends.issuperset(self._waiting):
                joined_s = now_s + JOIN_WAIT_S if joined_s is None else joined_s
                self._joined = now_s >= joined_s
                if self._joined:
                    self._say_joined()
            await asyncio.sleep(PROBE_EVERY_S)
        if not self._frontends and not self._supervisor.stopping:
            self._print_joined()

    async def _is_ready(self, launch: Launch) -> bool:
        """Return whether a service is ready, or is not needed. Show what has changed: why it is not, or that it is
        ready now, after all was served without it."""
        name = launch.program.name
        if not self._supervisor.knows(name) or self._supervisor.state(name) == "ended":
            return True  # removed, or misconfigured and not needed
        healthy, reason = await health(launch, attached=launch.hands_over, models=self._models.get(name, ()))
        if healthy and reason:
            self._terminal.notice(f"  {name}: {reason}")
        if healthy and self._served and launch.hands_over:
            self._terminal.notice(f"{name} is ready now")
        if not healthy and reason and self._reasons.get(name) != reason and not launch.program.late:
            self._reasons[name] = reason
            self._say_reason(name, reason)
        return healthy

    def _say_serving(self, missing: list[str]) -> None:
        """Print that requests are served, though these services take no part in hand-overs."""
        for name in missing:
            self._terminal.notice(
                f"{name} takes no part in hand-overs yet: {self._reasons.get(name, 'it does not answer')}"
            )
        self._say_ready()
        self._serving()

    def _print_joined(self) -> None:
        self._terminal.clear()
        print(f"{paint('joined', 'yellow', sys.stdout)} {without_password(self._stack.nats)}", flush=True)

    def _say_joined(self) -> None:
        """Print that this machine has done its part, and what the fleet lacks."""
        self._print_joined()
        state = state_flag(self._state_dir)
        reasons = sorted({self._reasons[name] for name in self._waiting if name in self._reasons})
        why = "; ".join(reasons) or "the frontends do not answer"
        print(
            f"""
The workers of this machine are in the fleet, but no request is served yet: {why}.
On another machine, start `up` with --{self._stack.other_role} and the same NATS and etcd. This one then says `ready`.
status:  {COMMAND} status{state}
logs:    {self._state_dir.logs}
stop:    Ctrl-C
""",
            file=sys.stderr,
            flush=True,
        )

    def _say_reason(self, name: str, reason: str) -> None:
        """Show why a service is not ready yet; a reason that ends in a percentage is drawn as progress, of one of the
        services that do the same."""
        what, _, share = reason.removesuffix(" %").rpartition(": ")
        if what and share.isdecimal():
            if self._tasks.shows(name, what, int(share)):
                self._terminal.progress(f"  {name}: {what}", int(share) / 100)
        else:
            self._tasks.left(name)
            self._terminal.notice(f"  {name}: {reason}")

    def _say_ready(self) -> None:
        self._terminal.clear()
        stack, state = self._stack, state_flag(self._state_dir)
        look = "" if stack.single else f"\nstatus:  {COMMAND} status{state}"
        look += f"\npage:    {stack.page}" if stack.page else ""
        look += f"\npicker:  {stack.picker}, for gateways (docs/picker.md)" if stack.picker else ""
        at = (stack.url, stack.model, stack.access, state, look, str(self._state_dir.logs))
        say_ready(*at, makes_pictures=stack.makes_pictures)


def say_ready(
    url: str, model: str, access: AccessFiles, state: str, look: str, logs: str, *, makes_pictures: bool = False
) -> None:
    """Print that requests are served at a URL, without its /v1, and how to ask. `state` is a flag for commands, `look`
    further lines, `logs` where the logs are."""
    message = {"role": "user", "content": "What is the capital of France?"}
    question = json.dumps({"model": model, "messages": [message], "temperature": 0})
    by_file, by_header = (" --api-key-file FILE", " -H 'Authorization: Bearer KEY'") if access.keys else ("", "")
    certificate = shlex.quote(access.tls_cert)
    trusted, trust = (f" --cacert {certificate}", f"SSL_CERT_FILE={certificate} ") if access.tls_cert else ("", "")
    by_json = f"-H 'Content-Type: application/json'{by_header}"
    ask = f"""ask:     {trust}{COMMAND} chat{state}{by_file} --temperature 0 "What is the capital of France?"
   or:   curl{trusted} {url}/v1/chat/completions {by_json} -d '{question}'"""
    if makes_pictures:
        wanted = json.dumps({"model": model, "prompt": "a lighthouse at dusk", "seed": 1})
        picture = "json.load(sys.stdin)['data'][0]['b64_json']"
        unpack = f'python3 -c "import base64, json, sys; sys.stdout.buffer.write(base64.b64decode({picture}))"'
        ask = f"""ask:     curl{trusted} {url}/v1/images/generations {by_json} -d '{wanted}' \\
           | {unpack} > picture.png
   or:   if it makes videos (docs/pictures.md): curl{trusted} {url}/v1/videos {by_json} -d '{wanted}'"""
    print(f"{paint('ready', 'green', sys.stdout)} {url}/v1", flush=True)
    print(
        f"""
{ask}{look}
logs:    {logs}
{LAST_LINE}
""",
        file=sys.stderr,
        flush=True,
    )


async def health(launch: Launch, *, attached: bool = False, models: Sequence[str] = ()) -> tuple[bool, str]:
    """Return (ready, the reason if it is not, or else the service's notes on its settings). With `attached` a worker is
    ready only once it exchanges blocks with the kvbm. A frontend is ready only once it knows all `models`."""
    noted: list[str] = []
    for url in (*launch.also, launch.observe):
        healthy, said = await _health(url, attached=attached, models=models)
        if not healthy:
            return False, said
        noted += [said] if said else []
    return True, "; ".join(noted)


async def _health(url: str, *, attached: bool, models: Sequence[str]) -> tuple[bool, str]:
    """Return what `health` does of one service."""
    try:
        status, body = await probe.get(f"{url}/health", timeout_s=2.0)
    except OSError:
        return False, ""  # not listening yet; if it exits, the supervisor reports that
    ready = status == 200
    try:
        fields = json.loads(body)
        if attached and ready and (missing := fields.get("no_hand_over")):
            return False, "not attached to the kvbm: " + "; ".join(map(str, missing))
        if ready and (unknown := sorted(set(models).difference(fields.get("models", ())))):
            return False, f"it does not know {', '.join(unknown)} yet"
        reasons = fields.get("notes" if ready else "reasons", [])
    except (ValueError, AttributeError, TypeError):
        reasons = []
    return ready, "; ".join(str(reason) for reason in reasons)


def state_flag(state_dir: StateDirectory) -> str:
    """Return the flag that names the state directory; empty for the usual one."""
    return "" if state_dir.home == DEFAULT_HOME else f" --state {shlex.quote(str(state_dir.home))}"
