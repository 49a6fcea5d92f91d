"""Every spectrum, kernel and rule once; the conformance tests combine them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from gpytorch.kernels import (
    ConstantKernel,
    CosineKernel,
    LCMKernel,
    LinearKernel,
    MaternKernel,
    MultitaskKernel,
    PeriodicKernel,
    PolynomialKernel,
    RBFKernel,
    RQKernel,
    ScaleKernel,
    SpectralMixtureKernel,
)

import gp_orff
from gp_orff.kernels.lines import TidalKernel
from gp_orff.kernels.spectra import GammaQuantile
from tests.support import oracles


def spectral_mixture(ard_num_dims=None, **kwargs):
    kernel = SpectralMixtureKernel(num_mixtures=2, ard_num_dims=ard_num_dims or 1, **kwargs)
    shape = kernel.mixture_means.shape
    kernel.mixture_means = torch.linspace(0.05, 0.3, math.prod(shape)).reshape(shape)
    kernel.mixture_scales = torch.linspace(0.1, 0.2, math.prod(shape)).reshape(shape)
    kernel.mixture_weights = torch.tensor([0.4, 0.9]).expand_as(kernel.mixture_weights)
    return kernel


SPECTRA = {
    "rbf": lambda **kwargs: RBFKernel(**kwargs),
    "matern12": lambda **kwargs: MaternKernel(nu=0.5, **kwargs),
    "matern32": lambda **kwargs: MaternKernel(nu=1.5, **kwargs),
    "matern52": lambda **kwargs: MaternKernel(nu=2.5, **kwargs),
    "matern_general": lambda **kwargs: gp_orff.GeneralMaternKernel(nu=1.8, **kwargs),
    "rq": lambda **kwargs: RQKernel(**kwargs),
    "spectral_mixture": spectral_mixture,
}
UNKNOWN_DENSITY = {  # radial spectra that can only be drawn, in one number of inputs: test_bessel
    "bessel": lambda power=2, num_dims=2, **kwargs: gp_orff.BesselKernel(power, num_dims, **kwargs),
}
TRAINED_DENSITY = {  # which random frequencies cannot follow: test_learned_spectrum
    "learned": lambda **kwargs: gp_orff.LearnedSpectrumKernel(7, **kwargs),
}
SMOOTH = ("rbf", "matern32", "matern52", "matern_general", "rq")  # have radial derivatives

# Of one input: test_lines.
LINES = {"cosine": CosineKernel, "periodic": PeriodicKernel, "tide": TidalKernel}

DOT_PRODUCTS = {  # of d inputs; they are not stationary, see test_dot_products
    "exponential": lambda d: gp_orff.DotProductKernel(
        torch.tensor([1 / math.factorial(n) for n in range(6)], dtype=torch.float64)
    ),
    "even": lambda d: gp_orff.DotProductKernel.from_taylor(
        torch.tensor([0.3, 0.0, 0.0, 0.0, 0.7], dtype=torch.float64)
    ),
    "legendre": lambda d: gp_orff.DotProductKernel.from_legendre(
        torch.tensor([0.2, 0.5, 0.0, 0.3], dtype=torch.float64), d
    ),
    "projections": lambda d: gp_orff.DotProductKernel.from_projections(
        torch.tensor([0.1, 1.0, 2.0, 3.0], dtype=torch.float64), d
    ),
    "linear": lambda d: LinearKernel(ard_num_dims=d),
    "polynomial": lambda d: PolynomialKernel(power=3),
}

HARMONIC = {  # fields in free space: tests/kernels/test_harmonic.py
    "harmonic": lambda: gp_orff.HarmonicKernel(reference_height=0.0),
}

FIELDS = {  # kernel class, exact blocks from the Hessian of k, spectral matrix A(ω)
    "curl_free": (gp_orff.CurlFreeKernel, oracles.curl_free, oracles.outer),
    "divergence_free": (
        gp_orff.DivergenceFreeKernel,
        oracles.divergence_free,
        oracles.projected,
    ),
}

RULES = {
    "monte_carlo": gp_orff.MonteCarlo,
    "orthogonal": gp_orff.Orthogonal,
    "quasi_monte_carlo": gp_orff.QuasiMonteCarlo,
}
STRUCTURED_RULES = {  # for separable kernels only: tests/features/test_structured.py
    "fastfood": gp_orff.Fastfood,
    "structured_orthogonal": gp_orff.StructuredOrthogonal,
    "fourier_fastfood": gp_orff.FourierFastfood,
}
LOCAL_RULES = {  # for RBF kernels only: tests/features/test_templates.py
    "templates": lambda number: gp_orff.Templates(number, a=2.5),
}
DETERMINISTIC_RULES = {  # their errors are not random: test_grid and test_hermite hold them
    "grid": lambda number: gp_orff.Grid(domain=((-3.0, 3.0),) * 2, max_features=2 * number),
    "gauss_hermite": lambda number: gp_orff.GaussHermite(number),
    "auto": lambda number: gp_orff.Auto(max_features=2 * number),
}
MEASURES = ("trace", "base")

SYMBOLS = {  # of a field with p components on d inputs in space
    "background": lambda d, p: gp_orff.Background(),
    "box_average": lambda d, p: gp_orff.BoxAverage(0.3),
    "component": lambda d, p: gp_orff.Component([1.0, 2.0, 3.0][:p]),
    "curl": lambda d, p: gp_orff.Curl(),
    "curl_free_part": lambda d, p: gp_orff.CurlFreePart(),
    "divergence": lambda d, p: gp_orff.Divergence(),
    "divergence_free_part": lambda d, p: gp_orff.DivergenceFreePart(),
    "flux": lambda d, p: gp_orff.Flux(_path(d)),
    "jacobian": lambda d, p: gp_orff.Jacobian(num_dims=d),
    "line_integral": lambda d, p: gp_orff.LineIntegral(_path(d)),
    "potential": lambda d, p: gp_orff.Potential([0.1] * d),
    "stream_function": lambda d, p: gp_orff.StreamFunction([0.1] * d),
    "vector_potential": lambda d, p: gp_orff.VectorPotential(),
}
OF_HARMONIC_FIELDS = {"reduction_to_pole": lambda d, p: gp_orff.ReductionToPole([0.3, 0.4, -0.8])}


def _path(d):
    return torch.tensor([[0.0, 0.0, 0.0], [0.3, -0.2, 0.1]])[:, :d]


# (spectrum, measure) of field kernels that raise, and those whose features have infinite variance
NO_CELL = {("spectral_mixture", "trace")}
INFINITE_VARIANCE = {("matern32", "base"), ("matern_general", "base")}


def base(name: str, num_dims: int, ard: bool = True):
    """Return a scalar kernel in float64 with lengthscales other than one."""
    kernel = SPECTRA[name](ard_num_dims=num_dims if ard else None).double()
    if kernel.has_lengthscale:
        kernel.lengthscale = torch.linspace(0.7, 1.3, num_dims if ard else 1, dtype=torch.float64)
    if name == "rq":
        kernel.alpha = torch.tensor(1.4, dtype=torch.float64)
    return kernel


def nodes_by_hand(kernel, base_variables, tilt):
    """Compute the frequencies ω, and D times the weights, from the base variables by the formulas
    of the page Mathematics."""
    if isinstance(kernel, RQKernel):
        g, u = base_variables[:, :-1], base_variables[:, -1]
        s = GammaQuantile.apply(kernel.alpha + tilt, u) / kernel.alpha
        z, second_moment = s.sqrt().unsqueeze(-1) * g, 1.0
    else:
        z, nu = base_variables, getattr(kernel, "nu", math.inf)
        second_moment = 1.0 if math.isinf(nu) else nu / (nu - 1)
    ratio = z.shape[-1] * second_moment / z.square().sum(-1) if tilt else torch.ones(len(z))
    return z / kernel.lengthscale, ratio.double()


@dataclass
class Part:
    """A term outputscale() · E[A(ω₁) cos⟨Σ ω_i, τ⟩] of a kernel. Each leaf is a scalar kernel with
    its columns."""

    leaves: list[tuple[Any, tuple[int, ...]]]
    outputscale: Callable[[], torch.Tensor]
    spectral_matrix: Callable[[torch.Tensor], torch.Tensor]

    def covariance(self, draw, x, z):
        weights, total, first = torch.ones((), dtype=x.dtype), 0.0, None
        for (kernel, dims), variables, tilt in zip(
            self.leaves, draw.bases, draw.orders, strict=True
        ):
            omega, ratio = nodes_by_hand(kernel, variables, tilt)
            weights = weights * ratio
            first = omega if first is None else first
            full = torch.zeros(len(omega), x.shape[-1], dtype=x.dtype)
            total = total + full.index_copy(-1, torch.tensor(dims), omega)
        if first is None:  # a constant
            total = torch.zeros(1, x.shape[-1], dtype=x.dtype)
            first, weights = total, torch.ones(1, dtype=x.dtype)
        weights = self.outputscale() * weights / len(total)
        return oracles.fourier_sum(x, z, total, weights, self.spectral_matrix(first))


@dataclass
class Case:
    """A kernel for `ORFFKernel`, and its covariance for given frequencies by the definition."""

    kernel: Any
    num_dims: int
    num_outputs: int
    parts: list[Part]

    def covariance(self, draws, x, z):
        return sum(part.covariance(d, x, z) for part, d in zip(self.parts, draws, strict=True))


def _one():
    return torch.ones((), dtype=torch.float64)


def _scalar_matrix(omega):
    return torch.ones(len(omega), 1, 1, dtype=torch.float64)


def _field(name, spectrum, num_dims):
    cls, _, matrix = FIELDS[name]
    leaf = base(spectrum, num_dims)
    part = Part([(leaf, tuple(range(num_dims)))], _one, matrix)
    return Case(cls(leaf, num_dims=num_dims), num_dims, num_dims, [part])


def _scaled():
    case = _field("curl_free", "rbf", 2)
    inner = ScaleKernel(case.kernel).double()
    kernel = ScaleKernel(inner).double()
    inner.outputscale, kernel.outputscale = 1.7, 0.6
    part = case.parts[0]
    part.outputscale = lambda: kernel.outputscale * inner.outputscale
    return Case(kernel, 2, 2, [part])


def _helmholtz():
    kernel = gp_orff.HelmholtzKernel(base("matern52", 2), num_dims=2).double()
    curl, div = kernel.curl_free, kernel.divergence_free
    div.outputscale = 0.3
    return Case(
        kernel,
        2,
        2,
        [
            Part([(curl.base_kernel.base_kernel, (0, 1))], lambda: curl.outputscale, oracles.outer),
            Part(
                [(div.base_kernel.base_kernel, (0, 1))], lambda: div.outputscale, oracles.projected
            ),
        ],
    )


def randomise_tasks(kernel, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in kernel.task_covar_module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return kernel


def _task_matrix(kernel):
    return lambda omega: kernel.task_covar_module.covar_matrix.to_dense().expand(len(omega), -1, -1)


def _separable(num_tasks=3):
    leaf = base("rbf", 2)
    kernel = randomise_tasks(MultitaskKernel(leaf, num_tasks=num_tasks, rank=2).double())
    return Case(kernel, 2, num_tasks, [Part([(leaf, (0, 1))], _one, _task_matrix(kernel))])


def _separable_sum():
    """Return a case with one task matrix for a sum of scalar kernels and a constant, which is still
    a Kronecker product."""
    first, second, constant = base("rbf", 2), ScaleKernel(base("rq", 2)), ConstantKernel().double()
    second.double().outputscale = 0.5
    data = first + second + constant
    kernel = randomise_tasks(MultitaskKernel(data, num_tasks=2, rank=1).double())
    matrix = _task_matrix(kernel)
    return Case(
        kernel,
        2,
        2,
        [
            Part([(first, (0, 1))], _one, matrix),
            Part([(second.base_kernel, (0, 1))], lambda: second.outputscale, matrix),
            Part([], lambda: constant.constant.squeeze(), matrix),
        ],
    )


def _rank_one():
    leaf, root = base("rbf", 2), torch.tensor([[0.7], [-1.2], [0.4]], dtype=torch.float64)
    kernel = gp_orff.SeparableKernel(leaf, root).double()
    return Case(kernel, 2, 3, [Part([(leaf, (0, 1))], _one, _root_matrix(kernel))])


def _trained_root():
    """Return a case with a root of rank 2 for 3 outputs, and with a sum.

    One kernel of the sum has one input. It selects a column among the columns that the sum selects.
    """
    first, second = base("rbf", 2), ScaleKernel(base("matern52", 1)).double()
    second.outputscale, second.active_dims = 0.5, torch.tensor([1])
    root = torch.nn.Parameter(torch.tensor([[0.7, 0.3], [-1.2, 0.5], [0.4, 0.9]]).double())
    kernel = gp_orff.SeparableKernel(first + second, root, active_dims=(2, 0)).double()
    matrix = _root_matrix(kernel)
    parts = [
        Part([(first, (2, 0))], _one, matrix),
        Part([(second.base_kernel, (0,))], lambda: second.outputscale, matrix),
    ]
    return Case(kernel, 3, 3, parts)


def _root_matrix(kernel):
    return lambda omega: (kernel.root @ kernel.root.mT).expand(len(omega), -1, -1)


def _potential_of_a_sum():
    smooth, rough = base("rbf", 3), ScaleKernel(base("matern52", 3)).double()
    rough.outputscale = 0.4
    kernel = gp_orff.DivergenceFreeKernel(smooth + rough, num_dims=3)
    every = (0, 1, 2)
    return Case(
        kernel,
        3,
        3,
        [
            Part([(smooth, every)], _one, oracles.projected),
            Part([(rough.base_kernel, every)], lambda: rough.outputscale, oracles.projected),
        ],
    )


def _field_separable_and_constant():
    field, separable = _field("divergence_free", "rq", 2), _separable(num_tasks=2)
    background = randomise_tasks(MultitaskKernel(ConstantKernel(), num_tasks=2, rank=0).double())
    constant = background.data_covar_module
    part = Part([], lambda: constant.constant.squeeze(), _task_matrix(background))
    kernel = field.kernel + separable.kernel + background
    return Case(kernel, 2, 2, [*field.parts, *separable.parts, part])


def _field_times_time():
    space = base("rbf", 2)
    time = MaternKernel(nu=1.5, active_dims=(1,)).double()
    time.lengthscale = 0.8
    field = ScaleKernel(gp_orff.CurlFreeKernel(space, num_dims=2, active_dims=(0, 2))).double()
    part = Part([(space, (0, 2)), (time, (1,))], lambda: field.outputscale, oracles.outer)
    return Case(time * field, 3, 2, [part])


def _periodic():
    field = gp_orff.CurlFreeKernel(base("rbf", 2), num_dims=2, active_dims=(0, 2))
    time = PeriodicKernel(active_dims=(1,)).double()
    time.lengthscale, time.period_length = 0.8, 1.3
    time.raw_period_length.requires_grad_(False)  # grids do not follow it
    return MixtureCase(field * time, 3, 2, [])


def _active_dims():
    """Return a case with nested selections of columns: the field selects two of four inputs, and
    its potential selects one of these."""
    potential = base("rbf", 1)
    potential.active_dims = torch.tensor([1])
    field = gp_orff.CurlFreeKernel(potential, num_dims=2, active_dims=(3, 0))

    def matrix(omega):
        return oracles.outer(torch.cat([torch.zeros_like(omega), omega], dim=-1))

    other = randomise_tasks(
        MultitaskKernel(RBFKernel().double(), num_tasks=2, rank=1, active_dims=(1, 2)).double()
    )
    parts = [
        Part([(potential, (0,))], _one, matrix),
        Part([(other.data_covar_module, (1, 2))], _one, _task_matrix(other)),
    ]
    return Case(field + other, 4, 2, parts)


def _general_matern():
    leaf = base("matern_general", 2)
    kernel = gp_orff.DivergenceFreeKernel(leaf, num_dims=2)
    return Case(kernel, 2, 2, [Part([(leaf, (0, 1))], _one, oracles.projected)])


def _scalar(name):
    leaf = base(name, 2)
    return Case(leaf, 2, 1, [Part([(leaf, (0, 1))], _one, _scalar_matrix)])


def _bessel():
    leaf = UNKNOWN_DENSITY["bessel"](ard_num_dims=2).double()
    leaf.lengthscale = torch.tensor([0.3, 0.5])
    return Case(leaf, 2, 1, [Part([(leaf, (0, 1))], _one, _scalar_matrix)])


def _scalar_product():
    first, second = base("rbf", 2), base("matern32", 2)
    constant = ConstantKernel().double()
    part = Part(
        [(first, (0, 1)), (second, (0, 1))], lambda: constant.constant.squeeze(), _scalar_matrix
    )
    return Case(first * second * constant, 2, 1, [part])


def amplitude(omega):
    """Return the factor B(ω) (D, 2, 2) of a kernel that differs from all other cases."""
    square = omega.square().sum(-1)
    first = torch.stack([1 / (1 + square), 0.5 * torch.cos(omega[:, 0])], dim=-1)
    second = torch.stack([omega.prod(-1) / (1 + square), torch.full_like(square, 0.3)], dim=-1)
    return torch.stack([first, second], dim=-2)


def _spectral_matrix():
    leaf = base("rbf", 2)
    kernel = gp_orff.SpectralMatrixKernel(leaf, amplitude, num_outputs=2, num_dims=2)
    part = Part([(leaf, (0, 1))], _one, lambda omega: amplitude(omega) @ amplitude(omega).mT)
    return Case(kernel.double(), 2, 2, [part])


@dataclass
class MixtureCase(Case):
    """A case whose frequencies and weights come from the package. They are tested against exact
    kernels elsewhere."""

    def covariance(self, draws, x, z):
        from gp_orff.features.assemble import expand

        full = expand(self.kernel, draws, x.shape[-1]).general()
        frequencies = len(full.phi.omega)
        matrices = torch.zeros(2 * frequencies, self.num_outputs, self.num_outputs).to(x)
        outer = full.directions.unsqueeze(-1) * full.directions.unsqueeze(-2)
        matrices = matrices.index_add(0, full.columns, outer)[:frequencies]
        return oracles.fourier_sum(x, z, full.phi.omega, torch.ones(frequencies).to(x), matrices)


def _lcm():
    kernel = LCMKernel([base("rbf", 2), base("matern52", 2)], num_tasks=2, rank=1).double()
    for seed, part in enumerate(kernel.covar_module_list):
        randomise_tasks(part, seed)
    return MixtureCase(kernel, 2, 2, [])


CASES = {
    "curl_free": lambda: _field("curl_free", "rbf", 2),
    "curl_free_rq": lambda: _field("curl_free", "rq", 2),
    "divergence_free_2d": lambda: _field("divergence_free", "rbf", 2),
    "divergence_free_3d": lambda: _field("divergence_free", "matern52", 3),
    "helmholtz": _helmholtz,
    "general_matern": _general_matern,
    "separable": _separable,
    "separable_sum": _separable_sum,
    "rank_one": _rank_one,
    "trained_root": _trained_root,
    "lcm": _lcm,
    "spectral_matrix": _spectral_matrix,
    "scaled": _scaled,
    "potential_of_a_sum": _potential_of_a_sum,
    "field_separable_and_constant": _field_separable_and_constant,
    "field_times_time": _field_times_time,
    "periodic": _periodic,
    "active_dims": _active_dims,
    "scalar": lambda: _scalar("matern52"),
    "scalar_rq": lambda: _scalar("rq"),
    "scalar_bessel": _bessel,
    "scalar_product": _scalar_product,
    "spectral_mixture": lambda: MixtureCase(base("spectral_mixture", 2), 2, 1, []),
}
NO_GRID = {  # the kernels of which a grid cannot be built, and what the error says
    "scalar_bessel": "GridSpectrum",
    "scalar_product": "different input columns",
}
