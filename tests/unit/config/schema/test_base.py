"""How config classes behave: frozen, keyword-only, typed, with rules and a choice of a branch."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, Field

from tests.config_builders import collect_mistakes, wrong_fields
from trainer_kit.config.schema.configclass import Config, OneOfConfig, configclass
from trainer_kit.config.schema.experiment import (
    DataConfig,
    ExperimentConfig,
    TaskConfig,
    TrainerConfig,
)
from trainer_kit.config.schema.section import is_configclass
from trainer_kit.errors import ConfigError


def even(value: int) -> int:
    if value % 2:
        raise ValueError(f"{value} is odd")
    return value


@configclass
class Even(Config):
    size: Annotated[int, AfterValidator(even)] = 2


@configclass
class Inner(Config):
    size: Annotated[int, Field(ge=1)] = 1
    rate: float = 0.5
    on: bool = False
    word: str = "a"
    several: tuple[int, ...] = ()
    by_name: dict[str, int] | None = None
    maybe: int | None = None


@configclass
class Ruled(Config):
    low: int = 0
    high: int = 1
    inner: Inner = Inner()

    def rules(self) -> Iterator[tuple[str, str]]:
        """Low is at most high."""
        if self.low > self.high:
            yield "low", f"{self.low} is above high ({self.high}); lower it"
        if self.low < 0:
            yield "low", "is below 0"


@configclass
class Choice(OneOfConfig):
    type: Literal["inner", "ruled"] | None = None
    inner: Inner | None = None
    ruled: Ruled | None = None


@configclass
class Needed(Config):
    size: int


@configclass
class Either(OneOfConfig):
    type: Literal["inner", "needed"] | None = None
    inner: Inner | None = None
    needed: Needed | None = None


def test_fields_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Inner().size = 2  # type: ignore[misc]


def test_fields_have_to_be_named() -> None:
    with pytest.raises((TypeError, ConfigError)):
        Inner(2)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("config_class", "values", "path", "said"),
    [
        (Inner, {"sise": 2}, "Inner.sise", "did you mean Inner.size?"),
        (Needed, {}, "Needed.size", "is needed"),
        (Either, {"type": "needed"}, "Either.needed.size", "is needed"),
        (Choice, {"type": "outer"}, "Choice.type", "is not one of inner, ruled or null"),
        (Even, {"size": 3}, "Even.size", "3 is odd"),
        (TrainerConfig, {"validation_steps": 0}, "trainer.validation_steps", "use -1"),
        (
            TrainerConfig,
            {"export": ["keras", "saved_modle"]},
            "trainer.export",
            "is not a list (each item one of saved_model, keras, litert, litert_int8, onnx)",
        ),
    ],
)
def test_a_section_alone_names_its_place_in_an_experiment(
    config_class: type[Config], values: dict[str, Any], path: str, said: str
) -> None:
    assert said in str(collect_mistakes(config_class, **values)[path])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("size", "5"),
        ("size", 5.0),
        ("size", True),
        ("size", None),
        ("size", 0),
        ("rate", "0.5"),
        ("rate", True),
        ("rate", float("nan")),
        ("rate", float("inf")),
        ("on", 1),
        ("on", "yes"),
        ("word", 5),
        ("several", (1, "2")),
        ("several", 5),
        ("by_name", {"a": "1"}),
        ("by_name", {1: 1}),
        ("maybe", "5"),
    ],
)
def test_values_are_not_bent_into_a_type(name: str, value: object) -> None:
    assert wrong_fields(Inner, {name: value})[0].startswith(name)


def test_equivalent_plain_values_are_accepted() -> None:
    config = Ruled(inner={"rate": 1, "several": [1, 2], "by_name": {"a": 1}})  # type: ignore[arg-type]

    assert config.inner == Inner(rate=1.0, several=(1, 2), by_name={"a": 1})
    assert isinstance(config.inner.rate, float)


def test_all_broken_rules_come_at_once_with_their_fields() -> None:
    with pytest.raises(ConfigError) as caught:
        Ruled(low=-1, high=-2)

    assert [str(mistake) for mistake in caught.value.mistakes] == [
        "Ruled.low: -1 is above high (-2); lower it",
        "Ruled.low: is below 0",
    ]


def test_replace_leaves_the_original_alone_and_checks_again() -> None:
    before = Ruled()
    after = before.replace(high=5, inner={"size": 3})

    assert after.high == 5
    assert after.inner.size == 3
    assert after.inner.rate == 0.5
    assert before == Ruled()
    assert after.replace(inner=Inner(size=7)).inner.size == 7

    for wrong in ({"low": 9}, {"inner": {"size": 0}}, {"lwo": 1}):
        with pytest.raises(ConfigError):
            before.replace(**wrong)


def test_as_dict_is_plain_data_that_makes_an_equal_config() -> None:
    config = Ruled(high=3, inner=Inner(several=(1, 2), by_name={"a": 1}))
    plain = config.as_dict()

    assert plain["inner"]["several"] == [1, 2]
    assert Ruled(**plain) == config

    plain["inner"]["by_name"]["a"] = 2
    assert config.inner.by_name == {"a": 1}


def test_configs_can_be_compared_copied_and_pickled() -> None:
    config = Ruled(high=3)

    assert config == Ruled(high=3) != Ruled()
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(Needed(size=1)) == hash(Needed(size=1))


def test_a_choice_holds_its_branch_and_nothing_else() -> None:
    nothing = Choice()

    assert nothing.get() is None
    assert nothing.as_dict() == {"type": None}

    chosen = Choice(type="inner", ruled=Ruled(high=4))
    assert chosen.get() == Inner()
    assert chosen.ruled is None
    assert chosen.as_dict().keys() == {"type", "inner"}
    assert Choice(type="ruled", ruled={"high": 4}).get().high == 4  # type: ignore[arg-type]
    assert chosen.replace(type="ruled").get() == Ruled()
    assert Choice.branches() == {"inner": Inner, "ruled": Ruled}


def test_a_branch_that_is_not_chosen_is_not_made() -> None:
    assert Either(type="inner").inner == Inner()
    assert Either(type="needed", needed=Needed(size=3)).get().size == 3


def test_subclasses_add_fields_and_keep_rules() -> None:
    @configclass
    class More(Ruled):
        extra: Annotated[float, Field(gt=0)] = 1

    assert More(extra=2).as_dict().keys() == {"low", "high", "inner", "extra"}

    for wrong in ({"low": 9}, {"extra": 0}, {"extra": "2"}):
        with pytest.raises(ConfigError):
            More(**wrong)  # type: ignore[arg-type]


def test_only_decorated_classes_are_config_classes() -> None:
    class Undecorated(Inner):
        pass

    assert is_configclass(Inner)
    assert is_configclass(Choice)

    for other in (Undecorated, Config, int, Inner(), None):
        assert not is_configclass(other)


def test_a_class_that_is_no_config_cannot_be_decorated() -> None:
    with pytest.raises(TypeError, match="inherit from"):

        @configclass
        class Stranger:
            size: int = 1


def test_a_union_is_strict_in_each_of_its_parts() -> None:
    @configclass
    class United(Config):
        value: int | tuple[str, ...] | Literal["all"] = 1

    fine: list[Any] = [5, ("a",), "all"]

    assert [United(value=value).value for value in fine] == fine

    for wrong in ("5", 5.0, (1,), "some"):
        with pytest.raises(ConfigError):
            United(value=wrong)  # type: ignore[arg-type]


def test_replace_merges_sections_by_name() -> None:
    data = DataConfig(drop_remainder=False, global_batch_size=4)
    task = TaskConfig(validation_data=data).replace(
        validation_data={"dev": {"global_batch_size": 2}, "hard": {}}
    )

    assert task.validation_data == {"dev": data.replace(global_batch_size=2), "hard": data}

    again = task.replace(
        validation_data={"dev": {"shuffle_buffer_size": 9}, "hard": None, "new": data}
    )
    assert again.validation_data == {
        "dev": data.replace(global_batch_size=2, shuffle_buffer_size=9),
        "new": data,
    }

    with pytest.raises(ConfigError):
        task.replace(validation_data={"global_batch_size": 3})


def test_replace_tells_every_mistake_with_its_whole_path() -> None:
    wrong: dict[str, Any] = {
        "trainer": {"train_step": 5, "steps_per_loop": "3"},
        "task": {"validation_data": {"dev": {"batch_size": 3}}},
        "runtime": 5,
    }

    with pytest.raises(ConfigError) as caught:
        ExperimentConfig().replace(**wrong)

    assert {mistake.path for mistake in caught.value.mistakes} == {
        "trainer.train_step",
        "trainer.steps_per_loop",
        "task.validation_data.dev.batch_size",
        "runtime",
    }
    assert caught.value.__notes__ == [f"given in {__file__}:{caught.traceback[0].lineno + 1}"]
    assert caught.value.exit_code == 2
    assert isinstance(caught.value, ValueError)
