"""The tasks: a robot that slides along x, and a destination."""

import numpy as np
from gymnasium.spaces import Box

import humanoid_bench.mjx.flax_to_torch  # noqa: F401


class Task:
    max_episode_steps = 8
    success_bar = 5.0
    observation_space = Box(-np.inf, np.inf, shape=(4,), dtype=np.float64)

    def __init__(self, robot=None, env=None):
        if env is None:
            return
        self._env = env
        self.goal = 0.0
        if env.render_mode is not None:
            env.viewer = env.mujoco_renderer._get_viewer(env.render_mode)

    def get_obs(self):
        data = self._env.data
        destination = data.body("destination").xpos[0]
        return np.array([data.qpos[0], data.qvel[0], self.goal, destination])

    def get_reward(self):
        return 1.0, {}

    def get_terminated(self):
        return False, {}

    def reset_model(self):
        return self.get_obs()

    def step(self, action):
        self._env.do_simulation(action, self._env.frame_skip)
        reward, info = self.get_reward()
        terminated, _ = self.get_terminated()
        return self.get_obs(), reward, terminated, False, {"per_timestep_reward": reward, **info}

    def render(self):
        env = self._env
        return env.mujoco_renderer.render(env.render_mode, env.camera_id, env.camera_name)


class Walk(Task):
    """Falls, which ends the episode, where it is pushed to the left."""

    def get_terminated(self):
        return self._env.data.qpos[0] < 0.48, {}


class Reach(Task):
    """Goals from NumPy's global generator, and a return that never reaches the bar"""

    success_bar = 1000.0

    def reset_model(self):
        self.goal = np.random.uniform(-2, 2)  # noqa: NPY002
        return self.get_obs()


class Push(Task):
    """It tells success by itself, for a moment only."""

    def get_reward(self):
        return -1.0, {"success": 0.07 < self._env.data.time < 0.09}


class Package(Task):
    """It moves a body of the model, so no other environment may have the same model."""

    def reset_model(self):
        self._env.model.body_pos[-1, 0] = np.random.uniform(-2, 2)  # noqa: NPY002
        return self.get_obs()


class Kitchen(Task):
    """Its model needs the kettle."""
