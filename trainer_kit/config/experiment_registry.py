"""Experiments by name, and the task class that belongs to each task config.

A factory returns a new ExperimentConfig at each call. A task class is bound to exactly one config
class. A subclass of that config class needs a separate binding. Neither needs TensorFlow: a config
module names its task as "module:Class", and the module is imported when the task is built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar, overload
from weakref import WeakKeyDictionary

from trainer_kit.config.imported_names import import_object
from trainer_kit.config.registry import Registry, is_redefinition
from trainer_kit.config.schema.configclass import Config
from trainer_kit.config.schema.experiment import ExperimentConfig
from trainer_kit.config.schema.section import FieldError, is_configclass
from trainer_kit.errors import ConfigError, UsageError

Factory = Callable[..., ExperimentConfig]
AnyFactory = TypeVar("AnyFactory", bound=Factory)
AnyClass = TypeVar("AnyClass", bound=type)
BoundTask = TypeVar("BoundTask", bound=Callable[..., object] | str)

experiments: Registry[Factory] = Registry("experiment")

# The keys are weak: a config class may be made for one experiment and be freed with it.
_task_classes: MutableMapping[type[Config], Callable[..., object] | str] = WeakKeyDictionary()
_trainer_classes: MutableMapping[type[Config], type | str] = WeakKeyDictionary()


def register_experiment(name: str) -> Callable[[AnyFactory], AnyFactory]:
    """Returns a decorator that registers a config factory.

    A factory is a function that returns a new ExperimentConfig. Its own arguments need defaults,
    and gin can bind them.

    Raises:
      UsageError: When the name is taken.
    """
    return experiments.register(name)  # type: ignore[return-value]


def get_experiment(name: str, **arguments: Any) -> ExperimentConfig:
    """Returns a new config of an experiment.

    Args:
      name: The name of the experiment.
      **arguments: The arguments of its factory.

    Raises:
      UsageError: When there is no such experiment, or its factory does not return an
        ExperimentConfig whose sections are made by `@configclass`.
      ConfigError: When the factory passes unknown keys or wrong values to a config class.
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
    config_class: type[Config],
    task: Callable[..., object] | str,
    *,
    trainer: type | str | None = None,
) -> None: ...
@overload
def register_task(
    config_class: type[Config], *, trainer: type | str | None = None
) -> Callable[[AnyClass], AnyClass]: ...
def register_task(
    config_class: type[Config],
    task: Callable[..., object] | str | None = None,
    *,
    trainer: type | str | None = None,
) -> Any:
    """Binds a task class to its config class.

    Without `task`, it returns a decorator of the task class.

    Args:
      config_class: The config class of the task's section.
      task: The class of the task, "module:Class", or a function that takes the arguments of the
        class and returns a task. None means the decorated class.
      trainer: The subclass of Trainer that trains the task, or "module:Class". None means Trainer
        itself.

    Raises:
      UsageError: When `config_class` is not made by `@configclass`, or is already bound to another
        task.
    """
    if not is_configclass(config_class):
        raise UsageError(
            f"{config_class.__qualname__} has to be decorated with @trainer_kit.configclass"
        )

    def bind(task_class: BoundTask) -> BoundTask:
        bound_task = _task_classes.setdefault(config_class, task_class)
        if is_redefinition(bound_task, task_class):
            _task_classes[config_class] = task_class
        elif bound_task is not task_class and bound_task != task_class:
            raise UsageError(
                f"{config_class.__qualname__} is bound to the task {bound_task} already; "
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
    """Returns the task class that is bound to the class of `config`.

    Its module is imported if the class is named as "module:Class".

    Raises:
      UsageError: When no task is bound to exactly this class, or the task lacks a required method.
    """
    bound_task = _task_classes.get(type(config))
    if bound_task is None:
        raise UsageError(
            f"no task is registered for {type(config).__qualname__}; decorate the task class with "
            f"@trainer_kit.register_task({type(config).__qualname__})"
        )

    task_class = _import_if_named(bound_task)
    if missing_methods := sorted(getattr(task_class, "__abstractmethods__", ())):
        raise UsageError(
            f"the task {task_class.__qualname__} lacks {' and '.join(missing_methods)};"
            " every task has to define them"
        )
    return task_class


def find_trainer_class(config: Config) -> Any:
    """Returns the subclass of Trainer that is bound to the class of a task's section, or None.

    Its module is imported if the class is named as "module:Class".
    """
    return _import_if_named(_trainer_classes.get(type(config)))


def _import_if_named(target: Callable[..., object] | str | None) -> Any:
    if isinstance(target, str):
        return import_object("register_task", target, callable, "class")
    return target


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
            field_path = f"{path}.{field.name}" if path else field.name
            _check_decorated(name, value, field_path)
