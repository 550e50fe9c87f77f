"""The files that a real run writes are those of the table in docs/reference/run_directory.md."""

from __future__ import annotations

from pathlib import Path

from tests.engine.linear_task import SGD, linear_experiment
from tests.run_directory_page import PATHS, is_in_table, matches
from trainer_kit.run.launcher import launch


def _find_unknown_files(folder: Path) -> set[str]:
    paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return {path for path in paths if not is_in_table(path)}


def test_every_file_of_a_run_and_its_sidecar_is_in_the_table(tmp_path: Path) -> None:
    bests = {"lowest": {"metric": "validation_loss", "metric_comp": "lower"}}
    callbacks = [{"name": "ema_checkpoints"}, {"name": "set_from_file"}]
    averages = {"optimizer_config": {**SGD, "ema": {"average_decay": 0.9}}, "callbacks": callbacks}
    (tmp_path / "hyper_parameters.yaml").write_text("learning_rate: 0.02")
    config = linear_experiment(best_checkpoint_eval_metric="accuracy")
    config = config.replace(trainer={"best_checkpoints": bests, **averages})

    launch(
        config,
        "train_and_eval",
        str(tmp_path),
        records=lambda: {"operative_config.train_and_eval.gin": ""},
    )
    launch(config, "continuous_eval", str(tmp_path), eval_name="fast")
    launch(config, "eval", str(tmp_path))

    assert _find_unknown_files(tmp_path) == set()

    written = [
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()
    ]
    missing = {row for row in PATHS if not any(matches(row, path) for path in written)}

    assert missing == {
        "ckpt-<step>.pin",
        ".saving-ckpt-<step>/",
        "metrics.superseded.jsonl",
        "errors/<time>-<pid>.txt",
        "stacks-<time>.txt",
        "diverged/",
        "damaged/",
        "archived/",
        "attempts.jsonl",
        "workers/<n>/",
        "finetune-<step>/",
        "metrics-<step>.json",
        "export/<step>/",
        "samples/",
        "history.json",
        "trackers/",
    }


def test_a_file_that_is_not_in_the_table_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "strange.txt").touch()
    assert _find_unknown_files(tmp_path) == {"strange.txt"}
