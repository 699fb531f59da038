"""The models of `up --models`, which take turns on this machine: their names, and whether each fits."""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from deploy.local.stack.model import CHAT_TEMPLATE, SAMPLING
from deploy.local.stack.model import NAME as BUNDLED
from deploy.local.stack.model_source import ModelSource, find_default, find_source
from deploy.local.stack.stack import TurnModel
from deploy.local.table import size
from deploy.local.usage import DEFAULT_MODEL, UpFlags
from shared.errors import ConfigError

MOST_MODELS = 64
"""The most models of one `up`, and the most that take turns on a device."""
HOST_CHARACTERS = 48
"""The most characters of a host name in the name of a device."""
BOOT_DIGITS = 4
"""The digits of a digest of the boot's id in it."""
ENGINES = ("native", "simulated", "echo")
"""The engines whose models take turns."""


def turn_words(flags: UpFlags) -> list[str]:
    """Return the models that the flags name; none without --models. Raise ConfigError for flags that contradict one
    another."""
    if not flags.models:
        if flags.awake is not None:
            raise ConfigError("--awake needs --models")
        return []
    refused = {
        "--model": flags.model != DEFAULT_MODEL,
        "--model-name": bool(flags.model_name),
        "--chat-template": bool(flags.chat_template),
        "--workers": flags.workers is not None,
        "--prefill, --decode": (flags.prefill, flags.decode) != (None, None),
        "--encode": flags.encode is not None,
        "--single": flags.single,
        "--on ray": flags.on == "ray",
        "--tensor-parallel": flags.tensor_parallel != 1,
        f"--engine {flags.engine}": flags.engine not in ENGINES,
    }
    for flag, given in refused.items():
        if given:
            raise ConfigError(
                f"{flag}: not with --models, whose models take turns on this machine, with a worker each"
                " (docs/model_turns.md)"
            )
    words = [word.strip() for word in flags.models.split(",")]
    if not 2 <= len(words) <= MOST_MODELS or not all(words):
        raise ConfigError(
            f"--models {flags.models}: 2 to {MOST_MODELS} models, commas between them; --model serves one"
        )
    if twice := [word for word, number in Counter(words).items() if number > 1]:
        raise ConfigError(f"--models: {twice[0]} is named twice")
    if flags.awake is not None and not 1 <= flags.awake <= len(words):
        raise ConfigError(f"--awake {flags.awake}: 1 to {len(words)}, the number of --models")
    return words


def check_names(sources: Sequence[ModelSource]) -> None:
    """Raise ConfigError if clients could not tell two models apart."""
    counts = Counter(source.name for source in sources)
    for name, number in counts.items():
        if number > 1:
            raise ConfigError(f"--models: {number} are called {name}, after their directories or files; rename one")


def check_room(models: Sequence[TurnModel], awake: int, memory_bytes: int) -> None:
    """Raise ConfigError if the largest models that may be awake at once do not fit into memory. Their files alone
    count, since what else an engine needs is known only to it."""
    largest = sorted(((weights_bytes(Path(model.path)), model.name) for model in models), reverse=True)[:awake]
    needed_bytes = sum(each for each, _ in largest)
    if needed_bytes > memory_bytes:
        setting, again = ("--models", "") if awake == 1 else (f"--awake {awake}", "; let fewer be awake")
        raise ConfigError(
            f"{setting}: {', '.join(name for _, name in largest)}, {size(needed_bytes)} of files, fit in no turn of"
            f" this machine's {size(memory_bytes)} of memory{again}"
        )


def device_name(host: str, boot: str) -> str:
    """Return the name of a machine's CPU as a device of the fleet: after its host name, and its boot's id (the kernel's
    `boot_id`), since two machines may have one host name."""
    told = re.sub(r"[^A-Za-z0-9_-]", "-", host)[:HOST_CHARACTERS] or "host"
    number = sha256(boot.encode()).hexdigest()[:BOOT_DIGITS]
    return f"{told}-cpu-{number}"


def this_device() -> str:
    """Return the name of this machine's CPU as a device of the fleet."""
    boot = ""
    with suppress(OSError):  # the host name must do
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return device_name(socket.gethostname(), boot)


def find_model(word: str, cache: Path, *, weights: bool) -> ModelSource:
    """Return a model of --models: the one that Headrace brings, by its name, or what --model takes. Raise
    ConfigError."""
    return find_default(cache) if _is_bundled(word) else find_source(word, weights=weights, flag="--models")


def turn_model(word: str, name: str, path: Path) -> TurnModel:
    """Return a model of --models, now that it is at `path`."""
    return TurnModel(name, str(path), CHAT_TEMPLATE, SAMPLING) if _is_bundled(word) else TurnModel(name, str(path))


def _is_bundled(word: str) -> bool:
    return word == BUNDLED and not Path(word).exists()


def weights_bytes(path: Path) -> int:
    """Return the size of a model's files with weights."""
    files = path.glob("*.safetensors") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)
