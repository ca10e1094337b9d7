"""A walk on a grid: answers are moves, observations are the new grid or what is around the walker, in words."""

import re
from typing import Any, Literal

from tunekit.environments.base import Environment

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
MOVE = re.compile(rf"\b({'|'.join(MOVES)})\b", re.IGNORECASE)
REQUEST = "Answer with one move: up, down, left or right."
Observation = Literal["map", "text"]
INSTRUCTIONS: dict[Observation, str] = {"map": f"You are at A. Reach G; # is a wall. {REQUEST}", "text": REQUEST}


class GridWorld(Environment):
    """Reward 1 if the walk reaches the goal. Needs no tools: the last move named in an answer is made."""

    def __init__(self, observation: Observation = "map") -> None:
        self.observation: Observation = observation
        self.grid: list[str] = []
        self.position = self.goal = (0, 0)
        self.num_moves = 0

    def reset(self, grid: str | list[str], **columns: Any) -> str:
        self.grid = grid.strip("\n").split("\n") if isinstance(grid, str) else list(grid)
        self.position, self.goal = self._find("S"), self._find("G")
        return f"\n{INSTRUCTIONS[self.observation]}\n{self._observe()}"

    def _find(self, mark: str) -> tuple[int, int]:
        """Row and column of a mark."""
        cells = [(y, x) for y, row in enumerate(self.grid) for x, cell in enumerate(row) if cell == mark]
        if len(cells) != 1:
            raise ValueError(f"the grid must have one {mark}, got {len(cells)}")
        return cells[0]

    def _observe(self) -> str:
        return self._describe() if self.observation == "text" else self._draw()

    def _describe(self) -> str:
        """The way to the goal and the walls next to the current position, as in BabyAI-Text (arXiv:2302.02662)."""
        down, right = self.goal[0] - self.position[0], self.goal[1] - self.position[1]
        distances = {"up": -down, "down": down, "left": -right, "right": right}
        goal = ", ".join(f"{distance} {move}" for move, distance in distances.items() if distance > 0)
        walls = ", ".join(move for move in MOVES if self._is_wall(self._next(move)))
        return f"Goal: {goal}. Walls: {walls or 'none'}."

    def _next(self, move: str) -> tuple[int, int]:
        """Row and column after a move."""
        down, right = MOVES[move]
        return self.position[0] + down, self.position[1] + right

    def _is_wall(self, cell: tuple[int, int]) -> bool:
        """Whether a cell is a wall or outside of the grid."""
        y, x = cell
        return not (0 <= y < len(self.grid) and 0 <= x < len(self.grid[y])) or self.grid[y][x] == "#"

    def _draw(self) -> str:
        """The grid with the current position."""
        rows = [list(row.replace("S", ".")) for row in self.grid]
        rows[self.position[0]][self.position[1]] = "A"
        return "\n".join("".join(row) for row in rows)

    def step(self, answer: str) -> str | None:
        moves = MOVE.findall(answer)
        if not moves:
            return REQUEST
        self.num_moves += 1
        cell = self._next(moves[-1].lower())
        if self._is_wall(cell):
            return f"There is a wall.\n{self._observe()}"
        self.position = cell
        return None if self.position == self.goal else self._observe()

    def get_reward(self) -> float:
        return float(self.position == self.goal)

    def get_metrics(self) -> dict[str, float]:
        return {"num_moves": float(self.num_moves)}
