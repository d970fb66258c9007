"""The time of a transfer between ranks, or to the host's memory: a latency and a bandwidth for each kind of link,
fitted to measured times.

`links.py` measures, and `schedule` uses the result. Where `LinkModel` has no link (with analytic costs, or for a scope
that the measured cluster did not have), `schedule` takes the configured bandwidths.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import polars as pl

from dflop.base import UserError
from dflop.store import LINK_MODEL_SCHEMA, LINKS_SCHEMA, read_parquet

__all__ = ["COMMUNICATOR", "HOST", "Link", "LinkModel", "fit_links", "measured_communicator_bytes", "read_links"]

# The kind of rows whose `num_bytes` are those that a communicator takes of a GPU, and `seconds` those to make it.
COMMUNICATOR = "communicator"
# The kind of a device's link to its host's memory, while all devices of a node copy.
HOST = "host"

_Bytes = TypeVar("_Bytes", float, np.ndarray)


@dataclass(frozen=True, slots=True)
class Link:
    """A link over which a transfer takes `latency_s`, plus its bytes divided by `bytes_per_s`."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: _Bytes) -> _Bytes:
        return self.latency_s + num_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class LinkModel:
    """`fitted[kind, scope, num_ranks]`: kind host, p2p, exchange or gradient_sync, scope intra (one node) or inter
    (several)."""

    fitted: dict[tuple[str, str, int], Link] = field(default_factory=dict)

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]]) -> "LinkModel":
        """The model in the rows of the table `link_model`."""
        return cls(
            {(row["kind"], row["scope"], row["num_ranks"]): Link(row["latency_s"], row["bytes_per_s"]) for row in rows}
        )

    def find(self, kind: str, scope: str, num_ranks: int) -> Link | None:
        """The link as measured with this number of ranks, or scaled from the nearest number that was measured; None
        where none was.

        A gradient sync is a reduce-scatter of gradients and an all-gather of parameters. It is scaled to n ranks as a
        ring, which takes 2(n - 1) steps of 1/n of the bytes each (Patarasuk and Yuan, "Bandwidth optimal all-reduce
        algorithms for clusters of workstations", 2009). The bytes of an exchange are those that come to a rank: their
        time hardly depends on how many ranks send them. Nor are links to the host scaled.
        """
        measured = [size for known, where, size in self.fitted if (known, where) == (kind, scope)]
        if not measured:
            return None
        nearest = min(measured, key=lambda size: (abs(math.log(size / num_ranks)), size))
        link = self.fitted[kind, scope, nearest]
        if kind in (HOST, "exchange"):
            return link
        more_steps = (num_ranks - 1) / (nearest - 1)
        return Link(link.latency_s * more_steps, link.bytes_per_s / more_steps * num_ranks / nearest)


def read_links(path: Path) -> pl.DataFrame:
    """The rows (`LINKS_SCHEMA`) of the file that `dflop profile-links` made.

    Raises:
        UserError: when the file is missing or is not such a file.
    """
    frame = read_parquet(path, made_by="profile-links")
    if frame.schema != LINKS_SCHEMA:
        raise UserError(
            f"{path} has the columns {', '.join(frame.columns)}, not those of measured links; make it with "
            "`dflop profile-links`"
        )
    return frame


def measured_communicator_bytes(links: pl.DataFrame) -> int | None:
    """Bytes that a communicator takes of a GPU, the most that any rank measured; None where none was measured."""
    return links.filter(pl.col("kind") == COMMUNICATOR)["num_bytes"].max()


def fit_links(links: pl.DataFrame) -> pl.DataFrame:
    """The table `link_model`, a row a kind, scope and number of ranks; `median_error` is the relative error of the fit.

    Latency and seconds per byte are non-negative and minimise the relative errors at the medians of the repeats.

    Raises:
        UserError: when a link was measured at one size alone, or in no time at all.
    """
    from scipy.optimize import nnls  # takes longer to import than most commands take

    rows = []
    links = links.filter(pl.col("kind") != COMMUNICATOR)
    points = links.group_by("kind", "scope", "num_ranks", "num_bytes", maintain_order=True).agg(
        pl.col("seconds").median()
    )
    for (kind, scope, num_ranks), frame in points.group_by("kind", "scope", "num_ranks", maintain_order=True):
        num_bytes, seconds = frame["num_bytes"].to_numpy().astype(float), frame["seconds"].to_numpy()
        if len(frame) < 2 or not (seconds > 0).all():
            raise UserError(
                f"{kind} {scope} of {num_ranks} ranks: {len(frame)} size(s), the shortest in {seconds.min():.3g} s, "
                "give no latency and bandwidth; run `dflop profile-links` again"
            )
        scale = np.array([seconds.min(), seconds.max() / num_bytes.max()])
        design = np.column_stack([np.ones(len(frame)), num_bytes]) * scale / seconds[:, None]
        latency_s, seconds_per_byte = nnls(design, np.ones(len(frame)))[0] * scale
        link = Link(float(latency_s), float(1 / seconds_per_byte) if seconds_per_byte else math.inf)
        errors = np.abs(link.seconds(num_bytes) / seconds - 1)
        rows.append((kind, scope, num_ranks, link.latency_s, link.bytes_per_s, len(frame), float(np.median(errors))))
    return pl.DataFrame(rows, schema=LINK_MODEL_SCHEMA, orient="row")
