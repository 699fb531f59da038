"""Tests of frequencies by their definitions; the golden logits of test_decoder.py cover the rest."""

from __future__ import annotations

import math

import numpy as np
import pytest

from services.worker.native.rope import (
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    NoRope,
    PlainRope,
    YarnRope,
    frequencies,
    rope_tables,
)


def test_plain_frequencies_are_powers_of_theta() -> None:
    angles, scale = frequencies(PlainRope(10_000.0), 8)
    np.testing.assert_allclose(angles, [1, 0.1, 0.01, 0.001])
    assert scale == 1


def test_linear_divides_and_dynamic_does_not_within_the_served_length() -> None:
    plain, _ = frequencies(PlainRope(), 64)
    np.testing.assert_allclose(frequencies(LinearRope(4.0), 64)[0], plain / 4)
    np.testing.assert_array_equal(frequencies(DynamicRope(4.0), 64)[0], plain)


def test_llama_3_keeps_short_waves_and_divides_long_ones() -> None:
    rope = Llama3Rope(8.0, 1.0, 4.0, 8192, 500_000.0)
    plain, _ = frequencies(PlainRope(500_000.0), 128)
    scaled, _ = frequencies(rope, 128)
    wavelength = 2 * math.pi / plain
    np.testing.assert_allclose(scaled[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    np.testing.assert_allclose(scaled[wavelength > 8192], plain[wavelength > 8192] / 8)
    assert (np.diff(scaled) < 0).all()


def test_yarn_keeps_frequencies_that_rotate_often_and_divides_those_that_hardly_rotate() -> None:
    rope = YarnRope(4.0, 4096, 10_000.0)
    plain, _ = frequencies(PlainRope(), 128)
    scaled, scale = frequencies(rope, 128)
    turns = 4096 * plain / (2 * math.pi)
    np.testing.assert_allclose(scaled[turns > 40], plain[turns > 40])
    np.testing.assert_allclose(scaled[turns < 0.8], plain[turns < 0.8] / 4)
    assert scale == pytest.approx(0.1 * math.log(4) + 1)
    assert frequencies(YarnRope(4.0, 4096, attention_factor=0.5), 128)[1] == 0.5


def test_tables_hold_cosine_and_sine_of_every_position() -> None:
    cosines, sines = rope_tables(PlainRope(), 8, 5)
    assert cosines.shape == sines.shape == (5, 4)
    assert cosines.dtype == np.float32
    np.testing.assert_allclose(cosines[3], np.cos([3, 0.3, 0.03, 0.003]), rtol=1e-6)
    np.testing.assert_allclose(sines[3], np.sin([3, 0.3, 0.03, 0.003]), rtol=1e-6)


def test_longrope_divides_by_its_short_factors_and_scales_attention() -> None:
    angles, scale = frequencies(LongRope((1.0, 2.0, 4.0, 8.0), 16.0, 4096), 8)
    np.testing.assert_allclose(angles, [1, 0.05, 0.0025, 0.000125])
    assert scale == pytest.approx(math.sqrt(1 + math.log(16) / math.log(4096)))
    assert frequencies(LongRope((1.0,), 16.0, 4096, attention_factor=0.5), 2)[1] == 0.5
    assert frequencies(LongRope((1.0,), 1.0, 1), 2)[1] == 1


def test_elements_that_are_not_rotated_keep_their_size_whatever_the_factor_on_the_others() -> None:
    rope = YarnRope(4.0, 4096, attention_factor=0.5)
    cosines, sines = rope_tables(rope, 8, 3, rotated=4)
    np.testing.assert_array_equal(cosines[:, 2:], 1)
    np.testing.assert_array_equal(sines[:, 2:], 0)
    np.testing.assert_array_equal(cosines[:, :2], rope_tables(rope, 4, 3)[0])
    cosines, sines = rope_tables(NoRope(), 8, 3)
    assert (cosines == 1).all()
    assert (sines == 0).all()
