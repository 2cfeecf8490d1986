"""Built-in chat templates, in Jinja, for tokenizers that bring none.

Each writes a format that models were trained on: system prompts, and where the format has them reasoning, tools, their
calls and results. Reasoning is left out of turns that a later question follows, as it is when the model is used. A
format without tools refuses them.
"""

# As Mixtral-8x7B-Instruct-v0.1 has it; a system prompt stands before the first question.
_MISTRAL = """\
{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {%- set ns.system = ns.system + message['content'] + '\n\n' %}
    {%- elif message['role'] == 'assistant' %}
        {%- if ns.system %}
            {{- ' [INST] ' + ns.system.strip() + ' [/INST]' }}
            {%- set ns.system = '' %}
        {%- endif %}
        {%- if message['tool_calls'] %}
            {{- ' [TOOL_CALLS] ' + (message['tool_calls'] | tojson) }}
        {%- endif %}
        {%- if message['content'] %}
            {{- ' ' + message['content'] }}
        {%- endif %}
        {{- eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- ' [TOOL_RESULTS] ' + message['content'] + ' [/TOOL_RESULTS]' }}
    {%- elif message['role'] == 'user' %}
        {%- if tools and loop.index0 <= 1 %}
            {{- ' [AVAILABLE_TOOLS] ' + (tools | tojson) + ' [/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- ' [INST] ' + ns.system + message['content'] + ' [/INST]' }}
        {%- set ns.system = '' %}
    {%- else %}
        {{- raise_exception('the template knows the roles system, user, assistant and tool, not ' + message['role']) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.system %}
    {{- ' [INST] ' + ns.system.strip() + ' [/INST]' }}
{%- endif %}
"""

# Which question is the last: reasoning of the turns before it is left out.
_LAST_QUESTION = """\
{%- set ns = namespace(last_question=-1, call='', in_results=false, system='') %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {%- set ns.last_question = loop.index0 %}
    {%- endif %}
{%- endfor %}
"""

# As Qwen3 has it, to the letter where there are tools. Where <|im_end|> is not the token that ends generation, that one
# follows it.
_CHATML = (
    _LAST_QUESTION
    + """\
{{- bos_token if bos_token and bos_token != '<|im_start|>' and bos_token != eos_token else '' }}
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] + '\n\n' }}
    {%- endif %}
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within ' }}
    {{- '<tool_call></tool_call> XML tags:\n<tool_call>\n' }}
    {{- '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'tool' %}
        {{- '<|im_start|>user' if not ns.in_results }}
        {%- set ns.in_results = not loop.last and loop.nextitem['role'] == 'tool' %}
        {{- '\n<tool_response>\n' + message['content'] + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if not ns.in_results }}
    {%- elif not (loop.first and tools and message['role'] == 'system') %}
        {{- '<|im_start|>' + message['role'] + '\n' }}
        {%- if message['reasoning_content'] and loop.index0 > ns.last_question %}
            {{- '<think>\n' + message['reasoning_content'] + '\n</think>\n\n' }}
        {%- endif %}
        {{- message['content'] or '' }}
        {%- for call in message['tool_calls'] or [] %}
            {{- '\n' if message['content'] or not loop.first }}
            {{- '<tool_call>\n{"name": ' + (call['function']['name'] | tojson) }}
            {{- ', "arguments": ' + (call['function']['arguments'] | tojson) + '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- if message['role'] == 'assistant' and eos_token and eos_token != '<|im_end|>' %}
            {{- eos_token }}
        {%- endif %}
        {{- '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
)

# As GPT-OSS has it: reasoning in the channel analysis, calls and what is said before them in commentary, answers in
# final. <|return|> and <|call|> end generation; in the history an answer ends in <|end|>. Today's date, which may stand
# in the system message, would make other tokens of the same data each day, so it is left out.
_HARMONY = (
    _LAST_QUESTION
    + """\
{%- macro typed(schema) %}
    {%- set kind = schema['type'] or 'any' %}
    {%- if schema['enum'] %}
        {%- for value in schema['enum'] %}
            {{- (' | ' if not loop.first) ~ (value | tojson) }}
        {%- endfor %}
    {%- elif schema['anyOf'] or schema['oneOf'] %}
        {%- for one in schema['anyOf'] or schema['oneOf'] %}
            {{- (' | ' if not loop.first) ~ typed(one) }}
        {%- endfor %}
    {%- elif kind is sequence and kind is not string %}
        {%- for one in kind %}
            {{- (' | ' if not loop.first) ~ typed(dict(schema, type=one)) }}
        {%- endfor %}
    {%- elif kind == 'integer' %}
        {{- 'number' }}
    {%- elif kind == 'array' %}
        {%- set item = typed(schema['items']) if schema['items'] else 'any' %}
        {{- ('(' + item + ')' if ' | ' in item else item) + '[]' }}
    {%- elif kind == 'object' and schema['properties'] %}
        {{- '{\n' + properties(schema) + '}' }}
    {%- else %}
        {{- kind if kind in ('string', 'number', 'boolean', 'null', 'object') else 'any' }}
    {%- endif %}
{%- endmacro %}
{%- macro properties(schema) %}
    {%- for name, property in schema['properties'].items() %}
        {%- if property['description'] %}
            {{- '// ' + property['description'] + '\n' }}
        {%- endif %}
        {{- name + ('' if name in (schema['required'] or []) else '?') + ': ' + typed(property) + ',' }}
        {{- ' // default: ' + (property['default'] | tojson) if property['default'] is defined }}
        {{- '\n' }}
    {%- endfor %}
{%- endmacro %}
{{- '<|start|>system<|message|>' }}
{{- model_identity | default('You are ChatGPT, a large language model trained by OpenAI.') }}
{{- '\nKnowledge cutoff: 2024-06\n\nReasoning: ' + (reasoning_effort | default('medium')) }}
{{- '\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message.' }}
{%- if tools %}
    {{- "\nCalls to these tools must go to the commentary channel: 'functions'." }}
{%- endif %}
{{- '<|end|>' }}
{%- if messages[0]['role'] in ('system', 'developer') %}
    {%- set ns.system = messages[0]['content'] %}
{%- endif %}
{%- if ns.system or tools %}
    {{- '<|start|>developer<|message|>' }}
    {{- '# Instructions\n\n' + ns.system if ns.system }}
    {{- '\n\n' if ns.system and tools }}
    {%- if tools %}
        {{- '# Tools\n\n## functions\n\nnamespace functions {\n\n' }}
        {%- for tool in tools %}
            {%- set function = tool['function'] or tool %}
            {%- if function['description'] %}
                {{- '// ' + function['description'] + '\n' }}
            {%- endif %}
            {{- 'type ' + function['name'] + ' = (' }}
            {%- if function['parameters'] and function['parameters']['properties'] %}
                {{- '_: {\n' + properties(function['parameters']) + '}' }}
            {%- endif %}
            {{- ') => any;\n\n' }}
        {%- endfor %}
        {{- '} // namespace functions' }}
    {%- endif %}
    {{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] in ('system', 'developer') %}
        {%- if not loop.first %}
            {{- '<|start|>developer<|message|># Instructions\n\n' + message['content'] + '<|end|>' }}
        {%- endif %}
    {%- elif message['role'] == 'assistant' %}
        {%- set last = loop.last and not add_generation_prompt %}
        {%- if message['reasoning_content'] and loop.index0 > ns.last_question %}
            {{- '<|start|>assistant<|channel|>analysis<|message|>' + message['reasoning_content'] + '<|end|>' }}
        {%- endif %}
        {%- if message['tool_calls'] %}
            {%- if message['content'] %}
                {{- '<|start|>assistant<|channel|>commentary<|message|>' + message['content'] + '<|end|>' }}
            {%- endif %}
            {%- for call in message['tool_calls'] %}
                {%- set ns.call = call['function']['name'] %}
                {%- set arguments = call['function']['arguments'] %}
                {{- '<|start|>assistant<|channel|>commentary to=functions.' + ns.call }}
                {{- ' <|constrain|>json<|message|>' }}
                {{- (arguments if arguments is string else arguments | tojson) + '<|call|>' }}
            {%- endfor %}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message['content'] }}
            {{- '<|return|>' if last else '<|end|>' }}
        {%- endif %}
    {%- elif message['role'] == 'tool' %}
        {{- '<|start|>functions.' + (message['name'] or ns.call) + ' to=assistant<|channel|>commentary<|message|>' }}
        {{- message['content'] + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message['role'] + '<|message|>' + message['content'] + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant' }}
{%- endif %}
"""
)

# As DeepSeek-V3 and R1 have it. What follows the results of tools is the same turn, which no <｜Assistant｜> opens.
_DEEPSEEK = (
    _LAST_QUESTION
    + """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {%- set ns.system = ns.system + ('\n\n' if ns.system else '') + message['content'] %}
    {%- endif %}
{%- endfor %}
{{- ns.system }}
{%- if tools %}
    {{- ('\n\n' if ns.system else '') + '## Tools\n\nFunctions that may be called:\n' }}
    {%- for tool in tools %}
        {{- '\n' + (tool | tojson) }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- '<｜User｜>' + message['content'] }}
    {%- elif message['role'] == 'assistant' %}
        {{- '<｜Assistant｜>' if loop.first or loop.previtem['role'] != 'tool' }}
        {%- if message['reasoning_content'] and loop.index0 > ns.last_question %}
            {{- '<think>\n' + message['reasoning_content'] + '\n</think>\n\n' }}
        {%- endif %}
        {{- message['content'] or '' }}
        {%- for call in message['tool_calls'] or [] %}
            {%- set arguments = call['function']['arguments'] %}
            {{- '<｜tool▁calls▁begin｜>' if loop.first else '\n' }}
            {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call['function']['name'] + '\n```json\n' }}
            {{- (arguments if arguments is string else arguments | tojson) + '\n```<｜tool▁call▁end｜>' }}
            {{- '<｜tool▁calls▁end｜>' if loop.last }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message['role'] == 'tool' %}
        {{- '\n' if loop.previtem and loop.previtem['role'] == 'tool' else '<｜tool▁outputs▁begin｜>' }}
        {{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}
        {{- '<｜tool▁outputs▁end｜>' if loop.last or loop.nextitem['role'] != 'tool' }}
    {%- elif message['role'] != 'system' %}
        {{- raise_exception('the template knows the roles system, user, assistant and tool, not ' + message['role']) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages and messages[-1]['role'] != 'tool' %}
    {{- '<｜Assistant｜>' }}
{%- endif %}
"""
)

# As GLM-4.5 has it, to the letter where there are tools: generation ends with the token that opens the next turn, the
# user's or, after a call, its result's.
_GLM = (
    _LAST_QUESTION
    + """\
{{- '[gMASK]<sop>' }}
{%- if tools %}
    {{- '<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n' }}
    {%- for tool in tools %}
        {{- (tool | tojson) + '\n' }}
    {%- endfor %}
    {{- '</tools>\n\nFor each function call, output the function name and arguments within the following XML ' }}
    {{- 'format:\n<tool_call>{function-name}\n' }}
    {%- for number in ('1', '2') %}
        {{- '<arg_key>{arg-key-' + number + '}</arg_key>\n<arg_value>{arg-value-' + number + '}</arg_value>\n' }}
    {%- endfor %}
    {{- '...\n</tool_call>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
        {%- set reasoning = message['reasoning_content'] if loop.index0 > ns.last_question else '' %}
        {{- '<|assistant|>\n<think>' + (reasoning or '') + '</think>' }}
        {{- '\n' + message['content'] if message['content'] }}
        {%- for call in message['tool_calls'] or [] %}
            {{- '\n<tool_call>' + call['function']['name'] }}
            {%- for name, value in call['function']['arguments'].items() %}
                {{- '\n<arg_key>' + name + '</arg_key>\n<arg_value>' }}
                {{- (value if value is string else value | tojson) + '</arg_value>' }}
            {%- endfor %}
            {{- '\n</tool_call>' }}
        {%- endfor %}
        {%- if loop.last and not add_generation_prompt %}
            {{- '<|observation|>' if message['tool_calls'] else '<|user|>' }}
        {%- endif %}
    {%- elif message['role'] == 'tool' %}
        {{- '<|observation|>' if loop.first or loop.previtem['role'] != 'tool' }}
        {{- '\n<tool_response>\n' + message['content'] + '\n</tool_response>' }}
    {%- else %}
        {{- '<|' + message['role'] + '|>\n' + message['content'] }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""
)

# As OLMoE-Instruct has it from Tülu: roles are plain text, there are no tools and no reasoning.
_OLMOE = """\
{%- if tools %}
    {{- raise_exception('the format has no tools') }}
{%- endif %}
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ('system', 'user', 'assistant') or message['tool_calls'] %}
        {{- raise_exception('the format has no tools, and no roles but system, user and assistant') }}
    {%- endif %}
    {{- '<|' + message['role'] + '|>\n' + message['content'] }}
    {{- eos_token if message['role'] == 'assistant' }}
    {{- '\n' if not loop.last or message['role'] != 'assistant' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\n' }}
{%- endif %}
"""

TEMPLATES = {
    "mistral": _MISTRAL,
    "chatml": _CHATML,
    "harmony": _HARMONY,
    "deepseek": _DEEPSEEK,
    "glm": _GLM,
    "olmoe": _OLMOE,
}

OWN_TOKENS = {
    "chatml": "<|im_start|>",
    "harmony": "<|channel|>",
    "deepseek": "<｜Assistant｜>",
    "glm": "<|observation|>",
}
"""A token that only vocabularies made for the template have, which is the one for them. Mistral has no such token:
it is for all others."""
