"""AdamW on float32 master weights, and the learning rate over a run.

A bfloat16 weight forgets any step smaller than about 1/256 of itself, and RL's steps are smaller; so masters, moments
and accumulated gradients are float32, and the model's own weights are their rounded copy. A float32 model is its own
master, unless it has to hold rounded values. State is plain tensors by parameter name: it saves as safetensors and
resumes to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
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
    clip: float = 1.0  # global gradient norm; 0 turns clipping off
    rounded: bool = False  # hold the values of a float32 model to bfloat16, as samplers will get them


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a factor of its peak: up over `warmup` steps, down to `final` at the last one."""

    steps: int
    warmup: int = 0
    decay: Decay = "cosine"
    final: float = 0.1

    def factor(self, step: int) -> float:
        """Of step 0, 1, ... steps - 1."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.decay == "constant":
            return 1.0
        done = (step - self.warmup + 1) / max(1, self.steps - self.warmup)
        shape = (1 + math.cos(math.pi * done)) / 2 if self.decay == "cosine" else 1 - done
        return self.final + (1 - self.final) * shape


class MasterAdamW:
    """Each module is clipped by its own norm, so that training one beside another does not change the other's steps."""

    def __init__(self, modules: Mapping[str, nn.Module], settings: AdamSettings) -> None:
        self.settings = settings
        named = [(f"{module}.{name}", p) for module, m in modules.items() for name, p in m.named_parameters()]
        self.parameters = {name: p for name, p in named if p.requires_grad}
        if not self.parameters:
            raise InputError("there is nothing to train: no parameter asks for a gradient")
        own = settings.rounded  # a float32 model that must be rounded is not its own master
        self.masters = {
            n: p if p.dtype == torch.float32 and not own else p.detach().float().clone()
            for n, p in self.parameters.items()
        }
        self._round()
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

    def collect(self) -> None:
        """Add the model's gradients to the masters' in float32 and clear them; once after every backward."""
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if parameter.grad is None or master is parameter:
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad += parameter.grad
            parameter.grad = None

    def step(self, factor: float) -> dict[str, Tensor]:
        """Clip, step at `factor` of the learning rate, round into the model; returns each module's norm before that."""
        norms = {}
        for module in dict.fromkeys(name.partition(".")[0] for name in self.masters):
            own = [m for name, m in self.masters.items() if name.partition(".")[0] == module and m.grad is not None]
            norms[module] = torch.nn.utils.get_total_norm([m.grad for m in own if m.grad is not None])
            if self.settings.clip:
                torch.nn.utils.clip_grads_with_norm_(own, self.settings.clip, norms[module])
        for group in self.adam.param_groups:
            group["lr"] = self.settings.learning_rate * factor
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self._round()
        return norms

    @torch.no_grad()
    def _round(self) -> None:
        """The model's weights from their masters."""
        for name, parameter in self.parameters.items():
            if (master := self.masters[name]) is not parameter:
                parameter.copy_(master.bfloat16() if self.settings.rounded else master)

    def state(self) -> dict[str, Tensor]:
        """Masters, both moments and the step count, by parameter name."""
        found = {}
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                found[f"{name}/master"] = master
            found |= {f"{name}/{key}": value for key, value in self.adam.state[master].items()}
        return {key: value.detach() for key, value in found.items()}

    def restore(self, state: dict[str, Tensor]) -> None:
        for name, master in self.masters.items():
            mine = {key.rsplit("/", 1)[1]: value for key, value in state.items() if key.rsplit("/", 1)[0] == name}
            if not mine:
                raise InputError(f"the optimizer state holds nothing for {name}; it belongs to another model")
            with torch.no_grad():
                if "master" in mine:
                    master.copy_(mine.pop("master"))
            # fused Adam keeps its step counter on the device of the weights
            self.adam.state[master] = {key: value.to(master.device) for key, value in mine.items()}
        self._round()
