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


class ImportanceRequest(Body):
    """A text, or two, whose words are left out in turn."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"text": "What a lovely day."},
                {"text": "How old is it?", "second": "What is its age?", "tasks": ["quora"]},
            ]
        }
    )
    text: Text
    second: Text | None = Field(default=None, description="Of a pair, the second text.")
    tasks: list[str] | None = Field(
        default=None, min_length=1, max_length=100, description="Which; by default all that read what is there."
    )
    label: str | None = Field(default=None, description="A class to ask about instead of the answered one.")


class Word(BaseModel):
    text: str
    start: int = Field(description="Where it begins in its text, in characters (code points).")
    end: int
    side: int = Field(description="Of a pair, which text it is in: 0 or 1.")
    effect: float = Field(description="The probability, or the score, less what it is without the word.")


class TaskImportance(BaseModel):
    answer: str = Field(description="The class that was asked about; empty for a score.")
    value: float = Field(description="Its probability, or the score.")
    words: list[Word]
    skipped: int = Field(description="Words beyond the limit, about which nothing is known.")


class ImportanceResponse(Cost):
    tasks: dict[str, TaskImportance]


class SearchRequest(Body):
    model_config = ConfigDict(json_schema_extra={"examples": [{"texts": ["How old is it?"], "count": 3}]})
    texts: Texts = Field(min_length=1)
    count: int = Field(default=10, ge=1, le=100, description="At most so many for each text.")


class Match(BaseModel):
    score: float = Field(description="The cosine of the embeddings, -1 to 1.")
    row: int = Field(description="Which sentence of the index's file it is, from 1.")
    text: str


class SearchResponse(Cost):
    matches: list[list[Match]] = Field(description="For each text the nearest sentences of the index, best first.")


class TaskCard(BaseModel):
    name: str
    kind: str
    reads: Literal["text", "pair"]
    classes: list[str] = Field(description="Empty for a score.")
    low: float = Field(description="Of a score.")
    high: float


class ScoreCard(BaseModel):
    task: str
    metric: str
    value: float | None
    low: float | None = Field(description="Of the 95% interval.")
    high: float | None
    rows: int = Field(description="Of dev that were scored.")


class SourceCard(BaseModel):
    task: str
    data: str
    terms: str


class IndexCard(BaseModel):
    sentences: int
    kind: Literal["exact", "hnsw"]


class Allowed(BaseModel):
    texts: int = Field(description="Texts and pairs of a request.")
    body_bytes: int
    words: int = Field(description="Words of a question whose importance is measured.")


class ModelResponse(BaseModel):
    """The model's card."""

    name: str
    version: str = Field(description="Of the minbert that trained it.")
    recipe: str
    encoder: str
    pooling: str
    members: int = Field(description="Models that answer together; 1 but of an ensemble.")
    embeddings: bool = Field(description="Whether there are vectors; an ensemble has none.")
    max_tokens: int = Field(description="Read of a text, or of a pair together.")
    tasks: list[TaskCard]
    scores: list[ScoreCard]
    data: list[SourceCard]
    limits: list[str] = Field(description="What the model should not be trusted with.")
    index: IndexCard | None = Field(description="What /v1/search searches.")
    allowed: Allowed


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
NO_INDEX = ERRORS | {404: {"model": ErrorResponse, "description": "The server was started without an index."}}
