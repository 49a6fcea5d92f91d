"""The evidence under an exact kernel: a Cholesky factor, an inverse, and two sweeps over tiles.

With E = VᵀK⁻¹V and log|K|, the gradient in K is G = ∂/∂log|K| K⁻¹ − U (∂/∂E) Uᵀ, U = K⁻¹V. The
first sweep writes K. The second computes every tile again, with derivatives, and contracts it with
its tile of G, so that no graph of N² nodes is held.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from gpytorch.kernels import Kernel
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function

from gp_orff.inference.exact.tiles import Member, Tiles
from gp_orff.inference.quadratic import (
    Evidence,
    InvQuadLogdet,
    log_determinant,
    seen_by,
    solve,
)
from gp_orff.kernels.cholesky import cholesky
from gp_orff.kernels.pairs.forms import cotangents
from gp_orff.kernels.pairs.rows import (
    Geometry,
    Rows,
    by_directions,
    row_covariance,
    row_products,
)

GroupNoises = Float[Tensor, "n v v"] | Float[Tensor, "n*v n*v"]
"""The noise covariance of a group at every point, or that of all its numbers."""


def tiled_evidence(
    kernel: Kernel,
    tiles: Tiles,
    design: Float[Tensor, "M 1+p"],
    noises: Sequence[GroupNoises],
) -> Evidence:
    """The evidence of V, once differentiable in the kernel, the design and the noise.

    Args:
        kernel: without batch dimensions; its parameters are leaves of the graph.
        tiles: of the observations.
        design: V, with a row for each observed number.
        noises: of each group, the noise covariance at every point, or that of all its numbers.
    """
    parameters = [parameter for parameter in kernel.parameters() if parameter.requires_grad]
    terms = TiledInvQuadLogdet.apply(kernel, tiles, len(noises), design, *noises, *parameters)
    variances = [noise.diagonal(dim1=-1, dim2=-2).flatten() for noise in noises]
    return Evidence(*terms, seen_by(design, torch.cat(variances)))


class TiledInvQuadLogdet(Function):
    """VᵀK⁻¹V and log|K|, of K = Cov[H f] + noise.

    Arguments: the kernel, the tiles, the number of groups, V, the noise of every group, and the
    trained parameters of the kernel.
    """

    @staticmethod
    def forward(ctx, kernel: Kernel, tiles: Tiles, num_groups: int, design: Tensor, *tensors):
        factor = cholesky(covariance_of_tiles(kernel, tiles, tensors[:num_groups]))
        half, u = solve(factor, design)
        ctx.kernel, ctx.tiles, ctx.num_groups = kernel, tiles, num_groups
        ctx.save_for_backward(factor, u, design, *tensors)
        return half.mT @ half, log_determinant(factor)

    @staticmethod
    def backward(ctx, grad_quad, grad_logdet):
        factor, u, design, *tensors = ctx.saved_tensors
        noises, parameters = tensors[: ctx.num_groups], tensors[ctx.num_groups :]
        if torch.is_grad_enabled():  # with the graph of all of K
            values = InvQuadLogdet.apply(_with_graph(ctx.kernel, ctx.tiles, noises), design)
            inputs = (design, *tensors)
            variables = [t for t in inputs if t.requires_grad]
            grads = torch.autograd.grad(
                values, variables, (grad_quad, grad_logdet), create_graph=True, allow_unused=True
            )
            found = iter(grads)
            return None, None, None, *(next(found) if t.requires_grad else None for t in inputs)
        weights = u @ (0.5 * (grad_quad + grad_quad.mT))
        inverse = torch.cholesky_inverse(factor)
        noise_gradients = [torch.zeros_like(noise) for noise in noises]
        derivatives = _Derivatives(ctx.kernel, parameters)
        for left, right, geometry in ctx.tiles.lower():
            times = 1 if left is right else 2  # and the tile above the diagonal
            gradient = times * grad_logdet * inverse[left.span, right.span]
            gradient.addmm_(weights[left.span], u[right.span].mT, alpha=-times)
            for member in left.members if left is right else ():
                if noises[member.group].dim() == 2:
                    continue
                own = slice(member.span.start - left.span.start, member.span.stop - left.span.start)
                blocks = _diagonal_blocks(gradient[own, own], member)
                noise_gradients[member.group][member.points] = blocks.permute(2, 0, 1)
            if parameters:
                derivatives.add(left.rows, right.rows, geometry, gradient)
        for noise, total, span in zip(noises, noise_gradients, ctx.tiles.spans, strict=True):
            if noise.dim() == 2:
                total += grad_logdet * inverse[span, span] - weights[span] @ u[span].mT
        return None, None, None, 2 * weights, *noise_gradients, *derivatives.totals()


class _Derivatives:
    """Σ G ∂K over tiles; tensors computed for all tiles are differentiated once, at the end."""

    def __init__(self, kernel: Kernel, parameters: Sequence[Tensor]):
        self.parameters, self.heads, self.leaves = parameters, [], []
        with torch.enable_grad():
            self.products = row_products(kernel, self._cut)
        self.sums = [torch.zeros_like(t) for t in (*parameters, *self.leaves)]

    def _cut(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        self.heads.append(tensor)
        self.leaves.append(tensor.detach().requires_grad_())
        return self.leaves[-1]

    def add(
        self, left: Rows, right: Rows, geometry: Geometry, gradient: Float[Tensor, "k l"]
    ) -> None:
        """Add one tile."""
        with torch.enable_grad():
            products = self.products(left, right, geometry)
        heads, gradients = zip(
            *cotangents(products, by_directions(gradient, left, right)), strict=True
        )
        inputs = (*self.parameters, *self.leaves)
        gradients = torch.autograd.grad(heads, inputs, gradients, allow_unused=True)
        self._accumulate(self.sums, gradients)

    def totals(self) -> list[Tensor]:
        """Of every parameter."""
        count = len(self.parameters)
        if self.heads:
            inner = torch.autograd.grad(
                self.heads, self.parameters, self.sums[count:], allow_unused=True
            )
            self._accumulate(self.sums[:count], inner)
        return self.sums[:count]

    def _accumulate(self, sums: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        for total, gradient in zip(sums, gradients, strict=True):
            if gradient is not None:
                total += gradient


@torch.no_grad()
def covariance_of_tiles(
    kernel: Kernel, tiles: Tiles, noises: Sequence[GroupNoises]
) -> Float[Tensor, "*b M M"]:
    """The lower triangle of K = Cov[H f] + noise; of a batch of kernels, each with its noise."""
    covariance = tiles.covariance(kernel)
    for noise, span in zip(noises, tiles.spans, strict=True):
        if noise.dim() == 2:
            covariance[span, span] += noise.tril()
    for member in chain(*(piece.members for piece in tiles.pieces)):
        if noises[member.group].dim() > 2:
            blocks = _diagonal_blocks(covariance[..., member.span, member.span], member)
            blocks += noises[member.group][..., member.points, :, :].movedim(-3, -1)
    return covariance


def _diagonal_blocks(
    part: Float[Tensor, "*b n*v n*v"], member: Member
) -> Float[Tensor, "*b v v n"]:
    """A view of the blocks of single points."""
    width = member.width
    return part.unflatten(-2, (-1, width)).unflatten(-1, (-1, width)).diagonal(dim1=-4, dim2=-2)


def _with_graph(
    kernel: Kernel, tiles: Tiles, noises: Sequence[GroupNoises]
) -> Float[Tensor, "M M"]:
    """K, differentiable any number of times."""
    between, pieces = row_covariance(kernel), tiles.pieces
    rows = [torch.cat([between(a.rows, b.rows) for b in pieces], dim=-1) for a in pieces]
    blocks = (noise if noise.dim() == 3 else noise.unsqueeze(0) for noise in noises)
    return torch.cat(rows) + torch.block_diag(*chain(*blocks))
