"""The few operations on files that the tier needs; tests replace them to inject faults."""

import ctypes
import os
import pathlib
from collections.abc import Sequence

import numpy as np

Bytes = bytes | bytearray | memoryview | np.ndarray

_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h
_OFFSET = ctypes.c_int64


def _find_sync_file_range():
    """Linux's `sync_file_range`, which Python does not wrap; None elsewhere."""
    try:
        found = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError, TypeError):
        return None
    found.argtypes = (ctypes.c_int, _OFFSET, _OFFSET, ctypes.c_uint)
    found.restype = ctypes.c_int
    return found


_sync_file_range = _find_sync_file_range()


class Files:
    """Every method may raise OSError. Reads may be short; writes are whole or raise."""

    def create(self, path: pathlib.Path) -> int:
        """A new file, for reading and writing."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def open(self, path: pathlib.Path, write: bool) -> int:
        """An existing file."""
        return os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)

    def close(self, fd: int) -> None:
        """Closes a file."""
        os.close(fd)

    def size(self, fd: int) -> int:
        """Bytes of the file."""
        return os.fstat(fd).st_size

    def read(self, fd: int, nbytes: int, offset: int) -> bytes:
        """Up to `nbytes` from `offset`; fewer at the end of the file."""
        parts = []
        while nbytes > 0:
            part = os.pread(fd, nbytes, offset)
            if not part:
                break
            parts.append(part)
            nbytes -= len(part)
            offset += len(part)
        return b"".join(parts)

    def read_into(self, fd: int, buffers: Sequence[np.ndarray], offset: int) -> int:
        """Fills u8 buffers one after the other; returns the bytes read."""
        return self._all(os.preadv, fd, buffers, offset)

    def write(self, fd: int, parts: Sequence[Bytes], offset: int) -> None:
        """Writes all parts one after the other."""
        total = sum(memoryview(part).nbytes for part in parts)
        if self._all(os.pwritev, fd, parts, offset) != total:
            raise OSError("nothing was written")

    def sync(self, fd: int) -> None:
        """Returns when data and size are on the disk."""
        os.fdatasync(fd)

    def start_sync(self, fd: int, offset: int, nbytes: int) -> None:
        """Asks the system to begin writing a range, so that less is left for `sync`.

        Only a hint: it says nothing about success, and does nothing where there is no such call.
        """
        if _sync_file_range is not None:
            _sync_file_range(fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE)

    def truncate(self, fd: int, size: int) -> None:
        """Cuts the file."""
        os.ftruncate(fd, size)

    def remove(self, path: pathlib.Path) -> None:
        """Takes the file's name away."""
        os.unlink(path)

    def sync_directory(self, path: pathlib.Path) -> None:
        """Returns when creations and removals in it are on the disk."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    @staticmethod
    def _all(move, fd: int, parts: Sequence[Bytes], offset: int) -> int:
        views = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
        done = 0
        while views:
            moved = move(fd, views, offset + done)
            if moved <= 0:
                break
            done += moved
            while views and moved >= views[0].nbytes:
                moved -= views[0].nbytes
                views.pop(0)
            if moved:
                views[0] = views[0][moved:]
        return done
