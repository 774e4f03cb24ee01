"""tools/export.py: the exported policy gives the actions of the original."""

import numpy as np
import pytest
import torch
from run_helpers import CLOCK, SAMPLERS, every_script_slowly, load, train, trudi

from tools import export


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def get(script):
        if script not in made:
            made[script] = tmp_path_factory.mktemp("export") / "run"
            train(made[script], script=script, env=CLOCK)
        return made[script]

    return get


def expected_actions(script, folder, sampler, obs, noise):
    """By the script's own functions, with this noise instead of a generator's."""
    checkpoint = load(folder / "policy.pt")
    agent = script.make_agent(checkpoint)
    agent.policy.noise = lambda batch_size, generator: noise
    args = script.Args(**checkpoint["args"])
    with torch.no_grad():
        normalized = agent.policy.normalizer(obs)
        action = script.act(agent, normalized, sampler, args, None).clamp(-1, 1)
    low = torch.tensor([-1.0, 2.0])  # Clock's
    high = torch.tensor([3.0, 12.0])
    return low + (high - low) * (action + 1) / 2


def inputs_for(script, sampler, batch_size):
    obs = 3 * torch.randn(batch_size, 4)
    shapes = {
        "ode": (1, batch_size, 2),
        "sde": (3, batch_size, 2),  # N = 2 in tiny runs
        "sample": (batch_size, 2),
    }
    if sampler == "mean":
        return obs, None
    return obs, torch.randn(shapes[sampler])


@every_script_slowly
def test_onnx(script, folders, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    folder = folders(script)
    for sampler in SAMPLERS[script]:
        if sampler == "best-of-k":
            continue
        out = tmp_path / f"{sampler}.onnx"
        export.main([str(folder), "--sampler", sampler, "--out", str(out)])
        session = onnxruntime.InferenceSession(str(out))
        for batch_size in (1, 2, 7):
            obs, noise = inputs_for(script, sampler, batch_size)
            feed = {"obs": obs.numpy()}
            if noise is not None:
                feed["noise"] = noise.numpy()
            (action,) = session.run(["action"], feed)
            expected = expected_actions(script, folder, sampler, obs, noise)
            assert action.shape == (batch_size, 2)
            np.testing.assert_allclose(action, expected.numpy(), rtol=1e-5, atol=1e-5)


def test_torch_export(folders, tmp_path):
    folder = folders(trudi)
    out = tmp_path / "policy.pt2"
    export.main([str(folder / "policy.pt"), "--out", str(out)])
    module = torch.export.load(out).module()
    obs, noise = inputs_for(trudi, "ode", 5)
    expected = expected_actions(trudi, folder, "ode", obs, noise)
    torch.testing.assert_close(module(obs, noise), expected, rtol=1e-5, atol=1e-5)


def test_refusals(folders, tmp_path, capsys):
    folder = folders(trudi)
    for flags in (
        [str(tmp_path / "nothing.pt")],
        [str(folder), "--sampler", "best-of-k"],
        [str(folder), "--sampler", "mean"],
        [str(folder), "--out", str(tmp_path / "policy.txt")],
    ):
        with pytest.raises(SystemExit) as end:
            export.main(flags)
        err = capsys.readouterr().err
        assert end.value.code == 2 and err.startswith("error: ") and err.count("\n") == 1
