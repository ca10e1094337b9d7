"""A template is untrusted: what it refuses is told, what it should not reach it does not."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tunekit.data.chat_template.template import ChatTemplate
from tunekit.errors import UserError

TALK = [{"role": "user", "content": "Hi <b>'é'"}, {"role": "assistant", "content": "Yo"}]
CONTEXT = {"messages": TALK, "tools": None, "documents": None, "add_generation_prompt": False}


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages | tojson }} {{ messages | tojson(indent=2) }} {{ messages[0] | tojson(sort_keys=True) }}",
        "{{ messages | tojson(ensure_ascii=True, separators=(',', ':')) }}",
        "{% for m in messages %}\n  {% if m.role == 'user' %}\n    {{ m.content }}\n  {% endif %}\n{% endfor %}\n",
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{{ dict(a=1, **messages[0]) }} {{ missing }} {{ messages[0].missing }} {{ tools is none }}",
        "{% for m in messages %}{% generation %}\n{{ m.content }}\n{% endgeneration %}\n!{% endfor %}",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "{% macro say(m) %}{{ m.role }}: {{ caller() }}{% endmacro %}{% call say(messages[0]) %}x{% endcall %}",
    ],
)
def test_text_equals_transformers(text: str) -> None:
    assert ChatTemplate(text, "t").render(CONTEXT) == render_jinja_template([TALK], chat_template=text)[0][0]


BLOCK = "{% generation %}{{ m.content }}{% endgeneration %}"


@pytest.mark.parametrize(
    ("text", "straight"),
    [
        (f"{{% for m in messages %}}{{{{ m.role }}}}:{BLOCK}\n{{% endfor %}}", True),
        (f"{{% for m in messages if m.role == 'tool' %}}{BLOCK}{{% endfor %}}", True),
        (f"{{% for m in messages %}}{{% block b scoped %}}<{BLOCK}>{{% endblock %}}{{% endfor %}}", True),
        (f"{{% for m in messages %}}{{% set x %}}<{BLOCK}>{{% endset %}}{{{{ x }}}}{{{{ x }}}}{{% endfor %}}", False),
        (f"{{% macro say(m) %}}<{BLOCK}>{{% endmacro %}}{{{{ say(messages[0]) }}}}", False),
        (f"{{% for m in messages %}}{{% filter upper %}}<{BLOCK}>{{% endfilter %}}{{% endfor %}}", False),
        (f"{{% for m in messages %}}{BLOCK}{{% endfor %}}{{# generation_opens #}}", False),
    ],
)
def test_blocks_are_found_as_they_are_written_or_by_a_second_look(text: str, straight: bool) -> None:
    template = ChatTemplate(text, "t")
    whole, spans = template.written(CONTEXT)
    assert whole == template.render(CONTEXT)
    assert (spans is not None) == straight
    found = template.generated(whole, CONTEXT)
    template.plain = False  # both ways give the same
    assert template.generated(whole, CONTEXT) == found
    assert not straight or found == spans


def test_generation_spans_equal_transformers_and_hold_in_macros_too() -> None:
    text = "é{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}.{% endgeneration %}\n{% endfor %}"
    theirs, spans = render_jinja_template([TALK], chat_template=text, return_assistant_tokens_mask=True)
    template = ChatTemplate(text, "t")
    assert template.generated(template.render(CONTEXT), CONTEXT) == spans[0]
    assert [theirs[0][start:end] for start, end in spans[0]] == ["Hi <b>'é'.", "Yo."]
    macro = "{% macro say(m) %}<{% generation %}{{ m.content }}{% endgeneration %}>{% endmacro %}"
    template = ChatTemplate(macro + "{% for m in messages %}{{ say(m) }}{% endfor %}", "t")
    whole = template.render(CONTEXT)
    assert [whole[start:end] for start, end in template.generated(whole, CONTEXT)] == ["Hi <b>'é'", "Yo"]


@pytest.mark.parametrize(
    "text",
    [
        "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}",
        "{% set x %}{% generation %}abc{% endgeneration %}{% endset %}{{ x | length }}",
        "{% set x %}{% generation %}abc{% endgeneration %}{% endset %}{{ x | truncate(2, True, '', 0) }}",
    ],
)
def test_generation_blocks_that_are_rewritten_are_refused(text: str) -> None:
    template = ChatTemplate(text, "t")
    with pytest.raises(UserError, match="nests or rewrites its generation blocks"):
        template.generated(template.render(CONTEXT), CONTEXT)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ raise_exception('Only\nusers speak') }}", "the chat template fails: Only users speak"),
        ("{{ messages[0].content + 1 }}", "the chat template fails: can only concatenate str"),
        ("{{ nothing.here }}", "the chat template fails: 'nothing' is undefined"),
        ("{{ 1 / 0 }}", "the chat template fails: division by zero"),
        ("{{ nothing | tojson }}", "the chat template fails: Object of type Undefined"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "the chat template fails: .*recursion"),
        ("{% include 'file' %}", "the chat template fails"),
    ],
)
def test_what_a_template_refuses_is_told(text: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^model/chat.jinja: {message}") as told:
        ChatTemplate(text, "model/chat.jinja").render(CONTEXT)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ dict.__init__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ (messages | attr('__class__')).__mro__ }}",
        "{{ range(10000000) | list }}",
    ],
)
def test_a_template_does_not_leave_its_sandbox(text: str) -> None:
    with pytest.raises(UserError, match="^t: the chat template (tries to leave its sandbox|fails)"):
        ChatTemplate(text, "t").render(CONTEXT)
    assert TALK[0] == {"role": "user", "content": "Hi <b>'é'"}


def test_bad_syntax_is_told_with_its_line() -> None:
    with pytest.raises(UserError, match="^t: the chat template is no valid Jinja: line 2: "):
        ChatTemplate("fine\n{% if %}", "t")
