"""What others made, and no salt keeps apart, is not a client's to ask for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.borrowed import MOST_VALUES, TRANSFER_KEYS
from router.error import ClientError
from router.salt import salt_field, salted

FIELD = salt_field("router-salt_0")
LOGO = {"type": "image_url", "image_url": {"url": "http://a/logo.png"}, "uuid": "logo"}
TEXT = {"type": "text", "text": '"uuid":"in a text"', "uuid": "x"}


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model": "m", **fields}).encode()


def said_by(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def is_passed(body: bytes) -> bool:
    """Return whether the body passes with nothing changed but its salt; raises ClientError."""
    return salted(body, FIELD) == b"{%b,%b" % (FIELD, body[1:])


def escaped(body: bytes, name: str) -> bytes:
    """Return the body with the first letter of all such keys as an escape."""
    code = f'"\\u{ord(name[0]):04x}{name[1:]}"'
    return body.replace(f'"{name}"'.encode(), code.encode())


@pytest.mark.parametrize("key", TRANSFER_KEYS)
def test_no_engine_is_told_whose_pages_or_images_to_take(key: str) -> None:
    """S-05: vLLM's encoder outputs and SGLang's rooms, as well as vLLM's pages."""
    for body in (body_of(**{key: {"peer": "a"}}), body_of(**{key: 7})):
        for written in (body, escaped(body, key)):
            with pytest.raises(ClientError, match=f"{key}: expected none"):
                salted(written, FIELD)
    assert is_passed(body_of(**{key: None}))
    assert is_passed(body_of(tools=[{"parameters": {"properties": {key: {"type": "object"}}}}]))


@pytest.mark.parametrize("holder", ["vllm_xargs", "sampling_params"])
@pytest.mark.parametrize("key", TRANSFER_KEYS[:2])
def test_nor_by_way_of_other_parameters(holder: str, key: str) -> None:
    """S-05: vLLM merges both into the arguments where it looks for a transfer."""
    body = body_of(**{holder: {"deep": {key: "x"}}})
    for written in (body, escaped(body, key), escaped(body, holder)):
        with pytest.raises(ClientError, match=f"{holder}: expected no parameters"):
            salted(written, FIELD)
    assert is_passed(body_of(**{holder: {"top_k": 3}}))


@pytest.mark.parametrize(
    "part",
    [
        LOGO,
        LOGO | {"image_url": None},
        LOGO | {"uuid": 7},
        LOGO | {"uuid": {"a": 1}},
        {"image_url": None, "uuid": "logo"},
        {"type": "image_embeds", "image_embeds": None, "uuid": "logo"},
        {"type": "input_audio", "input_audio": {"data": ""}, "uuid": "voice"},
        {"type": "video_url", "uuid": "film"},
        {"type": "text", "text": "x", "image_url": "http://a/b", "uuid": "logo"},
    ],
)
def test_media_go_by_their_content_and_by_no_name_that_a_client_gives(part: Any) -> None:
    """S-04: an engine would answer with the image that another tenant sent under that name."""
    for body in (
        body_of(messages=said_by(TEXT, part)),
        body_of(data_1={"content": [part]}),
        body_of(input=[{"role": "user", "content": [part]}]),
    ):
        for written in (body, escaped(body, "uuid")):
            with pytest.raises(ClientError, match="uuid: expected none"):
                salted(written, FIELD)


def test_other_things_may_be_called_so() -> None:
    """Tools have such fields, calls of them do, and so have images that name none."""
    schema = {"type": "object", "properties": {"uuid": {"type": "string"}, "image_url": {}}}
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {"uuid": "a", "image_url": "b"}}
    assert is_passed(body_of(tools=[{"name": "f", "input_schema": schema}], messages=[]))
    assert is_passed(body_of(messages=said_by(TEXT, call, LOGO | {"uuid": None})))
    assert is_passed(body_of(messages=said_by('{"uuid":"x","image_url":"y"}')))


def test_looking_for_names_of_media_is_bounded() -> None:
    with pytest.raises(ClientError, match=f"uuid: expected at most {MOST_VALUES} values"):
        salted(body_of(uuid="x", prompt=[1] * (MOST_VALUES + 1)), FIELD)
    with pytest.raises(ClientError, match="body: expected a JSON object"):
        salted(b'{"uuid":' + b"[" * 50_000 + b"]" * 50_000 + b"}", FIELD)
    with pytest.raises(ClientError, match="body: expected a JSON object"):
        salted(b'{"uuid":1', FIELD)
