"""Shampoo of whole matrices in one process, written down from Shi et al. 2023 (arXiv 2309.06497), algorithms 1 to 3."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class PlainShampoo:
    """Everything in double; each block of a matrix by itself, as a matrix would be."""

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
