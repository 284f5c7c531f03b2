"""Bring a virtual environment to a set of requirements, and stamp it when done.

An environment that is there is kept if it is whole: its interpreter runs, is at least 3.11, and
every distribution in it has all the files its record lists. An interrupted `venv` or `pip install`
leaves one without a record; then the environment is made anew. The stamp is made last. A lock lets
one process at a time in; whoever waited finds the stamp and has nothing to do.
"""

import argparse
import fcntl
import pathlib
import subprocess
import sys
import venv

_CHECK = """
import importlib.metadata, platform, sys, sysconfig
paths = list({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
names = set()
for dist in importlib.metadata.distributions(path=paths):
    names.add(dist.metadata["Name"])
    if dist.files is None:
        sys.exit(f"{dist.metadata['Name']} has no record of its files")
    for file in dist.files:
        if file.suffix != ".pyc" and not file.locate().exists():
            sys.exit(f"{dist.metadata['Name']} lacks {file}")
if "pip" not in names:
    sys.exit("pip is missing")
if sys.version_info < (3, 11):
    sys.exit("its Python is older than 3.11")
print(platform.python_version())
"""


def fault(directory: pathlib.Path, version: str | None) -> str | None:
    """Returns why the environment cannot be kept, or None if it can."""
    python = directory / "bin" / "python"
    if not python.exists():
        return "it has no interpreter"
    run = subprocess.run([python, "-I", "-c", _CHECK], capture_output=True, text=True)
    if run.returncode:
        return (run.stderr.strip().splitlines() or ["its interpreter does not run"])[-1]
    if version and run.stdout.strip() != version:
        return f"it has Python {run.stdout.strip()}, not {version}"
    return None


def prepare(directory: pathlib.Path, version: str | None) -> None:
    """Makes the environment unless it can be kept."""
    reason = fault(directory, version)
    if reason is None:
        return
    mine = sys.version.split()[0]
    if directory.exists():
        print(f"making {directory} anew with Python {mine}: {reason}", flush=True)
    else:
        print(f"making {directory} with Python {mine}", flush=True)
    venv.create(directory, clear=True, symlinks=True, with_pip=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="prepare a virtual environment")
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("stamp", type=pathlib.Path, help="made when the environment is ready")
    parser.add_argument("pip", nargs="+", help="what to pass to `pip install`")
    parser.add_argument(
        "--same-version", action="store_true", help="ask for the version that runs this script"
    )
    args = parser.parse_args()
    with open(f"{args.directory}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if args.stamp.exists():
            return
        prepare(args.directory, sys.version.split()[0] if args.same_version else None)
        print(f"installing into {args.directory} (minutes the first time)", flush=True)
        python = args.directory / "bin" / "python"
        code = subprocess.call([python, "-m", "pip", "install", *args.pip])
        if code:
            sys.exit(f"pip ended with {code}: {args.directory} is not ready")
        args.stamp.parent.mkdir(exist_ok=True)
        args.stamp.touch()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
