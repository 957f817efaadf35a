"""AdamW on float32 master weights, and the learning-rate schedule.

A bfloat16 weight loses any update smaller than about 1/256 of itself, and the updates of RL are smaller. So master
weights, moments and accumulated gradients are float32, and the model's weights are a rounded copy of the masters. A
float32 model is its own master unless its values must be rounded. Of a sharded model, each rank steps its own parts,
which are plain tensors. The state is tensors by parameter name, sharded like the model, and resumes bit for bit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from etude.errors import InputError
from etude.parallel.tensors import like, local_part, total_norm

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

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        settings: AdamSettings,
        group: dist.ProcessGroup | None = None,
        stored_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.settings, self.group = settings, group  # ranks that have one copy of the parameters together
        self.stored_dtype = stored_dtype  # of the weights in checkpoints: if it is narrower, the state has the masters
        named = [(f"{module}.{name}", p) for module, m in modules.items() for name, p in m.named_parameters()]
        self.parameters = {name: p for name, p in named if p.requires_grad}
        if not self.parameters:
            raise InputError("there is nothing to train: no parameter requires a gradient")
        # A float32 model whose values must be rounded is not its own master.
        rounded = settings.round_to_bfloat16
        self.copied = {n for n, p in self.parameters.items() if p.dtype != torch.float32 or rounded}
        parts = {name: local_part(parameter).detach() for name, parameter in self.parameters.items()}
        self.masters = {name: part.float().clone() if name in self.copied else part for name, part in parts.items()}
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
        for name in self.copied:
            master, parameter = self.masters[name], self.parameters[name]
            if parameter.grad is None:
                continue
            if master.grad is None:
                master.grad = local_part(parameter.grad).float()
            else:
                master.grad += local_part(parameter.grad)
            parameter.grad = None

    def step(self, lr_factor: float) -> dict[str, Tensor]:
        """Clip, step at `lr_factor` of the learning rate and update the model; return the norms before clipping."""
        for name in self.masters.keys() - self.copied:  # autograd has summed these
            if (gradient := self.parameters[name].grad) is not None:
                self.masters[name].grad, self.parameters[name].grad = local_part(gradient), None
        norms = {}
        for module in dict.fromkeys(name.partition(".")[0] for name in self.masters):
            own = [m for name, m in self.masters.items() if name.partition(".")[0] == module and m.grad is not None]
            norms[module] = total_norm([m.grad for m in own if m.grad is not None], self.group)
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
        for name in self.copied:
            master = self.masters[name]
            local_part(self.parameters[name]).copy_(master.bfloat16() if self.settings.round_to_bfloat16 else master)

    def state_dict(self) -> dict[str, Tensor]:
        """Return masters, both moments and the step count, by parameter name, and the recent norms, by module."""
        state = {f"{module}/norms": torch.tensor(list(norms)) for module, norms in self.recent_norms.items() if norms}
        for name, master in self.masters.items():
            exact = name not in self.copied and self.stored_dtype == torch.float32
            parts = {} if exact else {"master": master}
            parts |= self._moments(master)
            whole = self.parameters[name].detach()
            state |= {
                f"{name}/{key}": value if value.dim() == 0 else like(value, whole) for key, value in parts.items()
            }
        return {key: value.detach() for key, value in state.items()}

    def _moments(self, master: Tensor) -> dict[str, Tensor]:
        """Return Adam's state of a parameter, which torch makes at its first step only."""
        state: dict[str, Tensor] = self.adam.state[master]
        if not state:  # fused Adam keeps its step counter on the device of the weights
            state |= {"step": torch.zeros((), device=master.device)}
            state |= {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        for module, recent in self.recent_norms.items():
            recent.extend(state.get(f"{module}/norms", torch.empty(0)).tolist())
        for name, master in self.masters.items():
            found = {key.rsplit("/", 1)[1]: value for key, value in state.items() if key.rsplit("/", 1)[0] == name}
            own = {key: local_part(value) for key, value in found.items()}
            if not own:
                raise InputError(f"the optimizer state has no entry for {name}; it belongs to another model")
            with torch.no_grad():
                if "master" in own:
                    master.copy_(own.pop("master"))
            # fused Adam keeps its step counter on the device of the weights
            self.adam.state[master] = {key: value.to(master.device) for key, value in own.items()}
        self._copy_to_model()
