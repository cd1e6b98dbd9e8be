"""How far an image may move in the 2-norm before its class changes: proved, and by attack."""

import torch
from torch import Tensor

from lipsformer._renamed import renamed
from lipsformer.analysis.estimate import Function, sample_norm


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the logit of the label minus the largest other logit.

    Args:
        logits: [B, K], K >= 2.
        labels: [B].

    Returns:
        The margins, [B]. They are positive where the prediction is right.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.robustness import margins
        >>> margins(torch.tensor([[3.0, 1.0, 2.5]]), torch.tensor([0]))
        tensor([0.5000])
    """
    of_label = logits.gather(1, labels[:, None]).squeeze(1)
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return of_label - others.amax(dim=1)


def smallest_margins(
    function: Function,
    images: Tensor,
    labels: Tensor,
    eps: float | Tensor,
    *,
    steps: int = 20,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Search within a distance of the images for the smallest margins, by gradient descent.

    The attack is projected gradient descent on the margin. It starts at a random point and makes
    steps of length 2.5 eps / steps along the unit gradient:

    .. math:: x \leftarrow \Pi_{[0, 1]} \Pi_{|x - x_0|_2 \le \epsilon} (x - \eta\, g / |g|_2)

    Args:
        function: Map from images to logits that treats the images independently.
        images: [B, ...], values in [0, 1].
        labels: [B].
        eps: Largest distance in the 2-norm over an image, > 0; or one for each image, [B, 1, ...].
        steps: Number of steps.
        generator: Random generator of the starting point.

    Returns:
        The smallest margin of the image and of all images on the way, [B].

    Example:
        >>> import torch
        >>> from lipsformer.analysis.robustness import smallest_margins
        >>> images, labels = torch.tensor([[0.9, 0.1]]), torch.tensor([0])  # the margin is 0.8
        >>> smallest_margins(lambda x: x, images, labels, eps=0.1).item() < 0.7
        True

    Reference:
        Madry et al. 2018, "Towards Deep Learning Models Resistant to Adversarial Attacks".
    """

    def project(moved: Tensor) -> Tensor:
        delta = moved - images
        delta = delta * (eps / sample_norm(delta).clamp_min(eps))
        return (images + delta).clamp(0.0, 1.0)  # Clamping never increases the distance.

    noise = torch.randn(images.shape, generator=generator, dtype=images.dtype).to(images.device)
    with torch.no_grad():
        smallest = margins(function(images), labels)
    moved = project(images + eps * noise / sample_norm(noise))
    for _ in range(steps):
        moved = moved.detach().requires_grad_()
        with torch.enable_grad():
            margin = margins(function(moved), labels)
            (gradient,) = torch.autograd.grad(margin.sum(), moved)
        smallest = smallest.fmin(margin.detach())
        direction = gradient / sample_norm(gradient).clamp_min(torch.finfo(gradient.dtype).tiny)
        moved = project(moved.detach() - 2.5 * eps / steps * direction)
    with torch.no_grad():
        return smallest.fmin(margins(function(moved), labels))


def pgd_attack(
    function: Function,
    images: Tensor,
    labels: Tensor,
    eps: float | Tensor,
    *,
    steps: int = 20,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Search within a distance of the images for images that the function classifies wrongly.

    Args:
        function: As for `smallest_margins`, like all other arguments.
        images: [B, ...].
        labels: [B].
        eps: Largest distance.
        steps: Number of steps.
        generator: Random generator of the starting point.

    Returns:
        Mask [B], True if the image or any image on the way is not classified as its label.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.robustness import pgd_attack
        >>> images, labels = torch.tensor([[0.6, 0.4]]), torch.tensor([0])  # the pixels are logits
        >>> [pgd_attack(lambda x: x, images, labels, eps).item() for eps in (0.1, 0.2)]
        [False, True]
    """
    smallest = smallest_margins(function, images, labels, eps, steps=steps, generator=generator)
    return smallest <= 0.0


def robust_mask(
    function: Function,
    images: Tensor,
    labels: Tensor,
    eps: float,
    radius: Tensor,
    *,
    steps: int = 20,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Return which images keep their label within a distance: proved, and under attack.

    Args:
        function: Map from images to logits that treats the images independently.
        images: [B, ...], values in [0, 1].
        labels: [B].
        eps: Distance in the 2-norm over an image, > 0.
        radius: Certified radius of each prediction, [B], in the units of `images`.
        steps: Number of steps of the attack.
        generator: Random generator of the attack.

    Returns:
        Two masks [B]: True where the label is proved to stay, and where the attack failed.

    Raises:
        RuntimeError: If the attack succeeds on a certified image. The radius is then wrong.

    Example:
        >>> import torch
        >>> from lipsformer.analysis.robustness import robust_mask
        >>> images, labels = torch.tensor([[0.9, 0.1], [0.5, 0.6]]), torch.tensor([0, 1])
        >>> radius = (images[:, 0] - images[:, 1]).abs() / 2**0.5  # of the two pixels as logits
        >>> robust_mask(lambda x: x, images, labels, 0.2, radius)
        (tensor([ True, False]), tensor([ True, False]))
    """
    with torch.no_grad():
        certified = (margins(function(images), labels) > 0.0) & (radius > eps)
    attacked = ~pgd_attack(function, images, labels, eps, steps=steps, generator=generator)
    if (certified & ~attacked).any():
        raise RuntimeError(
            f"an attack within distance {eps:g} broke a certificate: the certified radius is wrong"
        )
    return certified, attacked


__getattr__ = renamed(__name__)
