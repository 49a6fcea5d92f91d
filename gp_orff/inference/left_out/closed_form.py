"""Readings left out by blocks, from the covariance of all (dual algebra).

With K = Cov[H f] + noise, V = [y, H(1⊗I_p)] and Q = K⁻¹V, the rows b of a block have, given all
others r,

    Cov[y_b | y_r] = ([K⁻¹]_bb)⁻¹ ,    V_b − E[V_b | V_r] = ([K⁻¹]_bb)⁻¹ Q_b ,
    V_rᵀ K_rr⁻¹ V_r = Vᵀ Q − Q_bᵀ ([K⁻¹]_bb)⁻¹ Q_b ,

and the last one gives the constant mean of largest evidence of the rest, and its covariance
(Rasmussen & Williams 2006, eqs. 5.10–5.12, for blocks and with a mean).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gp_orff.data.dataset import Dataset
from gp_orff.data.noise.covariances import Noises
from gp_orff.data.observations import Observations, PointObservations
from gp_orff.data.repeats.merged import merged, site_labels
from gp_orff.inference.conditioning import ExactInference
from gp_orff.inference.exact_posterior import observed_covariance
from gp_orff.inference.left_out.conditioning import Block, LeftOut, left_out
from gp_orff.inference.quadratic import Evidence, seen_by
from gp_orff.kernels.cholesky import cholesky

_SPLIT = 2  # times as many rows as sites, beyond which conditioning on the rest is cheaper


@dataclass(frozen=True)
class Rows:
    """The rows of a covariance matrix, merged at sites if asked for, and the readings in each."""

    readings: Sequence[Observations]  # nominal, a part for each group
    groups: Sequence[Observations]  # merged, with weights
    sites: Sequence[Int[Tensor, "n"]]  # of the readings of each part, among those of its group

    @classmethod
    def of(
        cls,
        data: Dataset,
        reach: Sequence[float] | None = None,
        kinds: Int[Tensor, "N"] | None = None,
    ) -> "Rows":
        """The rows of data; readings of one `kind` are merged that lie within one `reach`."""
        readings, weighted = list(data.unweighted().visit()), list(data.visit())
        if reach is None:
            sites = [torch.arange(len(part), device=part.x.device) for part in readings]
            return cls(readings, weighted, sites)
        apart = (*reach, 0.0)
        tagged = [
            replace(part, x=torch.cat([part.x, kinds[part.index, None].to(part.x)], dim=-1))
            for part in weighted
        ]
        sites = [torch.from_numpy(site_labels(part, apart)).to(part.x.device) for part in tagged]
        groups = [replace(part, x=part.x[:, :-1]) for part in merged(tagged, apart)[0]]
        return cls(readings, groups, sites)

    @property
    def observed(self) -> PointObservations:
        return PointObservations(list(self.groups))

    def __len__(self) -> int:
        return sum(group.y.numel() for group in self.groups)

    def within(self, block: Bool[Tensor, "N"]) -> Bool[Tensor, "M"]:
        """The rows that are in a block."""
        masks = []
        for part, group, sites in zip(self.readings, self.groups, self.sites, strict=True):
            inside = torch.zeros(len(group), dtype=torch.bool, device=sites.device)
            inside[sites] = block[part.index]
            masks.append(inside.repeat_interleave(group.y.shape[-1]))
        return torch.cat(masks)

    def predicted(
        self,
        tested: Bool[Tensor, "N"],
        rows: Int[Tensor, "k"],
        mean: Float[Tensor, "k"],
        latent: Float[Tensor, "k k"],
    ) -> list[LeftOut]:
        """The tested readings, and the field there, from its mean and covariance at some rows."""
        position = torch.zeros(len(self), dtype=torch.long, device=rows.device)
        position[rows] = torch.arange(len(rows), device=rows.device)
        first, results = 0, []
        for part, group, sites in zip(self.readings, self.groups, self.sites, strict=True):
            kept, values = tested[part.index], group.y.shape[-1]
            columns = torch.arange(values, device=rows.device)
            at = position[first + values * sites[kept].unsqueeze(-1) + columns]  # (n, v)
            if kept.any():
                joint = partial(_square, latent, at.flatten())
                results.append(LeftOut(part.take(kept), mean[at], latent.diagonal()[at], joint))
            first += group.y.numel()
        return results


def _square(matrix: Float[Tensor, "k k"], rows: Int[Tensor, "m"]) -> Float[Tensor, "m m"]:
    """The matrix of some rows and columns."""
    return matrix[rows[:, None], rows]


@left_out.register
@torch.no_grad()
def _(inference: ExactInference, kernel, noises, mean, blocks):
    blocks = list(blocks)
    if not blocks:
        return
    rows = Rows.of(inference.data, inference.reach, kinds([block.left_out for block in blocks]))
    if inference.changes is not None or len(rows) > _SPLIT * inference.size:
        yield from left_out.dispatch(object)(inference, kernel, noises, mean, blocks)
        return
    covariance = observed_covariance(kernel, [rows.observed])
    covariance = covariance + rows.observed.noise_covariance(noises)
    yield from left_out_of_rows(rows, covariance, noises, mean, blocks)


def left_out_of_rows(
    rows: Rows,
    covariance: Float[Tensor, "M M"],
    noises: Noises,
    mean: Float[Tensor, "p"] | None,
    blocks: Iterable[Block],
) -> Iterator[list[LeftOut]]:
    """The readings of every block, and the field there given all others, from K of all rows."""
    design = rows.observed.design(next(iter(noises.values())).shape[-1])
    factor = cholesky(covariance)
    solved = torch.cholesky_solve(design, factor)
    noise = rows.observed.noise_covariance(noises)
    for block in blocks:
        b = torch.nonzero(rows.within(block.left_out)).squeeze(-1)
        unit = torch.zeros_like(covariance[:, : len(b)])
        unit[b, torch.arange(len(b), device=b.device)] = 1.0
        half = torch.linalg.solve_triangular(factor, unit, upper=False)
        conditional = torch.cholesky_inverse(cholesky(half.mT @ half))
        residual = conditional @ solved[b]
        rest = torch.ones_like(design[:, 0], dtype=torch.bool).index_fill(0, b, False)
        evidence = Evidence(
            design.mT @ solved - solved[b].mT @ residual,
            covariance.new_zeros(()),
            seen_by(design[rest], covariance.diagonal()[rest]),
        )
        expected = design[b, 0] - (residual @ evidence.contrast(mean)).squeeze(-1)
        latent = conditional - _square(noise, b)
        if mean is None:
            effect = residual[:, 1:] @ evidence.mean_root()
            latent = latent + effect @ effect.mT
        yield rows.predicted(block.tested, b, expected, latent)


def kinds(masks: Sequence[Bool[Tensor, "N"]]) -> Int[Tensor, "N"]:
    """A number for each reading; two have the same one if they are in the same sets."""
    words = np.random.default_rng(0).integers(0, 2**64, size=len(masks), dtype=np.uint64)
    sums = np.zeros(len(masks[0]), dtype=np.uint64)
    for word, mask in zip(words, masks, strict=True):
        sums[mask.cpu().numpy()] += word  # modulo 2⁶⁴
    numbers = np.unique(sums, return_inverse=True)[1]
    return torch.from_numpy(numbers.ravel()).to(masks[0].device)
