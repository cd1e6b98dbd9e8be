"""How far an image may move in the 2-norm before its class changes: certified, and by attack."""

from collections.abc import Callable

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the logit of the label minus the largest other one.

    Args:
        logits: [B, K], K >= 2.
        labels: [B].

    Returns:
        [B], positive where the label wins.
    """
    own = logits.gather(1, labels[:, None]).squeeze(1)
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return own - others.amax(dim=1)


def pgd_attack(
    function: Function,
    images: Tensor,
    labels: Tensor,
    eps: float,
    *,
    steps: int = 20,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Search for images within a distance that are not given their label.

    Projected gradient descent on the margin from a random start, with steps of 2.5 eps / steps
    along the unit gradient:

    .. math:: x \leftarrow \Pi_{[0, 1]} \Pi_{|x - x_0|_2 \le \epsilon} (x - \eta\, g / |g|_2)

    Args:
        function: Images to logits, each image by itself.
        images: [B, ...], values in [0, 1].
        labels: [B].
        eps: Largest distance in the 2-norm over an image, > 0.
        steps: Number of steps.
        generator: Source of randomness for the start.

    Returns:
        [B], true where the image itself or one that was met on the way is not given its label.

    Reference:
        Madry et al. 2018, "Towards Deep Learning Models Resistant to Adversarial Attacks".
    """

    def project(moved: Tensor) -> Tensor:
        delta = moved - images
        delta = delta * (eps / _length(delta).clamp_min(eps))
        return (images + delta).clamp(0.0, 1.0)  # moves towards the image: the distance stays

    noise = torch.randn(images.shape, generator=generator, dtype=images.dtype).to(images.device)
    with torch.no_grad():
        broken = margins(function(images), labels) <= 0.0
    moved = project(images + eps * noise / _length(noise))
    for _ in range(steps):
        moved = moved.detach().requires_grad_()
        with torch.enable_grad():
            margin = margins(function(moved), labels)
            (gradient,) = torch.autograd.grad(margin.sum(), moved)
        broken |= margin.detach() <= 0.0
        direction = gradient / _length(gradient).clamp_min(torch.finfo(gradient.dtype).tiny)
        moved = project(moved.detach() - 2.5 * eps / steps * direction)
    with torch.no_grad():
        return broken | (margins(function(moved), labels) <= 0.0)


def withstood(
    function: Function,
    images: Tensor,
    labels: Tensor,
    eps: float,
    radius: Tensor,
    *,
    steps: int = 20,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Say which images keep their label within a distance, certified and by attack.

    Args:
        function: Images to logits, each image by itself.
        images: [B, ...], values in [0, 1].
        labels: [B].
        eps: Distance in the 2-norm over an image, > 0.
        radius: Certified radius of each prediction, [B], in the units of ``images``.
        steps: Of the attack.
        generator: Source of randomness of the attack.

    Returns:
        (certified [B], attacked [B]): true where the label is proved to stay, and where the attack
        did not change it.

    Raises:
        RuntimeError: If an image is certified and the attack changed its label, so that the radius
            was wrong.
    """
    with torch.no_grad():
        certified = (margins(function(images), labels) > 0.0) & (radius > eps)
    attacked = ~pgd_attack(function, images, labels, eps, steps=steps, generator=generator)
    if (certified & ~attacked).any():
        raise RuntimeError(f"an attack within {eps:g} broke a certificate: the radius is wrong")
    return certified, attacked


def _length(x: Tensor) -> Tensor:
    return x.flatten(1).norm(dim=1).reshape(-1, *[1] * (x.ndim - 1))
