"""Writes a trained policy as a file that runs without this project: ONNX, or torch.export's pt2.

    python tools/export.py runs/FOLDER                           # runs/FOLDER/policy.onnx
    python tools/export.py runs/FOLDER/best.pt --sampler sde --out walker.onnx
    python tools/export.py runs/FOLDER --out policy.pt2          # for torch.export.load

Inputs: obs (B, O), observations as the environment gives them, flat and without privileged_state;
and noise, standard normal, where the sampler needs some. Output: action (B, A), in the
environment's own units. The normalizer and the scaling of the actions are inside.

    sampler           noise
    ode               (1, B, A)      TruDi: the start of the probability flow
    sde               (N + 1, B, A)  TruDi: the start and the N denoising steps
    mean              none           REPPO and PPO
    sample            (B, A)         REPPO and PPO

ONNX needs `pip install onnx onnxscript`, and to run it onnxruntime.
"""

import argparse
import logging
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools import record  # noqa: E402

EXAMPLE_BATCH = 3  # any number above one: the exported batch is dynamic


class Exported(nn.Module):
    """obs, noise -> action, with everything that belongs to the policy inside."""

    def __init__(self, script, checkpoint, sampler):
        super().__init__()
        self.script = script
        self.args = script.Args(**checkpoint["args"])
        self.agent = script.make_agent(checkpoint)
        self.sampler = sampler
        spaces = checkpoint["spaces"]
        self.num_privileged = spaces["obs_dim"] - spaces["actor_dim"]
        low = torch.tensor(spaces["action_low"])
        high = torch.tensor(spaces["action_high"])
        self.register_buffer("center", (high + low) / 2)
        self.register_buffer("halfwidth", (high - low) / 2)

    def noise_shape(self, batch_size):
        """None where the sampler needs no noise."""
        action_dim = len(self.center)
        if self.sampler == "mean":
            return None
        if self.sampler == "ode":
            return (1, batch_size, action_dim)
        if self.sampler == "sde":
            return (self.args.diffusion_steps + 1, batch_size, action_dim)
        return (batch_size, action_dim)

    def forward(self, obs, noise=None):
        policy = self.agent.policy
        obs = nn.functional.pad(obs, (0, self.num_privileged))  # which only the critic looks at
        policy.noise = lambda batch_size, generator: noise  # instead of drawing it
        action = self.script.act(self.agent, policy.normalizer(obs), self.sampler, self.args, None)
        return self.center + self.halfwidth * action.clamp(-1, 1)


def example_inputs(exported, checkpoint):
    """-> inputs, names of their dynamic dimensions"""
    obs = torch.randn(EXAMPLE_BATCH, checkpoint["spaces"]["actor_dim"])
    batch = torch.export.Dim("batch")
    shape = exported.noise_shape(EXAMPLE_BATCH)
    if shape is None:
        return (obs,), ({0: batch},)
    return (obs, torch.randn(shape)), ({0: batch}, {len(shape) - 2: batch})


@torch.no_grad()
def export(script, checkpoint, sampler, out):
    exported = Exported(script, checkpoint, sampler).eval()
    inputs, dynamic_shapes = example_inputs(exported, checkpoint)
    program = torch.export.export(exported, inputs, dynamic_shapes=dynamic_shapes, strict=False)
    if out.suffix == ".pt2":
        torch.export.save(program, out)
        return
    names = ["obs", "noise"][: len(inputs)]
    logging.getLogger("torch.onnx").setLevel("ERROR")  # about torchvision, which is not needed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the exporter's own insides
        torch.onnx.export(
            program,
            inputs,
            out,
            input_names=names,
            output_names=["action"],
            dynamic_shapes=dynamic_shapes,
            external_data=False,
            verbose=False,
        )


def parse_args(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="a run's folder (its policy.pt), or a checkpoint")
    parser.add_argument("--sampler", default="", help="otherwise the run's own")
    parser.add_argument(
        "--out", type=Path, help="file to write, .onnx or .pt2; otherwise policy.onnx"
    )
    return parser.parse_args(argv)


def main(argv=None):
    options = parse_args(argv)
    path = options.run / "policy.pt" if options.run.is_dir() else options.run
    script, checkpoint = record.load(path)
    sampler = options.sampler or checkpoint["args"]["eval_sampler"]
    known = [name for name in script.SAMPLERS if name != "best-of-k"]
    if sampler not in known:
        record.stop(f"--sampler {sampler}: choose one of {', '.join(known)}", code=2)
    out = options.out or path.with_suffix(".onnx")
    if out.suffix not in (".onnx", ".pt2"):
        record.stop(f"--out {out} must end in .onnx or .pt2", code=2)
    try:
        export(script, checkpoint, sampler, out)
    except ImportError as error:
        record.stop(f"ONNX needs `pip install onnx onnxscript` ({error})", code=2)
    except OSError as error:
        record.stop(f"cannot write {out}: {error}", code=1)
    print(f"saved {out}: sampler {sampler}, {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
