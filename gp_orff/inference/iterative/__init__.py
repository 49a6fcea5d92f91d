"""The primal algebra without its matrix, on frequency lattices of many features.

A = I + Σ C[c,c] ∘ (M P Mᵀ) is a sum of Toeplitz and Hankel matrices between diagonal ones: a
product with it takes two fast Fourier transforms for each output (`images`, `operator`). A
preconditioner with a dense block for the features of which the data tell most (`preconditioner`)
makes conjugate gradients quick (`conjugate_gradients`); the Lanczos process gives log|A| with a
standard error, and A^{−½}z (`lanczos`, `system`). From these follow the evidence (`evidence`) and
the posterior (`posterior`), as the normal equations of `equations`.
"""

from gp_orff.inference.iterative.conjugate_gradients import ConvergenceError
from gp_orff.inference.iterative.equations import Iterative
from gp_orff.inference.iterative.system import Accuracy

__all__ = ["Accuracy", "ConvergenceError", "Iterative"]
