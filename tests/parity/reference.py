"""What a case should give: a family's own class in one process on the full batch, with torch's clipping and optimizers.

Nothing of ours is imported here: what is computed depends on the model, the question and this file alone, by the hash
of which it is kept (`kept.py`).
"""

import math
import re
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

MAX_GRAD_NORM = 0.5
SETTINGS: dict[str, Any] = {
    "optim": "adamw_torch_fused",
    "learning_rate": 1e-3,
    "weight_decay": 0.1,
    "adam_epsilon": 1e-8,
    "router_aux_loss_per_layer": False,
    "shampoo_frequency": 10,
    "shampoo_start": None,
    "shampoo_block_size": 1024,
}
"""What is read of a run's settings, and what it is by default."""
IGNORED = -100


def question(case: Any) -> dict[str, Any]:
    """All that is read of a case, but for its model; of simple kinds."""
    return {
        "tokens": [sample.tokens for sample in case.samples],
        "is_trained": [sample.is_trained for sample in case.samples],
        "balance": case.balance,
        "z": case.z,
        "steps": case.steps,
        "frozen": case.frozen,
        **{name: case.settings.get(name, default) for name, default in SETTINGS.items()},
    }


def answer(model: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Losses, gradient norms, balancing and z-losses of each step, gradients of the first and weights after the last,
    as transformers names them."""
    of = SimpleNamespace(**asked)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (of.frozen and re.search(of.frozen, name)))
    model.train()
    optimizer: Any = HFMatrices(model, of) if of.optim in ("muon", "shampoo") else hf_adamw(model, of)
    tokens_BS, mask_BS = padded(of.tokens, 0), padded([[1] * len(tokens) for tokens in of.tokens], 0)
    labels_BS = padded([labels_of(*sample) for sample in zip(of.tokens, of.is_trained, strict=True)], IGNORED)
    found: dict[str, list[float]] = {"losses": [], "grad_norms": [], "balances": [], "zs": []}
    grads: dict[str, Tensor] = {}
    asks_router = {"output_router_logits": True} if of.balance > 0 or of.z > 0 else {}
    # to which torch's Muon goes by itself
    in_fp32 = mock.patch.object(Tensor, "bfloat16", Tensor.float) if of.optim == "muon" else nullcontext()
    for step in range(of.steps):
        optimizer.zero_grad()
        out = model(input_ids=tokens_BS, attention_mask=mask_BS, use_cache=False, **asks_router)
        cross_entropy = loss_of(model, out.logits, labels_BS)
        balance = z = torch.zeros(())
        if asks_router:
            balance = _balance_by_layer(model, out, mask_BS) if of.router_aux_loss_per_layer else out.aux_loss
            logits = torch.stack([layer.float()[mask_BS.bool().flatten()] for layer in out.router_logits])
            z = logits.logsumexp(dim=-1).square().mean()
        (cross_entropy + of.balance * balance + of.z * z).backward()
        if step == 0:
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found["grad_norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)))
        with in_fp32:
            optimizer.step()
        # the mean over no target, which has the gradient of a sum over none
        has_targets = bool((labels_BS[:, 1:] != IGNORED).any())
        found["losses"].append(float(cross_entropy.detach()) if has_targets else math.nan)
        found["balances"].append(float(balance.detach()))
        found["zs"].append(float(z.detach()))
    return {**found, "grads": grads, "weights": {n: p.detach().clone() for n, p in model.named_parameters()}}


def padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])


def labels_of(tokens: Sequence[int], is_trained: Sequence[bool]) -> list[int]:
    """As a data set of transformers holds them; the first token is predicted by nothing."""
    trained = [False, *is_trained[1:]]
    return [token if is_one else IGNORED for token, is_one in zip(tokens, trained, strict=True)]


def loss_of(model: Any, logits: Tensor, labels: Tensor) -> Tensor:
    """By the model's own loss function, as `forward(labels=...)` does."""
    num_items = max(int((labels[:, 1:] != IGNORED).sum()), 1)
    loss: Tensor = model.loss_function(logits, labels, logits.shape[-1], num_items_in_batch=num_items)
    return loss


def _balance_by_layer(model: Any, out: Any, mask_BS: Tensor) -> Tensor:
    """HF's balancing loss of each layer alone, averaged."""
    top_k = model.num_experts_per_tok
    losses = [load_balancing_loss_func((layer,), layer.shape[-1], top_k, mask_BS) for layer in out.router_logits]
    return torch.stack([torch.as_tensor(loss) for loss in losses]).mean()


def hf_adamw(model: Any, config: Any, but: Collection[Tensor] = ()) -> torch.optim.AdamW:
    """torch's AdamW for all parameters, `but` some; no weight decay for norms and biases."""
    named = [(n, p) for n, p in model.named_parameters() if not any(p is other for other in but)]
    is_exempt = {n: p.dim() <= 1 or (".experts." in n and n.endswith("_bias")) for n, p in named}
    return torch.optim.AdamW(
        [
            {"params": [p for n, p in named if not is_exempt[n]], "weight_decay": config.weight_decay},
            {"params": [p for n, p in named if is_exempt[n]], "weight_decay": 0.0},
        ],
        lr=config.learning_rate,
        eps=config.adam_epsilon,
    )


class HFMatrices:
    """Muon or Shampoo for every projection and for every expert's gate, up and down; torch's AdamW for the rest."""

    def __init__(self, model: Any, config: Any):
        # (a matrix, sharing memory with the parameter that holds it; that parameter; where in it)
        self.matrices: list[tuple[nn.Parameter, nn.Parameter, Any]] = []
        for module in model.modules():
            if hasattr(module, "is_concatenated"):
                self._add_experts(module)
        for name, p in model.named_parameters():
            if re.search(r"\.layers\..*_proj\w*\.weight$", name):
                self._add(p, ...)
        self.owners = {owner for _, owner, _ in self.matrices}
        self.adamw = hf_adamw(model, config, but=self.owners)
        matrices = [matrix for matrix, _, _ in self.matrices]
        settings: dict[str, Any] = {"lr": config.learning_rate, "weight_decay": config.weight_decay}
        self.optimizer: Any
        if config.optim == "muon":
            self.optimizer = torch.optim.Muon(matrices, **settings, adjust_lr_fn="match_rms_adamw")
        else:
            first = config.shampoo_frequency if config.shampoo_start is None else config.shampoo_start
            every, size = config.shampoo_frequency, config.shampoo_block_size
            self.optimizer = PlainShampoo(matrices, **settings, every=every, first=first, size=size)

    def _add_experts(self, experts: Any) -> None:
        fused, down = experts.gate_up_proj, experts.down_proj
        # which dim of an expert's part has gate and up: of transposed ones, the last
        dim, width = (1 if experts.is_transposed else 0), fused.shape[2 if experts.is_transposed else 1]
        halves = (slice(0, width // 2), slice(width // 2, None))
        for half in halves if experts.is_concatenated else (slice(0, None, 2), slice(1, None, 2)):
            for expert in range(len(fused)):
                self._add(fused, (expert, half) if dim == 0 else (expert, slice(None), half))
        for expert in range(len(down)):
            self._add(down, expert)

    def _add(self, parameter: nn.Parameter, index: Any) -> None:
        self.matrices.append((nn.Parameter(parameter.detach()[index]), parameter, index))

    def zero_grad(self) -> None:
        self.adamw.zero_grad()
        for owner in self.owners:
            owner.grad = None

    def step(self) -> None:
        for matrix, owner, index in self.matrices:
            assert owner.grad is not None
            matrix.grad = owner.grad[index]
        self.optimizer.step()
        self.adamw.step()


class PlainShampoo:
    """Shampoo of whole matrices, written down from Shi et al. 2023 (arXiv 2309.06497), algorithms 1 to 3: everything in
    double; each block of a matrix by itself, as a matrix would be."""

    def __init__(
        self, matrices: Sequence[nn.Parameter], lr: float, weight_decay: float, every: int, first: int, size: int
    ):
        self.lr, self.weight_decay, self.every, self.first = lr, weight_decay, every, first
        self.blocks = [
            (matrix, slice(i, i + size), slice(j, j + size))
            for matrix in matrices
            for i in range(0, matrix.shape[0], size)
            for j in range(0, matrix.shape[1], size)
        ]
        self.states = [_Block(matrix[rows, columns]) for matrix, rows, columns in self.blocks]
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        renewed = self.steps >= self.first and (self.steps - self.first) % self.every == 0
        for (matrix, rows, columns), state in zip(self.blocks, self.states, strict=True):
            assert matrix.grad is not None
            change = state.change(matrix.grad[rows, columns].double(), self.steps, renewed, self.steps >= self.first)
            block = matrix.detach()[rows, columns]
            block.copy_(block * (1 - self.lr * self.weight_decay) - self.lr * change)


class _Block:
    def __init__(self, block: Tensor):
        num_rows, num_columns = block.shape
        self.mean = torch.zeros(num_rows, num_columns, dtype=torch.double)
        self.square = torch.zeros_like(self.mean)
        self.left = torch.zeros(num_rows, num_rows, dtype=torch.double)
        self.right = torch.zeros(num_columns, num_columns, dtype=torch.double)

    def change(self, grad: Tensor, step: int, renewed: bool, begun: bool) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * grad
        self.square = 0.999 * self.square + 0.001 * grad**2
        self.left = 0.999 * self.left + 0.001 * grad @ grad.T
        self.right = 0.999 * self.right + 0.001 * grad.T @ grad
        mean, square = self.mean / (1 - 0.9**step), self.square / (1 - 0.999**step)
        adam = mean / (square.sqrt() + 1e-8)
        if not begun:
            return adam
        if renewed:
            self.roots = [_root(factor / (1 - 0.999**step)) for factor in (self.left, self.right)]
        change = self.roots[0] @ mean @ self.roots[1]
        return change / change.norm() * adam.norm()


def _root(factor: Tensor) -> Tensor:
    """The power -1/4, by the square root of a square root of the inverse."""
    norm = torch.linalg.matrix_norm(factor, 2)
    inverse = torch.linalg.inv(factor + 1e-5 * norm * torch.eye(len(factor), dtype=torch.double))
    return _square_root(_square_root(inverse))


def _square_root(matrix: Tensor) -> Tensor:
    left, values, right = torch.linalg.svd((matrix + matrix.T) / 2)
    return left * values.sqrt() @ right
