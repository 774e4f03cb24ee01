"""Figure 2 of the paper, drawn by the sampler of trudi_continuous.py.

    python docs/figures/samplers.py    # writes docs/figures/samplers.png, prints weights and widths

It compares the SDE with the ODE at the score scales c = 0.5 and c = 1.0. The target is a mixture of
two Gaussians in one dimension, so the control that a trained network would predict is known.
Noising by x_k = (1 - e_k / eta^2) x_{k+1} + sqrt(2 e_k) noise, Eq. (4), leaves a mixture at every
step. Its means are (1 - e_k / eta^2) m and its variances (1 - e_k / eta^2)^2 v + 2 e_k. With the
score of this mixture, Tweedie's formula gives
    E[x_{k+1} | x_k] = (x_k + 2 e_k score_k(x_k)) / (1 - e_k / eta^2).
The control is the u for which the denoising mean x + e (u - x / eta^2), Eq. (5), equals that.

Upper row: the noising reaches the prior (eta = 0.5, 64 steps). The SDE and the ODE with c = 0.5
both end in the target. With c = 1 the ODE is greedier: its modes are narrow, and nearly all chains
go to the likelier one.

Lower row: the algorithm's own eta = 2.5 and N = 8. All steps together add a variance of about 1 to
the target, but the variance of the prior is 6.25. Chains therefore start where noised actions never
are. The SDE corrects most of this, the ODE does not: with c = 0.5 its modes are wider than those of
the SDE, with c = 1 they are narrower, and both modes survive. So c = 0.5 keeps the marginals of the
policy, as the paper says, only where the noising reaches the prior.
"""

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import trudi_continuous as trudi  # noqa: E402

WEIGHTS = (0.35, 0.65)
MEANS = (-0.6, 0.6)
STD = 0.15


class Sampler(NamedTuple):
    name: str  # of eval_sampler
    score_scale: float


class Setting(NamedTuple):
    eta: float
    num_steps: int


class Marginal(NamedTuple):
    """A mixture of two Gaussians."""

    means: torch.Tensor  # (2,)
    variance: torch.Tensor


class Modes(NamedTuple):
    """The two modes of samples, left and right of zero."""

    right_weight: float
    left_width: float
    right_width: float


SAMPLERS = {
    "SDE": Sampler("sde", 1.0),
    "ODE, c = 0.5": Sampler("ode", 0.5),
    "ODE, c = 1.0": Sampler("ode", 1.0),
}
SETTINGS = (Setting(eta=0.5, num_steps=64), Setting(eta=2.5, num_steps=8))


class MixturePolicy:
    """Stands in for DiffusionPolicy. Its control is optimal for a mixture over x_N."""

    action_dim = 1

    def __init__(self, eta, num_steps):
        self.eta = eta
        self.num_steps = num_steps
        self.schedule = trudi.cosine_schedule(num_steps)
        self.step_sizes = torch.tensor(self.schedule)
        scales = [eta] + [math.sqrt(2 * e) for e in self.schedule]
        self.noise_scales = torch.tensor(scales)
        self.control_scales = torch.ones(num_steps)
        self.weights = torch.tensor(WEIGHTS)
        means = torch.tensor(MEANS)
        variance = torch.tensor(STD**2)
        self.marginals = [Marginal(means, variance)]  # of x_0 to x_N, built from the end
        for e in self.step_sizes.flip(0):
            shrink = 1 - e / eta**2
            means = shrink * means
            variance = shrink**2 * variance + 2 * e
            self.marginals.insert(0, Marginal(means, variance))
        self.path = []  # x_0 to x_{N-1} of the last chains, (B, 1) each

    def density(self, x, k):
        """Density of x_k at x (B, 1) -> (B,)"""
        means, variance = self.marginals[k]
        norm = (2 * torch.pi * variance).sqrt()
        gaussians = torch.exp(-((x - means) ** 2) / (2 * variance)) / norm
        return (self.weights * gaussians).sum(dim=-1)

    def score(self, x, k):
        """Gradient of the log density of x_k at x (B, 1) -> (B, 1)"""
        means, variance = self.marginals[k]
        log_weights = self.weights.log() - (x - means) ** 2 / (2 * variance)  # (B, 2)
        share = log_weights.softmax(dim=-1)
        return (share * (means - x) / variance).sum(dim=-1, keepdim=True)

    def embed(self, obs):
        """The step is all that the control needs besides x. New chains begin here."""
        self.path = []
        return torch.arange(self.num_steps)

    def control(self, k, x):
        self.path.append(x)
        e = self.step_sizes[k]
        next_mean = (x + 2 * e * self.score(x, k)) / (1 - e / self.eta**2)
        return (next_mean - x) / e + x / self.eta**2

    def controls_of_steps(self):
        return [self.control] * self.num_steps

    def noise(self, batch_size, generator):
        return torch.randn(self.num_steps + 1, batch_size, 1, generator=generator)


def sample(policy, sampler, score_scale, batch_size, seed=0):
    """Chains of the script's own sampler: x_0 to x_N (N + 1, B)"""
    agent = SimpleNamespace(policy=policy)
    args = SimpleNamespace(eval_score_scale=score_scale, eval_start="step")
    generator = torch.Generator().manual_seed(seed)
    action = trudi.act(agent, torch.zeros(batch_size, 1), sampler, args, generator)
    return torch.stack([*policy.path, action.atanh()])[..., 0]


def modes(x):
    right = x > 0
    return Modes(
        right_weight=right.float().mean().item(),
        left_width=x[x < 0].std().item(),
        right_width=x[right].std().item(),
    )


def plot_chains(axes, policy, chains, limit):
    """Density at each step, over its maximum, and some of the chains."""
    clock = np.concatenate([[0], np.cumsum(policy.schedule)])
    columns = []
    for x in chains.numpy():
        density, _ = np.histogram(x, 100, (-limit, limit), density=True)
        columns.append(density / density.max())
    heat = np.stack(columns, axis=1)
    positions = np.linspace(-limit, limit, 100)
    axes.pcolormesh(clock, positions, heat, shading="nearest", cmap="viridis")
    axes.plot(clock, chains[:, :25], color="white", lw=0.6, alpha=0.8)
    axes.set(ylim=(-limit, limit), xlabel="sum of the step sizes, prior to action", ylabel="x")


def plot_ends(axes, policy, ends, limit):
    """Where the chains end, beside the target."""
    side = axes.inset_axes([1.0, 0, 0.18, 1])
    side.hist(
        ends.numpy(),
        100,
        range=(-limit, limit),
        density=True,
        orientation="horizontal",
        color="tab:blue",
    )
    positions = torch.linspace(-limit, limit, 300)
    side.plot(policy.density(positions[:, None], -1), positions, color="tab:red", lw=1)
    side.set(ylim=(-limit, limit))
    side.axis("off")


def draw(path, batch_size=20_000):
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    for row, setting in zip(figure.subplots(2, 3), SETTINGS, strict=True):
        policy = MixturePolicy(setting.eta, setting.num_steps)
        limit = 1 + setting.eta
        for axes, (name, sampler) in zip(row, SAMPLERS.items(), strict=True):
            chains = sample(policy, sampler.name, sampler.score_scale, batch_size)
            plot_chains(axes, policy, chains, limit)
            plot_ends(axes, policy, chains[-1], limit)
            title = f"{name}; eta = {setting.eta:g}, N = {setting.num_steps}"
            axes.set_title(title, fontsize=10)
            found = modes(chains[-1])
            print(
                f"eta {setting.eta:g} N {setting.num_steps:<3} {name:<13} "
                f"weight {found.right_weight:.3f} (target 0.650), "
                f"widths {found.left_width:.3f} {found.right_width:.3f} (target 0.150)"
            )
    figure.suptitle(
        "Bars: where the chains end; red: the target. "
        "Color: density at each step, over its maximum."
    )
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(Path(__file__).with_name("samplers.png"))
