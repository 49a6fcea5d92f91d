"""Columns φ averaged over blocks of readings, φ̄_b = mean_i φ(x_i)."""

from collections.abc import Iterator
from functools import singledispatch
from math import prod

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from gp_orff.features import chunked
from gp_orff.features.columns import Columns
from gp_orff.features.lattice import LatticeColumns

_NUMBERS = 2**19  # of the readings of some blocks and their waves, at once


def block_means(
    values: Float[Tensor, "N k"], block: Int[Tensor, "N"], count: int
) -> Float[Tensor, "T k"]:
    """The means of values over blocks."""
    sums = values.new_zeros(count, values.shape[-1]).index_add(0, block, values)
    return sums / torch.bincount(block, minlength=count).to(values).unsqueeze(-1)


@singledispatch
def averaged(
    phi: Columns, x: Float[Tensor, "N d"], block: Int[Tensor, "N"], count: int
) -> Float[Tensor, "T M"]:
    """φ̄ of `count` blocks of readings at x; `block`, that of each, increases."""
    if any(tensor.requires_grad for tensor in phi.tensors):
        return block_means(phi.values(x), block, count)
    total = x.new_zeros(count, phi.num_columns, dtype=torch.float64)
    for rows in chunked.chunks(x, phi.num_columns):
        total.index_add_(0, block[rows], phi.values(x[rows]))
    return total / torch.bincount(block, minlength=count).unsqueeze(-1)


def averaged_along(
    phi: Columns,
    x: Float[Tensor, "N d"],
    direction: Float[Tensor, "N p"],
    block: Int[Tensor, "N"],
    count: int,
) -> Float[Tensor, "M p*T"]:
    """mean_i φ(x_i) u_i of `count` blocks of readings at x along directions u."""

    def products(rows: slice) -> Float[Tensor, "n p*M"]:
        return (direction[rows].unsqueeze(-1) * phi.values(x[rows]).unsqueeze(1)).flatten(1)

    width = direction.shape[-1] * phi.num_columns
    if any(tensor.requires_grad for tensor in phi.tensors):
        means = block_means(products(slice(None)), block, count)
    else:
        means = x.new_zeros(count, width, dtype=torch.float64)
        for rows in chunked.chunks(x, width):
            means.index_add_(0, block[rows], products(rows))
        means /= torch.bincount(block, minlength=count).unsqueeze(-1)
    return means.unflatten(1, (-1, phi.num_columns)).permute(2, 1, 0).flatten(1)


@averaged.register
def _(
    phi: LatticeColumns, x: Float[Tensor, "N d"], block: Int[Tensor, "N"], count: int
) -> Float[Tensor, "T M"]:
    """Waves of a lattice are products over the axes: a block's mean is a product of matrices."""
    phases = ((x.double() - phi.origin) * phi.spacing).mT.contiguous()
    out = phases.new_empty(count, phi.num_columns)
    flipped = phi.indices[:, -1] < 0  # waves are those of k_d ≥ 0: the others are their conjugates
    indices = torch.where(flipped.unsqueeze(-1), -phi.indices, phi.indices)
    offset = torch.tensor([*phi.modes[:-1], 0], device=x.device)
    sizes = [*(2 * m + 1 for m in phi.modes[:-1]), phi.modes[-1] + 1]
    strides = torch.tensor([prod(sizes[i + 1 :]) for i in range(len(sizes))], device=x.device)
    place = ((indices + offset) * strides).sum(-1)
    sign = 1.0 - 2.0 * flipped.to(phases)
    for blocks, rows, inside in _batches(block, count, sum(sizes) + prod(sizes[:-1])):
        waves = _mean_waves(phases[:, rows], inside, phi.modes)
        cosines, sines = (
            part.contiguous().index_select(1, place) for part in (waves.real, waves.imag)
        )
        out[blocks] = torch.cat([cosines, sines.mul_(sign)], dim=-1)
    return out


def _batches(
    block: Int[Tensor, "N"], count: int, width: int
) -> Iterator[tuple[Int[Tensor, "b"], Int[Tensor, "b n"], Float[Tensor, "b n"]]]:
    """Blocks of about the same size, the rows of their readings, and 1/n, or 0 in the place of
    readings that they do not have."""
    size = torch.bincount(block, minlength=count)
    start, order, done = size.cumsum(0) - size, size.argsort(descending=True), 0
    while done < count:
        many = max(1, _NUMBERS // (width * size[order[done]].item()))
        blocks = order[done : done + many]
        rank = torch.arange(size[blocks[0]].item(), device=block.device)
        present = rank < size[blocks, None]
        yield (
            blocks,
            torch.where(present, start[blocks, None] + rank, start[blocks, None]),
            present / size[blocks, None].double(),
        )
        done += len(blocks)


def _mean_waves(
    phases: Float[Tensor, "d b n"], weights: Float[Tensor, "b n"], modes: tuple[int, ...]
) -> Complex[Tensor, "b q"]:
    """Σ_n w_n exp(i⟨k, θ_n⟩) for all |k_i| ≤ m_i, with 0 ≤ k_d in the last place."""
    product = torch.ones_like(weights).unsqueeze(0)
    for phase, most in zip(phases[:-1], modes[:-1], strict=True):
        half = _powers(phase, most, torch.ones_like(weights))
        powers = torch.cat([half[1:].flip(0).conj(), half])
        product = (product.unsqueeze(1) * powers).flatten(0, 1)
    last = _powers(phases[-1], modes[-1], weights)
    return (product.transpose(0, 1).to(last) @ last.permute(1, 2, 0)).flatten(1)


def _powers(
    phase: Float[Tensor, "b n"], most: int, weights: Float[Tensor, "b n"]
) -> Complex[Tensor, "m b n"]:
    """w exp(ikθ) for k = 0, …, `most`, each from the one before."""
    wave = torch.polar(torch.ones_like(phase), phase)
    powers = wave.new_empty(most + 1, *wave.shape)
    powers[0] = weights
    for k in range(most):
        torch.mul(powers[k], wave, out=powers[k + 1])
    return powers
