"""Bodies and events of the Responses API: output items that open, grow and close one after another."""

import json
from dataclasses import dataclass
from typing import Any

from dspark_ray.core.types import FinishReason
from dspark_ray.serving.answer import Answer, AnswerDelta, ChoiceEvent
from dspark_ray.serving.response_request import ResponseFields
from dspark_ray.serving.tool_calls import CallDelta

JsonObject = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What is known of a response before its first token."""

    id: str  # without a prefix
    created: int  # Unix time, seconds
    model: str
    temperature: float
    top_p: float
    parallel_tool_calls: bool
    fields: ResponseFields

    def body(self, status: str, output: list[JsonObject], usage: JsonObject | None = None) -> JsonObject:
        """The response object."""
        fields = self.fields
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": fields.instructions,
            "max_output_tokens": fields.max_output_tokens,
            "metadata": {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": self.temperature,
            "text": {"format": fields.text.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": "auto" if fields.tool_choice is None else _dumped(fields.tool_choice),
            "tools": [tool.model_dump() for tool in fields.tools],
            "top_p": self.top_p,
            "truncation": "disabled",
            "usage": usage,
        }


def response_body(head: ResponseHead, answer: Answer, reason: FinishReason, usage: JsonObject) -> JsonObject:
    """The answer of a request that does not stream. `usage` in the words of the chat routes"""
    whole = AnswerDelta(answer.content, answer.reasoning, tuple(answer.calls))
    events = ResponseEvents(head)
    events.event(ChoiceEvent(0, whole, 0, reason))
    return events.body(usage)


def usage_of(chat_usage: JsonObject) -> JsonObject:
    """`usage` in the words of this API."""
    return {
        "input_tokens": chat_usage["prompt_tokens"],
        "input_tokens_details": chat_usage["prompt_tokens_details"],
        "output_tokens": chat_usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": chat_usage["total_tokens"],
    }


class ResponseEvents:
    """Turns deltas into server-sent events, and puts the output items together on the way."""

    def __init__(self, head: ResponseHead) -> None:
        self._head = head
        self._items: list[JsonObject] = []  # the last one may be open
        self._open_kind = ""
        self._open_call = -1
        self._num_events = 0
        self._reason: FinishReason | None = None

    def opening(self) -> bytes:
        started = self._head.body("in_progress", [])
        return self._event("response.created", response=started) + self._event(
            "response.in_progress", response=started
        )

    def event(self, event: ChoiceEvent) -> bytes:
        """What an output adds; there is one choice."""
        self._reason = event.finish_reason or self._reason
        return self._grow_items(event.delta)

    def _grow_items(self, delta: AnswerDelta) -> bytes:
        """What a text adds."""
        events = b""
        if delta.reasoning:
            events += self._open("reasoning") + self._grow("response.reasoning_text.delta", delta.reasoning)
        if delta.content:
            events += self._open("message") + self._grow("response.output_text.delta", delta.content)
        for call in delta.calls:
            events += self._call(call)
        return events

    def closing(self, usage: JsonObject) -> bytes:
        """`usage` in the words of the chat routes."""
        events = self._close(self._status)
        body = self.body(usage)
        return events + self._event(f"response.{body['status']}", response=body)

    def failure(self, error: JsonObject) -> bytes:
        """`error` in the words of the chat routes."""
        inner = error["error"]
        body = {
            **self._head.body("failed", self._items),
            "error": {"code": "server_error", "message": inner["message"]},
        }
        return self._event("response.failed", response=body)

    def body(self, usage: JsonObject) -> JsonObject:
        """The whole response."""
        self._close(self._status)
        return self._head.body(self._status, self._items, usage_of(usage))

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason is FinishReason.LENGTH else "completed"

    def _call(self, call: CallDelta) -> bytes:
        events = b""
        if call.index != self._open_call or self._open_kind != "function_call":
            events += self._close("completed")
            item = {
                "id": self._new_id("fc"),
                "type": "function_call",
                "status": "in_progress",
                "call_id": call.id,
                "name": call.name,
                "arguments": "",
            }
            events += self._add("function_call", item)
            self._open_call = call.index
        if call.arguments:
            self._items[-1]["arguments"] += call.arguments
            events += self._event(
                "response.function_call_arguments.delta", **self._place(), delta=call.arguments
            )
        return events

    def _open(self, kind: str) -> bytes:
        if self._open_kind == kind:
            return b""
        events = self._close("completed")
        item: JsonObject
        part: JsonObject
        if kind == "message":
            item = {
                "id": self._new_id("msg"),
                "type": "message",
                "role": "assistant",
                "status": "in_progress",
                "content": [],
            }
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {
                "id": self._new_id("rs"),
                "type": "reasoning",
                "status": "in_progress",
                "summary": [],
                "content": [],
            }
            part = {"type": "reasoning_text", "text": ""}
        events += self._add(kind, item)
        events += self._event("response.content_part.added", **self._place(), content_index=0, part=part)
        item["content"] = [part]
        return events

    def _add(self, kind: str, item: JsonObject) -> bytes:
        self._items.append(item)
        self._open_kind = kind
        place = {"output_index": len(self._items) - 1}
        return self._event("response.output_item.added", **place, item=item)

    def _grow(self, event: str, text: str) -> bytes:
        self._items[-1]["content"][0]["text"] += text
        extra: JsonObject = {"logprobs": []} if self._open_kind == "message" else {}
        return self._event(event, **self._place(), content_index=0, delta=text, **extra)

    def _close(self, status: str) -> bytes:
        events = b""
        if not self._open_kind:
            return events
        item = self._items[-1]
        if self._open_kind == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            events += self._event("response.function_call_arguments.done", **self._place(), **done)
        else:
            part = item["content"][0]
            message = self._open_kind == "message"
            events += self._event(
                "response.output_text.done" if message else "response.reasoning_text.done",
                **self._place(),
                content_index=0,
                text=part["text"],
                **({"logprobs": []} if message else {}),
            )
            events += self._event("response.content_part.done", **self._place(), content_index=0, part=part)
        item["status"] = status
        events += self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)
        self._open_kind = ""
        return events

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}_{self._head.id}_{len(self._items)}"

    def _place(self) -> JsonObject:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _event(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
        return f"event: {kind}\ndata: {text}\n\n".encode()


def _dumped(value: Any) -> Any:
    return value if isinstance(value, str) else value.model_dump()
