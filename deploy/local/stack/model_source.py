"""Where the model of an `up` comes from: this machine, a hub, or the package with the default model.

HEADRACE_CACHE                 directory of the default model and of converted weights, of all state directories
else .headrace/models          if it is there: earlier versions kept them in each state directory
else $XDG_CACHE_HOME/headrace  ~/.cache/headrace where that is not set
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from deploy.local.stack import model
from deploy.local.stack.hub_files import HubModel, parse_name
from deploy.local.state import CACHE_VARIABLE, StateDirectory
from deploy.local.terminal import Terminal
from shared.config import environment
from shared.errors import ConfigError

if TYPE_CHECKING:
    from deploy.local.stack.hub import Check

NAMES = "a model on the hub is ORG/NAME[@REVISION][:FILE.gguf]"


class ModelSource(Struct, frozen=True):
    """The model of an `up`, which may still be elsewhere."""

    path: Path
    """Where the model is or, if it must be fetched, would be."""
    name: str
    """Its name for clients, if they are given no other."""
    here: bool = True
    """Whether all of it is on this machine, so that it can be checked before anything starts."""
    on_hub: HubModel | None = None


def cache_directory(state_dir: StateDirectory) -> Path:
    """Return the directory of the default model and of converted weights."""
    variables = environment()
    if given := variables.get(CACHE_VARIABLE):
        return Path(given).absolute()
    with suppress(PermissionError):  # another user's; what writes there says so
        if state_dir.models.is_dir():
            return state_dir.models
    root = Path(variables.get("XDG_CACHE_HOME", ""))
    if not root.is_absolute():  # so the standard says
        try:
            root = Path.home() / ".cache"
        except RuntimeError:  # this user has no home
            return state_dir.models
    return root / "headrace"


def find_default(cache: Path) -> ModelSource:
    """Return the default model."""
    return ModelSource(cache / model.FILE, model.NAME, here=False)


def find_source(text: str, *, weights: bool, flag: str = "--model") -> ModelSource:
    """Return the model that `flag` names: a path if there is such a file or directory, else a name on the hub.

    `weights` says that the engine reads them. Nothing is fetched, and no hub is asked. Raises ConfigError.
    """
    path = Path(text)
    if path.exists():
        path = path.absolute()
        return ModelSource(path, path.stem if path.suffix == ".gguf" else path.name)
    named = parse_name(text)
    if named is None:
        raise ConfigError(f"{flag} {text}: no such file or directory; {NAMES}")
    with _variables_read():
        from deploy.local.stack import hub  # imported here because it loads an HTTP client

    name = Path(named.file).stem or named.repository
    found = hub.find_cached(named, weights=weights)
    return ModelSource(found or Path("/to/be/fetched"), name, here=found is not None, on_hub=named)


def fetch_source(source: ModelSource, check: Check, terminal: Terminal, *, weights: bool) -> Path:
    """Return the model's path, after fetching it if it is not here. Raises ModelError, and what `check` raises."""
    if source.here:
        if source.on_hub is not None:
            terminal.notice(f"{source.on_hub}: from the cache, {source.path}")
        return source.path
    if source.on_hub is None:
        path = model.fetch_default(source.path.parent, terminal.progress)
    else:
        path = fetch_named(source.on_hub, check, terminal, weights=weights, newest=False)
    terminal.clear()
    return path


def fetch_named(
    named: HubModel, check: Callable[[str], None], terminal: Terminal, *, weights: bool = True, newest: bool = True
) -> Path:
    """Fetch a model of the hub: the newest commit of its revision, or what is missing of the one in the cache.

    Raises ModelError, and what `check` raises.
    """
    with _variables_read():
        from deploy.local.stack import hub  # as above

    try:
        return hub.fetch(
            named,
            weights=weights,
            newest=newest,
            check=check,
            progress=terminal.progress,
            notice=terminal.notice,
        )
    finally:
        terminal.clear()


@contextmanager
def _variables_read() -> Iterator[None]:
    """Translate what the hub's library raises at its import, where it reads its variables."""
    try:
        yield
    except ValueError as wrong:
        raise ConfigError(f"HF_HUB_DOWNLOAD_TIMEOUT, HF_HUB_ETAG_TIMEOUT: {wrong}") from None
