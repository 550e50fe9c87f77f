"""Random valid configs survive YAML bit by bit; random corruptions of them are all reported, and none accepted."""

from __future__ import annotations

import contextlib
import copy
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from trainer_kit.config.fields import (
    checker,
    fields_of,
    has_sections,
    leaves,
    listed_class,
    named_class,
    section_class,
    sections,
)
from trainer_kit.config.merge import apply
from trainer_kit.config.schema.base import Config, OneOfConfig
from trainer_kit.config.schema.evaluation import BestCheckpointConfig
from trainer_kit.config.schema.experiment import CallbackConfig, ExperimentConfig
from trainer_kit.config.schema.gradient_processors import (
    ClipGlobalNormConfig,
    ClipNormConfig,
    ClipValueConfig,
    GradientNoiseConfig,
    GradientProcessorConfig,
    ScaleGradientsConfig,
)
from trainer_kit.config.schema.initial_weights import InitCheckpointConfig
from trainer_kit.config.schema.metrics import KerasMetricConfig, MetricConfig, SummaryConfig
from trainer_kit.config.schema.optimization import LayerDecayConfig, NamedOptimizerConfig, RateMultiplierConfig
from trainer_kit.config.serialize import from_yaml, to_yaml
from trainer_kit.config.sources.layer import Layer
from trainer_kit.errors import ConfigError

# The default config is never changed, so one of them serves all examples, which are the same ones in every run.
calm = settings(
    deadline=None, max_examples=10, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SCHEDULES = {"exponential", "polynomial", "cosine", "power", "power_linear", "power_with_offset", "linear"}
NEEDED: dict[type, dict[str, Any]] = {  # what has no default
    BestCheckpointConfig: {"metric": "loss"},
    CallbackConfig: {"name": "samples"},
    ClipGlobalNormConfig: {"bound": 1.0},
    ClipNormConfig: {"bound": 1.0},
    ClipValueConfig: {"bound": 1.0},
    GradientNoiseConfig: {"stddev": 0.1},
    GradientProcessorConfig: {"type": "centralize"},
    InitCheckpointConfig: {"path": "ckpt-1"},
    KerasMetricConfig: {"metric": "Mean"},
    MetricConfig: {"type": "keras", "keras": {"metric": "Mean"}},
    LayerDecayConfig: {"decay": 0.5, "layers": ("block",)},
    RateMultiplierConfig: {"variables": "bias", "multiplier": 0.5},
    ScaleGradientsConfig: {"factor": 0.5},
    SummaryConfig: {"tensor": "hidden"},
}
# The sections of one optimizer are drawn in optimizer_config; all of them twice more would be too much for an example.
OPTIMIZERS = st.builds(
    NamedOptimizerConfig,
    optimizer=st.sampled_from([{"type": "sgd"}, {"type": "adam", "adam": {"beta_1": 0.5}}]),
    learning_rate=st.just({"type": "constant"}),
    variables=st.lists(st.sampled_from(["bias", "^dense/", "."]), max_size=2).map(tuple),
    period=st.integers(2, 5),
    accumulate=st.booleans(),
    loss_scale=st.none() | st.just("dynamic") | st.floats(1, 1e6),
)
TEXTS = st.text(max_size=12) | st.sampled_from(["off", "null", "1e-3", "010", "12:30", "a: b", "\x85", "\u2028"])
SET_NAMES = st.sampled_from(["dev", "test", "seen"])


def values_of(annotation: Any, metadata: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    """Values that a leaf allows, as far as its own field tells."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return values_of(args[0], (*args[1:], *metadata))
    if origin is Literal:
        return st.sampled_from(args)
    if origin is Union or type(annotation).__name__ == "UnionType":
        return st.one_of([values_of(arg, metadata) for arg in args])
    if origin is tuple:
        return st.lists(values_of(args[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(values_of(args[0]), values_of(args[1]), max_size=3)
    low, high = limits(metadata)
    if annotation is int:
        return st.integers(min_value=low, max_value=high)
    if annotation is float:
        exclude_min = excludes_its_minimum(metadata)
        return st.floats(low, high, allow_nan=False, allow_infinity=False, exclude_min=exclude_min)
    if annotation is Any:
        plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
        return plain | st.lists(plain, max_size=2)
    return {bool: st.booleans(), str: TEXTS, type(None): st.none()}[annotation]


def limits(metadata: tuple[Any, ...]) -> tuple[Any, Any]:
    flat = [inner for item in metadata for inner in (item, *getattr(item, "metadata", ()))]
    low = [limit for item in flat for key in ("ge", "gt") if (limit := getattr(item, key, None)) is not None]
    high = [limit for item in flat if (limit := getattr(item, "le", None)) is not None]
    return (low[0] if low else None), (high[0] if high else None)


def excludes_its_minimum(metadata: tuple[Any, ...]) -> bool:
    flat = [inner for item in metadata for inner in (item, *getattr(item, "metadata", ()))]
    return any(getattr(item, "gt", None) is not None for item in flat)


@st.composite
def configs(draw: st.DrawFn, default: Config, full: bool = False) -> Config:
    """A config of the class of `default`; drawn fields that break a rule are left out. `full`: no leaf keeps None."""
    values: dict[str, Any] = {}
    for name, info in fields_of(type(default)).items():
        inner, named = section_class(info.annotation), named_class(info.annotation)
        items = named or listed_class(info.annotation)
        present = getattr(default, name)
        if isinstance(present, Config):
            several = st.dictionaries(SET_NAMES, configs(present), min_size=1, max_size=2) if named else st.nothing()
            values[name] = draw(configs(present) | several)
        elif inner is not None and inner is not Config and not isinstance(default, OneOfConfig):
            values[name] = draw(st.none() | configs(inner(**NEEDED.get(inner, {}))))
        elif items is not None:
            drawn = OPTIMIZERS if items is NamedOptimizerConfig else configs(items(**NEEDED.get(items, {})))
            values[name] = draw(st.dictionaries(SET_NAMES, drawn, max_size=2) if named else st.lists(drawn, max_size=2))
        elif inner is None and (draw(st.integers(0, 3)) == 0 or (full and present is None)):
            drawn = values_of(info.annotation, tuple(info.metadata))
            values[name] = draw(drawn.filter(lambda value: value is not None) if full else drawn)
    if isinstance(default, OneOfConfig):
        kinds = [*default.branches(), *([] if isinstance(default, (GradientProcessorConfig, MetricConfig)) else [None])]
        kind = draw(st.sampled_from(kinds))
        section = default.branches()[kind] if kind else None
        branch = {kind: draw(configs(section(**NEEDED.get(section, {})), kind in SCHEDULES))} if section else {}
        return whole(default, type=kind, **branch)
    with contextlib.suppress(ConfigError):
        return default.replace(**values)
    made = default  # one of them breaks a rule: each by itself
    for name, value in values.items():
        with contextlib.suppress(ConfigError):
            made = made.replace(**{name: value})
    return made


def whole(default: Config, **values: Any) -> Config:
    try:
        return type(default)(**values)
    except ConfigError:
        return default


def corrupted(draw: st.DrawFn, path: str, config: ExperimentConfig, values: dict[str, Any]) -> str:
    """Puts one mistake into the section at `path` of nested values; returns where."""
    section: Any = config
    for part in filter(None, path.split(".")):
        section = section[part] if isinstance(section, dict) else getattr(section, part)
        values = values[part]
    shown = {name: fields_of(type(section))[name] for name in values}
    inner = [
        name for name in shown if isinstance(getattr(section, name), Config) or has_sections(getattr(section, name))
    ]
    leaves = [name for name in shown if name not in inner and name != "type"]
    name = draw(st.sampled_from(["no_such_key", *leaves]))
    inside = f"{path}.{name}".lstrip(".")
    if name == "no_such_key":
        values[name] = draw(st.none() | st.integers())
        return inside
    low, high = limits(tuple(shown[name].metadata))
    wrong = ["words", 0.5, True, 7, [[]], {"a": 0.5}, {}, None, float("nan"), *([low - 1] if low is not None else [])]
    wrong += [high + 1] if high is not None else []
    wrong = [value for value in wrong if not allowed(section, name, value)]
    values[name] = draw(st.sampled_from(wrong))
    return inside


def allowed(section: Config, name: str, value: object) -> bool:
    try:
        checker(type(section), name).validate_python(value)
    except ValidationError:
        return False
    return True


@calm
@given(st.data())
def test_random_configs_survive_yaml_and_mistakes_are_told(default: ExperimentConfig, data: st.DataObject) -> None:
    """Both are tested on one config, since to draw it takes most of the time."""
    config: Any = data.draw(configs(default))
    again = from_yaml(to_yaml(config), default)
    assert again == config
    assert leaves(again) == leaves(config)

    values = copy.deepcopy(config.as_dict())
    there = [path for path, _, is_there in sections(config) if is_there and ".blocks" not in path]
    chosen = data.draw(st.lists(st.sampled_from(there), min_size=1, max_size=4, unique=True))
    wrong = {data.draw(st.composite(corrupted)(path, config, values)) for path in sorted(chosen, key=len, reverse=True)}
    try:
        apply(default, [Layer(values)])
    except ConfigError as error:
        reported = [mistake.path for mistake in error.mistakes]
        item_of = {path for path in reported if any(path.startswith(f"{place}.") for place in wrong)}
        assert wrong <= {*reported, *(path.rpartition(".")[0] for path in item_of)}
        assert len(reported) == len(set(reported))
    else:
        raise AssertionError(f"accepted: {wrong}")
