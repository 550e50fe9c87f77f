"""What `check` tells of what cannot be built: one line that names the value, the exit code, and bugs as they are."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from official.core import task_factory
from official.vision.configs.image_classification import ImageClassificationTask

from tests.process.compat.model_garden.lazy import ONE_BLOCK, TWO_BLOCKS
from trainer_kit.cli.main import main
from trainer_kit.compat.model_garden.config.build_errors import part_of, sections_of, told
from trainer_kit.config.schema.runtime import RuntimeConfig
from trainer_kit.distribution.precision import precision
from trainer_kit.errors import ConfigError, DataError, UsageError

OPTIMIZER = "trainer.optimizer_config"
LAZY_MODULE = "tests.process.compat.model_garden.lazy"
RESNET, LAZY, RATES = "resnet_imagenet", "tests_lazy", f"{OPTIMIZER}.learning_rate"
SMALL = f"resnet_imagenet task.model.backbone.resnet.model_id={ONE_BLOCK}"  # of fewer layers, which are made sooner
SMALL_BERT = ",".join(
    f"task.model.encoder.bert.{size}"
    for size in ("num_layers=1", "hidden_size=8", "vocab_size=9", "num_attention_heads=2", "intermediate_size=8")
)
BERT = (
    f"{RATES}.polynomial.initial_learning_rate=0.1,{RATES}.polynomial.decay_steps=9,"
    f"{OPTIMIZER}.warmup.polynomial.warmup_steps=3,{SMALL_BERT}"
)
DETECTOR = "retinanet_mobile_coco " + ",".join(  # smaller too
    f"task.model.{size}"
    for size in (
        "input_size=[64,64,3]", "backbone.type=resnet", f"backbone.resnet.model_id={TWO_BLOCKS}", "decoder.type=fpn",
        "head.num_convs=1", "min_level=2", "max_level=3",
    )
)  # fmt: skip

CASES = [
    ("mock", "", 2, f"{OPTIMIZER}.optimizer.type: has no value, and is needed; choose one of: sgd, "),
    ("bert/squad", SMALL_BERT, 2, f"{OPTIMIZER}.warmup.polynomial.warmup_steps: has no value"),
    ("bert/tagging", "", 2, "task.class_names: has no value (None), and is needed; give the names of the classes"),
    ("bert/sentence_prediction", BERT, 2, "task.model.num_classes: has no value (0), and is needed"),
    ("wmt_transformer/large", "", 2, "task.sentencepiece_model_path: has no value (None), and is needed"),
    ("wmt_transformer/large", "task.sentencepiece_model_path=no.model", 5, "there is no 'no.model'"),
    ("image_classification", "", 2, "task.model.input_size: has no value ([]), and is needed; give height, width"),
    (
        SMALL,
        "",
        5,
        "task.train_data.input_path: no file matches 'imagenet-2012-tfrecord/train*'; set it to where\n"
        "task.validation_data.input_path: no file matches 'imagenet-2012-tfrecord/valid*'",
    ),
    (SMALL, "task.train_data.input_path=''", 2, "task.train_data: names no data; give input_path"),
    (
        SMALL,
        "task.train_data.input_path='',task.train_data.tfds_name=a,task.train_data.tfds_split=b",
        2,
        "TFDS",
    ),
    (
        SMALL,
        "task.train_data.file_type=sstable,task.train_data.input_path=data.tfrecord",
        2,
        "task.train_data: Model Garden refuses its values: ",
    ),
    (
        RESNET,
        "task.model.backbone.resnet.model_id=51",
        2,
        "task.model.backbone.resnet.model_id: Model Garden does not know",
    ),
    (
        RESNET,
        "task.model.norm_activation.activation=reluu",
        2,
        "task.model: Model Garden refuses its values: Unknown act",
    ),
    (RESNET, "task.model.backbone.type=null", 2, "task.model.backbone.type: has no value, and is needed; choose one"),
    (
        SMALL,
        f"{RATES}.stepwise.boundaries=[1,2]",
        2,
        f"{OPTIMIZER}: Model Garden refuses its values: The length of",
    ),
    (DETECTOR, "", 5, "task.annotation_file: there is no 'coco/inst"),
    (LAZY, "task.train_data.input_path=no/*.tfrecord", 5, "task.train_data.input_path: no file matches 'no/*.tfr"),
    (LAZY, "task.train_data.tfds_name=1", 2, "task.train_data.tfds_name (--params_override): 1 is not text"),
]


BUGS = {
    "model": "ValueError: a bug of the user's",
    "data": "TypeError: object",
    "map": "NameError: name 'misspelt' is not defined",
    "slices": "ValueError: Dimensions 3 and 4 are not compatible",
}
FILE = "data.tfrecord"


@dataclass(frozen=True)
class Told:
    """The exit code of a check, and what it has written."""

    code: int
    text: str


def _arguments(name: str, override: str = "") -> list[str]:
    name, _, first = name.partition(" ")
    override = ",".join(filter(None, (first, override)))
    return ["check", f"tfm/{name}", f"--params_override={override}", f"--import_module={LAZY_MODULE}"]


Check = Callable[..., Told]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Check]:
    """Runs the command here, in a folder with a file of data: a process of its own would import for longer."""
    (tmp_path / FILE).touch()
    monkeypatch.chdir(tmp_path)

    def run(name: str, override: str = "") -> Told:
        with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.redirect_stderr(text):
            code = main(_arguments(name, override))
        return Told(code, text.getvalue())

    with precision(RuntimeConfig()):  # the precision of this process is afterwards what it was
        yield run


@pytest.mark.parametrize(("name", "override", "code", "message"), CASES, ids=[f"{n} {o}"[:90] for n, o, _, _ in CASES])
def test_what_is_missing_is_told_by_its_path(check: Check, name: str, override: str, code: int, message: str) -> None:
    ended = check(name, override)
    assert ended.code == code, ended.text
    assert "Traceback" not in ended.text
    error = ended.text.partition("\nerror: ")[2] or ended.text.removeprefix("error: ")
    for part in message.split("\n"):
        assert [line for line in error.splitlines() if part in line], error
    assert "In call to configurable" not in error


def test_a_model_that_its_first_call_builds_is_checked(check: Check) -> None:
    ended = check(LAZY)
    assert ended.code == 0, ended.text
    assert "tfm/tests_lazy is ready to run" in ended.text


@pytest.mark.parametrize("bug", BUGS)
def test_a_users_bug_stays_a_traceback_without_data(check: Check, bug: str) -> None:
    ended = check(LAZY, f"task.bug={bug}")
    assert ended.code == 1, ended.text
    assert "the whole traceback: " in ended.text
    assert BUGS[bug] in ended.text


def test_errors_that_explain_themselves_pass() -> None:
    with pytest.raises(DataError, match="mine"), told("task.model", ImageClassificationTask()):
        raise DataError("mine")


def test_a_missing_package_is_told() -> None:
    message = "task.train_data: a package is missing: No module named 'no_such_package'"
    with pytest.raises(UsageError, match=message), told("task.train_data", ImageClassificationTask()):
        importlib.import_module("no_such_package")


@pytest.mark.parametrize(
    ("package", "raised", "message"),
    [
        (
            "tensorflow_datasets",
            "AssertionError('Dataset imagenet2012: could not find data')",
            "task.train_data: TensorFlow Datasets cannot provide it: Dataset imagenet2012: could not find data; prep",
        ),
        (
            "tensorflow_hub",
            "OSError('https://tfhub.dev/x does not appear to be a valid module')",
            "task.train_data: TensorFlow Hub cannot provide it: https://tfhub.dev/x does not appear to be a valid",
        ),
    ],
)
def test_data_that_cannot_be_downloaded_is_a_data_error(
    package: str, raised: str, message: str, tmp_path: Path
) -> None:
    stub = tmp_path / package / "load.py"
    stub.parent.mkdir()
    stub.write_text(f"def load():\n    raise {raised}\n")
    spec = importlib.util.spec_from_file_location("stub", stub)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = ImageClassificationTask()
    config.train_data.tfds_name = "imagenet2012"
    with pytest.raises(DataError) as error, told("task.train_data", config):
        module.load()
    assert str(error.value).startswith(message)


def test_of_several_tasks_the_one_that_the_error_quotes_is_named() -> None:
    tasks = [SimpleNamespace(task_config=ImageClassificationTask()) for _ in range(3)]
    for number, task in enumerate(tasks[:2]):
        task.task_config.override({"init_checkpoint": f"no/{number}", "model": {"input_size": [8, 8, 3]}})
        task.task_config.model.num_classes = 2
    with pytest.raises(DataError) as error, told("task", sections_of(tasks)):
        raise FileNotFoundError("cannot open no/1")
    assert str(error.value).startswith("task.task_routines.1.task_config.init_checkpoint: there is no 'no/1'")


def test_a_value_without_which_no_model_is_made_is_told() -> None:
    config = ImageClassificationTask()
    with pytest.raises(ConfigError) as raised, told("task.model", config):
        task_factory.get_task(config).build_model()
    assert [mistake.path for mistake in raised.value.mistakes] == ["task.model.input_size", "task.model.num_classes"]


def test_a_section_of_data_is_found_by_what_it_is() -> None:
    config = ImageClassificationTask()
    assert part_of(config, config.validation_data) == "task.validation_data"
    assert part_of(config, None) == "task"
