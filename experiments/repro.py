"""Replays a bundle of an audit: what differs first, and is it what was recorded?

    python -m experiments.repro BUNDLE [--weights=PATH] [--out=FILE]

The prompt is computed cold, and the stored state is put into a row, replayed where the lease said
so, and run on to the end of the prompt; both are compared row by row, as in the audit. Weights: a
checkpoint of `experiments.checkpoint`, or a Hugging Face directory; default: what the bundle names.
Writes what it found as JSON, by default to BUNDLE/repro.json.

Exit code: 0 it is as recorded; 1 it is not, or cannot be told; 2 not possible: a damaged bundle,
other weights, another program.
"""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable, Mapping

import jax
import numpy as np
from absl import app, flags
from safetensors import SafetensorError

import models
from experiments import checkpoint, config_tools, run_record
from hetero_kv import bundle, bundle_files, snapshot, validate
from hetero_kv.audit import Audit, last_logits
from hetero_kv.bundle_files import Bundle
from hetero_kv.params import Params
from hetero_kv.prefix.identity import describe_leaves, weights_digest
from hetero_kv.requests import Handle
from hetero_kv.reusing import SHADOW
from hetero_kv.rows import Rows
from hetero_kv.state import Cache

REPRODUCED, NOT, UNKNOWN = "reproduced", "not reproduced", "cannot be told"
_WEIGHTS = flags.DEFINE_string("weights", "", "checkpoint, or directory of Hugging Face weights")
_OUT = flags.DEFINE_string("out", "", "JSON file; default: repro.json in the bundle")


# -- the model of a bundle -------------------------------------------------------------------------


def model_of(made: Bundle) -> models.Decoder:
    """The model that the bundle's configuration describes.

    Raises ValueError where this program would make another one of it.
    """
    about = made.about["model"]
    if not isinstance(about["config"], Mapping):
        raise ValueError(f"the bundle has no configuration of its model ({about['kind']})")
    try:
        model = models.build(config_tools.from_dict(models.DecoderConfig, about["config"]))
    except (TypeError, ValueError) as error:
        raise ValueError(f"the bundle is of a model that is not known here: {error}") from error
    spec = model.cache_spec
    if (spec.block, spec.chunk) != (about["block"], about["chunk"]):
        raise ValueError(
            f"the bundle is of blocks of {about['block']} and chunks of {about['chunk']} tokens, "
            f"here its configuration makes {spec.block} and {spec.chunk}"
        )
    for have, want in zip(bundle.plain(describe_leaves(spec)), about["leaves"], strict=False):
        if have != want:
            raise ValueError(f"the bundle's cache has {want}, and {have} here: another program")
    if len(about["leaves"]) != len(describe_leaves(spec)):
        raise ValueError(f"the bundle's cache has {len(about['leaves'])} leaves, not as many here")
    return model


def weights_of(made: Bundle, model: models.Decoder, path: str = "") -> Params:
    """The bundle's weights, from `path` or from where it says. ValueError for any others."""
    path, digest = path or made.about["weights"].get("source", ""), made.about["weights"]["digest"]
    if not path:
        raise ValueError("the bundle does not say where its weights are: give --weights=PATH")
    try:
        if (pathlib.Path(path) / "config.json").is_file():
            _, params = models.from_pretrained(path)
        else:
            _, params = checkpoint.load(path)
    except FileNotFoundError as error:
        raise ValueError(f"no weights at {path!r}: {error}; give others with --weights") from None
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"the weights at {path!r} cannot be read: {error}; give others with --weights"
        ) from None
    if not digest:
        raise ValueError("the bundle names no weights digest: its engine had no store")
    found = weights_digest(params)
    if found == digest:
        return jax.device_put(params)
    shapes = jax.tree.map(np.shape, params) == jax.tree.map(np.shape, model.abstract_params())
    if shapes:  # an engine may run on what `prepare` makes of them
        prepared = model.prepare(jax.device_put(params))
        if weights_digest(prepared) == digest:
            return prepared
    raise ValueError(
        f"{path} holds weights {found[:16]}…, and the bundle was made with {digest[:16]}…: "
        "give those with --weights (or an older version prepared them otherwise)"
    )


def warnings(made: Bundle) -> list[str]:
    """What here may change bits that the bundle recorded."""
    here = bundle.versions()
    found = [
        f"{name} is {here.get(name)} here, and was {value}: bits may differ"
        for name, value in made.about["versions"].items()
        if here.get(name) != value
    ]
    return found + made.about["notes"]


# -- the replay ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Cold:
    """The prompt computed cold: the row at the resumed length, and the last logits."""

    row: Cache
    logits: np.ndarray


def _cold(rows: Rows, params: Params, prompt: np.ndarray, length: int) -> _Cold:
    cache, at, kept = rows.new(1), 0, None
    for stop in (length, len(prompt)):
        while at < stop:
            logits, cache, _ = rows.prefill(params, cache, 0, prompt, at, stop)
            count, _ = rows.piece(at, stop)
            at += count
        if stop == length:
            kept = rows.take(cache, 0)
    return _Cold(kept, last_logits(logits, count))


def replay(made: Bundle, model: models.Decoder, params: Params) -> dict:
    """Recomputes, replays and compares; fields as in repro.json, but for paths and warnings."""
    about, recorded = made.about, made.about["finding"]
    prompt = np.array(about["request"]["tokens"], np.int32)
    state, engine = about["state"], about["engine"]
    rows = Rows(
        model,
        slots=1,
        capacity=engine["capacity"],
        keep_prompt_logits=engine["keep_prompt_logits"],
    )
    cold = _cold(rows, params, prompt, state["length"])
    served, other = made.arrays.get(bundle_files.SERVED), made.arrays.get(bundle_files.RECOMPUTED)
    if engine["reuse"] == SHADOW:  # the answer came from the cold path
        served, other = other, served
    found = {
        "recorded": recorded,
        "found": None,
        "first": None,
        "evidence": [],
        "cold_logits_as_recorded": _same(cold.logits, other),
        "resumed_logits_as_recorded": None,
        "answer_differs_from_cold": None if served is None else not _same(served, cold.logits),
    }
    leaves = made.leaves()
    if not state["length"]:
        same = _same(cold.logits, made.arrays.get(bundle_files.SERVED))
        return found | {"verdict": REPRODUCED if same else NOT}
    if not leaves:
        return found | {"verdict": UNKNOWN}
    partial = leaves.keys() != {x.path for x in snapshot.kept(rows.spec)}
    into = rows.take(cold.row, 0) if partial else rows.new(1)
    held = snapshot.put_leaves(rows.spec, into, leaves, state["at"], state["grid_length"])
    if not state["replay"]:
        verdict = validate.evidence(rows.spec, held)
        found["evidence"] = validate.describe(rows.spec, verdict, 0)
    audit = Audit(
        rows,
        Handle(about["request"]["number"]),
        prompt,
        state["length"],
        held,
        shadow=True,
        replay=tuple(state["replay"]) if state["replay"] else None,
        floor=recorded["floor"] if recorded else 0.0,
    )
    audit.cold, audit.served = cold.row, cold.logits
    while audit.finding is None:
        audit.advance(params)
    now = bundle.finding_to_dict(audit.finding)
    found |= {
        "found": now,
        "first": {x: now[x] for x in _FIRST},
        "resumed_logits_as_recorded": _same(audit.recomputed, served),
    }
    as_recorded = recorded is not None and _what(recorded) == _what(now)
    return found | {"verdict": REPRODUCED if as_recorded else NOT}


_FIRST = ("component", "leaf", "block", "position")


def _what(finding: Mapping) -> list:
    """What a finding says, but for the size of errors."""
    leaves = [(x["path"], x["layer"], x["position"]) for x in finding["leaves"]]
    return [finding[x] for x in ("ok", *_FIRST)] + sorted(leaves)


def _same(one: np.ndarray, two: np.ndarray | None) -> bool | None:
    """Bit for bit; None: there is nothing to compare with."""
    return None if two is None else one.tobytes() == two.tobytes()


def report(found: Mapping) -> list[str]:
    """What `repro` found, for people."""
    lines = [f"warning: {x}" for x in found["warnings"]]
    recorded = found["recorded"]
    lines.append(f"recorded: {recorded['text'] if recorded else 'no audit was made'}")
    if found["found"]:
        lines.append(f"here:     {found['found']['text']}")
        lines += [
            f"  {x['component']} ({x['path']}, layer {x['layer']}): first at position "
            f"{x['position']}, block {x['block']}, by at most {x['error']:.3g}"
            for x in found["found"]["leaves"]
        ]
    lines += [f"  the evidence of the stored state is wrong: {x}" for x in found["evidence"]]
    for name, text in (
        ("cold_logits_as_recorded", "logits of the cold run"),
        ("resumed_logits_as_recorded", "logits of the resumed run"),
    ):
        if found[name] is not None:
            lines.append(f"{text}: {'as' if found[name] else 'NOT as'} recorded, bit for bit")
    return [*lines, f"verdict: {found['verdict']}"]


def run(
    path: str | os.PathLike, weights: str = "", out: str = "", say: Callable[[str], None] = print
) -> int:
    """Replays a bundle; returns the exit code."""
    try:
        made = bundle_files.load(path)
        model = model_of(made)
        params = weights_of(made, model, weights)
        found = {"bundle": os.fspath(path), "warnings": warnings(made)}
        found |= replay(made, model, params)
    except ValueError as error:
        say(str(error))
        return 2
    target = pathlib.Path(out) if out else pathlib.Path(path) / "repro.json"
    run_record.write_json(target, found)
    for line in report(found):
        say(line)
    say(f"written: {target}")
    return 0 if found["verdict"] == REPRODUCED else 1


def main(argv: list[str]) -> None:
    """Replays the bundle that the command line names."""
    if len(argv) != 2:
        raise app.UsageError("give one bundle: python -m experiments.repro BUNDLE")
    sys.exit(run(argv[1], _WEIGHTS.value, _OUT.value))


if __name__ == "__main__":
    app.run(main)
