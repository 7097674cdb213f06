"""Images in conversations: their form in a request, their bytes, and their places in a prompt.

An image comes in the request itself, as a `data:` URL. Nothing is fetched from other hosts: a server that fetches what
its clients name reaches what they must not. The engine decodes the file and decides how many tokens it takes; the
prompt has the mark that the model's chat template writes for it.
"""

import base64
import binascii
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dynamo.base import errors
from dynamo.protocols import blocks
from dynamo.runtime.http import json_body

PART = "image_url"  # the part of a message that has one, as OpenAI calls it
_PLACE = "place"  # in a part that `make_part` made: where the caller's request has the file
MAX_BYTES = 20 * 2**20  # of all images of a request; a frame of the request plane has 32 MiB
_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)
# The keys of config.json that name the token of an image, or the one with which it begins.
_TOKEN_KEYS = (
    "image_token_id",
    "image_token_index",
    "vision_start_token_id",
    "image_start_token_id",
    "boi_token_index",
    "boi_token_id",
)


def check_part(part: Mapping[str, Any], place: str) -> None:
    """Raise InvalidRequest for a part that is no image in OpenAI's form."""
    described = part.get(PART)
    url = described.get("url") if isinstance(described, dict) else described
    if not isinstance(url, str):
        param = f"{place}.image_url.url"
        got = json_body.describe(described)
        raise errors.InvalidRequest.of_param(param, f"expected a string, got {got}")


def make_part(url: str, place: str) -> dict[str, Any]:
    """Return the part for the image of another API, which errors name by this place in the caller's request."""
    return {"type": PART, PART: {"url": url}, _PLACE: place}


def data_url(media_type: str, encoded: str) -> str:
    """Return the URL that holds a file itself, which is encoded in base64."""
    return f"data:{media_type};base64,{encoded}"


class FoundImage(NamedTuple):
    """An image of a conversation, and where the request has its part and its file."""

    place: str
    file_place: str
    url: str


@dataclasses.dataclass(frozen=True, slots=True)
class ImageInput:
    """The images that a model takes: how many in a request, and the tokens with which one begins in a prompt."""

    max_images: int = 0  # 0: it reads text only
    tokens: frozenset[int] = frozenset()

    @classmethod
    def of_model(cls, config: Mapping[str, Any], max_images: int) -> "ImageInput":
        """Read the tokens from the model's config.json."""
        named = (config.get(key) for key in _TOKEN_KEYS)
        return cls(max_images, frozenset(number for number in named if type(number) is int))

    def find(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[FoundImage]:
        """Return the images of these messages, in order. Raises InvalidRequest."""
        images = _find(messages)
        if not images:  # nearly always so
            return images
        if not self.max_images:
            param = images[0].place
            raise errors.InvalidRequest.of_param(
                param, "this model reads text only; leave the image out"
            )
        if len(images) > self.max_images:
            param = images[self.max_images].place
            raise errors.InvalidRequest.of_param(
                param,
                f"this model takes at most {self.max_images} images in a request, got {len(images)}",
            )
        return images

    def read(self, messages: Sequence[Mapping[str, Any]]) -> tuple[bytes, ...]:
        """Return the files of all images. Raises InvalidRequest."""
        images = self.find(messages)
        if not images:
            return ()
        if sum(len(image.url) for image in images) > MAX_BYTES * 4 // 3:
            raise errors.InvalidRequest.of_param(
                "messages", f"expected images of at most {MAX_BYTES // 2**20} MiB in all"
            )
        return tuple(_decode(image.url, image.file_place) for image in images)

    def count_text(self, packed_ids: bytes) -> int:
        """Return the number of tokens before the first image; 0 if its tokens are not known."""
        ids = blocks.unpack(packed_ids)
        return next((n for n, token_id in enumerate(ids) if token_id in self.tokens), 0)


TEXT_ONLY = ImageInput()


def _find(messages: Sequence[Mapping[str, Any]]) -> list[FoundImage]:
    images: list[FoundImage] = []
    for number, message in enumerate(messages):
        content = message.get("content")
        if type(content) is not list:
            continue
        for index, part in enumerate(content):
            if part["type"] == PART:
                described = part[PART]
                url = described["url"] if isinstance(described, dict) else described
                given, place = part.get(_PLACE), f"messages[{number}].content[{index}]"
                if isinstance(given, str):
                    images.append(FoundImage(given, given, url))
                else:
                    images.append(FoundImage(place, f"{place}.image_url.url", url))
    return images


def _decode(url: str, param: str) -> bytes:
    if not _DATA_URL.match(url):
        raise errors.InvalidRequest.of_param(
            param,
            f"expected the image itself, as 'data:image/png;base64,…', because nothing is fetched from "
            f"elsewhere; got {url[:40]!r}",
        )
    try:
        return base64.b64decode(url.partition(",")[2], validate=True)
    except (binascii.Error, ValueError) as error:
        raise errors.InvalidRequest.of_param(param, f"expected base64: {error}") from error
