"""Powers of Bessel functions as kernels."""

from collections.abc import Sequence

import scipy.special
import torch
from gpytorch.constraints import Interval
from gpytorch.kernels import Kernel
from gpytorch.priors import Prior
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from gp_orff.kernels.base import check_positive_integer

_TERMS = 48  # of the series of Bessel functions over Gaussians
_NEAR, _LARGE, _DECAY = 13.0, 100, 45.0  # q/b to which it holds; b from which it holds to _DECAY


class BesselKernel(Kernel):
    r"""Power of a Bessel function, which Le et al. (2013, eq. 37) call Matérn kernel.

    k(x, z) = [Γ(ν + 1) (2/r)^ν J_ν(r)]^t, with ν = d/2, r = ‖(x − z)/ℓ‖ and the power t.

    Its spectral density is the distribution of a sum of t independent points, each uniform in the
    unit ball of d dimensions, divided by ℓ. So k has no frequencies beyond t/ℓ; for t = 1 all below
    are equally probable, and for d = 1, k is then sin(r)/r. The more dimensions, the closer k is to
    exp(−t r²/(2d + 4)), an RBF kernel of the lengthscale ℓ √((d + 2)/t): lengthscales are not
    comparable to those of other kernels. Start from ℓ √(t/(d + 2)), ℓ being one for an RBF kernel.

    The kernel belongs to one number of dimensions. Of the rules that pad the inputs,
    `Fastfood` needs d = 2^k, and `StructuredOrthogonal` 2^k ≥ 32; `MonteCarlo`, `QuasiMonteCarlo`
    and `Orthogonal` work for every d, and so does `FourierFastfood`, with its bias. `Grid` and
    `GaussHermite` do not, nor rules with `shared=True`, since the density is not evaluated.
    `CurlFreeKernel`, `DivergenceFreeKernel` and `HelmholtzKernel` of it are exact, and have
    features with `measure="base"`.

    The covariance is accurate to 1e-13 for all d and r; it can be differentiated any number of
    times.

    Args:
        power: t, a positive integer.
        num_dims: d, the number of inputs.
        ard_num_dims: d for one lengthscale of each input; one for all inputs if None.
        batch_shape: the batch shape of the lengthscales, as in gpytorch.
        active_dims: the d input columns of the kernel; all columns if None.
        lengthscale_prior: the prior of the lengthscales, as in gpytorch.
        lengthscale_constraint: the constraint of the lengthscales, as in gpytorch.

    Raises:
        ValueError: `power` or `num_dims` is not a positive integer; `ard_num_dims`, `active_dims`
            or the inputs have another number of dimensions.

    Example:
        >>> import gp_orff, torch
        >>> exact = gp_orff.BesselKernel(power=3, num_dims=16)
        >>> kernel = gp_orff.ORFFKernel(exact, gp_orff.Fastfood(4096))
        >>> x = torch.rand(10, 16)
        >>> error = kernel(x).to_dense() - exact(x).to_dense()
        >>> bool(error.abs().max() < 0.05)
        True
    """

    has_lengthscale = True

    def __init__(
        self,
        power: int,
        num_dims: int,
        *,
        ard_num_dims: int | None = None,
        batch_shape: torch.Size | None = None,
        active_dims: Sequence[int] | None = None,
        lengthscale_prior: Prior | None = None,
        lengthscale_constraint: Interval | None = None,
    ):
        check_positive_integer(power, "power", "BesselKernel")
        check_positive_integer(num_dims, "num_dims", "BesselKernel")
        numbers = {
            "ard_num_dims": ard_num_dims,
            "the number of active_dims": None if active_dims is None else len(active_dims),
        }
        for name, number in numbers.items():
            if number is not None and number != num_dims:
                raise ValueError(
                    f"BesselKernel expects {name} to be num_dims={num_dims}, got {number}; the "
                    "kernel belongs to one number of dimensions, give it as num_dims"
                )
        super().__init__(
            ard_num_dims=ard_num_dims,
            batch_shape=batch_shape,
            active_dims=active_dims,
            lengthscale_prior=lengthscale_prior,
            lengthscale_constraint=lengthscale_constraint,
        )
        self.power, self.num_dims = int(power), int(num_dims)

    def forward(
        self,
        x1: Float[Tensor, "*b n d"],
        x2: Float[Tensor, "*b m d"],
        diag: bool = False,
        **params,
    ) -> Float[Tensor, "*b n m"]:
        """k(x1, x2), or its diagonal (*b, n) if `diag`.

        Args:
            x1: points (*b, n, d).
            x2: points (*b, m, d).
            diag: return the diagonal only.
            params: further arguments of gpytorch's `covar_dist`.

        Raises:
            ValueError: another number of inputs than `num_dims`.
        """
        for x in (x1, x2):
            if x.shape[-1] != self.num_dims:
                raise ValueError(
                    f"BesselKernel expects {self.num_dims} inputs, its num_dims, got "
                    f"{x.shape[-1]}; the kernel belongs to one number of dimensions, use "
                    f"BesselKernel({self.power}, num_dims={x.shape[-1]})"
                )
        x1, x2 = x1 / self.lengthscale, x2 / self.lengthscale
        if diag:
            return self.correlation((x1 - x2).square().sum(-1))
        return self.correlation(self.covar_dist(x1, x2, square_dist=True, **params))

    def correlation(self, s: Float[Tensor, "*m"], order: int = 0) -> Float[Tensor, "*m"]:
        """κ(s), or a derivative: k(x, z) = κ(s) with s = ‖(x − z)/ℓ‖².

        κ = f^t with f(s) = ₀F₁(; ν + 1; −s/4), and ₀F₁(; b; −q)′ = −₀F₁(; b + 1; −q)/b.

        Args:
            s: (*m), squared distances in units of the lengthscale.
            order: 0 for κ, 1 for κ′ and 2 for κ″.
        """
        b, t = self.num_dims / 2 + 1, self.power
        f = BesselFunction.apply(s / 4, b)
        if order == 0:
            return f**t
        first = -BesselFunction.apply(s / 4, b + 1) / (4 * b)
        if order == 1:
            return t * f ** (t - 1) * first
        second = BesselFunction.apply(s / 4, b + 2) / (16 * b * (b + 1))
        square = (t - 1) * f ** (t - 2) * first.square() if t > 1 else 0.0
        return t * (square + f ** (t - 1) * second)


class BesselFunction(Function):
    """₀F₁(; b; −q) = Γ(b) J_{b−1}(2√q) / q^{(b−1)/2} for q ≥ 0, in float64.

    Its derivative by q is −₀F₁(; b + 1; −q)/b. It is e^{−y} Σ c_n yⁿ with y = q/b, c_0 = 1, c_1 = 0
    and (n + 1)(n + b) c_{n+1} = 2n c_n − c_{n−1}, which follows from Bessel's equation. Beyond
    y = 13 it is that of scipy, whose functions underflow for b > 100; there the series holds up to
    y = 45, and the function vanishes beyond.
    """

    @staticmethod
    def forward(ctx, q: Float[Tensor, "*m"], b: float) -> Float[Tensor, "*m"]:
        ctx.save_for_backward(q)
        ctx.b = b
        return _bessel(q.double(), b).to(q.dtype)

    @staticmethod
    def backward(ctx, grad):
        (q,) = ctx.saved_tensors
        return -grad / ctx.b * BesselFunction.apply(q, ctx.b + 1), None


def _bessel(q: Float[Tensor, "*m"], b: float) -> Float[Tensor, "*m"]:
    """₀F₁(; b; −q)."""
    values, far = _gaussian_series(q / b, b), q > _NEAR * b
    if b <= _LARGE and far.any():
        beyond = scipy.special.hyp0f1(b, -q[far].cpu().numpy())
        values[far] = torch.from_numpy(beyond).to(q.device)
    return values


def _gaussian_series(y: Float[Tensor, "*m"], b: float) -> Float[Tensor, "*m"]:
    """e^{−y} Σ c_n yⁿ."""
    coefficients = [1.0, 0.0]
    for n in range(1, _TERMS):
        step = 2 * n * coefficients[-1] - coefficients[-2]
        coefficients.append(step / ((n + 1) * (n + b)))
    y = y.clamp_max(_DECAY)
    total = torch.zeros_like(y)
    for coefficient in reversed(coefficients):
        total.mul_(y).add_(coefficient)
    return total.mul_((-y).exp_())
