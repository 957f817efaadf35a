"""Request schemas: OpenAI's chat and completion, and the token-exact endpoints.

A field of OpenAI's schema that this server does not support is an error unless its value is the default behaviour, and
an unknown field is an error that names it. `IGNORED` lists the fields that are accepted with any value and not used.
"""

import difflib
import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from etude.chat.messages import Message, ToolCall
from etude.errors import InputError
from etude.inference.known_routing import KnownRouting
from etude.inference.sampling import MAX_SAMPLES, MAX_STOPS, Sampling, StopText

MAX_VERSION = 2**63 - 1
Finite = Annotated[float, Field(allow_inf_nan=False)]
PositiveInt = Annotated[int, Field(ge=1)]
RequestT = TypeVar("RequestT", bound=BaseModel)
COMPLETION_TOKENS = 16  # OpenAI's default for plain completions; a chat may use the rest of the context

# Fields of requests and messages that have no effect here: they address the operator of a hosted service, or, as
# `parallel_tool_calls`, ask for what only a model can decide.
IGNORED = {
    "metadata",
    "name",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
# Unsupported fields of OpenAI's schema, with the values that equal this server's behaviour.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "top_logprobs": (0,),
    "annotations": ([],),
    "include_obfuscation": (False,),
    **dict.fromkeys(("audio", "function_call", "functions", "moderation", "prediction", "reasoning_effort"), ()),
    **dict.fromkeys(("refusal", "verbosity", "web_search_options"), ()),
}


class StrictModel(BaseModel):
    """Treats null and ignored fields as absent; any other field that is not declared is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kept = {}
        for name, value in given.items():
            if name in cls.model_fields:
                if value is not None:
                    kept[name] = value
            elif name in NEUTRAL and value is not None and value not in NEUTRAL[name]:
                raise ValueError(f"{name} is {value!r:.80}, which this server does not support; leave it out")
            elif name not in NEUTRAL and name not in IGNORED:
                close = difflib.get_close_matches(name, cls.model_fields, 1)
                raise ValueError(f"unknown field {name!r:.80}" + (f"; did you mean {close[0]}?" if close else ""))
        return kept


class TextPart(StrictModel):
    type: Literal["text"]
    text: str


class CalledFunction(StrictModel):
    name: str
    arguments: str


class RequestToolCall(StrictModel):
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction

    def to_call(self) -> ToolCall:
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise InputError(f"messages: the arguments of call {self.id!r:.80} are not a JSON object")
        return ToolCall(self.function.name, arguments, self.id)


class RequestMessage(StrictModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[RequestToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _check_role(self) -> "RequestMessage":
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content):
            raise ValueError(f"tool_calls and reasoning_content belong to role assistant, not to role {self.role}")
        if self.role != "tool" and self.tool_call_id:
            raise ValueError(f"tool_call_id belongs to role tool, not to role {self.role}")
        if self.content is None and not self.tool_calls:
            raise ValueError(f"content is missing in a message of role {self.role}")
        return self

    def to_message(self, called: dict[str, str]) -> Message:
        """Return the message for a dialect. `called` has the tools by call id. `developer` is OpenAI's new `system`."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())
        calls = tuple(call.to_call() for call in self.tool_calls or ())
        role, call = ("system" if self.role == "developer" else self.role), self.tool_call_id or ""
        return Message(role, content, self.reasoning_content or "", calls, call, called.get(call, ""))


class FunctionTool(StrictModel):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None  # enforcing a schema would need constrained sampling


class RequestTool(StrictModel):
    type: Literal["function"]
    function: FunctionTool


class StreamOptions(StrictModel):
    include_usage: bool = False


class BaseRequest(StrictModel):
    """Fields common to chats and completions. `top_k` and `min_p` are not OpenAI's, but widely used."""

    max_tokens: PositiveInt | None = None
    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    temperature: Finite | None = None  # default: that of the model's profile
    top_p: Finite = 1.0
    top_k: int = 0
    min_p: Finite = 0.0
    seed: int | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> "BaseRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options requires stream: true")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int, temperature: float, seed: int, stop: frozenset[int]) -> Sampling:
        """Return the sampling parameters, with these defaults. OpenAI's seeds may be negative, ours are not."""
        return Sampling(
            max_tokens=self.limit or max_tokens,
            temperature=temperature if self.temperature is None else self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=seed if self.seed is None else self.seed % 2**61,
            samples=self.n,
            stop=stop,
            stop_text=self.stops,
        )


class ChatRequest(BaseRequest):
    messages: Annotated[list[RequestMessage], Field(min_length=1)]
    tools: list[RequestTool] | None = None
    tool_choice: Any = "auto"
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool = False
    top_logprobs: int = 0

    @model_validator(mode="after")
    def _check_supported(self) -> "ChatRequest":
        if self.tool_choice not in ("auto", "none"):
            raise ValueError(f"tool_choice is {self.tool_choice!r:.80}; this server supports auto and none")
        if self.top_logprobs:
            raise ValueError("top_logprobs: this server returns those of sampled tokens only; leave it out")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens mean the same, but their values differ; give one")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def usable_tools(self) -> list[dict[str, Any]]:
        return [] if self.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in self.tools or ()]

    def chat(self) -> list[Message]:
        """Return the messages for a dialect."""
        called = {call.id: call.function.name for message in self.messages for call in message.tool_calls or ()}
        return [message.to_message(called) for message in self.messages]


class CompletionRequest(BaseRequest):
    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None

    @model_validator(mode="after")
    def _check_supported(self) -> "CompletionRequest":
        if self.logprobs:
            raise ValueError("logprobs: this server returns those of sampled tokens only; send logprobs: 0")
        if isinstance(self.prompt, list) and len(self.prompt) > 1 and not isinstance(self.prompt[0], int):
            raise ValueError(f"{len(self.prompt)} prompts; this server takes one per request")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens or COMPLETION_TOKENS

    @property
    def one_prompt(self) -> str | list[int]:
        first = self.prompt[0] if isinstance(self.prompt, list) and self.prompt else 0
        return self.prompt if isinstance(first, int) or isinstance(self.prompt, str) else first  # type: ignore[return-value]


class GenerateRequest(StrictModel):
    tokens: list[int]
    sampling: Sampling = Sampling()
    routing: bool = False
    known_routing: KnownRouting | None = None  # of the client, from the session's earlier turns
    stream: bool = False


class LoadWeightsRequest(StrictModel):
    path: Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]
    version: Annotated[int, Field(ge=0, le=MAX_VERSION)]


def explain(error: ValidationError) -> tuple[str, str | None]:
    """Return an error message and the field it is about."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    # Of the alternatives of a union, the intended one has the right type and another error.
    first = next((each for each in found if not each["type"].endswith("_type")), found[0])
    # The names of the alternatives of a union mean nothing to the client.
    named = [part for part in first["loc"] if not isinstance(part, str) or (part.isidentifier() and part != "str")]
    place = ".".join(map(str, named))
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "unexpected_keyword_argument":
        place, message = "", f"unknown field {named[-1]!r:.80}"
    return (f"{place}: {message}" if place else message), place or None


def parse_request(kind: type[RequestT], given: Any) -> RequestT:
    """Return a request of this kind; raise BadField with the problem if it is invalid."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        message, place = explain(error)
        raise BadField(message, place) from None


class BadField(InputError):
    """A field of a request is invalid."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param
