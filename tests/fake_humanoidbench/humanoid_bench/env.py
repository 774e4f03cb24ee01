import os

from gymnasium.envs.mujoco import MujocoEnv
from gymnasium.spaces import Box
from gymnasium.utils import EzPickle

from humanoid_bench.dmc_deps import dmc_sizes
from humanoid_bench.tasks import Kitchen, Package, Push, Reach, Walk

TASKS = {"walk": Walk, "reach": Reach, "push": Push, "package": Package, "kitchen": Kitchen}


class HumanoidEnv(MujocoEnv, EzPickle):
    metadata = {"render_modes": ["human", "rgb_array", "depth_array"], "render_fps": 50}

    def __init__(self, robot=None, control=None, task=None, render_mode="rgb_array"):
        EzPickle.__init__(self, metadata=self.metadata)
        assets = os.path.join(os.path.dirname(__file__), "assets")
        MujocoEnv.__init__(
            self,
            os.path.join(assets, f"envs/{robot}_{control}_{task}.xml"),
            frame_skip=10,
            observation_space=TASKS[task].observation_space,
            render_mode=render_mode,
            width=64,
            height=64,
            camera_name="cam_default",
        )
        self.action_space = Box(-1, 1, shape=self.action_space.shape)
        self.task = TASKS[task](robot, self)
        print("No randomness in this env.")
        for struct, name in ((self.model, "mjmodel"), (self.data, "mjdata")):
            for array in dmc_sizes.array_sizes[name]:
                getattr(struct, array)

    def step(self, action):
        return self.task.step(action)

    def reset_model(self):
        noise = self.np_random.uniform(-0.01, 0.01, size=self.model.nq)
        self.set_state(self.init_qpos + 0.5 + noise, self.init_qvel)
        return self.task.reset_model()

    def render(self):
        return self.task.render()
