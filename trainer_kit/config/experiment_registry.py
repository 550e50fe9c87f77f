"""Experiments by name, and the task class that belongs to each task config.

A factory returns a fresh ExperimentConfig at each call. A task class is bound to exactly one config
class; a subclass of that config needs a binding of its own. Neither needs TensorFlow: a config
module names its task as "module:Class", and the module is imported when the task is built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar, overload
from weakref import WeakKeyDictionary

from trainer_kit.config.imported_names import import_object
from trainer_kit.config.registry import Registry
from trainer_kit.config.schema.configclass import Config
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.schema.section import FieldError, is_configclass
from trainer_kit.errors import ConfigError, UsageError

Factory = Callable[..., ExperimentConfig]
AnyFactory = TypeVar("AnyFactory", bound=Factory)
AnyClass = TypeVar("AnyClass", bound=type)

experiments: Registry[Factory] = Registry("experiment")
# Weak keys: a config class may be made for one experiment and be freed with it.
_task_classes: MutableMapping[type[Config], Callable[..., Any] | str] = WeakKeyDictionary()
_trainer_classes: MutableMapping[type[Config], type | str] = WeakKeyDictionary()


def register_experiment(name: str) -> Callable[[AnyFactory], AnyFactory]:
    """Returns a decorator that registers a config factory: a function that returns a new ExperimentConfig.

    The factory's own arguments need defaults; gin can bind them.

    Raises:
      UsageError: when the name is taken.
    """
    return experiments.register(name)  # type: ignore[return-value]


def get_experiment(name: str, **arguments: Any) -> ExperimentConfig:
    """Returns a fresh config of the experiment `name`; `arguments` go to its factory.

    Raises:
      UsageError: when there is no such experiment, or its factory does not return an
        ExperimentConfig whose sections are made by `@configclass`.
      ConfigError: when the factory passes unknown keys or wrong values to a config class.
    """
    factory = experiments.lookup(name)
    try:
        config = factory(**arguments)
    except FieldError as error:
        origin = f"{factory.__module__}.{getattr(factory, '__qualname__', name)}"
        raise ConfigError(
            dataclasses.replace(mistake, origin=origin) for mistake in error.mistakes
        ) from error
    if not isinstance(config, ExperimentConfig):
        raise UsageError(
            f"the factory of experiment {name!r} returned {config!r}; it has to return an"
            " ExperimentConfig"
        )
    _check_decorated(name, config)
    return config


@overload
def register_task(
    config_class: type[Config], task: Callable[..., Any] | str, *, trainer: type | str | None = None
) -> None: ...
@overload
def register_task(
    config_class: type[Config], *, trainer: type | str | None = None
) -> Callable[[AnyClass], AnyClass]: ...
def register_task(
    config_class: type[Config],
    task: Callable[..., Any] | str | None = None,
    *,
    trainer: type | str | None = None,
) -> Any:
    """Binds a task class to its config class; as a decorator of the task class, or with "module:Class".

    Args:
      config_class: The config class of the task's section.
      task: The class of the task, "module:Class", or a function that takes the arguments of the
        class and returns a task; None means the decorated class.
      trainer: The subclass of Trainer that trains the task, or "module:Class"; None means Trainer
        itself.

    Raises:
      UsageError: when `config_class` is not made by `@configclass` or is bound to another task
        already.
    """
    if not is_configclass(config_class):
        raise UsageError(
            f"{config_class.__qualname__} has to be decorated with @trainer_kit.configclass"
        )

    def bind(task_class: Any) -> Any:
        known = _task_classes.setdefault(config_class, task_class)
        if known is not task_class and known != task_class:
            raise UsageError(
                f"{config_class.__qualname__} is bound to the task {known} already; "
                f"give {task_class} a config class of its own"
            )
        if trainer is not None:
            _trainer_classes[config_class] = trainer
        return task_class

    if task is None:
        return bind
    bind(task)
    return None


def lookup_task_class(config: Config) -> Any:
    """Returns the task class bound to the class of `config`; imports its module if it is named as "module:Class".

    Raises:
      UsageError: when no task is bound to exactly this class, or the task lacks a required method.
    """
    bound = _task_classes.get(type(config))
    if bound is None:
        raise UsageError(
            f"no task is registered for {type(config).__qualname__}; decorate the task class with "
            f"@trainer_kit.register_task({type(config).__qualname__})"
        )
    found = _import_if_named(bound)
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise UsageError(
            f"the task {found.__qualname__} lacks {' and '.join(missing)}; every task has to define"
            " them"
        )
    return found


def find_trainer_class(config: Config) -> Any:
    """Returns the subclass of Trainer bound to the class of `config`, a task's section; None if there is none.

    Imports its module if it is named as "module:Class".
    """
    return _import_if_named(_trainer_classes.get(type(config)))


def _import_if_named(target: Any) -> Any:
    return (
        import_object("register_task", target, callable, "class")
        if isinstance(target, str)
        else target
    )


def _check_decorated(name: str, section: Config, path: str = "") -> None:
    if not is_configclass(type(section)):
        where = f"its section {path} " if path else ""
        raise UsageError(
            f"experiment {name!r}: {where}is a {type(section).__qualname__}, which has to be"
            " decorated with @trainer_kit.configclass"
        )
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        value = getattr(section, field.name)
        if isinstance(value, Config):
            _check_decorated(name, value, f"{path}.{field.name}" if path else field.name)
