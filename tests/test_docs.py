"""Examples in the docs are correct: commands parse and name existing files, configs load, links have targets, code
runs.
"""

import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from transformers import AutoModelForCausalLM, HeliumConfig

from tunekit import assets, build
from tunekit.adapters.config import NoAdapter
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.cli import main as cli
from tunekit.cli import recipe_loader, registry, torchtune_run
from tunekit.cli.commands import run as run_verb
from tunekit.config import schema
from tunekit.config.choices import ChoiceRegistry, iter_slots
from tunekit.config.dump import dump_yaml
from tunekit.config.load import load_config
from tunekit.config.yaml_parser import read_recipe
from tunekit.data.dataloader.build import build_dataloader as read
from tunekit.data.tokenizer import Tokenizer
from tunekit.distributed.context import DistributedContext
from tunekit.memory.config import MemoryConfig
from tunekit.models.families.registry import FAMILIES, Family
from tunekit.models.precision import PrecisionConfig
from tunekit.quantization.config import NoQuantization
from tunekit.recipes.sft import SFTConfig

ROOT = Path(__file__).parent.parent
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "tunekit/bundled/README.md")
}
OPTIONS = {path.stem: path for path in (ROOT / "docs/options").glob("*.md")}
BASE = {"model": "tunekit/nano", "data": {"kind": "text", "source": "rows.jsonl"}, "output_dir": "runs/docs"}
PROMPTS = {"prompts": ["Why?"]}  # of recipes that answer
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXECUTED_VERBS = (
    "ls",
    "cp",
    "cat",
    "options",
    "completion",
    "import",
)  # fast verbs without downloads: the tests run them


def code_blocks(page: str, *kinds: str) -> list[str]:
    return [text for kind, text in FENCE.findall(PAGES[page]) if kind in kinds]


def inline_code(page: str) -> list[str]:
    """Inline code. On from_torchtune.md the first table column shows torchtune syntax and is skipped."""
    text = FENCE.sub("", PAGES[page])
    text = re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE) if page.endswith("from_torchtune.md") else text
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", text)]


def tune_commands(page: str) -> list[list[str]]:
    """Arguments of each `tune` command of a page, up to a redirection or the next command."""
    lines = [line for block in code_blocks(page, "sh") for line in block.splitlines()]
    lines += [line[2:] for block in code_blocks(page, "") for line in block.splitlines() if line.startswith("$ ")]
    commands = []
    for line in [*lines, *inline_code(page)]:
        if line.startswith("tune ") and "..." not in line:
            args = shlex.split(line, comments=True)[1:]
            end = next((i for i, word in enumerate(args) if word in (">", "&&", "|")), len(args))
            commands.append(args[:end])
    return commands


@pytest.fixture
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_files(page: str) -> None:
    """Write the files of a page: code blocks whose first line is a comment with a file name."""
    for text in code_blocks(page, "yaml", "yml", "python"):
        if name := re.match(r"# (\w+\.(?:yaml|py))\n", text):
            Path(name[1]).write_text(text)


@cache
def resolved_configs() -> dict[str, str]:
    """Resolved config of each sft config, by output directory."""
    sft_configs = {name: path for name, path in registry.list_configs().items() if read_recipe(path) == "sft"}
    return {
        cfg.output_dir: dump_yaml(cfg, "sft") for cfg in (load_config(SFTConfig, path) for path in sft_configs.values())
    }


def check_command(command: list[str]) -> None:
    """Run the command if it is fast. Otherwise parse its arguments and load its config."""
    if command[0] in cli.VERBS and len(command) == 1 or command[1:] in ([name] for name in registry.list_recipes()):
        return  # only the name of a verb, or of a recipe
    top, parsers = cli.make_parser()
    args, unknown_args = top.parse_known_args(command)
    if args.verb is None:
        return
    cli._merge_overrides(args, unknown_args, parsers[args.verb])
    if args.verb in EXECUTED_VERBS:
        cli.dispatch_command(command)
    elif args.verb in ("run", "validate"):
        if args.verb == "run":
            args.words = tuple(command)
            torchtune_run.translate(args)
            run_verb.resolve_recipe_and_config(args)
        path = registry.find_config(args.config)
        recipe = args.recipe or read_recipe(path)
        assert recipe is not None, f"{args.config} names no recipe"
        assert recipe.endswith(".py") or recipe == read_recipe(path)
        load_config(
            recipe_loader.load_recipe(recipe).CONFIG, path, args.overrides, [Path(file) for file in args.imports]
        )


def test_commands_parse_and_name_existing_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for page in PAGES:
        work_dir = tmp_path / page.replace("/", "-")
        work_dir.mkdir()
        monkeypatch.chdir(work_dir)
        write_files(page)
        for directory, text in resolved_configs().items():
            (work_dir / directory).mkdir(parents=True)
            (work_dir / directory / "config.yaml").write_text(text)
        for args in tune_commands(page):
            if "rnk" not in str(args):  # the error in the README is checked by another test
                check_command(args)


def test_job_files_are_valid(work_dir: Path) -> None:
    """YAML of schedulers, whose `tune` commands have variables as values, and Python files of Ray."""
    page = "docs/clusters.md"
    for text in code_blocks(page, "py"):
        compile(text, page, "exec")
    texts = code_blocks(page, "yml")
    for text in texts:
        assert yaml.safe_load(text)
        for command in re.findall(r"exec tune (.*)", text.replace("\\\n", ""), re.DOTALL):  # up to the end of the file
            check_command(shlex.split(re.sub(r"\$\(.*?\)|\$\w+", "2", command)))
    assert len(texts) == 3


def test_readme_shows_each_verb() -> None:
    verbs = {args[0] for args in tune_commands("README.md") if args}
    assert set(cli.VERBS) <= verbs


def test_error_in_the_readme_matches_the_output(capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = (block for block in code_blocks("README.md", "") if "rnk" in block)
    command, _, expected = text.partition("\n")
    assert cli.main(shlex.split(command)[2:]) == 2
    assert capsys.readouterr().err == expected


def config_fragments(page: str) -> Iterator[dict[str, Any]]:
    """Configs and parts of configs as data: YAML blocks, and inline code such as `adapter: lora`."""
    keys = tuple(f"{key}: " for key in SFTConfig.__dataclass_fields__)
    texts = [*code_blocks(page, "yaml"), *(text for text in inline_code(page) if text.startswith(keys))]
    for text in texts:
        if not text.startswith("global_batch_size: 16, micro_batch"):  # two keys in a sentence
            yield yaml.safe_load(text)


def test_configs_load() -> None:
    for page in PAGES:
        for fragment in config_fragments(page):
            cls = recipe_loader.load_recipe(fragment.pop("recipe", "sft")).CONFIG
            base = {key: value for key, value in (BASE | PROMPTS).items() if key in cls.__dataclass_fields__}
            load_config(cls, base | ({"adapter": "lora"} if "quantization" in fragment else {}) | fragment)


@cache
def known_keys() -> frozenset[str]:
    """Config keys of all recipes."""
    slots = (
        slot
        for name in registry.list_recipes()
        for slot in iter_slots(recipe_loader.load_recipe(name).CONFIG, ChoiceRegistry())
    )
    return frozenset(".".join(path) for path, _ in slots)


def test_keys_exist() -> None:
    known = known_keys()
    sections = {key.partition(".")[0] for key in known}
    files = (".yaml", ".json", ".jsonl", ".jinja", ".py", ".safetensors")
    keys = [(page, text) for page in PAGES for text in inline_code(page) if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", text)]
    unknown = [(page, text) for page, text in keys if text.partition(".")[0] in sections and text not in known]
    assert not [(page, text) for page, text in unknown if Path(text).suffix not in files]


def has_target(page: str, link: str) -> bool:
    """Whether the file of a relative link exists and has its heading."""
    file, _, anchor = link.partition("#")
    path = (ROOT / page).parent / file if file else ROOT / page
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE) if anchor and path.exists() else []
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    return path.exists() and (not anchor or anchor in anchors)


def test_links_have_targets() -> None:
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", PAGES[page]))]
    assert links and not [(page, link) for page, link in links if "://" not in link and not has_target(page, link)]


def test_option_pages_are_current() -> None:
    assert set(OPTIONS) == set(registry.list_recipes())
    for name, path in OPTIONS.items():
        expected = schema.options_markdown(recipe_loader.load_recipe(name).CONFIG) + "\n"
        assert path.read_text() == expected, f"tune options {name} --all > docs/options/{name}.md"


def test_each_key_is_in_a_config_or_on_a_page() -> None:
    pages = [text for name, text in PAGES.items() if name != "CHANGELOG.md"]
    files = [path for folder in ("configs", "notebooks") for path in (ROOT / folder).rglob("*") if path.is_file()]
    words = set(re.findall(r"\w+", "\n".join([*pages, *(path.read_text() for path in files)])))
    configs = [recipe_loader.load_recipe(name).CONFIG for name in registry.list_recipes()]
    keys = {path[-1] for config in configs for path, _ in iter_slots(config, ChoiceRegistry())} - {"0"}
    assert keys and not keys - words


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_python_blocks_run(page: str, work_dir: Path) -> None:
    for text in code_blocks(page, "python"):
        exec(compile(text, page, "exec"), {"__name__": f"docs_{len(text)}"})


def test_example_rows_match_the_configs_after_them(work_dir: Path) -> None:
    configs = [text for text in code_blocks("docs/data.md", "yaml") if text.startswith("data:")]
    rows = code_blocks("docs/data.md", "json")
    folder = assets.model_dir("tunekit/nano")
    assert folder is not None and len(configs) == len(rows)
    for config, text in zip(configs, rows, strict=True):
        fragment = yaml.safe_load(config)
        Path(fragment["data"]["source"]).write_text(text)
        data = read(load_config(SFTConfig, BASE | fragment).data, Tokenizer.open(folder), 1, 1, DistributedContext())
        assert len(data.documents) == len(text.splitlines()) and all(json.loads(line) for line in text.splitlines())


def test_mixture_and_streaming_configs_load() -> None:
    texts = [
        text for text in code_blocks("docs/data.md", "yaml") if "kind: mixture" in text or "streaming: true" in text
    ]
    configs = [load_config(SFTConfig, BASE | yaml.safe_load(text)) for text in texts]
    assert sum(config.data.packing for config in configs) == 2 and len(configs) == 3


def test_example_loss_with_gamma_0_is_cross_entropy(work_dir: Path) -> None:
    write_files("docs/configs.md")
    imports = [Path("my_losses.py")]
    torch.manual_seed(0)
    logits, targets = torch.randn(5, 11), torch.randint(11, (5,))
    unfocused, focal = (
        load_config(SFTConfig, BASE, ["loss=focal", f"loss.gamma={gamma}"], imports).loss.measure(logits, targets)
        for gamma in (0, 2)
    )
    torch.testing.assert_close(unfocused, F.cross_entropy(logits, targets, reduction="sum"))
    p = logits.softmax(-1)[torch.arange(5), targets]
    torch.testing.assert_close(focal, (-((1 - p) ** 2) * p.log()).sum())


def test_readme_lists_all_model_families() -> None:
    rows = {
        code for line in PAGES["README.md"].splitlines() if line.startswith("|") for code in re.findall("`(.+?)`", line)
    }
    assert FAMILIES.keys() <= rows


def test_example_family_matches_transformers(work_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = code_blocks("docs/families.md", "python")
    names: dict[str, Any] = {}
    exec(compile(text, "families.md", "exec"), names)
    monkeypatch.setitem(FAMILIES, "helium", Family(names["spec"]))
    torch.manual_seed(0)
    config = HeliumConfig(
        vocab_size=97,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=80,
        max_position_embeddings=128,
        attention_bias=True,
    )
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)  # zeros would hide a bias that is added at the wrong position
    theirs.save_pretrained(work_dir / "helium")
    source, run = HFCheckpoint.open(work_dir / "helium"), DistributedContext(device="cpu")
    ours = build.build_model(source, NoQuantization(), NoAdapter(), PrecisionConfig("fp32"), MemoryConfig(), run).eval()
    tokens = torch.randint(97, (2, 17))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
