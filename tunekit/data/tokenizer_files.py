"""Reads the files of a tokenizer to the tokens and ids that transformers 5 reads from them.

Besides tokenizer.json, tokens are in tokenizer_config.json (`added_tokens_decoder`, `bos_token`,
`extra_special_tokens`, ...) and, in older checkpoints, in special_tokens_map.json and added_tokens.json.
"""

import functools
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from tunekit.data.tokenizer_classes import (
    CLASSES,
    FORCED,
    TOKENIZER_JSON,
    UNSUPPORTED,
    Merges,
    TokenizerClass,
    Vocabulary,
    find_class_name,
)
from tunekit.errors import UserError

MODEL, CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
STANDARD_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
EXTRA_KEYS = ("extra_special_tokens", "additional_special_tokens")  # the second one before transformers 5
OTHER_FORMATS = ("tekken.json", "tokenizer.model", "tiktoken.model", "vocab.json", "vocab.txt", "spiece.model")
VERSIONED_FILE = re.compile(r"tokenizer\.(.+)\.json")
MAX_NORMALIZER_GROWTH = 1000  # factor of the length of a text; known tokenizers have up to 3
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
# Of transformers, which replaces the regular expression of large Mistral tokenizers that were saved before version 5
OLD_VERSION, MIN_MISTRAL_VOCAB = re.compile(r"[0-4]\."), 100_000
MISTRAL_TYPES = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
MISTRAL_REGEX = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SURROGATE = re.compile("[\ud800-\udfff]")  # half of a character, which is no text
Token = str | AddedToken


class TokenizerErrors:
    """Turns the plain `Exception` and the panics that the tokenizers library raises into UserError.

    A context manager, because `except Exception` would also catch all other errors.
    """

    def __init__(self, problem: str, fix: str) -> None:
        self.problem, self.fix = problem, fix

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is Exception or (kind is not None and kind.__name__ == "PanicException"):  # of Rust, a BaseException
            raise UserError(f"{self.problem} ({error}). {self.fix}") from error


def has_file(path: Path) -> bool:
    """Whether a file of a checkpoint exists. Raises UserError for a broken link, as of an incomplete download."""
    if not path.is_file() and (path.is_symlink() or path.exists()):
        raise UserError(f"{path}: not a file, or a link to none. Download it again.")
    return path.is_file()


def read_json(path: Path) -> dict[str, Any]:
    """JSON object of a file of a checkpoint; empty if the file does not exist."""
    return parse_json(path, read_bytes(path)) if has_file(path) else {}


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise make_read_error(path, error) from None


def parse_json(path: Path, text: bytes) -> dict[str, Any]:
    try:
        content = json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise make_read_error(path, error) from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: must be a JSON object, got {type(content).__name__}")
    return content


def write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def make_read_error(path: Path, error: Exception) -> UserError:
    return UserError(f"{path}: cannot read the file: {error}. Download it again.")


@dataclass(frozen=True)
class ClassHints:
    """Inputs that select, together with config.json, the class of transformers that reads a tokenizer."""

    config: Mapping[str, Any]  # tokenizer_config.json
    is_byte_level: bool

    def find_class(self, model_config: Mapping[str, Any]) -> tuple[str, TokenizerClass]:
        """Name and properties of the class in a directory with this config.json."""
        name = find_class_name(self.config, model_config, self.is_byte_level)
        return name, CLASSES.get(name, TOKENIZER_JSON)


@dataclass(frozen=True)
class SavedTokenizer:
    """A tokenizer as saved. `model`, which must not be changed, has no post-processor, truncation and padding.

    `names`: texts of special tokens by name, such as `eos_token`. `cleans_up_spaces`: whether decoded texts have no
    spaces before punctuation.
    """

    model: tokenizers.Tokenizer
    post_processor: Any
    names: Mapping[str, str]
    cleans_up_spaces: bool
    hints: ClassHints


@dataclass(frozen=True)
class TokenizerFiles:
    """The files of a tokenizer, and the config.json of its model. Those with the same content are equal."""

    digest: bytes
    directory: Path = field(compare=False)
    contents: dict[str, bytes] = field(compare=False)  # by file name
    model_config: Mapping[str, Any] = field(compare=False)

    @staticmethod
    def read(directory: Path, model_config: Mapping[str, Any] | None = None) -> "TokenizerFiles":
        """Read each file once. `model_config` is config.json, if it was read before."""
        paths = (directory / name for name in (MODEL, CONFIG, SPECIAL_TOKENS, ADDED_TOKENS))
        contents = {path.name: read_bytes(path) for path in paths if has_file(path)}
        config = read_json(directory / "config.json") if model_config is None else model_config
        parts = [*map(str.encode, contents), *contents.values(), json.dumps(config).encode()]
        digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts))
        return TokenizerFiles(digest.digest(), directory, contents, config)

    def json(self, name: str) -> dict[str, Any]:
        """JSON object of a file; empty if the file does not exist."""
        return parse_json(self.directory / name, self.contents[name]) if name in self.contents else {}

    @property
    def hints(self) -> ClassHints:
        return ClassHints(self.json(CONFIG), b'"ByteLevel"' in self.contents[MODEL])


def read_tokenizer(directory: Path, model_config: Mapping[str, Any] | None = None) -> SavedTokenizer:
    """Read a tokenizer. Raises UserError."""
    if not has_file(directory / MODEL):
        others = next((f"cannot read {name}, and " for name in OTHER_FORMATS if (directory / name).is_file()), "")
        raise UserError(
            f"{directory}: {others}has no tokenizer.json. Download it, set `tokenizer` to a checkpoint, or create it "
            "with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    files = TokenizerFiles.read(directory, model_config)
    try:
        return parse_tokenizer(files)
    finally:
        files.contents.clear()  # the cache keeps its keys


@functools.lru_cache(maxsize=2)  # the result of a run has the tokenizer of its checkpoint
def parse_tokenizer(files: TokenizerFiles) -> SavedTokenizer:
    """The tokenizer of some files."""
    directory, content, hints = files.directory, files.json(MODEL), files.hints
    config = hints.config
    check_supported(directory, content, config)
    with TokenizerErrors(f"{directory / MODEL}: is not a valid tokenizer", "Download it again."):
        saved = tokenizers.Tokenizer.from_str(json.dumps(content))
    name, kind = hints.find_class(files.model_config)
    if name in UNSUPPORTED:
        remedy = "If tokenizer.json is complete, set tokenizer_class to PreTrainedTokenizerFast."
        raise UserError(f"{directory / CONFIG}: tokenizer_class {name} is not supported. {remedy}")
    tokens = read_token_settings(files, content, config, kind)
    with TokenizerErrors(f"{directory / CONFIG}: does not fit to tokenizer.json", "Download both again."):
        model = rebuild_tokenizer(saved, content, kind, tokens.settings)
        add_saved_tokens(model, tokens, kind)
    check_mistral_regex(files, config, model)
    post_processor = saved.post_processor if kind.adds_bos is None else add_bos(model, tokens, kind.adds_bos)
    model.post_processor = None
    model.no_truncation()
    model.no_padding()
    keeps_spaces = isinstance(model.model, tokenizers.models.BPE) and not config.get(
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    )
    cleans_up_spaces = bool(config.get("clean_up_tokenization_spaces")) and not keeps_spaces
    return SavedTokenizer(model, post_processor, tokens.names, cleans_up_spaces, hints)


def check_supported(directory: Path, content: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise UserError for files that would be read to other tokens than in transformers."""
    if max_growth(content.get("normalizer")) > MAX_NORMALIZER_GROWTH:
        problem = f"the normalizer can make a text more than {MAX_NORMALIZER_GROWTH} times longer"
        raise UserError(f"{directory / MODEL}: {problem}")
    if config.get("split_special_tokens"):
        problem = "split_special_tokens is not supported: special tokens of chat templates would become text"
        raise UserError(f"{directory / CONFIG}: {problem}. Remove the key.")
    files = config.get("fast_tokenizer_files")
    versioned = [name for name in files if VERSIONED_FILE.fullmatch(str(name))] if isinstance(files, list) else []
    if versioned:
        problem = f"fast_tokenizer_files names {versioned[0]}, only {MODEL} can be read"
        raise UserError(f"{directory / CONFIG}: {problem}. Rename the file, and remove the key.")


def check_mistral_regex(files: TokenizerFiles, config: Mapping[str, Any], model: tokenizers.Tokenizer) -> None:
    """Raise UserError if transformers would replace the first step of the pre-tokenizer, as it does for old files."""
    model_config = files.model_config
    is_old = OLD_VERSION.match(str(model_config.get("transformers_version") or "0.0")) is not None
    is_mistral = (files.directory / "config.json").is_file() and model_config.get("model_type") in (
        None,
        *MISTRAL_TYPES,
    )
    is_large = model.get_vocab_size() > MIN_MISTRAL_VOCAB and model.pre_tokenizer is not None
    if not (config.get("fix_mistral_regex") and is_old and is_mistral and is_large):
        return
    steps = json.loads(model.to_str())["pre_tokenizer"].get("pretokenizers") or [{}]
    if steps[0].get("pattern") != {"Regex": MISTRAL_REGEX}:
        problem = "fix_mistral_regex needs another regular expression than that of tokenizer.json"
        remedy = "Save the tokenizer with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        raise UserError(f"{files.directory / CONFIG}: {problem}. {remedy}.")


def max_growth(normalizer: Any) -> int:
    """How many times longer the replacements of a normalizer can make a text: they may follow one another."""
    if not isinstance(normalizer, dict):
        return 1
    steps = normalizer.get("normalizers")
    if isinstance(steps, list):
        return math.prod(map(max_growth, steps))
    content = normalizer.get("content")
    return max(1, len(content)) if isinstance(content, str) else 1


def check_model_type(hints: ClassHints, own_config: Mapping[str, Any], model_config: Mapping[str, Any]) -> None:
    """Raise UserError if transformers would read a tokenizer to other tokens in a checkpoint with this config.json.

    `own_config` is config.json of the tokenizer's directory.
    """
    (name, kind), (other, forced) = hints.find_class(own_config), hints.find_class(model_config)
    model_type = model_config.get("model_type")
    if kind is not forced and model_type in FORCED:
        problem = f"transformers reads the tokenizer as {other} instead of {name} in models of type {model_type}"
        raise UserError(f"tokenizer: {problem}, to other tokens. Use the tokenizer of a model of this type.")


def keep_class(directory: Path, source_config: Mapping[str, Any]) -> None:
    """Name the class of a tokenizer that was copied from a directory with another config.json.

    Without it, transformers could choose another class.
    """
    if not (directory / MODEL).is_file():
        return
    files = TokenizerFiles.read(directory)
    hints = files.hints
    name, kind = hints.find_class(source_config)
    if hints.find_class(files.model_config)[1] is not kind:
        write_json(directory / CONFIG, {**hints.config, "tokenizer_class": name})


def rebuild_tokenizer(
    saved: tokenizers.Tokenizer, content: Mapping[str, Any], kind: TokenizerClass, settings: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    """The tokenizer of a class, without added tokens unless it is that of tokenizer.json."""
    if kind.build is None:
        return saved
    return kind.build(*read_bpe(content["model"]), settings)


def read_bpe(model: Mapping[str, Any]) -> tuple[Vocabulary, Merges]:
    """Vocabulary and merges of a model in tokenizer.json."""
    vocabulary, merges = model.get("vocab", {}), model.get("merges", [])
    if isinstance(vocabulary, list):
        vocabulary = {item[0] if isinstance(item, list) else item: index for index, item in enumerate(vocabulary)}
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in merges)
    return vocabulary, [(left, right) for left, right in pairs]


@dataclass(frozen=True)
class TokenSettings:
    """Tokens besides those of tokenizer.json: in the order of their ids, by name, and without a name."""

    settings: Mapping[str, Any]
    by_id: list[AddedToken]
    named: dict[str, Token]
    extra: list[Token]

    @property
    def names(self) -> dict[str, str]:
        return {name: str(token) for name, token in self.named.items()}


def to_token(value: Any, where: str) -> Token:
    """A token of a file: a text, or an object with its flags. Raises UserError."""
    if isinstance(value, AddedToken):
        return value
    content: Any = value.get("content") if isinstance(value, dict) else value
    flags = {name: value[name] for name in FLAGS if name in value} if isinstance(value, dict) else {}
    is_text = isinstance(content, str) and SURROGATE.search(content) is None
    if not is_text or not all(isinstance(flag, bool) for flag in flags.values()):
        raise UserError(f"{where}: must be a token, got {json.dumps(value)[:80]}. Download the file again.")
    return AddedToken(content, **{"special": True, **flags}) if isinstance(value, dict) else content


def read_token_settings(
    files: TokenizerFiles, content: Mapping[str, Any], config: Mapping[str, Any], kind: TokenizerClass
) -> TokenSettings:
    """Tokens of all files. With `added_tokens_decoder`, transformers does not read the older files."""
    directory = files.directory
    settings = check_extra_tokens(dict(config), directory / CONFIG)
    if not settings.get(EXTRA_KEYS[0]) and EXTRA_KEYS[1] in settings:
        settings[EXTRA_KEYS[0]] = settings.pop(EXTRA_KEYS[1])
    model_tokens = split_model_tokens(settings)
    by_id: dict[int, AddedToken] = {}
    if "added_tokens_decoder" in config:
        by_id = read_decoder(directory / CONFIG, config["added_tokens_decoder"])
    else:
        merge_special_tokens_map(settings, model_tokens, files)
        by_id = read_added_tokens(files, settings)
        by_id |= {item["id"]: added_token(item, directory / MODEL) for item in content.get("added_tokens") or ()}
    flags = {str(token): token for token in by_id.values()}
    with_flags = {
        name: flags.get(content_of(settings[name]), settings[name]) for name in STANDARD_TOKENS if name in settings
    }
    settings = {**kind.special_tokens, **settings, **with_flags}
    if isinstance(content.get("padding"), dict):
        settings.setdefault("pad_token", content["padding"].get("pad_token"))
    named = {name: settings[name] for name in STANDARD_TOKENS if settings.get(name) is not None}
    others = {**kind.infill_tokens, **{key: value for key, value in settings.items() if is_model_token(key, value)}}
    named |= others | model_tokens
    extra = settings.get(EXTRA_KEYS[0], settings.get(EXTRA_KEYS[1])) or []
    where = str(directory / CONFIG)
    named_tokens = {name: to_token(value, f"{where}: {name}") for name, value in named.items()}
    settings |= {name: str(token) for name, token in named_tokens.items()}
    extra_tokens = [to_token(value, f"{where}: {EXTRA_KEYS[0]}") for value in extra] if isinstance(extra, list) else []
    return TokenSettings(settings, [by_id[index] for index in sorted(by_id)], named_tokens, extra_tokens)


def check_extra_tokens(settings: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the content of a file. Raises UserError for extra special tokens that are neither a list nor an object."""
    for key in EXTRA_KEYS:
        if not isinstance(settings.get(key), list | dict | None):
            raise UserError(f"{path}: {key} must be a list of tokens. Download the file again.")
    return settings


def split_model_tokens(settings: dict[str, Any]) -> dict[str, Any]:
    """Remove the special tokens of this model from a config, such as `image_token`, and return them."""
    names = [key for key, value in settings.items() if is_model_token(key, value) and isinstance(value, str)]
    tokens = {key: settings.pop(key) for key in names}
    if isinstance(settings.get(EXTRA_KEYS[0]), dict):
        tokens |= settings.pop(EXTRA_KEYS[0])
    return tokens


def is_model_token(key: str, value: Any) -> bool:
    """Whether a value is a special token besides the standard ones."""
    is_token = isinstance(value, str | AddedToken) or (isinstance(value, dict) and value.get("__type") == "AddedToken")
    return key.endswith("_token") and key not in STANDARD_TOKENS and is_token


def content_of(value: Any) -> str:
    """Text of a token."""
    return str(value.get("content") if isinstance(value, dict) else value)


def added_token(value: Any, where: Path) -> AddedToken:
    token = to_token({"special": False, **value} if isinstance(value, dict) else value, str(where))
    return token if isinstance(token, AddedToken) else AddedToken(token, special=True)


def read_decoder(path: Path, values: Any) -> dict[int, AddedToken]:
    """Tokens of `added_tokens_decoder` by id."""
    try:
        return {int(index): added_token(value, path) for index, value in values.items()}
    except (AttributeError, ValueError):
        raise UserError(f"{path}: added_tokens_decoder must map token ids to tokens. Download it again.") from None


def merge_special_tokens_map(settings: dict[str, Any], model_tokens: dict[str, Any], files: TokenizerFiles) -> None:
    """Override the special tokens of a config by those of special_tokens_map.json."""
    path = files.directory / SPECIAL_TOKENS
    for key, value in check_extra_tokens(files.json(SPECIAL_TOKENS), path).items():
        if key == EXTRA_KEYS[0] and isinstance(value, list):
            known = list(settings.get(key) or [])
            tokens = [to_token(item, f"{path}: {key}") for item in value]
            value = [*known, *(token for token in tokens if token not in known)]
        elif isinstance(value, dict) and key != EXTRA_KEYS[0]:
            value = to_token({**value, "special": True}, f"{path}: {key}")
        settings[key] = value
    if isinstance(settings.get(EXTRA_KEYS[0]), dict):
        model_tokens |= settings.pop(EXTRA_KEYS[0])


def read_added_tokens(files: TokenizerFiles, settings: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Tokens of added_tokens.json by id. Those that are also special tokens are special."""
    path, values = files.directory / ADDED_TOKENS, files.json(ADDED_TOKENS)
    tokens = [*(settings[name] for name in STANDARD_TOKENS if name in settings), *(settings.get(EXTRA_KEYS[0]) or ())]
    special = {str(token) for token in tokens if isinstance(token, str | AddedToken)}  # not those with flags
    if not all(isinstance(index, int) and SURROGATE.search(text) is None for text, index in values.items()):
        raise UserError(f"{path}: must map tokens to token ids. Download it again.")
    return {
        index: AddedToken(text, normalized=text not in special, special=text in special)
        for text, index in values.items()
    }


def add_saved_tokens(model: tokenizers.Tokenizer, tokens: TokenSettings, kind: TokenizerClass) -> None:
    """Add the tokens that the model lacks, in the order of transformers. Ids follow from the order, as there."""
    missing: list[Token] = [*tokens.by_id]  # also those of tokenizer.json, whose flags may differ
    contents = {token.content for token in model.get_added_tokens_decoder().values()} | {str(t) for t in missing}
    for token in (*tokens.named.values(), *tokens.extra):
        if str(token) not in contents and token not in missing:
            missing.append(token)
    model.add_tokens(list(as_added(missing, set(tokens.names.values()))))
    special = [*tokens.named.values(), *tokens.extra]
    if kind.resets_flags:
        model.add_tokens([AddedToken(text, special=True) for text in dict.fromkeys(map(str, special))])
    if kind.marks_special:
        model.add_special_tokens(list(as_added(special, set())))


def as_added(tokens: Iterable[Token], special: set[str]) -> Iterable[AddedToken]:
    """Tokens with flags. Texts, and those of `special`, are special."""
    for token in tokens:
        if isinstance(token, AddedToken) and not token.special and token.content in special:
            token.special = True
        yield token if isinstance(token, AddedToken) else AddedToken(token, special=True, normalized=False)


def add_bos(model: tokenizers.Tokenizer, tokens: TokenSettings, adds_bos: bool) -> Any:
    """Post-processor that adds the BOS token to texts; None if there is none."""
    bos = tokens.names.get("bos_token")
    index = None if bos is None else model.token_to_id(bos)
    if not adds_bos or bos is None or index is None:
        return None
    return processors.TemplateProcessing([bos, "$A"], [bos, "$A", bos, "$B:1"], [(bos, index)])
