"""Chat messages to text: prompts, turns, and the rows of supervised training.

Messages are rendered by the tokenizer's own chat template. What the template adds for
one message is found by rendering the chat with and without it, so every mark of an
assistant's turn, its end-of-turn token too, is exactly the template's.
"""

from __future__ import annotations

from typing import Any, TypeGuard

from jppo.readers import DataError

Message = dict[str, Any]  # {"role": …, "content": …}
Prompt = str | list[Message]


# Messages


def is_chat(value: Any) -> TypeGuard[list[Message]]:
    """Whether a value is a list of messages rather than a text."""
    return isinstance(value, list) and all(isinstance(m, dict) for m in value)


def check_messages(messages: Any, where: str) -> None:
    """Raises DataError unless this is a list of messages, each with role and content.

    A message that calls tools may have no content.
    """
    if not is_chat(messages):
        raise DataError(
            f"{where}: expected a list of messages, got {str(messages)[:60]!r}"
        )
    if not messages:
        raise DataError(f"{where}: the list of messages is empty")
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise DataError(
                f"{where}: message {i} needs a role, got {str(message)[:60]}"
            )
        if message.get("content") is None and not message.get("tool_calls"):
            raise DataError(
                f"{where}: message {i} needs content, got {str(message)[:60]}"
            )


def apply_template(
    tokenizer: Any, messages: list[Message], where: str, *, reply: bool
) -> str:
    """The chat as text; with reply=True it ends where the assistant begins.

    Raises DataError when the tokenizer has no template or the template refuses.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(
            f"{where}: the tokenizer has no chat template to write messages with: give"
            " plain text, or set tokenizer.chat_template"
        )
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=reply
        )
    except Exception as error:  # templates raise whatever they like
        says = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{where}: the chat template failed: {says}") from None


def render_prompt(tokenizer: Any, prompt: Any, where: str = "prompt") -> str:
    """The text that a policy goes on from: a string as it is, messages as a chat.

    A chat ends with the template's opening of the assistant's turn, so its last
    message must not be the assistant's. The text may hold the template's own BOS;
    `encode` sees to it that there is only one.
    """
    if isinstance(prompt, str):
        return prompt
    check_messages(prompt, where)
    if prompt[-1]["role"] == "assistant":
        raise DataError(
            f"{where}: the last message is the assistant's, but it is to be answered:"
            " remove it"
        )
    return apply_template(tokenizer, prompt, where, reply=True)


def render_turns(
    tokenizer: Any, messages: Any, where: str = "row", *, start: int = 1
) -> list[tuple[str, bool]]:
    """The chat as (text, whether the assistant wrote it), which joined are all of it.

    The assistant's text is all that the template adds after its opening of the turn,
    the end-of-turn token included. The last message must be the assistant's. Messages
    before `start` are a prompt, whoever wrote them.
    Raises DataError where the template writes earlier turns differently once later
    ones follow, as some do that drop reasoning: then no marks would be exact.
    """
    check_messages(messages, where)
    if messages[0]["role"] == "assistant":
        raise DataError(f"{where}: the first message is the assistant's")
    if messages[-1]["role"] != "assistant":
        raise DataError(
            f"{where}: the last message is of role {messages[-1]['role']!r}, it must be"
            " the assistant's"
        )
    turns, done = [], ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant" or i < start:
            continue
        for part, own in ((messages[:i], False), (messages[: i + 1], True)):
            text = apply_template(tokenizer, part, where, reply=not own)
            if not text.startswith(done):
                raise DataError(
                    f"{where}: with message {i} the chat template writes the messages"
                    " before it differently, so its completion cannot be told apart:"
                    " give text as prompt and completion"
                )
            if text != done:
                turns.append((text[len(done) :], own))
            done = text
    return turns


# Rows


def columns(row: dict[str, Any], where: str, *names: str) -> list[Any]:
    """These columns, all texts or all messages; a text may complete messages."""
    values = [row.get(name) for name in names]
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, str) and not is_chat(value):
            raise DataError(
                f"{where}: column {name!r} must be a string or a list of messages, got"
                f" {str(value)[:60]}; the row has {sorted(row)}"
            )
    if is_chat(values[0]):
        says = lambda v: [{"role": "assistant", "content": v}]  # noqa: E731
        return [values[0], *(says(v) if isinstance(v, str) else v for v in values[1:])]
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, str):
            raise DataError(
                f"{where}: column {name!r} holds messages, but {names[0]!r} is text"
            )
    return values


def render_completion(
    tokenizer: Any, prompt: list[Message], completion: list[Message], where: str
) -> list[tuple[str, bool]]:
    """Turns of a chat: first the prompt, then what the messages add that answer it."""
    check_messages(prompt, where)
    check_messages(completion, where)
    if prompt[-1]["role"] == "assistant" or completion[0]["role"] != "assistant":
        raise DataError(
            f"{where}: the prompt ends with role {prompt[-1]['role']!r} and the"
            f" completion begins with {completion[0]['role']!r}: the completion must"
            " be the assistant's"
        )
    return render_turns(tokenizer, [*prompt, *completion], where, start=len(prompt))


def example_turns(
    tokenizer: Any, row: dict[str, Any], where: str
) -> tuple[list[tuple[str, bool]], bool]:
    """(text, whether it is a completion) of a row, and whether the row is a chat."""
    if row.get("messages") is not None:
        return render_turns(tokenizer, row["messages"], where), True
    if row.get("text") is not None and row.get("prompt") is None:
        if not isinstance(row["text"], str):
            raise DataError(f"{where}: column 'text' must be a string")
        return [(row["text"], True)], False
    prompt, completion = columns(row, where, "prompt", "completion")
    if isinstance(prompt, str):
        return [(prompt, False), (completion, True)], False
    return render_completion(tokenizer, prompt, completion, where), True


def render_example(
    tokenizer: Any, row: dict[str, Any], where: str = "row"
) -> tuple[str, str]:
    """(prompt, completion) as texts, from a row in one of these forms:

    - `text`: plain language modelling, an empty prompt;
    - `prompt` and `completion`, both strings, or both lists of messages;
    - `messages`: the completion is the last message, which must be the assistant's.

    A chat's completion ends as the template ends a turn. Plain strings get no EOS
    here: `encode_example` appends it as a token.
    """
    if row.get("messages") is not None:
        messages = row["messages"]
        check_messages(messages, where)
        row = {"prompt": messages[:-1], "completion": messages[-1:]}
    turns, _ = example_turns(tokenizer, row, where)
    opening = turns[0][0] if not turns[0][1] else ""
    return opening, "".join(text for text, _ in turns)[len(opening) :]
