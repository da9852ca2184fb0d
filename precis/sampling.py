"""From logits to a token."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from precis.constraint import Constraint


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token and how likely it was.

    Attributes:
        logprob: of the token, in nats, under the model's own distribution (temperature 1).
        top: the most likely tokens with their logprobs, best first; empty unless asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Sampler:
    """Greedy at temperature 0, else nucleus sampling with a generator of its own.

    Attributes:
        temperature: 0 = greedy.
        top_p: share of probability from which to draw, in (0, 1].
        seed: the same seed gives the same draws; None draws from the operating system.
        n_top: alternatives to report per token.
        constraint: which tokens may come at all, or None.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    n_top: int = 0
    constraint: Constraint | None = None
    _generator: torch.Generator = field(default_factory=torch.Generator)

    def __post_init__(self) -> None:
        if self.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(self.seed)

    def sample(self, logits: Tensor) -> Sampled:
        """Choose the next token.

        Args:
            logits: [vocabulary] float32, any device.

        Raises:
            ValueError: if the model gave no finite logits.
        """
        logits = logits.float().cpu()
        if bool(torch.isnan(logits).any()):
            raise ValueError("the model's logits are not numbers")
        logprobs = torch.log_softmax(logits, -1)
        open_to = logits if self.constraint is None else self.constraint.masked(logits)
        token_id = int(open_to.argmax()) if self.temperature == 0 else self._draw(open_to)
        values, indices = logprobs.topk(self.n_top) if self.n_top else (logprobs[:0], logprobs[:0].long())
        top = tuple(zip(indices.tolist(), values.tolist(), strict=True))
        return Sampled(token_id, float(logprobs[token_id]), top)

    def _draw(self, logits: Tensor) -> int:
        best = logits.max()  # taken off first, in float64: no temperature, however small, makes what is not a number
        chances = torch.softmax((logits - best).double() / self.temperature, -1)
        chances, order = chances.sort(descending=True, stable=True)
        before = chances.cumsum(-1) - chances
        before[0] = -1.0  # the first token always stays
        chances = chances.masked_fill(before >= self.top_p, 0.0)
        return int(order[torch.multinomial(chances, 1, generator=self._generator)])
