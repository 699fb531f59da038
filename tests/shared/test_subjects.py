"""The names inside subjects and keys."""

from __future__ import annotations

from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import subjects
from shared.errors import ProtocolError

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=100)


@given(NAMES)
def test_an_escaped_name_is_one_token_and_comes_back(name: str) -> None:
    token = subjects.escape(name)
    assert not set(token) & set(".*>/ \t\r\n")
    assert token.isascii()
    assert token
    assert not any(mark.isspace() for mark in token)
    assert unquote(token) == name


@given(NAMES, NAMES)
def test_two_names_never_share_a_token(name: str, other: str) -> None:
    assert (subjects.escape(name) == subjects.escape(other)) is (name == other)


@given(NAMES)
def test_a_models_subjects_and_key_have_a_fixed_number_of_parts(name: str) -> None:
    assert len(subjects.select("default", name).split(".")) == 5
    assert len(subjects.router_load("default", name).split(".")) == 5
    assert len(subjects.model_key("default", name, "0a").split("/")) == 6


def test_subjects_and_keys_read_as_documented() -> None:
    assert subjects.client("default", "chat") == "headrace.default.frontend.chat"
    assert subjects.stream("default", "0a") == "headrace.default.frontend.0a.stream"
    assert subjects.recent_requests("default", "0a") == "headrace.default.frontend.0a.recent"
    assert subjects.select("default", "org/model-1.5") == "headrace.default.router.org%2Fmodel-1%2E5.select"
    assert subjects.explain("default", "m") == "headrace.default.router.m.explain"
    assert subjects.worker("default", "0a", "generate") == "headrace.default.worker.0a.generate"
    assert subjects.control("default", "router", "0a") == "headrace.default.router.0a.control"
    assert subjects.instance_key("default", "worker", "0a") == "/headrace/default/instances/worker/0a"
    assert subjects.model_key("default", "org/m", "0a") == "/headrace/default/models/org%2Fm/0a"


def test_every_key_lies_below_its_prefixes() -> None:
    instance, model = subjects.instance_key("n", "worker", "0a"), subjects.model_key("n", "m", "0a")
    assert instance.startswith(subjects.instances_prefix("n"))
    assert model.startswith(subjects.models_prefix("n"))
    assert instance.startswith(subjects.namespace_prefix("n"))
    assert not instance.startswith(subjects.namespace_prefix("na"))


@given(NAMES)
def test_a_models_subject_is_one_that_nats_takes(name: str) -> None:
    subjects.check(subjects.select("default", name))
    subjects.check(subjects.router_load("default", name), wildcards=True)


def test_an_id_is_one_token_and_one_segment() -> None:
    assert subjects.is_id("0123456789abcdef")
    assert subjects.is_id("worker-1_a")
    for text in ("", "a.b", "a b", "a/b", "*", ">", "a\n", "é", "a" * 65):
        assert not subjects.is_id(text), text


def test_a_subject_has_a_bound() -> None:
    subjects.check("é" * (subjects.LIMIT_BYTES // 2))
    with pytest.raises(ProtocolError):
        subjects.check("é" * (subjects.LIMIT_BYTES // 2) + "a")
    with pytest.raises(ProtocolError):
        subjects.check("a" * subjects.LIMIT_BYTES + ".>", wildcards=True)
