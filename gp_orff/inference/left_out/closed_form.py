"""Readings left out by blocks, from the inverse of the covariance of all (dual algebra).

With K = Cov[H f] + noise, V = [y, H(1⊗I_p)] and Q = K⁻¹V, the rows b of a block have, given all
others r,

    Cov[y_b | y_r] = ([K⁻¹]_bb)⁻¹ ,    V_b − E[V_b | V_r] = ([K⁻¹]_bb)⁻¹ Q_b ,
    V_rᵀ K_rr⁻¹ V_r = Vᵀ Q − Q_bᵀ ([K⁻¹]_bb)⁻¹ Q_b ,

and the last one gives the constant mean of largest evidence of the rest (Rasmussen & Williams 2006,
eqs. 5.10–5.12, for blocks and with a mean).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

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
from gp_orff.inference.left_out.conditioning import LeftOut, left_out
from gp_orff.inference.quadratic import Evidence
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

    def left_out(
        self, block: Bool[Tensor, "N"], mean: Float[Tensor, "M"], variance: Float[Tensor, "M"]
    ) -> list[LeftOut]:
        """The readings of a block, with the values of their rows."""
        sizes, results = [group.y.numel() for group in self.groups], []
        values = zip(mean.split(sizes), variance.split(sizes), strict=True)
        for part, sites, pair in zip(self.readings, self.sites, values, strict=True):
            inside = block[part.index]
            columns = (v.unflatten(0, (-1, part.y.shape[-1]))[sites[inside]] for v in pair)
            if inside.any():
                results.append(LeftOut(part.take(inside), *columns))
        return results


@left_out.register
@torch.no_grad()
def _(inference: ExactInference, kernel, noises, mean, blocks):
    blocks = list(blocks)
    rows = Rows.of(inference.data, inference.reach, kinds(blocks))
    if len(rows) > _SPLIT * inference.size:
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
    blocks: Iterable[Bool[Tensor, "N"]],
) -> Iterator[list[LeftOut]]:
    """The readings of every block, and the field there given all others, from K of all rows."""
    design = rows.observed.design(next(iter(noises.values())).shape[-1])
    inverse = torch.cholesky_inverse(cholesky(covariance))
    solved = inverse @ design
    noise = rows.observed.noise_covariance(noises).diagonal()
    for block in blocks:
        b = torch.nonzero(rows.within(block)).squeeze(-1)
        conditional = torch.cholesky_inverse(cholesky(inverse[b[:, None], b]))
        residual = conditional @ solved[b]
        evidence = Evidence(design.mT @ solved - solved[b].mT @ residual, covariance.new_zeros(()))
        expected, variance = torch.zeros_like(noise), torch.zeros_like(noise)
        expected[b] = design[b, 0] - (residual @ evidence.contrast(mean)).squeeze(-1)
        variance[b] = (conditional.diagonal() - noise[b]).clamp_min(0)
        yield rows.left_out(block, expected, variance)


def kinds(blocks: Sequence[Bool[Tensor, "N"]]) -> Int[Tensor, "N"]:
    """A number for each reading; two have the same one if they are in the same blocks."""
    words = np.random.default_rng(0).integers(0, 2**64, size=len(blocks), dtype=np.uint64)
    sums = np.zeros(len(blocks[0]), dtype=np.uint64)
    for word, block in zip(words, blocks, strict=True):
        sums[block.cpu().numpy()] += word  # modulo 2⁶⁴
    numbers = np.unique(sums, return_inverse=True)[1]
    return torch.from_numpy(numbers.ravel()).to(blocks[0].device)
