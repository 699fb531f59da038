"""Which model another name means, and which names resemble one that does not exist."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.frontend.models.model_names import COMPARED_CHARACTERS, NAMES_LISTED, ModelAliases, similar_names

ONE, TWO = ("/models/one", "digest"), ("/models/two", "digest")


def test_a_servers_name_means_its_model_while_no_other_model_has_it() -> None:
    aliases = ModelAliases()
    assert aliases.find("org/one") == ""
    aliases.set_names("one", ["org/one", "/models/one", "", "one"], ONE)
    assert [aliases.find(name) for name in ("org/one", "/models/one", "one", "")] == ["one", "one", "", ""]
    assert list(aliases.refusals({"one"}, {"sql"})) == []
    aliases.set_names("two", ["org/one"], TWO)
    assert aliases.find("org/one") == ""
    assert list(aliases.refusals()) == ["the name 'org/one' means no model, because servers of one, two have it"]
    aliases.set_names("one", ["/models/one"], ONE)
    assert (aliases.find("org/one"), list(aliases.refusals())) == ("two", [])


def test_a_name_of_a_model_that_has_gone_does_not_mean_another_model_of_other_files() -> None:
    aliases = ModelAliases()
    aliases.set_names("one", ["org/one"], ONE)
    aliases.lose_workers("one")
    assert aliases.find("org/one") == "one"
    aliases.set_names("two", ["org/one"], TWO)
    assert (aliases.find("org/one"), list(aliases.refusals())) == (
        "",
        ["the name 'org/one' means no model, because servers of one, two have it (one has no workers now)"],
    )
    aliases.lose_workers("two")
    assert aliases.find("org/one") == ""
    aliases.set_names("one", [], ONE)
    assert aliases.find("org/one") == "two"


def test_a_name_of_a_model_that_has_gone_means_the_same_files_under_another_name() -> None:
    aliases = ModelAliases()
    aliases.set_names("one", ["org/one"], ONE)
    aliases.lose_workers("one")
    aliases.set_names("two", ["org/one"], ONE)
    assert (aliases.find("org/one"), list(aliases.refusals())) == ("two", [])
    aliases.set_names("one", ["org/one"], ONE)
    assert aliases.find("org/one") == ""


def test_a_name_that_a_model_or_a_lora_has_itself_is_said() -> None:
    aliases = ModelAliases()
    aliases.set_names("one", ["two", "sql"], ONE)
    assert list(aliases.refusals({"one", "two"}, set())) == [
        "the name 'two' means the model of that name, although servers of one have it"
    ]
    assert [line for line in aliases.refusals(set(), {"sql"}) if "'sql' means the model of that name" in line]


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
        self.gone: set[str] = set()

    @rule(
        model=st.sampled_from("mno"),
        names=st.sets(st.sampled_from(("x", "y", "z", "m", ""))),
        files=st.sampled_from("12"),
    )
    def set_names(self, model: str, names: set[str], files: str) -> None:
        self.aliases.set_names(model, names, (files, ""))
        self.names[model], self.files[model] = names - {"", model}, files
        self.gone.discard(model)

    @rule(model=st.sampled_from("mno"))
    def lose_workers(self, model: str) -> None:
        self.aliases.lose_workers(model)
        self.gone.add(model)

    @invariant()
    def agrees(self) -> None:
        self.aliases.validate()
        for name in "xyzm":
            models = [model for model, names in self.names.items() if name in names]
            there = {self.files[model] for model in models if model not in self.gone}
            models = [model for model in models if model not in self.gone or self.files[model] not in there]
            assert self.aliases.find(name) == (models[0] if len(models) == 1 else "")


TestAliases = Aliases.TestCase
