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


def _override_mirror(theirs: Any, *layers: dict[str, Any]) -> Any:
    return apply_layers(mirror(theirs), [ConfigLayer(values) for values in layers]).config


def _changed_items(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in after.items() if name not in before or before[name] != value
    }


def test_an_untouched_config_comes_back_as_it_was() -> None:
    theirs = Whole()
    theirs.override({"more": {"a": 1}, "extra": 5}, is_strict=False)
    back = build_original(mirror(theirs))

    assert type(back) is Whole
    assert back is not theirs
    assert back == theirs
    assert back.as_dict() == theirs.as_dict()
    assert isinstance(back.several, tuple)
    assert isinstance(back.rate, int)
    assert back.rate == 1
    assert isinstance(back.heads[1], Head)
    assert isinstance(back.part.neck, Neck)


@pytest.mark.parametrize(
    ("override", "changed"),
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
    override: dict[str, Any], changed: dict[str, Any]
) -> None:
    back = build_original(_override_mirror(Whole(), override))

    theirs = Whole()
    theirs.override(override)
    assert back.as_dict() == theirs.as_dict()
    assert _changed_items(Whole().as_dict(), back.as_dict()) == changed
    for name, value in changed.items():
        # A rate of 2 is 2.0.
        kind = float if isinstance(value, float) else type(getattr(theirs, name))
        assert type(getattr(back, name)) is kind


@pytest.mark.parametrize(
    ("override", "problem"),
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
def test_a_value_that_their_class_would_take_is_refused_by_path(
    override: dict[str, Any], problem: str
) -> None:
    theirs = Whole(data=config_definitions.DataConfig(input_path={"train": "x"}))
    with pytest.raises(ConfigError, match=problem):
        _override_mirror(theirs, override)


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
    routines = (Routine(name="a", head=LargeHead()), Routine(name="b", part=Neck()))
    theirs = Routines(routines=routines)

    back = build_original(mirror(theirs))
    assert back == theirs
    assert isinstance(back.routines[0].head, LargeHead)
    assert isinstance(back.routines[1].part, Neck)

    changed = build_original(_override_mirror(theirs, {"routines": [{"head": {"depth": 7}}, {}]}))
    assert isinstance(changed.routines[0].head, LargeHead)
    assert changed.routines[0].head.depth == 7
    assert changed.routines[0].name == "a"
    assert changed.routines[1] == theirs.routines[1]


def test_changed_values_alone_are_put_on_their_object() -> None:
    overrides: list[Any] = []

    @dataclasses.dataclass
    class Noting(Head):
        def override(self, override_params: Any, is_strict: bool = True) -> None:
            overrides.append(override_params)
            super().override(override_params, is_strict)

    mirrored = _override_mirror(Noting(), {"name": "n", "size": 1})
    overrides.clear()
    assert build_original(mirrored).name == "n"
    assert overrides == [{"name": "n"}]


def test_keys_that_they_do_not_annotate_can_be_written() -> None:
    theirs = Whole()
    theirs.override({"more": {"a": 1}, "extra": 5}, is_strict=False)
    back = build_original(_override_mirror(theirs, {"extra": "six", "more": {"a": 2}}))

    assert (back.extra, back.more.a) == ("six", 2)
    with pytest.raises(ConfigError, match=r"more.b: there is no such key"):
        _override_mirror(theirs, {"more": {"b": 2}})


def _mirror_trainer(theirs: config_definitions.TrainerConfig) -> Any:
    return mirror(theirs, TrainerConfig, optimizer_config=mirror(theirs.optimizer_config))


@pytest.mark.parametrize(
    "option",
    [
        {"fuse_steps": 4},
        {"early_stopping": {"metric": "loss"}},
        {"best_checkpoints": {"mine": {"metric": "loss"}}},
    ],
    ids=str,
)
def test_an_option_of_trainer_kit_survives_a_round_trip(option: dict[str, Any]) -> None:
    defaults = _mirror_trainer(config_definitions.TrainerConfig())
    before = defaults.replace(**option)

    back = build_original(before)
    after = _mirror_trainer(back)

    assert type(back) is config_definitions.TrainerConfig
    assert after.as_dict() == before.as_dict() != defaults.as_dict()
    (name,) = option
    assert type(getattr(after, name)) is type(getattr(before, name))
    # Their object has only the option that changed.
    assert not any(hasattr(back, other) for other in {"fuse_steps", "early_stopping"} - {name})


@pytest.mark.parametrize("inner", [False, True])
def test_the_original_of_a_locked_object_can_be_changed(inner: bool) -> None:
    theirs = Whole(count=70 + inner)  # of which there is no mirror yet
    if inner:
        for part in (theirs.heads[0], theirs.part.neck, theirs.data):
            part.lock()
    theirs.lock()

    override = {
        "count": 4,
        "heads": [{"size": 7}, {}],
        "part": {"neck": {"depth": 5}},
        "data": {"cache": True},
    }
    back = build_original(_override_mirror(theirs, override))

    assert back.count == 4
    assert back.heads[0].size == 7
    assert back.part.neck.depth == 5
    assert back.data.cache is True
    back.data.cache = False
    back.on = False
    with pytest.raises(ValueError, match="locked"):
        theirs.on = True


def test_a_class_that_holds_itself_ends_where_there_is_nothing() -> None:
    tree = Tree(inside=Tree(size=2))
    back = build_original(_override_mirror(tree, {"inside": {"size": 3, "inside": {"size": 4}}}))
    innermost = {"size": 4, "inside": None}
    assert back.as_dict() == {"size": 1, "inside": {"size": 3, "inside": innermost}}
    assert type(back.inside.inside) is Tree

    back = build_original(_override_mirror(Tree(), {"inside": {"inside": {"size": 4}}}))
    assert back.inside.inside.size == 4


def test_two_mirrors_share_nothing_that_can_be_changed() -> None:
    first = mirror(Whole())
    second = mirror(Whole())
    assert first == second
    assert first is not second

    first.heads.append("mine")
    heads = Whole().as_dict()["heads"]
    assert mirror(Whole()).as_dict()["heads"] == second.as_dict()["heads"] == heads

    back = build_original(second)
    back.heads[0].size = 100
    back.data.input_path = "mine"
    assert build_original(mirror(Whole())) == build_original(second) == Whole()


@pytest.mark.parametrize(
    ("override", "other"),
    [
        ({"anything": 1}, {"anything": True}),
        ({"anything": 1}, {"anything": 1.0}),
        ({"several": (1,)}, {"several": [1]}),
    ],
    ids=str,
)
def test_objects_with_other_value_types_have_own_mirrors(
    override: dict[str, Any], other: dict[str, Any]
) -> None:
    for values in (override, other, override):
        theirs = Whole()
        theirs.override(values)
        back = build_original(mirror(theirs))
        ((name, value),) = values.items()
        assert getattr(back, name) == value
        assert type(getattr(back, name)) is type(value)


def test_two_classes_of_the_same_name_have_own_mirrors() -> None:
    mirrors = []
    for default in (1, 2):

        @dataclasses.dataclass
        class Same(base_config.Config):
            size: int = default

        mirrors.append(mirror(Same()))
    assert [mirrored.size for mirrored in mirrors] == [1, 2]


@pytest.mark.parametrize("copy_mirror", [copy.copy, copy.deepcopy])
def test_a_mirror_is_copied(copy_mirror: Any) -> None:
    mirrored = _override_mirror(
        Whole(), {"count": 9, "absent": {"size": 4}, "heads": [{"name": "c"}]}
    )
    again = copy_mirror(mirrored)

    assert again == mirrored
    assert again is not mirrored
    assert build_original(again) == build_original(mirrored)
    assert apply_layers(again, [ConfigLayer({"count": 11})]).config.count == 11


def test_a_class_goes_with_its_last_object() -> None:
    mirrored = mirror(Head(name="only here"))
    reference = weakref.ref(type(mirrored))
    gc.collect()
    assert reference() is not None

    del mirrored
    gc.collect()
    assert reference() is None


def test_an_option_of_ours_on_their_object_is_checked() -> None:
    theirs = config_definitions.TrainerConfig()
    theirs.override({"continuous_eval": {"policy": "newest"}}, is_strict=False)
    message = r"continuous_eval.policy .*: 'newest' is not one of all, latest"

    with pytest.raises(ConfigError, match=message):
        _mirror_trainer(theirs)


def test_a_value_that_their_class_refuses_is_told() -> None:
    @dataclasses.dataclass
    class Strict(base_config.Config):
        size: int = 1

        def override(self, override_params: Any, is_strict: bool = True) -> None:
            if override_params.get("size", 1) > 2:
                raise ValueError("too large")
            super().override(override_params, is_strict)

    with pytest.raises(ConfigError, match="too large"):
        build_original(_override_mirror(Strict(), {"size": 3}))
