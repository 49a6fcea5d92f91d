"""The likelihood of readings that come with their noise: which groups have one, and its factor."""

from collections.abc import Mapping
from itertools import chain

import torch
from gpytorch.likelihoods import Likelihood

from gp_orff.data.dataset import Data
from gp_orff.data.noise.known_noise_likelihood import KnownNoiseLikelihood
from gp_orff.data.patterns import DEFAULT
from gp_orff.models.fitting.coordinates import admissible
from gp_orff.models.fitting.noise.independent import independent
from gp_orff.models.fitting.starting_values import scale_noise, start_noise

_TRUSTED = 100.0  # the most that the noise may be off, over a share of the variance of the data


def with_known_noise(
    likelihoods: Mapping[str, Likelihood], data: Data, held: Data | None = None
) -> dict[str, Likelihood]:
    """The likelihoods, with a `KnownNoiseLikelihood` for every group of readings that come with
    their noise, and none for others. Data that are `held` already count too.

    Raises:
        ValueError: readings with known noise and others in one group.
    """
    groups, known = dict(likelihoods), {}
    device = next(groups[DEFAULT].parameters()).device
    for key in chain.from_iterable(every.keys for every in (held, data) if every is not None):
        if known.setdefault(key.label, key.known) != key.known:
            raise ValueError(
                "expected noise= for all readings of a group or for none, got both "
                f"{f'in group {key.label!r}' if key.label else 'without a group'}; give noise= for "
                "all of them, or give the others another name, group="
            )
    for label, given in known.items():
        present = groups.get(label, groups[DEFAULT])
        if given and not isinstance(present, KnownNoiseLikelihood):
            groups[label] = KnownNoiseLikelihood(data.keys[0].pattern.num_outputs)
            groups[label].copy_deg_free(present)
            groups[label].to(device)
        elif not given and isinstance(groups.get(label), KnownNoiseLikelihood):
            groups[label] = independent(groups[label])
    return groups


@torch.no_grad()
def learn_scales(likelihoods: Mapping[str, Likelihood], data: Data, learn: bool) -> None:
    """Whether a fit learns the factor of known noise; without, it is one.

    Raises:
        ValueError: `learn`, where no reading comes with its noise.
    """
    known = {key.label for key in data.keys if key.known}
    if learn and not known:
        raise ValueError(
            "expected noise= beside scale_noise=True, got readings without it; leave out "
            "scale_noise=, since their noise is learned"
        )
    for label in known:
        likelihood = likelihoods[label]
        likelihood.raw_noise_scale.requires_grad_(learn)
        if not learn:
            likelihood.noise_scale = 1.0


def note_of(likelihoods: Mapping[str, Likelihood], data: Data) -> str:
    """A sentence on known noise; empty if all noise is learned."""
    if not any(key.known for key in data.keys):
        return ""
    how = "kept" if is_kept(likelihoods, data) else "times noise_scale"
    return f"noise: as given with the readings, {how}"


def is_kept(likelihoods: Mapping[str, Likelihood], data: Data) -> bool:
    """Whether there is known noise, and none of it has a factor."""
    known = [likelihoods[label] for label in {key.label for key in data.keys if key.known}]
    plain = (not n.raw_noise_scale.requires_grad and n.noise_scale.item() == 1 for n in known)
    return bool(known) and all(plain)


@start_noise.register
def _(likelihood: KnownNoiseLikelihood, variance: float) -> None:
    """The factor starts at one, unless the data say that units are mistaken."""
    _learned_from(likelihood, min(max(1.0, variance / _TRUSTED), variance * _TRUSTED))


@scale_noise.register
def _(likelihood: KnownNoiseLikelihood, factor: float) -> None:
    _learned_from(likelihood, factor * likelihood.noise_scale.item())


def _learned_from(likelihood: KnownNoiseLikelihood, value: float) -> None:
    """Set the factor, if it is learned."""
    if likelihood.raw_noise_scale.requires_grad:
        values = torch.full_like(likelihood.noise_scale, value)
        likelihood.noise_scale = admissible(likelihood.raw_noise_scale_constraint, values)
