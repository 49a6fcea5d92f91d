"""Le, Sarlós & Smola 2013, Table 2: time and memory of Fastfood and of a dense projection.

    python benchmarks le_table2 [--rounds 21] [--smoke] [--output FOLDER]

n inner products ⟨ω, x⟩ with d inputs in float64, by `Fastfood` and by the product of a dense matrix
Ω (n × d) with x in torch, for an RBF kernel. Interleaved in one process; medians of the rounds, and
of their ratios. Each with one thread and with as many as torch takes. In a round, what fits into
caches is called ten times; `cold` is one call of Fastfood, after a dense product, which empties
them.

- `projection`: of one vector, alone: the phases of an `ORFFKernel` whose features are built, which
  scale x by the lengthscale, pad, and scale by the radii. `kernel.phases` builds and checks them.
- `prediction`: of one vector, the projection, cosines, sines, and ten outputs. `user` has
  scikit-learn's `RBFSampler.transform`, with the same Ω as its weights, and a product with ten
  vectors of weights: what a user would use instead (n cosines, not 2n features).
- `thousand`: the projection of 1000 vectors (a tenth of the rounds).
- `memory`: bytes of what is stored for the frequencies. Fastfood keeps 1 + 8 + 8 + 8 bytes for each
  frequency: a sign, an index, a Gaussian number, and what its radius is computed from.
- `pieces`: of the projection of one vector, one thread: two Hadamard transforms, a permutation, and
  products with signs, Gaussian numbers and radii.
- `limits`: what cannot be avoided. A dense product reads 8nd bytes once. Fastfood reads what it
  stores, and its two transforms add at least 2n log₂ d numbers; ours multiply by dense blocks.

The paper has n = 16 384 and more with C++ libraries, one vector, and prints 24×, 89× and 199×.
Draws le_table2.png beside the results.
"""

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
import torch
from gpytorch.kernels import RBFKernel
from helpers.command import Sizes
from helpers.measure import interleaved, median_ratio
from helpers.papers import pictures
from helpers.results import save
from helpers.rows import Rows
from sklearn.kernel_approximation import RBFSampler

import gp_orff
from gp_orff.features.phases import hadamard

SIZES = ((1024, 16_384), (4096, 32_768), (8192, 65_536))
OUTPUTS, VECTORS, CALLS = 10, 1000, 10
ONCE = ("dense", "cold", "user")  # calls in a round
PAPER = {  # Fastfood, Random Kitchen Sinks (seconds), speed and memory
    1024: (0.00058, 0.0139, 24, 256),
    4096: (0.00137, 0.1222, 89, 1024),
    8192: (0.00269, 0.5351, 199, 2048),
}
Work = dict[str, Callable[[], object]]


class Projections:
    """Fastfood and a dense Ω of one size."""

    def __init__(self, num_inputs: int, number: int):
        rbf = RBFKernel().double()
        rbf.lengthscale = num_inputs**0.5
        self.kernel = gp_orff.ORFFKernel(rbf, gp_orff.Fastfood(number), num_dims=num_inputs)
        (self.draw,) = self.kernel.frequencies
        self.phases = self.kernel._expansion(num_inputs).phi.phases
        generator = torch.Generator().manual_seed(0)
        random = {"generator": generator, "dtype": torch.float64}
        self.omega = torch.randn(number, num_inputs, **random).mul_(num_inputs**-0.5)
        self.x = torch.randn(VECTORS, num_inputs, **random)
        self.weights = torch.randn(2 * number, OUTPUTS, **random)
        self.sampler = RBFSampler(gamma=0.5 / num_inputs, n_components=number)
        self.sampler.fit(np.zeros((1, 1)))  # its attributes, for the dense Ω of the others
        self.sampler.random_weights_ = self.omega.mT.numpy()
        self.sampler.n_features_in_ = num_inputs

    def projection(self) -> Work:
        x = self.x[:1]
        return {
            "dense": lambda: x @ self.omega.mT,
            "cold": lambda: self.phases(x),
            "Fastfood": lambda: self.phases(x),
            "kernel.phases": lambda: self.kernel.phases(x),
        }

    def prediction(self) -> Work:
        x, number = self.x[:1], len(self.omega)
        points, weights = x.numpy(), self.weights[:number].numpy()

        def outputs(phases: Callable) -> torch.Tensor:
            theta = phases(x)
            return theta.cos() @ self.weights[:number] + theta.sin() @ self.weights[number:]

        return {
            "dense": lambda: outputs(lambda x: x @ self.omega.mT),
            "Fastfood": lambda: outputs(self.phases),
            "user": lambda: self.sampler.transform(points) @ weights,
        }

    def thousand(self) -> Work:
        return {
            "dense": lambda: self.x @ self.omega.mT,
            "Fastfood": lambda: self.kernel.phases(self.x),
        }

    def pieces(self) -> Work:
        (own,) = self.draw.projections
        x = torch.nn.functional.pad(self.x[:1], (0, own.signs.shape[-1] - self.x.shape[-1]))
        mixed = hadamard(x * own.signs)
        theta = mixed.reshape(1, -1)[:, : len(self.omega)]
        return {
            "signs": lambda: x * own.signs,
            "two transforms": lambda: hadamard(hadamard(mixed)),
            "permutation": lambda: mixed.gather(-1, own.order),
            "Gaussian numbers": lambda: mixed * own.gaussians,
            "radii": lambda: theta * self.phases.radius.mT,
            "all": lambda: self.phases(self.x[:1]),
        }

    @property
    def stored(self) -> int:
        """Bytes of Fastfood, one for each sign."""
        return sum(buffer.nbytes for buffer in self.draw.buffers())


def repeated(function: Callable[[], object], calls: int) -> Callable[[], None]:
    def several() -> None:
        for _ in range(calls):
            function()

    return several


def timed(work: Work, rounds: int, calls: int = CALLS) -> dict[str, float]:
    """Seconds of a call of each, and how many times as long others take as Fastfood."""
    numbers = [1 if name in ONCE else calls for name in work]
    repeats = [repeated(*pair) for pair in zip(work.values(), numbers, strict=True)]
    parts = zip(work, numbers, interleaved(repeats, rounds), strict=True)
    times = {name: [seconds / number for seconds in own] for name, number, own in parts}
    found = {name: statistics.median(own) for name, own in times.items()}
    if "Fastfood" in work:
        found["speedup"] = median_ratio(times["dense"], times["Fastfood"])
    if "user" in work:
        found["over user"] = median_ratio(times["user"], times["Fastfood"])
    return found


def limits(own: Projections, dense: float, fast: float) -> dict[str, float]:
    """Bytes and additions, and their rates."""
    number, d = own.omega.shape
    additions = 2 * number * math.log2(d)
    return {
        "dense bytes": own.omega.nbytes,
        "dense GB/s": own.omega.nbytes / dense / 1e9,
        "Fastfood bytes": own.stored,
        "least additions": additions,
        "G additions/s": additions / fast / 1e9,
    }


def picture(tables, threads):
    """Seconds of a projection, and how many times faster, beside the paper."""
    figure, ((left, right),) = pictures.panels(1, 2)
    for count in dict.fromkeys((1, threads)):
        kind = "-" if count == 1 else "--"
        own = [row for row in tables["projection"] if row["threads"] == count]
        d = [row["d"] for row in own]
        for name, colour in (("dense", pictures.ORANGE), ("Fastfood", pictures.BLUE)):
            label = f"{name}, {count} thread{'s' * (count > 1)}"
            style = {"color": colour, "linestyle": kind, "marker": "o", "label": label}
            left.loglog(d, [row[name] for row in own], **style)
        for what, colour in (("projection", pictures.BLUE), ("prediction", pictures.GREEN)):
            rows = [row for row in tables[what] if row["threads"] == count]
            label = f"{what}, {count} thread{'s' * (count > 1)}"
            style = {"color": colour, "linestyle": kind, "marker": "o", "label": label}
            right.loglog(d, [row["speedup"] for row in rows], **style)
    printed = [PAPER[number] for number in d if number in PAPER]
    if len(printed) == len(d):
        hollow = {"marker": "s", "mfc": "white", "linestyle": ":"}
        fast, dense, speedup, _ = zip(*printed, strict=True)
        left.loglog(d, dense, color=pictures.ORANGE, label="dense, paper", **hollow)
        left.loglog(d, fast, color=pictures.BLUE, label="Fastfood, paper", **hollow)
        right.loglog(d, speedup, color="0.3", label="paper", **hollow)
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set(xlabel="inputs d")
        ax.minorticks_off()
        ax.legend(frameon=False, fontsize=8)
    left.set(ylabel="seconds for one vector")
    right.set(ylabel="times faster than dense")
    return figure


@torch.no_grad()
def main(words: Sequence[str] | None = None) -> None:
    sizes = {"rounds": (21, 2), "most": (8192, 64)}
    arguments = Sizes(__file__, __doc__, **sizes).parse_args(words)
    threads = torch.get_num_threads()
    sized = [size for size in SIZES if size[0] <= arguments.most] or [(arguments.most, 1024)]
    tables = {
        name: Rows()
        for name in ("projection", "prediction", "thousand", "pieces", "memory", "limits")
    }
    try:
        for d, n in sized:
            own, what = Projections(d, n), {"d": d, "n": n}
            for count in dict.fromkeys((1, threads)):
                torch.set_num_threads(count)
                at = {**what, "threads": count}
                one = timed(own.projection(), arguments.rounds)
                printed = {"paper": PAPER[d][2] if d in PAPER else None}
                tables["projection"].add(**at, **one, **printed)
                tables["prediction"].add(**at, **timed(own.prediction(), arguments.rounds))
                if count == 1:
                    tables["pieces"].add(**at, **timed(own.pieces(), arguments.rounds))
                    tables["limits"].add(**what, **limits(own, one["dense"], one["Fastfood"]))
            few = max(2, arguments.rounds // 10)
            tables["thousand"].add(**what, threads=count, **timed(own.thousand(), few, 1))
            dense, fast = own.omega.nbytes, own.stored
            printed = {"paper": PAPER[d][3] if d in PAPER else None}
            tables["memory"].add(**what, dense=dense, Fastfood=fast, ratio=dense / fast, **printed)
            del own
    finally:
        torch.set_num_threads(threads)
    pictures.save_picture(arguments, picture(tables, threads))
    save(arguments, {"outputs": OUTPUTS, "vectors": VECTORS, **tables})
