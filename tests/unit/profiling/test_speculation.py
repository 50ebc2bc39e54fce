"""Figures of speculation from two metric pages."""

import pytest

from dspark_ray.profiling.speculation import speculation_figures


def test_this_programs_counters() -> None:
    before = {("dspark_request_steps_total", ""): 10.0, ("dspark_decode_tokens_total", ""): 15.0}
    after = {
        ("dspark_request_steps_total", ""): 110.0,
        ("dspark_decode_tokens_total", ""): 195.0,
        ("dspark_verified_tokens_total", ""): 300.0,
        ("dspark_target_steps_total", ""): 50.0,
        ("dspark_verified_per_position_total", "10"): 0.0,
        ("dspark_verified_per_position_total", "2"): 20.0,
        ("dspark_verified_per_position_total", "1"): 40.0,
        ("dspark_accepted_per_position_total", "2"): 5.0,
        ("dspark_accepted_per_position_total", "1"): 30.0,
    }
    figures = speculation_figures(before, after)
    assert figures == {"tau": pytest.approx(1.8), "budget_tokens": 6.0, "acceptance": [0.75, 0.25]}


def test_vllms_counters_and_none() -> None:
    page = {
        ("vllm:spec_decode_num_drafts_total", ""): 10.0,
        ("vllm:spec_decode_num_accepted_tokens_total", ""): 15.0,
    }
    assert speculation_figures({}, page) == {"accepted_length_of_drafts": 2.5}
    assert speculation_figures(page, page) == {}
