"""Tiny Gymnasium environments whose right answer is known. `--env-id probe_envs:Name-v0` finds them from here."""

import gymnasium as gym
import numpy as np


class Probe(gym.Env):
    """Episodes of `length` steps; subclasses say what is seen and what is paid. A render is the clock as a picture."""

    length, terminates = 1, True
    low, high = np.array([-1.0], np.float32), np.array([1.0], np.float32)
    size = 1  # of the observation
    metadata = dict(render_modes=["rgb_array"], render_fps=10)

    def __init__(self, render_mode=None, **settings):
        self.render_mode, self.t, self.episode = render_mode, 0, 0
        for name, value in settings.items():
            setattr(self, name, value)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (self.size,), np.float32)
        self.action_space = gym.spaces.Box(self.low, self.high)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.draw, self.action = 0, self.np_random.uniform(-1, 1), np.zeros_like(self.low)
        self.episode += 1
        return self.see(), {}

    def step(self, action):
        self.action, self.t = action, self.t + 1
        ended = self.t == self.length
        return self.see(), self.pay(), ended and self.terminates, ended and not self.terminates, self.tell(ended)

    def render(self):
        return np.full((16, 16, 3), 10 * self.t % 256, np.uint8)

    def see(self):
        return np.zeros(self.size, np.float32)

    def pay(self):
        return 1.0

    def tell(self, ended):
        return {}


class Late(Probe):  # pays at the end only
    length = 2

    def see(self):
        return np.array([self.t], np.float32)

    def pay(self):
        return float(self.t == self.length)


class Sign(Probe):  # pays what it shows: +1 or -1
    def see(self):
        return np.array([np.sign(self.draw)], np.float32)

    def pay(self):
        return float(np.sign(self.draw))


class Climb(Probe):  # starts at 0 or 1 and goes to 1, where each step pays 1; truncated after one step
    terminates = False

    def see(self):
        return np.array([self.draw > 0 or self.t > 0], np.float32)

    def pay(self):
        return float(self.draw > 0)


class Target(Probe):  # best action 0.5
    def pay(self):
        return float(-((self.action[0] - 0.5) ** 2))


class Peaks(Probe):  # two equally good actions, -0.6 and 0.6
    def pay(self):
        return float(np.exp(-(((abs(self.action[0]) - 0.6) / 0.2) ** 2)))


class Clock(Probe):
    """Shows the time, the episode's random draw and the action that arrived (bounds are lopsided); random resets."""

    length, terminates, size = 16, False, 4
    low, high = np.array([-1.0, 2.0], np.float32), np.array([3.0, 12.0], np.float32)

    def see(self):
        return np.array([self.t, self.draw, *self.action], np.float32)

    def pay(self):
        return float(self.draw + 0.1 * self.action[0])

    def tell(self, ended):
        return {self.key: float(self.draw > 0)} if ended else {}

    key = "success"


class Faulty(Clock):
    """Actions in (0.5, 0.6) break the observation, in (-0.6, -0.5) the reward, `reset_fault` of the resets are bad."""

    low, high, size, reset_fault, reward_fault = (
        np.array([-1.0], np.float32),
        np.array([1.0], np.float32),
        3,
        0.0,
        np.inf,
    )

    def reset(self, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        return np.where(self.np_random.uniform() < self.reset_fault, np.float32(np.nan), obs), info

    def see(self):
        return np.where(0.5 < self.action[0] < 0.6, np.float32(np.nan), super().see())

    def pay(self):
        return self.reward_fault if -0.6 < self.action[0] < -0.5 else 1.0


class Discrete(Probe):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.action_space = gym.spaces.Discrete(3)


class Uninstalled(Probe):  # what LunarLander does where Box2D is missing
    def __init__(self, **settings):
        raise gym.error.DependencyNotInstalled("Simulator9000 is not installed, run `pip install simulator9000`")


gym.register("One-v0", Probe)
gym.register("Endless-v0", Probe, kwargs=dict(length=4, terminates=False))
for probe in (Late, Sign, Climb, Target, Peaks, Clock, Faulty, Discrete, Uninstalled):
    gym.register(f"{probe.__name__}-v0", probe)
gym.register("Limited-v0", Clock, max_episode_steps=8)
