"""Leases: files in which a sidecar, an evaluation in another process, names the checkpoints that it needs.

`evals/<name>.lease.json` is the sidecar's heartbeat. It adds the step that the sidecar reads, the
step after which it needs every checkpoint, and the lineage of the run that it has followed so far.
If the run was rewound since, the sidecar needs every checkpoint from there on, although it notices
that only after its current evaluation. The training run reads leases before it removes a
checkpoint. It does not wait for a sidecar, but keeps a limited number of further checkpoints. A
lease that has ended no longer counts. One whose sidecar was killed or stopped counts for
LEASE_SECONDS, in which the sidecar may be started again.
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
from trainer_kit.process.run_lock import RunLock, read_heartbeat

LEASE, LEASE_SECONDS = ".lease.json", 300.0
_LOG = logging.getLogger(__name__)


class Lease(RunLock):
    """While entered, this process is the only sidecar of its name, and its lease names the checkpoints it needs.

    Args:
      evals_dir: The folder `evals_dir` of the run; made if it is missing.
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
        file = f"{name}{LEASE}"
        before = read_heartbeat(evals_dir, file) or {}
        self.name = name
        # The needs of the previous process, until this one knows its own.
        self._needed_checkpoints = {
            "after": before.get("after", -1),
            "reads": None,
            "lineage": _lineage(before),
        }
        super().__init__(evals_dir, progress, names=(f"{name}.lock", file), **options)

    def protect_checkpoints(
        self, after_step: int | None, reading_step: int | None, lineage: int = 0
    ) -> None:
        """Writes the needed checkpoints to the lease, before one of them is read.

        Args:
          after_step: The step after which every checkpoint is needed; None: only the one that is
            read.
          reading_step: The step of the checkpoint that is read now; None: no checkpoint.
          lineage: The lineage of the run that the sidecar has followed so far.
        """
        needs = {"after": after_step, "reads": reading_step, "lineage": lineage}
        if needs != self._needed_checkpoints:
            self._needed_checkpoints = needs
            self.refresh_heartbeat()

    def _entries(self) -> dict[str, Any]:
        return {**super()._entries(), **self._needed_checkpoints}

    def _remove(self) -> None:
        super()._remove()
        parent = self._folder.parent
        if not self._folder.exists() and parent.is_dir() and not any(parent.iterdir()):
            parent.rmdir()

    def _build_in_use_error(self, holder: dict[str, Any] | None) -> ModelDirInUseError:
        who = (
            f"{holder['host']} pid {holder['pid']}, since {holder['started']}"
            if holder
            else "another process"
        )
        return ModelDirInUseError(
            f"a continuous_eval named {self.name!r} runs for {self._folder.parent} already ({who});"
            " wait until it ends, stop it, or give another --eval_name to this one"
        )


class _RewindLedger(Protocol):
    def find_rewind_step(self, lineage: int) -> int | None:
        """Returns the earliest step that the run was rewound to after a lineage; None without a rewind."""


class LeaseReader:
    """Reads the leases of a run's sidecars, for its trainer when it removes old checkpoints.

    Args:
      evals_dir: The folder of the leases.
      max_wait_checkpoints: The largest number of checkpoints that are kept because a sidecar has
        not evaluated them yet.
      ledger: The ledger of the run, which knows its rewinds; None: the run was never rewound.
    """

    def __init__(
        self,
        evals_dir: str | os.PathLike[str],
        max_wait_checkpoints: int,
        ledger: _RewindLedger | None = None,
    ) -> None:
        self._folder, self._max_wait_checkpoints, self._ledger = (
            Path(evals_dir),
            max_wait_checkpoints,
            ledger,
        )
        self._last_beats: dict[str, tuple[Any, float]] = {}
        self._reported_leases: set[str] = set()

    def select_protected_steps(self, steps: Sequence[int]) -> set[int]:
        """Returns those of `steps`, the steps of checkpoints to remove, oldest first, that have to stay."""
        reads: set[int] = set()
        waiting: dict[int, str] = {}
        for path in sorted(self._folder.glob(f"*{LEASE}")):
            lease = read_heartbeat(self._folder, path.name)
            if lease is None or not self._is_active(path, lease):
                continue
            after = self._compute_protected_after(lease)
            reads |= {step for step in steps if step == lease.get("reads")}
            waiting |= {
                step: path.name for step in steps if isinstance(after, int) and step > after
            }
        kept = sorted(waiting)[-self._max_wait_checkpoints :] if self._max_wait_checkpoints else []
        for step, name in waiting.items():
            if step in kept or step in reads or name in self._reported_leases:
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
        return reads | set(kept)

    def _compute_protected_after(self, lease: Mapping[str, Any]) -> Any:
        """Returns the step after which a sidecar needs all; an earlier one if it has not noticed a rewind yet."""
        after, back = (
            lease.get("after"),
            self._ledger.find_rewind_step(_lineage(lease)) if self._ledger else None,
        )
        return min(after, back - 1) if isinstance(after, int) and back is not None else after

    def _is_active(self, path: Path, lease: Mapping[str, Any]) -> bool:
        """Whether the sidecar may still need its checkpoints, by its last beat and this machine's clock."""
        if lease["ended"] == "done":
            return False
        now = time.monotonic()
        beat, since = self._last_beats.get(path.name, (None, now))
        if beat != lease["beat"]:
            since = now
            if beat is None:  # seen for the first time: the file tells how old the beat is
                with contextlib.suppress(OSError):
                    since = now - max(0.0, time.time() - path.stat().st_mtime)
            self._last_beats[path.name] = (lease["beat"], since)
        return now - since < LEASE_SECONDS


def read_lineages_in_evaluation(evals_dir: str | os.PathLike[str]) -> list[int]:
    """Returns the lineages of the checkpoints that sidecars are reading, or were reading when they were killed."""
    leases = [
        read_heartbeat(evals_dir, path.name) or {} for path in Path(evals_dir).glob(f"*{LEASE}")
    ]
    return [_lineage(lease) for lease in leases if isinstance(lease.get("reads"), int)]


def _lineage(lease: Mapping[str, Any]) -> int:
    """Returns the run's lineage in a lease; 0 for a lease of an earlier version."""
    lineage = lease.get("lineage", 0)
    return lineage if isinstance(lineage, int) else 0
