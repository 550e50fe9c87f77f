"""Makes callbacks from their names in a config.

For example `trainer.callbacks: [{name: samples, args: {every: 100}}]`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable as Function
from collections.abc import Iterable, Sequence
from typing import TypeGuard, TypeVar

from trainer_kit.callbacks.callback import Callback
from trainer_kit.callbacks.ema_checkpoints import EMACheckpoints
from trainer_kit.callbacks.reduce_on_plateau import ReduceOnPlateau
from trainer_kit.callbacks.sample_pictures import SamplePictures
from trainer_kit.callbacks.set_from_file import SetFromFile
from trainer_kit.callbacks.set_value import SetAtSteps, SetByFunction
from trainer_kit.callbacks.trackers import MLflowTracker, TrackioTracker, WandbTracker
from trainer_kit.callbacks.webhook import Webhook
from trainer_kit.config.imported_names import import_object
from trainer_kit.config.registry import Registry
from trainer_kit.config.schema.experiment import CallbackConfig
from trainer_kit.errors import UsageError, suggest_names

AnyCallback = TypeVar("AnyCallback", bound=type[Callback])

_callbacks: Registry[type[Callback]] = Registry("callback")
for _shipped in (
    SamplePictures,
    EMACheckpoints,
    SetAtSteps,
    SetByFunction,
    SetFromFile,
    ReduceOnPlateau,
    Webhook,
    WandbTracker,
    MLflowTracker,
    TrackioTracker,
):
    _callbacks.register(_shipped.name)(_shipped)


def register_callback(name: str) -> Function[[AnyCallback], AnyCallback]:
    """Returns a decorator that registers a Callback class under `name`, for `trainer.callbacks`.

    Raises:
      UsageError: when the name is taken, or the class is not a subclass of Callback.
    """

    def register(callback: AnyCallback) -> AnyCallback:
        if not _is_callback_class(callback):
            raise UsageError(
                f"{callback!r:.80} is not a subclass of trainer_kit.Callback; inherit from that"
                " class"
            )
        _callbacks.register(name)(callback)
        return callback

    return register


def get_registered_callbacks() -> dict[str, type[Callback]]:
    """Returns the registered classes by name."""
    return {name: _callbacks.lookup(name) for name in _callbacks.names()}


def create_callbacks(sections: Iterable[CallbackConfig]) -> list[Callback]:
    """Returns new callbacks for the entries of trainer.callbacks, in their order.

    Raises:
      UsageError: when no callback has such a name, or its class does not accept the arguments.
    """
    # A Model Garden program may have a field of this name for its own use.
    if not isinstance(sections, Sequence):
        return []
    return [
        _create_callback(f"trainer.callbacks[{place}]", section)
        for place, section in enumerate(sections)
    ]


def check_callbacks(callbacks: object) -> list[Callback]:
    """Returns the caller's callbacks as a list.

    Raises:
      UsageError: when the argument is not a list of Callback objects.
    """
    if callbacks is None:
        return []
    if isinstance(callbacks, (str, Callback)) or not isinstance(callbacks, Sequence):
        kind = type(callbacks).__name__
        raise UsageError(
            f"callbacks: {kind} is not a list; give a list of trainer_kit.Callback objects"
        )

    for callback in callbacks:
        if not isinstance(callback, Callback):
            advice = describe_alternative(callback)
            raise UsageError(
                f"callbacks: {callback!r:.80} is not a trainer_kit.Callback object{advice}"
            )
    return list(callbacks)


def describe_alternative(value: object) -> str:
    """Returns advice for an object that is not a Callback."""
    # Callbacks of Keras have this method.
    if hasattr(value, "on_epoch_end"):
        return (
            ": Keras callbacks are called for compiled models only: give it to"
            " trainer_kit.compat.keras.fit or register_keras_experiment; for other tasks write a"
            " trainer_kit.Callback"
        )
    if isinstance(value, type):
        return f"; give an object of this class: {value.__name__}()"
    if isinstance(value, (str, dict)):
        return "; to use a callback by name, set trainer.callbacks in the config"
    if callable(value):
        return "; pass a function of the logs in train_actions or eval_actions"
    return ""


def _create_callback(path: str, section: CallbackConfig) -> Callback:
    # A name with a colon is that of a class, and other names are registered.
    callback_class: type[Callback]
    if ":" in section.name:
        callback_class = import_object(
            f"{path}.name", section.name, _is_callback_class, "subclass of trainer_kit.Callback"
        )
    else:
        try:
            callback_class = _callbacks.lookup(section.name)
        except UsageError as error:
            advice = "import its module with --import_module, or give its class as module:Class"
            raise UsageError(f"{path}.name: {error}; {advice}") from None

    signature = inspect.signature(callback_class)
    try:
        signature.bind(**section.args)
    except TypeError as error:
        parameters = list(signature.parameters)
        unknown = [name for name in section.args if name not in parameters]
        if unknown:
            problem = f"there is no argument {unknown[0]!r}"
            advice = suggest_names(unknown[0], parameters)
        else:
            problem = str(error)
            advice = f"it takes {', '.join(parameters) or 'no arguments'}"
        raise UsageError(f"{path}.args: {section.name}: {problem}; {advice}") from None
    return callback_class(**section.args)


def _is_callback_class(value: object) -> TypeGuard[type[Callback]]:
    return isinstance(value, type) and issubclass(value, Callback)
