"""Leases: files in which a sidecar names the checkpoints that it needs.

A sidecar is an evaluation in another process. `evals/<name>.lease.json` is its heartbeat. It adds
the step that the sidecar reads, the step after which it needs every checkpoint, and the lineage of
the run that it has followed so far. If the run was rewound since, the sidecar needs every
checkpoint from there on, although it notices that only after its current evaluation.

The training run reads leases before it removes a checkpoint. It does not wait for a sidecar, but
keeps a limited number of further checkpoints. A lease that has ended no longer counts. One whose
sidecar was killed or stopped counts for LEASE_SECONDS, in which the sidecar may be started again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainer_kit.errors import ModelDirInUseError
from trainer_kit.process.run_lock import Heartbeat, RunLock, read_heartbeat

LEASE = ".lease.json"
LEASE_SECONDS = 300.0
_LOG = logging.getLogger(__name__)


class Lease(RunLock):
    """While entered, this process is the only sidecar of its name.

    Its lease names the checkpoints that it needs.

    Args:
      evals_dir: The folder `evals_dir` of the run. It is made if it is missing.
      name: The name of the sidecar.
      progress: Returns (phase, step).
      **options: Further options of RunLock.
    """

    def __init__(
        self,
        evals_dir: str | os.PathLike[str],
        name: str,
        progress: Callable[[], tuple[str, int]],
        **options: Any,
    ) -> None:
        lease_name = f"{name}{LEASE}"
        previous_lease: Mapping[str, object] = read_heartbeat(evals_dir, lease_name) or {}
        self.name = name
        # The needs of the previous process, until this one knows its own.
        after = previous_lease.get("after", -1)
        self._needed_checkpoints: Mapping[str, object] = {
            "after": after,
            "reads": None,
            "lineage": _lineage(previous_lease),
        }
        super().__init__(evals_dir, progress, names=(f"{name}.lock", lease_name), **options)

    def protect_checkpoints(
        self, after_step: int | None, reading_step: int | None, lineage: int = 0
    ) -> None:
        """Writes the needed checkpoints to the lease, before one of them is read.

        Args:
          after_step: The step after which every checkpoint is needed. None means only the one that
            is read.
          reading_step: The step of the checkpoint that is read now. None means no checkpoint.
          lineage: The lineage of the run that the sidecar has followed so far.
        """
        needs = {"after": after_step, "reads": reading_step, "lineage": lineage}
        if needs != self._needed_checkpoints:
            self._needed_checkpoints = needs
            self.refresh_heartbeat()

    def _entries(self) -> Mapping[str, object]:
        return {**super()._entries(), **self._needed_checkpoints}

    def _remove(self) -> None:
        super()._remove()
        parent = self._folder.parent
        if self._folder.exists() or not parent.is_dir():
            return
        if not any(parent.iterdir()):
            parent.rmdir()

    def _build_in_use_error(self, holder: Heartbeat | None) -> ModelDirInUseError:
        owner = "another process"
        if holder:
            owner = f"{holder['host']} pid {holder['pid']}, since {holder['started']}"
        return ModelDirInUseError(
            f"a continuous_eval named {self.name!r} runs for {self._folder.parent} already"
            f" ({owner}); wait until it ends, stop it, or give another --eval_name to this one"
        )


class _RewindLedger(Protocol):
    def find_rewind_step(self, lineage: int) -> int | None:
        """Returns the earliest step that the run was rewound to after a lineage.

        Returns None without a rewind.
        """


class LeaseReader:
    """Reads the leases of a run's sidecars, for its trainer when it removes old checkpoints.

    Args:
      evals_dir: The folder of the leases.
      max_wait_checkpoints: The largest number of checkpoints that are kept because a sidecar has
        not evaluated them yet.
      ledger: The ledger of the run, which knows its rewinds. None means that the run was never
        rewound.
    """

    def __init__(
        self,
        evals_dir: str | os.PathLike[str],
        max_wait_checkpoints: int,
        ledger: _RewindLedger | None = None,
    ) -> None:
        self._folder = Path(evals_dir)
        self._max_wait_checkpoints = max_wait_checkpoints
        self._ledger = ledger
        # By the name of the lease, its last beat and the time since when it has not changed.
        self._last_beats: dict[str, tuple[str | None, float]] = {}
        self._reported_leases: set[str] = set()

    def select_protected_steps(self, steps: Sequence[int]) -> set[int]:
        """Returns the steps whose checkpoints have to stay.

        Args:
          steps: The steps of the checkpoints to remove, oldest first.
        """
        # The steps that a sidecar reads now, and those that wait for one, with its lease.
        steps_in_evaluation: set[int] = set()
        waiting_steps: dict[int, str] = {}
        for path in sorted(self._folder.glob(f"*{LEASE}")):
            lease = read_heartbeat(self._folder, path.name)
            if lease is None or not self._is_active(path, lease):
                continue
            steps_in_evaluation |= {step for step in steps if step == lease.get("reads")}

            after = lease.get("after")
            if not isinstance(after, int):
                continue
            # After a rewind that the sidecar has not noticed yet, it needs earlier checkpoints too.
            if self._ledger is not None:
                rewind_step = self._ledger.find_rewind_step(_lineage(lease))
                if rewind_step is not None:
                    after = min(after, rewind_step - 1)
            waiting_steps |= {step: path.name for step in steps if step > after}

        # Only the newest of the waiting ones stay.
        protected_steps: list[int] = []
        if self._max_wait_checkpoints:
            protected_steps = sorted(waiting_steps)[-self._max_wait_checkpoints :]

        for step, name in waiting_steps.items():
            is_protected = step in protected_steps or step in steps_in_evaluation
            if is_protected or name in self._reported_leases:
                continue
            self._reported_leases.add(name)
            sidecar = name.removesuffix(LEASE)
            _LOG.warning(
                "ckpt-%d is removed before %s has evaluated it: %s is more than %d checkpoints"
                " behind (trainer.continuous_eval.max_wait_checkpoints); later removals are not"
                " reported",
                step,
                sidecar,
                sidecar,
                self._max_wait_checkpoints,
            )
        return steps_in_evaluation | set(protected_steps)

    def _is_active(self, path: Path, lease: Heartbeat) -> bool:
        """Whether the sidecar may still need its checkpoints.

        Its last beat and this machine's clock decide.
        """
        if lease["ended"] == "done":
            return False
        now = time.monotonic()
        beat, since = self._last_beats.get(path.name, (None, now))
        if beat != lease["beat"]:
            since = now
            if beat is None:
                # This process has not read the lease before. The file tells how old the beat is.
                with contextlib.suppress(OSError):
                    age = time.time() - path.stat().st_mtime
                    since = now - max(0.0, age)
            self._last_beats[path.name] = (lease["beat"], since)
        return now - since < LEASE_SECONDS


def read_lineages_in_evaluation(evals_dir: str | os.PathLike[str]) -> list[int]:
    """Returns the lineages of the checkpoints that sidecars are reading.

    Those that a sidecar was reading when it was killed are among them.
    """
    lineages = []
    for path in Path(evals_dir).glob(f"*{LEASE}"):
        lease = read_heartbeat(evals_dir, path.name)
        if lease is not None and isinstance(lease.get("reads"), int):
            lineages.append(_lineage(lease))
    return lineages


def _lineage(lease: Mapping[str, object]) -> int:
    """Returns the run's lineage in a lease, 0 for a lease of an earlier version."""
    lineage = lease.get("lineage", 0)
    if isinstance(lineage, int):
        return lineage
    return 0
