"""The noise of every instrument, by name."""

from collections.abc import Iterator, MutableMapping

from gpytorch.likelihoods import Likelihood
from torch import nn


class Instruments(nn.Module, MutableMapping):
    """Likelihoods by name; any string is one, unlike in `torch.nn.ModuleDict`."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []
        self.members = nn.ModuleList()

    def __getitem__(self, name: str) -> Likelihood:
        if name not in self.names:
            raise KeyError(
                f"no readings of {name!r}, but of {self.names}; to give it a noise beforehand, "
                "assign a likelihood: GaussianLikelihood(noise_constraint=GreaterThan(0.0))"
            )
        return self.members[self.names.index(name)]

    def __setitem__(self, name: str, likelihood: Likelihood) -> None:
        if name in self.names:
            self.members[self.names.index(name)] = likelihood
        else:
            self.names.append(name)
            self.members.append(likelihood)

    def __delitem__(self, name: str) -> None:
        del self.members[self.names.index(name)]
        self.names.remove(name)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.names))

    def __len__(self) -> int:
        return len(self.names)

    __hash__ = nn.Module.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other
