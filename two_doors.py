"""Two ways to succeed, equally good: a point between two doors.

    python trudi_continuous.py --env-id two_doors:TwoDoors-v0 --total-timesteps 200000
    python trudi_continuous.py --evaluate runs/FOLDER --eval-episodes 200    # which doors it takes
    python tools/plot_modes.py runs/FOLDER --out doors.png                   # and how

Each episode starts in the middle. A policy whose action is the same whenever it sees the same
position takes the same door in all of them. A policy that keeps both doors alive takes each in
about half of its episodes, at the same return. `info["mode"]` says which door was taken; scripts
that find it there report the entropy of the choice.
"""

import gymnasium as gym
import numpy as np


class TwoDoors(gym.Env):
    """32 steps, each by at most 0.2 in x and y. A step pays 1 - distance to the nearer door."""

    doors = np.array([[-1.0, 0.0], [1.0, 0.0]])
    num_steps = 32
    speed = 0.2
    door_width = 0.2
    metadata = {"render_modes": []}

    def __init__(self, render_mode=None):
        self.observation_space = gym.spaces.Box(-2.0, 2.0, (2,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.position = np.zeros(2)
        self.steps = 0
        return self.position.astype(np.float32), {}

    def step(self, action):
        self.position = np.clip(self.position + self.speed * np.clip(action, -1, 1), -2, 2)
        self.steps += 1
        distance = np.linalg.norm(self.position - self.doors, axis=1)
        nearer = int(distance.argmin())
        reward = 1 - distance[nearer]
        truncated = self.steps == self.num_steps
        info = {"mode": nearer, "success": bool(distance[nearer] < self.door_width)}
        return self.position.astype(np.float32), reward, False, truncated, info


gym.register("TwoDoors-v0", TwoDoors, max_episode_steps=TwoDoors.num_steps)
