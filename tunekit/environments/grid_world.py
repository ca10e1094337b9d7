"""A walk on a grid of text: answers are moves, observations are the new grid."""

import re
from typing import Any

from tunekit.environments.base import Environment

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
MOVE = re.compile(rf"\b({'|'.join(MOVES)})\b", re.IGNORECASE)
INSTRUCTIONS = "You are at A. Reach G; # is a wall. Answer with one move: up, down, left or right."


class GridWorld(Environment):
    """Reward 1 if the walk reaches the goal. Needs no tools: the last move named in an answer is made."""

    def __init__(self) -> None:
        self.grid: list[str] = []
        self.position = self.goal = (0, 0)
        self.num_moves = 0

    def reset(self, grid: str | list[str], **columns: Any) -> str:
        self.grid = grid.strip("\n").split("\n") if isinstance(grid, str) else list(grid)
        self.position, self.goal = self._find("S"), self._find("G")
        return f"\n{INSTRUCTIONS}\n{self._draw()}"

    def _find(self, mark: str) -> tuple[int, int]:
        """Row and column of a mark."""
        cells = [(y, x) for y, row in enumerate(self.grid) for x, cell in enumerate(row) if cell == mark]
        if len(cells) != 1:
            raise ValueError(f"the grid must have one {mark}, got {len(cells)}")
        return cells[0]

    def _draw(self) -> str:
        """The grid with the current position."""
        rows = [list(row.replace("S", ".")) for row in self.grid]
        rows[self.position[0]][self.position[1]] = "A"
        return "\n".join("".join(row) for row in rows)

    def step(self, answer: str) -> str | None:
        moves = MOVE.findall(answer)
        if not moves:
            return "Answer with one move: up, down, left or right."
        self.num_moves += 1
        down, right = MOVES[moves[-1].lower()]
        y, x = self.position[0] + down, self.position[1] + right
        if not (0 <= y < len(self.grid) and 0 <= x < len(self.grid[y])) or self.grid[y][x] == "#":
            return f"There is a wall.\n{self._draw()}"
        self.position = (y, x)
        return None if self.position == self.goal else self._draw()

    def get_reward(self) -> float:
        return float(self.position == self.goal)

    def get_metrics(self) -> dict[str, float]:
        return {"num_moves": float(self.num_moves)}
