"""The penalty fᵀMf of semi-supervised and multi-view regression.

f is the vector of the field at all points, with and without a label. Element n·p + i is output i at
point n. The penalty is the third term of Minh 2016, eq. 67.
"""

from collections.abc import Callable
from functools import singledispatch

import numpy as np
import scipy.sparse as sp
import torch
from jaxtyping import Float
from scipy.sparse.csgraph import laplacian as laplacian_of
from scipy.sparse.linalg import eigsh
from sklearn.neighbors import kneighbors_graph
from torch import Tensor

from gp_orff.data.validation import as_points, without_tensor
from gp_orff.features.columns import Columns
from gp_orff.features.expansion import Expansion, KroneckerExpansion
from gp_orff.kernels.base import check_positive_integer

Matrix = sp.csr_array | np.ndarray

_BLOCK_BYTES = 256 * 2**20  # the size of the values of a block of features at all points
_ROUNDING = 1e-9  # the rounding of M, relative to its largest entry
_LARGE = 2000  # sparse matrices with more rows are not factorised


def graph_laplacian(X: Float[Tensor, "N d"], n_neighbors: int = 10) -> sp.csr_array:
    r"""Return the Laplacian M (N, N) of a graph that connects each point to its nearest neighbours.

    The penalty fᵀMf is large if the function f differs between neighbours. Pass M as `laplacian` to
    `ORFFRidge.fit`, to penalise outputs that vary fast along the curve or surface on which the
    points lie. Points without a label show where this curve or surface is.

    M = c (diag(W1) − W), with the vector 1 of ones. The weight W_nm is exp(−‖x_n − x_m‖²/s²) if one
    of the two points is among the `n_neighbors` nearest neighbours of the other, and 0 otherwise.
    s² is the mean square distance between neighbours. The factor c is such that tr(XᵀMX) is the
    mean square distance of the points from their mean. fᵀMf is then the mean square slope of f
    between neighbours, times the squared size of the data. It has the unit of f², and is
    independent of the unit of the inputs. It tends to a limit as N grows, so a weight has the same
    meaning for 100 and for 10 000 points. A constant f has no penalty, because the rows of M sum to
    zero. Points at the same position, such as the times of a station, are one node of the graph,
    with the mean of f over these points.

    Source: Belkin, Niyogi & Sindhwani 2006, who divide by N² and leave s to the user.

    Args:
        X: (N, d), a tensor or an array of points, with and without a label. All columns must have
            the same unit.
        n_neighbors: the number of neighbours of each point. If there are fewer other points, all of
            them are neighbours.

    Raises:
        TypeError: X does not contain real numbers.
        ValueError: X contains NaN or infinity; all points are at one place; `n_neighbors` is not a
            positive integer.

    Example:
        Points on a circle. The first function varies slowly, and the second one changes its sign
        from point to point:

        >>> import numpy as np
        >>> from gp_orff.regression import graph_laplacian
        >>> angle = np.linspace(0, 2 * np.pi, 100, endpoint=False)
        >>> X = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        >>> M = graph_laplacian(X, n_neighbors=4)
        >>> slow, fast = X[:, 0], np.cos(50 * angle)
        >>> round(float(slow @ M @ slow), 3), bool(fast @ M @ fast > 200)
        (0.5, True)
    """
    X = as_points(X).numpy()
    n_neighbors = check_positive_integer(n_neighbors, "n_neighbors", "graph_laplacian")
    places, index, copies = np.unique(X, axis=0, return_inverse=True, return_counts=True)
    if len(places) < 2:
        raise ValueError(
            f"a graph expects points at two or more places, got {len(X)} at {len(places)}; set "
            "laplacian_weight=0"
        )
    # If the points are far from the origin, distances of centred points lose fewer digits.
    centred = places - places.mean(0)
    distances = kneighbors_graph(centred, min(n_neighbors, len(places) - 1), mode="distance")
    graph = sp.csr_array(distances)
    graph.data = np.exp(-(graph.data**2) / np.mean(graph.data**2))
    edges = sp.coo_array(graph.maximum(graph.T))
    squares = ((centred[edges.row] - centred[edges.col]) ** 2).sum(1)
    slope = edges.data @ squares / 2  # tr(XᵀMX), without cancellation
    matrix = sp.csr_array(laplacian_of(edges)) * (np.mean((centred**2).sum(1)) / slope)
    mean = sp.csr_array((1 / copies[index], (np.arange(len(X)), index)))  # (N, places)
    return sp.csr_array(mean @ matrix @ mean.T)


def view_disagreement(num_points: int, num_views: int, num_outputs: int = 1) -> sp.csr_array:
    r"""Return the matrix M of a penalty fᵀMf of differences between several views of each point.

    Each of m views has a field fᵢ with q outputs, and

        fᵀMf = Σₙ Σ_{i<j} ‖fᵢ(xₙ) − fⱼ(xₙ)‖² ,    M = I_N ⊗ (m I_m − 1 1ᵀ) ⊗ I_q .

    Here the sum is over N points, with and without a label, and 1 is the vector of m ones. f has
    p = m·q outputs. Output i·q + j is output j of view i, both counted from 0. Pass M as
    `laplacian` to `ORFFRidge.fit`. Divide M by N if the weight of the penalty should not depend on
    the number of points.

    Source: Minh, Bazzani & Murino 2016, JMLR 17, the between-view regulariser of co-regularised
    multi-view learning.

    Args:
        num_points: N, the number of points with and without a label.
        num_views: m ≥ 2, the number of views.
        num_outputs: q, the number of outputs of each view.

    Returns:
        M, a scipy sparse matrix (N·p, N·p).

    Raises:
        ValueError: `num_views` < 2, `num_points` < 1 or `num_outputs` < 1.

    Example:
        Two views have the values 1 and 4 at the first point, and 2 and 2 at the second point:

        >>> import numpy as np
        >>> from gp_orff.regression import view_disagreement
        >>> M = view_disagreement(num_points=2, num_views=2)
        >>> f = np.array([1.0, 4.0, 2.0, 2.0])
        >>> float(f @ M @ f)
        9.0
    """
    if num_views < 2:
        raise ValueError(
            f"expected at least two views, got {num_views}; with one view, use laplacian_weight=0"
        )
    if min(num_points, num_outputs) < 1:
        raise ValueError(
            "expected positive numbers of points and outputs, got "
            f"num_points={num_points} and num_outputs={num_outputs}; pass len(X) as num_points"
        )
    pairs = num_views * np.eye(num_views) - 1.0
    return sp.csr_array(sp.kron(sp.eye_array(num_points), np.kron(pairs, np.eye(num_outputs))))


# Tests whether a matrix M can be a penalty, from the cheapest to the most expensive one.
#
# 1. Its shape, its entries and its symmetry are checked, up to rounding relative to the largest
#    entry.
# 2. A diagonally dominant matrix is positive by Gershgorin's theorem. Graph Laplacians are
#    diagonally dominant, so that large ones need no factorisation.
# 3. Dense matrices and small sparse ones must have a Cholesky factor after a shift by the rounding.
# 4. For other sparse matrices, a Lanczos iteration estimates the smallest eigenvalue.
def check_laplacian(laplacian: object, num_points: int, num_outputs: int) -> Matrix:
    """Return M as a float64 matrix, sparse or dense like `laplacian`.

    M is (N, N), which represents M ⊗ I_p, or (N·p, N·p). Eigenvalues above −10⁻⁹ times the largest
    entry count as positive. For sparse matrices with more than 2000 rows that are not diagonally
    dominant, the smallest eigenvalue is a Lanczos estimate. It misses negative eigenvalues whose
    absolute value is below about 10⁻⁵ of the norm.

    Args:
        laplacian: M.
        num_points: N.
        num_outputs: p, the number of outputs of the kernel.

    Raises:
        ValueError: M has another shape or type, contains NaN or infinity, is not symmetric, or has
            a negative eigenvalue.
    """
    matrix = _as_matrix(laplacian)
    shapes = {(num_points, num_points), (num_points * num_outputs, num_points * num_outputs)}
    if matrix.shape not in shapes:
        raise ValueError(
            "laplacian expects a matrix with a row for each row of X, with and without a label, of "
            f"shape {' or '.join(map(str, sorted(shapes)))}, got {matrix.shape}; compute it from "
            "the X of fit, for example by graph_laplacian(X)"
        )
    entries = matrix.data if sp.issparse(matrix) else matrix
    if not np.isfinite(entries).all():
        raise ValueError(
            f"laplacian expects finite entries, got {int((~np.isfinite(entries)).sum())} that are "
            "NaN or infinite; correct them"
        )
    rounding = _ROUNDING * abs(matrix).max()
    asymmetry = abs(matrix - matrix.T).max()
    if asymmetry > rounding:
        raise ValueError(
            f"laplacian expects a symmetric matrix, got M and Mᵀ that differ by {asymmetry:.2g}; "
            "pass (M + Mᵀ)/2"
        )
    matrix = (matrix + matrix.T) / 2
    if not _is_positive(matrix, rounding):
        raise ValueError(
            "laplacian expects a positive semi-definite matrix, got one with a negative eigenvalue;"
            " pass diag(W1) − W with weights W ≥ 0, not its negative or the weights W"
        )
    return matrix


def _as_matrix(values: object) -> Matrix:
    """Return a matrix of any kind as a float64 matrix, sparse if it is sparse."""
    if sp.issparse(values) and values.dtype.kind in "fiu":
        return sp.csr_array(values, dtype=np.float64)
    array = np.asarray(without_tensor(values))
    if array.dtype.kind not in "fiu" or array.ndim != 2:
        raise ValueError(
            "laplacian expects a real matrix, a scipy sparse matrix, an array or a tensor, got "
            f"{type(values).__name__} of shape {array.shape} and type {array.dtype}; convert it"
        )
    return array.astype(np.float64)


def _is_positive(matrix: Matrix, rounding: float) -> bool:
    """Return whether all eigenvalues are above −`rounding`; if M is large, they are estimated."""
    sums, diagonal = np.asarray(abs(matrix).sum(1)).ravel(), matrix.diagonal()
    if (diagonal - (sums - abs(diagonal)) >= -rounding).all():
        return True
    if sp.issparse(matrix) and matrix.shape[0] > _LARGE:
        # A Lanczos iteration converges to the largest eigenvalue first, so M is shifted. The
        # largest sum of absolute values in a row is at least the largest eigenvalue.
        start = np.random.default_rng(0).standard_normal(matrix.shape[0])
        shifted = sums.max() * sp.eye_array(matrix.shape[0]) - matrix
        found = eigsh(shifted, k=1, v0=start, tol=1e-4, return_eigenvectors=False)
        return sums.max() - found.item() >= -rounding
    dense = torch.from_numpy(matrix.toarray() if sp.issparse(matrix) else matrix)
    return not torch.linalg.cholesky_ex(dense + rounding * torch.eye(len(dense))).info


@torch.no_grad()
def penalty(
    expansion: Expansion, x: Float[Tensor, "N d"], laplacian: Matrix
) -> Float[Tensor, "F F"]:
    """Return ΦᵀMΦ for the features Φ at all points, and a checked M, (N, N) or (N·p, N·p).

    It is the penalty as a function of the weights, fᵀMf = θᵀ(ΦᵀMΦ)θ (Minh 2016, eq. 74). Features
    are multiplied in blocks, so that the whole (N·p, F) matrix is not stored.
    """
    if len(x) == laplacian.shape[0]:
        return _same_for_all_outputs(expansion, x, laplacian)

    def product(theta: Float[Tensor, "F k"]) -> Float[Tensor, "F k"]:
        f = expansion.apply(x, theta).reshape(-1, theta.shape[-1])  # Φθ (N·p, k)
        image = torch.from_numpy(laplacian @ f.numpy()).reshape(len(x), -1)
        return expansion.adjoint(x, image)

    return _in_blocks(product, expansion.num_features, laplacian)


@torch.no_grad()
def column_penalty(
    phi: Columns, x: Float[Tensor, "N d"], laplacian: Matrix
) -> Float[Tensor, "M M"]:
    """Return φᵀMφ for the columns φ at all points, and M (N, N)."""

    def product(w: Float[Tensor, "M k"]) -> Float[Tensor, "M k"]:
        return phi.adjoint(x, torch.from_numpy(laplacian @ phi.apply(x, w).numpy()))

    return _in_blocks(product, phi.num_columns, laplacian)


@singledispatch
def _same_for_all_outputs(
    expansion: Expansion, x: Float[Tensor, "N d"], laplacian: Matrix
) -> Float[Tensor, "F F"]:
    """Return Φᵀ(M ⊗ I_p)Φ = φᵀMφ[c, c] ∘ (m mᵀ), with columns c and directions m of features."""
    expansion = expansion.general()
    gram = expansion.gather(expansion.gather(column_penalty(expansion.phi, x, laplacian)).mT)
    return gram * (expansion.directions @ expansion.directions.mT)


@_same_for_all_outputs.register
def _(expansion: KroneckerExpansion, x, laplacian):
    """Return ψᵀMψ ⊗ LᵀL for the scaled columns ψ."""
    return torch.kron(
        scaled_column_penalty(expansion, x, laplacian), expansion.mixing.mT @ expansion.mixing
    )


@torch.no_grad()
def scaled_column_penalty(
    expansion: KroneckerExpansion, x: Float[Tensor, "N d"], laplacian: Matrix
) -> Float[Tensor, "M M"]:
    """Return ψᵀMψ for the scaled columns ψ = φ · scales of a separable kernel, and M (N, N)."""
    return expansion.scales * column_penalty(expansion.phi, x, laplacian) * expansion.scales.mT


def _in_blocks(
    product: Callable[[Float[Tensor, "F k"]], Float[Tensor, "F k"]],
    size: int,
    laplacian: Matrix,
) -> Float[Tensor, "F F"]:
    """Return the symmetric matrix of the linear map `product`, from blocks of unit vectors."""
    block = max(1, _BLOCK_BYTES // (8 * laplacian.shape[0]))
    units = torch.eye(size, dtype=torch.float64)
    matrix = torch.cat([product(part) for part in units.split(block, dim=1)], dim=1)
    return (matrix + matrix.mT) / 2
