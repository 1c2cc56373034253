"""What was chosen on which samples, and what it brings: all that tables and figures show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from perturbkv.analyses.identity import RunIdentity
from perturbkv.analyses.questions.alpha.alpha_choice import Chosen, Fold
from perturbkv.analyses.questions.alpha.alpha_rows import Measured
from perturbkv.analyses.questions.alpha.alpha_rows_part import NAMES, OTHERS, Point, Row
from perturbkv.analyses.questions.alpha.alpha_sweep import Sweep
from perturbkv.configs.alpha_table import HEAD, LAYER, AlphaTable


@dataclass(frozen=True, repr=False)
class Choices:
    """What was chosen, and what it brings.

    Attributes:
        identity: which run this is.
        sweep: what every head loses at each α.
        folds: which samples were judged together, by what was chosen on the others.
        rows: isolated, each choice against the paper's α and against one α for all heads.
        curve: one α for all heads.
        chosen: on all samples: (layer, head) which α of the sweep.
        shares: the same as files hold it, by `global`, `layer`, `head`.
        unstable: of each level the share of layers or kept sets whose choice differs between folds.
        measured: what comes out, where each fold was run with its choice; None where it was not.
    """

    identity: RunIdentity
    sweep: Sweep
    folds: tuple[Fold, ...]
    rows: tuple[Row, ...]
    curve: tuple[Point, ...]
    chosen: Chosen
    shares: Mapping[str, AlphaTable]
    unstable: Mapping[str, float]
    measured: Measured | None

    @property
    def finest(self) -> str:
        """The finest level at which α was chosen: `head`, or `layer` where all its heads share a kept set."""
        return HEAD if HEAD in self.chosen else LAYER

    def row(self, by: str, chosen_on: str = OTHERS) -> Row:
        """The row of a level."""
        return next(row for row in self.rows if (row.name, row.chosen_on) == (NAMES[by], chosen_on))
