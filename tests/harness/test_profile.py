"""The profile of a checkpoint: what its model was shown in training."""

from pathlib import Path

import pytest

from etude.errors import InputError
from etude.harness.budget import Budget
from etude.harness.profile import AgentProfile
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
