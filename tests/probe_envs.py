"""Tiny Gymnasium environments whose right answer is known.

`--env-id probe_envs:Name-v0` finds them from this folder.
"""

import gymnasium as gym
import numpy as np


class Probe(gym.Env):
    """Episodes of `length` steps that pay 1 each; subclasses see and pay something else."""

    length = 1
    terminates = True
    size = 1  # of the observation
    low = np.array([-1.0], np.float32)
    high = np.array([1.0], np.float32)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}

    def __init__(self, render_mode=None, **settings):
        self.render_mode = render_mode
        self.t = 0
        for name, value in settings.items():
            setattr(self, name, value)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (self.size,), np.float32)
        self.action_space = gym.spaces.Box(self.low, self.high)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.draw = self.np_random.uniform(-1, 1)  # what is random about an episode
        self.action = np.zeros_like(self.low)
        return self.see(), {}

    def step(self, action):
        self.action = action
        self.t += 1
        ended = self.t == self.length
        terminated = ended and self.terminates
        truncated = ended and not self.terminates
        return self.see(), self.pay(), terminated, truncated, self.tell(ended)

    def render(self):
        """The time as a shade of gray."""
        return np.full((16, 16, 3), 10 * self.t % 256, np.uint8)

    def see(self):
        return np.zeros(self.size, np.float32)

    def pay(self):
        return 1.0

    def tell(self, ended):
        return {}


class Late(Probe):
    """Pays at the end only."""

    length = 2

    def see(self):
        return np.array([self.t], np.float32)

    def pay(self):
        return float(self.t == self.length)


class Sign(Probe):
    """Pays what it shows: 1 or -1."""

    def see(self):
        return np.array([np.sign(self.draw)], np.float32)

    def pay(self):
        return float(np.sign(self.draw))


class Climb(Probe):
    """Starts at 0 or 1 and goes to 1, where each step pays 1; truncated after one step."""

    terminates = False

    def see(self):
        return np.array([self.draw > 0 or self.t > 0], np.float32)

    def pay(self):
        return float(self.draw > 0)


class Target(Probe):
    """The best action is 0.5."""

    def pay(self):
        return float(-((self.action[0] - 0.5) ** 2))


class Peaks(Probe):
    """Two actions are equally good, -0.6 and 0.6."""

    def pay(self):
        distance = abs(self.action[0]) - 0.6
        return float(np.exp(-((distance / 0.2) ** 2)))


class Clock(Probe):
    """Shows the time, the episode's random draw and the action that arrived.

    The bounds of its actions are lopsided.
    """

    length = 16
    terminates = False
    size = 4
    low = np.array([-1.0, 2.0], np.float32)
    high = np.array([3.0, 12.0], np.float32)
    key = "success"  # where it tells whether the episode succeeded

    def see(self):
        return np.array([self.t, self.draw, *self.action], np.float32)

    def pay(self):
        return float(self.draw + 0.1 * self.action[0])

    def tell(self, ended):
        if not ended:
            return {}
        return {self.key: float(self.draw > 0)}


class Faulty(Clock):
    """Actions in (0.5, 0.6) break the observation, actions in (-0.6, -0.5) the reward."""

    size = 3
    low = np.array([-1.0], np.float32)
    high = np.array([1.0], np.float32)
    reward_fault = np.inf
    reset_fault = 0.0  # share of the resets that are bad, too
    reset_value = np.nan  # what they show

    def reset(self, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        if self.np_random.uniform() < self.reset_fault:
            obs = np.full_like(obs, self.reset_value)
        return obs, info

    def see(self):
        if 0.5 < self.action[0] < 0.6:
            return np.full(self.size, np.nan, np.float32)
        return super().see()

    def pay(self):
        if -0.6 < self.action[0] < -0.5:
            return self.reward_fault
        return 1.0


class Hopeless(Clock):
    """No step is finite."""

    def pay(self):
        return np.nan


class Discrete(Probe):
    """Has three actions to choose from."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.action_space = gym.spaces.Discrete(3)


class Uninstalled(Probe):
    """Does what LunarLander does where Box2D is missing."""

    def __init__(self, **settings):
        sentence = "Simulator9000 is not installed, run `pip install simulator9000`"
        raise gym.error.DependencyNotInstalled(sentence)


class Dictionary(Clock):
    """Its observation has parts, one of which is for the critic alone."""

    def __init__(self, **settings):
        super().__init__(**settings)
        part = gym.spaces.Box(-np.inf, np.inf, (2,))
        square = gym.spaces.Box(-np.inf, np.inf, (2, 2))
        spaces = {"privileged_state": part, "clock": square, "draw": part}
        self.observation_space = gym.spaces.Dict(spaces)

    def see(self):
        clock = np.full((2, 2), self.t, np.float32)
        draw = np.full(2, self.draw, np.float32)
        return {"privileged_state": draw + 1, "clock": clock, "draw": draw}


class Unbounded(Clock):
    """One of its actions has no upper bound."""

    high = np.array([3.0, np.inf], np.float32)


class TupleObs(Clock):
    """Observations in a tuple, which no network takes."""

    def __init__(self, **settings):
        super().__init__(**settings)
        part = gym.spaces.Box(-np.inf, np.inf, (2,))
        self.observation_space = gym.spaces.Tuple([part, part])

    def see(self):
        return (np.zeros(2, np.float32), np.zeros(2, np.float32))


class OldApi(Clock):
    """Steps as gym did before 0.26."""

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward, terminated or truncated, info


class WrongShape(Clock):
    """Its observations are longer than it says."""

    def step(self, action):
        obs, *rest = super().step(action)
        return np.append(obs, 0.0).astype(np.float32), *rest


class NoReward(Clock):
    """Pays nothing at all: None."""

    def pay(self):
        return None


gym.register("One-v0", Probe)
gym.register("Endless-v0", Probe, kwargs={"length": 4, "terminates": False})
gym.register("Late-v0", Late)
gym.register("Sign-v0", Sign)
gym.register("Climb-v0", Climb)
gym.register("Target-v0", Target)
gym.register("Peaks-v0", Peaks)
gym.register("Clock-v0", Clock)
gym.register("Limited-v0", Clock, max_episode_steps=8)
gym.register("Faulty-v0", Faulty)
gym.register("BadStart-v0", Faulty, kwargs={"reset_fault": 0.5, "reset_value": np.inf})
gym.register("Hopeless-v0", Hopeless)
gym.register("Discrete-v0", Discrete)
gym.register("Uninstalled-v0", Uninstalled)
gym.register("Dict-v0", Dictionary)
gym.register("Unbounded-v0", Unbounded)
gym.register("Tuple-v0", TupleObs)
gym.register("OldApi-v0", OldApi)
gym.register("WrongShape-v0", WrongShape)
gym.register("NoReward-v0", NoReward)
