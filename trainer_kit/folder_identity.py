"""Notices when a folder that a process writes to is moved, removed or replaced.

If a folder is moved or removed during a run, the next write would make it again at the old path and split the run in
two. So every write calls `check_held` first, which raises StorageError once the path has another folder or none. A
folder is known by its device and inode number. Some file systems (FUSE, 9p, virtiofs, a network file system that is
mounted again) change these numbers, or report no links, while the folder stays in its place. There the folder is the
same if the open descriptor and the path list the same names. An error of the file system other than "no such file"
proves nothing, and the write itself decides.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from types import TracebackType

from trainer_kit.checkpoint_names import owner, step_of
from trainer_kit.errors import StorageError


class FolderIdentity:
    """While entered, refuses writes below `path` once the folder there is no longer the same as at the start.

    A folder that was found missing stays lost, even if it is moved back, since other threads may have noticed it too.

    Args:
      path: The path of a local folder that exists.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._absolute = os.path.abspath(self.path)
        self._descriptor = -1
        self._at_start: os.stat_result | None = None
        self._place, self._links, self._lost = "", 0, ""

    def __enter__(self) -> FolderIdentity:
        """Remembers the folder at the path.

        Raises:
          StorageError: when there is no folder, or it cannot be read.
        """
        try:
            self._at_start = os.stat(self._absolute)
            self._descriptor = os.open(self._absolute, _FOLDER)
            self._links = os.fstat(self._descriptor).st_nlink
        except OSError as error:
            raise StorageError(f"{self.path} cannot be used: {error.strerror or error}") from error
        self._place = self._place_now()
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
        """The message for the user once `look` has found the folder gone; "" before. Uses no file system."""
        return self._lost

    def look(self) -> str:
        """Returns the message for the user if the folder is gone from its path, else "". In any thread."""
        if not self._is_there():
            self._lost = self._explanation()
        return self._lost

    @property
    def path_at_start(self) -> str:
        """The absolute path of the folder when it was entered."""
        return self._absolute

    def remove_if_made_again(self) -> None:
        """Removes an empty folder that was made at the path since the held folder was moved or removed."""
        if not self._is_there():
            with contextlib.suppress(OSError):
                os.rmdir(self._absolute)

    def contains(self, path: str) -> bool:
        """Whether an absolute path is that of the folder or lies below it."""
        return path == self._absolute or path.startswith(self._absolute.rstrip(os.sep) + os.sep)

    def _is_there(self) -> bool:
        try:
            now = os.stat(self._absolute)
            if self._links > 0 and os.fstat(self._descriptor).st_nlink == 0:
                return False  # removed; a file system that counts no links says 0 from the start
            assert self._at_start is not None
            return os.path.samestat(self._at_start, now) or (not self._new_place() and self._lists_the_same())
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True

    def _lists_the_same(self) -> bool:
        """Whether descriptor and path list the same names; tries several times, since files may come and go."""
        return any(set(self._names()) == set(os.listdir(self._absolute)) for _ in range(_TRIES))

    def _names(self) -> list[str]:
        """Returns the names in the folder of the start, wherever it is now."""
        again = os.open(".", _FOLDER, dir_fd=self._descriptor)  # other threads read the folder too, from its beginning
        try:
            return os.listdir(again)
        finally:
            os.close(again)

    def _place_now(self) -> str:
        """Returns the folder's current path by Linux's /proc; "" without /proc."""
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/self/fd/{self._descriptor}")
        return ""

    def _new_place(self) -> str:
        """Returns the path that the folder was moved to; "" if it was not moved, was removed, or is not known."""
        place = self._place_now()
        return "" if place == self._place or place.endswith(" (deleted)") else place

    def _explanation(self) -> str:
        steps: list[int] = []
        with contextlib.suppress(OSError):
            steps = [step_of(str(owner(name))) for name in self._names() if _is_index(name)]
        what = f"{self.path} was moved or removed during the run"
        other = "; the folder that is at that path now was not changed" if os.path.exists(self._absolute) else ""
        if place := self._new_place():
            held = f", with checkpoints up to step {max(steps)}" if steps else ""
            return (
                f"{what}: it is now at {place}{held}{other}. Move it back, then run the same command again, or give "
                "the new path"
            )
        if steps:
            return (
                f"{what}{other}. The folder held checkpoints up to step {max(steps)}. Move it back, then run the same "
                "command again"
            )
        return f"{what}: none of its checkpoints was found{other}. Run the same command again to start from step 0"


def _is_index(name: str) -> bool:
    return owner(name) is not None and name == f"{owner(name)}.index"


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_TRIES = 5
_held: list[FolderIdentity] = []  # changed by atomic operations only, since threads read it


def lost_folder(path: str | os.PathLike[str]) -> str:
    """Returns the message for the user if `path` lies in a held folder that is gone, else ""."""
    absolute = os.path.abspath(path)
    return next((lost for held in list(_held) if held.contains(absolute) and (lost := held.look())), "")


def check_held(path: str | os.PathLike[str]) -> None:
    """Raises StorageError before a write to `path` when it lies in a held folder that is gone."""
    if lost := lost_folder(path):
        raise StorageError(lost)


def remove_made_again(path: str | os.PathLike[str]) -> None:
    """Removes an empty folder that a call made in place of the held folder of `path`, which is gone."""
    absolute = os.path.abspath(path)
    for held in list(_held):
        if held.contains(absolute):
            held.remove_if_made_again()


def make_folder(path: str | os.PathLike[str]) -> None:
    """Makes a local folder and its parents, as os.makedirs does, but never a held folder itself.

    A held folder is one whose identity this process keeps, as that of its run. It may be moved between a check and
    the next system call. Made again, it would hold a part of the run's files, and the moved one the others.

    Raises:
      StorageError: when `path` is or lies in a held folder that is gone.
      OSError: when os.makedirs would raise it.
    """
    check_held(path)
    absolute = os.path.abspath(path)
    held_paths = {held.path_at_start for held in list(_held) if held.contains(absolute)}
    try:
        _make_below(absolute, held_paths)
    except FileNotFoundError:
        check_held(path)
        raise


def _make_below(folder: str, held_paths: set[str]) -> None:
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    if folder in held_paths:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), folder)
    _make_below(parent, held_paths)
    try:
        os.mkdir(folder)
    except FileExistsError:
        if not os.path.isdir(folder):  # otherwise another thread or process has made it
            raise


def is_seen_lost(path: str | os.PathLike[str]) -> bool:
    """Returns False, or raises if the held folder of `path` was already found gone. Uses no file system.

    Raises:
      StorageError: when it is gone; the message says where it is now.
    """
    absolute = os.path.abspath(path)
    for held in list(_held):
        if held.lost and held.contains(absolute):
            raise StorageError(held.lost)
    return False


@contextlib.contextmanager
def held_if_there(path: str | os.PathLike[str]) -> Iterator[None]:
    """Holds the folder at `path` for a block; does nothing if there is no folder yet."""
    with contextlib.ExitStack() as stack:
        if os.path.isdir(path):
            stack.enter_context(FolderIdentity(path))
        yield
