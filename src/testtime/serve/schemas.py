"""What the OpenAPI description says about bodies and answers, and the page that shows it."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, Field


class Classified(BaseModel):
    """A class and its probability."""

    number: int = Field(alias="class")
    name: str
    probability: float | None
    probabilities: list[float | None]


class ImageAnswer(Classified):
    """The answer for one image."""

    before: Classified = Field(description="The same network before it learned from the image.")
    loss_before: float | None
    loss_after: float | None
    confidence: float | None
    adapted: bool
    rolled_back: bool = Field(description="Whether the guard undid the update.")
    alarmed: bool = Field(description="Whether it did so since the stream has collapsed or gone too far.")


class StreamImageAnswer(ImageAnswer):
    """The answer for one image of a stream."""

    sample: int = Field(description="Number of the image within the stream, which seeds its augmentations.")
    version: int = Field(description="Version of the stream's network after the image.")


class EpisodicAnswers(BaseModel):
    """The answers of a request without a stream."""

    answers: list[ImageAnswer]


class StreamAnswers(BaseModel):
    """The answers of a request."""

    stream: str
    answers: list[StreamImageAnswer]
    version: int
    sample: int
    seen: int
    shadow: bool = Field(description="Whether the classes are those of the original network.")
    sequence: int | None
    saved_sequence: int = Field(description="Number of the last request that a crash of the service cannot lose.")
    repeated: bool = Field(description="Whether the request was answered before; it was not learned from again.")


class Error(BaseModel):
    """Why a request was refused."""

    error: str
    expected: int | None = Field(None, description="The sequence number expected next.")


_MEANINGS = {
    400: "The image cannot be read.",
    401: "The token is missing or wrong.",
    403: "The request comes from a page of another site.",
    404: "There is no such stream or version.",
    408: "The body came too slowly.",
    409: "The stream is busy, or the request is out of order.",
    413: "The body is too large.",
    415: "The content type is not supported.",
    422: "A parameter or the shape of an array is invalid.",
    429: "Too many requests or streams; Retry-After says when to try again.",
    503: "The service is starting or stopping, or cannot store new streams.",
}
ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    status: {"model": Error, "description": meaning} for status, meaning in _MEANINGS.items()
}
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            **dict.fromkeys(("image/png", "image/jpeg", "image/webp", "application/x-npy"), _BINARY),
            "multipart/form-data": {
                "schema": {"type": "object", "additionalProperties": {"type": "string", "format": "binary"}}
            },
        },
    }
}
_HEADERS = {
    "X-Testtime-Version": {"description": "Version of the stream's network.", "schema": {"type": "integer"}},
    "X-Testtime-Sample": {"description": "Sample number of the last image.", "schema": {"type": "integer"}},
}
PREDICT: Final[dict[str, Any]] = {
    "openapi_extra": _BODY,
    "responses": {200: {"model": StreamAnswers, "headers": _HEADERS}},
}
PREDICT_EPISODIC: Final[dict[str, Any]] = {
    "openapi_extra": _BODY,
    "responses": {200: {"model": EpisodicAnswers, "headers": _HEADERS}},
}
EXPORT: Final[dict[str, Any]] = {"responses": {200: {"content": {"application/octet-stream": _BINARY}}}}


def format_page(description: Mapping[str, Any]) -> str:
    """Return an OpenAPI description as a page that needs nothing from elsewhere."""
    rows = []
    for path, methods in description["paths"].items():
        for method, about in methods.items():
            summary = about.get("description") or about.get("summary", "")
            parameters = ", ".join(one["name"] for one in about.get("parameters", []) if one["in"] == "query")
            bodies = ", ".join(about.get("requestBody", {}).get("content", {}))
            statuses = ", ".join(about["responses"])
            cells = (f"{method.upper()} {path}", summary, parameters, bodies, statuses)
            rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    heads = "".join(f"<th>{head}</th>" for head in ("Request", "", "Query", "Body", "Status"))
    style = "body{font:16px/1.5 system-ui;margin:2em}td,th{padding:.3em 1em .3em 0;text-align:left;vertical-align:top}"
    title = html.escape(f"{description['info']['title']} {description['info']['version']}")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{title}</title><style>{style}</style><h1>{title}</h1>"
        f"<p>{html.escape(description['info']['description'])} "
        f"<a href=/openapi.json>OpenAPI description</a></p><table><tr>{heads}</tr>{''.join(rows)}</table></html>"
    )
