"""Request schemas: OpenAI's chat and completion, and the token-exact endpoints.

No field is ignored silently. A field that OpenAI defines and this server does not support is an error unless its value
is the default behaviour; an unknown field is an error that names it. Only `user` is accepted and unused.
"""

import difflib
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError, model_validator

from etude.errors import InputError
from etude.inference.sampling import MAX_SAMPLES, Sampling

NUMBER = Field(allow_inf_nan=False, strict=True)  # accepts whole numbers; not true or "1"
# Every new token of every completion is searched for every stop text.
MAX_STOPS, MAX_STOP_LENGTH = 64, 1024
StopText = Annotated[StrictStr, Field(max_length=MAX_STOP_LENGTH)]
MAX_VERSION = 2**63 - 1
RequestT = TypeVar("RequestT", bound=BaseModel)
COMPLETION_TOKENS = 16  # OpenAI's default for plain completions; a chat may use the rest of the context

# Unsupported fields of OpenAI's schema, with the values that equal this server's behaviour.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "audio": (),
    "function_call": (),
    "functions": (),
    "moderation": (),
    "prediction": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "safety_identifier": (),
    "verbosity": (),
    "web_search_options": (),
}
# Fields of an OpenAI assistant message that is sent back unchanged.
NEUTRAL_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": (),
}


class StrictModel(BaseModel):
    """Treats null fields as absent; any other field that is not declared is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kept = {}
        for name, value in given.items():
            if value is None:
                if name in cls.model_fields or name in cls.neutral:
                    continue
            elif name in cls.neutral:
                if value not in cls.neutral[name]:
                    raise ValueError(f"{name} is {value!r:.80}, which this server does not support; leave it out")
                continue
            if name not in cls.model_fields:
                close = difflib.get_close_matches(name, cls.model_fields, 1)
                raise ValueError(f"unknown field {name!r:.80}" + (f"; did you mean {close[0]}?" if close else ""))
            kept[name] = value
        return kept


class TextPart(StrictModel):
    type: Literal["text"]
    text: StrictStr


class CalledFunction(StrictModel):
    name: StrictStr
    arguments: StrictStr


class RequestToolCall(StrictModel):
    id: StrictStr = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class RequestMessage(StrictModel):
    neutral = NEUTRAL_IN_MESSAGES

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | list[TextPart] | None = None
    name: StrictStr | None = None
    tool_calls: list[RequestToolCall] | None = None
    tool_call_id: StrictStr | None = None
    reasoning_content: StrictStr | None = None

    @model_validator(mode="after")
    def _check_role(self) -> "RequestMessage":
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content):
            raise ValueError(f"tool_calls and reasoning_content belong to role assistant, not to role {self.role}")
        if self.role != "tool" and self.tool_call_id:
            raise ValueError(f"tool_call_id belongs to role tool, not to role {self.role}")
        if self.content is None and not self.tool_calls:
            raise ValueError(f"content is missing in a message of role {self.role}")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message for the chat template. `developer` is OpenAI's newer word for `system`."""
        message = self.model_dump(exclude_none=True)
        return {**message, "role": "system"} if self.role == "developer" else message


class FunctionTool(StrictModel):
    name: Annotated[StrictStr, Field(min_length=1)]
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: Literal[False] | None = None  # enforcing a schema would need constrained sampling


class RequestTool(StrictModel):
    type: Literal["function"]
    function: FunctionTool


class StreamOptions(StrictModel):
    neutral = {"include_obfuscation": (False,)}

    include_usage: StrictBool = False


class BaseRequest(StrictModel):
    """Fields common to chats and completions. `top_k` and `min_p` are not OpenAI's, but widely used."""

    neutral = NEUTRAL

    model: StrictStr | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_SAMPLES)] = 1
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    temperature: Annotated[float, NUMBER] = 1.0
    top_p: Annotated[float, NUMBER] = 1.0
    top_k: StrictInt = 0
    min_p: Annotated[float, NUMBER] = 0.0
    seed: StrictInt | None = None
    user: StrictStr | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> "BaseRequest":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options requires stream: true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_tokens: int, default_seed: int, stop: frozenset[int]) -> Sampling:
        """Return the sampling parameters. OpenAI's seeds may be negative, ours are not."""
        return Sampling(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=default_seed if self.seed is None else self.seed % 2**61,
            samples=self.n,
            stop=stop,
            stop_text=self.stops,
        )


class ChatRequest(BaseRequest):
    messages: Annotated[list[RequestMessage], Field(min_length=1)]
    tools: list[RequestTool] | None = None
    tool_choice: Any = "auto"
    max_completion_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    logprobs: StrictBool = False
    top_logprobs: StrictInt = 0

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


class CompletionRequest(BaseRequest):
    prompt: StrictStr | list[StrictInt] | list[StrictStr] | list[list[StrictInt]]
    logprobs: StrictInt | None = None

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


class SamplingFields(StrictModel):
    """`Sampling` as JSON; `Sampling` itself checks the values."""

    max_tokens: StrictInt = 256
    temperature: Annotated[float, NUMBER] = 1.0
    top_p: Annotated[float, NUMBER] = 1.0
    top_k: StrictInt = 0
    min_p: Annotated[float, NUMBER] = 0.0
    seed: StrictInt = 0
    samples: StrictInt = 1
    stop: list[StrictInt] = Field(default_factory=list)
    stop_text: Annotated[list[StopText], Field(max_length=MAX_STOPS)] = Field(default_factory=list)
    since: StrictInt | None = None

    def sampling(self) -> Sampling:
        others = self.model_dump(exclude={"stop", "stop_text"})
        return Sampling(**others, stop=frozenset(self.stop), stop_text=tuple(self.stop_text))


class GenerateRequest(StrictModel):
    tokens: list[StrictInt]
    sampling: SamplingFields = SamplingFields()
    routing: StrictBool = False
    stream: StrictBool = False


class LoadWeightsRequest(StrictModel):
    path: Annotated[StrictStr, Field(min_length=1)]
    version: Annotated[StrictInt, Field(ge=0, le=MAX_VERSION)]

    @model_validator(mode="after")
    def _check_path(self) -> "LoadWeightsRequest":
        if "\0" in self.path:
            raise ValueError(f"path is {self.path!r:.80}; a path cannot contain a null character")
        return self


def explain(error: ValidationError) -> tuple[str, str | None]:
    """Return an error message and the field it is about."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    # Of the alternatives of a union, the intended one has the right type and another error.
    first = next((each for each in found if not each["type"].endswith("_type")), found[0])
    # The names of the alternatives of a union mean nothing to the client.
    named = [part for part in first["loc"] if not isinstance(part, str) or (part.isidentifier() and part != "str")]
    place = ".".join(map(str, named))
    message = first["msg"].removeprefix("Value error, ")
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
