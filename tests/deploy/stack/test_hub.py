"""deploy/local/stack/hub.py: a model comes whole into the cache that other tools know, after a check of its head."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from huggingface_hub import constants, hf_hub_download, snapshot_download

from deploy.local.stack import hub_client
from deploy.local.stack.check import check
from deploy.local.stack.hub import SMALL, fetch, find_cached
from deploy.local.stack.hub_cache import HEAD_LIMIT_BYTES
from deploy.local.stack.hub_files import HubModel
from deploy.local.stack.stack import UpOptions
from deploy.local.state import StateDirectory
from services.worker.model.tensor_header import HEADER_LIMIT_BYTES
from shared.errors import ConfigError, ModelError
from tests.hub_server import HubServer, Repository, files_of, use_hub
from tests.kvbm.small_tmpfs import small_tmpfs
from tests.tiny_model import write_tiny_model

MODEL = HubModel("org/tiny")
EMBEDDING = {"modules.json": b"[]", "1_Pooling/config.json": b'{"pooling_mode_mean_tokens": true}'}
OTHERS = {"pytorch_model.bin": b"pickle", "README.md": b"# tiny", "original/params.json": b"{}", "run.py": b"evil()"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return files_of(write_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return files_of(write_tiny_model(tmp_path_factory.mktemp("sharded"), shards=3, dtype="bfloat16"))


@pytest.fixture
def hub(tiny: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(hub_client, "PAUSE_S", 0.0)
    hub = HubServer()
    hub.repositories["org/tiny"] = Repository(tiny | OTHERS)
    use_hub(hub, tmp_path / "cache", monkeypatch)
    with hub.running():
        yield hub


class WatchedFetch:
    """What one fetch has shown and checked."""

    def __init__(self, model: HubModel = MODEL, *, weights: bool = True, newest: bool = True) -> None:
        self.checked: list[Path] = []
        self.progress: list[tuple[str, float]] = []
        self.notices: list[str] = []
        self.path = fetch(
            model,
            weights=weights,
            newest=newest,
            check=lambda path: self.checked.append(Path(path)),
            progress=lambda what, share: self.progress.append((what, share)),
            notice=self.notices.append,
        )


def check_here(path: str) -> None:
    """The check of the worker, as `up` runs it."""
    options = UpOptions(model=path, model_name="tiny", discovery="file")
    check(options, StateDirectory(Path("/to/be/made")), python=sys.executable, model=True)


def fetch_checked(model: HubModel = MODEL) -> Path:
    return fetch(model, weights=True, newest=True, check=check_here, progress=lambda *_: None, notice=lambda _: None)


def names(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


def test_a_model_comes_whole_and_nothing_else_does(hub: HubServer, tiny: dict[str, bytes]) -> None:
    hub.repositories["org/tiny"].files |= EMBEDDING
    fetched = WatchedFetch()
    assert files_of(fetched.path) == tiny | EMBEDDING
    assert fetched.path.name == hub.repositories["org/tiny"].commit
    size = len(tiny["model.safetensors"]) / 1e6
    assert fetched.progress[-1] == (f"fetching org/tiny ({size:.1f} MB)", 1.0)
    assert fetched.notices[0].startswith(f"org/tiny: commit {fetched.path.name[:12]} at 127.0.0.1:")
    assert not set(hub.bodies()) & {name.rpartition("/")[2] for name in OTHERS}


def test_other_tools_find_the_files_and_their_cache_is_found(
    hub: HubServer, tiny: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = {hf_hub_download("org/tiny", name) for name in tiny}
    with monkeypatch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        assert {str(find_cached(MODEL, weights=True))} == {str(Path(file).parent) for file in theirs}
    shutil.rmtree(constants.HF_HUB_CACHE)
    assert find_cached(MODEL, weights=True) is None
    ours = WatchedFetch().path
    hub.asked.clear()
    for revision in ("main", ours.name):
        found = {hf_hub_download("org/tiny", name, revision=revision, local_files_only=True) for name in tiny}
        assert found == {str(ours / name) for name in tiny}
    assert snapshot_download("org/tiny", local_files_only=True) == str(ours)
    assert hub.asked == []


def test_a_whole_model_is_found_without_asking_the_hub(hub: HubServer) -> None:
    path = WatchedFetch().path
    hub.asked.clear()
    assert find_cached(MODEL, weights=True) == path
    assert find_cached(HubModel("org/tiny", path.name), weights=True) == path
    assert find_cached(HubModel("org/tiny", "v1"), weights=True) is None
    assert hub.asked == []
    (path / "model.safetensors").resolve().unlink()
    assert find_cached(MODEL, weights=True) is None
    assert find_cached(MODEL, weights=False) == path


def test_what_is_there_is_not_fetched_again_and_a_new_commit_fetches_what_changed(hub: HubServer) -> None:
    first = WatchedFetch().path
    hub.asked.clear()
    assert WatchedFetch().path == first
    assert hub.bodies() == []
    hub.repositories["org/tiny"].files["generation_config.json"] = b'{"eos_token_id": 2}'
    second = WatchedFetch().path
    assert second != first
    assert hub.bodies() == ["generation_config.json"]
    assert find_cached(MODEL, weights=True) == second
    assert find_cached(HubModel("org/tiny", first.name), weights=True) == first


def test_the_check_sees_the_heads_of_the_weights_before_the_weights_come(
    hub: HubServer, sharded: dict[str, bytes]
) -> None:
    hub.repositories["org/tiny"] = Repository(sharded)
    fetched = list[str]()

    def checked(path: str) -> None:
        fetched.extend(asked.range for asked in hub.asked if asked.path.startswith("/large/"))
        shards = sorted(Path(path).glob("*.safetensors"))
        assert [shard.stat().st_size for shard in shards] == [len(sharded[shard.name]) for shard in shards]
        assert all(shard.read_bytes() != sharded[shard.name] for shard in shards)
        check_here(path)

    path = fetch(MODEL, weights=True, newest=True, check=checked, progress=lambda *_: None, notice=lambda _: None)
    assert files_of(path) == sharded
    assert len(fetched) == 6, "eight bytes and a head of each of three"
    assert max(int(asked.partition("-")[2]) for asked in fetched) < 10_000
    assert find_cached(MODEL, weights=True) == path


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "config.json: architecture GPT2LMHeadModel is not supported; "),
        ({"hidden_act": "gelu"}, "config.json: hidden_act is gelu; only silu is supported"),
        ({"num_hidden_layers": 3}, "tensor model.layers.2.input_layernorm.weight is in no safetensors file"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_before_its_weights_come(
    hub: HubServer, change: dict[str, object], said: str
) -> None:
    files = hub.repositories["org/tiny"].files
    files["config.json"] = json.dumps(json.loads(files["config.json"]) | change).encode()
    with pytest.raises(ConfigError) as wrong:
        fetch_checked()
    assert str(wrong.value).startswith("org/tiny")
    assert said in str(wrong.value)
    assert "/tmp" not in str(wrong.value)
    large = [asked.range for asked in hub.asked if asked.path.startswith("/large/")]
    assert all(asked.startswith("bytes=") for asked in large), "only heads came"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", None, "org/tiny/tokenizer.json: missing"),
        ("tokenizer.json", b"{}", "org/tiny/tokenizer.json: "),
        ("config.json", None, "org/tiny/config.json: No such file or directory"),
        ("model.safetensors", b"", "org/tiny/model.safetensors: torn or not a safetensors file (0 bytes)"),
        ("model.safetensors", b"not tensors", "org/tiny/model.safetensors: torn or not a safetensors file (11 bytes)"),
    ],
)
def test_a_file_that_is_missing_or_torn_is_named_as_it_is_on_the_hub(
    hub: HubServer, name: str, content: bytes | None, said: str
) -> None:
    files = hub.repositories["org/tiny"].files
    if content is None:
        del files[name]
    else:
        files[name] = content
    with pytest.raises(ConfigError) as wrong:
        fetch_checked()
    assert str(wrong.value).startswith(said)


def test_a_name_that_is_not_there_leaves_nothing(hub: HubServer) -> None:
    with pytest.raises(ModelError, match=r"has no model org/tinny, or it is private: check the name; "):
        WatchedFetch(HubModel("org/tinny"))
    assert not Path(constants.HF_HUB_CACHE).exists()


def test_a_repository_without_safetensors_is_refused(hub: HubServer) -> None:
    del hub.repositories["org/tiny"].files["model.safetensors"]
    with pytest.raises(ModelError, match=r"has no model.safetensors .*; files of other kinds are not loaded$"):
        WatchedFetch()
    assert "pytorch_model.bin" not in hub.bodies()


def test_an_engine_that_computes_nothing_needs_no_weights(hub: HubServer) -> None:
    path = WatchedFetch(weights=False).path
    assert "model.safetensors" not in names(path)
    assert hub.bodies()
    assert "model.safetensors" not in hub.bodies()


def test_a_gguf_file_comes_alone(hub: HubServer) -> None:
    hub.repositories["org/tiny"].files["sub/a-Q4.gguf"] = b"GGUF" * 1000
    model = HubModel("org/tiny", "main", "sub/a-Q4.gguf")
    assert find_cached(model, weights=True) is None
    fetched = WatchedFetch(model)
    assert fetched.path.read_bytes() == b"GGUF" * 1000
    assert fetched.checked == [fetched.path]
    assert hub.bodies() == ["a-Q4.gguf"]
    assert find_cached(model, weights=True) == fetched.path
    with pytest.raises(ModelError, match=r"org/tiny has no file b.gguf; it has org/tiny:sub/a-Q4.gguf$"):
        WatchedFetch(HubModel("org/tiny", "main", "b.gguf"))


def test_an_interrupted_fetch_continues_where_it_ended(
    hub: HubServer, tiny: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_client, "TRIES", 1)
    hub.faults["model.safetensors"] = ["", "", "cut"]
    with pytest.raises(ModelError, match=r"ended it after|cannot be reached"):
        WatchedFetch()
    assert find_cached(MODEL, weights=True) is None
    hub.asked.clear()
    assert files_of(WatchedFetch().path) == tiny
    [continued] = [asked.range for asked in hub.asked if asked.path.startswith("/large/")]
    assert int(continued.removeprefix("bytes=").partition("-")[0]) > len(tiny["model.safetensors"]) // 4


def test_a_file_with_another_content_is_removed(hub: HubServer) -> None:
    hub.faults["config.json"] = ["changed"]
    with pytest.raises(ModelError, match=r"config.json does not have the digest that the hub announced; it is removed"):
        WatchedFetch()
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.incomplete"))
    WatchedFetch()


def test_a_configuration_beyond_its_limit_is_not_fetched(hub: HubServer) -> None:
    hub.repositories["org/tiny"].files["config.json"] = b" " * (SMALL["config.json"] + 1)
    with pytest.raises(ModelError, match=r"config.json has 1048577 bytes; at most 1048576 are read"):
        WatchedFetch()
    assert hub.bodies() == []


def test_the_document_names_every_file_that_is_fetched() -> None:
    text = (Path(__file__).parents[3] / "docs" / "model_files.md").read_text()
    assert [name for name in SMALL if f"`{name}`" not in text] == []


def test_heads_are_fetched_up_to_the_workers_limit() -> None:
    assert HEAD_LIMIT_BYTES >= HEADER_LIMIT_BYTES


def test_offline_nothing_is_asked(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        ModelError, match=r"^HF_HUB_OFFLINE is set, so no hub is asked, and the cache /.* has no org/tiny$"
    ):
        WatchedFetch()
    assert hub.asked == []


def test_offline_a_model_that_is_in_the_cache_is_returned_and_a_missing_file_is_named(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = WatchedFetch().path
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = WatchedFetch()
    assert again.path == path
    assert again.checked == [path]
    assert again.notices == [f"org/tiny: from the cache, {path}"]
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no hub is asked, and the cache /.* lacks model.safetensors of org/tiny$"):
        WatchedFetch()
    assert hub.asked == []


def fill_in_part(hub: HubServer, *names: str) -> Path:
    """Let another tool fetch some files of a model that has more; return the directory of its commit."""
    more = {"chat_template.jinja": b"{{ messages }}", "generation_config.json": b'{"eos_token_id": 2}', **EMBEDDING}
    hub.repositories["org/tiny"].files |= more
    path = Path(snapshot_download("org/tiny", allow_patterns=list(names)))
    hub.asked.clear()
    return path


NECESSARY = ("config.json", "tokenizer.json", "*.safetensors")


def test_what_another_tool_has_left_out_is_fetched_once(hub: HubServer) -> None:
    path = fill_in_part(hub, *NECESSARY)
    assert find_cached(MODEL, weights=True) is None
    fetched = WatchedFetch(newest=False)
    assert fetched.path == path
    assert (path / "chat_template.jinja").read_bytes() == b"{{ messages }}"
    assert "model.safetensors" not in hub.bodies()
    assert hub.asked[0].path == f"/api/models/org/tiny/revision/{path.name}", "it asks for no newer commit"
    hub.asked.clear()
    assert find_cached(MODEL, weights=True) == path
    assert hub.asked == []


def test_files_of_another_tool_that_are_no_links_are_not_fetched_again(hub: HubServer) -> None:
    path = fill_in_part(hub, *NECESSARY)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        blob = (path / name).resolve()
        (path / name).unlink()
        blob.rename(path / name)
    assert WatchedFetch(newest=False).path == path
    asked = {asked.path.partition(f"/resolve/{path.name}/")[2] for asked in hub.asked}
    assert not asked & {"config.json", "tokenizer.json", "model.safetensors"}
    assert (path / "chat_template.jinja").is_file()


@pytest.mark.parametrize("name", ["tokenizer_config.json", "model.safetensors"])
def test_a_file_that_is_no_link_and_has_another_content_is_fetched(
    hub: HubServer, tiny: dict[str, bytes], name: str
) -> None:
    path = fill_in_part(hub, *NECESSARY)
    (path / name).unlink(missing_ok=True)
    (path / name).write_bytes(b"#" * len(tiny[name]))
    assert (WatchedFetch().path / name).read_bytes() == tiny[name]
    hub.repositories["org/tiny"].files["generation_config.json"] = b'{"eos_token_id": 1}'
    other = WatchedFetch().path
    assert other != path
    assert (other / name).read_bytes() == tiny[name]


def test_a_file_that_the_hub_lists_without_a_digest_is_not_noted_as_absent(hub: HubServer) -> None:
    hub.repositories["org/tiny"].files["chat_template.jinja"] = b"{{ messages }}"
    hub.without_digest.add("chat_template.jinja")
    with pytest.raises(ModelError, match=r"^org/tiny: the hub lists chat_template.jinja without a size and a digest"):
        WatchedFetch()
    assert not list(Path(constants.HF_HUB_CACHE).rglob(".no_exist/*/chat_template.jinja"))
    path = Path(snapshot_download("org/tiny", allow_patterns=list(NECESSARY)))
    fetched = WatchedFetch(newest=False)
    assert fetched.path == path
    assert "chat_template.jinja without a size and a digest" in fetched.notices[-1]


def test_a_download_of_another_tool_that_broke_off_is_completed(hub: HubServer, tiny: dict[str, bytes]) -> None:
    path = fill_in_part(hub, "config.json")
    assert find_cached(MODEL, weights=True) is None
    assert WatchedFetch(newest=False).path == path
    assert files_of(path).keys() >= tiny.keys()


def test_offline_a_snapshot_that_has_what_is_necessary_is_enough(
    hub: HubServer, sharded: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["org/tiny"] = Repository(sharded)
    path = fill_in_part(hub, *NECESSARY, "*.index.json")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_cached(MODEL, weights=True) == path
    (path / "model-00002-of-00003.safetensors").unlink()
    assert find_cached(MODEL, weights=True) is None
    with pytest.raises(ModelError, match=r" lacks model-00002-of-00003.safetensors of org/tiny$"):
        WatchedFetch(newest=False)


@pytest.mark.parametrize("fault", ["503", "404"])
def test_a_snapshot_of_another_tool_is_served_as_it_is_if_the_hub_does_not_list_its_files(
    hub: HubServer, fault: str
) -> None:
    path = fill_in_part(hub, *NECESSARY)
    hub.faults["listing"] = [fault] * 100
    fetched = WatchedFetch(newest=False)
    assert fetched.path == path
    assert fetched.checked == [path]
    assert fetched.notices[-1].endswith(
        f"\norg/tiny: served as it is in the cache, {path}; with HF_HUB_OFFLINE=1 no hub is asked"
    )
    assert len(hub.asked) == 1
    with pytest.raises(ModelError):
        WatchedFetch(newest=True)


def test_a_snapshot_of_another_tool_is_served_as_it_is_from_a_cache_that_cannot_be_written(
    hub: HubServer, tmp_path: Path
) -> None:
    with small_tmpfs(tmp_path / "small") as small, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(small / "cache"))
        path = fill_in_part(hub, *NECESSARY)
        subprocess.run(["mount", "-o", "remount,ro", small], check=True)
        fetched = WatchedFetch(newest=False)
        assert fetched.path == path
        assert fetched.notices[-1].startswith(f"{path} cannot be written\n")
        assert hub.asked == []


@pytest.mark.parametrize("file", [".locks", ".locks/models--org--tiny"])
def test_a_snapshot_of_another_tool_is_served_as_it_is_where_no_lock_can_be_made(hub: HubServer, file: str) -> None:
    path = fill_in_part(hub, *NECESSARY)
    shutil.rmtree(path.parents[2] / ".locks", ignore_errors=True)
    (path.parents[2] / file).parent.mkdir(exist_ok=True)
    (path.parents[2] / file).touch()  # so that there can be no directory, for root either
    fetched = WatchedFetch(newest=False)
    assert fetched.path == path
    assert fetched.checked == [path]
    assert "HF_HOME names another directory\n" in fetched.notices[-1]
    with pytest.raises(ModelError, match="HF_HOME names another directory"):
        WatchedFetch()


def test_a_blob_of_another_size_than_the_hub_says_is_fetched_again(hub: HubServer, tiny: dict[str, bytes]) -> None:
    path = WatchedFetch().path
    for name in ("model.safetensors", "tokenizer.json"):
        os.truncate(path / name, 100)
    hub.asked.clear()
    assert files_of(WatchedFetch().path) == tiny
    assert sorted(set(hub.bodies())) == ["model.safetensors", "tokenizer.json"]


def test_a_disk_without_room_is_named_before_weights_come(hub: HubServer, tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small") as small, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(small / "cache"))
        hub.repositories["org/tiny"].files["model.safetensors"] = os.urandom(4 << 20)
        with pytest.raises(
            ModelError, match=r"no space left: 4.2 MB are to be fetched, and the disk of /.* has 2.1 MB"
        ):
            WatchedFetch()
        assert "model.safetensors" not in names(small)


def test_a_disk_that_becomes_full_is_named(hub: HubServer, tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small") as small, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(small / "cache"))
        hub.repositories["org/tiny"].files["tokenizer.json"] = b" " * (3 << 20)
        with pytest.raises(ModelError, match=r"^org/tiny: no space left in /.*; HF_HOME names another directory$"):
            WatchedFetch()


def test_a_cache_that_cannot_be_made_is_named(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/proc/cache")
    with pytest.raises(ModelError, match=r"^/proc/cache: No such file or directory; HF_HOME names another directory$"):
        WatchedFetch()


FETCH = """
import sys
from deploy.local.stack.hub import fetch
from deploy.local.stack.hub_files import HubModel
show = lambda what, share: print(what, flush=True)
path = fetch(
    HubModel("org/tiny"), weights=True, newest=True, check=lambda path: None, progress=show, notice=lambda text: None
)
print(path)
"""


def test_of_two_at_once_one_fetches(hub: HubServer, tiny: dict[str, bytes]) -> None:
    hub.faults["tokenizer.json"] = ["stall"]
    first = Thread(target=WatchedFetch)
    first.start()
    assert hub.holding.wait(30)
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": constants.HF_HUB_CACHE}
    command = [sys.executable, "-c", FETCH]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as second:
        assert second.stdout is not None
        assert second.stdout.readline() == "waiting for another process that fetches the model\n"
        hub.over.set()  # the held answer ends early, and is continued
        first.join()
        shown = second.stdout.read().splitlines()
    assert files_of(Path(shown[-1])) == tiny
    assert not [line for line in shown if line.startswith("fetching")], "the first one has fetched it"
    assert hub.bodies().count("config.json") == 1
