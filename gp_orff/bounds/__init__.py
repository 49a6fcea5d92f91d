"""Bounds of the number of random frequencies that suffice for an error of the kernel.

Random features approximate a kernel K by a kernel K̃. Each function returns a `Bound` of the norm of
K̃(x, z) − K(x, z). The rule for the frequencies is `gp_orff.MonteCarlo(D)`. For the last function in
the table, it is `gp_orff.Fastfood(D)`.

================  ==========  =================  =============================================
function          norm        error at           kernels
================  ==========  =================  =============================================
`hoeffding`       spectral    one pair x, z      scalar, separable
`minh_pointwise`  Frobenius   one pair x, z      all; fields with `measure="trace"` only
`brault`          spectral    all x, z in a box  all; fields with both measures
`minh`            Frobenius   all x, z in a box  all; fields with `measure="trace"` only
`rahimi_recht`    spectral    all x, z in a box  scalar, separable
`fastfood`        spectral    one pair x, z      RBF: scalar, separable
================  ==========  =================  =============================================

"Fields" are curl-free, divergence-free and Helmholtz kernels. Bounds for a `SpectralMatrixKernel`
are the same as for fields. `minh_pointwise` and `minh` then need a bounded A(ω), as for a delay, or
a suitable `sampler`. No bound is known for an `LCMKernel` and for rules with `shared=True`.

For a box, use `brault`, which usually requires the fewest frequencies. The other bounds are for
comparison with the papers. Do not choose D by a bound over a box, because far fewer frequencies
suffice in practice. For an error of 5 % of the variance, `brault` requires 82 501 frequencies here,
but 4000 are enough:

>>> import gp_orff, torch
>>> kernel, box = gp_orff.CurlFreeKernel(num_dims=2), ((-1, 1), (-1, 1))
>>> kernel.base_kernel.lengthscale = 1.0
>>> gp_orff.bounds.brault(kernel, box).num_frequencies(
...     error=0.05, confidence=0.95
... )
82501
>>> lags = torch.cartesian_prod(*[torch.linspace(-2, 2, 21)] * 2)  # x − z
>>> features = gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(4000, seed=0))
>>> zero = torch.zeros(1, 2)
>>> error = features(lags, zero).to_dense() - kernel(lags, zero).to_dense()
>>> norms = torch.linalg.matrix_norm(error.reshape(-1, 2, 2), 2)
>>> bool(norms.max() < 0.05)
True
"""

from gp_orff.bounds.constants import Bound
from gp_orff.bounds.theorems import brault, fastfood, hoeffding, minh, minh_pointwise, rahimi_recht

__all__ = ["Bound", "brault", "fastfood", "hoeffding", "minh", "minh_pointwise", "rahimi_recht"]
