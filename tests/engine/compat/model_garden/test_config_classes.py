"""Config objects of Model Garden as config classes of ours, and back: what may be written, and what
reaches theirs.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from typing import Any, Optional, Union

import pytest
from official.core import config_definitions
from official.modeling.hyperparams import base_config, oneof

from trainer_kit.compat.model_garden.config_classes import build_original, mirror
from trainer_kit.config.merge import apply_layers
from trainer_kit.config.schema.experiment import TrainerConfig
from trainer_kit.config.sources.layer import ConfigLayer
from trainer_kit.errors import ConfigError


@dataclasses.dataclass
class Head(base_config.Config):
    name: str = ""
    size: int = 1


@dataclasses.dataclass
class Neck(base_config.Config):
    depth: int = 2
    heads: list[Head] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Part(oneof.OneOfConfig):
    type: Optional[str] = None  # noqa: UP045 - as theirs are written
    head: Head = dataclasses.field(default_factory=Head)
    neck: Neck = dataclasses.field(default_factory=Neck)


@dataclasses.dataclass
class Whole(base_config.Config):
    """Every kind of field that Model Garden's own classes have."""

    count: int = 3
    rate: float = 1  # written without a point, as often
    broken: int = 0.5  # type: ignore[assignment]
    untold: str = None  # type: ignore[assignment]
    on: bool = False
    several: tuple[int, ...] = (1, 2)
    words: Optional[list[str]] = None  # noqa: UP045
    either: Union[int, str] = "x"  # noqa: UP007
    anything: Any = None
    there: Head | None = dataclasses.field(default_factory=Head)
    absent: Head | None = None
    heads: list[Head] = dataclasses.field(
        default_factory=lambda: [Head(name="a"), Head(name="b", size=2)]
    )
    part: Part = dataclasses.field(default_factory=lambda: Part(type="neck"))
    free: Part = dataclasses.field(default_factory=Part)
    data: config_definitions.DataConfig = dataclasses.field(
        default_factory=config_definitions.DataConfig
    )


@dataclasses.dataclass
class Tree(base_config.Config):
    size: int = 1
    inside: Optional[Tree] = None  # noqa: UP045


def _overridden(theirs: Any, *layers: dict[str, Any]) -> Any:
    return apply_layers(mirror(theirs), [ConfigLayer(values) for values in layers]).config


def _differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in other.items() if name not in one or one[name] != value}


def test_what_is_not_touched_comes_back_as_it_was() -> None:
    theirs = Whole()
    theirs.override({"more": {"a": 1}, "extra": 5}, is_strict=False)
    back = build_original(mirror(theirs))
    assert type(back) is Whole and back is not theirs
    assert back == theirs and back.as_dict() == theirs.as_dict()
    assert isinstance(back.several, tuple) and isinstance(back.rate, int) and back.rate == 1
    assert isinstance(back.heads[1], Head) and isinstance(back.part.neck, Neck)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"count": 5}, {"count": 5}),
        ({"rate": 2}, {"rate": 2.0}),
        ({"broken": "word"}, {"broken": "word"}),
        ({"untold": "word"}, {"untold": "word"}),
        ({"words": ["a"]}, {"words": ["a"]}),
        ({"either": 4}, {"either": 4}),
        ({"anything": {"a": {"b": 1}}}, {"anything": {"a": {"b": 1}}}),
        ({"there": None}, {"there": None}),
        ({"absent": {"size": 4}}, {"absent": {"name": "", "size": 4}}),
        ({"heads": [{"name": "c"}]}, {"heads": [{"name": "c", "size": 1}]}),
        (
            {"heads": [{}, {"size": 5}]},
            {"heads": [{"name": "a", "size": 1}, {"name": "b", "size": 5}]},
        ),
        (
            {"part": {"neck": {"depth": 7}}},
            {"part": {"type": "neck", "neck": {"depth": 7, "heads": []}}},
        ),
        ({"part": {"type": "head"}}, {"part": {"type": "head", "head": {"name": "", "size": 1}}}),
        ({"part": {"type": None}}, {"part": {"type": None}}),
        (
            {"free": {"type": "head", "head": {"size": 4}}},
            {"free": {"type": "head", "head": {"name": "", "size": 4}}},
        ),
    ],
    ids=str,
)
def test_an_override_reaches_the_original_object(
    given: dict[str, Any], found: dict[str, Any]
) -> None:
    theirs, mirrored = Whole(), _overridden(Whole(), given)
    back = build_original(mirrored)
    theirs.override(given)
    assert back.as_dict() == theirs.as_dict()
    assert _differences(Whole().as_dict(), back.as_dict()) == found
    for name, value in found.items():
        kind = (
            float if isinstance(value, float) else type(getattr(theirs, name))
        )  # a rate of 2 is 2.0
        assert type(getattr(back, name)) is kind


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"count": None}, "count: null is not a whole number"),
        ({"heads": [{}, {"size": "2"}]}, "heads.1.size: '2' is not a whole number"),
        ({"several": ["a"]}, "several: .* is not a list"),
        ({"either": 1.5}, "either: 1.5 is not a whole number or text"),
        ({"absent": {"sise": 3}}, "absent.sise: there is no such key; did you mean absent.size"),
        ({"part": {"head": {"size": 4}}}, "part.head .*: has no effect while part.type is 'neck'"),
        (
            {"data": {"input_path": {"trian": "y"}}},
            "input_path.trian: .* did you mean data.input_path.train",
        ),
    ],
    ids=str,
)
def test_what_their_classes_would_take_is_refused_with_its_path(
    given: dict[str, Any], problem: str
) -> None:
    theirs = Whole(data=config_definitions.DataConfig(input_path={"train": "x"}))
    with pytest.raises(ConfigError, match=problem):
        _overridden(theirs, given)


@dataclasses.dataclass
class Routine(base_config.Config):
    name: str = ""
    part: base_config.Config | None = None
    head: Head | None = None


@dataclasses.dataclass
class Routines(base_config.Config):
    routines: tuple[Routine, ...] = ()


@dataclasses.dataclass
class LargeHead(Head):
    depth: int = 5


def test_list_items_may_have_fields_unknown_to_their_class() -> None:
    theirs = Routines(
        routines=(Routine(name="a", head=LargeHead()), Routine(name="b", part=Neck()))
    )
    back = build_original(mirror(theirs))
    assert (
        back == theirs
        and isinstance(back.routines[0].head, LargeHead)
        and isinstance(back.routines[1].part, Neck)
    )
    changed = build_original(_overridden(theirs, {"routines": [{"head": {"depth": 7}}, {}]}))
    assert isinstance(changed.routines[0].head, LargeHead) and changed.routines[0].head.depth == 7
    assert changed.routines[0].name == "a" and changed.routines[1] == theirs.routines[1]


def test_only_what_changed_is_put_on_their_object() -> None:
    given: list[Any] = []

    @dataclasses.dataclass
    class Noting(Head):
        def override(self, override_params: Any, is_strict: bool = True) -> None:
            given.append(override_params)
            super().override(override_params, is_strict)

    mirrored = _overridden(Noting(), {"name": "n", "size": 1})
    given.clear()
    assert build_original(mirrored).name == "n"
    assert given == [{"name": "n"}]


def test_keys_that_they_do_not_annotate_can_be_written() -> None:
    theirs = Whole()
    theirs.override({"more": {"a": 1}, "extra": 5}, is_strict=False)
    back = build_original(_overridden(theirs, {"extra": "six", "more": {"a": 2}}))
    assert (back.extra, back.more.a) == ("six", 2)
    with pytest.raises(ConfigError, match=r"more.b: there is no such key"):
        _overridden(theirs, {"more": {"b": 2}})


def _trainer(theirs: config_definitions.TrainerConfig) -> Any:
    return mirror(theirs, TrainerConfig, optimizer_config=mirror(theirs.optimizer_config))


@pytest.mark.parametrize(
    "given",
    [
        {"fuse_steps": 4},
        {"early_stopping": {"metric": "loss"}},
        {"best_checkpoints": {"mine": {"metric": "loss"}}},
    ],
    ids=str,
)
def test_an_option_of_trainer_kit_survives_a_round_trip(given: dict[str, Any]) -> None:
    before = _trainer(config_definitions.TrainerConfig()).replace(**given)
    back = build_original(before)
    assert type(back) is config_definitions.TrainerConfig
    after = _trainer(back)
    assert (
        after.as_dict()
        == before.as_dict()
        != _trainer(config_definitions.TrainerConfig()).as_dict()
    )
    (name,) = given
    assert type(getattr(after, name)) is type(getattr(before, name))
    assert not any(
        hasattr(back, other) for other in {"fuse_steps", "early_stopping"} - {name}
    )  # only what changed


@pytest.mark.parametrize("inner", [False, True])
def test_the_original_of_a_locked_object_can_be_changed(inner: bool) -> None:
    theirs = Whole(count=70 + inner)  # of which there is no mirror yet
    for part in (theirs.heads[0], theirs.part.neck, theirs.data) if inner else ():
        part.lock()
    theirs.lock()
    given = {
        "count": 4,
        "heads": [{"size": 7}, {}],
        "part": {"neck": {"depth": 5}},
        "data": {"cache": True},
    }
    back = build_original(_overridden(theirs, given))
    assert (back.count, back.heads[0].size, back.part.neck.depth, back.data.cache) == (
        4,
        7,
        5,
        True,
    )
    back.data.cache = back.on = False
    with pytest.raises(ValueError, match="locked"):
        theirs.on = True


def test_a_class_that_holds_itself_ends_where_there_is_nothing() -> None:
    back = build_original(
        _overridden(Tree(inside=Tree(size=2)), {"inside": {"size": 3, "inside": {"size": 4}}})
    )
    assert back.as_dict() == {
        "size": 1,
        "inside": {"size": 3, "inside": {"size": 4, "inside": None}},
    }
    assert type(back.inside.inside) is Tree
    assert (
        build_original(_overridden(Tree(), {"inside": {"inside": {"size": 4}}})).inside.inside.size
        == 4
    )


def test_two_mirrors_share_nothing_that_can_be_changed() -> None:
    first, second = mirror(Whole()), mirror(Whole())
    assert first == second and first is not second
    first.heads.append("mine")
    assert (
        mirror(Whole()).as_dict()["heads"]
        == second.as_dict()["heads"]
        == Whole().as_dict()["heads"]
    )
    back = build_original(second)
    back.heads[0].size = 100
    back.data.input_path = "mine"
    assert build_original(mirror(Whole())) == build_original(second) == Whole()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"anything": 1}, {"anything": True}),
        ({"anything": 1}, {"anything": 1.0}),
        ({"several": (1,)}, {"several": [1]}),
    ],
    ids=str,
)
def test_objects_with_other_value_types_have_own_mirrors(
    one: dict[str, Any], other: dict[str, Any]
) -> None:
    for given in (one, other, one):
        theirs = Whole()
        theirs.override(given)
        ((name, value),) = given.items()
        found = getattr(build_original(mirror(theirs)), name)
        assert found == value and type(found) is type(value)


def test_two_classes_of_the_same_name_have_own_mirrors() -> None:
    made = []
    for default in (1, 2):

        @dataclasses.dataclass
        class Same(base_config.Config):
            size: int = default

        made.append(mirror(Same()))
    assert [one.size for one in made] == [1, 2]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_mirror_is_copied(copied: Any) -> None:
    mirrored = _overridden(Whole(), {"count": 9, "absent": {"size": 4}, "heads": [{"name": "c"}]})
    again = copied(mirrored)
    assert again == mirrored and again is not mirrored
    assert build_original(again) == build_original(mirrored)
    assert apply_layers(again, [ConfigLayer({"count": 11})]).config.count == 11


def test_a_class_goes_with_its_last_object() -> None:
    mirrored = mirror(Head(name="only here"))
    seen = weakref.ref(type(mirrored))
    gc.collect()
    assert seen() is not None
    del mirrored
    gc.collect()
    assert seen() is None


def test_an_option_of_ours_on_their_object_is_checked() -> None:
    theirs = config_definitions.TrainerConfig()
    theirs.override({"continuous_eval": {"policy": "newest"}}, is_strict=False)
    with pytest.raises(
        ConfigError, match=r"continuous_eval.policy .*: 'newest' is not one of all, latest"
    ):
        _trainer(theirs)


def test_a_value_that_their_class_refuses_is_told() -> None:
    @dataclasses.dataclass
    class Strict(base_config.Config):
        size: int = 1

        def override(self, override_params: Any, is_strict: bool = True) -> None:
            if override_params.get("size", 1) > 2:
                raise ValueError("too large")
            super().override(override_params, is_strict)

    with pytest.raises(ConfigError, match="too large"):
        build_original(_overridden(Strict(), {"size": 3}))
