"""Chat templates that write what those of well-known models do, in words of our own.

`LLAVA_ONEVISION` and `QWEN2_VL` were compared with public copies of the released ones; the others are from memory.
"""

CHATML_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"

# The processor's of llava-hf: a space behind the role, each text on a line of its own, media first.
LLAVA_ONEVISION = """
{%- for message in messages -%}
{{ '<|im_start|>' ~ message.role ~ ' ' }}
{%- for kind in ['image', 'video'] %}{% for part in message.content | selectattr('type', 'equalto', kind) %}
{{- '<' ~ kind ~ '>' }}
{%- endfor %}{% endfor %}
{%- for part in message.content | selectattr('type', 'equalto', 'text') %}
{%- if message.role == 'assistant' %}{% generation %}{{ '\n' ~ part.text }}{% endgeneration %}
{%- else %}{{ '\n' ~ part.text }}{% endif %}
{%- endfor %}
{{- '<|im_end|>' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""

# The same as transformers' own conversion of the original weights writes it: lines end as in the original.
LLAVA_ONEVISION_CONVERTED = """
{%- for message in messages -%}
{{ '<|im_start|>' ~ message.role ~ '\n' }}
{%- for kind in ['image', 'video'] %}{% for part in message.content | selectattr('type', 'equalto', kind) %}
{{- '<' ~ kind ~ '>\n' }}
{%- endfor %}{% endfor %}
{%- for part in message.content | selectattr('type', 'equalto', 'text') %}
{%- if message.role == 'assistant' %}{% generation %}{{ part.text }}{% endgeneration %}
{%- else %}{{ part.text }}{% endif %}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif -%}
"""

# Qwen2-VL's and Qwen2.5-VL's: a system turn where there is none.
QWEN2_VL = """
{%- set num = namespace(images=0, videos=0) %}
{%- for message in messages %}
{%- if loop.first and message.role != 'system' %}
{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}
{%- endif %}
{{- '<|im_start|>' ~ message.role ~ '\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
{%- set num.images = num.images + 1 %}
{%- if add_vision_id %}{{ 'Picture ' ~ num.images ~ ': ' }}{% endif %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' or 'video' in part %}
{%- set num.videos = num.videos + 1 %}
{%- if add_vision_id %}{{ 'Video ' ~ num.videos ~ ': ' }}{% endif %}
{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif 'text' in part %}{{ part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
""" + CHATML_PROMPT.replace("{% if", "{%- if", 1)

# Qwen3-VL's: tools, calls of them, and what they return.
QWEN3_VL = """
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].content is string %}{{ messages[0].content }}
{%- else %}{% for part in messages[0].content %}{% if 'text' in part %}{{ part.text }}{% endif %}{% endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|im_start|>user\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' or 'video' in part %}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif 'text' in part %}{{ part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}{% if 'text' in part %}{{ part.text }}{% endif %}{% endfor %}
{%- endif %}
{%- if message.tool_calls %}
{%- for call in message.tool_calls %}
{%- if message.content or not loop.first %}{{ '\n' }}{% endif %}
{{- '<tool_call>\n' ~ (call.function.arguments | tojson) ~ '\n</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' ~ message.content ~ '\n</tool_response><|im_end|>\n' }}
{%- endif %}
{%- endfor %}
""" + CHATML_PROMPT.replace("{% if", "{%- if", 1)

# Qwen3's, which InternVL3.5 has, too: only the last answer has room for thoughts, those of earlier ones are left out.
QWEN3_THINKING = """
{%- set last = namespace(query=messages | length - 1, open=true) %}
{%- for message in messages[::-1] %}
{%- if last.open and message.role == 'user' and not message.content.startswith('<tool_response>') %}
{%- set last.open = false %}
{%- set last.query = messages | length - 1 - loop.index0 %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role != 'assistant' %}{{ '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' }}
{%- else %}
{%- set said, thought = message.content, '' %}
{%- if '</think>' in said %}
{%- set thought = said.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set said = said.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > last.query and (loop.last or thought) %}
{{- '<think>\n' ~ thought.strip('\n') ~ '\n</think>\n\n' ~ said.lstrip('\n') }}
{%- else %}{{ said }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
""" + CHATML_PROMPT.replace("{% if", "{%- if", 1)

# InternVL3's in Hugging Face format.
INTERNVL = """
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{ '<IMG_CONTEXT>\n' }}
{%- elif part.type == 'video' %}{{ '<video>\n' }}
{%- elif part.type == 'text' %}{{ part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
""" + CHATML_PROMPT.replace("{% if", "{%- if", 1)

# Llama 3's: texts are trimmed, and a token begins the whole.
LLAMA3 = """
{%- for message in messages %}
{%- set text = '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' %}
{%- if loop.first %}{% set text = bos_token + text %}{% endif %}
{{- text }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""

# Llama 3.2's: a system turn with the day.
LLAMA32 = """
{{- bos_token }}
{%- if strftime_now is defined %}{% set today = strftime_now('%d %b %Y') %}{% else %}{% set today = '26 Jul 2024' %}{% endif %}
{%- if messages[0].role == 'system' %}
{%- set rules = messages[0].content | trim %}
{%- set rest = messages[1:] %}
{%- else %}
{%- set rules = '' %}
{%- set rest = messages %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' ~ today ~ '\n\n' ~ rules ~ '<|eot_id|>' }}
{%- for message in rest %}
{{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\n\n' ~ message.content | trim ~ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""  # noqa: E501

# Mistral's: no prompt for an answer, turns must alternate, the system's text goes into the last question.
MISTRAL = """
{%- if messages[0].role == 'system' %}
{%- set rules = messages[0].content.strip() ~ '\n\n' %}
{%- set rest = messages[1:] %}
{%- else %}
{%- set rules = '' %}
{%- set rest = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in rest %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate user/assistant/user/assistant') }}
{%- endif %}
{%- if message.role == 'user' %}
{{- '[INST] ' ~ (rules if loop.last or loop.revindex == 2 and rest[-1].role == 'assistant' else '') }}
{{- message.content.strip() ~ ' [/INST]' }}
{%- else %}{{ ' ' ~ message.content.strip() ~ eos_token }}
{%- endif %}
{%- endfor %}
"""

# Gemma's: the assistant is called model, and a system's turn is refused.
GEMMA = """
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<start_of_turn>' ~ role ~ '\n' ~ message.content | trim ~ '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""

# As TRL writes it for training on answers alone.
CHATML_GENERATION = """
{%- for message in messages %}
{{- '<|im_start|>' ~ message.role ~ '\n' }}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content ~ '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ message.content ~ '<|im_end|>' }}
{%- endif %}
{{- '\n' }}
{%- endfor %}
""" + CHATML_PROMPT.replace("{% if", "{%- if", 1)
