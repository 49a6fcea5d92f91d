"""The loss that plans foresee, against the evidence that their fits lack.

    python benchmarks plan_loss [--most 2200] [--every 3] [--smoke]

Searches on frequency grids of at most 100 to 1600 features, of the sets of `record` with at most
2200 values. Each row has

features    at most so many
foreseen    the loss of its plan in nats, M/4 (δ/(σ² + δ))² and that of rows
true        the evidence under the exact kernel that is missing to the best known, of `record`

and the table counts the rows by both. A plan may end a search where the foreseen loss is at most 1.
"""

import json
import warnings
from collections.abc import Iterator, Sequence
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
from gp_orff.fitting.plans import OnLattice
from gp_orff.fitting.searches import best_start
from gp_orff.fitting.trainer import Trainer
from gp_orff.inference.representation import FINE_FACTOR, Representation

FEATURES = (100, 200, 400, 800, 1600)
EDGES = (1.0, 3.0, 10.0)  # nats
EVALUATIONS = 60  # of a search


def known(name: str) -> float:
    """The best evidence that any fit or search has reached."""
    rows = json.loads((RESULTS / "record.json").read_text())["results"]["rows"]
    row = rows.get(f"fit / {name} / evidence", {})
    return max(row.get("known", -np.inf), row.get("present", -np.inf))


def chosen(most: int, every: int) -> Iterator[tuple[str, cases.Case]]:
    """Sets with a grid, whose noise is Gaussian."""
    names = list(cases.names())
    for name in [*names[: -len(cases.SPECIAL) : every], *cases.SPECIAL]:
        case = cases.names()[name]()
        if 100 < case.values <= most and not name.startswith(("Student-t", "harmonic", "learned")):
            yield name, case


def searched(case: cases.Case, features: int) -> tuple[gp_orff.VectorFieldGP, float] | None:
    """A model whose hyperparameters are those of a search on grids of so few features, and the loss
    that its plan foresees; None where no such grid was searched on."""
    model = case.model().condition(case.x, case.y, **case.options)
    kernel, likelihoods, data = model.kernel, model.state.likelihoods, model.state.data
    journal = Journal(Progress())
    trainer = Trainer(kernel, likelihoods, None, data.survey, journal, tracks=data.tracks)
    search = best_start(trainer)
    rule = gp_orff.Grid(domain=data.box)
    grids = Representation(kernel, likelihoods, rule, data, rule)
    if not grids.on_lattice:
        return None
    level = partial(Representation.fine, most=features)
    plan = OnLattice(trainer, "grid", grids, level, FINE_FACTOR, data.num_values)
    before = search.evaluations
    plan.search(search, EVALUATIONS)
    return (model, plan.loss) if search.evaluations > before else None


def row(name: str, case: cases.Case, features: int) -> dict[str, object] | None:
    """None where the kernel has no grid of so few features."""
    try:
        found = searched(case, features)
        if found is None:
            return None
        model, foreseen = found
        reached, _ = evidence.reached(case, model)
    except (ValueError, NotImplementedError, RuntimeError):
        return None
    missing = max(known(name) - reached, 0.0)
    return {"set": name, "features": features, "foreseen": foreseen, "true": missing}


def table(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """How many plans have a foreseen and a true loss between the edges."""
    ends = [0.0, *EDGES, np.inf]
    found = []
    for low, high in pairwise(ends):
        own = [r["true"] for r in rows if low <= r["foreseen"] < high or r["foreseen"] == high]
        counts = np.histogram(own, bins=ends)[0] if own else np.zeros(len(EDGES) + 1, int)
        words = [f"true < {edge:g}" for edge in EDGES] + [f"true ≥ {EDGES[-1]:g}"]
        found.append({"foreseen at least": low, **dict(zip(words, counts.tolist(), strict=True))})
    return found


def main(words: Sequence[str] | None = None) -> None:
    arguments = Sizes(__file__, __doc__, most=(2200, 200), every=(3, 40)).parse_args(words)
    torch.set_num_threads(1)
    rows = Rows()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of small grids, and of what they truncate
        for name, case in chosen(arguments.most, arguments.every):
            for features in FEATURES[: 2 if arguments.smoke else None]:
                if (found := row(name, case, features)) is not None:
                    rows.add(**found)
    counts = Rows()
    for line in table(rows):
        counts.add(**line)
    save(arguments, {"rows": list(rows), "table": list(counts)})
