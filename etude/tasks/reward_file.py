"""Read a verifier's reward files: reward.json takes precedence over reward.txt, and only finite numbers are valid."""

import json
import math
from collections.abc import Mapping

from etude.pods.pod import Pod, PodFileError
from etude.tasks.verifier_result import VerifierFailed

REWARD_JSON, REWARD_TXT = "/logs/verifier/reward.json", "/logs/verifier/reward.txt"
MAX_REWARD = 1 << 20  # bytes read of a reward file
Rewards = Mapping[str, float]


async def read_if_exists(pod: Pod, path: str, tail: int | None = None) -> bytes | None:
    """Return a file of a pod, or its last `tail` bytes; None if it cannot be read."""
    try:
        start = max(0, (await pod.stat(path)).size - tail) if tail else 0
        return await pod.read(path, offset=start, length=MAX_REWARD)
    except PodFileError:
        return None


async def read_rewards(pod: Pod, task: str, log: str = "") -> Rewards:
    """Return the rewards of reward.json if it exists, else of reward.txt."""
    for path, parse in ((REWARD_JSON, parse_json), (REWARD_TXT, parse_text)):
        data = await read_if_exists(pod, path)
        if data is not None:
            try:
                return parse(data)
            except ValueError as error:
                raise VerifierFailed("bad-reward", f"{task}: {path}: {error}") from None
    end = "\n".join(log.strip().splitlines()[-10:])
    raise VerifierFailed("no-reward", f"{task}: the verifier wrote neither {REWARD_JSON} nor {REWARD_TXT}:\n{end}")


def parse_text(data: bytes) -> dict[str, float]:
    """Parse reward.txt: one finite number."""
    text = data.decode("utf-8", "replace").strip()
    if not text:
        raise ValueError("the file is empty")
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text[:100]!r} is not a number") from None
    return {"reward": _finite(value)}


def parse_json(data: bytes) -> dict[str, float]:
    """Parse reward.json: a flat object of finite numbers, or one number."""
    if not data.strip():
        raise ValueError("the file is empty")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the file is not JSON ({error})") from None
    rewards = found if isinstance(found, dict) else {"reward": found}
    for key, value in rewards.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{key} is {str(value)[:100]!r}; expected a number")
    return {key: _finite(value) for key, value in rewards.items()}


def _finite(value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{number} is not a finite number")
    return number
