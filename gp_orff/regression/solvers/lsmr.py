"""LSMR: ridge regression that needs products with Φ only."""

import warnings

import numpy as np
import torch
from jaxtyping import Float
from scipy.sparse.linalg import LinearOperator, lsmr
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from gp_orff.features.expansion import Expansion
from gp_orff.regression.problem import Problem
from gp_orff.regression.solvers.base import (
    Options,
    Solution,
    Solver,
    refuse_laplacian,
    refuse_loss,
)

_TOLERANCE = 1e-10
_LIMIT_REACHED = 7  # the reason for stopping that scipy's lsmr returns


class Lsmr(Solver):
    """θ by LSMR (Fong & Saunders 2011), column by column."""

    name = "lsmr"

    def solve(self, problem: Problem, options: Options) -> Solution:
        refuse_laplacian(self.name, problem)
        refuse_loss(self.name, options)
        expansion, (x, y) = problem.observed, problem.labels
        columns = y if expansion.num_outputs == 1 else y.reshape(-1, 1)
        phi = LinearOperator(
            (len(columns), expansion.num_features),
            matvec=lambda theta: _product(expansion, x, theta),
            rmatvec=lambda values: _adjoint(expansion, x, values),
            dtype=np.float64,
        )
        limit = options.max_iter or 10 * expansion.num_features
        tol = _TOLERANCE if options.tol is None else options.tol
        stop = {"atol": tol, "btol": tol, "conlim": 0.0, "maxiter": limit}
        found = [lsmr(phi, column, damp=problem.alpha**0.5, **stop) for column in columns.T.numpy()]
        if any(reason == _LIMIT_REACHED for _, reason, *_ in found):
            warnings.warn(
                f"lsmr reached max_iter={limit} before tol={tol:g}: raise either of them, "
                "or alpha, or use solver='cholesky'",
                ConvergenceWarning,
                stacklevel=4,  # through `fit` and its choice of threads
            )
        theta = torch.from_numpy(np.stack([solution for solution, *_ in found], axis=-1))
        return Solution(theta, max(count for _, _, count, *_ in found))


def _product(expansion: Expansion, x: Float[Tensor, "N d"], theta: np.ndarray) -> np.ndarray:
    """Φθ."""
    weights = expansion.column_weights(torch.from_numpy(theta).reshape(-1, 1))
    return expansion.phi.apply(x, weights).flatten().numpy()


def _adjoint(expansion: Expansion, x: Float[Tensor, "N d"], values: np.ndarray) -> np.ndarray:
    """Φᵀv."""
    values = torch.from_numpy(values).reshape(len(x), expansion.num_outputs)
    return expansion.feature_values(expansion.phi.adjoint(x, values)).flatten().numpy()
