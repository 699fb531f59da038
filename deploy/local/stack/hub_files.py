"""Names of models on a hub, and which files of a repository make a model. Pure.

    ORG/NAME                       the repository's branch `main`
    ORG/NAME@REVISION              a branch, a tag or a commit
    ORG/NAME[@REVISION]:FILE.gguf  one GGUF file of it

Whatever a hub says is checked here before a path or an address is made of it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec import Struct

from shared.errors import ModelError

if TYPE_CHECKING:
    from hashlib import _Hash

_SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(
    rf"(?P<repository>{_SEGMENT}/{_SEGMENT})"
    rf"(?:@(?P<revision>{_SEGMENT}(?:/{_SEGMENT}){{0,3}}))?"
    rf"(?::(?P<file>{_SEGMENT}(?:/{_SEGMENT}){{0,3}}\.gguf))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHOWN = 8
"""The maximum number of names in an error."""

T = TypeVar("T")


class HubModel(Struct, frozen=True):
    """A model on a hub, by its name."""

    repository: str
    revision: str = "main"
    file: str = ""
    """Path of a GGUF file in the repository. Empty means the safetensors files and what belongs to them."""

    def __str__(self) -> str:
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return f"{self.repository}{revision}{':' if self.file else ''}{self.file}"


class HubFile(Struct, frozen=True):
    """One file of a repository, as the hub announces it."""

    name: str
    size_bytes: int
    digest: str
    """Hexadecimal: the SHA-256 of a large file, or the SHA-1 that Git gives a small one. It is the file's name in the
    cache."""

    def new_hash(self) -> _Hash:
        """Return the hash that has the digest after all bytes of the file."""
        if len(self.digest) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self.size_bytes, usedforsecurity=False)


class HubListing(Struct, frozen=True):
    """The files of a repository at one commit."""

    commit: str
    files: Mapping[str, HubFile]


class _Large(Struct):
    sha256: str
    size: int


class _Sibling(Struct, rename={"name": "rfilename", "digest": "blobId"}):
    name: str
    size: int | None = None
    digest: str | None = None
    lfs: _Large | None = None


class _Repository(Struct):
    sha: str
    siblings: list[_Sibling]


class _ShardIndex(Struct):
    weight_map: dict[str, str]


def parse_name(text: str) -> HubModel | None:
    """Return the model that a name means; None if the text is no name of a hub's model."""
    match = _NAME.fullmatch(text.removeprefix("hf.co/"))  # which Ollama's names begin with
    if match is None or ".." in text or "--" in match["repository"]:
        return None
    return HubModel(match["repository"], match["revision"] or "main", match["file"] or "")


def is_commit(revision: str) -> bool:
    """Return whether a revision is a whole commit, whose files never change."""
    return _COMMIT.fullmatch(revision) is not None


def parse_listing(model: HubModel, content: bytes, small: Container[str] = ()) -> HubListing:
    """Return the files that the hub's answer lists.

    Raises ModelError, also if it lists a file that may be fetched without a size and a digest: the GGUF file, one of
    `small`, or weights. Others are left out.
    """
    answer = _decoded(content, _Repository, f"{model}: the hub's list of files")
    if not is_commit(answer.sha):
        raise ModelError(f"{model}: the hub names the commit {answer.sha[:80]!r}, which is none")
    if is_commit(model.revision) and answer.sha != model.revision:
        raise ModelError(f"{model}: the hub answers with another commit, {answer.sha}")
    files: dict[str, HubFile] = {}
    for each in answer.siblings:
        size, digest = (each.lfs.size, each.lfs.sha256) if each.lfs else (each.size, each.digest)
        if size is not None and size >= 0 and digest is not None and _DIGEST.fullmatch(digest):
            files[each.name] = HubFile(each.name, size, digest)
        elif each.name == model.file or (not model.file and (each.name in small or each.name.endswith(".safetensors"))):
            raise ModelError(f"{model}: the hub lists {each.name} without a size and a digest, so it is not fetched")
    return HubListing(answer.sha, files)


def chosen_file(model: HubModel, listing: HubListing) -> HubFile:
    """Return the GGUF file that the model's name asks for. Raises ModelError."""
    if model.file not in listing.files:
        raise ModelError(f"{model.repository} has no file {model.file}{_offered(model, listing)}")
    return listing.files[model.file]


def weight_files(model: HubModel, listing: HubListing, index: bytes | None) -> list[HubFile]:
    """Return the safetensors files; `index` is the content of their index, if the repository has one.

    Raises ModelError if there are none: pickles (.bin, .pth) are never fetched.
    """
    if SINGLE in listing.files:
        return [listing.files[SINGLE]]
    if index is None:
        raise ModelError(
            f"{model} has no {SINGLE} and no {INDEX}; files of other kinds are not loaded{_offered(model, listing)}"
        )
    names = index_names(index, f"{model}: {INDEX}")
    missing = [name for name in names if name not in listing.files]
    if missing:
        raise ModelError(f"{model}: {INDEX} names {missing[0]!r}, which is not in the repository")
    return [listing.files[name] for name in names]


def index_names(index: bytes, where: str) -> list[str]:
    """Return the names of the files of an index, in order. Raises ModelError."""
    names = sorted(set(_decoded(index, _ShardIndex, where).weight_map.values()))
    for name in names:
        if re.fullmatch(rf"{_SEGMENT}\.safetensors", name) is None:
            raise ModelError(f"{where} names {name[:80]!r}, which is no safetensors file next to it")
    return names


def _offered(model: HubModel, listing: HubListing) -> str:
    """Return the GGUF files that could be asked for, as the end of an error."""
    base = HubModel(model.repository, model.revision)
    names = [f"{base}:{name}" for name in sorted(listing.files) if parse_name(f"{base}:{name}")]
    more = ", …" if len(names) > SHOWN else ""
    return f"; it has {', '.join(names[:SHOWN])}{more}" if names else ""


def _decoded(content: bytes, kind: type[T], where: str) -> T:
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as wrong:
        raise ModelError(f"{where}: {wrong}") from None
    except RecursionError:
        raise ModelError(f"{where}: nested too deeply") from None
