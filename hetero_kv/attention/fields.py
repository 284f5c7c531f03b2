"""The fields that a mechanism is built from."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hetero_kv.attention.rope import Rope, Yarn
from hetero_kv.packing import KINDS, Packing

_NONE: Mapping[str, Any] = MappingProxyType({})
_YARN = Yarn(1.0, 1, 1.0, 1.0)._asdict()  # a value of each field's type
_TYPES = {bool: "True or False", int: "an integer", float: "a number", str: "a string"}


def check_like(where: str, value: Any, like: Any) -> None:
    """Raises ValueError unless `value` is of the type that `like` has, a value of the same field.

    An integer is a number; True is neither, and numbers are finite. Values of other types are not
    looked at.
    """
    if type(like) not in _TYPES:
        return
    kinds = (int, float) if type(like) is float else type(like)
    if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(like, bool):
        raise ValueError(f"{where}={value!r}: {_TYPES[type(like)]} is needed")
    if type(like) is float and not math.isfinite(value):
        raise ValueError(f"{where}={value!r}: a finite number is needed")


def check_integer(where: str, value: Any, least: int) -> None:
    """Raises ValueError unless it is an integer, at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{where}={value!r}: an integer >= {least} is needed")


class Fields:
    """The fields of a model's configuration, with those of one layer type in front of them.

    kind: the layer type's name. Attributes are fields; `sizes` is for those that only the layer
    type has, `get` for those that a configuration may lack. `unused` are the layer type's own
    fields that nobody has asked for. table: where its own fields are declared.
    """

    def __init__(
        self, config: object, kind: str, own: Mapping[str, Any] = _NONE, table: str = "attention"
    ):
        self.kind, self.where = kind, f"{table}[{kind!r}]"
        self._config, self._own, self._asked = config, dict(own), set()
        self._idle: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self._asked.add(name)
        if name in self._own:
            value = self._own[name]
            check_like(f"{self.where}: {name}", value, getattr(self._config, name, None))
            return value
        if not hasattr(self._config, name):
            raise ValueError(f"{self.where} lacks a field {name!r}; add it")
        return getattr(self._config, name)

    def get(self, name: str, default: Any = None) -> Any:
        """The field, or `default` where there is none; it is of the default's type."""
        self._asked.add(name)
        if name not in self._own and not hasattr(self._config, name):
            return default
        value = getattr(self, name)
        check_like(f"{self.where}: {name}", value, default)
        return value

    def sizes(self, *names: str) -> tuple[int, ...]:
        """Integers >= 1 that the layer type must say; ValueError naming all that are missing."""
        missing = [x for x in names if x not in self._own and not hasattr(self._config, x)]
        if missing:
            raise ValueError(
                f"{self.where} lacks {', '.join(missing)}; such a type needs "
                f"{', '.join(names)}, integers >= 1"
            )
        values = tuple(getattr(self, name) for name in names)
        for name, value in zip(names, values, strict=True):
            check_integer(f"{self.where}: {name}", value, 1)
        return values

    def rope_of(self, theta: float, yarn: Yarn | None = None) -> Rope:
        """The layer type's `rope`, a mapping of fields of `Rope` (its yarn: a mapping of `Yarn`'s).

        What is not in it: dim is `rope_dim`, base and YaRN are those given here.
        """
        like = {"dim": 0, "theta": 0.0, "stretch": 1.0, "halves": False}
        own = self._mapping("rope", self.get("rope"), [x.name for x in dataclasses.fields(Rope)])
        for name in like.keys() & own.keys():
            check_like(f"{self.where}: rope: {name}", own[name], like[name])
        if own.get("yarn"):
            stretched = self._mapping("rope: yarn", own["yarn"], Yarn._fields)
            missing = [x for x in Yarn._fields if x not in {**stretched, **Yarn._field_defaults}]
            if missing:
                raise ValueError(f"{self.where}: rope: yarn lacks {', '.join(missing)}; add them")
            for name, value in stretched.items():
                check_like(f"{self.where}: rope: yarn: {name}", value, _YARN[name])
            own["yarn"] = Yarn(**stretched)
        try:
            return Rope(**({"dim": self.rope_dim, "theta": theta, "yarn": yarn} | own))
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from None

    def packing(self, leaf: str, width: int, rope: int = 0, group: int = 0) -> Packing | None:
        """How `cache_layouts` stores the leaf's rows of `width` values, as multiples of
        `cache_align` bytes; None: as they are.

        rope: rotated channels, the last ones of a row: layouts that may keep bfloat16 values keep
        these. group: values per scale, where a row is several vectors.

        Raises ValueError, naming the leaf, for a layout that its rows cannot have.
        """
        kind = (self.get("cache_layouts") or {}).get(leaf)
        if kind is None:
            self.idle(f"rows are packed: name {leaf!r} (or another leaf) in cache_layouts",
                      "cache_align")  # fmt: skip
            return None
        about = f"layer type {self.kind!r}: cache_layouts[{leaf!r}]={kind!r}"
        usable = [name for name in KINDS if rope or name != "fp8_rope"]
        if kind not in usable:
            raise ValueError(f"{about} is no layout of its rows; use one of {', '.join(usable)}")
        try:
            rope = rope if KINDS[kind].rope else 0
            return Packing(kind, width, rope, group, self.cache_dtype, self.get("cache_align", 0))
        except ValueError as error:
            raise ValueError(f"{about}: {error}") from None

    def _mapping(self, name: str, value: Any, known: Any) -> dict[str, Any]:
        """A field that is a mapping of known names, or empty; as a dict."""
        value, where = value or {}, f"{self.where}: {name}"
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}={value!r}: a dict of {list(known)} is needed")
        if unknown := sorted(set(value) - set(known)):
            raise ValueError(f"{where} has fields {unknown}; it may have {list(known)}")
        return dict(value)

    def idle(self, when: str, *names: str) -> None:
        """Says of fields that are not read as things are: they would be where it is `when`."""
        self._idle.update(dict.fromkeys(names, when))

    @property
    def unused(self) -> list[str]:
        """Own fields that were not read."""
        return sorted(set(self._own) - self._asked)

    def check_unused(self) -> None:
        """Raises ValueError naming own fields that nothing has read, and those that were read."""
        for name in self.unused:
            if name in self._idle:
                raise ValueError(
                    f"{self.where}: {name}={self._own[name]!r} is read only where "
                    f"{self._idle[name]}, or leave {name} out"
                )
        if self.unused:
            raise ValueError(
                f"{self.where} has fields that nothing reads: {self.unused}; it may have "
                f"{sorted(self._asked)}"
            )
