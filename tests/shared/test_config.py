"""Where settings come from and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta, Struct

from shared.config import DiscoveryConfig, NatsConfig, TraceConfig, load
from shared.errors import ConfigError


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    name: str = "default"
    count: int = 1
    share: float = 0.5
    fast: bool = False
    sizes: tuple[int, ...] = ()
    nats: NatsConfig = NatsConfig()
    discovery: DiscoveryConfig = DiscoveryConfig()
    trace: TraceConfig = TraceConfig()


class Needs(Struct, frozen=True, forbid_unknown_fields=True):
    model: str


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.toml"
    path.write_text('name = "file"\ncount = 2\n[nats]\nurl = "nats://file:1"\nuser = "file"\n', encoding="utf-8")
    return path


def test_flags_win_over_the_environment_over_the_file_over_defaults(file: Path) -> None:
    environ = {"HEADRACE_COUNT": "3", "HEADRACE_NATS_URL": "nats://env:1", "PATH": "/bin"}
    settings = load(Settings, file=file, environ=environ, flags=["--nats-url", "nats://flag:1"])
    assert settings.nats.url == "nats://flag:1"
    assert settings.count == 3
    assert settings.name == "file"
    assert settings.nats.user == "file"
    assert settings.share == 0.5


def test_the_file_may_be_named_by_a_flag(file: Path) -> None:
    assert load(Settings, environ={}, flags=["--config", str(file)]).name == "file"
    assert load(Settings, environ={}, flags=[f"--config={file}", "--name=flag"]).name == "flag"


def test_texts_become_what_the_field_is() -> None:
    environ = {"HEADRACE_FAST": "true", "HEADRACE_SIZES": "1, 2,3", "HEADRACE_DISCOVERY_ENDPOINTS": "a:1,b:2"}
    settings = load(Settings, environ=environ, flags=["--share=0.25"])
    assert settings.fast is True
    assert settings.sizes == (1, 2, 3)
    assert settings.discovery.endpoints == ("a:1", "b:2")
    assert settings.share == 0.25


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("colour = 1", "colour"),
        ("[nats]\ncolour = 1", "nats.colour"),
        ("[table]\n", "table"),
        ('nats = "nats://host:1"', "nats is a table"),
        ('count = "many"', "count"),
        ("count = 1.5", "count"),
        ("count = ", "settings.toml"),
        ("sizes = 3", "sizes"),
    ],
)
def test_a_wrong_file_is_refused_by_its_key(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=told):
        load(Settings, file=path, environ={})


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        load(Settings, file=tmp_path / "none.toml", environ={})
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.toml"):
        load(Settings, file=binary, environ={})


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--colour", "1"], "--colour: no such setting"),
        (["name"], "name: no such setting"),
        (["--name"], "--name needs a value"),
        (["--count", "many"], "count"),
        (["--nats-password", "secret"], "set a secret in the file"),
        (["--nats-password=secret"], "set a secret in the file"),
    ],
)
def test_a_wrong_flag_is_refused(flags: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as wrong:
        load(Settings, environ={}, flags=flags)
    assert "secret'" not in str(wrong.value)


def test_a_mistyped_name_is_refused_with_what_is_like_it(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("counts = 1", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"unknown key counts; did you mean count\?$"):
        load(Settings, file=file, environ={})
    with pytest.raises(ConfigError, match=r"--nats-ur: no such setting; did you mean --nats-url or --nats-user\?$"):
        load(Settings, environ={}, flags=["--nats-ur", "x"])
    with pytest.raises(
        ConfigError, match=r"--nats\.payload_limit: no such setting; did you mean --nats\.payload_limit_bytes\?$"
    ):
        load(Settings, environ={}, flags=["--nats.payload_limit", "x"])
    with pytest.raises(ConfigError, match=r"--xyz: no such setting; `--help` lists them all$"):
        load(Settings, environ={}, flags=["--xyz", "x"])
    with pytest.raises(ConfigError, match=r"--xyz: no such setting; known: --config, --model$"):
        load(Needs, environ={}, flags=["--xyz", "x"])


def test_a_flag_may_be_written_as_the_file_has_it() -> None:
    assert load(Settings, environ={}, flags=["--nats.payload_limit_bytes=1"]).nats.payload_limit_bytes == 1
    with pytest.raises(ConfigError, match="set a secret in the file"):
        load(Settings, environ={}, flags=["--nats.password=secret"])


class Chooses(Struct, frozen=True, forbid_unknown_fields=True):
    name: str = ""
    how: Literal["fast", "well"] = "fast"


class Table(Struct, frozen=True, forbid_unknown_fields=True):
    below: Chooses = Chooses()
    each: dict[str, Literal["fast", "well"]] = {}
    how: Literal["fast", "well"] | Literal["auto"] = "auto"


@pytest.mark.parametrize(
    ("flag", "told"),
    [("--below-how", r"; below\.how is one of fast, well$"), ("--how", r"; how is one of fast, well, auto$")],
)
def test_a_word_that_is_no_choice_is_refused_with_those_there_are(flag: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load(Table, environ={}, flags=["--below-name", "any", flag, "good"])


class Counts(Struct, frozen=True, forbid_unknown_fields=True):
    count: int = 1
    how: Literal["fast", "well"] = "fast"


def test_each_fault_has_a_line_of_its_own() -> None:
    with pytest.raises(ConfigError) as refused:
        load(Counts, environ={}, flags=["--count=many", "--how=good"])
    assert str(refused.value).splitlines() == [
        "Counts: count: Expected `int`, got `str`",
        "Counts: how: 'good' is not one of fast, well",
    ]


def test_a_word_that_is_no_choice_in_a_table_of_them_is_refused_likewise(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[each]\na = "fast"\nb = "good"', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"; each is one of fast, well$"):
        load(Table, file=file, environ={})


def test_a_table_of_names_is_a_flag_too() -> None:
    assert load(Table, environ={}, flags=["--each", "my/model=fast, b=well"]).each == {"my/model": "fast", "b": "well"}
    with pytest.raises(ConfigError, match=r"each: 'fast' is not NAME=VALUE"):
        load(Table, environ={}, flags=["--each=fast"])
    with pytest.raises(ConfigError, match=r"; each is one of fast, well$"):
        load(Table, environ={}, flags=["--each", "a=good"])


def test_a_wrong_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match="HEADRACE_COLOUR"):
        load(Settings, environ={"HEADRACE_COLOUR": "1"})
    with pytest.raises(ConfigError, match="HEADRACE_NAME_FILE"):
        load(Settings, environ={"HEADRACE_NAME_FILE": "/etc/hostname"})


def test_a_secret_comes_from_the_environment_or_from_a_file_that_it_names(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("from the file\n", encoding="utf-8")
    assert load(Settings, environ={"HEADRACE_TRACE_TOKEN": "plain"}).trace.token == "plain"
    assert load(Settings, environ={"HEADRACE_TRACE_TOKEN_FILE": str(secret)}).trace.token == "from the file"
    with pytest.raises(ConfigError, match="HEADRACE_TRACE_TOKEN_FILE"):
        load(Settings, environ={"HEADRACE_TRACE_TOKEN_FILE": str(tmp_path / "none")})
    secret.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="HEADRACE_TRACE_TOKEN_FILE"):
        load(Settings, environ={"HEADRACE_TRACE_TOKEN_FILE": str(secret)})


def test_the_file_of_a_password_is_a_setting_since_it_is_read_again_and_again() -> None:
    loaded = load(Settings, environ={"HEADRACE_NATS_PASSWORD_FILE": "/a"}, flags=["--discovery-password-file", "/b"])
    assert (loaded.nats.password_file, loaded.discovery.password_file) == ("/a", "/b")


def test_a_setting_without_a_default_must_be_given() -> None:
    with pytest.raises(ConfigError, match="model"):
        load(Needs, environ={})
    assert load(Needs, environ={}, flags=["--model", "m"]).model == "m"


class WithAnything(Struct, frozen=True, forbid_unknown_fields=True):
    given: dict[str, Any] = {}
    names: dict[str, str] = {}


def test_a_flag_sets_one_entry_of_a_table_of_any_values(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[given]\nmax_num_seqs = 4\ndtype = "float32"\n', encoding="utf-8")
    settings = load(WithAnything, file=file, environ={}, flags=["--given.max_num_seqs=8", "--given.seed", "1"])
    assert settings.given == {"max_num_seqs": "8", "dtype": "float32", "seed": "1"}
    assert load(WithAnything, environ={"HEADRACE_GIVEN": "a=1,b=2"}).given == {"a": "1", "b": "2"}


def test_no_flag_sets_an_entry_that_is_a_secret_or_is_of_another_table() -> None:
    with pytest.raises(ConfigError, match=r"--given\.hf_token: set a secret in the file"):
        load(WithAnything, environ={}, flags=["--given.hf_token=x"])
    with pytest.raises(ConfigError, match=r"--names\.one: no such setting"):
        load(WithAnything, environ={}, flags=["--names.one=x"])


def test_a_table_of_any_values_is_a_table(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("given = 3\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="given is a table"):
        load(WithAnything, file=file, environ={}, flags=["--given.a=1"])


class ListedConfig(Struct, frozen=True):
    names: tuple[str, ...] = ()
    numbers: Annotated[tuple[int, ...], Meta(min_length=1)] = (1,)


@pytest.mark.parametrize("text", ["7,8", "7, 8", "[7, 8]", " [7,8]"])
def test_a_list_is_written_with_commas_or_as_in_toml(text: str) -> None:
    assert load(ListedConfig, environ={}, flags=[f"--numbers={text}"]).numbers == (7, 8)


def test_texts_of_a_list_may_be_in_quotes_and_then_hold_commas() -> None:
    assert load(ListedConfig, environ={}, flags=["--names", '["a,b", "c"]']).names == ("a,b", "c")
    assert load(ListedConfig, environ={}, flags=["--names", "a,b"]).names == ("a", "b")
    assert load(ListedConfig, environ={}, flags=["--names", "[]"]).names == ()


@pytest.mark.parametrize(
    ("text", "wrong"), [("[7, 8", r"numbers: '\[7, 8' is not a list"), ("[]", "numbers"), ("x", "numbers")]
)
def test_a_list_that_is_wrong_names_the_setting(text: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        load(ListedConfig, environ={}, flags=[f"--numbers={text}"])
