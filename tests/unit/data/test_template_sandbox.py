"""Hostile templates are stopped within seconds and little memory, in threads and processes; others are not affected."""

import pickle
import subprocess
import sys
import threading
import time
from datetime import date
from pathlib import Path

import pytest

from tests.helpers.chat_families import FAMILIES, write_family
from tests.helpers.wait import TIMEOUT_SECONDS
from tunekit.data.chat_template.template import ChatTemplate
from tunekit.data.tokenizer import Tokenizer
from tunekit.errors import UserError

CONVERSATION = [{"role": "user", "content": "Hi" * 50}, {"role": "assistant", "content": "Yo"}]
CONTEXT = {"messages": CONVERSATION, "tools": None, "documents": None, "add_generation_prompt": False}
MANY, END = "{% for a in range(100000) %}", "{% endfor %}"
DOUBLE = "{% set ns = namespace(s='x') %}" + MANY + "{% set ns.s = BODY %}" + END
TREE = (
    "{% set ns = namespace(s=[1], t=[1]) %}{% for i in range(60) %}"
    "{% set ns.s = [ns.s, ns.s] %}{% set ns.t = [ns.t, ns.t] %}{% endfor %}"
)
LONG = "{% set b = 'ab' * 10000000 %}" + MANY + "BODY" + END
WIDE = "{% set b = range(90000) | list %}" + MANY + "{% set c = BODY %}" + END

ENDLESS = [
    MANY * 3 + END * 3,
    "{% for a in range(99999) if range(99999) | sum %}{% endfor %}",
    "{% for x in [[1] * 10] * 10 recursive %}{{ loop([[1] * 10] * 10) }}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(200) }}",
    "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    MANY * 2 + "A" * 1000 + END * 2,
    MANY + "{% set x %}" + "A" * 10000 + "{% endset %}" + END,
]
GROWING = [
    *(
        DOUBLE.replace("BODY", body)
        for body in (
            "ns.s ~ ns.s",
            "ns.s + ns.s",
            "ns.s * 2",
            "[ns.s, ns.s] | join",
            "ns.s.replace('x', 'xx')",
            "ns.s | replace('x', 'xx')",
            "ns.s.join([ns.s, ns.s, ns.s])",
            "'%s%s' % (ns.s, ns.s)",
            "'{}{}'.format(ns.s, ns.s)",
            "'%s%s' | format(ns.s, ns.s)",
            "(ns.s ~ '<') | e",
            "(ns.s | safe) * 2",
            "ns.g | map('upper')",
        )
    ),
    *(
        TREE + use
        for use in (
            "{{ ns.s }}",
            "{{ ns.s | tojson }}",
            "{{ ns.s ~ '' }}",
            "{{ ns.s == ns.t }}",
            "{{ ns.s in [1, ns.t] }}",
            "{{ ns.s is eq(ns.t) }}",
            "{{ '%s' % ns.s }}",
            "{{ '{}'.format(ns.s) }}",
            "{{ raise_exception(ns.s) }}",
            "{{ [ns.s] | join(',') }}",
            "{{ [ns.s] | map('string') | list }}",
            "{% for m in [1] %}{{ loop.changed(ns.s) }}{% endfor %}",
        )
    ),
    *(
        LONG.replace("BODY", body)
        for body in ("{% if b == b ~ 'c' %}{% endif %}", "{% if 'ba' * 3 in b %}{% endif %}", "{% set c = b[1:] %}",
                     "{% set c = b.upper() %}", "{% set c = b | trim %}", "{{ b }}", "{% set c = (b | safe).upper() %}")
    ),
    *(WIDE.replace("BODY", body) for body in ("b | sort", "b | list", "b[::-1]", "5 in b", "b.count(7)", "b + [1]")),
]  # fmt: skip
HUGE = """'x' * 10**9;10**9 * 'x';[0] * 10**9;7**99999999;'x'.center(10**9);'x' | center(10**9);'x'.ljust(10**9)
'x'.zfill(10**9);'%1000000000d' % 1;'%*d' % (10**9, 1);'{:1000000000}'.format(1);'{:{}}'.format(1, 10**9)
'%1000000000d' | format(1);messages | tojson(indent=10**9);'a' | indent(10**9);('a ' * 100000) | replace(' ', 'a' * 900)
range(9) | batch(10**9, 'x') | list;range(9) | slice(10**9) | list;range(99999) | map('string') | join('x' * 100000)
([[1] * 300] * 300) | sum(start=[]);'x'.join(['x'] * 99999 | map('center', 999));10**999 * 10**999"""
FORBIDDEN = """'x'.expandtabs(10**9);(1).to_bytes(10**9, 'big');'x'.encode();{}.fromkeys(range(99999));lipsum(10**6)
cycler.__init__.__globals__;joiner.__init__;namespace.__init__.__globals__;(''|attr('__class__')).x;('<' | e).unescape()
dict.fromkeys(range(9));messages[0].items().__class__;'x' | urlize;[1] | random;'x'.translate({120: 'y' * 999})"""


@pytest.mark.parametrize("text", [*ENDLESS, *GROWING])
def test_endless_template_is_stopped(text: str) -> None:
    start = time.process_time()
    with pytest.raises(UserError, match="^t: "):
        ChatTemplate(text, "t").render(CONTEXT)
    assert time.process_time() - start < 8


@pytest.mark.parametrize("expression", [part.strip() for line in HUGE.splitlines() for part in line.split(";")])
def test_huge_values_are_not_created(expression: str) -> None:
    with pytest.raises(UserError, match="^t: "):
        ChatTemplate("{{ " + expression + " }}", "t").render(CONTEXT)


@pytest.mark.parametrize("expression", [part for line in FORBIDDEN.splitlines() for part in line.split(";")])
def test_unsafe_features_are_unavailable(expression: str) -> None:
    with pytest.raises(UserError, match="^t: "):
        ChatTemplate("{{ " + expression + " }}", "t").render(CONTEXT)


@pytest.mark.parametrize(
    "text",
    ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if 1 %}" * 3000 + "{% endif %}" * 3000, "x" * 300_000,
     "{% for a in [1] %}" * 30 + "{% endfor %}" * 30],
)  # fmt: skip
def test_template_that_is_too_large_is_rejected(text: str) -> None:
    with pytest.raises(UserError, match="^t: "):
        ChatTemplate(text, "t")


@pytest.mark.slow
def test_templates_are_stopped_in_threads_and_use_little_memory() -> None:
    errors: list[str] = []

    def run() -> None:
        try:
            ChatTemplate(ENDLESS[0], "t").render(CONTEXT)
        except UserError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(TIMEOUT_SECONDS)
    assert len(errors) == 1 and errors[0].startswith("t: ")
    code = (
        "from tests.unit.data.test_template_sandbox import *\n"
        "for text in (*ENDLESS, *GROWING[:8]):\n"
        " try: ChatTemplate(text, 't').render(CONTEXT)\n"
        " except UserError: pass\n"
        "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])\n"
    )
    root = Path(__file__).parents[3]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert int(result.stdout) < 1000 * 1024  # not ru_maxrss, which starts at the value of the parent


def test_long_conversations_are_not_stopped(tmp_path: Path) -> None:
    """Ten megabytes in a message, and thousands of messages, with the template that scans them most often."""
    tokenizer = Tokenizer.open(write_family(tmp_path, "qwen3"))
    large_messages = [
        {"role": "user", "content": "ab c" * 2_500_000},
        {"role": "assistant", "content": "</think>" + "é" * 5_000_000},
    ]
    assert len(tokenizer.render(large_messages)) > 15_000_000
    many_messages = CONVERSATION * 2000
    assert tokenizer.render(many_messages).count("Hi" * 50) == 2000


def test_tokenizer_survives_pickling(tmp_path: Path) -> None:
    tokenizer = Tokenizer.open(write_family(tmp_path, "llama3"))
    expected = tokenizer.encode(tokenizer.render(CONVERSATION))
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.encode(copy.render(CONVERSATION)) == expected
    assert (copy.digest, copy.stops, copy.special_ids) == (tokenizer.digest, tokenizer.stops, tokenizer.special_ids)
    assert copy.encode_texts(["a"], special=True) == tokenizer.encode_texts(["a"], special=True)


def test_digests_differ_if_tokens_can(tmp_path: Path) -> None:
    tokenizers = {}
    for name in FAMILIES:
        (tmp_path / name).mkdir()
        tokenizers[name] = Tokenizer.open(write_family(tmp_path / name, name))
    plain, dated = tokenizers["llama3"], tokenizers["granite"]
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    distinct = [plain, plain.with_template(str(tmp_path / "own.jinja")), plain.with_vocab_size(99_999, "model"), dated]
    distinct += [dated.with_date(date(2024, 2, 29)), tokenizers["llama3_tools"], tokenizers["chatml"]]
    assert len({tokenizer.digest for tokenizer in distinct}) == len(distinct)
    assert plain.with_date(date(2024, 2, 29)).digest == plain.digest  # its template prints no date
