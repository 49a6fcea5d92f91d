"""Data under many hyperparameters at once."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from gpytorch import Module
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from jaxtyping import Float
from linear_operator.utils.warnings import NumericalWarning
from torch import Tensor, nn

from gp_orff.data.noise.covariances import noises_of
from gp_orff.inference.conditioning import ExactInference
from gp_orff.inference.quadratic import Evidence
from gp_orff.models.fitting.coordinates import Coordinates
from gp_orff.models.fitting.starting_values import all_summands

_NUMBERS = 2**23  # in the matrices of one batch


@dataclass(frozen=True)
class Model:
    """A kernel and the likelihoods of all groups, of which a search moves the coordinates."""

    inference: ExactInference
    kernel: Kernel
    likelihoods: Mapping[str, Likelihood]
    mean: Float[Tensor, "p"] | None  # a fixed one
    coordinates: Coordinates

    @property
    def step(self) -> int:
        """How many hyperparameters are evaluated at once."""
        if not self.inference.serves_batches(self.kernel):
            return 1
        return max(1, int(_NUMBERS / self.inference.size**2))

    def batch(self, u: Float[np.ndarray, "S k"]) -> tuple[Kernel, dict[str, Likelihood]]:
        """A batch of kernels and likelihoods."""
        return self._at(self.coordinates.raw(u), torch.Size([len(u)]))

    def at(self, u: Float[np.ndarray, "k"]) -> tuple[Kernel, dict[str, Likelihood]]:
        """A kernel and likelihoods."""
        raw = self.coordinates.raw(u[None])
        return self._at({own: values[0] for own, values in raw.items()}, torch.Size())

    def _at(
        self, raw: Mapping[nn.Parameter, Tensor], batch: torch.Size
    ) -> tuple[Kernel, dict[str, Likelihood]]:
        kernel, *likelihoods = (
            with_parameters(module, raw, batch)
            for module in (self.kernel, *self.likelihoods.values())
        )
        return kernel, dict(zip(self.likelihoods, likelihoods, strict=True))

    def evidence(self, u: Float[np.ndarray, "S k"]) -> Float[np.ndarray, "S"]:
        """log p(y | u): with the constant mean integrated out, unless it is fixed; −∞ where it
        cannot be computed."""
        parts = np.array_split(u, max(1, -(-len(u) // self.step)))
        with warnings.catch_warnings():  # draws may make the covariance singular to rounding
            warnings.simplefilter("ignore", NumericalWarning)
            values = np.concatenate([self._evidence(part) for part in parts])
        return np.where(np.isfinite(values), values, -np.inf)

    def _evidence(self, u: Float[np.ndarray, "S k"]) -> Float[np.ndarray, "S"]:
        try:
            if len(u) == 1:
                kernel, likelihoods = self.at(u[0])
                noises = noises_of(kernel, likelihoods)
                return self.log_density(self.inference.evidence(kernel, noises))[None]
            kernel, likelihoods = self.batch(u)
            whitened = self.inference.in_batches(kernel, noises_of(kernel, likelihoods))
            return self.log_density(whitened.evidence)
        except (torch.linalg.LinAlgError, ValueError, RuntimeError):
            if len(u) == 1:
                return np.array([-np.inf])
            return np.concatenate([self._evidence(one) for one in np.split(u, len(u))])

    def log_density(self, evidence: Evidence) -> Float[np.ndarray, "*b"]:
        return self.inference.log_density(evidence, self.mean, restricted=True).cpu().numpy()

    def moments(
        self, u: Float[np.ndarray, "S k"], x: Float[Tensor, "n d"]
    ) -> tuple[Float[np.ndarray, "S t"], Float[np.ndarray, "S t"]]:
        """Means and variances of the field at points, and of each summand of a sum of kernels."""
        kernel, likelihoods = self.batch(u)
        noises = noises_of(kernel, likelihoods)
        factor, half, evidence = self.inference.in_batches(kernel, noises)
        summands = all_summands(kernel)
        residual = half @ evidence.contrast(self.mean)
        means, variances = [], []
        for part in [kernel, *(summands if len(summands) > 1 else [])]:
            cross = self.inference.cross(part, x).to(factor).expand(*factor.shape[:-1], -1)
            cross = torch.linalg.solve_triangular(factor, cross, upper=False)
            mean = (cross.mT @ residual).squeeze(-1)
            variance = part(x, diag=True) - cross.square().sum(-2)
            if part is kernel and self.mean is None:
                constants = torch.eye(half.shape[-1] - 1).to(half).repeat(len(x), 1)
                effect = constants - cross.mT @ half[..., 1:]
                mean = mean + evidence.best_mean().repeat(1, len(x))
                variance = variance + (effect @ evidence.mean_root()).square().sum(-1)
            means.append(mean)
            variances.append(variance)
        return torch.cat(means, -1).cpu().numpy(), torch.cat(variances, -1).cpu().numpy()


def with_parameters(
    module: Module, parameters: Mapping[nn.Parameter, Tensor], batch: torch.Size
) -> Module:
    """A copy of a module with other values of some parameters, which shares all else with it; of a
    kernel, a batch of copies has a batch of every parameter."""
    copies: dict[Module, Module] = {}

    def copied(part: Module) -> Module:
        if part not in copies:
            copies[part] = own = object.__new__(type(part))
            own.__dict__.update(vars(part))
            own.__dict__["_parameters"] = {
                name: None if raw is None else value(part, raw)
                for name, raw in vars(part)["_parameters"].items()
            }
            children = vars(part)["_modules"].items()
            own.__dict__["_modules"] = {n: None if c is None else copied(c) for n, c in children}
            if batch and isinstance(part, Kernel):
                own.batch_shape = batch
        return copies[part]

    def value(part: Module, raw: nn.Parameter) -> nn.Parameter:
        values = parameters.get(raw)
        if values is None:
            own = isinstance(part, Kernel)
            values = raw.detach().expand((*batch, *raw.shape)) if own else raw.detach()
        return nn.Parameter(values, requires_grad=False)

    return copied(module)
