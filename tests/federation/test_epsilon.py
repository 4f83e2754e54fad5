"""The accountant's epsilon against published values, and against the formulas of the mechanism."""

from __future__ import annotations

import math

import pytest
import torch

from llm_fed.federation.privacy import epsilon
from llm_fed.settings.config import PrivacyConfig


def gaussian(orders: torch.Tensor, noise: float, q: float, steps: int) -> torch.Tensor:
    """Renyi divergences of the sampled Gaussian at integer orders (Mironov, Talwar, Zhang 2019, Eq. 5 and 6):
    log(sum_k C(a, k) (1 - q)^(a - k) q^k exp((k^2 - k) / (2 sigma^2))) / (a - 1) for each step."""
    found = []
    for order in orders.tolist():
        k = torch.arange(order + 1, dtype=torch.float64)
        ways = math.lgamma(order + 1) - torch.lgamma(k + 1) - torch.lgamma(order - k + 1)
        terms = ways + (order - k) * math.log1p(-q) + k * math.log(q) + (k * k - k) / (2 * noise**2)
        found.append(float(terms.logsumexp(0)) / (order - 1))
    return steps * torch.tensor(found, dtype=torch.float64)


PUBLISHED = [  # noise, q, steps, epsilon at delta = 1e-5
    (4.0, 0.01, 10_000, 1.26),  # Abadi et al. 2016, Figure 2 (100 epochs)
    (1.3, 256 / 60_000, 15 * 60_000 // 256, 1.19),  # this and the next two: tutorials of TensorFlow Privacy, MNIST
    (1.1, 256 / 60_000, 60 * 60_000 // 256, 3.01),
    (0.7, 256 / 60_000, 45 * 60_000 // 256, 7.10),
]


@pytest.mark.parametrize("noise, q, steps, published", PUBLISHED)
def test_epsilon_against_published_values(noise, q, steps, published):
    """The published values are the smallest `rdp + log(1 / delta) / (a - 1)` over orders a, which is reproduced here
    from the formula of the mechanism. The accountant's conversion (Canonne, Kamath, Steinke 2020, Prop. 12) is tighter:
    `rdp + log1p(-1 / a) - log(delta a) / (a - 1)`, of which it must find the minimum, too."""
    orders, delta = torch.arange(2, 64), 1e-5
    rdp = gaussian(orders, noise, q, steps)
    classic = (rdp - math.log(delta) / (orders - 1)).min()
    assert float(classic) == pytest.approx(published, rel=4e-3)
    tighter = (rdp + torch.log1p(-1 / orders) - (orders.double() * delta).log() / (orders - 1)).min()
    found = epsilon(PrivacyConfig(clip=1.0, noise=noise, delta=delta), q, steps)
    assert found == pytest.approx(float(tighter), rel=5e-3) and found < published


def test_epsilon_without_sampling():
    """The unsampled Gaussian of multiplier z has rdp a / (2 z^2) a round. A client's own noise counts half: z / 2."""
    orders, delta, rounds = torch.linspace(1.5, 60, 600, dtype=torch.float64), 1e-6, 7
    for where, factor in (("server", 1.0), ("client", 2.0)):
        rdp = rounds * orders * factor**2 / (2 * 3.0**2)
        bound = (rdp + torch.log1p(-1 / orders) - (orders * delta).log() / (orders - 1)).min()
        found = epsilon(PrivacyConfig(clip=0.1, noise=3.0, where=where, delta=delta), 1.0, rounds)
        assert found == pytest.approx(float(bound), rel=2e-3)


def test_epsilon_grows_and_is_amplified_by_sampling_at_the_server_alone():
    server, client = (PrivacyConfig(clip=1.0, noise=2.0, where=where) for where in ("server", "client"))
    assert epsilon(server, 0.1, 0) == 0 < epsilon(server, 0.1, 1) < epsilon(server, 0.1, 50) < epsilon(server, 1.0, 50)
    assert epsilon(client, 0.1, 50) == epsilon(client, 1.0, 50) > epsilon(server, 1.0, 50)
    assert epsilon(PrivacyConfig(clip=1.0), 0.1, 1) == math.inf
