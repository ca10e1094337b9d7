"""What a command left."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """Its exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line that a mistake is told in."""
        assert self.code == 2 and not self.out, self.out + self.err
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and self.err.endswith(f"{lines[0]}\n") and "Traceback" not in self.err, self.err
        return lines[0]
