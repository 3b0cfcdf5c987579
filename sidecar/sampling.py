"""The fields of a call that shape its output: what is done, and what is refused by name."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from sidecar.api import ApiError, decoded

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_CHOICES: Final = 128
MAX_TOP_LOGPROBS: Final = 20
DEFAULT_TEMPERATURE: Final = 1.0
DEFAULT_COMPLETION_TOKENS: Final = 16
_SEED_BITS: Final = 63

_S = TypeVar("_S", bound="Sampling")
_PositiveCount = Annotated[int, Meta(ge=1)]
_TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
_StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
_StopStrings = Annotated[list[_StopString], Meta(max_length=256)]
_TokenId = Annotated[int, Meta(ge=0, lt=2**32)]
_StopTokens = Annotated[list[_TokenId], Meta(max_length=1024)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]


class StreamOptions(Struct, frozen=True):
    """What a stream sends besides its deltas."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class Sampling(Struct, frozen=True, kw_only=True):
    """The fields of both kinds of call; fields that are not named here are ignored.

    Those after ``min_tokens`` must be what they are without being named, or are refused.
    """

    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = 1
    max_tokens: _PositiveCount | UnsetType | None = UNSET
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: _StopString | _StopStrings | None = None
    stop_token_ids: _StopTokens | None = None
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    return_token_ids: bool | None = False
    return_tokens_as_token_ids: bool | None = False

    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    logit_bias: dict[str, float] | None = None
    best_of: int | None = None
    skip_special_tokens: bool | None = True
    prompt_logprobs: Any = None
    logprob_token_ids: Any = None
    echo: Any = None
    suffix: Any = None
    use_beam_search: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    tool_choice: Any = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def is_stream(self) -> bool:
        """Whether the answer is a stream of events."""
        return bool(self.stream)

    @property
    def samples(self) -> int:
        """How many answers each prompt gets."""
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        """Whether every chunk of a stream says what its choice took so far."""
        options = self.stream_options
        return self.wants_usage and options is not None and bool(options.continuous_usage_stats)

    @property
    def output_limit(self) -> int | None:
        """The most tokens of an answer; None without a limit."""
        return None if self.max_tokens is UNSET else self.max_tokens

    @property
    def logprob_count(self) -> int | None:
        """How many alternatives are told with each token; None where no logprobs are wanted."""
        return None

    @property
    def used_temperature(self) -> float:
        """The temperature; 0 is greedy."""
        return DEFAULT_TEMPERATURE if self.temperature is None else self.temperature

    @property
    def used_top_k(self) -> int:
        """From how many tokens is drawn; 0 for all."""
        return max(0, self.top_k or 0)

    def used_seed(self) -> int:
        """Return the seed: what was asked for, or another one with every call."""
        if self.seed is not None:
            return self.seed
        return secrets.randbits(_SEED_BITS) if self.used_temperature > 0 else 0


class ChatSampling(Sampling, frozen=True, kw_only=True):
    """The output fields of a chat completion."""

    max_completion_tokens: _PositiveCount | None = None
    logprobs: bool | None = False
    top_logprobs: _TopLogprobs | None = 0

    @property
    def output_limit(self) -> int | None:
        """See ``Sampling``; the newer name wins."""
        return self.max_completion_tokens or super().output_limit

    @property
    def logprob_count(self) -> int | None:
        """See ``Sampling``."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionSampling(Sampling, frozen=True, kw_only=True):
    """The output fields of a text completion."""

    logprobs: _TopLogprobs | None = None

    @property
    def output_limit(self) -> int | None:
        """See ``Sampling``; without the field there is a short limit, with null there is none."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is UNSET else self.max_tokens

    @property
    def logprob_count(self) -> int | None:
        """See ``Sampling``."""
        return self.logprobs


_chat_decoder: Final = msgspec.json.Decoder(ChatSampling)
_completion_decoder: Final = msgspec.json.Decoder(CompletionSampling)


def _is_empty(value: object) -> bool:
    return value is None or value is False or value in ("", [], {})


def _is_text_format(value: object) -> bool:
    return value is None or (isinstance(value, dict) and value.get("type") == "text")


_NEUTRAL: Final[dict[str, Callable[[Any], bool]]] = {
    "min_tokens": lambda value: not value,
    "presence_penalty": lambda value: not value,
    "frequency_penalty": lambda value: not value,
    "repetition_penalty": lambda value: value in (None, 1),
    "min_p": lambda value: not value,
    "logit_bias": lambda value: not value,
    "skip_special_tokens": lambda value: value is not False,
    "prompt_logprobs": _is_empty,
    "logprob_token_ids": _is_empty,
    "echo": _is_empty,
    "suffix": _is_empty,
    "use_beam_search": _is_empty,
    "bad_words": _is_empty,
    "allowed_token_ids": _is_empty,
    "response_format": _is_text_format,
    "structured_outputs": _is_empty,
    "guided_json": _is_empty,
    "guided_regex": _is_empty,
    "guided_choice": _is_empty,
    "guided_grammar": _is_empty,
    "tool_choice": lambda value: value in (None, "none", "auto"),
}
"""What the fields that this engine does not know may be."""


def decode_chat_sampling(body: bytes) -> ChatSampling:
    """Decode the output fields of a chat completion; raises ApiError that names the field."""
    sampling = _checked(decoded(_chat_decoder, body))
    if sampling.top_logprobs and not sampling.logprobs:
        name = "top_logprobs"
        raise ApiError(400, f"{name}: expected logprobs to be true with it", name)
    return sampling


def decode_completion_sampling(body: bytes) -> CompletionSampling:
    """Decode the output fields of a text completion; raises ApiError that names the field."""
    return _checked(decoded(_completion_decoder, body))


def _checked(sampling: _S) -> _S:
    for name, is_neutral in _NEUTRAL.items():
        if not is_neutral(getattr(sampling, name)):
            raise refusal(name)
    if sampling.best_of not in (None, 1, sampling.samples):
        name = "best_of"
        raise refusal(name)
    return sampling


def refusal(name: str) -> ApiError:
    """Return the error for a field whose value asks for what this engine cannot do."""
    return ApiError(400, f"{name}: this value is not supported by this engine", name)
