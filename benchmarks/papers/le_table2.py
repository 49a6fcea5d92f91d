"""Le, Sarlós & Smola 2013, Table 2: time and memory of Fastfood and of a dense projection.

    python benchmarks le_table2 [--rounds 21] [--smoke] [--output FOLDER]

The paper measures the time from the d inputs of one vector to its label. `prediction` is the same
computation: n inner products ⟨ω, x⟩, their cosines and sines, and ten outputs, of which the largest
is the label. One time is that of `Fastfood`, and the other that of the product of a dense matrix Ω
(n × d) and x in torch, for an RBF kernel in float64. The paper has n = 16 384 and more with C++
libraries, and its ratios are 24, 89 and 199. Times are CPU seconds with one thread, interleaved in
one process. The table has medians of the rounds and of their ratios. Operations that fit into
caches are called ten times per round.

- `prediction`: `user` is a comparison with `RBFSampler.transform` of scikit-learn, with the same Ω
  as its weights, and a product with ten vectors of weights. It has n cosines instead of 2n
  features.
- `projection`: the inner products alone, which the paper does not measure. They are the phases of
  an `ORFFKernel` with features that are already built. The phases divide x by the lengthscale, pad
  it, and multiply by the radii. `kernel.phases` also builds and checks the features. `cold` is one
  call of Fastfood after a dense product, which empties the caches.
- `thousand`: the projection of 1000 vectors, in a tenth of the rounds.
- `memory`: the bytes that are stored for the frequencies. Fastfood stores 1 + 8 + 8 + 8 bytes for
  each frequency: a sign, an index, a Gaussian number, and the number that determines its radius.
- `pieces`: the parts of the projection of one vector: two Hadamard transforms, a permutation, and
  products with signs, Gaussian numbers and radii.
- `limits`: lower limits of any implementation. A dense product reads 8nd bytes once. Fastfood reads
  the stored numbers, and its two transforms need at least 2n log₂ d additions. The transforms here
  multiply by dense blocks.

The figure is le_table2.png in the folder of the results.
"""

import math
import statistics
import time
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
    """Fastfood and a dense matrix Ω of the same size."""

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

        def label(phases: Callable) -> torch.Tensor:
            theta = phases(x)
            outputs = theta.cos() @ self.weights[:number] + theta.sin() @ self.weights[number:]
            return outputs.argmax(-1)

        return {
            "dense": lambda: label(lambda x: x @ self.omega.mT),
            "Fastfood": lambda: label(self.phases),
            "user": lambda: (self.sampler.transform(points) @ weights).argmax(-1),
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
        """The bytes that Fastfood stores, including one for each sign."""
        return sum(buffer.nbytes for buffer in self.draw.buffers())


def repeated(function: Callable[[], object], calls: int) -> Callable[[], None]:
    def several() -> None:
        for _ in range(calls):
            function()

    return several


def timed(work: Work, rounds: int, calls: int = CALLS) -> dict[str, float]:
    """Return the CPU seconds of one call of each computation, and the ratios to Fastfood."""
    numbers = [1 if name in ONCE else calls for name in work]
    repeats = [repeated(*pair) for pair in zip(work.values(), numbers, strict=True)]
    taken = interleaved(repeats, rounds, time.process_time)
    parts = zip(work, numbers, taken, strict=True)
    times = {name: [seconds / number for seconds in own] for name, number, own in parts}
    found = {name: statistics.median(own) for name, own in times.items()}
    if "Fastfood" in work:
        found["speedup"] = median_ratio(times["dense"], times["Fastfood"])
    if "user" in work:
        found["over user"] = median_ratio(times["user"], times["Fastfood"])
    return found


def limits(own: Projections, dense: float, fast: float) -> dict[str, float]:
    """Return bytes and additions, and their rates."""
    number, d = own.omega.shape
    additions = 2 * number * math.log2(d)
    return {
        "dense bytes": own.omega.nbytes,
        "dense GB/s": own.omega.nbytes / dense / 1e9,
        "Fastfood bytes": own.stored,
        "least additions": additions,
        "G additions/s": additions / fast / 1e9,
    }


def picture(tables):
    """Draw the seconds from the vector to its label, and the ratios of times with those of the
    paper."""
    figure, ((left, right),) = pictures.panels(1, 2)
    rows = tables["prediction"]
    d = [row["d"] for row in rows]
    hollow = {"marker": "s", "mfc": "white", "linestyle": ":"}
    paper = list(zip(*(PAPER.get(number, (math.nan,) * 4) for number in d), strict=True))
    for name, colour, printed in (
        ("Fastfood", pictures.BLUE, paper[0]),
        ("dense", pictures.ORANGE, paper[1]),
    ):
        left.loglog(d, [row[name] for row in rows], color=colour, marker="o", label=name)
        left.loglog(d, printed, color=colour, label=f"{name}, paper", **hollow)
    for what, label, colour in (
        ("prediction", "from the vector to its label", pictures.BLUE),
        ("projection", "the projection alone", pictures.GREEN),
    ):
        speedup = [row["speedup"] for row in tables[what]]
        right.loglog(d, speedup, color=colour, marker="o", label=label)
    right.loglog(d, paper[2], color="0.3", label="paper, to its label", **hollow)
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set(xlabel="inputs d")
        ax.minorticks_off()
        ax.legend(frameon=False, fontsize=8)
    left.set(ylabel="CPU seconds for one vector")
    right.set(ylabel="times faster than dense", yticks=(10, 20, 50, 100, 200))
    right.yaxis.set_major_formatter("{x:g}")
    return figure


@torch.no_grad()
def main(words: Sequence[str] | None = None) -> None:
    sizes = {"rounds": (21, 2), "most": (8192, 64)}
    arguments = Sizes(__file__, __doc__, **sizes).parse_args(words)
    torch.set_num_threads(1)
    sized = [size for size in SIZES if size[0] <= arguments.most] or [(arguments.most, 1024)]
    names = ("prediction", "projection", "thousand", "pieces", "memory", "limits")
    tables = {name: Rows() for name in names}
    for d, n in sized:
        own, what = Projections(d, n), {"d": d, "n": n}
        speedup, ratio = PAPER[d][2:] if d in PAPER else (None, None)
        one = timed(own.projection(), arguments.rounds)
        tables["prediction"].add(**what, **timed(own.prediction(), arguments.rounds), paper=speedup)
        tables["projection"].add(**what, **one)
        tables["pieces"].add(**what, **timed(own.pieces(), arguments.rounds))
        tables["limits"].add(**what, **limits(own, one["dense"], one["Fastfood"]))
        tables["thousand"].add(**what, **timed(own.thousand(), max(2, arguments.rounds // 10), 1))
        dense, fast = own.omega.nbytes, own.stored
        tables["memory"].add(**what, dense=dense, Fastfood=fast, ratio=dense / fast, paper=ratio)
        del own
    pictures.save_picture(arguments, picture(tables))
    save(arguments, {"outputs": OUTPUTS, "vectors": VECTORS, **tables})
