"""The scores of `make demo`: an unchanged run of tutorial 01 in a separate process.

    python benchmarks demo [--smoke]

The tutorial predicts squares of 128 pixels, in the wake and in the core, from all other vectors.
The scores are the root mean square error in pixels, the negative log density per component, and the
fraction inside 95 % intervals. Further scores are the errors of two kernels that learn from few
vectors, averaged over random draws, and the total time in seconds.
"""

import csv
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from helpers.command import Sizes
from helpers.measure import seconds
from helpers.results import ROOT, save
from helpers.rows import Rows

SCRIPT = ROOT / "tutorials" / "01_wing_tip_vortex.py"


def main(words: Sequence[str] | None = None) -> None:
    arguments = Sizes(__file__, __doc__).parse_args(words)
    rows, few = Rows(), Rows()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, SCRIPT, "--output", folder]
        command += ["--smoke"] * arguments.smoke
        took = seconds(lambda: subprocess.run(command, check=True))
        with open(Path(folder) / "wing_tip_vortex_scores.csv", newline="") as file:
            for row in csv.DictReader(file):
                texts = {name: row.pop(name) for name in ("model", "part")}
                vectors = int(row.pop("vectors"))
                scores = {name: float(value) for name, value in row.items()}
                rows.add(**texts, vectors=vectors, **scores)
        draws = np.loadtxt(Path(folder) / "wing_tip_vortex_few.csv", delimiter=",", skiprows=1)
    for number in np.unique(draws[:, 0]):
        own = draws[draws[:, 0] == number]
        divergence_free, independent = own[:, 2:].mean(0).tolist()
        errors = {"divergence_free": divergence_free, "independent": independent}
        few.add(vectors=int(number), draws=len(own), **errors)
    save(arguments, {"rows": rows, "few": few, "seconds": took})
