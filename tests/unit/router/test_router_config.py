"""The options of a router: which policy they choose, and what an operator is told of them."""

import dataclasses
import random

import pytest

from dynamo.base import errors
from dynamo.router import api, config, policies, prefix_index, worker_load


def make_policy(**options):
    return config.make_policy(config.RoutingConfig(router_mode="kv", **options), lambda: 0.0)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, policies.EstimatedTtft),
        ({"kv_overlap_score_weight": 1.0}, policies.Dynamo),
        ({"router_temperature": 0.8}, policies.Dynamo),
        ({"router_policy": "lmetric", "router_temperature": 0.8}, policies.LMetric),
        ({"router_policy": "estimated-ttft", "router_temperature": 0.8}, policies.EstimatedTtft),
    ],
)
def test_policy_is_the_named_one_or_the_one_that_uses_the_options(options, expected):
    assert type(make_policy(**options)) is expected


def test_options_of_the_second_article_reach_dynamos_policy():
    made = make_policy(kv_overlap_score_weight=2.0, router_temperature=0.8)

    assert (made.overlap_weight, made.temperature) == (2.0, 0.8)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"router_mode": "kv", "router_policy": "dynamo", "router_replica_sync": True}, []),
        ({"router_mode": "direct", "router_replica_sync": True}, []),
        ({"router_policy": "dynamo"}, ["--router-policy"]),
        ({"router_mode": "least-loaded", "router_policy": "dynamo"}, ["--router-policy"]),
        (
            {"router_session_affinity_ttl_secs": 60.0, "router_replica_sync": True},
            ["--router-session-affinity-ttl-secs", "--router-replica-sync"],
        ),
    ],
)
def test_operator_is_told_which_options_the_router_mode_ignores(options, expected):
    notes = config.RoutingConfig(**options).find_mode_notes()

    assert [note.partition(" has no effect in the router mode ")[0] for note in notes] == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"router_policy": "dynamo", "kv_overlap_score_weight": 2.0}, []),
        ({"router_temperature": 0.8}, ["selected by --router-policy dynamo"]),
        (
            {"router_policy": "lmetric", "kv_overlap_score_weight": 2.0},
            ["--kv-overlap-score-weight has no effect: the policy lmetric"],
        ),
        (
            {"router_mode": "random", "router_temperature": 0.8},
            ["--router-temperature has no effect: the policy random"],
        ),
    ],
)
def test_operator_is_told_what_options_choose_or_that_they_have_no_effect(options, expected):
    routing = config.RoutingConfig(**{"router_mode": "kv"} | options)
    notes = routing.policy_config.find_notes()

    assert len(notes) == len(expected)
    assert all(part in note for part, note in zip(expected, notes, strict=True))


@pytest.mark.parametrize(
    "name", ["fastest", "no.such.module:Policy", "json:NoSuchClass", "json:JSONDecoder"]
)
def test_wrong_policy_is_refused_by_name(name):
    with pytest.raises(errors.ConfigError, match=f"--router-policy {name}: expected a policy"):
        config.make_policy(config.RouterConfig(router_policy=name), random.random)


def test_policy_direct_refuses_a_request_that_names_no_worker_also_while_all_are_busy():
    settings = config.RouterConfig(router_policy="direct", router_queue_threshold=1.0)
    selector = config.make_selector(
        settings, prefix_index.PrefixIndex(), block_size=4, draw=random.Random(1).random
    )
    selector.set_workers({api.Worker(1): worker_load.Capacity(max_num_seqs=1)})
    prompt = api.Prompt(num_tokens=4, block_size=4, sequence_hashes=[1])
    selector.select("busy", dataclasses.replace(prompt, pinned=api.Worker(1)), 0.0)
    with pytest.raises(errors.InvalidRequest, match="name its worker"):
        selector.select("r", prompt, 0.0)
