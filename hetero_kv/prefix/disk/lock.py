"""One writer process per directory, by an advisory lock that dies with its process."""

import fcntl
import os
import pathlib

NAME = "lock"


class LockedError(RuntimeError):
    """Another process writes to the directory."""


class DirectoryLock:
    """Held from construction to `release`, or to the end of the process, however it ends.

    The file's content is only for people: it names the process and may be damaged or emptied.

    Raises:
        LockedError: someone else holds it, in this process or another.
        OSError: the lock file cannot be made.
    """

    def __init__(self, directory: pathlib.Path):
        self._fd = os.open(directory / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            os.close(self._fd)
            if isinstance(error, BlockingIOError):
                raise LockedError(
                    f"{directory} has a writer already (process {holder or 'unknown'}): stop it, "
                    "use another directory, or read with DiskReader"
                ) from None
            raise
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, b"%d\n" % os.getpid(), 0)
        except OSError:
            pass  # a full disk: the lock holds without a name in it

    def release(self) -> None:
        """Lets others in. May be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
