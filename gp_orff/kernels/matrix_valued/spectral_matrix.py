"""Kernels of any positive spectral matrix."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor

from gp_orff.kernels.base import (
    WrapperKernel,
    check_base_kernel,
    check_num_dims,
    check_points,
)
from gp_orff.kernels.factors import Sampler, SpectralMatrix, evaluate
from gp_orff.kernels.matrix_valued.quadrature import covariance, variances
from gp_orff.kernels.matrix_valued.signature import amplitude_of
from gp_orff.kernels.spectra.base import GridSpectrum, spectral_density, spectrum
from gp_orff.kernels.tree import Term, inner_terms, terms

_CHECKED = 64  # frequencies at which an amplitude is checked
_EVEN = 1e-6  # the largest relative difference of A(ω) and A(−ω)


class SpectralMatrixKernel(WrapperKernel):
    r"""The kernel of a spectral matrix A(ω) = B(ω) B(ω)ᵀ that you write as a function B.

    K(x, z) = ∫ cos⟨ω, x − z⟩ B(ω) B(ω)ᵀ S(ω) dω

    S is the spectral density of the scalar kernel `base_kernel`, and B(ω) is a (p, r) matrix. The
    field is a sum of random waves cos⟨ω, x⟩ and sin⟨ω, x⟩, each along a column of B(ω); S says how
    strong each frequency is. With B = 1 it is the scalar kernel itself. A is positive semidefinite
    for every B, and every shift-invariant kernel with real values and a density is of this form
    (Brault et al. 2016, Propositions 2.2 and 2.3; Minh 2016, Theorem 3 and equation 21). Only the
    product A·S matters: S can be any density, if B makes up for it. Random frequencies are drawn
    from S, unless there is a `sampler`.

    How it is computed:

    - In an `ORFFKernel`, by features, r for each cosine and each sine, with any frequency rule.
    - In `VectorFieldGP`, by features too, for small data as well: it has no closed form.
    - As a plain gpytorch kernel, by quadrature over frequencies, for up to 3 inputs. The relative
      error is about 1e-9 for an RBF base kernel and a smooth B.

    Parameters of `amplitude` are trained with the others if it is a `torch.nn.Module`. `save` of a
    `VectorFieldGP` needs a module; `load` then needs `kernel=`, this kernel built anew. A fit tries
    several lengthscales and variances, but starts from the present parameters of the module: set
    them to values of the right size.

    The covariance matrix of points x (N, d) is (N·p, N·p), ordered point by point: row n·p + i is
    output i at point n.

    Args:
        base_kernel: the scalar kernel with the spectral density S, such as `RBFKernel()`: any that
            `gp_orff.spectrum` knows, alone or in a `ScaleKernel`, or a sum of such kernels.
        amplitude: B, a function or a `torch.nn.Module` that takes frequencies ω (D, d), in radians
            per unit of the inputs, and returns a tensor (D, p, r). It has to be finite at every ω,
            also at ω = 0, and so have its derivatives by its parameters. It has to be continuous,
            since grids do not see a jump between their frequencies. Each column has to be even
            or odd in ω, so that A(−ω) = A(ω). D changes from call to call. ω comes in float64, or
            in the dtype of the parameters of a module, which has to be that of `base_kernel`.
        num_outputs: p, the number of outputs.
        num_dims: d, the number of input columns of the kernel.
        active_dims: the d input columns; all columns if None.
        sampler: a better density ρ to draw random frequencies from, for `measure="trace"`. It is a
            function of uniform numbers u (D, d) in (0, 1) that returns ω (D, d), in radians per
            unit of the inputs, and log ρ(ω) (D,). These ω stay where they are when lengthscales are
            trained; their weights S(ω)/ρ(ω) change. So ρ has to cover S for all lengthscales that
            training may reach. Best is ρ ∝ S tr A, whose features are bounded (Minh 2016, Theorem 9
            and Corollary 10). `ORFFKernel.accuracy` tells how good it is. If None, frequencies are
            drawn from S, and follow the lengthscales.

    Raises:
        TypeError: `base_kernel` is not an instance of a kernel, or `amplitude` is not a function;
            inputs of another dtype than the hyperparameters.
        ValueError: B has another shape than (D, p, r), is not finite, or A(−ω) ≠ A(ω); the variance
            is infinite; `base_kernel` is a product or constant, has several outputs or
            `active_dims`.
        NotImplementedError: the spectrum of `base_kernel` is not known; a covariance without
            features for more than 3 inputs.

    Example:
        A current that flows at an angle to the pressure gradient; the angle is learned:

        >>> import gpytorch, gp_orff, torch
        >>> class Turned(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.angle = torch.nn.Parameter(torch.tensor(0.5))
        ...
        ...     def forward(self, omega):  # (D, 2) -> (D, 2, 1)
        ...         c, s = self.angle.cos(), self.angle.sin()
        ...         rotation = torch.stack([torch.stack([c, -s]), torch.stack([s, c])])
        ...         return (omega @ rotation.mT).unsqueeze(-1)
        >>> rbf = gpytorch.kernels.RBFKernel()
        >>> kernel = gp_orff.SpectralMatrixKernel(rbf, Turned(), num_outputs=2, num_dims=2)
        >>> [name for name, _ in kernel.named_parameters()]
        ['base_kernel.raw_lengthscale', 'amplitude.angle']
        >>> gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(100)).num_features
        200

        Two outputs, of which the second lacks the long waves of the first (r = 1):

        >>> import gpytorch, gp_orff, torch
        >>> def amplitude(omega):  # (D, 1) -> (D, 2, 1)
        ...     return torch.stack([torch.ones_like(omega), omega**2 / (1 + omega**2)], dim=1)
        >>> rbf = gpytorch.kernels.RBFKernel()
        >>> kernel = gp_orff.SpectralMatrixKernel(rbf, amplitude, num_outputs=2, num_dims=1)
        >>> kernel(torch.zeros(1, 1)).to_dense().detach().diagonal()
        tensor([1.0000, 0.3017])
        >>> x = torch.linspace(0, 1, 20).unsqueeze(-1)
        >>> gp_orff.ORFFKernel(kernel, gp_orff.Grid.for_data(x, tolerance=1e-3)).num_features < 50
        True
    """

    is_stationary = True

    def __init__(
        self,
        base_kernel: Kernel,
        amplitude: Callable[[Float[Tensor, "D d"]], Float[Tensor, "D p r"]],
        *,
        num_outputs: int,
        num_dims: int,
        active_dims: Sequence[int] | None = None,
        sampler: Sampler | None = None,
    ):
        name = type(self).__name__
        check_base_kernel(name, base_kernel)
        check_num_dims(name, num_dims, 1, active_dims)
        if not callable(amplitude) or isinstance(amplitude, type):
            raise TypeError(
                "SpectralMatrixKernel expects amplitude to be a function of frequencies (D, d), or "
                f"an instance of torch.nn.Module, got {amplitude!r}"
            )
        super().__init__(active_dims=active_dims)
        self.base_kernel = base_kernel
        self.amplitude = amplitude
        self.sampler = sampler
        self.num_outputs, self.num_dims = num_outputs, num_dims
        for term in terms(base_kernel):
            _check_base(term, num_dims)
        self.rank = self._checked_rank()
        self._require_finite_variance()

    @classmethod
    def from_signature(
        cls,
        signature: Callable[[Float[Tensor, "m d"]], Float[Tensor, "m p p"]],
        domain: Sequence[tuple[float, float]],
    ) -> "SpectralMatrixKernel":
        r"""The kernel of a covariance K₀ of the lag δ = x − z, given as a function.

        K(x, z) = K₀(x − z). K₀ is called the signature of the kernel. It takes three steps (Brault
        et al. 2016, Section 2.2):

        1. The spectral matrix C(ω) = (2π)^{−d} ∫ e^{i⟨ω,δ⟩} K₀(δ) dδ, by a fast Fourier transform
           (Proposition 2.4).
        2. A density S: that of a Matérn 5/2 kernel with the second moments of tr C.
        3. B(ω) from the eigenvectors of C(ω)/S(ω), so that B Bᵀ S = C.

        The kernel has nothing to train: its Matérn lengthscale belongs to S and is frozen, and says
        nothing about the data. A `ScaleKernel` around it trains a variance; `VectorFieldGP` adds
        one. Kernels of 1 or 2 inputs are made in tenths of a second, of 3 inputs in seconds.

        Args:
            signature: K₀, a function that takes lags δ (m, d), in float64, and returns symmetric
                matrices (m, p, p), with K₀(−δ) = K₀(δ). It has to vanish at large lags.
            domain: ((low, high), …), the box of the inputs, one pair for each of the d inputs.

        Returns:
            A `SpectralMatrixKernel` of d inputs and p outputs, in float64.

        Raises:
            ValueError: K₀ is not finite, symmetric and even; it does not vanish within 16 times the
                domain; or no field has this covariance, since C(ω) has a negative eigenvalue.

        Example:
            >>> import gp_orff, torch
            >>> def signature(lag):  # (m, 1) -> (m, 2, 2)
            ...     near, far = torch.exp(-lag.square()), torch.exp(-lag.square() / 4)
            ...     return torch.stack([near + far, far, far, far], dim=-1).reshape(-1, 2, 2)
            >>> kernel = gp_orff.SpectralMatrixKernel.from_signature(signature, [(0, 3)])
            >>> kernel(torch.zeros(1, 1).double(), torch.ones(1, 1).double()).to_dense()
            tensor([[1.1467, 0.7788],
                    [0.7788, 0.7788]], dtype=torch.float64)
        """
        base_kernel, amplitude = amplitude_of(signature, domain)
        num_outputs = amplitude.num_outputs
        return cls(base_kernel, amplitude, num_outputs=num_outputs, num_dims=len(domain))

    @property
    def factor(self) -> SpectralMatrix:
        """B(ω)."""
        return SpectralMatrix(
            self.amplitude, self.num_outputs, self.num_dims, self.rank, self.sampler
        )

    def num_outputs_per_input(self, x1: Tensor, x2: Tensor) -> int:
        """p, the number of outputs at each of the points `x1` (n, d) and `x2` (m, d)."""
        return self.num_outputs

    def forward(
        self,
        x1: Float[Tensor, "*b n d"],
        x2: Float[Tensor, "*b m d"],
        diag: bool = False,
        last_dim_is_batch: bool = False,
    ) -> Float[Tensor, "*b n*p m*p"] | Float[Tensor, "*b n*p"]:
        """The covariance matrix between the points `x1` (*b, n, d) and `x2` (*b, m, d).

        Rows and columns are point-major, n·p + i. With `diag`, only the diagonal, (*b, n·p).

        Raises:
            ValueError: `last_dim_is_batch`, another number of columns, no points, NaN or infinity.
            TypeError: inputs of another dtype than the hyperparameters.
            NotImplementedError: more than 3 inputs, or a spectral density that is not known.
        """
        check_points(self, self.num_dims, x1, x2, last_dim_is_batch)
        if self.num_dims > 3:
            raise NotImplementedError(
                "SpectralMatrixKernel computes covariances by quadrature for at most 3 inputs, got "
                f"{self.num_dims}; put it inside ORFFKernel, with gp_orff.QuasiMonteCarlo"
            )
        quadrature = variances if diag else covariance
        total = 0.0
        for term in inner_terms(self):
            measure = spectrum(term.leaves[0].kernel)
            if not isinstance(measure, GridSpectrum):
                raise NotImplementedError(
                    "SpectralMatrixKernel computes covariances by quadrature of a known spectral "
                    f"density, got {type(measure).__name__}; put it inside ORFFKernel, with "
                    "gp_orff.QuasiMonteCarlo"
                )
            density = term.factor.variance_spectrum(measure)
            scale = term.outputscale.reshape(*term.outputscale.shape, 1, *[1] * (not diag))
            total = total + scale * quadrature(density, x1, x2)
        return total.to(x1.dtype)

    @torch.no_grad()
    def _checked_rank(self) -> int:
        """r, after checks of B at zero, and at random frequencies and their negatives."""
        density = spectrum(terms(self.base_kernel)[0].leaves[0].kernel)
        rng = np.random.default_rng(0)
        directions = rng.standard_normal((_CHECKED, self.num_dims))
        directions /= np.linalg.norm(directions, axis=-1, keepdims=True)
        u = rng.random((_CHECKED, density.num_coordinates(self.num_dims)))
        base = torch.from_numpy(density.base(directions, u, 0))
        omega = density.frequencies(base, 0).reshape(-1, self.num_dims).double()
        omega = torch.cat([torch.zeros_like(omega[:1]), omega])
        b, opposite = (_checked(self.amplitude, w, self.num_outputs) for w in (omega, -omega))
        a, other = b @ b.mT, opposite @ opposite.mT
        sizes = a.square().sum((-1, -2)).sqrt()
        difference = (a - other).square().sum((-1, -2)).sqrt()
        if (difference > _EVEN * sizes.clamp_min(_EVEN * sizes.amax())).any():
            worst = omega[(difference / sizes.clamp_min(1e-300)).argmax()].tolist()
            raise ValueError(
                "SpectralMatrixKernel expects A(−ω) = A(ω), A = B Bᵀ, as for every kernel with "
                f"real values, got another A(−ω) at ω = {worst}; make B even or odd in ω"
            )
        return b.shape[-1]

    @torch.no_grad()
    def _require_finite_variance(self) -> None:
        densities = [spectrum(term.leaves[0].kernel) for term in terms(self.base_kernel)]
        if self.num_dims > 3 or not all(isinstance(density, GridSpectrum) for density in densities):
            return  # no quadrature
        if any(math.isinf(self.factor.variance_spectrum(d).moment(0)) for d in densities):
            raise ValueError(
                "SpectralMatrixKernel expects a finite variance ∫ tr B Bᵀ S dω, got an amplitude "
                f"that grows too fast for the spectral density of {type(self.base_kernel).__name__}"
                "; use a smoother base kernel, such as RBFKernel"
            )


def _checked(
    amplitude: Callable, omega: Float[Tensor, "m d"], num_outputs: int
) -> Float[Tensor, "m p r"]:
    """B(ω).

    Raises:
        TypeError, ValueError: B is no tensor, has another shape, or is not finite.
    """
    shape = f"({len(omega)}, {num_outputs}, r)"
    b = evaluate(amplitude, omega)
    if b.dim() != 3 or b.shape[:2] != (len(omega), num_outputs) or not b.shape[-1]:
        raise ValueError(
            f"SpectralMatrixKernel expects amplitude to return matrices {shape} for "
            f"{len(omega)} frequencies and num_outputs={num_outputs}, got {tuple(b.shape)}; give "
            "one matrix of p rows for each frequency"
        )
    if not torch.isfinite(b).all():
        worst = omega[~torch.isfinite(b).all(-1).all(-1)][0].tolist()
        raise ValueError(
            "SpectralMatrixKernel expects a finite amplitude, got NaN or infinity at "
            f"ω = {worst}; return the limit there, or any finite value at ω = 0"
        )
    return b


def _check_base(term: Term, num_dims: int) -> None:
    """Refuse a term of the base kernel that has no spectral density over all inputs."""
    if term.num_outputs != 1:
        raise ValueError(
            "SpectralMatrixKernel needs a scalar base kernel, got one with "
            f"{term.num_outputs} outputs; pass the scalar kernel inside it"
        )
    if len(term.leaves) != 1:
        raise ValueError(
            "SpectralMatrixKernel expects a base kernel made of scaled sums of stationary kernels, "
            "got a constant or a product; to multiply by a kernel of time, multiply "
            "SpectralMatrixKernel itself"
        )
    leaf = term.leaves[0]
    spectral_density(leaf.kernel, "SpectralMatrixKernel")  # raises where there is none
    if leaf.active_dims is not None:
        raise ValueError(
            f"SpectralMatrixKernel(num_dims={num_dims}) expects a base kernel of all its inputs, "
            f"got active_dims {leaf.active_dims}; give active_dims to SpectralMatrixKernel"
        )
    if leaf.kernel.ard_num_dims not in (None, num_dims):
        raise ValueError(
            f"SpectralMatrixKernel(num_dims={num_dims}) expects ard_num_dims={num_dims} in its "
            f"base kernel, got {leaf.kernel.ard_num_dims}"
        )


@inner_terms.register
def _(kernel: SpectralMatrixKernel) -> list[Term]:
    return [term.with_factor(kernel.factor) for term in terms(kernel.base_kernel)]
