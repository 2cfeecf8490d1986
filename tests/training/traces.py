"""The same trace of an agent in the forms in which other tools have them, and templates of six families."""

import json
from pathlib import Path
from typing import Any

import trl
from tokenizers import AddedToken
from transformers import AutoTokenizer

from tests.tiny import save_tokenizer

Row = dict[str, Any]

# Of three families no installed package has the template. These are ours, with what is particular to theirs.

# DeepSeek-V3.1, but for tools, which its own leaves to the system prompt: the words that ask for an answer close its
# thought, so that none is written; arguments are text; behind results, which nothing opens, nothing asks for an answer.
DEEPSEEK = """\
{%- set ns = namespace(asked=false) %}
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{- m.content }}{% endif %}
{%- endfor %}
{%- if tools %}{{- tools | tojson }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- set ns.asked = true %}
        {{- '<｜User｜>' + m.content }}
    {%- elif m.role == 'assistant' %}
        {{- '<｜Assistant｜></think>' if ns.asked }}
        {%- set ns.asked = false %}
        {{- m.content if m.tool_calls else m.content.split('</think>')[-1] }}
        {%- for call in m.tool_calls or [] %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first }}
            {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}
            {{- '<｜tool▁call▁end｜>' + ('<｜tool▁calls▁end｜>' if loop.last else '') }}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- elif m.role == 'tool' %}
        {%- set ns.asked = false %}
        {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.asked %}{{- '<｜Assistant｜></think>' }}{% endif %}
"""
# Kimi-K2-Thinking: thoughts are written behind the last answer without calls, and an empty one before it; the id of a
# call, and that of its result, stands for the function's name.
KIMI = """\
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and not m.tool_calls %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' }}{% endif %}
{%- for m in messages %}
    {{- '<|im_' + (m.role if m.role in ('user', 'assistant') else 'system') + '|>' + m.role + '<|im_middle|>' }}
    {%- if m.role == 'assistant' %}
        {{- '<think>' + (m.reasoning_content or '' if loop.index0 > ns.last else '') + '</think>' + m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '<|tool_calls_section_begin|>' if loop.first }}
            {{- '<|tool_call_begin|>' ~ call.id ~ '<|tool_call_argument_begin|>' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '<|tool_call_end|>' + ('<|tool_calls_section_end|>' if loop.last else '') }}
        {%- endfor %}
    {%- else %}
        {{- ('## Return of ' ~ m.tool_call_id ~ '\n' if m.role == 'tool' else '') ~ m.content }}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}
"""
# MiniMax-M2: thoughts are written behind the last question alone, and what asks for an answer opens one; a call is an
# element whose parameters are elements; the results of one turn stand together; brackets are its special tokens.
MINIMAX = """\
{%- set ns = namespace(last=-1, called=false) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{{- ']~!b[]~b]system\n' + (messages[0].content if messages[0].role == 'system' else '') }}
{{- ('<tools>' + (tools | tojson) + '</tools>' if tools else '') + '[e~[\n' }}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- ']~b]ai\n' }}
        {%- if m.reasoning_content and loop.index0 > ns.last %}
            {{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}
        {%- endif %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\n<minimax:tool_call>\n' if loop.first }}
            {{- '<invoke name="' + call.function.name + '">\n' }}
            {%- for key, value in call.function.arguments.items() %}
                {{- '<parameter name="' + key + '">' + (value if value is string else value | tojson) }}
                {{- '</parameter>\n' }}
            {%- endfor %}
            {{- '</invoke>\n' + ('</minimax:tool_call>' if loop.last else '') }}
        {%- endfor %}
        {{- '[e~[\n' }}
        {%- set ns.called = m.tool_calls %}
    {%- elif m.role == 'tool' %}
        {%- if not ns.called %}{{- raise_exception('a result without a call') }}{% endif %}
        {{- ']~b]tool' if loop.previtem.role != 'tool' }}
        {{- '\n<response>' + m.content + '</response>' }}
        {{- '[e~[\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- elif m.role == 'user' %}
        {{- ']~b]user\n' + m.content + '[e~[\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- ']~b]ai\n<think>\n' }}{% endif %}
"""


def published(name: str) -> str:
    """The family's own template, as trl brings it."""
    return (Path(trl.__file__).parent / f"chat_templates/{name}.jinja").read_text(encoding="utf-8")


FAMILIES: dict[str, tuple[str, list[str]]] = {
    "Qwen3": (published("qwen3"), ["<|im_end|>", "<|im_start|>"]),
    "GLM-4.5": (published("glm4moe"), ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"]),
    "GPT-OSS": (
        published("gptoss"), ["<|return|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"],
    ),
    "DeepSeek-V3.1": (DEEPSEEK, ["<｜end▁of▁sentence｜>"]),
    "Kimi-K2": (KIMI, ["<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"]),
    "MiniMax-M2": (MINIMAX, ["[e~[", "]~b]", "]~!b["]),
}  # fmt: skip
"""Of each family the template and special tokens, of which the first ends generation."""


def tokenizer_of(directory: Path, name: str) -> Any:
    template, special = FAMILIES[name]
    save_tokenizer(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.eos_token, tokenizer.chat_template = special[0], template
    return tokenizer


SCHEMA = {"type": "object", "properties": {"q": {"type": "string", "description": "what"}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": SCHEMA}}
    for name in ("find", "buy")
]
FLAT = [tool["function"] for tool in TOOLS]
ASKED, THOUGHT, SAID, ENOUGH, DONE = "A pen?", "Which one", "Let me see", "Cheap", "It is here"
NAMES, WORDS, RESULTS = ("find", "buy"), ("blue", "red"), ("at 3", "at 7")
IDS = [f"functions.{name}:{at}" for at, name in enumerate(NAMES)]
SYSTEM = "Be brief."


def call(at: int, has_id: bool = True, is_text: bool = False) -> Row:
    arguments: Any = {"q": WORDS[at]}
    function = {"name": NAMES[at], "arguments": json.dumps(arguments) if is_text else arguments}
    return {**({"id": IDS[at]} if has_id else {}), "type": "function", "function": function}


def answer(content: str, reasoning: str = "", calls: int = 0, has_ids: bool = True) -> Row:
    made = [call(at, has_ids) for at in range(calls)]
    found = {"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": made}
    return {key: value for key, value in found.items() if value or key == "content"}


def result(at: int, has_id: bool = True) -> Row:
    return {"role": "tool", "content": RESULTS[at]} | ({"tool_call_id": IDS[at]} if has_id else {})


def turn(role: str, content: Any, **more: Any) -> Row:
    return {"role": role, "content": content, **more}


def said(who: str, value: str) -> Row:
    return {"from": who, "value": value}


def part(kind: str, **more: Any) -> Row:
    return {"type": kind, **more}


def tagged(at: int) -> str:
    """Hermes' call, as Python writes it."""
    return f"<tool_call>\n{ {'arguments': {'q': WORDS[at]}, 'name': NAMES[at]} }\n</tool_call>"


HERMES = (
    "You are a function calling AI model. You are provided with function signatures within <tools> </tools> XML tags. "
    f"Here are the available tools:\n<tools>\n{json.dumps(TOOLS)}\n</tools>\nFor each call return a JSON object."
)
FULL = [
    turn("user", ASKED), answer(SAID, THOUGHT, 2), result(0), result(1), answer(DONE, ENOUGH),
]  # fmt: skip
WITHOUT_IDS = [turn("user", ASKED), answer(SAID, "", 2, False), result(0, False), result(1, False), answer(DONE)]
BARE = [json.dumps({"name": NAMES[at], "arguments": {"q": WORDS[at]}}) for at in (0, 1)]

WRITTEN = {
    "OpenAI": "`tool_calls`; role `tool`, `tool_call_id`; `tools`",
    "OpenAI's older": "`function_call`; role `function`; `functions`",
    "reasoning_content": "`reasoning_content` (`reasoning`, `thinking`) beside `content` and `tool_calls`",
    "Anthropic": "parts `thinking`, `text`, `tool_use`; the user's `tool_result`; `input_schema`",
    "ms-swift": "roles `assistant`, `tool_call`, `tool_response`",
    "ShareGPT": "`gpt`, `function_call`, `observation`",
    "LLaMA-Factory": "parts `reasoning`, `text`, `tool_call`",
    "verifiers": "`prompt`, `completion`, `tool_defs`; each call as JSON text",
    "Hermes": "`<tools>`, `<think>`, `<tool_call>`, `<tool_response>` in texts",
    "xlam": "`query`, `answers`, `tools`",
}
"""How each of FORMS has reasoning, text, calls, results and tools, for docs/reference/data-formats.md."""
FORMS: dict[str, tuple[Row, list[Row]]] = {
    "OpenAI": (
        {
            "messages": [
                turn("user", ASKED), turn("assistant", None, tool_calls=[call(0, is_text=True), call(1, is_text=True)]),
                result(1), result(0), turn("assistant", DONE),
            ],
            "tools": TOOLS, "parallel_tool_calls": True,
        },
        [turn("user", ASKED), answer("", "", 2), result(0), result(1), answer(DONE)],
    ),
    "OpenAI's older": (
        {
            "messages": [
                turn("user", ASKED), turn("assistant", None, function_call=call(0, is_text=True)["function"]),
                turn("function", RESULTS[0], name=NAMES[0]), turn("assistant", DONE),
            ],
            "functions": FLAT,
        },
        [turn("user", ASKED), answer("", "", 1, False), turn("tool", RESULTS[0], name=NAMES[0]), answer(DONE)],
    ),
    "reasoning_content": ({"messages": FULL, "tools": TOOLS}, FULL),
    "Anthropic": (
        {
            "system": [part("text", text=SYSTEM)],
            "messages": [
                turn("user", [part("text", text=ASKED)]),
                turn("assistant", [
                    part("thinking", thinking=THOUGHT, signature="x"), part("text", text=SAID),
                    *(part("tool_use", id=IDS[at], name=NAMES[at], input={"q": WORDS[at]}) for at in (0, 1)),
                ]),
                turn("user", [
                    part("tool_result", tool_use_id=IDS[1], content=[part("text", text=RESULTS[1])]),
                    part("tool_result", tool_use_id=IDS[0], content=RESULTS[0], is_error=False),
                ]),
                turn("assistant", [part("thinking", thinking=ENOUGH), part("text", text=DONE)]),
            ],
            "tools": [{"name": t["name"], "description": t["description"], "input_schema": SCHEMA} for t in FLAT],
        },
        [turn("system", SYSTEM), *FULL],
    ),
    "ms-swift": (
        {
            "messages": [
                turn("user", ASKED), turn("assistant", SAID), turn("tool_call", BARE[0]), turn("tool_call", BARE[1]),
                turn("tool_response", RESULTS[0]), turn("tool_response", RESULTS[1]), turn("assistant", DONE),
            ],
            "tools": json.dumps(TOOLS),
        },
        WITHOUT_IDS,
    ),
    "ShareGPT": (
        {
            "conversations": [
                said("human", ASKED), said("gpt", SAID), said("function_call", f"[{BARE[0]}, {BARE[1]}]"),
                said("observation", RESULTS[0]), said("observation", RESULTS[1]), said("gpt", DONE),
            ],
            "system": SYSTEM, "tools": json.dumps(FLAT),
        },
        [turn("system", SYSTEM), *WITHOUT_IDS],
    ),
    "LLaMA-Factory": (
        {
            "messages": [
                turn("user", [part("text", value=ASKED)], loss_weight=0.0),
                turn("assistant", [
                    part("reasoning", value=THOUGHT), part("text", value=SAID),
                    *(part("tool_call", value=one) for one in BARE),
                ], loss_weight=1.0),
                turn("tool", [part("text", value=RESULTS[0])]), turn("tool", [part("text", value=RESULTS[1])]),
                turn("assistant", [part("reasoning", value=ENOUGH), part("text", value=DONE)]),
            ],
            "tools": json.dumps(TOOLS),
        },
        [turn("user", ASKED), answer(SAID, THOUGHT, 2, False), *WITHOUT_IDS[2:4], answer(DONE, ENOUGH)],
    ),
    "verifiers": (
        {
            "prompt": [turn("system", SYSTEM), turn("user", ASKED)],
            "completion": [
                turn("assistant", SAID, reasoning_content=THOUGHT, tool_calls=[
                    json.dumps({"id": IDS[at], "name": NAMES[at], "arguments": json.dumps({"q": WORDS[at]})})
                    for at in (0, 1)
                ]),
                result(0), result(1), turn("assistant", DONE, reasoning_content=ENOUGH, tool_calls=None),
            ],
            "tool_defs": FLAT, "answer": "7", "reward": 1.0,
        },
        [turn("system", SYSTEM), *FULL],
    ),
    "Hermes": (
        {
            "conversations": [
                said("system", HERMES), said("human", ASKED),
                said("gpt", f"<think>\n{THOUGHT}\n</think>\n{SAID}\n{tagged(0)}\n{tagged(1)}"),
                said("tool", "".join(f"<tool_response>\n{each}\n</tool_response>\n" for each in RESULTS)),
                said("gpt", f"<think>\n{ENOUGH}\n</think>\n\n{DONE}"),
            ],
            "category": "shopping",
        },
        [turn("user", ASKED), answer(SAID, THOUGHT, 2, False), *WITHOUT_IDS[2:4], answer(DONE, ENOUGH)],
    ),
    "xlam": (
        {
            "query": ASKED, "answers": f"[{BARE[0]}, {BARE[1]}]",
            "tools": json.dumps([{**tool, "parameters": SCHEMA["properties"]} for tool in FLAT]),
        },
        WITHOUT_IDS[:1] + [answer("", "", 2, False)],
    ),
}  # fmt: skip
"""(a record as the tool has it, the messages in OpenAI's form that it says)"""
