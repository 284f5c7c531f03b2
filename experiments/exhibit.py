"""What a run shows: claims with verdicts, tables, figures. Runners make one; reports join them."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence

import matplotlib.axes
import matplotlib.figure

from experiments.bench.report import Table

# Okabe and Ito's colours, told apart by colour-blind readers as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
REPRODUCED, DIRECTION, NOT = "reproduced", "direction only", "not reproduced"
UNTESTED = "not tested"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """A published value and what was found here.

    margin: how far `found` may be from `published`; a share of it, or with `absolute` an amount.
    relation: "equal", or "at least": then a larger value is no fault.
    neutral: the value that would mean no effect; a claim whose margin is missed still holds in its
    direction where found and published lie on the same side of it. None: it has no direction.
    untested: why this run says nothing about the claim, whatever was found: a model that the claim
    is about has not learnt what it presupposes. Empty: the run does.
    """

    name: str
    published: float
    found: float
    margin: float
    source: str
    absolute: bool = False
    relation: str = "equal"
    neutral: float | None = None
    note: str = ""
    untested: str = ""

    def __post_init__(self):
        if self.relation not in ("equal", "at least"):
            raise ValueError(f"relation={self.relation!r} must be 'equal' or 'at least'")
        if self.margin < 0 or (not self.absolute and not self.published):
            raise ValueError(f"{self.name}: a margin >= 0, and absolute where 0 is published")

    @property
    def off(self) -> float:
        """Signed distance from the published value, in units of the margin's."""
        distance = self.found - self.published
        return distance if self.absolute else distance / abs(self.published)

    @property
    def verdict(self) -> str:
        """REPRODUCED, DIRECTION or NOT; UNTESTED where the run cannot tell."""
        if self.untested:
            return UNTESTED
        inside = self.off >= -self.margin if self.relation == "at least" else (
            abs(self.off) <= self.margin
        )  # fmt: skip
        if inside:
            return REPRODUCED
        if self.neutral is None:
            return NOT
        same = (self.found - self.neutral) * (self.published - self.neutral) > 0
        return DIRECTION if same else NOT

    def row(self) -> list[str]:
        """As cells of `claims_table`."""
        off = f"{self.off:+.3g}" if self.absolute else f"{self.off:+.1%}"
        margin = f"{self.margin:g}" if self.absolute else f"{self.margin:.1%}"
        wanted = f"≥ {self.published:.4g}" if self.relation == "at least" else (
            f"{self.published:.4g}"
        )  # fmt: skip
        about = "; ".join(x for x in (self.source, self.note, self.untested) if x)
        return [self.name, wanted, f"{self.found:.4g}", off, margin, self.verdict, about]

    def values(self) -> dict:
        """As JSON."""
        return {**dataclasses.asdict(self), "verdict": self.verdict}

    @classmethod
    def read(cls, values: Mapping) -> "Claim":
        """From JSON."""
        return cls(**{k: v for k, v in values.items() if k != "verdict"})


def claims_table(claims: Sequence[Claim]) -> Table:
    """One line a claim."""
    columns = ("claim", "published", "here", "off by", "margin", "verdict", "source")
    return Table("Claims", columns, [x.row() for x in claims])


@dataclasses.dataclass
class Exhibit:
    """All that a run has to show. figures: by file stem."""

    title: str
    intro: str = ""
    claims: Sequence[Claim] = ()
    tables: Sequence[Table] = ()
    figures: Mapping[str, matplotlib.figure.Figure] = dataclasses.field(default_factory=dict)

    @property
    def shown(self) -> list[Table]:
        """The claims, then the tables, those without rows left out."""
        every = [claims_table(self.claims), *self.tables]
        return [table for table in every if table.rows]

    def markdown(self, pictures: Mapping[str, str]) -> str:
        """A section. pictures: the link of each figure by its stem."""
        parts = [f"# {self.title}", "", *([self.intro, ""] if self.intro else [])]
        parts += [f"![{stem}]({pictures[stem]})\n" for stem in self.figures]
        return "\n".join([*parts, *(x.markdown() for x in self.shown)])

    def write(self, directory: str | os.PathLike) -> None:
        """Writes report.md and the figures."""
        place = pathlib.Path(directory)
        place.mkdir(parents=True, exist_ok=True)
        pictures = self.save(place)
        (place / "report.md").write_text(self.markdown(pictures))

    def save(self, place: pathlib.Path, prefix: str = "") -> dict[str, str]:
        """Writes the figures; file name by stem."""
        names = {stem: f"{prefix}{stem}.png" for stem in self.figures}
        for stem, figure in self.figures.items():
            figure.savefig(place / names[stem], dpi=120)
        return names


def plain(*axes: matplotlib.axes.Axes) -> None:
    """Colours of COLOURS, and no frame above and to the right."""
    for axis in axes:
        axis.set_prop_cycle(color=list(COLOURS))
        axis.spines[["top", "right"]].set_visible(False)
