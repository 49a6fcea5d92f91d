"""`on_workers`: methods of a model whose passes over chunks run on an executor."""

import inspect
from collections.abc import Callable
from functools import wraps

import torch

from gp_orff.data.workers.passes import passes_on

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_ADDED = [
    inspect.Parameter("executor", _KEYWORD, default=None, annotation=object),
    inspect.Parameter("retries", _KEYWORD, default=2, annotation=int),
    inspect.Parameter("checkpoint", _KEYWORD, default=None, annotation=object),
]


def on_workers(method: Callable) -> Callable:
    """A method with further arguments `executor`, `retries` and `checkpoint`, as for `passes_on`.

    They hold for this call; the model keeps none of them.
    """

    @wraps(method)
    def call(
        self: torch.nn.Module,
        *arguments: object,
        executor: object = None,
        retries: int = 2,
        checkpoint: object = None,
        **options: object,
    ) -> object:
        def identity() -> object:
            named = {name: value for name, value in options.items() if name != "progress"}
            return [method.__name__, named, str(self), dict(self.state_dict())]

        with passes_on(executor, retries, checkpoint, identity):
            return method(self, *arguments, **options)

    signature = inspect.signature(method)
    given = list(signature.parameters.values())
    last = [given.pop()] if given[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    call.__signature__ = signature.replace(parameters=[*given, *_ADDED, *last])
    return call
