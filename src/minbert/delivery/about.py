"""The card of a model that is served, as data: what the page shows and adapts to."""

from __future__ import annotations

from dataclasses import asdict

from minbert.delivery.card import data_sources, dev_scores, encoder_name, known_limits
from minbert.delivery.messages import Allowed, IndexCard, ModelResponse, ScoreCard, SourceCard, TaskCard
from minbert.delivery.search import SearchIndex
from minbert.delivery.service import Service
from minbert.tasks import Task


def describe(service: Service, index: SearchIndex | None = None) -> ModelResponse:
    """From what the model's folder says of it, and what the server allows."""
    predictor, limits = service.predictor, service.limits
    manifest = predictor.manifest
    return ModelResponse(
        name=service.name,
        version=manifest.version,
        recipe=manifest.recipe,
        encoder=encoder_name(manifest.model.encoder),
        pooling=manifest.model.pooling,
        members=len(manifest.members) or 1,
        embeddings=not manifest.members,
        max_tokens=predictor.max_tokens,
        tasks=[_task(task) for task in predictor.tasks.values() if not task.is_masked],
        scores=[ScoreCard(**asdict(score)) for score in dev_scores(manifest)],
        data=[SourceCard(task=task, data=about, terms=terms) for task, about, terms in data_sources(manifest)],
        limits=known_limits(manifest),
        index=IndexCard(sentences=len(index), kind=index.manifest.kind) if index is not None else None,
        allowed=Allowed(texts=limits.texts, body_bytes=limits.body_bytes, words=service.most_words),
    )


def _task(task: Task) -> TaskCard:
    low, high = (0.0, task.scale or 1.0) if task.is_contrastive else (task.low, task.high)
    return TaskCard(
        name=task.name,
        kind=task.kind,
        reads="pair" if task.answers_pairs else "text",
        classes=list(task.classes),
        low=low,
        high=high,
    )
