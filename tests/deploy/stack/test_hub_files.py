"""deploy/local/stack/hub_files.py: names and lists are taken only if no path outside the cache can follow from them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deploy.local.stack.hub_files import (
    INDEX,
    HubFile,
    HubListing,
    HubModel,
    chosen_file,
    index_names,
    parse_listing,
    parse_name,
    weight_files,
)
from shared.errors import ModelError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHA1, SHA256 = "a" * 40, "b" * 64
MODEL = HubModel("org/name")


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("org/name", HubModel("org/name")),
        ("Qwen/Qwen2.5-0.5B-Instruct", HubModel("Qwen/Qwen2.5-0.5B-Instruct")),
        ("org/name@v1.0", HubModel("org/name", "v1.0")),
        (f"org/name@{COMMIT}", HubModel("org/name", COMMIT)),
        ("org/name@refs/pr/1", HubModel("org/name", "refs/pr/1")),
        ("org/name:a.gguf", HubModel("org/name", "main", "a.gguf")),
        ("org/name@v1:sub/a-Q4_K.gguf", HubModel("org/name", "v1", "sub/a-Q4_K.gguf")),
    ],
)
def test_a_name_is_read_and_written_alike(text: str, model: HubModel) -> None:
    assert parse_name(text) == model
    assert str(model) == text
    assert parse_name(f"hf.co/{text}") == model


@pytest.mark.parametrize(
    "text",
    [
        "name",
        "/no/such",
        "./org/name",
        "../name",
        "org/..",
        "org/a..b",
        "org/name/more",
        "org//name",
        "org--x/name",
        "~/name",
        "org/name@",
        "org/name@../../x",
        "org/name@/etc",
        "org/name@a/../b",
        "org/name@-x",
        "org/name:model.bin",
        "org/name:../a.gguf",
        "org/name:/etc/a.gguf",
        "org/name:a/../../b.gguf",
        "org/name:a.gguf@v1",
        "https://huggingface.co/org/name",
        "org/na me",
        "org/name\n",
        "org/näme",
        f"org/{'n' * 97}",
        "",
    ],
)
def test_what_is_no_name_is_not_taken_for_one(text: str) -> None:
    assert parse_name(text) is None


def listing(*siblings: dict[str, Any], sha: str = COMMIT) -> bytes:
    return json.dumps({"id": "org/name", "sha": sha, "siblings": siblings, "more": 1}).encode()


def test_files_are_listed_with_the_size_and_digest_of_the_content() -> None:
    large = {"rfilename": "w.safetensors", "size": 9, "blobId": SHA1, "lfs": {"sha256": SHA256, "size": 9}}
    found = parse_listing(MODEL, listing({"rfilename": "config.json", "size": 3, "blobId": SHA1}, large))
    files = (HubFile("config.json", 3, SHA1), HubFile("w.safetensors", 9, SHA256))
    assert found == HubListing(COMMIT, {file.name: file for file in files})


@pytest.mark.parametrize(
    "sibling",
    [
        {"rfilename": "config.json"},
        {"rfilename": "config.json", "size": 3},
        {"rfilename": "config.json", "size": -1, "blobId": SHA1},
        {"rfilename": "config.json", "size": 3, "blobId": "../../../../.bashrc"},
        {"rfilename": "config.json", "size": 3, "lfs": {"sha256": "B" * 64, "size": 3}},
    ],
)
def test_a_file_without_a_digest_is_left_out_if_it_is_not_fetched_and_refused_otherwise(
    sibling: dict[str, Any],
) -> None:
    assert parse_listing(MODEL, listing(sibling)).files == {}
    refused = r"^org/name.*: the hub lists .* without a size and a digest, so it is not fetched$"
    with pytest.raises(ModelError, match=refused):
        parse_listing(MODEL, listing(sibling), {"config.json"})
    with pytest.raises(ModelError, match=refused):
        parse_listing(MODEL, listing(sibling | {"rfilename": "model-00001-of-00002.safetensors"}))
    gguf = HubModel("org/name", "main", "q4.gguf")
    with pytest.raises(ModelError, match=refused):
        parse_listing(gguf, listing(sibling | {"rfilename": "q4.gguf"}))
    assert parse_listing(gguf, listing(sibling | {"rfilename": "model.safetensors"}), {"config.json"}).files == {}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"<html>", "org/name: the hub's list of files: JSON is malformed"),
        (b"[" * 100_000, "org/name: the hub's list of files: "),
        (b"{}", "org/name: the hub's list of files: Object missing required field `sha`"),
        (listing(sha="../../x"), "org/name: the hub names the commit '../../x', which is none"),
    ],
)
def test_a_list_that_is_none_is_refused(content: bytes, said: str) -> None:
    with pytest.raises(ModelError) as wrong:
        parse_listing(MODEL, content)
    assert str(wrong.value).startswith(said)


def test_a_commit_that_was_asked_for_is_the_one_that_comes() -> None:
    with pytest.raises(ModelError, match="answers with another commit"):
        parse_listing(HubModel("org/name", "f" * 40), listing())


def test_one_weights_file_is_preferred_to_several() -> None:
    single = HubFile("model.safetensors", 1, SHA256)
    files = {single.name: single, INDEX: HubFile(INDEX, 1, SHA1)}
    assert weight_files(MODEL, HubListing(COMMIT, files), b"not read") == [single]


def test_only_the_files_of_the_index_are_weights() -> None:
    files = {name: HubFile(name, 1, SHA256) for name in ("b.safetensors", "a.safetensors", "consolidated.safetensors")}
    index = b'{"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "a.safetensors"}}'
    found = weight_files(MODEL, HubListing(COMMIT, files), index)
    assert [file.name for file in found] == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/a.safetensors", "sub/a.safetensors", "a.bin", ""])
def test_an_index_names_only_safetensors_next_to_it(name: str) -> None:
    with pytest.raises(ModelError, match="which is no safetensors file next to it"):
        index_names(json.dumps({"weight_map": {"x": name}}).encode(), INDEX)


def test_pickles_are_no_weights_and_gguf_files_are_offered() -> None:
    names = ["pytorch_model.bin", "q4.gguf", "q8.gguf", "bad name.gguf"]
    found = HubListing(COMMIT, {name: HubFile(name, 1, SHA256) for name in names})
    with pytest.raises(ModelError) as wrong:
        weight_files(HubModel("org/name", "v1"), found, None)
    assert str(wrong.value) == (
        "org/name@v1 has no model.safetensors and no model.safetensors.index.json; files of other kinds are not loaded;"
        " it has org/name@v1:q4.gguf, org/name@v1:q8.gguf"
    )
    with pytest.raises(ModelError, match=r"^org/name has no file q5.gguf; it has org/name@v1:q4.gguf, "):
        chosen_file(HubModel("org/name", "v1", "q5.gguf"), found)


def test_an_index_that_names_what_is_not_there_is_refused() -> None:
    with pytest.raises(ModelError, match=r"names 'a.safetensors', which is not in the repository"):
        weight_files(MODEL, HubListing(COMMIT, {}), b'{"weight_map": {"x": "a.safetensors"}}')
