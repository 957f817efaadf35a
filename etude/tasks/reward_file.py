"""What a verifier leaves: reward.json before reward.txt, finite numbers only. Anything else is no reward at all."""

import json
import math
from collections.abc import Mapping

from etude.pods.pod import Pod, PodFileError
from etude.tasks.verifier_result import GradingFailed

REWARD_JSON, REWARD_TXT = "/logs/verifier/reward.json", "/logs/verifier/reward.txt"
MAX_REWARD = 1 << 20  # bytes of a reward file that are read
Rewards = Mapping[str, float]


async def read_if_there(pod: Pod, path: str, tail: int | None = None) -> bytes | None:
    """A file of a pod, or the end of it; None if it cannot be read."""
    try:
        start = max(0, (await pod.stat(path)).size - tail) if tail else 0
        return await pod.read(path, offset=start, length=MAX_REWARD)
    except PodFileError:
        return None


async def read_rewards(pod: Pod, task: str, log: str = "") -> Rewards:
    """What the verifier wrote: reward.json if it is there, else reward.txt."""
    for path, parse in ((REWARD_JSON, parse_json), (REWARD_TXT, parse_text)):
        data = await read_if_there(pod, path)
        if data is not None:
            try:
                return parse(data)
            except ValueError as error:
                raise GradingFailed("bad-reward", f"{task}: {path}: {error}") from None
    end = "\n".join(log.strip().splitlines()[-10:])
    raise GradingFailed("no-reward", f"{task}: the verifier wrote neither {REWARD_JSON} nor {REWARD_TXT}:\n{end}")


def parse_text(data: bytes) -> dict[str, float]:
    """reward.txt: one finite number."""
    text = data.decode("utf-8", "replace").strip()
    if not text:
        raise ValueError("it is empty")
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text[:100]!r} is not a number") from None
    return {"reward": _finite(value)}


def parse_json(data: bytes) -> dict[str, float]:
    """reward.json: a flat object of finite numbers, or one number."""
    if not data.strip():
        raise ValueError("it is empty")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from None
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
