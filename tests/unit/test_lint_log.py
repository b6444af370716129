"""The lint of a log: what requests change that they could have left alone."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvnotes.errors import InputError
from kvnotes.lint import LogReport, lint_requests, parse_request

POLICY = "\n".join(f"Rule {i}: do thing number {i} politely." for i in range(40))
Messages = list[dict[str, Any]]


def tool(name: str, note: str = "") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    function = {"name": name, "description": f"does {name}{note}", "parameters": parameters}
    return {"type": "function", "function": function}


def log(
    num: int,
    *,
    system: Callable[[int], str] = lambda i: f"You serve a shop.\n{POLICY}",
    tools: Callable[[int], list[dict[str, Any]]] = lambda i: [tool("a"), tool("b")],
    messages: Callable[[int, Messages], Messages] = lambda i, history: history,
) -> list[dict[str, Any]]:
    """A conversation, one request per user message, each with all that came before."""
    requests, history = [], []
    for i in range(num):
        history.append({"role": "user", "content": f"question {i}: what about my order?"})
        said = [{"role": "system", "content": system(i)}, *messages(i, list(history))]
        requests.append({"tools": tools(i), "messages": said})
        history.append({"role": "assistant", "content": f"answer {i}: it is on its way"})
    return requests


def characters(text: str, start: int) -> int:
    return len(text) - start


def lint(requests: Sequence[object]) -> LogReport:
    return lint_requests(requests, count_tokens=characters)


def whole(request: object) -> str:
    return "".join(part.text for part in parse_request(request).parts)


def test_conversation_that_only_grows_has_no_faults() -> None:
    report = lint(log(5))
    assert (report.num_requests, report.num_compared) == (5, 4)
    assert (report.num_invalidated_tokens, report.causes, report.misses) == (0, (), ())
    requests = log(5)
    assert report.num_reusable_tokens == sum(len(whole(request)) for request in requests[:-1])
    assert report.num_tokens == sum(len(whole(request)) for request in requests)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (lambda i: f"Current time: 09:1{i}", "time"),
        (lambda i: f"x-client: checksum={i * 7919 + 4096:06x}9a", "digest"),
        (lambda i: f"ts: 171567796{i}", "epoch"),
        (lambda i: f"request 6f1c2d3e-4b5a-4c6d-8e7f-90a1b2c3d4e{i}", "uuid"),
        (lambda i: f"turn: {i + 3}", "counter"),
        (lambda i: f"mood: {['good', 'bad', 'fine'][i % 3]}", "changed-text"),
    ],
)
def test_value_that_changes_early_costs_all_behind_it(
    value: Callable[[int], str], kind: str
) -> None:
    requests = log(4, system=lambda i: f"{value(i)}\n{POLICY}")
    report = lint(requests)
    (cause,) = report.causes
    assert (cause.kind, cause.part, cause.num_requests) == (kind, "messages[0] system", 3)
    assert cause.num_invalidated_tokens == cause.num_saved_tokens == report.num_invalidated_tokens
    miss = report.misses[0]
    head = len(whole({**requests[1], "messages": []}))
    assert miss.num_invalidated_tokens == miss.num_shared_tokens - head - miss.start
    assert miss.num_invalidated_tokens > 0
    assert (miss.request, miss.previous, miss.line) == (2, 1, 1)
    text = value(1)
    assert text[miss.start :].startswith(miss.new) and miss.new in text and miss.old in value(0)


def test_first_difference_stands_where_the_common_prefix_ends() -> None:
    requests = log(2, system=lambda i: f"{POLICY}\nCurrent time: 09:1{i} sharp\n{POLICY}")
    (miss,) = lint(requests).misses
    old, new = whole(requests[0]), whole(requests[1])
    same = next(i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    value = new.rindex("09:1", 0, same + 1)
    assert miss.num_invalidated_tokens == len(old) - value  # the values are of one length


def test_second_cause_saves_nothing_before_the_first_is_gone() -> None:
    report = lint(
        log(3, system=lambda i: f"Current time: 09:1{i}\n{POLICY}\nturn: {i + 3}\n{POLICY}")
    )
    clock, turn = report.causes
    assert (clock.kind, turn.kind, turn.num_saved_tokens) == ("time", "counter", 0)
    assert clock.num_saved_tokens == clock.num_invalidated_tokens - turn.num_invalidated_tokens
    assert report.num_invalidated_tokens == clock.num_invalidated_tokens


def test_kind_that_is_ignored_leaves_the_next_one() -> None:
    requests = log(3, system=lambda i: f"Current time: 09:1{i}\n{POLICY}\nturn: {i + 3}\n{POLICY}")
    (cause,) = lint_requests(requests, ignore=["time"]).causes
    assert cause.kind == "counter"
    assert cause.num_saved_tokens == cause.num_invalidated_tokens


# -- tools -------------------------------------------------------------------------------------


def test_same_tools_in_another_order_are_one_cause() -> None:
    def shuffled(i: int) -> list[dict[str, Any]]:
        names = list("abcdef")
        random.Random(i).shuffle(names)
        return [tool(name) for name in names]

    report = lint(log(5, tools=shuffled))
    (cause,) = report.causes
    assert (cause.kind, cause.part) == ("tools-reordered", "tools")
    assert set(cause.old.split(", ")) == set("abcdef")
    assert report.num_invalidated_tokens > 0.9 * report.num_reusable_tokens


def test_tools_are_compared_where_nothing_else_is_shared() -> None:
    requests = [
        {"tools": [tool(n) for n in names], "messages": [{"role": "user", "content": text}]}
        for names, text in (("abc", "first of all"), ("acb", "another one"))
    ]
    assert [cause.kind for cause in lint(requests).causes] == ["tools-reordered"]


@pytest.mark.parametrize(
    ("tools", "kind", "shown"),
    [
        (lambda i: [tool(n) for n in "abcd"[: i + 1]], "tool-added", "b"),
        (lambda i: [tool(n) for n in "abcd"[i:]], "tool-removed", "a"),
        (lambda i: [tool("a", f" {i}"), tool("b")], "tool-changed", "1"),
        (
            lambda i: [dict(sorted(tool("a").items(), reverse=bool(i % 2))), tool("b")],
            "tool-keys-reordered",
            "",
        ),
    ],
)
def test_other_changes_of_tools_are_told_apart(
    tools: Callable[[int], list[dict[str, Any]]], kind: str, shown: str
) -> None:
    report = lint(log(2, tools=tools))
    (cause,) = report.causes
    assert cause.kind == kind
    assert shown in (cause.old, cause.new) or not shown
    assert 0 < report.num_invalidated_tokens < report.num_tokens


# -- messages ----------------------------------------------------------------------------------


def test_memory_in_another_order_is_told_from_changed_text() -> None:
    def memory(i: int) -> str:
        lines = [f"- memory {k}: likes thing {k}" for k in range(20)]
        random.Random(i).shuffle(lines)
        return "You remember:\n" + "\n".join(lines) + f"\n{POLICY}"

    (cause,) = lint(log(4, system=memory)).causes
    assert cause.kind == "lines-reordered"


def test_window_that_slides_drops_messages() -> None:
    report = lint(log(6, messages=lambda i, history: history[-3:]))
    (cause,) = report.causes
    assert (cause.kind, cause.num_requests) == ("message-removed", 4)
    assert cause.old == "question 0: what about my order?"


def test_earlier_message_that_changes_is_rewritten() -> None:
    def thinking(i: int, history: Messages) -> Messages:
        last = len(history) - 2
        return [
            {**message, "content": message["content"] + (" <think>hm</think>" * (k == last))}
            for k, message in enumerate(history)
        ]

    causes = lint(log(4, messages=thinking)).causes
    assert [(cause.kind, cause.part) for cause in causes] == [
        ("changed-text", "messages assistant")
    ]


def test_message_that_moves_is_named() -> None:
    extra = {"role": "user", "content": "By the way, my name is Ana and I live in Graz."}

    def moving(i: int, history: Messages) -> Messages:
        return [extra, *history] if i % 2 else [*history, extra]

    kinds = {cause.kind for cause in lint(log(3, messages=moving)).causes}
    assert "message-moved" in kinds


def test_summary_in_place_of_old_messages_is_rewritten_history() -> None:
    def compacted(i: int, history: Messages) -> Messages:
        if i < 3:
            return history
        return [{"role": "user", "content": "Summary: they talked."}, *history[4:]]

    (cause,) = lint(log(4, messages=compacted)).causes
    assert cause.kind == "message-rewritten"


def test_same_short_message_twice_is_no_move() -> None:
    said = [
        {"role": "system", "content": POLICY},
        {"role": "user", "content": "ok"},
        {"role": "assistant", "content": "hm"},
    ]
    report = lint([{"messages": said}, {"messages": [*said, {"role": "user", "content": "ok"}]}])
    assert report.causes == ()


def test_conversations_that_alternate_are_compared_each_with_itself() -> None:
    def worded(ask: str, reply: str) -> Callable[[int, Messages], Messages]:
        words = {"question": ask, "answer": reply}
        polite = " Please take your time, and tell me all that you know about it, thank you."
        return lambda i, history: [
            {
                **m,
                "content": re.sub("question|answer", lambda w: words[w[0]], m["content"]) + polite,
            }
            for m in history
        ]

    one = log(4, messages=worded("question", "answer"))
    other = log(4, messages=worded("issue", "reply"))
    report = lint([request for pair in zip(one, other, strict=True) for request in pair])
    assert (report.num_compared, report.causes) == (7, ())


def test_context_behind_the_question_is_no_fault() -> None:
    def late(i: int, history: Messages) -> Messages:
        last = {"role": "user", "content": f"{history[-1]['content']}\nCurrent time: 09:1{i}"}
        return [*history[:-1], last]

    assert lint(log(4, messages=late)).causes == ()


def test_prompt_of_one_line_is_known_again_though_its_clock_changed() -> None:
    prompts = [f"You are Nora. The time is 09:1{i}. {'Be polite. ' * 40}" for i in range(3)]
    report = lint(prompts)
    assert report.num_compared == 2
    assert [(cause.kind, cause.num_requests) for cause in report.causes] == [("time", 2)]


def test_unlike_prompts_are_not_compared() -> None:
    assert lint(["What is the weather?", "Tell me a joke.", "hi"]).num_compared == 0


def test_prompts_with_another_question_behind_them_share_their_beginning() -> None:
    prompts = [{"prompt": f"{POLICY}\nUser: question {i}?\nAssistant:"} for i in range(3)]
    report = lint(prompts)
    assert (report.num_compared, report.causes) == (2, ())
    clocks = [f"Current time: 09:1{i}\n{POLICY}\nUser: question {i}?" for i in range(3)]
    assert [cause.kind for cause in lint(clocks).causes] == ["time"]


def test_most_expensive_cause_comes_first() -> None:
    def tools(i: int) -> list[dict[str, Any]]:
        return [tool("b"), tool("a")] if i == 2 else [tool("a"), tool("b")]

    report = lint(log(6, tools=tools, system=lambda i: f"Current time: 09:1{i}\n{POLICY}"))
    costs = [cause.num_invalidated_tokens for cause in report.causes]
    assert costs == sorted(costs, reverse=True) and len(costs) == 2


# -- shapes of requests ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        {"messages": [{"role": "user", "content": "a b"}]},
        {"body": {"messages": [{"role": "user", "content": [{"type": "text", "text": "a b"}]}]}},
        {"input": "a b", "instructions": None},
        {"messages": [{"role": "user", "content": [{"text": "a b"}]}], "tools": None},
    ],
)
def test_shapes_of_requests_mean_the_same(data: object) -> None:
    (message,) = parse_request(data).messages
    assert (message.role, message.text) == ("user", "a b")


def test_system_text_beside_the_messages_comes_first() -> None:
    request = parse_request({"system": [{"text": "s"}], "messages": [{"role": "user"}]})
    assert [(m.role, m.text) for m in request.messages] == [("system", "s"), ("user", "")]


def test_picture_and_tool_call_stay_json() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    content = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    request = parse_request(
        {"messages": [{"role": "assistant", "content": content, "tool_calls": [call]}]}
    )
    assert '"image_url"' in request.messages[0].text
    assert '"name": "f"' in request.messages[0].text


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (17, "17 where a request should stand"),
        ([], "a list where a request should stand"),
        ({"model": "m"}, "without messages or prompt"),
        ({"messages": {}}, "'messages' is an object"),
        ({"messages": ["hello"]}, "messages[0] is a text"),
        ({"prompt": {"a": 1}}, "the prompt is an object"),
        ({"messages": [], "tools": "x"}, "'tools' is a text"),
        ({"body": {"body": {}}}, "without messages or prompt"),
    ],
)
def test_what_is_no_request_is_refused(data: object, said: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_request(data)
    assert said in caught.value.message
    assert caught.value.hint
