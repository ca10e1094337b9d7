"""`tune completion`: a script for the shell, written from the parser, so that it knows every verb, option and name."""

import argparse
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from tunekit.cli import registry


@dataclass(frozen=True)
class Option:
    """One option of a verb: its words, what it is for, and whether a value follows."""

    names: tuple[str, ...]
    about: str
    valued: bool
    words: tuple[str, ...]


@dataclass(frozen=True)
class Verb:
    """A verb with its options, and the known words of each place behind it; of the last place also further on."""

    name: str
    about: str
    options: tuple[Option, ...]
    places: tuple[tuple[str, ...], ...]


def main(args: argparse.Namespace) -> None:
    """Print the script."""
    _, parsers = args.tree
    print(SHELLS[args.shell]([verb(name, parser) for name, parser in parsers.items()]))


def verb(name: str, parser: argparse.ArgumentParser) -> Verb:
    """What the parser of a verb knows. A config stands first among the overrides of `tune run`."""
    known = {"RECIPE": tuple(registry.list_recipes()), "CONFIG": tuple(registry.list_configs())}
    known |= {"NAME": known["RECIPE"] + known["CONFIG"], "CONFIG key=value": known["CONFIG"]}
    options, places = [], []
    for action in parser._actions:  # argparse has no public list of them
        words = tuple(action.choices or known.get(str(action.metavar), ()))
        if action.option_strings:
            options.append(Option(tuple(action.option_strings), action.help or "", action.nargs is None, words))
        else:
            places.append(words)
    return Verb(name, parser.description or "", tuple(options), tuple(places))


def bash(verbs: list[Verb]) -> str:
    """A function that counts the words before the cursor, and offers what may stand there; files otherwise."""
    cases = "\n".join(bash_case(verb) for verb in verbs)
    return f"""# tune, for bash: eval "$(tune completion bash)"
_tune() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD - 1]}} place=0 words= i
    if ((COMP_CWORD == 1)); then
        words={quoted([verb.name for verb in verbs] + ["--help", "--version"])}
    else
        case ${{COMP_WORDS[1]}} in
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o bashdefault -o default -F _tune tune"""


def bash_case(verb: Verb) -> str:
    """What bash offers behind one verb, by the word before the cursor and the place: after an option its values."""
    valued = [option for option in verb.options if option.valued]
    offers = [(f"{name}:*", option.words) for option in valued for name in option.names]
    offers += [(f"*:{place}", words) for place, words in enumerate(verb.places)]
    cases = "\n".join(f"                    {pattern}) words={quoted(words)} ;;" for pattern, words in offers)
    skipped = "".join(f"{name}) ((i++)) ;; " for option in valued for name in option.names)
    return f"""            {verb.name})
                for ((i = 2; i < COMP_CWORD; i++)); do
                    case ${{COMP_WORDS[i]}} in {skipped}-*) ;; *) ((place++)) ;; esac
                done
                case $before:$place in
{cases}
                esac
                [[ $word == -* ]] && words={quoted([name for option in verb.options for name in option.names])} ;;"""


def zsh(verbs: list[Verb]) -> str:
    """The same through zsh's own `_arguments`, which shows what each word is for."""
    names = "\n".join(f"        {shlex.quote(f'{verb.name}:{verb.about}')}" for verb in verbs)
    cases = "\n".join(f"        {verb.name}) _arguments {' '.join(zsh_words(verb))} ;;" for verb in verbs)
    return f"""#compdef tune
# tune, for zsh: eval "$(tune completion zsh)", after compinit
_tune() {{
    local -a verbs=(
{names}
    )
    if ((CURRENT == 2)); then
        _describe verb verbs
        return
    fi
    shift words
    ((CURRENT--))
    case $words[1] in
{cases}
    esac
}}
compdef _tune tune"""


def zsh_words(verb: Verb) -> list[str]:
    """The specifications that `_arguments` takes."""
    specs = []
    for option in verb.options:
        about = "".join(character for character in option.about if character not in "[]:")
        value = f":value:{zsh_values(option.words)}" if option.valued else ""
        specs += [shlex.quote(f"*{name}[{about}]{value}") for name in option.names]
    specs += [shlex.quote(f"{place}::word:{zsh_values(words)}") for place, words in enumerate(verb.places, 1)]
    return [*specs, "'*:file:_files'"]


def zsh_values(words: tuple[str, ...]) -> str:
    """Known words, files besides."""
    return f"{{ compadd -- {' '.join(words)}; _files }}" if words else "_files"


def fish(verbs: list[Verb]) -> str:
    """One line for each word that fish may offer."""
    lines = [
        "# tune, for fish: tune completion fish | source",
        "complete -c tune -n __fish_use_subcommand -f -l version",
    ]
    for verb in verbs:
        lines.append(f"complete -c tune -n __fish_use_subcommand -f -a {verb.name} -d {shlex.quote(verb.about)}")
        behind = f"complete -c tune -n '__fish_seen_subcommand_from {verb.name}'"
        words = sorted({word for place in verb.places for word in place})
        lines += [f"{behind} -a {quoted(words)}"] if words else []
        for option in verb.options:
            names = " ".join(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names)
            value = f" -r -a {quoted(option.words)}" if option.valued else ""
            lines.append(f"{behind} {names}{value} -d {shlex.quote(option.about)}")
    return "\n".join(lines)


def quoted(words: list[str] | tuple[str, ...]) -> str:
    """Words as one word of the shell."""
    return shlex.quote(" ".join(words))


SHELLS: dict[str, Callable[[list[Verb]], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
