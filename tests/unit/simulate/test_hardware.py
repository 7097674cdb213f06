"""The roofline, against arithmetic done by hand."""

import pytest

from dynamo.simulate.hardware import Gpu, Group, Model

GPU = Gpu(flops=1e12, bytes_per_s=1e10, memory_bytes=3e9, link_bytes_per_s=1e9, all_reduce_s=1e-5,
          overhead_s=0.001)  # fmt: skip
MODEL = Model(num_parameters=1e9, weight_bytes=2e9, num_layers=10, hidden_size=100, kv_bytes=1e4)


def group(size=1):
    return Group(gpu=GPU, model=MODEL, size=size)


def test_a_prompt_is_linear_work_and_attention_to_all_before():
    assert group().prompt_s(0, 1000) == pytest.approx((2e12 + 2 * 10 * 100 * 1e6) / 1e12)


@pytest.mark.parametrize("cut", [1, 500, 999])
def test_parts_of_a_prompt_are_as_much_work_as_the_whole(cut):
    parts = group().prompt_s(0, cut) + group().prompt_s(cut, 1000)

    assert parts == pytest.approx(group().prompt_s(0, 1000))


def test_a_single_answer_waits_for_the_weights_and_for_what_it_reads():
    took = group().iteration_s(prompts_s=0, num_prompt_tokens=0, num_decoding=1, num_read=500)

    assert took == pytest.approx(0.001 + 2e9 / 1e10 + 500 * 1e4 / 1e10)


def test_a_long_prompt_hides_the_weights():
    took = group().iteration_s(prompts_s=7.0, num_prompt_tokens=9, num_decoding=10, num_read=0)

    assert took == pytest.approx(0.001 + 7.0 + 10 * 2e9 / 1e12)


def test_groups_share_the_work_and_pay_two_all_reduces_a_layer():
    took = group(4).iteration_s(prompts_s=3.0, num_prompt_tokens=1000, num_decoding=0, num_read=0)

    over_links = 2 * 3 / 4 * 1000 * 100 * 2 / 1e9
    assert took == pytest.approx(0.001 + 3.0 + 2 * 10 * (1e-5 + over_links))
    assert group(4).prompt_s(0, 100) == pytest.approx(group(1).prompt_s(0, 100) / 4)


@pytest.mark.parametrize(("size", "num_tokens"), [(1, 100_000), (2, 400_000)])
def test_memory_beside_the_weights_holds_keys_and_values(size, num_tokens):
    assert group(size).num_kv_tokens == num_tokens
