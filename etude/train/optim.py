"""AdamW on float32 master weights, and the learning-rate schedule.

A bfloat16 weight loses any update smaller than about 1/256 of itself, and the updates of RL are smaller. So master
weights, moments and accumulated gradients are float32, and the model's weights are a rounded copy of the masters. A
float32 model is its own master unless its values must be rounded. The state is plain tensors by parameter name: it is
stored as safetensors and resumes bit for bit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch
from torch import Tensor, nn

from etude.errors import InputError

Decay = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True)
class AdamSettings:
    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0  # global gradient-norm limit; 0: none
    max_grad_norm_ratio: float = 0.0  # the same, as a multiple of the median norm of the recent steps; 0: none
    round_to_bfloat16: bool = False  # round the values of a float32 model to bfloat16, as samplers get them


@dataclass(frozen=True)
class LRSchedule:
    """Learning rate as a factor of its peak: linear warm-up, then decay to `final_fraction` at the last step."""

    steps: int
    warmup: int = 0
    decay: Decay = "cosine"
    final_fraction: float = 0.1

    def factor(self, step: int) -> float:
        """Return the factor of `step`, counted from 0."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.decay == "constant":
            return 1.0
        done = (step - self.warmup + 1) / max(1, self.steps - self.warmup)
        shape = (1 + math.cos(math.pi * done)) / 2 if self.decay == "cosine" else 1 - done
        return self.final_fraction + (1 - self.final_fraction) * shape


RECENT_STEPS, MIN_RECENT_STEPS = 32, 4  # whose median a relative limit is a multiple of


class MasterAdamW:
    """AdamW over several modules. Each module is clipped by its own gradient norm, so that training one together with
    another does not change the other's updates."""

    def __init__(self, modules: Mapping[str, nn.Module], settings: AdamSettings) -> None:
        self.settings = settings
        named = [(f"{module}.{name}", p) for module, m in modules.items() for name, p in m.named_parameters()]
        self.parameters = {name: p for name, p in named if p.requires_grad}
        if not self.parameters:
            raise InputError("there is nothing to train: no parameter requires a gradient")
        # A float32 model whose values must be rounded is not its own master.
        self.masters = {
            n: p if p.dtype == torch.float32 and not settings.round_to_bfloat16 else p.detach().float().clone()
            for n, p in self.parameters.items()
        }
        self._copy_to_model()
        self.limits: dict[str, float] = {}  # gradient-norm limits of the last step, by module
        self.recent_norms = {module: deque[float](maxlen=RECENT_STEPS) for module in modules}
        matrices = [m for m in self.masters.values() if m.dim() > 1]
        vectors = [m for m in self.masters.values() if m.dim() <= 1]  # norms and biases are not decayed
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )

    def accumulate_gradients(self) -> None:
        """Add the model's gradients to the masters' in float32 and clear them. Call once after every backward."""
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if parameter.grad is None or master is parameter:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad += parameter.grad
            parameter.grad = None

    def step(self, lr_factor: float) -> dict[str, Tensor]:
        """Clip, step at `lr_factor` of the learning rate and update the model; return the norms before clipping."""
        norms = {}
        for module in dict.fromkeys(name.partition(".")[0] for name in self.masters):
            own = [m for name, m in self.masters.items() if name.partition(".")[0] == module and m.grad is not None]
            norms[module] = torch.nn.utils.get_total_norm([m.grad for m in own if m.grad is not None])
            self.limits[module] = self._limit(module, norms[module])
            if self.limits[module] < math.inf:
                torch.nn.utils.clip_grads_with_norm_(own, self.limits[module], norms[module])
        for group in self.adam.param_groups:
            group["lr"] = self.settings.learning_rate * lr_factor
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self._copy_to_model()
        return norms

    def _limit(self, module: str, norm: Tensor) -> float:
        """Return the gradient-norm limit of a step, and record its norm for later ones."""
        limit, ratio = self.settings.max_grad_norm or math.inf, self.settings.max_grad_norm_ratio
        if not ratio:
            return limit
        recent = self.recent_norms[module]
        if len(recent) >= MIN_RECENT_STEPS:
            limit = min(limit, ratio * median(recent))
        if norm > 0:  # a step without a gradient says nothing about those that have one
            recent.append(norm.item())
        return limit

    @torch.no_grad()
    def _copy_to_model(self) -> None:
        """Copy the masters into the model's weights, rounded to the model's dtype."""
        for name, parameter in self.parameters.items():
            if (master := self.masters[name]) is not parameter:
                parameter.copy_(master.bfloat16() if self.settings.round_to_bfloat16 else master)

    def state_dict(self) -> dict[str, Tensor]:
        """Return masters, both moments and the step count, by parameter name, and the recent norms, by module."""
        state = {f"{module}/norms": torch.tensor(list(norms)) for module, norms in self.recent_norms.items() if norms}
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                state[f"{name}/master"] = master
            state |= {f"{name}/{key}": value for key, value in self.adam.state[master].items()}
        return {key: value.detach() for key, value in state.items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        for module, recent in self.recent_norms.items():
            recent.extend(state.get(f"{module}/norms", torch.empty(0)).tolist())
        for name, master in self.masters.items():
            own = {key.rsplit("/", 1)[1]: value for key, value in state.items() if key.rsplit("/", 1)[0] == name}
            if not own:
                raise InputError(f"the optimizer state has no entry for {name}; it belongs to another model")
            with torch.no_grad():
                if "master" in own:
                    master.copy_(own.pop("master"))
            # fused Adam keeps its step counter on the device of the weights
            self.adam.state[master] = {key: value.to(master.device) for key, value in own.items()}
        self._copy_to_model()
