"""Folders that a process writes to for a while: whether each is still the folder that it was at the start.

A folder that somebody moves or removes during a run would come into being again at the old path with the next write,
and there would be two halves of a run. So `check_held` is asked before every write: it raises StorageError once the
folder at the path is another one, or none. A folder is told by its device and inode number. A network file system that
is mounted again may have another device number: there the same inode number with the same names inside is the same
folder. An error of the file system other than "no such file" says nothing; the write itself will tell.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from types import TracebackType

from trainer_kit.checkpoints.names import owner, step_of
from trainer_kit.errors import StorageError


class HeldFolder:
    """While entered, writes below `path` are refused as soon as the folder there is not the one it was at the start.

    Once it was seen that the folder is gone it counts as gone, even if it is moved back: others may have noticed too.

    Args:
      path: of a folder that exists; local.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._absolute = os.path.abspath(self.path)
        self._descriptor = -1
        self._lost = ""

    def __enter__(self) -> HeldFolder:
        """Remembers which folder is at the path.

        Raises:
          StorageError: when there is none, or it cannot be read.
        """
        try:
            self._descriptor = os.open(self._absolute, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"{self.path} cannot be used: {error.strerror or error}") from error
        _held.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self in _held:
            _held.remove(self)
            os.close(self._descriptor)

    @property
    def lost(self) -> str:
        """What to tell once `look` has seen that the folder is gone; "" before. Asks no file system."""
        return self._lost

    def look(self) -> str:
        """Looks at the path, and returns what to tell if the folder is gone; "" if it is there. In any thread."""
        if not self._lost and not self._is_there():
            self._lost = self._told()
        return self._lost

    def contains(self, path: str) -> bool:
        """Whether an absolute path is that of the folder or lies below it."""
        return path == self._absolute or path.startswith(self._absolute.rstrip(os.sep) + os.sep)

    def _is_there(self) -> bool:
        try:
            mine, now = os.fstat(self._descriptor), os.stat(self._absolute)
            if mine.st_ino != now.st_ino or mine.st_nlink == 0:
                return False
            return mine.st_dev == now.st_dev or set(os.listdir(self._descriptor)) == set(os.listdir(self._absolute))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def _told(self) -> str:
        steps: list[int] = []
        place = ""
        with contextlib.suppress(OSError):
            steps = [step_of(str(owner(name))) for name in os.listdir(self._descriptor) if _is_index(name)]
            if os.fstat(self._descriptor).st_nlink > 0:
                place = os.readlink(f"/proc/self/fd/{self._descriptor}")
        what = f"{self.path} was moved or removed during the run"
        other = "; what is at that path now was left alone" if os.path.exists(self._absolute) else ""
        upto = f"checkpoints up to step {max(steps)}" if steps else ""
        if place and place != self._absolute and not place.endswith(" (deleted)"):
            there = f" with {upto}" if upto else ""
            return (
                f"{what}: it is {place} now{there}{other}; move it back and run the same command again, or go on there"
            )
        if upto:
            return f"{what}: {upto} are where it went{other}; put it back and run the same command again"
        return f"{what}: nothing is left of it{other}; run the same command again to begin anew"


def _is_index(name: str) -> bool:
    return owner(name) is not None and name == f"{owner(name)}.index"


_held: list[HeldFolder] = []  # changed by single operations only, since threads read it


def lost_folder(path: str | os.PathLike[str]) -> str:
    """Returns what to tell if `path` lies in a held folder that is gone; "" otherwise."""
    absolute = os.path.abspath(path)
    return next((told for held in list(_held) if held.contains(absolute) and (told := held.look())), "")


def check_held(path: str | os.PathLike[str]) -> None:
    """Raises StorageError when `path`, which is about to be written, lies in a held folder that is gone."""
    if told := lost_folder(path):
        raise StorageError(told)


def is_seen_lost(path: str | os.PathLike[str]) -> bool:
    """Returns False unless it was seen that the held folder of `path` is gone: then it raises. Asks no file system.

    Raises:
      StorageError: that tells where the folder went.
    """
    absolute = os.path.abspath(path)
    for held in list(_held):
        if held.lost and held.contains(absolute):
            raise StorageError(held.lost)
    return False


@contextlib.contextmanager
def held_if_there(path: str | os.PathLike[str]) -> Iterator[None]:
    """Holds the folder at `path`; does nothing where there is none yet."""
    with contextlib.ExitStack() as stack:
        if os.path.isdir(path):
            stack.enter_context(HeldFolder(path))
        yield
