"""What the server reads and writes, as types: the OpenAPI document is made of these."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

MAX_TEXTS = 256
"""Texts of a request, and pairs; the most that the server can be told to allow."""

Text = Annotated[str, StringConstraints(min_length=1)]
Texts = Annotated[list[Text], Field(max_length=MAX_TEXTS)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PredictRequest(Body):
    """Texts, pairs of texts, or both."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"texts": ["What a lovely day."]},
                {"pairs": [["How old is it?", "What is its age?"]], "tasks": ["quora", "sts"]},
            ]
        }
    )
    texts: Texts = Field(default=[], description="For the tasks that read one text.")
    pairs: list[tuple[Text, Text]] = Field(
        default=[], max_length=MAX_TEXTS, description="For the tasks that read two texts."
    )
    tasks: list[str] | None = Field(
        default=None, min_length=1, max_length=100, description="Which; by default all that read what is there."
    )

    @model_validator(mode="after")
    def _something(self) -> PredictRequest:
        if not self.texts and not self.pairs:
            raise ValueError("no texts and no pairs; expected some of either")
        return self


class Answer(BaseModel):
    """A class with its probabilities, or a score."""

    label: str | None = None
    probability: float | None = Field(default=None, description="Of the label.")
    probabilities: dict[str, float] | None = Field(default=None, description="Of every class.")
    score: float | None = None


class Cut(BaseModel):
    """What was longer than the encoder reads, and was answered by its beginning."""

    texts: list[int] = Field(description="Their numbers in the request, from 0.")
    pairs: list[int]
    max_tokens: int = Field(description="How many tokens are read of a text, or of a pair together.")


class Cost(BaseModel):
    model: str
    encodings: int = Field(description="Distinct texts and pairs that the encoder had to read.")
    tokens: int = Field(description="Of these.")
    truncated: Cut | None = Field(default=None, description="Only if something was.")


class PredictResponse(Cost):
    texts: list[dict[str, Answer]] = Field(description="For each text its answers, by task.")
    pairs: list[dict[str, Answer]]


class EmbedRequest(Body):
    model_config = ConfigDict(json_schema_extra={"examples": [{"texts": ["A cat sat.", "A dog ran."]}]})
    texts: Texts = Field(min_length=1)
    normalize: bool = Field(default=False, description="Give each vector the length 1.")


class EmbedResponse(Cost):
    width: int
    embeddings: list[list[float]] = Field(description="A vector for each text.")


class SimilarityRequest(Body):
    model_config = ConfigDict(
        json_schema_extra={"examples": [{"texts": ["A cat sat."], "others": ["A dog ran.", "It is late."]}]}
    )
    texts: Texts = Field(min_length=1)
    others: Texts | None = Field(
        default=None, min_length=1, description="What they are compared with; by default each other."
    )


class SimilarityResponse(Cost):
    matrix: list[list[float]] = Field(description="Cosines of the embeddings: a row for each text, -1 to 1.")


class EmbeddingsRequest(BaseModel):
    """As the OpenAI API has it. Other fields are ignored."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"input": ["A cat sat."], "model": "minbert"}]})
    input: Text | Annotated[list[Text], Field(min_length=1, max_length=MAX_TEXTS)]
    model: str = Field(default="", description="Read by nobody: there is one model here.")
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, description="If given, the width that the vectors have.")
    user: str | None = None


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str = Field(description="Of length 1; as base64, little-endian float32.")


class Usage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage


class Health(BaseModel):
    status: Literal["ok", "draining", "failed"]


class Problem(BaseModel):
    message: str
    type: str = Field(description="invalid_request, unauthorized, not_found, too_large, overloaded, timeout, internal")
    request_id: str


class ErrorResponse(BaseModel):
    error: Problem


ERRORS: dict[int | str, dict[str, Any]] = {
    code: {"model": ErrorResponse, "description": about}
    for code, about in {
        400: "The body is no JSON.",
        401: "No API key, or a wrong one.",
        413: "The body is too large.",
        422: "The request asks for something that is not there, or is not as described.",
        500: "A mistake of the server.",
        503: "Too much waits, or the server is shutting down; Retry-After says when to come again.",
        504: "It took too long.",
    }.items()
}
