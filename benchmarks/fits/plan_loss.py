"""The loss of evidence that fit plans predict, compared with the true loss.

    python benchmarks plan_loss [--most 4096] [--every 3] [--smoke]

The searches use frequency grids of at most 100 to 1600 features. The data are the sets of `record`
with at most 4096 values. They include sets in space, with time, along tracks, with Student-t noise
and with harmonic kernels. The columns are

values      M, the number of observed values
inputs      the number of inputs of the kernel
features    the largest number of features
foreseen    the loss that the plan predicts in nats, M/4 (δ/(σ² + δ))²
by gradient ½ gᵀH⁻¹g, from the gradient and the information under the exact kernel
true        the best known evidence, of `record` or of this run, minus the evidence of the fit, both
            under the exact kernel

The tables count the rows by each predicted loss and the true loss. They also count the rows within
a factor of five of a true loss above a tenth of a nat. A fit uses the first prediction if it is
below a tenth of a nat or above one nat, and the second prediction otherwise.
"""

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from helpers.command import RESULTS, Sizes
from helpers.record import cases, evidence
from helpers.results import save
from helpers.rows import Rows

import gp_orff
from gp_orff.fitting.journal import Journal, Progress
from gp_orff.fitting.plans import OnLattice, loss_by_gradient
from gp_orff.fitting.robust_em import has_weights, start_with_weights
from gp_orff.fitting.strategy import best_start
from gp_orff.fitting.trainer import Trainer
from gp_orff.inference.price import BUDGET, FINE_FACTOR
from gp_orff.inference.representation import Representation

FEATURES = (100, 200, 400, 800, 1600)
EDGES = (1.0, 3.0, 10.0)  # nats
LOSSES = "foreseen", "by gradient"
NOTHING = 1e-2  # nats: further grids lose no less
SMALL, FACTOR = 0.1, 5  # true losses in nats; how near is near


def known(name: str) -> float:
    """Return the best evidence that any recorded fit or search has reached."""
    rows = json.loads((RESULTS / "record.json").read_text())["results"]["rows"]
    row = rows.get(f"fit / {name} / evidence", {})
    return max(row.get("known", -np.inf), row.get("present", -np.inf))


def chosen(most: int, every: int) -> Iterator[tuple[str, cases.Case]]:
    """Yield the cases whose fits may use a grid."""
    names = list(cases.names())
    for name in [*names[: -len(cases.SPECIAL) : every], *cases.SPECIAL]:
        case = cases.names()[name]()
        if 100 < case.values <= most and not name.startswith("learned"):
            yield name, case


def rows_of(name: str, case: cases.Case, sizes: Sequence[int]) -> Iterator[dict[str, object]]:
    """Yield a row for each grid that can be built, with increasing numbers of features.

    The last row is the first one whose losses are negligible. All searches begin at the same start.
    """
    model = case.model().condition(case.x, case.y, **case.options)
    kernel, likelihoods, data = model.kernel, model.state.likelihoods, model.state.data
    journal = Journal(Progress())
    trainer = Trainer(kernel, likelihoods, None, data.survey, journal, tracks=data.tracks)
    if has_weights(trainer, data):
        data = start_with_weights(trainer, data, warm_start=False)
        start = trainer.new_search().reached
    else:
        start = best_start(trainer).reached
    rule = gp_orff.Grid(domain=data.box)
    grids = Representation(kernel, likelihoods, rule, data, rule)
    known = {"set": name, "values": case.values, "inputs": case.x.shape[-1]}
    for features in sizes:
        level = partial(Representation.fine, most=features, returned=not grids.on_lattice)
        plan = OnLattice(trainer, "grid", grids, level, FINE_FACTOR, data.num_values)
        (search := trainer.new_search()).go_to(start)
        before = search.evaluations
        plan.search(search, BUDGET)
        if search.evaluations == before:  # no grid of so few features
            continue
        reached, _ = evidence.reached(case, model)
        losses = {"foreseen": plan.loss, "by gradient": loss_by_gradient(plan)}
        yield {**known, "features": features, **losses, "reached": reached}
        if max(losses.values()) < NOTHING:
            break


def table(rows: list[dict[str, object]], loss: str) -> list[dict[str, object]]:
    """Return how many plans have a predicted loss in one interval and a true loss in another."""
    ends = [0.0, *EDGES, np.inf]
    found = []
    for low, high in pairwise(ends):
        own = [r["true"] for r in rows if low <= r[loss] < high or r[loss] == high]
        counts = np.histogram(own, bins=ends)[0] if own else np.zeros(len(EDGES) + 1, int)
        words = [f"true < {edge:g}" for edge in EDGES] + [f"true ≥ {EDGES[-1]:g}"]
        found.append(
            {"loss": loss, "at least": low, **dict(zip(words, counts.tolist(), strict=True))}
        )
    return found


def near(rows: list[dict[str, object]], loss: str) -> int:
    """Return how many rows have a predicted loss within the factor `FACTOR` of the true loss."""
    return sum(1 / FACTOR <= own[loss] / own["true"] <= FACTOR for own in rows)


def with_true(rows: list[dict[str, object]], name: str) -> list[dict[str, object]]:
    """Return the rows of a set with their true loss, which is the best known evidence minus the
    evidence of the row."""
    best = max([known(name), *(own["reached"] for own in rows)])
    return [{**own, "true": best - own["reached"]} for own in rows]


def main(words: Sequence[str] | None = None) -> None:
    arguments = Sizes(__file__, __doc__, most=(4096, 200), every=(3, 40)).parse_args(words)
    torch.set_num_threads(1)
    rows, sizes = Rows(), FEATURES[: 2 if arguments.smoke else None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of small grids, and of what they truncate
        for name, case in chosen(arguments.most, arguments.every):
            found = []
            with suppress(ValueError, NotImplementedError, RuntimeError):  # no such grid
                for own in rows_of(name, case, sizes):
                    found.append(own)
            for own in with_true(found, name):
                rows.add(**own)
    counts = Rows()
    for loss in LOSSES:
        for line in table(rows, loss):
            counts.add(**line)
    large = [own for own in rows if own["true"] > SMALL]
    close = {loss: near(large, loss) for loss in LOSSES}
    close["of"] = len(large)
    print(f"within a factor of {FACTOR}: {close}")
    save(arguments, {"rows": list(rows), "table": list(counts), "close": close})
