"""Models by name: finds them in the cache of Hugging Face's tools, or fetches them into it.

    listing ─▶ configuration, tokenizer ─▶ heads of the weights ─▶ check by the worker ─▶ weights ─▶ snapshot and ref

Weights are fetched last. With their heads alone the worker checks architecture, tokenizer, and the name, type and shape
of each tensor, as it would with all of them.

docs/decisions/0049 gives the reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from huggingface_hub import constants
from msgspec.structs import replace

from deploy.local.install import exclusive
from deploy.local.stack.hub_cache import HubCache, disk_errors, format_size
from deploy.local.stack.hub_client import HubClient
from deploy.local.stack.hub_files import (
    INDEX,
    SHOWN,
    SINGLE,
    HubFile,
    HubListing,
    HubModel,
    chosen_file,
    index_names,
    is_commit,
    parse_listing,
    weight_files,
)
from deploy.local.stack.model import WAITING, Progress
from shared.errors import ConfigError, ModelError
from shared.model_file import CONFIG_LIMIT_BYTES, FILES, IMAGE_FILES, LIST_LIMIT_BYTES, read_model_file

SMALL = {
    **FILES,
    **IMAGE_FILES,
    "modules.json": CONFIG_LIMIT_BYTES,
    "1_Pooling/config.json": CONFIG_LIMIT_BYTES,
    INDEX: LIST_LIMIT_BYTES,
}
"""The files that are fetched in addition to weights, with the largest size of each. Other files stay on the hub."""

Check = Callable[[str], None]
"""A check of a model's directory or file. Raises ConfigError."""


def find_cached(model: HubModel, *, weights: bool) -> Path | None:
    """Return the directory or file of a model if all of it is in the cache. `weights` says that they are needed.

    No hub is asked, so a branch means the commit that it had when it was fetched. Another tool may have fetched a part
    of the model, without its chat template for example. So a file that the repository may have counts as missing. With
    HF_HUB_OFFLINE, what the model cannot do without is enough. Raises ModelError.
    """
    with disk_errors(model):
        cache, commit = HubCache(model), _cached_commit(model)
        if not commit or _missing(cache, model, commit, weights):
            return None
        if not (model.file or constants.HF_HUB_OFFLINE) and cache.unknown(commit, _optional(cache.snapshot(commit))):
            return None
        return cache.snapshot(commit) / model.file


def _cached_commit(model: HubModel) -> str:
    return model.revision if is_commit(model.revision) else HubCache(model).commit_of(model.revision)


def _missing(cache: HubCache, model: HubModel, commit: str, weights: bool) -> list[str]:
    """Return the names of the files that the model cannot do without and the cache lacks."""
    directory = cache.snapshot(commit)
    if model.file:
        needed = [model.file]
    else:
        try:
            needed = ["config.json", "tokenizer.json", *(_weight_names(directory) if weights else [])]
        except ModelError:  # a torn index does not say what is missing
            return [INDEX]
    return [name for name in needed if not (directory / name).is_file()]


def _optional(directory: Path) -> list[str]:
    """Return the names of the files that a model may have or not."""
    return [name for name in SMALL if name != INDEX or not (directory / SINGLE).exists()]


def _weight_names(directory: Path) -> list[str]:
    if (directory / SINGLE).exists():
        return [SINGLE]
    index = read_model_file(directory / INDEX, LIST_LIMIT_BYTES, missing=b'{"weight_map": {}}')
    return index_names(index, str(directory / INDEX)) or [SINGLE]


def fetch(
    model: HubModel,
    *,
    weights: bool,
    newest: bool,
    check: Check,
    progress: Progress,
    notice: Callable[[str], None],
) -> Path:
    """Return the directory or file of a model, after fetching what the cache lacks of it.

    With `newest` that is the revision's present commit. Otherwise a commit in the cache that lacks nothing necessary
    is completed, and served as it is if the hub, asked once, does not list its files, or if the cache cannot be
    written. `check` runs before weights are fetched, with a directory in which they have only their heads; a GGUF
    file is checked afterwards. If several processes ask, one fetches. Raises ModelError, and what `check` raises.
    """
    if constants.HF_HUB_OFFLINE:
        return _offline(model, weights, check, notice)
    cache, commit = HubCache(model), "" if newest else _cached_commit(model)
    if commit and _missing(cache, model, commit, weights):
        commit = ""
    with HubClient() as client, disk_errors(model):
        at = replace(model, revision=commit or model.revision)
        try:
            if commit and not cache.is_writable(commit):
                raise ModelError(f"{cache.snapshot(commit)} cannot be written")
            answer = client.listing(at, LIST_LIMIT_BYTES, notice, once=bool(commit))
            listing = parse_listing(at, answer, SMALL)
            lock_file = cache.lock_file()
        except ModelError as wrong:
            if not commit:
                raise
            path = cache.snapshot(commit) / model.file
            notice(f"{wrong}\n{model}: served as it is in the cache, {path}; with HF_HUB_OFFLINE=1 no hub is asked")
            check(str(path))
            return path
        with exclusive(lock_file, partial(progress, WAITING, 0.0)), closing(cache):
            notice(f"{model}: commit {listing.commit[:12]} at {client.host}")
            fetching = _ModelFetch(model, cache, client, listing, progress)
            if model.file:
                fetching.fetch_file(check)
            else:
                fetching.fetch_directory(check, weights=weights)
                cache.note_absent(listing.commit, [name for name in SMALL if name not in listing.files])
            cache.set_commit(model.revision, listing.commit)
            return cache.snapshot(listing.commit) / model.file


def _offline(model: HubModel, weights: bool, check: Check, notice: Callable[[str], None]) -> Path:
    """Return the model as it is in the cache. Raises ModelError that says what the cache lacks."""
    path = find_cached(model, weights=weights)
    if path is not None:
        notice(f"{model}: from the cache, {path}")
        check(str(path))
        return path
    cache, commit = HubCache(model), _cached_commit(model)
    here = bool(commit) and cache.snapshot(commit).is_dir()
    lacks = (
        f"lacks {', '.join(_missing(cache, model, commit, weights)[:SHOWN])} of {model}" if here else f"has no {model}"
    )
    raise ModelError(f"HF_HUB_OFFLINE is set, so no hub is asked, and the cache {constants.HF_HUB_CACHE} {lacks}")


class _ModelFetch:
    """One fetch of one model, under the lock."""

    def __init__(
        self, model: HubModel, cache: HubCache, client: HubClient, listing: HubListing, progress: Progress
    ) -> None:
        self._model = model
        self._cache = cache
        self._client = client
        self._listing = listing
        self._progress = progress

    def fetch_file(self, check: Check) -> None:
        """Fetch, link and check the GGUF file of the model's name."""
        file = chosen_file(self._model, self._listing)
        self._cache.take_in(self._listing.commit, [file])
        self._fetch_weights([file])
        check(str(self._cache.link(self._listing.commit, [file]) / file.name))

    def fetch_directory(self, check: Check, *, weights: bool) -> None:
        """Fetch and link what belongs to a model in safetensors files, after the check of what comes first."""
        small = [self._listing.files[name] for name in SMALL if name in self._listing.files]
        for file in small:
            if file.size_bytes > (limit_bytes := SMALL[file.name]):
                raise ModelError(
                    f"{self._model}: {file.name} has {file.size_bytes} bytes; at most {limit_bytes} are read"
                )
        self._cache.take_in(self._listing.commit, small)
        self._fetch(small, [file.size_bytes for file in small], "configuration and tokenizer of ")
        heavy = self._fetch_heads() if weights else []
        with TemporaryDirectory(prefix="headrace-hub-") as aside:
            self._cache.preview(Path(aside), small, heavy)
            try:
                check(aside)
            except ConfigError as wrong:  # it names a directory that does not stay
                raise ConfigError(str(wrong).replace(aside, str(self._model))) from None
        self._fetch_weights(heavy)
        self._cache.link(self._listing.commit, [*small, *heavy])

    def _fetch_heads(self) -> list[HubFile]:
        """Return the weights, after fetching their heads: eight bytes that have the length, then the rest."""
        index = self._listing.files.get(INDEX)
        content = None if index is None else read_model_file(self._cache.blob(index), LIST_LIMIT_BYTES)
        heavy = weight_files(self._model, self._listing, content)
        self._cache.take_in(self._listing.commit, heavy)
        self._fetch(heavy, [min(8, file.size_bytes) for file in heavy])
        self._fetch(heavy, [self._cache.head_bytes(file) for file in heavy], "heads of the weights of ")
        return heavy

    def _fetch_weights(self, files: Sequence[HubFile]) -> None:
        self._cache.check_room(self._model, files)
        sizes = [file.size_bytes for file in files]
        self._fetch(files, sizes, "", f" ({format_size(sum(sizes))})")

    def _fetch(self, files: Sequence[HubFile], lengths: Sequence[int], what: str | None = None, size: str = "") -> None:
        """Fetch the first `lengths` bytes of each file that is not there; a file that is then whole gets its name."""
        missing = [
            (file, length)
            for file, length in zip(files, lengths, strict=True)
            if not self._cache.has(file) and (length == file.size_bytes or self._cache.part_bytes(file) < length)
        ]
        total, done = sum(length for _, length in missing), 0
        for file, length in missing:

            def show(fetched: int, done: int = done) -> None:
                if what is not None:
                    self._progress(f"fetching {what}{self._model}{size}", (done + fetched) / total)

            part, whole = self._cache.part(file), False
            while not whole:
                digest = self._client.fetch(self._model, self._listing.commit, file, part, length, show)
                whole = length < file.size_bytes or self._cache.accept(self._model, file, digest)
            done += length
