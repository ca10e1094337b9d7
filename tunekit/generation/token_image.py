"""Picture of the tokens of an answer and their probabilities. Apart, because matplotlib takes a second to import."""

import io
from collections.abc import Iterator, Sequence

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from tunekit.config.secrets import escape_control
from tunekit.data.inspect.token_display import decode_groups, show_whitespace
from tunekit.data.tokenizer import Tokenizer
from tunekit.generation.token_probabilities import TokenProbability

CHARACTERS_PER_LINE = 90
CHARACTER_WIDTH, LINE_HEIGHT, MARGIN = 0.1, 0.42, 0.3  # inches
COLORS = colormaps["RdYlGn"]
Cell = tuple[int, int, str, float]  # line, first character, text, probability


def draw_probabilities(
    tokenizer: Tokenizer, answer: Sequence[TokenProbability], title: str, format: str = "png"
) -> bytes:
    """Image file of the tokens, each with its probability below, from red (0%) over yellow to green (100%)."""
    cells = [*place_cells(tokenizer, answer)]
    num_lines = 1 + max((line for line, *_ in cells), default=0)
    width = CHARACTERS_PER_LINE * CHARACTER_WIDTH + 2 * MARGIN
    height = (num_lines + 1) * LINE_HEIGHT + 2 * MARGIN
    figure = Figure(figsize=(width, height), dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    axes.text(MARGIN, MARGIN + LINE_HEIGHT / 3, title, fontsize=10, va="center", parse_math=False)
    for line, start, text, probability in cells:
        x, y = MARGIN + start * CHARACTER_WIDTH, MARGIN + (line + 1) * LINE_HEIGHT
        size = len(text) * CHARACTER_WIDTH
        color = COLORS(0.15 + 0.7 * probability)
        axes.add_patch(Rectangle((x, y - 0.16), size - 0.02, 0.2, color=color, alpha=0.6, linewidth=0))
        style = {"family": "monospace", "ha": "center", "parse_math": False}
        axes.text(x + size / 2, y - 0.06, text, fontsize=8.5, va="center", **style)
        axes.text(x + size / 2, y + 0.05, f"{probability:.0%}", fontsize=4.5, va="top", color="#555", **style)
    file = io.BytesIO()
    figure.savefig(file, format=format)
    return file.getvalue()


def place_cells(tokenizer: Tokenizer, answer: Sequence[TokenProbability]) -> Iterator[Cell]:
    """Position of each token. Tokens that share a character are one cell; a token that ends a line breaks it."""
    line, column, index = 0, 0, 0
    for ids, text, special in decode_groups(tokenizer, [item.token for item in answer]):
        probability = min(item.probability for item in answer[index : index + len(ids)])
        index += len(ids)
        shown = escape_control(text if special else show_whitespace(text, False, False))
        shown = shown.replace("\n", "").expandtabs(4)[:CHARACTERS_PER_LINE] or " "
        size = max(len(shown), 3)  # space for the probability
        if column + size > CHARACTERS_PER_LINE:
            line, column = line + 1, 0
        yield line, column, shown.center(size), probability
        column += size
        if "\n" in text:
            line, column = line + 1, 0
