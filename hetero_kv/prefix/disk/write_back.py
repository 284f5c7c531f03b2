"""The queue of objects that wait to be written, and the thread that may write them."""

import collections
import threading
from collections.abc import Callable

from hetero_kv.prefix.disk.books import Entry

_AT_ONCE = 8  # objects that the thread writes before it lets others in


class WriteBack:
    """Bounded by its user. Without `start` whoever calls `run` does the writing.

    io: held while anything is written, so that objects are written in order.
    lock: guards the queue; taken after `io`.
    """

    def __init__(self, write: Callable[[Entry], None], io: threading.RLock, lock: threading.RLock):
        self._write = write
        self._io = io
        self._wake = threading.Condition(lock)
        self._queue: collections.deque[Entry] = collections.deque()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def __len__(self) -> int:
        """Objects that wait; some may have been deleted meanwhile."""
        return len(self._queue)

    @property
    def is_threaded(self) -> bool:
        """Whether a thread writes."""
        return self._thread is not None

    def start(self) -> None:
        """Starts the thread."""
        self._thread = threading.Thread(target=self._work, name="disk-tier", daemon=True)
        self._thread.start()

    def add(self, entry: Entry) -> None:
        """Queues an object."""
        with self._wake:
            self._queue.append(entry)
            self._wake.notify()

    def run(self, most: int) -> int:
        """Writes up to `most` objects; returns how many."""
        done = 0
        with self._io:
            while done < most:
                with self._wake:
                    if not self._queue or self._stopped:
                        break
                    entry = self._queue.popleft()
                self._write(entry)
                done += 1
        return done

    def stop(self) -> None:
        """Forgets what waits; the thread ends."""
        with self._wake:
            self._stopped = True
            self._queue.clear()
            self._wake.notify_all()

    def join(self) -> None:
        """Returns when the thread has ended. Not to be called with `io` or `lock` held."""
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while not self._stopped:
            with self._wake:
                while not self._queue and not self._stopped:
                    self._wake.wait()
            self.run(_AT_ONCE)
