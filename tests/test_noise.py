"""Counter-based noise: pinned numbers, keys that alone decide, and the distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from stalefront.noise import normals, row_keys, uniforms

MASK = 2**64 - 1


def mixed(word: int) -> int:
    """Finaliser of SplitMix64 in Python's integers."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def absorbed(key: int, word: int) -> int:
    return mixed(((key ^ (word & MASK)) + 0x9E3779B97F4A7C15) & MASK)


def random_word(key: int, counter: int, entry: int) -> int:
    return mixed((absorbed(key, counter) + mixed((entry + 1) * 0x9E3779B97F4A7C15 & MASK)) & MASK)


def unsigned(key: torch.Tensor) -> list[int]:
    return [value & MASK for value in key.tolist()]


def test_the_finaliser_is_that_of_splitmix64():
    # First outputs of the reference program for seed 1234567, as its test vectors have them.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [mixed((1234567 + k * 0x9E3779B97F4A7C15) & MASK) for k in (1, 2, 3)] == expected


def test_against_exact_integers():
    key = row_keys(3, "mismatch", 7, rows=3, first_row=2)
    # CRC-32 of the purpose, from another program: printf mismatch | gzip -c | tail -c8 | od -An -tu4.
    crc = 19738178
    assert unsigned(key) == [absorbed(absorbed(absorbed(absorbed(0, 3), crc), 7), row) for row in (2, 3, 4)]
    expected = [[(random_word(k, 11, j) >> 11) / 2**53 for j in range(5)] for k in unsigned(key)]
    assert uniforms(key, 11, 5).tolist() == expected
    bits = np.array([[random_word(k, 11, j) >> 12 for j in range(5)] for k in unsigned(key)], dtype=np.float64)
    expected = stats.norm.ppf((bits + 0.5) / 2**52).astype(np.float32)
    assert np.allclose(normals(key, 11, 5).numpy(), expected, rtol=2e-7, atol=0)


def test_pinned_values():
    key = row_keys(0, "noise", 1, rows=2)
    assert key.tolist() == [-3260575790299813487, 1049611471870922070]
    assert uniforms(key, 5, 3).tolist() == [
        [0.7819756941149203, 0.5853851750726052, 0.932990596287933],
        [0.8888634840008635, 0.18864364215135765, 0.4023566500984237],
    ]
    expected = [[0.77888304, 0.215689674, 1.49844062], [1.22050619, -0.882905602, -0.247251883]]
    assert normals(key, 5, 3).tolist() == [pytest.approx(row, rel=2e-7) for row in expected]


@pytest.mark.parametrize("draw", [normals, uniforms])
def test_an_entry_depends_on_its_key_counter_and_column_alone(draw):
    key, counter = row_keys(3, "a", 7, rows=64), torch.arange(64) % 5
    many = draw(key, counter, 33)
    assert torch.equal(draw(key[:9], counter[:9], 33), many[:9])
    assert torch.equal(draw(key[9:11], counter[9:11], 7), many[9:11, :7])
    assert torch.equal(draw(key.flip(0), counter.flip(0), 33), many.flip(0))
    assert torch.equal(torch.cat([draw(key[n : n + 1], int(counter[n]), 33) for n in range(64)]), many)


def test_keys_do_not_depend_on_how_a_batch_is_cut():
    whole = row_keys(3, "a", 7, rows=64)
    parts = [row_keys(3, "a", 7, rows=rows, first_row=first) for first, rows in ((0, 5), (5, 50), (55, 9))]
    assert torch.equal(torch.cat(parts), whole)


def test_every_part_of_the_key_counts():
    words = [(0, "a", 1), (1, "a", 1), (0, "b", 1), (0, "a", 2), (1, "a", 0), (-1, "a", 1)]
    keys = torch.cat([row_keys(*word, rows=500) for word in words])
    assert len(keys.unique()) == len(keys)
    base, other = (normals(row_keys(*word, rows=1), 0, 50) for word in words[:2])
    assert not (base == other).any()
    assert not (base == normals(row_keys(*words[0], rows=1), 1, 50)).any()


def test_streams_do_not_run_into_one_another():
    # A row that walked through the states of its neighbour would repeat its numbers somewhere.
    key = row_keys(0, "a", 1, rows=100)
    values = torch.cat([uniforms(key, counter, 1000) for counter in (0, 1)])
    assert len(values.unique()) == values.numel()


@pytest.mark.parametrize("seed", range(3))
def test_normals_are_normal(seed):
    values = normals(row_keys(seed, "a", 0, rows=200), 3, 1000).double().numpy().ravel()
    n = values.size
    # Five standard errors of each: 1/n, 2/n, 6/n and 24/n are the variances.
    assert abs(values.mean()) < 5 * (1 / n) ** 0.5
    assert abs(values.var() - 1) < 5 * (2 / n) ** 0.5
    assert abs(stats.skew(values)) < 5 * (6 / n) ** 0.5
    assert abs(stats.kurtosis(values)) < 5 * (24 / n) ** 0.5
    assert stats.kstest(values, "norm").pvalue > 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_uniforms_are_uniform(seed):
    values = uniforms(row_keys(seed, "a", 0, rows=200), 3, 1000).numpy().ravel()
    assert values.min() >= 0
    assert values.max() < 1
    assert stats.kstest(values, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("bit", [*range(0, 53, 8), 52])
def test_every_bit_is_a_fair_coin(bit):
    ones = (uniforms(row_keys(4, "a", 0, rows=100), 0, 1000) * 2**53).long() >> bit & 1
    assert abs(float(ones.double().mean()) - 0.5) < 5 * 0.5 / ones.numel() ** 0.5


def test_neighbours_are_not_correlated():
    key = row_keys(0, "a", 0, rows=401)
    values = normals(key, 7, 501).double()
    pairs = {
        "rows": (values[1:], values[:-1]),
        "columns": (values[:, 1:], values[:, :-1]),
        "diagonal": (values[1:, 1:], values[:-1, :-1]),
        "counters": (values, normals(key, 8, 501).double()),
        "seeds": (values, normals(row_keys(1, "a", 0, rows=401), 7, 501).double()),
        "batches": (values, normals(row_keys(0, "a", 1, rows=401), 7, 501).double()),
    }
    for name, (one, other) in pairs.items():
        # Five standard errors, 1/√n; squares would show a dependence of sizes.
        bound = 5 / one.numel() ** 0.5
        for power in (1, 2):
            found = np.corrcoef(one.numpy().ravel() ** power, other.numpy().ravel() ** power)[0, 1]
            assert abs(found) < bound, (name, power)


def test_column_means_and_row_means_scatter_as_they_should():
    values = normals(row_keys(5, "a", 0, rows=300), torch.arange(300), 400).double()
    for means, n in ((values.mean(0) * 300**0.5, 400), (values.mean(1) * 400**0.5, 300)):
        assert stats.kstest(means.numpy(), "norm").pvalue > 1e-3
        assert abs(float(means.square().mean()) - 1) < 5 * (2 / n) ** 0.5


def test_the_outermost_words_are_finite(monkeypatch):
    extreme = torch.tensor([[0, -1, 2**63 - 1, -(2**63)]])
    monkeypatch.setattr("stalefront.noise._words", lambda key_N, counter, width: extreme)
    key = torch.zeros(1, dtype=torch.int64)
    values = normals(key, 0, 4)
    # 52 bits end at Φ⁻¹(2⁻⁵³), and the two middle words lie on either side of 0.
    assert values[0].tolist() == pytest.approx(stats.norm.ppf([2.0**-53, 1 - 2.0**-53, 0.5 - 2.0**-53, 0.5 + 2.0**-53]))
    assert values.isfinite().all()
    assert uniforms(key, 0, 4)[0].tolist() == [0.0, 1 - 2.0**-53, 0.5 - 2.0**-53, 0.5]


def test_types_and_shapes():
    key = row_keys(0, "a", 0, rows=3)
    assert (key.dtype, key.shape) == (torch.int64, (3,))
    assert (normals(key, 0, 4).dtype, normals(key, 0, 4).shape) == (torch.float32, (3, 4))
    assert (uniforms(key, 0, 4).dtype, uniforms(key, 0, 4).shape) == (torch.float64, (3, 4))
    assert normals(key[:0], 0, 4).shape == (0, 4)


@pytest.mark.gpu
def test_devices_agree():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    key, there = row_keys(0, "a", 1, rows=64), row_keys(0, "a", 1, rows=64, device="cuda")
    assert torch.equal(there.cpu(), key)
    assert torch.equal(uniforms(there, 3, 1000).cpu(), uniforms(key, 3, 1000))
    torch.testing.assert_close(normals(there, 3, 1000).cpu(), normals(key, 3, 1000), rtol=2e-7, atol=0)
