"""How fast to learn, over the steps of a training."""

from __future__ import annotations

import math


def learning_rate_factor(step: int, num_steps: int, num_rising: int) -> float:
    """Return the share of the peak learning rate: a rise of so many steps, then a cosine down to a fiftieth."""
    if step < num_rising:
        return (step + 1) / num_rising
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - num_rising) / max(1, num_steps - num_rising)))
