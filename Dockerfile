# A model behind HTTP, on a CPU: an export, of `minbert export MODEL --to onnx-int8 --out model`, which needs no torch.
#
#   docker build -t minbert:0.1.0 .
#   docker run --rm -p 127.0.0.1:8000:8000 -v "$PWD/model:/model:ro" minbert:0.1.0
#
# For model folders as training leaves them: --build-arg EXTRAS=serve,train,export. torch is then most of the image. Its
# builds for CPUs are a tenth of the usual ones, which hold what GPUs need: --build-arg PIP_EXTRA_INDEX_URL=..., the
# address that torch's installation page names for CPUs.

FROM python:3.11-slim-bookworm AS build
ARG EXTRAS=serve
ARG PIP_EXTRA_INDEX_URL=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src src
# Versions are those of constraints.txt. Compiled once here: a container whose disk is read-only cannot.
RUN python -m venv /opt/minbert \
 && /opt/minbert/bin/pip install --no-cache-dir --compile --constraint constraints.txt ".[${EXTRAS}]" \
 && /opt/minbert/bin/pip uninstall --yes pip

FROM python:3.11-slim-bookworm
LABEL org.opencontainers.image.title="minbert" \
      org.opencontainers.image.description="One encoder that understands sentences for many tasks at once" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --system --gid 10001 minbert \
 && useradd --system --uid 10001 --gid 10001 --no-log-init --create-home --home-dir /var/lib/minbert minbert
COPY --from=build /opt/minbert /opt/minbert
ENV PATH=/opt/minbert/bin:$PATH \
    MINBERT_HOME=/var/lib/minbert \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /var/lib/minbert
USER 10001:10001
VOLUME ["/model"]
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s --retries=3 \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["minbert"]
CMD ["serve", "/model", "--host", "0.0.0.0", "--port", "8000"]
