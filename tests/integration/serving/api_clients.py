"""Ask a server through other clients than ours; run by `test_apis.py`, with another Python.

Usage: `python api_clients.py URL`. Prints what each client received as JSON, by its name.
"""

import json
import sys
from importlib import import_module
from typing import Any

MODEL = "apar-tiny"
PROMPT = "Give me 3 tips for sleeping well."


def official(url: str) -> dict[str, Any]:
    """Return the texts of OpenAI's and Anthropic's own clients, perhaps of older versions."""
    openai = import_module("openai").OpenAI(base_url=f"{url}/v1", api_key="plain")
    anthropic = import_module("anthropic").Anthropic(base_url=url, api_key="plain")
    messages = [{"role": "user", "content": PROMPT}]
    chat: dict[str, Any] = {"model": MODEL, "messages": messages, "temperature": 0}
    asked: dict[str, Any] = {"model": MODEL, "input": PROMPT, "temperature": 0}
    said: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 400}
    # Newer clients have no `temperature` for messages.
    said["extra_body"] = {"temperature": 0}
    chunks = list(openai.chat.completions.create(**chat, stream=True))
    with openai.responses.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    with anthropic.messages.stream(**said) as stream:
        texts = list(stream.text_stream)
    whole_chat = openai.chat.completions.create(**chat)
    whole_response = openai.responses.create(**asked)
    whole_message = anthropic.messages.create(**said)
    return {
        "openai chat": {
            "whole": whole_chat.choices[0].message.content,
            "streamed": "".join(each.choices[0].delta.content or "" for each in chunks),
            "tokens": whole_chat.usage.completion_tokens,
            "pieces": len(chunks),
        },
        "openai responses": {
            "whole": whole_response.output_text,
            "streamed": "".join(deltas),
            "tokens": whole_response.usage.output_tokens,
            "pieces": len(deltas),
        },
        "anthropic messages": {
            "whole": whole_message.content[0].text,
            "streamed": "".join(texts),
            "tokens": whole_message.usage.output_tokens,
            "pieces": len(texts),
        },
    }


def langchain(url: str) -> dict[str, Any]:
    """Return the texts of LangChain's models: whole, streamed, and by each API."""
    # By name: the packages are no dependencies, not even of the tests.
    to_openai = import_module("langchain_openai")
    to_anthropic = import_module("langchain_anthropic")
    common: dict[str, Any] = {"model": MODEL, "api_key": "plain", "temperature": 0}
    openai = common | {"base_url": f"{url}/v1"}
    chats = {
        "chat": to_openai.ChatOpenAI(**openai),
        "responses": to_openai.ChatOpenAI(**openai, use_responses_api=True),
        "messages": to_anthropic.ChatAnthropic(**common, base_url=url, max_tokens=400),
    }
    found: dict[str, Any] = {}
    for name, chat in chats.items():
        whole = chat.invoke(PROMPT)
        pieces = list(chat.stream(PROMPT))
        found[f"langchain {name}"] = {
            "whole": whole.text,
            "streamed": "".join(piece.text for piece in pieces),
            "tokens": whole.usage_metadata["output_tokens"],
            "pieces": len(pieces),
        }
    text = to_openai.OpenAI(**openai, max_tokens=40)
    found["langchain completion"] = {
        "whole": text.invoke("The best tea"),
        "streamed": "".join(text.stream("The best tea")),
    }
    return found


def litellm(url: str) -> dict[str, Any]:
    """Return the texts of LiteLLM: whole, streamed, and by each API."""
    package = import_module("litellm")
    common: dict[str, Any] = {"api_key": "plain", "temperature": 0}
    messages = [{"role": "user", "content": PROMPT}]
    found: dict[str, Any] = {}
    for name, model, base in (
        ("chat", f"openai/{MODEL}", f"{url}/v1"),
        ("hosted_vllm", f"hosted_vllm/{MODEL}", f"{url}/v1"),
        ("messages", f"anthropic/{MODEL}", url),
    ):
        asked = common | {"model": model, "api_base": base, "messages": messages, "max_tokens": 400}
        whole = package.completion(**asked)
        pieces = list(package.completion(**asked, stream=True))
        found[f"litellm {name}"] = {
            "whole": whole.choices[0].message.content,
            "streamed": "".join(piece.choices[0].delta.content or "" for piece in pieces),
            "tokens": whole.usage.completion_tokens,
            "pieces": len(pieces),
        }
    asked = common | {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "input": PROMPT}
    whole = package.responses(**asked)
    events = list(package.responses(**asked, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    found["litellm responses"] = {
        "whole": whole.output[0].content[0].text,
        "streamed": "".join(deltas),
        "tokens": whole.usage.output_tokens,
        "pieces": len(deltas),
    }
    return found


if __name__ == "__main__":
    found = official(sys.argv[1]) | langchain(sys.argv[1]) | litellm(sys.argv[1])
    print(json.dumps(found))  # noqa: T201
