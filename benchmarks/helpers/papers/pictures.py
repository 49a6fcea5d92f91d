"""Figures in the folder of the results."""

from argparse import Namespace
from io import BytesIO

import matplotlib
from PIL import Image

matplotlib.use("agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PINK = (  # Okabe & Ito, safe for colour-blind readers
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#F0E442",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)
COLOURS = 64  # of a PNG: a third of the size, and no difference to see


def panels(rows: int, columns: int, **kwargs: object) -> tuple[Figure, list[list[Axes]]]:
    """A page-wide figure of panels with a light grid."""
    figure, axes = plt.subplots(
        rows, columns, figsize=(10, 0.7 + 3.1 * rows), squeeze=False, layout="constrained", **kwargs
    )
    for ax in axes.flat:
        ax.grid(color="0.92", lw=0.6)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_picture(arguments: Namespace, figure: Figure) -> None:
    """Write `<benchmark>.png` into the output folder, if there is one."""
    if arguments.output is not None:
        path = (arguments.output / arguments.benchmark).with_suffix(".png")
        path.parent.mkdir(parents=True, exist_ok=True)
        if arguments.smoke:  # nobody looks at it, and a layout draws everything several times
            figure.set_layout_engine("none")
        buffer = BytesIO()
        figure.savefig(buffer, dpi=30 if arguments.smoke else 150)
        Image.open(buffer).convert("RGB").quantize(COLOURS).save(path, optimize=True)
        print(f"figure: {path}")
    plt.close(figure)
