"""A client of the service, with nothing but the standard library.

    client = testtime.Client("http://127.0.0.1:8000")
    camera = client.stream("camera-7")
    print(camera.predict("image.png").answers[0].name)

Requests are numbered: one that failed on its way is repeated, and the service learns from it once. If the service was
killed and has lost the last of the images that it had not saved, they are sent again.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import ssl
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from testtime.storage import FileError, check_file, error_text, printable

SUFFIXES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp"}
_AGAIN = (429, 502, 503, 504)
_UNUSABLE = (400, 413, 415)  # bodies that are unreadable, too large or of another type
_UNSAVED = 256  # requests held to be sent again
_ARRAY = "application/x-npy"


class ServiceError(Exception):
    """A request that the service refused, or could not be reached for.

    Args:
        message: What is wrong.
        status: The HTTP status; None if there was no answer.
        expected: The sequence number that the service expects next, if that was wrong.
        retry_after: Seconds after which to try again.
        again: Whether to try again.
    """

    def __init__(
        self,
        message: str,
        status: int | None = None,
        expected: int | None = None,
        retry_after: float = 0.0,
        again: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.expected, self.retry_after, self.again = status, expected, retry_after, again


class PictureError(ServiceError):
    """A request that the service refused for its images: unreadable, too large or of another type."""


@dataclass(frozen=True)
class Class:
    """A class and its probability.

    Attributes:
        number: The class.
        name: Its name.
        probability: Its probability.
        probabilities: Those of all classes.
    """

    number: int
    name: str
    probability: float
    probabilities: tuple[float, ...]


@dataclass(frozen=True)
class ImageAnswer(Class):
    """The answer for one image.

    Attributes:
        before: The class before adaptation.
        loss_before: The objective's loss before adaptation.
        loss_after: The objective's loss after adaptation.
        confidence: The objective's confidence before adaptation.
        adapted: Whether the network learned from the image.
        rolled_back: Whether the guard undid the update.
        alarmed: Whether it did so since the stream has collapsed or gone too far.
        sample: Number of the image in its stream.
        version: Version of the stream's network after the image.
    """

    before: Class
    loss_before: float
    loss_after: float
    confidence: float
    adapted: bool
    rolled_back: bool
    alarmed: bool = False
    sample: int = 0
    version: int = 0


@dataclass(frozen=True)
class Answers:
    """The answer to a request.

    Attributes:
        answers: One for each image.
        version: Version of the stream's network.
        sequence: Number of the request; None without a stream.
        saved_sequence: Number of the last request that the service cannot lose.
        repeated: Whether the service had answered the request before.
        shadow: Whether the classes are those of the original network.
        raw: The whole answer.
    """

    answers: tuple[ImageAnswer, ...]
    version: int = 0
    sequence: int | None = None
    saved_sequence: int = 0
    repeated: bool = False
    shadow: bool = False
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Client:
    """A service.

    Args:
        url: Its address, e.g. "http://127.0.0.1:8000".
        token: Its token, if it needs one.
        timeout: Seconds for a request.
        retries: How often a request is repeated that fails on its way or that the service cannot answer now.
    """

    url: str
    token: str | None = field(default=None, repr=False)
    timeout: float = 60.0
    retries: int = 5

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"`url` must be like http://127.0.0.1:8000, got {self.url!r}.")

    def stream(self, name: str) -> ClientStream:
        """Return a stream of the service, which is created by its first image."""
        return ClientStream(self, name)

    def predict(self, *images: Any) -> Answers:
        """Classify images, each adapted to by itself; see `ClientStream.predict`."""
        kind, body = encode_images(images)
        return parse_answers(self.call("POST", "/v1/predict", body, {"Content-Type": kind}))

    def list_streams(self) -> list[dict[str, Any]]:
        """Return what is known of the streams."""
        return self.call("GET", "/v1/streams")["streams"]

    def call(self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None) -> Any:
        """Send a request, again if it fails on its way or the service cannot answer now; returns the JSON.

        Raises:
            ServiceError: The service refused it or cannot be reached.
        """
        content = self.fetch(method, path, body, headers)
        try:
            return json.loads(content)
        except ValueError:
            raise ServiceError("The answer is not JSON: is this a testtime service?") from None

    def fetch(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> bytes:
        """Like `call`; returns the body of the answer."""
        fault: ServiceError | None = None
        for attempt in range(self.retries + 1):
            if fault is not None:
                time.sleep(min(self.timeout, max(fault.retry_after, 0.1 * 2**attempt)))
            try:
                return self._send(method, path, body, headers or {})
            except (OSError, http.client.HTTPException) as error:
                fault = ServiceError(f"The service cannot be reached: {error or type(error).__name__}.")
            except ServiceError as error:
                if not error.again:
                    raise
                fault = error
        assert fault is not None
        raise fault

    def _send(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> bytes:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        if parts.scheme == "https":
            context = ssl.create_default_context()
            made = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=self.timeout, context=context)
        else:
            made = http.client.HTTPConnection(parts.hostname, parts.port, timeout=self.timeout)
        own = {} if self.token is None else {"Authorization": f"Bearer {self.token}"}
        with contextlib.closing(made) as connection:
            connection.request(method, parts.path.rstrip("/") + path, body, {**headers, **own})
            response = connection.getresponse()
            content = response.read()
        if response.status < 400:
            return content
        try:
            about = json.loads(content)
            message = printable(str(about["error"]))
        except (ValueError, KeyError, TypeError):
            about, message = {}, f"The service answered with status {response.status}."
        wait = response.headers.get("Retry-After", "")
        # A 500 without the service's own words is from a proxy that has lost the service, or a replica of it.
        again = response.status in _AGAIN or (response.status == 500 and not about)
        seconds = float(wait) if wait.isdecimal() else 0.0
        kind = PictureError if body is not None and response.status in _UNUSABLE else ServiceError
        raise kind(message, response.status, about.get("expected"), seconds, again)


class ClientStream:
    """A stream of a service. One process should send to a stream, since its requests are numbered.

    Args:
        client: The service.
        name: The name of the stream.
    """

    def __init__(self, client: Client, name: str) -> None:
        self._client, self.name = client, name
        self._path = f"/v1/streams/{quote(name, safe='')}"
        self._next: int | None = None
        self._unsaved: OrderedDict[int, tuple[str, bytes]] = OrderedDict()

    def predict(self, *images: Any) -> Answers:
        """Classify images, after learning from each.

        Args:
            *images: Paths of PNG, JPEG or WebP files; bytes of such; or arrays and tensors `(C, H, W)`, uint8 or floats
                in [0, 1], of the network's size.

        Raises:
            FileError: A file cannot be read or is not a picture.
            ServiceError: The service refused the request or cannot be reached; a `PictureError` if it is because of
                the images.
        """
        if self._next is None:
            self._next = self._find_next()
        sequence, encoded = self._next, encode_images(images)
        answers = self._send(sequence, *encoded)
        self._next = sequence + 1
        self._unsaved[sequence] = encoded
        for number in list(self._unsaved):
            if number <= answers.saved_sequence or len(self._unsaved) > _UNSAVED:
                del self._unsaved[number]
        return answers

    def info(self) -> dict[str, Any]:
        """Return what is known of the stream."""
        return self._client.call("GET", self._path)

    def reset(self) -> dict[str, Any]:
        """Return to the original network."""
        return self._client.call("POST", f"{self._path}/reset")

    def roll_back(self, version: int | None = None) -> dict[str, Any]:
        """Return to a former version, by default the newest that is stored."""
        query = "" if version is None else f"?version={version}"
        return self._client.call("POST", f"{self._path}/rollback{query}")

    def freeze(self, frozen: bool = True) -> dict[str, Any]:
        """Answer without learning, or learn again."""
        return self._client.call("POST", f"{self._path}/{'freeze' if frozen else 'unfreeze'}")

    def export(self, path: str | Path) -> None:
        """Write the adapted network to a file, for `testtime.load`."""
        from testtime.storage import write_atomic

        write_atomic(path, self._client.fetch("GET", f"{self._path}/export"))

    def delete(self) -> None:
        """Delete the stream."""
        self._client.call("DELETE", self._path)
        self._next, self._unsaved = None, OrderedDict()

    def _find_next(self) -> int:
        try:
            return int(self.info()["sequence"]) + 1
        except ServiceError as error:
            if error.status != 404:
                raise
            return 1

    def _send(self, sequence: int, kind: str, body: bytes) -> Answers:
        path = f"{self._path}/predict?sequence={sequence}"
        try:
            return parse_answers(self._client.call("POST", path, body, {"Content-Type": kind}))
        except ServiceError as error:
            gap = range(error.expected or sequence, sequence)
            if error.status != 409 or not gap or any(number not in self._unsaved for number in gap):
                raise
        for number in gap:  # the service was killed before it had saved these
            self._client.call(
                "POST",
                f"{self._path}/predict?sequence={number}",
                self._unsaved[number][1],
                {"Content-Type": self._unsaved[number][0]},
            )
        return parse_answers(self._client.call("POST", path, body, {"Content-Type": kind}))


def encode_images(images: Sequence[Any]) -> tuple[str, bytes]:
    """Return content type and body of a request.

    Raises:
        ValueError: There are no images, or one is of an unknown kind.
        FileError: A file cannot be read or is not a picture.
    """
    if not images:
        raise ValueError("`images` must be at least one.")
    parts = [_encode(image) for image in images]
    if len(parts) == 1:
        return parts[0]
    boundary = uuid.uuid4().hex
    chunks = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{number}"\r\nContent-Type: {kind}\r\n\r\n'.encode()
        + content
        + b"\r\n"
        for number, (kind, content) in enumerate(parts)
    ]
    return f"multipart/form-data; boundary={boundary}", b"".join([*chunks, f"--{boundary}--\r\n".encode()])


def _encode(image: Any) -> tuple[str, bytes]:
    if isinstance(image, str | Path):
        check_file(image)
        try:
            content = Path(image).read_bytes()
        except OSError as error:
            raise FileError(image, f"cannot be read ({error_text(error)})") from None
    elif isinstance(image, bytes | bytearray):
        content = bytes(image)
    else:
        import numpy as np

        file = io.BytesIO()
        np.save(file, np.asarray(image.cpu() if hasattr(image, "cpu") else image), allow_pickle=False)
        return _ARRAY, file.getvalue()
    for magic, kind in ((b"\x89PNG", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"RIFF", "image/webp")):
        if content.startswith(magic):
            return kind, content
    if isinstance(image, str | Path):
        raise FileError(image, "not a PNG, JPEG or WebP picture")
    raise ValueError("`images` must be PNG, JPEG or WebP pictures, or arrays.")


def parse_answers(table: Any) -> Answers:
    """Return an answer of the service.

    Raises:
        ServiceError: It is not one.
    """
    try:
        images = tuple(
            ImageAnswer(
                *_parse_class(one),
                before=Class(*_parse_class(one["before"])),
                **{name: _number(one[name]) for name in ("loss_before", "loss_after", "confidence")},
                adapted=one["adapted"],
                rolled_back=one["rolled_back"],
                alarmed=one["alarmed"],
                sample=one.get("sample", 0),
                version=one.get("version", 0),
            )
            for one in table["answers"]
        )
        names = ("version", "sequence", "saved_sequence", "repeated", "shadow")
        about = {name: table[name] for name in names if name in table}
    except (KeyError, TypeError):
        raise ServiceError("The answer is not one of a testtime service.") from None
    return Answers(images, **about, raw=table)


def _parse_class(table: Mapping[str, Any]) -> tuple[int, str, float, tuple[float, ...]]:
    values = tuple(_number(value) for value in table["probabilities"])
    return table["class"], table["name"], _number(table["probability"]), values


def _number(value: float | None) -> float:
    return float("nan") if value is None else float(value)
