"""Templates are untrusted: their errors are reported in one line, and they cannot leave the sandbox."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tunekit.data.chat_template.template import ChatTemplate
from tunekit.errors import UserError

CONVERSATION = [{"role": "user", "content": "Hi <b>'é'"}, {"role": "assistant", "content": "Yo"}]
CONTEXT = {"messages": CONVERSATION, "tools": None, "documents": None, "add_generation_prompt": False}


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
    assert ChatTemplate(text, "t").render(CONTEXT) == render_jinja_template([CONVERSATION], chat_template=text)[0][0]


BLOCK = "{% generation %}{{ m.content }}{% endgeneration %}"


@pytest.mark.parametrize(
    ("text", "has_one_pass_spans"),
    [
        (f"{{% for m in messages %}}{{{{ m.role }}}}:{BLOCK}\n{{% endfor %}}", True),
        (f"{{% for m in messages if m.role == 'tool' %}}{BLOCK}{{% endfor %}}", True),
        (f"{{% for m in messages %}}{{% block b scoped %}}<{BLOCK}>{{% endblock %}}{{% endfor %}}", True),
        (
            f"{{% for m in messages %}}{{% set x %}}<{BLOCK}>{{% endset %}}{{{{ x }}}}{{{{ x }}}}{{% endfor %}}",
            False,
        ),
        (f"{{% macro say(m) %}}<{BLOCK}>{{% endmacro %}}{{{{ say(messages[0]) }}}}", False),
        (f"{{% for m in messages %}}{{% filter upper %}}<{BLOCK}>{{% endfilter %}}{{% endfor %}}", False),
        (f"{{% for m in messages %}}{BLOCK}{{% endfor %}}{{# generation_opens #}}", False),
    ],
)
def test_generation_spans_are_the_same_in_one_or_two_passes(text: str, has_one_pass_spans: bool) -> None:
    template = ChatTemplate(text, "t")
    rendered, spans = template.render_with_spans(CONTEXT)
    assert rendered == template.render(CONTEXT)
    assert (spans is not None) == has_one_pass_spans
    two_pass_spans = template.generation_spans(rendered, CONTEXT)
    template.boundaries_only_in_blocks = False  # both methods give the same spans
    assert template.generation_spans(rendered, CONTEXT) == two_pass_spans
    assert not has_one_pass_spans or two_pass_spans == spans


def test_generation_spans_equal_transformers_and_work_in_macros() -> None:
    text = "é{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}.{% endgeneration %}\n{% endfor %}"
    theirs, spans = render_jinja_template([CONVERSATION], chat_template=text, return_assistant_tokens_mask=True)
    template = ChatTemplate(text, "t")
    assert template.generation_spans(template.render(CONTEXT), CONTEXT) == spans[0]
    assert [theirs[0][start:end] for start, end in spans[0]] == ["Hi <b>'é'.", "Yo."]
    macro = "{% macro say(m) %}<{% generation %}{{ m.content }}{% endgeneration %}>{% endmacro %}"
    template = ChatTemplate(macro + "{% for m in messages %}{{ say(m) }}{% endfor %}", "t")
    rendered = template.render(CONTEXT)
    assert [rendered[start:end] for start, end in template.generation_spans(rendered, CONTEXT)] == ["Hi <b>'é'", "Yo"]


@pytest.mark.parametrize(
    "text",
    [
        "{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}",
        "{% set x %}{% generation %}abc{% endgeneration %}{% endset %}{{ x | length }}",
        "{% set x %}{% generation %}abc{% endgeneration %}{% endset %}{{ x | truncate(2, True, '', 0) }}",
    ],
)
def test_rewritten_generation_blocks_are_an_error(text: str) -> None:
    template = ChatTemplate(text, "t")
    with pytest.raises(UserError, match="generation"):
        template.generation_spans(template.render(CONTEXT), CONTEXT)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ raise_exception('Only\nusers speak') }}", "Only users speak"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ nothing.here }}", "'nothing' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ nothing | tojson }}", "Object of type Undefined"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% include 'file' %}", ""),
    ],
)
def test_template_error_is_one_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^model/chat.jinja: .*{message}") as error:
        ChatTemplate(text, "model/chat.jinja").render(CONTEXT)
    assert "\n" not in str(error.value)


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
def test_template_cannot_leave_its_sandbox(text: str) -> None:
    with pytest.raises(UserError, match="^t: "):
        ChatTemplate(text, "t").render(CONTEXT)
    assert CONVERSATION[0] == {"role": "user", "content": "Hi <b>'é'"}


def test_syntax_error_has_its_line() -> None:
    with pytest.raises(UserError, match="^t: .*line 2"):
        ChatTemplate("fine\n{% if %}", "t")
