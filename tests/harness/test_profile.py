"""The profile of a checkpoint: what its model was shown in training."""

from pathlib import Path

import pytest

from etude.errors import InputError
from etude.harness.budget import Budget
from etude.harness.model_options import session_changes
from etude.harness.profile import AgentProfile
from etude.harness.summary import SummarySettings
from etude.harness.tool_set import ToolSet


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    tools = ToolSet(tools=("read_file",), short_system_prompt=True)
    profile = AgentProfile(
        tool_set=tools, window=2048, budget=Budget(max_turn_tokens=200), plugins=("etude_nano.plugin",)
    )
    (tmp_path / "agent.json").write_text(profile.to_json())
    assert AgentProfile.load(tmp_path) == profile
    assert AgentProfile.load(tmp_path / "elsewhere") is None


def test_a_damaged_profile_is_an_error_that_names_file_and_key(tmp_path: Path) -> None:
    (tmp_path / "agent.json").write_text('{"window": "wide"}')
    with pytest.raises(InputError, match=r"agent\.json: not an agent profile: window"):
        AgentProfile.load(tmp_path)


def test_a_profile_names_no_directory_of_the_machine_that_reads_it() -> None:
    with pytest.raises(InputError, match=r"tool_set\.root"):
        AgentProfile.from_json('{"tool_set": {"root": "/etc"}}', "http://endpoint/v1")


def test_a_models_sessions_are_those_of_its_profile_unless_options_change_them() -> None:
    trained = AgentProfile(
        tool_set=ToolSet(tools=("read_file",), short_system_prompt=True),
        window=2048,
        budget=Budget(turns=10, max_turn_tokens=200),
        summaries=SummarySettings(mode="off"),
    )
    assert AgentProfile.for_model(trained, 4096, {}) == trained
    changes = session_changes(tools="grep,read_file", temperature=0.0, turns=3)
    used = AgentProfile.for_model(trained, 4096, changes)
    assert (used.tool_set.tools, used.tool_set.short_system_prompt) == (("grep", "read_file"), True)
    assert (used.temperature, used.budget.turns, used.budget.max_turn_tokens) == (0.0, 3, 200)
    assert AgentProfile.for_model(trained, 1024, {}).window == 1024
    with pytest.raises(InputError, match="--window 8,192: this model's window has 4,096 tokens"):
        AgentProfile.for_model(trained, 4096, {"window": 8192})


@pytest.mark.parametrize("window", [256, 2048, 8192, 128_000])
def test_without_a_profile_turns_and_summaries_fit_the_window(window: int) -> None:
    used = AgentProfile.for_model(None, window, {})
    assert used.budget.max_turn_tokens == min(4096, window // 4)
    assert used.summaries.reserve == min(2048, window // 4)
    with pytest.raises(InputError, match="must be less than window"):
        AgentProfile.for_model(None, window, session_changes(max_turn_tokens=window))
