"""The files that `up` keeps: in a checkout below .headrace, else in the state directory of the XDG standard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from shared.config import environment
from shared.installation import PACKAGED, TREE

CACHE_VARIABLE = "HEADRACE_CACHE"
"""The environment variable with the directory of models; it is no setting of a service."""


def default_home(variables: Mapping[str, str], *, packaged: bool = PACKAGED) -> Path:
    """Return the state directory if none is given: that of the checkout or, of the package, one of this user. A user
    without a home has it in the current directory."""
    if not packaged:
        return TREE / ".headrace"
    root = Path(variables.get("XDG_STATE_HOME", ""))
    if not root.is_absolute():  # so the standard says
        try:
            root = Path.home() / ".local" / "state"
        except RuntimeError:
            return Path(".headrace").absolute()
    return root / "headrace"


DEFAULT_HOME = default_home(environment())


class StateDirectory(Struct, frozen=True):
    """The directory where `up` keeps its state (`--state`)."""

    home: Path

    @property
    def run(self) -> Path:
        """The directory that each `up` empties at its start and writes again."""
        return self.home / "run"

    @property
    def logs(self) -> Path:
        return self.home / "logs"

    @property
    def models(self) -> Path:
        """The directory in which earlier versions kept models; it is used if it is there."""
        return self.home / "models"

    @property
    def record(self) -> Path:
        """The file that says what runs now, for `status`, `chat` and people."""
        return self.run / "up.json"

    @property
    def scale(self) -> Path:
        """The socket on which `up` is asked for another number of workers."""
        return self.run / "scale.sock"

    @property
    def weights(self) -> Path:
        """The directory of the memory service, while one runs."""
        return self.run / "weights"

    @property
    def fleet(self) -> Path:
        """The settings with which a further process joins this fleet, the password of NATS included."""
        return self.run / "fleet.toml"
