"""Turns any model source into a directory whose weights can be mapped as float32.

    directory, all float32   ─▶ itself, used in place
    directory, 16-bit floats ─▶ converted once ─┐
    GGUF file                ─▶ converted once ─┴▶ CACHE/<name>-<key>/     a Hugging Face directory

The key covers the source's path, sizes and modification times. A conversion is written under another name and renamed
when it is complete and on the disk. It holds a lock that ends with its process; a second worker waits and then finds
the result. All workers of a machine map the same files, so the page cache holds the weights once. float32 takes twice
the disk space of 16-bit weights and up to eight times that of a GGUF file: the price of arithmetic without unpacking.

The cache is bounded: after a conversion the least recently used models are removed until the rest fits in
`limit_bytes`, except those that a process uses or that were prepared again within the last hour. A process that uses
an entry shares a kernel lock of its weights until the process ends. An entry is removed only under an exclusive one.

On a file system without locks each worker converts for itself, the first result stays, and nothing is removed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from services.worker.contracts.messages import Loading
from services.worker.model.tensor_header import Shape
from services.worker.native.config import read_config
from services.worker.native.gguf_file import GgufFile, is_gguf
from services.worker.native.gguf_tokenizer import as_json
from services.worker.native.tensor_file import Floats, write_tensors
from services.worker.native.weights import Checkpoint, checkpoint_files, tensor_shapes
from shared.errors import ModelError
from shared.model_file import FILES, IMAGE_FILES, read_model_file

_FORMAT = b"headrace 2"
"""A part of every key. Change it whenever a conversion writes something else."""
_COPIED = {**FILES, **IMAGE_FILES}
WEIGHTS = "model.safetensors"
CACHE_LIMIT_BYTES = 64 << 30
MOST_FILES = 64
"""The most entries without weights, of some MB each."""
_RECENT_S = 3600.0
_used: dict[Path, int] = {}
"""Entry → the descriptor of its weights, which is locked until this process ends."""

Progress = Callable[[Loading], None]


def prepare(
    source: Path, cache: Path, progress: Progress, *, limit_bytes: int = CACHE_LIMIT_BYTES, as_stored: bool = False
) -> Path:
    """Return the directory to serve `source` from, with config, tokenizer and float32 weights.

    `source` is a directory or a GGUF file. With `as_stored` a directory is served from itself, for engines that read
    weights of any type. A conversion stays in the cache while this process lives. Raise ModelError that names the file
    that is missing, torn, of an unsupported kind or shape, or cannot be written.
    """
    if source.is_dir():
        checkpoint = _checkpoint(source)
        if as_stored or checkpoint.mapped:
            return source
        return _converted(
            source,
            _source_files(source),
            cache,
            progress,
            limit_bytes,
            lambda target: _convert_directory(source, checkpoint, target, progress),
        )
    _refuse_other_files(source)
    return _converted(
        source, [source], cache, progress, limit_bytes, lambda target: _convert_gguf(source, target, progress)
    )


def check_source(source: Path, cache: Path) -> None:
    """Check the heads of the files and raise ModelError if `prepare` would. Nothing that it writes stays."""
    if source.is_dir():
        _checkpoint(source)
        return
    _refuse_other_files(source)
    if not _is_whole(_target(source, [source], cache)):
        with tempfile.TemporaryDirectory(prefix="headrace-check-") as aside:
            _open_gguf(source, Path(aside))


def source_key(source: Path) -> str:
    """Return 16 hex digits that change whenever a file of the source changes. Raise ModelError."""
    return _key(source, _source_files(source))


def _source_files(source: Path) -> list[Path]:
    """Return the files that a conversion reads."""
    if not source.is_dir():
        return [source]
    return [*checkpoint_files(source), *(source / name for name in _COPIED if (source / name).exists())]


def prepare_files(source: Path, cache: Path) -> Path:
    """Return the directory to serve `source` from, with config and tokenizer: a directory itself or, for a GGUF file,
    an entry of the cache that has no weights. Of these the MOST_FILES that were asked for last stay. Raise
    ModelError."""
    if source.is_dir():
        _checkpoint(source)
        return source
    _refuse_other_files(source)
    entry = _target(source, [source], cache)
    target = entry.with_name(f"{entry.name}.files")
    aside = target.with_name(f"{target.name}.{secrets.token_hex(4)}.partial")
    try:
        if target.exists():  # it is complete: it got its name last
            os.utime(target)
            return target
        aside.mkdir(parents=True)
        _open_gguf(source, aside)
        try:
            aside.rename(target)
        except OSError:
            if not target.exists():  # else another engine was the first
                raise
        _drop_old_files(cache)
    except OSError as wrong:
        raise ModelError(f"{target}: {wrong.strerror}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _drop_old_files(cache: Path) -> None:
    """Keep the MOST_FILES entries without weights that were asked for last."""
    made: list[tuple[float, Path]] = []
    for entry in cache.glob("*.files"):
        with suppress(FileNotFoundError):  # another process has just removed it
            made.append((entry.stat().st_mtime, entry))
    for _, entry in sorted(made, reverse=True)[MOST_FILES:]:
        shutil.rmtree(entry, ignore_errors=True)


@dataclass(frozen=True)
class WeightsSource:
    """The float32 weights that a model's files give."""

    shapes: dict[str, Shape]
    open: Callable[[], Callable[[str], Floats]]
    """Opens the files; returns what reads a tensor by its name. Both raise ModelError."""
    in_place: bool
    """Whether the files have them as they are, so that they can be mapped."""


def open_source(source: Path, directory: Path) -> WeightsSource:
    """Return the weights of a source. `directory` is the result of `prepare_files`. Raise ModelError."""
    if source.is_dir():
        checkpoint = _checkpoint(source)
        return WeightsSource(checkpoint.shapes, lambda: checkpoint.floats, checkpoint.mapped)
    shapes = tensor_shapes(read_config(directory))

    def open_gguf() -> Callable[[str], Floats]:
        model = GgufFile(source)
        model.check(shapes)
        return model.floats

    return WeightsSource(shapes, open_gguf, in_place=False)


def _checkpoint(source: Path) -> Checkpoint:
    """Open a directory's checkpoint, after checking that it has a tokenizer too."""
    config = read_config(source)
    if not (source / "tokenizer.json").exists():
        raise ModelError(f"{source / 'tokenizer.json'}: missing")
    return Checkpoint(source, config)


def _refuse_other_files(source: Path) -> None:
    if not source.is_file() or not (source.suffix == ".gguf" or is_gguf(source)):
        raise ModelError(f"{source}: no model here; expected a Hugging Face directory or a GGUF file")


def _converted(
    source: Path, files: list[Path], cache: Path, progress: Progress, limit_bytes: int, convert: Callable[[Path], None]
) -> Path:
    """Return the cache's entry for these source files; convert them if it is missing or damaged."""
    target = _target(source, files, cache)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{target.name}.lock", progress) as alone:
            found = target.exists()
            if _use(target) and _is_whole(target):
                os.utime(target)  # used now: the last to be removed
                return target
            if found:  # not what a worker without a lock has made meanwhile
                shutil.rmtree(target, ignore_errors=True)
            own = "" if alone else f".{secrets.token_hex(4)}"  # else the same, to replace a killed conversion's files
            aside = cache / f"{target.name}{own}.partial"
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            try:
                convert(aside)
                try:
                    aside.rename(target)
                except OSError:
                    if alone or not _is_whole(target):  # another worker was the first
                        raise
                _use(target)
                _shrink(cache, limit_bytes)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    except OSError as wrong:
        what = "no space left for the converted weights" if wrong.errno == errno.ENOSPC else wrong.strerror
        raise ModelError(f"{target}: {what}") from None
    return target


def _target(source: Path, files: list[Path], cache: Path) -> Path:
    """Return the cache's entry for these source files, which may not exist yet."""
    name = source.stem if source.is_file() else source.resolve().name  # also of "."
    return cache / f"{name}-{_key(source, files)}"


def _convert_directory(source: Path, checkpoint: Checkpoint, target: Path, progress: Progress) -> None:
    for name, limit_bytes in _COPIED.items():
        if (source / name).exists():
            content = read_model_file(source / name, limit_bytes)
            (target / name).parent.mkdir(exist_ok=True)
            (target / name).write_bytes(content)
    _write_weights(source, checkpoint.shapes, checkpoint.floats, target, progress)


def _convert_gguf(source: Path, target: Path, progress: Progress) -> None:
    progress(Loading(f"reading {source.name}", 0.0))
    model, shapes = _open_gguf(source, target)
    _write_weights(source, shapes, model.floats, target, progress)


def _open_gguf(source: Path, target: Path) -> tuple[GgufFile, dict[str, Shape]]:
    """Open and check a GGUF file, and write all but its weights to `target`; return it with its tensors' shapes."""
    model = GgufFile(source)
    vocabulary = model.vocabulary()
    (target / "config.json").write_text(as_json(model.config()), encoding="utf-8")
    generation = {"eos_token_id": model.eos_token_ids(), "bos_token_id": vocabulary.bos}
    (target / "generation_config.json").write_text(as_json(generation), encoding="utf-8")
    (target / "tokenizer.json").write_text(vocabulary.tokenizer_json(), encoding="utf-8")
    (target / "tokenizer_config.json").write_text(as_json(vocabulary.tokenizer_config()), encoding="utf-8")
    try:
        shapes = tensor_shapes(read_config(target))
    except ModelError as wrong:  # it names a file in `target`, which will not stay
        raise ModelError(f"{source}: {str(wrong).removeprefix(f'{target}/config.json: ')}") from None
    model.check(shapes)
    return model, shapes


def _write_weights(
    source: Path, shapes: dict[str, Shape], floats: Callable[[str], Floats], target: Path, progress: Progress
) -> None:
    write_tensors(
        target / WEIGHTS,
        shapes,
        floats,
        lambda share: progress(Loading(f"converting {source.name} to float32", share)),
    )


def _is_whole(target: Path) -> bool:
    """Say whether an entry exists and its files have the right lengths; otherwise the source is converted again."""
    try:
        Checkpoint(target, read_config(target))
    except ModelError:
        return False
    return (target / "tokenizer.json").exists()


def _key(source: Path, files: list[Path]) -> str:
    """Return 16 hex digits that change whenever a source file changes."""
    digest = hashlib.sha256(_FORMAT + os.fsencode(source.resolve()))
    for file in files:
        try:
            stat = file.stat()
        except OSError as wrong:
            raise ModelError(f"{file}: {wrong.strerror}") from None
        digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[bool]:
    """Hold a kernel lock, which ends with its process, however the process ends. Yield whether there are locks."""
    with path.open("w") as lock:
        try:
            alone = _flock(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(Loading("waiting for another worker that converts the model", 0.0))
            alone = _flock(lock.fileno(), fcntl.LOCK_EX)
        yield alone


def _flock(file: int, operation: int) -> bool:
    """Lock an open file. Return False if its file system has no locks."""
    try:
        fcntl.flock(file, operation)
    except OSError as wrong:
        if wrong.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        return False
    return True


def _use(entry: Path) -> bool:
    """Keep an entry in the cache while this process lives. Return whether its weights are there."""
    try:
        weights = os.open(entry / WEIGHTS, os.O_RDONLY)
    except FileNotFoundError:
        return False
    former, _used[entry] = _used.get(entry), weights
    _flock(weights, fcntl.LOCK_SH)  # waits while another process removes the entry
    if former is not None:  # perhaps of a file that was damaged and is replaced
        os.close(former)
    return True


def _shrink(cache: Path, limit_bytes: int) -> None:
    """Remove entries, least recently used first, until the rest fits or is in use.

    The files of a killed conversion count as an entry; an entry that is being written is in use.
    """
    entries: list[tuple[float, int, Path]] = []
    for entry in cache.iterdir():
        with suppress(FileNotFoundError, NotADirectoryError):  # no entry, or another process has just removed it
            weights, written = (entry / WEIGHTS).stat(), entry.stat().st_mtime
            entries.append((max(written, weights.st_mtime), weights.st_size, entry))
    held_bytes = sum(size_bytes for _, size_bytes, _ in entries)
    for used_at_s, size_bytes, entry in sorted(entries):
        if held_bytes <= limit_bytes or time.time() - used_at_s < _RECENT_S:
            return
        if _remove(entry):
            held_bytes -= size_bytes


def _remove(entry: Path) -> bool:
    """Remove an entry that no process uses. Return whether it is gone."""
    try:
        with (entry / WEIGHTS).open("r+b") as weights:  # NFS locks for one alone only what is open to write
            fcntl.flock(weights, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry)
    except FileNotFoundError:  # another process has removed it
        return True
    except OSError:  # in use, of another user, or without locks
        return False
    return True
