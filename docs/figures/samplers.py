"""Figure 2 of the paper, drawn by trudi_continuous.py's own sampler: SDE, ODE with c = 0.5, ODE with c = 1.0.

    python docs/figures/samplers.py        # writes docs/figures/samplers.png, prints weights and widths

The target is a mixture of two Gaussians in one dimension, so the control that a trained network would predict is known.
Noising it by x_k = (1 - e_k h) x_{k+1} + sqrt(2 e_k) noise, h = 1/eta^2, Eq. (4), leaves a mixture at every step, with
means (1 - e_k h) m and variances (1 - e_k h)^2 v + 2 e_k. With its score, Tweedie's formula gives
    E[x_{k+1} | x_k] = (x_k + 2 e_k score_k(x_k)) / (1 - e_k h),
and the control is the u for which the denoising mean x + e (u - h x), Eq. (5), is just that.

Above, the noising reaches the prior (eta = 0.5, 64 steps). SDE and c = 0.5 both end in the target; c = 1 is greedier:
its modes are narrow, and nearly all chains go to the likelier one.
Below, the algorithm's own eta = 2.5 and N = 8. All steps together add a variance of about 1 to the target, where the
prior's is 6.25, so chains start where noised actions never are. The SDE makes up for most of it, the ODE does not: with
c = 0.5 its modes are wider than the SDE's, with c = 1 narrower, and both modes survive. c = 0.5 keeps the policy's
marginals, as the paper says, where the noising reaches the prior, and only there.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import trudi_continuous as trudi  # noqa: E402

SAMPLERS = {"SDE": ("sde", 1.0), "ODE, c = 0.5": ("ode", 0.5), "ODE, c = 1.0": ("ode", 1.0)}
SETTINGS = dict(eta=0.5, num_steps=64), dict(eta=2.5, num_steps=8)


class MixturePolicy:
    """Stands in for DiffusionPolicy: its control is optimal for a Gaussian mixture over x_N, before the tanh."""

    action_dim = 1

    def __init__(self, eta, num_steps, weights=(0.35, 0.65), means=(-0.6, 0.6), std=0.15):
        self.eta, self.num_steps, self.sizes = eta, num_steps, torch.tensor(trudi.step_sizes(num_steps))
        self.weights, mean, var = torch.tensor(weights), torch.tensor(means), torch.tensor(std**2)
        self.marginals = [(mean, var)]  # of x_0 .. x_N
        for e in self.sizes.flip(0):
            mean, var = (1 - e / eta**2) * mean, (1 - e / eta**2) ** 2 * var + 2 * e
            self.marginals.insert(0, (mean, var))
        self.path = []  # of the last chain: (B, 1) each

    def density(self, x, k):
        mean, var = self.marginals[k]
        return (self.weights * torch.exp(-((x - mean) ** 2) / (2 * var)) / (2 * torch.pi * var).sqrt()).sum(-1)

    def score(self, x, k):  # (B, 1)
        mean, var = self.marginals[k]
        share = (self.weights.log() - (x - mean) ** 2 / (2 * var)).softmax(-1)  # (B, 2)
        return (share * (mean - x) / var).sum(-1, keepdim=True)

    def embed(self, obs):
        self.path = []
        return torch.arange(self.num_steps), None

    def control(self, k, _, x):
        self.path.append(x)
        e, h = self.sizes[k], self.eta**-2
        following = (x + 2 * e * self.score(x, k)) / (1 - e * h)
        return (following - x) / e + h * x

    def noise(self, batch, rng):
        return torch.randn(self.num_steps + 1, batch, 1, generator=rng)


def sample(policy, sampler, scale, batch, seed=0):  # -> x_0 .. x_N (N+1, B)
    critic = SimpleNamespace(features=lambda obs, action: action, value=lambda x: x[:, 0])
    args = SimpleNamespace(eval_score_scale=scale, eval_best_of=1)
    agent, rng = SimpleNamespace(policy=policy, critic=critic), torch.Generator().manual_seed(seed)
    action = trudi.act(agent, torch.zeros(batch, 1), sampler, args, rng)
    return torch.stack([*policy.path, action.atanh()])[..., 0]


def modes(x):  # (B,) -> weight of the right mode, standard deviations of the left and the right one
    return (x > 0).float().mean().item(), x[x < 0].std().item(), x[x > 0].std().item()


def draw(path, batch=20_000):
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    for row, settings in zip(figure.subplots(2, 3), SETTINGS, strict=True):
        policy = MixturePolicy(**settings)
        limit = 1 + policy.eta
        span = torch.linspace(-limit, limit, 300)
        clock = np.concatenate([[0], np.cumsum(trudi.step_sizes(policy.num_steps))])
        for axes, (name, (sampler, scale)) in zip(row, SAMPLERS.items(), strict=True):
            x = sample(policy, sampler, scale, batch)
            heat = np.stack([np.histogram(v, 100, (-limit, limit), density=True)[0] for v in x.numpy()], 1)
            heat = heat / heat.max(0)
            axes.pcolormesh(clock, np.linspace(-limit, limit, 100), heat, shading="nearest", cmap="viridis")
            axes.plot(clock, x[:, :25], color="white", lw=0.6, alpha=0.8)
            twin = axes.inset_axes([1.0, 0, 0.18, 1])
            twin.hist(
                x[-1].numpy(), 100, range=(-limit, limit), density=True, orientation="horizontal", color="tab:blue"
            )
            twin.plot(policy.density(span[:, None], -1), span, color="tab:red", lw=1)
            twin.set(ylim=(-limit, limit))
            twin.axis("off")
            weight, *stds = modes(x[-1])
            axes.set(ylim=(-limit, limit), xlabel="sum of the step sizes, prior to action", ylabel="x")
            axes.set_title(f"{name}; eta = {policy.eta:g}, N = {policy.num_steps}", fontsize=10)
            print(
                f"eta {policy.eta:g} N {policy.num_steps:<3} {name:<13} weight {weight:.3f} (target 0.650), "
                f"widths {stds[0]:.3f} {stds[1]:.3f} (target 0.150)"
            )
    figure.suptitle("Bars: where the chains end; red: the target. Colour: density at each step, over its maximum.")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw(Path(__file__).with_name("samplers.png"))
