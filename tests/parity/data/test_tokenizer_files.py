"""The tokens and ids of all tokenizer files equal those that transformers reads, or the files are refused."""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import (
    MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS,
    TOKENIZER_MAPPING_NAMES,
)

from tests.helpers.random_checkpoints import make_checkpoint
from tests.helpers.tokenizers import SHAPES, train_tokenizer
from tunekit.checkpoint.hf_checkpoint import HFCheckpoint
from tunekit.checkpoint.merge import check_tokenizer
from tunekit.checkpoint.model_dir import ModelDir
from tunekit.data.chat_template.chat_format import advise_on_markers, describe_split_markers, find_split_markers
from tunekit.data.new_tokens import add_new_tokens, write_new_tokens
from tunekit.data.tokenizer import Tokenizer
from tunekit.data.tokenizer_classes import AS_FILE, CLASSES, FORCED, MODEL_CLASSES, UNSUPPORTED, base_name
from tunekit.data.tokenizer_files import TokenizerFiles, check_model_type, keep_class, read_json
from tunekit.errors import UserError
from tunekit.models.families.registry import FAMILIES

SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>", "</s>", "<unk>", "<img>")
WORDS = (*SPECIAL, "fox", "é", "▁a", "the ", "  ")
TEXT = "The fox says <|im_start|>user\nHi <img> fox, é!<|im_end|> \n the the  <s></s><pad> a"
Files = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def bases() -> dict[str, str]:
    """Contents of tokenizer.json of two kinds, without added tokens."""
    contents = {name: json.loads(train_tokenizer(SHAPES[name]).to_str()) for name in ("chatml", "brackets")}
    return {name: json.dumps(content | {"added_tokens": [], "padding": None}) for name, content in contents.items()}


def write(directory: Path, base: str, files: Files) -> Path:
    (directory / "tokenizer.json").write_text(base)
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def assert_equal_to_transformers(directory: Path, texts: tuple[str, ...] = (TEXT,)) -> Tokenizer:
    ours, theirs = Tokenizer.open(directory), AutoTokenizer.from_pretrained(directory)
    assert (ours.size, ours.names) == (len(theirs), theirs.special_tokens_map)
    for text in texts:
        ids = theirs.encode(text)
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, special=True) == ids
        assert ours.decode(ids, special=True) == theirs.decode(ids)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    return ours


def token(content: str, **flags: bool) -> dict[str, Any]:
    return {"content": content, **dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False), **flags}


FILES: dict[str, Files] = {
    "added_tokens.json": {"added_tokens.json": {"<|im_start|>": 402, "<|im_end|>": 401}},
    "added tokens that are special": {
        "added_tokens.json": {"<|im_start|>": 900, "<|im_end|>": 7},
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "extra_special_tokens": ["<img>"]},
    },
    "added_tokens_decoder": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "950": token("<|im_start|>", special=True, rstrip=True),
                "7": token("<|im_end|>", special=True, lstrip=True),
                "400": token("fox", special=False, single_word=True, normalized=True),
            }
        },
        "added_tokens.json": {"<img>": 401},  # not read
    },
    "special_tokens_map.json": {
        "special_tokens_map.json": {"eos_token": token("<|im_end|>", lstrip=True), "bos_token": "<s>"},
        "tokenizer_config.json": {"eos_token": "</s>"},
    },
    "additional_special_tokens": {"tokenizer_config.json": {"additional_special_tokens": ["<|im_start|>", "<img>"]}},
    "named tokens": {"tokenizer_config.json": {"image_token": "<img>", "extra_special_tokens": {"boi": "fox"}}},
    "ignored flags": {
        "tokenizer_config.json": {
            "bos_token": "<s>",
            **dict.fromkeys(("add_bos_token", "add_eos_token", "add_prefix_space", "legacy"), True),
            "clean_up_tokenization_spaces": True,
        }
    },
}


@pytest.mark.parametrize("base", ["chatml", "brackets"])
@pytest.mark.parametrize("name", FILES)
def test_tokens_of_each_file(name: str, base: str, bases: dict[str, str], tmp_path: Path) -> None:
    assert_equal_to_transformers(write(tmp_path, bases[base], FILES[name]))


def random_files(source: random.Random) -> Files:
    """Files with conflicting tokens, flags and ids."""

    def flags() -> dict[str, bool]:
        names = ("lstrip", "rstrip", "normalized", "single_word", "special")
        return {name: source.random() < 0.3 for name in names}

    def pick(typed: bool = True) -> Any:
        word = source.choice(WORDS)
        return word if source.random() < 0.5 or not typed else {"__type": "AddedToken", "content": word, **flags()}

    def subset(values: Iterator[tuple[str, Any]], share: float = 0.4) -> dict[str, Any]:
        return {key: value for key, value in values if source.random() < share}

    names = ("bos_token", "eos_token", "unk_token", "pad_token", "mask_token", "audio_token")
    lists = ("additional_special_tokens", "extra_special_tokens")
    decoder = {str(source.randrange(420)): {"content": source.choice(WORDS), **flags()} for _ in range(4)}
    switches = ("add_bos_token", "add_prefix_space", "legacy", "clean_up_tokenization_spaces")
    config = subset((name, pick()) for name in names) | subset((name, [pick(), pick()]) for name in lists)
    config |= subset(iter([("added_tokens_decoder", decoder)])) | subset(
        (name, source.random() < 0.5) for name in switches
    )
    named = source.choice([None, *CLASSES, "PreTrainedTokenizerFast", "CustomTokenizer"])
    config |= {} if named is None else {"tokenizer_class": named}
    special = subset((name, pick(False)) for name in names) | subset((name, [pick(False)]) for name in lists)
    added = {source.choice(WORDS): source.randrange(360, 420) for _ in range(3)}
    files = subset(iter([("special_tokens_map.json", special), ("added_tokens.json", added)]), 0.5)
    model_type = source.choice(["llama", "qwen2", "qwen3", "gemma2", "cohere", "olmoe", "phi3", "mistral", "smollm3"])
    return {"tokenizer_config.json": config, "config.json": {"model_type": model_type}, **files}


def test_random_combinations(bases: dict[str, str], tmp_path: Path) -> None:
    for seed in range(24):
        source = random.Random(seed)
        (tmp_path / str(seed)).mkdir()
        directory = write(tmp_path / str(seed), bases[source.choice(["chatml", "brackets"])], random_files(source))
        texts = ("".join(source.choice([*WORDS, " ", "a", "\n"]) for _ in range(12)) for _ in range(3))
        try:
            AutoTokenizer.from_pretrained(directory).encode(TEXT)
        except Exception:  # a tokenizer that fails on texts is no expectation
            continue
        assert_equal_to_transformers(directory, (TEXT, *texts))


def test_classes_of_all_families_are_those_of_transformers() -> None:
    theirs = {name: base_name(TOKENIZER_MAPPING_NAMES[name]) for name in FAMILIES if name in TOKENIZER_MAPPING_NAMES}
    as_file = {"MistralCommonBackend": AS_FILE}  # without the package mistral-common
    assert {name: MODEL_CLASSES.get(name) for name in theirs} == {
        name: as_file.get(kind or "", kind) for name, kind in theirs.items()
    }
    assert {*FAMILIES} & MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS == {*FAMILIES} & FORCED
    known = {*CLASSES, *UNSUPPORTED, AS_FILE, *as_file}
    assert {base_name(name) for name in TOKENIZER_MAPPING_NAMES.values() if name} - known == set()


def test_words_are_decoded_without_spaces_before_punctuation(tmp_path: Path) -> None:
    vocabulary = {"[UNK]": 0, "it": 1, "is": 2, "not": 3, "##n": 4, ".": 5, "do": 6, "n't": 7, ",": 8}
    model = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    model.normalizer, model.decoder = normalizers.Lowercase(), decoders.WordPiece(cleanup=False)
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": True}
    directory = write(tmp_path, model.to_str(), {"tokenizer_config.json": config})
    tokenizer = assert_equal_to_transformers(directory, ("It do n't . is , not",))
    assert tokenizer.decode([6, 7, 5]) == "don't."


REFUSED: dict[str, tuple[str | None, Files]] = {
    "split_special_tokens": ("chatml", {"tokenizer_config.json": {"split_special_tokens": True}}),
    "fast_tokenizer_files": ("chatml", {"tokenizer_config.json": {"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}}),
    "T5Tokenizer": ("chatml", {"tokenizer_config.json": {"tokenizer_class": "T5TokenizerFast"}}),
    "added_tokens_decoder": ("chatml", {"tokenizer_config.json": {"added_tokens_decoder": [1]}}),
    "extra_special_tokens": ("chatml", {"tokenizer_config.json": {"extra_special_tokens": 3}}),
    "bos_token": ("chatml", {"special_tokens_map.json": {"bos_token": {"content": 3}}}),
    "added_tokens.json": ("chatml", {"added_tokens.json": {"<a>": "3"}}),
    "tekken.json": (None, {"tekken.json": {}}),
    "vocab.json": (None, {"vocab.json": {}, "merges.txt": {}}),
    "tokenizer.model": (None, {"tokenizer.model": {}}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(name: str, bases: dict[str, str], tmp_path: Path) -> None:
    base, files = REFUSED[name]
    write(tmp_path, bases[base or "chatml"], files)
    if base is None:
        (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError) as error:
        Tokenizer.open(tmp_path)
    assert name in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("config", [
    {"model_type": "mistral"}, {"model_type": "mistral3", "transformers_version": "4.57.1"}, {"a": 1}, {},
    {"model_type": "mistral", "transformers_version": "5.0.0"}, {"model_type": "llama"},
], ids=str)  # fmt: skip
def test_fix_of_mistral_is_refused_where_transformers_makes_it(
    config: dict, bases: dict[str, str], tmp_path: Path
) -> None:
    content = json.loads(bases["chatml"])
    content["model"]["vocab"] |= {f"more{index}": index for index in range(len(content["model"]["vocab"]), 100_001)}
    write(tmp_path, json.dumps(content), {"tokenizer_config.json": {"fix_mistral_regex": True}, "config.json": config})
    unchanged = Backend.from_file(str(tmp_path / "tokenizer.json"))
    theirs, text = AutoTokenizer.from_pretrained(tmp_path), "theFox says/\n123"
    steps = [backend.pre_tokenizer.pre_tokenize_str(text) for backend in (theirs.backend_tokenizer, unchanged)]
    if steps[0] != steps[1]:
        with pytest.raises(UserError, match="fix_mistral_regex"):
            Tokenizer.open(tmp_path)
        theirs.save_pretrained(tmp_path)
    else:
        assert config.get("model_type") == "llama" or config.get("transformers_version") == "5.0.0" or not config
    assert Tokenizer.open(tmp_path).encode(text) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                                  "added_tokens.json", "generation_config.json", "chat_template.jinja"])  # fmt: skip
def test_broken_links_are_no_missing_files(name: str, bases: dict[str, str], tmp_path: Path) -> None:
    """The links of an incomplete download point to missing files."""
    write(tmp_path, bases["chatml"], {"tokenizer_config.json": {}})
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to(tmp_path / "blobs" / "missing")
    with pytest.raises(UserError, match=name):
        Tokenizer.open(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=name):
        Tokenizer.open(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_new_tokens_are_saved_with_those_of_all_files(name: str, bases: dict[str, str], tmp_path: Path) -> None:
    directory = write(tmp_path, bases["chatml"], FILES[name])
    extended, tokens = add_new_tokens(Tokenizer.open(directory), ("<new>",), ("<|new|>",))
    write_new_tokens(directory, tokens)
    text = TEXT + "<new> x<|new|>"
    saved = assert_equal_to_transformers(directory, (text,))
    assert saved.encode(text) == extended.encode(text)
    assert [saved.encode(token.text) for token in tokens] == [[token.id] for token in tokens]


def test_marker_that_is_split_is_reported_without_resetting_rows(bases: dict[str, str], tmp_path: Path) -> None:
    template = {"chat_template": SHAPES["chatml"].template}
    split = Tokenizer.open(write(tmp_path, bases["chatml"], {"tokenizer_config.json": template}))
    markers = ["<|im_start|>", "<|im_end|>"]
    assert find_split_markers(split) == markers
    assert all(marker in describe_split_markers(split) for marker in markers)
    assert "new_special_tokens" in advise_on_markers(split.copy_with(vocab_size=split.size), markers)
    unused_rows = split.copy_with(vocab_size=split.size + 2)  # the rows of the missing tokens may be trained
    assert "new_special_tokens" not in advise_on_markers(unused_rows, markers)
    added = {marker: split.size + index for index, marker in enumerate(markers)}
    complete = Tokenizer.open(write(tmp_path, bases["chatml"], {"added_tokens.json": added}))
    assert (find_split_markers(complete), describe_split_markers(complete)) == ([], "")


def test_marker_that_is_only_in_the_vocabulary_is_split(bases: dict[str, str], tmp_path: Path) -> None:
    content = json.loads(bases["chatml"])
    content["model"]["vocab"]["<|im_start|>"] = len(content["model"]["vocab"])
    config = {"tokenizer_config.json": {"chat_template": SHAPES["chatml"].template}}
    assert "<|im_start|>" in find_split_markers(Tokenizer.open(write(tmp_path, json.dumps(content), config)))


def test_copied_tokenizer_keeps_its_class(bases: dict[str, str], tmp_path: Path) -> None:
    """transformers chooses the class also by config.json, which an adapter and a model with another tokenizer lack."""
    source, adapter, model = (tmp_path / name for name in ("source", "adapter", "model"))
    for directory in (source, adapter, model):
        directory.mkdir()
        write(directory, bases["chatml"], {"tokenizer_config.json": {"eos_token": "</s>"}})
    write(source, bases["chatml"], {"config.json": {"model_type": "qwen3"}})
    write(model, bases["chatml"], {"config.json": {"model_type": "cohere"}})
    for directory in (adapter, model):
        keep_class(directory, read_json(source / "config.json"))
        assert assert_equal_to_transformers(directory).encode(TEXT) == Tokenizer.open(source).encode(TEXT)
    with pytest.raises(UserError, match="^tokenizer: "):
        check_model_type(TokenizerFiles.read(model).hints, {"model_type": "cohere"}, {"model_type": "phi3"})
    check_model_type(TokenizerFiles.read(source).hints, {"model_type": "qwen3"}, {"model_type": "qwen2"})


def test_adapter_whose_tokenizer_a_merged_model_would_read_otherwise_is_refused(tmp_path: Path) -> None:
    base = HFCheckpoint.open(make_checkpoint(tmp_path / "base", "qwen2"))
    adapter = shutil.copytree(tmp_path / "base", tmp_path / "adapter", ignore=lambda *_: ["config.json"])
    (adapter / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPTNeoXTokenizer"}))
    check_tokenizer(base, ModelDir.open(adapter))  # its tokenizer is that of the base
    other = json.loads((adapter / "tokenizer.json").read_text())
    other["added_tokens"].append({"id": len(other["model"]["vocab"]) + 9, "content": "<other>", **token("<other>")})
    (adapter / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(UserError, match="^tokenizer: "):
        check_tokenizer(base, ModelDir.open(adapter))
    (adapter / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2TokenizerFast"}))
    check_tokenizer(base, ModelDir.open(adapter))
