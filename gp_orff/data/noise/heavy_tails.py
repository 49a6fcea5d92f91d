"""The degrees of freedom of Student-t noise, as a parameter of a likelihood."""

import math
from copy import deepcopy

import torch
from gpytorch.constraints import GreaterThan, Interval
from gpytorch.likelihoods import Likelihood
from gpytorch.priors import LogNormalPrior, Prior
from jaxtyping import Float
from torch import Tensor, nn

from gp_orff.kernels.base import as_real_tensor

_LIKELIEST, _WIDTH = 2.0, 1.0  # of the prior of ν − 2: its mode, and the spread of its logarithm


class HeavyTails(Likelihood):
    """The part of a likelihood that has the degrees of freedom ν > 2 of Student-t noise.

    They are a parameter `raw_deg_free` (1,) in float64, as that of
    `gpytorch.likelihoods.StudentTLikelihood`.
    """

    def add_deg_free(
        self,
        deg_free: float | Tensor,
        learned: bool = False,
        constraint: Interval | None = None,
        prior: Prior | None = None,
    ) -> None:
        """Register ν, its constraint and its prior, by default a log-normal one of ν − 2 with its
        mode at 2: it keeps ν near 4 where readings do not tell, from 2, where the noise has no
        variance, and from growing without bound under noise that is Gaussian.

        Raises:
            ValueError: ν of at most 2, or one that the constraint does not allow.
        """
        constraint = constraint or GreaterThan(2.0)
        if not deg_free > 2:
            raise ValueError(
                f"{type(self).__name__} expects deg_free > 2, got {float(deg_free)}, with which "
                "the noise has no variance; use 4, for instance"
            )
        if not constraint.check(torch.as_tensor(deg_free)):
            raise ValueError(
                f"{type(self).__name__} expects deg_free inside its constraint, {constraint}, got "
                f"{float(deg_free)}; give both"
            )
        raw = nn.Parameter(torch.zeros(1, dtype=torch.float64), requires_grad=learned)
        self.register_parameter("raw_deg_free", raw)
        self.register_constraint("raw_deg_free", constraint)
        own = prior is None
        self.register_prior(
            "deg_free_prior",
            LogNormalPrior(math.log(_LIKELIEST) + _WIDTH**2, _WIDTH) if own else prior,
            _excess if own else _deg_free,
            _set_excess if own else _set_deg_free,
        )
        self.deg_free = deg_free

    def copy_deg_free(self, other: Likelihood) -> None:
        """Register the ν of another likelihood, with its constraint and prior, if it has one."""
        nu = getattr(other, "deg_free", None)
        if isinstance(other, HeavyTails) and other.has_deg_free:
            constraint, learned = other.raw_deg_free_constraint, other.raw_deg_free.requires_grad
            prior = None if other.has_default_prior else other.deg_free_prior
            self.add_deg_free(nu, learned, *deepcopy((constraint, prior)))
        elif nu is not None:
            self.add_deg_free(nu)

    @property
    def has_default_prior(self) -> bool:
        """Whether ν has the prior of `add_deg_free`."""
        closures = {name: closure for name, _, _, closure, _ in self.named_priors()}
        return closures.get("deg_free_prior") is _excess

    @property
    def deg_free(self) -> Float[Tensor, "1"] | None:
        """The degrees of freedom ν, a tensor (1,); None for Gaussian noise."""
        if not self.has_deg_free:
            return None
        return self.raw_deg_free_constraint.transform(self.raw_deg_free)

    @deg_free.setter
    def deg_free(self, value: float | Tensor) -> None:
        raw = self.raw_deg_free
        value = as_real_tensor(value, "deg_free", dtype=raw.dtype).to(raw).expand_as(raw)
        raw_value = self.raw_deg_free_constraint.inverse_transform(value)
        self.initialize(raw_deg_free=raw_value)

    @property
    def has_deg_free(self) -> bool:
        """Whether the noise is Student-t."""
        return "raw_deg_free" in self._parameters

    @property
    def heavier(self) -> float:
        """The variance of the noise over its squared scale, ν/(ν − 2); 1 for Gaussian noise."""
        if not self.has_deg_free:
            return 1.0
        nu = self.deg_free.item()
        return nu / (nu - 2)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args, **kwargs) -> None:
        """States from before ν was a parameter keep the ν of the constructor."""
        for name, value in self.state_dict().items():
            if name.startswith(("raw_deg_free", "deg_free_prior")):
                state_dict.setdefault(prefix + name, value.clone())
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _deg_free(likelihood: HeavyTails) -> Tensor:
    return likelihood.deg_free


def _set_deg_free(likelihood: HeavyTails, value: Tensor) -> None:
    likelihood.deg_free = value


def _excess(likelihood: HeavyTails) -> Tensor:
    return likelihood.deg_free - 2


def _set_excess(likelihood: HeavyTails, value: Tensor) -> None:
    likelihood.deg_free = value + 2


def raw_deg_frees(module: nn.Module) -> set[nn.Parameter]:
    """The degrees of freedom of a likelihood and of its parts: the weights of readings tell them,
    and the evidence under given weights does not depend on them."""
    tails = (part for part in module.modules() if isinstance(part, HeavyTails))
    return {part.raw_deg_free for part in tails if part.has_deg_free}
