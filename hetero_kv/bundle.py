"""Bundles: all that it takes to replay one audited request elsewhere, as a directory.

    bundle.json          what was asked, looked up, restored and found; versions; notes
    state.safetensors    the restored state as it was used, and the logits

A bundle holds the request's tokens and tenant: treat it like the traffic itself.
`experiments.repro` replays it.
"""

import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import time
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from hetero_kv.audit import Finding
from hetero_kv.bundle_files import ABOUT, FORMAT, RECOMPUTED, SERVED, VERSION, save
from hetero_kv.contract import LAYOUT_VERSION, CacheSpec
from hetero_kv.options import Options
from hetero_kv.prefix.identity import describe_leaves
from hetero_kv.prefix.store import PrefixStore
from hetero_kv.rows import Rows
from hetero_kv.scheduler import Entry, Run
from hetero_kv.snapshot import take_leaves
from hetero_kv.state import Cache

WRITTEN, SKIPPED, FAILED = "written", "skipped", "failed"
_PACKAGES = ("jax", "jaxlib", "numpy")


@dataclasses.dataclass(frozen=True, eq=False)
class Exhibit:
    """What a bundle needs of a request, taken when its state was resumed.

    leaves: by LeafSlot.path, [repeats, rows, *width] of every stored leaf, History as far as
    `length`. at, grid: the lengths that the row stood at (before a replay not yet `length`).
    """

    entry: Entry
    run: Run
    length: int
    leaves: Mapping[str, np.ndarray]
    at: int = 0
    grid: int = 0
    replay: tuple[int, int] | None = None

    @classmethod
    def of(
        cls,
        spec: CacheSpec,
        entry: Entry,
        length: int,
        held: Cache | None,
        replay: tuple[int, int] | None = None,
    ) -> "Exhibit":
        """held: the restored row, batch 1; None: nothing was resumed."""
        if held is None:
            return cls(entry, entry.run, 0, {})
        at, grid = int(held.length[0]), int(held.grid_length[0])
        leaves = take_leaves(spec, held, length)
        return cls(entry, entry.run, length, leaves, at, grid, replay)


class Written(NamedTuple):
    """What became of a bundle: WRITTEN, SKIPPED or FAILED, where it is, and why not."""

    outcome: str
    path: pathlib.Path | None
    reason: str = ""


class Bundles:
    """Writes bundles into a directory. It never raises: what goes wrong is in what it returns.

    Args:
        directory: made if need be; each bundle is a directory in it.
        most_bytes: of one bundle's arrays; beyond, the leaves that differ, or none, are kept, and a
            note says so.
        most: bundles that the directory may hold.
        weights: where the weights can be loaded from, for `experiments.repro`.
    """

    def __init__(
        self,
        directory: str | os.PathLike,
        *,
        most_bytes: int = 1 << 28,
        most: int = 16,
        weights: str = "",
    ):
        self.directory = pathlib.Path(directory)
        self.most_bytes, self.most, self.weights = most_bytes, most, weights
        self.last: Written | None = None

    @classmethod
    def of(cls, options: Options) -> "Bundles | None":
        """As the options of an engine say."""
        if options.bundle_dir is None:
            return None
        return cls(
            options.bundle_dir,
            most_bytes=options.bundle_bytes,
            most=options.max_bundles,
            weights=options.weights_source,
        )

    def take(
        self,
        spec: CacheSpec,
        entry: Entry,
        length: int,
        held: Cache,
        replay: tuple[int, int] | None,
    ) -> Exhibit | None:
        """`Exhibit.of`, or None: `last` says why."""
        try:
            return Exhibit.of(spec, entry, length, held, replay)
        except Exception as error:
            self.last = Written(FAILED, None, f"{type(error).__name__}: {error}")
            return None

    def write(
        self,
        rows: Rows,
        store: PrefixStore | None,
        exhibit: Exhibit,
        finding: Finding | None,
        *,
        mode: str = "",
        served: np.ndarray | None = None,
        recomputed: np.ndarray | None = None,
    ) -> Written:
        """One bundle. finding: None if there was no audit."""
        try:
            self.last = self._write(rows, store, exhibit, finding, mode, served, recomputed)
        except Exception as error:  # whatever happens, requests are served
            self.last = Written(FAILED, None, f"{type(error).__name__}: {error}")
        return self.last

    def _write(self, rows, store, exhibit, finding, mode, served, recomputed) -> Written:
        self.directory.mkdir(parents=True, exist_ok=True)
        made = (x for x in self.directory.iterdir() if not x.name.startswith("."))
        there = sum((x / ABOUT).is_file() for x in made)
        if there >= self.most:
            why = f"{self.directory} holds {there} bundles, the most there may be"
            return Written(SKIPPED, None, why)
        arrays, notes = self._arrays(exhibit, finding)
        for name, value in ((SERVED, served), (RECOMPUTED, recomputed)):
            if value is not None:
                arrays[name] = np.asarray(value)
        about = describe(rows, store, exhibit, finding, mode)
        about["weights"]["source"] = self.weights
        about["notes"] = notes
        return Written(WRITTEN, save(self.directory, about, arrays))

    def _arrays(
        self, exhibit: Exhibit, finding: Finding | None
    ) -> tuple[dict[str, np.ndarray], list[str]]:
        """As many leaves as there is room for, and notes on those left out."""
        leaves = dict(exhibit.leaves)
        size = sum(x.nbytes for x in leaves.values())
        if size <= self.most_bytes:
            return leaves, [] if exhibit.length else [
                "no audit was made: there is no restored state"
            ]
        too_much = f"the state takes {size} bytes, more than {self.most_bytes=} allows"
        if finding is not None and finding.leaves and exhibit.replay is None:
            differing = {x.path: leaves[x.path] for x in finding.leaves if x.path in leaves}
            if sum(x.nbytes for x in differing.values()) <= self.most_bytes:
                note = f"{too_much}: only leaves that differ are here, others are as computed"
                return differing, [note]
        return {}, [f"{too_much}: it is left out, and only the cold run can be replayed"]


# -- what a bundle says ----------------------------------------------------------------------------


def describe(
    rows: Rows, store: PrefixStore | None, exhibit: Exhibit, finding: Finding | None, mode: str
) -> dict:
    """The contents of bundle.json but for notes and checksums, as JSON values."""
    entry, run, request = exhibit.entry, exhibit.run, exhibit.entry.request
    identity = store.identity if store is not None else None
    config = getattr(rows.model, "config", None)
    return {
        "format": FORMAT,
        "version": VERSION,
        "written_unix": time.time(),
        "request": {
            "number": entry.handle.number,
            "tokens": entry.prompt.tolist(),
            "answer": [int(x) for x in entry.emitted],
            "max_new_tokens": int(request.max_new_tokens),
            "stop": [int(x) for x in request.stop],
            "sampling": plain(request.sampling),
            "tenant": request.tenant,
            "extra": plain(request.extra),
        },
        "lease": {
            "candidate_length": run.candidate,
            "resumable_length": run.resumable,
            "approximate": run.approximate,
            "routes": dict(run.routes),
            "reasons": [plain(x._asdict()) for x in run.reasons],
            "checkpoint_points": list(run.points),
            "epoch": (run.epoch or b"").hex(),
        },
        "state": {
            "length": exhibit.length,
            "at": exhibit.at,
            "grid_length": exhibit.grid,
            "replay": list(exhibit.replay) if exhibit.replay else None,
        },
        "engine": {
            "reuse": mode,
            "slots": rows.slots,
            "capacity": rows.capacity,
            "keep_prompt_logits": rows.keep_prompt_logits,
        },
        "finding": None if finding is None else finding_to_dict(finding),
        "identity": None if identity is None else plain(identity),
        "identity_digest": "" if identity is None else identity.digest.hex(),
        "model": {
            "kind": f"{type(rows.model).__module__}.{type(rows.model).__qualname__}",
            "config": plain(config),
            "leaves": plain(describe_leaves(rows.spec)),
            "block": rows.spec.block,
            "chunk": rows.spec.chunk,
        },
        "weights": {"digest": "" if identity is None else identity.weights},
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of everything that can change a bit."""
    found = {"python": platform.python_version(), "cache_layout": str(LAYOUT_VERSION)}
    found |= {x: importlib.metadata.version(x) for x in _PACKAGES}
    device = jax.devices()[0]
    return found | {"backend": device.platform, "device_kind": device.device_kind}


def finding_to_dict(finding: Finding) -> dict:
    """A finding as JSON values."""
    found = plain({x.name: getattr(finding, x.name) for x in dataclasses.fields(finding)})
    del found["handle"]
    return found | {"text": str(finding)}


def plain(value: object) -> object:
    """Any value as JSON values: dataclasses become mappings, what JSON lacks its repr."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {x.name: plain(getattr(value, x.name)) for x in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return repr(value)
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
