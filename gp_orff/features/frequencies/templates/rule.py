"""A rule for few inputs: positive, local features of the RBF kernel."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real

import numpy as np
import torch

from gp_orff.features.frequencies.rule import Draw, TermSpectrum, check_seed
from gp_orff.features.frequencies.templates.draw import TemplateDraw, reach
from gp_orff.kernels.base import check_positive_integer
from gp_orff.kernels.spectra.elliptical import Gaussian


@dataclass(frozen=True)
class Templates:
    r"""Positive, local features of an RBF kernel: bumps around random templates z.

    For each template z ~ N(0, I/b) there is one feature, with x̃ = (x − center)/ℓ,

        φ_z(x) = (a/(a − 2))^{d/4} exp(−½[2‖x̃‖² − 2a⟨x̃, z⟩ + a‖z‖²]) ,    b = a² − 2a .

    It is a Gaussian bump around x̃ = (a/2) z. With n templates, the mean of φ_z(x) φ_z(x′) estimates
    the RBF kernel exp(−½‖x̃ − x̃′‖²) without bias. Unlike waves, bumps leave distant inputs alone,
    and are never negative.

    Their variance grows exponentially with d and with the distance from the center. At x = x′ with
    ‖x̃‖ = r the variance of the kernel, which is 1, is

        (1/n) [(a²/(a² − 4))^{d/2} exp(4r²(a − 2)/(a + 2)) − 1] .

    At r = √d, a = 2.45 is the best, and the square bracket is 2.6^d − 1: 16 for d = 3, 14 000 for
    d = 10. The pair of waves of a frequency has ½ at most, for every d and everywhere. Templates
    lie around the center with a standard deviation of ½√(a/(a − 2)) lengthscales: 1.2 for a = 2.45,
    2.5 for a = 2.08. Take a smaller a for wider data. Far from the center, features vanish, and
    with them the variance of the prior.

    Le et al. 2013, eqs. 26 and 27, which leave out (a/(a − 2))^{d/4}, and in which b is free: then
    the kernel has the lengthscale √(2a + b)/a in units of ℓ, which is 1 for this b.

    Args:
        num_features: n, the number of features of a scalar kernel, for each term of a sum.
        a: a > 2. The larger a is, the closer the templates are to the center.
        weighted: use the bumps exp(−(a/2)‖x̃ − z‖²) of eq. 24, whose width does not depend on b.
            The features are then those of the locally weighted kernel
            exp(−½(a − 2)(‖x̃‖² + ‖x̃′‖²)) exp(−½‖x̃ − x̃′‖²) (eq. 25), and not of the RBF kernel.
        center: the center of the templates, one number for each input of the kernel, in the units
            of the inputs: about the mean of the inputs. The origin if None.
        seed: seed of NumPy's `default_rng`.

    Raises:
        ValueError: `num_features` is not a positive integer, a ≤ 2, `center` is not d finite
            numbers, or `seed` is not a non-negative integer.
        NotImplementedError: when an `ORFFKernel` is built, for other kernels than `RBFKernel`,
            alone or in a sum, scaled, or in a separable kernel.

    Example:
        >>> import gp_orff, gpytorch, torch
        >>> exact = gpytorch.kernels.RBFKernel()
        >>> kernel = gp_orff.ORFFKernel(exact, gp_orff.Templates(4000, a=2.5), num_dims=1)
        >>> x = torch.linspace(-1, 1, 5).unsqueeze(-1)
        >>> error = kernel(x).to_dense() - exact(x).to_dense()
        >>> bool(error.abs().max() < 0.1)
        True
        >>> kernel.num_features
        4000
    """

    num_features: int
    a: float = field(kw_only=True)
    weighted: bool = field(default=False, kw_only=True)
    center: Sequence[float] | None = field(default=None, kw_only=True)
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self):
        check_positive_integer(self.num_features, "num_features", "Templates")
        if not isinstance(self.a, Real) or not 2 < self.a < math.inf:
            raise ValueError(
                f"Templates expects a > 2, got {self.a!r}; try a=2.5, and a smaller one for data "
                "that are wider than a lengthscale"
            )
        if not isinstance(self.weighted, bool):
            raise ValueError(
                f"Templates expects weighted to be True or False, got {self.weighted!r}"
            )
        if self.center is not None:
            try:
                center = tuple(np.asarray(self.center, dtype=float).reshape(-1).tolist())
            except (TypeError, ValueError):
                center = (math.nan,)
            if not all(map(math.isfinite, center)):
                raise ValueError(
                    "Templates expects finite numbers as center, one for each input, got "
                    f"{self.center}; pass the mean of the inputs"
                )
            object.__setattr__(self, "center", center)
        check_seed(self.seed, "Templates")

    def draw(self, terms: Sequence[TermSpectrum]) -> list[Draw]:
        """The templates of each of `terms`, from independent random streams of the seed."""
        streams = np.random.default_rng(self.seed).spawn(len(terms))
        return [self._draw(term, rng) for term, rng in zip(terms, streams, strict=True)]

    def _draw(self, term: TermSpectrum, rng: np.random.Generator) -> Draw:
        if not term.leaves:  # a constant: one cosine of ω = 0
            return Draw([], [])
        _check(term)
        dims = term.leaves[0].dims
        center = (0.0,) * len(dims) if self.center is None else self.center
        if len(center) != len(dims):
            raise ValueError(
                f"Templates expects a center of {len(dims)} numbers, one for each input of the "
                f"kernel, got {len(center)}: {self.center}"
            )
        if not reach(self.a, len(dims), self.num_features):
            warnings.warn(
                f"Templates(a={self.a:g}) expects few inputs: with {len(dims)} inputs and "
                f"{self.num_features} features, the standard error of the kernel exceeds the "
                "kernel; use gp_orff.QuasiMonteCarlo, or gp_orff.Fastfood for many inputs",
                stacklevel=2,
            )
        normal = torch.from_numpy(rng.standard_normal((int(self.num_features), len(dims))))
        center = torch.tensor(center, dtype=torch.float64)
        return TemplateDraw(normal, float(self.a), self.weighted, center, dims)


def _check(term: TermSpectrum) -> None:
    """Check that a term is a scalar or separable RBF kernel.

    Raises:
        NotImplementedError: it is not.
    """
    leaf, names = term.leaves[0], [type(leaf.spectrum).__name__ for leaf in term.leaves]
    if len(names) > 1 or not isinstance(leaf.spectrum, Gaussian):
        raise NotImplementedError(
            f"Templates expects RBFKernel in every term, got spectra {' x '.join(names)}; use "
            "gp_orff.QuasiMonteCarlo, and one RBFKernel with ARD for a product of RBF kernels"
        )
    if leaf.degree or leaf.variance is not None:
        raise NotImplementedError(
            "Templates expects scalar or separable kernels, got one whose spectral matrix varies "
            "with the frequency, such as a CurlFreeKernel, and templates have no frequencies; use "
            "gp_orff.QuasiMonteCarlo"
        )
