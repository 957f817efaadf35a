import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from etude.errors import InputError
from etude.harness.trace import Cost
from etude.rewards.effort import EffortSettings, effort, effort_units


@pytest.mark.parametrize(
    ("x", "q", "value"),
    [(1, 2, 0.5), (10, 2, 0.909), (100, 2, 0.990), (1, 0.5, 0.828), (10, 0.5, 4.633), (100, 0.5, 18.1)],
)
def test_known_values(x: float, q: float, value: float) -> None:
    assert effort(x, k=1, q=q) == pytest.approx(value, abs=0.0005 if value < 10 else 0.05)


POSITIVE = st.floats(1e-3, 1e4)


@given(POSITIVE, st.floats(1e-3, 10), st.floats(-1, 5).filter(lambda q: abs(q - 1) > 0.05))
def test_it_equals_the_formula(x: float, k: float, q: float) -> None:
    assert effort(x, k, q) == pytest.approx(((1 + k * x) ** (1 - q) - 1) / (k * (1 - q)), rel=1e-6)


@given(POSITIVE, st.floats(1e-3, 10))
def test_q_of_one_is_the_logarithm_and_near_one_it_is_stable(x: float, k: float) -> None:
    assert effort(x, k, 1) == pytest.approx(math.log(1 + k * x) / k, rel=1e-9)
    for distance in (1e-14, 1e-9, 1e-6):
        assert effort(x, k, 1 + distance) == pytest.approx(effort(x, k, 1), rel=1e-4)
        assert effort(x, k, 1 - distance) == pytest.approx(effort(x, k, 1), rel=1e-4)


@given(POSITIVE, st.floats(-1, 5))
def test_k_of_zero_is_a_line(x: float, q: float) -> None:
    assert effort(x, 0, q) == x
    assert effort(x, 1e-12, q) == pytest.approx(x, rel=1e-4)


@given(POSITIVE, POSITIVE, st.floats(1e-3, 10), st.floats(0.01, 5))
def test_it_is_increasing_and_concave(x: float, more: float, k: float, q: float) -> None:
    assert effort(0, k, q) == 0
    assert effort(x, k, q) <= effort(x + more, k, q) * (1 + 1e-12)
    middle = effort(x + more / 2, k, q)
    assert middle >= (effort(x, k, q) + effort(x + more, k, q)) / 2 * (1 - 1e-9)
    if q > 1.01:
        assert effort(1e12, k, q) <= 1 / (k * (q - 1)) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("x", "k", "q"), [(-1, 1, 1), (math.nan, 1, 1), (1, -1, 1), (1, 1, math.inf), (math.inf, 1, 1)]
)
def test_invalid_arguments_are_refused(x: float, k: float, q: float) -> None:
    with pytest.raises(InputError, match="effort"):
        effort(x, k, q)


def test_effort_units_count_six_quantities() -> None:
    cost = Cost(thinking=1, summary=1, call=10, output=100, final=900, commentary=100, calls=10_000, turns=100_000)
    ones = EffortSettings(thinking_token=1, call_token=1, output_token=1, final_token=1, call=1, turn=1)
    assert effort_units(cost, ones) == 2 + 10 + 100 + 1000 + 10_000 + 100_000
    assert effort_units(Cost(prompt=5, cached=5, pod_s=9, wall_s=9, model_s=9), ones) == 0
    with pytest.raises(ValidationError, match="turn"):
        EffortSettings(turn=-1)
