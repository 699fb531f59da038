"""Which model another name means, and which names resemble one that does not exist."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.frontend.models.model_names import COMPARED_CHARACTERS, KEPT_S, NAMES_LISTED, ModelAliases, similar_names

ONE, TWO = ("/models/one", "digest"), ("/models/two", "digest")


def test_a_servers_name_means_its_model_while_no_other_model_has_it() -> None:
    aliases = ModelAliases()
    assert aliases.find("org/one", 0.0) == ""
    aliases.set_names("one", ["org/one", "/models/one", "", "one"], ONE)
    assert [aliases.find(name, 0.0) for name in ("org/one", "/models/one", "one", "")] == ["one", "one", "", ""]
    assert list(aliases.refusals(0.0, {"one"}, {"sql"})) == []
    aliases.set_names("two", ["org/one"], TWO)
    assert aliases.find("org/one", 0.0) == ""
    assert list(aliases.refusals(0.0)) == ["the name 'org/one' means no model, because servers of one, two have it"]
    aliases.set_names("one", ["/models/one"], ONE)
    assert (aliases.find("org/one", 0.0), list(aliases.refusals(0.0))) == ("two", [])


def test_a_name_of_a_model_that_has_gone_does_not_mean_another_model_of_other_files() -> None:
    aliases = ModelAliases()
    aliases.set_names("one", ["org/one"], ONE)
    aliases.lose_workers("one", 0.0)
    assert aliases.find("org/one", 0.0) == "one"
    aliases.set_names("two", ["org/one"], TWO)
    assert (aliases.find("org/one", 0.0), list(aliases.refusals(0.0))) == (
        "",
        [
            "the name 'org/one' means no model, because servers of one, two have it"
            " (one has no workers now, and keeps it for 600 s)"
        ],
    )
    aliases.lose_workers("two", 0.0)
    assert aliases.find("org/one", 0.0) == ""
    aliases.set_names("one", [], ONE)
    assert aliases.find("org/one", 0.0) == "two"


def test_a_model_that_has_been_gone_for_long_loses_its_names_to_one_that_has_workers() -> None:
    aliases = ModelAliases()
    aliases.set_names("one", ["org/one", "mine"], ONE)
    aliases.lose_workers("one", 5.0)
    aliases.set_names("two", ["org/one"], TWO)
    aliases.lose_workers("one", 100.0)
    assert [aliases.find("org/one", now_s) for now_s in (5.0, 4.9 + KEPT_S, 5.0 + KEPT_S)] == ["", "", "two"]
    assert list(aliases.refusals(5.0 + KEPT_S)) == []
    assert aliases.find("mine", 5.0 + KEPT_S) == "one"
    aliases.lose_workers("two", 9.0)
    assert aliases.find("org/one", 9.0 + KEPT_S) == "", "both are gone"
    aliases.set_names("one", ["org/one"], ONE)
    assert (aliases.find("org/one", 9.0), aliases.find("org/one", 9.0 + KEPT_S)) == ("", "one")


def test_a_name_of_a_model_that_has_gone_means_the_same_files_under_another_name() -> None:
    aliases = ModelAliases()
    aliases.set_names("one", ["org/one"], ONE)
    aliases.lose_workers("one", 0.0)
    aliases.set_names("two", ["org/one"], ONE)
    assert (aliases.find("org/one", 0.0), list(aliases.refusals(0.0))) == ("two", [])
    aliases.set_names("one", ["org/one"], ONE)
    assert aliases.find("org/one", 0.0) == ""


def test_a_name_that_a_model_or_a_lora_has_itself_is_said() -> None:
    aliases = ModelAliases()
    aliases.set_names("one", ["two", "sql"], ONE)
    assert list(aliases.refusals(0.0, {"one", "two"}, set())) == [
        "the name 'two' means the model of that name, although servers of one have it"
    ]
    assert [line for line in aliases.refusals(0.0, set(), {"sql"}) if "'sql' means the model of that name" in line]


def test_names_that_resemble_come_first_and_a_long_one_is_not_compared() -> None:
    known = [f"model-{number:03}" for number in range(100)]
    assert similar_names("modle-042", known)[0] == "model-042"
    assert similar_names("x" * (COMPARED_CHARACTERS + 1), known) == known[:NAMES_LISTED]
    assert similar_names("zzz", known) == known[:NAMES_LISTED]


class Aliases(RuleBasedStateMachine):
    """The names of models change in any order; a name means a model only if no other one has it."""

    def __init__(self) -> None:
        super().__init__()
        self.aliases = ModelAliases()
        self.names: dict[str, set[str]] = {}
        self.files: dict[str, str] = {}
        self.gone: dict[str, float] = {}
        self.now_s = 0.0

    @rule(
        model=st.sampled_from("mno"),
        names=st.sets(st.sampled_from(("x", "y", "z", "m", ""))),
        files=st.sampled_from("12"),
    )
    def set_names(self, model: str, names: set[str], files: str) -> None:
        self.aliases.set_names(model, names, (files, ""))
        self.names[model], self.files[model] = names - {"", model}, files
        self.gone.pop(model, None)

    @rule(model=st.sampled_from("mno"))
    def lose_workers(self, model: str) -> None:
        self.aliases.lose_workers(model, self.now_s)
        self.gone.setdefault(model, self.now_s)

    @rule(share=st.sampled_from((0.5, 1.0)))
    def wait(self, share: float) -> None:
        self.now_s += share * KEPT_S

    @invariant()
    def agrees(self) -> None:
        self.aliases.validate()
        for name in "xyzm":
            models = [model for model, names in self.names.items() if name in names]
            there = {self.files[model] for model in models if model not in self.gone}
            late = {model for model, since_s in self.gone.items() if there and self.now_s - since_s >= KEPT_S}
            models = [
                each for each in models if each not in self.gone or not (self.files[each] in there or each in late)
            ]
            assert self.aliases.find(name, self.now_s) == (models[0] if len(models) == 1 else "")


TestAliases = Aliases.TestCase
