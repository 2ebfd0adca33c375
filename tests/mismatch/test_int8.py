"""INT8: integers by hand and by numpy, and activations quantised on the fly."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import linear


def integers(x, axis):
    """Symmetric integers from −127 to 127 times their scale, in numpy."""
    values = x.detach().numpy()
    step = np.abs(values).max(axis=axis, keepdims=True) / np.float32(127)
    return torch.from_numpy(np.round(values / step) * step)


def test_values_by_hand(entry):
    weight = torch.tensor([[127.0, 1.4, -2.6], [12.7, 0.14, -0.26]])
    expected = torch.tensor([[127.0, 1.0, -3.0], [12.7, 0.1, -0.3]])
    torch.testing.assert_close(entry("int8").weight(weight), expected, rtol=1e-6, atol=0)
    assert entry("int8", scale="tensor").weight(weight)[1].tolist() == [13.0, 0.0, 0.0]
    torch.testing.assert_close(entry("int8", strength=0.5).weight(weight)[0], torch.tensor([127.0, 1.2, -2.8]))
    assert entry("int8", strength=0.0).weight(weight) is weight


@pytest.mark.parametrize(("scale", "axis"), [("channel", -1), ("tensor", (-2, -1))])
def test_matrices_are_those_of_numpy(scale, axis, make_learner, moved):
    found = moved(make_learner("int8", **{"mismatch.int8.scale": scale}))
    assert len(found) == 14
    for name, (live, mine) in found.items():
        assert name.endswith("_proj.weight")
        torch.testing.assert_close(mine, integers(live, axis), rtol=1e-6, atol=1e-8)


def test_inputs_are_quantised_token_by_token_where_asked(make_learner, loaded):
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    hidden[1] *= 100
    for dynamic in (False, True):
        module = loaded(make_learner("int8", **{"mismatch.int8.dynamic": dynamic})).model.layers[0].mlp.up_proj
        expected = linear(integers(hidden, -1) if dynamic else hidden, module.weight)
        torch.testing.assert_close(module(hidden), expected, rtol=1e-5, atol=1e-5)


def test_options(refused):
    refused("int8", "scale", scale="group")
