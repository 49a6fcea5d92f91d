"""How many random frequencies suffice: Rahimi & Recht, Brault et al., Minh, and Le et al.

Random features replace a kernel K by K̃. Each function here takes the kernel and returns a `Bound`
of the norm of K̃(x, z) − K(x, z), for the independent frequencies of `gp_orff.MonteCarlo(D)`, or in
the last row for those of `gp_orff.Fastfood(D)`:

================  ==========  =================  =============================================
function          norm        error at           kernels
================  ==========  =================  =============================================
`hoeffding`       spectral    one pair x, z      scalar, separable
`minh_pointwise`  Frobenius   one pair x, z      all, fields with `measure="trace"` only
`brault`          spectral    all x, z in a box  all, fields with either measure
`minh`            Frobenius   all x, z in a box  all, fields with `measure="trace"` only
`rahimi_recht`    spectral    all x, z in a box  scalar, separable
`fastfood`        spectral    one pair x, z      RBF: scalar, separable
================  ==========  =================  =============================================

"Fields" are curl-free, divergence-free and Helmholtz kernels. A `SpectralMatrixKernel` has the same
bounds as they: Minh's where A(ω) is bounded, as that of a delay is, or where a `sampler` makes it
so. No bound is known for an `LCMKernel` and for rules with `shared=True`. For a box use `brault`,
which mostly asks for the fewest frequencies; the others are for comparison with the papers. Bounds
over a box guarantee an error, but are far from sharp, and no way to choose D. Here `brault` asks
for 82 501 frequencies for an error of 5 % of the variance, which is 1, and 4000 have it:

>>> import gp_orff, torch
>>> kernel, box = gp_orff.CurlFreeKernel(num_dims=2), ((-1, 1), (-1, 1))
>>> kernel.base_kernel.lengthscale = 1.0
>>> gp_orff.bounds.brault(kernel, box).num_frequencies(
...     error=0.05, confidence=0.95
... )
82501
>>> # x − z, for x and z in the box
>>> lags = torch.cartesian_prod(*[torch.linspace(-2, 2, 21)] * 2)
>>> features = gp_orff.ORFFKernel(kernel, gp_orff.MonteCarlo(4000, seed=0))
>>> zero = torch.zeros(1, 2)
>>> error = (
...     features(lags, zero).to_dense() - kernel(lags, zero).to_dense()
... ).reshape(-1, 2, 2)
>>> bool(torch.linalg.matrix_norm(error, 2).max() < 0.05)
True
"""

from gp_orff.bounds.constants import Bound
from gp_orff.bounds.theorems import brault, fastfood, hoeffding, minh, minh_pointwise, rahimi_recht

__all__ = ["Bound", "brault", "fastfood", "hoeffding", "minh", "minh_pointwise", "rahimi_recht"]
