"""The scores of `make demo`: tutorial 01 as it is, in a process of its own.

    python benchmarks/demo.py [--smoke]

Evidence in nats per training vector, root mean square error in pixels, negative log density per
component and share inside the 95 % interval at held-out vectors, seconds of training.
"""

import csv
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from helpers.command import Sizes
from helpers.results import ROOT, save
from helpers.rows import Rows

SCRIPT = ROOT / "tutorials" / "01_wing_tip_vortex.py"


def main(words: Sequence[str] | None = None) -> None:
    arguments = Sizes(__file__, __doc__).parse_args(words)
    rows = Rows()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, SCRIPT, "--output", folder]
        subprocess.run(command + ["--smoke"] * arguments.smoke, check=True)
        with open(Path(folder) / "wing_tip_vortex_scores.csv", newline="") as file:
            for row in csv.DictReader(file):
                texts = {name: row.pop(name) for name in ("model", "held_out")}
                counts = {name: int(row.pop(name)) for name in ("training", "test")}
                rows.add(**texts, **counts, **{name: float(value) for name, value in row.items()})
    save(arguments, {"rows": rows})


if __name__ == "__main__":
    main()
