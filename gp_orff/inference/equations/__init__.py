"""Evidence of vector observations under an expansion.

With noise covariance Σ (p×p, shared by all points), columns c and directions M of the features,

    A = I_F + C[c,c] ∘ (M Σ⁻¹ Mᵀ) ,   b = Σ_j (Z[c] Σ⁻¹ ∘ M)[:, j] ,
    yᵀ(K + I⊗Σ)⁻¹y = tr(Σ⁻¹Y₂) − bᵀA⁻¹b ,   log|K + I⊗Σ| = log|A| + N log|Σ| .

The same holds for V = [y, 1⊗I_p] in the place of y, with B in the place of b. This gives the
evidence for every constant mean.

Groups of observations have statistics, patterns and noise of their own. Each adds its terms to A, B
and the rest: for every weight a_k of its pattern a C, with M restricted to the observed components.

For separable kernels A = I + S C S ⊗ LᵀΣ⁻¹L: one eigendecomposition of size r, then r Cholesky
factorisations of size 2D, or one eigendecomposition of that size (`separable`). With fewer values
than features, the dual algebra factorises K + I⊗Σ; that of a separable kernel has blocks of size N.
"""

from gp_orff.inference.equations.base import Group, NormalEquations
from gp_orff.inference.equations.choice import (
    dual_equations,
    equations_of_vectors,
    normal_equations,
    prefers_dual,
    whole_vectors,
)
from gp_orff.inference.equations.dense import (
    DenseRows,
    Dual,
    dense_evidence,
    dense_posterior,
    mean_and_response,
    with_ones,
)
from gp_orff.inference.equations.track_rows import Rows, TrackRows

__all__ = [
    "DenseRows",
    "Dual",
    "Group",
    "NormalEquations",
    "Rows",
    "TrackRows",
    "dense_evidence",
    "dense_posterior",
    "dual_equations",
    "equations_of_vectors",
    "mean_and_response",
    "normal_equations",
    "prefers_dual",
    "whole_vectors",
    "with_ones",
]
