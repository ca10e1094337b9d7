"""Result of a command."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CommandResult:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The single error line of a usage or config error (exit code 2)."""
        assert self.code == 2 and not self.out, self.out + self.err
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1 and self.err.endswith(f"{lines[0]}\n") and "Traceback" not in self.err, self.err
        return lines[0]
