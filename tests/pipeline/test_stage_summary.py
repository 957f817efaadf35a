"""Summaries of finished stages."""

from etude.pipeline.rl_stage import format_minutes
from etude.pipeline.stages import summarize_stage

RISE = {"tasks": 72, "solved": 0.205, "solved_low": 0.131, "solved_high": 0.285}


def test_rl_reports_the_rise_and_its_confidence_interval() -> None:
    facts = {
        "steps": 12,
        "reward_first": 0.1667,
        "reward_last": 0.4167,
        "seconds": 194.1,
        "stale": 24,
        "deaths": 0,
        "before": {"step": 0, "solved": 0.2257, "best/4": 0.4861},
        "after": {"step": 12, "solved": 0.4306, "best/4": 0.6389},
        "rise": RISE,
    }
    assert summarize_stage("rl", facts).splitlines() == [
        "rl: 12 steps in 3 min 14 s; mean reward 0.17 -> 0.42 (24 stale)",
        "  validation tasks solved, from its own start: 23% -> 43%, +20 points (95 % interval +13 to +28, 72 tasks); "
        "best of 4: 49% -> 64%",
    ]
    assert summarize_stage("rl", {"steps": 0, "ended_early": "no prompt is left"}).splitlines() == [
        "rl: 0 steps",
        "  ended early: no prompt is left",
    ]


def test_training_reports_its_losses() -> None:
    facts = {"steps": 40, "tokens": 163_840, "first_loss": 2.7398, "last_loss": 2.3713}
    assert summarize_stage("sft", facts) == "sft: 40 steps, 163,840 tokens; loss 2.740 -> 2.371"
    held_out = {"held_out_nats_before": 54_076.1, "held_out_nats_after": 47_365.7}
    assert summarize_stage("pretrain", facts | held_out).endswith("held-out code 54,076 -> 47,366 nats (-12.4%)")
    heads = {"steps": 2, "tokens": 9, "first_mtp_1_kl": 7.8, "last_mtp_1_kl": 3.2}
    seen = {"held_out_overlap_before": 0.0, "held_out_overlap_after": 0.227}
    assert summarize_stage("mtp", heads | seen).endswith("next token on held-out code 0% -> 23%")


def test_other_stages_list_every_fact() -> None:
    assert (
        summarize_stage("nll", {"files": 1234, "score": 0.5, "by": {"a": 1}})
        == "nll: files 1,234, score 0.5000, by (a 1)"
    )
    assert summarize_stage("tasks", {"train": {"tasks": 1000, "demonstrations": 3}, "new": {"tasks": 2}}) == (
        "tasks: train 1,000, new 2; 3 demonstrations"
    )


def test_seconds_become_minutes_from_sixty_on() -> None:
    assert [format_minutes(seconds) for seconds in (0.4, 59.4, 59.6, 194.1, 3600)] == [
        "0 s",
        "59 s",
        "1 min 00 s",
        "3 min 14 s",
        "60 min 00 s",
    ]
