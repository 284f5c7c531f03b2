"""Checks and repairs a directory of the prefix store's disk tier.

python -m experiments.fsck --directory=DIR                      # reads every byte
python -m experiments.fsck --directory=DIR --action=list        # names every object
python -m experiments.fsck --directory=DIR --action=quarantine  # takes what is damaged out of use
python -m experiments.fsck --directory=DIR --action=prune --bytes=N
python -m experiments.fsck --directory=DIR --action=rebuild     # the index, from the segments

Exit code: 0 healthy, or done; 1 something is damaged, or could not be done; 2 not possible: there
is no such directory, or a writer has it.
"""

import pathlib
import sys
from collections.abc import Callable

from absl import app, flags

from hetero_kv.prefix.disk import fsck
from hetero_kv.prefix.disk.lock import LockedError

ACTIONS = ("verify", "list", "quarantine", "prune", "rebuild")
_DIRECTORY = flags.DEFINE_string("directory", None, "directory of a disk tier", required=True)
_ACTION = flags.DEFINE_enum("action", "verify", ACTIONS, "what to do")
_BYTES = flags.DEFINE_integer("bytes", 0, "for prune: bytes of all files together")


def run(
    directory: pathlib.Path,
    action: str = "verify",
    nbytes: int = 0,
    say: Callable[[str], None] = print,
) -> int:
    """Does one of ACTIONS; returns the exit code."""
    if action == "prune" and nbytes < 1:
        say(f"prune needs --bytes=N, N >= 1: the bytes that may be left, got {nbytes}")
        return 2
    if not directory.is_dir():
        say(f"{directory} is no directory")
        return 2
    try:
        if action in ("verify", "list"):
            return _report(fsck.check(directory), action == "list", say)
        if action == "quarantine":
            for item in fsck.quarantine(directory):
                say(f"out of use: {item}")
            return _report(fsck.check(directory), False, say)
        reason = fsck.prune(directory, nbytes) if action == "prune" else fsck.rebuild(directory)
    except (LockedError, OSError, ValueError) as error:
        say(str(error))
        return 2
    say(f"{action}: {reason or 'done'}")
    return 1 if reason else 0


def _report(report: fsck.Report, everything: bool, say: Callable[[str], None]) -> int:
    for item in report.items if everything else report.damaged:
        say(str(item))
    for state, (number, nbytes) in sorted(report.counts().items()):
        say(f"{state}: {number} ({nbytes} bytes)")
    say(f"index: {report.index or 'agrees with the segments'}")
    return 0 if report.is_healthy else 1


def main(argv: list[str]) -> None:
    """Runs the action that the flags name."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    sys.exit(run(pathlib.Path(_DIRECTORY.value), _ACTION.value, _BYTES.value))


if __name__ == "__main__":
    app.run(main)
