"""The penalty fᵀMf of semi-supervised and multi-view regression: matrices M, and ΦᵀMΦ.

f holds the field at all points, labelled or not, in point-major order: row n·p + i is output i at
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

_BLOCK_BYTES = 256 * 2**20  # of the values of a block of features at all points
_ROUNDING = 1e-9  # of M, relative to its largest entry
_LARGE = 2000  # rows of a sparse matrix that is not factorised


def graph_laplacian(X: Float[Tensor, "N d"], n_neighbors: int = 10) -> sp.csr_array:
    r"""Return the Laplacian M (N, N) of a graph that connects each point to its nearest neighbours.

    fᵀMf is large if f differs between neighbours. As `laplacian` of an `ORFFRidge`, M penalises
    outputs that vary fast along the curve or surface of the points. Unlabelled points show where
    this curve or surface is.

    M = c (diag(W1) − W), where W_nm = exp(−|x_n − x_m|²/s²) if one of the two points is among the
    `n_neighbors` nearest neighbours of the other, and s² is the mean square of these distances.
    Belkin, Niyogi & Sindhwani 2006 divide by N² and leave s to the user. Here c is such that
    tr(XᵀMX) is the mean square of the distances of the points from their mean. So fᵀMf is the mean
    square of the slope of f between neighbours, times the square of the size of the data. It has
    the unit of f², is independent of the unit of the inputs, and tends to a limit as N grows. A
    weight therefore has the same meaning for 100 and for 10 000 points. Rows of M sum to zero, so
    that a constant f has no penalty. Points at one position, such as the times of a station, are
    one node, with the mean of f over them.

    Args:
        X: N points (N, d), labelled and unlabelled; a tensor or an array, in one unit.
        n_neighbors: the number of neighbours of each point; all other points, if there are fewer.

    Raises:
        TypeError: points that are not real numbers.
        ValueError: points that are not finite, or all at one place; `n_neighbors` is not a positive
            integer.

    Example:
        >>> import numpy as np
        >>> from gp_orff.regression import graph_laplacian
        >>> angle = np.linspace(0, 2 * np.pi, 100, endpoint=False)
        >>> X = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        >>> M = graph_laplacian(X, n_neighbors=4)
        >>> # slow, and from point to point
        >>> along, across = X[:, 0], np.cos(50 * angle)
        >>> round(float(along @ M @ along), 3), bool(across @ M @ across > 200)
        (0.5, True)
    """
    X = as_points(X).numpy()
    n_neighbors = check_positive_integer(n_neighbors, "n_neighbors", "graph_laplacian")
    places, index, copies = np.unique(X, axis=0, return_inverse=True, return_counts=True)
    if len(places) < 2:
        raise ValueError(
            f"a graph expects points at two places at least, got {len(X)} at {len(places)}; set "
            "laplacian_weight=0"
        )
    # Centred points lose fewer digits in the distances, if they are far from the origin.
    centred = places - places.mean(0)
    distances = kneighbors_graph(centred, min(n_neighbors, len(places) - 1), mode="distance")
    graph = sp.csr_array(distances)
    graph.data = np.exp(-(graph.data**2) / np.mean(graph.data**2))
    edges = sp.coo_array(graph.maximum(graph.T))
    squares = ((centred[edges.row] - centred[edges.col]) ** 2).sum(1)
    slope = edges.data @ squares / 2  # tr(XᵀMX), where cancellation would cost the sign
    matrix = sp.csr_array(laplacian_of(edges)) * (np.mean((centred**2).sum(1)) / slope)
    mean = sp.csr_array((1 / copies[index], (np.arange(len(X)), index)))  # (N, places)
    return sp.csr_array(mean @ matrix @ mean.T)


def view_disagreement(num_points: int, num_views: int, num_outputs: int = 1) -> sp.csr_array:
    r"""Return M (N·p, N·p) with fᵀMf = Σₙ Σ_{i<j} ‖fᵢ(xₙ) − fⱼ(xₙ)‖², for p = views · outputs.

    As `laplacian` of an `ORFFRidge`, it penalises differences between the fields fᵢ of several
    views at all points, labelled and unlabelled. It is the between-view regulariser of
    co-regularised multi-view learning, M = I_N ⊗ (m I_m − 1 1ᵀ) ⊗ I_q for m views of q outputs
    (Minh, Bazzani & Murino 2016, JMLR 17). Output i·q + j of the field is output j of view i. The
    penalty is a sum over points: divide it by `num_points` for a weight that does not depend on
    their number.

    Args:
        num_points: N, labelled and unlabelled.
        num_views: m, at least two.
        num_outputs: q, the number of outputs of each view.

    Raises:
        ValueError: fewer than two views, or numbers that are not positive.

    Example:
        >>> import numpy as np
        >>> from gp_orff.regression import view_disagreement
        >>> M = view_disagreement(num_points=2, num_views=2)
        >>> # views 1 and 4 at a point, 2 and 2 at the other
        >>> f = np.array([1.0, 4.0, 2.0, 2.0])
        >>> float(f @ M @ f)
        9.0
    """
    if num_views < 2:
        raise ValueError(
            f"expected at least two views, got {num_views}; one has none to agree with"
        )
    if min(num_points, num_outputs) < 1:
        raise ValueError(
            f"expected positive numbers of points and outputs, got {num_points} and {num_outputs}"
        )
    pairs = num_views * np.eye(num_views) - 1.0
    return sp.csr_array(sp.kron(sp.eye_array(num_points), np.kron(pairs, np.eye(num_outputs))))


# Whether a matrix M can be a penalty, from the cheapest test to the most expensive one.
#
# 1. Its shape, its entries and its symmetry, up to rounding relative to the largest entry.
# 2. A matrix that is dominated by its diagonal is positive by Gershgorin's theorem. Graph
#    Laplacians are, so that large ones need no factorisation.
# 3. Dense matrices and small sparse ones have a Cholesky factor after a shift by the rounding.
# 4. For other sparse matrices Lanczos estimates the smallest eigenvalue.
def check_laplacian(laplacian: object, num_points: int, num_outputs: int) -> Matrix:
    """M as a float64 matrix, sparse if it was; (N, N), which stands for M ⊗ I_p, or (N·p, N·p).

    Eigenvalues above −10⁻⁹ times its largest entry count as positive. Of sparse matrices of more
    than 2000 rows that are not dominated by their diagonals, the smallest eigenvalue is an estimate
    of Lanczos, which misses negative ones below about 10⁻⁵ of the norm.

    Raises:
        ValueError: another shape, a type that is not a real matrix, NaN or infinite entries, an
            asymmetric or an indefinite matrix.
    """
    matrix = _as_matrix(laplacian)
    shapes = {(num_points, num_points), (num_points * num_outputs, num_points * num_outputs)}
    if matrix.shape not in shapes:
        raise ValueError(
            "laplacian expects a matrix with a row for each row of X, labelled or not, of shape "
            f"{' or '.join(map(str, sorted(shapes)))}, got {matrix.shape}; make it from the X of "
            "fit, as graph_laplacian(X)"
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
            "take (M + Mᵀ)/2"
        )
    matrix = (matrix + matrix.T) / 2
    if not _is_positive(matrix, rounding):
        raise ValueError(
            "laplacian expects a positive semi-definite matrix, got one with a negative eigenvalue;"
            " a Laplacian is diag(W1) − W with weights W ≥ 0, and −M or an adjacency W is none"
        )
    return matrix


def _as_matrix(values: object) -> Matrix:
    """A matrix of any kind as a float64 matrix, sparse if it is sparse."""
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
    """Whether no eigenvalue is below −`rounding`; of a large sparse matrix, by an estimate."""
    sums, diagonal = np.asarray(abs(matrix).sum(1)).ravel(), matrix.diagonal()
    if (diagonal - (sums - abs(diagonal)) >= -rounding).all():
        return True
    if sp.issparse(matrix) and matrix.shape[0] > _LARGE:
        # Lanczos converges to the largest eigenvalue first. The largest sum of absolute values in a
        # row is at least the largest eigenvalue, and the shifted matrix is positive.
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
    """ΦᵀMΦ of the features at all points, for a checked M (N, N) or (N·p, N·p).

    It is the penalty in terms of the weights, fᵀMf = θᵀ(ΦᵀMΦ)θ, in Minh 2016, eq. 74. Features go
    through M in blocks: the whole (N·p, F) matrix is not stored.
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
    """φᵀMφ of the columns at all points, for M (N, N)."""

    def product(w: Float[Tensor, "M k"]) -> Float[Tensor, "M k"]:
        return phi.adjoint(x, torch.from_numpy(laplacian @ phi.apply(x, w).numpy()))

    return _in_blocks(product, phi.num_columns, laplacian)


@singledispatch
def _same_for_all_outputs(
    expansion: Expansion, x: Float[Tensor, "N d"], laplacian: Matrix
) -> Float[Tensor, "F F"]:
    """Φᵀ(M ⊗ I_p)Φ = φᵀMφ[c, c] ∘ (m mᵀ) for the columns c of the features."""
    expansion = expansion.general()
    gram = expansion.gather(expansion.gather(column_penalty(expansion.phi, x, laplacian)).mT)
    return gram * (expansion.directions @ expansion.directions.mT)


@_same_for_all_outputs.register
def _(expansion: KroneckerExpansion, x, laplacian):
    """ψᵀMψ ⊗ LᵀL of the scaled columns ψ."""
    return torch.kron(
        scaled_column_penalty(expansion, x, laplacian), expansion.mixing.mT @ expansion.mixing
    )


@torch.no_grad()
def scaled_column_penalty(
    expansion: KroneckerExpansion, x: Float[Tensor, "N d"], laplacian: Matrix
) -> Float[Tensor, "M M"]:
    """ψᵀMψ of the scaled columns ψ = φ · scales of a separable kernel, for M (N, N)."""
    return expansion.scales * column_penalty(expansion.phi, x, laplacian) * expansion.scales.mT


def _in_blocks(
    product: Callable[[Float[Tensor, "F k"]], Float[Tensor, "F k"]],
    size: int,
    laplacian: Matrix,
) -> Float[Tensor, "F F"]:
    """The symmetric matrix that `product` multiplies by, from blocks of unit vectors."""
    block = max(1, _BLOCK_BYTES // (8 * laplacian.shape[0]))
    units = torch.eye(size, dtype=torch.float64)
    matrix = torch.cat([product(part) for part in units.split(block, dim=1)], dim=1)
    return (matrix + matrix.mT) / 2
